"""Classes by which an algorithm states its requirements, and a run the facts about itself.

:class:`Requires` states what an algorithm needs from a run, :class:`RunFacts` what is known about a
run, and :class:`EvaluatedModels` the model with which each client is evaluated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from fedclade.core import Aggregation, DataSpec, LocalTraining, Mixture


@dataclass(frozen=True, kw_only=True)
class Requires:
    """Needs of an algorithm that a run must fulfil, and further facts about the algorithm.

    The defaults describe an algorithm that may use all of each client's update, and needs no other
    information from clients.

    Parameters
    ----------
    updates
        Whether the algorithm uses the whole updates of single clients. If False, it uses only
        signatures (short vectors by which updates are compared) and sums of updates. The run may
        then stream updates: add each one to a sum when it arrives, and not store it.
    signatures
        Whether the algorithm compares clients by the signatures of their updates. If False, a run
        that streams updates stores no signatures.
    lengths
        Whether comparisons of updates depend on their norms in addition to their directions.
    gradients
        Whether clients send gradients, which secure aggregation does not mask.
    clients_outside_cohort
        Whether clients that were not sampled for a round may train in it. Central differential
        privacy does not account for such clients.
    reports
        Information about their data that clients must report in addition to updates and scores, as
        a phrase for messages, such as ``training losses``. Differential privacy does not protect
        this information.
    reports_beyond
        Number of clients above which clients send ``reports``, provided that a round samples only a
        fraction of them. None: clients send ``reports`` in all runs.
    disclosures
        Names of the kinds of information in ``reports``, as clients' policies name them, such as
        ``subspaces``. With secure aggregation a client sends this information in clear only if its
        policy permits these names. A method that has ``reports`` but no name in ``disclosures`` is
        therefore refused under secure aggregation.
    data_queries
        Kinds of the queries about clients' data that the algorithm sends, such as ``subspaces``, in
        addition to training and evaluation. A plain Flower ClientApp does not answer them.
    initial_models
        Number of initial models that :meth:`Algorithm.init <fedclade.Algorithm.init>` receives,
        each with separately drawn parameters.
    clusters_of
        Folder of a finished run whose clusters the algorithm starts with; None if the algorithm
        does not start with the clusters of another run.
    personal
        Part of a model that stays with each client, unless the run specifies another part:
        ``head``, ``body`` or ``norm``, see :class:`~fedclade.models.Parts`.
    own_models
        Whether clients store models of their own, with which they are evaluated.
    mixture
        Mixture of all clusters' models with which a newcomer to a finished run is evaluated; None
        if each client is evaluated with a single model.
    soft_clusters
        Whether every client belongs to all clusters, with a weight for each of them. In the tree, a
        client is a member of the cluster with its highest weight.
    clients_choose
        Whether each client itself states which cluster's model it trains, for example the model
        with the lowest loss; see :attr:`Aggregation.leave_out_opposed <fedclade.Aggregation>`.
    clusters_from
        Name of the hyper-parameter that gives the number of clusters, which must not exceed the
        number of clients. Empty if no hyper-parameter gives it.
    plans_rounds
        Whether decisions of the algorithm depend on the number of rounds of the run. A run that is
        continued for more rounds then differs from a run that had these rounds from the start.
    server_steps
        Whether the algorithm moves models by mean updates, so that a server optimizer can make the
        steps (:class:`~fedclade.ServerOptimizer`).
    simulation
        Reason why the algorithm runs only in simulations, as a clause for messages. Empty if it
        also runs over a network.
    """

    updates: bool = True
    signatures: bool = True
    lengths: bool = False
    gradients: bool = False
    clients_outside_cohort: bool = False
    reports: str = ""
    reports_beyond: int | None = None
    disclosures: tuple[str, ...] = ()
    data_queries: tuple[str, ...] = ()
    initial_models: int = 1
    clusters_of: str | None = None
    personal: Literal["", "head", "body", "norm"] = ""
    own_models: bool = False
    mixture: Mixture | None = None
    soft_clusters: bool = False
    clients_choose: bool = False
    clusters_from: str = ""
    plans_rounds: bool = False
    server_steps: bool = True
    simulation: str = ""

    def reports_in(self, clients: int, fraction: float) -> str:
        """Return the information that clients must report in a run of this size, as a phrase.

        The result is the field ``reports``. But if ``reports_beyond`` is set, the result is the
        empty string for runs with at most ``reports_beyond`` clients, and for runs in which all
        clients take part in every round.

        Parameters
        ----------
        clients
            Number of clients of the run; 0 if it is not known.
        fraction
            Fraction of the clients that is sampled for a round.
        """
        if self.reports_beyond is None:
            return self.reports
        return self.reports if clients > self.reports_beyond and fraction < 1 else ""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run, by which an algorithm checks that its hyper-parameters suit the run.

    A fact is None if it is not known yet.

    Parameters
    ----------
    clients
        Number of clients.
    client_fraction
        Fraction of the clients that is sampled for a round.
    rounds
        Number of rounds.
    data
        Properties of the clients' examples: the shapes of inputs and outputs, and the task.
    local
        Settings of local training.
    aggregation
        Settings of the aggregation of updates.
    parameters
        Number of trained parameters of the model.
    replies
        Number of clients whose replies to one query the server has in memory at the same time.
    memory
        Number of bytes that a round may use.
    """

    clients: int | None = None
    client_fraction: float | None = None
    rounds: int | None = None
    data: DataSpec | None = None
    local: LocalTraining | None = None
    aggregation: Aggregation | None = None
    parameters: int | None = None
    replies: int | None = None
    memory: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedModels:
    """Model with which each client is evaluated: its cluster's, its own, or a mixture.

    Parameters
    ----------
    nodes
        For each client, the node of the tree whose model is evaluated.
    own
        Ids of clients that store a model of their own, and are evaluated with it instead. They must
        follow from the algorithm's state alone, without queries. An algorithm that uses this
        parameter sets :attr:`Requires.own_models`.
    mixture
        Mixture of all clusters' models with which every client is evaluated; ``nodes`` then only
        names the clients' clusters. None if each client is evaluated with a single model. An
        algorithm that uses this parameter sets :attr:`Requires.mixture`, too.
    """

    nodes: Mapping[int, int]
    own: Collection[int] = ()
    mixture: Mixture | None = None
