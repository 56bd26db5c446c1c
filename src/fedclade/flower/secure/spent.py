"""Record of the training requests for which a client has joined sums or agreed to a sum.

An update may be part of only one sum that is unmasked, since the difference of two sums could
reveal the update.
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
"""File in the client's folder with the current sum and the last request that it replied to."""

MOST_BEGUN = 3  # sums for one training request: some may fail because clients drop out

_SPENT = -1  # stored in place of the count once the client has agreed to a sum


class SpentQuestions:
    """Record of the sums that a client has joined, by training request.

    For each training request it contains the number of joined sums, or a mark that the client has
    agreed to unmask a sum.

    Parameters
    ----------
    folder
        Folder of the client; None if the client has no folder.
    """

    def __init__(self, folder: Path | None) -> None:
        self._record = LastingRecord(folder, _KIND)
        self._part: Path | None = None
        if folder is not None:
            self._part = folder / PART

    def begin(self, question: str, state: RecordDict | None) -> None:
        """Count a sum that the client is about to join.

        Parameters
        ----------
        question
            Digest of the training request.
        state
            Record that Flower stores for the client between two messages.

        Raises
        ------
        UpdateError
            If the client may not join a further sum for this training request.
        """
        with self._record.alone():
            counts = self._record.read(state)
            before = counts.get(question, 0)
            self._check_open(before)
            if before >= MOST_BEGUN:
                raise UpdateError(
                    f"this client has already joined {before} sums for this training request and "
                    "joins no more; send a request with another seed"
                )
            self._record.write({**counts, question: before + 1}, state)

    def spend(self, question: str, state: RecordDict | None) -> None:
        """Record that the client is about to agree to unmask a sum for a training request.

        Parameters
        ----------
        question
            Digest of the training request.
        state
            Record that Flower stores for the client between two messages.

        Raises
        ------
        UpdateError
            If the client has agreed to a sum for this training request before.
        """
        with self._record.alone():
            counts = self._record.read(state)
            self._check_open(counts.get(question, 0))
            self._record.write({**counts, question: _SPENT}, state)

    def advance(self, ticket: str, after: str, stage: str) -> None:
        """Record that the client replies to a stage (one of the five requests) of a sum.

        Flower may pass the same state to two concurrent messages, each in its own process. If the
        client replied to both, it would use the same masks twice. Without a folder nothing is
        recorded.

        Parameters
        ----------
        ticket
            Random name of the client's state in the sum. The client draws it, since the server may
            choose the same name for two sums.
        after
            Last stage that the client must have replied to; empty for the first stage.
        stage
            Stage of this reply.

        Raises
        ------
        UpdateError
            If the last stage that the client replied to is not ``after``.
        """
        if self._part is None:
            return
        path = self._part
        with self._record.alone():
            if after and (not path.exists() or path.read_text() != f"{ticket} {after}"):
                raise UpdateError(
                    f"the request {stage!r} of a sum was received twice, or the sum has ended, so "
                    "this client does not reply: a second reply could reveal its update"
                )
            appear(path, lambda beside: beside.write_text(f"{ticket} {stage}"), private=True)

    def _check_open(self, count: int) -> None:
        """Raise an UpdateError if a training request is marked as part of an unmasked sum."""
        if count == _SPENT:
            raise UpdateError(
                "this client's reply to this training request is already part of a sum and cannot "
                "become part of another sum; send a request with another seed"
            )


def _encoded(counts: dict[str, int]) -> dict[str, Any]:
    """Convert a record of joined sums, counts by training request, to JSON values."""
    return {"questions": counts}


def _decoded(stored: dict[str, Any]) -> dict[str, int]:
    """Read from JSON values how many sums a client has joined, by training request.

    Raise a ValueError if a value is malformed.
    """
    counts: dict[str, Any] = stored["questions"]
    for question, count in counts.items():
        if type(count) is not int or (count < 1 and count != _SPENT):
            raise ValueError(
                "in the list of the sums that a client has joined, the number of sums for request "
                f"{shown(question)} should be a whole number of at least 1, or {_SPENT} after an "
                f"agreement to a sum, got {shown(count)}"
            )
    return counts


def _combined(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Combine two records of joined sums.

    For each training request the result has the larger count, or the mark for a sum that the client
    agreed to, if either record has this mark.
    """
    together = dict(other)
    for question, count in one.items():
        known = together.get(question, 0)
        together[question] = max(count, known)
        if _SPENT in (count, known):
            together[question] = _SPENT
    return together


_KIND = RecordKind(
    file=FILE,
    what="the list of the sums that this client has joined",
    consequence="this client joins no further sum",
    empty=dict[str, int],
    encoded=_encoded,
    decoded=_decoded,
    combined=_combined,
)
