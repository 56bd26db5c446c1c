"""What one client holds, and how it sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
from torch import Tensor

from fedclade.core import IGNORED, DataError, Indices, Split
from fedclade.data.arrays import as_indices, check_name, check_range, whole_number
from fedclade.data.pool import Pool


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds, and how it sees it.

    A name that is no string, or a number or an index that is not whole, raises a DataError.
    """

    id: int  # by which the server knows the client
    name: str  # for people; results do not depend on it
    key: int  # the client's own number for its random draws, which stays when the server renames the client
    train: Indices  # into the pool
    validation: Indices  # may be empty
    test: Indices
    label_map: Tensor | None = None  # int64 [outputs]: where the pool has label y, the client sees label_map[y]
    quarter_turns: int = 0  # its images are turned by so many times 90°

    def __post_init__(self) -> None:
        check_name(self.name, f"the name of client {self.id}")
        for name in ("id", "key", "quarter_turns"):
            object.__setattr__(self, name, whole_number(getattr(self, name), f"the {name} of client {self.name!r}"))
        for name in get_args(Split):
            object.__setattr__(self, name, as_indices(getattr(self, name), f"{name} of client {self.name!r}"))

    def __repr__(self) -> str:
        held = ", ".join(f"{split}={len(getattr(self, split))}" for split in get_args(Split))
        return f"ClientData({self.id}, {self.name!r}, {held})"

    def labels(self, y: Tensor) -> Tensor:
        """Return pool targets as this client sees them, same shape; those that are ignored stay as they are."""
        return y if self.label_map is None else mapped(y, self.label_map)


def mapped(y: Tensor, label_map: Tensor) -> Tensor:
    """Return targets as a label map shows them, same shape; those that are ignored stay as they are."""
    return label_map[y.clamp(min=0)].where(y != IGNORED, IGNORED)


def check_held(pool: Pool, indices: Indices, split: Split, client: str) -> None:
    """Check that a pool has these examples, and that none of their inputs is NaN or infinite."""
    check_range(indices, len(pool.x), f"the {split} indices of {client}")
    if len(pool.not_finite) == 0 or len(odd := np.flatnonzero(np.isin(indices, pool.not_finite))) == 0:
        return
    row = int(indices[odd[0]])
    place: list[int] = (~pool.x[row].isfinite()).nonzero()[0].tolist()
    column = place[0] if len(place) == 1 else place
    more = f" and in {len(odd) - 1} more" if len(odd) > 1 else ""
    raise DataError(
        f"{client} has {float(pool.x[row][tuple(place)])} in column {column} of {split} example {odd[0]} (example "
        f"{row} of pool {pool.name!r}){more}; fill such inputs in, or leave these examples out"
    )


def no_examples(client: int, name: str, split: Split, clients: int) -> DataError:
    """Return the error of a client, one of so many, without examples of a split."""
    what = "training" if split == "train" else split
    return DataError(
        f"client {client} ({name!r}) has no {what} examples; ask for fewer clients (now {clients}), more examples, "
        "or a partition that gives every client some"
    )
