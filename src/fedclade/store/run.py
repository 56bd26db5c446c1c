"""A finished run, and the folder that keeps it."""

from __future__ import annotations

import json
import shutil
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedclade.errors import RunError
from fedclade.params import Layout
from fedclade.similarity import Similarity
from fedclade.store.tree_files import read_layout, read_tree, write_tree
from fedclade.tree import ParameterTree

FORMAT = 1
"""Version of the run folder's layout, in ``summary.json``."""

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
        beside = target.with_name(f".{target.name}.writing")
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            self._write(beside)
            if extra is not None:
                extra(beside)
            beside.rename(target)
        except OSError as error:
            raise RunError(f"cannot write the run folder {target}: {error}") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return target

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Read a run folder.

        Raises
        ------
        RunError
            If it is not a run folder, is of another format, or is damaged.
        """
        source = Path(folder)
        if not (source / "summary.json").is_file():
            raise RunError(f"{source} is not a run folder: it has no summary.json")
        try:
            summary = json.loads((source / "summary.json").read_text())
            if summary.get("format") != FORMAT:
                raise RunError(f"{source} has format {summary.get('format')}, this version reads format {FORMAT}")
            return cls(
                summary=summary,
                config=tomllib.loads((source / "config.toml").read_text()),
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
        import tomli_w  # not needed to simulate, only to save

        (folder / "config.toml").write_text(tomli_w.dumps(_without_none(self.config)))
        (folder / "summary.json").write_text(json.dumps(self.summary, indent=2) + "\n")
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
    if target.exists():
        raise RunError(f"{target} exists already; name another folder with --out, or remove it")
    return target


def _without_none(value: Any) -> Any:
    """TOML has no null: a setting that is not set is left out."""
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, tuple | list):
        return [_without_none(entry) for entry in value]
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
