"""Which updates are alike: heat maps of the similarities in each cluster, clients in the order of the tree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedclade.clustering import Similarity
from fedclade.report.colours import truth_colour
from fedclade.report.formats import count
from fedclade.report.outcome import ClientOrder
from fedclade.report.picture import Axis, Box, HeatMap, LegendEntry, Mark, Panel, Picture
from fedclade.report.run_view import RunView
from fedclade.runs import SimilarityMatrix

MOST_BLOCKS = 80
"""Between more clusters there are no lines, and of more true ones no strip: there would be nothing else to see."""

LOWEST_BLOCK = 0.04
"""Clusters of a smaller share of a matrix have no label beside it."""


def similarity_pictures(view: RunView, matrices: Sequence[SimilarityMatrix], side: int) -> list[Picture]:
    """Return a heat map of the cosine similarities for each of some matrices, all with one scale.

    White lines separate the current clusters; where the truth is known, a strip at the left shows each client's true
    cluster. Of more clients than ``side``, means over neighbours are drawn, so many in a row.
    """
    order, limit = ClientOrder(view.run), _largest_similarity(matrices)
    return [_picture(view, matrix, order, limit, side) for matrix in matrices]


def _largest_similarity(matrices: Sequence[SimilarityMatrix]) -> float:
    """Return the largest similarity of two different clients, up to the next tenth: the end of a colour scale."""
    pairs = [np.abs(m.alpha[~np.eye(len(m.clients), dtype=bool)]) for m in matrices]
    largest = max((float(each[np.isfinite(each)].max(initial=0.0)) for each in pairs), default=0.0)
    return min(1.0, math.ceil(10 * largest) / 10) or 0.1


def _picture(view: RunView, matrix: SimilarityMatrix, order: ClientOrder, limit: float, side: int) -> Picture:
    rows = order.rows(matrix.clients)
    clients = [matrix.clients[row] for row in rows]
    alpha = matrix.alpha[np.ix_(rows, rows)].astype(float)
    np.fill_diagonal(alpha, np.nan)  # everybody is like themselves
    values, names, step = _thinned(alpha, [view.outcome.name(client) for client in clients], side)
    n, truth = len(names), order.true_clusters(clients)
    marks: list[Mark] = [HeatMap(values, names, limit, "α"), *_lines(order.clusters(clients), step, n)]
    if truth and len(truth) <= MOST_BLOCKS:
        marks += _strip(truth, step, n)
    left = -0.5 - 0.06 * n if order.truth is not None else -0.5
    ticks = {
        (start + size / 2) / step - 0.5: name
        for start, size, name in order.clusters(clients)
        if size / len(clients) >= LOWEST_BLOCK
    }
    name = "root" if matrix.node == 0 else f"cluster {matrix.node}"
    title = f"{name}: {count(len(clients), 'client')}, round {matrix.round}"
    labels = sorted(set((order.truth or {}).values()))[:10]
    legend = [LegendEntry(truth_colour(label), f"true cluster {label}", "box") for label in labels]
    panel = Panel(marks, Axis("true cluster" if truth else "", range=(n - 0.5, -0.5), grid=False))
    return Picture(title, [panel], Axis("current cluster", range=(left, n - 0.5), ticks=ticks, grid=False), 520, legend)


def _thinned(alpha: Similarity, names: list[str], side: int) -> tuple[Similarity, list[str], int]:
    """Return a matrix of at most ``side`` rows, what to call them, and how many clients each stands for."""
    n = len(alpha)
    step = -(-n // side)
    if step == 1:
        unique = names if len(set(names)) == n else [f"{name} ({i})" for i, name in enumerate(names)]
        return alpha, unique, 1
    starts = np.arange(0, n, step)
    known = ~np.isnan(alpha)
    sums, counts = (
        np.add.reduceat(np.add.reduceat(values, starts, 0), starts, 1)
        for values in (np.where(known, alpha, 0.0), known.astype(float))
    )
    with np.errstate(invalid="ignore"):  # a block of one client with itself has no mean
        return sums / counts, [f"{names[i]} … ({i // step})" for i in starts], step


def _lines(blocks: Sequence[tuple[int, int, str]], step: int, n: int) -> list[Mark]:
    """Return lines between the current clusters."""
    if len(blocks) > min(MOST_BLOCKS, n / 2):
        return []
    places = [start / step - 0.5 for start, _, _ in blocks[1:]]
    upright: list[Mark] = [Box(at, at, -0.5, n - 0.5, "@panel") for at in places]
    return [*upright, *(Box(-0.5, n - 0.5, at, at, "@panel") for at in places)]


def _strip(truth: Sequence[tuple[int, int, int]], step: int, n: int) -> list[Mark]:
    """Return the strip of true clusters."""
    left, right, smallest = -0.5 - 0.055 * n, -0.5 - 0.015 * n, LOWEST_BLOCK * n * step
    return [
        Box(left, right, at / step - 0.5, (at + size) / step - 0.5, truth_colour(k), str(k) if size >= smallest else "")
        for at, size, k in truth
    ]
