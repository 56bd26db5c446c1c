"""Base classes of federated algorithms: a step from one immutable state to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from inspect import isfunction
from itertools import chain
from types import UnionType
from typing import Any, ClassVar, Generic, Literal, Self, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVar

from fedclade.clustering import Assignment, SplitCriteria, assign_to_root, route, walk_down
from fedclade.core import (
    KEEPS_NONE,
    OWN,
    CheckpointError,
    Clients,
    ConfigError,
    DataSpec,
    Event,
    Joined,
    LocalTraining,
    Mixture,
    ParameterTree,
    Round,
    Updates,
    require,
)


@dataclass(frozen=True, eq=False)
class State:
    """Algorithm state: immutable between rounds and saved in checkpoints.

    An algorithm that stores more than the tree defines a frozen subclass. Its fields are tensors,
    numbers, tuples of numbers, or booleans. Fields that may be missing from a checkpoint have a
    default.

    Parameters
    ----------
    tree
        The clusters and their models. Clients train on the models of the leaves.
    """

    tree: ParameterTree

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields by name as tensors, without the tree and what is None or False."""
        values = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name != "tree"
        }
        return {
            name: _tensor_of(value)
            for name, value in values.items()
            if value is not None and value is not False
        }

    @classmethod
    def from_tensors(cls, tree: ParameterTree, tensors: Mapping[str, Tensor]) -> Self:
        """Return the state that :meth:`tensors` turned into these tensors.

        Raises
        ------
        CheckpointError
            If the tensors belong to a state of another class.
        """
        hints = get_type_hints(cls)
        needed = {
            each.name for each in fields(cls) if each.name != "tree" and each.default is MISSING
        }
        if odd := sorted(needed - set(tensors) | set(tensors) - set(hints)):
            raise CheckpointError(
                f"the state in the checkpoint is not a {cls.__name__}, which differs in "
                f"{', '.join(odd)}"
            )
        return cls(
            tree, **{name: _value_of(hints[name], tensor) for name, tensor in tensors.items()}
        )


@dataclass(frozen=True, eq=False)
class OwnState(State):
    """State of a method whose clients store a model of their own.

    Parameters
    ----------
    keepers
        Ids of the clients that have such a model, in ascending order.
    """

    keepers: tuple[int, ...]

    def rows(self, clients: Sequence[int]) -> list[int]:
        """Return for each client the row of the model that it trains.

        ``OWN`` stands for the client's own model. Clients without one train row 0, the first model
        that they are sent.
        """
        keepers = set(self.keepers)
        return [OWN if client in keepers else 0 for client in clients]

    def keepers_after(self, updates: Updates) -> tuple[int, ...]:
        """Return the ids of the clients that have a model of their own after training.

        Clients that report that they have lost their model are removed.
        """
        lost = {client for client, why in updates.left_out.items() if why.startswith(KEEPS_NONE)}
        return tuple(sorted({*self.keepers, *updates.ids} - lost))


S = TypeVar("S", bound=State, default=Any)
"""Type of an algorithm's state."""

OwnS = TypeVar("OwnS", bound=OwnState, default=OwnState)
"""Type of the state of an algorithm whose clients store models of their own."""


def _tensor_of(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    # Numbers keep all their digits, or a resumed run would differ from an uninterrupted one.
    return torch.from_numpy(np.atleast_1d(value))


def _value_of(hint: Any, tensor: Tensor) -> Any:
    hint = get_args(hint)[0] if isinstance(hint, UnionType) else hint  # "X | None": X
    if hint in (bool, int, float):
        return hint(tensor.item())
    return tuple(tensor.tolist()) if get_origin(hint) is tuple else tensor


@dataclass(frozen=True, eq=False)
class RoundLog:
    """Results of one round that an algorithm reports, such as losses and events.

    The discrepancy is Σ ‖w_i − w‖ over the clients that replied, where w is the model of the
    client's cluster after the round, in parameter units (FedGroup eq. 4). It is None if no client
    replied, or if the run streams updates and therefore stores no single ones.
    """

    criteria: Mapping[int, SplitCriteria]  # by node, for each cluster with replies
    losses: Mapping[int, float]  # mean training loss of each client that replied
    discrepancy: float | None = None
    events: tuple[Event, ...] = ()  # in the order in which they happened
    phase: str = "train"  # or another purpose of the round, such as "split"
    # further columns of the run's metrics
    numbers: Mapping[str, float | None] = field(default_factory=dict[str, float | None])


class Algorithm(ABC, Generic[S]):
    """A federated algorithm: its hyper-parameters, and a step.

    Subclasses are frozen dataclasses whose fields are the hyper-parameters, named as in the paper.
    Configs name a user's own algorithm by ``module:Class``, or by an entry point
    ``fedclade.algorithms`` of its package.

    Attributes
    ----------
    state_type
        Type of the states: :class:`State`, or a subclass with further fields.
    asks_for
        Information about their data that clients must report in addition to updates and scores, in
        words. Differential privacy does not cover it.
    personal
        Part of a model that stays with each client, unless the run specifies one: ``head``,
        ``body`` or ``norm``, see :class:`~fedclade.models.Parts`.
    clusters_from
        Name of the hyper-parameter that gives the number of clusters, which is at most the number
        of clients. Empty if no hyper-parameter does.
    clients_choose
        Whether each client itself states which cluster's model it trains, for example by the lowest
        loss; see :attr:`Aggregation.leave_out_opposed <fedclade.Aggregation>`.
    is_soft
        Whether every client belongs to all clusters, each to some degree. Its leaf is the cluster
        of the highest degree.
    summary
        Line for ``fedclade ls algorithms``. If empty, the first line of the docstring.
    simulated
        Reason why the algorithm runs only in simulations, in words. Empty if it also runs over a
        network.
    citation
        BibTeX for ``fedclade cite``, for a paper that is not among fedclade's own entries.

    Raises
    ------
    ConfigError
        If a hyper-parameter is out of range; one line for each. If a subclass defines a method
        ``cohort``, the former name of :meth:`sample_cohort`.
    """

    state_type: ClassVar[type[State]] = State
    asks_for: ClassVar[str] = ""
    personal: ClassVar[Literal["", "head", "body", "norm"]] = ""
    clusters_from: ClassVar[str] = ""
    simulated: ClassVar[str] = ""
    clients_choose: ClassVar[bool] = False
    is_soft: ClassVar[bool] = False
    summary: ClassVar[str] = ""
    citation: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a method ``cohort``, the former name of :meth:`sample_cohort`.

        Without this check such a method would silently never be called.
        """
        super().__init_subclass__(**options)
        if isfunction(vars(cls).get("cohort")):
            raise ConfigError(
                f"{cls.__name__}.cohort() should be called sample_cohort(); rename the method"
            )

    @property
    def needs_updates(self) -> bool:
        """Return whether a step uses the whole updates of single clients.

        An algorithm that needs only their signatures, and sums over all clients of a model, returns
        False, and allows runs that stream updates.
        """
        return True

    @property
    def compares(self) -> bool:
        """Return whether a step uses signatures of updates.

        If not, a run that streams updates stores no signatures.
        """
        return True

    @property
    def asks_for_gradients(self) -> bool:
        """Return whether clients send gradients, which secure aggregation does not mask."""
        return False

    @property
    def trains_outside_cohort(self) -> bool:
        """Return whether clients outside of a round's cohort may train.

        Central differential privacy does not account for such clients.
        """
        return False

    @property
    def compares_lengths(self) -> bool:
        """Return whether comparisons of updates depend on norms in addition to directions."""
        return False

    @property
    def discloses(self) -> tuple[str, ...]:
        """Kinds of data that the server must see of each client, in addition to updates and scores.

        The names are those that clients' policies use, such as ``subspaces``. Secure aggregation
        refuses a method with an :attr:`asks_for` for which there is no name.
        """
        return ()

    @property
    def initial_models(self) -> int:
        """Number of initial models, each drawn separately, that :meth:`init` receives."""
        return 1

    def asks(self, clients: int, fraction: float) -> str:
        """Return :attr:`asks_for` for a run with this number of clients and client fraction."""
        return self.asks_for

    def too_short(self, rounds: int) -> str:
        """Return a warning if a run of this number of rounds is too short for the method.

        The warning is a sentence with advice on what to change; by default it is empty.
        """
        return ""

    def too_few(self, clients: int) -> str:
        """Return a warning if a run has too few clients for the method.

        The warning is a sentence with advice on what to change; by default it is empty.
        """
        return ""

    def check_model(self, parameters: int, clients: int, memory: int) -> None:
        """Check that the hyper-parameters suit the size of the model and the memory.

        By default they always do.

        Parameters
        ----------
        parameters
            Number D of trained entries of a model.
        clients
            Number of clients that reply at once.
        memory
            Bytes that a round may use.

        Raises
        ------
        ConfigError
            If a hyper-parameter is too large for the model, the clients or the memory.
        """

    def check_clients(self, clients: int) -> None:
        """Check that there are enough clients for the hyper-parameters.

        By default there must be at least as many clients as clusters.

        Raises
        ------
        ConfigError
            If there are too few clients.
        """
        name = self.clusters_from
        count: int | None = getattr(self, name) if name else None
        holds = count is None or count <= clients
        require((f"algorithm.{name}", count, holds, f"at most the number of clients, {clients}"))

    def check_data(self, spec: DataSpec) -> None:
        """Check that the method supports examples of this kind; by default it supports all.

        Raises
        ------
        ConfigError
            If it does not, for example because it uses labels and the examples have none.
        """

    def check_training(self, spec: LocalTraining) -> None:
        """Check that the method supports this local training; by default it supports any.

        Raises
        ------
        ConfigError
            If it does not; one line for each setting.
        """

    def needs_mean(self, clients: int, fraction: float) -> str:
        """Return the reason why the method works with no aggregation rule but the mean.

        Empty, as by default, if it works with all rules.

        Parameters
        ----------
        clients
            Number of clients of the run; 0 if it is not known.
        fraction
            Fraction of the clients in a round.
        """
        return ""

    @property
    def begins_in(self) -> str | None:
        """Folder of a finished run in whose clusters this algorithm begins; by default None."""
        return None

    def init_in(self, tree: ParameterTree, params: Tensor, clients: Clients) -> S:
        """Return the state before the first round, in the clusters of the run :attr:`begins_in`.

        Parameters
        ----------
        tree
            Tree of that run, with the clients of this run and the models as the server sees them.
        params
            The initial model, ``[S]``.
        clients
            All clients of this run.
        """
        raise NotImplementedError(f"{type(self).__name__} does not begin in the clusters of a run")

    @abstractmethod
    def init(self, params: Tensor, clients: Clients) -> S:
        """Return the state before the first round.

        Parameters
        ----------
        params
            The initial model ``[S]``, or ``[initial_models, S]`` if there are several.
        clients
            All clients of the run.
        """

    @abstractmethod
    def step(
        self, state: S, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[S, RoundLog]:
        """Run one round with the sampled clients; return the next state and the round's log.

        Parameters
        ----------
        state
            The state before the round.
        cohort
            Ids of the clients sampled for this round.
        clients
            All clients; queries go through this object.
        this_round
            Round number, seed and local training.
        """

    def finished(self, state: S) -> bool:
        """Return whether the run ends after this state, even if rounds are left."""
        return False

    def sample_cohort(
        self, state: S, fraction: float, draw: np.random.Generator
    ) -> tuple[int, ...]:
        """Sample the clients of a round: a fraction of every cluster, at least one client of each.

        Every cluster is a federation by itself (CFL Algorithm 3; FL+HC after its clustering step).
        So are the stragglers of a node: the clients that did not reply when it was split.
        """
        cohorts = (sample(members, fraction, draw) for members in groups_that_train(state))
        return tuple(chain.from_iterable(cohorts))

    def serve(self, state: S, clients: Clients) -> Mapping[int, int]:
        """Return for each client the node whose model it is evaluated with: its cluster's."""
        return state.tree.leaf_of

    def keepers(self, state: S) -> Sequence[int]:
        """Return the clients that store a model of their own and are evaluated with it."""
        return ()

    def tuned(self, state: S, clients: Clients, this_round: Round) -> S:
        """Return the state after clients prepared the models with which they are evaluated.

        A run calls this method when it ends in a round that was not to be evaluated
        (``this_round.evaluated`` was False) but is evaluated after all. It then does the part of
        :meth:`step` that happens only in evaluated rounds. By default it changes nothing.
        """
        return state

    def mixture(self, state: S | None) -> Mixture | None:
        """Return the mixture of all leaves' models with which every client is evaluated.

        None, as by default, if each client is evaluated with one model. With ``state=None`` the
        method returns the mixture for newcomers to a finished run.
        """
        return None

    def tunes(self, spec: LocalTraining) -> LocalTraining | None:
        """Return the training that turns the server's model into a client's evaluated model.

        None, as by default, if there is no such training. Newcomers to a finished run take it, too.
        """
        return None

    def join(
        self, state: S, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[S, list[Event]]:
        """Add newcomers to the tree before a round; return the next state and the events.

        If the tree caches updates, newcomers descend to a leaf (CFL Algorithm 4). Otherwise, or if
        they do not reply, they begin at the root. Methods that assign clients in every round, or in
        a client's first one, assign newcomers in the same way.

        Parameters
        ----------
        state
            The state before the round.
        ids
            Ids of the newcomers, which are among ``clients`` by now.
        clients, this_round
            As in :meth:`step`.
        """
        tree, joined = walk_down(state.tree.with_newcomers(ids), ids, clients, this_round)
        events: list[Event] = [
            Joined(0, tuple(ids)),
            *(Joined(node, tuple(come)) for node, come in joined.items()),
        ]
        return replace(state, tree=tree), events

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Find a place in the tree for newcomers, without changing the tree.

        If the tree caches updates from before the splits, newcomers descend by their own updates
        (CFL Algorithm 4). Otherwise each gets the leaf whose model has the lowest loss on its
        training data.

        Parameters
        ----------
        tree
            Tree of a run, as the server sees it.
        ids
            Ids of the newcomers, all of them among ``clients``.
        clients, this_round
            As in :meth:`step`.
        """
        return route(tree, ids, clients, this_round)


class OwnModels(Algorithm[OwnS]):
    """An algorithm whose clients each store a model of their own.

    The server and other clients never see these models. The tree consists of the root.
    """

    state_type = OwnState

    @property
    def needs_updates(self) -> bool:
        """Return whether a step uses the whole updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Return whether a step uses signatures of updates."""
        return False

    def keepers(self, state: OwnS) -> Sequence[int]:
        """Return the clients that have a model of their own so far; others use the root's model."""
        return state.keepers

    def tuned(self, state: OwnS, clients: Clients, this_round: Round) -> OwnS:
        """Return the state after clients :meth:`tune <tunes>` the root's model for themselves.

        The state is unchanged if the round is not evaluated, or if :meth:`tunes` returns None.
        """
        if not this_round.evaluated or (spec := self.tunes(this_round.spec)) is None:
            return state
        at_home = replace(this_round, spec=spec, purpose="finetune", communicates="nothing")
        root = state.tree.nodes[0].params
        ids = clients.ids
        updates = clients.train(ids, root[None], [0] * len(ids), at_home, own=True)
        return replace(state, keepers=state.keepers_after(updates))

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Assign newcomers to the root, since all other models belong to other clients."""
        return assign_to_root(ids)


class OneCohort(Algorithm[S]):
    """An algorithm that samples a round's clients from all clients, not from each cluster.

    It suits methods in which clients may change clusters in every round.
    """

    def sample_cohort(
        self, state: S, fraction: float, draw: np.random.Generator
    ) -> tuple[int, ...]:
        """Sample the clients of a round: a fraction of all clients, at least one."""
        return sample(state.tree.nodes[0].members, fraction, draw)


def groups_that_train(state: State) -> list[tuple[int, ...]]:
    """Return the groups of clients from which a cohort is sampled.

    They are the members of each cluster that has any, and the stragglers of each node.
    """
    clusters = [leaf.members for leaf in state.tree.leaves if leaf.members]
    stragglers = [members for _, members in sorted(state.tree.stragglers.items())]
    return clusters + stragglers


def sample(members: Sequence[int], fraction: float, draw: np.random.Generator) -> tuple[int, ...]:
    """Return a random fraction of the members, at least one, in ascending order (C of FedAvg)."""
    return sample_count(members, share_of(len(members), fraction), draw)


def share_of(count: int, fraction: float) -> int:
    """Return a fraction of ``count``, rounded to the nearest integer, at least 1."""
    return max(1, round(fraction * count))


def sample_count(members: Sequence[int], count: int, draw: np.random.Generator) -> tuple[int, ...]:
    """Return ``count`` random members in ascending order."""
    return tuple(sorted(draw.choice(np.sort(members), count, replace=False).tolist()))


def never_clusters(algorithm: Algorithm[Any], needed: int, rounds: int, setting: str) -> str:
    """Return a warning if a run ends before the method has clustered the clients.

    Such a run is federated averaging.

    Parameters
    ----------
    algorithm
        The method.
    needed
        Number of rounds that it needs.
    rounds
        Number of rounds of the run.
    setting
        Hyper-parameter that reduces the number of rounds needed.

    Returns
    -------
    str
        The warning; empty if the run is long enough.
    """
    if rounds >= needed:
        return ""
    return (
        f"{type(algorithm).__name__} needs {needed} rounds until it has clustered the clients, and "
        f"this run has {rounds}: it will be federated averaging; set more rounds, or a smaller "
        f"algorithm.{setting}"
    )
