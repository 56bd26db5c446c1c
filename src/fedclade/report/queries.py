"""Queries on the records of runs, for tables and pictures.

They read the leaves and splits of a parameter tree, and series: values of a cluster over the
rounds.
"""

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
    """Values of one cluster over the rounds, in ascending order of rounds."""

    rounds: tuple[int, ...]
    values: tuple[float, ...]


def heading(run: Run) -> str:
    """Return the title of a run: ``cfl on digits, 20 clients, shift label_swap, seed 0``."""
    return f"{run.summary['algorithm']} on {run.summary['data']}, seed {run.summary['seed']}"


def waits_for_nodes(run: Run) -> bool:
    """Return whether a run had to wait for the nodes of its clients before round 1.

    The seconds in its summary are those of the rounds, without this start, which can be longer.
    """
    return "network" in run.config or "client_app" in run.config


class Personal(NamedTuple):
    """Personal part of a model, which stays on each client.

    Its fields are the share of the model's parameters, a text with their number, and their names.
    """

    share: float
    numbers: str
    names: tuple[str, ...]


def personal_part(run: Run) -> Personal | None:
    """Return the part of a run's model that stays on each client; None if there is no such part."""
    if run.layout is None or not run.layout.personal:
        return None
    size = run.layout.personal_size
    full_size = run.layout.full.size
    names = tuple(slot.name for slot in run.layout.personal)
    return Personal(size / full_size, f"{size:,} of {full_size:,} numbers", names)


def describe_stable_groups(clusters: Mapping[str, Any]) -> str | None:
    """Return a sentence on the stable groups among a run's clusters; None if they are unknown.

    Parameters
    ----------
    clusters
        Section ``clusters`` of the run's summary.
    """
    stability = clusters.get("stability")
    if stability is None:
        return None
    groups = clusters["stable_sizes"]
    if not groups:
        return (
            f"No stable groups (stability {stability:.2f}): clients differ gradually, or too "
            "little to tell; the clusters may differ in a run with another seed."
        )
    sentence = f"Stable groups: {len(groups)} (stability {stability:.2f})"
    if len(groups) < clusters["found"]:
        return f"{sentence}; each has the clients of one or more clusters."
    return f"{sentence}."


def leaves_in_tree_order(tree: ParameterTree) -> tuple[Node, ...]:
    """Return the leaves of a parameter tree in depth-first order.

    In this order, clusters that were separated by a late split are adjacent.
    """
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
    """Return the ids of the nodes that were split in each round.

    A root that was split in round 0, because a run starts with several clusters, is left out.
    """
    splits: dict[int, list[int]] = defaultdict(list)
    for node in tree.nodes:
        if node.split_in:
            splits[node.split_in].append(node.id)
    return dict(sorted(splits.items()))


def score_series(run: Run) -> dict[int, Series]:
    """Return the mean score of each cluster's clients over the rounds, by node id.

    Clients without a score are left out. In the round of a split, the evaluation belongs to the
    split cluster, as its children still have its model; if the children start from other models,
    the evaluation belongs to the children.
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
    return {node: over_rounds(by_round, _average) for node, by_round in sorted(scores.items())}


def _children_have_own_models(run: Run) -> bool:
    """Return whether a run's config lets the children of a split start with models of their own."""
    settings = run.config.get("algorithm", {})
    return settings.get("children_start") == "own_mean" or settings.get("keep_updates") is True


def joined_series(tree: ParameterTree, found: Mapping[int, Series]) -> dict[int, Series]:
    """Connect the series of each cluster to the series of its nearest ancestor that has one.

    The last point of the ancestor becomes the first point of the cluster, so that lines of a plot
    have no gap at a split.

    Parameters
    ----------
    tree
        Parameter tree of the run.
    found
        Series by node id.
    """
    joined: dict[int, Series] = {}
    for node, series in found.items():
        before = _find_ancestor_series(tree, found, node)
        # An ancestor's series can continue after the split, with clients that are in no leaf yet.
        # Its last point is then not before the first point of this series, and is not added.
        if before is not None and before.rounds[-1] < series.rounds[0]:
            rounds = (before.rounds[-1], *series.rounds)
            values = (before.values[-1], *series.values)
            series = Series(rounds, values)
        joined[node] = series
    return joined


def _find_ancestor_series(
    tree: ParameterTree, found: Mapping[int, Series], node: int
) -> Series | None:
    """Return the series of a node's nearest ancestor that has a series; None if there is none."""
    for ancestor in reversed(tree.above(node)[:-1]):
        if ancestor.id in found:
            return found[ancestor.id]
    return None


def criterion_series(run: Run, column: str) -> dict[int, Series]:
    """Return a column of ``clusters.parquet`` as series over the rounds, by node id.

    Missing values are left out.
    """
    numbers: dict[int, dict[int, float]] = defaultdict(dict)
    for row in run.cluster_rows:
        if (value := row.get(column)) is not None:
            numbers[row["node"]][row["round"]] = value
    return {
        node: Series(tuple(by_round), tuple(by_round.values()))
        for node, by_round in numbers.items()
    }


def norm_thresholds(run: Run) -> tuple[float | None, float | dict[int, Series] | None]:
    """Return CFL's thresholds ε₂ for the largest norm (eq. 33) and ε₁ for the mean norm (eq. 32).

    Returns
    -------
    eps2
        Threshold ε₂. None if it decides no split of this run: it is infinite, or applies to
        other vectors than the updates of a round.
    eps1
        Threshold ε₁. None if it decides no split of this run, as with fixed rounds of splits.
        With ``eps1 = "auto"``, a series for each node id: a tenth of the largest mean norm so
        far in the cluster and its ancestors.
    """
    settings = run.config.get("algorithm", {})
    # Splits are decided by a test or a user-defined criterion, and not by thresholds.
    if settings.get("criterion", "thresholds") != "thresholds":
        return None, None
    eps2 = settings.get("eps2")
    if eps2 is not None and (isinf(eps2) or not _is_eps2_of_updates(settings)):
        eps2 = None
    if settings.get("split_rounds"):
        eps1 = None
    else:
        eps1 = settings.get("eps1")
    if eps1 == "auto":
        return eps2, _compute_auto_eps1(run)
    return eps2, eps1


def _is_eps2_of_updates(settings: Mapping[str, Any]) -> bool:
    """Return whether CFL's threshold ε₂ applies to the norms of the updates that a round computes.

    These are the norms that the report draws, so that ε₂ can be drawn with them.
    """
    if settings.get("eps2_of") == "updates":
        return True
    compares_updates = settings.get("similarity", "updates") == "updates"
    return compares_updates and settings.get("compared_at", "round_start") == "round_start"


def _compute_auto_eps1(run: Run) -> dict[int, Series]:
    """Return the threshold ε₁ for ``eps1 = "auto"`` over the rounds, by node id.

    It is a tenth of the largest mean norm so far in the cluster and its ancestors.
    """
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
    """Return the values of all series in each round, in ascending order of rounds."""
    values: dict[int, list[float]] = defaultdict(list)
    for series in found:
        for number, value in zip(series.rounds, series.values, strict=True):
            values[number].append(value)
    return dict(sorted(values.items()))


def over_rounds(
    values: Mapping[int, Sequence[float]], reduce: Callable[[Sequence[float]], float]
) -> Series:
    """Return a series with one number for each round, such as the mean of several values.

    Parameters
    ----------
    values
        Values of each round.
    reduce
        Computes the number from the values of a round.
    """
    return Series(tuple(values), tuple(reduce(at_round) for at_round in values.values()))


def mean_series(found: Iterable[Series]) -> Series:
    """Return the mean of several series in each round."""
    return over_rounds(values_by_round(found), _average)


def _average(values: Sequence[float]) -> float:
    """Return the mean of at least one number."""
    return sum(values) / len(values)
