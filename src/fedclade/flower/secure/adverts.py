"""The public keys that a client shows to the others of its sum, signed by the key by which the server knows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedclade.core import UpdateError
from fedclade.flower.keys import Key
from fedclade.flower.secure.secrets import check_public
from fedclade.flower.secure.terms import listed
from fedclade.flower.wire import Content, shown


@dataclass(frozen=True)
class Advert:
    """One client's public keys for one sum: ``masking`` for pairwise masks, ``sealing`` for shares sent to it."""

    client: int
    masking: bytes
    sealing: bytes
    commitment: bytes
    signer: str  # its public Ed25519 key, in hexadecimal
    signature: bytes = b""

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """Its public keys."""
        return self.masking, self.sealing

    def signed(self, context: bytes, key: Key) -> Advert:
        """Return it with a signature by the client's own key, for one sum."""
        return replace(self, signature=key.private.sign(self._transcript(context)))

    def check(self, context: bytes) -> None:
        """Check that the holder of its ``signer`` key signed it for this sum; an UpdateError otherwise."""
        try:
            check_public(self.masking)
            check_public(self.sealing)
            public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.signer))
            public.verify(self.signature, self._transcript(context))
        except (ValueError, InvalidSignature) as error:
            raise UpdateError(f"client {self.client}'s keys for the sum are not signed by its key") from error

    def _transcript(self, context: bytes) -> bytes:
        parts = [self.masking.hex(), self.sealing.hex(), self.commitment.hex()]
        return json.dumps(["fedclade keys for a sum", context.hex(), self.client, *parts]).encode()


def told(adverts: Sequence[Advert]) -> dict[str, Any]:
    """Return adverts as the values of a message."""
    columns = ("client", "masking", "sealing", "commitment", "signer", "signature")
    return {f"{name}s": [getattr(each, name) for each in adverts] for name in columns}


def read(content: Content) -> list[Advert]:
    """Return the adverts of a message, all of different clients; an UpdateError otherwise."""
    ids = listed(content, "clients", int)
    others = [listed(content, name, bytes) for name in ("maskings", "sealings", "commitments", "signatures")]
    signers = listed(content, "signers", str)
    if len({len(ids), len(signers), *map(len, others)}) != 1 or len(set(ids)) != len(ids):
        raise UpdateError(f"keys of clients {shown(ids)}: each client should be there once, with all of its keys")
    maskings, sealings, commitments, signatures = others
    rows = zip(ids, maskings, sealings, commitments, signers, signatures, strict=True)
    return [Advert(*row) for row in rows]


def check_with(peers: Mapping[str, int], adverts: Sequence[Advert]) -> None:
    """Check adverts by a client's own list of the others' keys: nobody else has signed any of them."""
    for each in adverts:
        if peers.get(each.signer) != each.client:
            listed = "is not on" if each.client not in peers.values() else "has another key on"
            raise UpdateError(
                f"client {each.client}, with the key {shown(each.signer)}, {listed} this client's list of peers "
                "(peers-file)"
            )
