"""Public random rotation of updates, after which all entries of an update have a similar size.

Secure aggregation encodes entries as integers of a fixed range. But the entries of an update differ
in size by orders of magnitude, and a malicious client may put its whole update into one entry.
After a rotation by random signs and Hadamard matrices each entry of an update of norm C behaves
like a normal variable of standard deviation C/√d, for every update (Suresh et al. 2017,
"Distributed mean estimation with limited communication"). The rotation is linear, so the sum of
rotated updates is the rotated sum of the updates, and the server rotates only the sum back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import shake_256

import numpy as np
from numpy.typing import NDArray

LARGEST_BLOCK = 1024
"""Largest number of entries that one Hadamard matrix mixes.

Padding to a multiple of this number costs less than 1 % at 100,000 entries.
"""

Entries = NDArray[np.float64]


@dataclass(frozen=True)
class Rotation:
    """Random rotation of vectors ``[size]`` into vectors ``[padded_size]``.

    The rotation is the same for all clients of one sum. A first pass multiplies by random signs
    and, in each block of entries, by a Hadamard matrix. Then the blocks are transposed, and a
    second pass does the same. With a single pass, the norm of a block with large entries, such as
    the last layer, would stay in that block. The transposition distributes the entries of each
    block over all blocks.

    Parameters
    ----------
    size
        Number of entries of a vector.
    key
        Bytes from which the random signs of both passes derive; all clients of a sum and the server
        know them.
    """

    size: int
    key: bytes

    @property
    def block(self) -> int:
        """Number of entries in a block, which one Hadamard matrix mixes.

        The number is a power of two that needs little padding.
        """
        most = max(1, self.size // 16)
        return min(LARGEST_BLOCK, 1 << (most.bit_length() - 1))

    @property
    def padded_size(self) -> int:
        """Number of entries of a rotated vector: ``size`` rounded up to a multiple of ``block``."""
        return -(-self.size // self.block) * self.block

    def apply(self, vector: Entries) -> Entries:
        """Rotate a vector ``[size]``; return the rotated vector ``[padded_size]``."""
        padded = np.zeros(self.padded_size)
        padded[: self.size] = vector
        first, second = self._signs
        mixed = hadamard((padded * first).reshape(-1, self.block))
        dealt_out = mixed.T.ravel()
        return hadamard((dealt_out * second).reshape(-1, self.block)).ravel()

    def undo(self, rotated: Entries) -> Entries:
        """Apply the inverse rotation to a vector ``[padded_size]``; return a vector ``[size]``."""
        first, second = self._signs
        dealt_out = hadamard(rotated.reshape(-1, self.block)).ravel() * second
        mixed = dealt_out.reshape(self.block, -1).T
        padded = hadamard(np.ascontiguousarray(mixed)).ravel() * first
        return padded[: self.size]

    @cached_property
    def _signs(self) -> tuple[Entries, Entries]:
        """Random signs of the first and of the second pass, each ``[padded_size]`` of 1 and −1."""
        # SHAKE-256 gives the same signs on every machine. A NumPy generator may change between
        # versions, and a client with another version would then add noise to the sum.
        n_bytes = -(-self.padded_size // 8)
        drawn = shake_256(b"fedclade signs of a rotation" + self.key).digest(2 * n_bytes)
        bits = np.unpackbits(
            np.frombuffer(drawn, np.uint8).reshape(2, n_bytes), axis=1, bitorder="little"
        )
        first, second = 1.0 - 2.0 * bits[:, : self.padded_size]
        return first, second


def hadamard(blocks: Entries) -> Entries:
    """Multiply each row of a matrix ``[n, b]`` by the orthonormal Hadamard matrix of order b.

    The number b of columns is a power of two. The fast Hadamard transform takes b·log₂ b additions
    for each row.
    """
    n_blocks, size = blocks.shape
    width = 1
    while width < size:
        pairs = blocks.reshape(n_blocks, size // (2 * width), 2, width)
        left = pairs[:, :, 0]
        right = pairs[:, :, 1]
        blocks = np.stack([left + right, left - right], axis=2).reshape(n_blocks, size)
        width *= 2
    return blocks / np.sqrt(size)
