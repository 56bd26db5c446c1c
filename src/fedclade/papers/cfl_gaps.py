"""CFL's figures 5 and 6: the separation gap against data points and against rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from fedclade.core import LocalSpec
from fedclade.data import Federation, load_federation
from fedclade.papers.drawing import head, legend, mean_lines, panels
from fedclade.papers.experiment import ResultCache, Settings
from fedclade.papers.gaps import KINDS, Gaps, gaps_over_rounds
from fedclade.papers.outcome import Claim, Outcome, Row, Summary, untold
from fedclade.report import style
from fedclade.runs import module_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST_ROUNDS = 20
"""Fewer tell nothing of what the paper says of 50."""

NAMES = {"updates": "weight updates", "gradients": "gradients"}

BECAUSE = (
    "Neither step size, nor layers, nor batch size of this figure are in the paper, and they decide: larger steps are "
    "noisier, smaller ones are far from a stationary point after the same rounds. The bi-partition is right before the "
    "gap is positive (figure 3)."
)

REMARK = (
    "The paper gives neither the step size nor the layers of its networks, and no batch size for this figure: 100 is "
    "that of its section VI-C. Which of updates and gradients separates better depends on it, as 'batches of 10' shows "
    "in figure 6 at the scale laptop. Both are made at one model, that after the round named."
)


def measure_data(bench: ResultCache, settings: Settings) -> Outcome:
    """Measure the gap after the last round for every number of data points (figure 5)."""
    curves = {
        data: _curves(bench, settings, data, [({"points": n}, [settings["rounds"]]) for n in task["points"]])
        for data, task in settings["tasks"].items()
    }
    enough = settings["enough_points"]
    claims: list[Claim] = []
    for data, curve in curves.items():
        points = settings["tasks"][data]["points"]
        claims += [
            *_from_on(data, points, curve, enough[data], "data points"),
            Claim(
                f"{data}: the gap grows with the data (section VI-A)",
                *_grows(points, curve["updates"]["gap"], "data points"),
            ),
            _updates_are_better(data, points, curve),
        ]
    told = claims if settings["rounds"] >= FEWEST_ROUNDS else untold(claims)
    return _outcome(curves, {data: task["points"] for data, task in settings["tasks"].items()}, "data points", told)


def measure_rounds(bench: ResultCache, settings: Settings) -> Outcome:
    """Measure the gap at the model after each chosen round (figure 6)."""
    rounds: list[int] = settings["rounds"]
    curves = {
        data: _curves(bench, settings, data, [({"points": task["points"]}, rounds)])
        for data, task in settings["tasks"].items()
    }
    claims: list[Claim] = []
    for data, curve in curves.items():
        claims += [
            *_from_on(data, rounds, curve, settings["enough_rounds"], "rounds"),
            Claim(
                f"{data}: the gap grows with the rounds (section VI-A)",
                *_grows(rounds, curve["updates"]["gap"], "rounds"),
            ),
            _updates_are_better(data, rounds, curve),
        ]
    told = claims if max(rounds) >= FEWEST_ROUNDS else untold(claims)
    return _outcome(curves, dict.fromkeys(curves, rounds), "rounds", told)


Curves = Mapping[str, Mapping[str, Sequence[Sequence[Any]]]]
"""By kind, then ``gap`` or ``right``: ``[seeds][n]``."""


def _curves(
    bench: ResultCache, settings: Settings, data: str, asked: Sequence[tuple[Mapping[str, int], Sequence[int]]]
) -> Curves:
    """Return what a figure shows of one data set: for each of ``asked`` the chosen rounds, one after the other."""
    found: list[list[Gaps]] = [
        [
            bench.piece(
                f"{data}, {given['points']} data points, seed {seed}",
                partial(_gaps, bench, settings, data, given["points"], at, seed),
            )
            for given, at in asked
        ]
        for seed in settings["tasks"][data].get("seeds", settings["seeds"])
    ]
    return {
        kind: {what: [[at[what] for gaps in each for at in gaps[kind]] for each in found] for what in ("gap", "right")}
        for kind in KINDS
    }


def _gaps(bench: ResultCache, settings: Settings, data: str, points: int, at: Sequence[int], seed: int) -> Gaps:
    task = settings["tasks"][data]
    federation = load_federation(
        task.get("data", data),
        clients=settings["clients"],
        samples_per_client=points,
        shift="label_swap",
        clusters=settings["clusters"],
        test_samples=settings["test_samples"],
        seed=seed,
        data_dir=bench.data_dir,
    )
    local = LocalSpec(
        epochs=settings["epochs"], batch_size=task.get("batch_size", settings["batch_size"]), lr=settings["lr"]
    )
    make = partial(_model, federation, task)
    return gaps_over_rounds(federation, make, local, at, seed=seed, device=bench.device, stop=bench.stop)


def _model(federation: Federation, task: Settings, seed: int) -> nn.Module:
    return module_for(task["model"], federation.pool.schema, seed, task.get("model_arguments"))


def _from_on(data: str, x: Sequence[int], curve: Curves, enough: int, unit: str) -> list[Claim]:
    """Say whether the split is right, and whether the gap is positive, from where the paper says on.

    The paper takes one for the other; but a split can be right without a gap (figure 3).
    """
    gaps = np.asarray(curve["updates"]["gap"]).mean(0)
    right = 100 * np.asarray(curve["updates"]["right"], dtype=float).mean(0)
    beyond = np.asarray(x) >= enough
    return [
        Claim(
            f"{data}: with weight updates the bi-partition is right from {enough} {unit} on (section VI-A)",
            bool(right[beyond].min() == 100) if beyond.any() else None,
            f"share of the seeds, by {unit}: "
            + ", ".join(f"{n}: {share:.0f} %" for n, share in zip(x, right, strict=True)),
        ),
        Claim(
            f"{data}: ... and the gap g(α) is positive from there on (figures 5 and 6)",
            bool(gaps[beyond].min() > 0) if beyond.any() else None,
            f"mean gap, by {unit}: " + ", ".join(f"{n}: {gap:+.2f}" for n, gap in zip(x, gaps, strict=True)),
        ),
    ]


def _grows(x: Sequence[int], gaps: Sequence[Sequence[float]], unit: str) -> tuple[bool | None, str]:
    """Say whether a gap grows from the first to the last point; single steps back are told, too."""
    means = np.asarray(gaps).mean(0)
    steps = np.diff(means)
    back = int((steps < 0).sum())
    told = f"{unit} {x[0]}: {means[0]:+.2f}, {x[-1]}: {means[-1]:+.2f}; {back} of {len(steps)} steps go down"
    return (bool(means[-1] > means[0]) if len(steps) else None), told


def _updates_are_better(data: str, x: Sequence[int], curve: Curves) -> Claim:
    gaps = {kind: np.asarray(curve[kind]["gap"]).mean(0) for kind in KINDS}
    better = np.asarray(x)[gaps["updates"] > gaps["gradients"]].tolist()
    return Claim(
        f"{data}: weight updates separate better than gradients, with few data points and early (section VI-A)",
        len(better) > len(x) / 2,
        f"at {', '.join(map(str, better)) or 'none'} of {', '.join(map(str, x))}; mean gap "
        f"{gaps['updates'].mean():+.2f} against {gaps['gradients'].mean():+.2f}",
    )


def _outcome(
    curves: Mapping[str, Curves], x: Mapping[str, Sequence[int]], unit: str, claims: Sequence[Claim]
) -> Outcome:
    rows = tuple(
        Row(f"{data}, {unit} = {place} · {NAMES[kind]}: g(α)", None, float(np.mean(seeds)), "", seeds=seeds)
        for data, curve in curves.items()
        for kind in KINDS
        for n, place in enumerate(x[data])
        for seeds in [tuple(float(line[n]) for line in curve[kind]["gap"])]
    )
    series = {
        data: {"x": list(x[data]), **{kind: np.round(curve[kind]["gap"], 4).tolist() for kind in KINDS}}
        for data, curve in curves.items()
    }
    return Outcome(rows, tuple(claims), series, (REMARK,), _summary(curves, x, unit, claims))


def _summary(
    curves: Mapping[str, Curves], x: Mapping[str, Sequence[int]], unit: str, claims: Sequence[Claim]
) -> Summary:
    ends = "; ".join(
        f"{data} {gaps[0]:+.2f} at {x[data][0]} to {gaps[-1]:+.2f} at {x[data][-1]}"
        for data, curve in curves.items()
        for gaps in [np.asarray(curve["updates"]["gap"]).mean(0)]
    )
    seen = Counter(claim.seen for claim in claims if claim.holds is not None)
    told = f"; {seen['yes']} of {seen.total()} claims were seen" if seen else ""
    return Summary(
        f"The separation gap of weight updates grows with {unit}, and is positive early on.",
        f"Mean gap by {unit}: {ends}{told}.",
        BECAUSE if seen["no"] else "",
    )


def draw(outcome: Outcome, settings: Settings, *, figure: int, unit: str) -> Figure:
    """Draw a panel for each data set: the gap of updates and of gradients; above zero the split is right."""
    picture, axes = panels(
        len(outcome.series),
        f"Separation gap against {unit}",
        f"after Sattler et al. 2019, figure {figure} · {settings['clients']} clients, "
        f"{settings['clusters']} label swaps",
    )
    for panel, (data, shown) in zip(axes, outcome.series.items(), strict=True):
        mean_lines(panel, shown["x"], {NAMES[kind]: shown[kind] for kind in KINDS})
        panel.axhline(0, color=style.MUTED, linewidth=0.9)
        style.label(panel, x=unit, y="separation gap g(α)")
        head(panel, data)
    legend(axes[0])
    return picture


draw_data = partial(draw, figure=5, unit="data points of a client")
draw_rounds = partial(draw, figure=6, unit="communication rounds")
