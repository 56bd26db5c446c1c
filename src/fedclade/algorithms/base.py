"""What an algorithm is: a pure step from one state to the next, with the clients passed in."""

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

# What an algorithm carries from round to round, and how a checkpoint keeps it.


@dataclass(frozen=True, eq=False)
class State:
    """All that an algorithm carries from round to round. Immutable.

    An algorithm that keeps more than the tree has a frozen subclass, whose fields are tensors,
    numbers, tuples of numbers, or true or false. Those that may be missing from a checkpoint have a
    default.

    Parameters
    ----------
    tree
        The clusters and their models; its leaves are what clients train on.
    """

    tree: ParameterTree

    def tensors(self) -> dict[str, Tensor]:
        """Return all fields but the tree as tensors by name; what is None or False is left out."""
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
        """Return the state whose :meth:`tensors` these are.

        Raises
        ------
        CheckpointError
            If they are those of another class.
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
    """Of a method whose clients each keep a model of their own: which do, in ascending order."""

    keepers: tuple[int, ...]

    def rows(self, clients: Sequence[int]) -> list[int]:
        """Return what clients go on from: those without a model of their own from the first that they are sent."""
        keepers = set(self.keepers)
        return [OWN if client in keepers else 0 for client in clients]

    def keepers_after(self, updates: Updates) -> tuple[int, ...]:
        """Return who keeps a model after some were trained, without those who say that they have lost it."""
        lost = {client for client, why in updates.left_out.items() if why.startswith(KEEPS_NONE)}
        return tuple(sorted({*self.keepers, *updates.ids} - lost))


S = TypeVar("S", bound=State, default=Any)
"""The state of an algorithm."""

OwnS = TypeVar("OwnS", bound=OwnState, default=OwnState)
"""That of one whose clients keep models of their own."""


def _tensor_of(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    # numbers in all their digits, or a resumed run would be another
    return torch.from_numpy(np.atleast_1d(value))


def _value_of(hint: Any, tensor: Tensor) -> Any:
    hint = get_args(hint)[0] if isinstance(hint, UnionType) else hint  # of what may be None
    if hint in (bool, int, float):
        return hint(tensor.item())
    return tuple(tensor.tolist()) if get_origin(hint) is tuple else tensor


@dataclass(frozen=True, eq=False)
class RoundLog:
    """What an algorithm reports of a round.

    The discrepancy is Σ ‖w_i − w‖ over the clients that answered, where w is the model of the
    client's cluster after the round, in parameter units (FedGroup eq. 4); None if nobody answered,
    or the run streams and keeps no single updates.
    """

    criteria: Mapping[int, SplitCriteria]  # of each cluster that had answers, by node
    losses: Mapping[int, float]  # mean training loss of each client that answered
    discrepancy: float | None = None
    events: tuple[Event, ...] = ()  # in the order in which they happened
    phase: str = "train"  # or what else the round was for
    # more columns of metrics
    numbers: Mapping[str, float | None] = field(default_factory=dict[str, float | None])


class Algorithm(ABC, Generic[S]):
    """A federated algorithm: its hyper-parameters, and a step.

    Subclasses are frozen dataclasses whose fields are the hyper-parameters, named as in the paper.
    One of a user's own is named in a config by ``module:Class``, or by an entry point
    ``fedclade.algorithms`` of its package.

    Attributes
    ----------
    state_type
        Of its states: :class:`State`, or a subclass of one's own with what is kept besides the
        tree.
    asks_for
        What else of their data clients must report besides updates and scores, in words;
        differential privacy does not cover it.
    personal
        Which part of a model stays with each client where a run does not say: ``head``, ``body`` or
        ``norm``, see :class:`~fedclade.models.Parts`.
    clusters_from
        The hyper-parameter that says how many clusters there are, at most as many as clients; empty
        if none does.
    clients_choose
        Whether each client itself states which cluster's model it trains, as by the lowest loss;
        see :attr:`Aggregation.leave_out_opposed <fedclade.Aggregation>`.
    is_soft
        Whether every client belongs to all clusters, each to some degree: its leaf is where it
        belongs most.
    summary
        A line for ``fedclade ls algorithms``; the docstring's first, if empty.
    simulated
        Why it runs in a simulation alone, in words; empty, if it does over a network too.
    citation
        BibTeX for ``fedclade cite``, of what is not in fedclade's own.

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
        """Refuse a method ``cohort``, the former name of :meth:`sample_cohort`, which would never be called."""
        super().__init_subclass__(**options)
        if isfunction(vars(cls).get("cohort")):
            raise ConfigError(
                f"{cls.__name__}.cohort() should be called sample_cohort(); rename the method"
            )

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients.

        One that does with their signatures, and with sums over all clients of a model, says False,
        and can stream.
        """
        return True

    @property
    def compares(self) -> bool:
        """Whether a step looks at signatures of updates; without, a stream keeps none."""
        return True

    @property
    def asks_for_gradients(self) -> bool:
        """Whether clients send gradients, which secure aggregation does not mask."""
        return False

    @property
    def trains_outside_cohort(self) -> bool:
        """Whether clients outside of a round's cohort may train, for whom central privacy does not account."""
        return False

    @property
    def compares_lengths(self) -> bool:
        """Whether the lengths of updates matter where they are compared, and not their directions alone."""
        return False

    @property
    def discloses(self) -> tuple[str, ...]:
        """What of each client's data the server must see besides updates and scores, as clients' policies name it.

        Such as ``subspaces``. Secure aggregation refuses a method that :attr:`asks_for` something
        without a name.
        """
        return ()

    @property
    def initial_models(self) -> int:
        """How many initial models, each drawn by itself, ``init`` starts from."""
        return 1

    def asks(self, clients: int, fraction: float) -> str:
        """Return :attr:`asks_for` of a run of so many clients with this fraction of them in a round."""
        return self.asks_for

    def too_short(self, rounds: int) -> str:
        """Return what a run of so few rounds misses of the method, as a sentence with advice; nothing by default."""
        return ""

    def too_few(self, clients: int) -> str:
        """Return what a run of so few clients misses of the method, as a sentence with advice; nothing by default."""
        return ""

    def check_model(self, parameters: int, clients: int, memory: int) -> None:
        """Check that the hyper-parameters suit the size of the model and the memory; by default they always do.

        Parameters
        ----------
        parameters
            Number D of trained entries of a model.
        clients
            How many clients reply at once.
        memory
            Bytes that a round may take.

        Raises
        ------
        ConfigError
            If a hyper-parameter is too large for them.
        """

    def check_clients(self, clients: int) -> None:
        """Check that there are enough clients for the hyper-parameters, by default for the number of clusters.

        Raises
        ------
        ConfigError
            If there are not.
        """
        name = self.clusters_from
        count: int | None = getattr(self, name) if name else None
        holds = count is None or count <= clients
        require((f"algorithm.{name}", count, holds, f"at most the number of clients, {clients}"))

    def check_data(self, spec: DataSpec) -> None:
        """Check that the method can go with such examples; by default it can with any.

        Raises
        ------
        ConfigError
            If it cannot, as it goes by labels where there are none.
        """

    def check_training(self, spec: LocalTraining) -> None:
        """Check that the method can go with some local training; by default it can with any.

        Raises
        ------
        ConfigError
            If it cannot; one line for each setting.
        """

    def needs_mean(self, clients: int, fraction: float) -> str:
        """Return why the method can do with no other rule than the mean, in a run of so many clients, 0 if not known.

        ``fraction`` is that of the clients in a round. Empty by default: it can do with all.
        """
        return ""

    @property
    def begins_in(self) -> str | None:
        """The folder of a finished run in whose clusters it begins; by default None."""
        return None

    def init_in(self, tree: ParameterTree, params: Tensor, clients: Clients) -> S:
        """Return the state before the first round in the clusters of a run's tree, where :attr:`begins_in` names one.

        The tree has the run's clients, and models as the server sees them; ``params`` is the
        initial model ``[S]``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not begin in the clusters of a run")

    @abstractmethod
    def init(self, params: Tensor, clients: Clients) -> S:
        """Return the state before the first round, from the initial model ``[S]``, or ``[initial_models, S]``."""

    @abstractmethod
    def step(
        self, state: S, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[S, RoundLog]:
        """Run one round with the sampled clients; return the next state and the round's log."""

    def finished(self, state: S) -> bool:
        """Whether the run is at its end, however many rounds it was given."""
        return False

    def sample_cohort(
        self, state: S, fraction: float, draw: np.random.Generator
    ) -> tuple[int, ...]:
        """Sample the clients of a round: this fraction of every cluster, and at least one of each.

        Every cluster is a federation of its own (CFL Algorithm 3; FL+HC after its clustering step).
        So are the stragglers of a node, who did not answer when it was split.
        """
        cohorts = (sample(members, fraction, draw) for members in groups_that_train(state))
        return tuple(chain.from_iterable(cohorts))

    def serve(self, state: S, clients: Clients) -> Mapping[int, int]:
        """Return the node whose model each client is served with: its cluster's."""
        return state.tree.leaf_of

    def keepers(self, state: S) -> Sequence[int]:
        """Return the clients that keep a model of their own, and are served with that in place of a node's."""
        return ()

    def tuned(self, state: S, clients: Clients, this_round: Round) -> S:
        """Return the state after clients have made what they are evaluated with of what :meth:`step` left.

        It is called where a run ends in a round that was not to be evaluated
        (``this_round.evaluated`` was False), and is evaluated after all: what a step does in
        evaluated rounds only is then done here. By default that is nothing.
        """
        return state

    def mixture(self, state: S | None) -> Mixture | None:
        """Return what the leaves' models are together, where all clients are served with all of them; by default None.

        Without a state it is that which newcomers to a finished run are served with.
        """
        return None

    def tunes(self, spec: LocalTraining) -> LocalTraining | None:
        """Return the training by which a client makes what it is served with of the server's model; by default None.

        Newcomers to a finished run do so, too.
        """
        return None

    def join(
        self, state: S, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[S, list[Event]]:
        """Take newcomers in before a round; return the next state and what happened.

        In a tree of cached updates they go down to a leaf (CFL Algorithm 4). Otherwise they begin
        at the root, and so do those that do not answer: methods that assign clients in every round,
        or at their first, do so with them.

        Parameters
        ----------
        state
            Before the round.
        ids
            The newcomers, who are among the clients now.
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
        """Find a place in the tree for newcomers; it changes nothing.

        By what the tree has: where updates from before the splits are cached, down the tree by the
        newcomers' own (CFL Algorithm 4); otherwise to the leaf whose model has the lowest loss on
        their training data.

        Parameters
        ----------
        tree
            Of a run, as the server sees it.
        ids
            The newcomers, all of them among the clients.
        clients, this_round
            As in :meth:`step`.
        """
        return route(tree, ids, clients, this_round)


class OwnModels(Algorithm[OwnS]):
    """An algorithm whose clients each keep a model of their own, which nobody else sees; the tree is the root alone."""

    state_type = OwnState

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Whether a step looks at signatures of updates."""
        return False

    def keepers(self, state: OwnS) -> Sequence[int]:
        """Return the clients that have a model of their own so far; all others are served with the root's."""
        return state.keepers

    def tuned(self, state: OwnS, clients: Clients, this_round: Round) -> OwnS:
        """Return the state after clients :meth:`tune <tunes>` the root's model for themselves, if it is evaluated."""
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
        """Give newcomers the root's model; the other models are other clients' own."""
        return assign_to_root(ids)


class OneCohort(Algorithm[S]):
    """An algorithm that samples from all clients at once: who is in which cluster may change in every round."""

    def sample_cohort(
        self, state: S, fraction: float, draw: np.random.Generator
    ) -> tuple[int, ...]:
        """Sample the clients of a round: this fraction of all, and at least one."""
        return sample(state.tree.nodes[0].members, fraction, draw)


def groups_that_train(state: State) -> list[tuple[int, ...]]:
    """Return the groups that a cohort is sampled from: clusters with members, and the stragglers of each node."""
    clusters = [leaf.members for leaf in state.tree.leaves if leaf.members]
    stragglers = [members for _, members in sorted(state.tree.stragglers.items())]
    return clusters + stragglers


def sample(members: Sequence[int], fraction: float, draw: np.random.Generator) -> tuple[int, ...]:
    """Return a random fraction of the members, at least one, in ascending order (C of FedAvg)."""
    return sample_count(members, share_of(len(members), fraction), draw)


def share_of(count: int, fraction: float) -> int:
    """Return how many clients a fraction of ``count`` clients is: at least one."""
    return max(1, round(fraction * count))


def sample_count(members: Sequence[int], count: int, draw: np.random.Generator) -> tuple[int, ...]:
    """Return ``count`` random members in ascending order."""
    return tuple(sorted(draw.choice(np.sort(members), count, replace=False).tolist()))


def never_clusters(algorithm: Algorithm[Any], needed: int, rounds: int, setting: str) -> str:
    """Return that a run of fewer rounds than it takes until clients are clustered is federated averaging."""
    if rounds >= needed:
        return ""
    return (
        f"{type(algorithm).__name__} needs {needed} rounds until it has clustered the clients, and "
        f"this run has {rounds}: it will be federated averaging; set more rounds, or a smaller "
        f"algorithm.{setting}"
    )
