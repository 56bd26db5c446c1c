"""Table I and figure 1 of the FedGroup paper: FedAvg on clients with few classes each.

The *discrepancy* is the paper's measure of how far the clients' models are from the global model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, variance

from fedclade_papers.cache import ResultCache, Settings
from fedclade_papers.experiment import Paper
from fedclade_papers.fedgroup.runs import FEWEST_ROUNDS, Found, runs_of
from fedclade_papers.fedgroup.tasks import TASKS
from fedclade_papers.outcome import Claim, Outcome, Row, within_printed

TARGET = 0.85

MEAN = "discrepancy, mean"
VARIANCE = "discrepancy, variance"
MAXIMUM = "accuracy, maximum"
MEDIAN = "accuracy, median"
ROUNDS = "rounds to 85 %"


def measure_classes(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure Table I and figure 1: FedAvg on clients that each have few classes.

    The data of the figure are the accuracies and discrepancies of the first seed in every round.
    """
    task = TASKS[settings["task"]]
    runs = {
        n: runs_of(cache, settings, task, "FedAvg", labels_per_client=n)
        for n in settings["classes"]
    }
    rows = {n: _make_rows(n, found, paper.numbers[f"{n}"]) for n, found in runs.items()}
    series: dict[str, Found] = {}
    for n, found in runs.items():
        first = found[0]
        series[f"{n}"] = {"accuracy": first["accuracy"], "discrepancy": first["discrepancy"]}
    few = rows[min(rows)]
    many = rows[max(rows)]
    sentence = (
        f"From {min(rows)} to {max(rows)} classes: best accuracy {few[MAXIMUM].ours:.1f} to "
        f"{many[MAXIMUM].ours:.1f} %, discrepancy {few[MEAN].ours:.1f} to {many[MEAN].ours:.1f}, "
        f"its variance {few[VARIANCE].ours:.0f} to {many[VARIANCE].ours:.0f}."
    )
    missed = [
        f"With {n} classes 85 % were not reached in all runs."
        for n in rows
        if ROUNDS not in rows[n]
    ]
    claims = _check_claims(paper, rows, tested=settings["rounds"] >= FEWEST_ROUNDS)
    # Figure 1 draws the runs of Table I, whose rows count there.
    shown_in = paper.texts.get("rows_of", "")
    every = [replace(row, repeats=shown_in) for of_n in rows.values() for row in of_n.values()]
    return paper.outcome(
        every, claims, series, sentence, remarks=[paper.texts["shared_out"], *missed]
    )


def _make_rows(classes: int, runs: Sequence[Found], paper: Sequence[float]) -> dict[str, Row]:
    """Return the five numbers of a row of Table I, by name.

    The number of rounds to the target accuracy is omitted if a run did not reach the target.
    """
    rounds = [_find_round_at_target(run) for run in runs]
    found = {
        MEAN: ([fmean(run["discrepancy"]) for run in runs], "", 0.5),
        VARIANCE: ([variance(run["discrepancy"]) for run in runs], "", 2.0),
        MAXIMUM: ([max(_list_accuracies(run)) for run in runs], "%", 1.0),
        MEDIAN: ([median(_list_accuracies(run)) for run in runs], "%", 1.0),
        ROUNDS: ([number for number in rounds if number], "rounds", 2.0),
    }
    name = "1 class" if classes == 1 else f"{classes} classes"
    return {
        what: Row.of(f"{name} · {what}", theirs, values, unit, within=within)
        for (what, (values, unit, within)), theirs in zip(found.items(), paper, strict=True)
        if len(values) == len(runs)
    }


def _falls_as_printed(first: float, last: float) -> bool:
    """Return whether a variance falls by 80.5 %, as in the paper."""
    return within_printed([100 * (1 - last / first)], 80.5)


def _rises_as_printed(first: float, last: float) -> bool:
    """Return whether an accuracy rises by 4.0 percentage points, as in the paper."""
    return within_printed([last - first], 4.0)


def _takes_rounds_as_printed(first: float, last: float) -> bool:
    """Return whether the numbers of rounds to the target are 36 and 10, as in the paper."""
    return within_printed([first], 36) and within_printed([last], 10)


def _list_accuracies(run: Found) -> list[float]:
    """Return the accuracy of a run in every round in percent."""
    return [100 * value for value in run["accuracy"]]


def _find_round_at_target(run: Found) -> int | None:
    """Return the first round in which a run has the target accuracy; None if no round has it."""
    for number, value in enumerate(run["accuracy"], start=1):
        if value >= TARGET:
            return number
    return None


def _check_claims(
    paper: Paper, rows: Mapping[int, Mapping[str, Row]], *, tested: bool
) -> list[Claim]:
    """Return the paper's claims on the effect of more classes per client (section III-A).

    The claims compare the fewest and the most classes per client. ``tested`` is whether the runs
    have enough rounds to test all claims.
    """
    few = min(rows)
    many = max(rows)
    checks: dict[str, tuple[str, int, Callable[[float, float], bool] | None]] = {
        "discrepancy": (MEAN, -1, None),
        "variance": (VARIANCE, -1, _falls_as_printed),
        "maximum": (MAXIMUM, 1, _rises_as_printed),
        "rounds": (ROUNDS, -1, _takes_rounds_as_printed),
    }
    claims: list[Claim] = []
    for key, (what, sign, is_as_large) in checks.items():
        if key not in paper.claims:
            continue
        if not (what in rows[few] and what in rows[many]):
            claims.append(paper.claim(key, None, f"{what}: not reached in all runs"))
            continue
        first = rows[few][what].ours
        last = rows[many][what].ours
        measured = f"{what}: {first:.3g} with {few}, {last:.3g} with {many}"
        if tested or key == "maximum":
            holds = sign * (last - first) > 0
        else:
            holds = None
        claims.append(paper.claim(key, holds, measured, is_as_large and is_as_large(first, last)))
    return claims
