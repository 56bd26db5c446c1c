"""FedProto: Tan et al. 2022, "FedProto: Federated prototype learning ..." (AAAI), Algorithm 1.

Clients share no models, only the mean representation of each label, its prototype. The
representation is the input of the last linear layer. As in the authors' code, the penalty of a batch
is the mean squared distance of each representation to the prototype of its label (the paper's eq. 5
has the distances of the client's prototypes), and the server averages prototypes without the weights
of eq. 6. Departure: a client computes its prototypes (eq. 3) after its training, from all examples.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, one_hot

import fedclade
from fedclade.algorithms import Method, OneCohort, OwnModels, OwnState, Paper


@dataclass(frozen=True, eq=False)
class PrototypeQuery(fedclade.RowQuery):
    """Query for a client's prototypes, ``[C, d + 1]`` for C labels and d entries.

    The last entry is 1 for each label that the client has. The row of any other label is zero.
    """

    kind = "prototypes"
    mechanism = "none"
    discloses = "prototypes"
    reveals = "mean representations of their labels"

    size: int  # d

    def shape(self, spec):
        """Return the shape of a reply, ``(C, d + 1)``."""
        return (spec.labels, self.size + 1)

    def answer(self, data, store):
        """Return the prototypes (eq. 3) of a client by the model that it stores."""
        model = data.load_own_model()
        with torch.no_grad():
            features = fedclade.with_features(model, data.inputs)[1].cpu().float()
        features = torch.cat([features, torch.ones(len(features), 1)], dim=1)
        labels = one_hot(data.targets.long(), data.spec.labels).float()
        return labels.T @ features / labels.sum(0).clamp(min=1)[:, None]


@dataclass(frozen=True, eq=False)
class ProtoTraining(fedclade.ClientTrainer):
    """Local training with a penalty on the distance to the global prototypes (eq. 7).

    ``prototypes`` are as in a reply of a client, ``[C, d + 1]``; before the first replies, they are
    ``[0, d + 1]``.
    """

    lam: float
    prototypes: Tensor

    def train_client(self, model, batches, context):
        """Train a client; examples of a label without a global prototype have no penalty."""

        def loss(inputs, targets):
            outputs, features = fedclade.with_features(model, inputs)
            goals = features.detach()
            if len(self.prototypes):
                found = self.prototypes.to(features)[targets]
                goals = torch.where(found[:, -1:] > 0, found[:, :-1], goals)
            return context.loss(outputs, targets) + self.lam * mse_loss(features, goals)

        return context.minimize(model, batches, loss)


@dataclass(frozen=True, eq=False)
class ProtoState(OwnState):
    """State between rounds, with the global prototypes, as in :class:`ProtoTraining`."""

    prototypes: Tensor


@dataclass(frozen=True, kw_only=True)
class FedProto(OwnModels, OneCohort):
    """FedProto: clients train own models towards common prototypes of ``size`` entries."""

    state_type = ProtoState
    requires = replace(
        OwnModels.requires, reports=PrototypeQuery.reveals, disclosures=("prototypes",)
    )

    size: int
    lam: float = 1.0

    def init(self, params, clients):
        """Return the state before round 1, without prototypes."""
        tree = fedclade.ParameterTree.root_only(clients.ids, params)
        return ProtoState(tree, (), torch.zeros(0, self.size + 1))

    def step(self, state, cohort, clients, this_round):
        """Run one round: the cohort trains own models, and reports their prototypes."""
        work = fedclade.ClientWork(
            start=fedclade.FromStored(),
            steps=ProtoTraining(self.lam, state.prototypes),
            store=fedclade.LocalModel(),
            reply=fedclade.NoReply(),
        )
        root = state.tree.nodes[0].params[None]
        updates = clients.train(cohort, root, state.rows(cohort), this_round, work)
        found = clients.ask(PrototypeQuery(updates.ids, size=self.size)).sum(0)
        mean = found / found[:, -1:].clamp(min=1)  # of the clients that have the label
        losses = dict(zip(updates.ids, updates.losses.tolist(), strict=True))
        new = replace(state, keepers=state.keepers_after(updates), prototypes=mean)
        return new, fedclade.RoundLog({}, losses, discrepancy=0.0)


TITLE = "FedProto: Federated prototype learning across heterogeneous clients"
PAPER = Paper(("Tan", "Long", "Liu", "Zhou", "Lu", "Jiang", "Zhang"), 2022, TITLE)
METHOD = Method(name="fedproto", algorithm=FedProto, papers=(PAPER,))
