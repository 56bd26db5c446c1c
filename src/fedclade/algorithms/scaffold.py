"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh 2020 (arXiv:1910.06378), Algorithm 1.

FedAvg whose clients correct each gradient by c − c_i, the server's control variate minus their own:
y_i ← y_i − η_l (g_i(y_i) − c_i + c). The correction prevents the drift of clients' models that
differences between their data cause.

Where paper and other implementations leave a choice, this file decides as follows:

- *Control variates.* c_i is option II: c_i⁺ = c_i − c + (x − y_i)/(K η_l), where K is the number of
  steps that the client has really taken, which differs between clients if local training counts
  epochs. c and all c_i start as zeros, and so does c_i of a client that joins later.
- *Traffic.* A client sends only Δy_i: c_i⁺ − c_i = −c − Δy_i/(K η_l), and the server knows K from
  the client's |D_i|. So downloads are twice those of FedAvg, and uploads the same. If the server
  limits a client's weight, or shortens its update, c still moves by the whole update, as c_i has: a
  malicious client moves c by its share of the norm that ``largest_norm`` permits. If updates are
  compressed or private, c is only approximately the mean of the c_i.
- *Membership.* A newcomer has c_i = 0, so c shrinks to the mean over more clients. If a client
  leaves, if an update is lost after its client has changed c_i, or if data changes in size, c
  differs permanently from the mean of the c_i: the model then converges to a point away from the
  optimum.
- *Weights.* Means are weighted by |D_i| as in FedAvg, also the mean of the c_i: c ← c + Σ_{i∈S}
  |D_i| (c_i⁺ − c_i) / Σ_i |D_i|, where the sum in the denominator is over all clients. The
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
from torch import Tensor

from fedclade.algorithms.apfl import scaled
from fedclade.algorithms.base import OneCohort, RoundLog, State
from fedclade.algorithms.cluster_update import ClusterUpdate, log_of, move_clusters
from fedclade.core import (
    LARGEST,
    Clients,
    ControlVariates,
    Event,
    LocalTraining,
    ParameterTree,
    Round,
    Updates,
    checked,
    mean,
    require,
)


@dataclass(frozen=True, eq=False)
class ScaffoldState(State):
    """State of SCAFFOLD between rounds.

    Parameters
    ----------
    control
        The server's control variate c, ``[S]``; zeros at the model's buffers.
    """

    control: Tensor


@checked()
@dataclass(frozen=True, kw_only=True)
class Scaffold(OneCohort[ScaffoldState]):
    """SCAFFOLD (Karimireddy et al. 2020): FedAvg with control variates against client drift.

    Parameters
    ----------
    server_lr
        η_g, greater than 0: factor by which the global model moves along the mean update.
    weighted
        Whether means have the weights |D_i|, as in FedAvg, or are plain, as in Algorithm 1.
    """

    state_type = ScaffoldState

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

    @property
    def compares(self) -> bool:
        """Return whether a step uses signatures of updates."""
        return False

    def check_training(self, spec: LocalTraining) -> None:
        """Check that local training is plain SGD."""
        ControlVariates().check_training(spec)

    def init(self, params: Tensor, clients: Clients) -> ScaffoldState:
        """Put all clients at the global model, with c = 0."""
        return ScaffoldState(ParameterTree.root_only(clients.ids, params), torch.zeros_like(params))

    def join(
        self, state: ScaffoldState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ScaffoldState, list[Event]]:
        """Add newcomers, and scale c, since their c_i are zero and c is the mean over all clients.

        The mean is weighted by numbers of examples, or plain, see ``weighted``.
        """
        weights = clients.sizes if self.weighted else dict.fromkeys(clients.sizes, 1)
        share = 1 - sum(weights[client] for client in ids) / sum(weights.values())
        state, events = super().join(state, ids, clients, this_round)
        return replace(state, control=share * state.control), events

    def step(
        self, state: ScaffoldState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ScaffoldState, RoundLog]:
        """Run one round of Algorithm 1."""
        models = torch.stack([state.tree.nodes[0].params, state.control])
        ruled = replace(this_round, rule=ControlVariates())
        updates = clients.train(cohort, models, [0] * len(cohort), ruled, anchors=[1] * len(cohort))
        updates = updates.select(sorted(cohort))
        part = scaled(
            ClusterUpdate.of(0, updates, this_round, weighted=self.weighted), self.server_lr
        )
        control = state.control + self._control_step(state.control, updates, clients, this_round)
        return ScaffoldState(move_clusters(state.tree, [part]), control), log_of([part])

    def _control_step(
        self, control: Tensor, updates: Updates, clients: Clients, this_round: Round
    ) -> Tensor:
        """Return the step of c, ``[S]``, weighted by numbers of examples or plain."""
        if self.weighted:
            return _moved(control, updates, updates.sizes, sum(clients.sizes.values()), this_round)
        return _moved(
            control, updates, torch.ones_like(updates.sizes), len(clients.ids), this_round
        )


def _moved(
    control: Tensor, updates: Updates, weights: Tensor, total: int, this_round: Round
) -> Tensor:
    """Return Σ_{i∈S} weight_i (c_i⁺ − c_i) / total, ``[S]``, or a robust rule's replacement.

    Parameters
    ----------
    control
        c, ``[S]``.
    updates
        Updates of the n clients that replied.
    weights
        Weights of these clients, ``[n]``.
    total
        Sum of all clients' weights.
    this_round
        The round, with its local training.
    """
    deltas = updates.required_deltas
    moved = torch.zeros_like(control)
    trained_on = updates.sizes if updates.uncapped is None else updates.uncapped
    steps = torch.tensor(
        [this_round.spec.steps_with(int(size)) for size in trained_on.tolist()], dtype=torch.float64
    )
    if updates.shortened is not None:  # the client changed c_i by its whole update
        steps = steps * updates.shortened
    D = updates.n_parameters
    if updates.aggregation is not None:
        gradients = deltas[:, :D] / (steps * this_round.lr)[:, None].to(deltas)
        of_each = replace(
            updates,
            deltas=torch.cat([-gradients - control[:D], torch.zeros_like(deltas[:, D:])], 1),
        )
        return mean(of_each) * (float(weights.sum()) / total)
    of_sum = (weights / (steps * this_round.lr)).to(deltas)
    moved[:D] = -(of_sum @ deltas[:, :D] + weights.sum().to(control) * control[:D]) / total
    return moved
