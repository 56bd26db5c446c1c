"""Gradients that are drawn at random: how often the split is right, and what CFL's Theorem 1 says of it.

The setting of the paper's figure 3: k distributions whose gradients ∇R are normal in d dimensions and sum to zero, as
at a stationary point (eq. 104); m clients, the same number of each distribution, whose ∇r = ∇R + noise. The noise is
normal, too, and scaled to γ times the norm of ∇R, so that all γ_i of eq. 16 are γ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, sin

import numpy as np
import torch

from fedclade.clustering import (
    cosine_similarity,
    highest_cross,
    lowest_intra,
    optimal_bipartition,
    separation_gap,
)


def bounds(k: int, gamma: float) -> tuple[float, float]:
    """Return the bounds of eqs. 19 and 21, on α_cross^max from above and α_intra^min from below, if all γ_i are γ."""
    return highest_cross([gamma] * k, range(k)), lowest_intra([gamma] * 2, [0, 0])


def largest_noise(k: int) -> float:
    """Return the γ below which Theorem 1 promises a right split of k distributions: sin(π / (4·(k − 1))).

    There the two bounds meet: with H = cos(2·arcsin γ), 2·arcsin γ = π/(k − 1) − 2·arcsin γ.
    """
    return sin(pi / (4 * (k - 1)))


@dataclass(frozen=True)
class Sample:
    """One draw.

    Parameters
    ----------
    intra
        α_intra^min, the smallest similarity of two clients of one distribution (eq. 21).
    cross
        α_cross^max of the optimal bi-partition (eq. 17).
    right
        Whether that parts no two clients of one distribution (Definition 1).
    gap
        Separation gap g(α) (Definition 2).
    """

    intra: float
    cross: float
    right: bool
    gap: float


def draw_sample(k: int, d: int, gamma: float, clients_each: int, draw: np.random.Generator) -> Sample:
    """Draw gradients once, and split them in two.

    Parameters
    ----------
    k
        Distributions, at least 2.
    d
        Dimensions, at least 2.
    gamma
        Relative noise γ ≥ 0 of every client.
    clients_each
        Clients of each distribution; m = k · clients_each.
    draw
        Source of chance.
    """
    means = draw.normal(size=(k, d))
    means -= means.mean(0)
    truth = np.repeat(np.arange(k), clients_each)
    noise = draw.normal(size=(len(truth), d))
    norms = np.linalg.norm(means[truth], axis=1) / np.linalg.norm(noise, axis=1)
    gradients = means[truth] + gamma * norms[:, None] * noise
    alpha = cosine_similarity(torch.from_numpy(gradients))
    split = optimal_bipartition(alpha, range(len(truth)))
    gap = separation_gap(alpha, truth.tolist(), split.alpha_cross_max)
    right = not set(truth[list(split.first)]) & set(truth[list(split.second)])
    return Sample(gap + split.alpha_cross_max, split.alpha_cross_max, right, gap)


def summary(samples: Sequence[Sample]) -> dict[str, float]:
    """Return what many draws of one k, d and γ show, as JSON has it: shares in [0, 1], and the extremes."""
    n = len(samples)
    return {
        "gap_positive": sum(sample.gap > 0 for sample in samples) / n,
        "right": sum(sample.right for sample in samples) / n,
        "wrong_with_gap": sum(sample.gap > 0 and not sample.right for sample in samples),
        "right_without_gap": sum(sample.right and sample.gap <= 0 for sample in samples),
        "highest_cross": max(sample.cross for sample in samples),
        "lowest_intra": min(sample.intra for sample in samples),
    }
