"""Public keys of a client for one sum, signed by the key by which other clients know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedclade.core import UpdateError
from fedclade.flower.secure.encoding import digest, transcript
from fedclade.flower.secure.secrets import check_public
from fedclade.flower.secure.statements import is_signed
from fedclade.flower.secure.terms import MOST_CLIENTS, listed
from fedclade.flower.signing import Key
from fedclade.flower.wire import Content, shown

FEWEST_HONEST = 2
"""Fewest honest clients of a sum: with one honest client the sum would reveal its update."""


@dataclass(frozen=True)
class Advert:
    """Public keys of one client for one sum.

    Parameters
    ----------
    client
        Number of the client.
    masking
        Public key for pairwise masks.
    sealing
        Public key for encrypting shares that are sent to the client.
    signer
        The client's own public Ed25519 key, in hexadecimal.
    signature
        Signature by that key.
    min_honest
        h, the number of honest clients that the client demands in a sum with its update, itself
        included. They must send updates only under masks. It is 0 for a client that does not insist
        on sums (``secure-aggregation`` in its policy): such a client replies to the same training
        request without masks, too, and so hides no other client's update.
    """

    client: int
    masking: bytes
    sealing: bytes
    signer: str
    signature: bytes = b""
    min_honest: int = 0

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """The two public keys for the sum."""
        return self.masking, self.sealing

    def signed(self, context: bytes, key: Key) -> Advert:
        """Return the advert with a signature by the client's own key, for one sum."""
        return replace(self, signature=key.private.sign(self._transcript(context)))

    def check(self, context: bytes) -> None:
        """Check that the ``signer`` key signed the advert for this sum; an UpdateError if not."""
        try:
            check_public(self.masking)
            check_public(self.sealing)
            right = is_signed(self._transcript(context), self.signer, self.signature)
        except ValueError:
            right = False
        if not right:
            raise UpdateError(f"client {self.client}'s keys for the sum are not signed by its key")

    def _transcript(self, context: bytes) -> bytes:
        return transcript(
            "advert", context, self.client, self.masking, self.sealing, self.min_honest
        )


def check_min_honest(number: int) -> None:
    """Check that a client can demand ``number`` honest clients; raise an UpdateError if not."""
    if number and not FEWEST_HONEST <= number <= MOST_CLIENTS:
        raise UpdateError(
            f"a sum of at least {shown(number)} honest clients (min_honest); expected 0, or "
            f"{FEWEST_HONEST} to {MOST_CLIENTS}"
        )


def digest_of_list(context: bytes, everybody: Sequence[Advert]) -> bytes:
    """Return λ, the digest of a whole list in ascending order of its clients."""
    fields: list[bytes | str | int] = []
    for each in sorted(everybody, key=lambda each: each.client):
        fields += [
            each.client,
            bytes.fromhex(each.signer),
            each.masking,
            each.sealing,
            each.min_honest,
        ]
        fields.append(each.signature)
    return digest("list", context, len(everybody), *fields)


def told(adverts: Sequence[Advert], *, has_signers: bool) -> dict[str, Any]:
    """Return adverts as the values of a message, with or without the clients' own keys."""
    columns = ("client", "masking", "sealing", "signature")
    values: dict[str, Any] = {
        f"{name}s": [getattr(each, name) for each in adverts] for name in columns
    }
    values["min_honests"] = [each.min_honest for each in adverts]
    if has_signers:
        values["signers"] = [bytes.fromhex(each.signer) for each in adverts]
    return values


def read(content: Content, keys: Mapping[int, str] | None) -> list[Advert]:
    """Return the adverts of a message.

    Parameters
    ----------
    content
        Message with the adverts.
    keys
        The clients' own keys by number, if known from another source than the message.

    Raises
    ------
    UpdateError
        If the adverts are malformed, not of different clients in ascending order, or of a client
        without a known key.
    """
    ids = listed(content, "clients", int)
    columns = [listed(content, name, bytes) for name in ("maskings", "sealings", "signatures")]
    if keys is None:
        columns.append(listed(content, "signers", bytes))
    min_honests = listed(content, "min_honests", int)
    if {*map(len, columns), len(min_honests)} != {len(ids)} or sorted(set(ids)) != ids:
        raise UpdateError(
            f"keys of clients {shown(ids)}: each client should be there once, in ascending order, "
            "with all of its keys"
        )
    for number in min_honests:
        check_min_honest(number)
    if keys is None:
        signers = [signer.hex() for signer in columns.pop()]
    elif unknown := [client for client in ids if client not in keys]:
        raise UpdateError(
            f"clients {shown(unknown)} are not on this client's list of peers (peers-file)"
        )
    else:
        signers = [keys[client] for client in ids]
    rows = zip(ids, *columns, signers, min_honests, strict=True)
    return [
        Advert(client, masking, sealing, signer, signature, min_honest)
        for client, masking, sealing, signature, signer, min_honest in rows
    ]
