"""Table III, figures 3 and 4, and equation 10 of the FedGroup paper: FedGroup and other methods."""

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
"""Variants of FedGroup that differ in the cold start of clients.

In the first variant all clients join a group at the start; in the other two each client joins in
the first round in which it is sampled, and a group's direction is computed in different ways.
"""

SHOWN = ("FedAvg", "FedProx", "FedGroup", "FedGrouProx")
"""Names of the methods that figures 3 and 4 show."""

ALIKE = 0.2
"""Percentage points by which two accuracies in Table III may differ and still count as equal."""

Runs = Mapping[str, Mapping[str, Sequence[Found]]]
"""Results of runs, by task and method, with one entry for each seed."""


def _run_methods(cache: ResultCache, settings: Settings, methods: Sequence[str]) -> Runs:
    runs: dict[str, dict[str, list[Found]]] = {}
    for name, task in tasks_at_hand(cache, settings).items():
        seeds = settings["seeds_of"].get(name)
        runs[name] = {
            method: runs_of(cache, settings, task, method, seeds=seeds) for method in methods
        }
    return runs


def _make_best_rows(
    name: str, runs: Mapping[str, Sequence[Found]], paper: Mapping[str, float | None]
) -> list[Row]:
    """Return a row for each method of a task: our best accuracy and the paper's."""
    rows = list[Row]()
    for method, found in runs.items():
        best = [100 * max(run["accuracy"]) for run in found]
        rows.append(
            Row.of(f"{name} · {method}, best round", paper[method], best, wanted="at least")
        )
    return rows


def _read_table(paper: Paper, name: str) -> dict[str, float | None]:
    """Return the paper's accuracies of a task in Table III by method; None if not printed."""
    return dict(zip(METHODS, paper.numbers.get(name, (None,) * len(METHODS)), strict=True))


def measure_best(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure Table III: all methods on all tasks whose data is available."""
    runs = _run_methods(cache, settings, METHODS)
    rows = list[Row]()
    claims = list[Claim]()
    lines = list[str]()
    last = list[str]()
    for name, of_methods in runs.items():
        table = _read_table(paper, name)
        best_rows = _make_best_rows(name, of_methods, table)
        best = {which: row.ours for which, row in zip(METHODS, best_rows, strict=True)}
        rows += best_rows
        claims += _check_claims(
            paper, name, best, table, tested=settings["rounds"] >= FEWEST_ROUNDS
        )
        texts = [_write_best(method, best[method], table[method]) for method in METHODS]
        lines.append(f"{name}: {', '.join(texts)}")
        # In practice the best round cannot be chosen, so the mean of the last ten is reported too.
        listed = ", ".join(
            f"{method} {100 * _average_last_ten(found):.1f}" for method, found in of_methods.items()
        )
        last.append(f"{name}, mean of the last ten rounds in %: {listed}.")
    gone = ", ".join(name for name in settings["tasks"] if name not in runs)
    because = paper.because
    if gone:
        because = f"{gone}: the data is not to be had here. {because}"
    remarks = [paper.texts["left_out"], paper.texts["shared_out"], *last, *absent(cache, settings)]
    sentence = f"Best accuracies in %, the paper's in brackets: {'; '.join(lines)}."
    return paper.outcome(rows, claims, {}, sentence, because=because, remarks=remarks)


def _write_best(method: str, best: float, printed: float | None) -> str:
    """Write a method's best accuracy, and in brackets the paper's accuracy if it is printed."""
    text = f"{_shorten_name(method)} {best:.1f}"
    if printed is not None:
        text += f" ({printed:.1f})"
    return text


def _average_last_ten(runs: Sequence[Found]) -> float:
    """Return the mean accuracy of some runs over their last ten rounds."""
    return fmean(fmean(run["accuracy"][-10:]) for run in runs)


def _shorten_name(method: str) -> str:
    return method.removeprefix("FedGroup-")


def _check_claims(
    paper: Paper,
    name: str,
    best: Mapping[str, float],
    table: Mapping[str, float | None],
    *,
    tested: bool,
) -> list[Claim]:
    """Return the paper's claims on a task (section IV-B), and on the order in Table III.

    Parameters
    ----------
    paper, name
        The paper's statements, and the name of the task.
    best, table
        Our and the paper's best accuracy in percent, by method.
    tested
        Whether the runs have enough rounds to test all claims.
    """
    averaged, proximal, rcc, rac, ours, both = (best[which] for which in METHODS)
    baseline = max(averaged, proximal)
    synthetic = name.startswith("Synthetic")
    but = "and FedGroup here" if synthetic else "but not FedGroup"
    claim = partial(paper.claim, task=name, but=but)
    gains = (
        f"by {ours - baseline:+.1f} and {both - baseline:+.1f} points; "
        f"FedGroup − FedAvg {ours - averaged:+.1f}"
    )
    of_rcc = (
        f"RCC {rcc:.1f} %, FedGroup {ours:.1f} %, the better of FedAvg and FedProx {baseline:.1f} %"
    )
    rcc_holds = None
    rac_holds = None
    if tested:
        rcc_holds = baseline < rcc and (rcc > ours) == synthetic
        rac_holds = rac < min(averaged, proximal)
    claims = [claim("groups", min(ours, both) > baseline, gains), claim("rcc", rcc_holds, of_rcc)]
    # All clients of Synthetic pre-train, so none is cold, and the paper has no figure.
    if not synthetic:
        measured = f"RAC {rac:.1f} %, FedAvg {averaged:.1f} %, FedProx {proximal:.1f} %"
        claims.append(claim("rac", rac_holds, measured))
    # Methods whose figures in the paper differ by at most a fifth of a point may change places.
    known = {which: value for which, value in table.items() if value is not None}
    swapped = [
        f"; {worse} is above {better}"
        for worse, better in combinations(sorted(known, key=known.__getitem__), 2)
        if known[better] - known[worse] > ALIKE and best[worse] > best[better]
    ]
    ranks = " < ".join(
        f"{_shorten_name(which)} {best[which]:.1f}" for which in sorted(best, key=best.__getitem__)
    )
    if tested and known:
        holds = not swapped
    else:
        holds = None
    return [*claims, claim("rank", holds, f"{ranks} %" + "".join(swapped))]


def measure_joining(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Run FedGroup with every reading of section III-E and eq. 10."""
    rows = list[Row]()
    claims = list[Claim]()
    for name, runs in _run_methods(cache, settings, JOINING).items():
        printed = _read_table(paper, name)["FedGroup"]
        best = _make_best_rows(name, runs, dict.fromkeys(JOINING, printed))
        rows += best
        ways = ("all at the start", *(way.removeprefix("FedGroup, ") for way in JOINING[1:]))
        measured = ", ".join(
            f"{way}: {row.ours:.1f} %" for way, row in zip(ways, best, strict=True)
        )
        if printed is None:
            holds = None
        else:
            holds = best[1].ours > printed - 1
        claims.append(paper.claim("join", holds, measured, task=name))
    printed = " (Table III: 95.7 %)." if rows and rows[0].paper else "."
    sentence = "; ".join(claim.measured for claim in claims) + printed
    return paper.outcome(rows, claims, {}, sentence, remarks=[paper.texts["shared_out"]])


def measure_rounds(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figures 3 and 4: the runs of Table III in every round.

    The data of the figures are accuracies, the discrepancy of FedAvg's and FedProx's global model,
    and the accuracy of each group of FedGroup and FedGrouProx.
    """
    runs = _run_methods(cache, settings, METHODS)
    series: dict[str, dict[str, Found]] = {}
    for name, found in runs.items():
        series[name] = {method: found[method][0] for method in SHOWN}
    claims: list[Claim] = []
    for name, of_methods in runs.items():
        averaged = fmean(fmean(run["discrepancy"]) for run in of_methods["FedAvg"])
        proximal = fmean(fmean(run["discrepancy"]) for run in of_methods["FedProx"])
        measured = f"mean discrepancy: FedAvg {averaged:.2f}, FedProx {proximal:.2f}"
        claims.append(paper.claim("stable", proximal < averaged, measured, task=name))
    texts = (paper.texts["left_out"], paper.texts["shared_out"])
    rows = list[Row]()
    for name, found in runs.items():
        for method in SHOWN:
            means = [fmean(run["discrepancy"]) for run in found[method]]
            rows.append(Row.of(f"{name} · {method}, mean discrepancy", None, means, ""))
    calmer = sum(claim.holds is True for claim in claims)
    sentence = f"It lowers the mean discrepancy in {calmer} of {len(claims)} tasks."
    because = None if len(runs) < len(settings["tasks"]) else ""
    remarks = [*texts, "The first seed is drawn.", *absent(cache, settings)]
    return paper.outcome(rows, claims, series, sentence, because=because, remarks=remarks)
