"""The criterion by which CFL splits clusters: the interface, and what passes through it.

A round of CFL (Sattler et al. 2019, Algorithm 5) trains all clusters, decides which of them are to
be split, and into which two groups of clients, and then splits them. A :class:`SplitCriterion`
makes the decision. The paper's own, by thresholds, is in :mod:`fedclade.algorithms.cfl`, and a
statistical test in :mod:`fedclade.algorithms.rcfl.replicate_test`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor

from fedclade.algorithms.base import State
from fedclade.algorithms.cluster_update import ClusterUpdate, train_clusters
from fedclade.core import Clients, Event, Node, Round, Updates


@dataclass(frozen=True, eq=False)
class CFLState(State):
    """State of CFL between rounds.

    Parameters
    ----------
    peaks
        Largest norm of a mean update seen in each node's lineage, ``[nodes]``, in parameter units.
    stationary
        Whether every cluster is done, so that the run may end.
    parts, part_size
        How clients split their data for the replicate test: into ``parts`` splits of ``part_size``
        examples. 0 where the criterion needs no splits, or the clients have too few examples.
    done
        With ``stop_done_clusters``, the nodes of the clusters that train no more.
    """

    peaks: Tensor
    stationary: bool = False
    parts: int = 0
    part_size: int = 0
    done: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class ProposedSplit:
    """A cluster that is to be split in two (Algorithm 5, line 19).

    Parameters
    ----------
    node
        The cluster, with the model at which ``updates`` were made. It keeps this model.
    updates
        The members' updates, which are cached at the edges to the children (eq. 47).
    clusters
        The two groups of clients; together they are the clients in ``updates``.
    criteria
        The numbers by which the split was decided, by name. The tree keeps them, and the report
        shows them.
    rejected_because
        If not empty, the reason why the cluster is not split after all.
    """

    node: Node
    updates: Updates
    clusters: Sequence[tuple[int, ...]]
    criteria: Mapping[str, float]
    rejected_because: str = ""


@dataclass(frozen=True, eq=False)
class ExaminedCluster:
    """A cluster after its training in a round, and whether it is to be split.

    Parameters
    ----------
    update
        The members' updates, and the mean by which the cluster's model moves.
    split
        The split, or None if the cluster stays as it is.
    events
        What was found, in the order in which a run reports it, before the split.
    is_done
        Whether the cluster is near a stationary point and, unless it is split, has nothing more to
        learn. It ends a run with ``stop_when_stationary``, and the cluster's training with
        ``stop_done_clusters``.
    """

    update: ClusterUpdate
    split: ProposedSplit | None = None
    events: tuple[Event, ...] = ()
    is_done: bool = False


class SplitCriterion(ABC):
    """Rule that decides which clusters are split, and into which two groups of clients.

    A subclass defines :meth:`examine`. It keeps nothing between rounds; a frozen dataclass is best,
    since its fields are then written into the run's config.
    """

    @property
    def needs_updates(self) -> bool:
        """Return whether the criterion uses whole updates of single clients (``updates.deltas``).

        One that uses only their signatures, norms and means returns False, and allows runs that
        stream updates.
        """
        return True

    @property
    def asks_for_gradients(self) -> bool:
        """Return whether clients send gradients, which secure aggregation does not mask."""
        return False

    def init(self, state: CFLState, clients: Clients) -> CFLState:
        """Return the state before the first round; by default unchanged."""
        return state

    def train(
        self,
        state: CFLState,
        cohort: Sequence[int],
        clients: Clients,
        this_round: Round,
        *,
        weighted: bool,
    ) -> Sequence[ClusterUpdate]:
        """Train all clusters (lines 5 to 13); by default each client of the cohort on all its data.

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
        weighted
            Whether the mean weights clients by their numbers of examples.

        Returns
        -------
        sequence of ClusterUpdate
            One for each cluster that was trained, in the order of nodes, stragglers included.
        """
        return train_clusters(state, cohort, clients, this_round, weighted=weighted)

    @abstractmethod
    def examine(
        self, cluster: ClusterUpdate, state: CFLState, clients: Clients, this_round: Round
    ) -> ExaminedCluster:
        """Decide whether a cluster is split, and into which two groups (lines 14 to 18).

        Parameters
        ----------
        cluster
            The updates of the members that replied, as :meth:`train` returned it. Its ``enough`` is
            False if they are fewer than ``min_clients``. Its method ``compared`` adds their
            similarities and the optimal bi-partition.
        state
            The state before the round; the cluster is ``state.tree.nodes[cluster.node]``.
        clients, this_round
            As in :meth:`train`, for further queries.
        """

    @property
    def described(self) -> str:
        """Text that names the criterion and its settings, for a run's config."""
        kind = type(self)
        settings = ""
        if is_dataclass(self):
            settings = ", ".join(
                f"{each.name}={getattr(self, each.name)!r}" for each in fields(self)
            )
        return f"{kind.__module__}:{kind.__qualname__}({settings})"
