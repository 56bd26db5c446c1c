"""Rows of a long table, kept as columns: those of a million clients would take gigabytes as dicts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]

Column = NDArray[Any] | list[Any]
"""Values of equal type as an array; others, such as names and what may be missing, as a list."""

Block = Mapping[str, Column]

AT_A_TIME = 65_536
"""Rows that are made into dicts in one go where all are looked at."""


class RowTable(Sequence[Row]):
    """Rows that are added in blocks and read like a list of dicts, each of which is made when it is looked at."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.blocks: tuple[Block, ...] = tuple(block for block in blocks if _length(block))
        """The columns of each block, all of one length, by name."""
        self._ends = list(accumulate(map(_length, self.blocks)))

    @classmethod
    def of(cls, rows: Iterable[Row]) -> RowTable:
        """Return rows given as dicts, a block for those of each round with the same keys."""
        if isinstance(rows, RowTable):
            return rows
        together = groupby(rows, key=lambda row: (row.get("round"), *row))
        blocks = ((list(kind[1:]), list(some)) for kind, some in together)
        return cls({name: _column([row[name] for row in some]) for name in names} for names, some in blocks)

    def with_block(self, block: Block) -> RowTable:
        """Return these rows, and those of a block behind them."""
        return RowTable((*self.blocks, block))

    def column(self, name: str) -> list[Any]:
        """Return the values of a column, one for each row."""
        return [value for block in self.blocks for value in _values(block[name])]

    @property
    def last(self) -> RowTable:
        """The rows of the last block."""
        return RowTable(self.blocks[-1:])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | Sequence[Row]:
        if isinstance(at, slice):
            return [self[place] for place in range(len(self))[at]]
        place = range(len(self))[at]
        number = bisect_right(self._ends, place)
        block = self.blocks[number]
        within = place - (self._ends[number] - _length(block))
        return {name: _values(values[within : within + 1])[0] for name, values in block.items()}

    def __iter__(self) -> Iterator[Row]:
        for block in self.blocks:
            for start in range(0, _length(block), AT_A_TIME):
                some = [_values(values[start : start + AT_A_TIME]) for values in block.values()]
                yield from (dict(zip(block, row, strict=True)) for row in zip(*some, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(cast(Sequence[object], other))

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (as of a list)

    def __repr__(self) -> str:
        return f"RowTable({list(self)!r})"


def _length(block: Block) -> int:
    return len(next(iter(block.values()), ()))


def _values(column: Column) -> list[Any]:
    return column if isinstance(column, list) else column.tolist()


def _column(values: list[Any]) -> Column:
    """Return values as an array if all are whole numbers, or all are floats."""
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return np.array(values, dtype=np.int64)
    return np.array(values, dtype=np.float64) if kinds == {float} else values
