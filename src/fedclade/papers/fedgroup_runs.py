"""What is behind FedGroup's tables and figures: its federations, its methods, and what is kept of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedclade.algorithms import Algorithm, FedAvg, FedGroup
from fedclade.core import LocalSpec, Round, Updates
from fedclade.data import Federation, load_federation
from fedclade.models import build_model
from fedclade.papers.experiment import ResultCache, Settings
from fedclade.runs import (
    Backend,
    Maker,
    Run,
    module_for,
    simulate,
)

Found = dict[str, Any]
"""What is kept of a run, as JSON has it."""

DIGITS = 4
"""Decimals of an accuracy that are kept."""

TOLD_AFTER = 25
"""Rounds from which on a run can tell what is claimed of runs of 200."""

SHARES_OUT = (
    "The data follows the generators of Li et al. 2020 (FedProx), as section III-A says: MNIST's 70,000 digits, each "
    "pixel standardised, in log-normal sizes, client i with label i mod 10 and the next; a tenth of every client's "
    "own to test on. Neither the draws nor the seeds are in the paper."
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
    input_shape, outputs
        Of the model, as Table II counts its parameters.
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
    input_shape: tuple[int, ...] = (1, 28, 28)
    outputs: int = 10
    hidden: int | None = None

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        module = build_model(self.model, input_shape=self.input_shape, outputs=self.outputs, arguments=self.arguments)
        return sum(parameter.numel() for parameter in module.parameters())

    @property
    def arguments(self) -> Mapping[str, int]:
        """Arguments of the model's factory."""
        return {} if self.hidden is None else {"hidden": self.hidden}

    def maker(self, federation: Federation) -> Maker:
        """Return what makes the model from a seed."""
        return lambda seed: module_for(self.model, federation.pool.schema, seed, self.arguments)

    @property
    def engine(self) -> str:
        """The engine that is known to be the fastest for dense models; for others that is measured."""
        return "stacked" if self.model in ("mclr", "mlp") else "auto"


def there(tasks: Mapping[str, Task], bench: ResultCache, settings: Settings) -> list[str]:
    """Return the tasks of the settings whose data is at hand, or could come from the Hub."""
    return [name for name in settings["tasks"] if bench.data_dir is None or bench.has(tasks[name].data)]


def absent(tasks: Mapping[str, Task], bench: ResultCache, settings: Settings) -> list[str]:
    """Say of the other tasks that they were not measured."""
    measured = there(tasks, bench, settings)
    return [f"{name} was not measured: its data is not at hand." for name in settings["tasks"] if name not in measured]


def method(name: str, task: Task, settings: Settings) -> tuple[Algorithm, float]:
    """Return an algorithm of Table III, and the μ of its local training.

    Parameters
    ----------
    name
        ``FedAvg``, ``FedProx``, or one of :data:`WAYS`.
    task, settings
        Give m and μ, and α and η_g.
    """
    if name in ("FedAvg", "FedProx"):
        return FedAvg(), task.mu if name == "FedProx" else 0.0
    common = {"groups": task.groups, "pretrain_scale": settings["pretrain_scale"], "eta_g": settings["eta_g"]}
    mu = task.mu if name == "FedGrouProx" else None
    return FedGroup(**common, mu=mu, **WAYS[name]), 0.0


WAYS: Mapping[str, Mapping[str, Any]] = {
    "FedGroup": {},
    "FedGrouProx": {},
    "FedGroup-RCC": {"rcc": True},
    "FedGroup-RAC": {"rac": True},
    "FedGroup, sampled, by latest update": {"cold_start": "sampled"},
    "FedGroup, sampled, by position": {"cold_start": "sampled", "direction": "position"},
}
"""FedGroup's variants; the last two let clients join a group in the round that first samples them."""


LABELS = 2
"""Labels per client of Li et al.'s images, if not told otherwise."""

OF_A_RUN = ("rounds", "selected", "epochs", "batch_size", "pretrain_scale", "eta_g")
"""Settings that a run depends on, besides the number of clients: tables and figures that share them share runs."""


def federation_of(
    data: str, settings: Settings, bench: ResultCache, seed: int, labels_per_client: int = LABELS
) -> Federation:
    """Return the clients of a data set of Table II.

    Images are shared out as Li et al. do it, those of the test split too; a client's words and the draws of Synthetic
    are its own. All are tested on a part of their own examples: in Li et al. a tenth, of Sent140 a fifth.
    """
    images = {"partition": "power_law", "scaling": "pixel"}
    how: dict[str, dict[str, Any]] = {
        "mnist": {**images, "partition_arguments": {"labels_per_client": labels_per_client}},
        "femnist": {
            **{"partition": "power_law", "scaling": "unit", "partition_arguments": {"labels_per_client": 3}},
            "source_arguments": {"characters": "lowercase"},
        },
        "synthetic": {"partition": "natural", "test_fraction": 0.1},
        "sent140": {"partition": "natural", "source_arguments": {"vectors": "glove.6B.300d.txt"}},
    }
    common: dict[str, Any] = {"clients": settings["clients"][data], "seed": seed, "data_dir": bench.data_dir}
    return load_federation(data, **how.get(data, how["mnist"]), **common)


def run_of(
    bench: ResultCache, settings: Settings, task: Task, name: str, seed: int, labels_per_client: int = LABELS
) -> Found:
    """Run a method once; return ``accuracy`` and ``discrepancy`` by round, and the accuracy of the ``groups``.

    Parameters
    ----------
    bench, settings
        Of the experiment.
    task, name
        What is run.
    seed
        Of data and run.
    labels_per_client
        Of the digits that a client has.
    """
    of_it = {key: settings[key] for key in OF_A_RUN}
    bench = bench.within({**of_it, "clients": {task.data: settings["clients"][task.data]}})
    labels = "" if labels_per_client == LABELS else f", labels per client {labels_per_client}"
    key = f"{task.data}, {task.model}{labels}, {name}, seed {seed}"

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


def pretrained(bench: ResultCache, settings: Settings, task: Task, seed: int) -> tuple[Updates, list[int]]:
    """Return the updates of all n clients after one epoch from w_0, and the rows of αm of them, as Algorithm 3 has."""
    federation = federation_of(task.data, settings, bench, seed)
    algorithm = FedGroup(groups=task.groups, pretrain_scale=settings["pretrain_scale"])
    world = Backend.simulated_by(
        federation, task.maker(federation), algorithm, seed=seed, device=bench.device, engine=task.engine
    )
    spec = LocalSpec(epochs=1, batch_size=settings["batch_size"], lr=task.lr)
    this_round = Round(1, spec, seed, purpose="pretrain")
    wanted = min(len(federation), settings["pretrain_scale"] * task.groups)
    chosen = this_round.generator("pretrain").choice(len(federation), wanted, replace=False)
    ids = list(federation.ids)
    return world.clients.train(ids, world.initial[None], [0] * len(ids), this_round), sorted(chosen.tolist())
