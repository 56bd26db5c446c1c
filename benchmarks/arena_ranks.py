"""Who ranks where over the cells of the arena: mean ranks, what cannot be told apart, and the picture of both.

Friedman's test, and Nemenyi's critical difference (Demšar 2006, "Statistical comparisons of classifiers over multiple
data sets", sections 3.2.2 and 3.2.4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

Line = Mapping[str, Any]
FEWEST = 4
"""Cells and folds below which ranks say nothing."""


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of methods over sets, a set being one fold of one cell; 1 is the best."""

    mean: Mapping[str, float]  #: by method, the best first
    sets: int
    cells: int
    p_value: float  #: of Friedman's test that all are alike
    critical: float  #: by how much mean ranks must differ at least to be told apart, at 5 %

    def alike(self) -> list[tuple[str, str]]:
        """Return the longest runs of methods that cannot be told apart, as the first and the last of each."""
        names = list(self.mean)
        last = [max(j for j, b in enumerate(names) if self.mean[b] - self.mean[a] < self.critical) for a in names]
        return [(names[i], names[j]) for i, j in enumerate(last) if j > i and (i == 0 or j > last[i - 1])]


def ranks_of(lines: Sequence[Line]) -> Ranks | None:
    """Return the ranks of methods that have all run in the same sets; None if these are too few.

    Of all choices of methods and sets without a gap, by how many sets a method has run in, that of the most cells, and
    of these that of the most methods.
    """
    by_set: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for line in lines:
        by_set[line["cell"], line["seed"]][line["method"]] = line["accuracy"]
    ran = {method: sum(method in each for each in by_set.values()) for each in by_set.values() for method in each}
    ordered = sorted(ran, key=lambda method: (-ran[method], method))
    choices: list[tuple[list[str], list[tuple[str, int]]]] = []
    for k in range(3, len(ordered) + 1):
        whole = [key for key, each in by_set.items() if {*ordered[:k]} <= each.keys()]
        if len(whole) >= FEWEST:
            choices.append((ordered[:k], whole))
    if not choices:
        return None
    methods, keys = max(choices, key=lambda choice: (len({cell for cell, _ in choice[1]}), len(choice[0])))
    table = np.array([[by_set[key][method] for method in methods] for key in keys])
    means = stats.rankdata(-table, axis=1).mean(0).tolist()
    n, k = table.shape
    critical = stats.studentized_range.ppf(0.95, k, np.inf) / np.sqrt(2) * np.sqrt(k * (k + 1) / (6 * n))
    return Ranks(
        {method: mean for mean, method in sorted(zip(means, methods, strict=True))},
        sets=n,
        cells=len({cell for cell, _ in keys}),
        p_value=float(stats.friedmanchisquare(*table.T).pvalue),
        critical=float(critical),
    )


def said(ranks: Ranks) -> str:
    """Return the sentence before the table of ranks."""
    ahead = {a: ranks.mean[b] - ranks.mean[a] for a, b in combinations(ranks.mean, 2) if b == "rcfl"}
    surely = [f"`{a}`" for a, by in ahead.items() if by >= ranks.critical]
    unsure = [f"`{a}`" for a, by in ahead.items() if 0 < by < ranks.critical]
    text = f"Mean ranks of what has run in all of {ranks.cells} cells, {ranks.sets} folds in all (Friedman's p = "
    text += f"{ranks.p_value:.1g}). Ranks that differ by less than {ranks.critical:.2f} are not told apart "
    text += "(Nemenyi, 5 %)"
    text += f"; ahead of `rcfl`: {', '.join(surely)}" if surely else ""
    return text + (f"; ahead of `rcfl`, but not surely: {', '.join(unsure)}." if unsure else ".")


def draw(ranks: Ranks, path: Path) -> None:
    """Write the critical-difference diagram: methods on an axis of ranks, and bars over those not told apart."""
    names, bars = list(ranks.mean), ranks.alike()
    half = (len(names) + 1) // 2
    low, high = 1, len(names)
    top, step = 0.35 * (len(bars) + 1), 0.5
    bottom, margin = -top - step * half, 0.03 * (high - low)
    figure = Figure(figsize=(8, 0.55 * (1.2 - bottom)))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(low - 7 * margin, high + 7 * margin), ylim=(bottom, 1.2))
    axes.plot([low, high], [0, 0], color="black", lw=1)
    for tick in np.arange(low, high + 1):
        axes.plot([tick, tick], [0, 0.12], color="black", lw=1)
        axes.text(tick, 0.2, f"{tick:.0f}", ha="center", va="bottom", fontsize=9)
    for place, name in enumerate(names):
        left = place < half
        y = -top - step * (place if left else len(names) - 1 - place)
        end = low - margin if left else high + margin
        axes.plot([ranks.mean[name], ranks.mean[name], end], [0, y, y], color="black", lw=0.8)
        text = f"{name}  {ranks.mean[name]:.1f}" if left else f"{ranks.mean[name]:.1f}  {name}"
        weight = "bold" if name == "rcfl" else "normal"
        axes.text(end, y, f" {text} ", ha="right" if left else "left", va="center", fontsize=9, weight=weight)
    for row, (first, last) in enumerate(bars):
        span = [ranks.mean[first] - margin / 3, ranks.mean[last] + margin / 3]
        axes.plot(span, [-0.3 * (row + 1)] * 2, color="tab:blue", lw=3, solid_capstyle="round")
    axes.plot([low, low + ranks.critical], [0.9, 0.9], color="tab:blue", lw=3, solid_capstyle="round")
    axes.text(low + ranks.critical, 0.9, f"  critical difference {ranks.critical:.2f}", va="center", fontsize=9)
    axes.set_axis_off()
    with mpl.rc_context({"svg.hashsalt": "arena"}):
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
