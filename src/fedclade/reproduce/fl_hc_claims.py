"""What the text of the FL+HC paper claims of its tables, and whether it was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from fedclade.reproduce.experiment import Settings
from fedclade.reproduce.fl_hc_runs import Found
from fedclade.reproduce.outcome import Claim

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
            min(first) >= 1.3 and fmean(first) > fmean(others),
            f"n = 1: {min(first):.2f}x to {max(first):.2f}x, later: {min(others):.2f}x to {max(others):.2f}x",
            told,
        ),
        _more_clients(cells, "1.2x to 2.0x", told),
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
        _claim("at the end FL+HC has 98.4 to 99.2 % (Table II)", min(last) >= 0.98, _range(last), told),
        _claim("directly after clustering it has 98.1 to 98.6 % (Table II)", min(after) >= 0.98, _range(after) + mean,
               told),
    )  # fmt: skip


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
        return (*claims, _more_clients(cells, "1.2x to 2.1x", told))
    averaged = [max(run["accuracy"]) for cell in cells for run in cell.averaged]
    ceiling = "FL can only achieve an accuracy of 80 % (section III-A)"
    last = [value for cell in cells for value in cell.last("accuracy")]
    return (
        *claims,
        _claim(ceiling, max(averaged) <= CEILING + 0.02, f"best of all rounds {_range(averaged)}", told),
        _claim(
            "at the end FL+HC has 98.3 to 99.1 % (Table V)", min(last) >= 0.98, _range(last) + _mistaken(cells), told
        ),
    )


def claim_of_curve(name: str, cell: Cell) -> Claim:
    """Return the claim on a figure: from the clustering step on, FL+HC is above FL, on the mean of the rounds."""
    after = [fmean(run["accuracy"][cell.rounds_before :]) for run in (*cell.runs, *cell.averaged)]
    text = f"{name}: after the clustering step FL+HC converges in fewer rounds than FL (section III-A)"
    measured = f"mean accuracy of the rounds after it: FL+HC {100 * after[0]:.1f} %, FL {100 * after[1]:.1f} %"
    return Claim(text, after[0] > after[1], measured)


def _order(cells: Sequence[Cell], metrics: tuple[str, ...], told: bool) -> Claim:
    """Return the claim that one metric is better than the next, by the mean over linkages."""
    means = {m: fmean(fmean(c.last("accuracy")) for c in cells if c.key.startswith(m)) for m in metrics}
    first, *others = metrics
    text = f"the {first} distance performs best" + (
        f", followed by {others[0]} and {others[1]} (section III-B)" if first == "l1" else " (section III-B)"
    )
    ordered = pairwise(metrics) if first == "l1" else ((first, other) for other in others)
    holds = all(means[one] > means[other] for one, other in ordered)
    return _claim(text, holds, ", ".join(f"{metric} {100 * mean:.1f} %" for metric, mean in means.items()), told)


def _mistaken(cells: Sequence[Cell]) -> str:
    """Say which cells did not find the true clusters."""
    found = [cell.key for cell in cells if any(run["ari"] < 1 for run in cell.runs)]
    return f"; other clusters than the true ones with {', '.join(found)}" if found else ""


def _more_clients(cells: Sequence[Cell], ratio: str, told: bool) -> Claim:
    shares = [fmean(cell.last("reached")) for cell in cells]
    averaged = [fmean(run["reached"][-1] for run in cell.averaged) for cell in cells]
    return _claim(
        f"more clients reach the target at the end, {ratio} (section III)",
        all(ours > theirs for ours, theirs in zip(shares, averaged, strict=True)),
        f"FL+HC {_range(shares)}, FL {_range(averaged)}",
        told,
    )


def _claim(text: str, holds: bool, measured: str, told: bool) -> Claim:
    return Claim(text, holds if told else None, measured)


def _range(shares: Sequence[float]) -> str:
    return f"{100 * min(shares):.1f} to {100 * max(shares):.1f} %"


def _points(gains: Sequence[float]) -> str:
    return f"{100 * min(gains):+.1f} to {100 * max(gains):+.1f} points beside FL"
