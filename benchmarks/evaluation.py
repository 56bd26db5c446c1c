"""Measure the time of an evaluation of all clients in one call, and of one client after another.

``loop`` evaluates one client after another: it loads the client's model, fetches its examples from
the pool, and runs the model on up to 1024 examples at a time. ``evaluate`` is
:meth:`SimulatedClients.evaluate`, which stores examples that it has fetched. Images are random and
have the shape of MNIST images. Both are timed alternately in one process, and the table has
medians.

    python benchmarks/evaluation.py
    python benchmarks/evaluation.py --model mlp --clients 10000 --cases "one model"
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from fedclade import Federation, Pool
from fedclade.core import memory_bytes
from fedclade.core.queries import Split
from fedclade.data.federation import ClientData
from fedclade.models import build_model
from fedclade.training import SimulatedClients

IMAGES, TEST_IMAGES, LABELS = 60_000, 10_000, 10
LARGEST_PASS = 1024
WIDTH = 110


@dataclass(frozen=True)
class Case:
    """Clients and models of an evaluation.

    Parameters
    ----------
    clients
        Number of clients.
    models
        Number of models, which are assigned to clients in turn.
    examples
        Number of examples of each client, which are in its training split. None: all clients share
        a test set.
    views
        Number of different label maps of the clients.
    everyone
        Whether each client evaluates all models.
    """

    clients: int
    models: int
    examples: int | None = None
    views: int = 1
    everyone: bool = False


def cases(clients: int) -> dict[str, Case]:
    return {
        "4 models, shared test set, 4 views": Case(20, 4, views=4),
        "own models, shared test set": Case(20, 20),
        "one model, own sets": Case(clients, 1, examples=60),
        "own models, own sets": Case(clients, clients, examples=60),
        "everyone about 4 models, own sets": Case(100, 4, examples=300, everyone=True),
    }


def federation_of(case: Case) -> Federation:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (IMAGES, 1, 28, 28), generator=draw, dtype=torch.uint8)
    y = torch.randint(LABELS, (IMAGES,), generator=draw)
    maps = [None, *(torch.randperm(LABELS, generator=draw) for _ in range(case.views - 1))]
    everything, order = np.arange(IMAGES), np.random.default_rng(0).permutation(IMAGES)
    test, none = order[:TEST_IMAGES], everything[:0]
    each = case.examples or 1
    held = [order[np.arange(k * each, (k + 1) * each) % IMAGES] for k in range(case.clients)]
    clients = tuple(
        ClientData(k, f"c{k}", k, held[k], none, test, maps[k % len(maps)])
        for k in range(case.clients)
    )
    return Federation(
        Pool("random", x, y, y.numpy(), everything, none, LABELS, mean=0.13, std=0.31), clients
    )


@torch.inference_mode()
def one_after_another(
    federation: Federation,
    clients: SimulatedClients,
    module: nn.Module,
    ids: Sequence[int],
    models: Tensor,
    rows: Sequence[int],
    split: Split,
) -> tuple[list[float], list[float]]:
    """Evaluate one client after another; return accuracies and mean cross-entropies."""
    accuracies: list[float] = []
    losses: list[float] = []
    module.eval()
    for client, row in zip(ids, rows, strict=True):
        clients.layout.load(models[row], module)
        inputs, targets = (part.to(models.device) for part in federation.examples(client, split))
        logits = torch.cat([module(x) for x in inputs.split(LARGEST_PASS)])
        accuracies.append(float((logits.argmax(-1) == targets).double().mean()))
        losses.append(float(functional.cross_entropy(logits, targets)))
    return accuracies, losses


def measured(
    case: Case, model: str, device: str, memory: int | None, repeats: int
) -> tuple[float, float]:
    """Return the seconds of ``loop`` and ``evaluate``, and check that their results are equal."""
    federation = federation_of(case)
    module = build_model(model, input_shape=(1, 28, 28), outputs=LABELS).to(device)
    clients = SimulatedClients(federation, module, device, memory=memory)
    first = clients.layout.flatten(module)
    models = first + 0.01 * torch.randn(
        case.models, len(first), generator=torch.Generator().manual_seed(0)
    ).to(device)
    times = case.models if case.everyone else 1
    ids = [client for client in clients.ids for _ in range(times)]
    rows = [k % case.models for k in range(len(ids))]
    split: Split = "train" if case.examples else "test"

    def timed(run: Callable[[], object]) -> float:
        synchronize(device)
        start = perf_counter()
        run()
        synchronize(device)
        return perf_counter() - start

    contestants: list[Callable[[], object]] = [
        lambda: one_after_another(federation, clients, module, ids, models, rows, split),
        lambda: clients.evaluate(ids, models, rows, split),
    ]
    accuracies, losses = one_after_another(federation, clients, module, ids, models, rows, split)
    evaluation = clients.evaluate(ids, models, rows, split)  # also the warm-up
    # If the two largest logits of an image are equal up to rounding, predictions may differ.
    np.testing.assert_allclose(
        evaluation.scores[:, 0], accuracies, atol=2 / (case.examples or TEST_IMAGES)
    )
    np.testing.assert_allclose(evaluation.losses, losses, rtol=1e-4)
    seconds = [[timed(run) for run in contestants] for _ in range(repeats)]
    loop, together = (median(column) for column in zip(*seconds, strict=True))
    return loop, together


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mclr", help="the model (default: mclr)")
    parser.add_argument(
        "--clients",
        type=int,
        default=1_000,
        help='clients in "one model, own sets" and "own models, own sets" (default: 1000)',
    )
    parser.add_argument("--cases", default="", help="run only cases whose names contain this text")
    parser.add_argument(
        "--memory",
        type=memory_bytes,
        help="memory for stored examples, such as 4GB; 1B: no examples are stored",
    )
    parser.add_argument("--repeats", type=int, default=3, help="number of repeats (default: 3)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads of torch"
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="device (default: cpu)"
    )
    parser.add_argument("--json", type=Path, help="write the medians, in seconds, to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, dict[str, float]] = {}
    table = Table(
        title=f"evaluation of {arguments.model}, {arguments.device}, {arguments.threads} threads"
    )
    for column in ("case", "clients", "loop, ms", "evaluate, ms", "loop/evaluate"):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for name, case in cases(arguments.clients).items():
        if arguments.cases in name:
            loop, together = measured(
                case, arguments.model, arguments.device, arguments.memory, arguments.repeats
            )
            found[name] = {"loop": loop, "evaluate": together}
            table.add_row(
                *(name, f"{case.clients:,}", f"{1e3 * loop:,.1f}", f"{1e3 * together:,.1f}"),
                f"{loop / together:.1f}",
            )
    Console(width=WIDTH).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
