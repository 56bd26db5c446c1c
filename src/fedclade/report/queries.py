"""What tables and pictures look up in a run: leaves, splits, and numbers of clusters over the rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isinf, isnan
from typing import NamedTuple

from fedclade.core import Node, ParameterTree
from fedclade.report.score import Score
from fedclade.runs import Run


@dataclass(frozen=True)
class Series:
    """A number of one cluster over the rounds, which ascend."""

    rounds: tuple[int, ...]
    values: tuple[float, ...]


def heading(run: Run) -> str:
    """Return what a run is, in one line: ``cfl on digits, 20 clients, shift label_swap, 4 clusters, seed 0``."""
    return f"{run.summary['algorithm']} on {run.summary['data']}, seed {run.summary['seed']}"


class Personal(NamedTuple):
    """What stays with each client: its share of a model, how many numbers that is, and their names."""

    share: float
    numbers: str
    names: tuple[str, ...]


def personal_part(run: Run) -> Personal | None:
    """Return what stays with each client; None if nothing does."""
    if run.layout is None or not run.layout.personal:
        return None
    own, whole = run.layout.personal_size, run.layout.full.size
    return Personal(own / whole, f"{own:,} of {whole:,} numbers", tuple(slot.name for slot in run.layout.personal))


def leaves_in_tree_order(tree: ParameterTree) -> tuple[Node, ...]:
    """Return the leaves depth first, so that clusters that parted late stand side by side."""
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
    """Return the nodes that were split, by round. A tree that starts out with many clusters was not split into them."""
    splits: dict[int, list[int]] = defaultdict(list)
    for node in tree.nodes:
        if node.split_in:
            splits[node.split_in].append(node.id)
    return dict(sorted(splits.items()))


def score_series(run: Run) -> dict[int, Series]:
    """Return the mean score of the clients in each cluster over the rounds, by node; of those that have one.

    The evaluation after a split counts for the cluster that was split, as its children still have its model; it counts
    for the children where they start from models of their own.
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
    """Return whether the clusters of a split start from models of their own, not from that of the cluster split."""
    settings = run.config.get("algorithm", {})
    return settings.get("children_start") == "own_mean" or settings.get("keep_updates") is True


def joined_series(tree: ParameterTree, found: Mapping[int, Series]) -> dict[int, Series]:
    """Return series that each go on from the last point of the nearest node above that has one."""
    joined: dict[int, Series] = {}
    for node, series in found.items():
        above = (ancestor.id for ancestor in reversed(tree.above(node)[:-1]))
        before = next((found[ancestor] for ancestor in above if ancestor in found), None)
        if before is not None and before.rounds[-1] < series.rounds[0]:  # not so for clients that no leaf holds yet
            series = Series((before.rounds[-1], *series.rounds), (before.values[-1], *series.values))
        joined[node] = series
    return joined


def criterion_series(run: Run, column: str) -> dict[int, Series]:
    """Return one column of ``clusters.parquet`` over the rounds, by node, wherever there is a number."""
    numbers: dict[int, dict[int, float]] = defaultdict(dict)
    for row in run.cluster_rows:
        if (value := row.get(column)) is not None:
            numbers[row["node"]][row["round"]] = value
    return {node: Series(tuple(by_round), tuple(by_round.values())) for node, by_round in numbers.items()}


def norm_thresholds(run: Run) -> tuple[float | None, float | dict[int, Series] | None]:
    """Return CFL's ε₂ (eq. 33) and ε₁ (eq. 32), each None where they decide nothing, ε₁ also where splits have dates.

    Where ε₂ is infinite, or is held against something else than the updates of a round, it is None. With
    ``eps1 = "auto"`` ε₁ is a tenth of the largest mean norm in a cluster's lineage so far, by node.
    """
    settings = run.config.get("algorithm", {})
    if settings.get("criterion", "thresholds") != "thresholds":  # a test, or a criterion of one's own
        return None, None
    eps2, eps1 = (settings.get(name) for name in ("eps2", "eps1"))
    by_updates = settings.get("similarity", "updates") == "updates"
    by_updates = by_updates and settings.get("compared_at", "round_start") == "round_start"
    if eps2 is not None and (isinf(eps2) or not (by_updates or settings.get("eps2_of") == "updates")):
        eps2 = None
    eps1 = None if settings.get("split_rounds") else eps1
    if eps1 != "auto":
        return eps2, eps1
    found: dict[int, Series] = {}
    means, peaks = criterion_series(run, "mean_norm"), dict[int | None, float]({None: 0.0})
    for node in run.tree.nodes:  # parents come before their children
        series = means.get(node.id, Series((), ()))
        highest = tuple(accumulate(series.values, max, initial=peaks[node.parent]))
        peaks[node.id] = highest[-1]
        if series.rounds:
            found[node.id] = Series(series.rounds, tuple(peak / 10 for peak in highest[1:]))
    return eps2, found


def values_by_round(found: Iterable[Series]) -> dict[int, list[float]]:
    """Return the values of the clusters that there were in each round, in the order of rounds."""
    values: dict[int, list[float]] = defaultdict(list)
    for series in found:
        for number, value in zip(series.rounds, series.values, strict=True):
            values[number].append(value)
    return dict(sorted(values.items()))


def over_rounds(values: Mapping[int, Sequence[float]], reduce: Callable[[Sequence[float]], float]) -> Series:
    """Return one number for each round, such as the mean over the clusters."""
    return Series(tuple(values), tuple(reduce(each) for each in values.values()))


def mean_series(found: Iterable[Series]) -> Series:
    """Return the mean over the clusters that there were in each round."""
    return over_rounds(values_by_round(found), _mean)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
