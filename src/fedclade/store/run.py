"""A finished run, and the folder that keeps it."""

from __future__ import annotations

import json
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedclade.errors import RunError
from fedclade.files import appear, bring_to_disk, remove, take_place
from fedclade.params import Layout
from fedclade.similarity import Similarity
from fedclade.store.tree_files import read_layout, read_tree, write_tree
from fedclade.tree import ParameterTree

FORMAT = 2
"""Version of the run folder's layout, in ``summary.json``."""

READABLE = (1, 2)
"""Versions that are read. Folders of format 1 had no checkpoints and could not be unfinished, and are else the same."""

CONFIG, _SUMMARY = "config.toml", "summary.json"
"""The first file of a run folder, there from the start of the run; and the last, which only a finished run has."""

Row = dict[str, Any]

_DAMAGES = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error)
"""What the readers of the files raise when they meet something else than what was written."""


@dataclass(frozen=True, eq=False)
class SimilarityMatrix:
    """Cosine similarities of a cluster's updates.

    Parameters
    ----------
    node
        The cluster.
    round
        The round of the updates: for a cluster that was split, the last before.
    clients
        ``[n]``.
    alpha
        ``[n, n]``.
    """

    node: int
    round: int
    clients: tuple[int, ...]
    alpha: Similarity


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that a run tells.

    Parameters
    ----------
    summary
        As in ``summary.json``.
    config
        What was run, as in ``config.toml``.
    tree
        The clusters and their models.
    metrics
        One row for each round.
    clusters
        One row for each round and cluster.
    clients
        One row for each evaluation and client.
    events
        Splits and the like, in order.
    similarities
        The latest of every cluster that had more than one answer.
    layout
        Where the entries of a model belong in the module; None in folders of before this was kept.
    """

    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    tree: ParameterTree
    metrics: Sequence[Row]
    clusters: Sequence[Row]
    clients: Sequence[Row]
    events: Sequence[Row]
    similarities: Sequence[SimilarityMatrix] = field(default_factory=tuple[SimilarityMatrix, ...])
    layout: Layout | None = None

    def __repr__(self) -> str:
        told = ("algorithm", "data", "model", "seed", "rounds")
        return f"Run({', '.join(f'{key}={self.summary.get(key)!r}' for key in told)})"

    def check_readable(self) -> None:
        """Check that its models can be used as they are.

        Raises
        ------
        RunError
            If they are permuted still: in a simulation they are opened at the end, but the clients of a network keep
            their secret from the server.
        """
        if "network" in self.config and self.config.get("privacy", {}).get("permute"):
            raise RunError(
                "the models of this run are permuted by a secret that only its clients have, and nobody else can use "
                "them; clients are served over the network, where newcomers join too"
            )

    def save(self, folder: str | Path, extra: Callable[[Path], object] | None = None) -> Path:
        """Write the run folder; all of it or nothing.

        Parameters
        ----------
        folder
            Must not exist yet.
        extra
            Writes further files, such as figures, into the folder that it is given, before the folder appears.

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
        """Write the result files into the folder of a run in progress; the last of them makes it a finished one.

        Raises
        ------
        RunError
            If they cannot be written.
        """
        beside = folder / ".results.writing"
        try:
            remove(beside)
            beside.mkdir()
            self._write(beside)
            bring_to_disk(beside)
            for path in sorted(beside.iterdir(), key=lambda path: path.name == _SUMMARY):
                take_place(path, folder / path.name)
        except OSError as error:
            raise RunError(f"cannot write the results of the run to {folder}: {error}") from error
        finally:
            remove(beside)

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Read a run folder.

        Raises
        ------
        RunError
            If it is not a run folder, unfinished, of a format that this version does not read, or damaged.
        """
        source = Path(folder)
        if not is_finished(source):
            if is_unfinished(source):
                raise RunError(f"the run in {source} is unfinished; continue with: fedclade resume {source}")
            raise RunError(f"{source} is not a run folder: it has no {_SUMMARY}")
        try:
            summary = json.loads((source / _SUMMARY).read_text())
            if summary.get("format") not in READABLE:
                known = " and ".join(map(str, READABLE))
                raise RunError(
                    f"{source} has format {summary.get('format')}, this version of fedclade reads formats {known}"
                )
            return cls(
                summary=summary,
                config=read_config(source),
                tree=read_tree(source / "tree"),
                metrics=_read_rows(source / "metrics.parquet"),
                clusters=_read_rows(source / "clusters.parquet"),
                clients=_read_rows(source / "clients.parquet"),
                events=[json.loads(line) for line in (source / "events.jsonl").read_text().splitlines()],
                similarities=_read_similarities(source / "similarities.npz"),
                layout=read_layout(source / "tree"),
            )
        except _DAMAGES as error:
            raise RunError(f"the run folder {source} is damaged: {type(error).__name__}: {error}") from error

    def _write(self, folder: Path) -> None:
        write_config(folder / CONFIG, self.config)
        (folder / _SUMMARY).write_text(json.dumps(self.summary, indent=2) + "\n")
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in self.events))
        _write_rows(folder / "metrics.parquet", self.metrics)
        _write_rows(folder / "clusters.parquet", self.clusters)
        _write_rows(folder / "clients.parquet", self.clients)
        write_tree(self.tree, folder / "tree", self.layout)
        _write_similarities(folder / "similarities.npz", self.similarities)


def check_free(folder: str | Path) -> Path:
    """Return the path of a run folder that is to be made.

    Raises
    ------
    RunError
        If something is there already.
    """
    target = Path(folder)
    if is_unfinished(target):
        raise RunError(
            f"{target} holds an unfinished run; continue it with: fedclade resume {target}, or name another folder"
        )
    if target.exists():
        raise RunError(f"{target} exists already; name another folder with --out, or remove it")
    return target


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a finished run."""
    return (folder / _SUMMARY).is_file()


def is_unfinished(folder: Path) -> bool:
    """Whether a folder holds a run that has begun and not finished."""
    return (folder / CONFIG).is_file() and not is_finished(folder)


def reopen(folder: Path) -> None:
    """Make a finished run an unfinished one, for further rounds."""
    (folder / _SUMMARY).unlink(missing_ok=True)


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read the config of a run folder.

    Raises
    ------
    RunError
        If it cannot be read.
    """
    try:
        return tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"the run folder {folder} is damaged: {type(error).__name__}: {error}") from error


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config as TOML."""
    import tomli_w  # not needed to simulate, only to save

    path.write_text(tomli_w.dumps(without_none(config)), encoding="utf-8")


def plain(value: Any) -> Any:
    """Return a setting, or a detail of an event, as files can hold it: no numbers of NumPy, no tensors, no objects."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        entries = [plain(entry) for entry in value]
        return tuple(entries) if isinstance(value, tuple) else entries
    if isinstance(value, np.generic | np.ndarray | Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def without_none(value: Any) -> Any:
    """TOML has no null: a setting that is not set is left out."""
    if isinstance(value, Mapping):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, tuple | list):
        return [without_none(entry) for entry in value]
    return value


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def _read_rows(path: Path) -> list[Row]:
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def _write_similarities(path: Path, similarities: Sequence[SimilarityMatrix]) -> None:
    arrays: dict[str, Any] = {}
    for s in similarities:
        key = f"{s.node}/{s.round}"
        arrays[f"{key}/clients"] = np.asarray(s.clients, dtype=np.int64)
        arrays[f"{key}/alpha"] = s.alpha.astype(np.float32)
    np.savez_compressed(path, **arrays)


def _read_similarities(path: Path) -> tuple[SimilarityMatrix, ...]:
    found: list[SimilarityMatrix] = []
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            node, number, what = name.split("/")
            if what == "alpha":
                clients = tuple(arrays[f"{node}/{number}/clients"].tolist())
                found.append(SimilarityMatrix(int(node), int(number), clients, arrays[name].astype(np.float64)))
    return tuple(found)
