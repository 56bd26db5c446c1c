"""Algorithms 2 and 3 of the CFL paper (Sattler et al. 2019), recursion and all, in NumPy's float64 and plain loops.

The recursion's clusters train side by side in the library, so every call is given the round that it begins in. The
choices of Algorithm 3:

- Line 3 has gradients at θ*; section V-A puts updates in their place (``updates``), from θ* as well (eq. 47), or by
  ``latest`` the last transmitted ones, which were made before the last step (section III).
- Line 6 holds ε₂ against what is compared, or against the last transmitted updates (``eps2_of_updates``).
- Lines 7 and 8 start the children from θ*; the authors' code starts each from its own members' mean (``own_mean``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tests.reference.bipartition import alpha_cross_max, bipartition

Vector = np.ndarray
Cluster = frozenset[int]


@dataclass
class Stationary:
    """What Algorithm 2 returns: θ*, with what its last round began from and transmitted, and the round after it."""

    theta: Vector
    before: Vector
    delta: dict[int, Vector]
    next_round: int


class Client(Protocol):
    """A client: |D_i|, SGD_n(θ, D_i) − θ, and ∇r_i(θ)."""

    size: int

    def update(self, theta: Vector) -> Vector: ...

    def gradient(self, theta: Vector) -> Vector: ...


@dataclass
class Clustering:
    """Algorithm 3 on some clients; its results are gathered while the recursion runs."""

    clients: Mapping[int, Client]
    eps1: float
    eps2: float
    gamma_max: float = 0.0
    updates: bool = True
    latest: bool = False
    eps2_of_updates: bool = False
    own_mean: bool = False
    last_round: int = 1000
    theta: dict[int, Vector] = field(default_factory=dict)
    """Of each client, what line 12 returns."""
    done_in: dict[Cluster, int] = field(default_factory=dict)
    """Of each cluster that line 10 is reached for, its last round of training."""
    split_in: dict[Cluster, int] = field(default_factory=dict)
    edges: dict[Cluster, dict[int, Vector]] = field(default_factory=dict)
    """Of each cluster that was split, the updates that its edges cache (eq. 47)."""
    stationary: dict[Cluster, Vector] = field(default_factory=dict)
    """Of each cluster that was split, the model at which these updates were made."""

    def federated_learning(self, theta: Vector, c: Cluster, t: int) -> Stationary | None:
        """Algorithm 2; None if it has not ended by the last round."""
        D_c = sum(self.size(i) for i in c)
        while True:  # line 2
            if t > self.last_round:
                return None
            delta = {i: self.clients[i].update(theta) for i in c}  # lines 3 to 6
            mean = sum(self.size(i) / D_c * delta[i] for i in c)
            before, theta, t = theta, theta + mean, t + 1  # line 7
            if np.linalg.norm(mean) < self.eps1:  # line 8
                return Stationary(theta, before, delta, t)  # line 9

    def run(self, theta: Vector, c: Cluster, t: int = 1) -> None:
        """Algorithm 3."""
        found = self.federated_learning(theta, c, t)  # line 2
        if found is None:
            return
        last = found.next_round - 1
        if self.updates and self.latest:
            compared = found.delta
        elif self.updates:
            compared = {i: self.clients[i].update(found.theta) for i in c}
        else:
            at = found.before if self.latest else found.theta
            compared = {i: -self.clients[i].gradient(at) for i in c}
        if len(c) > 1:
            members = sorted(c)
            # line 3
            alpha = np.array(
                [[_cosine(compared[i], compared[j]) for j in members] for i in members]
            )
            parts = bipartition(alpha)  # line 4
            cross = alpha_cross_max(alpha, *parts)  # line 5
            vectors = found.delta if self.eps2_of_updates else compared
            far = max(np.linalg.norm(vector) for vector in vectors.values()) >= self.eps2
            if far and np.sqrt((1 - cross) / 2) > self.gamma_max:  # line 6
                self.split_in[c] = last
                from_theta = self.updates and not self.latest
                self.edges[c] = compared if from_theta else found.delta
                self.stationary[c] = found.theta if from_theta else found.before
                for part in parts:  # lines 7 and 8
                    child = frozenset(members[k] for k in part)
                    self.run(self.start_of(child, c, found), child, found.next_round)
                return
        self.done_in[c] = last
        self.theta |= dict.fromkeys(c, found.theta)  # line 10

    def start_of(self, child: Cluster, c: Cluster, found: Stationary) -> Vector:
        if not self.own_mean:
            return found.theta
        D_c = sum(self.size(i) for i in child)
        return self.stationary[c] + sum(self.size(i) / D_c * self.edges[c][i] for i in child)

    def size(self, i: int) -> int:
        return self.clients[i].size


def _cosine(a: Vector, b: Vector) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
