"""SCAFFOLD, FedAvg with control variates (Karimireddy et al. 2020, Algorithm 1).

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, arXiv:1910.06378. Clients correct each gradient by c
− c_i, the server's control variate minus the client's control variate: y_i ← y_i − η_l (g_i(y_i) −
c_i + c). The correction prevents the drift of clients' models that differences between their data
cause.

Where paper and other implementations leave a choice, this file decides as follows:

- *Control variates.* c_i is updated by option II: c_i⁺ = c_i − c + (x − y_i)/(K η_l), where K is
  the number of steps that the client has really taken, which differs between clients if local
  training counts epochs. c and all c_i start as zeros, and so does c_i of a client that joins
  later.
- *Traffic.* A client sends only Δy_i: c_i⁺ − c_i = −c − Δy_i/(K η_l), and the server knows K from
  the client's |D_i|. So downloads are twice those of FedAvg, and uploads the same. If the server
  limits a client's weight, or scales its update down, c still moves by the whole update, since the
  client has changed c_i by the whole update. A malicious client can therefore move c as far as
  ``largest_norm`` permits, times its share of the weights. If updates are compressed or private, c
  is only approximately the mean of the c_i.
- *Membership.* A newcomer has c_i = 0, so c shrinks to the mean over more clients. If a client
  leaves, if an update is lost after its client has changed c_i, or if data changes in size, c
  differs permanently from the mean of the c_i: the model then converges to a point away from the
  optimum.
- *Weights.* Means are weighted by |D_i| as in FedAvg, including the mean of the c_i: c ← c +
  Σ_{i∈S} |D_i| (c_i⁺ − c_i) / Σ_i |D_i|, where the sum in the denominator is over all clients. The
  algorithm's means are plain: x ← x + η_g/|S| Σ Δy_i and c ← c + 1/N Σ (c_i⁺ − c_i), lines 16 and
  17. ``weighted = false`` uses these. With equal sizes both are the same.
- *Local training.* Steps are plain SGD: with momentum (x − y_i)/(K η_l) would not be a mean of
  gradients, so momentum is refused.
- η_g = 1, as in the paper's experiments. Buffers, such as BatchNorm's, are averaged; they have no
  control variate, and neither have personal parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedclade.algorithms.apfl import scaled
from fedclade.algorithms.base import OneCohort, RoundLog, State
from fedclade.algorithms.cluster_update import ClusterUpdate, log_of, move_clusters
from fedclade.algorithms.requires import Requires, RunFacts
from fedclade.core import (
    LARGEST,
    Clients,
    ClientWork,
    ControlVariates,
    Event,
    ParameterTree,
    Round,
    RoundPlan,
    Updates,
    checked,
    mean,
    require,
    sum_of,
)


@dataclass(frozen=True, eq=False)
class ScaffoldState(State):
    """State of SCAFFOLD between rounds.

    Parameters
    ----------
    control
        The server's control variate c, ``[S]``; zeros at the model's buffers.
    """

    control: torch.Tensor


@checked()
@dataclass(frozen=True, kw_only=True)
class Scaffold(OneCohort[ScaffoldState]):
    """SCAFFOLD (Karimireddy et al. 2020): FedAvg with control variates against client drift.

    Parameters
    ----------
    server_lr
        η_g, greater than 0: factor by which the global model moves along the mean update.
    weighted
        Whether means weight clients by their numbers of examples |D_i|, as in FedAvg. If False,
        means are plain, as in Algorithm 1.
    """

    state_type = ScaffoldState
    requires = Requires(signatures=False)

    server_lr: float = 1.0
    weighted: bool = True

    def __post_init__(self) -> None:
        step = self.server_lr
        require(
            (
                "algorithm.server_lr",
                step,
                0 < step <= LARGEST,
                f"greater than 0 and at most {LARGEST:g}",
            )
        )

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check that local training is plain SGD, as SCAFFOLD's control variates require."""
        if run.local is not None:
            ControlVariates().check_training(run.local)
        return super().check(run)

    def init(self, params: torch.Tensor, clients: Clients) -> ScaffoldState:
        """Return the state before round 1, with the control variate c = 0."""
        return ScaffoldState(ParameterTree.root_only(clients.ids, params), torch.zeros_like(params))

    def join(
        self, state: ScaffoldState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ScaffoldState, list[Event]]:
        """Add clients that join during a run, and scale the server's control variate c.

        c is the mean of all clients' control variates c_i (weighted by numbers of examples, or
        plain, see ``weighted``). The c_i of newcomers are zero, so c shrinks.
        """
        sizes = clients.sizes
        weights = clients.weigh(sizes if self.weighted else dict.fromkeys(sizes, 1))
        share = 1 - sum(weights[client] for client in ids) / sum(weights.values())
        state, events = super().join(state, ids, clients, this_round)
        return replace(state, control=share * state.control), events

    def step(
        self, state: ScaffoldState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[ScaffoldState, RoundLog]:
        """Run one round of SCAFFOLD (Algorithm 1): train the cohort; move the model and c."""
        models = torch.stack([state.tree.nodes[0].params, state.control])
        work = ClientWork(steps=ControlVariates())
        anchors = [1] * len(cohort)  # the row of c
        updates = clients.train(
            cohort, models, [0] * len(cohort), this_round, work, anchors=anchors
        )
        updates = updates.select(sorted(cohort))
        part = scaled(
            ClusterUpdate.of(0, updates, this_round, weighted=self.weighted), self.server_lr
        )
        control = state.control + self._control_step(state.control, updates, clients, this_round)
        return ScaffoldState(move_clusters(state.tree, [part]), control), log_of([part])

    def _control_step(
        self, control: torch.Tensor, updates: Updates, clients: Clients, this_round: Round
    ) -> torch.Tensor:
        """Return the step of the server's control variate c in a round, ``[S]`` (line 17)."""
        if self.weighted or updates.has_weights:
            total = sum_of(clients.weigh(clients.sizes))
            return _sum_control_steps(control, updates, updates.weights, total, this_round)
        return _sum_control_steps(
            control, updates, torch.ones_like(updates.sizes), len(clients.ids), this_round
        )


def _sum_control_steps(
    control: torch.Tensor, updates: Updates, weights: torch.Tensor, total: float, this_round: Round
) -> torch.Tensor:
    """Compute the step of the server's control variate c from clients' updates, ``[S]``.

    It is Σ_i weight_i (c_i⁺ − c_i) / total over the clients that replied, where c_i and c_i⁺ are a
    client's control variates before and after its training. A robust aggregation rule replaces the
    mean. Clients do not send c_i⁺ − c_i: the server computes it from the update and c.

    Parameters
    ----------
    control
        The server's control variate c, ``[S]``.
    updates
        Updates of the n clients that replied.
    weights
        Weight of each of the n clients, ``[n]``.
    total
        Sum of the weights of all clients of the run.
    this_round
        The round, whose local training gives the number and size of a client's steps.
    """
    deltas = updates.required_deltas
    moved = torch.zeros_like(control)
    trained_on = updates.sizes if updates.uncapped is None else updates.uncapped
    steps = torch.tensor(
        [this_round.local.steps_with(int(size)) for size in trained_on.tolist()],
        dtype=torch.float64,
    )
    if updates.shortened is not None:  # clients changed c_i by their updates before shortening
        steps = steps * updates.shortened
    D = updates.n_parameters
    if updates.aggregation is not None:
        gradients = deltas[:, :D] / (steps * this_round.lr)[:, None].to(deltas)
        of_each = updates.with_columns(
            deltas=torch.cat([-gradients - control[:D], torch.zeros_like(deltas[:, D:])], 1)
        )
        return mean(of_each) * (float(weights.sum()) / total)
    of_sum = (weights / (steps * this_round.lr)).to(deltas)
    moved[:D] = -(of_sum @ deltas[:, :D] + weights.sum().to(control) * control[:D]) / total
    return moved
