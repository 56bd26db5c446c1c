"""The secret that clients share and the server does not know: their permutation and initial models come from it."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import torch
from torch import Tensor

from fedclade.core import ConfigError, Layout, rng
from fedclade.runs import Maker

SHORTEST = 32  # characters of a secret: as many hexadecimal digits are 128 bits


def read_secret(path: Path) -> str:
    """Return the secret in a file; a ConfigError if it cannot be read, or is short enough to be guessed."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the clients' secret {path}: {error}") from error
    if len(secret) < SHORTEST:
        raise ConfigError(
            f"the clients' secret {path} has {len(secret)} characters, expected at least {SHORTEST}; make one "
            "with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return secret


def seed_of(secret: str) -> int:
    """Return a secret as a number of 256 bits."""
    return int.from_bytes(hashlib.sha256(secret.encode()).digest(), "big")


def secret_digest(secret: str) -> str:
    """Return a digest that is the same for the same secret, and from which nobody can compute the secret."""
    return hmac.new(secret.encode(), b"fedclade: do we share this?", hashlib.sha256).hexdigest()


def secret_model(make: Maker, layout: Layout, seed: int, number: int = 0) -> Tensor:
    """Return the initial model ``[S]`` of a number that only clients can draw that share the secret ``seed``.

    The entries of each parameter are shuffled: torch draws a model from 32 bits, few enough for a server to try them
    all, and whoever knows every entry of a model sees from P·θ where P put it.
    """
    vector = layout.flatten(make(rng.torch_seed(seed, "initial model", number)))
    draw = rng.generator(seed, "initial model's order", number)
    for slot in layout.parameters:
        part = vector[slot.start : slot.stop]
        part.copy_(part[torch.from_numpy(draw.permutation(len(part)))])
    return vector
