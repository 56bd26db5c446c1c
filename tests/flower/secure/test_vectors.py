"""The protocol against an implementation that shares no code with it, value by value."""

from __future__ import annotations

import json
from dataclasses import astuple, fields
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedclade.flower import wire
from fedclade.flower.secure.adverts import Advert, digest_of_list
from fedclade.flower.secure.encoding import bitmap, transcript
from fedclade.flower.secure.group import Group
from fedclade.flower.secure.member import SumState, add_masks
from fedclade.flower.secure.parameters import Graph
from fedclade.flower.secure.secrets import (
    MODULUS,
    Contribution,
    Numbers,
    Scope,
    agreed,
    combined,
    commitment,
    digest_of_numbers,
    is_key_of,
    is_seed_of,
    own_mask,
    pack,
    pair_mask,
    promises_of,
    public_of,
    unpack,
    unseal,
)
from fedclade.flower.secure.statements import Statements
from fedclade.flower.secure.terms import Terms
from fedclade.flower.signing import Key

VECTORS = Path(__file__).parents[2] / "vectors"


@cache
def reference() -> Any:
    spec = spec_from_file_location("secagg_reference", VECTORS / "secagg_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Sum:
    """One of the sums, by the project's own code."""

    def __init__(self, name: str) -> None:
        self.vector = json.loads((VECTORS / "secagg-13.json").read_text())[name]
        members = self.members = self.vector["members"]
        fixed = reference().fixed
        self.masking = {client: fixed("masking", client) for client in members}
        self.sealing = {client: fixed("sealing", client) for client in members}
        self.seeds = {client: fixed("seed", client, 31) for client in members}
        self.keys = {
            client: Key(Ed25519PrivateKey.from_private_bytes(fixed("signing", client)))
            for client in members
        }
        names = [each.name for each in fields(Terms)]
        self.terms = Terms(**dict(zip(names, self.vector["terms"], strict=True)))
        context = self.terms.context
        self.adverts = {
            client: Advert(
                client,
                public_of(self.masking[client]),
                public_of(self.sealing[client]),
                self.keys[client].public,
                min_honest=0 if client in self.vector["bystanders"] else reference().MIN_HONEST,
            ).signed(context, self.keys[client])
            for client in members
        }
        self.scope: Scope = context, digest_of_list(context, list(self.adverts.values()))
        self.dealt = [client for client in members if client not in self.vector["not_dealt"]]
        self.active = [client for client in self.dealt if client not in self.vector["gone"]]
        holders = self.vector["k"] or len(members) - 1
        self.holders: dict[int, list[int]] = {}
        for place, client in enumerate(members):
            circle = [*members[place + 1 :], *members[:place]]
            self.holders[client] = sorted(circle[:holders])

    def kept(self, client: int) -> SumState:
        return SumState(
            "instance",
            self.terms.text,
            client,
            self.masking[client],
            self.sealing[client],
            self.seeds[client],
            listing=self.scope[1],
            members=self.members,
            their_masking=[self.adverts[member].masking for member in self.members],
            holders=self.holders[client],
            dealt=bitmap({*self.dealt}, self.members),
            sources=[other for other in self.dealt if client in self.holders[other]],
        )

    def numbers(self, client: int) -> np.ndarray:
        fixed = reference().fixed
        return unpack(fixed("numbers", client) + fixed("more", client, 28))


@pytest.mark.parametrize("name", ["complete", "mixed", "sparse"])
def test_all_values_are_those_of_the_reference(name: str):
    one, vector = Sum(name), json.loads((VECTORS / "secagg-13.json").read_text())[name]
    first, active = one.members[0], one.active[0]
    graph = one.terms.graph(len(one.members), len(one.members) - len(vector["bystanders"]))
    assert graph == Graph(vector["k"], vector["t"])
    assert list(astuple(one.terms)) == vector["terms"]
    assert one.scope[0].hex() == vector["ctx"]
    assert one.adverts[first].signature.hex() == vector["sigma0"]
    assert one.scope[1].hex() == vector["list"]
    assert commitment(one.seeds[first], one.scope, first).hex() == vector["commitment"]
    share = vector["share"]
    way, pair = (
        (share["from"], share["to"]),
        (bytes.fromhex(share["seed"]), bytes.fromhex(share["masking"])),
    )
    shared = agreed(one.sealing[way[1]], one.adverts[way[0]].sealing)
    assert unseal(shared, one.scope, way, bytes.fromhex(vector["sealed"])) == pair
    assert promises_of(*pair, way, one.scope).hex() == vector["promise"]
    statements = Statements(one.scope, bitmap({*one.dealt}, one.members))
    assert statements.dealt.hex() == vector["dealt"]
    assert own_mask(one.seeds[active], one.scope, active, 16).tolist() == vector["own"]
    secret = agreed(one.masking[way[0]], one.adverts[way[1]].masking)
    assert pair_mask(secret, one.scope, way, 16).tolist() == vector["pair"]
    masked = {client: add_masks(one.kept(client), one.numbers(client)) for client in one.active}
    sent = {client: pack(each) for client, each in masked.items()}
    assert sent[active].hex() == vector["masked"]
    assert sha256(b"".join(sent.values())).hexdigest() == vector["all_masked"]
    key, numbers = one.keys[active].private, digest_of_numbers(sent[active])
    assert key.sign(statements.masked(active, numbers)).hex() == vector["sigma1"]
    bits = bitmap({*one.active}, one.members)
    assert bits.hex() == vector["active"]
    assert key.sign(statements.agreed(bits)).hex() == vector["sigma2"]
    exact = sum(
        (one.numbers(client) for client in one.active), np.zeros(reference().ENTRIES, np.uint32)
    )
    assert (exact % MODULUS).tolist() == vector["sum"]


def test_an_update_becomes_the_numbers_of_the_reference():
    vector = json.loads((VECTORS / "secagg-13.json").read_text())["encoding"]
    assert vector == {**reference().ENCODING, "numbers": reference().encode(reference().ENCODING)}
    numbers = Numbers(
        clients=vector["clients"],
        parameters=vector["parameters"],
        buffers=vector["buffers"],
        clip=vector["norm"],
        clip_of_buffers=vector["norm_of_buffers"],
        largest_weight=vector["cap"],
        key=vector["question"].encode(),
    )
    update = torch.sin(
        1 + 3 * torch.arange(vector["parameters"] + vector["buffers"], dtype=torch.float64)
    )
    contribution = Contribution(update=update, examples=vector["examples"], loss=vector["loss"])
    assert numbers.encode(contribution).tolist() == vector["numbers"]


@pytest.mark.parametrize("name", ["complete", "mixed", "sparse"])
def test_the_reference_computes_what_the_file_has(name: str):
    found = reference().compute(reference().CASES[name])
    vector = json.loads((VECTORS / "secagg-13.json").read_text())[name]
    assert {**reference().CASES[name], **found} == vector


def test_the_server_takes_masks_off_with_shares_of_the_reference():
    one, split = Sum("complete"), reference().share
    masked = {client: add_masks(one.kept(client), one.numbers(client)) for client in one.active}
    group = Group(
        0,
        one.active,
        one.terms,
        adverts=one.adverts,
        members=one.members,
        listing=one.scope[1],
        dealt=one.dealt,
        ciphertexts={client: dict.fromkeys(one.holders[client], b"") for client in one.members},
        promises={client: dict.fromkeys(one.members, b"") for client in one.members},
        commitments={
            client: commitment(one.seeds[client], one.scope, client) for client in one.members
        },
        masked=masked,
        active=one.active,
    )
    for client in one.dealt:
        secret = one.seeds[client] if client in masked else one.masking[client]
        group.shares[client] = {
            holder: split(secret, 3, 1 + place, "x") for place, holder in enumerate(one.active)
        }
    assert group.unmasked().tolist() == one.vector["sum"]


def test_shares_of_the_reference_open_secrets_and_the_other_way_round():
    one, split = Sum("complete"), reference().share
    first = one.members[0]
    shares = [split(one.seeds[first], 3, number, "x") for number in (4, 1, 7)]
    assert (
        combined(
            shares, is_seed_of(commitment(one.seeds[first], one.scope, first), one.scope, first)
        )
        == one.seeds[first]
    )
    shares = [split(one.masking[first], 3, number, "y") for number in (2, 9, 5)]
    assert combined(shares, is_key_of(one.adverts[first].masking)) == one.masking[first]
    assert reference().opened(shares) == one.masking[first]


def test_a_transcript_begins_as_no_signed_answer_does():
    assert transcript("agree")[:1] == b"\0"
    signed = {"statement": "fedclade answer"} | {str(number): number for number in range(6)}
    for vectors in (0, 1, 8, 100):
        more = {f"vector {number}": b"" for number in range(vectors)}
        assert wire.pack(signed | more)[:1] != b"\0"
