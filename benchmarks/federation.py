"""What a server spends on a round of many clients over Flower's grid: seconds, and memory at its peak.

The clients are scripted: they answer at once with an update made of their true cluster's direction and noise, encoded
as the case says. Everything else is the real thing: CFL in ``fedclade.flower.federate``, which splits twice, over a
``LocalGrid``, where every message goes through Flower's own serialisation. A round trains and evaluates all clients.
Seconds are of CPU time, on one thread, since nothing waits here; what clients take inside their app is measured and
left out, and Flower's work on a message is counted on both sides of it, as both are this process. Every case has a
process of its own, whose memory is counted from after a short run of the same kind, in which libraries were loaded.

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
"""Of the MLP 784-503-10, which has 399,895 parameters."""

SKETCH = 1024
SPLITS = (2, 3)
"""Rounds in which every cluster splits: one into two, then two into four."""

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
    """Clients that answer from a script, all of them behind one app; they note how long that takes.

    Parameters
    ----------
    count
        How many there are.
    encoding
        Of their updates.
    seconds
        What they took so far.
    """

    count: int
    encoding: str
    seconds: float = 0.0
    layout: Layout = field(default_factory=lambda: Layout.of(model()))

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        size = self.layout.size
        pairs, own = torch.randn(2, CLUSTERS, size, generator=draw) / size**0.5
        # two pairs, that split first
        self._directions = pairs.repeat_interleave(2, 0)[:CLUSTERS] + own
        self._noise = torch.randn(size + 8 * self.count, generator=draw) / size**0.5
        self._structure = wire.layout_digest(self.layout)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        start = process_time()
        content, client = Content.of(message.content), int(context.node_config["partition-id"])
        answer = {"hello": self._hello, "train": self._train, "evaluate": self._evaluate}
        record = signed(answer[content.get("what", str)](content, client), message, key_of(context))
        self.seconds += process_time() - start
        return Message(record, reply_to=message)

    def _update(self, client: int) -> Tensor:
        """Return the update of a client: no two have the same noise."""
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
    """A grid that notes how long pushing and pulling takes, the clients' own time included."""

    seconds = 0.0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        start = process_time()
        ids = super().push_messages(messages)
        self.seconds += process_time() - start
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers to messages, each made now."""
        start = process_time()
        answers = super().pull_messages(message_ids)
        self.seconds += process_time() - start
        return answers


def status(name: str) -> int:
    """Return one of the numbers of bytes that Linux tells of this process."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    )
    return 1024 * int(line.split()[1])


def play(
    scripted: ScriptedClients, grid: TimedGrid, stream: bool, rounds: int, splits: Sequence[int]
) -> tuple[Run, list[tuple[float, float, float]]]:
    """Run CFL; return the run, and the CPU seconds so far after every round: of all, of the grid, of the clients."""
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
    """Run one case; return medians over its rounds but the first, and the memory at its peak."""
    torch.set_num_threads(1)
    scripted = ScriptedClients(max(clients, 2 * CLUSTERS), encoding)

    def grid(clients: int) -> TimedGrid:
        return TimedGrid({1 + k: LocalNode(scripted, {"partition-id": k}) for k in range(clients)})

    play(scripted, grid(2 * CLUSTERS), stream, 3, splits)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
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
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--splits", nargs="*", type=int, default=SPLITS, help="rounds; none for no split at all"
    )
    parser.add_argument("--encodings", nargs="+", choices=ENCODINGS, default=list(ENCODINGS))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
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
