"""Results of a finished run, and the run folder in which they are stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedclade.core import (
    ConfigError,
    Displayed,
    Layout,
    ParameterTree,
    RunError,
    appear,
    bring_to_disk,
    checked,
    drawn,
    remove,
    take_place,
)
from fedclade.data import DataSchema
from fedclade.runs.store.contents import (
    FINISHED,
    TABLES,
    Row,
    check_shape,
    data_frame,
    read_json,
    read_rows,
    read_summary,
    write_rows,
)
from fedclade.runs.store.event_rows import read_events
from fedclade.runs.store.gains import GAINS, Gains, read_gains, write_gains
from fedclade.runs.store.manifest import (
    CONFIG,
    LOCK,
    REMEDY,
    check_manifest,
    is_private,
    read_run_config,
    write_config,
    write_manifest,
)
from fedclade.runs.store.tree_files import (
    DAMAGES,
    KEPT,
    SimilarityMatrix,
    read_kept,
    read_layout,
    read_similarities,
    read_tree,
    write_kept,
    write_similarities,
    write_tree,
)
from fedclade.tasks import read_metrics

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from fedclade.data import Federation
    from fedclade.runs.prediction import NewScores, Predictions

FORMAT = 3
"""Version of the format of a run folder, recorded in ``summary.json``."""

READABLE = (1, 2, 3)
"""Versions of the format of a run folder that can be read.

Folders of format 1 had no checkpoints and could not be unfinished. Folders before format 3 had no
SHA-256 sums, so that only the structure of their contents can be checked.
"""

_SUMMARY = "summary.json"
"""Name of the file that is written last to a run folder, and marks its run as finished."""

_MANIFEST = "manifest.json"
"""Name of the file with the SHA-256 of every other file of a finished run."""

SCHEMA = "schema.json"
"""Name of the file with the schema of the clients' data, in the format of ``data.schema``."""

_LEFTOVERS = {LOCK, f".{CONFIG}.writing"}
"""Names of the files that a killed process can leave in a folder before it writes the config."""

EVENTS = "events.jsonl"
"""Name of the file with the events."""

_FILES = (
    *(CONFIG, _SUMMARY, EVENTS, "similarities.npz", "tree/tree.json", "tree/tree.safetensors"),
    *(f"{name}.parquet" for name in TABLES),
)
"""Relative paths of the files that the folder of every finished run contains."""


@dataclass(frozen=True, eq=False)
class Run(Displayed):
    """All results of a run: summary, metrics, clusters and their models, events.

    Parameters
    ----------
    summary, config
        Contents of ``summary.json`` and ``config.toml``.
    tree
        The clusters and their models.
    metric_rows, cluster_rows, client_rows
        Rows of the tables as dicts: a row for each round; for each round and cluster; and for each
        evaluation and client. The properties :attr:`metrics`, :attr:`clusters` and :attr:`clients`
        return them as pandas data frames.
    events
        Splits and other events, in order.
    similarities
        The latest similarity matrix of every cluster in which more than one client replied.
    layout
        Mapping between the entries of a model and the module's tensors; None in folders of versions
        that did not store it.
    kept
        Tensors that each client of a simulation stores, by client id and name: ``personal``, its
        P personal parameters ``[P]``; ``model``, a whole model of its own with F entries ``[F]``;
        and ``mixture``, its weights of the K leaves' models ``[K]``.
    is_trusted
        Whether functions that use the config again, such as :func:`fedclade.assign`, may import
        code that the config names by ``module:name``. A run that was made in this process is
        trusted; a run that was loaded from a folder only with ``trust=True``.
    gains
        Advantage of the run's models over simpler models on the test rows of each client; None if
        it was not measured, for example in a network.
    schema
        Schema by which the clients' tables or texts were encoded; None for other data, and in
        folders of versions that did not store it.
    """

    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    tree: ParameterTree
    metric_rows: Sequence[Row]
    cluster_rows: Sequence[Row]
    client_rows: Sequence[Row]
    events: Sequence[Row]
    similarities: Sequence[SimilarityMatrix] = field(default_factory=tuple[SimilarityMatrix, ...])
    layout: Layout | None = None
    kept: Mapping[int, Mapping[str, Tensor]] = field(
        default_factory=dict[int, Mapping[str, Tensor]]
    )
    is_trusted: bool = True
    gains: Gains | None = None
    schema: DataSchema | None = None

    def __repr__(self) -> str:
        shown = ("algorithm", "data", "model", "seed", "rounds")
        return f"Run({', '.join(f'{key}={self.summary.get(key)!r}' for key in shown)})"

    @property
    def has_diverged(self) -> bool:
        """Whether the run diverged, so that its models and clusters carry no information."""
        return "diverged" in self.summary

    @property
    def is_unfinished(self) -> bool:
        """Whether the run was loaded before its end, from a checkpoint."""
        return "unfinished" in self.summary

    @property
    def model_round(self) -> int:
        """Round of the run's models: the last round, or the best round with ``keep_best``."""
        chosen = self.summary.get("chosen", {})
        if chosen.get("kept"):
            return chosen["round"]
        return self.summary["rounds"]

    @cached_property
    def metrics(self) -> DataFrame:
        """Results as a pandas data frame with one row for each round, as in ``metrics.parquet``.

        Raises
        ------
        MissingExtraError
            If pandas is not installed. :attr:`metric_rows` has the same rows as dicts.
        """
        return data_frame(self.metric_rows, "Run.metrics, unlike Run.metric_rows,")

    @cached_property
    def clusters(self) -> DataFrame:
        """Norms and split criteria as a pandas data frame, with a row for each round and cluster.

        :attr:`cluster_rows` has the same rows as dicts.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        """
        return data_frame(self.cluster_rows, "Run.clusters, unlike Run.cluster_rows,")

    @cached_property
    def clients(self) -> DataFrame:
        """Clusters and scores as a pandas data frame, with a row for each evaluation and client.

        :attr:`client_rows` has the same rows as dicts.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        """
        return data_frame(self.client_rows, "Run.clients, unlike Run.client_rows,")

    def plot(self) -> Figure:
        """Plot the score of every cluster over the rounds, as a Plotly figure.

        Dotted lines mark splits. A second plot below shows the separation gap g(α) of the clusters
        if the true clusters are known, otherwise α_cross^max, the largest cosine similarity between
        updates of clients in different parts of a cluster's bipartition. The colours suit a dark
        page if ``plotly.io.templates.default`` is a dark template.

        Returns
        -------
        plotly.graph_objects.Figure
            The figure.

        Raises
        ------
        MissingExtraError
            If plotly is not installed.
        """
        return drawn("plot_of", self)

    def check_readable(self) -> None:
        """Check that the run is finished, and that the entries of its models are not permuted.

        Over a network, clients can permute them by a secret that the server does not know.

        Raises
        ------
        RunError
            If the run is unfinished, or the models are permuted.
        """
        if self.is_unfinished:
            raise RunError(
                "the models of an unfinished run cannot be used; continue the run with fedclade "
                "resume RUN, or finish it as it is with fedclade resume RUN --finish"
            )
        if "network" in self.config and self.config.get("privacy", {}).get("permute"):
            raise RunError(
                "the models of this run are permuted by a secret that only its clients know, so "
                "they cannot be used here; clients are evaluated over the network, and newcomers "
                "can join there"
            )

    @property
    def parted(self) -> bool:
        """Whether a part of the model is personal: trained and stored by each client separately."""
        return self.layout is not None and bool(self.layout.personal)

    def personal(self, client: int) -> Mapping[str, Tensor]:
        """Return a client's personal parameters and buffers, by name.

        The result is empty if clients share the whole model.

        Raises
        ------
        TreeError
            If the run has no such client.
        RunError
            If only the client stores its personal parameters, as in a network.
        """
        self.tree.path(client)  # raises a TreeError for a client that the run does not have
        if self.layout is None or not self.layout.personal:
            return {}
        if "personal" not in self.kept.get(client, {}):
            raise RunError(
                f"this run has no personal parameters of client {client}: over a network, only the "
                "client stores them"
            )
        return self.layout.unflatten_personal(self.kept[client]["personal"])

    def predict(
        self, rows: Any, *, client: int | str | None = None, node: int | None = None, **options: Any
    ) -> Predictions:
        """Predict the targets of new rows by a model of the run; see :func:`fedclade.predict`.

        Parameters
        ----------
        rows
            The path of a file, a data frame, a list of mappings or texts, or an array.
        client, node
            The client (its id or its name) or the node whose model predicts; give one of the two.
        **options
            Further arguments of :func:`fedclade.predict`.
        """
        # Imported here, since the module uses runs.
        from fedclade.runs.prediction import predict

        return predict(self, rows, client=client, node=node, **options)

    def evaluate(self, federation: Federation, **options: Any) -> NewScores:
        """Evaluate the run's models on new data of its clients; see :func:`fedclade.evaluate`.

        Parameters
        ----------
        federation
            Data of clients of the run, which are recognized by their names.
        **options
            Further arguments of :func:`fedclade.evaluate`.
        """
        from fedclade.runs.prediction import evaluate

        return evaluate(self, federation, **options)

    @checked()
    def save(
        self,
        folder: str | Path,
        extra: Callable[[Path], object] | None = None,
        *,
        replace: bool = False,
    ) -> Path:
        """Write all results to a new run folder. If an error occurs, no folder is created.

        Parameters
        ----------
        folder
            Path of the folder, which must not exist yet, except with ``replace``.
        extra
            Function that writes further files, such as figures, into the new folder. Its argument
            is the folder's temporary path; after the call, the folder is renamed to ``folder``.
        replace
            Whether to replace the folder of a finished run. It is removed only when the new folder
            has been written. No other file or folder is ever replaced.

        Returns
        -------
        Path
            Path of the folder.

        Raises
        ------
        RunError
            If the folder exists already, or cannot be written.
        """
        target = Path(folder)
        if not (replace and is_finished(target)):
            check_free(target)

        def write(beside: Path) -> None:
            beside.mkdir()
            self._write(beside)
            if extra is not None:
                extra(beside)

        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            appear(target, write)
        except OSError as error:
            raise RunError(f"cannot write the run folder {target}: {error}") from error
        return target

    def finish(self, folder: Path) -> None:
        """Write the results into the folder of a run in progress.

        The file that is written last marks the run as finished.

        Raises
        ------
        RunError
            If a file cannot be written. The run is then still unfinished.
        """
        beside = folder / ".results.writing"
        try:
            remove(beside)
            beside.mkdir()
            self._write(beside)
            bring_to_disk(beside)
            # The manifest and then the summary come last: a folder with a summary is finished.
            for path in sorted(
                beside.iterdir(), key=lambda path: (path.name == _SUMMARY, path.name == _MANIFEST)
            ):
                take_place(path, folder / path.name)
        except OSError as error:
            raise RunError(f"cannot write the results of the run to {folder}: {error}") from error
        finally:
            remove(beside)

    @classmethod
    @checked()
    def load(cls, folder: str | Path, *, trust: bool = False, unfinished: bool = False) -> Run:
        """Read the results of a finished run from its folder.

        No code that the run's config names is imported.

        Parameters
        ----------
        folder
            A folder that :meth:`save`, ``fedclade.simulate(folder=...)`` or ``fedclade run`` wrote.
        trust
            Whether :func:`fedclade.assign` may import the code that the folder's config names by
            ``module:name``, which runs that module. Set it only for a folder whose origin you
            trust.
        unfinished
            Whether to load an unfinished run, too: its tables and clusters at the newest checkpoint.
            Its models cannot be used.

        Raises
        ------
        RunError
            If the folder does not exist or is not a run folder, its run is unfinished, its format
            is not supported, or a file is damaged.
        """
        source = Path(folder)
        if not is_finished(source):
            if is_unfinished(source) and unfinished:
                # Imported here, since the module uses runs.
                from fedclade.runs.store.folder import load_unfinished

                return load_unfinished(source)
            if is_unfinished(source):
                raise RunError(
                    f"the run in {source} is unfinished; continue with: fedclade resume {source}"
                )
            if not source.exists():
                raise RunError(f"there is no folder {source}; name the folder of a run")
            raise RunError(f"{source} is not a run folder: it has no {_SUMMARY}")
        try:
            _check_format(source)
            summary = read_summary(source / _SUMMARY)
            tree = read_tree(source / "tree")
            nodes = len(tree.nodes)
            rows = [read_rows(source / f"{name}.parquet", summary, nodes) for name in TABLES]
            check_shape(config := read_run_config(source), FINISHED, CONFIG)
            events = read_events(source / EVENTS, nodes)
            similarities = read_similarities(source / "similarities.npz", nodes)
            layout = read_layout(source / "tree")
            kept = read_kept(source / KEPT, layout)
            gains = read_gains(source)
            schema = _read_schema(source)
            return cls(
                summary,
                config,
                tree,
                *rows,
                events=events,
                similarities=similarities,
                layout=layout,
                kept=kept,
                is_trusted=trust,
                gains=gains,
                schema=schema,
            )
        except DAMAGES as error:
            raise RunError(
                f"the run folder {source} is damaged: {type(error).__name__}: {error}; {REMEDY}"
            ) from error

    def _write(self, folder: Path) -> None:
        """Write all result files into an existing folder."""
        write_config(folder / CONFIG, self.config)
        (folder / _SUMMARY).write_text(json.dumps(self.summary, indent=2) + "\n")
        (folder / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in self.events))
        for name, rows in zip(
            TABLES, (self.metric_rows, self.cluster_rows, self.client_rows), strict=True
        ):
            scores: list[str] = []
            if name == "clients":
                scores = [metric.name for metric in read_metrics(self.summary)]
            write_rows(folder / f"{name}.parquet", rows, scores)
        write_tree(self.tree, folder / "tree", self.layout, is_private(self.config))
        write_kept(folder / KEPT, self.kept, is_private(self.config))
        write_similarities(folder / "similarities.npz", self.similarities)
        if self.schema is not None:
            self.schema.save(folder / SCHEMA)
        write_manifest(folder / _MANIFEST, FORMAT)
        # After the manifest, which does not list the file: gains can be measured again later.
        if self.gains is not None:
            write_gains(self.gains, folder)


def _read_schema(folder: Path) -> DataSchema | None:
    """Read the schema of a run's data from its folder; None if the folder has no schema.

    Raises
    ------
    ValueError
        If the file is damaged.
    """
    if not (folder / SCHEMA).exists():
        return None
    try:
        return DataSchema.load(folder / SCHEMA)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _check_format(folder: Path) -> None:
    """Check that a run folder has a supported format, and that its files are unchanged."""
    found = read_json(folder / _SUMMARY, {"format": object})["format"]
    if found not in READABLE:
        known = f"{', '.join(map(str, READABLE[:-1]))} and {READABLE[-1]}"
        raise RunError(
            f"{folder} has format {found}, but this version of fedclade reads formats {known}; use "
            "the version that wrote the folder"
        )
    if found < 3 and not (folder / _MANIFEST).exists():
        return
    try:
        names = check_manifest(folder / _MANIFEST, FORMAT)
        if missing := sorted(set(_FILES) - set(names)):
            raise RunError(f"{_MANIFEST} should list {missing[0]}, a file of every run folder")
    except RunError as error:
        raise RunError(f"the run folder {folder} is damaged: {error}; {REMEDY}") from error


def check_free(folder: str | Path, *, take_over: bool = False) -> Path:
    """Check that a new run folder can be created at a path, and return the path.

    Parameters
    ----------
    folder
        Path of the folder.
    take_over
        Whether the folder may contain the leftovers of a run that was killed before its config was
        written. The lock of the folder decides later whether that run is still alive.

    Raises
    ------
    RunError
        If the path exists, whether it contains an unfinished run or anything else.
    """
    target = Path(folder)
    if take_over and target.is_dir() and holds_leftovers(target):
        return target
    if is_unfinished(target):
        raise RunError(
            f"{target} contains an unfinished run; continue it with: fedclade resume {target}, or "
            "name another folder"
        )
    if target.exists():
        raise RunError(
            f"{target.absolute()} exists already; name another folder (on the command line with "
            "--out), or remove it"
        )
    return target


def is_finished(folder: Path) -> bool:
    """Return whether a folder contains a finished run."""
    return (folder / _SUMMARY).is_file()


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder contains a run that has begun and is not finished."""
    return (folder / CONFIG).is_file() and not is_finished(folder)


def holds_leftovers(folder: Path) -> bool:
    """Return whether a folder contains at most the files of a run killed at its very start."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= _LEFTOVERS


def reopen(folder: Path) -> None:
    """Mark a finished run as unfinished, so that it can be continued for further rounds.

    The summary and the gains are removed; they are written again at the end of the continued run.
    """
    (folder / _SUMMARY).unlink(missing_ok=True)
    (folder / GAINS).unlink(missing_ok=True)
