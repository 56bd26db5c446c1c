"""Table I and figure 1 of FedGroup: FedAvg on clients with few classes each."""

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
    """Train FedAvg on clients with few classes each.

    ``series`` of the outcome has the results of the first seed for every round.
    """
    task = TASKS[settings["task"]]
    runs = {
        n: runs_of(cache, settings, task, "FedAvg", labels_per_client=n)
        for n in settings["classes"]
    }
    rows = {n: _rows(n, found, paper.numbers[f"{n}"]) for n, found in runs.items()}
    series = {
        f"{n}": {key: found[0][key] for key in ("accuracy", "discrepancy")}
        for n, found in runs.items()
    }
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
    claims = _claims(paper, rows, tested=settings["rounds"] >= FEWEST_ROUNDS)
    # Figure 1 draws the runs of Table I, whose rows count there.
    shown_in = paper.texts.get("rows_of", "")
    every = [replace(row, repeats=shown_in) for of_n in rows.values() for row in of_n.values()]
    return paper.outcome(
        every, claims, series, sentence, remarks=[paper.texts["shared_out"], *missed]
    )


def _rows(classes: int, runs: Sequence[Found], paper: Sequence[float]) -> dict[str, Row]:
    """Return the five figures of a row of Table I.

    The last figure is omitted if a run did not reach the target accuracy.
    """
    accuracy = [[100 * value for value in run["accuracy"]] for run in runs]
    rounds = [
        next((n for n, value in enumerate(run["accuracy"], start=1) if value >= TARGET), None)
        for run in runs
    ]
    found = {
        MEAN: ([fmean(run["discrepancy"]) for run in runs], "", 0.5),
        VARIANCE: ([variance(run["discrepancy"]) for run in runs], "", 2.0),
        MAXIMUM: ([max(values) for values in accuracy], "%", 1.0),
        MEDIAN: ([median(values) for values in accuracy], "%", 1.0),
        ROUNDS: ([number for number in rounds if number], "rounds", 2.0),
    }
    name = f"{classes} {'class' if classes == 1 else 'classes'}"
    return {
        what: Row.of(f"{name} · {what}", theirs, values, unit, within=within)
        for (what, (values, unit, within)), theirs in zip(found.items(), paper, strict=True)
        if len(values) == len(runs)
    }


def _claims(paper: Paper, rows: Mapping[int, Mapping[str, Row]], *, tested: bool) -> list[Claim]:
    """Return the claims of section III-A on the step from the fewest to the most classes."""
    few = min(rows)
    many = max(rows)
    checks: dict[str, tuple[str, int, Callable[[float, float], bool] | None]] = {
        "discrepancy": (MEAN, -1, None),
        "variance": (
            VARIANCE,
            -1,
            lambda first, last: within_printed([100 * (1 - last / first)], 80.5),
        ),
        "maximum": (MAXIMUM, 1, lambda first, last: within_printed([last - first], 4.0)),
        "rounds": (
            ROUNDS,
            -1,
            lambda first, last: within_printed([first], 36) and within_printed([last], 10),
        ),
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
        holds = sign * (last - first) > 0 if tested or key == "maximum" else None
        claims.append(paper.claim(key, holds, measured, is_as_large and is_as_large(first, last)))
    return claims
