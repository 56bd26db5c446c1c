"""Adversaries of a simulation: their selection, their poisoned data, and their separate scores.

An adversary is a malicious client. Only the simulation knows which clients are adversaries: it
builds the middleware that falsifies their replies, and computes separate scores for honest clients
and for adversaries. No algorithm has access to this information.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import Tensor

from fedclade.channel import Adversary, Lying
from fedclade.core import (
    Ask,
    Clients,
    ConfigError,
    Evaluation,
    Mixture,
    ParameterTree,
    require,
    rng,
    shown,
)
from fedclade.data import (
    Backdoor,
    Federation,
    LabelFlip,
    Statistics,
    StatisticsQuery,
    compute_statistics,
    poison_federation,
)
from fedclade.runs.store.contents import Row, RowTable
from fedclade.tasks import FittedTask, cluster_scores, mean_score, spread

ACCURACY = "accuracy"
"""Name of the metric that measures the success of a backdoor."""


@dataclass(frozen=True, eq=False)
class Adversaries:
    """The malicious clients of a simulated run, and the scores that measure their attack.

    Parameters
    ----------
    settings
        The kind of attack and its options.
    federation
        All clients; the data of adversaries is poisoned if the attack poisons data.
    lying
        Middleware that replaces the replies of adversaries.
    task
        Task of the run, which defines the metrics by which clients are scored.
    """

    settings: Adversary
    federation: Federation
    lying: Lying
    task: FittedTask

    @classmethod
    def drawn(
        cls, adversary: Adversary | None, federation: Federation, task: FittedTask, seed: int
    ) -> Adversaries | None:
        """Draw the adversaries at random from all clients of a run, and poison their data.

        The draw depends on the seed and on the clients' keys only, not on the order of the clients.

        Returns
        -------
        Adversaries or None
            None if ``adversary`` is None or its share is 0, so that all clients are honest.

        Raises
        ------
        ConfigError
            If the true cluster from which to draw does not exist, no client would be honest, the
            data cannot be poisoned by this attack, or the task lacks the accuracy that measures the
            success of a backdoor.
        """
        if not adversary:
            return None
        liars = _draw_adversaries(adversary, federation, seed)
        if adversary.kind == "label_flip":
            held: Federation = poison_federation(
                federation, liars, LabelFlip.of(federation.pool), seed
            )
        elif adversary.kind == "backdoor":
            options = (adversary.option(name) for name in ("target", "patch", "poisoned"))
            held = poison_federation(
                federation, liars, Backdoor.of(federation.pool, *options), seed
            )
            names = [metric.name for metric in task.metrics]
            require(
                (
                    "task.metrics",
                    names,
                    ACCURACY in names,
                    f"a list with {ACCURACY!r}, the metric that measures the success of a backdoor",
                )
            )
        else:
            held = federation
        return cls(adversary, held, Lying(adversary, liars, federation.keys), task)

    def counted(self, query: StatisticsQuery) -> Tensor:
        """Add up the numbers of training examples of each label that clients report before round 1.

        The result is an int64 tensor ``[L]`` with a sum for each of the L labels. Adversaries may
        have falsified the numbers that they report.
        """

        def ask(query: StatisticsQuery) -> Statistics:
            return compute_statistics(self.federation.in_round(query.data_round), query)

        return self.lying.data(query, cast("Ask", ask)).labels

    def attacked(
        self,
        clients: Clients,
        ids: Sequence[int],
        models: Tensor,
        rows: Sequence[int],
        mixture: Mixture | None,
    ) -> float | None:
        """Measure the success of a backdoor attack on the honest clients.

        In a backdoor attack, adversaries train the model to classify every input that contains a
        trigger as one target label.

        Parameters
        ----------
        clients
            All clients; queries to them pass through all middleware.
        ids
            Clients to evaluate; adversaries among them are skipped.
        models
            K models as vectors ``[K, S]``, with a column for each of the S entries of a model.
        rows
            For each client, the row of ``models`` to evaluate.
        mixture
            Rule that combines all K models; None if each client is evaluated with a single model.

        Returns
        -------
        float or None
            Share of the honest clients' test examples that are classified as the target label after
            the trigger was added to them; examples that have the target label from the start are
            not counted. None if the attack is not a backdoor, or no such examples were evaluated.
        """
        if self.settings.kind != "backdoor":
            return None
        number = self.lying.number
        there = self.federation.in_round(-number).by_id
        asked = {
            client: row
            for client, row in zip(ids, rows, strict=True)
            if self._is_honest(client) and client in there
        }
        if not asked:
            return None
        found = clients.evaluate(
            list(asked), models, list(asked.values()), "test", data_round=-number, mixture=mixture
        )
        column = [metric.name for metric in self.task.metrics].index(ACCURACY)
        examples = found.examples.double()
        return float(found.scores[:, column] @ examples / examples.sum()) if found.ids else None

    def columns(
        self,
        evaluation: Evaluation | None,
        tree: ParameterTree,
        truth: Mapping[int, int] | None,
        success: float | None,
    ) -> Row:
        """Return the columns of ``metrics.parquet`` on the attack, with their values in one round.

        The columns are the mean scores of honest clients and of adversaries by the task's first
        metric, the adjusted Rand index of the honest clients' clusters, and the success of a
        backdoor.

        Parameters
        ----------
        evaluation
            Scores on test data; None if the round was not evaluated.
        tree
            The clusters after the round.
        truth
            True cluster of each client; None if unknown.
        success
            Result of :meth:`attacked`.
        """
        name = self.task.metrics[0].name
        scores = (
            {}
            if evaluation is None
            else dict(zip(evaluation.ids, evaluation.scores[:, 0].tolist(), strict=True))
        )
        return {
            f"{name}_honest": mean_score(
                score for client, score in scores.items() if self._is_honest(client)
            ),
            f"{name}_adversaries": mean_score(
                score for client, score in scores.items() if not self._is_honest(client)
            ),
            "ari_honest": self._honest_ari(tree, truth),
            "attack_success": success,
        }

    def summary(
        self, last: Row, rows: RowTable, tree: ParameterTree, truth: Mapping[int, int] | None
    ) -> dict[str, Any]:
        """Return the section ``adversary`` of ``summary.json``: attack, scores and clusters.

        Parameters
        ----------
        last
            The last round's row of ``metrics.parquet``.
        rows
            Rows of the last evaluation, one for each client.
        tree
            The clusters at the end of the run.
        truth
            True cluster of each client; None if unknown.
        """
        clients = np.asarray(rows.column("client"))
        honest = np.array([self._is_honest(client) for client in clients.tolist()], dtype=bool)
        scores: dict[str, dict[str, float | None]] = {}
        for metric in self.task.metrics:
            values = np.asarray(rows.column(metric.name), dtype=np.float64)
            numbers = spread(values[honest].tolist(), lower_is_better=not metric.higher_is_better)
            scores[metric.name] = {
                "honest": numbers["mean"],
                "honest_worst10": numbers["worst10_mean"],
                "adversaries": mean_score(values[~honest].tolist()),
            }
        alone, mixed, beside = self._count_clusters(tree)
        return {
            "kind": self.settings.kind,
            **({"lies": list(self.settings.lies)} if self.settings.lies else {}),
            "ids": sorted(self.lying.liars),
            "scores": scores,
            "clusters": {
                "of_adversaries": alone,
                "of_both": mixed,
                "adversaries_with_honest": beside,
            },
            "ari_honest": self._honest_ari(tree, truth),
            "attack_success": last.get("attack_success"),
        }

    def _count_clusters(self, tree: ParameterTree) -> tuple[int, int, int]:
        """Count the clusters that contain adversaries.

        Returns
        -------
        tuple
            Number of clusters with adversaries only, number of clusters with both adversaries and
            honest clients, and number of adversaries in the latter clusters.
        """
        liars = [
            sum(not self._is_honest(client) for client in leaf.members) for leaf in tree.leaves
        ]
        each = [(n, len(leaf.members)) for n, leaf in zip(liars, tree.leaves, strict=True) if n]
        both = [n for n, members in each if n < members]
        return len(each) - len(both), len(both), sum(both)

    def _honest_ari(self, tree: ParameterTree, truth: Mapping[int, int] | None) -> float | None:
        """Compute the adjusted Rand index between the clusters and true clusters of honest clients.

        The result is None if no honest client is in the tree, or the true clusters are unknown.
        """
        found = {client: leaf for client, leaf in tree.leaf_of.items() if self._is_honest(client)}
        return cluster_scores(found, truth)["ari"] if found else None

    def _is_honest(self, client: int) -> bool:
        return client not in self.lying.liars


def _draw_adversaries(adversary: Adversary, federation: Federation, seed: int) -> list[int]:
    """Draw the adversaries at random, and return their client ids.

    They are drawn from all clients or, if ``adversary.cluster`` is set, from this true cluster.
    """
    among = list(federation.ids)
    cluster = adversary.cluster
    if cluster is not None:
        truth = federation.true_clusters
        if truth is None:
            raise ConfigError(
                "adversary.cluster should be left out, since the true clusters of these clients "
                f"are not known, got {cluster}"
            )
        among = [client for client in among if truth[client] == cluster]
        known = shown(sorted(set(truth.values())))
        require(("adversary.cluster", cluster, bool(among), f"one of the true clusters, {known}"))
    number = max(1, round(adversary.share * len(among)))
    rule = f"smaller, so that at least one of the {len(federation)} clients is honest"
    require(("adversary.share", adversary.share, number < len(federation), rule))
    # Sorted by key, so that the draw does not depend on how clients are numbered.
    by_key = sorted(among, key=lambda client: federation.keys[client])
    drawn = rng.generator(seed, "adversaries").permutation(len(by_key))[:number]
    return [by_key[place] for place in drawn.tolist()]
