"""Keyed randomness: every draw belongs to (seed, purpose, numbers), never to the order in which things happen.

So results do not depend on how clients are grouped into batches, on the engine that trains them, or
on whether a run was interrupted.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch

from fedclade.core.errors import ConfigError

__all__ = ["BESIDE", "generator", "seeded_globally", "torch_generator", "torch_seed"]

BESIDE = "beside"
"""Purpose of training one more model in a round: clients draw what they draw in the regular training."""


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return the NumPy generator of a key: seed, purpose (``"cohort"``, ``"partition"``, ...), round, client key, ...

    Two purposes never share a stream; all numbers are at least 0.
    """
    return np.random.default_rng(_sequence(seed, purpose, numbers))


def torch_generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """Return the torch generator (on the CPU) that belongs to a key; see :func:`generator`."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *numbers))


def torch_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Return the 63-bit seed that belongs to a key; see :func:`generator`."""
    return int(_sequence(seed, purpose, numbers).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def seeded_globally(seed: int, device: torch.device) -> Generator[None]:
    """Let what draws from torch's global generators, such as dropout, draw from a seed, and leave them as they were."""
    # Not torch.manual_seed and fork_rng, which look for every accelerator: a loop comes here for
    # each client.
    before = torch.default_generator.get_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        torch.default_generator.manual_seed(seed)
        if on_device is not None:
            torch.cuda.manual_seed(seed)
        yield
    finally:
        torch.default_generator.set_state(before)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)


def _sequence(seed: int, purpose: str, numbers: tuple[int, ...]) -> np.random.SeedSequence:
    if seed < 0:
        raise ConfigError(f"seed should be at least 0, got {seed}")
    # As a spawn key, since NumPy pads entropy with zeros: [seed, purpose] and [seed, purpose, 0]
    # would draw the same.
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode())], spawn_key=numbers)
