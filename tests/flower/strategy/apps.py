"""Plain ClientApps in NumPy, which know nothing of fedclade, and grids of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedclade.flower import LocalGrid, LocalNode, part_of
from fedclade.flower.strategy import app_nodes

FIRST_NODE = 100
FEATURES = 4
EXAMPLES = 60

Change = Callable[[int, RecordDict], None]
"""A change of the reply of a client, given its number."""


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs start at once, as the nodes of a local grid are all there."""
    monkeypatch.setattr(app_nodes, "SETTLE", 0.0)


def data_of(client: int, split: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a client's examples; clients with an odd number have the opposite labels."""
    draw = np.random.default_rng([client, split])
    inputs = draw.normal(size=(EXAMPLES, FEATURES))
    side = 1 if client % 2 == 0 else -1
    weights = np.array([1.0, -2.0, 0.5, 1.5]) * side
    return inputs, (inputs @ weights > 0).astype(float)


def initial_arrays(**more: Any) -> ArrayRecord:
    weights = np.random.default_rng(0).normal(size=FEATURES) * 0.01
    arrays = {"w": weights, "b": np.zeros(1), **more}
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def probabilities(arrays: ArrayRecord, inputs: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-(inputs @ arrays["w"].numpy() + arrays["b"].numpy())))


def app_of(
    *,
    selects_parts: bool = False,
    mods: Sequence[Any] = (),
    change: Change | None = None,
    seen: list[Message] | None = None,
) -> ClientApp:
    """Return an app that trains a logistic regression on its own data.

    ``change`` changes the content of its replies, and ``seen`` collects what it receives.
    """
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(msg: Message, context: Context) -> Message:
        if seen is not None:
            seen.append(msg)
        client = int(context.node_config["partition-id"])
        inputs, labels = data_of(client)
        if selects_parts:
            inputs, labels = part_of((inputs, labels), msg.content["config"])
        received = msg.content.array_records["arrays"]
        values = {name: array.numpy() for name, array in received.items()}
        for _ in range(5):
            error = 1 / (1 + np.exp(-(inputs @ values["w"] + values["b"]))) - labels
            values["w"] = values["w"] - 0.5 * inputs.T @ error / len(inputs)
            values["b"] = values["b"] - 0.5 * error.mean()
        arrays = ArrayRecord({name: Array(np.asarray(each)) for name, each in values.items()})
        metrics = {"train_loss": float((error**2).mean()), "num-examples": len(inputs)}
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        if change is not None:
            change(client, content)
        return Message(content, reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        if seen is not None:
            seen.append(msg)
        client = int(context.node_config["partition-id"])
        inputs, labels = data_of(client, 1)
        chances = probabilities(msg.content.array_records["arrays"], inputs).clip(1e-9, 1 - 1e-9)
        losses = -np.log(np.where(labels == 1, chances, 1 - chances))
        metrics = MetricRecord(
            {
                "eval_loss": float(losses.mean()),
                "eval_acc": float(((chances > 0.5) == labels).mean()),
                "num-examples": len(inputs),
            }
        )
        content = RecordDict({"metrics": metrics})
        if change is not None:
            change(client, content)
        return Message(content, reply_to=msg)

    return app


def grid_of(app: ClientApp, clients: int = 6) -> LocalGrid:
    return LocalGrid({FIRST_NODE + c: LocalNode(app, {"partition-id": c}) for c in range(clients)})


def truth_of(clients: int = 6) -> dict[int, int]:
    """Return the true cluster of each node."""
    return {FIRST_NODE + client: client % 2 for client in range(clients)}
