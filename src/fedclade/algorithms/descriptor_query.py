"""Query of FLUX for descriptors of clients' data, and the latents that clients compute for it.

Clients need this module, and nothing else of :mod:`fedclade.algorithms.flux`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fedclade.core import (
    IGNORED,
    ConfigError,
    DataSpec,
    LocalData,
    LocalStore,
    ModelError,
    RowQuery,
    require,
    rng,
)

COMPONENTS = 10
"""Default number of components for examples without labels.

With labels the default is the number of labels.
"""

HUGE = 1e30
"""Value of every number in the false descriptor of a simulated adversary.

It is finite in float32, since the server drops rows with numbers that are not finite.
"""

POINTS = 200
"""Number of random points whose principal directions give the components, as in FLUX's code."""

EXAMPLES_AT_A_TIME = 1024
"""Number of examples in a forward pass."""


@dataclass(frozen=True, eq=False)
class DescriptorQuery(RowQuery):
    """Query for descriptors of clients' training data: statistics of a model's latent.

    The latent of an example is the input of the first dense layer after the last convolution,
    flattened; for a model without convolutions, the input of its last dense layer. The latent is
    projected to C components, along directions that depend only on the seed and the width of the
    latent. The reply of n clients is float32 ``[n, 2 + B, C]``. The rows of a client's descriptor
    are

    - the largest entry of the client's latents, repeated C times;
    - the components of the mean of the random points that determine the directions (points in a
      cube of side 1); the server uses this mean to centre the components of the examples;
    - mean and standard deviation of the components of the client's examples (B = 2);
    - with ``per_label`` also the means, and then the deviations, of the examples of each of L
      labels (B = 2 + 2L). Labels are numbered as in the client's data, even if another client uses
      the same number for another class. Means and deviations are −1 for a label with fewer than two
      examples.

    Parameters
    ----------
    model
        The model that computes the latent, a parameter vector ``[S]``.
    seed
        Seed of the directions.
    components
        Number C of components. 0: the number of labels; the last components are then 0 if the
        latent has fewer entries.
    per_label
        Whether the data of each label is described separately as well.
    """

    kind = "descriptors"
    mechanism = "none"
    discloses = "descriptors"
    reveals = "descriptors of their data"
    reply_name = "descriptor"

    model: torch.Tensor
    seed: int
    components: int = 0
    per_label: bool = True

    def __post_init__(self) -> None:
        components = self.components
        require(
            ("the seed of a descriptor", self.seed, self.seed >= 0, "at least 0"),
            ("the components of a descriptor", components, components >= 0, "at least 0"),
        )

    def shape(self, spec: DataSpec) -> tuple[int, int]:
        """Return the shape of a client's descriptor: its number of rows, and of components.

        Raises
        ------
        ConfigError
            If the query is for statistics of each label, and examples have no label or several.
        """
        if self.per_label and spec.labels is None:
            raise ConfigError(
                f"FLUX cannot describe the data of each label separately in a {spec.task} task, "
                "since examples do not have exactly one label each; set algorithm.per_label = false"
            )
        groups = 1 + (spec.labels or 0) if self.per_label else 1
        return 2 + 2 * groups, self.components or spec.labels or COMPONENTS

    def answer(self, data: LocalData, store: LocalStore) -> torch.Tensor:
        """Compute the descriptor of a client's training data, on the client.

        Raises
        ------
        ConfigError
            If the latent has fewer entries than ``components``.
        ModelError
            If the model has no dense layer.
        """
        with torch.inference_mode():
            return self._describe(data)

    def _describe(self, data: LocalData) -> torch.Tensor:
        found = latents(data.load_model(self.model), data.inputs)
        targets = data.targets
        if data.spec.task == "language":  # each next token is an example
            found = found[targets != IGNORED]
        found = found.flatten(1).double().cpu()
        _, count = self.shape(data.spec)
        most = min(found.shape[1], POINTS - 1)
        if most < self.components:
            raise ConfigError(
                f"algorithm.components should be at most {most} for this model, whose latent (the "
                f"layer's input that FLUX describes) has {found.shape[1]} entries, got "
                f"{self.components}"
            )
        directions, centre = projection(self.seed, found.shape[1], min(most, count))
        missing = (0, count - min(most, count))
        directions = torch.nn.functional.pad(directions, missing)
        centre = torch.nn.functional.pad(centre, missing)
        projected = found @ directions
        mean, deviation = _compute_moments(projected)
        blocks = [found.max().expand(count), centre, mean, deviation]
        if self.per_label:
            labels = range(data.spec.labels or 0)
            of_labels = [_compute_moments(projected[targets == label]) for label in labels]
            blocks += [mean for mean, _ in of_labels]
            blocks += [deviation for _, deviation in of_labels]
        return torch.stack(blocks).float()

    def amounts(self, spec: DataSpec) -> Mapping[str, int]:
        """Return the amounts that a client's policy can limit: the number of components."""
        _, count = self.shape(spec)
        return {"max_components": count}

    def false_row(self, row: torch.Tensor, key: int) -> torch.Tensor:
        """Return the false reply of a simulated adversary: a descriptor of huge numbers."""
        return torch.full_like(row, HUGE)


def latents(module: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Compute the latents of n examples, ``[n, ...]``: the inputs of the layer ``latent_layer``.

    Parameters
    ----------
    module
        The model, in evaluation mode.
    inputs
        The examples' inputs, ``[n, ...]``.
    """
    caught: list[torch.Tensor] = []
    layer = latent_layer(module, inputs[:1])
    handle = layer.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0]))
    try:
        found: list[torch.Tensor] = []
        for part in inputs.split(EXAMPLES_AT_A_TIME):
            module(part)
            found.append(caught[-1])
            caught.clear()
    finally:
        handle.remove()
    return torch.cat(found)


def latent_layer(module: torch.nn.Module, inputs: torch.Tensor) -> torch.nn.Module:
    """Find the dense layer of a model whose input is the latent.

    It is the first dense layer after the last convolution, in the order in which a forward pass
    calls layers; for a model without convolutions, the last dense layer.

    Parameters
    ----------
    module
        The model.
    inputs
        An example's inputs ``[1, ...]``, for a forward pass.

    Raises
    ------
    ModelError
        If there is no such layer.
    """
    from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]  (all convolutions)

    called: list[torch.nn.Module] = []
    kinds = [
        layer
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear | _ConvNd) and not name.endswith(("lora_A", "lora_B"))
    ]
    handles = [
        layer.register_forward_pre_hook(lambda layer, _: called.append(layer)) for layer in kinds
    ]
    try:
        module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    convolutions = [place for place, layer in enumerate(called) if isinstance(layer, _ConvNd)]
    first = convolutions[-1] + 1 if convolutions else 0
    dense = [layer for layer in called[first:] if isinstance(layer, torch.nn.Linear)]
    if not dense:
        raise ModelError(
            f"{type(module).__name__} has no dense layer (nn.Linear) after its last convolution, "
            "and FLUX describes data by the input of such a layer; use another model, or an "
            "algorithm that clusters clients by their updates"
        )
    return dense[0] if convolutions else dense[-1]


@lru_cache(maxsize=8)
def projection(seed: int, width: int, components: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the directions along which FLUX projects latents, from a seed.

    The directions are the principal directions of random points in a cube of side 1. For a cube of
    side s the directions would be the same, and the mean of the points s times as large. Each
    direction's sign is chosen so that its entry of largest magnitude is positive.

    Parameters
    ----------
    seed
        Seed of the points.
    width
        Number of dimensions d of the cube.
    components
        Number of directions C, in descending order of variance.

    Returns
    -------
    tuple of Tensor
        The directions as columns, ``[d, C]``; and the coordinates of the points' mean along the
        directions, ``[C]``.
    """
    points = rng.generator(seed, "descriptor points", width).random((POINTS, width))
    rows = np.linalg.svd(points - points.mean(0), full_matrices=False)[2][:components]
    largest = np.take_along_axis(rows, np.abs(rows).argmax(1)[:, None], 1)
    rows = rows * np.sign(largest)
    return torch.from_numpy(rows.T.copy()), torch.from_numpy(rows @ points.mean(0))


def _compute_moments(projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of each of C components over n examples.

    Both have shape ``[C]``. All entries are −1 if there are fewer than two examples.
    """
    if len(projected) < 2:
        none = projected.new_full(projected.shape[1:], -1.0)
        return none, none
    return projected.mean(0), projected.std(0, correction=0)
