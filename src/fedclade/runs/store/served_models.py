"""The model that a client of a run was served with: a node's, one of its own, or a mixture of all leaves'."""

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
    """The mixture that a client is served with.

    Parameters
    ----------
    nodes
        The leaves, each with one of the models.
    weights
        Of the client, one for each model, ``[K]``.
    task
        What the models' outputs are, see :class:`~fedclade.ModelMixture`.
    """

    nodes: tuple[Node, ...]
    weights: Tensor
    task: str

    def state_dict(self, layout: Layout) -> dict[str, Tensor]:
        """Return the mixture as a :class:`~fedclade.ModelMixture` takes it: copies on the CPU."""
        tensors = {"weights": self.weights.cpu().clone()}
        for number, node in enumerate(self.nodes):
            model = layout.state_dict(node.model)
            tensors |= {f"models.{number}.{name}": tensor for name, tensor in model.items()}
        return tensors

    @property
    def described(self) -> dict[str, Any]:
        """The mixture as a model card has it."""
        return {
            "nodes": [node.id for node in self.nodes],
            "weights": self.weights.tolist(),
            "task": self.task,
        }


def served_node(run: Run, client: int) -> Node:
    """Return the node whose model a client was served with last: not always its leaf's.

    Where validation data choose, it may be one above; and a client that has no cluster yet is
    served with a cluster's. A client that was not evaluated with the run's models has its leaf's.

    Raises
    ------
    TreeError
        If the tree does not know the client.
    """
    leaf = run.tree.node_for(client)
    for row in run.client_rows:
        if row["round"] == run.model_round and row["client"] == client:
            return run.tree.nodes[row["served_by"]]
    return leaf


def serves_mixtures(run: Run) -> bool:
    """Return whether clients of a run are served with mixtures of all leaves' models.

    Their weights say so, and where a network has no weights, the method, if it is fedclade's or a
    package's.
    """
    if any("mixture" in kept for kept in run.kept.values()):
        return True
    method = method_of_run(run.config["algorithm"]["name"])
    return method is not None and method.algorithm.mixture is not Algorithm.mixture


def client_mixture(run: Run, client: int) -> ClientMixture | None:
    """Return the mixture that a client was served with; None if the run's clients are served with single models.

    Raises
    ------
    RunError
        If the run has no weights of the client, or does not say what its models' outputs are.
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
