"""Where clients train, and how exactly a GPU multiplies float32 matrices there."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from fedclade.core import ConfigError


def choose_device(device: str) -> str:
    """Return ``cpu`` or ``cuda`` for ``auto``, ``cpu``, ``cuda``.

    Raises
    ------
    ConfigError
        If the name is unknown, or there is no such device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device should be auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device; use --device cpu")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


@contextmanager
def float32_products(tf32: bool) -> Generator[None]:
    """Let a GPU round the factors of float32 products to 10 bits of mantissa in the block (TF32), or not.

    Torch by itself rounds them in convolutions and recurrent layers, but not in products of matrices.
    """
    kinds: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.cudnn  # types know neither setting
    before = [kind.allow_tf32 for kind in kinds]
    try:
        for kind in kinds:
            kind.allow_tf32 = tf32
        yield
    finally:
        for kind, allowed in zip(kinds, before, strict=True):
            kind.allow_tf32 = allowed
