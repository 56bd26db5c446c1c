"""The clustering of Vahidian et al. 2023 (PACFL), step by step, in NumPy's float64 and plain loops."""

from __future__ import annotations

import numpy as np
from scipy.linalg import subspace_angles

from fedclade.data.federation import Federation


def principal_vectors(federation: Federation, client: int, p: int, label: int | None = None) -> np.ndarray:
    """U_p ``[d, p]`` of the data matrix ``[d, n]`` of a client: all of its data, or that of one label."""
    x, y = federation.examples(client, "train")
    D = x.flatten(1).numpy().astype(np.float64).T
    D = D if label is None else D[:, y.numpy() == label]
    return np.linalg.svd(D, full_matrices=False)[0][:, :p]


def smallest_angle(U: np.ndarray, V: np.ndarray) -> float:
    """Θ₁(U, V), in degrees."""
    return float(np.rad2deg(subspace_angles(U, V).min()))


def angle_of_same_place(U: np.ndarray, V: np.ndarray) -> float:
    """tr(arccos(UᵀV)) in degrees, divided by p, with the signs of singular vectors made equal."""
    return float(np.mean([np.rad2deg(np.arccos(min(1.0, abs(u @ v)))) for u, v in zip(U.T, V.T, strict=True)]))


def hierarchical_clustering(A: np.ndarray, beta: float) -> set[frozenset[int]]:
    """Merge the two nearest clusters until none are within β; their distance is the mean over pairs."""
    clusters = [[i] for i in range(len(A))]
    while len(clusters) > 1:
        pairs = [(a, b) for n, a in enumerate(clusters) for b in clusters[n + 1 :]]
        a, b = min(pairs, key=lambda pair: A[np.ix_(*pair)].mean())
        if A[np.ix_(a, b)].mean() > beta:
            break
        clusters = [c for c in clusters if c not in (a, b)] + [a + b]
    return {frozenset(cluster) for cluster in clusters}
