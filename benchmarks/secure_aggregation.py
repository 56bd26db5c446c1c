"""Measure CPU time and bytes of a round with secure aggregation, and of the same round without it.

The method is FedAvg. Clients train an MLP (101,770 parameters) on a few random examples, so that
training takes little of their time. Server and clients run in one process and on one thread, over a
``LocalGrid``. CPU seconds in the clients' apps are measured separately from those of the server,
which include Flower's work on messages on both sides. Bytes are those of whole messages as Flower
serialises them, with keys and shares. Evaluation is not measured. In the rows "one drops out", the
last client takes part until it should send its masked update, so the other clients have to unmask
the sum.

    python benchmarks/secure_aggregation.py
    python benchmarks/secure_aggregation.py --clients 6 --rounds 3
"""

from __future__ import annotations

import fedclade  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.common.serde import message_to_proto
from torch.utils.data import TensorDataset

from fedclade import FedAvg, LocalTraining, one_client
from fedclade.flower import LocalGrid, LocalNode, Network, client_app, federate
from fedclade.flower.wire import Content

CLIENTS, ROUNDS = (6, 10, 20), 4
EXAMPLES = 20
COLUMNS = (
    "clients",
    "",
    "server, s",
    "a client, s",
    "down to a client, MB",
    "up from a client, MB",
)


def data(context: Context) -> fedclade.Federation:
    number = int(context.node_config["partition-id"])
    draw = torch.Generator().manual_seed(number)
    x, y = torch.randn(2 * EXAMPLES, 1, 28, 28, generator=draw), torch.arange(2 * EXAMPLES) % 10
    train, test = (
        TensorDataset(x[:EXAMPLES], y[:EXAMPLES]),
        TensorDataset(x[EXAMPLES:], y[EXAMPLES:]),
    )
    return one_client(train, test, labels=10, name=f"c{number}", key=number)


@dataclass
class Timed:
    """App that records its CPU time; with ``drops`` it does not send its masked update."""

    app: Callable[[Message, Context], Message]
    drops: bool = False
    seconds: float = 0.0

    def __call__(self, message: Message, context: Context) -> Message:
        """Reply to a message."""
        start = process_time()
        try:
            answer = self.app(message, context)
            if self.drops and Content.of(message.content).values["what"] == "masked":
                raise TimeoutError("dropped out")
            return answer
        finally:
            self.seconds += process_time() - start


class CountedGrid(LocalGrid):
    """Grid that counts the bytes of messages, and records the CPU time of counting."""

    down = up = 0
    counting = 0.0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        some = list(messages)
        self.down += self._size(some)
        return super().push_messages(some)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages."""
        some = list(super().pull_messages(message_ids))
        self.up += self._size(some)
        return some

    def _size(self, messages: Iterable[Message]) -> int:
        start = process_time()
        size = sum(message_to_proto(message).ByteSize() for message in messages)
        self.counting += process_time() - start
        return size


def measure(clients: int, rounds: int, secure: bool, drop: bool) -> dict[str, Any]:
    """Return medians over all rounds except the first, and the last, which also evaluates."""
    app = client_app("mlp", data, device="cpu")
    apps = [Timed(app, drops=drop and k == clients - 1) for k in range(clients)]
    grid = CountedGrid({1 + k: LocalNode(each, {"partition-id": k}) for k, each in enumerate(apps)})
    seen: list[tuple[float, ...]] = []

    def note(*_: Any) -> None:
        inside = sum(each.seconds for each in apps)
        seen.append((process_time() - inside - grid.counting, inside, grid.down, grid.up))

    federate(
        grid,
        FedAvg(),
        "mlp",
        rounds=rounds + 2,
        local=LocalTraining(epochs=1, batch_size=EXAMPLES),
        network=Network(clients=clients, secure_aggregation=secure, secure_norm=10.0),
        evaluate_every=rounds + 2,
        on_round=note,
    )
    each = [
        [now - was for now, was in zip(*pair, strict=True)]
        for pair in zip(seen[1:-1], seen, strict=False)
    ]
    server, inside, down, up = (median(column) for column in zip(*each, strict=True))
    return {
        **{"clients": clients, "secure": secure, "drop": drop, "server": server},
        **{"client": inside / clients, "down": down / clients, "up": up / clients},
    }


def row(found: dict[str, Any]) -> str:
    """Return a row of the Markdown table."""
    name = "secure, one drops out" if found["drop"] else "secure" if found["secure"] else "plain"
    numbers = [f"{found[key]:.3f}" for key in ("server", "client")]
    return (
        f"| {found['clients']} | {name} | {' | '.join(numbers)} | "
        + " | ".join(f"{found[key] / 1e6:.3f}" for key in ("down", "up"))
        + " |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--clients",
        nargs="+",
        type=int,
        default=list(CLIENTS),
        help="numbers of clients (default: 6 10 20)",
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"measured rounds (default: {ROUNDS})"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "flwr", "cryptography"))
    print(f"Python {platform.python_version()}, {versions}; for each round\n")
    print(f"| {' | '.join(COLUMNS)} |\n|--:|:--|{'--:|' * (len(COLUMNS) - 2)}")
    results: list[dict[str, Any]] = []
    for clients in arguments.clients:
        for secure, drop in ((False, False), (True, False), (True, True)):
            results.append(measure(clients, arguments.rounds, secure, drop))
            print(row(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
