"""Results of a finished run, and the folder that stores them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedclade.core import (
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
from fedclade.runs.store.contents import (
    FINISHED,
    TABLES,
    Row,
    check_shape,
    data_frame,
    read_events,
    read_json,
    read_rows,
    read_summary,
    write_rows,
)
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

FORMAT = 3
"""Version of the run folder's layout, recorded in ``summary.json``."""

READABLE = (1, 2, 3)
"""Versions of the run folder's layout that can be read.

Folders of format 1 had no checkpoints and could not be unfinished. Folders before format 3 had no
SHA-256 sums, so that only the shapes of their contents can be checked.
"""

_SUMMARY = "summary.json"
"""Last file of a run folder, which only a finished run has."""

_MANIFEST = "manifest.json"
"""File with the SHA-256 of every other file of a finished run."""

_LEFTOVERS = {LOCK, f".{CONFIG}.writing"}
"""Files that can exist before the config of a run."""

_FILES = (
    *(
        CONFIG,
        _SUMMARY,
        "events.jsonl",
        "similarities.npz",
        "tree/tree.json",
        "tree/tree.safetensors",
    ),
    *(f"{name}.parquet" for name in TABLES),
)
"""Files of a finished run."""


@dataclass(frozen=True, eq=False)
class Run(Displayed):
    """All results of a run.

    Parameters
    ----------
    summary, config
        Contents of ``summary.json`` and ``config.toml``.
    tree
        The clusters and their models.
    metric_rows, cluster_rows, client_rows
        Rows of the tables: one for each round; for each round and cluster; for each evaluation and
        client. As pandas data frames they are :attr:`metrics`, :attr:`clusters` and
        :attr:`clients`.
    events
        Splits and other events, in order.
    similarities
        The latest similarity matrix of every cluster in which more than one client replied.
    layout
        Mapping between the entries of a model and the module's tensors; None in folders of versions
        that did not store it.
    kept
        Tensors that each client of a simulation stores, by client and name: ``personal``, its
        personal parameters ``[P]``, ``model``, a whole model of its own ``[F]``, and ``mixture``,
        its weights of the leaves' models ``[K]``.
    is_trusted
        Whether functions that use the config again, such as :func:`fedclade.assign`, may import
        code that it names by ``module:name``. A run that was made in this process is trusted; a
        loaded run is not, unless the user says that its origin is.
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

    def __repr__(self) -> str:
        shown = ("algorithm", "data", "model", "seed", "rounds")
        return f"Run({', '.join(f'{key}={self.summary.get(key)!r}' for key in shown)})"

    @property
    def model_round(self) -> int:
        """Round of the models: the last, or the best of a run with ``keep_best``."""
        chosen = self.summary.get("chosen", {})
        return chosen["round"] if chosen.get("kept") else self.summary["rounds"]

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

        :attr:`cluster_rows` has the same rows as dicts. Raises the errors of :attr:`metrics`.
        """
        return data_frame(self.cluster_rows, "Run.clusters, unlike Run.cluster_rows,")

    @cached_property
    def clients(self) -> DataFrame:
        """Clusters and scores as a pandas data frame, with a row for each evaluation and client.

        :attr:`client_rows` has the same rows as dicts. Raises the errors of :attr:`metrics`.
        """
        return data_frame(self.client_rows, "Run.clients, unlike Run.client_rows,")

    def plot(self) -> Figure:
        """Plot the score of every cluster over the rounds as a Plotly figure.

        Splits are dotted lines. Below the scores is the separation gap g(α), if the true clusters
        are known, or else α_cross^max. The colours are those of a dark page if
        ``plotly.io.templates.default`` is a dark template.

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
        """Check that the run's models are not permuted.

        Clients of a network can permute models by a secret that the server does not know.

        Raises
        ------
        RunError
            If they are permuted.
        """
        if "network" in self.config and self.config.get("privacy", {}).get("permute"):
            raise RunError(
                "the models of this run are permuted by a secret that only its clients have, and "
                "nobody else can use them; clients are served over the network, where newcomers "
                "join too"
            )

    @property
    def parted(self) -> bool:
        """Whether a part of each client's model is personal."""
        return self.layout is not None and bool(self.layout.personal)

    def personal(self, client: int) -> Mapping[str, Tensor]:
        """Return a client's personal parameters and buffers by name.

        The result is empty if all of its model is shared.

        Raises
        ------
        TreeError
            If the run has no such client.
        RunError
            If only the client stores them, as in a network.
        """
        self.tree.path(client)  # raises a TreeError for a client that the run does not have
        if self.layout is None or not self.layout.personal:
            return {}
        if "personal" not in self.kept.get(client, {}):
            raise RunError(
                f"this run has no personal parameters of client {client}: over a network they stay "
                "with it"
            )
        return self.layout.unflatten_personal(self.kept[client]["personal"])

    @checked()
    def save(self, folder: str | Path, extra: Callable[[Path], object] | None = None) -> Path:
        """Write the run folder, or nothing if an error occurs.

        Parameters
        ----------
        folder
            Path of the folder, which must not exist yet.
        extra
            Function that writes further files, such as figures, into the folder that it is given;
            it is called before the folder appears under its name.

        Returns
        -------
        Path
            Path of the folder.

        Raises
        ------
        RunError
            If the folder exists already or cannot be written.
        """
        target = check_free(folder)

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
        """Write the result files into the folder of a run in progress.

        The last of the files makes it a finished run.
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
    def load(cls, folder: str | Path, *, trust: bool = False) -> Run:
        """Read a run folder. No code that its config names is imported.

        Parameters
        ----------
        folder
            A folder that :meth:`save`, ``fedclade.simulate(folder=...)`` or ``fedclade run`` wrote.
        trust
            Whether :func:`fedclade.assign` may import the code that the folder's config names by
            ``module:name``, which runs that module. Set it only for a folder whose origin you
            trust.

        Raises
        ------
        RunError
            If it is not a run folder, unfinished, of a format that this version does not read, or
            damaged.
        """
        source = Path(folder)
        if not is_finished(source):
            if is_unfinished(source):
                raise RunError(
                    f"the run in {source} is unfinished; continue with: fedclade resume {source}"
                )
            raise RunError(f"{source} is not a run folder: it has no {_SUMMARY}")
        try:
            _check_format(source)
            summary = read_summary(source / _SUMMARY)
            tree = read_tree(source / "tree")
            nodes = len(tree.nodes)
            rows = [read_rows(source / f"{name}.parquet", summary, nodes) for name in TABLES]
            check_shape(config := read_run_config(source), FINISHED, CONFIG)
            events = read_events(source / "events.jsonl", nodes)
            similarities = read_similarities(source / "similarities.npz", nodes)
            layout = read_layout(source / "tree")
            kept = read_kept(source / KEPT, layout)
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
            )
        except DAMAGES as error:
            raise RunError(
                f"the run folder {source} is damaged: {type(error).__name__}: {error}; {REMEDY}"
            ) from error

    def _write(self, folder: Path) -> None:
        write_config(folder / CONFIG, self.config)
        (folder / _SUMMARY).write_text(json.dumps(self.summary, indent=2) + "\n")
        (folder / "events.jsonl").write_text(
            "".join(json.dumps(event) + "\n" for event in self.events)
        )
        for name, rows in zip(
            TABLES, (self.metric_rows, self.cluster_rows, self.client_rows), strict=True
        ):
            scores = [each.name for each in read_metrics(self.summary)] if name == "clients" else ()
            write_rows(folder / f"{name}.parquet", rows, scores)
        write_tree(self.tree, folder / "tree", self.layout, is_private(self.config))
        write_kept(folder / KEPT, self.kept, is_private(self.config))
        write_similarities(folder / "similarities.npz", self.similarities)
        write_manifest(folder / _MANIFEST, FORMAT)


def _check_format(folder: Path) -> None:
    """Check that a folder has a readable format, and that its files have not changed."""
    found = read_json(folder / _SUMMARY, {"format": object})["format"]
    if found not in READABLE:
        known = f"{', '.join(map(str, READABLE[:-1]))} and {READABLE[-1]}"
        raise RunError(
            f"{folder} has format {found}, this version of fedclade reads formats {known}"
        )
    if found < 3 and not (folder / _MANIFEST).exists():
        return
    try:
        names = check_manifest(folder / _MANIFEST, FORMAT)
        if missing := sorted(set(_FILES) - set(names)):
            raise RunError(f"{_MANIFEST} lacks {missing[0]}")
    except RunError as error:
        raise RunError(f"the run folder {folder} is damaged: {error}; {REMEDY}") from error


def check_free(folder: str | Path, *, take_over: bool = False) -> Path:
    """Return the path of a run folder to make, after checking that nothing is in its place.

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
        If the folder exists, with an unfinished run or anything else.
    """
    target = Path(folder)
    if take_over and target.is_dir() and holds_leftovers(target):
        return target
    if is_unfinished(target):
        raise RunError(
            f"{target} holds an unfinished run; continue it with: fedclade resume {target}, or "
            "name another folder"
        )
    if target.exists():
        raise RunError(f"{target} exists already; name another folder with --out, or remove it")
    return target


def is_finished(folder: Path) -> bool:
    """Whether a folder has a finished run."""
    return (folder / _SUMMARY).is_file()


def is_unfinished(folder: Path) -> bool:
    """Whether a folder has a run that has begun and not finished."""
    return (folder / CONFIG).is_file() and not is_finished(folder)


def holds_leftovers(folder: Path) -> bool:
    """Whether a folder has nothing but leftovers of a run killed before it wrote its config."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= _LEFTOVERS


def reopen(folder: Path) -> None:
    """Make a finished run an unfinished one, for further rounds."""
    (folder / _SUMMARY).unlink(missing_ok=True)
