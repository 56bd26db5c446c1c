"""Which training questions a client has begun sums of, and which it has seen opened: each of these once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedclade.core import UpdateError, appear
from fedclade.flower.lasting_record import LastingRecord, RecordKind
from fedclade.flower.wire import shown

FILE = "sums.json"  # in the client's folder
PART = "part.txt"
"""The file beside it: the client's present part in a sum, and the stage of it that was answered last."""

MOST_BEGUN = 3  # sums of one question: drop-outs may spoil some

_SPENT = -1  # in place of a count


class SpentQuestions:
    """How often a client has begun a sum of each question, or that one of them was opened."""

    def __init__(self, folder: Path | None) -> None:
        self._record = LastingRecord(folder, _KIND)
        self._part = None if folder is None else folder / PART

    def begin(self, question: str, state: RecordDict | None) -> None:
        """Count a sum that begins; an UpdateError if there must be none of this question any more."""
        with self._record.alone():
            counts = self._record.read(state)
            before = counts.get(question, 0)
            self._check_open(before)
            if before >= MOST_BEGUN:
                raise UpdateError(
                    f"this client has begun {before} sums of this training question already, and "
                    "begins no more; ask with another seed"
                )
            self._record.write({**counts, question: before + 1}, state)

    def spend(self, question: str, state: RecordDict | None) -> None:
        """Note that a sum of a question is about to be opened; an UpdateError if one was before."""
        with self._record.alone():
            counts = self._record.read(state)
            self._check_open(counts.get(question, 0))
            self._record.write({**counts, question: _SPENT}, state)

    def advance(self, ticket: str, after: str, stage: str) -> None:
        """Note that a stage is answered; an UpdateError if the stage answered last is not ``after``.

        Flower may give two messages that come together the same state, each in a process of its
        own. Were both answered, masks would be used twice. ``ticket`` names the part in a sum; the
        client draws it, since the server may choose the name of a sum twice. Without a folder
        nothing is noted.
        """
        if self._part is None:
            return
        path = self._part
        with self._record.alone():
            if after and (not path.exists() or path.read_text() != f"{ticket} {after}"):
                raise UpdateError(
                    f"asked for the {stage!r} of a sum twice, or of a sum that is over"
                )
            appear(path, lambda beside: beside.write_text(f"{ticket} {stage}"), private=True)

    def _check_open(self, count: int) -> None:
        if count == _SPENT:
            raise UpdateError(
                "this client's answer to this training question is part of a sum already, and "
                "will not be of another; ask with another seed"
            )


def _encoded(counts: dict[str, int]) -> dict[str, Any]:
    return {"questions": counts}


def _decoded(stored: dict[str, Any]) -> dict[str, int]:
    counts: dict[str, Any] = stored["questions"]
    for question, count in counts.items():
        if type(count) is not int or (count < 1 and count != _SPENT):
            raise ValueError(f"{shown(count)} sums of question {shown(question)} are no count")
    return counts


def _combined(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Return the counts of both: of each question the larger one, or that it is spent if one says so."""
    together = dict(other)
    for question, count in one.items():
        known = together.get(question, 0)
        together[question] = _SPENT if _SPENT in (count, known) else max(count, known)
    return together


_KIND = RecordKind(
    file=FILE,
    what="the list of the sums that this client has been part of",
    consequence="nothing leaves it",
    empty=dict[str, int],
    encoded=_encoded,
    decoded=_decoded,
    combined=_combined,
)
