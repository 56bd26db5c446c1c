"""Whether every engine gives the updates of the plain loop, on this device and in this version of torch.

The models of ``fedclade ls models``, clients of different sizes, plain SGD, momentum, and a proximal term; relative
errors of the updates against the loop on the CPU. Ends with an error if one is above its limit.

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

from fedclade import ConfigError, LocalSpec
from fedclade.engine.auto import build_engine, without_dropout
from fedclade.engine.jobs import Job, Task
from fedclade.engine.loop import LoopEngine
from fedclade.params import Layout

SIZES = (30, 25, 7, 12)
LIMITS = {torch.float32: 1e-3, torch.float64: 1e-9}
"""Of relative errors after a few steps. Devices add up in another order, which every step magnifies."""

SPECS = {
    "plain": LocalSpec(batch_size=10, lr=0.05),
    "momentum": LocalSpec(batch_size=10, lr=0.01, momentum=0.9, weight_decay=0.01),
    "proximal": LocalSpec(batch_size=10, lr=0.05, mu=0.1),
}


def task_of(name: str, spec: LocalSpec, dtype: torch.dtype, device: str) -> Task:
    """Return clients of different sizes with a model each; the same on every device."""
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
    return Task(module.to(device), layout, (first + 0.01 * noise).to(device), jobs, spec, spec.lr)


def error(got: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of an update."""
    apart = torch.linalg.vector_norm(got.cpu() - expected, dim=1)
    return float((apart / torch.linalg.vector_norm(expected, dim=1)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--engines", nargs="+", default=["loop", "stacked", "vmap"])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    table = Table(title=f"largest relative error against the loop on the CPU, on {arguments.device}")
    for column in ("model", "type", "training", *arguments.engines):
        table.add_column(column, justify="left" if column in ("model", "type", "training") else "right")
    wrong = 0
    for name in arguments.models:
        for dtype, limit in LIMITS.items():
            for kind, spec in SPECS.items():
                expected, _ = LoopEngine().train(task_of(name, spec, dtype, "cpu"))
                cells: list[str] = []
                for engine in arguments.engines:
                    task = task_of(name, spec, dtype, arguments.device)
                    try:
                        got, _ = build_engine(engine).train(replace(task, module=copy.deepcopy(task.module)))
                    except ConfigError as refused:
                        cells.append(f"[yellow]{str(refused).split(':')[0]}")
                        continue
                    found = error(got, expected)
                    wrong += found > limit
                    cells.append(f"[red]{found:.1e}" if found > limit else f"{found:.1e}")
                table.add_row(name, str(dtype).removeprefix("torch."), kind, *cells)
    Console().print(table)
    if wrong:
        sys.exit(f"{wrong} errors are above their limits: {LIMITS}")


if __name__ == "__main__":
    main()
