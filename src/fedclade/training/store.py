"""State that clients keep between rounds: named tensors per client, which the server never sees."""

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
"""Names of stored tensors: personal parameters ``[P]``, and a whole model of the client ``[F]``."""

MIXTURE = "mixture"
"""Name of a client's weights π of the models of a mixture, float64 ``[K]``."""

SERVED_MIXTURE = "served mixture"
"""Name of the weights ``[K]`` by which a client that has not trained last evaluated a mixture."""

OPTIMIZER = "optimizer"
OWN_OPTIMIZER = "optimizer of model"
"""Prefixes of the names of an optimizer's state: ``<prefix>/<parameter>.<entry>``.

The optimizer that trains a client's own model has a prefix of its own.
"""

RULE = "rule"
SERVED = "served"
"""Prefix of the names of a local rule's state; and the name, in that state, of the deployed model.

The deployed model is the client's own model that results from the rule.
"""

RESERVED_NAMES = (PERSONAL, OWN_MODEL, MIXTURE, SERVED_MIXTURE, OPTIMIZER, OWN_OPTIMIZER, RULE)
"""Names under which training stores tensors. Names of optimizers and rules continue with ``/``."""


@dataclass(frozen=True)
class Generation:
    """Tensors that a client stored after one round."""

    number: int  #: number of the round, from 1; 0 before the first round
    tensors: Mapping[str, Tensor]


class ClientStore:
    """Named tensors of each client, as of its last round and as of the time before that round.

    A server may repeat the query of a round, because a reply was lost or the round was restarted. A
    repeated round must start from the state before its first attempt, so the store keeps that
    state, too.
    """

    def __init__(self) -> None:
        # Of each client at most two generations, the newest last.
        self._kept: dict[int, tuple[Generation, ...]] = {}

    def __bool__(self) -> bool:
        """Return whether any client stores a tensor."""
        return bool(self._kept)

    def before(self, number: int, client: int) -> Mapping[str, Tensor]:
        """Return the tensors that a client had stored before a round, by name.

        If that state is no longer known, these are the oldest tensors that are. Before the first
        round there are none.
        """
        return self._before(number, client).tensors

    def latest(self, client: int) -> Mapping[str, Tensor]:
        """Return the tensors that a client stores now, by name."""
        return self._kept[client][-1].tensors if client in self._kept else {}

    def keep(self, number: int, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors of a client after a round; its tensors of other names stay unchanged.

        Parameters
        ----------
        number
            Number of the round, from 1. A repeated round replaces its tensors of the same names.
        client
            Id of the client.
        tensors
            Tensors by name; they are copied.
        """
        before = self._before(number, client)
        kept = self._kept.get(client, ())
        of_round = kept[-1].tensors if kept and kept[-1].number == number else before.tensors
        new = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._kept[client] = (before, Generation(number, {**of_round, **new}))

    def add(self, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors to a client's latest ones, in any round; no training starts from them."""
        kept = self._kept.get(client, (Generation(0, {}),))
        new = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._kept[client] = (*kept[:-1], Generation(kept[-1].number, {**kept[-1].tensors, **new}))

    def with_states(self, work: Workload, number: int, name: str) -> Workload:
        """Return the workload of a round with the state of each client's optimizer or local rule.

        The states are those from before round ``number``, stored with the prefix ``name``.
        """
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
        """Store the states of optimizers or rules after a round, except for clients that diverged.

        A client has diverged if its loss or its update is not finite, or its update is longer than
        :data:`~fedclade.core.LARGEST_NORM`.
        """
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
        """Forget the tensors of all clients."""
        self._kept.clear()

    def tensors(
        self, clients: Iterable[int] | None = None, *, before: bool = False
    ) -> dict[str, Tensor]:
        """Return the tensors that clients store, named ``<client>/<round>/<name>``.

        Parameters
        ----------
        clients
            Ids of the clients; None for all.
        before
            Whether to include the tensors from before each client's last round.
        """
        return {
            f"{client}/{each.number}/{name}": tensor
            for client in (self._kept if clients is None else clients)
            for kept in [self._kept.get(client, ())]
            for each in (kept if before else kept[-1:])
            for name, tensor in each.tensors.items()
        }

    def load(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Replace the whole content by tensors that :meth:`tensors` returned.

        Raises
        ------
        ValueError
            If a name does not have the form ``<client>/<round>/<name>``.
        """
        self.clear()
        self.take(tensors, device)

    def take(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Replace the content of some clients by tensors that :meth:`tensors` returned.

        Clients without tensors in the argument keep theirs.

        Raises
        ------
        ValueError
            If a name does not have the form ``<client>/<round>/<name>``.
        """
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
    """Return the name under which a tensor of an optimizer's or rule's state is stored."""
    return OWN_MODEL if key == SERVED else f"{name}/{key}"


# A client's whole model: the shared part, which the server sends, and the part that it stores.


@dataclass(frozen=True, eq=False)
class Start:
    """Models from which k clients start their local training."""

    models: Tensor  #: whole models, ``[m, F]``
    rows: Sequence[int]  #: row of each client's model, ``[k]``
    #: row of the model to which each client's proximal term pulls, ``[k]``; None: its own row
    anchors: Sequence[int | None]
    #: personal parameters ``[k, P]``; None if they are not trained as a separate part
    personal: Tensor | None = None
    #: prefix of the names of stored optimizer or rule states; None if states are not stored
    optimizer: str | None = None


class WholeModels:
    """Assembles each client's whole model before training or evaluation, and splits it afterwards.

    Personal parameters that a client has not trained yet are the ``initial`` ones, the same for all
    clients. The proximal term pulls personal parameters to their values before the round, and
    shared parameters to the anchor.

    Parameters
    ----------
    layout
        Layout of the shared and the personal part.
    initial
        Initial personal parameters, ``[P]``.
    store
        State that clients store between rounds.
    """

    def __init__(self, layout: Layout, initial: Tensor, store: ClientStore) -> None:
        self._layout = layout
        self.initial = initial
        self._store = store

    def start(self, query: UpdateQuery, places: Sequence[int]) -> Start:
        """Return the models from which the clients at some places of a query start."""
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
            # A client's own model that is trained for another purpose starts from the state after
            # this round's training.
            number += 1
        kept = [self._store.before(number, client) for client in ids]
        personal = self._personal([mine.get(PERSONAL) for mine in kept])
        starts = zip(ids, rows, kept, personal, strict=True)
        models = torch.stack(
            [self._whole(client, query.models, row, mine, own) for client, row, mine, own in starts]
        )
        each = range(len(ids))
        pulled = list[int | None]([None] * len(ids))
        if anchors is not None and query.round.uses_anchors:
            # With a local rule the anchor is a vector of the server, which never sees personal
            # parameters: NaN marks that it has no values for them.
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
        """Store the clients' own part of their new models; return their updates ``[k, S]``.

        Parameters
        ----------
        query
            The training query.
        places
            Places of the k clients in the query.
        start
            Models from which the clients started.
        deltas
            Differences ``[k, F]`` between the whole models after and before training.
        losses
            Mean training losses ``[k]``. The loss of a client whose training has diverged is set to
            NaN, and its model is not stored.
        """
        if not query.own and start.personal is None:
            return deltas
        # Not ``>``: a norm of NaN has to count as diverged as well.
        diverged = ~(row_norms(deltas) <= LARGEST_NORM)
        losses[diverged] = torch.nan
        if start.personal is None:
            sent = deltas[:, :0]
            name = OWN_MODEL
            now = start.models[: len(places)] + deltas
            if query.shares:
                assert query.anchors is not None  # queries with ``shares`` have anchors
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
        """Yield parts of an evaluation query: a slice, models ``[m, F]``, and rows of the clients.

        A part has at most ``at_once`` clients, or some more where a client compares several models.
        If no client evaluates a model that it stores, and the layout has no personal part, the
        query is one part.
        """
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
        """Return vectors ``[..., F]`` with zeros outside one part, ``personal`` or ``shared``."""
        shared, personal = self._layout.parted(vectors)
        (shared if part == PERSONAL else personal).zero_()
        return self._layout.joined(shared, personal)

    def of(self, this_round: Round, client: int, model: Tensor) -> Tensor:
        """Return a client's whole model ``[F]`` in a round, given the shared model ``[S]``."""
        return self._layout.joined(
            model, self._personal([self._store.before(this_round.number, client).get(PERSONAL)])[0]
        )

    def load(self, client: int, model: Tensor, module: nn.Module) -> None:
        """Load a client's current whole model into the module, given the shared model ``[S]``."""
        whole = self._layout.joined(
            model, self._personal([self._store.latest(client).get(PERSONAL)])[0]
        )
        self._layout.full.load(whole, module)

    def kept(self, ids: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        """Return the deployed state that clients store now, by client and name.

        That is personal parameters ``[P]``, whole models ``[F]``, and weights of mixtures ``[K]``.
        """
        start = {PERSONAL: self.initial} if self._layout.personal else {}
        if not start and not self._store:  # avoids a pass over a million clients
            return {}
        each = {client: {**start, **self._store.latest(client)} for client in ids}
        found = {client: _lasting(mine) for client, mine in each.items()}
        return {client: mine for client, mine in found.items() if mine}

    def _whole(
        self, client: int, models: Tensor, row: int, kept: Mapping[str, Tensor], personal: Tensor
    ) -> Tensor:
        """Return a client's whole model ``[F]``: a row with its personal part, or its own model."""
        if row != OWN:
            return self._layout.joined(models[row], personal)
        if OWN_MODEL not in kept:
            raise UpdateError(f"{KEEPS_NONE}: client {client} has trained none, or has lost it")
        return kept[OWN_MODEL]

    def _personal(self, kept: Sequence[Tensor | None]) -> Tensor:
        return torch.stack([self.initial if each is None else each for each in kept])


def _lasting(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select, of the tensors that a client stores, those that its deployed model consists of."""
    found = {name: kept[name] for name in (PERSONAL, OWN_MODEL, MIXTURE) if name in kept}
    if MIXTURE not in kept and SERVED_MIXTURE in kept:
        found[MIXTURE] = kept[SERVED_MIXTURE]
    return found


def _parts(query: EvaluationQuery, at_once: int) -> Iterator[slice]:
    """Cut a query into parts of ``at_once`` models; models that a client compares stay together."""
    ids = query.ids
    first = 0
    while first < len(ids):
        stop = min(first + at_once, len(ids))
        while query.compares and stop < len(ids) and ids[stop] == ids[stop - 1]:
            stop += 1
        yield slice(first, stop)
        first = stop
