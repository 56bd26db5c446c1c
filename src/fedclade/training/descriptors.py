"""What a model makes of clients' data: means and deviations of a few components of its latent."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]  (all convolutions)

from fedclade.core import IGNORED, ConfigError, DescriptorQuery, ModelError, rng
from fedclade.training.stages import Held
from fedclade.training.store import WholeModels

POINTS = 200
"""Random points whose principal directions are the components: as many as the authors of FLUX take."""

AT_A_TIME = 1024
"""Examples in a forward pass."""


@torch.inference_mode()
def descriptors(query: DescriptorQuery, held: Held, whole: WholeModels, module: nn.Module) -> Tensor:
    """Return the descriptors of some clients' training data, float32 ``[n, 2 + B, C]``; see the query.

    The module is overwritten.

    Raises
    ------
    ConfigError
        If the latent has fewer entries than there are to be components, or examples have no labels to go by.
    ModelError
        If the model has no dense layer.
    """
    spec, rows = held.federation.pool.schema, list[Tensor]()
    (_, components), labels = query.shape(spec), spec.labels if query.per_label else None
    for client in query.ids:
        whole.load(client, query.model.to(held.data.device), module.eval())
        inputs, targets = held.data.of(client)
        found = latents(module, inputs)
        if spec.task == "language":  # the next token at each place is an example
            found = found[targets != IGNORED]
        exact = query.components > 0
        rows.append(described(found.flatten(1).double().cpu(), targets.cpu(), labels, components, query.seed, exact))
    return torch.stack(rows).float()


def described(
    found: Tensor, targets: Tensor, labels: int | None, components: int, seed: int, exact: bool = True
) -> Tensor:
    """Return the descriptor ``[2 + B, C]`` of one client, given the latents ``[n, d]`` of its examples.

    Where latents have fewer than C entries the last components are 0, or, if there are to be ``exact`` as many, an
    error says so.
    """
    if (most := min(found.shape[1], POINTS - 1)) < components and exact:
        raise ConfigError(
            f"algorithm.components should be at most {most}, as the model's latent has {found.shape[1]} entries, got "
            f"{components}"
        )
    directions, centre = (
        functional.pad(each, (0, max(0, components - most)))
        for each in projection(seed, found.shape[1], min(most, components))
    )
    projected = found @ directions
    of_labels = [_moments(projected[targets == label]) for label in range(labels or 0)]
    of_all = found.max().expand(components), centre, *_moments(projected)
    return torch.stack([*of_all, *(mean for mean, _ in of_labels), *(std for _, std in of_labels)])


def latents(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return what goes into the layer that :func:`latent_layer` names, of each input, ``[n, ...]``."""
    caught: list[Tensor] = []
    layer = latent_layer(module, inputs[:1])
    handle = layer.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0]))
    try:
        found: list[Tensor] = []
        for part in inputs.split(AT_A_TIME):
            module(part)
            found.append(caught[-1])
            caught.clear()
    finally:
        handle.remove()
    return torch.cat(found)


def latent_layer(module: nn.Module, inputs: Tensor) -> nn.Module:
    """Return the dense layer whose input is the latent: the first behind the last convolution, else the last of all."""
    called: list[nn.Module] = []
    kinds = [
        layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | _ConvNd) and not name.endswith(("lora_A", "lora_B"))
    ]
    handles = [layer.register_forward_pre_hook(lambda layer, _: called.append(layer)) for layer in kinds]
    try:
        module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    convolutions = [place for place, layer in enumerate(called) if isinstance(layer, _ConvNd)]
    dense = [layer for layer in called[convolutions[-1] + 1 if convolutions else 0 :] if isinstance(layer, nn.Linear)]
    if not dense:
        raise ModelError(
            f"{type(module).__name__} has no dense layer (nn.Linear) behind its last convolution, whose input would "
            "describe data; take another model, or an algorithm that goes by updates"
        )
    return dense[0] if convolutions else dense[-1]


@lru_cache(maxsize=8)
def projection(seed: int, width: int, components: int) -> tuple[Tensor, Tensor]:
    """Return the principal directions ``[d, C]`` of random points in a cube, and the components ``[C]`` of their mean.

    The cube's side is 1: of a larger one directions are the same, and the mean is so much farther. In each direction
    the entry that is largest in size is positive.
    """
    points = rng.generator(seed, "descriptor points", width).random((POINTS, width))
    rows = np.linalg.svd(points - points.mean(0), full_matrices=False)[2][:components]
    largest = np.take_along_axis(rows, np.abs(rows).argmax(1)[:, None], 1)
    rows = rows * np.sign(largest)
    return torch.from_numpy(rows.T.copy()), torch.from_numpy(rows @ points.mean(0))


def _moments(projected: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation ``[C]`` of components ``[n, C]``; −1 where there are fewer than two."""
    if len(projected) < 2:
        none = projected.new_full(projected.shape[1:], -1.0)
        return none, none
    return projected.mean(0), projected.std(0, correction=0)
