"""MOON: Li, He and Song 2021, "Model-contrastive federated learning" (CVPR), Algorithm 1.

Clients train with an additional loss: the representation z of an example, the input of the last
linear layer (section 3.2), should be near that of the received model, and far from that of the model
that the client trained in its last round. As in the authors' code, the loss is left out in a
client's first round, and both other models are in evaluation mode.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

import fedclade
from fedclade.algorithms import Method, Paper
from fedclade.core import require


def contrastive_loss(z: Tensor, received: Tensor, earlier: Tensor, tau: float) -> Tensor:
    """Return the mean model-contrastive loss (eq. 3) of representations, ``[B, d]`` each."""
    similarities = [cosine_similarity(z, other) for other in (received, earlier)]
    logits = torch.stack(similarities, dim=1) / tau
    return cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.int64))


@dataclass(frozen=True)
class MoonTraining(fedclade.ClientTrainer):
    """Local training of MOON (Algorithm 1, PartyLocalTraining)."""

    stores = ("earlier",)

    mu: float
    tau: float

    def train_client(self, model, batches, context):
        """Train a client with the loss of eq. 4, and store its model for the next round."""
        received = context.model_of(context.start)
        stored = context.stored("earlier")
        earlier = None if stored is None else context.model_of(stored)

        def loss(inputs, targets):
            outputs, z = fedclade.with_features(model, inputs)
            supervised = context.loss(outputs, targets)
            if earlier is None:
                return supervised
            others = [fedclade.with_features(other, inputs)[1] for other in (received, earlier)]
            return supervised + self.mu * contrastive_loss(z, *others, self.tau)

        mean = context.minimize(model, batches, loss)
        context.store("earlier", context.vector_of(model))
        return mean


@dataclass(frozen=True, kw_only=True)
class Moon(fedclade.FedAvg):
    """MOON: FedAvg with a contrastive loss between local and global model."""

    mu: float = 1.0
    tau: float = 0.5

    def __post_init__(self):
        require(
            ("algorithm.mu", self.mu, self.mu >= 0, "at least 0"),
            ("algorithm.tau", self.tau, self.tau > 0, "greater than 0"),
        )

    def step(self, state, cohort, clients, this_round):
        """Run one round: FedAvg of the models that clients train by :class:`MoonTraining`."""
        work = fedclade.ClientWork(steps=MoonTraining(self.mu, self.tau))
        parts = fedclade.train_clusters(state, cohort, clients, this_round, work)
        return fedclade.State(fedclade.move_clusters(state.tree, parts)), fedclade.log_of(parts)


PAPER = Paper(("Li", "He", "Song"), 2021, "Model-contrastive federated learning")
METHOD = Method(name="moon", algorithm=Moon, papers=(PAPER,))
