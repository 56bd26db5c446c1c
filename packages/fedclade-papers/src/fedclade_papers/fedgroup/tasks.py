"""FedGroup's tasks, and Table II with their numbers of clients, samples and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedclade import Federation, build_model, load_federation
from fedclade.runs import Maker
from fedclade_papers.cache import ResultCache, Settings, maker_of
from fedclade_papers.experiment import Paper, read_tables
from fedclade_papers.outcome import Outcome, Row

TABLES = read_tables(Path(__file__).with_name("experiments.toml"))

LABELS = 2
"""Default number of labels per client of Li et al.'s images."""

ROUNDED = 50
"""Largest difference in samples that counts as none.

Shares of the data are rounded down, and differ from draw to draw.
"""


@dataclass(frozen=True)
class Task:
    """A data set and a model of Table II; see ``[tasks]`` of ``experiments.toml``."""

    data: str
    model: str
    #: Number m of groups.
    groups: int
    #: Step size η, and μ of FedProx.
    lr: float
    mu: float
    #: Input shape and number of outputs for which Table II counts the model's parameters.
    input_shape: Sequence[int] = (1, 28, 28)
    outputs: int = 10
    #: Arguments of the function that builds the model.
    arguments: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        shape = tuple(self.input_shape)
        arguments = self.arguments
        module = build_model(
            self.model, input_shape=shape, outputs=self.outputs, arguments=arguments
        )
        return sum(parameter.numel() for parameter in module.parameters())

    def maker(self, federation: Federation) -> Maker:
        """Return a function that builds the model from a seed."""
        return maker_of(federation, self.model, self.arguments)

    @property
    def engine(self) -> str:
        """Training engine: the one known to be fastest for dense models, otherwise ``auto``."""
        return "stacked" if self.model in ("mclr", "mlp") else "auto"


TASKS = {name: Task(**task) for name, task in TABLES["tasks"].items()}


def tasks_at_hand(cache: ResultCache, settings: Settings) -> dict[str, Task]:
    """Return the tasks of the settings with data that is available or can be downloaded."""
    return {name: TASKS[name] for name in settings["tasks"] if cache.may_have(TASKS[name].data)}


def absent(cache: ResultCache, settings: Settings) -> list[str]:
    """Return a remark for each task that was not measured for lack of data."""
    measured = tasks_at_hand(cache, settings)
    return [
        f"{name} was not measured: its data is not at hand."
        for name in settings["tasks"]
        if name not in measured
    ]


def federation_of(
    data: str, settings: Settings, cache: ResultCache, seed: int, labels_per_client: int = LABELS
) -> Federation:
    """Return the clients of a data set of Table II."""
    how = TABLES["federations"][data]
    if labels_per_client != LABELS:
        how = how | {"partition_arguments": {"labels_per_client": labels_per_client}}
    return load_federation(
        data, clients=settings["clients"][data], seed=seed, data_dir=cache.data_dir, **how
    )


def measure_statistics(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Count the parameters of every model, and the clients and samples of available data sets."""
    rows = list[Row]()
    exact = list[bool]()
    counted = set[str]()
    present = tasks_at_hand(cache, settings)
    for name in settings["tasks"]:
        task, (clients, samples, parameters) = (
            TASKS[name],
            paper.numbers.get(name, (None, None, None)),
        )
        found = cache.piece(f"{name}, parameters", lambda task=task: task.parameters)
        rows.append(Row(f"{name} · parameters", parameters, found, "", (float(found),), within=0.0))
        exact.append(parameters in (None, found))
        if name in present and task.data not in counted:
            counted.add(task.data)

            def count(seed: int, data: str = task.data) -> dict[str, int]:
                members = federation_of(data, settings, cache, seed).clients
                return {
                    "clients": len(members),
                    "samples": sum(len(m.train) + len(m.test) for m in members),
                }

            counts = cache.by_seed(task.data, settings["seeds"], count)
            devices, examples = ([each[key] for each in counts] for key in ("clients", "samples"))
            rows.append(Row.of(f"{task.data} · devices", clients, devices, "", within=0.0))
            rows.append(Row.of(f"{task.data} · samples", samples, examples, "", within=ROUNDED))
    claim = paper.claim("exact", all(exact), f"{sum(exact)} of {len(exact)} to the last one")
    sizes = (
        f"{row.what.replace(' · ', ': ')} {row.ours:,.0f}"
        for row in rows
        if row.what.endswith("samples")
    )
    sentence = f"{sum(exact)} of {len(exact)} models have the very number of parameters; {'; '.join(sizes)}."
    remarks = [paper.texts["shared_out"], *absent(cache, settings)]
    return paper.outcome(
        rows, [claim], {row.what: [row.paper, row.ours] for row in rows}, sentence, remarks=remarks
    )
