"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh 2020 (arXiv:1910.06378), Algorithm 1.

FedAvg whose clients correct each gradient by c − c_i, the server's control variate less their own:
y_i ← y_i − η_l (g_i(y_i) − c_i + c). So their models do not drift apart by what their data differ
in.

Where paper and others leave a choice, this file makes it:

- c_i is option II: c_i⁺ = c_i − c + (x − y_i)/(K η_l), with the steps K that the client has really
  taken, which differ where local training counts epochs. c and all c_i begin with zeros, and so
  does c_i of a client that joins later.
- A client sends Δy_i alone: c_i⁺ − c_i = −c − Δy_i/(K η_l), and the server knows K from the
  client's |D_i|. So traffic is twice that of FedAvg down, and the same up. Where the server lets a
  client weigh less, or shortens its update, c still moves by the whole of it, as c_i has: one that
  lies moves c by its share of what ``largest_norm`` lets through. Where updates are coded or
  private, c is not quite the mean of the c_i.
- Who joins has c_i = 0, so c shrinks to the mean over more clients. Where a client leaves, or an
  update gets lost, whose client has moved c_i, or data changes its size, c stays beside the mean of
  the c_i for good: the model then settles beside the optimum.
- Means are weighted by |D_i| as in FedAvg, that of the c_i too: c ← c + Σ_{i∈S} |D_i| (c_i⁺ − c_i)
  / Σ_i |D_i|, below over all clients. The algorithm's means are plain: x ← x + η_g/|S| Σ Δy_i and c
  ← c + 1/N Σ (c_i⁺ − c_i), lines 16 and 17. ``weighted = false`` takes these. With equal sizes it
  is the same.
- Steps are plain SGD: with momentum (x − y_i)/(K η_l) would not be a mean of gradients, so it is
  refused.
- η_g = 1, as in the paper's experiments. Buffers, such as BatchNorm's, are averaged; they have no
  control variate, and personal parameters have none.
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
    """The server's control variate c, ``[S]``, zeros where buffers are."""

    control: Tensor


@checked()
@dataclass(frozen=True, kw_only=True)
class Scaffold(OneCohort[ScaffoldState]):
    """SCAFFOLD (Karimireddy et al. 2020): FedAvg with control variates against the drift of the clients.

    Parameters
    ----------
    server_lr
        η_g: how far the global model goes to the mean of the clients'.
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
        """Whether a step looks at signatures of updates."""
        return False

    def check_training(self, spec: LocalTraining) -> None:
        """Check that local training is plain SGD."""
        ControlVariates().check_training(spec)

    def init(self, params: Tensor, clients: Clients) -> ScaffoldState:
        """Put all clients under the global model, with c = 0."""
        return ScaffoldState(ParameterTree.root_only(clients.ids, params), torch.zeros_like(params))

    def join(
        self, state: ScaffoldState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ScaffoldState, list[Event]]:
        """Take newcomers in; c is the mean over the examples of all clients, or over all clients."""
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
        """Return what c moves by, ``[S]``, by the examples of all clients, or by their number."""
        if self.weighted:
            return _moved(control, updates, updates.sizes, sum(clients.sizes.values()), this_round)
        return _moved(
            control, updates, torch.ones_like(updates.sizes), len(clients.ids), this_round
        )


def _moved(
    control: Tensor, updates: Updates, weights: Tensor, total: int, this_round: Round
) -> Tensor:
    """Return Σ_{i∈S} weight_i (c_i⁺ − c_i) / total, ``[S]``, or, by a robust rule, what takes the place of the mean.

    ``weights`` ``[n]`` are those of the clients that answered, and ``total`` is the sum of all
    clients' weights.
    """
    deltas = updates.required_deltas
    moved = torch.zeros_like(control)
    trained_on = updates.sizes if updates.uncapped is None else updates.uncapped
    steps = torch.tensor(
        [this_round.spec.steps_with(int(size)) for size in trained_on.tolist()], dtype=torch.float64
    )
    if updates.shortened is not None:  # c_i has moved by the whole update
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
