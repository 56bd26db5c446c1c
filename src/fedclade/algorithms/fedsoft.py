"""FedSoft, soft clustering of clients (Ruan and Joe-Wong 2022, AAAI), Algorithm 1.

Source: arXiv:2112.06053.

A client's data is a mixture of the data of K clusters. Its importance weight u_ik is the share of
its examples for which the k-th centre, the model of cluster k, has the lowest loss. In each round
every cluster draws S clients with probability v_ik = u_ik n_i / Σ_j u_jk n_j. Each client that any
cluster draws trains its own model w_i once, near all centres: min f_i(w) + λ/2 Σ_k u_ik ‖w − c_k‖².
A centre becomes the mean of the models of the clients that its cluster drew.

Where paper and official code leave a choice, this file decides as follows:

- *Start.* The centres are drawn separately, and so is one model from which all clients start, as in
  the official code.
- *Proximal term.* The K proximal terms equal λ/2 ‖w − Σ_k u_ik c_k‖² and a constant, so a client
  receives one vector instead of K. For this the u_ik of a client are divided by their sum. In the
  code they are not divided, and their sum is up to 1 + (K − 1) σ, since u_ik is a small constant σ
  if centre k is best for none of the client's examples.
- *Importance.* It is estimated in round 1 and every ``estimate_every`` rounds, by the clients of
  that round. A client that is first sampled in between estimates it then. If two centres have the
  same loss, the example counts for the first.
- *Full participation.* If the round has at most S clients, all of them train for every cluster, and
  a centre is the mean of their models weighted by v_ik (paper, "full participation"). In the code
  the drawn clients have equal weights even then, which makes all centres equal.
- *Choice of S.* Drawn clients have equal weights if the round has more than S clients. If S is
  larger than the number of clients that mainly belong to a cluster, the cluster also draws clients
  of other clusters, which pull its centre towards the other centres.
- *Clients' models.* Client i sends the difference of w_i from Σ_k u_ik c_k, the point near which it
  trains, and the server adds this point again. The client stores w_i and is evaluated with it. A
  client that has not trained yet is evaluated with the centre of its largest weight, and a client
  without weights with the mean of the centres.
- *Tree.* A client is a member of the cluster of its largest weight. A newcomer during a run
  estimates its importance, and trains from the common initial model; a newcomer to a finished run
  gets the centre of the lowest loss.
- *Local training.* The code shuffles no batches, and a client's Adam state lasts from round to
  round; here local training is as configured (``local.keep_state``).
- *Defaults* are those of the official main program, for CIFAR-10; its solver for MNIST has λ = 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.algorithms.base import OneCohort, OwnState, RoundLog, require_different_models
from fedclade.algorithms.cluster_update import by_cluster, log_of, membership_events
from fedclade.algorithms.requires import EvaluatedModels, Requires, RunFacts
from fedclade.core import (
    LARGEST,
    Clients,
    ClientWork,
    ConfigError,
    DistanceToAnchor,
    FromStored,
    LocalModel,
    ParameterTree,
    Proximal,
    Round,
    RoundPlan,
    TooFew,
    Updates,
    centre_of,
    checked,
    require,
    row_norms,
)

Weights = NDArray[np.float64]
"""Weights u or v of n clients in K clusters, ``[n, K]``; or of one client, ``[K]``."""

SIGMA = 1e-4
"""σ of the official code: a client's weight in a cluster whose centre is best for no example."""


@dataclass(frozen=True, eq=False)
class FedSoftState(OwnState):
    """State of FedSoft between rounds.

    Parameters
    ----------
    importance
        Importance weights u of m clients in K clusters, float64 ``[m, K]``; None if no client has
        estimated its weights yet.
    ids
        Ids of the m clients, in the order of the rows of ``importance``, which is ascending.
    """

    importance: torch.Tensor | None = None
    ids: tuple[int, ...] = ()

    @property
    def weights(self) -> dict[int, Weights]:
        """Importance weights of clients in the K clusters: a vector ``[K]`` by client."""
        return (
            {}
            if self.importance is None
            else dict(zip(self.ids, self.importance.numpy(), strict=True))
        )


@checked()
@dataclass(frozen=True, kw_only=True)
class FedSoft(OneCohort[FedSoftState]):
    """FedSoft (Ruan and Joe-Wong 2022): soft clusters, with a model for each client.

    A client's data is a mixture of the data of several clusters; the client's model is trained near
    a mean of the clusters' models (centres), weighted by the shares of the mixture.

    Parameters
    ----------
    clusters
        Number K of centres.
    lam
        λ, at least 0: weight of the proximal term that keeps clients' models near the centres.
    selection
        S: number of clients that each cluster draws in a round. If a round has S clients or fewer,
        all of them train for every cluster.
    estimate_every
        τ: number of rounds after which clients estimate their importance weights again.
    """

    state_type = FedSoftState

    clusters: int = 2
    lam: float = 0.01
    selection: int = 15
    estimate_every: int = 2

    def __post_init__(self) -> None:
        require(
            ("algorithm.clusters", self.clusters, self.clusters >= 1, "at least 1"),
            ("algorithm.lam", self.lam, self.lam >= 0, "at least 0"),
            ("algorithm.lam", self.lam, not self.lam > LARGEST, f"at most {LARGEST:g}"),
            ("algorithm.selection", self.selection, self.selection >= 1, "at least 1"),
            (
                "algorithm.estimate_every",
                self.estimate_every,
                self.estimate_every >= 1,
                "at least 1",
            ),
        )

    @property
    def requires(self) -> Requires:
        """Needs of FedSoft that a run checks.

        It needs K initial models for the centres and one for all clients; clients store models, and
        report for how many of their examples each centre is best.
        """
        return Requires(
            signatures=False,
            reports="for how many of their training examples each model is best",
            initial_models=self.clusters + 1,
            own_models=True,
            soft_clusters=True,
            server_steps=False,
            clusters_from="clusters",
        )

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check that the aggregation rule is the mean if every centre uses all clients of a round.

        In that case the centres differ only in the weights of their means. Robust aggregation rules
        ignore these weights, so that all centres would be equal.

        Raises
        ------
        ConfigError
            If every centre uses all clients, and the aggregation rule is robust.
        """
        warnings = super().check(run)
        if run.aggregation is None or not run.aggregation.is_robust or not run.clients:
            return warnings
        in_round = round((run.client_fraction or 1.0) * run.clients)
        if self.selection < in_round:
            return warnings
        raise ConfigError(
            f"FedSoft cannot use aggregate.rule = '{run.aggregation.rule}' if every centre uses "
            "all clients of a round: the centres then differ only in weights that this rule "
            f"ignores; set algorithm.selection below {in_round}, the number of clients in a round"
        )

    def init(self, params: torch.Tensor, clients: Clients) -> FedSoftState:
        """Return the state before round 1, from K + 1 different initial models.

        Parameters
        ----------
        params
            Initial models ``[K + 1, S]``, one parameter vector in each row. The first K are the
            centres, and the last is the model from which all clients start.
        clients
            All clients of the run.

        Raises
        ------
        ConfigError
            If two of the initial models are equal.
        """
        params = require_different_models(params, self.requires.initial_models, "fedsoft")
        tree = ParameterTree.star([()] * self.clusters, params[:-1], clients.ids).with_model(
            0, params[-1]
        )
        return FedSoftState(tree.continued(params[:-1].mean(0)), ())

    def step(
        self, state: FedSoftState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[FedSoftState, RoundLog]:
        """Run one round of FedSoft (Algorithm 1).

        Clients estimate their importance weights if this is due, every cluster draws clients, the
        drawn clients train their models, and each centre becomes the mean of its clients' models.
        """
        before = state.tree
        cohort = sorted(cohort)
        here = set(clients.ids)
        weights = {client: mine for client, mine in state.weights.items() if client in here}
        is_due = (this_round.number - 1) % self.estimate_every == 0
        if asked := [client for client in cohort if is_due or client not in weights]:
            weights |= self._query_importance(asked, before, clients)
        tree = before.reassigned(
            {client: 1 + int(mine.argmax()) for client, mine in weights.items()}
        )
        events = membership_events(before, tree)
        there = [client for client in cohort if client in weights]
        after = replace(state, tree=tree, **_convert_weights(weights))
        if not there:
            return after, log_of([], events)
        u = np.stack([weights[client] for client in there])
        of_examples = clients.weigh(clients.sizes)
        v = u * np.array([[of_examples[client]] for client in there])
        draws = self._draw_clients(v / v.sum(0), this_round)
        centres = torch.stack([leaf.params for leaf in tree.leaves])
        near = torch.from_numpy(u).to(centres) @ centres  # proximal point of each client, [n, S]
        drawn = np.flatnonzero((draws > 0).any(1)).tolist()
        ids = [there[i] for i in drawn]
        models = torch.cat([tree.nodes[0].params[None], near[drawn]])
        work = ClientWork(
            start=FromStored(),
            steps=Proximal(self.lam),
            store=LocalModel(),
            reply=DistanceToAnchor(),
        )
        anchors = range(1, 1 + len(ids))
        updates = clients.train(ids, models, state.rows(ids), this_round, work, anchors=anchors)
        after = replace(after, keepers=state.keepers_after(updates))
        if not updates.ids:
            return after, log_of([], events)
        place_of = {client: place for place, client in enumerate(there)}
        places = [place_of[client] for client in updates.ids]
        local = near[places] + updates.required_deltas
        came = draws[places]
        for k, leaf in enumerate(tree.leaves):
            share = came[:, k] / max(came[:, k].sum(), 1e-300)
            answers = int((came[:, k] > 0).sum())
            if answers >= max(1, this_round.min_clients):
                tree = tree.with_model(leaf.id, _compute_centre(leaf.params, local, share, updates))
            elif answers:
                events.append(TooFew(leaf.id, answers))
        tree = tree.continued(torch.stack([leaf.params for leaf in tree.leaves]).mean(0))
        log = log_of(by_cluster(tree, updates, replace(this_round, min_clients=0)), events)
        return replace(after, tree=tree), replace(
            log, discrepancy=_sum_distances(tree, updates, local)
        )

    def models_for(self, state: FedSoftState, clients: Clients) -> EvaluatedModels:
        """Return the models with which clients are evaluated: the models that they store.

        A client that stores no model yet is evaluated with the model of its node in the tree: the
        centre of its largest weight, or the mean of the centres if it has no weights.
        """
        return EvaluatedModels(nodes=state.tree.leaf_of, own=state.keepers)

    def _query_importance(
        self, ids: Sequence[int], tree: ParameterTree, clients: Clients
    ) -> Mapping[int, Weights]:
        """Query clients for their importance weights u ``[K]``; return them by client.

        A client's weights are the shares of its training examples for which each of the K centres
        has the lowest loss. Clients that do not reply are missing from the result.
        """
        models, rows = tree.models([leaf.id for leaf in tree.leaves])
        each = [client for client in ids for _ in rows]
        found = clients.evaluate(each, models, [*rows] * len(ids), "train", compares=True)
        if found.wins is None or not found.ids:
            return {}
        counts = found.wins.view(-1, len(rows)).numpy().astype(np.float64)
        shares = np.where(counts > 0, counts / counts.sum(1, keepdims=True), SIGMA)
        return dict(
            zip(found.ids[:: len(rows)], shares / shares.sum(1, keepdims=True), strict=True)
        )

    def _draw_clients(self, v: Weights, this_round: Round) -> Weights:
        """Draw ``selection`` clients for each of K clusters (S of Algorithm 1).

        Parameters
        ----------
        v
            Probabilities of drawing each of n clients for each cluster, ``[n, K]``.
        this_round
            The round, which determines the random draws.

        Returns
        -------
        numpy.ndarray
            Weight of each client in each centre, ``[n, K]``: 1 for drawn clients and 0 for other
            clients; or ``v`` if there are no more than ``selection`` clients.
        """
        if self.selection >= len(v):
            return v
        draw = this_round.generator("selection")
        counts = np.zeros_like(v)
        for k in range(v.shape[1]):
            counts[draw.choice(len(v), self.selection, replace=False, p=v[:, k]), k] = 1.0
        return counts


def _compute_centre(
    before: torch.Tensor, local: torch.Tensor, share: Weights, updates: Updates
) -> torch.Tensor:
    """Compute a cluster's new centre ``[S]`` from the models of its clients.

    The centre is the weighted mean of the models. A robust aggregation rule is applied instead to
    the differences between the models and the old centre, all with equal weight, and the centre
    moves by the result.

    Parameters
    ----------
    before
        The old centre, ``[S]``.
    local
        Models of the n clients that replied, ``[n, S]``.
    share
        Weight of each client in this centre, ``[n]``; 0 for clients that the cluster did not draw.
    updates
        The clients' updates, which contain the aggregation rule.
    """
    if updates.aggregation is None:
        return torch.from_numpy(share).to(local) @ local
    drawn = [client for client, mine in zip(updates.ids, share.tolist(), strict=True) if mine > 0]
    return centre_of(updates, local, drawn, before)


def _convert_weights(
    weights: Mapping[int, Weights],
) -> dict[str, torch.Tensor | tuple[int, ...] | None]:
    """Convert importance weights to the fields ``importance`` and ``ids`` of the state."""
    ids = tuple(sorted(weights))
    return {
        "importance": torch.from_numpy(np.stack([weights[c] for c in ids])) if ids else None,
        "ids": ids,
    }


def _sum_distances(tree: ParameterTree, updates: Updates, local: torch.Tensor) -> float:
    """Return the discrepancy Σ ‖w_i − c‖ over the clients that trained in a round.

    Here w_i is a client's model after training, and c the new centre of the cluster in which the
    client has its largest weight. Buffers of the model, such as BatchNorm's, are left out.
    """
    D = updates.n_parameters
    models = [tree.nodes[tree.leaf_of[client]].params for client in updates.ids]
    return float(row_norms((local - torch.stack(models))[:, :D]).sum())
