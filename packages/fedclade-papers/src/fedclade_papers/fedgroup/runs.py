"""Methods of FedGroup's tables and figures, and the stored results of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fedclade import Algorithm, FedAvg, FedGroup, Round, Run, Updates
from fedclade.training import SimulatedClients, choose_device
from fedclade_papers.cache import ResultCache, Settings, local_of
from fedclade_papers.fedgroup.tasks import LABELS, Task, federation_of

Found = dict[str, Any]
"""Stored results of a run, in JSON's types."""

DIGITS = 4
"""Number of decimals of a stored accuracy."""

FEWEST_ROUNDS = 25
"""Smallest number of rounds that can show claims on runs of 200 rounds."""

OF_A_RUN = ("rounds", "selected", "epochs", "batch_size", "pretrain_scale", "eta_g")
"""Settings on which a run depends, in addition to the number of clients.

Tables and figures with equal ones share runs.
"""

WAYS: Mapping[str, Mapping[str, Any]] = {
    "FedGroup": {},
    "FedGrouProx": {},
    "FedGroup-RCC": {"rcc": True},
    "FedGroup-RAC": {"rac": True},
    "FedGroup, sampled, by latest update": {"cold_start": "sampled"},
    "FedGroup, sampled, by position": {"cold_start": "sampled", "direction": "position"},
}
"""FedGroup's variants. In the last two, clients join in the first round that samples them."""


def method(name: str, task: Task, settings: Settings) -> tuple[Algorithm, float]:
    """Return an algorithm and the μ of its local training.

    The name is ``FedAvg``, ``FedProx`` or one of :data:`WAYS`.
    """
    if name in ("FedAvg", "FedProx"):
        return FedAvg(), task.mu if name == "FedProx" else 0.0
    common = {
        "groups": task.groups,
        "pretrain_scale": settings["pretrain_scale"],
        "eta_g": settings["eta_g"],
    }
    mu = task.mu if name == "FedGrouProx" else None
    return FedGroup(**common, mu=mu, **WAYS[name]), 0.0


def runs_of(
    cache: ResultCache,
    settings: Settings,
    task: Task,
    name: str,
    *,
    seeds: Sequence[int] | None = None,
    labels_per_client: int = LABELS,
) -> list[Found]:
    """Run a method with every seed.

    Parameters
    ----------
    cache, settings, task
        Cache and settings of the experiment, and the task.
    name
        Name of the method, as in :func:`method`.
    seeds
        Seeds of data and run. None: those of the settings.
    labels_per_client
        Number of labels of which each client has images.

    Returns
    -------
    list
        For each seed ``accuracy`` and ``discrepancy`` by round, and the accuracy of the ``groups``.
    """
    shared = {key: settings[key] for key in OF_A_RUN}
    within = cache.within({**shared, "clients": {task.data: settings["clients"][task.data]}})
    labels = "" if labels_per_client == LABELS else f", labels per client {labels_per_client}"
    key = f"{task.data}, {task.model}{labels}, {name}"

    def make(seed: int) -> Found:
        federation = federation_of(task.data, settings, within, seed, labels_per_client)
        algorithm, mu = method(name, task, settings)
        run = within.simulate(
            *(
                algorithm,
                task.maker(federation),
                federation,
                {**settings, "lr": task.lr, "mu": mu},
                seed,
            ),
            key=f"{key}, seed {seed}",
            client_fraction=min(1.0, settings["selected"] / len(federation)),
            engine=task.engine,
        )
        return {
            "accuracy": [round(row["accuracy_weighted"], DIGITS) for row in run.metric_rows],
            "discrepancy": [round(row["discrepancy"], DIGITS) for row in run.metric_rows],
            "groups": _accuracy_of_groups(run),
        }

    return within.by_seed(key, settings["seeds"] if seeds is None else seeds, make)


def _accuracy_of_groups(run: Run) -> dict[str, list[float | None]]:
    """Return the accuracy of each leaf's members in every round, weighted by their sizes.

    It is None in rounds in which the leaf has no members.
    """
    right = defaultdict[tuple[int, int], float](float)
    weight = defaultdict[tuple[int, int], int](int)
    for row in run.client_rows:
        place = row["cluster"], row["round"]
        right[place] += row["accuracy"] * row["n_train"]
        weight[place] += row["n_train"]
    rounds = range(1, len(run.metric_rows) + 1)
    return {
        f"{leaf.id}": [
            round(right[place] / weight[place], DIGITS)
            if (place := (leaf.id, number)) in weight
            else None
            for number in rounds
        ]
        for leaf in run.tree.leaves
    }


def pretrained(
    cache: ResultCache, settings: Settings, task: Task, seed: int
) -> tuple[Updates, list[int]]:
    """Return the updates of all n clients after one epoch from w_0, and rows of αm of them.

    The rows are those of the clients that Algorithm 3 chooses.
    """
    federation = federation_of(task.data, settings, cache, seed)
    module = task.maker(federation)(seed)
    clients = SimulatedClients(federation, module, choose_device(cache.device), task.engine)
    initial = clients.layout.flatten(module)
    this_round = Round(
        1, local_of({**settings, "epochs": 1, "lr": task.lr}), seed, purpose="pretrain"
    )
    wanted = min(len(federation), settings["pretrain_scale"] * task.groups)
    chosen = this_round.generator("pretrain").choice(len(federation), wanted, replace=False)
    ids = list(federation.ids)
    return clients.train(ids, initial[None], [0] * len(ids), this_round), sorted(chosen.tolist())
