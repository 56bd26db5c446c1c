"""What clients keep from round to round: named tensors of each client's own, which no server sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
from fedclade.training.jobs import Workload

PERSONAL = "personal"
OWN_MODEL = "model"
"""Names of what is kept: personal parameters ``[P]``, and a whole model ``[F]``."""

MIXTURE = "mixture"
"""The name of the weights π of a mixture's models, float64 ``[K]``."""

SERVED_MIXTURE = "served mixture"
"""The name of the weights ``[K]`` that a client which has not trained was served with last."""

OPTIMIZER = "optimizer"
OWN_OPTIMIZER = "optimizer of model"
"""How the names of an optimizer's state begin, before ``/<parameter>.<what it is>``; a model of its own has another."""

RULE = "rule"
SERVED = "served"
"""How the names of a local rule's state begin; and the name, in that, of the client's own model that comes of it."""

RESERVED_NAMES = (PERSONAL, OWN_MODEL, MIXTURE, SERVED_MIXTURE, OPTIMIZER, OWN_OPTIMIZER, RULE)
"""Names under which training stores something; those of optimizers and rules go on with ``/``."""


@dataclass(frozen=True)
class Generation:
    """What a client kept after a round."""

    number: int  #: of the round; 0 before the first
    tensors: Mapping[str, Tensor]


class ClientStore:
    """Named tensors of each client, as they are after its last round, and as they were before.

    A server may ask for a round again, since an answer was lost or it was started anew; so a round
    always starts from what was kept before it.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Generation, ...]] = {}  # at most two, the newest last

    def __bool__(self) -> bool:
        """Whether any client keeps anything."""
        return bool(self._kept)

    def before(self, number: int, client: int) -> Mapping[str, Tensor]:
        """Return what a client kept before a round, or the oldest that is known; nothing before the first round."""
        return self._before(number, client).tensors

    def latest(self, client: int) -> Mapping[str, Tensor]:
        """Return what a client keeps now."""
        return self._kept[client][-1].tensors if client in self._kept else {}

    def keep(self, number: int, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors of a client after a round; others of other names stay as they are."""
        before = self._before(number, client)
        kept = self._kept.get(client, ())
        of_round = kept[-1].tensors if kept and kept[-1].number == number else before.tensors
        new = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._kept[client] = (before, Generation(number, {**of_round, **new}))

    def add(self, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors of a client beside what it kept last, whatever the round; no training begins with them."""
        kept = self._kept.get(client, (Generation(0, {}),))
        new = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._kept[client] = (*kept[:-1], Generation(kept[-1].number, {**kept[-1].tensors, **new}))

    def with_states(self, work: Workload, number: int, name: str) -> Workload:
        """Return the workload of a round with what the clients' optimizers or rules kept before it under a name."""
        jobs = [
            replace(
                job,
                state={
                    key.removeprefix(f"{name}/"): t
                    for key, t in kept.items()
                    if key.startswith(f"{name}/")
                },
            )
            for job in work.jobs
            for kept in [self.before(number, job.client)]
        ]
        return replace(work, jobs=jobs)

    def keep_states(
        self, work: Workload, number: int, name: str, deltas: Tensor, losses: Tensor
    ) -> None:
        """Keep what the clients' optimizers or rules had after a round, but for those that diverged."""
        fine = (row_norms(deltas) <= LARGEST_NORM).cpu() & losses.isfinite()
        for job, is_fine in zip(work.jobs, fine.tolist(), strict=True):
            if is_fine:
                state = {
                    _stored(name, key): tensor for key, tensor in work.states[job.client].items()
                }
                self.keep(number, job.client, state)

    def _before(self, number: int, client: int) -> Generation:
        kept = self._kept.get(client, ())
        if number <= 1 or not kept:
            return Generation(0, {})
        known = [each for each in kept if each.number < number]
        return known[-1] if known else Generation(number - 1, kept[0].tensors)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def tensors(
        self, clients: Iterable[int] | None = None, *, before: bool = False
    ) -> dict[str, Tensor]:
        """Return what some clients keep, or all, by client, round and name.

        ``before`` adds what was kept before the last round.
        """
        return {
            f"{client}/{each.number}/{name}": tensor
            for client in (self._kept if clients is None else clients)
            for kept in [self._kept.get(client, ())]
            for each in (kept if before else kept[-1:])
            for name, tensor in each.tensors.items()
        }

    def load(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Keep what :meth:`tensors` returned in place of all else; a ValueError if it is something else."""
        self.clear()
        self.take(tensors, device)

    def take(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Keep what :meth:`tensors` returned of some clients in place of what these kept; raises as :meth:`load`."""
        found: dict[int, dict[int, dict[str, Tensor]]] = {}
        for key, tensor in tensors.items():
            client, number, name = key.split("/", 2)
            found.setdefault(int(client), {}).setdefault(int(number), {})[name] = tensor.to(device)
        self._kept |= {
            client: (
                Generation(0, {}),
                *(Generation(number, rounds[number]) for number in sorted(rounds)),
            )[-2:]
            for client, rounds in found.items()
        }


def _stored(name: str, key: str) -> str:
    """Return the name under which a tensor of a state is kept."""
    return OWN_MODEL if key == SERVED else f"{name}/{key}"


# A client's whole model: what it is sent, and what it keeps for itself.


@dataclass(frozen=True, eq=False)
class Start:
    """Where k clients start their local training."""

    models: Tensor  #: ``[m, F]``
    rows: Sequence[int]  #: of each client's own, ``[k]``
    #: of what its proximal term pulls it to, ``[k]``; None: where it starts
    anchors: Sequence[int | None]
    #: personal parameters ``[k, P]``, where they are part of what is trained
    personal: Tensor | None = None
    #: the name under which the states of optimizers or local rules are kept, if they are
    optimizer: str | None = None


class WholeModels:
    """Puts each client's model together before it trains or evaluates, and takes what it has trained apart again.

    Personal parameters that a client has not trained yet are ``initial`` ones ``[P]``, the same for
    all clients. The proximal term pulls them to where they were before the round, and shared ones
    to the anchor.
    """

    def __init__(self, layout: Layout, initial: Tensor, store: ClientStore) -> None:
        self._layout = layout
        self.initial = initial
        self._store = store

    def start(self, query: UpdateQuery, places: Sequence[int]) -> Start:
        """Return where the clients at some places of a query start."""
        rows = [query.assignment[place] for place in places]
        anchors = None if query.anchors is None else [query.anchors[place] for place in places]
        kept_as = RULE if query.round.rule else OWN_OPTIMIZER if query.own else OPTIMIZER
        keeps = (query.round.spec.keep_state or query.round.rule) and query.round.lasts
        optimizer = kept_as if keeps else None
        if not query.own and not self._layout.personal:
            return Start(query.models, rows, anchors or [None] * len(rows), optimizer=optimizer)
        ids = [query.ids[place] for place in places]
        number = query.round.number
        if query.own and not query.round.lasts:
            number += 1  # of its own for another purpose: from what the round's training has left
        kept = [self._store.before(number, client) for client in ids]
        personal = self._personal([mine.get(PERSONAL) for mine in kept])
        starts = zip(ids, rows, kept, personal, strict=True)
        models = torch.stack(
            [self._whole(client, query.models, row, mine, own) for client, row, mine, own in starts]
        )
        each = range(len(ids))
        pulled = list[int | None]([None] * len(ids))
        if anchors is not None and query.round.uses_anchors:
            # a server's vector has nothing to say of what it never sees
            none = query.round.rule is not None
            beside = torch.full_like(personal, torch.nan) if none else personal
            models = torch.cat([models, self._layout.joined(query.models[anchors], beside)])
            pulled = [len(ids) + k for k in each]
        return Start(models, each, pulled, None if query.own else personal, optimizer)

    def settle(
        self,
        query: UpdateQuery,
        places: Sequence[int],
        start: Start,
        deltas: Tensor,
        losses: Tensor,
    ) -> Tensor:
        """Let clients keep what is theirs of ``[k, F]`` that they moved by; return what they send, ``[k, S]``.

        What has diverged is not kept, and its loss becomes NaN.
        """
        if not query.own and start.personal is None:
            return deltas
        diverged = ~(row_norms(deltas) <= LARGEST_NORM)
        losses[diverged] = torch.nan
        if start.personal is None:
            sent = deltas[:, :0]
            name = OWN_MODEL
            now = start.models[: len(places)] + deltas
            if query.shares:
                assert query.anchors is not None  # as such a query has
                sent = (
                    self._layout.parted(now)[0]
                    - query.models[[query.anchors[place] for place in places]]
                )
        else:
            sent, moved = self._layout.parted(deltas)
            name = PERSONAL
            now = start.personal + moved
        if query.own or query.round.lasts:
            for place, kept, bad in zip(
                places, now, (diverged | ~losses.isfinite()).tolist(), strict=True
            ):
                if not bad:
                    self._store.keep(query.round.number, query.ids[place], {name: kept})
        return sent

    def evaluated(
        self, query: EvaluationQuery, at_once: int
    ) -> Iterator[tuple[slice, Tensor, Sequence[int]]]:
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
        whole = self._layout.joined(
            model, self._personal([self._store.latest(client).get(PERSONAL)])[0]
        )
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

    def _whole(
        self, client: int, models: Tensor, row: int, kept: Mapping[str, Tensor], personal: Tensor
    ) -> Tensor:
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
    ids = query.ids
    first = 0
    while first < len(ids):
        stop = min(first + at_once, len(ids))
        while query.compares and stop < len(ids) and ids[stop] == ids[stop - 1]:
            stop += 1
        yield slice(first, stop)
        first = stop
