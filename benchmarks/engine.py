"""Measure samples per second of local training with every engine.

Each client trains in batches of 10, on random data of the right shape. The engines are compared
with two bounds. ``loop`` trains one client after another, with all threads. ``central`` trains the
same module on the examples of all clients together, in batches of 32, 128 or 512 (on a GPU also
1,000), whichever is fastest; this is a practical limit of the machine. All are timed alternately in
one process, and the table has the medians. On a GPU, ``step by step`` is the stacked engine without
CUDA graphs. ``own mlp`` is the model ``mlp`` as a user may write it; ``bert``, ``gpt2`` and
``resnet18`` are in ``engine_models.py``. As in a run, products are computed without TF32 unless
``--tf32`` allows it, and all contestants have the same precision. A line below the table gives the
reason if an engine was refused.

    python benchmarks/engine.py --json engine.json
    python benchmarks/engine.py --quick
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

import torch
from engine_models import PLACES, WORDS, OwnMLP, Transformer, resnet18
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fedclade import ConfigError, LocalTraining
from fedclade.core.params import Layout
from fedclade.models import build_model
from fedclade.tasks import FittedTask
from fedclade.training import loop
from fedclade.training.auto import ENGINES, build_engine
from fedclade.training.jobs import Job, Workload
from fedclade.training.stacked import StackedEngine
from fedclade.training.threads import float32_products

BATCH, LR = 10, 0.05
CENTRAL_BATCHES = {"cpu": (32, 128, 512), "cuda": (32, 128, 512, 1000)}
CLIENTS = (20, 100)
WIDTH = 150

Speed = Callable[[], float]
"""Function that trains once, and returns samples per second."""


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
    decodes
        Whether the targets are tokens, one for each token of the input; otherwise they are labels.
    """

    shape: tuple[int, ...]
    outputs: int
    steps: int
    quick_steps: int
    vocabulary: int = 0
    decodes: bool = False

    def module(self, name: str) -> nn.Module:
        """Build the model."""
        if name in OWN:
            return OWN[name]()
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
        shape = (n, *self.shape) if self.decodes else (n,)
        return inputs.to(device), torch.randint(self.outputs, shape, generator=draw).to(device)


OWN: Mapping[str, Callable[[], nn.Module]] = {
    "own mlp": OwnMLP,
    "bert": lambda: Transformer(outputs=2),
    "gpt2": lambda: Transformer(outputs=None),
    "resnet18": resnet18,
}
"""Functions that build the models that fedclade has not built in."""


SUBJECTS = {
    "mclr": Subject((1, 28, 28), 10, 30, 15),
    "mlp": Subject((1, 28, 28), 10, 30, 15),
    "own mlp": Subject((1, 28, 28), 10, 30, 15),
    "cnn": Subject((1, 28, 28), 10, 20, 3),
    "cifar_cnn": Subject((3, 32, 32), 10, 20, 2),
    "lstm": Subject((25,), 2, 20, 2, vocabulary=10_000),
    "bert": Subject((PLACES,), 2, 20, 2, vocabulary=WORDS),
    "gpt2": Subject((PLACES,), WORDS, 20, 2, vocabulary=WORDS, decodes=True),
    "resnet18": Subject((3, 32, 32), 10, 5, 1),
}


def contestants(
    name: str, clients: int, steps: int, device: str, precision: str
) -> tuple[dict[str, Speed], str, str | None]:
    """Prepare the engines for a model, with a warm-up.

    Returns
    -------
    tuple
        The functions to time; the choice of ``auto``; and the reason if it is not the engine that
        is usually the fastest.
    """
    module = SUBJECTS[name].module(name).to(device)
    layout = Layout.of(module)
    spec = LocalTraining(batch_size=BATCH, lr=LR, precision=precision)
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
        settings = LocalTraining(batch_size=batch_size, lr=LR, precision=precision)
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
    fallback: str | None = None
    for kind in (kind for kind in ENGINES if kind != "loop"):
        engine = build_engine(kind)
        try:
            engine.train(task())
        except ConfigError as error:
            Console(stderr=True).print(f"{name}: {error}", style="yellow")
            continue
        if kind == "auto":
            taken = str(engine.resolved)
            fallback = engine.fallback
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
    return speeds, taken, fallback


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


def in_markdown(
    results: Mapping[str, Mapping[str, float]],
    taken: Mapping[str, str],
    reasons: Sequence[str],
    title: str,
) -> str:
    """Return the main columns of the table in Markdown, with the reasons of refusals below it."""
    lines = [
        f"**{title}**",
        "",
        "| model | auto | plain loop | one big batch | auto / loop | auto / big batch | auto takes |",
        "|:--|--:|--:|--:|--:|--:|:--|",
    ]
    for model, found in results.items():
        speeds = " | ".join(f"{found[kind]:,.0f}" for kind in ("auto", "loop", "central"))
        ratios = f"{found['auto/loop']:.2f} | {found['auto/central']:.2f}"
        lines.append(f"| {model} | {speeds} | {ratios} | {taken[model]} |")
    lines += ["", *(f"- {reason}" for reason in reasons)]
    return "\n".join(lines) + "\n"


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
    parser.add_argument(
        "--tf32", action="store_true", help="allow TF32, as 'tf32 = true' in a config does"
    )
    parser.add_argument("--precision", default="float32", help="local.precision (default: float32)")
    parser.add_argument("--markdown", type=Path, help="write the tables, in Markdown, to this file")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with float32_products(arguments.tf32):
        measure_all(arguments)


def measure_all(arguments: argparse.Namespace) -> None:
    """Measure the chosen models, and print and write the tables."""
    quick = arguments.quick
    machine = (
        torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else f"{arguments.threads} threads"
    )
    if arguments.tf32:
        machine += ", TF32"
    if arguments.precision != "float32":
        machine += f", {arguments.precision}"
    results: dict[str, dict[str, float]] = {}
    pages: list[str] = []
    for clients in arguments.clients or (CLIENTS[:1] if quick else CLIENTS):
        here: dict[str, dict[str, float]] = {}
        taken: dict[str, str] = {}
        reasons: list[str] = []
        for model in arguments.models:
            subject = SUBJECTS[model]
            steps = subject.quick_steps if quick else subject.steps
            speeds, taken[model], fallback = contestants(
                model, clients, steps, arguments.device, arguments.precision
            )
            here[model] = measured(speeds, arguments.repeats or (3 if quick else 5), quick)
            if fallback is not None:
                reasons.append(f"{model}: engine: {fallback}")
        title = f"samples/s, {clients} clients × batch {BATCH}, {machine}"
        Console(width=WIDTH).print(shown(here, taken, title))
        for reason in reasons:
            print(reason)
        pages.append(in_markdown(here, taken, reasons, title))
        # The first number of clients has the models' plain names.
        results |= {
            f"{model}, {clients} clients" if results else model: found
            for model, found in here.items()
        }
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(pages))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
