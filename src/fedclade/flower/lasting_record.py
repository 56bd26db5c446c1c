"""Records that a client stores over all its runs, such as counts of its replies.

A client uses the records to decide whether it may send a further reply.
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
"""Version of the format of the records' files."""

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class RecordKind(Generic[R]):
    """Description of a kind of record, and its conversion to JSON.

    Parameters
    ----------
    file
        Name of the record's file in the client's folder, such as ``policy.json``.
    what
        Description of the record, for the error if the file is damaged, such as "the count of this
        client's replies".
    consequence
        Consequence of a damaged record, for the error, such as "this client sends no reply".
    empty
        Function that makes the record of a client that has not replied yet.
    encoded
        Function that converts a record to JSON values, always with the same names.
    decoded
        Function that converts JSON values with all of these names to a record; for damaged values
        it raises a ValueError, TypeError, KeyError or AttributeError.
    combined
        Function that combines the record in Flower's state, which belongs to one run, with the
        record in memory, which may have counts of other runs.
    """

    file: str
    what: str
    consequence: str
    empty: Callable[[], R]
    encoded: Callable[[R], Mapping[str, Any]]
    decoded: Callable[[dict[str, Any]], R]
    combined: Callable[[R, R], R]


class LastingRecord(Generic[R]):
    """Record of a client that survives restarts, in a file in the client's folder.

    The file is written atomically and readable by its owner only. For a client without a folder,
    the record is in memory, and in the state that Flower stores for a client between two messages,
    so the record lasts until the client's SuperNode stops.

    Parameters
    ----------
    folder
        Folder of the client; None if the client has no folder.
    kind
        Description of the record and conversion to JSON.
    """

    def __init__(self, folder: Path | None, kind: RecordKind[R]) -> None:
        self._path = None if folder is None else folder / kind.file
        self._kind = kind
        self._latest = kind.empty()

    def alone(self) -> AbstractContextManager[None]:
        """Return a context that locks the record against other processes.

        Two processes may run the same client at the same time, so the record must be read and
        written in one such context. Without a folder there is no lock.
        """
        return nullcontext() if self._path is None else alone(self._path)

    def read(self, state: RecordDict | None = None) -> R:
        """Return the stored record; raise a PolicyError if the file or the state is damaged."""
        if self._path is not None:
            try:
                text = self._path.read_bytes()
            except FileNotFoundError:
                return self._kind.empty()
            except OSError as error:  # for example, a folder has the name of the file
                raise self._damage_error(str(self._path), error) from error
            return self._parse_record(text, str(self._path))
        stored = (state or {}).get(self._name)
        if not isinstance(stored, ConfigRecord):
            return self._latest
        return self._kind.combined(
            self._parse_record(str(stored.get("record")), "Flower's state of this client"),
            self._latest,
        )

    def write(self, record: R, state: RecordDict | None = None) -> None:
        """Store the record.

        If this raises an error, the client must not send the reply that the record counts.
        """
        text = json.dumps({"format": FORMAT, **self._kind.encoded(record)})
        self._latest = record
        if self._path is not None:
            appear(self._path, lambda beside: beside.write_text(text), private=True)
        elif state is not None:
            state[self._name] = ConfigRecord({"record": text})

    @property
    def _name(self) -> str:
        """Name of the record in Flower's state."""
        return f"fedclade.{self._kind.file.removesuffix('.json')}"

    def _parse_record(self, text: bytes | str, where: str) -> R:
        """Return the record in a JSON text; raise a PolicyError if the text is damaged.

        ``where`` names the source of the text, for the error.
        """
        expected = {"format", *self._kind.encoded(self._kind.empty())}
        try:
            stored = json.loads(text)
            if stored.keys() != expected:
                raise ValueError(
                    f"{self._kind.what} should have the keys {sorted(expected)}, got "
                    f"{sorted(stored)}"
                )
            version = stored.pop("format")
            if type(version) is not int or version != FORMAT:
                raise ValueError(
                    f"{self._kind.what} has format {version!r}, but this version of fedclade reads "
                    f"format {FORMAT}; use the version that wrote it"
                )
            return self._kind.decoded(stored)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._damage_error(where, error) from error

    def _damage_error(self, where: str, error: Exception) -> PolicyError:
        """Return the error for a damaged record in the file or state ``where``."""
        return PolicyError(
            f"{where}, {self._kind.what}, is damaged, so {self._kind.consequence}; restore the "
            f"file from a backup ({type(error).__name__}: {error})"
        )
