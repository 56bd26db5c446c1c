"""CFL's figure 3: how often random gradients are split right, against what Theorem 1 promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedclade.core import rng
from fedclade.papers.drawing import head, legend, panels
from fedclade.papers.experiment import ResultCache, Settings
from fedclade.papers.outcome import Claim, Outcome, Row, Summary
from fedclade.papers.separation_theorem import bounds, draw_sample, largest_noise, summary
from fedclade.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDING = 1e-9
"""Cosines in float64 may lie this far beyond a bound."""

MANY = 10
"""Distributions above which eqs. 30 and 31 speak of large k."""


def measure(bench: ResultCache, settings: Settings) -> Outcome:
    """Draw gradients for every k and γ, and for every d at one k and γ."""
    gammas = settings["gammas"]
    table = {
        k: bench.piece(f"k = {k}", lambda k=k: [_cell(settings, k, settings["d"], gamma) for gamma in gammas])
        for k in settings["ks"]
    }
    fixed = settings["over_d"]
    over_d = [bench.piece(f"d = {d}", lambda d=d: _cell(settings, fixed["k"], d, fixed["gamma"])) for d in fixed["ds"]]
    cells = [cell for row in table.values() for cell in row]
    return Outcome(
        rows=_rows(cells, settings),
        claims=_claims([*cells, *over_d], settings),
        series={"cells": cells, "over_d": over_d},
        remarks=(
            "The paper does not say how many draws it made, nor that gradients of k distributions sum to zero at a "
            "stationary point; here they do. The noise of every client is scaled to γ exactly.",
        ),
        summary=_summary([*cells, *over_d], settings),
    )


def _cell(settings: Settings, k: int, d: int, gamma: float) -> dict[str, Any]:
    draw = rng.generator(settings["seeds"][0], "figure 3", k, d, round(1000 * gamma))
    samples = [draw_sample(k, d, gamma, settings["clients_each"], draw) for _ in range(settings["samples"])]
    return {"k": k, "d": d, "gamma": gamma, **summary(samples)}


def _rows(cells: list[dict[str, Any]], settings: Settings) -> tuple[Row, ...]:
    """Return P[g(α) > 0] where eqs. 30 and 31 say that it is near 1: k above 10, γ just above 1."""
    above = min(gamma for gamma in settings["gammas"] if gamma > 1)
    return tuple(
        Row(
            f"P[g(α) > 0], k = {cell['k']}, d = {cell['d']}, γ = {above:g} (eq. 30)",
            *(100.0, 100 * cell["gap_positive"]),
            wanted="at least",
            told="≈ 1",
        )
        for cell in cells
        if cell["k"] > MANY and cell["gamma"] == above
    )


def _claims(cells: list[dict[str, Any]], settings: Settings) -> tuple[Claim, ...]:
    bounded = [cell for cell in cells if 0 < cell["gamma"] < 1]  # eq. 15; without noise they are the bounds
    n = len(bounded) * settings["samples"]
    cross = max(cell["highest_cross"] - bounds(cell["k"], cell["gamma"])[0] for cell in bounded)
    intra = min(cell["lowest_intra"] - bounds(cell["k"], cell["gamma"])[1] for cell in bounded)
    green = [cell for cell in cells if cell["gamma"] < largest_noise(cell["k"])]
    wrong = sum(1 - cell["gap_positive"] for cell in green) * settings["samples"]
    beyond = max((cell["gamma"] for cell in cells if cell["k"] > MANY and cell["gap_positive"] > 0.99), default=None)
    without = sum(cell["right_without_gap"] for cell in cells)
    misled = sum(cell["wrong_with_gap"] for cell in cells)
    return (
        Claim(
            "α_cross^max never lies above its bound (Theorem 1, eq. 19)",
            cross <= ROUNDING,
            f"{n:,} samples; the nearest stays {-cross:.4f} below",
        ),
        Claim(
            "α_intra^min never lies below its bound (Theorem 1, eq. 21)",
            intra >= -ROUNDING,
            f"{n:,} samples; the nearest stays {intra:.4f} above",
        ),
        Claim(
            "Where the theorem promises it, the split is always right (fig. 3, green area)",
            wrong < 0.5,
            f"{wrong:.0f} of {len(green) * settings['samples']:,} samples of the area were not",
        ),
        Claim(
            "P[correct] ≈ 1 even for k > 10 and γ_max > 1 (eqs. 30, 31)",
            (beyond or 0) > 1 if any(cell["k"] > MANY for cell in cells) else None,
            f"for k > {MANY}, P > 0.99 up to γ = {beyond or 0:g}",
        ),
        Claim(
            "The bi-partition is right if the gap is positive (Corollary 1)",
            misled == 0,
            f"{misled} samples with a positive gap and a wrong split",
        ),
        Claim(
            "... and only if it is (Remark 2)",
            without == 0,
            f"{without:,} of {_drawn(cells, settings)} samples were split right without one: members of one "
            "distribution may be as unlike as clients across the split",
        ),
    )


def _drawn(cells: list[dict[str, Any]], settings: Settings) -> str:
    return f"{len(cells) * settings['samples']:,}"


def _summary(cells: list[dict[str, Any]], settings: Settings) -> Summary:
    without = sum(cell["right_without_gap"] for cell in cells)
    return Summary(
        "Theorem 1 bounds the similarities, and far beyond what it promises the split is still right nearly always.",
        f"Of {_drawn(cells, settings)} random samples none broke a bound or was split wrong with a positive gap; "
        f"{without:,} were split right without one.",
        "The 'only if' of Remark 2 does not follow from Corollary 1, and does not hold." if without else "",
    )


def draw(outcome: Outcome, settings: Settings) -> Figure:
    """Draw P[correct] over k and γ with the theorem's border, over d, and the samples' extremes below their bounds."""
    figure, (area, over_d, below) = panels(
        3,
        "How much noise a split can bear",
        f"after Sattler et al. 2019, figure 3 · d = {settings['d']}, m = {settings['clients_each']}k",
    )
    cells, ks, gammas = outcome.series["cells"], settings["ks"], settings["gammas"]
    share = np.array([cell["gap_positive"] for cell in cells]).reshape(len(ks), len(gammas))
    shown = area.contourf(ks, gammas, share.T, levels=np.linspace(0, 1, 11), cmap="Blues")
    dense = np.linspace(min(ks), max(ks), 200)
    area.fill_between(dense, [largest_noise(k) for k in dense], color=style.CLUSTERS[2], alpha=0.8, linewidth=0)
    area.set_ylim(0, max(gammas))
    figure.colorbar(shown, ax=area).set_label("P[g(α) > 0]", fontsize=9)
    style.label(area, x="distributions k", y="noise γ")
    head(area, "green: promised by Theorem 1")
    fixed = settings["over_d"]
    over_d.semilogx(
        fixed["ds"], [cell["gap_positive"] for cell in outcome.series["over_d"]], marker="o", color=style.ACCENT
    )
    style.label(over_d, x="dimensions d", y="P[g(α) > 0]")
    head(over_d, f"k = {fixed['k']}, γ = {fixed['gamma']:g}")
    noise = np.linspace(0, 1, 100, endpoint=False)
    for color, k in zip(style.CLUSTERS, settings["bounds_of"], strict=False):
        mine = [cell for cell in cells if cell["k"] == k and cell["gamma"] < 1]
        below.plot(noise, [bounds(k, gamma)[0] for gamma in noise], color=color, label=f"k = {k}")
        below.scatter([cell["gamma"] for cell in mine], [cell["highest_cross"] for cell in mine], color=color, s=14)
    style.label(below, x="noise γ", y="largest similarity across the split")
    below.set_ylim(-1.1, 1.8)
    head(below, "lines: eq. 19, dots: highest samples")
    legend(below, loc="upper left", ncols=2)
    return figure
