"""Availability traces: at which hours each client is there, from a file or made up."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedclade.core import ConfigError, DataError, rng, shown
from fedclade.data import ColumnRoles, Federation, Notation, Rows, prepare_sheets, read_sheet

DAY = 86_400.0
"""Seconds."""

DAILY = "daily"
"""The trace that is made up: each client is there once a day, for :data:`HOURS`, from an hour of its own on."""

HOURS = (4.0, 12.0)
"""How long a client of the ``daily`` trace is there, at least and at most."""

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Trace:
    """When each of n clients is there: m intervals ``[start, end)``, in seconds, which repeat after a period.

    Parameters
    ----------
    places
        Whose each interval is, ``[m]``, of 0 to n - 1.
    starts, ends
        ``[m]``, from 0 to the period.
    period
        Seconds after which it begins anew.
    always
        Which clients are always there, ``[n]``.
    """

    places: Places
    starts: Numbers
    ends: Numbers
    period: float
    always: NDArray[np.bool_]

    def there(self, seconds: float) -> NDArray[np.bool_]:
        """Return which clients are there so many seconds after the start, ``[n]``."""
        at, found = seconds % self.period, self.always.copy()
        found[self.places[(self.starts <= at) & (at < self.ends)]] = True
        return found

    @property
    def fingerprint(self) -> str:
        """SHA-256 of it."""
        found = hashlib.sha256(np.float64(self.period).tobytes())
        for array in (self.places, self.starts, self.ends, self.always):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    @classmethod
    def daily(cls, keys: Sequence[int], seed: int) -> Trace:
        """Make up a trace: a client's hours depend on the seed and its key alone, and are as likely at any time."""
        root = rng.generator(seed, "hours of the day").integers(2**64, size=2, dtype=np.uint64)
        of_keys = np.array(keys, dtype=np.int64).view(np.uint64)
        starts, lengths = (_uniform(of_keys, number) for number in root)
        starts, lengths = starts * DAY, 3600 * (HOURS[0] + lengths * (HOURS[1] - HOURS[0]))
        places, ends = np.arange(len(keys)), starts + lengths
        late = ends > DAY  # past midnight: two intervals
        return cls(
            np.concatenate([places, places[late]]),
            np.concatenate([starts, np.zeros(late.sum())]),
            np.concatenate([np.minimum(ends, DAY), ends[late] - DAY]),
            DAY,
            np.zeros(len(keys), dtype=bool),
        )

    @classmethod
    def read(cls, path: Path, federation: Federation, period: float | None = None) -> Trace:
        """Read a CSV, TSV or Parquet file of columns ``client``, ``from`` and ``to``, a row for each interval.

        A client goes by its name, or else by its id; one that no row names is always there. Without a period the trace
        repeats after its last day.

        Raises
        ------
        DataError
            If the file cannot be read, a column is missing, a client is unknown, a number is missing, an interval is
            reversed or begins before 0, or two of a client overlap.
        ConfigError
            If an interval ends after the period.
        """
        roles = ColumnRoles(inputs=("from", "to"), as_texts=("client",))
        rows = Rows(prepare_sheets([read_sheet(path)], roles, Notation()))
        starts, ends = _seconds(rows, "from", path), _seconds(rows, "to", path)
        places = _places(rows.texts("client"), federation, path)
        if len(odd := np.flatnonzero((starts < 0) | (ends <= starts))):
            row = int(odd[0])
            raise DataError(
                f"{path}: 'from' should be at least 0 and below 'to', got from {starts[row]:g} to {ends[row]:g} in row "
                f"{row + 1}"
            )
        order = np.lexsort((starts, places))
        places, starts, ends = places[order], starts[order], ends[order]
        if len(odd := np.flatnonzero((places[1:] == places[:-1]) & (starts[1:] < ends[:-1]))):
            i = int(odd[0])
            raise DataError(
                f"{path}: intervals of client {federation.clients[places[i]].name!r} overlap: from {starts[i]:g} to "
                f"{ends[i]:g} and from {starts[i + 1]:g} to {ends[i + 1]:g}; join them to one row"
            )
        last = float(ends.max())
        if period is not None and period < last:
            raise ConfigError(
                f"presence.trace_period should be at least {last:g}, the last 'to' of {path}, got {period:g}"
            )
        always = np.ones(len(federation), dtype=bool)
        always[places] = False
        if always.any():
            _log.info("%s has no row of %d of %d clients, which are always there", path, always.sum(), len(always))
        return cls(places, starts, ends, period or DAY * math.ceil(last / DAY), always)


def _seconds(rows: Rows, column: str, path: Path) -> Numbers:
    if rows.kind(column) not in ("whole", "number"):
        raise DataError(f"{path}: column {column!r} should hold seconds since the start, as numbers")
    return rows.numbers(column)


def _places(named: NDArray[np.object_], federation: Federation, path: Path) -> Places:
    """Return which client of a federation each row names, ``[m]``."""
    place_of = {str(client.id): place for place, client in enumerate(federation.clients)}
    place_of |= {client.name: place for place, client in enumerate(federation.clients)}
    names, which = np.unique(named.astype(str), return_inverse=True)
    if unknown := [str(name) for name in names.tolist() if name not in place_of]:
        raise DataError(
            f"{path} names clients that are not there: {shown(unknown)}; they should be names or ids, such as "
            f"{federation.clients[0].name!r} or {federation.clients[0].id}"
        )
    return np.array([place_of[name] for name in names.tolist()], dtype=np.int64)[which]


def _uniform(keys: NDArray[np.uint64], salt: np.uint64) -> Numbers:
    """Return a number in [0, 1) for each key: SplitMix64, since a generator for each of 10⁶ clients takes seconds."""
    z = (keys + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + salt
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
