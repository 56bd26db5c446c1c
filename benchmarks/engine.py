"""Measure samples per second of local training with every engine.

Each client trains in batches of 10, on random data of the right shape. The engines are compared
with two bounds. ``loop`` trains one client after another, with all threads. ``central`` trains the
same module on the examples of all clients together, in batches of 32, 128 or 512 (on a GPU also
1,000), whichever is fastest; this is a practical limit of the machine. All are timed alternately in
one process, and the table has the medians. On a GPU, ``step by step`` is the stacked engine without
CUDA graphs. ``own mlp`` is the model ``mlp`` as a user may write it.

    python benchmarks/engine.py --json engine.json
    python benchmarks/engine.py --quick
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from fedclade import ConfigError, LocalTraining
from fedclade.core.params import Layout
from fedclade.models import build_model
from fedclade.tasks import FittedTask
from fedclade.training import loop
from fedclade.training.auto import ENGINES, build_engine
from fedclade.training.jobs import Job, Workload
from fedclade.training.stacked import StackedEngine

BATCH, LR = 10, 0.05
CENTRAL_BATCHES = {"cpu": (32, 128, 512), "cuda": (32, 128, 512, 1000)}
CLIENTS = (20, 100)
WIDTH = 150

Speed = Callable[[], float]
"""Function that trains once, and returns samples per second."""


class OwnMLP(nn.Module):
    """The model ``mlp`` as a user may write it, with its own ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(784, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the labels."""
        return self.output(functional.relu(self.hidden(x.flatten(1))))


@dataclass(frozen=True)
class Subject:
    """A model with its data.

    Parameters
    ----------
    shape
        Shape of an input.
    outputs
        Number of outputs of the model.
    steps, quick_steps
        Steps of a client in a round, without and with ``--quick``.
    vocabulary
        Number of tokens, if inputs are tokens; otherwise 0.
    """

    shape: tuple[int, ...]
    outputs: int
    steps: int
    quick_steps: int
    vocabulary: int = 0

    def module(self, name: str) -> nn.Module:
        """Build the model."""
        if name == "own mlp":
            return OwnMLP()
        return build_model(
            name, input_shape=self.shape, outputs=self.outputs, vocabulary_size=self.vocabulary
        )

    def examples(self, n: int, device: str) -> tuple[Tensor, Tensor]:
        """Draw n random inputs and labels."""
        draw = torch.Generator().manual_seed(0)
        inputs = (
            torch.randint(1, self.vocabulary, (n, *self.shape), generator=draw)
            if self.vocabulary
            else torch.randn(n, *self.shape, generator=draw)
        )
        return inputs.to(device), torch.randint(self.outputs, (n,), generator=draw).to(device)


SUBJECTS = {
    "mclr": Subject((1, 28, 28), 10, 30, 15),
    "mlp": Subject((1, 28, 28), 10, 30, 15),
    "own mlp": Subject((1, 28, 28), 10, 30, 15),
    "cnn": Subject((1, 28, 28), 10, 20, 3),
    "cifar_cnn": Subject((3, 32, 32), 10, 20, 2),
    "lstm": Subject((25,), 2, 20, 2, vocabulary=10_000),
}


def contestants(name: str, clients: int, steps: int, device: str) -> tuple[dict[str, Speed], str]:
    """Return the functions to time for a model, after a warm-up, and the choice of ``auto``."""
    module = SUBJECTS[name].module(name).to(device)
    layout, spec = Layout.of(module), LocalTraining(batch_size=BATCH, lr=LR)
    models = layout.flatten(module)[None]
    each = steps * BATCH
    inputs, targets = SUBJECTS[name].examples(
        max(clients * each, max(CENTRAL_BATCHES[device])), device
    )
    data = list(zip(inputs.split(each), targets.split(each), strict=True))[:clients]

    def timed(run: Callable[[], object], samples: int) -> float:
        synchronize(device)
        start = perf_counter()
        run()
        synchronize(device)
        return samples / (perf_counter() - start)

    def task() -> Workload:
        jobs = [Job(k, 0, x, y, torch.Generator().manual_seed(k)) for k, (x, y) in enumerate(data)]
        return Workload(module, layout, models, jobs, spec, LR)

    def plain(x: Tensor, y: Tensor, batch_size: int) -> None:
        settings = LocalTraining(batch_size=batch_size, lr=LR)
        loop.train(
            module,
            layout,
            models[0],
            (x, y),
            settings,
            LR,
            FittedTask(),
            torch.Generator().manual_seed(0),
        )

    speeds: dict[str, Speed] = {}
    taken = "loop"
    for kind in (kind for kind in ENGINES if kind != "loop"):
        engine = build_engine(kind)
        try:
            engine.train(task())
        except ConfigError as error:
            Console(stderr=True).print(f"{name}: {error}", style="yellow")
            continue
        taken = str(engine.resolved) if kind == "auto" else taken
        speeds[kind] = lambda engine=engine: timed(lambda: engine.train(task()), clients * each)
    if device == "cuda":  # the other stacked engine may record its steps as CUDA graphs
        step_by_step = StackedEngine()
        step_by_step.train(task())
        speeds["step by step"] = lambda: timed(lambda: step_by_step.train(task()), clients * each)
    some = data[:10]  # clients train one after another, so ten clients are enough
    speeds["loop"] = lambda: timed(lambda: [plain(x, y, BATCH) for x, y in some], len(some) * each)
    for size in CENTRAL_BATCHES[device]:
        heap = max(size, min(2048, len(inputs) // size * size))
        plain(inputs[:size], targets[:size], size)
        speeds[f"central {size}"] = lambda size=size, heap=heap: timed(
            lambda: plain(inputs[:heap], targets[:heap], size), heap
        )
    return speeds, taken


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measured(speeds: Mapping[str, Speed], repeats: int, quick: bool) -> dict[str, float]:
    """Return the medians of alternating repeats, and ``auto`` as a multiple of the two bounds."""
    seen: dict[str, list[float]] = {kind: [] for kind in speeds}
    for repeat in range(repeats):
        # The order changes, because an engine that runs after another one finds its data in the
        # processor's cache.
        for kind, speed in Random(repeat).sample(sorted(speeds.items()), len(speeds)):
            # vmap is much slower than the others, so with --quick it is timed only once.
            if not (quick and kind == "vmap" and repeat):
                seen[kind].append(speed())
    found = {kind: median(values) for kind, values in seen.items()}
    central = max(found.pop(kind) for kind in speeds if kind.startswith("central"))
    found["central"] = central
    return {
        **found,
        "auto/central": found["auto"] / central,
        "auto/loop": found["auto"] / found["loop"],
    }


def shown(
    results: Mapping[str, Mapping[str, float]], taken: Mapping[str, str], title: str
) -> Table:
    table = Table(title=title)
    unrecorded = ["step by step"] * any("step by step" in found for found in results.values())
    kinds = [*ENGINES, *unrecorded, "central", "auto/central", "auto/loop"]
    for column in ("model", *kinds, "auto takes"):
        table.add_column(
            column, justify="left" if column in ("model", "auto takes") else "right", no_wrap=True
        )
    for model, found in results.items():
        cells = [
            f"{found[k]:,.2f}" if "/" in k else f"{found[k]:,.0f}" if k in found else "–"
            for k in kinds
        ]
        table.add_row(model, *cells, taken[model])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=SUBJECTS,
        default=list(SUBJECTS),
        help="models to measure (default: all)",
    )
    parser.add_argument(
        "--clients",
        nargs="+",
        type=int,
        help="numbers of clients (default: 20 100, with --quick only 20)",
    )
    parser.add_argument(
        "--repeats", type=int, help="number of repeats (default: 5, with --quick 3)"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads of torch"
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="device (default: cpu)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats, fewer steps, 20 clients: under 50 s"
    )
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine = (
        torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else f"{arguments.threads} threads"
    )
    results: dict[str, dict[str, float]] = {}
    for clients in arguments.clients or (CLIENTS[:1] if arguments.quick else CLIENTS):
        here: dict[str, dict[str, float]] = {}
        taken: dict[str, str] = {}
        for model in arguments.models:
            steps = SUBJECTS[model].quick_steps if arguments.quick else SUBJECTS[model].steps
            speeds, taken[model] = contestants(model, clients, steps, arguments.device)
            here[model] = measured(
                speeds, arguments.repeats or (3 if arguments.quick else 5), arguments.quick
            )
        Console(width=WIDTH).print(
            shown(here, taken, f"samples/s, {clients} clients × batch {BATCH}, {machine}")
        )
        # The first number of clients has the models' plain names.
        results |= {
            f"{model}, {clients} clients" if results else model: found
            for model, found in here.items()
        }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
