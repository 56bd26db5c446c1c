"""Runs for the tables and figures of the FedGroup paper: methods, settings and stored results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fedclade import Algorithm, ClientWork, FedAvg, FedGroup, Nothing, Round, Run, Updates
from fedclade.training import SimulatedClients, choose_device
from fedclade_papers.cache import ResultCache, Settings, local_of
from fedclade_papers.fedgroup.tasks import LABELS, Task, federation_of

Found = dict[str, Any]
"""Results of a run that are stored, in types that JSON has."""

DIGITS = 4
"""Number of decimals of a stored accuracy."""

FEWEST_ROUNDS = 25
"""Smallest number of rounds that can show claims on runs of 200 rounds."""

OF_A_RUN = ("rounds", "selected", "epochs", "batch_size", "pretrain_scale", "eta_g")
"""Settings on which a run depends, in addition to the number of clients.

Tables and figures with equal values of these settings share their runs.
"""

WAYS: Mapping[str, Mapping[str, Any]] = {
    "FedGroup": {},
    "FedGrouProx": {},
    "FedGroup-RCC": {"rcc": True},
    "FedGroup-RAC": {"rac": True},
    "FedGroup, sampled, by latest update": {"cold_start": "sampled"},
    "FedGroup, sampled, by position": {"cold_start": "sampled", "direction": "position"},
}
"""Options of FedGroup's variants, by name.

In the last two variants, a client joins a group in the first round in which it is sampled.
"""


def method(name: str, task: Task, settings: Settings) -> tuple[Algorithm, float]:
    """Build a method of the paper's tables.

    The name is ``FedAvg``, ``FedProx`` or a key of :data:`WAYS`.

    Returns
    -------
    tuple
        The algorithm, and the weight μ of the proximal term in local training (0 if the algorithm
        sets the weight itself).
    """
    if name in ("FedAvg", "FedProx"):
        mu = task.mu if name == "FedProx" else 0.0
        return FedAvg(), mu
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
    """Run a method on a task with every seed, and return the stored results.

    Parameters
    ----------
    cache, settings, task
        Cache and settings of the experiment, and the task (data set and model).
    name
        Name of the method, as in :func:`method`.
    seeds
        Seeds of the data and the run. None: the seeds in the settings.
    labels_per_client
        Number of labels in each client's images.

    Returns
    -------
    list
        For each seed a dictionary: ``accuracy`` and ``discrepancy`` have a value for every round,
        and ``groups`` has the accuracy of each group in every round.
    """
    shared = {key: settings[key] for key in OF_A_RUN}
    within = cache.within({**shared, "clients": {task.data: settings["clients"][task.data]}})
    if labels_per_client == LABELS:
        labels = ""
    else:
        labels = f", labels per client {labels_per_client}"
    key = f"{task.data}, {task.model}{labels}, {name}"

    def make(seed: int) -> Found:
        federation = federation_of(
            task.data, settings, within, seed=seed, labels_per_client=labels_per_client
        )
        algorithm, mu = method(name, task, settings)
        run = within.simulate(
            algorithm,
            task.maker(federation),
            federation,
            settings={**settings, "lr": task.lr, "mu": mu},
            seed=seed,
            key=f"{key}, seed {seed}",
            client_fraction=min(1.0, settings["selected"] / len(federation)),
            engine=task.engine,
        )
        return {
            "accuracy": [round(row["accuracy_weighted"], DIGITS) for row in run.metric_rows],
            "discrepancy": [round(row["discrepancy"], DIGITS) for row in run.metric_rows],
            "groups": _accuracy_of_groups(run),
        }

    chosen_seeds: Sequence[int] = settings["seeds"] if seeds is None else seeds
    return within.by_seed(key, chosen_seeds, make)


def _accuracy_of_groups(run: Run) -> dict[str, list[float | None]]:
    """Return the accuracy of each final group's members in every round.

    The accuracy is the mean over the members, weighted by their numbers of training examples. It is
    None in rounds in which the group has no members.
    """
    right = defaultdict[tuple[int, int], float](float)
    weight = defaultdict[tuple[int, int], int](int)
    for row in run.client_rows:
        place = row["cluster"], row["round"]
        right[place] += row["accuracy"] * row["n_train"]
        weight[place] += row["n_train"]
    accuracy: dict[str, list[float | None]] = {}
    for leaf in run.tree.leaves:
        of_leaf: list[float | None] = []
        for number in range(1, len(run.metric_rows) + 1):
            place = leaf.id, number
            if place in weight:
                of_leaf.append(round(right[place] / weight[place], DIGITS))
            else:
                of_leaf.append(None)
        accuracy[f"{leaf.id}"] = of_leaf
    return accuracy


def pretrained(
    cache: ResultCache, settings: Settings, task: Task, seed: int
) -> tuple[Updates, list[int]]:
    """Train all clients for one epoch from the initial model w_0, as FedGroup's pre-training does.

    Returns
    -------
    tuple
        The updates of all n clients; and the rows of the αm clients that Algorithm 3 chooses for
        pre-training, where m is the number of groups and α is the setting ``pretrain_scale``.
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
    work = ClientWork(store=Nothing())
    updates = clients.train(
        ids, models=initial[None], assignment=[0] * len(ids), this_round=this_round, work=work
    )
    return updates, sorted(chosen.tolist())
