"""Measure the structure of the library: modules, cycles of imports, fields, hooks, and call depth.

    python studies/structure.py

The script prints a table in Markdown. ``docs/design.md`` shows such a table with the date of its
measurement.
"""

from __future__ import annotations

import inspect
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn

import fedclade
from fedclade.core import ClientWork, Round, RoundPlan, TrainQuery, Updates

ROOT = Path(__file__).parents[1]
SOURCE = Path(fedclade.__file__).parent

sys.path.insert(0, str(ROOT))

from tests.test_import_cycles import find_cycle, find_imports, modules  # noqa: E402


def main() -> None:
    """Print a line for each measure."""
    print("| measure | value |\n|:--|--:|")
    for name, value in measures().items():
        print(f"| {name} | {value} |")


def measures() -> Mapping[str, object]:
    """Return the value of each measure, by its description."""
    lengths = [len(path.read_text(encoding="utf-8").splitlines()) for path in modules().values()]
    hooks = hooks_of(fedclade.Algorithm)
    attributes = attributes_of(fedclade.Algorithm)
    frames = frames_of_step()
    return {
        "modules, without the `__init__.py` of packages": len(lengths),
        "median of their lines": round(statistics.median(lengths)),
        "modules in a cycle of imports": len(set(imports_in_a_cycle())),
        "fields of `Round`": len(fields(Round)),
        "further fields of `RoundPlan`": len(fields(RoundPlan)) - len(fields(Round)),
        "fields of `TrainQuery`": len(fields(TrainQuery)),
        "parts of `ClientWork`": len(fields(ClientWork)),
        "fields of `Updates`": len(fields(Updates)),
        "methods and properties of `Algorithm` that a method may override": len(hooks),
        "class attributes of `Algorithm` that a method may set": len(attributes),
        "stack frames of fedclade between `run_round` and the model, engine `loop`": len(frames),
    }


def imports_in_a_cycle() -> Sequence[str]:
    """Return the modules of one cycle of imports; none if there is no cycle."""
    return find_cycle({name: set(find_imports(path)) for name, path in modules().items()})


def hooks_of(kind: type) -> list[str]:
    """Return the public methods and properties that a class defines itself."""
    defined = (
        name
        for name, value in vars(kind).items()
        if inspect.isfunction(value) or isinstance(value, property)
    )
    return [name for name in defined if not name.startswith("_")]


def attributes_of(kind: type) -> list[str]:
    """Return the public attributes of a class that are neither methods nor properties."""
    methods = hooks_of(kind)
    return [name for name in vars(kind) if not name.startswith("_") and name not in methods]


class Noted(nn.Module):
    """A linear model that calls a function in each step of training."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.note = note

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of digits ``[B, 1, 8, 8]``."""
        if self.training and torch.is_grad_enabled():
            self.note()
        return self.layer(inputs.flatten(1))


def frames_of_step() -> list[str]:
    """Return fedclade's functions on the call stack between ``run_round`` and the model.

    The stack is that of a training step of a client, with the engine ``loop``.
    """
    stacks: list[list[str]] = []

    def note() -> None:
        calls = [frame for frame in inspect.stack(0) if Path(frame.filename).is_relative_to(SOURCE)]
        stacks.append([frame.function for frame in calls])

    digits = fedclade.load_federation("digits", clients=2, samples_per_client=20)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        fedclade.simulate("fedavg", Noted(note), digits, rounds=1, engine="loop", folder=out)
    steps = [stack for stack in stacks if "run_round" in stack]
    deepest = max(steps, key=lambda stack: stack.index("run_round"))
    return deepest[: deepest.index("run_round")]


if __name__ == "__main__":
    main()
