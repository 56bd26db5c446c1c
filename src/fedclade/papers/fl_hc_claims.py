"""What the text of the FL+HC paper claims of its tables, and whether it was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from fedclade.papers.experiment import Settings
from fedclade.papers.fl_hc_runs import CLUSTERS, Found
from fedclade.papers.outcome import Claim, Summary, as_told

TOLD_AFTER = 20
"""Rounds from which on a run can tell what is claimed of runs of 50."""

CEILING = 0.8
"""What FL can reach where four groups swap two labels each: it learns the majority's, wrong for 2 of 10 digits."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: FL+HC in one way, beside FL.

    Parameters
    ----------
    key
        Names it.
    rounds_before
        n.
    runs, averaged
        FL+HC's and FL's, seed by seed.
    """

    key: str
    rounds_before: int
    runs: Sequence[Found]
    averaged: Sequence[Found]

    def after(self, what: str, *, averaged: bool = False) -> list[float]:
        """Return ``accuracy`` or ``reached`` in the round after the clustering step, seed by seed."""
        number = self.rounds_before + 1
        return [run[what][run["rounds"].index(number)] for run in (self.averaged if averaged else self.runs)]

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


def claims_of_fractions(cells: Sequence[Cell], settings: Settings) -> tuple[Claim, ...]:
    """Return the claims of section III-A on the setting's table."""
    told = settings["rounds"] >= TOLD_AFTER
    if settings["setting"] == "label-swapped":
        return _of_swaps(cells, told)
    better, better_after = sum(cell.gain > 0 for cell in cells), sum(cell.gain_after > 1 for cell in cells)
    if settings["setting"] == "by writer":
        text = "in most of the experiments clustering has a slightly negative effect on the accuracy (section III-A)"
        return (_claim(text, 2 * better < len(cells), f"below FL in {len(cells) - better} of {len(cells)}", told),)
    first = [cell.gain_after for cell in cells if cell.rounds_before == min(settings["rounds_before"])]
    others = [cell.gain_after for cell in cells if cell.rounds_before != min(settings["rounds_before"])]
    return (
        _claim(
            "FL+HC outperforms FL at every client fraction and number of rounds (section III-A)",
            better == better_after == len(cells),
            f"at the end in {better} of {len(cells)}, in the round after clustering in {better_after}",
            told,
        ),
        _claim(
            "the jump after clustering is greatest where n = 1, 1.3x to 1.9x (section III-A)",
            min(first) > 1 and fmean(first) > fmean(others),
            f"n = 1: {min(first):.2f}x to {max(first):.2f}x, later: {min(others):.2f}x to {max(others):.2f}x",
            told,
            as_large=as_told(first, 1.3, 1.9),
        ),
        _more_clients(cells, 1.2, 2.0, told),
    )


def _of_swaps(cells: Sequence[Cell], told: bool) -> tuple[Claim, ...]:
    averaged = [max(run["accuracy"]) for cell in cells for run in cell.averaged]
    last = [value for cell in cells for value in cell.last("accuracy")]
    after = [value for cell in cells for value in cell.after("accuracy")]
    scores = [run["ari"] for cell in cells for run in cell.runs]
    moved = [run["at_the_mean"] for cell in cells for run in cell.runs if run["at_the_mean"] is not None]
    gains = [cell.gain for cell in cells]
    mean = f"; from the mean of the clustering step's updates {_range(moved)}" if moved else ""
    return (
        _claim(
            "FL can only achieve an accuracy of 80 % (section III-A)",
            max(averaged) <= CEILING + 0.02,
            f"best of all rounds {_range(averaged)}",
            told=True,
        ),
        Claim("FL+HC finds the 4 clusters (section III-A)", min(scores) == 1, f"ARI {min(scores):.2f} and more"),
        _claim("FL+HC is significantly better than FL (section III-A)", min(gains) > 0.05, _points(gains), told=True),
        _claim("at the end FL+HC has 98.4 to 99.2 % (Table II)", _within(last, 98.4, 99.2), _range(last), told),
        _claim(
            "directly after clustering it has 98.1 to 98.6 % (Table II)",
            _within(after, 98.1, 98.6),
            _range(after) + mean,
            told,
        ),
    )


def claims_of_linkages(cells: Sequence[Cell], settings: Settings) -> tuple[Claim, ...]:
    """Return the claims of section III-B on the setting's table."""
    told = settings["rounds"] >= TOLD_AFTER
    metrics = {"pathological": ("l1", "l2", "cosine"), "label-swapped": ("cosine", "l2", "l1")}
    gains = [cell.gain for cell in cells]
    if settings["setting"] == "by writer":
        cosine = [cell.gain for cell in cells if cell.key.startswith("cosine")]
        text = "with the cosine distance the accuracy degrades (section III-B)"
        return (_claim(text, max(cosine) < 0, _points(cosine), told),)
    text = {
        "pathological": "every metric and linkage is as good as FL or better (section III-B)",
        "label-swapped": "every metric and linkage outperforms FL (section III-B)",
    }[settings["setting"]]
    floor = 0.05 if settings["setting"] == "label-swapped" else -0.01
    claims = [_claim(text, min(gains) > floor, _points(gains), told), _order(cells, metrics[settings["setting"]], told)]
    if settings["setting"] == "pathological":
        return (*claims, _more_clients(cells, 1.2, 2.1, told))
    averaged = [max(run["accuracy"]) for cell in cells for run in cell.averaged]
    ceiling = "FL can only achieve an accuracy of 80 % (section III-A)"
    last = [value for cell in cells for value in cell.last("accuracy")]
    return (
        *claims,
        _claim(ceiling, max(averaged) <= CEILING + 0.02, f"best of all rounds {_range(averaged)}", told),
        _claim(
            "at the end FL+HC has 98.3 to 99.1 % (Table V)",
            _within(last, 98.3, 99.1),
            _range(last) + _mistaken(cells),
            told,
        ),
    )


def claims_of_iid(found: Mapping[str, Sequence[int]], cell: Cell, settings: Settings) -> tuple[Claim, ...]:
    """Return what section III says of IID clients.

    Parameters
    ----------
    found
        Number of clusters at the threshold, seed by seed, by ``"n 1, l2 ward"``.
    cell
        FL+HC with the fewest rounds before clustering.
    settings
        Of the experiment.
    """
    first, *later = settings["rounds_before"]
    wards = {n: found[f"n {n}, l2 ward"] for n in (first, *later)}
    last = {
        metric: [
            count for name, counts in found.items() if name.startswith(f"n {later[-1]}, {metric} ") for count in counts
        ]
        for metric in ("l1", "l2", "cosine")
    }
    lost = 100 * -cell.gain
    return (
        Claim(
            "IID clients are one cluster if clustered after 3 rounds or more (section III-A)",
            all(set(wards[n]) == {1} for n in later),
            "clusters by n: " + ", ".join(f"{n}: {_counts(counts)}" for n, counts in wards.items()),
        ),
        Claim(
            "... but with n = 1 they are clustered, at a very slightly reduced accuracy (section III-A)",
            min(wards[first]) > 1 and lost > 0,
            f"{_counts(wards[first])} clusters, and {lost:.1f} points less at the end",
            as_large=0 < lost < POINT,
        ),
        Claim(
            "Euclidean and cosine distances fail to split IID clients, the Manhattan distance does not (section III-B)",
            set(last["l2"]) == set(last["cosine"]) == {1} and min(last["l1"]) > 1,
            "; ".join(f"{metric} {_counts(counts)}" for metric, counts in last.items()) + " clusters",
        ),
    )


def _counts(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def claim_of_curve(name: str, cell: Cell) -> Claim:
    """Return the claim on a figure: from the clustering step on, FL+HC is above FL, on the mean of the rounds."""
    after = [fmean(run["accuracy"][cell.rounds_before :]) for run in (*cell.runs, *cell.averaged)]
    text = f"{name}: after the clustering step FL+HC converges in fewer rounds than FL (section III-A)"
    measured = f"mean accuracy of the rounds after it: FL+HC {100 * after[0]:.1f} %, FL {100 * after[1]:.1f} %"
    return Claim(text, after[0] > after[1], measured)


def _order(cells: Sequence[Cell], metrics: tuple[str, ...], told: bool) -> Claim:
    """Return the claim that one metric is better than the next, by the mean over linkages; of what was measured."""
    of_each = {m: [fmean(cell.last("accuracy")) for cell in cells if cell.key.startswith(m)] for m in metrics}
    means = {metric: fmean(found) for metric, found in of_each.items() if found}
    first, *others = metrics
    text = f"the {first} distance performs best" + (
        f", followed by {others[0]} and {others[1]} (section III-B)" if first == "l1" else " (section III-B)"
    )
    measured = ", ".join(f"{metric} {100 * mean:.1f} %" for metric, mean in means.items())
    if missing := [metric for metric in metrics if metric not in means]:
        return Claim(text, None, f"{measured}; not measured: {', '.join(missing)}")
    ordered = pairwise(metrics) if first == "l1" else ((first, other) for other in others)
    return _claim(text, all(means[one] > means[other] for one, other in ordered), measured, told)


def _mistaken(cells: Sequence[Cell]) -> str:
    """Say which cells did not find the true clusters."""
    found = [cell.key for cell in cells if any(run["ari"] < 1 for run in cell.runs)]
    return f"; other clusters than the true ones with {', '.join(found)}" if found else ""


def _more_clients(cells: Sequence[Cell], low: float, high: float, told: bool) -> Claim:
    shares = [fmean(cell.last("reached")) for cell in cells]
    averaged = [fmean(run["reached"][-1] for run in cell.averaged) for cell in cells]
    ratios = [ours / theirs if theirs else float("inf") for ours, theirs in zip(shares, averaged, strict=True)]
    return _claim(
        f"more clients reach the target at the end, {low}x to {high}x (section III)",
        min(ratios) > 1,
        f"{min(ratios):.1f}x to {max(ratios):.1f}x: FL+HC {_range(shares)}, FL {_range(averaged)}",
        told,
        as_large=as_told(ratios, low, high),
    )


def _claim(text: str, holds: bool, measured: str, told: bool, *, as_large: bool | None = None) -> Claim:
    return Claim(text, holds if told else None, measured, as_large)


POINT = 1.0
"""Percentage points by which ours may lie outside of a range of accuracies."""


def _within(shares: Sequence[float], low: float, high: float) -> bool:
    """Tell whether shares lie in a range that is told in %, or within a point of it."""
    return low - POINT <= 100 * min(shares) and 100 * max(shares) <= high + POINT


def _range(shares: Sequence[float]) -> str:
    low, high = (f"{100 * share:.1f}" for share in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _points(gains: Sequence[float]) -> str:
    low, high = (f"{100 * gain:+.1f}".replace("-", "−") for gain in (min(gains), max(gains)))
    return f"{low} points beside FL" if low == high else f"{low} to {high} points beside FL"


def summary_of_cells(cells: Sequence[Cell], table: Mapping[str, Sequence[float | None]], settings: Settings) -> Summary:
    """Say what a table comes to.

    Parameters
    ----------
    cells
        Those that were measured.
    table
        The paper's, in %: second in each row the accuracy at the end.
    settings
        Of the experiment.
    """
    setting = settings["setting"]
    shows = {
        "pathological": "FL+HC ends as accurate as FL, gets there sooner, and up to twice as many clients reach 99 %.",
        "label-swapped": "FL+HC lifts label-swapped clients from FL's 80 % to 98 or 99 %.",
        "by writer": "On FEMNIST clustering gains little or nothing, and at times does great harm.",
    }[setting]
    last = [value for cell in cells for value in cell.last("accuracy")]
    told = [
        cell_told[1] for cell in cells if (cell_told := table.get(cell.key)) is not None and cell_told[1] is not None
    ]
    averaged = sorted({run["accuracy"][-1] for cell in cells for run in cell.averaged})
    found = f"FL+HC ends at {_range(last)}" + (f" (paper {min(told):.1f} to {max(told):.1f} %)" if told else "")
    found += f", FL at {_range(averaged)}; {_points([cell.gain for cell in cells])}."
    because = BECAUSE[setting]
    for cell in cells:
        counts = sorted({run["clusters"] for run in cell.runs})
        if setting == "label-swapped" and "threshold" in settings and counts != [CLUSTERS]:
            because += (
                f" At {cell.key} T = {settings['threshold']} makes {_counts(counts)} clusters in place of {CLUSTERS}: "
                f"the rows 'cut at {CLUSTERS} clusters' show what these come to."
            )
    missed = [cell.key for cell in cells if any(run["ari"] != 1 for run in cell.runs)]
    if setting == "label-swapped" and "cuts" in settings and missed:
        because += (
            f" At the numbers of clusters tried, {settings['cuts']}, {' and '.join(missed)} finds others than the "
            f"{CLUSTERS} groups; the paper shows the best of thresholds that it does not tell."
        )
    return Summary(shows, found, because)


BECAUSE = {
    "pathological": "Which clusters the paper finds is not told, nor how it scales pixels, and they decide what each "
    "model is trained on. Ours have few clients each, of which a round takes the client fraction, at least one "
    "(Algorithm 1, line 19): the model fits who trained last. The paper's accuracy is the same at all fractions, as it "
    "would be if all clients of such a cluster trained.",
    "label-swapped": "Directly after clustering the paper seems to keep the updates of the clustering step, which its "
    "Algorithm 1 throws away: the rows 'from their mean' are to be compared there. A client has 100 test images, and "
    "99 % allow it one mistake: tenths of a point in accuracy move the share of clients at the target by ten points.",
    "by writer": "",
}
"""Why ours differ, by setting."""


def summary_of_iid(found: Mapping[str, Sequence[int]], cell: Cell, settings: Settings) -> Summary:
    """Say what the text on IID clients comes to."""
    wards = ", ".join(f"{_counts(found[f'n {n}, l2 ward'])} (n = {n})" for n in settings["rounds_before"])
    return Summary(
        "IID clients stay one cluster, but for n = 1 and for the Manhattan distance.",
        f"Clusters at T = {settings['threshold']} with Ward's linkage: {wards}; FL ends at "
        f"{_range([run['accuracy'][-1] for run in cell.averaged])}, FL+HC with n = {cell.rounds_before} at "
        f"{_range(cell.last('accuracy'))}.",
        "A cosine distance is at most 2, and Manhattan distances of half a million parameters are hundreds: at one "
        "threshold for all of them neither can come out otherwise.",
    )


def summary_of_curves(series: Mapping[str, Mapping[str, Found]], settings: Settings) -> Summary:
    """Say what the figures come to."""
    ends = "; ".join(
        f"{name} {100 * each['FL+HC']['accuracy'][-1]:.1f} % beside {100 * each['FL']['accuracy'][-1]:.1f} %"
        for name, each in series.items()
    )
    missing = [] if len(series) == len(settings["figures"]) else ["FEMNIST is not at hand."]
    below = any(each["FL+HC"]["accuracy"][-1] < each["FL"]["accuracy"][-1] for each in series.values())
    return Summary(
        "After the clustering step FL+HC is above FL in accuracy and in clients at the target.",
        f"At the end FL+HC beside FL: {ends or 'nothing was measured'}.",
        " ".join([*missing, *([BECAUSE["pathological"]] if below else [])]),
    )
