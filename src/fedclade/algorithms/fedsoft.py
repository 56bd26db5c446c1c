"""FedSoft: Ruan and Joe-Wong 2022 (AAAI; arXiv:2112.06053), Algorithm 1.

A client's data is a mixture of the data of K clusters. Its importance weight u_ik is the share of
its examples for which the k-th centre has the lowest loss. In each round every cluster draws S
clients with probability v_ik = u_ik n_i / Σ_j u_jk n_j. Each client that any cluster draws trains
its own model w_i once, near all centres: min f_i(w) + λ/2 Σ_k u_ik ‖w − c_k‖². A centre becomes the
mean of the models of the clients that its cluster drew.

Where paper and official code leave a choice, this file decides as follows:

- *Start.* The centres are drawn separately, and so is one model from which all clients start, as in
  the official code.
- *Proximal term.* The K proximal terms equal λ/2 ‖w − Σ_k u_ik c_k‖² and a constant, so a client
  receives one vector instead of K. For this the u_ik of a client are divided by their sum. A
  cluster that is best for no example has u_ik = σ, so in the code the sum is up to 1 + (K − 1) σ.
- *Importance.* It is estimated in round 1 and every ``estimate_every`` rounds, by the clients of
  that round. A client that is first sampled in between estimates it then. If two centres have the
  same loss, the example counts for the first.
- *Full participation.* If a cluster would draw all clients of the round, or more than there are,
  all of them take part, and the centre is their mean by v_ik (paper, "full participation"). In the
  code a draw of all clients has equal weights, which makes all centres equal. For the same reason,
  a draw of more clients than a cluster has pulls its centre towards the others.
- *Clients' models.* w_i leaves its client only as the difference to the point near which it is
  trained. The client stores it and is evaluated with it. A client that has not trained yet is
  evaluated with the centre of its largest weight, and a client without weights with the mean of the
  centres.
- *Tree.* A client is shown in the cluster of its largest weight. A newcomer during a run estimates
  its importance, and trains from the common initial model; a newcomer to a finished run gets the
  centre of the lowest loss.
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
from torch import Tensor

from fedclade.algorithms.base import OneCohort, OwnState, RoundLog
from fedclade.algorithms.cluster_update import by_cluster, log_of, membership_events
from fedclade.core import (
    LARGEST,
    Clients,
    ConfigError,
    ParameterTree,
    Round,
    TooFew,
    Updates,
    centre_of,
    checked,
    require,
    row_norms,
)

Weights = NDArray[np.float64]
"""Weights of clients in clusters: u or v, ``[n, K]``."""

SIGMA = 1e-4
"""σ of the official code: the weight of a cluster that is best for none of a client's examples."""


@dataclass(frozen=True, eq=False)
class FedSoftState(OwnState):
    """State of FedSoft between rounds.

    Parameters
    ----------
    importance
        The importance weights u, float64 ``[m, K]``.
    ids
        Clients of the rows of ``importance``, in ascending order.
    """

    importance: Tensor | None = None
    ids: tuple[int, ...] = ()

    @property
    def weights(self) -> dict[int, Weights]:
        """Importance weights of each client, ``[K]``: one for each of the K clusters."""
        return (
            {}
            if self.importance is None
            else dict(zip(self.ids, self.importance.numpy(), strict=True))
        )


@checked()
@dataclass(frozen=True, kw_only=True)
class FedSoft(OneCohort[FedSoftState]):
    """FedSoft (Ruan and Joe-Wong 2022): clients belong to several clusters and have own models.

    Parameters
    ----------
    clusters
        Number K of centres.
    lam
        λ, at least 0: weight of the proximal term that keeps clients' models near the centres.
    selection
        S: number of clients that each cluster draws in a round. If a round has no more clients than
        that, all of them take part.
    estimate_every
        τ: number of rounds after which clients estimate their importance again.
    """

    state_type = FedSoftState
    is_soft = True
    clusters_from = "clusters"
    asks_for = "for how many of their training examples each model is best"

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
    def compares(self) -> bool:
        """Return whether a step uses signatures of updates."""
        return False

    @property
    def initial_models(self) -> int:
        """Number of initial models: the centres, and the first model of all clients."""
        return self.clusters + 1

    def needs_mean(self, clients: int, fraction: float) -> str:
        """Return the reason why only the mean works if all clients take part in all centres.

        In that case the centres differ only by the weights of their means, which other rules
        ignore.
        """
        in_round = round(fraction * clients)
        if not clients or self.selection < in_round:
            return ""
        return (
            "FedSoft draws clients for each centre, and with as many as there are each takes part "
            "in all, by weights that only a mean has; set algorithm.selection below the "
            f"{in_round} clients of a round"
        )

    def init(self, params: Tensor, clients: Clients) -> FedSoftState:
        """Return the state with the initial models ``[K + 1, S]``, which must all differ.

        The first K are the centres, and the last is the model from which all clients start.
        """
        if (found := len(params.unique(dim=0))) < self.initial_models:
            needed = f"fedsoft needs {self.initial_models} different initial models"
            raise ConfigError(f"{needed}, got {found}; let them depend on the seed")
        tree = ParameterTree.star([()] * self.clusters, params[:-1], clients.ids).with_model(
            0, params[-1]
        )
        return FedSoftState(tree.continued(params[:-1].mean(0)), ())

    def step(
        self, state: FedSoftState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FedSoftState, RoundLog]:
        """Run one round: importance weights (if due), draws, local training, and new centres."""
        before = state.tree
        cohort = sorted(cohort)
        here = set(clients.ids)
        weights = {client: mine for client, mine in state.weights.items() if client in here}
        is_due = (this_round.number - 1) % self.estimate_every == 0
        if asked := [client for client in cohort if is_due or client not in weights]:
            weights |= self._importance(asked, before, clients)
        tree = before.reassigned(
            {client: 1 + int(mine.argmax()) for client, mine in weights.items()}
        )
        events = membership_events(before, tree)
        there = [client for client in cohort if client in weights]
        after = replace(state, tree=tree, **_kept(weights))
        if not there:
            return after, log_of([], events)
        u = np.stack([weights[client] for client in there])
        v = u * np.array([[clients.sizes[client]] for client in there])
        draws = self._draws(v / v.sum(0), this_round)
        centres = torch.stack([leaf.params for leaf in tree.leaves])
        near = torch.from_numpy(u).to(centres) @ centres  # proximal point of each client, [n, S]
        drawn = np.flatnonzero((draws > 0).any(1)).tolist()
        ids = [there[i] for i in drawn]
        models = torch.cat([tree.nodes[0].params[None], near[drawn]])
        held = replace(this_round, spec=replace(this_round.spec, mu=self.lam))
        anchors = range(1, 1 + len(ids))
        updates = clients.train(ids, models, state.rows(ids), held, anchors, own=True, shares=True)
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
                tree = tree.with_model(leaf.id, _centre(leaf.params, local, share, updates))
            elif answers:
                events.append(TooFew(leaf.id, answers))
        tree = tree.continued(torch.stack([leaf.params for leaf in tree.leaves]).mean(0))
        log = log_of(by_cluster(tree, updates, replace(this_round, min_clients=0)), events)
        return replace(after, tree=tree), replace(
            log, discrepancy=_discrepancy(tree, updates, local)
        )

    def keepers(self, state: FedSoftState) -> Sequence[int]:
        """Return the clients that have a model of their own so far, and are evaluated with it."""
        return state.keepers

    def _importance(
        self, ids: Sequence[int], tree: ParameterTree, clients: Clients
    ) -> Mapping[int, Weights]:
        """Return the importance weights u of each client that replies.

        They are the shares of its examples for which each centre has the lowest loss.
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

    def _draws(self, v: Weights, this_round: Round) -> Weights:
        """Return the weight of each of n clients in each centre, ``[n, K]``.

        Weights are 1 for drawn clients and 0 for others, or v if all clients take part.
        """
        if self.selection >= len(v):
            return v
        draw = this_round.generator("selection")
        counts = np.zeros_like(v)
        for k in range(v.shape[1]):
            counts[draw.choice(len(v), self.selection, replace=False, p=v[:, k]), k] = 1.0
        return counts


def _centre(before: Tensor, local: Tensor, share: Weights, updates: Updates) -> Tensor:
    """Return a centre ``[S]``: the mean of clients' models ``[n, S]``, weighted by their shares.

    With a robust rule, the rule is applied to the differences between the drawn clients' models and
    the old centre, all with equal weight, and the centre moves by the result.
    """
    if updates.aggregation is None:
        return torch.from_numpy(share).to(local) @ local
    drawn = [client for client, mine in zip(updates.ids, share.tolist(), strict=True) if mine > 0]
    return centre_of(updates, local, drawn, before)


def _kept(weights: Mapping[int, Weights]) -> dict[str, Tensor | tuple[int, ...] | None]:
    """Return the fields of a state that store importance weights."""
    ids = tuple(sorted(weights))
    return {
        "importance": torch.from_numpy(np.stack([weights[c] for c in ids])) if ids else None,
        "ids": ids,
    }


def _discrepancy(tree: ParameterTree, updates: Updates, local: Tensor) -> float:
    """Return Σ ‖w_i − c‖ over the clients that trained, with the centre c of each client's leaf."""
    D = updates.n_parameters
    models = [tree.nodes[tree.leaf_of[client]].params for client in updates.ids]
    return float(row_norms((local - torch.stack(models))[:, :D]).sum())
