"""The similarities of the clients' updates, as heat maps in the order of the parameter tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedclade.report import facts, style
from fedclade.report.facts import ClientOrder
from fedclade.report.formats import count
from fedclade.runs import Run, SimilarityMatrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL_LIMIT = 12
"""So many clusters are drawn beside the root; of the rest only the number is told."""

SIDE = 5.2
"""Inches of the root's square, and of the height of the grid beside it."""

WORDS, GAP = 0.55, 0.35
"""Inches for what is written above and below a panel, and beside it."""

NARROWEST = 0.012
"""Blocks that are narrower than this share of a panel, on average, have no lines between them: they would cover it."""

ALONE = "Every cluster holds one client: there are no two updates to compare."
"""Why a picture of similarities is empty."""


def similarity_figure(run: Run) -> Figure:
    """Draw the cosine similarities of the last updates in every cluster: the root large, the others small.

    Clients stand in the order of the parameter tree's leaves, with white lines between them; where the truth is known,
    a strip at the left shows each client's true cluster. One colour scale for all, symmetric around 0; the diagonal is
    left out of it, as everyone is like themselves.
    """
    order = ClientOrder(run)
    root = [s for s in run.similarities if s.node == 0]
    others = sorted((s for s in run.similarities if s.node != 0), key=lambda s: s.node)
    shown, hidden = others[:SMALL_LIMIT], others[SMALL_LIMIT:]
    if not run.similarities:
        return _empty_figure(run)
    figure, panels, bar = _panels(len(root), len(shown))
    limit = facts.largest_similarity([*root, *shown])
    for i, (axes, matrix) in enumerate(zip(panels, [*root, *shown], strict=True)):
        _draw(axes, matrix, order, limit, is_large=i < len(root) or not root)
    style.color_bar(bar, panels[0].images[0], "cosine similarity α of two updates")
    more = f"  ({count(len(hidden), 'more cluster')} not shown)" if hidden else ""
    style.set_title(figure, "Similarity of the clients’ updates in every cluster", facts.heading(run) + more)
    return figure


def _empty_figure(run: Run) -> Figure:
    """Say why there is no heat map."""
    figure = style.new_figure(7.4, 3.0)
    axes = figure.subplots()
    axes.set_axis_off()
    alone = all(len(leaf.members) == 1 for leaf in run.tree.leaves)
    style.explain_empty(axes, ALONE if alone else "No similarities were kept.")
    style.set_title(figure, "Similarity of the clients’ updates", facts.heading(run))
    return figure


def _panels(n_large: int, n_small: int) -> tuple[Figure, list[Axes], Axes]:
    """Lay out a square for the root, if there is one, a grid beside it for the other clusters, and a colour bar."""
    columns = math.ceil(math.sqrt(n_small))
    rows = math.ceil(n_small / columns) if n_small else 1
    side = (SIDE - (rows - 1) * WORDS) / rows  # so that the grid is as high as the square
    widths = [SIDE] * n_large + [side] * columns
    figure = style.new_figure(sum(widths) + GAP * len(widths) + 1.3, style.HEADER + SIDE + 2 * WORDS)
    grid = figure.add_gridspec(rows, len(widths) + 1, width_ratios=[*widths, 0.16])
    large = [figure.add_subplot(grid[:, 0]) for _ in range(n_large)]
    small = [figure.add_subplot(grid[i // columns, n_large + i % columns]) for i in range(n_small)]
    return figure, [*large, *small], figure.add_subplot(grid[:, -1])


def _draw(axes: Axes, matrix: SimilarityMatrix, order: ClientOrder, limit: float, *, is_large: bool) -> None:
    """Draw one heat map with its lines and its strip."""
    n = len(matrix.clients)
    rows = order.rows(matrix.clients)
    alpha = matrix.alpha[np.ix_(rows, rows)]
    np.fill_diagonal(alpha, np.nan)
    axes.imshow(alpha, cmap=style.diverging_map(), vmin=-limit, vmax=limit, extent=(0, n, n, 0), aspect="auto")
    clients = [matrix.clients[row] for row in rows]
    blocks = order.clusters(clients)
    if len(blocks) * NARROWEST <= 1:
        for start, _, _ in blocks[1:]:
            axes.axhline(start, color="white", linewidth=2 if is_large else 1, gid="between leaves")
            axes.axvline(start, color="white", linewidth=2 if is_large else 1, gid="between leaves")
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    narrowest_label = 0.035 * n if is_large else 0.12 * n
    named = [block for block in blocks if block[1] >= narrowest_label]
    axes.set_xticks([start + size / 2 for start, size, _ in named], [name for _, _, name in named])
    axes.tick_params(length=0, labelsize=9.5 if is_large else 8.5, labelcolor=style.INK)
    title = f"{'node ' if is_large else ''}{matrix.node}: {count(n, 'client')}, round {matrix.round}"
    axes.set_title(title, fontsize=11 if is_large else 9.5, color=style.INK, loc="left")
    if is_large:
        style.label(axes, x="current cluster")
    if order.truth is not None:
        _draw_truth(axes, order.true_clusters(clients), n, named=is_large)


def _draw_truth(axes: Axes, blocks: Sequence[tuple[int, int, int]], n: int, *, named: bool) -> None:
    """Draw a strip at the left of a heat map, coloured by true cluster."""
    width = 0.045 * n
    for start, size, label in blocks:
        color = style.TRUTH[label % len(style.TRUTH)]
        axes.bar(-0.7 * width, size, width, bottom=start, color=color, gid="true cluster")
        if named and size >= 0.04 * n:
            middle = (-0.7 * width, start + size / 2)
            axes.text(*middle, str(label), ha="center", va="center", fontsize=9.5, color=style.INK)
    axes.set_xlim(-1.2 * width, n)
    axes.set_ylim(n, 0)
    if named:
        style.label(axes, y="true cluster")
