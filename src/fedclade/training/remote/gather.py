"""Queries in parts, one for each actor; and replies to the parts as the reply to the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fedclade.core import (
    OWN,
    DescriptorQuery,
    Evaluation,
    EvaluationQuery,
    Query,
    ShiftQuery,
    Statistics,
    SubspaceQuery,
    Sums,
    UpdateQuery,
    Updates,
)


def narrowed(query: Query[Any], places: Sequence[int]) -> tuple[Query[Any], list[int] | None]:
    """Return a query for the clients at some of its places, without models, and which rows of these it names."""
    ids = tuple(query.ids[place] for place in places)
    if not isinstance(query, UpdateQuery | EvaluationQuery):
        return replace(query, ids=ids), None
    of_client = [query.assignment[place] for place in places]
    anchors = None
    if isinstance(query, UpdateQuery) and query.anchors is not None:
        anchors = [query.anchors[place] for place in places]
    rows = sorted({row for row in (*of_client, *(anchors or ())) if row != OWN}) or [0]
    if query.mixture is not None:  # each client needs all models
        rows = list(range(len(query.models)))
    new = {OWN: OWN, **{row: k for k, row in enumerate(rows)}}
    part = replace(query, ids=ids, assignment=[new[row] for row in of_client], models=query.models[:0])
    if isinstance(part, UpdateQuery):
        held = None if part.data_rounds is None else [part.data_rounds[place] for place in places]
        anchors = None if anchors is None else [new[row] for row in anchors]
        part = replace(part, anchors=anchors, data_rounds=held, sink=None)
    return part, rows


def together(query: Query[Any], replies: Sequence[tuple[Sequence[int], Any]]) -> Any:
    """Return the reply to a query, from those of the clients at some of its places each."""
    if isinstance(query, UpdateQuery):
        return _updates(query, [reply for _, reply in replies])
    if isinstance(query, EvaluationQuery):
        return _evaluation(replies)
    if isinstance(query, SubspaceQuery | ShiftQuery | DescriptorQuery):
        return _in_order(query, [(places, reply) for places, reply in replies])
    return reduce(Statistics.plus, (statistics for _, statistics in replies))


def _in_order(query: Query[Any], parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    first = parts[0][1]
    whole = first.new_empty(len(query.ids), *first.shape[1:])
    for places, rows in parts:
        whole[list(places)] = rows
    return whole


def _evaluation(replies: Sequence[tuple[Sequence[int], Evaluation]]) -> Evaluation:
    places = torch.tensor([place for some, _ in replies for place in some])
    whole = Evaluation.concat([evaluation for _, evaluation in replies])
    if len(whole.ids) < len(places):  # in the order of the parts, as far as they replied
        return whole
    order = places.argsort()
    ids = tuple(whole.ids[k] for k in order.tolist())
    wins = None if whole.wins is None else whole.wins[order]
    of_all = {"scores": whole.scores[order], "losses": whole.losses[order], "examples": whole.examples[order]}
    return replace(whole, ids=ids, wins=wins, **of_all)


def _updates(query: UpdateQuery, parts: Sequence[Updates]) -> Updates:
    """Return the updates of all parts in the order of the query; each of their tensors is copied once."""
    left_out = {client: why for part in parts for client, why in part.left_out.items()}
    limited = {client: what for part in parts for client, what in part.limited.items()}
    some = [part for part in parts if part.ids] or parts[:1]
    there = {client for part in some for client in part.ids}
    ids = tuple(client for client in query.ids if client in there)
    place_of = {client: place for place, client in enumerate(ids)}
    places = [[place_of[client] for client in part.ids] for part in some]

    def of_all(name: str) -> Tensor | None:
        columns: list[Tensor | None] = [getattr(part, name) for part in some]
        first = columns[0]
        if first is None:
            return None
        whole = first.new_empty(len(ids), *first.shape[1:])
        for where, column in zip(places, columns, strict=True):
            assert column is not None
            whole[where] = column
        return whole

    names = ("sizes", "losses", "norms", "deltas", "sketches", "parts", "components")
    columns: dict[str, Any] = {name: of_all(name) for name in names}
    sums = None if some[0].sums is None else _sums(query, ids, some)
    of_all_parts = {"n_parameters": some[0].n_parameters, "left_out": left_out, "limited": limited}
    return Updates(ids=ids, sums=sums, **of_all_parts, **columns)


def _sums(query: UpdateQuery, ids: Sequence[int], parts: Sequence[Updates]) -> Sums:
    """Add the sums of the same model up: a part numbers its own, and a client's is that of the model it was sent."""
    row_of: Mapping[int, int] = dict(zip(query.ids, query.assignment, strict=True))
    assert parts[0].sums is not None
    groups = parts[0].sums.groups.new_zeros(len(query.models), parts[0].sums.groups.shape[1])
    for part in parts:
        assert part.sums is not None
        theirs = {group: row_of[client] for client, group in zip(part.ids, part.sums.group.tolist(), strict=True)}
        for group, row in theirs.items():
            groups[row] += part.sums.groups[group]
    return Sums(groups, torch.tensor([row_of[client] for client in ids], dtype=torch.int64))
