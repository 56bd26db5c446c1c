"""Which training questions a client has begun sums of, and which it has seen opened: each of these once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from flwr.app import ConfigRecord, RecordDict

from fedclade.core import PolicyError, UpdateError, alone, appear
from fedclade.flower.wire import shown

FILE = "sums.json"  # in the client's folder
PART = "part.txt"
"""The file beside it: the client's present part in a sum, and the stage of it that was answered last."""

MOST_BEGUN = 3  # sums of one question: drop-outs may spoil some

_STATE = "fedclade.sums"
_FORMAT = 1
_SPENT = -1  # in place of a count


class SpentQuestions:
    """How often a client has begun a sum of each question, or that one of them was opened.

    It is kept in the client's folder, under a lock, since two processes may serve one client;
    without a folder in the ``state`` that Flower keeps of the client.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE

    def begin(self, question: str, state: RecordDict | None) -> None:
        """Count a sum that begins; an UpdateError if there must be none of this question any more."""
        with self._alone():
            counts = self._read(state)
            before = counts.get(question, 0)
            self._check_open(before)
            if before >= MOST_BEGUN:
                raise UpdateError(
                    f"this client has begun {before} sums of this training question already, and begins no more; "
                    "ask with another seed"
                )
            self._write({**counts, question: before + 1}, state)

    def spend(self, question: str, state: RecordDict | None) -> None:
        """Note that a sum of a question is about to be opened; an UpdateError if one was before."""
        with self._alone():
            counts = self._read(state)
            self._check_open(counts.get(question, 0))
            self._write({**counts, question: _SPENT}, state)

    def advance(self, ticket: str, after: str, stage: str) -> None:
        """Note that a stage is answered; an UpdateError if the stage answered last is not ``after``.

        Flower may give two messages that come together the same state, each in a process of its own. Were both
        answered, masks would be used twice. ``ticket`` names the part in a sum; the client draws it, since the server
        may choose the name of a sum twice. Without a folder nothing is noted.
        """
        if self._path is None:
            return
        path = self._path.with_name(PART)
        with self._alone():
            if after and (not path.exists() or path.read_text() != f"{ticket} {after}"):
                raise UpdateError(f"asked for the {stage!r} of a sum twice, or of a sum that is over")
            appear(path, lambda beside: beside.write_text(f"{ticket} {stage}"), private=True)

    def _check_open(self, count: int) -> None:
        if count == _SPENT:
            raise UpdateError(
                "this client's answer to this training question is part of a sum already, and will not be of another; "
                "ask with another seed"
            )

    def _alone(self) -> Any:
        return nullcontext() if self._path is None else alone(self._path)

    def _read(self, state: RecordDict | None) -> dict[str, int]:
        if self._path is not None:
            return _read_file(self._path)
        record = {} if state is None else state.get(_STATE)
        if not isinstance(record, ConfigRecord):
            return {}
        questions, counts = (cast("list[Any]", record[name]) for name in ("questions", "counts"))
        return dict(zip(questions, counts, strict=True))

    def _write(self, counts: Mapping[str, int], state: RecordDict | None) -> None:
        if self._path is not None:
            text = json.dumps({"format": _FORMAT, "questions": dict(counts)})
            appear(self._path, lambda beside: beside.write_text(text), private=True)
        elif state is not None:
            state[_STATE] = ConfigRecord({"questions": list(counts), "counts": list(counts.values())})


def _read_file(path: Path) -> dict[str, int]:
    try:
        kept = json.loads(path.read_bytes())
        if kept["format"] != _FORMAT:
            raise ValueError("another format")
        counts = dict(kept["questions"])
        if any(type(count) is not int for count in counts.values()):
            raise ValueError(f"{shown(counts)} are no counts")
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PolicyError(
            f"{path}, the list of the sums that this client has been part of, is damaged, so nothing leaves it; "
            f"restore the file from a backup ({type(error).__name__}: {error})"
        ) from error
    return counts
