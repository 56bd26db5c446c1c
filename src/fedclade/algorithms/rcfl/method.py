"""Replicated clustering: clustered federated learning without thresholds.

Each client divides its data into disjoint *splits* and makes one update from each split, all at the
same model. From the similarities of these updates, within and between clients, the server finds
clusters and tests whether they are real. All clients are compared at once, so clusters are the
leaves of a star-shaped tree, and a *check* can split clusters, merge them and move single clients.
The *gain* of a partition into clusters measures how much more similar clients are within clusters
than noise would make them.

**First rounds.** In the first three rounds all clients train on equal splits of their data, and the
model moves by the mean of the splits' updates. The updates of the third round are tested
(:mod:`fedclade.clustering.part_test`), at no further cost, and clients separate into the clusters
that are found. If there are few clients, every cluster is tested separately in the next round
(:func:`look_inside`). If a round samples only some clients, all clients are queried in the first
round, and its updates are tested. If in addition there are more than a thousand clients, only the
clients of the cohort are queried in all rounds (:mod:`fedclade.algorithms.rcfl.cohorts`), and
nothing of what follows applies.

**Later checks.** Every few rounds a check queries all clients. It alternates between updates from
splits of the data, drawn again, at the mean of the clusters' models
(:mod:`fedclade.clustering.split_half`, :mod:`fedclade.clustering.parts_in_turn`), and updates from
the first round's equal splits, at the initial model. Updates of the second kind are the same as in
the first round unless the data of some client changed
(:mod:`fedclade.algorithms.rcfl.changed_data`); only then are they tested again. As long as nothing
changes, checks of the first kind become ever rarer.

**Levels.** Half of the level is for the first rounds, a quarter for tests at trained models, and a
quarter for splits that have changed. The first few tests of a kind compare p-values with 1/(j(j +
1)) of their quarter; all later tests share what is left, and add up e-values
(:mod:`fedclade.clustering.repeated_test`). So the probability that clients of one distribution are
ever separated is at most the level, however long the run. No later test of all clients takes more
than 10,000 shuffles. Splits that have not changed are not tested, and use nothing of the level.
Inside clusters that were found, each test except those of :func:`look_inside` has the whole level.

**Present clusters** stay unless other clusters have a larger gain. If present clusters have no gain
any more, and random shuffles of their clients have as large a gain, they become one cluster.

**Models of new clusters.** If a new cluster contains most members of one or more old clusters, it
starts from the mean of their models, weighted by the numbers of these members. Otherwise it starts
from the model of the old cluster from which most of its members come. For a while the models of new
clusters are pulled towards their mean (:func:`share_models`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedclade import core
from fedclade.algorithms.base import Algorithm, RoundLog, State
from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    by_cluster,
    log_of,
    move_clusters,
    place_stragglers,
    train_clusters,
)
from fedclade.algorithms.fallback import LEAF, ROOT, best_on_validation, keep_better, train_beside
from fedclade.algorithms.rcfl.changed_data import SplitSketches
from fedclade.algorithms.rcfl.cohorts import CohortTests, run_cohort_round
from fedclade.algorithms.rcfl.data_splits import HALVES, DataSplits, all_take_part, divisible_sizes
from fedclade.algorithms.rcfl.replicate_test import (
    Verdict,
    can_split_later,
    choose_check_splits,
    cluster_again_by_splits,
    cluster_by_halves,
    cluster_by_splits,
    compute_cosines,
    describe_unchanged,
    examine_node,
    get_split_signatures,
    list_clusters,
    postpone_if_too_few,
)
from fedclade.algorithms.requires import EvaluatedModels, Requires, RunFacts
from fedclade.clustering import VIEWS, Labels, RepeatedTest, is_due, is_same_partition
from fedclade.core import (
    Clients,
    Group,
    Node,
    ParameterTree,
    Round,
    RoundPlan,
    Updates,
    checked,
    require,
    row_norms,
)

if TYPE_CHECKING:
    from fedclade.core import Event

EARLY_ROUNDS = 3
"""Number of first rounds in which clients train on splits; the last round's updates are tested.

Some clusters, such as clients with swapped labels, can be found only once labels have been learnt.
"""

MANY_CLIENTS = 1000
"""Largest number of clients of which all are queried in a check, if rounds sample only some."""

FEW_CLIENTS = 12
"""Smallest number of clients for tests that shuffle whole clients.

With fewer clients there are too few different orders, and all checks shuffle splits.
"""

LARGEST_EXTRA = 0.15
"""Largest cost of checks as a share of the training so far, if rounds sample only some clients."""

LEVEL_SHARE_INSIDE = 0.01
"""Level of each test of :func:`look_inside`, as a share of the level of the run.

Most clusters are right already, and were tested from inside in the round before. At this low level
they stay whole, while the differences that remain have far lower p-values.
"""

SHARING_FADES = 0.9
"""Factor by which :func:`share_models` moves models less in each further round."""

LEAST_SHARING = 1e-3
"""Smallest share of the way to their mean by which models are moved; less has no effect."""

TOO_FAR = 3.0
"""Largest move of a cluster's model that is included in a mean of models.

It is a multiple of the move of the median cluster. The models of clusters of honest clients in one
federation are closer to each other.
"""


@dataclass(frozen=True, eq=False)
class ReplicatedState(State):
    """State of replicated clustering between rounds.

    Parameters
    ----------
    checks
        Number of checks after the first rounds.
    halves, halves_evidence
        Number of tests at trained models, and the running sum of their e-values.
    changes, changes_evidence
        Number of tests of splits that had changed, and the running sum of their e-values.
    occasions
        Number of checks at trained models that were due since data or clusters last changed. The
        larger this number, the fewer of these checks are made.
    trained
        Number of clients that trained in a round, summed over all rounds.
    asked
        Number of clients that were queried for a check in addition to the rounds' training, summed
        over all rounds.
    parts, part_size
        Number of splits of each client's data, and number of examples in a split; 0 if the data
        cannot be split.
    initial
        Initial model ``[S]``, at which checks request updates from the first round's splits; None
        if no such check is made.
    tested
        Ids of the n clients with ``sketches``.
    sketches
        Sketches ``[n, r, F]`` of the updates from these clients' splits at the initial model, when
        they were last tested; see :class:`~fedclade.algorithms.rcfl.changed_data.SplitSketches`.
        None if no splits were tested yet.
    keepers
        Ids of the clients that are evaluated with models of their own.
    on_cohorts
        Whether only the clients of the cohort are queried in a round.
    early
        With ``on_cohorts``, ids of the clients that trained before there were clusters.
    cohort_evidence
        With ``on_cohorts``, the running sum R of e-values of each node's tests, ``[nodes]``; None
        before the first test.
    """

    checks: int = 0
    halves: int = 0
    halves_evidence: float = 0.0
    changes: int = 0
    changes_evidence: float = 0.0
    occasions: int = 0
    trained: int = 0
    asked: int = 0
    parts: int = 0
    part_size: int = 0
    initial: torch.Tensor | None = None
    tested: tuple[int, ...] = ()
    sketches: torch.Tensor | None = None
    keepers: tuple[int, ...] = ()
    on_cohorts: bool = False
    early: tuple[int, ...] = ()
    cohort_evidence: torch.Tensor | None = None

    @property
    def split_sketches(self) -> SplitSketches | None:
        """Sketches of the updates that were tested last; None if no splits were tested yet."""
        return None if self.sketches is None else SplitSketches(self.tested, self.sketches)

    @property
    def splits(self) -> DataSplits:
        """Number and size of the splits of each client's data."""
        return DataSplits(self.parts, self.part_size)


@checked()
@dataclass(frozen=True, kw_only=True)
class ReplicatedCFL(Algorithm[ReplicatedState]):
    """Replicated clustering (``rcfl``): clusters found by a test on updates from splits of data.

    Each client makes several updates, each from one split of its data. A statistical test of these
    updates finds the clusters, without thresholds.

    Parameters
    ----------
    level
        Upper bound on the probability that clients which all have the same distribution are ever
        separated, in (0, 1).
    check_every
        Number of rounds between occasions for later checks. A check costs every client the training
        of a round, so that by default checks add at most a seventh to the training. Checks at
        trained models become rarer as long as no data changes. If rounds sample only some clients,
        checks that would add more than 15 % are left out.
    fallback
        Whether to train a model for all clients in addition to the clusters' models, once there are
        clusters. Each client is evaluated with whichever of the two models is better on validation
        data (:mod:`fedclade.algorithms.fallback`), so that its accuracy is at least about as high
        as with FedAvg. From the first split on, training and traffic double; for private clients
        the number of releases doubles, too.
    personalize
        Whether each client fine-tunes a copy of its cluster's model by a round of local training in
        rounds that are evaluated, and uses the copy if it is better on validation data. With
        ``fallback`` a client may fine-tune the model for all clients instead. The clusters do not
        depend on this option.
    sample
        Largest number of clients of a cluster that are tested, in runs with more than a thousand
        clients of which a round samples a fraction (:mod:`fedclade.algorithms.rcfl.cohorts`). With
        more clients a test finds smaller differences.
    sharing
        Share of the way to their mean by which the models of new clusters move after each round, in
        [0, 1). The share decreases by a tenth in each round after the clusters were found. Not used
        in runs that query only the clients of each cohort.

    Raises
    ------
    ConfigError
        If options are out of range; one line for each of them.
    """

    state_type = ReplicatedState

    level: float = 0.01
    check_every: int = 7
    fallback: bool = False
    personalize: bool = False
    sample: int = 32
    sharing: float = 0.1

    def __post_init__(self) -> None:
        require(
            ("algorithm.level", self.level, 0 < self.level < 1, "greater than 0 and less than 1"),
            ("algorithm.check_every", self.check_every, self.check_every >= 1, "at least 1"),
            ("algorithm.sample", self.sample, self.sample >= 2, "at least 2"),
            (
                "algorithm.sharing",
                self.sharing,
                0 <= self.sharing < 1,
                "at least 0 and less than 1",
            ),
        )

    @property
    def requires(self) -> Requires:
        """Needs of replicated clustering that a run checks: signatures and means of updates.

        Signatures are short vectors by which updates are compared.

        In runs with more than :data:`MANY_CLIENTS` clients, of which a round samples a fraction,
        clients also report training losses.
        """
        return Requires(
            updates=False,
            reports="training losses",
            reports_beyond=MANY_CLIENTS,
            own_models=self.personalize,
        )

    def check(self, run: RunFacts) -> Sequence[str]:
        """Return a warning if the run ends before clients can separate into clusters."""
        warnings = super().check(run)
        if run.rounds is None or run.rounds >= EARLY_ROUNDS:
            return warnings
        return (
            *warnings,
            f"rcfl separates clients after {EARLY_ROUNDS} rounds, but this run has only "
            f"{run.rounds}, so that it will be plain federated averaging; set more rounds",
        )

    def init(self, params: torch.Tensor, clients: Clients) -> ReplicatedState:
        """Return the state before round 1: one cluster, and the chosen splits of clients' data.

        A warning is logged if the test of the first rounds cannot find clusters.
        """
        state = ReplicatedState(ParameterTree.root_only(clients.ids, params))
        splits = DataSplits.choose_for_test("rcfl", clients, self.level)
        if splits is None:
            return state
        return replace(state, parts=splits.count, part_size=splits.size, initial=params.clone())

    def step(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[ReplicatedState, RoundLog]:
        """Run one round: train every cluster, and test and change the clusters if this is due.

        With ``personalize``, clients then fine-tune models of their own if the round is evaluated.
        """
        if (
            this_round.number == 1
            and len(state.tree.leaf_of) > MANY_CLIENTS
            and not all_take_part(state.tree, cohort, clients)
        ):
            state = self._choose_cohort_splits(state, clients)
        if state.on_cohorts:
            state, log = self._run_cohort_round(state, cohort, clients, this_round)
        else:
            state, log = self._run_round(state, cohort, clients, this_round)
        if not self.personalize:
            return state, log
        if this_round.evaluated:
            return self.tune(state, clients, this_round), log
        return replace(state, keepers=()), log

    def tune(
        self, state: ReplicatedState, clients: Clients, this_round: RoundPlan
    ) -> ReplicatedState:
        """Let clients fine-tune copies of models, with ``personalize``; return the next state.

        A client stores its copy if it is better on validation data.
        """
        if not self.personalize:
            return state
        starts = (LEAF,)
        if self.fallback and len(populated_leaves(state.tree)) > 1:
            starts = (ROOT, LEAF)
        return replace(state, keepers=keep_better(state.tree, starts, clients, this_round))

    def models_for(self, state: ReplicatedState, clients: Clients) -> EvaluatedModels:
        """Return the models with which clients are evaluated.

        These are the clients' own models (with ``personalize``), or the models of their clusters;
        with ``fallback``, the model on a client's path in the tree that is best on validation data.
        """
        nodes: Mapping[int, int] = state.tree.leaf_of
        if self.fallback:
            nodes = best_on_validation(state.tree, clients)
        return EvaluatedModels(nodes=nodes, own=state.keepers)

    def _run_round(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[ReplicatedState, RoundLog]:
        """Run one round in which all clients may be queried.

        In the first rounds clients train on splits of their data, and are then tested. Later they
        train on all their data, and some rounds begin with a check of the clusters.
        """
        number = this_round.number
        before = state.tree
        is_one_cluster = len(before.nodes) == 1
        state = replace(state, trained=state.trained + len(cohort))
        is_complete = all_take_part(before, cohort, clients)
        last_in_splits = EARLY_ROUNDS if is_complete else 1
        if number <= last_in_splits and state.parts and is_one_cluster:
            return self._run_round_in_splits(
                state, cohort, clients, this_round=this_round, last_in_splits=last_in_splits
            )

        events: list[Event] = []
        if number % self.check_every == 0 and self._can_afford_check(state):
            state = replace(state, checks=state.checks + 1)
            state, events = self._check(state, clients, this_round)
        looks_inside = (
            is_complete
            and state.tree is before
            and self._looks_inside(state, cohort, clients, number)
        )
        if self.fallback and len(populated_leaves(state.tree)) > 1:
            model = self._train_beside(state.tree, cohort, clients, this_round)
            state = replace(state, tree=state.tree.continued(model))

        if looks_inside:
            trained, tree, found = look_inside(
                state.tree,
                state.splits,
                cohort,
                clients=clients,
                this_round=this_round,
                level=self.level,
            )
            events += found
        else:
            trained = train_clusters(state, cohort, clients, this_round)
            tree = move_clusters(state.tree, trained)
        if events:  # for the report only: no decision depends on these similarities
            trained = [cluster.compared() for cluster in trained]
        tree, placements = place_stragglers(tree, trained)
        tree = share_models(tree, clients.weigh(clients.sizes), number, self.sharing)
        populated = populated_leaves(tree)
        # all have become one again
        if self.fallback and not is_one_cluster and len(populated) == 1:
            tree = tree.continued(populated[0].params)
        log = log_of(trained, [*events, *placements], "check" if events else "train")
        return replace(state, tree=tree), log

    def _train_beside(
        self, tree: ParameterTree, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> torch.Tensor:
        """Train the model for all clients in addition to the clusters' models; return it ``[S]``."""
        return train_beside(tree, cohort, clients, this_round)

    def _looks_inside(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, number: int
    ) -> bool:
        """Return whether this round tests for further clusters inside each cluster.

        :func:`look_inside` runs such a round. It is the round after the :data:`EARLY_ROUNDS` rounds
        in which clients train on splits of their data, if the test at the end of these rounds has
        found clusters, and if there are fewer than :data:`FEW_CLIENTS` clients.
        """
        if number != EARLY_ROUNDS + 1 or not _has_just_separated(state.tree, number):
            return False
        return len(state.splits.select_able(divisible_sizes(clients), cohort)) < FEW_CLIENTS

    def _run_round_in_splits(
        self,
        state: ReplicatedState,
        cohort: Sequence[int],
        clients: Clients,
        this_round: RoundPlan,
        last_in_splits: int,
    ) -> tuple[ReplicatedState, RoundLog]:
        """Run one of the first rounds, in which clients train on equal splits of their data.

        In the last of these rounds the updates are tested, and clients separate into the clusters
        that the test finds.
        """
        tree = state.tree
        model = tree.nodes[0].params
        able = state.splits.select_able(divisible_sizes(clients), tree.leaf_of)
        # Sketches of the first round's updates later show which clients' data has changed.
        compares = this_round.number in (1, last_in_splits)
        updates, in_splits = state.splits.train(
            tree, tree.leaf_of, cohort, clients=clients, this_round=this_round, compares=compares
        )
        cluster = ClusterUpdate.of(0, updates, this_round)
        replied = in_splits.ids
        state = replace(
            state,
            tree=move_clusters(tree, [cluster]),
            asked=state.asked + len(set(able).difference(cohort)),
        )
        if this_round.number == 1 and replied:
            sketches = SplitSketches.of(replied, get_split_signatures(in_splits))
            state = replace(state, tested=replied, sketches=sketches.sketches)
        if this_round.number < last_in_splits:
            return state, log_of([cluster])

        cluster = cluster.compared()
        # Clients that did not reply are not in this test. The next check by splits counts clients
        # without sketches as changed.
        state = _keep_sketches(state, replied)
        postponed = postpone_if_too_few(0, len(replied), this_round)
        if postponed:
            return state, log_of([cluster], [postponed], "check")
        level = self.level / 2
        verdict = cluster_by_splits(
            compute_cosines(in_splits),
            state.parts,
            level,
            this_round.generator("shuffles"),
            level_inside=self.level,
        )
        if not verdict.labels.any():
            event = verdict.make_event(core.Tested, 0, replied)
            return state, log_of([cluster], [event], "check")
        state, events = self._regroup(state, verdict, in_splits, model=model, this_round=this_round)
        return state, log_of([cluster], events, "check")

    def _check(
        self, state: ReplicatedState, clients: Clients, this_round: RoundPlan
    ) -> tuple[ReplicatedState, list[Event]]:
        """Run a check: query all clients for updates from splits, and find the clusters again.

        Checks alternate between new splits at a trained model, and the first round's splits at the
        initial model. With few clients, all checks are of the second kind.

        Returns
        -------
        tuple
            The next state, and the events of the check.
        """
        few_clients = len(state.tested) < FEW_CLIENTS
        if state.initial is not None and (few_clients or state.checks % 2 == 0):
            return self._check_first_splits(state, state.initial, clients, this_round)
        state = replace(state, occasions=state.occasions + 1)
        # Only checks by the first round's splits detect whether data changed.
        if state.initial is not None and not is_due(state.occasions):
            return state, []
        return self._check_trained_model(state, clients, this_round)

    def _check_first_splits(
        self, state: ReplicatedState, model: torch.Tensor, clients: Clients, this_round: RoundPlan
    ) -> tuple[ReplicatedState, list[Event]]:
        """Run a check by updates from the first round's splits, at the initial model.

        The updates are tested only if the data of some client changed since it was last tested, or
        if some client was not tested yet. If a client has left, this alone is no reason to test.

        Returns
        -------
        tuple
            The next state, and the events of the check.
        """
        tree = state.tree
        query = replace(this_round, number=1)  # the same random draws as in the first round
        able = state.splits.select_able(divisible_sizes(clients), tree.leaf_of)
        postponed = postpone_if_too_few(0, len(able), this_round)
        if postponed:
            return state, [postponed]
        updates = state.splits.request_updates(clients, able, model[None], query)
        state = replace(state, asked=state.asked + len(able))
        postponed = postpone_if_too_few(0, len(updates.ids), this_round)
        if postponed:
            return state, [postponed]

        cosines = compute_cosines(updates)
        present = _number_leaves(tree, updates.ids)
        repeated = self._get_repeated_test(state.changes, state.changes_evidence, views=VIEWS)
        now = SplitSketches.of(updates.ids, get_split_signatures(updates))
        known = state.split_sketches
        if known is not None and not known.find_changed(now):
            verdict = describe_unchanged(cosines, state.parts, present, repeated)
            return state, [verdict.make_event(core.Checked, 0, updates.ids)]

        verdict = cluster_again_by_splits(
            cosines,
            state.parts,
            present,
            repeated=repeated,
            generator=this_round.generator("shuffles"),
            level_inside=self.level,
        )
        sketches = now if known is None else known.select(tree.leaf_of).update(now)
        state = replace(state, tested=sketches.ids, sketches=sketches.sketches, occasions=0)
        if verdict.repeated is not None:
            state = replace(
                state, changes=verdict.repeated.tests, changes_evidence=verdict.repeated.total
            )
        return self._regroup(state, verdict, updates, model=model, this_round=this_round)

    def _check_trained_model(
        self, state: ReplicatedState, clients: Clients, this_round: RoundPlan
    ) -> tuple[ReplicatedState, list[Event]]:
        """Run a check by updates from new splits, at the mean of the clusters' models.

        No client is queried if there is one cluster, and no later test could split it.

        Returns
        -------
        tuple
            The next state, and the events of the check.
        """
        tree = state.tree
        repeated = self._get_repeated_test(state.halves, state.halves_evidence)
        splits, able = choose_check_splits(divisible_sizes(clients), tree.leaf_of, repeated)
        postponed = postpone_if_too_few(0, len(able), this_round)
        if postponed:
            return state, [postponed]
        has_clusters = len(populated_leaves(tree)) > 1
        if not has_clusters and not can_split_later(repeated, len(able), splits.count):
            return state, []  # no reply could change anything
        query = replace(this_round, purpose="replicate")
        model = average_models(tree, clients.weigh(clients.sizes))
        updates = splits.request_updates(
            clients,
            able,
            model[None],
            query,
            # The model of a single cluster is sent for training in this round anyway.
            sent_before=len(tree.leaves) == 1,
        )
        state = replace(state, asked=state.asked + len(able))
        postponed = postpone_if_too_few(0, len(updates.ids), this_round)
        if postponed:
            return state, [postponed]

        verdict = cluster_by_halves(
            updates, _number_leaves(tree, updates.ids), repeated, this_round.generator("shuffles")
        )
        if verdict.repeated is not None:
            state = replace(
                state, halves=verdict.repeated.tests, halves_evidence=verdict.repeated.total
            )
        return self._regroup(state, verdict, updates, model=model, this_round=this_round)

    def _get_repeated_test(self, tests: int, total: float, *, views: int = 1) -> RepeatedTest:
        """Return the state of a series of tests of one kind, which has a quarter of the level.

        Parameters
        ----------
        tests
            Number of tests of this kind so far.
        total
            Running sum of their e-values.
        views
            Number of views (kinds of similarities of updates) in which a test is made; each has its
            own p-value.
        """
        return RepeatedTest(self.level / 4, tests=tests, total=total, views=views)

    def _regroup(
        self,
        state: ReplicatedState,
        verdict: Verdict,
        updates: Updates,
        model: torch.Tensor,
        this_round: Round,
    ) -> tuple[ReplicatedState, list[Event]]:
        """Replace the present clusters by the clusters of a check's verdict, if they differ.

        Parameters
        ----------
        state
            The state before.
        verdict
            Result of the check.
        updates
            The clients' updates on which the verdict is based.
        model
            Model ``[S]`` at which the updates were made.
        this_round
            The round.

        Returns
        -------
        tuple
            The next state, and the event that reports the check.
        """
        before = np.array([state.tree.leaf_of[client] for client in updates.ids])
        if is_same_partition(before, verdict.labels):
            return state, [verdict.make_event(core.Checked, 0, updates.ids)]
        tree = regroup(
            state.tree,
            list_clusters(updates.ids, verdict.labels),
            updates,
            model,
            round_number=this_round.number,
            criteria=verdict.criteria,
        )
        if self.fallback:
            populated = populated_leaves(tree)
            if len(state.tree.nodes) == 1:
                # The root's own model, for all clients, starts from the model trained so far.
                tree = tree.continued(tree.nodes[1].params)
            elif len(populated) == 1:  # one cluster again, which continues with the root's model
                tree = tree.with_model(populated[0].id, tree.nodes[0].model)
        # New clusters train new models, at which further differences may show soon, so checks
        # become frequent again. The evidence of both kinds of tests was about the old clusters.
        state = replace(state, tree=tree, occasions=0, halves_evidence=0.0, changes_evidence=0.0)
        return state, [verdict.make_event(core.Regrouped, 0, updates.ids)]

    def _choose_cohort_splits(self, state: ReplicatedState, clients: Clients) -> ReplicatedState:
        """Choose the splits for a run that queries only the clients of each cohort."""
        splits = (
            DataSplits.choose_for_cohorts(divisible_sizes(clients), self.level, self.sample)
            or HALVES
        )
        return replace(
            state, on_cohorts=True, parts=splits.count, part_size=splits.size, initial=None
        )

    def _run_cohort_round(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[ReplicatedState, RoundLog]:
        """Run one round in which only the clients of the cohort are queried.

        See :mod:`fedclade.algorithms.rcfl.cohorts`.
        """
        tests = CohortTests(state.splits, self.sample, self.level, self.check_every)
        before = state.tree
        cohort_round = run_cohort_round(
            before,
            state.early,
            cohort,
            tests=tests,
            evidence=state.cohort_evidence,
            clients=clients,
            this_round=this_round,
        )
        tree, trained = cohort_round.tree, cohort_round.trained
        state = replace(state, cohort_evidence=cohort_round.evidence)
        had_clusters = len(before.nodes) > 1
        if len(tree.nodes) == 1:
            state = replace(state, early=tuple(sorted({*state.early, *cohort})))
        elif self.fallback and had_clusters:
            tree = tree.continued(self._train_beside(before, cohort, clients, this_round))
        elif self.fallback and trained[0].step is not None:
            # In the round of its split the root has already been trained.
            tree = tree.continued(before.nodes[0].params + trained[0].step)
        return replace(state, tree=tree), log_of(trained, cohort_round.events)

    def _can_afford_check(self, state: ReplicatedState) -> bool:
        """Return whether the cost of all checks so far, with another one, is within its limit.

        The limit is a share of the training so far.
        """
        # 1.05: if all clients take part in every round, checks are as frequent as specified.
        largest = max(LARGEST_EXTRA, 1.05 / self.check_every)
        return state.asked + len(state.tree.leaf_of) <= largest * state.trained


def _keep_sketches(state: ReplicatedState, clients: Collection[int]) -> ReplicatedState:
    """Remove the sketches of all clients from the state, except those of ``clients``."""
    known = state.split_sketches
    kept = None if known is None else known.select(clients)
    if kept is None or not kept.ids:
        return replace(state, tested=(), sketches=None)
    return replace(state, tested=kept.ids, sketches=kept.sketches)


def _number_leaves(tree: ParameterTree, clients: Sequence[int]) -> Labels:
    """Return a number from 0 for the present cluster of each of n clients, ``[n]``."""
    leaves = [tree.leaf_of[client] for client in clients]
    return np.unique(leaves, return_inverse=True)[1]


# Second look at new clusters, which may contain clients that should be separated, too.
#
# The first rounds find clusters once labels have been learnt; if a model learns slowly, some true
# clusters are still together. With many clients, later checks separate them. With few clients,
# shuffling whole clients has too few outcomes, and splits at the initial model give the same result
# as before. So if there are few clients, and they have just separated, they train in splits for one
# more round, each from its cluster's model, and every cluster is tested separately. This costs no
# further training. Except for the choice of its members, a cluster's model depends on all splits of
# the members alike, so the test is exact.


def look_inside(
    tree: ParameterTree,
    splits: DataSplits,
    cohort: Sequence[int],
    clients: Clients,
    this_round: RoundPlan,
    *,
    level: float,
) -> tuple[list[ClusterUpdate], ParameterTree, list[Event]]:
    """Run a round in which each cluster is tested, and divided if the test finds groups in it.

    The members of clusters with several clients train on splits of their data, from the cluster's
    model, and the test compares their updates. Clusters of one client train on all data.

    Parameters
    ----------
    tree
        The tree before the round.
    splits
        Number and size of the splits of a client's data.
    cohort
        Ids of the clients sampled for this round.
    clients
        All clients of the run.
    this_round
        Number, seed and local training of the round.
    level
        Level of the run, of which each test has the share :data:`LEVEL_SHARE_INSIDE`.

    Returns
    -------
    tuple
        The round's result for each cluster, the tree after the round, and the event of each test.
    """
    several = [leaf for leaf in tree.leaves if len(leaf.members) > 1]
    members = [client for leaf in several for client in leaf.members]
    updates, in_splits = splits.train(
        tree, members, cohort, clients=clients, this_round=this_round, compares=True
    )
    trained = by_cluster(tree, updates, this_round)
    tree = move_clusters(tree, trained)
    level_inside = LEVEL_SHARE_INSIDE * level
    events: list[Event] = []
    for leaf in several:
        replied = [client for client in leaf.members if client in in_splits.ids]
        own_updates = in_splits.select(replied)
        postponed = postpone_if_too_few(leaf.id, len(own_updates.ids), this_round)
        if postponed:
            events.append(postponed)
            continue
        verdict = examine_node(
            leaf.id,
            own_updates,
            splits.count,
            level_inside,
            this_round=this_round,
            level_inside=level_inside,
        )
        is_divided = bool(verdict.labels.any())
        kind = core.Regrouped if is_divided else core.Tested
        event = verdict.make_event(kind, leaf.id, own_updates.ids)
        events.append(event)
        if is_divided:
            tree = divide(tree, leaf.id, event.clusters, this_round.number)
    return trained, tree, events


def _has_just_separated(tree: ParameterTree, number: int) -> bool:
    """Return whether all clusters were found in the last round, and any has several members.

    Parameters
    ----------
    tree
        The tree before the round.
    number
        Number of the round.
    """
    are_new = all(leaf.born == number - 2 for leaf in tree.leaves)  # trained in round number - 1
    return are_new and any(len(leaf.members) > 1 for leaf in tree.leaves)


# Forming new clusters in the star, and their models.


def regroup(
    tree: ParameterTree,
    clusters: Sequence[tuple[int, ...]],
    updates: Updates,
    model: torch.Tensor,
    *,
    round_number: int,
    criteria: Mapping[str, float],
) -> ParameterTree:
    """Replace the clusters of a star-shaped tree by new clusters.

    Parameters
    ----------
    tree
        The tree before.
    clusters
        Members of each new cluster.
    updates
        The members' updates by which the clusters were found; the tree stores their signatures.
    model
        Model ``[S]`` at which the updates were made.
    round_number
        Number of the round.
    criteria
        Numbers that decided on the clusters, by name.
    """
    groups: list[Group] = []
    for members in clusters:
        leaf, start = _find_start(tree, members)
        groups.append(Group(members, leaf, start, updates.signatures_of(members)))
    return tree.regrouped(groups, params=model, round_number=round_number, criteria=criteria)


def divide(
    tree: ParameterTree, node: int, clusters: Sequence[tuple[int, ...]], round_number: int
) -> ParameterTree:
    """Divide one cluster of a star-shaped tree into several clusters.

    Members' signatures that the tree stores are passed on to their new clusters. Members of the old
    cluster that are in none of the new clusters become members of the root only.

    Parameters
    ----------
    tree
        The tree before.
    node
        The cluster's leaf.
    clusters
        Members of each new cluster.
    round_number
        Number of the round.
    """
    others = [leaf for leaf in tree.leaves if leaf.id != node and leaf.members]
    groups = [Group(leaf.members, leaf.id, leaf.params, leaf.cached) for leaf in others]
    divided = tree.nodes[node]
    for members in clusters:
        cached = None
        if divided.cached is not None:
            cached = divided.cached[[divided.members.index(client) for client in members]]
        leaf, start = _find_start(tree, members)
        groups.append(Group(members, leaf, start, cached))
    return tree.regrouped(groups, round_number=round_number)


def _find_start(tree: ParameterTree, members: Sequence[int]) -> tuple[int, torch.Tensor]:
    """Choose the first model of a new cluster, and the old cluster whose leaf it continues.

    Returns
    -------
    tuple
        The leaf of the old cluster, 0 if the new cluster continues no old one; and the model
        ``[S]``.
    """
    origins = Counter(tree.leaf_of[client] for client in members)
    taken_over = {
        leaf: n for leaf, n in origins.items() if leaf and 2 * n > len(tree.nodes[leaf].members)
    }
    if not taken_over:
        most_common = origins.most_common(1)[0][0]
        return 0, tree.nodes[most_common].params
    weights = torch.tensor([float(count) for count in taken_over.values()])
    models = torch.stack([tree.nodes[leaf].params for leaf in taken_over])
    largest = max(taken_over, key=lambda leaf: taken_over[leaf])
    return largest, (weights / weights.sum()).to(models) @ models


def average_models(tree: ParameterTree, sizes: Mapping[int, float]) -> torch.Tensor:
    """Return the mean of the clusters' models ``[S]``, weighted by their members' examples.

    A cluster is left out if its model has moved more than :data:`TOO_FAR` times as far from the
    root's model as the model of the median cluster. If malicious clients have a cluster of their
    own, its model can be arbitrary, and no other cluster should learn from it. The median is
    weighted by examples, over the clusters whose models have moved.

    Parameters
    ----------
    tree
        The tree of clusters.
    sizes
        Number of training examples of each client.
    """
    leaves = populated_leaves(tree)
    weights = torch.tensor([_sum_examples(leaf, sizes) for leaf in leaves])
    models = torch.stack([leaf.params for leaf in leaves])
    moved = row_norms(models, tree.nodes[0].params)
    distances, order = moved.sort()
    examples_up_to = weights.where(moved > 0, 0.0)[order].cumsum(0)
    below_median = int((2 * examples_up_to <= examples_up_to[-1]).sum())
    median = distances[min(below_median, len(leaves) - 1)]
    weights = weights.where(moved <= TOO_FAR * median, 0.0)
    return (weights / weights.sum()).to(models) @ models


def share_models(
    tree: ParameterTree, sizes: Mapping[int, float], number: int, sharing: float
) -> ParameterTree:
    """Move the models of new clusters towards the mean of all clusters' models, after a round.

    For a while clusters thereby continue to learn together what their data has in common, although
    it is not known which part of a model represents it. In the first round in which a
    new cluster trains, its model moves by the share ``sharing`` of the way to the mean. In each
    further round the share is a tenth smaller than in the round before.

    Parameters
    ----------
    tree
        The tree after the round.
    sizes
        Number of training examples of each client.
    number
        Number of the round.
    sharing
        Share of the way to the mean in the first round, in [0, 1).
    """
    shares: dict[int, float] = {}
    for leaf in tree.leaves:
        if leaf.members and leaf.parent is not None:
            shares[leaf.id] = sharing * SHARING_FADES ** (number - leaf.born - 1)
    if len(shares) < 2 or max(shares.values()) < LEAST_SHARING:
        return tree
    joint = average_models(tree, sizes)
    for node, share in shares.items():
        model = tree.nodes[node].params
        tree = tree.with_model(node, model + share * (joint - model))
    return tree


def _sum_examples(leaf: Node, sizes: Mapping[int, float]) -> float:
    """Return the number of training examples of a cluster's members."""
    return float(sum(sizes[client] for client in leaf.members))


def populated_leaves(tree: ParameterTree) -> list[Node]:
    """Return the leaves of the tree that have members: the present clusters."""
    return [leaf for leaf in tree.leaves if leaf.members]
