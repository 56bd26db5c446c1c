"""Three published methods, written outside of fedclade: Ditto, SCAFFOLD and FedEM.

Each method describes the work of its clients by one value, a ``ClientWork``: the model from which a
client starts, its training steps, what it stores and what it replies. The trained models are
bit for bit equal to those of fedclade's own methods (``tests/test_own_personal_method.py``).

python examples/own_personal_method.py
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fedclade
from fedclade import (
    OWN,
    Algorithm,
    Clients,
    ClientWork,
    ControlVariates,
    Em,
    EvaluatedModels,
    FromStored,
    LocalModel,
    Mixture,
    NoReply,
    ParameterTree,
    Proximal,
    Requires,
    RoundLog,
    RoundPlan,
    RunFacts,
    State,
    Updates,
    mean,
)
from fedclade.algorithms import ClusterUpdate, OneCohort
from fedclade.core import unpacked

# Ditto (Li et al. 2021): clients train a global model w, and each a personal model v near w.


@dataclass(frozen=True, eq=False)
class DittoState(State):
    """The global model w (in the tree), the clients that have a v, and the initial v."""

    owners: tuple[int, ...]
    initial: Tensor


@dataclass(frozen=True, kw_only=True)
class Ditto(Algorithm[DittoState]):
    """Ditto: each client trains a personal model, with a proximal term towards the global one."""

    state_type = DittoState
    requires = Requires(own_models=True)

    lam: float = 1.0

    def init(self, params: Tensor, clients: Clients) -> DittoState:
        """Assign all clients to the global model; no client has a personal model yet."""
        return DittoState(ParameterTree.root_only(clients.ids, params), (), params)

    def step(
        self, state: DittoState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[DittoState, RoundLog]:
        """Train w as in FedAvg, and each v with a proximal term towards w before the round."""
        global_update = fedclade.train_root(state, cohort, clients, this_round)
        work = ClientWork(
            start=FromStored(),  # v, as the client stores it
            steps=Proximal(self.lam),  # towards the anchor, which is w
            store=LocalModel(),
            reply=NoReply(),  # v never leaves the client
        )
        models = torch.stack([state.tree.nodes[0].params, state.initial])
        updates = clients.train(
            cohort,
            models,
            [OWN if client in state.owners else 1 for client in cohort],
            this_round,
            work=work,
            anchors=[0] * len(cohort),
            sent_before=True,  # w was sent for its own training
        )
        tree = fedclade.move_clusters(state.tree, [global_update])
        owners = tuple(sorted({*state.owners, *updates.ids}))
        return DittoState(tree, owners, state.initial), fedclade.log_of([global_update])

    def models_for(self, state: DittoState, clients: Clients) -> EvaluatedModels:
        """Return the global model, and the clients that are evaluated with their own v instead."""
        return EvaluatedModels(nodes=state.tree.leaf_of, own=state.owners)


# SCAFFOLD (Karimireddy et al. 2020): control variates c and c_i correct the drift of clients.


@dataclass(frozen=True, eq=False)
class ScaffoldState(State):
    """The global model (in the tree) and the server's control variate c."""

    control: Tensor


@dataclass(frozen=True, kw_only=True)
class Scaffold(Algorithm[ScaffoldState]):
    """SCAFFOLD: clients add c − c_i to every gradient."""

    state_type = ScaffoldState

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check that local training is plain SGD, if its settings are known."""
        if run.local is not None:
            ControlVariates().check_training(run.local)
        return super().check(run)

    def init(self, params: Tensor, clients: Clients) -> ScaffoldState:
        """Assign all clients to the global model, with c = 0."""
        return ScaffoldState(ParameterTree.root_only(clients.ids, params), torch.zeros_like(params))

    def step(
        self, state: ScaffoldState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[ScaffoldState, RoundLog]:
        """Run one round: update the global model and c by the replies of the cohort."""
        updates = clients.train(
            cohort,
            torch.stack([state.tree.nodes[0].params, state.control]),
            [0] * len(cohort),
            this_round,
            work=ClientWork(steps=ControlVariates()),  # each client stores its c_i
            anchors=[1] * len(cohort),  # c
        ).select(sorted(cohort))
        cluster = ClusterUpdate.of(0, updates, this_round)
        control = state.control + self.control_step(state.control, updates, clients, this_round)
        tree = fedclade.move_clusters(state.tree, [cluster])
        return ScaffoldState(tree, control), fedclade.log_of([cluster])

    def control_step(
        self, control: Tensor, updates: Updates, clients: Clients, this_round: RoundPlan
    ) -> Tensor:
        """Return the mean change of the c_i over all clients, where c_i⁺ − c_i = −c − Δ_i/(K η)."""
        D = updates.n_parameters  # the buffers after the D parameters have no control variate
        sizes = updates.sizes
        steps = [this_round.local.steps_with(int(size)) for size in sizes.tolist()]
        weights = sizes / (torch.tensor(steps, dtype=torch.float64) * this_round.lr)
        deltas = updates.required_deltas[:, :D]
        change = torch.zeros_like(control)
        change[:D] = -(weights.to(deltas) @ deltas + sizes.sum().to(control) * control[:D])
        return change / sum(clients.sizes.values())


# FedEM (Marfoq et al. 2021): all clients share several models, and each client predicts with a
# mixture of them, with weights of its own.


@dataclass(frozen=True, kw_only=True)
class FedEM(OneCohort[State]):
    """FedEM: clients train all models, and each model weights the examples by responsibilities."""

    n_models: int = 3

    @property
    def requires(self) -> Requires:
        """Requirements: several different initial models, and clients that mix all models."""
        return Requires(initial_models=self.n_models, mixture=Mixture(), soft_clusters=True)

    def init(self, params: Tensor, clients: Clients) -> State:
        """Make a leaf of each initial model ``[n_models, S]``; no client is in a leaf yet."""
        return State(ParameterTree.star([()] * self.n_models, params, clients.ids))

    def models_for(self, state: State, clients: Clients) -> EvaluatedModels:
        """Evaluate every client with the mixture of the models of all leaves."""
        return EvaluatedModels(nodes=state.tree.leaf_of, mixture=Mixture())

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[State, RoundLog]:
        """Let the cohort train all models, and move each model by the mean of its updates."""
        tree = state.tree
        leaves = [leaf.id for leaf in tree.leaves]
        models, _ = tree.models(leaves)
        work = ClientWork(steps=Em(Mixture()))  # each client stores its weights
        updates = clients.train(cohort, models, [0] * len(cohort), this_round, work)
        updates = updates.select(sorted(cohort))
        losses = dict(zip(updates.ids, updates.losses.tolist(), strict=True))
        if updates.components is None or len(updates.ids) < max(1, this_round.min_clients):
            return state, RoundLog({}, losses)
        n_parameters = updates.n_parameters // self.n_models
        steps, _ = unpacked(mean(updates), self.n_models, models.shape[1], n_parameters)
        largest = zip(updates.ids, updates.components.tolist(), strict=True)
        tree = tree.reassigned({client: leaves[component] for client, component in largest})
        for leaf, model_step in zip(leaves, steps, strict=True):
            tree = tree.moved(leaf, model_step)
        return replace(state, tree=tree), RoundLog({}, losses)


if __name__ == "__main__":
    data = fedclade.load_federation("digits", clients=20, shift="label_swap", clusters=2)
    for method in (fedclade.FedAvg(), Ditto(lam=0.1), Scaffold(), FedEM(n_models=2)):
        run = fedclade.simulate(method, "mlp", data, rounds=15)
        print(f"{type(method).__name__:10} accuracy {100 * run.summary['accuracy']['mean']:.1f} %")
