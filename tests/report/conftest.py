"""Runs made by hand, small enough to check every number of a table or a figure against."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedclade.core.tree import ParameterTree
from fedclade.runs.store.run import Run
from fedclade.runs.store.tree_files import SimilarityMatrix
from fedclade.tasks.metrics import spread


def summary(algorithm: str = "cfl", **changes) -> dict:
    """Return a summary whose numbers a test can override by name."""
    values = {
        "algorithm": algorithm,
        "data": "digits, 4 clients",
        "model": "mlp",
        "seed": 0,
        "rounds": 4,
        "clients": 4,
        "accuracy": spread([0.5, 0.7, 0.9, 0.9]),
        "clusters": {"found": 1, "true": None, "ari": None, "nmi": None, "sizes": [4]},
        "target": {
            "accuracy": None,
            "share_of_clients": None,
            "rounds_to_target": None,
            "bytes_to_target": None,
        },
        "bytes_up": 1000,
        "bytes_down": 2000,
        "seconds": {"total": 61.0, "train": 60.0, "evaluate": 0.5, "server": 0.5},
        "device": "cpu",
    }
    return values | changes


@pytest.fixture
def summary_run() -> Callable[..., Run]:
    """A run of which only the summary matters."""

    def make(algorithm: str = "cfl", mean: float = 0.7, **changes) -> Run:
        tree = ParameterTree.root_only(range(4), torch.zeros(1))
        changes = {"accuracy": spread([mean] * 4)} | changes
        return Run(summary(algorithm, **changes), {}, tree, [], [], [], [])

    return make


def client_rows(tree: ParameterTree, number: int, truth: Sequence[int] | None) -> list[dict]:
    """Score every client by its round and its cluster: 0.5 + 0.01 round + 0.1 node, within [0, 1]."""
    return [
        {
            "round": number,
            "client": client,
            "name": f"client-{client}",
            "cluster": leaf,
            "true_cluster": None if truth is None else truth[client],
            "accuracy": min(1.0, 0.5 + 0.01 * number + 0.1 * leaf),
            "loss": float(np.log(10.0 + leaf)),  # perplexity 10 + node
        }
        for client, leaf in sorted(tree.leaf_of.items())
    ]


def cluster_rows(tree: ParameterTree, number: int, truth: Sequence[int] | None) -> list[dict]:
    """Give every cluster norms, and criteria if it has two members."""
    rows = []
    for leaf in tree.leaves:
        two = len(leaf.members) > 1
        row = {"round": number, "node": leaf.id, "mean_norm": 1 / number, "max_norm": 2 / number}
        row |= {"alpha_cross_max": 0.1 if two else None, "gamma_bound": 0.67 if two else None}
        rows.append(row | {"separation_gap": 0.2 if two and truth is not None else None})
    return rows


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """A run with splits where the test wants them, between the first and the second half of a cluster."""

    def make(
        splits: Sequence[tuple[int, int]] = (),
        *,
        clients: int = 4,
        rounds: int = 4,
        truth: Sequence[int] | None = None,
        star: bool = False,
        language: bool = False,
        every: int = 1,
        **changes,
    ) -> Run:
        zero = torch.zeros(1)
        alone = [[client] for client in range(clients)]
        tree = (
            ParameterTree.star(alone, zero)
            if star
            else ParameterTree.root_only(range(clients), zero)
        )
        rows, clusters, events, similarities = [], [], [], {}
        for number in range(1, rounds + 1):
            clusters += cluster_rows(tree, number, truth)
            for leaf in tree.leaves:
                if len(leaf.members) > 1:
                    alpha = np.full((len(leaf.members),) * 2, 0.25) + 0.75 * np.eye(
                        len(leaf.members)
                    )
                    similarities[leaf.id] = SimilarityMatrix(leaf.id, number, leaf.members, alpha)
            for node in (node for when, node in splits if when == number):
                members = tree.nodes[node].members
                parts = [members[: len(members) // 2], members[len(members) // 2 :]]
                criteria = {
                    "mean_norm": 1 / number,
                    "max_norm": 2 / number,
                    "alpha_cross_max": -0.1,
                    "gamma_bound": 0.74,
                }
                tree = tree.split(
                    node,
                    parts,
                    params=zero,
                    cached=[zero, zero],
                    round_number=number,
                    criteria=criteria,
                )
                children = [child.id for child in tree.children(node)]
                event = {"round": number, "kind": "split", "node": node, "children": children}
                events.append({**event, "clusters": [list(part) for part in parts], **criteria})
            if number % every == 0 or number == rounds:
                rows += client_rows(tree, number, truth)
        known = {"true": None if truth is None else len(set(truth)), "found": len(tree.leaves)}
        sizes = [len(leaf.members) for leaf in tree.leaves]
        changes = {
            "clusters": {"ari": None, "nmi": None, "sizes": sizes, **known},
            "rounds": rounds,
        } | changes
        if language:
            changes["perplexity"] = spread([10.0, 11.0, 12.0, 12.0])
        run = Run(summary(**changes), {}, tree, [], clusters, rows, events)
        return replace(run, similarities=tuple(similarities.values()))

    return make


def scored(run: Run, name: str, *, higher: bool, share: bool, target: float | None = None) -> Run:
    """Return a run that is scored by another metric: its numbers are those that its accuracies were."""

    def renamed(row: dict) -> dict:
        return {
            f"{name}{key.removeprefix('accuracy')}" if key.startswith("accuracy") else key: v
            for key, v in row.items()
        }

    final = [row["accuracy"] for row in run.client_rows if row["round"] == run.summary["rounds"]]
    noted = {"metrics": [{"name": name, "higher_is_better": higher, "share": share}]}
    noted |= {name: spread(final, lower_is_better=not higher)} if final else {}
    noted["target"] = renamed(run.summary["target"]) | {name: target}
    rows = {
        "client_rows": [*map(renamed, run.client_rows)],
        "metric_rows": [*map(renamed, run.metric_rows)],
    }
    return replace(run, summary=renamed(run.summary) | noted, **rows)
