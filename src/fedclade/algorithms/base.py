"""Base classes of federated algorithms, and functions that sample the clients of a round.

An algorithm is a set of hyper-parameters with a method ``step``, which runs one round: it turns one
immutable state (clusters, models and what else must be stored in checkpoints) into the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from inspect import isfunction
from itertools import chain
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, get_args, get_origin, get_type_hints

import numpy as np
import torch
from typing_extensions import TypeVar

from fedclade import core
from fedclade.algorithms.requires import EvaluatedModels, Requires, RunFacts
from fedclade.clustering import Assignment, SplitCriteria, assign_to_root, route, walk_down
from fedclade.core import (
    KEEPS_NONE,
    OWN,
    CheckpointError,
    ClientIds,
    Clients,
    ClientWork,
    ConfigError,
    FromStored,
    LocalModel,
    LocalTraining,
    NoReply,
    ParameterTree,
    Round,
    RoundPlan,
    Updates,
    ascending_ids,
    id_array,
    require,
)

if TYPE_CHECKING:
    from fedclade.core import Event


@dataclass(frozen=True, eq=False)
class State:
    """Algorithm state: immutable between rounds and saved in checkpoints.

    An algorithm that stores more than the tree of clusters defines a frozen subclass, whose further
    fields are tensors, numbers, tuples of numbers, booleans, or ids of clients in ascending order
    (``Sequence[int]``, which are stored in an array if there are many). A field that may be missing
    from a checkpoint needs a default.

    Parameters
    ----------
    tree
        The clusters and their models. Clients train on the models of the leaves.
    """

    tree: ParameterTree

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state's fields as tensors, by name, for a checkpoint.

        The tree of clusters is left out, since checkpoints store it separately, and so are fields
        with the value None or False.
        """
        values = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name != "tree"
        }
        return {
            name: _tensor_of(value)
            for name, value in values.items()
            if value is not None and value is not False
        }

    @classmethod
    def from_tensors(cls, tree: ParameterTree, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return the state that a checkpoint stores: the inverse of :meth:`tensors`.

        Parameters
        ----------
        tree
            The tree of clusters from the checkpoint.
        tensors
            The other fields as tensors, by name.

        Raises
        ------
        CheckpointError
            If the names of the tensors do not match the fields of this class of states.
        """
        hints = get_type_hints(cls)
        needed = {
            each.name for each in fields(cls) if each.name != "tree" and each.default is MISSING
        }
        if odd := sorted(needed - set(tensors) | set(tensors) - set(hints)):
            raise CheckpointError(
                f"the state in the checkpoint is not a {cls.__name__}: these fields are in only "
                f"one of the two: {', '.join(odd)}; continue the run with the algorithm and the "
                "version of fedclade that wrote the checkpoint"
            )
        return cls(
            tree, **{name: _value_of(hints[name], tensor) for name, tensor in tensors.items()}
        )


@dataclass(frozen=True, eq=False)
class OwnState(State):
    """State of a personalized method: each client stores a model of its own on its device.

    Parameters
    ----------
    keepers
        Ids of the clients that store a model of their own, in ascending order.
    """

    keepers: tuple[int, ...]

    def rows(self, clients: Sequence[int]) -> list[int]:
        """Return for each of the ``clients`` the number of the model that it trains.

        Training queries contain these numbers. For a client that stores its own model, the number
        is the constant ``OWN``. For all other clients it is 0, which stands for the first of the
        models that the server sends.
        """
        keepers = set(self.keepers)
        return [OWN if client in keepers else 0 for client in clients]

    def keepers_after(self, updates: Updates) -> tuple[int, ...]:
        """Return the ids of the clients that store a model of their own after a round of training.

        These are the clients in ``keepers`` and all clients that replied with an update, except
        clients that reported that they have lost their stored model.
        """
        lost = {client for client, why in updates.left_out.items() if why.startswith(KEEPS_NONE)}
        return tuple(sorted({*self.keepers, *updates.ids} - lost))


S = TypeVar("S", bound=State, default=Any)
"""Type of an algorithm's state."""

OwnS = TypeVar("OwnS", bound=OwnState, default=OwnState)
"""Type of the state of an algorithm whose clients store models of their own."""


def _tensor_of(value: Any) -> torch.Tensor:
    """Convert one field of a state to a tensor, as checkpoints store it."""
    if isinstance(value, torch.Tensor):
        return value
    # NumPy converts without rounding to float32: otherwise a resumed run would differ from an
    # uninterrupted one.
    return torch.from_numpy(np.atleast_1d(value))


def _value_of(hint: Any, tensor: torch.Tensor) -> Any:
    """Convert a tensor from a checkpoint back to the type ``hint`` of a state's field."""
    hint = get_args(hint)[0] if isinstance(hint, UnionType) else hint  # "X | None": X
    if hint in (bool, int, float):
        return hint(tensor.item())
    if get_origin(hint) is Sequence:
        return ascending_ids(ClientIds(tensor.cpu().numpy()))
    return tuple(tensor.tolist()) if get_origin(hint) is tuple else tensor


@dataclass(frozen=True, eq=False)
class RoundLog:
    """Results of one round that an algorithm reports, such as losses and events.

    The field ``discrepancy`` is Σ ‖w_i − w‖ over the clients that replied, where w_i is client i's
    model after local training and w the model of its cluster after the round, in parameter units
    (FedGroup eq. 4). It is None if no client replied, or if the run streams updates: the server
    then adds each update to a sum and does not store updates of single clients.
    """

    criteria: Mapping[int, SplitCriteria]  # by node, for each cluster with replies
    losses: Mapping[int, float]  # mean training loss of each client that replied
    discrepancy: float | None = None
    events: tuple[Event, ...] = ()  # in the order in which they happened
    phase: str = "train"  # or another purpose of the round, such as "split"
    # further columns of the run's metrics
    numbers: Mapping[str, float | None] = field(default_factory=dict[str, float | None])


class Algorithm(ABC, Generic[S]):
    """Federated algorithm: its hyper-parameters, and a method that runs one round.

    Subclasses are frozen dataclasses whose fields are the hyper-parameters, named as in the paper.
    Configs name a user's own algorithm by ``module:Class``, or by an entry point
    ``fedclade.algorithms`` of its package.

    A subclass defines :meth:`init` and :meth:`step`. It may override the other methods and the two
    attributes below.

    Attributes
    ----------
    state_type
        Class of the algorithm's states: :class:`State`, or a subclass with further fields.
    requires
        Needs of the algorithm that a run checks, see :class:`Requires`; a property if they depend
        on the hyper-parameters.

    Raises
    ------
    ConfigError
        If hyper-parameters are out of range, with one line for each of them; or if a subclass
        defines a method ``cohort``, the former name of :meth:`sample_cohort`.
    """

    state_type: ClassVar[type[State]] = State
    requires = Requires()

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass with a method ``cohort``, the former name of :meth:`sample_cohort`.

        Without this check a subclass with the old name would be accepted, but its method would
        never be called.
        """
        super().__init_subclass__(**options)
        if isfunction(vars(cls).get("cohort")):
            raise ConfigError(
                f"{cls.__name__}.cohort() should be called sample_cohort(); rename the method"
            )

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check that the hyper-parameters suit a run.

        By default there must be at least as many clients as clusters. A run calls this method
        several times before its first round: when its clients and data are known, when its settings
        are checked, when its model is built, and at the start. Each call passes only the facts
        known at that time, and only the warnings of the last call are logged.

        Parameters
        ----------
        run
            Facts about the run; facts that this call does not check are None.

        Returns
        -------
        sequence of str
            Warnings, each a sentence with advice on what to change.

        Raises
        ------
        ConfigError
            If hyper-parameters do not suit the run, with one line for each of them.
        """
        name = self.requires.clusters_from
        if name and run.clients is not None:
            count: int | None = getattr(self, name)
            holds = count is None or count <= run.clients
            rule = f"at most the number of clients, {run.clients}"
            require((f"algorithm.{name}", count, holds, rule))
        return ()

    @abstractmethod
    def init(self, params: torch.Tensor, clients: Clients) -> S:
        """Return the state before the first round.

        Parameters
        ----------
        params
            The initial model as a parameter vector ``[S]``; or ``[initial_models, S]``, if the
            algorithm's :attr:`Requires.initial_models` is above 1.
        clients
            All clients of the run.

        Notes
        -----
        An algorithm that continues the clusters of a finished run (:attr:`Requires.clusters_of`)
        receives a third argument: the finished run's tree of clusters and models, with the clients
        of the present run as members.
        """

    @abstractmethod
    def step(
        self, state: S, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[S, RoundLog]:
        """Run one round with the sampled clients; return the next state and the round's log.

        Parameters
        ----------
        state
            The state before the round.
        cohort
            Ids of the clients sampled for this round.
        clients
            All clients of the run; the algorithm sends its queries through this object.
        this_round
            Number of the round, seed of its random draws, and settings of local training.
        """

    def finished(self, state: S) -> bool:
        """Return whether the run ends early: with this state, although rounds are left to run.

        By default no run ends early.
        """
        return False

    def sample_cohort(self, state: S, fraction: float, draw: np.random.Generator) -> Sequence[int]:
        """Sample the clients of a round: a fraction of every cluster, at least one client of each.

        Each cluster is sampled separately, since it is a federation of its own (CFL Algorithm 3;
        FL+HC after its clustering step). The stragglers of a split cluster, which are the clients
        that did not reply when the cluster was split, are sampled separately, too.
        """
        cohorts = (sample(members, fraction, draw) for members in groups_that_train(state))
        return tuple(chain.from_iterable(cohorts))

    def models_for(self, state: S, clients: Clients) -> EvaluatedModels:
        """Return the models with which clients are evaluated: by default their clusters' models."""
        return EvaluatedModels(nodes=state.tree.leaf_of)

    def tune(self, state: S, clients: Clients, this_round: RoundPlan) -> S:
        """Let clients prepare the models with which they are evaluated; return the next state.

        Some algorithms do a part of :meth:`step` only in rounds that are evaluated, for example
        fine-tuning. A run evaluates its last round even if no evaluation was planned for this round
        (``this_round.evaluated`` was False in ``step``). In this case the run calls this method, to
        do the part that ``step`` left out. By default the state is returned unchanged.
        """
        return state

    def tuning_events(self, state: S) -> Sequence[Event]:
        """Return the events that report the result of :meth:`tune`; by default there are none."""
        return ()

    def join(
        self, state: S, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[S, list[Event]]:
        """Add clients that join during a run to the tree of clusters, before a round.

        If the tree stores the members' updates from before each split, newcomers train, and descend
        from the root to a leaf: at each split, to the child with the most similar stored updates
        (CFL Algorithm 4). Otherwise, or if they do not reply, they become members of the root only.
        Methods that assign clients in every round, or in the first round of a client, override this
        method.

        Parameters
        ----------
        state
            The state before the round.
        ids
            Ids of the newcomers, which ``clients`` already contains.
        clients
            All clients of the run; queries go through this object.
        this_round
            Number, seed and local training of the round.

        Returns
        -------
        tuple
            The state with the newcomers, and the events that report where they joined.
        """
        tree, joined = walk_down(state.tree.with_newcomers(ids), ids, clients, this_round)
        events: list[Event] = [
            core.Joined(0, tuple(ids)),
            *(core.Joined(node, tuple(come)) for node, come in joined.items()),
        ]
        return replace(state, tree=tree), events

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Find the clusters of a finished run that suit new clients, without changing its tree.

        If the tree stores the members' updates from before each split, newcomers train, and descend
        from the root to a leaf: at each split, to the child with the most similar stored updates
        (CFL Algorithm 4). Otherwise each newcomer is assigned to the leaf whose model has the
        lowest loss on the newcomer's training data.

        Parameters
        ----------
        tree
            Tree of clusters and models of the run.
        ids
            Ids of the newcomers, which ``clients`` contains.
        clients
            The newcomers and possibly other clients; queries go through this object.
        this_round
            Number, seed and local training of the round.
        """
        return route(tree, ids, clients, this_round)


class OwnModels(Algorithm[OwnS]):
    """Base class of algorithms whose clients each store a personal model.

    Neither the server nor other clients ever receive a personal model. There is one cluster: the
    tree consists of the root, whose model is the global one.
    """

    state_type = OwnState
    requires = Requires(updates=False, signatures=False, own_models=True)

    def tuning(self, local: LocalTraining) -> LocalTraining | None:
        """Return the settings with which clients fine-tune the global model before an evaluation.

        The result is None if clients do not fine-tune, as by default. Newcomers to a finished run
        fine-tune with the same settings.

        Parameters
        ----------
        local
            The settings of local training of the run.
        """
        return None

    def models_for(self, state: OwnS, clients: Clients) -> EvaluatedModels:
        """Return the models with which clients are evaluated: the personal models they store.

        A client that stores no model yet is evaluated with the root's model.
        """
        return EvaluatedModels(nodes=state.tree.leaf_of, own=state.keepers)

    def tune(self, state: OwnS, clients: Clients, this_round: RoundPlan) -> OwnS:
        """Let all clients fine-tune a copy of the root's model and store it; return the next state.

        The state is unchanged if the round is not evaluated, or if :meth:`tuning` returns None.
        """
        if not this_round.evaluated or (local := self.tuning(this_round.local)) is None:
            return state
        tuning = replace(this_round, local=local, purpose="finetune")
        work = ClientWork(
            start=FromStored(latest=True), store=LocalModel(state=False), reply=NoReply()
        )
        root = state.tree.nodes[0].params
        ids = clients.ids
        updates = clients.train(ids, root[None], [0] * len(ids), tuning, work, sent_before=True)
        return replace(state, keepers=state.keepers_after(updates))

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Assign newcomers to the root, whose model is the only one that the server has."""
        return assign_to_root(ids)


class OneCohort(Algorithm[S]):
    """Base class of algorithms that sample the clients of a round from all clients together.

    Other algorithms sample from each cluster separately. Sampling from all clients suits methods in
    which clients may change clusters in every round.
    """

    def sample_cohort(
        self, state: S, fraction: float, draw: np.random.Generator
    ) -> tuple[int, ...]:
        """Sample the clients of a round: a fraction of all clients, at least one."""
        return sample(state.tree.nodes[0].members, fraction, draw)


def require_different_models(params: torch.Tensor, needed: int, method: str) -> torch.Tensor:
    """Check that enough initial models differ: equal models would stay equal in training.

    Parameters
    ----------
    params
        Initial models, ``[S]`` or ``[K, S]``: one parameter vector in each row.
    needed
        Number of different models that the method needs.
    method
        Name of the method, for the message.

    Returns
    -------
    Tensor
        The initial models as ``[K, S]``.

    Raises
    ------
    ConfigError
        If fewer than ``needed`` of the models are different.
    """
    models = params.view(-1, params.shape[-1])
    if (found := len(models.unique(dim=0))) < needed:
        raise ConfigError(
            f"{method} needs {needed} different initial models, got {found}; let the model's "
            "initial parameters depend on the seed"
        )
    return models


def groups_that_train(state: State) -> list[Sequence[int]]:
    """Return the groups of clients that are sampled separately for a round, a fraction of each.

    The groups are the members of each cluster that has members, and for each split cluster its
    stragglers: the members that did not reply when the cluster was split.
    """
    clusters = [leaf.members for leaf in state.tree.leaves if leaf.members]
    stragglers = [members for _, members in sorted(state.tree.stragglers.items())]
    return clusters + stragglers


def sample(members: Sequence[int], fraction: float, draw: np.random.Generator) -> tuple[int, ...]:
    """Draw a random fraction of the members, at least one, and return them in ascending order.

    The fraction is the C of FedAvg (McMahan et al. 2017).
    """
    return sample_count(members, share_of(len(members), fraction), draw)


def share_of(count: int, fraction: float) -> int:
    """Return the size of a fraction of ``count`` clients: a whole number, at least 1."""
    return max(1, round(fraction * count))


def sample_count(members: Sequence[int], count: int, draw: np.random.Generator) -> tuple[int, ...]:
    """Draw ``count`` of the members at random, without replacement, and return them sorted."""
    ids = id_array(ascending_ids(members))
    drawn = draw.choice(len(ids), count, replace=False)
    return tuple(np.sort(ids[drawn]).tolist())


def never_clusters(
    algorithm: Algorithm[Any], needed: int, run: RunFacts, setting: str
) -> tuple[str, ...]:
    """Return a warning if a run ends before the algorithm has clustered the clients.

    Without clusters, the run is plain federated averaging.

    Parameters
    ----------
    algorithm
        The algorithm.
    needed
        Number of rounds that the algorithm needs until the clients are clustered.
    run
        Facts about the run, of which only the number of rounds is used.
    setting
        Name of the hyper-parameter that the warning advises to reduce, as ``needed`` depends on it.

    Returns
    -------
    tuple of str
        The warning as the only element; empty if the run has enough rounds, or if its number of
        rounds is not known.
    """
    if run.rounds is None or run.rounds >= needed:
        return ()
    warning = (
        f"{type(algorithm).__name__} needs {needed} rounds until it has clustered the clients, but "
        f"this run has only {run.rounds}, so that it will be plain federated averaging; set more "
        f"rounds, or a smaller algorithm.{setting}"
    )
    return (warning,)
