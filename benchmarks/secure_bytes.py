"""Count the bytes that a client sends and receives for one sum with secure aggregation.

The present protocol is compared with the previous one, which had four requests, encrypted shares
with Fernet, and signed only keys. No protocol is executed: the script makes messages with values of
the right lengths, and Flower serialises them. Clients have a list of their peers. A masked number
has 3 bytes per entry, and had 4 bytes in the previous protocol.

    python benchmarks/secure_bytes.py
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Message, RecordDict
from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt, generate_shared_key
from flwr.common.serde import message_to_proto

from fedclade import LocalTraining
from fedclade.core import Models, Round, TrainQuery
from fedclade.flower import LocalGrid, wire
from fedclade.flower.models_sent import training_values
from fedclade.flower.secure.encoding import DIGEST_BYTES, bitmap
from fedclade.flower.secure.parameters import Graph, fewest_holders, quorum
from fedclade.flower.secure.secrets import BYTES_PER_ENTRY, new_key, public_of, seal
from fedclade.flower.secure.terms import Terms
from fedclade.flower.signing import with_nonce

ENTRIES = 101_770
SETTINGS = ((20, 1), (50, 5), (1000, 1), (1000, 100))
KEY, HASH, SIGNATURE = 33, 32, 64
GROUP, NONCE = with_nonce("12")
SEED_SHARE, KEY_SHARE = 36, 52


@dataclass(frozen=True)
class Bytes:
    """Numbers of bytes that a client receives and sends."""

    down: int
    up: int

    @property
    def both(self) -> int:
        """Sum of both directions."""
        return self.down + self.up


def some(length: int) -> bytes:
    """Return random bytes, which cannot be compressed."""
    return secrets.token_bytes(length)


def sizes_of(
    stages: Mapping[str, tuple[dict[str, Any], dict[str, Any]]], masked_bytes: int
) -> Bytes:
    """Return the bytes of the messages of a sum.

    Parameters
    ----------
    stages
        The values of the request and of the reply of each stage.
    masked_bytes
        Bytes of the masked vector.
    """
    down = up = 0
    for stage, (asked, answered) in stages.items():
        of_all = {
            "what": stage,
            "instance": secrets.token_hex(16),
            "layout": "l" * 32,
            "run": "r" * 32,
        }
        vectors = (
            {"model": wire.raw(some(4 * ENTRIES), "float32", ENTRIES)} if stage == "masked" else {}
        )
        masked = (
            {"masked": wire.raw(some(masked_bytes), "uint8", masked_bytes)}
            if stage == "masked"
            else {}
        )
        question = wire.record({**of_all, **asked}, vectors)
        proof = {"nonce": NONCE, "key": "k" * 64, "lasts": True, "signature": bytes(64)}
        answer = wire.record({"instance": of_all["instance"], **answered}, masked)
        down += length_of(question)
        up += length_of(wire.with_proof(answer, wire.pack(proof)))
    return Bytes(down, up)


def length_of(content: RecordDict) -> int:
    """Return the number of bytes of a message as Flower sends it."""
    return message_to_proto(Message(content, 2**62, "train", ttl=600.0, group_id=GROUP)).ByteSize()


def training() -> dict[str, Any]:
    """Return the values of a training request."""
    query = TrainQuery(
        range(2), Models(torch.zeros(1, 1), [0, 0]), Round(12, LocalTraining(lr=0.1))
    )
    return {**training_values(query, None), "signs": False}


def replied() -> dict[str, Any]:
    """Return the values that a reply to a training request repeats."""
    return {"what": "masked", "round": 12, "query": 0, "purpose": "train", "model": "m" * 32}


def now(clients: int, colluders: int) -> Bytes:
    """Return the bytes of the present protocol."""
    near = fewest_holders(clients, colluders) if clients > 64 else 0
    graph = Graph.of(clients, colluders, near)
    holders, members = graph.holders or clients - 1, range(clients)
    terms = Terms(
        **{
            "instance": "i" * 32,
            "clients": clients,
            "colluders": colluders,
            "neighbours": near,
            "norm": 8.0,
        },
        **{
            "norm_of_buffers": 8.0,
            "weight": 600,
            "training": "t" * 64,
            "question": "q" * 64,
            "model": "m" * 64,
            "anchor": "",
        },
    )
    scope = some(DIGEST_BYTES), some(DIGEST_BYTES)
    sealed = len(seal(some(32), scope, (1, 2), shares=(some(SEED_SHARE), some(KEY_SHARE))))
    promises = [some(2 * HASH) for _ in range(holders)]
    dealt = {"ciphertexts": [some(sealed) for _ in range(holders)], "promises": promises}
    bits, agreeing = bitmap({*members}, members), quorum(clients, colluders)
    everybody: dict[str, Any] = {
        "clients": list(members),
        **{f"{name}s": [some(length) for _ in members] for name, length in lengths().items()},
        "min_honests": [3] * clients,
    }
    del everybody["commitments"]  # only the server gets them, with the shares
    own = {} if graph.holders else {"promises": [*promises, some(2 * HASH)]}
    shares = [some(SEED_SHARE) for _ in range(holders + (graph.holders == 0))]
    signed = {
        "digests": [some(HASH) for _ in range(holders)],
        "signatures": [some(SIGNATURE) for _ in range(holders)],
    }
    agreed = {
        "clients": list(range(agreeing)),
        "signatures": [some(SIGNATURE) for _ in range(agreeing)],
    }
    stages = {
        "keys": (
            {"client": 7, "terms": terms.text},
            {**advert(), "min_honest": 3, "has_peers": True},
        ),
        "shares": (
            everybody,
            {"clients": list(range(holders)), **dealt, **own, "commitment": some(HASH)},
        ),
        "masked": (
            {**training(), "dealt": bits, "sources": list(range(holders)), **dealt},
            {**replied(), "signature": some(SIGNATURE)},
        ),
        "agree": ({"active": bits, **signed}, {"signature": some(SIGNATURE)}),
        "unmask": (agreed, {"shares": shares}),
    }
    return sizes_of(stages, BYTES_PER_ENTRY * terms.numbers(ENTRIES, ENTRIES).length)


def before(clients: int, colluders: int) -> Bytes:
    """Return the bytes of the previous protocol, with the same number of neighbours."""
    near = fewest_holders(clients, colluders) if clients > 64 else clients - 1
    plain = len(
        encrypt(generate_shared_key(*some_keys()), some(8 + 8 + 8 + SEED_SHARE + KEY_SHARE))
    )
    shown = near + 1
    adverts = {
        **{"clients": list(range(shown)), "signers": ["s" * 64] * shown},
        **{f"{name}s": [some(length) for _ in range(shown)] for name, length in lengths().items()},
    }
    dealt = {
        "ciphertexts": [some(plain) for _ in range(near)],
        "promises": [some(2 * HASH) for _ in range(near)],
    }
    terms = '{"clients": 1000, "clip": 8.0, "instance": "' + "i" * 250 + '"}'
    stages = {
        "keys": ({"client": 7, "terms": terms}, advert()),
        "shares": (adverts, {"clients": list(range(near)), **dealt}),
        "masked": (
            {**training(), "sources": list(range(near)), **dealt},
            {
                **replied(),
                "size": 600,
                "loss": 0.5,
                "norm": 0.5,
                "norm_of_buffers": 0.0,
                "clipped": 0,
            },
        ),
        "unmask": (
            {"active": list(range(shown)), "dead": list[int]()},
            {"shares": [some(SEED_SHARE) for _ in range(shown)]},
        ),
    }
    return sizes_of(stages, 4 * ENTRIES)


def lengths() -> dict[str, int]:
    """Return the lengths of the parts of an advert (a client's keys for a sum)."""
    return {"masking": KEY, "sealing": KEY, "commitment": HASH, "signature": SIGNATURE}


def advert() -> dict[str, bytes]:
    """Return an advert as a client sends it."""
    return {name: some(length) for name, length in lengths().items()}


def some_keys() -> tuple[Any, Any]:
    """Return a private key and another public key, in the form that Flower requires."""
    from cryptography.hazmat.primitives.asymmetric import ec

    one, other = new_key(), public_of(new_key())
    curve = ec.SECP256R1()
    private = ec.derive_private_key(int.from_bytes(one, "big"), curve)
    return private, ec.EllipticCurvePublicKey.from_encoded_point(curve, other)


def main() -> None:
    """Print a table."""
    LocalGrid({})  # messages contain their sender, which Flower knows after a grid was made
    print(f"{ENTRIES:,} entries; bytes for each client and sum\n")
    print(
        "| n | c | previous protocol | bytes received | bytes sent | bytes in addition to vectors "
        "| percentage of the previous protocol |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for clients, colluders in SETTINGS:
        was, found = before(clients, colluders), now(clients, colluders)
        beside = found.both - (4 + BYTES_PER_ENTRY) * ENTRIES
        row = f"| {clients:,} | {colluders} | {was.both:,} | {found.down:,} | {found.up:,} | {beside:,} "
        print(f"{row}| {found.both / was.both:.1%} |", flush=True)


if __name__ == "__main__":
    main()
