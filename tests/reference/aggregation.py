"""The robust rules as their papers state them, one vector and one number at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def median(vectors: Sequence[Vector]) -> Vector:
    """Yin et al. 2018, definition 1."""
    return np.array([_median([float(v[k]) for v in vectors]) for k in range(len(vectors[0]))])


def trimmed_mean(vectors: Sequence[Vector], f: int) -> Vector:
    """Yin et al. 2018, definition 2, of f = βn removed at each end."""
    found: list[float] = []
    for k in range(len(vectors[0])):
        left = sorted(float(v[k]) for v in vectors)
        for _ in range(f):
            left.remove(max(left))
            left.remove(min(left))
        found.append(sum(left) / len(left))
    return np.array(found)


def scores(vectors: Sequence[Vector], f: int) -> list[tuple[float, float]]:
    """Blanchard et al. 2017, section 4: s(i) = Σ_{i→j} ‖V_i − V_j‖² over the n − f − 2 closest to V_i.

    With the sum over all others, which decides between equal ones.
    """
    n = len(vectors)
    found: list[tuple[float, float]] = []
    for i in range(n):
        distances = sorted(
            float(((vectors[i] - vectors[j]) ** 2).sum()) for j in range(n) if j != i
        )
        found.append((sum(distances[: max(1, n - f - 2)]), sum(distances)))
    return found


def krum(vectors: Sequence[Vector], f: int) -> Vector:
    """The vector of the least score."""
    all_scores = scores(vectors, f)
    return vectors[all_scores.index(min(all_scores))]


def multi_krum(vectors: Sequence[Vector], f: int, m: int) -> Vector:
    """The mean of the m vectors that score best."""
    all_scores = scores(vectors, f)
    best = sorted(range(len(vectors)), key=lambda i: (all_scores[i], i))[:m]
    return sum((vectors[i] for i in best), np.zeros_like(vectors[0])) / m


def bulyan(vectors: Sequence[Vector], f: int) -> Vector:
    """El Mhamdi et al. 2018, section 4: θ = n − 2f by Krum, then of each coordinate those θ − 2f near the median."""
    received, selected = list(vectors), list[Vector]()
    theta = len(vectors) - 2 * f
    while len(selected) < theta:
        chosen = krum(received, f)
        selected.append(chosen)
        received = [v for v in received if v is not chosen]
    beta, found = theta - 2 * f, list[float]()
    for k in range(len(vectors[0])):
        values = [float(v[k]) for v in selected]
        middle = _median(values)
        closest = sorted(values, key=lambda value: abs(value - middle))[:beta]
        found.append(sum(closest) / beta)
    return np.array(found)


def geometric_median(
    vectors: Sequence[Vector], alphas: Sequence[float], start: Vector, nu: float, steps: int
) -> Vector:
    """Pillutla et al. 2019, smoothed Weiszfeld: β_i = α_i / (ν ∨ ‖v − w_i‖), v ← Σ β_i w_i / Σ β_i."""
    v = start
    for _ in range(steps):
        betas = [
            alpha / max(nu, float(np.linalg.norm(v - w)))
            for alpha, w in zip(alphas, vectors, strict=True)
        ]
        v = sum((beta * w for beta, w in zip(betas, vectors, strict=True)), np.zeros_like(v)) / sum(
            betas
        )
    return v


def centred_clipping(
    vectors: Sequence[Vector], start: Vector, radius: float | None, steps: int
) -> Vector:
    """Karimireddy et al. 2021: v ← v + 1/n Σ (x_i − v) min(1, τ/‖x_i − v‖); τ of None: the median of the distances."""
    v = start
    for _ in range(steps):
        distances = [float(np.linalg.norm(x - v)) for x in vectors]
        tau = _median(distances) if radius is None else radius
        pulls = [
            (x - v) * (1.0 if far <= tau else tau / far)
            for x, far in zip(vectors, distances, strict=True)
        ]
        v = v + sum(pulls, np.zeros_like(v)) / len(vectors)
    return v


def mixed(vectors: Sequence[Vector], f: int) -> list[Vector]:
    """Allouah et al. 2023: each vector becomes the mean of the n − f nearest to it, itself among them."""
    found: list[Vector] = []
    for x in vectors:
        nearest = sorted(vectors, key=lambda y: float(np.linalg.norm(x - y)))[: len(vectors) - f]
        found.append(sum(nearest, np.zeros_like(x)) / len(nearest))
    return found


def _median(values: Sequence[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else math.fsum(ordered[half - 1 : half + 1]) / 2
