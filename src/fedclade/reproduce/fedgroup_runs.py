"""What is behind FedGroup's tables and figures: its federations, its methods, and what is kept of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from fedclade.algorithms import Algorithm, FedAvg, FedGroup
from fedclade.clients import Round
from fedclade.data import load_federation
from fedclade.data.federation import Federation
from fedclade.data.sources import load_pool
from fedclade.local import LocalSpec
from fedclade.models import build_model
from fedclade.reproduce.experiment import Bench, Settings
from fedclade.simulation import simulate
from fedclade.store import Run
from fedclade.updates import Updates
from fedclade.world import Maker, World

Found = dict[str, Any]
"""What is kept of a run, as JSON has it."""

DIGITS = 4
"""Decimals of an accuracy that are kept."""

TOLD_AFTER = 25
"""Rounds from which on a run can tell what is claimed of runs of 200."""

SHARES_OUT = (
    "The exponent of the clients' power law and the share of test data are not in the paper: 2.5, and a fifth of each "
    "client's own; MNIST's own test split is shared out too, as the paper counts 69,035 examples."
)


@dataclass(frozen=True)
class Task:
    """A data set with a model, as in Table II.

    Parameters
    ----------
    data
        A data set of :attr:`Settings` ``clients``.
    model, hidden
        A model of the library; its hidden units, where it has such.
    groups
        m, from the captions of figures 3 and 4.
    lr, mu
        η, and μ of FedProx: the settings that FedGroup takes over from Li et al. 2020, appendix C.
    """

    data: str
    model: str
    groups: int
    lr: float
    mu: float
    hidden: int | None = None

    def maker(self, federation: Federation) -> Maker:
        """Return what makes the model from a seed."""
        schema = federation.pool.schema

        def make(seed: int) -> nn.Module:
            return build_model(
                self.model,
                input_shape=schema.input_shape,
                outputs=schema.outputs,
                task=schema.task,
                vocabulary_size=schema.vocabulary_size,
                seed=seed,
                arguments={} if self.hidden is None else {"hidden": self.hidden},
            )

        return make

    @property
    def engine(self) -> str:
        """The engine that is known to be the fastest for dense models; for others that is measured."""
        return "stacked" if self.model in ("mclr", "mlp") else "auto"


def there(tasks: Mapping[str, Task], bench: Bench, settings: Settings) -> list[str]:
    """Return the tasks of the settings whose data is at hand, or could come from the Hub."""
    return [name for name in settings["tasks"] if bench.data_dir is None or bench.has(tasks[name].data)]


def absent(tasks: Mapping[str, Task], bench: Bench, settings: Settings) -> list[str]:
    """Say of the other tasks that they were not measured."""
    measured = there(tasks, bench, settings)
    return [f"{name} was not measured: its data is not at hand." for name in settings["tasks"] if name not in measured]


def method(name: str, task: Task, settings: Settings) -> tuple[Algorithm, float]:
    """Return an algorithm of Table III, and the μ of its local training.

    Parameters
    ----------
    name
        ``FedAvg``, ``FedProx``, ``FedGroup-RCC``, ``FedGroup-RAC``, ``FedGroup`` or ``FedGrouProx``.
    task, settings
        Give m and μ, and α and η_g.
    """
    if name in ("FedAvg", "FedProx"):
        return FedAvg(), task.mu if name == "FedProx" else 0.0
    algorithm = FedGroup(
        groups=task.groups,
        pretrain_scale=settings["pretrain_scale"],
        eta_g=settings["eta_g"],
        mu=task.mu if name == "FedGrouProx" else None,
        rcc=name == "FedGroup-RCC",
        rac=name == "FedGroup-RAC",
    )
    return algorithm, 0.0


def federation_of(data: str, settings: Settings, bench: Bench, seed: int, labels_per_client: int = 2) -> Federation:
    """Return the clients of a data set of Table II.

    Images of digits are all shared out, those of the test split too, in sizes from a power law; each client is tested
    on a fifth of its own. The other data sets know whose their examples are.
    """
    common: dict[str, Any] = {
        "clients": settings["clients"][data],
        "samples_per_client": settings["largest_client"].get(data),
        "seed": seed,
    }
    if data in ("mnist", "digits"):
        pool = load_pool(data, data_dir=bench.data_dir)
        everything = replace(pool, train=np.arange(len(pool.x)), test=np.arange(0))
        sizes = {"labels_per_client": labels_per_client}
        return load_federation(everything, partition="power_law", partition_arguments=sizes, **common)
    return load_federation(data, partition="natural", data_dir=bench.data_dir, **common)


def run_of(
    bench: Bench, settings: Settings, key: str, task: Task, name: str, seed: int, labels_per_client: int = 2
) -> Found:
    """Run a method once; return ``accuracy`` and ``discrepancy`` by round, and the accuracy of the ``groups``.

    Parameters
    ----------
    bench, settings
        Of the experiment.
    key
        Names the piece.
    task, name
        What is run.
    seed
        Of data and run.
    labels_per_client
        Of the digits that a client has.
    """

    def make() -> Found:
        federation = federation_of(task.data, settings, bench, seed, labels_per_client)
        algorithm, mu = method(name, task, settings)
        run = simulate(
            algorithm,
            task.maker(federation),
            federation,
            local=LocalSpec(epochs=settings["epochs"], batch_size=settings["batch_size"], lr=task.lr, mu=mu),
            rounds=settings["rounds"],
            client_fraction=min(1.0, settings["selected"] / len(federation)),
            seed=seed,
            device=bench.device,
            engine=task.engine,
            folder=bench.folder_for(key),
            stop=bench.stop,
        )
        return {
            "accuracy": [round(row["accuracy_weighted"], DIGITS) for row in run.metrics],
            "discrepancy": [round(row["discrepancy"], DIGITS) for row in run.metrics],
            "groups": _accuracy_of_groups(run),
        }

    return bench.piece(key, make)


def _accuracy_of_groups(run: Run) -> dict[str, list[float | None]]:
    """Return by leaf the accuracy of its members in every round, weighted by their sizes; None while it has none."""
    right, weight = defaultdict[tuple[int, int], float](float), defaultdict[tuple[int, int], int](int)
    for row in run.clients:
        place = row["cluster"], row["round"]
        right[place] += row["accuracy"] * row["n_train"]
        weight[place] += row["n_train"]
    rounds = range(1, len(run.metrics) + 1)
    return {
        f"{leaf.id}": [
            round(right[place] / weight[place], DIGITS) if (place := (leaf.id, number)) in weight else None
            for number in rounds
        ]
        for leaf in run.tree.leaves
    }


def pretrained(bench: Bench, settings: Settings, task: Task, seed: int) -> Updates:
    """Return the updates of αm clients after one epoch from w_0 (Algorithm 3, lines 2 to 6)."""
    federation = federation_of(task.data, settings, bench, seed)
    algorithm = FedGroup(groups=task.groups, pretrain_scale=settings["pretrain_scale"])
    world = World.simulated_by(
        federation, task.maker(federation), algorithm, seed=seed, device=bench.device, engine=task.engine
    )
    spec = LocalSpec(epochs=1, batch_size=settings["batch_size"], lr=task.lr)
    this_round = Round(1, spec, seed, purpose="pretrain")
    wanted = min(len(federation), settings["pretrain_scale"] * task.groups)
    chosen = this_round.generator("pretrain").choice(federation.ids, wanted, replace=False)
    ids = sorted(chosen.tolist())
    return world.clients.train(ids, world.initial[None], [0] * len(ids), this_round)
