"""Model with which a client of a run was evaluated.

It is a node's model, a model of the client's own, or a mixture of all leaves' models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedclade.algorithms import Algorithm, method_of_run
from fedclade.core import Layout, Node, RunError
from fedclade.runs.store.run import Run
from fedclade.tasks import TASKS


@dataclass(frozen=True, eq=False)
class ClientMixture:
    """Mixture of models with which a client is evaluated.

    Parameters
    ----------
    nodes
        The leaves, each with one of the K models.
    weights
        The client's weight of each model, ``[K]``.
    task
        Kind of the models' outputs, see :class:`~fedclade.ModelMixture`.
    """

    nodes: tuple[Node, ...]
    weights: Tensor
    task: str

    def state_dict(self, layout: Layout) -> dict[str, Tensor]:
        """Return the state dict of a :class:`~fedclade.ModelMixture`: copies on the CPU."""
        tensors = {"weights": self.weights.cpu().clone()}
        for number, node in enumerate(self.nodes):
            model = layout.state_dict(node.model)
            tensors |= {f"models.{number}.{name}": tensor for name, tensor in model.items()}
        return tensors

    @property
    def described(self) -> dict[str, Any]:
        """Description of the mixture for a model card."""
        return {
            "nodes": [node.id for node in self.nodes],
            "weights": self.weights.tolist(),
            "task": self.task,
        }


def served_node(run: Run, client: int) -> Node:
    """Return the node with whose model a client was last evaluated, not always its leaf.

    If validation data choose the node, it may be an ancestor of the leaf. A client that has no
    cluster yet is evaluated with the model of a cluster. For a client that was not evaluated in the
    round of the run's models, it is the leaf.

    Raises
    ------
    TreeError
        If the tree does not have the client.
    """
    leaf = run.tree.node_for(client)
    for row in run.client_rows:
        if row["round"] == run.model_round and row["client"] == client:
            return run.tree.nodes[row["served_by"]]
    return leaf


def serves_mixtures(run: Run) -> bool:
    """Return whether clients of a run are evaluated with mixtures of all leaves' models.

    The clients' stored weights show it. If there are none, as in a network, the method decides, if
    it is one of fedclade or of an installed package.
    """
    if any("mixture" in kept for kept in run.kept.values()):
        return True
    method = method_of_run(run.config["algorithm"]["name"])
    return method is not None and method.algorithm.mixture is not Algorithm.mixture


def client_mixture(run: Run, client: int) -> ClientMixture | None:
    """Return the mixture with which a client was evaluated.

    None if the run's clients are evaluated with single models.

    Raises
    ------
    RunError
        If the run has no weights of the client, has another number of weights than models, or does
        not state the kind of its models' outputs.
    """
    if not serves_mixtures(run):
        return None
    weights = run.kept.get(client, {}).get("mixture")
    leaves = run.tree.leaves
    instead = "export single models with --node"
    if weights is None and "network" in run.config:
        raise RunError(
            f"client {client} is served with a mixture of all models, and over a network its "
            f"weights stay with it; {instead}"
        )
    if weights is None:
        raise RunError(
            f"client {client} is served with a mixture of all models, and this run has no weights "
            f"of it: it was neither trained nor evaluated; {instead}"
        )
    if len(weights) != len(leaves):
        raise RunError(
            f"the run is damaged: client {client} has {len(weights)} weights of {len(leaves)} "
            "models"
        )
    task = run.summary.get("task") or run.config.get("task", {}).get("name")
    if task not in TASKS:
        raise RunError(
            "this run folder was written before the kind of its task was kept, and it cannot be "
            f"known how its models predict together; run its config.toml again, or {instead}"
        )
    return ClientMixture(leaves, weights, task)
