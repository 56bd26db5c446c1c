"""Figure 3 of the CFL paper: how often random gradients are split correctly, and Theorem 1.

The gradients ∇R of k distributions are normal in d dimensions and sum to zero, as at a stationary
point (eq. 104). Each of m clients, the same number for each distribution, has ∇r = ∇R + noise. The
noise is normal, too, and scaled to γ times the norm of ∇R, so that all γ_i of eq. 16 are γ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import pi, sin
from typing import Any

import numpy as np
import torch

from fedclade.clustering import (
    bound_cross_similarity,
    bound_intra_similarity,
    cosine_similarity,
    find_optimal_bipartition,
    separation_gap,
)
from fedclade.core import rng
from fedclade_papers.cache import ResultCache, Settings
from fedclade_papers.experiment import Paper
from fedclade_papers.outcome import Claim, Outcome, Row

ROUNDING = 1e-9
"""Difference by which a cosine in float64 may exceed a bound, because of rounding."""

MANY = 10
"""Number of distributions k above which k counts as large in eqs. 30 and 31."""


def bounds(k: int, gamma: float) -> tuple[float, float]:
    """Return the bounds of Theorem 1 on similarities, for k distributions with equal noise γ.

    Returns
    -------
    tuple
        Upper bound on α_cross^max, the largest similarity across the split (eq. 19); and lower
        bound on α_intra^min, the smallest similarity within a distribution (eq. 21).
    """
    cross = bound_cross_similarity([gamma] * k, range(k))
    intra = bound_intra_similarity([gamma] * 2, [0, 0])
    return cross, intra


def largest_noise(k: int) -> float:
    """Return the γ below which Theorem 1 guarantees a right split: sin(π / (4·(k − 1))).

    At this γ the two bounds are equal: with H = cos(2·arcsin γ), 2·arcsin γ = π/(k − 1) − 2·arcsin
    γ.
    """
    return sin(pi / (4 * (k - 1)))


@dataclass(frozen=True)
class Sample:
    """Measures of one random sample of all clients' gradients and of its bi-partition."""

    #: α_intra^min, the smallest similarity of two clients of one distribution (eq. 21).
    intra: float
    #: α_cross^max of the optimal bi-partition (eq. 17).
    cross: float
    #: Whether the bi-partition separates no two clients of one distribution (Definition 1).
    right: bool
    #: Separation gap g(α) (Definition 2).
    gap: float


def draw_sample(
    k: int, d: int, gamma: float, clients_each: int, generator: np.random.Generator
) -> Sample:
    """Draw random gradients of clients with several distributions, and bi-partition the clients.

    Parameters
    ----------
    k
        Number of distributions, at least 2.
    d
        Number of dimensions, at least 2.
    gamma
        Relative noise γ, at least 0.
    clients_each
        Number of clients of each distribution.
    generator
        Source of random numbers.
    """
    means = generator.normal(size=(k, d))
    means -= means.mean(0)
    truth = np.repeat(np.arange(k), clients_each)
    noise = generator.normal(size=(len(truth), d))
    norms = np.linalg.norm(means[truth], axis=1) / np.linalg.norm(noise, axis=1)
    gradients = means[truth] + gamma * norms[:, None] * noise
    alpha = cosine_similarity(torch.from_numpy(gradients))
    split = find_optimal_bipartition(alpha, range(len(truth)))
    gap = separation_gap(alpha, truth.tolist(), split.alpha_cross_max)
    right = not set(truth[list(split.first)]) & set(truth[list(split.second)])
    return Sample(gap + split.alpha_cross_max, split.alpha_cross_max, right, gap)


def summary(samples: Sequence[Sample]) -> dict[str, float]:
    """Return statistics of many samples with the same k, d and γ.

    ``gap_positive`` and ``right`` are shares in [0, 1] of the samples; ``wrong_with_gap`` and
    ``right_without_gap`` are numbers of samples; ``highest_cross`` and ``lowest_intra`` are the
    extreme similarities.
    """
    n = len(samples)
    return {
        "gap_positive": sum(sample.gap > 0 for sample in samples) / n,
        "right": sum(sample.right for sample in samples) / n,
        "wrong_with_gap": sum(sample.gap > 0 and not sample.right for sample in samples),
        "right_without_gap": sum(sample.right and sample.gap <= 0 for sample in samples),
        "highest_cross": max(sample.cross for sample in samples),
        "lowest_intra": min(sample.intra for sample in samples),
    }


def measure(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figure 3: random gradients for every k and γ, and for every d at one k and γ."""
    gammas = settings["gammas"]
    fixed = settings["over_d"]
    cells: list[dict[str, Any]] = []
    for k in settings["ks"]:
        cells += cache.piece(f"k = {k}", partial(_measure_gammas, settings, k))
    over_d = [
        cache.piece(f"d = {d}", partial(_measure_cell, settings, fixed["k"], d, fixed["gamma"]))
        for d in fixed["ds"]
    ]
    every = [*cells, *over_d]
    without = sum(cell["right_without_gap"] for cell in every)
    sentence = (
        f"Of {len(every) * settings['samples']:,} random samples none broke a bound or was split "
        f"wrong with a positive gap; {without:,} were split right without one."
    )
    # Eqs. 30 and 31: P[g(α) > 0] is near 1 for k above 10, even for γ just above 1.
    above = min(gamma for gamma in gammas if gamma > 1)
    rows = [
        Row(
            f"P[g(α) > 0], k = {cell['k']}, d = {cell['d']}, γ = {above:g} (eq. 30)",
            paper=100.0,
            ours=100 * cell["gap_positive"],
            wanted="at least",
            told="≈ 1",
        )
        for cell in cells
        if cell["k"] > MANY and cell["gamma"] == above
    ]
    series = {"cells": cells, "over_d": over_d}
    claims = _check_claims(paper, every, settings)
    return paper.outcome(rows, claims, series, sentence, because=None if without else "")


def _measure_gammas(settings: Settings, k: int) -> list[dict[str, Any]]:
    """Return the statistics of random gradients with k distributions, for every noise γ."""
    return [_measure_cell(settings, k, settings["d"], gamma) for gamma in settings["gammas"]]


def _measure_cell(settings: Settings, k: int, d: int, gamma: float) -> dict[str, Any]:
    generator = rng.generator(settings["seeds"][0], "figure 3", k, d, round(1000 * gamma))
    samples = [
        draw_sample(k, d, gamma, clients_each=settings["clients_each"], generator=generator)
        for _ in range(settings["samples"])
    ]
    return {"k": k, "d": d, "gamma": gamma, **summary(samples)}


def _check_claims(paper: Paper, cells: Sequence[Settings], settings: Settings) -> list[Claim]:
    samples = settings["samples"]
    # The bounds need γ < 1 (eq. 15). Without noise the similarities equal the bounds.
    bounded = [cell for cell in cells if 0 < cell["gamma"] < 1]
    n = len(bounded) * samples
    cross = max(cell["highest_cross"] - bounds(cell["k"], cell["gamma"])[0] for cell in bounded)
    intra = min(cell["lowest_intra"] - bounds(cell["k"], cell["gamma"])[1] for cell in bounded)
    green = [cell for cell in cells if cell["gamma"] < largest_noise(cell["k"])]
    wrong = sum(1 - cell["gap_positive"] for cell in green) * samples
    largest = find_largest_noise(cells, settings["d"])
    without = sum(cell["right_without_gap"] for cell in cells)
    misled = sum(cell["wrong_with_gap"] for cell in cells)
    is_beyond = None
    beyond = 0.0
    if largest:
        beyond = min(largest.values())
        is_beyond = beyond > 1
    return [
        paper.claim(
            "cross", cross <= ROUNDING, f"{n:,} samples; the nearest stays {-cross:.4f} below"
        ),
        paper.claim(
            "intra", intra >= -ROUNDING, f"{n:,} samples; the nearest stays {intra:.4f} above"
        ),
        paper.claim(
            "promised",
            wrong < 0.5,
            f"{wrong:.0f} of {len(green) * samples:,} samples of the area were not",
        ),
        paper.claim("large", is_beyond, f"for every k > {MANY}, P > 0.99 up to γ = {beyond:g}"),
        paper.claim("gap", misled == 0, f"{misled} samples with a positive gap and a wrong split"),
        paper.claim(
            "only",
            without == 0,
            f"{without:,} of {len(cells) * samples:,} samples were split right without one: "
            "members of one distribution may be as unlike as clients across the split",
        ),
    ]


def find_largest_noise(cells: Sequence[Settings], d: int) -> dict[int, float]:
    """Return, for every k above :data:`MANY`, the largest noise γ with P[g(α) > 0] above 0.99.

    Only the cells with d dimensions count. The value is 0 for a k without such a noise.
    """
    largest: dict[int, float] = {}
    for cell in cells:
        if cell["k"] > MANY and cell["d"] == d:
            largest.setdefault(cell["k"], 0.0)
            if cell["gap_positive"] > 0.99:
                largest[cell["k"]] = max(largest[cell["k"]], cell["gamma"])
    return largest
