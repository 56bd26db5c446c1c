"""Who is like whom: the similarities of the last updates in each cluster, in the order of the tree."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedclade.clustering import Similarity
from fedclade.report import facts
from fedclade.report.facts import ClientOrder
from fedclade.report.formats import count, number
from fedclade.report.page import plot
from fedclade.report.page.palette import Key, truth_colour
from fedclade.report.page.run_view import RunView
from fedclade.report.page.section import Figure, Section, Table
from fedclade.runs import SimilarityMatrix

SIDE = 100
"""A matrix of more clients is drawn as means over neighbours, so many in a row."""

MATRICES = 8
"""So many clusters can be looked at; the largest, and the root first."""

MOST_BLOCKS = 80
"""Between more clusters there are no lines, and of more true ones no strip: there would be nothing else to see."""

LOWEST_BLOCK = 0.05
"""Clusters of a smaller share of a matrix have no label beside it."""

SCALE = [[0, "@low2"], [0.25, "@low1"], [0.5, "@middle"], [0.75, "@high1"], [1, "@high2"]]


def similarity_section(subject: RunView) -> Section | None:
    """Return heat maps of the cosine similarities, one for each cluster that has one; None if there is none."""
    kept = sorted(subject.run.similarities, key=lambda s: (s.node != 0, -len(s.clients), s.node))
    if not kept:
        return None
    shown = kept[:MATRICES]
    order, limit = ClientOrder(subject.run), facts.largest_similarity(shown)
    figures = {_name(matrix): _figure(subject, matrix, order, limit) for matrix in shown}
    thinned = max(len(matrix.clients) for matrix in shown) > SIDE
    caption = (
        "Cosine similarity of each pair of clients’ updates, clients in the order of the tree: what lies in one "
        "cluster should be warm, what lies in two cold. "
    )
    truth = order.truth
    caption += "" if truth is None else "The strip at the left shows each client’s true cluster. "
    caption += f"Matrices of more than {SIDE} clients are drawn as means over neighbours. " if thinned else ""
    caption += f"{count(len(kept) - MATRICES, 'smaller cluster')} not shown." if len(kept) > MATRICES else ""
    labels = sorted(set(truth.values())) if truth else []
    legend = [Key(truth_colour(label), f"true cluster {label}", "box") for label in labels[:10]]
    rows = [[str(m.node), str(m.round), str(len(m.clients)), *_extremes(m.alpha)] for m in shown]
    table = Table("Similarities by cluster", ["cluster", "round", "clients", "least", "mean", "most"], rows)
    return Section("similarity", "Similarity of the clients’ updates", caption.strip(), figures, legend, [table])


def _name(matrix: SimilarityMatrix) -> str:
    what = "root" if matrix.node == 0 else f"cluster {matrix.node}"
    return f"{what}: {count(len(matrix.clients), 'client')}, round {matrix.round}"


def _extremes(alpha: Similarity) -> list[str]:
    """Return the least, the mean and the largest similarity of two different clients."""
    pairs = alpha[~np.eye(len(alpha), dtype=bool)]
    return [number(float(value)) for value in (pairs.min(), pairs.mean(), pairs.max())]


def _figure(subject: RunView, matrix: SimilarityMatrix, order: ClientOrder, limit: float) -> Figure:
    rows = order.rows(matrix.clients)
    clients = [matrix.clients[row] for row in rows]
    alpha = matrix.alpha[np.ix_(rows, rows)].astype(float)
    np.fill_diagonal(alpha, np.nan)
    drawn, names, step = _thinned(alpha, [subject.drawn_name(client) for client in clients])
    heat = {
        "type": "heatmap",
        "z": [[None if np.isnan(v) else round(float(v), 2) for v in row] for row in drawn],
        "x": names,
        "y": names,
        "zmin": -limit,
        "zmax": limit,
        "colorscale": SCALE,
        "colorbar": {"title": {"text": "α", "side": "top"}, "thickness": 12, "outlinewidth": 0, "len": 0.9},
        "hovertemplate": "%{x} and %{y}<br>similarity %{z:.2f}<extra></extra>",
    }
    shapes, labels = _marks(clients, order, step, len(names))
    hidden = {"visible": False, "type": "category", "constrain": "domain"}
    strip = -0.5 - 0.06 * len(names) if order.truth is not None else -0.5
    return plot.figure(
        [heat],
        520,
        xaxis=hidden | {"range": [strip, len(names) - 0.5]},
        yaxis=hidden | {"range": [len(names) - 0.5, -0.5], "scaleanchor": "x"},
        shapes=shapes,
        annotations=labels,
        margin={"l": 8, "r": 8, "t": 16, "b": 36},
    )


def _thinned(alpha: Similarity, names: list[str]) -> tuple[Similarity, list[str], int]:
    """Return a matrix of at most ``SIDE`` rows, what to call them, and how many clients each stands for."""
    n = len(alpha)
    step = -(-n // SIDE)
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
        return sums / counts, [f"{names[i]} …" + f" ({i // step})" for i in starts], step


def _marks(clients: list[int], order: ClientOrder, step: int, n: int) -> tuple[list[Any], list[Any]]:
    """Return lines between the clusters with their names below, and the strip of true clusters."""
    blocks = order.clusters(clients)
    shapes: list[dict[str, Any]] = []
    if len(blocks) <= min(MOST_BLOCKS, n / 2):
        for start, _, _ in blocks[1:]:
            at, look = start / step - 0.5, {"type": "line", "line": {"color": "@panel", "width": 2}}
            shapes += [{**look, "x0": at, "x1": at, "y0": -0.5, "y1": n - 0.5}]
            shapes += [{**look, "x0": -0.5, "x1": n - 0.5, "y0": at, "y1": at}]
    labels = [
        plot.note(name, (start + size / 2) / step - 0.5, n - 0.5, xref="x", yref="y", yanchor="top", yshift=-2)
        for start, size, name in blocks
        if size / len(clients) >= LOWEST_BLOCK
    ]
    labels.append(plot.note("current cluster", n / 2, n - 0.5, xref="x", yref="y", yanchor="top", yshift=-18))
    strip = order.true_clusters(clients)
    if len(strip) <= MOST_BLOCKS:
        for start, size, label in strip:
            place = {"y0": start / step - 0.5, "y1": (start + size) / step - 0.5}
            wide = {"x0": -0.5 - 0.055 * n, "x1": -0.5 - 0.015 * n, "line": {"width": 0}}
            shapes.append({"type": "rect", "fillcolor": truth_colour(label), **place, **wide})
    return shapes, labels
