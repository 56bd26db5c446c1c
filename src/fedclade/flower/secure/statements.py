"""Statements that clients sign during a sum, in addition to their keys.

They state with which clients a client has masked, and whose updates are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedclade.flower.secure.encoding import digest, transcript
from fedclade.flower.secure.secrets import Scope


@dataclass(frozen=True)
class Statements:
    """Transcripts that clients sign in one sum, once the clients that have dealt shares are known.

    Parameters
    ----------
    scope
        Digests of the terms and of the list.
    dealt
        Bitmap of D, the clients that have dealt shares.
    """

    scope: Scope
    dealt: bytes

    def masked(self, client: int, numbers: bytes) -> bytes:
        """Return the statement on a client's masked vector, given the vector's digest."""
        return transcript("masked", *self.scope, self._digest, client, numbers)

    def agreed(self, active: bytes) -> bytes:
        """Return the statement on the sum, given the bitmap of A, the clients that are added up."""
        return transcript("agree", *self.scope, self._digest, active)

    @property
    def _digest(self) -> bytes:
        return digest("dealt", self.dealt)


def is_signed(message: bytes, signer: str, signature: bytes) -> bool:
    """Return whether the holder of a public key, in hexadecimal, has signed a transcript."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer)).verify(signature, message)
    except (ValueError, InvalidSignature):
        return False
    return True
