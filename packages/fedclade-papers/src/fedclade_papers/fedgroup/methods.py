"""Table III, figures 3 and 4, and equation 10 of FedGroup, compared with FedAvg and FedProx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean

from fedclade_papers.cache import ResultCache, Settings
from fedclade_papers.experiment import Paper
from fedclade_papers.fedgroup.runs import FEWEST_ROUNDS, Found, runs_of
from fedclade_papers.fedgroup.tasks import absent, tasks_at_hand
from fedclade_papers.outcome import Claim, Outcome, Row

METHODS = ("FedAvg", "FedProx", "FedGroup-RCC", "FedGroup-RAC", "FedGroup", "FedGrouProx")

JOINING = ("FedGroup", "FedGroup, sampled, by latest update", "FedGroup, sampled, by position")
"""Variants of the client cold start: when clients join, and the direction of a group."""

SHOWN = ("FedAvg", "FedProx", "FedGroup", "FedGrouProx")
"""Methods in figures 3 and 4."""

ALIKE = 0.2
"""Percentage points by which two figures of Table III may differ and still count as equal."""

Runs = Mapping[str, Mapping[str, Sequence[Found]]]
"""Results by task and method, for each seed."""


def _runs(cache: ResultCache, settings: Settings, methods: Sequence[str]) -> Runs:
    return {
        name: {
            which: runs_of(cache, settings, task, which, seeds=settings["seeds_of"].get(name))
            for which in methods
        }
        for name, task in tasks_at_hand(cache, settings).items()
    }


def _best_rows(
    name: str, runs: Mapping[str, Sequence[Found]], paper: Mapping[str, float | None]
) -> list[Row]:
    """Return the best accuracy over all rounds of every method."""
    return [
        Row.of(
            f"{name} · {which}, best round",
            *(paper[which], [100 * max(run["accuracy"]) for run in found]),
            wanted="at least",
        )
        for which, found in runs.items()
    ]


def _of_table(paper: Paper, name: str) -> dict[str, float | None]:
    """Return the row of Table III by method."""
    return dict(zip(METHODS, paper.numbers.get(name, (None,) * len(METHODS)), strict=True))


def measure_best(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Run all methods on all tasks whose data is available (Table III)."""
    runs = _runs(cache, settings, METHODS)
    rows = list[Row]()
    claims = list[Claim]()
    lines = list[str]()
    last = list[str]()
    for name, of_methods in runs.items():
        table = _of_table(paper, name)
        best_rows = _best_rows(name, of_methods, table)
        best = {which: row.ours for which, row in zip(METHODS, best_rows, strict=True)}
        rows += best_rows
        claims += _claims(paper, name, best, table, tested=settings["rounds"] >= FEWEST_ROUNDS)
        theirs = {
            which: "" if value is None else f" ({value:.1f})" for which, value in table.items()
        }
        lines.append(
            f"{name}: "
            f"{', '.join(f'{_short(which)} {best[which]:.1f}{theirs[which]}' for which in METHODS)}"
        )
        # In practice the best round cannot be chosen, so the mean of the last ten is reported too.
        ten = {
            which: fmean(fmean(run["accuracy"][-10:]) for run in each)
            for which, each in of_methods.items()
        }
        listed = ", ".join(f"{which} {100 * accuracy:.1f}" for which, accuracy in ten.items())
        last.append(f"{name}, mean of the last ten rounds in %: {listed}.")
    gone = ", ".join(name for name in settings["tasks"] if name not in runs)
    because = (f"{gone}: the data is not to be had here. " if gone else "") + paper.because
    remarks = [paper.texts["left_out"], paper.texts["shared_out"], *last, *absent(cache, settings)]
    sentence = f"Best accuracies in %, the paper's in brackets: {'; '.join(lines)}."
    return paper.outcome(rows, claims, {}, sentence, because=because, remarks=remarks)


def _short(which: str) -> str:
    return which.removeprefix("FedGroup-")


def _claims(
    paper: Paper,
    name: str,
    best: Mapping[str, float],
    table: Mapping[str, float | None],
    *,
    tested: bool,
) -> list[Claim]:
    """Return the claims of section IV-B on one task, and the ranking of Table III."""
    averaged, proximal, rcc, rac, ours, both = (best[which] for which in METHODS)
    baseline = max(averaged, proximal)
    synthetic = name.startswith("Synthetic")
    claim = partial(
        paper.claim, task=name, but="and FedGroup here" if synthetic else "but not FedGroup"
    )
    by = f"by {ours - baseline:+.1f} and {both - baseline:+.1f} points; FedGroup − FedAvg {ours - averaged:+.1f}"
    beside = (
        f"RCC {rcc:.1f} %, FedGroup {ours:.1f} %, the better of FedAvg and FedProx {baseline:.1f} %"
    )
    claims = [
        claim("groups", min(ours, both) > baseline, by),
        claim("rcc", baseline < rcc and (rcc > ours) == synthetic if tested else None, beside),
    ]
    # All clients of Synthetic pre-train, so none is cold, and the paper has no figure.
    if not synthetic:
        measured = f"RAC {rac:.1f} %, FedAvg {averaged:.1f} %, FedProx {proximal:.1f} %"
        claims.append(claim("rac", rac < min(averaged, proximal) if tested else None, measured))
    # Methods whose figures in the paper differ by at most a fifth of a point may change places.
    known = {which: value for which, value in table.items() if value is not None}
    swapped = [
        f"; {one} is above {other}"
        for one, other in combinations(sorted(known, key=known.__getitem__), 2)
        if known[other] - known[one] > ALIKE and best[one] > best[other]
    ]
    ranks = " < ".join(
        f"{_short(which)} {best[which]:.1f}" for which in sorted(best, key=best.__getitem__)
    )
    holds = not swapped if tested and known else None
    return [*claims, claim("rank", holds, f"{ranks} %" + "".join(swapped))]


def measure_joining(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Run FedGroup with every reading of section III-E and eq. 10."""
    rows = list[Row]()
    claims = list[Claim]()
    for name, runs in _runs(cache, settings, JOINING).items():
        printed = _of_table(paper, name)["FedGroup"]
        best = _best_rows(name, runs, dict.fromkeys(JOINING, printed))
        rows += best
        ways = ("all at the start", *(way.removeprefix("FedGroup, ") for way in JOINING[1:]))
        measured = ", ".join(
            f"{way}: {row.ours:.1f} %" for way, row in zip(ways, best, strict=True)
        )
        holds = None if printed is None else best[1].ours > printed - 1
        claims.append(paper.claim("join", holds, measured, task=name))
    printed = " (Table III: 95.7 %)." if rows and rows[0].paper else "."
    sentence = "; ".join(claim.measured for claim in claims) + printed
    return paper.outcome(rows, claims, {}, sentence, remarks=[paper.texts["shared_out"]])


def measure_rounds(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Return the runs of Table III for every round.

    They include the discrepancy of one global model, and the accuracy of each group.
    """
    runs = _runs(cache, settings, METHODS)
    series = {name: {which: found[which][0] for which in SHOWN} for name, found in runs.items()}
    claims: list[Claim] = []
    for name, found in series.items():
        averaged, proximal = (fmean(found[which]["discrepancy"]) for which in ("FedAvg", "FedProx"))
        measured = f"mean discrepancy: FedAvg {averaged:.2f}, FedProx {proximal:.2f}"
        claims.append(paper.claim("stable", proximal < averaged, measured, task=name))
    texts = (paper.texts["left_out"], paper.texts["shared_out"])
    rows = [
        Row.of(
            f"{name} · {which}, mean discrepancy",
            None,
            [fmean(run["discrepancy"]) for run in found[which]],
            "",
        )
        for name, found in runs.items()
        for which in SHOWN
    ]
    calmer = sum(claim.holds is True for claim in claims)
    sentence = f"It lowers the mean discrepancy in {calmer} of {len(claims)} tasks."
    because = None if len(runs) < len(settings["tasks"]) else ""
    remarks = [*texts, "The first seed is drawn.", *absent(cache, settings)]
    return paper.outcome(rows, claims, series, sentence, because=because, remarks=remarks)
