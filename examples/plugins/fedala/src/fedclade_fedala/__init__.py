"""FedALA: Zhang et al. 2023, "FedALA: Adaptive local aggregation ..." (AAAI), Algorithm 1.

Each client mixes the global model into its own model with learned weights, one for each entry of the
top layers, and then trains the result. As in the authors' code, ``p`` counts tensors (a layer has a
weight and a bias), and a client's first learning of the weights ends when the standard deviation of
the last 10 losses is below 0.1. Departures: this learning has at most 100 epochs; the share ``s`` of
the examples is drawn at random, where the code takes consecutive ones; the last, smaller batch is
used; clients are evaluated after their local training, where the code evaluates before it.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fedclade
from fedclade.algorithms import ClusterUpdate, Method, OneCohort, OwnModels, OwnState, Paper
from fedclade.core import require

MOST_EPOCHS = 100
"""Largest number of epochs in which a client learns its first weights."""


@dataclass(frozen=True)
class AlaTraining(fedclade.ClientTrainer):
    """Adaptive local aggregation, then local training (Algorithm 1, lines 5 to 13)."""

    stores = ("weights",)
    needs_anchor = True  # the global model; a client starts from its own model

    p: int
    eta: float
    s: float

    def train_client(self, model, batches, context):
        """Mix the global model into the client's own model, and train the result."""
        if not torch.equal(context.start, context.anchor):  # equal in a client's first round
            self.adapt(model, context)
        return context.minimize(model, batches, lambda x, y: context.loss(model(x), y))

    def adapt(self, model, context):
        """Learn the weights W (eq. 6), and write the mixture of both models (eq. 4) to the model."""
        own = list(model.parameters())
        received = list(context.model_of(context.anchor).parameters())
        for tensor, value in zip(own[: -self.p], received[: -self.p], strict=True):
            tensor.data.copy_(value)
        top = own[-self.p :]
        old = parameters_to_vector(top).detach().clone()
        change = parameters_to_vector(received[-self.p :]) - old
        stored = context.stored("weights")
        weights = torch.ones_like(old) if stored is None else stored
        vector_to_parameters(old + change * weights, top)
        inputs, targets = context.dataset.tensors
        count = max(1, int(self.s * len(inputs)))
        rows = torch.randperm(len(inputs))[:count].to(inputs.device)
        losses = []
        while not self.is_done(losses, is_first=stored is None):
            for batch in rows.split(context.local.batch_size):
                loss = context.loss(model(inputs[batch]), targets[batch])
                gradient = parameters_to_vector(torch.autograd.grad(loss, top))
                weights = (weights - self.eta * gradient * change).clamp(0, 1)
                vector_to_parameters(old + change * weights, top)
            losses.append(float(loss.detach()))
        context.store("weights", weights)

    def is_done(self, losses, *, is_first):
        """Return whether the weights are learned, given the loss of each epoch so far."""
        if not is_first or len(losses) <= 10:
            return not is_first and len(losses) == 1
        spread = torch.tensor(losses[-10:]).std(correction=0)
        return len(losses) == MOST_EPOCHS or bool(spread < 0.1)


@dataclass(frozen=True, kw_only=True)
class FedALA(OwnModels, OneCohort):
    """FedALA: clients mix the global model into their own models with learned weights."""

    p: int = 2
    eta: float = 1.0
    s: float = 0.8

    def __post_init__(self):
        require(
            ("algorithm.p", self.p, self.p >= 1, "at least 1"),
            ("algorithm.eta", self.eta, self.eta > 0, "greater than 0"),
            ("algorithm.s", self.s, 0 < self.s <= 1, "in (0, 1]"),
        )

    def init(self, params, clients):
        """Return the state before round 1, in which no client has a model of its own."""
        return OwnState(fedclade.ParameterTree.root_only(clients.ids, params), keepers=())

    def step(self, state, cohort, clients, this_round):
        """Run one round; the global model becomes the mean of the clients' trained models."""
        work = fedclade.ClientWork(
            start=fedclade.FromStored(),
            steps=AlaTraining(self.p, self.eta, self.s),
            store=fedclade.LocalModel(),
            reply=fedclade.DistanceToAnchor(),
        )
        root = state.tree.nodes[0].params[None]
        anchors = [0] * len(cohort)
        rows = state.rows(cohort)
        updates = clients.train(cohort, root, rows, this_round, work, anchors=anchors)
        part = ClusterUpdate.of(0, updates.select(sorted(updates.ids)), this_round)
        tree = fedclade.move_clusters(state.tree, [part])
        new = replace(state, tree=tree, keepers=state.keepers_after(updates))
        return new, fedclade.log_of([part])


TITLE = "FedALA: Adaptive local aggregation for personalized federated learning"
PAPER = Paper(("Zhang", "Hua", "Wang", "Song", "Xue", "Ma", "Guan"), 2023, TITLE)
METHOD = Method(name="fedala", algorithm=FedALA, papers=(PAPER,))
