"""Queries on runs for tables and pictures: leaves, splits, and series over the rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isinf, isnan
from typing import Any, NamedTuple

from fedclade.core import Node, ParameterTree
from fedclade.report.score import Score
from fedclade.runs import Run


@dataclass(frozen=True)
class Series:
    """Values of one cluster in ascending rounds."""

    rounds: tuple[int, ...]
    values: tuple[float, ...]


def heading(run: Run) -> str:
    """Return the title of a run: ``cfl on digits, 20 clients, shift label_swap, seed 0``."""
    return f"{run.summary['algorithm']} on {run.summary['data']}, seed {run.summary['seed']}"


class Personal(NamedTuple):
    """Part of a model that stays on each client: its share, its size and the parameters' names."""

    share: float
    numbers: str
    names: tuple[str, ...]


def personal_part(run: Run) -> Personal | None:
    """Return the part of the model that stays on each client; None if there is none."""
    if run.layout is None or not run.layout.personal:
        return None
    size = run.layout.personal_size
    full_size = run.layout.full.size
    names = tuple(slot.name for slot in run.layout.personal)
    return Personal(size / full_size, f"{size:,} of {full_size:,} numbers", names)


def leaves_in_tree_order(tree: ParameterTree) -> tuple[Node, ...]:
    """Return the leaves depth first, so that clusters that were split late are adjacent."""
    leaves: list[Node] = []
    pending = [tree.nodes[0]]
    while pending:
        node = pending.pop()
        children = tree.children(node.id)
        pending += reversed(children)
        if not children:
            leaves.append(node)
    return tuple(leaves)


def splits_by_round(tree: ParameterTree) -> dict[int, list[int]]:
    """Return the split nodes by round, without a root that starts with many clusters."""
    splits: dict[int, list[int]] = defaultdict(list)
    for node in tree.nodes:
        if node.split_in:
            splits[node.split_in].append(node.id)
    return dict(sorted(splits.items()))


def score_series(run: Run) -> dict[int, Series]:
    """Return the mean score of each cluster's clients over the rounds, by node.

    Clients without a score are left out. The evaluation in the round of a split belongs to the
    split cluster, as its children still have its model, or to the children if they start from
    models of their own.
    """
    score = Score.of_run(run)
    first = 0 if _children_have_own_models(run) else 1
    scores: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in run.client_rows:
        if isnan(value := score.of(row)):
            continue
        node = run.tree.nodes[row["cluster"]]
        while row["round"] < node.born + first and node.parent is not None:
            node = run.tree.nodes[node.parent]
        scores[node.id][row["round"]].append(value)
    return {node: over_rounds(by_round, _mean) for node, by_round in sorted(scores.items())}


def _children_have_own_models(run: Run) -> bool:
    """Return whether the children of a split start from models of their own."""
    settings = run.config.get("algorithm", {})
    return settings.get("children_start") == "own_mean" or settings.get("keep_updates") is True


def joined_series(tree: ParameterTree, found: Mapping[int, Series]) -> dict[int, Series]:
    """Prepend to each series the last point of the nearest ancestor with a series."""
    joined: dict[int, Series] = {}
    for node, series in found.items():
        before = _find_ancestor_series(tree, found, node)
        # Not earlier for clients that are in no leaf yet: their node's series continues.
        if before is not None and before.rounds[-1] < series.rounds[0]:
            rounds = (before.rounds[-1], *series.rounds)
            values = (before.values[-1], *series.values)
            series = Series(rounds, values)
        joined[node] = series
    return joined


def _find_ancestor_series(
    tree: ParameterTree, found: Mapping[int, Series], node: int
) -> Series | None:
    """Return the series of the nearest ancestor that has one."""
    for ancestor in reversed(tree.above(node)[:-1]):
        if ancestor.id in found:
            return found[ancestor.id]
    return None


def criterion_series(run: Run, column: str) -> dict[int, Series]:
    """Return a column of ``clusters.parquet`` over the rounds, by node, without missing values."""
    numbers: dict[int, dict[int, float]] = defaultdict(dict)
    for row in run.cluster_rows:
        if (value := row.get(column)) is not None:
            numbers[row["node"]][row["round"]] = value
    return {
        node: Series(tuple(by_round), tuple(by_round.values()))
        for node, by_round in numbers.items()
    }


def norm_thresholds(run: Run) -> tuple[float | None, float | dict[int, Series] | None]:
    """Return CFL's thresholds ε₂ (eq. 33) and ε₁ (eq. 32).

    Returns
    -------
    eps2
        None if it decides nothing, as it is infinite or applies to something else than the updates
        of a round.
    eps1
        None if it decides nothing, as with fixed rounds of splits. With ``eps1 = "auto"`` it is a
        tenth of the largest mean norm in a cluster's lineage so far, by node.
    """
    settings = run.config.get("algorithm", {})
    # a test, or a criterion of one's own
    if settings.get("criterion", "thresholds") != "thresholds":
        return None, None
    eps2 = settings.get("eps2")
    if eps2 is not None and (isinf(eps2) or not _is_eps2_of_updates(settings)):
        eps2 = None
    eps1 = None if settings.get("split_rounds") else settings.get("eps1")
    if eps1 == "auto":
        return eps2, _compute_auto_eps1(run)
    return eps2, eps1


def _is_eps2_of_updates(settings: Mapping[str, Any]) -> bool:
    """Return whether ε₂ applies to the norms of the updates of a round, which are drawn."""
    if settings.get("eps2_of") == "updates":
        return True
    compares_updates = settings.get("similarity", "updates") == "updates"
    return compares_updates and settings.get("compared_at", "round_start") == "round_start"


def _compute_auto_eps1(run: Run) -> dict[int, Series]:
    """Return a tenth of the largest mean norm in each cluster's lineage so far, by node."""
    means = criterion_series(run, "mean_norm")
    thresholds: dict[int, Series] = {}
    peaks: dict[int | None, float] = {None: 0.0}
    for node in run.tree.nodes:  # parents come before their children
        series = means.get(node.id, Series((), ()))
        highest = tuple(accumulate(series.values, max, initial=peaks[node.parent]))
        peaks[node.id] = highest[-1]
        if series.rounds:
            thresholds[node.id] = Series(series.rounds, tuple(peak / 10 for peak in highest[1:]))
    return thresholds


def values_by_round(found: Iterable[Series]) -> dict[int, list[float]]:
    """Return the values of all clusters in each round, in the order of rounds."""
    values: dict[int, list[float]] = defaultdict(list)
    for series in found:
        for number, value in zip(series.rounds, series.values, strict=True):
            values[number].append(value)
    return dict(sorted(values.items()))


def over_rounds(
    values: Mapping[int, Sequence[float]], reduce: Callable[[Sequence[float]], float]
) -> Series:
    """Reduce the values of each round to one number, such as their mean."""
    return Series(tuple(values), tuple(reduce(at_round) for at_round in values.values()))


def mean_series(found: Iterable[Series]) -> Series:
    """Return the mean over the clusters in each round."""
    return over_rounds(values_by_round(found), _mean)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
