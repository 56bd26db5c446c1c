"""What adversaries send in place of their updates, where that is made of the updates of others.

ALIE (Baruch, Baruch, Goldberg 2019), IPM (Xie, Koyejo, Gupta 2019), min-max and min-sum (Shejwalkar and Houmansadr
2021), as in Blades' ``adversaries/`` and ByzFL's ``attacks.py``. Updates are rows of ``[h, D]``, and weigh alike. Where
Blades bisects γ of min-max in [0, 5], and may end on the side where the constraint does not hold, the largest γ is
computed: it solves a quadratic equation for each update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import scipy
import torch
from torch import Tensor

from fedclade.core import row_norms


def alie_z(n: int, f: int) -> float:
    """Return z = Φ⁻¹((n − f − s) / (n − f)) with s = ⌊n/2 + 1⌋ − f, of n clients of which f are adversaries.

    s is how many honest clients must prefer the lie to the mean. Where adversaries have the majority by themselves one
    is taken, since z would have no bound; with fewer than two honest clients nothing deviates, and z is 0.
    """
    if n - f < 2:
        return 0.0
    s = max(1, n // 2 + 1 - f)
    return float(scipy.special.ndtri((n - f - s) / (n - f)))


def deviation(updates: Tensor) -> Tensor:
    """Return the standard deviation σ of each entry, ``[D]``, with ddof 1 as in Blades; of one update zeros."""
    return updates.std(0) if len(updates) > 1 else torch.zeros_like(updates[0])


def alie(updates: Tensor, z: float) -> Tensor:
    """Return μ + zσ, ``[D]``."""
    return updates.mean(0) + z * deviation(updates)


def ipm(updates: Tensor, epsilon: float) -> Tensor:
    """Return −εμ, ``[D]``."""
    return -epsilon * updates.mean(0)


DIRECTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "std": lambda updates: -deviation(updates),
    "sign": lambda updates: -updates.mean(0).sign(),
    "unit": lambda updates: -torch.nn.functional.normalize(updates.mean(0), dim=0, eps=0.0).nan_to_num(),
}
"""The ways in which min-max and min-sum leave the mean: −σ, −sign(μ) and −μ/‖μ‖."""


def min_max(updates: Tensor, direction: str) -> Tensor:
    """Return μ + γd with the largest γ whose distance from every update is at most that of the two furthest."""
    mean, d = updates.mean(0), DIRECTIONS[direction](updates)
    a = mean - updates
    along, squared = _along(a, d)
    most = max(float(row_norms(updates, row).max()) for row in updates)
    if squared == 0:
        return mean
    # ‖aᵢ + γd‖² = T² for the largest γ; the mean lies within T of every update, so the root is real.
    inside = (along**2 + squared * (most**2 - row_norms(a) ** 2)).clamp(min=0)
    return mean + float(((inside.sqrt() - along) / squared).min()) * d


def min_sum(updates: Tensor, direction: str) -> Tensor:
    """Return μ + γd with the largest γ whose summed squared distance from all updates is at most that of any of them.

    Since Σ(μ − gᵢ) = 0, Σ‖μ + γd − gᵢ‖² = Σ‖μ − gᵢ‖² + hγ²‖d‖².
    """
    mean, d = updates.mean(0), DIRECTIONS[direction](updates)
    squared = float(row_norms(d[None])[0] ** 2)
    most = max(float((row_norms(updates, row) ** 2).sum()) for row in updates)
    room = max(0.0, most - float((row_norms(updates, mean) ** 2).sum()))
    return mean if squared == 0 else mean + (room / (len(updates) * squared)) ** 0.5 * d


def _along(a: Tensor, d: Tensor) -> tuple[Tensor, float]:
    """Return aᵢ·d of each row, ``[h]``, and ‖d‖²."""
    exact = d.double()
    return torch.stack([row.double() @ exact for row in a]).cpu(), float(exact @ exact)
