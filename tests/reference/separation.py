"""Eqs. 19 to 21 of the CFL paper, pair by pair in plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi, sin, sqrt


def h_of(gamma_i: float, gamma_j: float) -> float:
    """Eq. 20."""
    return -gamma_i * gamma_j + sqrt(1 - gamma_i**2) * sqrt(1 - gamma_j**2)


def bound_of_eq_19(gammas: Sequence[float], I: Sequence[int]) -> float:  # noqa: E741
    """The largest over all pairs of different distributions: those across the best split are among them."""
    k, found = len(set(I)), []
    for i in range(len(I)):
        for j in range(len(I)):
            if I[i] != I[j]:
                h = h_of(gammas[i], gammas[j])
                if h >= cos(pi / (k - 1)):
                    found.append(cos(pi / (k - 1)) * h + sin(pi / (k - 1)) * sqrt(1 - h**2))
                else:
                    found.append(1.0)
    return max(found)


def bound_of_eq_21(gammas: Sequence[float], I: Sequence[int]) -> float:  # noqa: E741
    n = range(len(I))
    return min(
        [h_of(gammas[i], gammas[j]) for i in n for j in n if i != j and I[i] == I[j]], default=1.0
    )
