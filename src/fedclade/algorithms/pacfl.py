"""PACFL: Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin 2023 (arXiv:2209.10526), Algorithm 1.

Before training, every client sends the first p left singular vectors of its data. The server compares clients by the
angles between these, clusters them once by hierarchical clustering with a threshold, which also settles how many
clusters there are, and trains each cluster by FedAvg. The vectors show what the data looks like: the first one of a
label is close to the mean of the client's images of it.

Where paper and official code differ or leave a choice, this file makes it:

- ``per_label``: the paper decomposes the matrix of all data of a client. The official code does so where clients hold
  different data sets (MIX-4); where they differ in labels, it decomposes the data of each label by itself.
- ``angle``: the smallest principal angle, or the angles between vectors of the same place (the trace of arccos(UᵀV));
  the paper names both. Per label, the smallest angle of each label is averaged over the labels that at least one of the
  two clients holds; a label that one of them lacks counts as 90°. The official code takes the smallest angle between
  any two vectors instead, whatever their labels. That is blind to what labels are called: on swapped labels it finds
  nothing (docs/results.md).
- Angles lie in [0°, 90°], since the sign of a singular vector means nothing (the official code keeps it), and the trace
  is divided by the number of vectors, so that a threshold means the same whatever p is.
- Linkage is by the mean over pairs; the "average" of the official code weighs the two clusters that merge alike.
- The threshold is the user's. ``"auto"`` cuts where the next merge is the largest step up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import average, cut_tree, fcluster
from scipy.spatial.distance import squareform
from torch import Tensor

from fedclade.algorithms.base import Algorithm, Event, RoundLog, State, log_of, move_clusters, train_clusters
from fedclade.clients import Clients, Round
from fedclade.errors import require
from fedclade.tree import ParameterTree

Angles = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PACFL(Algorithm):
    """Clusters by principal angles between the clients' data, found once before training (Vahidian et al. 2023).

    Parameters
    ----------
    vectors
        p, how many singular vectors each client sends (for each label); 3 to 5 in the paper.
    per_label
        Whether the data of each label is decomposed by itself.
    angle
        Between two clients: the ``smallest`` principal angle, or the mean of all angles between vectors of the
        ``same_place``.
    threshold
        Clusters merge as long as their mean angle is at most this, in degrees; β of the paper.
    clusters
        How many clusters to make, instead of a threshold.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    needs_updates: ClassVar[bool] = False

    vectors: int = 3
    per_label: bool = True
    angle: Literal["smallest", "same_place"] = "smallest"
    threshold: float | Literal["auto"] = "auto"
    clusters: int | None = None

    def __post_init__(self) -> None:
        threshold_holds = self.threshold == "auto" if isinstance(self.threshold, str) else 0 <= self.threshold <= 90
        known = ("smallest", "same_place")
        require(
            ("algorithm.vectors", self.vectors, self.vectors >= 1, "at least 1"),
            ("algorithm.angle", self.angle, self.angle in known, "'smallest' or 'same_place'"),
            ("algorithm.threshold", self.threshold, threshold_holds, "an angle from 0 to 90 degrees, or 'auto'"),
            ("algorithm.clusters", self.clusters, self.clusters is None or self.clusters >= 1, "at least 1"),
        )

    def init(self, params: Tensor, clients: Clients) -> State:
        """Put all clients in one cluster; they are asked for their vectors in the first round."""
        return State(ParameterTree.root_only(clients.ids, params))

    def step(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, RoundLog]:
        """Cluster all clients, if that is still to be done; then run one round of FedAvg in every cluster."""
        events: list[Event] = []
        if len(state.tree.nodes) == 1:
            found = self._clusters(clients)
            state = State(ParameterTree.star(found, state.tree.nodes[0].params))
            events.append(Event("clustered", 0, {"clusters": found}))
        parts = train_clusters(state, cohort, clients, this_round)
        return State(move_clusters(state.tree, parts)), log_of(parts, events)

    def _clusters(self, clients: Clients) -> list[list[int]]:
        ids = sorted(clients.ids)
        degrees = angles(clients.subspaces(ids, self.vectors, self.per_label), self.angle)
        labels = self._labels(degrees)
        return [
            [client for client, label in zip(ids, labels, strict=True) if label == k] for k in dict.fromkeys(labels)
        ]

    def _labels(self, degrees: Angles) -> list[int]:
        n = len(degrees)
        if n == 1 or (n == 2 and self.threshold == "auto" and self.clusters is None):
            return [0] * n
        merges = average(squareform(degrees, checks=False))
        if self.clusters is not None:
            return cut_tree(merges, n_clusters=min(self.clusters, n)).ravel().tolist()
        heights = merges[:, 2]
        largest = int(np.diff(heights).argmax())
        threshold = heights[largest] if self.threshold == "auto" else self.threshold
        return fcluster(merges, threshold, criterion="distance").tolist()


def angles(vectors: Tensor, angle: Literal["smallest", "same_place"] = "smallest") -> Angles:
    """Return the angle between every two clients in degrees, ``[n, n]``, from their vectors ``[n, L, d, p]``."""
    vectors = vectors.cpu().double()
    held = vectors[..., 0].any(dim=2)
    degrees = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for i, mine in enumerate(vectors):
        products = mine.mT @ vectors
        if angle == "smallest":  # its cosine is the largest singular value of UᵀV
            each = _degrees(torch.linalg.matrix_norm(products, 2))
        else:
            each = _degrees(products.diagonal(dim1=-2, dim2=-1)).mean(dim=2)
        counted = held[i] | held
        degrees[i] = (each * counted).sum(dim=1) / counted.sum(dim=1)
    return degrees.fill_diagonal_(0.0).numpy()


def _degrees(cosines: Tensor) -> Tensor:
    return torch.rad2deg(cosines.abs().clamp(max=1.0).arccos())
