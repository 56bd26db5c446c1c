"""Measure how encodings of updates affect ARI, accuracy and bytes of clustered methods.

The script runs each config with every seed and every encoding, with and without error feedback. The
updates are encoded and decoded between the clients and the server. In runs with a permutation,
clients permute the entries of their updates, so that a block of entries with a common scale
contains entries of the whole model.

    python benchmarks/encoding.py --data-dir DIR
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedclade import Run
from fedclade.algorithms import build_algorithm
from fedclade.channel import (
    Channel,
    ErrorFeedback,
    Middleware,
    Retrying,
    client_side,
    decode,
    encode,
)
from fedclade.config import Config, find_config, read_config
from fedclade.core import TrainQuery, Updates
from fedclade.runs import Backend, Checkpointer, Churn, History, run_rounds

CONFIGS = tuple(f"{name}-mnist-label-swap" for name in ("cfl", "fl_hc", "fedgroup"))


@dataclass(frozen=True)
class Way:
    """Encoding of updates, with or without error feedback and permutation."""

    encoding: str
    feedback: bool = False
    permuted: bool = False

    def __str__(self) -> str:
        return self.encoding + ", error feedback" * self.feedback + ", permuted" * self.permuted


WAYS = (
    Way("float32"),
    Way("float16"),
    Way("float16", feedback=True),
    Way("int8"),
    Way("int8", feedback=True),
    Way("int8", feedback=True, permuted=True),
    Way("topk"),
    Way("topk", feedback=True),
)


class Encoding(Middleware):
    """Middleware that encodes updates, counts their bytes, and decodes them."""

    queries = (TrainQuery,)

    def __init__(self, way: Way, n_parameters: int) -> None:
        self._way = way
        self._n_parameters = n_parameters
        self._feedback: dict[tuple[int, str], ErrorFeedback] = {}
        self.bytes_up = 0

    def after(self, query: TrainQuery, reply: Updates) -> Updates:
        """Return the updates that the server receives."""
        pairs = zip(reply.ids, reply.required_deltas, strict=True)
        rows = torch.stack([self._sent(client, query.round.purpose, row) for client, row in pairs])
        sizes = [int(size) for size in reply.sizes.tolist()]
        return Updates.received(
            reply.ids, sizes, rows, self._n_parameters, reply.losses, query.round.number
        )

    def _sent(self, client: int, purpose: str, update: Tensor) -> Tensor:
        """Encode a client's update, and return the decoded update."""
        size, way = len(update), self._way
        key = client, purpose
        if way.feedback and key not in self._feedback:
            self._feedback[key] = ErrorFeedback(way.encoding, size, self._n_parameters)
        data = (
            self._feedback[key].encode(update)
            if way.feedback
            else encode(update, way.encoding, self._n_parameters)
        )
        self.bytes_up += len(data)
        return decode(data, size, way.encoding, self._n_parameters)


def run(config: Config, seed: int, way: Way, data_dir: Path | None) -> tuple[Run, int]:
    """Run a config with a seed; return the run and the bytes that all clients sent."""
    config = replace(config, top=replace(config.top, seed=seed, evaluate_every=config.top.rounds))
    federation = config.federation(data_dir)
    name, options = (
        config.algorithm["name"],
        {k: v for k, v in config.algorithm.items() if k != "name"},
    )
    algorithm = build_algorithm(name, options, federation.true_clusters)
    world = Backend.simulated_by(
        federation, config.model["name"], algorithm, seed=seed, permute=way.permuted, device="cpu"
    )
    encoding, retrying = Encoding(way, world.workers.layout.n_parameters), Retrying()
    clients = Channel(world.workers, *client_side(None, world.permutation), encoding, retrying)
    found = run_rounds(
        algorithm,
        replace(world, clients=clients, retrying=retrying),
        Churn().among(clients, federation, seed),
        Checkpointer(None, config.as_dict(), 0, lambda: ""),
        History(federation.roster, world.task),
        replace(config.settings, target=None),
    )
    return found, encoding.bytes_up


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="*", default=CONFIGS, help="configs to run")
    parser.add_argument("--data-dir", type=Path, help="folder with the data set")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key of the configs, as for fedclade run",
    )
    arguments = parser.parse_args()

    table = Table(box=box.MARKDOWN)
    for column in ("config", "encoding", "ARI by seed", "accuracy by seed, %", "mean, %", "MB up"):
        table.add_column(column, justify="left" if column in ("config", "encoding") else "right")
    for name in arguments.configs:
        config = read_config(find_config(name), arguments.set)
        for way in WAYS:
            runs = [run(config, seed, way, arguments.data_dir) for seed in range(arguments.seeds)]
            aris = [each.summary["clusters"]["ari"] for each, _ in runs]
            accuracies = [100 * each.summary["accuracy"]["mean"] for each, _ in runs]
            table.add_row(
                config.algorithm["name"],
                str(way),
                " ".join(f"{ari:.2f}" for ari in aris),
                " ".join(f"{accuracy:.2f}" for accuracy in accuracies),
                f"{mean(accuracies):.2f}",
                f"{mean(sent for _, sent in runs) / 1e6:.1f}",
            )
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
