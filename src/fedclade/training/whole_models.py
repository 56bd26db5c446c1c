"""A client's whole model: what it is sent, and what it keeps for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedclade.core import (
    KEEPS_NONE,
    LARGEST_NORM,
    OWN,
    EvaluationQuery,
    Layout,
    Round,
    UpdateError,
    UpdateQuery,
    row_norms,
)
from fedclade.training.store import (
    MIXTURE,
    OPTIMIZER,
    OWN_MODEL,
    OWN_OPTIMIZER,
    PERSONAL,
    RULE,
    SERVED_MIXTURE,
    ClientStore,
)


@dataclass(frozen=True, eq=False)
class Start:
    """Where k clients start their local training."""

    models: Tensor  #: ``[m, F]``
    rows: Sequence[int]  #: of each client's own, ``[k]``
    anchors: Sequence[int | None]  #: of what its proximal term pulls it to, ``[k]``; None: where it starts
    personal: Tensor | None = None  #: personal parameters ``[k, P]``, where they are part of what is trained
    optimizer: str | None = None  #: the name under which the states of optimizers or local rules are kept, if they are


class WholeModels:
    """Puts each client's model together before it trains or evaluates, and takes what it has trained apart again.

    Personal parameters that a client has not trained yet are ``initial`` ones ``[P]``, the same for all clients. The
    proximal term pulls them to where they were before the round, and shared ones to the anchor.
    """

    def __init__(self, layout: Layout, initial: Tensor, store: ClientStore) -> None:
        self._layout, self.initial, self._store = layout, initial, store

    def start(self, query: UpdateQuery, places: Sequence[int]) -> Start:
        """Return where the clients at some places of a query start."""
        rows = [query.assignment[place] for place in places]
        anchors = None if query.anchors is None else [query.anchors[place] for place in places]
        kept_as = RULE if query.round.rule else OWN_OPTIMIZER if query.own else OPTIMIZER
        keeps = (query.round.spec.keep_state or query.round.rule) and query.round.lasts
        optimizer = kept_as if keeps else None
        if not query.own and not self._layout.personal:
            return Start(query.models, rows, anchors or [None] * len(rows), optimizer=optimizer)
        ids, number = [query.ids[place] for place in places], query.round.number
        if query.own and not query.round.lasts:
            number += 1  # of its own for another purpose: from what the round's training has left
        kept = [self._store.before(number, client) for client in ids]
        personal = self._personal([mine.get(PERSONAL) for mine in kept])
        starts = zip(ids, rows, kept, personal, strict=True)
        models = torch.stack([self._whole(client, query.models, row, mine, own) for client, row, mine, own in starts])
        each, pulled = range(len(ids)), list[int | None]([None] * len(ids))
        if anchors is not None and query.round.uses_anchors:
            none = query.round.rule is not None  # a server's vector has nothing to say of what it never sees
            beside = torch.full_like(personal, torch.nan) if none else personal
            models = torch.cat([models, self._layout.joined(query.models[anchors], beside)])
            pulled = [len(ids) + k for k in each]
        return Start(models, each, pulled, None if query.own else personal, optimizer)

    def settle(self, query: UpdateQuery, places: Sequence[int], start: Start, deltas: Tensor, losses: Tensor) -> Tensor:
        """Let clients keep what is theirs of ``[k, F]`` that they moved by; return what they send, ``[k, S]``.

        What has diverged is not kept, and its loss becomes NaN.
        """
        if not query.own and start.personal is None:
            return deltas
        diverged = ~(row_norms(deltas) <= LARGEST_NORM)
        losses[diverged] = torch.nan
        if start.personal is None:
            sent, name, now = deltas[:, :0], OWN_MODEL, start.models[: len(places)] + deltas
            if query.shares:
                assert query.anchors is not None  # as such a query has
                sent = self._layout.parted(now)[0] - query.models[[query.anchors[place] for place in places]]
        else:
            sent, moved = self._layout.parted(deltas)
            name, now = PERSONAL, start.personal + moved
        if query.own or query.round.lasts:
            for place, kept, bad in zip(places, now, (diverged | ~losses.isfinite()).tolist(), strict=True):
                if not bad:
                    self._store.keep(query.round.number, query.ids[place], {name: kept})
        return sent

    def evaluated(self, query: EvaluationQuery, at_once: int) -> Iterator[tuple[slice, Tensor, Sequence[int]]]:
        """Cut a query into parts of at most so many models; yield those ``[m, F]``, and the row of each client."""
        if not self._layout.personal and OWN not in query.assignment:
            yield slice(None), query.models, query.assignment
            return
        for part in _parts(query, at_once):
            models = dict[tuple[int, int | None], Tensor]()
            keys: list[tuple[int, int | None]] = []
            for client, row in zip(query.ids[part], query.assignment[part], strict=True):
                kept = self._store.latest(client)
                keys.append((row, client if kept else None))
                if keys[-1] not in models:
                    personal = self._personal([kept.get(PERSONAL)])[0]
                    models[keys[-1]] = self._whole(client, query.models, row, kept, personal)
            row_of = {key: row for row, key in enumerate(models)}
            yield part, torch.stack([*models.values()]), [row_of[key] for key in keys]

    def only(self, part: str, vectors: Tensor) -> Tensor:
        """Return vectors ``[..., F]`` with zeros in all that is not of a part, ``personal`` or ``shared``."""
        shared, personal = self._layout.parted(vectors)
        (shared if part == PERSONAL else personal).zero_()
        return self._layout.joined(shared, personal)

    def of(self, this_round: Round, client: int, model: Tensor) -> Tensor:
        """Return a client's whole model ``[F]`` in a round, given a shared one ``[S]``."""
        return self._layout.joined(
            model, self._personal([self._store.before(this_round.number, client).get(PERSONAL)])[0]
        )

    def load(self, client: int, model: Tensor, module: nn.Module) -> None:
        """Make the module a client's whole model as it is now, given a shared one ``[S]``."""
        whole = self._layout.joined(model, self._personal([self._store.latest(client).get(PERSONAL)])[0])
        self._layout.full.load(whole, module)

    def kept(self, ids: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        """Return the personal parameters ``[P]``, models ``[F]`` and weights of mixtures ``[K]`` that clients keep now.

        By client and name.
        """
        start = {PERSONAL: self.initial} if self._layout.personal else {}
        if not start and not self._store:  # of a million clients none need be asked
            return {}
        each = {client: {**start, **self._store.latest(client)} for client in ids}
        found = {client: _lasting(mine) for client, mine in each.items()}
        return {client: mine for client, mine in found.items() if mine}

    def _whole(self, client: int, models: Tensor, row: int, kept: Mapping[str, Tensor], personal: Tensor) -> Tensor:
        """Return a client's whole model ``[F]``: of that in a row, or its own."""
        if row != OWN:
            return self._layout.joined(models[row], personal)
        if OWN_MODEL not in kept:
            raise UpdateError(f"{KEEPS_NONE}: client {client} has trained none, or has lost it")
        return kept[OWN_MODEL]

    def _personal(self, kept: Sequence[Tensor | None]) -> Tensor:
        return torch.stack([self.initial if each is None else each for each in kept])


def _lasting(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a client is served with besides what it is sent, of all that it keeps."""
    found = {name: kept[name] for name in (PERSONAL, OWN_MODEL, MIXTURE) if name in kept}
    if MIXTURE not in kept and SERVED_MIXTURE in kept:
        found[MIXTURE] = kept[SERVED_MIXTURE]
    return found


def _parts(query: EvaluationQuery, at_once: int) -> Iterator[slice]:
    """Cut a query into parts of so many models, or some more where a client compares its own."""
    ids, first = query.ids, 0
    while first < len(ids):
        stop = min(first + at_once, len(ids))
        while query.compares and stop < len(ids) and ids[stop] == ids[stop - 1]:
            stop += 1
        yield slice(first, stop)
        first = stop
