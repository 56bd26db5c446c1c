"""Checks whether our measurements confirm the FL+HC paper's claims on its tables and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from fedclade_papers.cache import Settings
from fedclade_papers.experiment import Paper
from fedclade_papers.fl_hc.runs import CLUSTERS, Found
from fedclade_papers.outcome import Claim, within_printed

FEWEST_ROUNDS = 20
"""Smallest number of rounds that can show claims on runs of 50 rounds."""

CEILING = 0.8
"""Highest accuracy that FL can have if four groups of clients swap two labels each.

FL learns the labels of the majority of clients, which are wrong for 2 of a client's 10 digits.
"""

ONE_FROM = 3
"""Rounds before clustering from which on IID clients are one cluster (section III-A)."""

POINT = 1.0
"""Difference in percentage points up to which accuracies count as equal or slightly reduced."""

SLIGHT = 5.0
"""Difference in percentage points up to which an effect counts as slight."""


@dataclass(frozen=True)
class Cell:
    """Results of one cell of a table: runs of FL+HC, and runs of FL for comparison."""

    key: str
    #: n of Algorithm 1.
    rounds_before: int
    #: Runs of FL+HC, and in ``averaged`` of FL, for each seed.
    runs: Sequence[Found]
    averaged: Sequence[Found]
    #: The paper's figures in %: accuracy directly after the clustering step and at the end, and the
    #: share of clients at the target at both times.
    paper: Sequence[float | None] = (None,) * 4

    def after(self, what: str, *, averaged: bool = False) -> list[float]:
        """Return a result in the first round after the clustering step, for each seed.

        ``what`` is ``accuracy``, or ``reached`` for the share of clients at the target. With
        ``averaged`` the result of FL is returned, otherwise of FL+HC.
        """
        number = self.rounds_before + 1
        if averaged:
            runs = self.averaged
        else:
            runs = self.runs
        return [run[what][run["rounds"].index(number)] for run in runs]

    def last(self, what: str) -> list[float]:
        """Return a result of FL+HC in the last round, for each seed.

        ``what`` is ``accuracy``, or ``reached`` for the share of clients at the target.
        """
        return [run[what][-1] for run in self.runs]

    @property
    def gain(self) -> float:
        """Mean accuracy of FL+HC minus mean accuracy of FL in the last round."""
        return fmean(self.last("accuracy")) - fmean(run["accuracy"][-1] for run in self.averaged)

    @property
    def has_true_clusters(self) -> bool:
        """Whether FL+HC found exactly the true clusters with every seed."""
        return all(run["ari"] == 1 for run in self.runs)

    @property
    def averaged_reached(self) -> float:
        """Share of clients that have the target accuracy with FL in the last round."""
        return fmean(run["reached"][-1] for run in self.averaged)

    @property
    def gain_after(self) -> float:
        """Ratio of the accuracies of FL+HC and FL in the first round after the clustering step."""
        return fmean(self.after("accuracy")) / fmean(self.after("accuracy", averaged=True))


Checked = tuple[bool | None, str] | tuple[bool, str, bool]
"""Result of a check: whether the claim holds, the measurement, and whether the size agrees.

The last entry is left out if the claim states no size.
"""


def claims_on(paper: Paper, cells: Sequence[Cell], settings: Settings) -> list[Claim]:
    """Check the paper's claims on a table, and return the claims with their results.

    If the runs have fewer than :data:`FEWEST_ROUNDS` rounds, only the claims listed as ``early`` in
    ``experiments.toml`` are tested.
    """
    checks = _Checks(cells, paper.numbers)
    claims = {key: paper.claim(key, *getattr(checks, key)()) for key in paper.claims}
    if settings["rounds"] >= FEWEST_ROUNDS:
        early = claims
    else:
        early = paper.numbers.get("early", ())
    return [claim if key in early else replace(claim, holds=None) for key, claim in claims.items()]


class _Checks:
    """Checks of the claims on a table: one method for each claim in ``experiments.toml``."""

    def __init__(self, cells: Sequence[Cell], numbers: Mapping[str, Any]) -> None:
        self.cells = cells
        self.numbers = numbers
        self.gains = [cell.gain for cell in cells]

    def outperforms(self) -> Checked:
        better = sum(gain > 0 for gain in self.gains)
        n = len(self.cells)
        better_after = sum(cell.gain_after > 1 for cell in self.cells)
        measured = f"at the end in {better} of {n}, in the round after clustering in {better_after}"
        return better == better_after == n, measured

    def jump(self) -> Checked:
        least = min(cell.rounds_before for cell in self.cells)
        first = [cell.gain_after for cell in self.cells if cell.rounds_before == least]
        others = [cell.gain_after for cell in self.cells if cell.rounds_before != least]
        measured = (
            f"n = 1: {min(first):.2f}x to {max(first):.2f}x, "
            f"later: {min(others):.2f}x to {max(others):.2f}x"
        )
        return min(first) > max(1, *others), measured, within_printed(first, *self.numbers["jump"])

    def same(self) -> Checked:
        furthest = max(abs(100 * gain) for gain in self.gains)
        return furthest <= POINT, points(self.gains)

    def as_printed(self) -> Checked:
        last = [value for cell in self.cells for value in cell.last("accuracy")]
        return _are_printed(last, *self.numbers["as_printed"]), percent(last)

    def more_clients(self) -> Checked:
        shares = [fmean(cell.last("reached")) for cell in self.cells]
        averaged = [cell.averaged_reached for cell in self.cells]
        ratios = [_divide(ours, fl) for ours, fl in zip(shares, averaged, strict=True)]
        measured = (
            f"{min(ratios):.1f}x to {max(ratios):.1f}x: FL+HC {percent(shares)}, "
            f"FL {percent(averaged)}"
        )
        return min(ratios) > 1, measured, within_printed(ratios, *self.numbers["more_clients"])

    def negative(self) -> Checked:
        worse = sum(gain < 0 for gain in self.gains)
        slightly = sum(-SLIGHT <= 100 * gain < 0 for gain in self.gains)
        n = len(self.cells)
        measured = f"below FL in {worse} of {n}, by at most five points in {slightly}"
        return 2 * worse > n, measured, 2 * slightly > n

    def ceiling(self) -> Checked:
        averaged = [max(run["accuracy"]) for cell in self.cells for run in cell.averaged]
        is_below = round(100 * max(averaged)) <= 100 * CEILING
        return is_below, f"best of all rounds {percent(averaged)}"

    def finds(self) -> Checked:
        least = min(run["ari"] for cell in self.cells for run in cell.runs)
        return least == 1, f"ARI {least:.2f} and more"

    def better(self) -> Checked:
        return min(self.gains) > self.numbers["better"], points(self.gains)

    def degrades(self) -> Checked:
        cosine = [cell.gain for cell in self.cells if cell.key.startswith("cosine")]
        return max(cosine) < 0, points(cosine)

    def end(self) -> Checked:
        last = [value for cell in self.cells for value in cell.last("accuracy")]
        return _are_printed(last, *self.numbers["end"]), percent(last)

    def end_of_cuts(self) -> Checked:
        others = [cell.key for cell in self.cells if not cell.has_true_clusters]
        holds, measured, *_ = self.end()
        if others:
            measured += f"; other clusters than the true ones with {', '.join(others)}"
        return holds, measured

    def after(self) -> Checked:
        after = [value for cell in self.cells for value in cell.after("accuracy")]
        moved = [
            run["at_the_mean"]
            for cell in self.cells
            for run in cell.runs
            if run["at_the_mean"] is not None
        ]
        mean = ""
        if moved:
            mean = f"; from the mean of the clustering step's updates {percent(moved)}"
        return _are_printed(after, *self.numbers["after"]), percent(after) + mean

    def order(self) -> Checked:
        """Check the order of the distance metrics by their mean accuracy over all linkages.

        The result is None if a metric was not measured.
        """
        metrics = dict.fromkeys(metric for pair in self.numbers["order"] for metric in pair)
        means: dict[str, float] = {}
        for metric in metrics:
            cells = [cell for cell in self.cells if cell.key.startswith(metric)]
            if cells:
                means[metric] = fmean(fmean(cell.last("accuracy")) for cell in cells)
        measured = ", ".join(f"{metric} {100 * mean:.1f} %" for metric, mean in means.items())
        if missing := [metric for metric in metrics if metric not in means]:
            return None, f"{measured}; not measured: {', '.join(missing)}"
        return all(means[one] > means[other] for one, other in self.numbers["order"]), measured


def claims_on_iid(
    paper: Paper, found: Mapping[str, Sequence[int]], cell: Cell, settings: Settings
) -> list[Claim]:
    """Check the paper's claims on IID clients (section III), and return them with their results.

    Parameters
    ----------
    paper, settings
        Statements of the paper, and settings of the experiment.
    found
        Number of clusters at the threshold for each seed, by names such as ``"n 1, l2 ward"``:
        rounds before clustering, distance metric and linkage.
    cell
        Results of FL+HC with the fewest rounds before clustering.
    """
    first, *later = settings["rounds_before"]
    wards = {n: found[f"n {n}, l2 ward"] for n in (first, *later)}
    last: dict[str, list[int]] = {metric: [] for metric in ("l1", "l2", "cosine")}
    for name, counts in found.items():
        for metric in last:
            if name.startswith(f"n {later[-1]}, {metric} "):
                last[metric] += counts
    lost = 100 * -cell.gain
    listed = ", ".join(f"{n}: {count(counts)}" for n, counts in wards.items())
    clustered = f"{count(wards[first])} clusters, and {lost:.1f} points less at the end"
    only_l1 = set(last["l2"]) == set(last["cosine"]) == {1} and min(last["l1"]) > 1
    metrics = "; ".join(f"{metric} {count(counts)}" for metric, counts in last.items())
    return [
        paper.claim(
            "one",
            all(set(wards[n]) == {1} for n in later),
            f"clusters by n: {listed}",
            as_large=min(later) <= ONE_FROM,
        ),
        paper.claim("first", min(wards[first]) > 1 and lost > 0, clustered, 0 < lost < POINT),
        paper.claim("metrics", only_l1, f"{metrics} clusters"),
    ]


def claim_on_curve(paper: Paper, cell: Cell) -> Claim:
    """Check the claim that more clients have the target accuracy with FL+HC than with FL.

    The claim is about all rounds after the clustering step. The claim holds if it is true for the
    mean over these rounds, and has the size of the paper if it is true in every one of them.
    """
    (clustered,) = cell.runs
    (averaged,) = cell.averaged
    ours = clustered["reached"][cell.rounds_before :]
    theirs = averaged["reached"][cell.rounds_before :]
    more = sum(share > of_fl for share, of_fl in zip(ours, theirs, strict=True))
    measured = (
        f"in {more} of {len(ours)} rounds; on the mean of these rounds FL+HC "
        f"{100 * fmean(ours):.1f} %, FL {100 * fmean(theirs):.1f} %"
    )
    return paper.claim(
        "curve", fmean(ours) > fmean(theirs), measured, more == len(ours), figure=cell.key
    )


def claim_on_speed(paper: Paper, cell: Cell) -> Claim:
    """Check the claim that FL+HC reaches FL's final accuracy in fewer rounds than FL.

    The paper makes this claim for pathological clients, which have few labels each.
    """
    (clustered,) = cell.runs
    (averaged,) = cell.averaged
    target = averaged["accuracy"][-1]
    ours = rounds_to(target, clustered)
    theirs = rounds_to(target, averaged)
    measured = (
        f"FL first has the {100 * target:.1f} % at which it ends in round {theirs}, "
        f"FL+HC in {ours or 'none'}"
    )
    return paper.claim(
        "sooner",
        ours is not None and theirs is not None and ours < theirs,
        measured,
        figure=cell.key,
    )


def rounds_to(accuracy: float, run: Found) -> int | None:
    """Return the first round in which a run has at least an accuracy; None if no round has."""
    for number, value in zip(run["rounds"], run["accuracy"], strict=True):
        if value >= accuracy:
            return number
    return None


def why_differ(paper: Paper, cells: Sequence[Cell], settings: Settings) -> str:
    """Write why a table differs from the paper: known reasons, and cells with wrong clusters."""
    because = paper.because
    if "threshold" in settings and "threshold" in paper.texts:
        for cell in cells:
            counts = sorted({run["clusters"] for run in cell.runs})
            if counts != [CLUSTERS]:
                because += paper.texts["threshold"].format(
                    cell=cell.key,
                    clusters=CLUSTERS,
                    found=count(counts),
                    threshold=settings["threshold"],
                )
    if "cuts" in settings and "cuts" in paper.texts:
        missed = " and ".join(cell.key for cell in cells if not cell.has_true_clusters)
        if missed:
            because += paper.texts["cuts"].format(cells=missed, clusters=CLUSTERS)
    return because


def _divide(share: float, of_fl: float) -> float:
    """Return the ratio of two shares; infinite if the second share is 0."""
    if of_fl == 0:
        return math.inf
    return share / of_fl


def _are_printed(shares: Sequence[float], low: float, high: float) -> bool:
    """Return whether all shares are in a range that the paper prints in percent."""
    return within_printed((100 * share for share in shares), low, high)


def count(counts: Sequence[int]) -> str:
    """Format the range of some whole numbers, such as "3 to 5"."""
    low = min(counts)
    high = max(counts)
    if low == high:
        return f"{low}"
    return f"{low} to {high}"


def percent(shares: Sequence[float]) -> str:
    """Format the range of some shares in percent, such as "90.1 to 92.3 %"."""
    low, high = (f"{100 * share:.1f}" for share in (min(shares), max(shares)))
    if low == high:
        return f"{low} %"
    return f"{low} to {high} %"


def points(gains: Sequence[float]) -> str:
    """Format the range of some differences from FL's accuracy, in percentage points."""
    low, high = (f"{100 * gain:+.1f}".replace("-", "−") for gain in (min(gains), max(gains)))
    if low == high:
        return f"{low} points beside FL"
    return f"{low} to {high} points beside FL"
