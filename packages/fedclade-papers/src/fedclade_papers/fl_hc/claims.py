"""What the FL+HC paper claims of its tables, and whether it was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from fedclade_papers.cache import Settings
from fedclade_papers.experiment import Paper
from fedclade_papers.fl_hc.runs import CLUSTERS, Found
from fedclade_papers.outcome import Claim, within_printed

FEWEST_ROUNDS = 20
"""Fewer cannot show what is claimed of runs of 50."""

CEILING = 0.8
"""What FL can reach where four groups swap two labels each: it learns the majority's, wrong for 2 of 10 digits."""

POINT = 1.0
"""Percentage points up to which an accuracy is the same, or only very slightly reduced."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: FL+HC in one way, beside FL."""

    key: str
    #: n of Algorithm 1.
    rounds_before: int
    #: FL+HC's and FL's, seed by seed.
    runs: Sequence[Found]
    averaged: Sequence[Found]
    #: The paper's, in %: accuracy directly after the clustering step and at the end, share of clients likewise.
    paper: Sequence[float | None] = (None,) * 4

    def after(self, what: str, *, averaged: bool = False) -> list[float]:
        """Return ``accuracy`` or ``reached`` in the round after the clustering step, seed by seed."""
        number = self.rounds_before + 1
        return [
            run[what][run["rounds"].index(number)]
            for run in (self.averaged if averaged else self.runs)
        ]

    def last(self, what: str) -> list[float]:
        """Return ``accuracy`` or ``reached`` at the end, seed by seed."""
        return [run[what][-1] for run in self.runs]

    @property
    def gain(self) -> float:
        """By how much the accuracy at the end is above FL's."""
        return fmean(self.last("accuracy")) - fmean(run["accuracy"][-1] for run in self.averaged)

    @property
    def gain_after(self) -> float:
        """The same in the round after the clustering step, as a ratio."""
        return fmean(self.after("accuracy")) / fmean(self.after("accuracy", averaged=True))


Checked = tuple[bool | None, str] | tuple[bool, str, bool]
"""What :meth:`Paper.claim` takes: whether a claim holds, what was measured, and whether it is as large."""


def claims_on(paper: Paper, cells: Sequence[Cell], settings: Settings) -> list[Claim]:
    """Return the claims on a table; those that few rounds can show are ``early`` among the paper's numbers."""
    checks = _Checks(cells, paper.numbers)
    claims = {key: paper.claim(key, *getattr(checks, key)()) for key in paper.claims}
    early = claims if settings["rounds"] >= FEWEST_ROUNDS else paper.numbers.get("early", ())
    return [claim if key in early else replace(claim, holds=None) for key, claim in claims.items()]


class _Checks:
    """How the claims on a table are checked: a method for each key in ``experiments.toml``."""

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
        measured = f"n = 1: {min(first):.2f}x to {max(first):.2f}x, later: {min(others):.2f}x to {max(others):.2f}x"
        return min(first) > max(1, *others), measured, within_printed(first, *self.numbers["jump"])

    def same(self) -> Checked:
        furthest = max(abs(100 * gain) for gain in self.gains)
        return furthest <= POINT, points(self.gains)

    def as_printed(self) -> Checked:
        last = [value for cell in self.cells for value in cell.last("accuracy")]
        return _are_printed(last, *self.numbers["as_printed"]), percent(last)

    def more_clients(self) -> Checked:
        shares = [fmean(cell.last("reached")) for cell in self.cells]
        averaged = [fmean(run["reached"][-1] for run in cell.averaged) for cell in self.cells]
        ratios = [
            ours / theirs if theirs else float("inf")
            for ours, theirs in zip(shares, averaged, strict=True)
        ]
        measured = f"{min(ratios):.1f}x to {max(ratios):.1f}x: FL+HC {percent(shares)}, FL {percent(averaged)}"
        return min(ratios) > 1, measured, within_printed(ratios, *self.numbers["more_clients"])

    def negative(self) -> Checked:
        worse = sum(gain <= 0 for gain in self.gains)
        n = len(self.cells)
        return 2 * worse > n, f"below FL in {worse} of {n}"

    def ceiling(self) -> Checked:
        averaged = [max(run["accuracy"]) for cell in self.cells for run in cell.averaged]
        return round(
            100 * max(averaged)
        ) <= 100 * CEILING, f"best of all rounds {percent(averaged)}"

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
        others = [cell.key for cell in self.cells if any(run["ari"] < 1 for run in cell.runs)]
        holds, measured, *_ = self.end()
        return holds, measured + (
            f"; other clusters than the true ones with {', '.join(others)}" if others else ""
        )

    def after(self) -> Checked:
        after = [value for cell in self.cells for value in cell.after("accuracy")]
        moved = [
            run["at_the_mean"]
            for cell in self.cells
            for run in cell.runs
            if run["at_the_mean"] is not None
        ]
        mean = f"; from the mean of the clustering step's updates {percent(moved)}" if moved else ""
        return _are_printed(after, *self.numbers["after"]), percent(after) + mean

    def order(self) -> Checked:
        """Compare metrics by the mean over linkages; of what was measured."""
        metrics = dict.fromkeys(metric for pair in self.numbers["order"] for metric in pair)
        of_each = {
            m: [fmean(cell.last("accuracy")) for cell in self.cells if cell.key.startswith(m)]
            for m in metrics
        }
        means = {metric: fmean(found) for metric, found in of_each.items() if found}
        measured = ", ".join(f"{metric} {100 * mean:.1f} %" for metric, mean in means.items())
        if missing := [metric for metric in metrics if metric not in means]:
            return None, f"{measured}; not measured: {', '.join(missing)}"
        return all(means[one] > means[other] for one, other in self.numbers["order"]), measured


def claims_on_iid(
    paper: Paper, found: Mapping[str, Sequence[int]], cell: Cell, settings: Settings
) -> list[Claim]:
    """Return what section III says of IID clients.

    ``found`` is the number of clusters at the threshold, seed by seed, by ``"n 1, l2 ward"``;
    ``cell`` is FL+HC with the fewest rounds before clustering.
    """
    first, *later = settings["rounds_before"]
    wards = {n: found[f"n {n}, l2 ward"] for n in (first, *later)}
    last = {
        metric: [
            n
            for name, counts in found.items()
            if name.startswith(f"n {later[-1]}, {metric} ")
            for n in counts
        ]
        for metric in ("l1", "l2", "cosine")
    }
    lost = 100 * -cell.gain
    listed = ", ".join(f"{n}: {count(counts)}" for n, counts in wards.items())
    clustered = f"{count(wards[first])} clusters, and {lost:.1f} points less at the end"
    only_l1 = set(last["l2"]) == set(last["cosine"]) == {1} and min(last["l1"]) > 1
    metrics = "; ".join(f"{metric} {count(counts)}" for metric, counts in last.items())
    return [
        paper.claim("one", all(set(wards[n]) == {1} for n in later), f"clusters by n: {listed}"),
        paper.claim("first", min(wards[first]) > 1 and lost > 0, clustered, 0 < lost < POINT),
        paper.claim("metrics", only_l1, f"{metrics} clusters"),
    ]


def claim_on_curve(paper: Paper, cell: Cell) -> Claim:
    """Return the claim on a figure: in any round after the clustering step more clients are at the target than with FL.

    It goes as the paper says on the mean of the rounds, and is as much as the paper says if it
    holds in every round.
    """
    (clustered,), (averaged,) = cell.runs, cell.averaged
    ours, theirs = (run["reached"][cell.rounds_before :] for run in (clustered, averaged))
    more = sum(one > other for one, other in zip(ours, theirs, strict=True))
    measured = (
        f"in {more} of {len(ours)} rounds; on the mean of these rounds FL+HC "
        f"{100 * fmean(ours):.1f} %, FL {100 * fmean(theirs):.1f} %"
    )
    return paper.claim(
        "curve", fmean(ours) > fmean(theirs), measured, more == len(ours), figure=cell.key
    )


def claim_on_speed(paper: Paper, cell: Cell) -> Claim:
    """Return the claim on a figure of pathological clients: FL+HC has sooner the accuracy at which FL ends."""
    (clustered,), (averaged,) = cell.runs, cell.averaged
    target = averaged["accuracy"][-1]
    ours = rounds_to(target, clustered)
    theirs = rounds_to(target, averaged)
    measured = f"FL first has the {100 * target:.1f} % at which it ends in round {theirs}, FL+HC in {ours or 'none'}"
    return paper.claim(
        "sooner",
        ours is not None and theirs is not None and ours < theirs,
        measured,
        figure=cell.key,
    )


def rounds_to(accuracy: float, run: Found) -> int | None:
    """Return the first round in which a run is at least as accurate; None if none is."""
    return next(
        (n for n, value in zip(run["rounds"], run["accuracy"], strict=True) if value >= accuracy),
        None,
    )


def why_differ(paper: Paper, cells: Sequence[Cell], settings: Settings) -> str:
    """Say why a table differs: the paper's reasons, and cells with other clusters than the true ones."""
    because = paper.because
    for cell in cells if "threshold" in settings and "threshold" in paper.texts else ():
        counts = sorted({run["clusters"] for run in cell.runs})
        if counts != [CLUSTERS]:
            named = {"cell": cell.key, "found": count(counts), "threshold": settings["threshold"]}
            because += paper.texts["threshold"].format(clusters=CLUSTERS, **named)
    missed = " and ".join(cell.key for cell in cells if any(run["ari"] != 1 for run in cell.runs))
    if missed and "cuts" in settings and "cuts" in paper.texts:
        because += paper.texts["cuts"].format(cells=missed, clusters=CLUSTERS)
    return because


def _are_printed(shares: Sequence[float], low: float, high: float) -> bool:
    """Return whether shares lie in a range that the paper prints in %."""
    return within_printed((100 * share for share in shares), low, high)


def count(counts: Sequence[int]) -> str:
    """Write a range of numbers."""
    low = min(counts)
    high = max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def percent(shares: Sequence[float]) -> str:
    """Write a range of shares."""
    low, high = (f"{100 * share:.1f}" for share in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def points(gains: Sequence[float]) -> str:
    """Write a range of differences to FL."""
    low, high = (f"{100 * gain:+.1f}".replace("-", "−") for gain in (min(gains), max(gains)))
    return f"{low} points beside FL" if low == high else f"{low} to {high} points beside FL"
