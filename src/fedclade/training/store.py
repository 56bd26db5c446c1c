"""State that clients store between rounds: named tensors, which the server never receives.

The module also assembles a client's whole model from the shared part, which the server sends, and
the personal part, which the client stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedclade.core import (
    KEEPS_NONE,
    LARGEST_NORM,
    OWN,
    SERVED,
    Answer,
    ClientTrainer,
    ClientWork,
    ConfigError,
    Delta,
    DistanceToAnchor,
    EvaluationQuery,
    FromStored,
    Lasting,
    Layout,
    LocalModel,
    LocalRule,
    Made,
    NoReply,
    Round,
    TrainQuery,
    UpdateError,
    row_norms,
)
from fedclade.training.jobs import Workload

PERSONAL = "personal"
OWN_MODEL = "model"
"""Names of stored tensors: a client's personal parameters ``[P]``, and its own model ``[F]``."""

MIXTURE = "mixture"
"""Name of the stored weights π of a client for the K models of a mixture, float64 ``[K]``."""

SERVED_MIXTURE = "served mixture"
"""Name of the stored weights ``[K]`` by which a client that has not trained evaluates a mixture."""

OPTIMIZER = "optimizer"
OWN_OPTIMIZER = "optimizer of model"
"""Prefixes of the names of an optimizer's stored state: ``<prefix>/<parameter>.<entry>``.

The optimizer that trains a client's own model has the prefix ``OWN_OPTIMIZER``.
"""

RULE = "rule"
CODE = "trainer"
"""Prefixes of the names of the stored states of a local rule, and of a user's own training code."""

RESERVED_NAMES = (
    PERSONAL,
    OWN_MODEL,
    MIXTURE,
    SERVED_MIXTURE,
    OPTIMIZER,
    OWN_OPTIMIZER,
    RULE,
    CODE,
)
"""Names and prefixes of tensors that training stores; a method's own tensors need other names."""


@dataclass(frozen=True)
class Generation:
    """Tensors that a client stored after one round, with the number of the round."""

    number: int  #: number of the round, from 1; 0 before the first round
    tensors: Mapping[str, Tensor]


class ClientStore:
    """Named tensors that clients store between rounds.

    For each client, the store has two versions of the tensors: from after the last round in which
    the client trained, and from before this round. The earlier version is needed if the server
    repeats the query of the round, because a reply was lost or the round was restarted: the
    repeated training must start from the same state as the first attempt.
    """

    def __init__(self) -> None:
        # At most two generations of each client, the newest last.
        self._kept: dict[int, tuple[Generation, ...]] = {}

    def __bool__(self) -> bool:
        """Return whether any client stores a tensor."""
        return bool(self._kept)

    def __contains__(self, client: int) -> bool:
        """Return whether a client stores a tensor."""
        return client in self._kept

    def before(self, number: int, client: int) -> Mapping[str, Tensor]:
        """Return the tensors, by name, that a client had stored before a round.

        If the store no longer has the state before this round, the result is the oldest state that
        it has. Before the first round there are no tensors.
        """
        return self._before(number, client).tensors

    def latest(self, client: int) -> Mapping[str, Tensor]:
        """Return the tensors, by name, that a client has stored last."""
        if client not in self._kept:
            return {}
        return self._kept[client][-1].tensors

    def keep(self, number: int, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors of a client after a round; its tensors with other names stay unchanged.

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
        of_round = before.tensors
        kept = self._kept.get(client, ())
        if kept and kept[-1].number == number:
            of_round = kept[-1].tensors
        new = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._kept[client] = (before, Generation(number, {**of_round, **new}))

    def add(self, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors to the latest tensors of a client, outside of a training round.

        No training may start from these tensors, since a repeated round would then start from
        another state than its first attempt.
        """
        kept = self._kept.get(client, (Generation(0, {}),))
        new = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._kept[client] = (*kept[:-1], Generation(kept[-1].number, {**kept[-1].tensors, **new}))

    def with_states(self, work: Workload, number: int, name: str) -> Workload:
        """Return a round's workload with the stored state of each client's optimizer or local rule.

        The states are those from before round ``number``, stored with the prefix ``name``.
        """

        def stored_state(client: int) -> dict[str, Tensor]:
            return {
                key.removeprefix(f"{name}/"): tensor
                for key, tensor in self.before(number, client).items()
                if key.startswith(f"{name}/")
            }

        jobs = [replace(job, state=stored_state(job.client)) for job in work.jobs]
        return replace(work, jobs=jobs)

    def keep_states(
        self, work: Workload, number: int, name: str, deltas: Tensor, losses: Tensor
    ) -> None:
        """Store the states of optimizers or local rules after a round, with the prefix ``name``.

        States of clients that diverged are not stored. A client has diverged if its loss or its
        update is not finite, or the norm of its update is larger than
        :data:`~fedclade.core.LARGEST_NORM`.
        """
        fine = (row_norms(deltas) <= LARGEST_NORM).cpu() & losses.isfinite()
        for job, is_fine in zip(work.jobs, fine.tolist(), strict=True):
            if is_fine:
                state = {
                    _build_name(name, key): tensor
                    for key, tensor in work.states[job.client].items()
                }
                self.keep(number, job.client, state)

    def _before(self, number: int, client: int) -> Generation:
        """Return the generation of tensors that a client had stored before a round."""
        kept = self._kept.get(client, ())
        if number <= 1 or not kept:
            return Generation(0, {})
        known = [each for each in kept if each.number < number]
        if not known:
            return Generation(number - 1, kept[0].tensors)
        return known[-1]

    def clear(self) -> None:
        """Remove the stored tensors of all clients."""
        self._kept.clear()

    def tensors(
        self, clients: Iterable[int] | None = None, *, before: bool = False
    ) -> dict[str, Tensor]:
        """Return the tensors that clients store, by names of the form ``<client>/<round>/<name>``.

        Parameters
        ----------
        clients
            Ids of the clients; None for all.
        before
            Whether to include the tensors from before each client's last round.
        """
        found: dict[str, Tensor] = {}
        for client in self._kept if clients is None else clients:
            generations = self._kept.get(client, ())
            if not before:
                generations = generations[-1:]
            for each in generations:
                for name, tensor in each.tensors.items():
                    found[f"{client}/{each.number}/{name}"] = tensor
        return found

    def load(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Replace the whole content of the store by tensors that :meth:`tensors` returned.

        Raises
        ------
        ValueError
            If a name does not have the form ``<client>/<round>/<name>``.
        """
        self.clear()
        self.take(tensors, device)

    def take(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Replace the stored tensors of some clients by tensors that :meth:`tensors` returned.

        The tensors of clients that do not occur in the argument stay unchanged.

        Raises
        ------
        ValueError
            If a name does not have the form ``<client>/<round>/<name>``.
        """
        found: dict[int, dict[int, dict[str, Tensor]]] = {}
        for key, tensor in tensors.items():
            client, number, name = key.split("/", 2)
            found.setdefault(int(client), {}).setdefault(int(number), {})[name] = tensor.to(device)
        for client, rounds in found.items():
            generations = [Generation(number, rounds[number]) for number in sorted(rounds)]
            # Before the only round of a client, it stored nothing.
            self._kept[client] = (Generation(0, {}), *generations)[-2:]


def _build_name(name: str, key: str) -> str:
    """Return the name under which an entry of an optimizer's or local rule's state is stored."""
    if key == SERVED:
        return OWN_MODEL
    return f"{name}/{key}"


# A client's whole model: the shared part, which the server sends, and the part that it stores.


@dataclass(frozen=True, eq=False)
class Start:
    """Models from which k clients start their local training."""

    models: Tensor  #: m whole models as parameter vectors, ``[m, F]``
    rows: Sequence[int]  #: row of each client's model, ``[k]``
    #: row of the model to which each client's proximal term pulls, ``[k]``; None: its own row
    anchors: Sequence[int | None]
    #: personal parameters ``[k, P]``; None if they are not trained as a separate part
    personal: Tensor | None = None
    #: prefix of the names of stored optimizer or rule states; None if states are not stored
    optimizer: str | None = None


class WholeModels:
    """Assembly of clients' whole models before training or evaluation, and their split afterwards.

    A whole model has a shared part, which the server sends, and a personal part, which the client
    stores. A client that has not trained its personal parameters yet uses the ``initial`` values,
    which are the same for all clients. The proximal term pulls personal parameters to their values
    before the round, and shared parameters to the anchor.

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

    @property
    def personal_names(self) -> frozenset[str]:
        """Names of the personal parameters and buffers, which stay with each client."""
        return frozenset(slot.name for slot in self._layout.personal)

    @property
    def shared_names(self) -> frozenset[str]:
        """Names of the parameters that clients share with the server."""
        return frozenset(slot.name for slot in self._layout.full.parameters) - self.personal_names

    @property
    def last_layer_names(self) -> frozenset[str]:
        """Names of the parameters of the last layer of the model that has trained parameters."""
        names = [slot.name for slot in self._layout.full.parameters]
        layer = names[-1].rpartition(".")[0]
        return frozenset(name for name in names if name.rpartition(".")[0] == layer)

    def sends_all(self, work: ClientWork) -> bool:
        """Return whether clients send the whole update that they train, and store no model."""
        stores_model = isinstance(work.store, LocalModel)
        is_delta = isinstance(work.reply, Delta | Answer)
        return is_delta and not stores_model and not self._layout.personal

    def start(self, query: TrainQuery, places: Sequence[int]) -> Start:
        """Return the whole models from which the clients at some positions in a query start."""
        work = query.work
        vectors = query.models.vectors
        rows = [query.models.start[place] for place in places]
        anchor_rows: list[int] | None = None
        if query.models.anchor is not None and work.steps.needs_anchor:
            anchor_rows = [query.models.anchor[place] for place in places]
        state = _name_of_state(query)
        is_stored = isinstance(work.start, FromStored) or isinstance(work.store, LocalModel)
        if not is_stored and not self._layout.personal:
            pulled_to: Sequence[int | None] = anchor_rows or [None] * len(rows)
            return Start(vectors, rows, pulled_to, optimizer=state)
        ids = [query.ids[place] for place in places]
        number = query.round.number
        if isinstance(work.start, FromStored) and work.start.latest:
            # The steps start from the state after this round's training, which is the state before
            # the next round.
            number += 1
        kept = [self._store.before(number, client) for client in ids]
        personal = self._personal([tensors.get(PERSONAL) for tensors in kept])
        starts = zip(ids, rows, kept, personal, strict=True)
        models = torch.stack(
            [
                self._whole(client, vectors, row, kept=tensors, personal=vector)
                for client, row, tensors, vector in starts
            ]
        )
        new_rows = range(len(ids))
        anchors: list[int | None] = [None] * len(ids)
        if anchor_rows is not None:
            # With a local rule, the anchor is a vector of the server, which never receives personal
            # parameters: NaN marks entries for which the server has no values.
            pulled_to_personal = personal
            if isinstance(work.steps, LocalRule):
                pulled_to_personal = torch.full_like(personal, torch.nan)
            whole_anchors = self._layout.joined(vectors[anchor_rows], pulled_to_personal)
            models = torch.cat([models, whole_anchors])
            anchors = [len(ids) + k for k in new_rows]
        return Start(
            models, new_rows, anchors, personal=None if is_stored else personal, optimizer=state
        )

    def settle(self, query: TrainQuery, places: Sequence[int], start: Start, made: Made) -> Tensor:
        """Store the tensors of new models that stay with the clients; return the updates to send.

        The updates of the k clients are ``[k, S]``, or ``[k, 0]`` if the clients reply without an
        update.

        Parameters
        ----------
        query
            The training query.
        places
            Places of the k clients in the query.
        start
            Models from which the clients started.
        made
            Results of the training steps. If the training of a client has diverged, its loss is set
            to NaN, and its new tensors are not stored.
        """
        work = query.work
        deltas = made.moved
        losses = made.losses
        sends_all = self.sends_all(work)
        if sends_all and not made.stored:
            return deltas
        # Written as the negation of ``<=``, since a norm of NaN has to count as diverged as well.
        diverged = ~(row_norms(deltas) <= LARGEST_NORM)
        losses[diverged] = torch.nan
        shared, personal = self._layout.parted(deltas)
        trained: Tensor | None = None
        if isinstance(work.store, LocalModel) or isinstance(work.reply, DistanceToAnchor):
            trained = start.models[list(start.rows)] + deltas
        kept: dict[str, Tensor] = {}
        if isinstance(work.store, LocalModel) and trained is not None:
            kept[OWN_MODEL] = trained
        if isinstance(work.store, Lasting):
            kept |= _checked_names(made.stored)
            if start.personal is not None:
                kept[PERSONAL] = start.personal + personal
        is_bad = (diverged | ~losses.isfinite()).tolist()
        for k, place in enumerate(places):
            if kept and not is_bad[k]:
                tensors = {name: of_all[k] for name, of_all in kept.items()}
                self._store.keep(query.round.number, query.ids[place], tensors)
        if isinstance(work.reply, NoReply):
            return deltas[:, :0]
        if isinstance(work.reply, DistanceToAnchor):
            assert trained is not None
            return self._distance_to_anchors(query, places, trained)
        if sends_all:
            return deltas
        return shared

    def _distance_to_anchors(
        self, query: TrainQuery, places: Sequence[int], trained: Tensor
    ) -> Tensor:
        """Return the shared parts of new whole models ``[k, F]`` minus the clients' anchors."""
        assert query.models.anchor is not None  # a query with this reply has anchors
        rows = [query.models.anchor[place] for place in places]
        return self._layout.parted(trained)[0] - query.models.vectors[rows]

    def evaluated(
        self, query: EvaluationQuery, at_once: int
    ) -> Iterator[tuple[slice, Tensor, Sequence[int]]]:
        """Cut an evaluation query into parts, and assemble the models of each part.

        A part has at most ``at_once`` clients, or more if a client compares several models. The
        query is one part if no client evaluates an own model and the layout has no personal part.

        Yields
        ------
        tuple
            Slice of the query's clients; whole models ``[m, F]``; and for each client of the part,
            the row of its model.
        """
        if not self._layout.personal and OWN not in query.assignment:
            yield slice(None), query.models, query.assignment
            return
        for part in _parts(query, at_once):
            models = dict[tuple[int, int | None], Tensor]()
            keys: list[tuple[int, int | None]] = []
            for client, row in zip(query.ids[part], query.assignment[part], strict=True):
                kept = self._store.latest(client)
                # Clients that store nothing evaluate the same model.
                key = (row, client if kept else None)
                keys.append(key)
                if key not in models:
                    models[key] = self._whole(
                        client,
                        query.models,
                        row,
                        kept=kept,
                        personal=self._personal([kept.get(PERSONAL)])[0],
                    )
            row_of = {key: row for row, key in enumerate(models)}
            yield part, torch.stack([*models.values()]), [row_of[key] for key in keys]

    def only(self, part: str, vectors: Tensor) -> Tensor:
        """Return a copy of vectors ``[..., F]`` with zeros outside one part of the model.

        ``part`` is ``personal`` or ``shared``.
        """
        shared, personal = self._layout.parted(vectors)
        if part == PERSONAL:
            shared.zero_()
        else:
            personal.zero_()
        return self._layout.joined(shared, personal)

    def only_last_layer(self, vectors: Tensor) -> Tensor:
        """Return a copy of vectors ``[..., F]`` with zeros outside the last layer's parameters."""
        names = self.last_layer_names
        kept = torch.zeros_like(vectors)
        for slot in self._layout.full.parameters:
            if slot.name in names:
                kept[..., slot.start : slot.stop] = vectors[..., slot.start : slot.stop]
        return kept

    def of(self, this_round: Round, client: int, model: Tensor) -> Tensor:
        """Return a client's whole model ``[F]`` in a round, given the shared part ``[S]``."""
        return self._layout.joined(
            model, self._personal([self._store.before(this_round.number, client).get(PERSONAL)])[0]
        )

    def load(self, client: int, model: Tensor, module: nn.Module) -> None:
        """Load a client's current whole model into a module, given the shared part ``[S]``."""
        whole = self._layout.joined(
            model, self._personal([self._store.latest(client).get(PERSONAL)])[0]
        )
        self._layout.full.load(whole, module)

    def load_own(self, client: int, module: nn.Module) -> bool:
        """Load a client's own model, which the client stores, into a module.

        The result is False, and the module stays unchanged, if the client stores no own model.
        """
        model = self._store.latest(client).get(OWN_MODEL)
        if model is None:
            return False
        self._layout.full.load(model, module)
        return True

    def kept(self, ids: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        """Return the tensors of each client's deployed model that the client stores.

        The tensors are given by client id and name: personal parameters ``[P]``, whole models
        ``[F]``, and weights of mixtures ``[K]``.
        """
        initial = {PERSONAL: self.initial} if self._layout.personal else {}
        clients = ids
        if not initial:
            # Of millions of clients, only those that have trained store tensors.
            clients = [client for client in ids if client in self._store] if self._store else []
        found = {
            client: _select_deployed({**initial, **self._store.latest(client)})
            for client in clients
        }
        return {client: mine for client, mine in found.items() if mine}

    def _whole(
        self, client: int, models: Tensor, row: int, kept: Mapping[str, Tensor], personal: Tensor
    ) -> Tensor:
        """Return a client's whole model ``[F]``.

        The result is the shared model in a row of ``models`` with the client's personal part, or,
        for the row ``OWN``, the own model that the client stores.

        Raises
        ------
        UpdateError
            If the client should use its own model, but stores none.
        """
        if row != OWN:
            return self._layout.joined(models[row], personal)
        if OWN_MODEL not in kept:
            raise UpdateError(
                f"{KEEPS_NONE}: client {client} has not trained one, or has lost its stored tensors; "
                "in the next round it starts again from the model that the server sends"
            )
        return kept[OWN_MODEL]

    def _personal(self, kept: Sequence[Tensor | None]) -> Tensor:
        """Return the personal parameters of k clients, ``[k, P]``.

        The initial values replace None, for clients without stored personal parameters.
        """
        return torch.stack([self.initial if each is None else each for each in kept])


def _checked_names(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors that a method's own steps store, after a check of their names.

    Raises
    ------
    ConfigError
        If a name is reserved for training.
    """
    for name in tensors:
        if name in RESERVED_NAMES or "/" in name:
            raise ConfigError(
                f"the steps of a method cannot store a tensor named {name!r}: names that the "
                "library uses and names with '/' are reserved; choose another name"
            )
    return tensors


def _name_of_state(query: TrainQuery) -> str | None:
    """Return the prefix under which a query's optimizer or local rule states are stored.

    The prefix is None if the states are not stored between rounds, because the query does not
    request that, or because the training has no such states.
    """
    work = query.work
    if isinstance(work.store, LocalModel):
        prefix = OWN_OPTIMIZER
        lasts = work.store.state
    else:
        prefix = OPTIMIZER
        lasts = isinstance(work.store, Lasting)
    if isinstance(work.steps, LocalRule):
        return RULE if lasts else None
    if isinstance(work.steps, ClientTrainer):
        return CODE if lasts and work.steps.stores else None
    return prefix if lasts and query.local.keep_state and query.local.trainer is None else None


def _select_deployed(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors of a client's deployed model from all tensors that the client stores."""
    found = {name: kept[name] for name in (PERSONAL, OWN_MODEL, MIXTURE) if name in kept}
    if MIXTURE not in kept and SERVED_MIXTURE in kept:
        found[MIXTURE] = kept[SERVED_MIXTURE]
    return found


def _parts(query: EvaluationQuery, at_once: int) -> Iterator[slice]:
    """Cut an evaluation query into slices of at most ``at_once`` pairs of client and model.

    If clients compare several models, all pairs of a client are in the same slice, which may
    therefore be longer.
    """
    ids = query.ids
    first = 0
    while first < len(ids):
        stop = min(first + at_once, len(ids))
        while query.compares and stop < len(ids) and ids[stop] == ids[stop - 1]:
            stop += 1
        yield slice(first, stop)
        first = stop
