"""Adversaries: clients of a simulation that send something else than they should.

What an adversary sends is of its own making after its privacy, and before its permutation and its replicates. So it
makes a lie of each part of its data, and the mean and the signatures that it sends agree with each other; its norm is
that of the lie. It claims its honest training loss, and sends its buffers as they are. What it sees of others is what
they send: their updates after privacy, of those that were sent the same model in the same query.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedclade.channel.adversary import Adversary
from fedclade.channel.attacks import alie, alie_z, ipm, min_max, min_sum
from fedclade.channel.middleware import Middleware
from fedclade.core import (
    Ask,
    Evaluation,
    EvaluationQuery,
    ParameterTree,
    Round,
    SubspaceQuery,
    UpdateQuery,
    Updates,
    rng,
    row_norms,
)


class Lying(Middleware):
    """Lets some clients lie, from a round on.

    Parameters
    ----------
    adversary
        How they lie.
    liars
        Who they are.
    keys
        The key of each client, which its draws belong to.
    """

    def __init__(self, adversary: Adversary, liars: Collection[int], keys: Mapping[int, int]) -> None:
        self.adversary, self.liars = adversary, frozenset(liars)
        self.awake: frozenset[int] = frozenset()
        self.number = 1
        self._keys = keys
        self._boost = len(keys) / max(1, len(self.liars))
        self._order: dict[int, list[int]] = {}

    def begin(self, number: int, tree: ParameterTree | None = None) -> None:
        """Begin a round, with the clusters as they are then: who lies in it."""
        self.number = number
        self.awake = self.liars if number >= self.adversary.from_round else frozenset()
        if self.adversary.sleeper and (tree is None or sum(bool(leaf.members) for leaf in tree.leaves) < 2):
            self.awake = frozenset()

    @property
    def late(self) -> frozenset[int]:
        """Those that are not there yet."""
        early = self.adversary.kind == "sybil" and self.number < self.adversary.from_round
        return self.liars if early else frozenset()

    def claims(self, this_round: Round) -> int | None:
        """Return how many training examples adversaries say their updates are from, if not the truth."""
        return self.adversary.claims

    def weights(self, sizes: Mapping[int, int]) -> Mapping[int, int]:
        """Return the numbers of training examples as clients tell them."""
        if (claims := self.adversary.claims) is None or not self.awake:
            return sizes
        return {client: claims if client in self.awake else size for client, size in sizes.items()}

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return updates, of which some are lies."""
        liars = [client for client in query.ids if client in self.awake]
        compared = query.round.part is not None and query.round.compares_parts
        if not liars or (self.adversary.evasive and compared):
            return ask(query)
        query = replace(query, sink=None)  # those who look around must see all at once
        updates = self._made(query, liars, ask)
        if query.kind == "gradients" or (query.round.sends_updates and not query.is_secret):
            updates = self._lied(query, updates)
        if (claims := self.claims(query.round)) is not None:
            claimed = torch.tensor([client in self.awake for client in updates.ids], dtype=torch.bool)
            updates = replace(updates, sizes=updates.sizes.masked_fill(claimed, claims / parts_of(query.round)))
        return updates

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return scores; of who has poisoned its data those on them, but on its test data, which measure the run."""
        places = self._poisoned(query.ids)
        if not places or query.split == "test":
            return ask(query)
        parts = [
            ask(replace(query, ids=ids, assignment=[query.assignment[k] for k in some], data_round=data_round))
            for some, ids, data_round in self._both(query.ids, places, query.data_round)
        ]
        whole, rows = Evaluation.concat(parts), defaultdict[int, list[int]](list)
        for row, client in enumerate(whole.ids):
            rows[client].append(row)
        order = torch.tensor([rows[c].pop(0) for c in query.ids if rows[c]], dtype=torch.int64)
        columns = {"scores": whole.scores[order], "losses": whole.losses[order], "examples": whole.examples[order]}
        wins = None if whole.wins is None else whole.wins[order]
        return replace(whole, ids=tuple(whole.ids[row] for row in order.tolist()), wins=wins, **columns)

    def subspaces(self, query: SubspaceQuery, ask: Ask) -> Tensor:
        """Return singular vectors ``[n, L, d, p]``, those of poisoned data where they are."""
        places = self._poisoned(query.ids)
        if not places:
            return ask(query)
        parts = [
            (some, ask(replace(query, ids=ids, data_round=data_round)))
            for some, ids, data_round in self._both(query.ids, places, query.data_round)
        ]
        vectors = parts[0][1].new_zeros(len(query.ids), *parts[0][1].shape[1:])
        for some, found in parts:
            vectors[some] = found
        return vectors

    def _poisoned(self, ids: Sequence[int]) -> list[int]:
        """Return at which places there is a client whose data is poisoned now."""
        return [k for k, client in enumerate(ids) if client in self.awake] if self.adversary.poisons else []

    def _both(
        self, ids: Sequence[int], places: Sequence[int], data_round: int
    ) -> list[tuple[list[int], list[int], int]]:
        """Return the places and ids of clients with honest and with poisoned data, and the round to ask about."""
        lying = set(places)
        honest = [k for k in range(len(ids)) if k not in lying]
        parts = (honest, data_round), (list(places), -(data_round or self.number))
        return [(some, [ids[k] for k in some], of) for some, of in parts if some]

    def _made(self, query: UpdateQuery, liars: Sequence[int], ask: Ask) -> Updates:
        """Return what clients have trained, on poisoned data where that is the lie."""
        if not self.adversary.poisons:
            return ask(query)
        mine, lying = query.select(liars), set(liars)
        rounds = None if mine.data_rounds is None else [tuple(-number for number in of) for of in mine.data_rounds]
        poisoned = replace(mine, data_round=-(query.data_round or self.number), data_rounds=rounds)
        honest = [client for client in query.ids if client not in lying]
        updates = [ask(query.select(honest))] if honest else []
        updates.append(ask(poisoned))
        return updates[0].concat(updates[-1]).select(query.ids) if honest else updates[0]

    def _lied(self, query: UpdateQuery, updates: Updates) -> Updates:
        """Return updates with the lies among them; one that cannot be used is left out, as an honest one would be."""
        if self.adversary.kind in ("label_flip", "false_size"):
            return updates
        D, deltas = updates.n_parameters, updates.required_deltas.clone()
        groups, lies = self._groups(query, updates), list[int]()
        for honest, liars in groups:
            deltas[liars, :D] = self._lies(updates, honest, liars, query).to(deltas)
            lies += liars
        if not lies:
            return updates
        ids, none = [updates.ids[k] for k in lies], updates.losses.new_zeros(len(lies))
        sizes = [int(size) for size in updates.sizes[lies].tolist()]
        bad = Updates.received(ids, sizes, deltas[lies], D, none, query.round.number).left_out
        norms = updates.norms.clone()
        norms[lies] = row_norms(deltas[lies, :D])
        told = replace(updates, deltas=deltas, norms=norms).select([c for c in updates.ids if c not in bad])
        return replace(told, left_out={**updates.left_out, **bad})

    def _groups(self, query: UpdateQuery, updates: Updates) -> list[tuple[list[int], list[int]]]:
        """Return the rows of honest clients and of adversaries that were sent the same model, where there are any."""
        row_of = dict(zip(query.ids, query.assignment, strict=True))
        groups = defaultdict[int, tuple[list[int], list[int]]](lambda: ([], []))
        for k, client in enumerate(updates.ids):
            groups[row_of[client]][client in self.awake].append(k)
        return [(honest, liars) for honest, liars in groups.values() if liars]

    def _lies(self, updates: Updates, honest: Sequence[int], liars: Sequence[int], query: UpdateQuery) -> Tensor:
        """Return what the adversaries of a group send, ``[f, D]``."""
        kind, of = self.adversary.kind, updates.required_deltas[:, : updates.n_parameters]
        mine = of[liars]
        if kind == "sign_flip":
            return -mine
        if kind in ("scaled", "backdoor"):
            factor = self.adversary.option("factor")
            return (self._boost if factor is None else factor) * mine
        if kind == "sybil":
            direction = self._direction(query.round.seed, mine.shape[1]).to(mine)
            return self.adversary.option("factor") * updates.norms[liars].to(mine)[:, None] * direction
        if kind == "gaussian":
            each = [self._normal(updates.ids[k], mine.shape[1], query) for k in liars]
            return self.adversary.option("mean") + torch.stack(each) * self.adversary.option("std")
        if kind == "copy":
            return torch.stack([self._copied(updates, k, honest, query) for k in liars])
        seen = of[honest] if honest and self.adversary.option("knows") == "honest" else mine
        return self._crafted(seen, len(honest) + len(liars), len(liars)).expand(len(liars), -1)

    def _crafted(self, seen: Tensor, n: int, f: int) -> Tensor:
        """Return what f of n clients send, ``[D]``, that have seen some updates ``[h, D]``."""
        kind, adversary = self.adversary.kind, self.adversary
        if kind == "alie":
            z = adversary.option("z")
            return alie(seen, alie_z(n, f) if z is None else z)
        if kind == "ipm":
            return ipm(seen, adversary.option("epsilon"))
        return (min_max if kind == "minmax" else min_sum)(seen, adversary.option("direction"))

    def _copied(self, updates: Updates, row: int, honest: Sequence[int], query: UpdateQuery) -> Tensor:
        """Return a copy of the update of the honest client that comes first in the adversary's own order, ``[D]``."""
        there, me = {updates.ids[k]: k for k in honest}, updates.ids[row]
        if me not in self._order:
            by_key = sorted(self._keys, key=lambda client: self._keys[client])
            drawn = rng.generator(query.round.seed, "who is copied", self._keys[me]).permutation(len(by_key))
            self._order[me] = [by_key[place] for place in drawn.tolist()]
        first = next((there[client] for client in self._order[me] if client in there), row)
        copied, std = updates.required_deltas[first, : updates.n_parameters], self.adversary.option("std")
        return copied + std * self._normal(me, len(copied), query).to(copied) if std else copied

    def _normal(self, client: int, size: int, query: UpdateQuery) -> Tensor:
        """Return normal numbers that belong to seed, round, query and the client's key, ``[D]``.

        Those of m parts have variance m, so that the mean of them has variance 1.
        """
        this_round = query.round
        key = this_round.number, this_round.query, self._keys[client]
        draw = rng.generator(this_round.seed, f"lie of {query.kind} in {this_round.purpose}", *key)
        return torch.from_numpy(draw.standard_normal(size) * np.sqrt(parts_of(this_round)))

    @staticmethod
    def _direction(seed: int, size: int) -> Tensor:
        """Return the direction that sybils have agreed on, a unit vector ``[D]``: the same in all rounds."""
        drawn = torch.from_numpy(rng.generator(seed, "the direction of sybils").standard_normal(size))
        return drawn / drawn.norm()


def parts_of(this_round: Round) -> int:
    """Return of how many parts of the data an update is of one; 1 where it is of all data."""
    return 1 if this_round.part is None else this_round.part[1]
