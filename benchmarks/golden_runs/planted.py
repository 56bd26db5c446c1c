"""Errors that are planted in the library on purpose, each of which must change a golden run.

They are typical errors of restructuring: a lost condition, a wrong name, a field that is forgotten
when an object is copied, a message or a table with other columns. ``tests/test_golden.py`` checks
that each is detected. If the code that a planted error replaces is moved or renamed, plant the
error in the new place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from fedclade.core import (
    FromStored,
    Lasting,
    LocalTraining,
    Nothing,
    ParameterTree,
    Splits,
    TrainQuery,
    Updates,
)
from fedclade.flower import wire
from fedclade.runs import History
from fedclade.training import store

Planting = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class PlantedError:
    """An error, and a golden run that detects it.

    Parameters
    ----------
    name
        Description of the error.
    plant
        Function that returns a context in which the library has the error.
    case
        Name of a case whose digests must differ with the error.
    part
        A part of the digests that must differ.
    """

    name: str
    plant: Planting
    case: str
    part: str


def store_after_every_query() -> AbstractContextManager[Any]:
    """Let clients store models after training for any purpose, also on parts of their data."""
    settle = store.WholeModels.settle

    def settle_and_store(self: Any, query: TrainQuery, *arguments: Any) -> Any:
        if isinstance(query.work.store, Nothing):
            query = replace(query, work=replace(query.work, store=Lasting()))
        return settle(self, query, *arguments)

    return patch.object(store.WholeModels, "settle", settle_and_store)


def tune_from_before_the_round() -> AbstractContextManager[Any]:
    """Let clients fine-tune from the model that they stored before the round, not in the round."""
    start = store.WholeModels.start

    def start_from_before(self: Any, query: TrainQuery, places: Sequence[int]) -> Any:
        if query.work.start == FromStored(latest=True):
            query = replace(query, work=replace(query.work, start=FromStored()))
        return start(self, query, places)

    return patch.object(store.WholeModels, "start", start_from_before)


def forget_the_scale_of_parts() -> AbstractContextManager[Any]:
    """Let clients send updates from parts of their data without scaling them."""
    split = Splits.split

    def without_scale(self: Splits, place: int, local: LocalTraining) -> Any:
        part, on_part = split(self, place, local)
        return replace(part, longest=1.0), on_part

    return patch.object(Splits, "split", without_scale)


def share_one_optimizer_state() -> AbstractContextManager[Any]:
    """Store the optimizer states of a client's own model and of the shared model under one name."""
    return patch.object(store, "OWN_OPTIMIZER", store.OPTIMIZER)


def forget_limits_when_joining() -> AbstractContextManager[Any]:
    """Drop the record of limited updates when updates are concatenated."""
    concat = Updates.concat

    def without_limits(self: Updates, other: Updates) -> Updates:
        return replace(concat(self, other), limited={})

    return patch.object(Updates, "concat", without_limits)


def continue_from_the_split() -> AbstractContextManager[Any]:
    """Let the root's continued model be the model at which the root was split."""

    def at_split(self: ParameterTree, model: Any) -> ParameterTree:
        root = replace(self.nodes[0], continued=self.nodes[0].params)
        return ParameterTree((root, *self.nodes[1:]))

    return patch.object(ParameterTree, "continued", at_split)


def add_a_value_to_messages() -> AbstractContextManager[Any]:
    """Add a value that no code reads to every query and reply."""
    record = wire.record

    def with_more(values: Mapping[str, Any], vectors: Mapping[str, Any] | None = None) -> Any:
        return record({**values, "unused": 1}, vectors)

    return patch.object(wire, "record", with_more)


def lose_a_column() -> AbstractContextManager[Any]:
    """Leave out a column of the table of rounds that is empty for most methods."""
    add = History.add

    def without_discrepancy(self: History, *arguments: Any, **options: Any) -> dict[str, Any]:
        row = add(self, *arguments, **options)
        del row["discrepancy"]
        return row

    return patch.object(History, "add", without_discrepancy)


PLANTED = (
    PlantedError(
        "training for any purpose is stored",
        store_after_every_query,
        case="variant: rcfl with a personal head",
        part="kept",
    ),
    PlantedError(
        "fine-tuning starts from before the round",
        tune_from_before_the_round,
        case="variant: finetune, with a personal head and lasting momentum",
        part="kept",
    ),
    PlantedError(
        "updates from parts of the data are not scaled",
        forget_the_scale_of_parts,
        case="method: rcfl",
        part="tree",
    ),
    PlantedError(
        "two models share an optimizer state",
        share_one_optimizer_state,
        case="variant: ditto, sampled, with lasting momentum",
        part="kept",
    ),
    PlantedError(
        "joined updates forget what was limited",
        forget_limits_when_joining,
        case="clients: limits and faults",
        part="events",
    ),
    PlantedError(
        "the continued model is that of the split",
        continue_from_the_split,
        case="method: stocfl",
        part="tree",
    ),
    PlantedError(
        "messages have one more value",
        add_a_value_to_messages,
        case="network: fedavg",
        part="messages",
    ),
    PlantedError(
        "the table of rounds lacks a column", lose_a_column, case="method: fedavg", part="metrics"
    ),
)
"""The errors, each with a case that detects it."""
