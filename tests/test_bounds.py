"""Bounds of settings: the last allowed value is accepted, and the next one is refused by name.

The bounds are read from the sources: a class checks its fields by ``require``, whose rules are texts
such as "at least 1" or "in [0, 1)".
"""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fedclade
from fedclade.core import FedcladeError

SOURCE = Path(fedclade.__file__).parent

REQUIRED: dict[str, dict[str, Any]] = {
    "Budget": {"epsilon": 1.0},
    "ColumnChoice": {"target": "y"},
    "DescriptorQuery": {"ids": [0], "model": torch.zeros(2), "seed": 0},
    "FLUX": {"earliest": 1, "latest": 2},
    "Interpolation": {"alpha": 0.5},
    "MetaLearning": {"alpha": 0.1, "hessian": True, "delta": 0.1},
    "MoreauEnvelope": {"lam": 1.0, "steps": 1, "lr": 0.1},
    "PlantedSettings": {"least": 1, "most": 9},
    "ShiftQuery": {"ids": [0], "round": 1, "share": 0.5, "by_label": True},
}
"""Arguments of classes that have fields without a default, or fields that bound each other."""

END = re.compile(r"(at least|at most|greater than|less than|below|in [\[(]) ?(-?[\d.e+]+)")
INTERVAL = re.compile(r"in ([\[(])(-?[\d.e+]+), (-?[\d.e+]+)([\])])")


@dataclass(frozen=True)
class Bound:
    """A bound of a field of a class: allowed and refused values, and the words of the refusal."""

    owner: type
    field: str
    told: str
    accepted: float
    refused: float

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.field} {self.refused:g}"


def ends_of(rule: str) -> Iterator[tuple[float, bool, bool]]:
    """Yield each end of a rule: the number, whether it is a lower end, and whether it is allowed."""
    if found := INTERVAL.search(rule):
        left, low, high, right = found.groups()
        yield float(low), True, left == "["
        yield float(high), False, right == "]"
        return
    for words, number in END.findall(rule):
        is_lower = words in ("at least", "greater than")
        yield float(number), is_lower, words in ("at least", "at most")


def neighbours(
    number: float, *, is_lower: bool, is_allowed: bool, is_whole: bool
) -> tuple[Any, Any]:
    """Return the last allowed value at an end, and the first value that is not."""
    inwards = math.inf if is_lower else -math.inf
    if is_whole:
        number = int(number)
        step = 1 if is_lower else -1
        return (number, number - step) if is_allowed else (number + step, number)
    if is_allowed:
        return number, math.nextafter(number, -inwards)
    return math.nextafter(number, inwards), number


def bounds_of(owner: type, check: ast.Tuple, names: dict[str, Any]) -> Iterator[Bound]:
    """Yield the bounds that an argument of ``require`` states about a field of a class."""
    key, value, _, rule = check.elts
    code = compile(ast.Expression(rule), "rule", "eval")
    try:
        text = eval(code, names)
        told = f"{ast.literal_eval(key)} should be {text}, got "
    except (NameError, ValueError):  # the rule depends on other fields
        return
    field = value.attr if isinstance(value, ast.Attribute) else told.split(" ")[0].split(".")[-1]
    annotation = next(
        (
            vars(base)["__annotations__"][field]
            for base in owner.__mro__
            if field in vars(base).get("__annotations__", {})
        ),
        None,
    )
    if annotation is None or "tuple" in annotation or told.startswith("newcomers."):
        return
    for number, is_lower, is_allowed in ends_of(text):
        accepted, refused = neighbours(
            number, is_lower=is_lower, is_allowed=is_allowed, is_whole="float" not in annotation
        )
        yield Bound(owner, field, told, accepted, refused)


def checks_of(owner: ast.ClassDef) -> list[ast.Tuple]:
    """Return the arguments of ``require`` in the ``__post_init__`` of a class."""
    found: list[ast.Tuple] = []
    for method in owner.body:
        if not isinstance(method, ast.FunctionDef) or method.name != "__post_init__":
            continue
        for call in ast.walk(method):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "require":
                found += [each for each in call.args if isinstance(each, ast.Tuple)]
    return [check for check in found if len(check.elts) == 4]


def find_bounds() -> list[Bound]:
    """Return all bounds that classes of the library check in ``__post_init__``."""
    found: list[Bound] = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.ClassDef) or not (checks := checks_of(node)):
                continue
            parts = path.relative_to(SOURCE.parent).with_suffix("").parts
            module = importlib.import_module(".".join(parts))
            for check in checks:
                found += bounds_of(getattr(module, node.name), check, vars(module))
    return found


BOUNDS = find_bounds()


def refusal(bound: Bound, value: float) -> str:
    """Return the text with which a value is refused; empty if the value is accepted."""
    arguments = {**REQUIRED.get(bound.owner.__name__, {}), bound.field: value}
    try:
        bound.owner(**arguments)
    except FedcladeError as error:
        return str(error)
    return ""


def test_many_bounds_are_found():
    assert len(BOUNDS) > 80
    assert len({bound.owner for bound in BOUNDS}) > 30


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_the_last_allowed_value_is_accepted_and_the_next_refused(bound: Bound):
    assert bound.told not in refusal(bound, bound.accepted)
    assert bound.told in refusal(bound, bound.refused)
