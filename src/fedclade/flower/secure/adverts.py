"""The public keys that a client shows to the others of its sum, signed by the key by which they know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedclade.core import UpdateError
from fedclade.flower.keys import Key
from fedclade.flower.secure.encoding import digest, transcript
from fedclade.flower.secure.secrets import check_public
from fedclade.flower.secure.statements import is_signed
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
            right = is_signed(self._transcript(context), self.signer, self.signature)
        except ValueError:
            right = False
        if not right:
            raise UpdateError(f"client {self.client}'s keys for the sum are not signed by its key")

    def _transcript(self, context: bytes) -> bytes:
        return transcript("advert", context, self.client, self.masking, self.sealing, self.commitment)


def digest_of_list(context: bytes, everybody: Sequence[Advert]) -> bytes:
    """Return λ, the digest of a whole list in ascending order of its clients."""
    fields: list[bytes | str | int] = []
    for each in sorted(everybody, key=lambda each: each.client):
        fields += [each.client, bytes.fromhex(each.signer), each.masking, each.sealing, each.commitment]
        fields.append(each.signature)
    return digest("list", context, len(everybody), *fields)


def told(adverts: Sequence[Advert]) -> dict[str, Any]:
    """Return adverts as the values of a message."""
    columns = ("client", "masking", "sealing", "commitment", "signature")
    signers = [bytes.fromhex(each.signer) for each in adverts]
    return {"signers": signers} | {f"{name}s": [getattr(each, name) for each in adverts] for name in columns}


def read(content: Content) -> list[Advert]:
    """Return the adverts of a message, of different clients in ascending order; an UpdateError otherwise."""
    ids = listed(content, "clients", int)
    names = ("maskings", "sealings", "commitments", "signers", "signatures")
    columns = [listed(content, name, bytes) for name in names]
    if {*map(len, columns)} != {len(ids)} or sorted(set(ids)) != ids:
        raise UpdateError(
            f"keys of clients {shown(ids)}: each client should be there once, in ascending order, with all of its keys"
        )
    rows = zip(ids, *columns, strict=True)
    return [
        Advert(client, masking, sealing, commitment, signer.hex(), signature)
        for client, masking, sealing, commitment, signer, signature in rows
    ]


def check_with(peers: Mapping[str, int], adverts: Sequence[Advert]) -> None:
    """Check adverts by a client's own list of the others' keys: nobody else has signed any of them."""
    for each in adverts:
        if peers.get(each.signer) != each.client:
            listed = "is not on" if each.client not in peers.values() else "has another key on"
            raise UpdateError(
                f"client {each.client}, with the key {shown(each.signer)}, {listed} this client's list of peers "
                "(peers-file)"
            )
