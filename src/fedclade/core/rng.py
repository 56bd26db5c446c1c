"""Random generators by key: a draw depends on (seed, purpose, numbers), not on the order of draws.

Results therefore do not depend on how clients are grouped into batches, on the engine that trains
them, or on whether a run was interrupted.
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
"""Purpose of training an additional model in a round.

Clients then use the random draws of the regular training.
"""


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return the NumPy generator of a key.

    Two purposes never share a stream.

    Parameters
    ----------
    seed
        Seed of the run, at least 0.
    purpose
        Purpose of the draws, such as ``"cohort"`` or ``"partition"``.
    numbers
        Further parts of the key, such as the round or a client's key; each at least 0.

    Raises
    ------
    ConfigError
        If the seed is negative.
    """
    return np.random.default_rng(_sequence(seed, purpose, numbers))


def torch_generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """Return the torch generator (on the CPU) of a key; see :func:`generator`."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *numbers))


def torch_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Return the 63-bit seed of a key; see :func:`generator`."""
    return int(_sequence(seed, purpose, numbers).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def seeded_globally(seed: int, device: torch.device) -> Generator[None]:
    """Seed torch's global generators inside the block, and restore their states at its end.

    Layers such as dropout draw from the global generators.
    """
    # torch.manual_seed and fork_rng look for every accelerator, which is too slow here: the loop
    # engine enters this block for each client.
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
    # The numbers are the spawn key, not part of the entropy: NumPy pads entropy with zeros, so that
    # [seed, purpose] and [seed, purpose, 0] would have the same stream.
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode())], spawn_key=numbers)
