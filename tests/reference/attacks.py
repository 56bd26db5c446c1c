"""The formulas of adversaries, literally: loops over clients, and bisection where a largest γ is searched."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor


def mean_of(updates: list[Tensor]) -> Tensor:
    total = torch.zeros_like(updates[0])
    for update in updates:
        total = total + update
    return total / len(updates)


def deviation_of(updates: list[Tensor]) -> Tensor:
    mean, total = mean_of(updates), torch.zeros_like(updates[0])
    for update in updates:
        total = total + (update - mean) ** 2
    return (total / (len(updates) - 1)).sqrt()


def alie(updates: list[Tensor], n: int, f: int) -> Tensor:
    """Baruch et al. 2019, Algorithm 3, with the sign of Blades."""
    s = math.floor(n / 2 + 1) - f
    z = NormalDist().inv_cdf((n - f - s) / (n - f))
    return mean_of(updates) + z * deviation_of(updates)


def ipm(updates: list[Tensor], epsilon: float) -> Tensor:
    """Xie et al. 2019, section 4."""
    return -epsilon * mean_of(updates)


def direction_of(updates: list[Tensor], name: str) -> Tensor:
    mean = mean_of(updates)
    return {
        "std": lambda: -deviation_of(updates),
        "sign": lambda: -mean.sign(),
        "unit": lambda: -mean / mean.norm(),
    }[name]()


def largest(holds) -> float:
    """Return the largest γ that holds, by bisection."""
    low, high = 0.0, 1.0
    while holds(high):
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def min_max(updates: list[Tensor], direction: str) -> Tensor:
    """Shejwalkar and Houmansadr 2021, eq. 5: no further from any update than these are from each other."""
    mean, d = mean_of(updates), direction_of(updates, direction)
    furthest = max(float((one - other).norm()) for one in updates for other in updates)
    gamma = largest(
        lambda g: max(float((mean + g * d - update).norm()) for update in updates) <= furthest
    )
    return mean + gamma * d


def min_sum(updates: list[Tensor], direction: str) -> Tensor:
    """Shejwalkar and Houmansadr 2021, eq. 6: the sum of squared distances is at most that of any update."""
    mean, d = mean_of(updates), direction_of(updates, direction)

    def sum_of(point: Tensor) -> float:
        return sum(float((point - update).norm()) ** 2 for update in updates)

    most = max(sum_of(update) for update in updates)
    return mean + largest(lambda g: sum_of(mean + g * d) <= most) * d
