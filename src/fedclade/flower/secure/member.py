"""A client's side of secure aggregation: four questions, each answered once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from cryptography.fernet import InvalidToken
from flwr.app import RecordDict
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat as sealed
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_separate as unsealed

from fedclade.core import UpdateError, Updates, row_norms
from fedclade.flower import wire
from fedclade.flower.keys import Key
from fedclade.flower.policy import Policy
from fedclade.flower.secure import adverts as advertising
from fedclade.flower.secure.adverts import Advert
from fedclade.flower.secure.kept import Kept
from fedclade.flower.secure.numbers import Numbers
from fedclade.flower.secure.secrets import (
    LONGEST_SHARE,
    Masked,
    agreed,
    commitment,
    mask,
    new_key,
    new_seed,
    promises_of,
    public_of,
)
from fedclade.flower.secure.terms import OF_STAGE, Terms, digest_of, listed, names_of
from fedclade.flower.wire import Content, shown

Train = Callable[[Content], Updates]
"""Trains as a question says: the one update ``[1, S + what leaves unmasked]``."""


class Member:
    """A client's part in sums; what lasts between two questions is in the ``state`` that Flower keeps of it.

    Parameters
    ----------
    policy
        The client's: it says how small a group may be.
    peers
        The number of each other client by its key, if the client knows them from elsewhere than from the server.
    """

    def __init__(self, policy: Policy, peers: Mapping[str, int] | None = None) -> None:
        self._policy, self._peers = policy, peers

    def keys(self, content: Content, state: RecordDict | None, key: Key | None) -> RecordDict:
        """Stage 0: take part in a sum, with fresh keys; what was begun before is forgotten."""
        terms = Terms.read(content)
        client, instance = content.get("client", int), content.get("instance", str)
        if key is None or instance != terms.instance or not 0 <= client < 2**63:
            raise UpdateError("a client takes part in a sum under a number, by terms of that sum, and with a key")
        self._policy.check_group(terms.clients)
        kept = Kept(instance, terms.text, client, masking=new_key(), sealing=new_key(), seed=new_seed())
        promise = commitment(kept.seed, terms.context)
        mine = Advert(client, public_of(kept.masking), public_of(kept.sealing), promise, key.public)
        mine = mine.signed(terms.context, key)
        kept.save(state, "keys")
        public = {name: getattr(mine, name) for name in ("masking", "sealing", "commitment", "signature")}
        return wire.record({"instance": instance, **public})

    def shares(self, content: Content, state: RecordDict | None) -> RecordDict:
        """Stage 1: see the others' keys, and give each a share of the own secrets that only it can read."""
        kept = Kept.load(state, "keys", content)
        terms, everybody = kept.read_terms(), advertising.read(content)
        others = self._others(kept, terms, everybody)
        kept.others = [each.client for each in others]
        kept.their_masking = [each.masking for each in others]
        kept.their_sealing = [each.sealing for each in others]
        needed = terms.needed(len(everybody))
        of_key, of_seed = (create_shares(each, needed, len(everybody)) for each in (kept.masking, kept.seed))
        kept.key_shares, kept.seed_shares = of_key[-1:], of_seed[-1:]
        ciphertexts = [
            encrypt(agreed(kept.sealing, each.sealing), sealed(kept.client, each.client, seed_share, key_share))
            for each, seed_share, key_share in zip(others, of_seed, of_key, strict=False)
        ]
        holders = [*kept.others, kept.client]
        promises = [
            promises_of(seed_share, key_share, kept.client, holder, terms.context)
            for holder, seed_share, key_share in zip(holders, of_seed, of_key, strict=True)
        ]
        kept.save(state, "shares")
        dealt = {"clients": kept.others, "ciphertexts": ciphertexts, "promises": promises}
        return wire.record({"instance": kept.instance, **dealt})

    def masked(self, content: Content, state: RecordDict | None, train: Train, n_parameters: int) -> RecordDict:
        """Stage 2: train, and send the update under masks, of a model of D = ``n_parameters`` parameters."""
        kept = Kept.load(state, "shares", content)
        terms = kept.read_terms()
        if digest_of(content.values) != terms.question or names_of(content.vectors) != terms.vectors:
            raise UpdateError("asked to train something else than the terms of the sum say")
        self._take_shares(kept, content, terms)
        updates = train(training_of(content))
        size = len(content.vector("model")) // updates.required_deltas.element_size()
        update, clear = updates.required_deltas[0, :size], updates.required_deltas[0, size:]
        self._policy.check_clear(len(clear), n_parameters)
        examples = int(updates.sizes[0])
        weight = min(examples, terms.weight) / terms.weight
        numbers, clipped = Numbers(terms.clip, terms.clients).encode(update, weight)
        numbers = self._add_masks(kept, terms, numbers)
        kept.save(state, "masked")
        loss = float(updates.losses[0])
        norms = [float(row_norms(part[None])) for part in (update[:n_parameters], update[n_parameters:])]
        values: dict[str, Any] = {
            **{name: content.values[name] for name in ("what", "round", "query", "purpose", "instance")},
            **{"model": wire.digest(content.vector("model")), "size": examples, "clipped": clipped},
            **{"norm": norms[0], "norm_of_buffers": norms[1]},
            **({} if loss != loss else {"loss": loss}),  # NaN: it is withheld from the server
        }
        vectors = {"masked": wire.raw(numbers.astype("<u4", copy=False).tobytes(), "uint32", len(numbers))}
        return wire.record(values, vectors | ({"clear": wire.raw_vector(clear)} if len(clear) else {}))

    def unmask(self, content: Content, state: RecordDict | None) -> RecordDict:
        """Stage 3: give shares of the seeds of those that answered, and of the keys of those that did not."""
        kept = Kept.load(state, "masked", content)
        active, dead = listed(content, "active", int), listed(content, "dead", int)
        everybody = [*kept.others, kept.client]
        taking_part = {who for who, share in zip(everybody, kept.key_shares, strict=True) if share != MISSING}
        if len(active) + len(dead) != len({*active, *dead}) or {*active, *dead} != taking_part:
            raise UpdateError(f"asked for shares of {shown(active)} and {shown(dead)}, of {shown(sorted(taking_part))}")
        if kept.client not in active:
            raise UpdateError("asked for shares of a sum that this client's update is not in")
        needed = kept.read_terms().needed(len(everybody))
        if len(active) < needed:
            raise UpdateError(f"asked to unmask a sum of {len(active)} clients, and at least {needed} are needed")
        self._policy.check_group(len(active))
        places = {who: place for place, who in enumerate(everybody)}
        shares = [kept.seed_shares[places[who]] for who in active] + [kept.key_shares[places[who]] for who in dead]
        answer = wire.record({"instance": kept.instance, "shares": [b"" if s == UNREADABLE else s for s in shares]})
        kept.save(state, "unmask")
        return answer

    def _others(self, kept: Kept, terms: Terms, everybody: list[Advert]) -> list[Advert]:
        """Return the adverts of the others, once all are checked."""
        self._policy.check_group(len(everybody))
        mine = [each for each in everybody if each.client == kept.client]
        own = public_of(kept.masking), public_of(kept.sealing)
        if len(everybody) > terms.clients or [(each.masking, each.sealing) for each in mine] != [own]:
            raise UpdateError(f"the keys shown for the sum are not those of its {terms.clients} clients")
        public = [key for each in everybody for key in (each.masking, each.sealing)]
        if len(set(public)) != len(public):
            raise UpdateError("two clients of the sum show the same key")
        others = [each for each in everybody if each.client != kept.client]
        for each in others:
            each.check(terms.context)
        if self._peers is not None:
            advertising.check_with(self._peers, others)
        return others

    def _take_shares(self, kept: Kept, content: Content, terms: Terms) -> None:
        """Keep the shares that others made for this client; also who made one that cannot be read is masked with.

        Both sides of a pair have to use a mask or neither, and the others hold shares to take it off again. A share
        that its dealer has not committed to is as good as none: the server would take it for a lie of the holder's.
        """
        sources, ciphertexts = listed(content, "sources", int), listed(content, "ciphertexts", bytes)
        promises = listed(content, "promises", bytes)
        all_there = len(sources) == len(ciphertexts) == len(promises)
        if not all_there or len(set(sources)) != len(sources) or not {*sources} <= {*kept.others}:
            raise UpdateError(f"got shares of {shown(sources)}, expected some of {shown(kept.others)}, each once")
        needed = terms.needed(len(kept.others) + 1)
        if len(sources) + 1 < needed:
            raise UpdateError(f"{len(sources) + 1} clients of the sum have sent shares, and {needed} are needed")
        found = dict(zip(sources, zip(ciphertexts, promises, strict=True), strict=True))
        of_key, of_seed = kept.key_shares, kept.seed_shares
        kept.key_shares, kept.seed_shares = [], []
        for other, sealing in zip(kept.others, kept.their_sealing, strict=True):
            key_share = seed_share = MISSING
            if other in found:
                ciphertext, promise = found[other]
                seed_share, key_share = _opened(ciphertext, other, kept.client, agreed(kept.sealing, sealing))
                if promise != promises_of(seed_share, key_share, other, kept.client, terms.context):
                    seed_share = key_share = UNREADABLE
            kept.key_shares.append(key_share)
            kept.seed_shares.append(seed_share)
        kept.key_shares += of_key
        kept.seed_shares += of_seed

    def _add_masks(self, kept: Kept, terms: Terms, numbers: Masked) -> Masked:
        """Return numbers under the client's own mask and one for each other client that has sent shares."""
        total = numbers + mask(kept.seed, terms.context, len(numbers))
        for other, public, share in zip(kept.others, kept.their_masking, kept.key_shares, strict=False):
            if share != MISSING:
                pairwise = mask(agreed(kept.masking, public), terms.context, len(numbers))
                total = total + pairwise if kept.client > other else total - pairwise
        return total


MISSING, UNREADABLE = b"", b"?"
"""In place of a share of somebody who has sent none, and takes no further part; or sent one that cannot be read."""


def training_of(content: Content) -> Content:
    """Return the question for plain training that one for a masked update contains."""
    values = {name: value for name, value in content.values.items() if name not in OF_STAGE}
    return replace(content, values={**values, "what": "train"})


def _opened(ciphertext: bytes, source: int, client: int, key: bytes) -> tuple[bytes, bytes]:
    try:
        said, meant, seed_share, key_share = unsealed(decrypt(key, ciphertext))
    except InvalidToken:
        return UNREADABLE, UNREADABLE
    right = (said, meant) == (source, client) and all(
        0 < len(share) <= LONGEST_SHARE for share in (seed_share, key_share)
    )
    return (seed_share, key_share) if right else (UNREADABLE, UNREADABLE)


def joined(updates: Updates, sketched: torch.Tensor) -> Updates:
    """Return an update with numbers behind it that leave unmasked, ``[1, R]``."""
    return replace(updates, deltas=torch.cat([updates.required_deltas, sketched.to(updates.required_deltas)], dim=1))
