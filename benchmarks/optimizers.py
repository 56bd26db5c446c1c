"""Measure stacked training with torch's optimizers, and compare it with three references.

The references are SGD with momentum, the engine ``loop``, and an upper bound. SGD with momentum
uses the general code path: the gradient is computed, and a step is one pass over gradient and
parameters. Other optimizers use the same path, and their steps take longer. The columns are

- *step*: microseconds of a step of one client, with parameters, gradient and state in the cache;
- *bytes*: bytes that a step reads and writes for each entry;
- *GB/s*: the resulting memory bandwidth;
- *bound*: the largest possible speed relative to SGD with momentum, if the longer step were the
  only difference.

The engines train alternately in one process, each time from a new state. The table has the samples
per second of the fastest repeat. With one thread, CPU time is measured, because other processes
affect it less.

    OMP_NUM_THREADS=1 python benchmarks/optimizers.py
    python benchmarks/optimizers.py --threads 2
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
from collections.abc import Callable, Mapping
from random import Random
from time import perf_counter, thread_time
from typing import Any

import torch
from engine import SUBJECTS
from rich.console import Console
from rich.table import Table
from torch import nn

from fedclade import LocalTraining
from fedclade.core.params import Layout
from fedclade.training.jobs import Engine, Job, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.stacked import StackedEngine

CLIENTS, OF_LOOP, STEPS, BATCH = 20, 4, 30, 10

ALONE = 500_000
"""Number of entries of the tensor with which a step is timed; it fits into the cache."""

GENERAL = "sgd, momentum"

RULES: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"lr": 0.05},
    GENERAL: {"lr": 0.05, "momentum": 0.9},
    "sgd, nesterov": {"lr": 0.05, "momentum": 0.9, "options": {"nesterov": True}},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw"},
    "adagrad": {"optimizer": "adagrad"},
    "rmsprop": {"optimizer": "rmsprop"},
}


def step_alone(rule: LocalOptimizer, clock: Callable[[], float]) -> float:
    """Return the seconds of a step per entry of a tensor, without the overhead of the call."""

    def least(size: int) -> float:
        parameter = nn.Parameter(torch.rand(size))
        parameter.grad = torch.rand(size)
        gradient, value = parameter.grad, parameter.data
        of_torch = rule.torch_optimizer([parameter], fused=True)
        step = (lambda: rule.step(value, gradient, None, None)) if rule.is_plain else of_torch.step
        seconds: list[float] = []
        for _ in range(500):
            start = clock()
            step()
            seconds.append(clock() - start)
        return min(seconds)

    return (least(ALONE) - least(1)) / ALONE


def measured(name: str, repeats: int, clock: Callable[[], float]) -> dict[str, tuple[float, float]]:
    """Return the samples per second of each optimizer with the engines ``stacked`` and ``loop``."""
    module = SUBJECTS[name].module(name)
    layout = Layout.of(module)
    models = layout.flatten(module)[None]
    inputs, targets = SUBJECTS[name].examples(CLIENTS * STEPS * BATCH, "cpu")
    data = [*zip(inputs.split(STEPS * BATCH), targets.split(STEPS * BATCH), strict=True)]
    engines: Mapping[str, tuple[Engine, int]] = {
        "stacked": (StackedEngine(), CLIENTS),
        "loop": (LoopEngine(), OF_LOOP),
    }

    def speed(rule: str, kind: str) -> float:
        engine, clients = engines[kind]
        spec = LocalTraining(batch_size=BATCH, **RULES[rule])
        jobs = [
            Job(k, 0, x, y, torch.Generator().manual_seed(k))
            for k, (x, y) in enumerate(data[:clients])
        ]
        work = Workload(module, layout, models, jobs, spec, spec.lr or 0.0)
        start = clock()
        engine.train(work)
        return clients * STEPS * BATCH / (clock() - start)

    pairs = [(rule, kind) for rule in RULES for kind in engines]
    best = dict.fromkeys(pairs, 0.0)
    for repeat in range(repeats):
        for pair in Random(repeat).sample(pairs, len(pairs)):
            best[pair] = max(best[pair], speed(*pair))
    return {rule: (best[rule, "stacked"], best[rule, "loop"]) for rule in RULES}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=SUBJECTS,
        default=["mclr", "mlp"],
        help="models to measure (default: mclr mlp)",
    )
    parser.add_argument("--repeats", type=int, default=15, help="number of repeats (default: 15)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = thread_time if arguments.threads == 1 else perf_counter
    title = f"samples/s, {CLIENTS} clients × batch {BATCH}, {arguments.threads} threads, torch {torch.__version__}"
    table = Table(title=title)
    columns = (
        "model",
        "optimizer",
        "stacked",
        "relative to sgd, momentum",
        "bound",
        "loop",
        "over the loop",
        "step, µs",
        "bytes",
        "GB/s",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right", no_wrap=True)
    for name in arguments.models:
        entries = Layout.of(SUBJECTS[name].module(name)).n_parameters
        found = measured(name, arguments.repeats, clock)
        general = 0.0  # seconds of a step of SGD with momentum
        for rule, (stacked, loop) in found.items():
            spec = LocalTraining(**RULES[rule])
            optimizer = LocalOptimizer.of(spec, spec.lr or 0.0)
            cells = ["–"] * 4  # plain SGD takes its step while the gradient is computed
            if not optimizer.can_fuse:
                states = 0 if optimizer.is_plain else len(optimizer.states)
                alone = step_alone(optimizer, clock) * entries
                general = alone if rule == GENERAL else general
                whole = BATCH / found[GENERAL][0]
                bound, moved = whole / (whole - general + alone), 12 + 8 * states
                cells = [
                    f"{bound:.2f}",
                    f"{alone * 1e6:.1f}",
                    f"{moved}",
                    f"{moved * entries / alone / 1e9:.0f}",
                ]
            of_general = stacked / found[GENERAL][0]
            of_loop = f"{loop:,.0f}", f"{stacked / loop:.1f}"
            table.add_row(
                name, rule, f"{stacked:,.0f}", f"{of_general:.2f}", cells[0], *of_loop, *cells[1:]
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
