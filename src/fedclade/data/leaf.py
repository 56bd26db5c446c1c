"""JSON files in the layout of LEAF (Caldas et al. 2018, arXiv:1812.01097).

Each file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.core import DataError


@dataclass(frozen=True)
class LeafFiles:
    """The files of one source: training files, and test files if the source was split."""

    train: tuple[Path, ...]
    test: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them, training files first."""
        return (*self.train, *self.test)


@dataclass(frozen=True)
class LeafExamples:
    """All examples of some files; the three lists run in parallel."""

    users: list[str]  # the owner of each
    x: list[Any]  # inputs and targets as they are in the files
    y: list[Any]


def find_leaf(data_dir: Path | None, name: str) -> LeafFiles | None:
    """Return ``name/train/*.json`` and ``name/test/*.json``, or ``name/*.json``, of a data folder; None if none."""
    if data_dir is None:
        return None
    folder = data_dir / name
    train = sorted((folder / "train").glob("*.json")) or sorted(folder.glob("*.json"))
    return LeafFiles(tuple(train), tuple(sorted((folder / "test").glob("*.json")))) if train else None


def read_leaf(files: tuple[Path, ...]) -> LeafExamples:
    """Return the examples of LEAF files, in the order of the files and of the users in them."""
    examples = LeafExamples([], [], [])
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {file}, which should be LEAF JSON: {error}") from error
        try:
            data = content["user_data"]
            of_users = [(str(user), data[user]["x"], data[user]["y"]) for user in content["users"]]
        except (KeyError, TypeError) as error:
            layout = "users, user_data -> user -> x, y"
            raise DataError(f"{file} is not laid out as LEAF JSON ({layout}): {error!r}") from error
        for user, x, y in of_users:
            if len(x) != len(y):
                raise DataError(f"{file}: user {user!r} has {len(x)} inputs x but {len(y)} targets y")
            examples.users.extend([user] * len(x))
            examples.x.extend(x)
            examples.y.extend(y)
    return examples
