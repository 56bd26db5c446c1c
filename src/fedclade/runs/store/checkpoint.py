"""Checkpoints: the state with which a run can continue after a round, as a folder of files.

```
round-000012/
  checkpoint.json       format, and the SHA-256 of every other file
  run.json              round, config, execution (device, versions), fingerprint of the data,
                        description of the tensors
  record/               table rows of all rounds so far, see write_segments
  tensors.safetensors   tensors of the algorithm's state, similarity matrices, clients' tensors
  tree/                 the parameter tree, in the format of a run folder
  best/                 the best round so far, if the run has keep_best; see kept_round.py
  members/              client ids of large clusters, see write_members
```

JSON preserves every bit of a float64: Python writes the shortest decimal that reads back as the
same number.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from fedclade.core import (
    MANY_IDS,
    CheckpointError,
    ParameterTree,
    RunError,
    copy_rows,
    id_array,
    write_tensors,
)
from fedclade.runs.store.contents import Row
from fedclade.runs.store.kept_round import KeptRound
from fedclade.runs.store.manifest import check_manifest, is_private, read_manifest, write_manifest
from fedclade.runs.store.tree_files import (
    DAMAGES,
    SimilarityMatrix,
    consecutive_range,
    read_tree,
    write_tree,
)

# The rows of a checkpoint are in several files, so that the next checkpoint writes little more than
# the rows of the new rounds.
#
# ``000001-000256.jsonl`` has the rows of all tables for 256 rounds: each line has the name of a
# table and a row of this table. A new file replaces the files before it that cover no more rounds
# than the new file. So there are few files, and each row is written about as often as there are
# files.

_NAME = re.compile(r"(\d+)-(\d+)\.jsonl")


def write_segments(
    folder: Path, rows: Mapping[str, Sequence[Row]], last: int, earlier: Sequence[Path] = ()
) -> list[Path]:
    """Write the rows of all rounds up to the ``last`` into a new folder, divided into files.

    A file contains the rows of consecutive rounds. Files of an ``earlier`` checkpoint of the same
    run are reused for the new checkpoint where possible, without writing them again.

    Parameters
    ----------
    folder
        Folder to make.
    rows
        Rows of each table, in the order of their rounds.
    last
        The last round to write.
    earlier
        Files of an earlier checkpoint of the same run.

    Returns
    -------
    list of Path
        The earlier files that are reused: both checkpoints share them.
    """
    folder.mkdir()
    kept = sorted((path for path in earlier if _NAME.fullmatch(path.name)), key=_rounds_of_file)
    first = 1  # the first round that is not in the earlier files
    for path in kept:
        begin, end = _rounds_of_file(path)
        if begin != first:
            kept = []  # rounds are missing between the files
            first = 1
            break
        first = end + 1
    if first > last:
        kept = []
        first = 1
    while kept and _count_rounds(kept[-1]) <= last - first + 1:
        first = _rounds_of_file(kept.pop())[0]
    for path in kept:
        share(path, folder / path.name)
    with (folder / f"{first:06d}-{last:06d}.jsonl").open("w", encoding="utf-8") as file:
        for name, table in rows.items():
            begin = bisect_left(table, first, key=_round_of) if first > 1 else 0
            end = bisect_right(table, last, key=_round_of)
            file.writelines(json.dumps([name, row]) + "\n" for row in table[begin:end])
    return kept


def read_segments(files: Iterable[Path], tables: Iterable[str]) -> dict[str, list[Row]]:
    """Read the rows of the given tables from the files that :func:`write_segments` wrote.

    The result has a list of rows for each table, by its name.
    """
    rows: dict[str, list[Row]] = {name: [] for name in tables}
    for path in sorted(files, key=_rounds_of_file):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, row = json.loads(line)
            rows[name].append(row)
    return rows


def share(path: Path, other: Path) -> None:
    """Make a file available under a second path, as a hard link or, if impossible, as a copy.

    The file must never be changed, since a change would affect both paths.
    """
    try:
        os.link(path, other)
    except OSError:  # the file system has no hard links
        shutil.copyfile(path, other)


def _rounds_of_file(path: Path) -> tuple[int, int]:
    """Return the first and the last round in a file of rows, according to the file's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(
            "the name of a file of rows in a checkpoint should be like 000001-000256.jsonl, got "
            f"{path.name}"
        )
    return int(match[1]), int(match[2])


def _count_rounds(path: Path) -> int:
    first, last = _rounds_of_file(path)
    return last - first + 1


def _round_of(row: Row) -> int:
    return row["round"]


# The members of each large cluster are in a separate file, so that a checkpoint only writes the
# members of clusters that have changed. Members with consecutive ids, such as all clients of a
# simulation, need no file: the tree states the first and the last id.

_MEMBERS_NAME = re.compile(r"[0-9a-f]{32}\.npy")


def write_members(
    tree: ParameterTree, folder: Path, earlier: Sequence[Path] = ()
) -> tuple[dict[int, str], list[Path]]:
    """Write the client ids of large clusters into a new folder, with one file for each cluster.

    A cluster is large if it has at least :data:`~fedclade.core.MANY_IDS` members. A file is named
    by the hash of its content, so that an ``earlier`` file with the same content can be reused
    without writing it again. Clusters whose members have consecutive ids are left out.

    Parameters
    ----------
    tree
        The clusters.
    folder
        Folder to create, if the tree has a large cluster.
    earlier
        Files of an earlier checkpoint of the same run.

    Returns
    -------
    tuple
        The name of the file of each large cluster, by node; and the earlier files that are reused.
    """
    known = {path.name: path for path in earlier if _MEMBERS_NAME.fullmatch(path.name)}
    names: dict[int, str] = {}
    shared: list[Path] = []
    for node in tree.nodes:
        if len(node.members) < MANY_IDS or consecutive_range(node.members) is not None:
            continue
        members = np.ascontiguousarray(id_array(node.members))
        names[node.id] = name = f"{hashlib.sha256(members.data).hexdigest()[:32]}.npy"
        folder.mkdir(exist_ok=True)
        if (folder / name).exists():  # a root and its only leaf have the same members
            continue
        if name in known:
            share(known[name], folder / name)
            shared.append(known[name])
        else:
            np.save(folder / name, members)
    return names, shared


def read_members(folder: Path, name: str) -> NDArray[np.int64]:
    """Read the client ids of a cluster from a file that :func:`write_members` wrote.

    Raises
    ------
    OSError, ValueError
        If ``name`` is not the name of such a file, or the file is damaged.
    """
    if not _MEMBERS_NAME.fullmatch(name):
        raise ValueError(
            "in the tree of a checkpoint, members should be a list of client ids, or the name of a "
            f"file with them, got {name!r}"
        )
    members = np.load(folder / name, allow_pickle=False)
    if members.ndim != 1 or members.dtype != np.int64:
        raise ValueError(
            f"{name} should be an array [n] of int64 ids, got {members.dtype} {members.shape}"
        )
    return members


FORMAT = 2
"""Version of the format of a checkpoint.

Checkpoints of other versions are not read, since a checkpoint is needed only until the run is
finished.
"""

_MANIFEST = "checkpoint.json"
_BEST = "best"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """State of a run after a round, from which the run can continue.

    It contains no state of random generators: every random draw is determined by the seed, the
    purpose, the round and the client, see :mod:`fedclade.core.rng`. If clients permute the entries
    of models, ``tree`` and ``memory`` are in permuted order.
    """

    round: int  #: number of the last finished round
    config: Mapping[str, Any]  #: as in ``config.toml``, with the engine that was chosen
    #: other properties that affect rounding: device, threads, versions of packages and so on
    made_with: Mapping[str, Any]
    fingerprint: str  #: fingerprint of the federation
    tree: ParameterTree  #: clusters and their models
    memory: Mapping[str, Tensor]  #: other tensors of the algorithm's state, by name
    on_cpu: frozenset[str]  #: names of tensors in ``memory`` that are always on the CPU
    #: rows of the history, by table: ``metrics``, ``clusters``, ``clients``, ``events``
    rows: Mapping[str, list[Row]]
    similarities: Sequence[SimilarityMatrix] = field(default_factory=tuple[SimilarityMatrix, ...])
    #: tensors that simulated clients store, see ``ClientStore.tensors``
    stores: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    #: reason for finishing the run after this round; None if it continues
    stopped: Mapping[str, Any] | None = None
    best: KeptRound | None = None  #: the best round so far, in a run that stores it
    #: summary of the run so far; None before the first evaluation, and in older checkpoints
    summary: Mapping[str, Any] | None = None
    #: moments of the clusters' server optimizers, see ``moments_as_tensors``
    server: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def write(self, folder: Path, earlier: Path | None = None) -> None:
        """Write the checkpoint into a new folder.

        Files with the same content as in an ``earlier`` checkpoint are shared with that checkpoint.
        The manifest is written last.
        """
        folder.mkdir(parents=True)
        private = is_private(self.config)
        known: dict[Path, str] = {}
        if earlier is not None:
            known = _files_of(earlier)
        members, unchanged = write_members(self.tree, folder / "members", list(known))
        write_tree(self.tree, folder / "tree", private=private, members=members)
        tensors = {
            f"memory/{name}": tensor.detach().cpu().clone() for name, tensor in self.memory.items()
        }
        tensors |= {f"similarity/{s.node}": torch.tensor(s.alpha) for s in self.similarities}
        tensors |= {f"store/{name}": tensor.cpu() for name, tensor in self.stores.items()}
        tensors |= {f"server/{name}": tensor.cpu() for name, tensor in self.server.items()}
        write_tensors(folder / "tensors.safetensors", tensors, private=private)
        run: dict[str, Any] = {
            "round": self.round,
            "config": self.config,
            "made_with": self.made_with,
            "fingerprint": self.fingerprint,
            "on_cpu": sorted(self.on_cpu),
            "similarities": [
                {"node": s.node, "round": s.round, "clients": s.clients} for s in self.similarities
            ],
            "tables": list(self.rows),
        }
        if self.summary is not None:
            run["summary"] = self.summary
        if self.stopped is not None:
            run["stopped"] = self.stopped
        if self.best is not None:
            self.best.write(folder / _BEST, private=private)
        _write_json(folder / "run.json", run)
        shared = write_segments(folder / "record", self.rows, self.round, list(known))
        sums = {f"{path.parent.name}/{path.name}": known[path] for path in (*shared, *unchanged)}
        write_manifest(folder / _MANIFEST, FORMAT, sums)

    def moved(self, device: str) -> Checkpoint:
        """Return the checkpoint with its tensors on a device, such as ``cuda``.

        Tensors that the algorithm stores on the CPU remain there.
        """
        tree = self.tree.map_vectors(*[lambda tensor: tensor.to(device)] * 2)
        memory = dict(self.memory)
        for name in memory.keys() - self.on_cpu:
            memory[name] = memory[name].to(device)
        stores = {name: tensor.to(device) for name, tensor in self.stores.items()}
        server = {name: tensor.to(device) for name, tensor in self.server.items()}
        best = self.best
        if best is not None:
            best = best.moved(device)
        return replace(self, tree=tree, memory=memory, stores=stores, best=best, server=server)

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read a checkpoint from its folder, with all tensors on the CPU.

        Raises
        ------
        CheckpointError
            If the checkpoint has another format, or a file is missing or damaged.
        """
        try:
            names = check_manifest(folder / _MANIFEST, FORMAT)
        except RunError as error:
            raise CheckpointError(str(error)) from error
        try:
            run = json.loads((folder / "run.json").read_text())
            rows = read_segments(
                [folder / name for name in names if name.startswith("record/")], run["tables"]
            )
            # Cloned, since all tensors of a file share one buffer with arbitrary alignment, and the
            # rounding of vectorized operations can depend on the alignment.
            tensors = {
                name: tensor.clone()
                for name, tensor in load_file(folder / "tensors.safetensors").items()
            }
            similarities = [
                SimilarityMatrix(
                    s["node"],
                    s["round"],
                    tuple(s["clients"]),
                    tensors[f"similarity/{s['node']}"].numpy(),
                )
                for s in run["similarities"]
            ]
            best: KeptRound | None = None
            if (folder / _BEST).is_dir():
                best = KeptRound.read(folder / _BEST)
            return cls(
                round=run["round"],
                config=run["config"],
                made_with=run["made_with"],
                fingerprint=run["fingerprint"],
                tree=read_tree(
                    folder / "tree", partial(read_members, folder / "members")
                ).map_vectors(torch.clone, copy_rows),
                memory=_select_tensors(tensors, "memory/"),
                on_cpu=frozenset(run["on_cpu"]),
                rows=rows,
                similarities=similarities,
                stores=_select_tensors(tensors, "store/"),
                stopped=run.get("stopped"),
                best=best,
                summary=run.get("summary"),
                server=_select_tensors(tensors, "server/"),
            )
        except (*DAMAGES, RunError) as error:
            raise CheckpointError(
                f"the checkpoint {folder} cannot be read: {type(error).__name__}: {error}"
            ) from error


def _select_tensors(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by their names without the prefix."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _files_of(folder: Path) -> dict[Path, str]:
    """Return the files of a checkpoint that a later checkpoint may share, with their SHA-256.

    The result is empty if the manifest cannot be read or a file is missing.
    """
    try:
        sums = read_manifest(folder / _MANIFEST, FORMAT)
    except RunError:
        return {}
    found = {
        folder / name: each
        for name, each in sums.items()
        if name.startswith(("record/", "members/"))
    }
    if not all(path.is_file() for path in found):
        return {}
    return found


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value) + "\n")
