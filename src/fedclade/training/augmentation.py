"""Augmentation of training batches: a hook on the module, so that engines need not know of it."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from fedclade.data import Augment


class Augmentation:
    """A hook that changes a module's inputs before the forward pass, in training mode alone."""

    def __init__(self, augment: Augment) -> None:
        self._augment = augment

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Return the augmented inputs; None leaves them as they are."""
        if not module.training:
            return None
        x = self._augment(inputs[0])
        if not isinstance(x, Tensor) or x.shape[:1] != inputs[0].shape[:1]:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"augment should return as many inputs as it is given, {len(inputs[0])}, got {got}")
        return (x, *inputs[1:])


def augmented(module: nn.Module, augment: Augment | None) -> nn.Module:
    """Return a copy of a module whose training batches are augmented; the module itself where there is no function."""
    if augment is None:
        return module
    changed = copy.deepcopy(module)
    changed.register_forward_pre_hook(Augmentation(augment))
    return changed


def is_augmented(module: nn.Module) -> bool:
    """Return whether a module's training batches are augmented."""
    return bool(_hooks(module))


def remove_augmentation(module: nn.Module) -> None:
    """Let a module take its training batches as they are."""
    for number in _hooks(module):
        del module._forward_pre_hooks[number]  # pyright: ignore[reportPrivateUsage]


def _hooks(module: nn.Module) -> list[int]:
    hooks = module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]  (no other way)
    return [number for number, hook in hooks.items() if isinstance(hook, Augmentation)]
