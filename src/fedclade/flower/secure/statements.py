"""Statements that clients sign during secure aggregation, in addition to their public keys.

A client first signs the list of clients with which it has masked its update, and later the set of
clients whose updates are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedclade.flower.secure.encoding import digest, transcript
from fedclade.flower.secure.secrets import Scope


@dataclass(frozen=True)
class Statements:
    """Statements that the clients of one sum sign, as bytes.

    They exist once D, the set of clients that have dealt shares, is known.

    Parameters
    ----------
    scope
        Digests of the terms of the sum and of the list of its clients.
    dealt
        Bitmap of D, the clients that have dealt shares.
    """

    scope: Scope
    dealt: bytes

    def masked(self, client: int, numbers: bytes) -> bytes:
        """Return the statement by which a client signs its masked vector and the sum's clients.

        Parameters
        ----------
        client
            Number of the client.
        numbers
            Digest of the masked vector.
        """
        return transcript("masked", *self.scope, self._digest, client, numbers)

    def agreed(self, active: bytes) -> bytes:
        """Return the statement by which a client agrees to a sum.

        ``active`` is the bitmap of A, the set of clients whose updates are added up.
        """
        return transcript("agree", *self.scope, self._digest, active)

    @property
    def _digest(self) -> bytes:
        """Digest of D, the set of clients that have dealt shares."""
        return digest("dealt", self.dealt)


def is_signed(message: bytes, signer: str, signature: bytes) -> bool:
    """Return whether a signature of some bytes is valid.

    Parameters
    ----------
    message
        Bytes that were signed.
    signer
        Public Ed25519 key of the signer, in hexadecimal.
    signature
        Signature.
    """
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer)).verify(signature, message)
    except (ValueError, InvalidSignature):
        return False
    return True
