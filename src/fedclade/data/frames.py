"""Tables of rows and columns as a federation: from pandas and polars data frames, and whatever Arrow reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np

from fedclade.core import ConfigError, TaskKind, checked, shown
from fedclade.data.cell_values import Notation
from fedclade.data.federation import Federation
from fedclade.data.own import Held, OwnOptions, OwnSettings, own_federation
from fedclade.data.pool import Columns
from fedclade.data.reading import rows_of
from fedclade.data.sheets import Rows, Sheet, arrow_table
from fedclade.data.targets import targets
from fedclade.data.typed_columns import ColumnRoles, prepare_sheets


@checked("frame")
def federation_from_frame(
    frame: Any,
    client: str,
    target: str | tuple[str, ...],
    inputs: tuple[str, ...] | None = None,
    task: TaskKind | None = None,
    *,
    text: str | None = None,
    drop: tuple[str, ...] = (),
    decimal: str | None = None,
    dates: str | None = None,
    name: str = "table",
    true_clusters: Mapping[str, int] | None = None,
    **options: Unpack[OwnOptions],
) -> Federation:
    """Make a federation of the rows of a data frame.

    Parameters
    ----------
    frame
        Of pandas or polars, a ``pyarrow.Table``, or anything else that gives Arrow data.
    client
        Column that says whose a row is.
    target
        Column to predict; several of them for ``multilabel``, and for a ``regression`` of several numbers.
    inputs
        Columns to predict it from; all others if left out. Numbers become float32. Texts and truth values are encoded
        by category: a column of 0 and 1 for each value, in sorted order, the same for all clients.
    task
        What the target is. If left out: texts, truth values and whole numbers are labels (``classification``), other
        numbers those of a ``regression``. Texts are numbered in sorted order, and so are the two values of a
        ``binary`` target.
    text
        A column of texts as the only input, in place of ``inputs``: as the words of a vocabulary.
    drop
        Columns to leave out.
    decimal
        Decimal mark of numbers that are texts, ``.`` or ``,``; detected if left out.
    dates
        Format of dates that are texts, such as ``%d.%m.%Y``, in the codes of Python's ``strptime``; detected if left
        out. All dates become days since 1970-01-01.
    name
        Of the data, for people.
    true_clusters
        By the clients' names, where they are known; for scoring only.
    **options
        Fields of :class:`~fedclade.data.OwnSettings`, such as ``standardize="federated"``.

    Raises
    ------
    ConfigError
        If a setting is out of range, or the target does not say what the task is.
    DataError
        If a column is missing, a value is missing or of no use, nearly all texts of a column differ, or a client has
        too few rows.
    """
    if not target:
        raise ConfigError(f"target should name at least 1 column, got {shown(target)}")
    sheets = [Sheet(arrow_table(frame), "the data frame", None)]
    chosen = Chosen(
        target if isinstance(target, tuple) else (target,),
        client,
        inputs,
        text=text,
        task=task,
        drop=drop,
        notation=Notation(decimal=decimal, dates=dates),
    )
    return federation_from_sheets(sheets, chosen, name, OwnSettings(**options), true_clusters)


@dataclass(frozen=True)
class Chosen:
    """Which columns are what; see :func:`federation_from_frame`."""

    target: tuple[str, ...]
    client: str | None = None
    inputs: tuple[str, ...] | None = None
    text: str | None = None
    task: TaskKind | None = None
    drop: tuple[str, ...] = ()
    notation: Notation = field(default_factory=Notation)

    @property
    def roles(self) -> ColumnRoles:
        """Which columns are used, and how."""
        as_texts = tuple(column for column in (self.client, self.text) if column is not None)
        inputs = () if self.text is not None else self.inputs
        return ColumnRoles(self.target, inputs, as_texts, self.drop)

    def __post_init__(self) -> None:
        if self.task == "language":
            raise ConfigError(
                "the task of a table should be classification, binary, multilabel or regression, got language"
            )
        if self.text is not None and self.inputs is not None:
            raise ConfigError(f"text = {self.text!r} is the only input; leave out inputs = {shown([*self.inputs])}")
        apart = {*self.target, self.client}
        if both := [column for column in self.inputs or () if column in apart]:
            raise ConfigError(f"inputs should be other columns than target and client, got {both[0]!r}")
        needed = [column for column in self.drop if column in (*apart, *(self.inputs or ()), self.text)]
        if needed:
            raise ConfigError(f"drop should be columns that are not needed, got {needed[0]!r}")


def federation_from_sheets(
    sheets: Sequence[Sheet],
    chosen: Chosen,
    name: str,
    settings: OwnSettings,
    true_clusters: Mapping[str, int] | None = None,
) -> Federation:
    """Make a federation of the rows of tables with the same columns; see :func:`federation_from_frame`."""
    sheets = prepare_sheets(sheets, chosen.roles, chosen.notation)
    rows = Rows(sheets)
    apart = [*chosen.target, *([] if chosen.client is None else [chosen.client])]
    y, task, labels = targets(rows, chosen.target, chosen.task)
    if chosen.client is None:
        held = [Held(str(s.client), part) for s, part in zip(sheets, rows_of([*map(len, rows.tables)]), strict=True)]
    else:
        owners = rows.texts(chosen.client)
        held = [Held(owner, np.flatnonzero(owners == owner)) for owner in dict.fromkeys(owners.tolist())]
    if chosen.text is None:
        x, names = rows.encoded(chosen.inputs or rows.others(apart))
    else:
        x, names = rows.texts(chosen.text, empty=True).tolist(), (chosen.text,)
    columns = Columns(names, labels)
    return own_federation(held, x, y, settings, true_clusters, name=name, task=task, columns=columns)
