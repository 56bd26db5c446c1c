"""Which clients are alike: the similarities of the last updates in each cluster, in the order of the tree."""

from __future__ import annotations

import numpy as np

from fedclade.clustering import Similarity
from fedclade.report.formats import count, number
from fedclade.report.page.plot import draw
from fedclade.report.page.section import Section, Table
from fedclade.report.run_view import RunView
from fedclade.report.similarity import similarity_pictures

SIDE = 100
"""A matrix of more clients is drawn as means over neighbours, so many in a row."""

MATRICES = 8
"""So many clusters can be looked at; the largest, and the root first."""


def similarity_section(view: RunView) -> Section | None:
    """Return heat maps of the cosine similarities, one for each cluster that has one; None if there is none."""
    kept = sorted(view.run.similarities, key=lambda s: (s.node != 0, -len(s.clients), s.node))
    if not kept:
        return None
    shown = kept[:MATRICES]
    pictures = similarity_pictures(view, shown, SIDE)
    caption = (
        "Cosine similarity of each pair of clients’ updates, clients in the order of the tree: what lies in one "
        "cluster should be warm, what lies in two cold. "
    )
    caption += "The strip at the left shows each client’s true cluster. " if view.outcome.truth is not None else ""
    if max(len(matrix.clients) for matrix in shown) > SIDE:
        caption += f"Matrices of more than {SIDE} clients are drawn as means over neighbours. "
    caption += f"{count(len(kept) - MATRICES, 'smaller cluster')} not shown." if len(kept) > MATRICES else ""
    figures = {picture.title: draw(picture) for picture in pictures}
    rows = [[str(m.node), str(m.round), str(len(m.clients)), *_extremes(m.alpha)] for m in shown]
    table = Table("Similarities by cluster", ["cluster", "round", "clients", "least", "mean", "most"], rows)
    title = "Similarity of the clients’ updates"
    return Section("similarity", title, caption.strip(), figures, pictures[0].legend, [table])


def _extremes(alpha: Similarity) -> list[str]:
    """Return the least, the mean and the largest similarity of two different clients."""
    pairs = alpha[~np.eye(len(alpha), dtype=bool)]
    return [number(float(value)) for value in (pairs.min(), pairs.mean(), pairs.max())]
