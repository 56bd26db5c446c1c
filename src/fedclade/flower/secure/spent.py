"""Record of the training requests for which a client has begun or opened a sum.

An update may be part of one opened sum only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedclade.core import UpdateError, appear
from fedclade.flower.lasting_record import LastingRecord, RecordKind
from fedclade.flower.wire import shown

FILE = "sums.json"  # in the client's folder
PART = "part.txt"
"""File in the same folder with the client's current sum, and its last stage with a reply."""

MOST_BEGUN = 3  # sums for one training request: some may fail because clients drop out

_SPENT = -1  # stored in place of the count once a sum was opened


class SpentQuestions:
    """Number of begun sums for each training request, or a note that one of them was opened."""

    def __init__(self, folder: Path | None) -> None:
        self._record = LastingRecord(folder, _KIND)
        self._part = None if folder is None else folder / PART

    def begin(self, question: str, state: RecordDict | None) -> None:
        """Count a sum that begins.

        Raises
        ------
        UpdateError
            If no further sum may begin for this training request.
        """
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
        """Record that a sum for a training request is about to be opened.

        Raises
        ------
        UpdateError
            If one was opened before.
        """
        with self._record.alone():
            counts = self._record.read(state)
            self._check_open(counts.get(question, 0))
            self._record.write({**counts, question: _SPENT}, state)

    def advance(self, ticket: str, after: str, stage: str) -> None:
        """Record that the client replies to a stage of a sum.

        Flower may give two concurrent messages the same state, each in its own process. If both had
        replies, masks would be used twice. Without a folder nothing is recorded.

        Parameters
        ----------
        ticket
            Name of the client's part in a sum. The client draws it, since the server may choose the
            same name for two sums.
        after
            Stage that must have been the last one with a reply; empty for the first.
        stage
            Stage of this reply.

        Raises
        ------
        UpdateError
            If the last stage with a reply is not ``after``.
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
    """Return the larger count of each request, or that it is spent if either record states so."""
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
