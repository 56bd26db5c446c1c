"""Model with which a client of a run was evaluated, which is also the model to deploy to it.

It is the model of a node of the tree, a model of the client's own, or a mixture of the models of
all leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedclade.algorithms import Requires, build_algorithm, method_of_run
from fedclade.core import ConfigError, Layout, Node, RunError, TreeError, reading_folder
from fedclade.runs.store.contents import RowTable
from fedclade.runs.store.run import Run
from fedclade.tasks import TASKS

SHOWN = 5
"""Largest number of clients that a message names."""


@dataclass(frozen=True, eq=False)
class ClientMixture:
    """Mixture of K models with which a client is evaluated.

    The mixture combines the models' predictions, weighted by the client's weights.

    Parameters
    ----------
    nodes
        The K leaves of the tree, each with one of the models.
    weights
        The client's weight of each model, ``[K]``.
    task
        Kind of the task, which defines how outputs are combined; see
        :class:`~fedclade.ModelMixture`.
    """

    nodes: tuple[Node, ...]
    weights: Tensor
    task: str

    def state_dict(self, layout: Layout) -> dict[str, Tensor]:
        """Return the state dict of a :class:`~fedclade.ModelMixture` with these models and weights.

        The tensors are copies on the CPU. ``layout`` maps a model vector to the module's tensors.
        """
        tensors = {"weights": self.weights.cpu().clone()}
        for number, node in enumerate(self.nodes):
            model = layout.state_dict(node.model)
            tensors |= {f"models.{number}.{name}": tensor for name, tensor in model.items()}
        return tensors

    @property
    def described(self) -> dict[str, Any]:
        """Nodes, weights and task of the mixture, as values for a model card."""
        return {
            "nodes": [node.id for node in self.nodes],
            "weights": self.weights.tolist(),
            "task": self.task,
        }


def find_client(run: Run, client: int | str) -> int:
    """Return the id of a client of a run, given by its id or its name.

    A text is the client's name, or its id in digits.

    Raises
    ------
    TreeError
        If the run has no such client, or a text matches several clients.
    """
    if isinstance(client, int):
        run.tree.path(client)  # raises a TreeError for a client that the run does not have
        return client
    ids_by_name = _list_ids_by_name(run)
    found = set(ids_by_name.get(client, ()))
    if client.isdecimal() and int(client) in run.tree.leaf_of:
        found.add(int(client))
    if len(found) == 1:
        return found.pop()
    if not found:
        raise TreeError(
            f"the run has no client {client!r}; its clients are {_show_clients(run, ids_by_name)}"
        )
    raise TreeError(
        f"{client!r} is the name or the id of several clients, with the ids "
        f"{', '.join(map(str, sorted(found)))}; in Python, pass the id as a number, such as "
        f"client={min(found)}"
    )


def _list_ids_by_name(run: Run) -> dict[str, list[int]]:
    """Return the ids of the run's clients by their names, as recorded by its evaluations."""
    names: dict[int, str] = {}
    for block in RowTable.of(run.client_rows).blocks:
        names.update(zip(map(int, block["client"]), map(str, block["name"]), strict=True))
    ids: dict[str, list[int]] = {}
    for client, name in names.items():
        ids.setdefault(name, []).append(client)
    return ids


def _show_clients(run: Run, ids_by_name: Mapping[str, Sequence[int]]) -> str:
    """Return the names of some clients for a message, or the range of their ids."""
    names = [name for name in ids_by_name if name]
    if not names:
        ids = sorted(run.tree.leaf_of)
        return f"{ids[0]} to {ids[-1]}"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


def served_node(run: Run, client: int) -> Node:
    """Return the node of the tree with whose model a client was last evaluated.

    This is not always the client's leaf: if the node is chosen by validation data, it may be an
    ancestor of the leaf, and a client that is in no cluster yet is evaluated with the model of some
    cluster. For a client that was not evaluated in the round of the run's models, the result is the
    leaf.

    Raises
    ------
    TreeError
        If the client is not in the tree.
    """
    leaf = run.tree.node_for(client)
    for row in run.client_rows:
        if row["round"] == run.model_round and row["client"] == client:
            return run.tree.nodes[row["served_by"]]
    return leaf


def requires_of(run: Run) -> Requires | None:
    """Return the requirements of a run's algorithm, such as models of clients' own.

    The result is None if the algorithm is neither part of fedclade nor of an installed package. The
    requirements depend on the hyper-parameters, which are read from the run's config. If one of
    them cannot be read, because it was an object of the script that started the run, the result is
    the requirements for the default hyper-parameters.
    """
    options = dict(run.config["algorithm"])
    name = options.pop("name")
    method = method_of_run(name)
    if method is None:
        return None
    try:
        with reading_folder(trust=run.is_trusted):
            return build_algorithm(name, options, {}).requires
    except ConfigError:
        return method.requires


def serves_own(run: Run) -> bool:
    """Return whether some clients of a run were evaluated with models of their own.

    The result depends on the algorithm; it is False for an unknown algorithm.
    """
    requires = requires_of(run)
    return requires is not None and requires.own_models


def serves_mixtures(run: Run) -> bool:
    """Return whether clients of a run are evaluated with mixtures of all leaves' models.

    This is the case if the run has clients' mixture weights. Over a network, where clients store
    their weights themselves, the algorithm's requirements decide.
    """
    if any("mixture" in kept for kept in run.kept.values()):
        return True
    requires = requires_of(run)
    return requires is not None and requires.mixture is not None


def client_mixture(run: Run, client: int) -> ClientMixture | None:
    """Return the mixture of models with which a client was evaluated.

    The result is None if the run's clients are evaluated with single models.

    Raises
    ------
    RunError
        If the run has no weights of the client, the numbers of weights and models differ, or the
        run folder does not state the kind of the task.
    """
    if not serves_mixtures(run):
        return None
    weights = run.kept.get(client, {}).get("mixture")
    leaves = run.tree.leaves
    instead = "export single models with --node"
    if weights is None and "network" in run.config:
        raise RunError(
            f"client {client} is evaluated with a mixture of all models, but over a network only "
            f"the client stores its weights of the models; {instead}"
        )
    if weights is None:
        raise RunError(
            f"client {client} is evaluated with a mixture of all models, but this run has no "
            f"weights of the client, since it was neither trained nor evaluated; {instead}"
        )
    if len(weights) != len(leaves):
        raise RunError(
            f"the run is damaged: client {client} has {len(weights)} weights for {len(leaves)} "
            "models; restore the run folder from a copy"
        )
    task = run.summary.get("task") or run.config.get("task", {}).get("name")
    if task not in TASKS:
        raise RunError(
            "this run folder was written by a version that did not record the kind of the task, so "
            "it is unknown how to combine the models' outputs; run its config.toml again, or "
            f"{instead}"
        )
    return ClientMixture(leaves, weights, task)
