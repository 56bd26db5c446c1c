"""Gains of the clients of a run: scores of several models on the same test rows of each client.

A gain is the difference between the scores of the run's deployed model and of a simpler model. The
module also reads and writes gains in a run folder.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedclade.core import RunError, appear, write_text
from fedclade.data import Trait
from fedclade.runs.store.contents import LARGEST, Row, check_shape, data_frame
from fedclade.tasks import Interval, Metric

if TYPE_CHECKING:
    from pandas import DataFrame

GAINS = "gains.json"
"""Name of the file with the gains in a run folder, written after the results of the run."""

REFERENCES = "references"
"""Name of the subfolder of a run folder with the runs of the reference models."""

TRIVIAL = "trivial"
ALONE = "alone"
ONE_MODEL = "one_model"
CLUSTER = "cluster_model"
OWN = "own_model"
MODELS = (TRIVIAL, ALONE, ONE_MODEL, CLUSTER, OWN)
"""Names of the models that are compared, in the order of tables.

``trivial`` predicts the most frequent label, or the mean target, of a client's training rows;
``alone`` is a model that the client trains alone; ``one_model`` is trained by all clients with
FedAvg; ``cluster_model`` is the model of the client's cluster in the run; ``own_model`` is the
client's personal model or mixture in the run.
"""

_FORMAT = 1

_NUMBER = (float, None)
_INTERVAL = [_NUMBER]
_SHAPE = {
    "format": int,
    "metric": {"name": str, "higher_is_better": bool, "share": bool},
    "round": int,
    "intervals": str,
    "missing": {...: str},
    "traits": [{"kind": str, "name": str}],
    "clients": [
        {
            "client": int,
            "name": str,
            "cluster": int,
            "n_train": (int, None),
            "n_test": (int, None),
            "deployed": str,
            "scores": {...: _INTERVAL},
            "gains": {...: _INTERVAL},
            "traits": [_NUMBER],
            "attributes": {...: (float, str, None)},
        }
    ],
    "sha256": str,
}


@dataclass(frozen=True)
class ClientGains:
    """Scores of several models on one client's test rows, and the gains of the deployed model.

    Parameters
    ----------
    client, name
        Id and name of the client.
    cluster
        Node of the client's cluster, a leaf of the parameter tree.
    n_train, n_test
        Numbers of training and test rows; None if clients do not report them.
    deployed
        Name of the model that the run deploys to the client: ``own_model`` or ``cluster_model``.
    scores
        Score of each model with its confidence interval, by the model's name; NaN if the score is
        undefined for the test rows.
    gains
        Advantage of the deployed model over each other model with its confidence interval, in the
        unit of the metric. A positive value means that the deployed model is better, also if lower
        scores are better.
    traits
        Value of each of the traits in :attr:`Gains.traits` for the client; NaN if undefined.
    attributes
        Further attributes of the client, by name, such as columns of a table of clients.
    """

    client: int
    name: str
    cluster: int
    n_train: int | None
    n_test: int | None
    deployed: str
    scores: Mapping[str, Interval]
    gains: Mapping[str, Interval]
    traits: Sequence[float] = ()
    attributes: Mapping[str, float | str | None] = field(
        default_factory=dict[str, float | str | None]
    )

    @property
    def row(self) -> Row:
        """All values as one flat row; intervals are in columns ``NAME_low`` and ``NAME_high``."""
        row: Row = {
            "client": self.client,
            "name": self.name,
            "cluster": self.cluster,
            "n_train": self.n_train,
            "n_test": self.n_test,
            "deployed": self.deployed,
        }
        for model in MODELS:
            if model in self.scores:
                row |= _columns_of(model, self.scores[model])
        for model in MODELS:
            if model in self.gains:
                row |= _columns_of(f"gain_over_{model}", self.gains[model])
        return row | {f"attribute_{name}": value for name, value in self.attributes.items()}


@dataclass(frozen=True, eq=False)
class Gains:
    """Gains of all clients of a run, measured on the same test rows of each client.

    A gain is the difference between the scores of the run's deployed model and of a simpler model.

    Parameters
    ----------
    metric
        The metric of all scores.
    round
        Round after which the run's models were stored.
    intervals
        Method of the confidence intervals: ``shares`` if a score is a share of test rows,
        ``means`` if it is a mean over test rows, or ``jackknife`` for all other scores.
    clients
        Scores and gains of each client.
    missing
        For each model that was not measured, the reason, by the model's name.
    traits
        Traits (numbers that describe the clients' training data) that were computed.
    """

    metric: Metric
    round: int
    intervals: str
    clients: Sequence[ClientGains]
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    traits: Sequence[Trait] = ()

    def __repr__(self) -> str:
        return f"Gains({len(self.clients)} clients, {', '.join(self.models)})"

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models for which at least one client has a score, in the order of tables."""
        known = {name for client in self.clients for name in client.scores}
        return tuple(name for name in MODELS if name in known)

    @property
    def rows(self) -> list[Row]:
        """One flat row for each client, as in the CSV file. All rows have the same columns."""
        rows = [client.row for client in self.clients]
        empty: Row = dict.fromkeys(_merge_columns(rows))
        return [empty | row for row in rows]

    def frame(self) -> DataFrame:
        """Return the rows as a pandas data frame, with one row for each client.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        """
        return data_frame(self.rows, "Gains.frame")

    def csv(self) -> str:
        """Return the rows as CSV text; shares are in [0, 1], missing numbers are empty cells."""
        rows = self.rows
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _as_cell(value) for name, value in row.items()})
        return out.getvalue()

    def save_csv(self, path: Path) -> Path:
        """Write the rows as a CSV file; an existing file is replaced in one step.

        Raises
        ------
        RunError
            If the file cannot be written.
        """
        try:
            if path.is_dir():
                raise IsADirectoryError(f"{path.name} is a folder; choose the name of a file")
            write_text(path, self.csv())
        except OSError as error:
            raise RunError(f"cannot write {path}: {error}") from error
        return path


def write_gains(gains: Gains, folder: Path) -> None:
    """Write gains into a run folder; an existing file of gains is replaced in one step.

    Raises
    ------
    RunError
        If the file cannot be written.
    """
    content = _as_json(gains)
    text = json.dumps({**content, "sha256": _sum_of(content)}, indent=1) + "\n"
    path = folder / GAINS
    try:
        appear(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}") from error


def read_gains(folder: Path) -> Gains | None:
    """Return the gains in a run folder; None if the folder has no file of gains.

    Raises
    ------
    OSError, ValueError, RecursionError
        If the file is damaged.
    """
    path = folder / GAINS
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    check_shape(content, _SHAPE, path.name)
    expected = content.pop("sha256")
    if expected != _sum_of(content):
        raise ValueError(f"{path.name} was changed: its SHA-256 differs from the recorded SHA-256")
    if content["format"] != _FORMAT:
        raise ValueError(
            f"{path.name} has format {content['format']}, but this version of fedclade reads format "
            f"{_FORMAT}; use the version that wrote the file"
        )
    return Gains(
        metric=Metric(**content["metric"]),
        round=content["round"],
        intervals=content["intervals"],
        clients=tuple(_read_client(entry) for entry in content["clients"]),
        missing=content["missing"],
        traits=tuple(Trait(**entry) for entry in content["traits"]),
    )


def _as_json(gains: Gains) -> Row:
    """Return gains as values for the JSON file, without the SHA-256."""
    return {
        "format": _FORMAT,
        "metric": gains.metric.noted,
        "round": gains.round,
        "intervals": gains.intervals,
        "missing": dict(gains.missing),
        "traits": [{"kind": trait.kind, "name": trait.name} for trait in gains.traits],
        "clients": [_client_as_json(client) for client in gains.clients],
    }


def _client_as_json(client: ClientGains) -> Row:
    return {
        "client": client.client,
        "name": client.name,
        "cluster": client.cluster,
        "n_train": client.n_train,
        "n_test": client.n_test,
        "deployed": client.deployed,
        "scores": {name: _interval_as_json(each) for name, each in client.scores.items()},
        "gains": {name: _interval_as_json(each) for name, each in client.gains.items()},
        "traits": [_finite_or_none(value) for value in client.traits],
        "attributes": dict(client.attributes),
    }


def _read_client(entry: Mapping[str, Any]) -> ClientGains:
    return ClientGains(
        client=entry["client"],
        name=entry["name"],
        cluster=entry["cluster"],
        n_train=entry["n_train"],
        n_test=entry["n_test"],
        deployed=entry["deployed"],
        scores={name: _read_interval(each) for name, each in entry["scores"].items()},
        gains={name: _read_interval(each) for name, each in entry["gains"].items()},
        traits=[_number_or_nan(value) for value in entry["traits"]],
        attributes=entry["attributes"],
    )


def _interval_as_json(interval: Interval) -> list[float | None]:
    return [
        _finite_or_none(interval.value),
        _finite_or_none(interval.low),
        _finite_or_none(interval.high),
    ]


def _read_interval(entry: Sequence[float | None]) -> Interval:
    if len(entry) != 3:
        raise ValueError(
            f"{GAINS}: an interval should have 3 numbers (value, lower and upper limit), got "
            f"{len(entry)}"
        )
    return Interval(_number_or_nan(entry[0]), entry[1], entry[2])


def _finite_or_none(value: float | None) -> float | None:
    """Return a number as a value for JSON, or None if JSON cannot represent it.

    None stands for NaN, infinity, and numbers that are too large to be read again.
    """
    if value is None or not math.isfinite(value) or abs(value) > LARGEST:
        return None
    return float(value)


def _number_or_nan(value: float | None) -> float:
    if value is None:
        return math.nan
    return float(value)


def _columns_of(name: str, interval: Interval) -> Row:
    """Return a score or gain with its confidence interval as three columns of a row."""
    return {
        name: _finite_or_none(interval.value),
        f"{name}_low": _finite_or_none(interval.low),
        f"{name}_high": _finite_or_none(interval.high),
    }


def _as_cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value


def _merge_columns(rows: Iterable[Row]) -> list[str]:
    """Return the names of the columns of all rows: scores first, then gains, then attributes."""
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    return sorted(columns, key=_column_order)


def _column_order(name: str) -> tuple[int, int]:
    """Return the sort key of a column's name; columns with equal keys stay in their order."""
    if name.startswith("attribute_"):
        return 3, 0
    model = name.removeprefix("gain_over_").removesuffix("_low").removesuffix("_high")
    if model not in MODELS:
        return 0, 0
    place = 2 if name.startswith("gain_over_") else 1
    return place, MODELS.index(model)


def _sum_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
