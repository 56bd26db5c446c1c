"""Digests of all results of a run, and the few figures that are equal on other machines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor

from golden_runs.running import Outcome

CLOCK_COLUMNS = frozenset({"seconds", "seconds_train", "seconds_evaluate", "seconds_server"})
"""Columns of tables with times. Their names are compared, but not their values."""

NOT_COMPARED = frozenset({"seconds", "versions", "device", "out"})
"""Entries of summaries and configs that depend on the machine, the versions, or the folder."""


def digests_of(outcome: Outcome) -> dict[str, str]:
    """Return a digest for each part of an outcome, so that a difference can be located.

    Two outcomes have the same digests only if they agree to the last bit, except for times.
    """
    run = outcome.run
    parts = {
        "config": without_machine(run.config),
        "summary": without_machine(run.summary),
        "metrics": without_clock(run.metric_rows),
        "clusters": without_clock(run.cluster_rows),
        "clients": without_clock(run.client_rows),
        "events": without_clock(run.events),
        "tree": [describe_fields(node) for node in run.tree.nodes],
        "similarities": [describe_fields(matrix) for matrix in run.similarities],
        "kept": run.kept,
        "messages": outcome.messages,
        "newcomers": outcome.newcomers,
    }
    return {name: digest_of(part) for name, part in parts.items()}


def describe_fields(record: Any) -> dict[str, Any]:
    """Return all fields of a dataclass by name, also fields that are added to the class later."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def without_clock(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of a table with None in the columns of times."""
    return [
        {name: None if name in CLOCK_COLUMNS else value for name, value in row.items()}
        for row in rows
    ]


def without_machine(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary or a config without entries that are not compared, also in its sections."""
    kept: dict[str, Any] = {}
    for name, value in entries.items():
        if name in NOT_COMPARED:
            continue
        kept[name] = without_machine(value) if isinstance(value, Mapping) else value
    return kept


def vector_digest(vector: Tensor | None) -> str | None:
    """Return a hash of a tensor's shape, type and values; None if there is no tensor."""
    return None if vector is None else array_digest(vector.cpu().numpy())


def array_digest(array: np.ndarray) -> str:
    """Return a hash of an array's shape, type and values."""
    found = hashlib.sha256(f"{array.dtype} {array.shape} ".encode())
    found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def digest_of(value: Any) -> str:
    """Return a short hash of plain values, in which numbers have all their digits."""
    text = json.dumps(value, sort_keys=True, default=plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Convert a value of a type that JSON does not have.

    Raises
    ------
    TypeError
        If the value is of a type whose text may hide a difference.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return array_digest(value)
    if isinstance(value, Tensor):
        return vector_digest(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a digest cannot contain a {type(value).__name__}: {value!r}")


def figures_of(outcome: Outcome) -> dict[str, float | int | None]:
    """Return the loss and score after the last round, clusters and bytes: the committed figures."""
    last = outcome.run.metric_rows[-1]
    return {
        "loss": rounded(last["loss_mean"]),
        "accuracy": rounded(last["accuracy_mean"]),
        "clusters": last["clusters"],
        "bytes_up": outcome.run.summary["bytes_up"],
        "bytes_down": outcome.run.summary["bytes_down"],
    }


def rounded(number: float | None) -> float | None:
    """Return a number with four significant digits."""
    return None if number is None else float(f"{number:.4g}")
