"""Check that every engine computes the same updates as the loop, on a device.

The script trains several models on clients of different sizes, with plain SGD, with momentum, and
with a proximal term. It prints the relative errors of the updates, compared with those of the
engine ``loop`` on the CPU. On a GPU, ``replayed`` is the stacked engine with steps that are
recorded as CUDA graphs, in its third round. The exit status is 1 if an error is above its limit.

    python benchmarks/agreement.py --device cuda
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import copy
import sys
from dataclasses import replace

import torch
from engine import SUBJECTS
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedclade import ConfigError, LocalTraining
from fedclade.core.params import Layout
from fedclade.training.auto import build_engine, without_dropout
from fedclade.training.jobs import Job, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import StackedEngine
from fedclade.training.stacking.replay import Replay

SIZES = (30, 25, 24, 21)
ROUNDS = 3
"""Rounds of the engine ``replayed``: steps are first taken, then recorded, then replayed."""

LIMITS = {torch.float32: 2e-2, torch.float64: 1e-9}
"""Largest relative errors after a few steps, by data type.

Devices add numbers in different orders, and each step magnifies the differences. In float32, they
sometimes change the sign of a ReLU's input. An engine that confuses clients, or leaves out a step,
has errors of about 1.
"""

SPECS = {
    "plain": LocalTraining(batch_size=10, lr=0.05),
    "momentum": LocalTraining(batch_size=10, lr=0.01, momentum=0.9, weight_decay=0.01),
    "proximal": LocalTraining(batch_size=10, lr=0.05, mu=0.1),
}


def task_of(name: str, spec: LocalTraining, dtype: torch.dtype, device: str) -> Workload:
    """Return the work of clients of different sizes, which start from two models in turn.

    The numbers are the same on every device.
    """
    torch.manual_seed(0)
    module = without_dropout(SUBJECTS[name].module(name)).to(dtype)
    layout = Layout.of(module)
    first = layout.flatten(module)
    noise = torch.randn(2, len(first), generator=torch.Generator().manual_seed(1), dtype=dtype)
    inputs, targets = SUBJECTS[name].examples(sum(SIZES), "cpu")
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    parts = zip(inputs.to(device).split(SIZES), targets.to(device).split(SIZES), strict=True)
    jobs = [Job(k, k % 2, x, y, torch.Generator().manual_seed(k)) for k, (x, y) in enumerate(parts)]
    return Workload(
        module.to(device), layout, (first + 0.01 * noise).to(device), jobs, spec, spec.lr
    )


def error(got: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of an update."""
    apart = torch.linalg.vector_norm(got.cpu() - expected, dim=1)
    return float((apart / torch.linalg.vector_norm(expected, dim=1)).max())


def updates(name: str, task: Workload) -> Tensor:
    """Return the updates of an engine; for ``replayed``, those of the last round."""
    if name != "replayed":
        return build_engine(name).train(task)[0]
    engine = StackedEngine(Replay())
    got = torch.empty(0)
    for _ in range(ROUNDS):
        try:
            got, _ = engine.train(task.redrawn())
        except RuntimeError as error:
            raise ConfigError(f"not recorded: {error}") from error
    return got


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=SUBJECTS,
        default=list(SUBJECTS),
        help="models to check (default: all)",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        help="engines to check (default: loop stacked vmap, on a GPU also replayed)",
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="device (default: cpu)"
    )
    arguments = parser.parse_args()
    arguments.engines = arguments.engines or [
        "loop",
        "stacked",
        *(["replayed"] * (arguments.device == "cuda")),
        "vmap",
    ]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    table = Table(
        title=f"largest relative error against the loop on the CPU, on {arguments.device}"
    )
    for column in ("model", "type", "training", *arguments.engines):
        table.add_column(
            column, justify="left" if column in ("model", "type", "training") else "right"
        )
    wrong = 0
    for name in arguments.models:
        for dtype, limit in LIMITS.items():
            for kind, spec in SPECS.items():
                expected, _ = LoopEngine().train(task_of(name, spec, dtype, "cpu"))
                cells: list[str] = []
                for engine in arguments.engines:
                    task = task_of(name, spec, dtype, arguments.device)
                    try:
                        got = updates(engine, replace(task, module=copy.deepcopy(task.module)))
                    except ConfigError as refused:
                        cells.append(f"[yellow]{str(refused).split(':')[0]}")
                        continue
                    found = error(got, expected)
                    wrong += found > limit
                    cells.append(f"[red]{found:.1e}" if found > limit else f"{found:.1e}")
                table.add_row(name, str(dtype).removeprefix("torch."), kind, *cells)
    Console().print(table)
    if wrong:
        sys.exit(f"{wrong} errors are above the limits {LIMITS}")


if __name__ == "__main__":
    main()
