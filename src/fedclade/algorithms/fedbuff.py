"""FedBuff, buffered asynchronous aggregation (Nguyen et al. 2022), Algorithm 1.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba 2022. M_c clients train at any time, each from
the model as it was when the client began. Updates that arrive are collected in a buffer. When the
buffer contains K updates, the server takes one step, w ← w + η_g/K Σ s(τ_i) Δ_i, where the
staleness τ_i is the number of steps that the server has taken since client i began, and s(τ) =
1/√(1 + τ). When a client has finished, another client begins at once.

This file simulates the method with a virtual clock. One round is one full buffer of every cluster;
each cluster is a federation with its own clock, buffer and versions of its model. All updates that
arrive in a round are computed together in that round, whenever their clients began. This is
possible since the random draws of a client's training do not depend on the order in which clients
are computed. A synchronous round would take as long as the slowest client of its cohort: the
largest of :meth:`FedBuff.seconds_of`.

Where paper and the authors' simulator (FLSim) leave a choice, this file decides as follows:

- *Weights.* Means are not weighted by |D_i|, as in Algorithm 1. With K = M_c = all clients, equal
  speeds and equal sizes the method is FedAvg.
- *Divisor.* Σ s(τ_i) Δ_i is divided by K, the number of updates, as in Algorithm 1 (line 10), so
  that a stale buffer makes a shorter step. FLSim divides by Σ s(τ_i) if its reducer is a weighted
  average (the default of reducers), and does not divide if its reducer is a weighted sum (as in its
  asynchronous aggregators). ``divide_by = "staleness"`` gives the weighted average. The default
  with ``eta_g`` multiplied by K gives the weighted sum.
- *Momentum.* FLSim's server takes its step by SGD, which may have momentum: V ← m V + mean, w ← w +
  η_g V. Algorithm 1 has none, and neither has FLSim by default; ``server_momentum`` is m. Buffers
  of the model, such as BatchNorm's, are averaged without momentum.
- *Duration.* The duration of a client's training is drawn each time from a half-normal
  distribution, as FLSim does for each user (``PerUserHalfNormalDurationDistribution``); or it is
  proportional to the client's number of examples; or equal for all. Uploads take no time.
- *Selection.* The clients that begin are drawn uniformly from the members that neither train nor
  are in the buffer, so no client is in a buffer twice. A cluster with fewer than K available
  members therefore has a smaller buffer, and a small one may have fewer than M_c clients in
  training.
- *Ties.* Of simultaneous events, updates come first, in the order of the clients' ids, then the
  server's step, then the clients that begin.
- *Lost updates.* An update that is lost (dropped out, not finite) is missing from the buffer: the
  step is divided by the number of updates that arrived.
- *Local training.* A client trains with the step size and the batches of the round in which its
  update arrives, not of the round in which it began.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from fedclade.algorithms.base import Algorithm, RoundLog, State
from fedclade.algorithms.cluster_update import by_cluster, log_of
from fedclade.algorithms.requires import Requires
from fedclade.clustering import assign_to_lowest_loss
from fedclade.core import (
    Buffered,
    Clients,
    Event,
    Joined,
    ParameterTree,
    Round,
    RoundPlan,
    TooFew,
    Updates,
    checked,
    mean,
    require,
    rng,
)

Flight = tuple[float, int, int]
"""Client in training: its finish time in virtual seconds, its id, and the version of its model."""


@dataclass(frozen=True, eq=False)
class FedBuffState(State):
    """State of FedBuff between rounds: clocks, clients in training, and the models they train from.

    Values for each cluster are in the order of the leaves of the tree. Times are in virtual
    seconds.

    Parameters
    ----------
    clocks
        Current virtual time of each cluster.
    versions
        Version of each cluster's model: the number of server steps that it has taken.
    training
        Ids of the clients in training.
    begun
        For each client in ``training``, the version of its cluster's model from which it trains.
    finishes
        For each client in ``training``, the time at which it finishes.
    old
        Earlier models of clusters from which some client still trains, ``[V, S]``: one row for each
        of V models, one column for each model parameter. None if there are none.
    old_node, old_version
        Node of the cluster, and version of its model, for each row of ``old``.
    velocity
        Momentum of the server's steps for each cluster's model, ``[clusters, S]``; None if the
        server has no momentum.
    """

    clocks: tuple[float, ...]
    versions: tuple[int, ...]
    training: tuple[int, ...] = ()
    begun: tuple[int, ...] = ()
    finishes: tuple[float, ...] = ()
    old: torch.Tensor | None = None
    old_node: tuple[int, ...] = ()
    old_version: tuple[int, ...] = ()
    velocity: torch.Tensor | None = None

    @classmethod
    def of(cls, tree: ParameterTree) -> FedBuffState:
        """Return the initial state for a tree of clusters, without any client in training."""
        return cls(tree, (0.0,) * len(tree.leaves), (0,) * len(tree.leaves))


def flights_of(state: FedBuffState) -> list[list[Flight]]:
    """Return for each cluster its clients in training, as a heap ordered by finish time.

    Clients that have left the federation are dropped.
    """
    place_of = {leaf.id: place for place, leaf in enumerate(state.tree.leaves)}
    heaps: list[list[Flight]] = [[] for _ in place_of]
    for client, begun, finish in zip(state.training, state.begun, state.finishes, strict=True):
        if client in state.tree.leaf_of:
            heaps[place_of[state.tree.leaf_of[client]]].append((finish, client, begun))
    for heap in heaps:
        heapq.heapify(heap)
    return heaps


def models_of(
    state: FedBuffState, buffers: Sequence[Sequence[Flight]]
) -> tuple[torch.Tensor, dict[int, int]]:
    """Return the models from which the clients in the clusters' buffers began to train.

    Parameters
    ----------
    state
        The state before the round.
    buffers
        The clients in each cluster's buffer.

    Returns
    -------
    tuple
        The V distinct models ``[V, S]``, one parameter vector in each row; and for each client the
        row of its model.
    """
    now = dict(zip((leaf.id for leaf in state.tree.leaves), state.versions, strict=True))
    rows = dict[tuple[int, int], int]()
    models = list[torch.Tensor]()
    row_of = dict[int, int]()
    for leaf, buffer in zip(state.tree.leaves, buffers, strict=True):
        for _, client, begun in sorted(buffer, key=lambda flight: flight[1]):
            if (key := (leaf.id, begun)) not in rows:
                rows[key] = len(rows)
                models.append(
                    leaf.params if begun == now[leaf.id] else _find_old_model(state, *key)
                )
            row_of[client] = rows[key]
    return torch.stack(models) if models else state.tree.nodes[0].params[:0], row_of


def _find_old_model(state: FedBuffState, node: int, version: int) -> torch.Tensor:
    """Return the model ``[S]`` that a cluster had at an earlier version, from the state."""
    place = list(zip(state.old_node, state.old_version, strict=True)).index((node, version))
    assert state.old is not None  # since a client still trains from this model
    return state.old[place]


def next_state(
    state: FedBuffState,
    tree: ParameterTree,
    clocks: Sequence[float],
    versions: Sequence[int],
    flights: Sequence[Sequence[Flight]],
) -> FedBuffState:
    """Return the state after a round, with all models from which some client still trains.

    Parameters
    ----------
    state
        The state before the round.
    tree
        The tree after the server's steps.
    clocks, versions, flights
        Virtual time, version of the model and clients in training of each cluster, after the round.
    """
    flying = [
        (leaf.id, *flight)
        for leaf, heap in zip(tree.leaves, flights, strict=True)
        for flight in sorted(heap)
    ]
    before = dict(zip((leaf.id for leaf in tree.leaves), state.versions, strict=True))
    now = dict(zip(before, versions, strict=True))
    needed = sorted({(node, begun) for node, _, _, begun in flying if begun != now[node]})
    old = [
        state.tree.nodes[node].params
        if begun == before[node]
        else _find_old_model(state, node, begun)
        for node, begun in needed
    ]
    return FedBuffState(
        tree,
        clocks=tuple(clocks),
        versions=tuple(versions),
        training=tuple(client for _, _, client, _ in flying),
        begun=tuple(begun for _, _, _, begun in flying),
        finishes=tuple(finish for _, finish, _, _ in flying),
        old=torch.stack(old) if old else None,
        old_node=tuple(node for node, _ in needed),
        old_version=tuple(begun for _, begun in needed),
    )


@checked()
@dataclass(frozen=True, kw_only=True)
class FedBuff(Algorithm[FedBuffState]):
    """FedBuff (Nguyen et al. 2022): buffered asynchronous aggregation, on a virtual clock.

    The method is available in simulations only. All clients are in one cluster, or in the clusters
    of a finished run.

    Parameters
    ----------
    concurrency
        M_c: number of clients of a cluster that train at any time. The paper has no default; its
        experiments have up to thousands.
    buffer_size
        K: number of updates for one step of the server; 10 in the paper's experiments.
    eta_g
        The server's step size η_g, which the paper tunes.
    discount
        Exponent a of s(τ) = (1 + τ)^-a, in [0, 1]: 0.5 as in the paper; with 0 staleness has no
        effect.
    divide_by
        Divisor of the buffer's sum Σ s(τ_i) Δ_i: ``updates``, the number of updates in the buffer,
        as in Algorithm 1; or ``staleness``, the sum Σ s(τ_i), as in FLSim's weighted average.
    server_momentum
        Momentum of the server's steps, in [0, 1), as in FLSim's server optimizer; 0 in Algorithm 1.
    duration
        Duration of a client's training: ``half_normal``, ``seconds`` · |z| with z from a standard
        normal distribution; ``examples``, ``seconds`` for each example that the client processes,
        where an example counts once in each epoch; or ``equal``, always ``seconds``.
    seconds
        Virtual seconds by which ``duration`` is scaled.
    clusters_of
        Folder of a finished run of the same clients and model, whose clusters the method uses.
        None: all clients are in one cluster.
    from_scratch
        Whether the clusters of ``clusters_of`` begin with the initial model instead of the models
        of the finished run.
    """

    state_type = FedBuffState

    concurrency: int = 20
    buffer_size: int = 10
    eta_g: float = 1.0
    discount: float = 0.5
    divide_by: Literal["updates", "staleness"] = "updates"
    server_momentum: float = 0.0
    duration: Literal["half_normal", "examples", "equal"] = "half_normal"
    seconds: float = 1.0
    clusters_of: str | None = None
    from_scratch: bool = False

    def __post_init__(self) -> None:
        durations = ("half_normal", "examples", "equal")
        is_known_divisor = self.divide_by in ("updates", "staleness")
        require(
            ("algorithm.concurrency", self.concurrency, self.concurrency >= 1, "at least 1"),
            ("algorithm.buffer_size", self.buffer_size, self.buffer_size >= 1, "at least 1"),
            ("algorithm.eta_g", self.eta_g, self.eta_g > 0, "greater than 0"),
            ("algorithm.discount", self.discount, 0 <= self.discount <= 1, "in [0, 1]"),
            ("algorithm.divide_by", self.divide_by, is_known_divisor, "'updates' or 'staleness'"),
            (
                "algorithm.server_momentum",
                self.server_momentum,
                0 <= self.server_momentum < 1,
                "in [0, 1)",
            ),
            (
                "algorithm.duration",
                self.duration,
                self.duration in durations,
                " or ".join(map(repr, durations)),
            ),
            ("algorithm.seconds", self.seconds, self.seconds > 0, "greater than 0"),
            (
                *(
                    "algorithm.from_scratch",
                    self.from_scratch,
                    not self.from_scratch or self.clusters_of is not None,
                ),
                "false unless clusters_of is set",
            ),
        )

    @property
    def requires(self) -> Requires:
        """Needs of FedBuff that a run checks.

        The run must be a simulation. It starts with the clusters of the finished run
        ``clusters_of``, if this option is set.
        """
        return Requires(
            clusters_of=self.clusters_of,
            simulation="it draws the durations of training at random, on a virtual clock",
        )

    def init(
        self, params: torch.Tensor, clients: Clients, tree: ParameterTree | None = None
    ) -> FedBuffState:
        """Return the state before round 1, in one cluster or in the clusters of a finished run.

        Parameters
        ----------
        params
            The initial model ``[S]``.
        clients
            All clients of the run.
        tree
            Tree of the finished run ``clusters_of``; None if all clients are in one cluster.
        """
        if tree is None:
            return FedBuffState.of(ParameterTree.root_only(clients.ids, params))
        if self.from_scratch:  # inner nodes keep their models, at which newcomers are compared
            for leaf in tree.leaves:
                tree = tree.with_model(leaf.id, params)
        return FedBuffState.of(tree)

    def sample_cohort(
        self, state: FedBuffState, fraction: float, draw: np.random.Generator
    ) -> tuple[int, ...]:
        """Return all clients of all clusters, whatever the fraction.

        The number of clients that train at a time is limited by ``concurrency`` instead.
        """
        return tuple(client for leaf in state.tree.leaves for client in leaf.members)

    def step(
        self, state: FedBuffState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[FedBuffState, RoundLog]:
        """Run one round: fill the buffer of every cluster, then move each cluster's model once.

        The buffer and the step of the model are those of FedBuff, Algorithm 1.

        Only clients of the cohort may begin to train. Clients that are already in training may
        finish even if they are not in the cohort.
        """
        tree = state.tree
        sizes = clients.sizes
        free = set(cohort)
        flights = flights_of(state)
        clocks = list[float]()
        buffers = list[list[Flight]]()
        for place, leaf in enumerate(tree.leaves):
            members = [client for client in leaf.members if client in free]
            clock, buffer = self._fill_buffer(
                flights[place],
                members,
                state.clocks[place],
                state.versions[place],
                leaf.id,
                sizes,
                this_round,
            )
            clocks.append(clock)
            buffers.append(buffer)
        models, rows = models_of(state, buffers)
        if not rows:
            none = [TooFew(leaf.id, 0) for leaf in tree.leaves if leaf.members]
            return replace(state, clocks=tuple(clocks)), RoundLog({}, {}, events=tuple(none))
        updates = clients.train(list(rows), models, list(rows.values()), this_round)
        versions = list(state.versions)
        events = list[Event]()
        came = set(updates.ids)
        velocity = self._copy_velocity(state)
        for place, (leaf, buffer) in enumerate(zip(tree.leaves, buffers, strict=True)):
            stale = {client: versions[place] - begun for _, client, begun in buffer}
            mine = updates.select([client for client in sorted(stale) if client in came])
            if len(mine.ids) < max(1, this_round.min_clients):
                continue  # the log reports it
            step = self._average_discounted(mine, stale)
            if velocity is not None:
                step = _with_momentum(
                    step, velocity[place], self.server_momentum, mine.n_parameters
                )
            tree = tree.moved(leaf.id, self.eta_g * step)
            versions[place] += 1
            ages = [stale[client] for client in mine.ids]
            of_step = len(ages), sum(ages) / len(ages), max(ages), clocks[place], versions[place]
            events.append(Buffered(leaf.id, *of_step))
        log = log_of(by_cluster(state.tree, updates, this_round, weighted=False), events)
        numbers = _summarize_staleness(events, clocks)
        state = replace(next_state(state, tree, clocks, versions, flights), velocity=velocity)
        # No discrepancy, since clients began at several models.
        return state, replace(log, discrepancy=None, numbers=numbers)

    def join(
        self, state: FedBuffState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FedBuffState, list[Event]]:
        """Add clients that join during a run to the clusters, before a round.

        If the tree stores the members' updates from before each split, newcomers train, and descend
        from the root to a leaf: at each split, to the child with the most similar stored updates.
        Otherwise they join the leaf whose model has the lowest loss on their data.

        Returns
        -------
        tuple
            The state with the newcomers, and the events that report where they joined.
        """
        state, events = super().join(state, ids, clients, this_round)
        leaves = {leaf.id for leaf in state.tree.leaves}
        lost = [client for client in ids if state.tree.leaf_of[client] not in leaves]
        tree = assign_to_lowest_loss(state.tree, lost, clients)[0] if lost else state.tree
        found = [(client, tree.leaf_of[client]) for client in lost]
        events += [Joined(node, (client,)) for client, node in found if node in leaves]
        return replace(state, tree=tree), events

    def seconds_of(
        self, clients: Sequence[int], sizes: Mapping[int, int], this_round: Round
    ) -> list[float]:
        """Return the duration of each client's training in virtual seconds, if it begins now.

        The largest of the durations is the time that a synchronous method would take for a round
        with these clients.

        Parameters
        ----------
        clients
            Ids of the clients.
        sizes
            Number of training examples of each client.
        this_round
            The round, whose seed and number determine random durations.
        """
        if self.duration == "equal":
            return [self.seconds] * len(clients)
        if self.duration == "examples":
            return [self.seconds * this_round.local.passed(sizes[client]) for client in clients]
        draws = (
            rng.generator(this_round.seed, "duration", this_round.number, client)
            for client in clients
        )
        return [self.seconds * abs(float(draw.standard_normal())) for draw in draws]

    def _fill_buffer(
        self,
        flights: list[Flight],
        members: Sequence[int],
        clock: float,
        version: int,
        node: int,
        sizes: Mapping[int, int],
        this_round: Round,
    ) -> tuple[float, list[Flight]]:
        """Simulate a cluster until its buffer contains ``buffer_size`` updates.

        Clients begin to train and finish in the order of virtual time. The heap ``flights`` is
        changed in place: afterwards it contains the clients that are still in training.

        Parameters
        ----------
        flights
            The clients of the cluster that are in training, as a heap ordered by finish time.
        members
            Clients of the cluster that may begin to train.
        clock
            Virtual time at the start.
        version
            Version of the cluster's model.
        node
            The cluster's node.
        sizes
            Number of training examples of each client.
        this_round
            The round.

        Returns
        -------
        tuple
            The virtual time at the end, and the clients in the buffer.
        """
        flying = {client for _, client, _ in flights}
        idle = sorted(client for client in members if client not in flying)
        waiting = (
            rng.generator(this_round.seed, "begin", this_round.number, node)
            .permutation(idle)
            .tolist()
        )
        buffer = list[Flight]()
        while True:
            begin = [
                waiting.pop() for _ in range(min(len(waiting), self.concurrency - len(flights)))
            ]
            for client, seconds in zip(
                begin, self.seconds_of(begin, sizes, this_round), strict=True
            ):
                heapq.heappush(flights, (clock + seconds, client, version))
            if not flights:
                return clock, buffer
            clock = flights[0][0]
            while flights and flights[0][0] == clock:
                buffer.append(heapq.heappop(flights))
                if len(buffer) == self.buffer_size:
                    return clock, buffer

    def _copy_velocity(self, state: FedBuffState) -> torch.Tensor | None:
        """Return a copy of the momentum vectors of all clusters, ``[clusters, S]``.

        They are zeros before the first step. The result is None if the server has no momentum.
        """
        if not self.server_momentum:
            return None
        if state.velocity is not None:
            return state.velocity.clone()
        return torch.stack([torch.zeros_like(leaf.params) for leaf in state.tree.leaves])

    def _average_discounted(self, updates: Updates, stale: Mapping[int, int]) -> torch.Tensor:
        """Return the mean of a buffer's updates, discounted by staleness, ``[S]`` (line 10).

        It is Σ s(τ_i) Δ_i, where τ_i is the staleness of client i's update Δ_i, divided by the
        number of updates or by Σ s(τ_i) (``divide_by``). A robust aggregation rule, if one is set,
        replaces the mean of the discounted updates s(τ_i) Δ_i.

        Parameters
        ----------
        updates
            Updates in the buffer.
        stale
            Staleness of each client's update.
        """
        deltas = updates.required_deltas
        weights = torch.tensor(
            [(1 + stale[client]) ** -self.discount for client in updates.ids], dtype=torch.float64
        )
        divisor = float(len(updates.ids))
        if updates.has_weights:
            weights = weights * updates.weights
            divisor = float(updates.weights.sum())
        if self.divide_by == "staleness":
            divisor = float(weights.sum())
        if updates.aggregation is not None:
            discounted = weights[:, None].to(deltas) * deltas
            return mean(updates.with_columns(deltas=discounted), weighted=False) * (
                len(updates.ids) / divisor
            )
        return (weights / divisor).to(deltas) @ deltas


def _with_momentum(
    step: torch.Tensor, velocity: torch.Tensor, momentum: float, n_parameters: int
) -> torch.Tensor:
    """Add momentum to the step of a cluster's model; change the momentum vector in place.

    Only the first ``n_parameters`` entries have momentum. The others are buffers of the model, such
    as the statistics of BatchNorm, and are returned as in ``step``.

    Parameters
    ----------
    step
        Step of the model without momentum, ``[S]``.
    velocity
        Momentum vector of the cluster, ``[S]``.
    momentum
        Factor by which the momentum vector is multiplied before the step is added.
    n_parameters
        Number of entries that are parameters.
    """
    velocity[:n_parameters] = momentum * velocity[:n_parameters] + step[:n_parameters]
    return torch.cat([velocity[:n_parameters], step[n_parameters:]])


def _summarize_staleness(
    events: Sequence[Event], clocks: Sequence[float]
) -> dict[str, float | None]:
    """Return FedBuff's metrics of a round, by name.

    They are the mean and the largest staleness over all clusters (None if no cluster took a step),
    and the largest virtual time of a cluster.
    """
    steps = [event for event in events if isinstance(event, Buffered)]
    count = sum(step.clients for step in steps)
    return {
        "staleness_mean": sum(step.staleness_mean * step.clients for step in steps) / count
        if count
        else None,
        "staleness_max": max((step.staleness_max for step in steps), default=None),
        "virtual_seconds": max(clocks),
    }
