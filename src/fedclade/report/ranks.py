"""Who ranks where over several scenarios: mean ranks, which cannot be told apart, and the picture of both.

Friedman's test, and Nemenyi's critical difference (Demšar 2006, "Statistical comparisons of classifiers over multiple
data sets", sections 3.2.2 and 3.2.4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.text import Text

from fedclade.report import style
from fedclade.report.comparison_files import markdown_table
from fedclade.report.formats import NONE, count
from fedclade.report.terminal import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST_SETS, FEWEST_METHODS = 4, 3
"""Below these ranks say nothing."""

LEVEL = 0.05
"""Of mean ranks that are told apart."""

LINE, BAR, INCHES = 0.5, 0.3, 0.55
"""Heights of a method and of a bar in the picture, in units of its axes, and how many inches a unit has."""


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of methods over sets, a set being one seed of one scenario; 1 is the best.

    Parameters
    ----------
    mean
        By method, the best first.
    sets
        How many there are.
    scenarios
        Of how many scenarios.
    p_value
        Of Friedman's test that all are alike; None if they have the same scores everywhere.
    critical
        By how much mean ranks must differ at least to be told apart, at 5 %.
    """

    mean: Mapping[str, float]
    sets: int
    scenarios: int
    p_value: float | None
    critical: float

    def alike(self) -> list[tuple[str, str]]:
        """Return the longest runs of methods that cannot be told apart, as the first and the last of each."""
        names = list(self.mean)
        last = [max(j for j, b in enumerate(names) if self.mean[b] - self.mean[a] < self.critical) for a in names]
        return [(names[i], names[j]) for i, j in enumerate(last) if j > i and (i == 0 or j > last[i - 1])]

    @property
    def title(self) -> str:
        """Over what they are."""
        return f"Mean ranks over {count(self.scenarios, 'scenario')}, {count(self.sets, 'run')} each"

    @property
    def note(self) -> str:
        """What they tell."""
        p_value = NONE if self.p_value is None else f"{self.p_value:.1g}"
        return (
            f"1 is the best. Friedman's p = {p_value}; ranks that differ by less than {self.critical:.2f} are not told "
            "apart (Nemenyi, 5 %)."
        )

    @property
    def rows(self) -> list[list[str]]:
        """Each method with its mean rank."""
        return [[method, f"{mean:.1f}"] for method, mean in self.mean.items()]

    def table(self) -> Group:
        """Return them for the terminal; what is said of them is wider than the table."""
        table = new_table("")
        table.add_column("config", no_wrap=True)
        table.add_column("mean rank", justify="right")
        for method, mean in self.rows:
            table.add_row(escape(method), mean)
        return Group(Text(self.title, style="bold"), table, self.note)

    def markdown(self) -> str:
        """Return them as Markdown, with a title and a note."""
        return f"**{self.title}**\n\n{markdown_table(['config', 'mean rank'], self.rows)}\n\n{self.note}"


def ranks_of(scores: Mapping[tuple[str, int], Mapping[str, float]]) -> Ranks | None:
    """Return the ranks of methods that have all run in the same sets; None if these are too few.

    Of all choices of methods and sets without a gap, by how many sets a method has run in, that of the most scenarios,
    and of these that of the most methods.

    Parameters
    ----------
    scores
        By scenario and seed: the score of each method, of which more is better.
    """
    ran = {method: sum(method in each for each in scores.values()) for each in scores.values() for method in each}
    ordered = sorted(ran, key=lambda method: (-ran[method], method))
    choices: list[tuple[list[str], list[tuple[str, int]]]] = []
    for k in range(FEWEST_METHODS, len(ordered) + 1):
        whole = [key for key, each in scores.items() if {*ordered[:k]} <= each.keys()]
        if len(whole) >= FEWEST_SETS:
            choices.append((ordered[:k], whole))
    if not choices:
        return None
    from scipy import stats  # imported late, since it takes long

    methods, keys = max(choices, key=lambda choice: (len({scenario for scenario, _ in choice[1]}), len(choice[0])))
    table = np.array([[scores[key][method] for method in methods] for key in keys])
    means = stats.rankdata(-table, axis=1).mean(0).tolist()
    n, k = table.shape
    critical = stats.studentized_range.ppf(1 - LEVEL, k, np.inf) / np.sqrt(2) * np.sqrt(k * (k + 1) / (6 * n))
    with np.errstate(invalid="ignore"):
        p_value = float(stats.friedmanchisquare(*table.T).pvalue)
    return Ranks(
        {method: mean for mean, method in sorted(zip(means, methods, strict=True))},
        sets=n,
        scenarios=len({scenario for scenario, _ in keys}),
        p_value=p_value if np.isfinite(p_value) else None,
        critical=float(critical),
    )


def rank_figure(ranks: Ranks) -> Figure:
    """Draw the critical-difference diagram: methods on an axis of ranks, and bars over those not told apart."""
    names, bars = list(ranks.mean), ranks.alike()
    half = (len(names) + 1) // 2
    low, high = 1, len(names)
    top = BAR * (len(bars) + 1)
    bottom, margin = -top - LINE * half, 0.03 * (high - low)
    figure = style.new_figure(9.6, style.HEADER + INCHES * (1.2 - bottom))
    axes = figure.subplots()
    axes.set_xlim(low - 7 * margin, high + 7 * margin)
    axes.set_ylim(bottom, 1.2)
    axes.set_axis_off()
    axes.plot([low, high], [0, 0], color=style.INK, lw=1, gid="axis")
    for tick in range(low, high + 1):
        axes.plot([tick, tick], [0, 0.12], color=style.INK, lw=1)
        axes.text(tick, 0.2, f"{tick}", ha="center", va="bottom", fontsize=9.5, color=style.INK)
    for place, name in enumerate(names):
        left = place < half
        y = -top - LINE * (place if left else len(names) - 1 - place)
        end = low - margin if left else high + margin
        axes.plot([ranks.mean[name], ranks.mean[name], end], [0, y, y], color=style.MUTED, lw=0.8, gid="method")
        text = f"{name}  {ranks.mean[name]:.1f}" if left else f"{ranks.mean[name]:.1f}  {name}"
        axes.text(end, y, f" {text} ", ha="right" if left else "left", va="center", fontsize=9.5, color=style.INK)
    for row, (first, last) in enumerate(bars):
        span = [ranks.mean[first] - margin / 3, ranks.mean[last] + margin / 3]
        axes.plot(span, [-BAR * (row + 1)] * 2, color=style.ACCENT, lw=3, solid_capstyle="round", gid="alike")
    axes.plot([low, low + ranks.critical], [0.9, 0.9], color=style.ACCENT, lw=3, solid_capstyle="round")
    told = f"  critical difference {ranks.critical:.2f}"
    axes.text(low + ranks.critical, 0.9, told, va="center", fontsize=9.5, color=style.INK)
    style.set_title(
        figure, ranks.title, "the best at the left; a bar joins those that are not told apart (Nemenyi, 5 %)"
    )
    return figure
