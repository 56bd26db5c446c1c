"""Training of one model on several devices: each batch is split among them.

The forward pass of a batch of n examples runs on k devices, with about n / k examples on each. The
outputs are joined on the first device, where the loss is computed. So the loss and its gradient are
those of the whole batch, up to rounding, for any loss. This is the method of torch's
``DataParallel``, which itself accepts no CPU and would change the names of parameters.

The parameters are copied to the other devices in each step, and gradients are summed over devices
by autograd. Kernels of a GPU are started without waiting for their results, so the devices compute
at the same time although one thread starts them all.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree  # torch's own modules nest tensors by it

from fedclade.core import ConfigError, ModelError, rng
from fedclade.training.jobs import mixing_layers


def split_batches(module: nn.Module, devices: Sequence[str | torch.device]) -> nn.Module:
    """Let a module split each batch among devices when it trains; return the module itself.

    The module's parameters and buffers stay on their device, which should be the first of
    ``devices``, and keep their names. In evaluation mode, and without gradients, the module runs on
    the first device alone.

    Parameters
    ----------
    module
        A module. Its forward pass takes and returns tensors whose first dimension is the batch,
        also in tuples, lists and dictionaries.
    devices
        The devices; with a single device, the module does not change.

    Raises
    ------
    ConfigError
        If a layer mixes the examples of a batch, which the devices would then mix separately.
    """
    if len(devices) < 2:
        return module
    for name, layer in mixing_layers(module):
        raise ConfigError(
            f"device = {', '.join(map(str, devices))}: each batch would be split among the "
            f"devices, but layer {name!r} ({type(layer).__name__}) mixes the examples of a batch; "
            "name one device, or use a model with GroupNorm"
        )
    # The copy, which receives the parameters of each step, owns no memory.
    replica = copy.deepcopy(module).to("meta")
    module.__class__ = _split_class(type(module))
    # A child module would change the names of parameters, which a list does not.
    cast("Any", module).split_among = ([torch.device(each) for each in devices], [replica])
    return module


@lru_cache
def _split_class(of: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a module's class whose forward pass splits batches."""
    return type(
        of.__name__, (_SplitForward, of), {"__module__": of.__module__, "__doc__": of.__doc__}
    )


class _SplitForward(nn.Module):
    """Forward pass that splits a batch among devices; the base of all such classes."""

    split_among: tuple[list[torch.device], list[nn.Module]]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs of the batch on the first device."""
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*inputs, **named)
        devices, (replica,) = self.split_among
        parts = _split((inputs, named), len(devices))
        for layer, of_replica in zip(self.modules(), replica.modules(), strict=True):
            of_replica.training = layer.training
        outputs = [super().forward(*parts[0][0], **parts[0][1])]
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for device, part in zip(devices[1:], parts[1:], strict=False):
            there = {name: tensor.to(device) for name, tensor in tensors.items()}
            args, kwargs = pytree.tree_map(partial(_to, device=device), part)
            # Dropout on the other devices would otherwise not depend on the run's seed.
            seed = int(torch.randint(2**62, ()))
            with _current(device), rng.seeded_globally(seed, device):
                outputs.append(functional_call(replica, there, args, kwargs))
        return _joined(outputs, devices[0], type(self).__name__)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is torch's current one, whose generator torch then seeds."""
    return torch.cuda.device(device) if device.type == "cuda" else ExitStack()


def _to(value: Any, device: torch.device) -> Any:
    """Return a tensor on a device, and any other value as it is."""
    return value.to(device) if isinstance(value, Tensor) else value


def _split(inputs: Any, count: int) -> list[Any]:
    """Split all tensors of nested inputs into up to ``count`` parts along the batch."""
    leaves, structure = pytree.tree_flatten(inputs)
    size = next((len(each) for each in leaves if isinstance(each, Tensor) and each.dim()), 0)
    length = max(1, -(-size // count))  # rounded up
    parts: list[Any] = []
    for start in range(0, max(size, 1), length):
        of_part = [
            each[start : start + length]
            if isinstance(each, Tensor) and each.dim() and len(each) == size
            else each
            for each in leaves
        ]
        parts.append(pytree.tree_unflatten(of_part, structure))
    return parts


def _joined(outputs: Sequence[Any], device: torch.device, model: str) -> Any:
    """Join nested outputs of the parts of a batch on a device.

    Raises
    ------
    ModelError
        If an output is no tensor with an entry for each example.
    """
    flat = [pytree.tree_flatten(each) for each in outputs]
    joined: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if all(each is None for each in leaves):
            joined.append(None)
            continue
        for each in leaves:
            if not isinstance(each, Tensor) or not each.dim():
                raise ModelError(
                    f"{model} returns {type(each).__name__} {each!r}, which does not belong to "
                    "single examples, so batches cannot be split among several devices; name one "
                    "device"
                )
        joined.append(torch.cat([each.to(device) for each in leaves]))
    return pytree.tree_unflatten(joined, flat[0][1])
