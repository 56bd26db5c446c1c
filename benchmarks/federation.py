"""Measure CPU time and peak memory of a server in a round of many clients, over Flower's messages.

The clients are scripted: without training, they reply with an update that is the direction of their
true cluster plus noise, in the encoding of the case. Everything else is real: CFL in
``fedclade.flower.federate``, which splits twice, and a ``LocalGrid``, where every message is
serialised as in a network. Each round trains and evaluates all clients.

Times are CPU seconds on one thread. The time in the clients' apps is measured separately and
subtracted. Flower's work on a message is counted on both sides, because both are in this process.
Each case runs in a separate process. Its memory is in addition to the memory after a short run of
the same kind, which loads the libraries.

    python benchmarks/federation.py
    python benchmarks/federation.py --clients 20 --rounds 3
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import multiprocessing
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor

from fedclade import CFL, Run, Signature
from fedclade.channel.encoding import ENCODINGS, encode
from fedclade.core.params import Layout
from fedclade.core.registry import DataSpec
from fedclade.flower import LocalGrid, LocalNode, Network, federate, wire
from fedclade.flower.signing import key_of, signed
from fedclade.flower.wire import Content
from fedclade.models import build_model
from fedclade.tasks import FittedTask

CLIENTS, CLUSTERS, ROUNDS = 200, 4, 5
HIDDEN = 503
"""Number of hidden units of the MLP 784-503-10, which has 399,895 parameters."""

SKETCH = 1024
SPLITS = (2, 3)
"""Rounds in which every cluster splits: one cluster into two, then two into four."""

SCHEMA = DataSpec("scripted", (1, 28, 28), 10)
KEPT, STREAMED = "all updates kept", "streamed, sketches of 1024"
COLUMNS = (
    *("", "encoding", "up, MB a round", "server, s a round", "of it messages", "of it the rest"),
    *("clients, s a round", "memory at its peak, MB", "ARI"),
)


def model(seed: int = 0) -> torch.nn.Module:
    return build_model(
        "mlp", input_shape=SCHEMA.input_shape, outputs=SCHEMA.outputs, arguments={"hidden": HIDDEN}
    )


@dataclass
class ScriptedClients:
    """App of all scripted clients, which measures its CPU time.

    Parameters
    ----------
    count
        Number of clients.
    encoding
        Encoding of their updates.
    seconds
        CPU seconds of all replies so far.
    layout
        Layout of the model's parameters.
    """

    count: int
    encoding: str
    seconds: float = 0.0
    layout: Layout = field(default_factory=lambda: Layout.of(model()))

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        size = self.layout.size
        pairs, own = torch.randn(2, CLUSTERS, size, generator=draw) / size**0.5
        # Two pairs of clusters have a direction in common; the first split separates the pairs.
        self._directions = pairs.repeat_interleave(2, 0)[:CLUSTERS] + own
        self._noise = torch.randn(size + 8 * self.count, generator=draw) / size**0.5
        self._structure = wire.layout_digest(self.layout)

    def __call__(self, message: Message, context: Context) -> Message:
        """Reply to a message."""
        start = process_time()
        content, client = Content.of(message.content), int(context.node_config["partition-id"])
        answer = {"hello": self._hello, "train": self._train, "evaluate": self._evaluate}
        record = signed(answer[content.get("what", str)](content, client), message, key_of(context))
        self.seconds += process_time() - start
        return Message(record, reply_to=message)

    def _update(self, client: int) -> Tensor:
        """Return the update of a client; the noise differs between clients."""
        noise = self._noise[8 * client : 8 * client + self.layout.size]
        return torch.add(self._directions[client % CLUSTERS], noise, alpha=0.5)

    def _hello(self, content: Content, client: int) -> RecordDict:
        named = {
            "number": client,
            "name": f"c{client}",
            "size": 100,
            "description": "scripted",
            "secret": "",
        }
        truth = {
            "true_cluster": client % CLUSTERS,
            "layout": self._structure,
            "task": FittedTask().described,
        }
        data = {
            "scaled": False,
            "encoding": "",
            "schema": json.dumps(asdict(SCHEMA)),
            "scores": True,
        }
        return wire.record({**named, **truth, **data})

    def _train(self, content: Content, client: int) -> RecordDict:
        words = content.values
        update = encode(self._update(client), self.encoding, self.layout.n_parameters)
        return wire.record(
            {
                **{name: words[name] for name in ("what", "round", "query", "purpose")},
                **{"model": wire.digest(content.vector("model")), "size": 100, "loss": 1.0},
                "encoding": self.encoding,
            },
            {"update": wire.raw(update, self.encoding, self.layout.size)},
        )

    def _evaluate(self, content: Content, client: int) -> RecordDict:
        count = len(content.vectors)
        return wire.record(
            {"scores": [0.5] * count, "losses": [1.0] * count, "examples": [100] * count}
        )


class TimedGrid(LocalGrid):
    """Grid that measures the CPU time of pushing and pulling messages, with the clients' time."""

    seconds = 0.0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        start = process_time()
        ids = super().push_messages(messages)
        self.seconds += process_time() - start
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages; the clients compute them in this call."""
        start = process_time()
        answers = super().pull_messages(message_ids)
        self.seconds += process_time() - start
        return answers


def status(name: str) -> int:
    """Return a field of ``/proc/self/status`` in bytes."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    )
    return 1024 * int(line.split()[1])


def play(
    scripted: ScriptedClients, grid: TimedGrid, stream: bool, rounds: int, splits: Sequence[int]
) -> tuple[Run, list[tuple[float, float, float]]]:
    """Run CFL; return the run, and the CPU seconds after each round.

    The seconds of a round are those of the process, of the grid, and of the clients, since the
    start.
    """
    seen: list[tuple[float, float, float]] = []
    run = federate(
        grid,
        CFL(eps2=0.1, split_rounds=tuple(splits), min_cluster_size=2),
        model,
        network=Network(clients=len(grid.nodes)),
        rounds=rounds,
        signature=Signature(kind="projected", dim=SKETCH) if stream else Signature(),
        stream=stream,
        on_round=lambda *_: seen.append((process_time(), grid.seconds, scripted.seconds)),
    )
    return run, seen


def measure(
    stream: bool, encoding: str, clients: int, rounds: int, splits: Sequence[int]
) -> dict[str, Any]:
    """Run one case; return medians over all rounds except the first, and the peak memory."""
    torch.set_num_threads(1)
    scripted = ScriptedClients(max(clients, 2 * CLUSTERS), encoding)

    def grid(clients: int) -> TimedGrid:
        return TimedGrid({1 + k: LocalNode(scripted, {"partition-id": k}) for k in range(clients)})

    play(scripted, grid(2 * CLUSTERS), stream, 3, splits)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    run, seen = play(scripted, grid(clients), stream, rounds, splits)
    each = [
        [now - was for now, was in zip(*pair, strict=True)]
        for pair in zip(seen[1:], seen, strict=False)
    ]
    total, in_grid, own = (median(column) for column in zip(*each, strict=True))
    return {
        **{
            "stream": stream,
            "encoding": encoding,
            "clients": clients,
            "parameters": scripted.layout.n_parameters,
        },
        **{"server": total - own, "messages": in_grid - own, "rest": total - in_grid, "own": own},
        **{"peak": status("VmHWM") - before, "update_bytes": clients * 4 * scripted.layout.size},
        **{"up": run.summary["bytes_up"] / rounds, "ari": run.metric_rows[-1]["ari"]},
    }


def in_a_process(*arguments: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def row(found: dict[str, Any]) -> str:
    """Return a row of the Markdown table."""
    cells = [
        *(STREAMED if found["stream"] else KEPT, found["encoding"], f"{found['up'] / 1e6:.0f}"),
        *(f"{found[name]:.2f}" for name in ("server", "messages", "rest", "own")),
        *(f"{found['peak'] / 1e6:.0f}", f"{found['ari']:.2f}"),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--clients", type=int, default=CLIENTS, help=f"number of clients (default: {CLIENTS})"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"number of rounds (default: {ROUNDS})"
    )
    parser.add_argument(
        "--splits",
        nargs="*",
        type=int,
        default=SPLITS,
        help="rounds in which clusters split; without numbers, none (default: 2 3)",
    )
    parser.add_argument(
        "--encodings",
        nargs="+",
        choices=ENCODINGS,
        default=list(ENCODINGS),
        help="encodings of updates to measure (default: all)",
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "flwr"))
    print(f"Python {platform.python_version()}, {versions}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|:--|:--|{'--:|' * (len(COLUMNS) - 2)}")
    results: list[dict[str, Any]] = []
    for stream in (False, True):
        for encoding in arguments.encodings:
            results.append(
                in_a_process(
                    stream, encoding, arguments.clients, arguments.rounds, arguments.splits
                )
            )
            print(row(results[-1]), flush=True)
    found = results[0]
    print(
        f"\nAll updates in float32: {found['clients']} × {found['parameters']:,}, {found['update_bytes'] / 1e6:.0f} MB"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
