"""Adverts: the public keys that a client uses in one sum, signed by the client's own key.

In the first stage of secure aggregation each client sends an advert. The list of all adverts tells
every client which clients the sum has.
"""

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
"""Smallest number of honest clients in a sum.

A sum with a single honest client would reveal this client's update to the server, if all other
clients collude with it.
"""


@dataclass(frozen=True)
class Advert:
    """Public keys that one client uses in one sum, with a signature.

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
        Signature by the key ``signer``.
    min_honest
        h, the number of honest clients that this client demands in a sum with its update, itself
        included; 0 if this client does not insist on secure aggregation (``secure-aggregation`` in
        its policy). Clients that do not insist on secure aggregation do not count as honest. They
        would also reply to the same training request without masks, so the server could subtract
        their updates from the sum.
    """

    client: int
    masking: bytes
    sealing: bytes
    signer: str
    signature: bytes = b""
    min_honest: int = 0

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """The client's two public keys for the sum: for masks, and for encrypting shares."""
        return self.masking, self.sealing

    def signed(self, context: bytes, key: Key) -> Advert:
        """Return the advert, signed by the client's own key for one sum.

        ``context`` is the digest of the terms of the sum.
        """
        return replace(self, signature=key.private.sign(self._transcript(context)))

    def check(self, context: bytes) -> None:
        """Check that the keys are valid and signed for one sum by the client's own key.

        ``context`` is the digest of the terms of the sum.

        Raises
        ------
        UpdateError
            If a key or the signature is invalid.
        """
        try:
            check_public(self.masking)
            check_public(self.sealing)
            right = is_signed(self._transcript(context), self.signer, self.signature)
        except ValueError:
            right = False
        if not right:
            raise UpdateError(
                f"the keys of client {self.client} for the sum are not signed by this client's own "
                "key, so they cannot be used; the client, or the server that has passed the keys on, "
                "does not follow the protocol"
            )

    def _transcript(self, context: bytes) -> bytes:
        """Return the bytes of the advert that the client signs."""
        return transcript(
            "advert", context, self.client, self.masking, self.sealing, self.min_honest
        )


def check_min_honest(number: int) -> None:
    """Check the number of honest clients that a client demands in a sum; 0 for no demand.

    Raises
    ------
    UpdateError
        If the number is out of range.
    """
    if number and not FEWEST_HONEST <= number <= MOST_CLIENTS:
        raise UpdateError(
            f"the client demands {shown(number)} honest clients in a sum (min_honest); expected 0, "
            f"or {FEWEST_HONEST} to {MOST_CLIENTS}"
        )


def digest_of_list(context: bytes, everybody: Sequence[Advert]) -> bytes:
    """Return λ, the digest of the list of all clients of a sum with their keys and signatures.

    All secrets of the sum are bound to this digest. It does not depend on the order of the adverts.

    Parameters
    ----------
    context
        Digest of the terms of the sum.
    everybody
        Adverts of all clients on the list.
    """
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
    """Return a list of adverts as the values of a message.

    The clients' own public keys (``signers``) are left out for a receiver that knows these keys.
    """
    values: dict[str, Any] = {}
    for name in ("client", "masking", "sealing", "signature"):
        values[f"{name}s"] = [getattr(advert, name) for advert in adverts]
    values["min_honests"] = [each.min_honest for each in adverts]
    if has_signers:
        values["signers"] = [bytes.fromhex(each.signer) for each in adverts]
    return values


def read(content: Content, keys: Mapping[int, str] | None) -> list[Advert]:
    """Read the list of adverts of all clients of a sum from a message.

    Parameters
    ----------
    content
        Message with the adverts.
    keys
        The clients' own public keys by number, from the reader's list of peers; None if the reader
        has no such list and takes the keys from the message.

    Raises
    ------
    UpdateError
        If the adverts are malformed, do not belong to different clients in ascending order, or
        belong to a client that is not in ``keys``.
    """
    ids = listed(content, "clients", int)
    columns = [listed(content, name, bytes) for name in ("maskings", "sealings", "signatures")]
    if keys is None:
        columns.append(listed(content, "signers", bytes))
    min_honests = listed(content, "min_honests", int)
    if {*map(len, columns), len(min_honests)} != {len(ids)} or sorted(set(ids)) != ids:
        raise UpdateError(
            f"the list of keys of clients {shown(ids)} should contain each client once, in "
            "ascending order, with all of its keys"
        )
    for number in min_honests:
        check_min_honest(number)
    if keys is None:
        signers = [signer.hex() for signer in columns.pop()]
    elif unknown := [client for client in ids if client not in keys]:
        raise UpdateError(
            f"clients {shown(unknown)} of the sum are not in this client's peers-file; add their "
            "keys there"
        )
    else:
        signers = [keys[client] for client in ids]
    rows = zip(ids, *columns, signers, min_honests, strict=True)
    return [
        Advert(
            client=client,
            masking=masking,
            sealing=sealing,
            signer=signer,
            signature=signature,
            min_honest=min_honest,
        )
        for client, masking, sealing, signature, signer, min_honest in rows
    ]
