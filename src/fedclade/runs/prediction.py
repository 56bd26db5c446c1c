"""Predictions of a finished run's models for new rows, and their scores on new data.

The rows are encoded and scaled as the rows of the run's clients were, and predictions are in the
labels and the unit of the run's targets.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedclade.algorithms import FedAvg, Requires
from fedclade.core import (
    OWN,
    ConfigError,
    DataError,
    ModelError,
    RunError,
    TaskKind,
    TreeError,
    appear,
    checked,
    make_folder,
)
from fedclade.data import (
    ClientData,
    Federation,
    InputEncoding,
    NewRows,
    Notation,
    encode_new_rows,
    join_some,
    scale_as_in_run,
)
from fedclade.runs.backend import Backend
from fedclade.runs.gain_outputs import predict_in_parts
from fedclade.runs.models import Maker
from fedclade.runs.newcomers import check_columns
from fedclade.runs.noted import NotedRun
from fedclade.runs.store import Run
from fedclade.runs.store.contents import Row, data_frame
from fedclade.runs.store.export import SelectedModel, select_model
from fedclade.runs.store.served_models import find_client, requires_of, served_node
from fedclade.tasks import TargetScale, Task, mix_outputs, spread
from fedclade.training import OWN_MODEL, choose_device, with_hooks_for

if TYPE_CHECKING:
    from pandas import DataFrame

FILE_TYPES = (".csv", ".parquet", ".json")
"""Endings of the files to which predictions and scores can be written."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of one model of a run for N rows.

    Parameters
    ----------
    outputs
        Outputs of the model ``[N, ...]``: logits of labels, or numbers in the unit of the targets.
    columns
        Table with a row for each of the N rows: its number from 1 (``row``), the columns that the
        caller wanted to keep, the prediction, and probabilities of labels.
    node
        Node of the tree whose model made the predictions, or the client's node.
    client
        Id of the client whose model made the predictions; None if a node was selected.
    is_own
        Whether the model is the client's own rather than the model of its cluster.
    """

    outputs: Tensor
    columns: Mapping[str, Sequence[Any]]
    node: int
    client: int | None
    is_own: bool

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def rows(self) -> list[Row]:
        """The table as a list with a dict for each row."""
        values = zip(*self.columns.values(), strict=True)
        return [dict(zip(self.columns, each, strict=True)) for each in values]

    @property
    def frame(self) -> DataFrame:
        """The table as a pandas data frame.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        """
        return data_frame(self.rows, "Predictions.frame, unlike Predictions.rows,")

    def save(self, path: str | Path) -> Path:
        """Write the table to a new ``.csv``, ``.parquet`` or ``.json`` file.

        Raises
        ------
        ConfigError
            If the name of the file has another ending.
        RunError
            If the file exists or cannot be written.
        """
        return write_table(self.columns, Path(path))


@dataclass(frozen=True, eq=False)
class NewScores:
    """Scores of a run's models on new data of its clients.

    Parameters
    ----------
    rows
        A dict for each client: its id (``client``) and ``name``; the ``node`` with whose model it
        was evaluated, and whether the model was its own (``own``); the number of ``examples``; its
        score by each metric, or None if the score is undefined; and its mean ``loss``.
    metrics
        Names of the metrics.
    """

    rows: Sequence[Row]
    metrics: Sequence[str]

    @property
    def summary(self) -> dict[str, dict[str, Any]]:
        """Mean, lowest and highest score over the clients, by metric; None without any score."""
        found: dict[str, dict[str, Any]] = {}
        for metric in self.metrics:
            numbers = spread([row[metric] for row in self.rows])
            found[metric] = {name: numbers[name] for name in ("mean", "min", "max", "clients")}
        return found

    def save(self, path: str | Path) -> Path:
        """Write the rows to a new ``.csv``, ``.parquet`` or ``.json`` file; see Predictions.save."""
        return write_table(
            {key: [row[key] for row in self.rows] for key in self.rows[0]}, Path(path)
        )


@checked("rows")
def predict(
    run: Run,
    rows: Any,
    *,
    client: int | str | None = None,
    node: int | None = None,
    level: int | None = None,
    model: nn.Module | str | Maker | None = None,
    keep: Sequence[str] = (),
    device: str = "cpu",
) -> Predictions:
    """Predict the targets of new rows by a model of a finished run.

    Parameters
    ----------
    run
        The run. If its config names a model by ``module:name``, load it with
        ``Run.load(folder, trust=True)``.
    rows
        The path of a CSV, TSV or Parquet file; a data frame of pandas, polars or Arrow, a mapping
        of columns, or a list of mappings; a list of texts; or an array ``[N, ...]`` of inputs before
        scaling. A table needs the input columns of the run, and may have others.
    client
        Id or name of the client whose model predicts: the model with which it was evaluated.
    node, level
        A node of the tree, or a level on the client's path; see :func:`fedclade.export_model`.
    model
        Model of the run, if its config cannot name it, such as a module that a script defined.
    keep
        Columns of the rows' table to repeat in the table of predictions, such as an id.
    device
        ``auto``, ``cpu`` or ``cuda``.

    Returns
    -------
    Predictions
        Outputs, and a table with the predictions in the labels or the unit of the targets.

    Raises
    ------
    ConfigError
        If not exactly one of client and node is given, or the model must be passed.
    TreeError
        If the run has no such client, node or level.
    DataError
        If the rows cannot be encoded as the rows of the run's clients.
    ModelError
        If the module does not fit the run's models.
    RunError
        If the models cannot be used here, for example because only the clients store them.
    """
    selected = select_model(run, client=client, node=node, level=level)
    task = _check_task(run)
    encoded = encode_new_rows(rows, input_encoding(run))
    module = NotedRun(run, "fedclade.predict").module(model)
    outputs = _compute_outputs(
        selected,
        module,
        encoded.x,
        torch.device(choose_device(device)),
        scored=run.config.get("task", {}).get("output"),
    )
    scale = TargetScale.of_inputs(run.summary["inputs"])
    if task == "regression" and scale is not None:
        outputs = scale.restore(outputs)
    columns: dict[str, Sequence[Any]] = {"row": list(range(1, len(outputs) + 1))}
    columns |= _kept_columns(encoded, keep)
    columns |= _describe_outputs(outputs, task, _target_names(run, task, outputs))
    return Predictions(outputs, columns, selected.node.id, selected.client, selected.is_own)


def input_encoding(run: Run) -> InputEncoding:
    """Return the encoding of a run's inputs: its schema, its scaling, the notation of its files.

    Raises
    ------
    RunError
        If the summary of the run does not describe its inputs, or pixels were scaled one by one.
    """
    inputs = run.summary.get("inputs")
    data = run.config.get("data", {})
    if not inputs:
        raise RunError(
            "this run folder was written by a version that did not record the model's inputs; run "
            "its config.toml again"
        )
    if inputs.get("structure") is not None:
        raise RunError(
            "an input of this run is several tensors, which are not read from a table; export the "
            "model, and apply it to tensors of the same names and shapes"
        )
    if data.get("scaling") == "pixel":
        raise RunError(
            "the inputs of this run are scaled by the mean and deviation of each pixel over all "
            "images (data.scaling = 'pixel'), which the run does not store; scale the images in "
            "the same way, and apply the exported model to them"
        )
    return InputEncoding(
        inputs,
        run.schema,
        Notation(decimal=data.get("decimal"), dates=data.get("dates")),
        separator=data.get("separator"),
        encoding=data.get("encoding") if "files" in data else None,
    )


def _check_task(run: Run) -> TaskKind:
    """Return the kind of the run's task, if its predictions are a table."""
    task = run.summary.get("task") or run.config.get("task", {}).get("name") or "classification"
    if task == "segmentation":
        raise ConfigError(
            "a segmentation predicts a label for each pixel, not a row of a table; export the "
            "model, and load it by fedclade.load_export"
        )
    if task == "language":
        raise ConfigError(
            "a language model predicts a distribution over words for each position, not a row of a "
            "table; export the model, and load it by fedclade.load_export"
        )
    return cast("TaskKind", task)


def _compute_outputs(
    selected: SelectedModel,
    module: nn.Module,
    x: Tensor,
    device: torch.device,
    scored: int | str | None,
) -> Tensor:
    """Return the outputs ``[N, ...]`` of a selected model or mixture, on the CPU.

    ``scored`` is the entry that the task scores if the model returns several tensors.
    """
    each: list[Tensor] = []
    module = module.to(device)
    hooked: nn.Module | None = None
    for state in selected.states:
        if hooked is None:
            load_state(module, state)
            tried = x[:2].to(device)
            hooked = with_hooks_for(module, selected.layout, tried, output=scored)
        else:
            load_state(hooked, state)
        each.append(predict_in_parts(hooked.eval(), x, device))
    if selected.mixture is None:
        return each[0]
    weights = selected.mixture.weights.cpu().expand(len(x), -1)
    return mix_outputs(cast("TaskKind", selected.mixture.task), torch.stack(each), weights)


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the state dict of a run's model into a module of the same structure.

    Raises
    ------
    ModelError
        If the tensors differ by name or shape.
    """
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(
            f"the models of the run do not fit into this {type(module).__name__}, which should "
            f"have tensors of the same names and shapes: {error}"
        ) from error


def _kept_columns(encoded: NewRows, keep: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the columns of the rows' table to repeat beside the predictions."""
    if not keep:
        return {}
    if encoded.table is None:
        raise ConfigError(
            f"keep names columns of a table, got {list(keep)} for rows that are not a table"
        )
    names = encoded.table.column_names
    if missing := [name for name in keep if name not in names]:
        raise ConfigError(f"keep should name columns of the rows, which are {names}, got {missing}")
    return {name: encoded.table[name].to_pylist() for name in keep}


def _target_names(run: Run, task: TaskKind, outputs: Tensor) -> list[str]:
    """Return the names of labels, or of several targets; numbers if they have no names."""
    names = [str(name) for name in run.summary["inputs"].get("labels", ())]
    width = outputs.shape[1] if outputs.dim() > 1 else 1
    if task == "binary":
        return names if len(names) == 2 else ["0", "1"]
    if task == "regression" and width == 1 and run.schema is not None and run.schema.target:
        return list(run.schema.target)
    return names if len(names) == width else [str(place) for place in range(width)]


def _describe_outputs(
    outputs: Tensor, task: TaskKind, names: Sequence[str]
) -> dict[str, Sequence[Any]]:
    """Return the columns of a table of predictions, from outputs ``[N, ...]`` of a model.

    For labels, these are the predicted label (``prediction``) and a column ``probability of LABEL``
    for each label; for numbers, a column for each target.
    """
    if task in ("binary", "multilabel") and outputs.dim() == 1:
        outputs = outputs[:, None]
    if task == "binary" and outputs.shape[1:] == (1,):
        yes = outputs[:, 0].double().sigmoid()
        chosen = (outputs[:, 0] > 0).long().tolist()
        return {
            "prediction": [names[label] for label in chosen],
            f"probability of {names[0]}": (1 - yes).tolist(),
            f"probability of {names[1]}": yes.tolist(),
        }
    if task == "multilabel" and outputs.dim() == 2:
        found: dict[str, Sequence[Any]] = {}
        for place, name in enumerate(names):
            found[name] = (outputs[:, place] > 0).long().tolist()
            found[f"probability of {name}"] = outputs[:, place].double().sigmoid().tolist()
        return found
    if task == "classification" and outputs.dim() == 2:
        shares = outputs.double().softmax(1)
        labels = [names[label] for label in outputs.argmax(1).tolist()]
        of_labels = {
            f"probability of {name}": shares[:, place].tolist() for place, name in enumerate(names)
        }
        return {"prediction": labels, **of_labels}
    flat = outputs.reshape(len(outputs), -1)
    if flat.shape[1] == 1:
        return {"prediction": flat[:, 0].tolist()}
    if len(names) != flat.shape[1]:
        names = [str(place) for place in range(flat.shape[1])]
    return {f"prediction of {name}": flat[:, place].tolist() for place, name in enumerate(names)}


@checked()
def evaluate(
    run: Run,
    federation: Federation,
    *,
    split: str = "test",
    model: nn.Module | str | Maker | None = None,
    task: Task | str | None = None,
    device: str = "auto",
) -> NewScores:
    """Evaluate the models of a finished run on new data of its clients, without any training.

    Each client is evaluated with the model with which the run evaluated it last: the model of its
    cluster, with its personal parameters; its own model; or its mixture of models.

    Parameters
    ----------
    run
        The run; also a run of 0 rounds, whose models are the initial models.
    federation
        Data of clients of the run, which are recognized by their names.
    split
        Rows to evaluate: ``train``, ``validation`` or ``test``, or ``all`` rows of a client.
    model, task
        Model and task of the run, if its config cannot name them; see :func:`fedclade.assign`.
    device
        ``auto``, ``cpu`` or ``cuda``.

    Raises
    ------
    ConfigError
        If the split is unknown, or the model or the task must be passed.
    DataError
        If a client is not a client of the run, or has no rows in the split.
    RunError
        If the data is encoded otherwise than the data of the run, or only the clients store the
        models.
    """
    if split not in ("train", "validation", "test", "all"):
        raise ConfigError(f"split should be train, validation, test or all, got {split!r}")
    run.check_readable()
    check_columns(run, federation)
    federation = scale_as_in_run(federation, run.summary.get("inputs", {}))
    federation = _numbered_as_in_run(run, federation, all_rows=split == "all")
    noted = NotedRun(run, "fedclade.evaluate")
    parts = noted.parts
    requires = requires_of(run) or Requires()
    backend = Backend.simulated_by(
        federation,
        model or partial(noted.build_model, federation.pool.schema),
        FedAvg(),  # no client trains, so only the structure of the model counts
        device=device,
        engine="loop",
        seed=run.summary["seed"],
        freeze=parts.freeze,
        personal=parts.personal or requires.personal or (),
        adapter=parts.adapter,
        stream=False,
        task=noted.task(task),
    )
    _check_models(run, backend, federation)
    ids = list(federation.ids)
    has_mixture = False
    for client in ids:
        # Raises an error if the server does not have the client's model.
        has_mixture |= select_model(run, client=client).mixture is not None
        assert backend.store is not None  # the clients are simulated here
        backend.store.add(client, _tensors_on(backend.device, run.kept.get(client, {})))
    nodes = [served_node(run, client).id for client in ids]
    models, rows = run.tree.models(nodes, served=True)
    has_own = [OWN_MODEL in run.kept.get(client, {}) for client in ids]
    rows = [OWN if own else row for own, row in zip(has_own, rows, strict=True)]
    options: dict[str, Any] = {}
    if has_mixture:
        options = {"mixture": requires.mixture}
        models = run.tree.models([leaf.id for leaf in run.tree.leaves])[0]
        rows = [0] * len(ids)
    models = models.to(backend.initial)
    found = backend.clients.evaluate(ids, models, rows, "test", **options)
    metrics = [metric.name for metric in backend.task.metrics]
    table: list[Row] = []
    for place, client in enumerate(ids):
        scores = [_as_score(score) for score in found.scores[place].tolist()]
        table.append(
            {
                "client": client,
                "name": federation.by_id[client].name,
                "node": nodes[place],
                "own": has_own[place] or has_mixture or run.parted,
                "examples": int(found.examples[place]),
                **dict(zip(metrics, scores, strict=True)),
                "loss": _as_score(float(found.losses[place])),
            }
        )
    return NewScores(table, metrics)


def _check_models(run: Run, backend: Backend, federation: Federation) -> None:
    """Check that the run's models fit the new data."""
    entries = run.tree.nodes[0].params.numel()
    expected = backend.initial.shape[-1]
    if entries != expected:
        raise RunError(
            f"the run's models have {entries:,} entries, but a model for the new data "
            f"({federation}) has {expected:,}; pass data with the inputs and labels of the run: "
            f"{run.summary['data']}"
        )


def _tensors_on(device: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _as_score(score: float) -> float | None:
    """Return a score, or None if it is undefined."""
    return None if math.isnan(score) else score


def _numbered_as_in_run(run: Run, federation: Federation, *, all_rows: bool) -> Federation:
    """Return a federation whose clients have the ids of the run's clients of the same names.

    With ``all_rows``, all rows of a client are its test rows.

    Raises
    ------
    DataError
        If a client is not a client of the run.
    """
    federation = federation.in_round(run.model_round)
    clients: list[ClientData] = []
    strangers: list[str] = []
    for client in federation.clients:
        try:
            number = find_client(run, client.name)
        except TreeError:
            strangers.append(client.name)
            continue
        rows = client.test
        if all_rows:
            rows = np.concatenate([client.train, client.validation, client.test])
        clients.append(replace(client, id=number, test=rows))
    if strangers:
        raise DataError(
            f"the data has clients that the run does not have: {join_some(strangers)}; rename them, "
            "or find models for them with fedclade.assign"
        )
    clients.sort(key=lambda client: client.id)
    return replace(
        federation, clients=tuple(clients), true_clusters=None, newcomers=None, attributes=None
    )


def write_table(columns: Mapping[str, Sequence[Any]], path: Path) -> Path:
    """Write a table, given by its columns, to a new CSV, Parquet or JSON file.

    Raises
    ------
    ConfigError
        If the name of the file has another ending.
    RunError
        If the file exists or cannot be written.
    """
    check_table_file(path)
    try:
        make_folder(path.parent)
        appear(path, lambda beside: _write_as(columns, beside, path.suffix))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}; choose another file") from error
    return path


def check_table_file(path: Path) -> None:
    """Check that a table can be written to a path; see :func:`write_table` for the errors."""
    if path.suffix not in FILE_TYPES:
        raise ConfigError(f"the file should end in {', '.join(FILE_TYPES)}, got {str(path)!r}")
    if path.exists():
        raise RunError(f"{path} exists already; name another file with --out, or remove it")


def _write_as(columns: Mapping[str, Sequence[Any]], path: Path, suffix: str) -> None:
    """Write a table to a path in the format that an ending names."""
    if suffix == ".json":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text(json.dumps(rows, indent=2, default=str) + "\n", encoding="utf-8")
    elif suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({name: list(values) for name, values in columns.items()})
        pq.write_table(table, path)
