"""Clients on the actors of a Ray cluster.

A query is split into one part per actor, and the replies of the actors are merged into one reply.
Clients are assigned to actors so that all actors take about equally long.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from fedclade.channel import Meter
from fedclade.core import (
    OWN,
    DataQuery,
    EngineError,
    Evaluation,
    EvaluationQuery,
    Layout,
    Mixture,
    Query,
    R,
    Sink,
    Sums,
    TrainQuery,
    Updates,
    Workers,
    models_of,
)
from fedclade.training.batch_rule import BatchRule
from fedclade.training.input_hooks import with_input_hooks
from fedclade.training.memory import check_model_fits
from fedclade.training.remote.actor import Part, Reply, Setup, packed, unpacked
from fedclade.training.remote.cluster import ActorPool, Actors, Slot, how, import_ray
from fedclade.training.store import ClientStore, WholeModels

# Splitting of a query into parts, one for each actor, and merging of the replies.


def narrowed(query: Query[Any], places: Sequence[int]) -> tuple[Query[Any], list[int] | None]:
    """Return the part of a query for some of its clients, and the rows of their models.

    ``places`` are the positions of these clients in the query.

    The part itself contains no models: it refers to the models of the query, which are sent
    separately. The rows are in ascending order; they are None for a query without models.
    """
    ids = tuple(query.ids[place] for place in places)
    if isinstance(query, TrainQuery):
        models = query.models.select(places)
        rows = _rows_sent(models.start, models.anchor, query.work.mixture, query.models.vectors)
        place_of = {OWN: OWN, **{row: k for k, row in enumerate(rows)}}
        anchor = None
        if models.anchor is not None:
            anchor = [place_of[row] for row in models.anchor]
        part = replace(
            models,
            vectors=models.vectors[:0],
            start=[place_of[row] for row in models.start],
            anchor=anchor,
        )
        return replace(query, ids=ids, models=part), rows
    if isinstance(query, EvaluationQuery):
        start = [query.assignment[place] for place in places]
        rows = _rows_sent(start, None, query.mixture, query.models)
        place_of = {OWN: OWN, **{row: k for k, row in enumerate(rows)}}
        assignment = [place_of[row] for row in start]
        return replace(query, ids=ids, assignment=assignment, models=query.models[:0]), rows
    return replace(query, ids=ids), None


def _vectors_of(query: Query[Any]) -> Tensor | None:
    """Return a query's models as parameter vectors, ``[K, S]``; None for a query without models."""
    if isinstance(query, TrainQuery):
        return query.models.vectors
    if isinstance(query, EvaluationQuery):
        return query.models
    return None


def _rows_sent(
    start: Sequence[int], anchor: Sequence[int] | None, mixture: Mixture | None, models: Tensor
) -> list[int]:
    """Return the rows of the models ``[K, S]`` that some clients need, in ascending order.

    ``start`` has the row of each client's model, and ``anchor`` the row of the model to which the
    proximal term pulls the client. With a mixture, each client needs all models.
    """
    if mixture is not None:  # each client needs all models
        return list(range(len(models)))
    needed = {*start, *(anchor or ())} - {OWN}
    return sorted(needed) or [0]


def together(query: Query[Any], replies: Sequence[tuple[Sequence[int], Any]]) -> Any:
    """Merge the replies to the parts of a query into one reply.

    Parameters
    ----------
    query
        The query.
    replies
        For each part of the query, the places of its clients in the query, and the reply.
    """
    if isinstance(query, TrainQuery):
        return _updates(query, [reply for _, reply in replies])
    if isinstance(query, EvaluationQuery):
        return _evaluation(replies)
    assert isinstance(query, DataQuery)  # clients of this process handle no other kinds
    return query.merge(replies)


def _evaluation(replies: Sequence[tuple[Sequence[int], Evaluation]]) -> Evaluation:
    """Merge the evaluations of the parts of a query, in the order of the query's clients."""
    places = torch.tensor([place for some, _ in replies for place in some])
    whole = Evaluation.concat([evaluation for _, evaluation in replies])
    if len(whole.ids) < len(places):  # some clients did not reply: keep the order of the parts
        return whole
    order = places.argsort()
    ids = tuple(whole.ids[k] for k in order.tolist())
    return replace(
        whole,
        ids=ids,
        scores=whole.scores[order],
        losses=whole.losses[order],
        examples=whole.examples[order],
        wins=None if whole.wins is None else whole.wins[order],
    )


def _updates(query: TrainQuery, parts: Sequence[Updates]) -> Updates:
    """Merge the updates of the parts of a query, in the order of the query's clients.

    Each tensor is copied only once, since updates may be large.
    """
    left_out = {client: why for part in parts for client, why in part.left_out.items()}
    limited = {client: what for part in parts for client, what in part.limited.items()}
    some = [part for part in parts if part.ids] or parts[:1]
    there = {client for part in some for client in part.ids}
    ids = tuple(client for client in query.ids if client in there)
    place_of = {client: place for place, client in enumerate(ids)}
    columns = {
        name: values.new_empty(len(ids), *values.shape[1:])
        for name, values in some[0].columns.items()
    }
    for part in some:
        places = [place_of[client] for client in part.ids]
        for name, whole in columns.items():
            whole[places] = part.columns[name]
    sums = None
    if some[0].sums is not None:
        sums = _sums(query, ids, some)
    common = replace(some[0].common, sums=sums)
    return Updates(ids=ids, columns=columns, common=common, left_out=left_out, limited=limited)


def _sums(query: TrainQuery, ids: Sequence[int], parts: Sequence[Updates]) -> Sums:
    """Add up, for each model of a query, the sums of updates from the parts of the query.

    In each part, updates are summed over groups of clients that were sent the same model. The parts
    number these groups differently, so groups of different parts are matched by their model.
    """
    row_of: Mapping[int, int] = dict(zip(query.ids, query.models.start, strict=True))
    assert parts[0].sums is not None
    groups = parts[0].sums.groups.new_zeros(
        len(query.models.vectors), parts[0].sums.groups.shape[1]
    )
    for part in parts:
        assert part.sums is not None
        theirs = {
            group: row_of[client]
            for client, group in zip(part.ids, part.sums.group.tolist(), strict=True)
        }
        for group, row in theirs.items():
            groups[row] += part.sums.groups[group]
    return Sums(groups, torch.tensor([row_of[client] for client in ids], dtype=torch.int64))


# Assignment of clients to actors by the measured speeds of the actors, so that all actors take
# equally long.

ENOUGH_SECONDS = 1.0
"""Seconds of training after which an actor's measured speed counts as reliable."""

CLEARLY = 1.15
"""Least factor by which a new assignment must shorten a round to replace the current one.

Speeds vary from round to round, so smaller gains may be random.
"""


def dealt(
    work: Mapping[int, float], speeds: Sequence[float], homes: Mapping[int, int]
) -> dict[int, int]:
    """Assign clients to actors, so that all actors take about equally long.

    An actor's share of all examples is proportional to its speed. An actor that has more than its
    share gives up clients, the largest first, until no client can leave without the actor having
    less than its share. These clients and clients without an actor, the largest first, are each
    assigned to the actor that would finish first with the additional client.

    Parameters
    ----------
    work
        Number of training examples of each client.
    speeds
        Speed of each actor, in examples per second; all positive.
    homes
        Number of each client's current actor. Clients without an actor, or with an actor that no
        longer exists, are assigned to another actor.

    Returns
    -------
    dict
        The actor of each client.
    """
    share = {actor: sum(work.values()) * speed / sum(speeds) for actor, speed in enumerate(speeds)}
    loads = dict.fromkeys(share, 0.0)
    for client, actor in homes.items():
        if actor in loads:
            loads[actor] += work[client]
    largest_first = sorted(work, key=lambda client: (-work[client], client))
    stays: dict[int, int] = {}
    for client in largest_first:
        actor = homes.get(client, -1)
        # The client leaves its actor if the actor has at least its share of the work without it.
        if actor in loads and loads[actor] - work[client] >= share[actor]:
            loads[actor] -= work[client]
        elif actor in loads:
            stays[client] = actor
    for client in largest_first:
        if client not in stays:
            first = min(
                loads, key=lambda actor: ((loads[actor] + work[client]) / speeds[actor], actor)
            )
            loads[first] += work[client]
            stays[client] = first
    return {client: stays[client] for client in work}


def makespan(work: Mapping[int, float], speeds: Sequence[float], homes: Mapping[int, int]) -> float:
    """Return the seconds until the last actor has trained all of its clients.

    ``work`` has the number of examples of each client, ``speeds`` the examples per second of each
    actor, and ``homes`` the actor of each client.
    """
    loads = [0.0] * len(speeds)
    for client, actor in homes.items():
        loads[actor] += work[client]
    return max(load / speed for load, speed in zip(loads, speeds, strict=True))


@dataclass
class Speeds:
    """Training speeds of the actors, measured since the last assignment of clients to actors."""

    actors: int
    #: seconds of training after which a speed is reliable; doubles with every new assignment
    needed: float = field(default_factory=lambda: ENOUGH_SECONDS)
    #: number of examples that each actor has trained, by number of the actor
    examples: dict[int, float] = field(default_factory=dict[int, float])
    #: seconds in which each actor has trained these examples
    seconds: dict[int, float] = field(default_factory=dict[int, float])

    def note(self, actor: int, examples: float, seconds: float) -> None:
        """Record that an actor has trained a number of examples in a number of seconds."""
        self.examples[actor] = self.examples.get(actor, 0.0) + examples
        self.seconds[actor] = self.seconds.get(actor, 0.0) + seconds

    def known(self) -> list[float] | None:
        """Return the speed of each actor, in examples per second.

        The result is None until the speeds of all actors have been measured for long enough.
        """
        if any(self.seconds.get(actor, 0.0) < self.needed for actor in range(self.actors)):
            return None
        return [self.examples[actor] / self.seconds[actor] for actor in range(self.actors)]

    def rebalanced(
        self, work: Mapping[int, float], homes: Mapping[int, int]
    ) -> dict[int, int] | None:
        """Return a new assignment of clients to actors; None if it would not be clearly faster.

        The result is also None until the speeds of all actors have been measured for long enough.
        ``work`` has the number of examples of each client, and ``homes`` its current actor.
        """
        if (speeds := self.known()) is None:
            return None
        self.examples.clear()
        self.seconds.clear()
        new = dealt(work, speeds, homes)
        if makespan(work, speeds, homes) < CLEARLY * makespan(work, speeds, new):
            return None
        self.needed *= 2
        return new


DEATHS = 3
"""Largest number of times that a part of a query is sent again after its actor has died."""

INLINE = 2**15
"""Bytes below which the models of a query are sent with each call of an actor.

Larger models are written to Ray's object store once, where all actors of a machine read them; for
small models this would take longer.
"""

CUDA = "ray (cuda)"
"""Prefix of the engine's name in :attr:`RayClients.engine_taken` if the actors have GPUs."""

_log = logging.getLogger(__name__)


_Call = tuple[Slot, Any, list[int], int]
"""Call of an actor: slot, actor, places of the clients in the query, and number of earlier deaths.

An earlier death is that of an actor while it computed the reply for the same places.
"""


class RayClients(Workers):
    """Clients of a federation that are trained by Ray actors, each with a shard of the clients.

    The cluster is joined at the first query. Tensors that clients store between rounds are stored
    in this process, and are sent with the queries that need them. So no state is lost if an actor
    dies, and another actor can repeat its part of the query.

    Parameters
    ----------
    setup
        Configuration that all actors share. Its middleware runs in each actor, and processes the
        queries and replies of the actor's clients.
    actors
        Settings of the actors: number, resources and cluster; None for default settings.
    device
        ``auto``, ``cpu`` or ``cuda``: the device on which actors train. Replies are on the CPU.
    resolved
        The value of :attr:`engine_taken` in the earlier part of a run that is continued; None for a
        new run.
    meter
        Meter to which the traffic that the actors count is added.

    Raises
    ------
    MissingExtraError
        If Ray is not installed.
    ModelError
        If the module does not fit the federation.
    """

    def __init__(
        self,
        setup: Setup,
        actors: Actors | None = None,
        device: str = "auto",
        resolved: str | None = None,
        meter: Meter | None = None,
    ) -> None:
        import_ray()
        federation = setup.federation
        module = setup.module
        self._setup = setup
        self._meter = meter or Meter()
        kind, _, inside = (resolved or "").partition(", ")
        self._resolved = inside or None
        self._cuda = kind == CUDA
        self.layout = Layout.of(module, setup.personal)
        cpu = torch.device("cpu")
        hooked = with_input_hooks(module, self.layout, federation, cpu, setup.task)
        check_model_fits(hooked, federation, cpu, setup.task)
        self._batch_rule = BatchRule.of(hooked, self.layout.full, federation, cpu)
        self.store = ClientStore()
        self._whole = WholeModels(self.layout, self.layout.flatten_personal(module), self.store)
        self._work = {client: float(size) for client, size in federation.sizes.items()}
        self._homes: dict[int, int] = {}
        self._shards: list[frozenset[int]] = []
        self._speeds = Speeds(0)
        self._logged: set[str] = set()
        self._pool = ActorPool(setup, actors or Actors(), "cuda" if self._cuda else device)

    def close(self) -> None:
        """End the actors, and end the Ray cluster if this process has started it."""
        self._pool.close()

    @property
    def engine(self) -> str:
        """Name of this engine, ``ray``; :attr:`engine_taken` has the engine inside the actors."""
        return "ray"

    @property
    def engine_taken(self) -> str | None:
        """Device and engine of the actors, such as ``ray (cuda), stacked``; None before round 1.

        Rounding depends on the device and the engine, so a run that is continued uses the same
        engine.
        """
        if self._resolved is None:
            return None
        kind = CUDA if self._cuda else self.engine
        return f"{kind}, {self._resolved}"

    @property
    def smallest_batch(self) -> int:
        """Number of examples in the smallest batch on which the model can be trained: 1 or 2."""
        return self._batch_rule.smallest

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in a fixed order."""
        return self._setup.federation.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client, by client id."""
        return self._setup.federation.sizes

    @property
    def undivided(self) -> Collection[int]:
        """Ids of the clients whose training examples cannot be divided into parts."""
        return self._setup.federation.undivided

    @property
    def kept(self) -> dict[int, dict[str, Tensor]]:
        """Tensors of each client's deployed model that the client stores, by client id and name.

        The tensors are personal parameters ``[P]``, whole models ``[F]`` of clients, and weights of
        mixtures ``[K]``.
        """
        return self._whole.kept(self.ids)

    def handle_updates(self, query: TrainQuery, sink: Sink | None = None) -> Updates:
        """Let each client train, or compute a gradient, on the actor that has the client's data.

        After a training query, clients are assigned to other actors if rounds become clearly
        faster. ``sink``, which would receive single replies early, is not used.

        Raises
        ------
        EngineError
            If the actors cannot be started, or die repeatedly.
        """
        updates: Updates = self._ask(query)
        if query.kind == "train" and (homes := self._speeds.rebalanced(self._work, self._homes)):
            moved = sum(home != self._homes[client] for client, home in homes.items())
            _log.info("%d clients move to other actors, to balance the training times", moved)
            self._place(homes)
        return updates

    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Let each client evaluate its model on the actor that has the client's data."""
        return self._ask(query)

    def handle_data(self, query: DataQuery[R]) -> R:
        """Let each client compute its reply to a data query on the actor that has its data."""
        return cast("R", self._ask(query))

    def _ask(self, query: Query[Any]) -> Any:
        """Send a query to the actors, and return the merged reply.

        If an actor dies, its part of the query is sent again.
        """
        cluster = self._pool.begun()
        if not self._homes:
            self._place(dealt(self._work, [1.0] * len(self._pool.slots), {}))
        ray = cluster.ray
        replies = list[tuple[Sequence[int], Any]]()
        models = None
        vectors = _vectors_of(query)
        if vectors is not None:
            models = packed(vectors, cluster.pickler)
            if vectors.nbytes >= INLINE:
                models = ray.put(models)
        pending = self._send(query, models, range(len(query.ids)))
        while pending:
            [ref], _ = ray.wait(list(pending), num_returns=1)
            slot, actor, places, died = pending.pop(ref)
            try:
                reply: Reply = unpacked(ray.get(ref))
            except cluster.deaths as error:
                if died >= DEATHS:
                    raise EngineError(
                        f"actors have died {died + 1} times on the same part of a query; the last "
                        f"error is: {how(error)}; if memory ran out, use fewer actors (--actors) "
                        "or a smaller --memory"
                    ) from error
                if slot.actor is actor:
                    self._replace(slot, error)
                pending |= self._send(query, models, places, died + 1)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, Exception):
                    raise error.cause from error
                raise EngineError(
                    f"a Ray actor failed while it processed its part of a query: {how(error)}; use "
                    "--engine auto to see the error without Ray"
                ) from error
            else:
                self._note(query, slot, places, reply)
                replies.append((places, reply.answer))
        return together(query, replies)

    def _send(
        self, query: Query[Any], models: Any, places: Sequence[int], died: int = 0
    ) -> dict[Any, _Call]:
        """Send each actor its part of a query, for the clients at some positions in the query.

        Parameters
        ----------
        query
            The query.
        models
            The packed models of the query, or a reference to them in Ray's object store; None for a
            query without models.
        places
            Positions in the query of the clients that should reply.
        died
            Number of times that an actor has already died on this part of the query.

        Returns
        -------
        dict
            The calls of actors whose replies are pending, by Ray's reference to the reply.
        """
        of_slot: dict[int, list[int]] = {}
        for place in places:
            of_slot.setdefault(self._homes[query.ids[place]], []).append(place)
        calls: dict[Any, _Call] = {}
        for number, slot_places in of_slot.items():
            slot = self._pool.slots[number]
            shard = self._shards[number]
            part, rows = narrowed(query, slot_places)
            kept: dict[str, Tensor] = {}
            if self._needs_kept(query):
                kept = self.store.tensors(part.ids, before=True)
            # The ids of an actor's clients are sent only if they have changed.
            new_shard = None if slot.holds == shard else shard
            slot.holds = shard
            slot.is_warm = slot.is_warm and new_shard is None
            message = packed(
                Part(part, rows, kept, shard=new_shard, resolved=self._resolved),
                self._pool.begun().pickler,
            )
            ref = slot.actor.answer.remote(message, models)
            calls[ref] = slot, slot.actor, slot_places, died
        return calls

    def _needs_kept(self, query: Query[Any]) -> bool:
        """Return whether a query needs the tensors that clients store between rounds."""
        if isinstance(query, EvaluationQuery):
            return (
                bool(self.layout.personal) or OWN in query.assignment or query.mixture is not None
            )
        if isinstance(query, DataQuery):
            of_models = bool(self.layout.personal) and bool(models_of(query))
            return of_models or bool(query.stores)
        return isinstance(query, TrainQuery)

    def _note(self, query: Query[Any], slot: Slot, places: Sequence[int], reply: Reply) -> None:
        """Process what an actor's reply contains in addition to the clients' replies.

        The actor's training speed and traffic and the chosen engine are recorded, tensors that
        clients store are taken over, and log lines are logged.
        """
        if isinstance(query, TrainQuery) and query.kind == "train":
            # The first training of an actor also includes the choice of an engine and the transfer
            # of data, so it does not count for the speed.
            if slot.is_warm and slot in self._pool.slots:
                trained = sum(self._work[query.ids[place]] for place in places)
                self._speeds.note(self._pool.slots.index(slot), trained, reply.seconds)
            slot.is_warm = True
        self._meter.bytes_up += reply.up
        self._meter.bytes_down += reply.down
        self._resolved = self._resolved or reply.resolved
        self._cuda = reply.cuda
        # Copies, so that the tensors do not occupy the object store.
        self.store.take({key: tensor.clone() for key, tensor in reply.kept.items()})
        for level, line in reply.logged:
            if line not in self._logged:  # another actor may have logged the same line
                _log.log(level, "%s", line)
                self._logged.add(line)

    def _place(self, homes: Mapping[int, int]) -> None:
        """Assign clients to actors from now on, given the number of each client's actor."""
        self._homes = dict(homes)
        of_slot: list[set[int]] = [set() for _ in self._pool.slots]
        for client, number in homes.items():
            of_slot[number].add(client)
        self._shards = [frozenset(some) for some in of_slot]
        self._speeds = Speeds(len(self._pool.slots), self._speeds.needed)

    def _replace(self, slot: Slot, error: Exception) -> None:
        """Start a new actor in place of a dead actor.

        If the cluster has no room for a new actor, the clients of the dead actor are assigned to
        the other actors.
        """
        if (lost := self._pool.replace(slot, error)) is not None:
            homes = {
                client: home - (home > lost) for client, home in self._homes.items() if home != lost
            }
            self._place(dealt(self._work, [1.0] * len(self._pool.slots), homes))


def taken_by(engine: str, resolved: str | None) -> str | None:
    """Return the engine choice, a value of ``engine_taken``, with which a run is to be continued.

    A run may be continued with or without the engine ``ray``. In both cases, clients should train
    with the same engine as before (inside the actors of ``ray``), since rounding depends on it.

    Parameters
    ----------
    engine
        Name of the engine that the user has set for the rest of the run.
    resolved
        The value of ``engine_taken`` in the run so far; None if no engine has been chosen.

    Returns
    -------
    str or None
        If the run continues with ``ray`` as before, or without ``ray`` as before: ``resolved``. If
        a run with ``ray`` continues without ``ray``: the engine inside the actors, such as
        ``stacked`` for ``ray (cuda), stacked``. None if an engine has to be chosen again, also if a
        run without ``ray`` continues with ``ray``.
    """
    if resolved is None or (engine == "ray") == resolved.startswith("ray"):
        return resolved
    if engine == "ray":
        return None
    return resolved.partition(", ")[2] or None


def here(engine: str) -> str:
    """Return the name of the engine with which to train in this process instead of on actors.

    The result is ``auto`` for ``ray``; other names are returned unchanged.
    """
    return "auto" if engine == "ray" else engine
