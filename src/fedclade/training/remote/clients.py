"""Clients on the actors of a Ray cluster: one call per actor and query, and one combined reply."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
    Query,
    R,
    Sums,
    UpdateQuery,
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
    """Return the part of a query for the clients at some places, and the rows of its models.

    The part has no models: it refers to the models of the query by their rows, in order. The rows
    are None for a query without models.
    """
    ids = tuple(query.ids[place] for place in places)
    if not isinstance(query, UpdateQuery | EvaluationQuery):
        return replace(query, ids=ids), None
    of_client = [query.assignment[place] for place in places]
    anchors = None
    if isinstance(query, UpdateQuery) and query.anchors is not None:
        anchors = [query.anchors[place] for place in places]
    rows = sorted({row for row in (*of_client, *(anchors or ())) if row != OWN}) or [0]
    if query.mixture is not None:  # each client needs all models
        rows = list(range(len(query.models)))
    new = {OWN: OWN, **{row: k for k, row in enumerate(rows)}}
    part = replace(
        query, ids=ids, assignment=[new[row] for row in of_client], models=query.models[:0]
    )
    if isinstance(part, UpdateQuery):
        held = None if part.data_rounds is None else [part.data_rounds[place] for place in places]
        anchors = None if anchors is None else [new[row] for row in anchors]
        part = replace(part, anchors=anchors, data_rounds=held, sink=None)
    return part, rows


def together(query: Query[Any], replies: Sequence[tuple[Sequence[int], Any]]) -> Any:
    """Return the reply to a query, merged from replies to its parts.

    Parameters
    ----------
    query
        The query.
    replies
        For each part, the places of its clients in the query, and the reply.
    """
    if isinstance(query, UpdateQuery):
        return _updates(query, [reply for _, reply in replies])
    if isinstance(query, EvaluationQuery):
        return _evaluation(replies)
    assert isinstance(query, DataQuery)  # clients of this process handle no other kinds
    return query.merge(replies)


def _evaluation(replies: Sequence[tuple[Sequence[int], Evaluation]]) -> Evaluation:
    places = torch.tensor([place for some, _ in replies for place in some])
    whole = Evaluation.concat([evaluation for _, evaluation in replies])
    if len(whole.ids) < len(places):  # some clients did not reply: keep the order of the parts
        return whole
    order = places.argsort()
    ids = tuple(whole.ids[k] for k in order.tolist())
    wins = None if whole.wins is None else whole.wins[order]
    of_all = {
        "scores": whole.scores[order],
        "losses": whole.losses[order],
        "examples": whole.examples[order],
    }
    return replace(whole, ids=ids, wins=wins, **of_all)


def _updates(query: UpdateQuery, parts: Sequence[Updates]) -> Updates:
    """Merge the updates of all parts in the order of the query; each tensor is copied once."""
    left_out = {client: why for part in parts for client, why in part.left_out.items()}
    limited = {client: what for part in parts for client, what in part.limited.items()}
    some = [part for part in parts if part.ids] or parts[:1]
    there = {client for part in some for client in part.ids}
    ids = tuple(client for client in query.ids if client in there)
    place_of = {client: place for place, client in enumerate(ids)}
    places = [[place_of[client] for client in part.ids] for part in some]

    def of_all(name: str) -> Tensor | None:
        columns: list[Tensor | None] = [getattr(part, name) for part in some]
        first = columns[0]
        if first is None:
            return None
        whole = first.new_empty(len(ids), *first.shape[1:])
        for where, column in zip(places, columns, strict=True):
            assert column is not None
            whole[where] = column
        return whole

    names = ("sizes", "losses", "norms", "deltas", "sketches", "parts", "components")
    columns: dict[str, Any] = {name: of_all(name) for name in names}
    sums = None if some[0].sums is None else _sums(query, ids, some)
    of_all_parts = {"n_parameters": some[0].n_parameters, "left_out": left_out, "limited": limited}
    return Updates(ids=ids, sums=sums, **of_all_parts, **columns)


def _sums(query: UpdateQuery, ids: Sequence[int], parts: Sequence[Updates]) -> Sums:
    """Add up the sums of each model over the parts.

    A part numbers its own groups; the model that a client was sent identifies the group in the
    query.
    """
    row_of: Mapping[int, int] = dict(zip(query.ids, query.assignment, strict=True))
    assert parts[0].sums is not None
    groups = parts[0].sums.groups.new_zeros(len(query.models), parts[0].sums.groups.shape[1])
    for part in parts:
        assert part.sums is not None
        theirs = {
            group: row_of[client]
            for client, group in zip(part.ids, part.sums.group.tolist(), strict=True)
        }
        for group, row in theirs.items():
            groups[row] += part.sums.groups[group]
    return Sums(groups, torch.tensor([row_of[client] for client in ids], dtype=torch.int64))


# Assignment of clients to actors: shards that take equally long, by the measured speeds of the
# actors.

ENOUGH_SECONDS = 1.0
"""Seconds of training by each actor after which its speed counts as known."""

CLEARLY = 1.15
"""Least factor by which a new assignment must shorten a round to replace the current one.

Smaller gains are within the variation of speeds from round to round.
"""


def dealt(
    work: Mapping[int, float], speeds: Sequence[float], homes: Mapping[int, int]
) -> dict[int, int]:
    """Assign clients to actors, so that all actors take about equally long.

    Clients stay with their actor, up to its share of the work. The other clients, the largest
    first, go to the actor that would finish them first.

    Parameters
    ----------
    work
        Number of training examples of each client.
    speeds
        Speed of each actor, in examples per second; all positive.
    homes
        Current actor of each client. Clients without an actor, or with one that no longer exists,
        are assigned to another.

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
        # Even without this client, the actor has at least its share of the work.
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
    """Return the seconds until the last actor has trained all of its clients."""
    loads = [0.0] * len(speeds)
    for client, actor in homes.items():
        loads[actor] += work[client]
    return max(load / speed for load, speed in zip(loads, speeds, strict=True))


@dataclass
class Speeds:
    """Speeds of the actors, measured since the last assignment of clients."""

    actors: int
    #: seconds of training required of each actor; doubles with every new assignment
    needed: float = ENOUGH_SECONDS
    examples: dict[int, float] = field(default_factory=dict[int, float])
    seconds: dict[int, float] = field(default_factory=dict[int, float])

    def note(self, actor: int, examples: float, seconds: float) -> None:
        """Record the training of some examples by an actor, and its duration in seconds."""
        self.examples[actor] = self.examples.get(actor, 0.0) + examples
        self.seconds[actor] = self.seconds.get(actor, 0.0) + seconds

    def known(self) -> list[float] | None:
        """Return the speed of each actor, in examples per second; None until all are known."""
        if any(self.seconds.get(actor, 0.0) < self.needed for actor in range(self.actors)):
            return None
        return [self.examples[actor] / self.seconds[actor] for actor in range(self.actors)]

    def rebalanced(
        self, work: Mapping[int, float], homes: Mapping[int, int]
    ) -> dict[int, int] | None:
        """Return a new assignment of clients to actors, or None if it is not clearly faster."""
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
"""Largest number of times that a part of a query is given to another actor after a death."""

INLINE = 2**15
"""Bytes of models below which they are sent with each call, instead of by the object store.

Sending them takes less time than storing them there.
"""

CUDA = "ray (cuda)"
"""Prefix of the name of the engine if actors have a GPU."""

_log = logging.getLogger(__name__)


_Call = tuple[Slot, Any, list[int], int]
"""Call of an actor: slot, actor, places in the query, and number of actors that died with it."""


class RayClients(Workers):
    """Clients of a federation that are trained by actors, each with a shard of the clients.

    The cluster is joined at the first query. State that clients store between rounds is stored in
    this process, and is sent with the queries that need it. So no state is lost if an actor dies,
    and another actor repeats its part of the query.

    Parameters
    ----------
    setup
        Configuration that all actors share. Its middleware runs in each actor, between clients and
        reply.
    actors
        Number and location of the actors.
    device
        ``auto``, ``cpu`` or ``cuda``: the device on which actors train. Replies are on the CPU.
    resolved
        The engine of a run that is continued, see :attr:`engine_taken`.
    meter
        Meter to which the traffic that actors count is added.

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
        self._setup, self._meter = setup, meter or Meter()
        kind, _, inside = (resolved or "").partition(", ")
        self._resolved = inside or None
        self._cuda = kind == CUDA
        self.layout = Layout.of(module, setup.personal)
        cpu = torch.device("cpu")
        hooked = with_input_hooks(module, self.layout, federation, cpu)
        check_model_fits(hooked, federation, cpu)
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
        """End the actors, and the cluster if this process has started it."""
        self._pool.close()

    @property
    def engine(self) -> str:
        """Name of this engine; :attr:`engine_taken` has the engine of the actors."""
        return "ray"

    @property
    def engine_taken(self) -> str | None:
        """Device and engine of the actors, on which rounding depends; None before round 1."""
        return (
            None
            if self._resolved is None
            else f"{CUDA if self._cuda else self.engine}, {self._resolved}"
        )

    @property
    def smallest_batch(self) -> int:
        """Number of examples in the smallest batch on which the model can be trained."""
        return self._batch_rule.smallest

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in a fixed order."""
        return self._setup.federation.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client."""
        return self._setup.federation.sizes

    @property
    def kept(self) -> dict[int, dict[str, Tensor]]:
        """Personal parameters ``[P]`` and models ``[F]`` that clients store, by client and name."""
        return self._whole.kept(self.ids)

    def handle_updates(self, query: UpdateQuery) -> Updates:
        """Let each client train, or compute a gradient, on the actor that has its data.

        Raises
        ------
        EngineError
            If there are no actors, or they die repeatedly.
        """
        updates: Updates = self._asked(query)
        if query.kind == "train" and (homes := self._speeds.rebalanced(self._work, self._homes)):
            moved = sum(home != self._homes[client] for client, home in homes.items())
            _log.info("%d clients move to other actors, by how fast these train", moved)
            self._place(homes)
        return updates

    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Let each client evaluate its model on the actor that has its data."""
        return self._asked(query)

    def handle_data(self, query: DataQuery[R]) -> R:
        """Let each client reply to a query about its own data, on the actor that has the data."""
        return cast("R", self._asked(query))

    def _asked(self, query: Query[Any]) -> Any:
        """Send a query to the actors, and parts of dead actors again; return the merged reply."""
        cluster = self._pool.begun()
        if not self._homes:
            self._place(dealt(self._work, [1.0] * len(self._pool.slots), {}))
        ray = cluster.ray
        replies = list[tuple[Sequence[int], Any]]()
        models = None
        if isinstance(query, UpdateQuery | EvaluationQuery):
            models = packed(query.models, cluster.pickler)
            models = models if query.models.nbytes < INLINE else ray.put(models)
        pending = self._sent(query, models, range(len(query.ids)))
        while pending:
            [ref], _ = ray.wait(list(pending), num_returns=1)
            slot, actor, places, died = pending.pop(ref)
            try:
                reply: Reply = unpacked(ray.get(ref))
            except cluster.deaths as error:
                if died >= DEATHS:
                    raise EngineError(
                        f"actors have died {died + 1} times with the same part of a query, the "
                        f"last one so: {how(error)}; if memory ran out, ask for fewer actors, or "
                        "less --memory"
                    ) from error
                if slot.actor is actor:
                    self._replace(slot, error)
                pending |= self._sent(query, models, places, died + 1)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, Exception):
                    raise error.cause from error
                raise EngineError(f"an actor failed: {how(error)}") from error
            else:
                self._note(query, slot, places, reply)
                replies.append((places, reply.answer))
        return together(query, replies)

    def _sent(
        self, query: Query[Any], models: Any, places: Sequence[int], died: int = 0
    ) -> dict[Any, _Call]:
        """Send parts of a query to the actors that have the clients at some of its places.

        ``died`` is the number of actors that have died with these places.
        """
        of_slot: dict[int, list[int]] = {}
        for place in places:
            of_slot.setdefault(self._homes[query.ids[place]], []).append(place)
        calls: dict[Any, _Call] = {}
        for number, mine in of_slot.items():
            slot = self._pool.slots[number]
            shard = self._shards[number]
            part, rows = narrowed(query, mine)
            kept = self.store.tensors(part.ids, before=True) if self._needs_kept(query) else {}
            told = None if slot.holds == shard else shard
            slot.holds = shard
            slot.is_warm = slot.is_warm and told is None
            message = packed(
                Part(part, rows, kept, told, self._resolved), self._pool.begun().pickler
            )
            calls[slot.actor.answer.remote(message, models)] = slot, slot.actor, mine, died
        return calls

    def _needs_kept(self, query: Query[Any]) -> bool:
        if isinstance(query, EvaluationQuery):
            return (
                bool(self.layout.personal) or OWN in query.assignment or query.mixture is not None
            )
        if isinstance(query, DataQuery):
            of_models = bool(self.layout.personal) and bool(models_of(query))
            return of_models or bool(query.stores)
        return isinstance(query, UpdateQuery)

    def _note(self, query: Query[Any], slot: Slot, places: Sequence[int], reply: Reply) -> None:
        """Record the measurements, the stored state and the log lines of a reply."""
        if isinstance(query, UpdateQuery) and query.kind == "train":
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
        """Assign clients to actors from now on."""
        self._homes = dict(homes)
        of_slot: list[set[int]] = [set() for _ in self._pool.slots]
        for client, number in homes.items():
            of_slot[number].add(client)
        self._shards = [frozenset(some) for some in of_slot]
        self._speeds = Speeds(len(self._pool.slots), self._speeds.needed)

    def _replace(self, slot: Slot, error: Exception) -> None:
        """Start a new actor in place of a dead one; without room for it, reassign its clients."""
        if (lost := self._pool.replace(slot, error)) is not None:
            homes = {
                client: home - (home > lost) for client, home in self._homes.items() if home != lost
            }
            self._place(dealt(self._work, [1.0] * len(self._pool.slots), homes))


def taken_by(engine: str, resolved: str | None) -> str | None:
    """Return the engine with which a run continues, if another engine may have begun it.

    Parameters
    ----------
    engine
        Name of the engine that continues the run.
    resolved
        The ``engine_taken`` of the part of the run so far, or None.

    Returns
    -------
    str or None
        ``resolved``, without the prefix of engine ``ray`` where another engine continues; None if
        the engine has to be chosen again.
    """
    if resolved is None or (engine == "ray") == resolved.startswith("ray"):
        return resolved
    return None if engine == "ray" else resolved.partition(", ")[2] or None


def here(engine: str) -> str:
    """Return the engine that trains in this process: ``auto`` in place of ``ray``."""
    return "auto" if engine == "ray" else engine
