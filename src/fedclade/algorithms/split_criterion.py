"""Interface of the criteria by which CFL splits clusters, and the classes that it exchanges.

A round of CFL (Sattler et al. 2019, Algorithm 5) trains all clusters, decides which clusters are
split into which two groups of clients, and then splits these clusters. A :class:`SplitCriterion`
makes the decision. The paper's criterion by thresholds is in :mod:`fedclade.algorithms.cfl`, and a
criterion by a statistical test in :mod:`fedclade.algorithms.rcfl.replicate_test`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

import torch

from fedclade.algorithms.base import State
from fedclade.algorithms.cluster_update import ClusterUpdate, train_clusters
from fedclade.core import Clients, Node, RoundPlan, Updates

if TYPE_CHECKING:
    from fedclade.core import Event


@dataclass(frozen=True, eq=False)
class CFLState(State):
    """State of CFL (clustered federated learning by Sattler et al. 2019) between rounds.

    Parameters
    ----------
    peaks
        For each node of the tree, the largest norm of a mean update so far in its cluster and the
        clusters above it, ``[nodes]``, in parameter units.
    stationary
        Whether every cluster is near a stationary point and will not be split, so that the run may
        end.
    parts, part_size
        Number of splits of each client's data for the replicate test, and number of examples in a
        split. 0 if the criterion needs no splits, or the clients have too few examples.
    done
        With ``stop_done_clusters``, the nodes of the clusters that no longer train; None if all
        clusters train.
    tests, evidence
        For each node, the number of replicate tests at trained models so far, and the running sum
        of their e-values, ``[nodes]``. None before the first such test.
    """

    peaks: torch.Tensor
    stationary: bool = False
    parts: int = 0
    part_size: int = 0
    done: tuple[int, ...] | None = None
    tests: torch.Tensor | None = None
    evidence: torch.Tensor | None = None


@dataclass(frozen=True)
class TestedSoFar:
    """Number and evidence of the replicate tests of one cluster so far, for its next test.

    Parameters
    ----------
    tests
        Number of tests of the cluster.
    evidence
        Running sum of the e-values of these tests (:class:`~fedclade.clustering.RepeatedTest`).
    """

    tests: int
    evidence: float


@dataclass(frozen=True, eq=False)
class ProposedSplit:
    """Proposal of a split criterion to split a cluster in two (CFL Algorithm 5, line 19).

    Parameters
    ----------
    node
        The cluster's node in the tree, with the model at which ``updates`` were made. The node
        still has this model after the split.
    updates
        The members' updates, which the tree stores to assign later clients to one of the children
        (eq. 47).
    clusters
        The two groups of clients, which together are the clients in ``updates``.
    criteria
        The numbers that decided on the split, by name. The tree stores them, and the report lists
        them.
    rejected_because
        Reason why the cluster is not split after all; empty if it is split.
    """

    node: Node
    updates: Updates
    clusters: Sequence[tuple[int, ...]]
    criteria: Mapping[str, float]
    rejected_because: str = ""


@dataclass(frozen=True, eq=False)
class ExaminedCluster:
    """Result of a split criterion for one cluster in one round.

    Parameters
    ----------
    update
        The members' updates, and their mean, by which the cluster's model moves.
    split
        The proposed split; None if the cluster is not split.
    events
        Events of the examination, such as a test's result, which the run reports before the split.
    is_done
        Whether the cluster is near a stationary point and, unless it is split, has nothing more to
        learn. With ``stop_when_stationary`` the run ends when all clusters are done. With
        ``stop_done_clusters`` a cluster that is done no longer trains.
    tested
        Number and evidence of the cluster's tests so far, if the cluster was tested in this round;
        otherwise None.
    """

    update: ClusterUpdate
    split: ProposedSplit | None = None
    events: tuple[Event, ...] = ()
    is_done: bool = False
    tested: TestedSoFar | None = None


class SplitCriterion(ABC):
    """Rule by which CFL decides which clusters are split into which two groups of clients.

    A subclass defines :meth:`examine`. It must not store anything between rounds in its attributes,
    since these are not saved in checkpoints. A frozen dataclass is best, since its fields are then
    written into the run's config.
    """

    @property
    def needs_updates(self) -> bool:
        """Whether the criterion uses whole updates of single clients (``updates.deltas``).

        A criterion that uses only signatures (short vectors for comparison), norms and means of
        updates returns False. Runs may then stream updates: add each to a sum and not store it.
        """
        return True

    @property
    def asks_for_gradients(self) -> bool:
        """Whether the criterion queries clients for gradients.

        Secure aggregation masks updates but not gradients, so it refuses such a criterion.
        """
        return False

    def init(self, state: CFLState, clients: Clients) -> CFLState:
        """Add the criterion's own values to CFL's state before the first round.

        By default the state is returned unchanged.
        """
        return state

    def train(
        self,
        state: CFLState,
        cohort: Sequence[int],
        clients: Clients,
        this_round: RoundPlan,
        *,
        weighted: bool,
    ) -> Sequence[ClusterUpdate]:
        """Train all clusters for one round (CFL Algorithm 5, lines 5 to 13).

        By default each client of the cohort trains its cluster's model on all of its data.

        Parameters
        ----------
        state
            The state before the round.
        cohort
            Ids of the clients sampled for this round.
        clients
            All clients of the run; queries go through this object.
        this_round
            Number, seed and local training of the round.
        weighted
            Whether the mean of updates weights clients by their numbers of examples.

        Returns
        -------
        sequence of ClusterUpdate
            The result of each cluster that trained, in the order of nodes. If stragglers (members
            that did not reply when their cluster was split) are in the cohort, there is one
            additional result for each split cluster with stragglers. It has the node of the split
            cluster and the stragglers' updates.
        """
        return train_clusters(state, cohort, clients, this_round, weighted=weighted)

    @abstractmethod
    def examine(
        self, cluster: ClusterUpdate, state: CFLState, clients: Clients, this_round: RoundPlan
    ) -> ExaminedCluster:
        """Decide whether and how a cluster is split in two (CFL Algorithm 5, lines 14 to 18).

        Parameters
        ----------
        cluster
            The cluster's updates in this round, an element of the result of :meth:`train`. Its
            attribute ``enough`` is False if fewer than ``min_clients`` members replied. Its method
            ``compared`` adds the members' similarities and the optimal bi-partition.
        state
            The state before the round; the cluster is ``state.tree.nodes[cluster.node]``.
        clients
            All clients of the run, for further queries.
        this_round
            Number, seed and local training of the round.
        """

    @property
    def described(self) -> str:
        """Class and settings of the criterion as a text, which is stored in a run's config."""
        kind = type(self)
        settings = ""
        if is_dataclass(self):
            settings = ", ".join(
                f"{each.name}={getattr(self, each.name)!r}" for each in fields(self)
            )
        return f"{kind.__module__}:{kind.__qualname__}({settings})"
