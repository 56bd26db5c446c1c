"""The rows of a checkpoint in several files, so that the next one writes those of the new rounds and little else.

``000001-000256.jsonl`` has the rows of all tables of 256 rounds: in each line the name of a table, and one of its rows.
A new file takes the ones before it along that are no longer than itself, so that there are few of them, and each row is
written about as often as there are files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedclade.runs.store.contents import Row

_NAME = re.compile(r"(\d+)-(\d+)\.jsonl")


def write_segments(
    folder: Path, rows: Mapping[str, Sequence[Row]], last: int, earlier: Sequence[Path] = ()
) -> list[Path]:
    """Write the rows of all rounds up to the ``last`` into a new folder; each table is in the order of its rounds.

    Files of an ``earlier`` checkpoint of the same run are shared as far as they are of use; returns those that are.
    """
    folder.mkdir()
    kept = sorted((path for path in earlier if _NAME.fullmatch(path.name)), key=_rounds)
    if [first for first, _ in map(_rounds, kept)] != [1, *(end + 1 for _, end in map(_rounds, kept))][: len(kept)]:
        kept = []  # with a gap
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
    """Give a file that is never changed another name, too."""
    try:
        os.link(path, other)
    except OSError:  # a file system on which a file has one name
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
