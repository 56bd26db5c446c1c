"""Table III, figures 3 and 4 of FedGroup: its methods against FedAvg and FedProx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from fedclade.papers.experiment import ResultCache, Settings
from fedclade.papers.fedgroup_runs import SHARES_OUT, TOLD_AFTER, Found, Task, absent, run_of, there
from fedclade.papers.outcome import Claim, Outcome, Row, Summary

METHODS: tuple[str, ...] = ("FedAvg", "FedProx", "FedGroup-RCC", "FedGroup-RAC", "FedGroup", "FedGrouProx")

BEST = (
    "Accuracies are the best of all rounds, as the paper has them (section IV-A), over the clients assigned so far, "
    "weighted by their test data; so they are chosen by looking at the test data."
)
LEFT_OUT = (
    "The paper gives no rounds for Table III: those of section III-A are taken. η and μ are 'the recommended settings' "
    "of Li et al. 2020: 0.03, 0.003, 0.01, 0.3 and 1, 1, 1, 0.01 for MNIST, FEMNIST, Synthetic, Sent140."
)

Runs = Mapping[str, Mapping[str, Sequence[Found]]]
"""By task and method, seed by seed."""


def measure_best(
    tasks: Mapping[str, Task], table: Mapping[str, tuple[float | None, ...]], bench: ResultCache, settings: Settings
) -> Outcome:
    """Run all methods at all tasks whose data is there."""
    runs = _runs(tasks, bench, settings)
    rows, claims = list[Row](), list[Claim]()
    for name, of_methods in runs.items():
        paper = dict(zip(METHODS, table.get(name, (None,) * len(METHODS)), strict=True))
        best = {which: [100 * max(run["accuracy"]) for run in found] for which, found in of_methods.items()}
        rows += [
            Row(f"{name} · {which}, best round", paper.get(which), fmean(values), "%", tuple(values), "at least")
            for which, values in best.items()
        ]
        means = {which: fmean(values) for which, values in best.items()}
        claims += _claims(name, means, settings["rounds"] >= TOLD_AFTER)
        claims.append(_claim_of_order(name, means, paper, told=settings["rounds"] >= TOLD_AFTER))
    last = (_last_rounds(name, found) for name, found in runs.items())
    remarks = (BEST, LEFT_OUT, SHARES_OUT, *last, *absent(tasks, bench, settings))
    return Outcome(tuple(rows), tuple(claims), {}, remarks, _summary(rows, tasks, bench, settings))


def _runs(tasks: Mapping[str, Task], bench: ResultCache, settings: Settings, methods: Sequence[str] = METHODS) -> Runs:
    return {
        name: {
            which: [
                run_of(bench, settings, tasks[name], which, seed)
                for seed in settings["seeds_of"].get(name, settings["seeds"])
            ]
            for which in methods
        }
        for name in there(tasks, bench, settings)
    }


def _claim_of_order(name: str, best: Mapping[str, float], paper: Mapping[str, float | None], *, told: bool) -> Claim:
    """Return the claim that methods rank as in the paper; those that it has within a fifth of a point may change."""
    known = {which: value for which, value in paper.items() if value is not None}
    ranked = sorted(known, key=known.__getitem__)
    swapped = [
        (one, other)
        for place, one in enumerate(ranked)
        for other in ranked[place + 1 :]
        if known[other] - known[one] > ALIKE and best[one] > best[other]
    ]
    ours = " < ".join(
        f"{which.removeprefix('FedGroup-')} {best[which]:.1f}" for which in sorted(best, key=best.__getitem__)
    )
    return Claim(
        f"{name}: the methods rank as in Table III, from the worst to the best",
        not swapped if told and known else None,
        f"{ours} %" + "".join(f"; {one} is above {other}" for one, other in swapped),
    )


ALIKE = 0.2
"""Percentage points by which two figures of Table III may differ without a rank."""


def _summary(rows: Sequence[Row], tasks: Mapping[str, Task], bench: ResultCache, settings: Settings) -> Summary:
    lines = [
        f"{name}: "
        + ", ".join(
            f"{row.what.partition(' · ')[2].removesuffix(', best round').removeprefix('FedGroup-')} {row.ours:.1f}"
            + (f" ({row.paper:.1f})" if row.paper is not None else "")
            for row in rows
            if row.what.startswith(f"{name} · ")
        )
        for name in there(tasks, bench, settings)
    ]
    gone = [name for name in settings["tasks"] if name not in there(tasks, bench, settings)]
    return Summary(
        "FedGroup and FedGrouProx beat FedAvg and FedProx by 3 to 15 points, and random groups for cold clients do "
        "not.",
        f"Best accuracies in %, the paper's in brackets: {'; '.join(lines)}.",
        (f"{', '.join(gone)}: the data is not to be had here. " if gone else "")
        + "On Synthetic(1,1) the clients are drawn anew for each seed, a few hold most of the data, and the paper's "
        "draw is not known.",
    )


JOINING = ("FedGroup", "FedGroup, sampled, by latest update", "FedGroup, sampled, by position")
"""When clients join, and what of a group they are compared with."""


def measure_joining(
    tasks: Mapping[str, Task], table: Mapping[str, tuple[float | None, ...]], bench: ResultCache, settings: Settings
) -> Outcome:
    """Run FedGroup with every reading of section III-E and eq. 10."""
    rows, claims = list[Row](), list[Claim]()
    for name, of_ways in _runs(tasks, bench, settings, JOINING).items():
        paper = dict(zip(METHODS, table.get(name, (None,) * len(METHODS)), strict=True))["FedGroup"]
        best = {way: [100 * max(run["accuracy"]) for run in found] for way, found in of_ways.items()}
        rows += [
            Row(f"{name} · {way}, best round", paper, fmean(values), "%", tuple(values), "at least")
            for way, values in best.items()
        ]
        means = {way: fmean(values) for way, values in best.items()}
        claims.append(
            Claim(
                f"{name}: clients that join when they are sampled, by the groups' latest updates (eq. 10), find theirs",
                None if paper is None else means[JOINING[1]] > paper - 1,
                ", ".join(
                    f"{way.removeprefix('FedGroup, ') if way != 'FedGroup' else 'all at the start'}: {mean:.1f} %"
                    for way, mean in means.items()
                ),
            )
        )
    summary = Summary(
        "A cold client joins the group whose latest update points most like its own pre-training update (eq. 10).",
        "; ".join(claim.measured for claim in claims) + (" (Table III: 95.7 %)." if rows and rows[0].paper else "."),
        "After a few rounds a group's latest update says which of its members were sampled last, more than which "
        "clients are like them. The authors' code lets all clients join before round 1, where update and position are "
        "the same.",
    )
    remark = (
        "'all at the start' is the default (cold_start = \"start\"). By position: where the group's model is, seen "
        "from "
        'the global one (direction = "position").'
    )
    return Outcome(tuple(rows), tuple(claims), {}, (remark, SHARES_OUT), summary)


def _claims(name: str, best: Mapping[str, float], told: bool) -> tuple[Claim, ...]:
    """Return what section IV-B says, for one task."""
    averaged, proximal = best["FedAvg"], best["FedProx"]
    baseline, ours, both = max(averaged, proximal), best["FedGroup"], best["FedGrouProx"]
    rcc, rac = best["FedGroup-RCC"], best["FedGroup-RAC"]
    synthetic = name.startswith("Synthetic")
    text = "random centers (RCC) still beat both, " + ("and FedGroup here" if synthetic else "but not FedGroup")
    holds = baseline < rcc and (rcc > ours) == synthetic
    claims = (
        Claim(
            f"{name}: FedGroup and FedGrouProx beat FedAvg and FedProx (section IV-B)",
            min(ours, both) > baseline,
            f"by {ours - baseline:+.1f} and {both - baseline:+.1f} points; FedGroup − FedAvg {ours - averaged:+.1f}",
        ),
        Claim(
            f"{name}: {text} (section IV-B)",
            holds if told else None,
            f"RCC {rcc:.1f} %, FedGroup {ours:.1f} %, the better of FedAvg and FedProx {baseline:.1f} %",
        ),
    )
    if synthetic:  # all its clients pre-train, none is cold, and the paper has no figure
        return claims
    return (
        *claims,
        Claim(
            f"{name}: random groups for cold clients (RAC) fall below FedAvg and FedProx (section IV-B)",
            rac < min(averaged, proximal) if told else None,
            f"RAC {rac:.1f} %, FedAvg {averaged:.1f} %, FedProx {proximal:.1f} %",
        ),
    )


def _last_rounds(name: str, runs: Mapping[str, Sequence[Found]]) -> str:
    """Say what the last ten rounds come to: the best round cannot be chosen in earnest."""
    last = (f"{which} {100 * fmean(fmean(run['accuracy'][-10:]) for run in each):.1f}" for which, each in runs.items())
    return f"{name}, mean of the last ten rounds in %: {', '.join(last)}."


def measure_rounds(tasks: Mapping[str, Task], bench: ResultCache, settings: Settings) -> Outcome:
    """Show the runs of Table III round by round, with the discrepancy of one model for all, and group by group."""
    shown = ("FedAvg", "FedProx", "FedGroup", "FedGrouProx")
    runs = _runs(tasks, bench, settings)
    series = {name: {which: found[which][0] for which in shown} for name, found in runs.items()}
    claims = tuple(_claim_of_stability(name, found, settings) for name, found in series.items())
    remarks = (LEFT_OUT, SHARES_OUT, "The first seed is drawn.", *absent(tasks, bench, settings))
    calmer = sum(claim.holds is True for claim in claims)
    summary = Summary(
        "The proximal term makes training steadier; every group of FedGroup trains to an accuracy of its own.",
        f"It lowers the mean discrepancy in {calmer} of {len(claims)} tasks.",
        "" if len(runs) == len(settings["tasks"]) else "FEMNIST and Sent140 are not to be had here.",
    )
    rows = [
        Row(f"{name} · {which}, mean discrepancy", None, fmean(values), "", tuple(values))
        for name, of_methods in runs.items()
        for which in shown
        for values in [[fmean(run["discrepancy"]) for run in of_methods[which]]]
    ]
    return Outcome(tuple(rows), claims, series, remarks, summary)


def _claim_of_stability(name: str, runs: Mapping[str, Found], settings: Settings) -> Claim:
    averaged, proximal = (fmean(runs[which]["discrepancy"]) for which in ("FedAvg", "FedProx"))
    return Claim(
        f"{name}: the proximal term reduces the divergence (section IV-B)",
        proximal < averaged,
        f"mean discrepancy: FedAvg {averaged:.2f}, FedProx {proximal:.2f}",
    )
