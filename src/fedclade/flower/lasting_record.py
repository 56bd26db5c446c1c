"""Records that a client keeps for its life: what it has answered, and what therefore may not leave it again."""

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
"""Version of the layout of every such file."""

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class RecordKind(Generic[R]):
    """What a record is, and how it becomes JSON.

    Parameters
    ----------
    file
        Name of its file in the client's folder, such as ``policy.json``.
    what
        What it is, for the error if it is damaged, such as "the count of what this client has
        answered".
    consequence
        What that means, such as "nothing leaves it".
    empty
        Makes the record of a client that has answered nothing yet.
    encoded
        Returns a record as JSON has it, always with the same names.
    decoded
        Returns a record from that, which has all of these names; of damaged values it raises a
        ValueError, TypeError, KeyError or AttributeError.
    combined
        Returns one record from the one in Flower's state, which is of one run, and the one in
        memory.
    """

    file: str
    what: str
    consequence: str
    empty: Callable[[], R]
    encoded: Callable[[R], Mapping[str, Any]]
    decoded: Callable[[dict[str, Any]], R]
    combined: Callable[[R, R], R]


class LastingRecord(Generic[R]):
    """One record of a client: in a file in its folder, for its life.

    Without a folder it is in memory, and in ``state``, which Flower stores of a client between two
    messages: for the life of its SuperNode. The file is written whole, and only its owner may read
    it.
    """

    def __init__(self, folder: Path | None, kind: RecordKind[R]) -> None:
        self._path = None if folder is None else folder / kind.file
        self._kind = kind
        self._latest = kind.empty()

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes from the record while it is read and written: two may serve one client."""
        return nullcontext() if self._path is None else alone(self._path)

    def read(self, state: RecordDict | None = None) -> R:
        """Return the record; a PolicyError if it is damaged."""
        if self._path is not None:
            try:
                text = self._path.read_bytes()
            except FileNotFoundError:
                return self._kind.empty()
            except OSError as error:  # such as a folder of that name
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
