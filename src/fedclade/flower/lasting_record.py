"""Records that a client stores for its lifetime, such as counts of the replies that have left it.

A client uses them to decide whether a further reply may leave.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from flwr.app import ConfigRecord, RecordDict

from fedclade.core import PolicyError, alone, appear

FORMAT = 1
"""Version of the format of every such file."""

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class RecordKind(Generic[R]):
    """Description of a kind of record, and its conversion to JSON.

    Parameters
    ----------
    file
        Name of the record's file in the client's folder, such as ``policy.json``.
    what
        Description of the record, for the error if it is damaged, such as "the count of what this
        client has answered".
    consequence
        Consequence of a damaged record, such as "nothing leaves it".
    empty
        Function that makes the record of a client without any replies yet.
    encoded
        Function that returns a record as JSON values, always with the same names.
    decoded
        Function that returns a record from such values, which have all of these names; for damaged
        values it raises a ValueError, TypeError, KeyError or AttributeError.
    combined
        Function that combines the record in Flower's state, which belongs to one run, with the
        record in memory.
    """

    file: str
    what: str
    consequence: str
    empty: Callable[[], R]
    encoded: Callable[[R], Mapping[str, Any]]
    decoded: Callable[[dict[str, Any]], R]
    combined: Callable[[R, R], R]


class LastingRecord(Generic[R]):
    """One record of a client, in a file in its folder for its lifetime.

    Without a folder the record is in memory, and in ``state``, which Flower stores for a client
    between two messages: for the lifetime of its SuperNode. The file is written atomically, and
    only its owner may read it.
    """

    def __init__(self, folder: Path | None, kind: RecordKind[R]) -> None:
        self._path = None if folder is None else folder / kind.file
        self._kind = kind
        self._latest = kind.empty()

    def alone(self) -> AbstractContextManager[None]:
        """Lock the record against other processes while it is read and written.

        Two processes may serve one client.
        """
        return nullcontext() if self._path is None else alone(self._path)

    def read(self, state: RecordDict | None = None) -> R:
        """Return the record; raise a PolicyError if it is damaged."""
        if self._path is not None:
            try:
                text = self._path.read_bytes()
            except FileNotFoundError:
                return self._kind.empty()
            except OSError as error:  # for example, a folder has that name
                raise self._damaged(str(self._path), error) from error
            return self._parsed(text, str(self._path))
        stored = (state or {}).get(self._name)
        if not isinstance(stored, ConfigRecord):
            return self._latest
        return self._kind.combined(
            self._parsed(str(stored.get("record")), "Flower's state of this client"), self._latest
        )

    def write(self, record: R, state: RecordDict | None = None) -> None:
        """Write the record; if that fails, there must be no reply."""
        text = json.dumps({"format": FORMAT, **self._kind.encoded(record)})
        self._latest = record
        if self._path is not None:
            appear(self._path, lambda beside: beside.write_text(text), private=True)
        elif state is not None:
            state[self._name] = ConfigRecord({"record": text})

    @property
    def _name(self) -> str:
        return f"fedclade.{self._kind.file.removesuffix('.json')}"

    def _parsed(self, text: bytes | str, where: str) -> R:
        expected = {"format", *self._kind.encoded(self._kind.empty())}
        try:
            stored = json.loads(text)
            if stored.keys() != expected:
                raise ValueError(f"it has {sorted(stored)}, expected {sorted(expected)}")
            version = stored.pop("format")
            if type(version) is not int or version != FORMAT:
                raise ValueError(f"format {version!r}, expected {FORMAT}")
            return self._kind.decoded(stored)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._damaged(where, error) from error

    def _damaged(self, where: str, error: Exception) -> PolicyError:
        return PolicyError(
            f"{where}, {self._kind.what}, is damaged, so {self._kind.consequence}; restore the "
            f"file from a backup ({type(error).__name__}: {error})"
        )
