"""Scale of the targets of a regression, by which targets are standardized for training.

A standardized target is its difference from the mean, in standard deviations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

SCALED_LOSSES = ("mse", "mae", "huber", "smooth_l1")
"""Losses whose targets may be standardized, since they measure differences from the targets.

``poisson_nll`` needs targets of at least 0, and a user-defined loss may need any other range.
"""


@dataclass(frozen=True)
class TargetScale:
    """Mean and standard deviation of each of k targets of a regression, in the user's unit.

    Parameters
    ----------
    mean, std
        Mean and standard deviation of each target, k numbers each; deviations are above 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of_inputs(cls, inputs: Mapping[str, Any]) -> TargetScale | None:
        """Return the scale that a run's summary or an exported model's card describes.

        Parameters
        ----------
        inputs
            The entry ``inputs`` of the summary, or the entry ``data`` of the card.

        Returns
        -------
        TargetScale or None
            The scale; None if targets were not standardized.
        """
        if not inputs.get("target_mean"):
            return None
        return cls(tuple(inputs["target_mean"]), tuple(inputs["target_std"]))

    def standardize(self, targets: Tensor) -> Tensor:
        """Standardize targets: subtract the mean and divide by the standard deviation.

        Parameters
        ----------
        targets
            Targets of B examples in the user's unit, ``[B]`` or ``[B, k]``.
        """
        mean, std = self._convert_scale(targets)
        return (targets - mean) / std

    def restore(self, outputs: Tensor) -> Tensor:
        """Convert outputs of a model from standardized targets to the user's unit.

        Parameters
        ----------
        outputs
            Outputs for B examples, ``[B, k]``, or ``[B]`` for a single target.
        """
        mean, std = self._convert_scale(outputs)
        return outputs * std + mean

    def _convert_scale(self, values: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Return mean and standard deviation in a form that can be combined with ``values``.

        These are two numbers for a single target, otherwise two tensors ``[k]`` of the same type
        and on the same device as ``values``.
        """
        if len(self.mean) == 1:
            # One target may have no dimension of its own. Numbers need no copy to a GPU either.
            return self.mean[0], self.std[0]
        mean = torch.tensor(self.mean, dtype=values.dtype, device=values.device)
        return mean, torch.tensor(self.std, dtype=values.dtype, device=values.device)
