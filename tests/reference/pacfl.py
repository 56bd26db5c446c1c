"""The clustering of Vahidian et al. 2023 (PACFL), step by step, in NumPy's float64 and plain loops."""

from __future__ import annotations

import numpy as np
from scipy.linalg import subspace_angles

from fedclade.data.federation import Federation


def principal_vectors(
    federation: Federation, client: int, p: int, label: int | None = None
) -> np.ndarray:
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
    return float(
        np.mean(
            [np.rad2deg(np.arccos(min(1.0, abs(u @ v)))) for u, v in zip(U.T, V.T, strict=True)]
        )
    )


def distance_of_paper(
    U_of: list[np.ndarray], V_of: list[np.ndarray], angle: str = "smallest"
) -> float:
    """Θ₁ or the trace (Algorithm 1), between two clients that each send one matrix, of all their data."""
    (U,), (V,) = U_of, V_of
    return smallest_angle(U, V) if angle == "smallest" else angle_of_same_place(U, V)


def distance_of_code(U_of: list[np.ndarray], V_of: list[np.ndarray]) -> float:
    """``main_pacfl.py`` and ``calculating_adjacency``: the labels' vectors side by side, the smallest angle of any two.

    The sign of a singular vector is that of the library that decomposes, so both signs of V are looked at.
    """
    U, V = np.hstack(U_of), np.hstack(V_of)
    angles = [np.min(np.arccos(np.clip(U.T @ signed, -1.0, 1.0))) for signed in (V, -V)]
    return float(min(angles) * 180 / np.pi)


def distance_per_label(
    U_of: list[np.ndarray], V_of: list[np.ndarray], angle: str = "smallest"
) -> float:
    """The variant of fedclade: the mean over labels of the principal angle between the data of the same label."""
    of_two = smallest_angle if angle == "smallest" else angle_of_same_place
    return float(np.mean([of_two(U, V) for U, V in zip(U_of, V_of, strict=True)]))


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
