"""Checkpoints: everything that a run needs to continue after a round, as a folder of files.

```
round-000012/
  checkpoint.json       format, and the SHA-256 of every other file
  run.json              round, config, execution (device, versions), fingerprint of the data,
                        description of the tensors
  record/               rows of all rounds so far, see write_segments
  tensors.safetensors   the algorithm's memory, similarity matrices, tensors that clients store
  tree/                 the parameter tree, as in a run folder
  best/                 the best round so far, if the run stores it; see kept_round.py
  members/              members of large clusters, see write_members
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
from safetensors.torch import load_file
from torch import Tensor

from fedclade.core import CheckpointError, ParameterTree, RunError, write_tensors
from fedclade.runs.store.contents import Row
from fedclade.runs.store.kept_round import KeptRound
from fedclade.runs.store.manifest import check_manifest, is_private, read_manifest, write_manifest
from fedclade.runs.store.tree_files import DAMAGES, SimilarityMatrix, read_tree, write_tree

# The rows of a checkpoint are in several files, so that the next checkpoint writes little more than
# the rows of the new rounds.
#
# ``000001-000256.jsonl`` has the rows of all tables of 256 rounds: each line has the name of a
# table, and one of its rows. A new file replaces the files before it that cover no more rounds than
# the new file. So there are few files, and each row is written about as often as there are files.

_NAME = re.compile(r"(\d+)-(\d+)\.jsonl")


def write_segments(
    folder: Path, rows: Mapping[str, Sequence[Row]], last: int, earlier: Sequence[Path] = ()
) -> list[Path]:
    """Write the rows of all rounds up to the ``last`` into a new folder.

    Files of an ``earlier`` checkpoint of the same run are shared with the new one where possible.

    Parameters
    ----------
    folder
        Folder to make.
    rows
        Rows of each table, in the order of their rounds.
    last
        The last round to write.
    earlier
        Files of an earlier checkpoint.

    Returns
    -------
    list of Path
        The earlier files that are shared.
    """
    folder.mkdir()
    kept = sorted((path for path in earlier if _NAME.fullmatch(path.name)), key=_rounds)
    if [first for first, _ in map(_rounds, kept)] != [
        1,
        *(end + 1 for _, end in map(_rounds, kept)),
    ][: len(kept)]:
        kept = []  # rounds are missing between the files
    if kept and _rounds(kept[-1])[1] >= last:
        kept = []
    first = _rounds(kept[-1])[1] + 1 if kept else 1
    while kept and _length(kept[-1]) <= last - first + 1:
        first = _rounds(kept.pop())[0]
    for path in kept:
        share(path, folder / path.name)
    with (folder / f"{first:06d}-{last:06d}.jsonl").open("w", encoding="utf-8") as file:
        for name, table in rows.items():
            begin = bisect_left(table, first, key=_round_of) if first > 1 else 0
            end = bisect_right(table, last, key=_round_of)
            file.writelines(json.dumps([name, row]) + "\n" for row in table[begin:end])
    return kept


def read_segments(files: Iterable[Path], tables: Iterable[str]) -> dict[str, list[Row]]:
    """Read the rows of some tables from the files of a checkpoint."""
    rows: dict[str, list[Row]] = {name: [] for name in tables}
    for path in sorted(files, key=_rounds):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, row = json.loads(line)
            rows[name].append(row)
    return rows


def share(path: Path, other: Path) -> None:
    """Give a file that never changes a second name, or copy it if the disk cannot do that."""
    try:
        os.link(path, other)
    except OSError:  # the file system has no hard links
        shutil.copyfile(path, other)


def _rounds(path: Path) -> tuple[int, int]:
    """Return the first and the last round of a file."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is no file of rows")
    return int(match[1]), int(match[2])


def _length(path: Path) -> int:
    first, last = _rounds(path)
    return last - first + 1


def _round_of(row: Row) -> int:
    return row["round"]


# The members of large clusters are in separate files, so that a checkpoint only writes those of
# clusters that changed.

LARGE = 10_000
"""Number of members from which on a cluster has a separate file for them."""

_MEMBERS_NAME = re.compile(r"[0-9a-f]{32}\.npy")


def write_members(
    tree: ParameterTree, folder: Path, earlier: Sequence[Path] = ()
) -> tuple[dict[int, str], list[Path]]:
    """Write the members of large clusters into a new folder.

    The files are named by their content.

    Parameters
    ----------
    tree
        The clusters.
    folder
        Folder to make, if a cluster is large.
    earlier
        Files of an earlier checkpoint.

    Returns
    -------
    tuple
        The name of the file of each large cluster, by node; and the earlier files that are shared,
        as they have the same content.
    """
    known = {path.name: path for path in earlier if _MEMBERS_NAME.fullmatch(path.name)}
    names: dict[int, str] = {}
    shared: list[Path] = []
    for node in tree.nodes:
        if len(node.members) < LARGE:
            continue
        members = np.array(node.members, dtype=np.int64)
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


def read_members(folder: Path, name: str) -> list[int]:
    """Read the members of a cluster from its file; raises OSError or ValueError."""
    if not _MEMBERS_NAME.fullmatch(name):
        raise ValueError(f"members should be a list, or the name of a file of them, got {name!r}")
    return np.load(folder / name, allow_pickle=False).tolist()


FORMAT = 2
"""Version of a checkpoint's layout.

Checkpoints of other versions are not read: a checkpoint is needed only until its run is finished.
"""

_MANIFEST = "checkpoint.json"
_BEST = "best"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """State of a run after one of its rounds.

    It contains no random state: every draw is keyed by (seed, purpose, round, client), see
    :mod:`fedclade.core.rng`.

    The algorithm's state, ``tree`` and ``memory``, is as the server sees it.
    """

    round: int  #: number of the last finished round
    config: Mapping[str, Any]  #: as in ``config.toml``, with the engine that was chosen
    #: other properties that affect rounding: device, threads, versions of packages and so on
    made_with: Mapping[str, Any]
    fingerprint: str  #: fingerprint of the federation
    tree: ParameterTree  #: clusters and their models
    memory: Mapping[str, Tensor]  #: other tensors of the algorithm's state, by name
    on_cpu: frozenset[str]  #: names in ``memory`` of tensors on the CPU, wherever the models are
    #: rows of the history, by table: ``metrics``, ``clusters``, ``clients``, ``events``
    rows: Mapping[str, list[Row]]
    similarities: Sequence[SimilarityMatrix] = field(default_factory=tuple[SimilarityMatrix, ...])
    #: tensors that simulated clients store, see ``ClientStore.tensors``
    stores: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    #: why the run is finished after this round; None if it is not
    stopped: Mapping[str, Any] | None = None
    best: KeptRound | None = None  #: the best round so far, in a run that stores it

    def write(self, folder: Path, earlier: Path | None = None) -> None:
        """Write the checkpoint into a new folder, its manifest last.

        Files with the same content as in an ``earlier`` checkpoint are shared with it.
        """
        folder.mkdir(parents=True)
        private = is_private(self.config)
        known = {} if earlier is None else _files_of(earlier)
        members, unchanged = write_members(self.tree, folder / "members", list(known))
        write_tree(self.tree, folder / "tree", None, private, members)
        tensors = {
            f"memory/{name}": tensor.detach().cpu().clone() for name, tensor in self.memory.items()
        }
        tensors |= {f"similarity/{s.node}": torch.tensor(s.alpha) for s in self.similarities}
        tensors |= {f"store/{name}": tensor.cpu() for name, tensor in self.stores.items()}
        write_tensors(folder / "tensors.safetensors", tensors, private=private)
        run = {
            "round": self.round,
            "config": self.config,
            "made_with": self.made_with,
            "fingerprint": self.fingerprint,
            "on_cpu": sorted(self.on_cpu),
            "similarities": [
                {"node": s.node, "round": s.round, "clients": s.clients} for s in self.similarities
            ],
            "tables": list(self.rows),
            **({} if self.stopped is None else {"stopped": self.stopped}),
        }
        if self.best is not None:
            self.best.write(folder / _BEST, private=private)
        _write_json(folder / "run.json", run)
        shared = write_segments(folder / "record", self.rows, self.round, list(known))
        sums = {f"{path.parent.name}/{path.name}": known[path] for path in (*shared, *unchanged)}
        write_manifest(folder / _MANIFEST, FORMAT, sums)

    def moved(self, device: str) -> Checkpoint:
        """Return the checkpoint with its tensors on a device.

        Tensors that the algorithm stores on the CPU stay there.
        """
        tree = self.tree.map_vectors(*[lambda tensor: tensor.to(device)] * 2)
        memory = {
            name: t if name in self.on_cpu else t.to(device) for name, t in self.memory.items()
        }
        stores = {name: tensor.to(device) for name, tensor in self.stores.items()}
        best = None if self.best is None else self.best.moved(device)
        return replace(self, tree=tree, memory=memory, stores=stores, best=best)

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read a checkpoint onto the CPU.

        Raises
        ------
        CheckpointError
            If it has another format, or a file is missing or damaged.
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
            # Cloned, since all tensors of a file share one piece of memory, so that they can have
            # any alignment, and rounding can depend on that.
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
            memory, stores = (
                {
                    name.removeprefix(kind): tensor
                    for name, tensor in tensors.items()
                    if name.startswith(kind)
                }
                for kind in ("memory/", "store/")
            )
            return cls(
                round=run["round"],
                config=run["config"],
                made_with=run["made_with"],
                fingerprint=run["fingerprint"],
                tree=read_tree(
                    folder / "tree", partial(read_members, folder / "members")
                ).map_vectors(torch.clone, torch.clone),
                memory=memory,
                on_cpu=frozenset(run["on_cpu"]),
                rows=rows,
                similarities=similarities,
                stores=stores,
                stopped=run.get("stopped"),
                best=KeptRound.read(folder / _BEST) if (folder / _BEST).is_dir() else None,
            )
        except (*DAMAGES, RunError) as error:
            raise CheckpointError(f"{folder}: {type(error).__name__}: {error}") from error


def _files_of(folder: Path) -> dict[Path, str]:
    """Return the files of a checkpoint that may be shared, with their SHA-256.

    None may be shared if the manifest cannot be read or a file is missing.
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
    return found if all(path.is_file() for path in found) else {}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value) + "\n")
