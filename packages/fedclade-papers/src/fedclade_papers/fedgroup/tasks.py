"""Tasks of the FedGroup paper, and Table II with numbers of clients, samples and parameters.

A *task* is a data set together with a model.
"""

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
"""Default number of labels per client, as in the image data of Li et al."""

ROUNDED = 50
"""Largest difference in the number of samples that does not count as a difference.

The clients' shares of the data are random and rounded down, so the number varies slightly.
"""


@dataclass(frozen=True)
class Task:
    """A data set and a model of Table II, as in the table ``[tasks]`` of ``experiments.toml``."""

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
        """Number of parameters of the task's model."""
        shape = tuple(self.input_shape)
        arguments = self.arguments
        module = build_model(
            self.model, input_shape=shape, outputs=self.outputs, arguments=arguments
        )
        return sum(parameter.numel() for parameter in module.parameters())

    def maker(self, federation: Federation) -> Maker:
        """Return a function that builds the task's model for a federation from a seed."""
        return maker_of(federation, self.model, self.arguments)

    @property
    def engine(self) -> str:
        """Training engine: ``stacked`` for dense models, where it is fastest, else ``auto``."""
        return "stacked" if self.model in ("mclr", "mlp") else "auto"


TASKS = {name: Task(**task) for name, task in TABLES["tasks"].items()}


def tasks_at_hand(cache: ResultCache, settings: Settings) -> dict[str, Task]:
    """Return the tasks of an experiment whose data is available or can be downloaded, by name."""
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
    """Load a data set of Table II and divide it among clients as the paper does."""
    how = TABLES["federations"][data]
    if labels_per_client != LABELS:
        how = how | {"partition_arguments": {"labels_per_client": labels_per_client}}
    return load_federation(
        data, clients=settings["clients"][data], seed=seed, data_dir=cache.data_dir, **how
    )


def measure_statistics(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure Table II: numbers of parameters, clients and samples.

    Clients and samples are counted for the data sets that are available.
    """
    rows = list[Row]()
    exact = list[bool]()
    counted = set[str]()
    present = tasks_at_hand(cache, settings)
    for name in settings["tasks"]:
        task = TASKS[name]
        clients, samples, parameters = paper.numbers.get(name, (None, None, None))
        found = cache.piece(f"{name}, parameters", lambda task=task: task.parameters)
        rows.append(
            Row(
                what=f"{name} · parameters",
                paper=parameters,
                ours=found,
                unit="",
                seeds=(float(found),),
                within=0.0,
            )
        )
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
            devices = [of_seed["clients"] for of_seed in counts]
            examples = [of_seed["samples"] for of_seed in counts]
            rows.append(Row.of(f"{task.data} · devices", clients, devices, "", within=0.0))
            rows.append(Row.of(f"{task.data} · samples", samples, examples, "", within=ROUNDED))
    claim = paper.claim("exact", all(exact), f"{sum(exact)} of {len(exact)} to the last one")
    sizes = (
        f"{row.what.replace(' · ', ': ')} {row.ours:,.0f}"
        for row in rows
        if row.what.endswith("samples")
    )
    sentence = (
        f"{sum(exact)} of {len(exact)} models have the very number of parameters; "
        f"{'; '.join(sizes)}."
    )
    remarks = [paper.texts["shared_out"], *absent(cache, settings)]
    series = {row.what: [row.paper, row.ours] for row in rows}
    return paper.outcome(rows, [claim], series, sentence, remarks=remarks)
