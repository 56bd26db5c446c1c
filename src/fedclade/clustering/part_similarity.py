"""How alike clients are by the updates of parts of their data, and what it is worth to part the clients."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fedclade.clustering.dendrograms import Matrix
from fedclade.clustering.similarity import Labels, are_signs, from_signs

VIEWS = 2
"""In which parts are looked at: by their cosines, and with their directions evened out."""

EVENED = 10
"""Directions in which parts vary so many times as much as in the median one count half as much as they could."""

LEAST_GAIN = 1e-9
"""Of a move from cluster to cluster: what gains less is rounding, and might be made for ever."""

NOTHING = 1e-6
"""Of the largest variance: directions with less are those of rounding."""


def part_similarity(signatures: Tensor) -> Matrix:
    """Return the cosines of all parts ``[n·r, n·r]`` of signatures ``[n, r, R]``, with zeros on the diagonal."""
    flat = signatures.flatten(0, 1)
    unit = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-30)
    cosines = (unit @ unit.T).double().cpu().numpy()
    if are_signs(flat):
        cosines = from_signs(cosines)
    np.fill_diagonal(cosines, 0.0)
    return cosines


def client_similarity(cosines: Matrix, parts: int) -> Matrix:
    """Return the mean cosine of two clients' parts ``[..., n, n]``; on the diagonal, of a client's different ones."""
    *some, size, _ = cosines.shape
    n = size // parts
    mean = cosines.reshape(*some, n, parts, n, parts).sum((-3, -1)) / parts**2
    own = np.arange(n)
    mean[..., own, own] *= parts / (parts - 1)
    return mean


def worth_of(similarity: Matrix, labels: Labels) -> float:
    """Return what a partition ``[n]`` is worth: |c| times the mean similarity of its pairs, over its clusters."""
    found = 0.0
    for cluster in np.unique(labels):
        members = np.flatnonzero(labels == cluster)
        block = similarity[np.ix_(members, members)]
        alone = len(members) == 1
        found += float(block.sum()) if alone else float((block.sum() - np.trace(block)) / (len(members) - 1))
    return found


def improved(similarity: Matrix, labels: Labels, cost: float) -> Labels:
    """Return a partition ``[n]`` after single clients changed their cluster while its worth, less costs, could grow.

    A dendrogram never takes back what it once merged, so that one noisy client may sit in the wrong branch. The most
    gainful move is made first. That every client moves into one cluster gains nothing where the partition pays.
    """
    own, labels = similarity.diagonal(), labels.copy()
    pairs = similarity - np.diag(own)
    everybody = np.arange(len(labels))
    while True:
        members = np.eye(labels.max() + 1)[labels]  # [n, k]
        sizes, towards = members.sum(0), pairs @ members
        inside, alone = (members * towards).sum(0), own @ members  # alone: of clusters of one
        worth = np.where(sizes > 1, inside / np.maximum(sizes - 1, 1), alone)
        here = towards[everybody, labels]
        left = _worth_left(sizes[labels], inside[labels] - 2 * here, alone[labels] - own, cost)
        gains = (inside + 2 * towards) / sizes - worth + (left - worth[labels])[:, None]  # [n, k]
        gains[everybody, labels] = 0.0
        client, cluster = np.unravel_index(gains.argmax(), gains.shape)
        if gains[client, cluster] <= LEAST_GAIN:
            return labels
        labels[client] = cluster
        labels = np.unique(labels, return_inverse=True)[1]


def _worth_left(sizes: Matrix, inside: Matrix, alone: Matrix, cost: float) -> Matrix:
    """Return what each client's cluster is worth without it, ``[n]``; one that is left empty saves its cost."""
    of_many = inside / np.maximum(sizes - 2, 1)
    return np.where(sizes == 1, cost, np.where(sizes == 2, alone, of_many))


def noise_of(similarity: Matrix, parts: int) -> float:
    """Return σ², the noise of the mean of a client's r parts: an r-th of that of one, which two of a client show."""
    return max(0.0, 1 - float(similarity.diagonal().mean())) / parts


def gain_by_parts(similarity: Matrix, labels: Labels, noise: float) -> float:
    """Return the gain of a partition ``[n]`` per client: its worth, less that of one cluster and the others' noise."""
    clusters = len(np.unique(labels))
    one = worth_of(similarity, np.zeros_like(labels))
    return (worth_of(similarity, labels) - one - (clusters - 1) * noise) / len(labels)


def views_of(cosines: Matrix, across: Matrix | None = None) -> tuple[Matrix, Matrix]:
    """Return how alike parts are in two views, each ``[N, N]`` with zeros on the diagonal: cosines, and evened out.

    Where updates vary most, it is often for reasons of no interest: how many examples of each label there happen to be
    moves the whole last layer. Therefore in the second view the directions of variance v (eigenvalues of the cosines,
    less those with the parts' mean) are scaled to v/(v + λ), with λ ten times the median of v: those of large variance
    count about alike. The more parts, the better this tells noise that all have in common from what only some have.

    Nothing in either view hangs on which part is whose, so that shuffling clients' parts shuffles the views, too.

    Parameters
    ----------
    cosines
        Of N parts (:func:`part_similarity`), from which the views are made, ``[N, N]``.
    across
        Of M other parts with these, ``[M, N]``: the views are then of those, and rows may have any scale.
    """
    whole = cosines + np.eye(len(cosines))
    middle = whole.mean(0)
    own = whole - middle - middle[:, None] + middle.mean()
    values, vectors = np.linalg.eigh(own)
    values = np.maximum(values, 0.0)
    scaled = values + EVENED * max(float(np.median(values[values >= NOTHING * values[-1]])), 1e-30)
    evening = (vectors / scaled) @ vectors.T
    lengths = np.sqrt(np.maximum((own * evening).sum(1), 1e-30))
    if across is not None:
        apart = across - across.mean(1, keepdims=True) - middle + middle.mean()
        return across, apart @ evening / lengths
    evened = own @ evening / np.outer(lengths, lengths)
    np.fill_diagonal(evened, 0.0)
    return cosines, evened


def gammas_of(similarity: Matrix, parts: int) -> Matrix:
    """Return γ_i of CFL's eq. 39 for whole updates, which have an r-th of the noise of a part's, ``[n]``."""
    own = similarity.diagonal()
    with np.errstate(divide="ignore"):
        return np.where(own > 0, np.sqrt(np.maximum(1 / own - 1, 0) / parts), np.inf)
