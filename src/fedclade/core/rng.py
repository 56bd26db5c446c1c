"""Random generators that are seeded by a key: a seed, a purpose, and further numbers.

The random numbers of a key do not depend on what else was drawn before. Results are therefore the
same for every grouping of clients into batches and every engine, and also if a run was interrupted
and resumed.
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
"""Purpose of a query that trains an additional model in a round.

Clients then use the same random draws as in the regular training of the round.
"""

_WORD = 2**32
"""Numbers from here on take more than one 32-bit word of a seed sequence."""

_POOL_SIZE = 4
"""Number of 32-bit words in the pool of NumPy's ``SeedSequence``."""


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return a NumPy random generator that is seeded by a key.

    Generators with equal keys return equal numbers; generators with different purposes are
    independent.

    Parameters
    ----------
    seed
        Seed of the run, at least 0.
    purpose
        Purpose of the draws, such as ``"cohort"`` or ``"partition"``.
    numbers
        Further parts of the key, such as the round number or a client's key; all at least 0.

    Raises
    ------
    ConfigError
        If the seed is negative.
    """
    return np.random.default_rng(_seed_sequence(seed, purpose, numbers))


def torch_generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """Return a torch random generator on the CPU that is seeded by a key; see :func:`generator`."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *numbers))


def torch_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Return a 63-bit seed for torch, derived from a key; see :func:`generator`."""
    return int(_seed_sequence(seed, purpose, numbers).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def seeded_globally(seed: int, device: torch.device) -> Generator[None]:
    """Seed torch's global generators inside a ``with`` block, and restore their states at its end.

    Layers such as dropout draw from the global generators. ``device`` is the device of the model:
    on a GPU, the GPU's generator is seeded as well.
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


def _seed_sequence(seed: int, purpose: str, numbers: tuple[int, ...]) -> np.random.SeedSequence:
    """Return NumPy's seed sequence of a key; see :func:`generator`."""
    if seed < 0:
        raise ConfigError(f"seed should be at least 0, got {seed}")
    # The numbers are the spawn key, not part of the entropy: NumPy pads entropy with zeros, so that
    # [seed, purpose] and [seed, purpose, 0] would have the same stream.
    entropy = [seed, zlib.crc32(purpose.encode())]
    if max(seed, *numbers, 0) >= _WORD or min(numbers, default=0) < 0:
        return np.random.SeedSequence(entropy, spawn_key=numbers)
    # The same sequence at half the cost, which counts with thousands of clients in each round:
    # NumPy itself pads the entropy to the size of its pool before it appends the spawn key.
    padding = [0] * (_POOL_SIZE - len(entropy)) if numbers else []
    return np.random.SeedSequence(np.array([*entropy, *padding, *numbers], dtype=np.uint32))
