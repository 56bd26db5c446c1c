"""Record of the ways in which a client has split its training data, to protect single examples.

The reply to a query for replicates contains sums over disjoint parts of the client's examples, and
the server knows which example is in which part. Sums over parts of several splits are linear
equations in the contributions of single examples. With as many independent equations as examples, a
server could solve for every example; with two parts that differ in one example, a subtraction would
be enough. So a client counts equations, and checks all sums together:

- A new split adds at most as many equations as it has parts, less one, and one more if some
  examples are in no part. Their total is limited by ``max-partings``.
- In no combination of all sums, including the sum over all examples, may one example have more
  than a given share of the squared weights (:func:`largest_shares`). Two parts that differ in one
  example would have a combination with a share of 1.
- A split that would exceed one of these limits is replaced by the first recorded split with the
  same number and size of parts. If there is none, the query is refused.

A recorded split adds no equations. It may be used again without limit, for any model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from fedclade.core import LocalTraining, PolicyError, Round
from fedclade.flower.lasting_record import LastingRecord, RecordKind
from fedclade.flower.policy import Policy, Usage, UsageLog
from fedclade.flower.wire import Content, shown

FILE = "splits.json"  # in the client's folder

MOST_REPEATS = 256
"""Number of latest queries with a stored digest."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSplit:
    """One way to split a client's training data.

    The parts depend on these values and on the client's key.

    Parameters
    ----------
    examples
        Number n of training examples of the client.
    seed, number
        The run's seed and the number of the round by which examples are drawn. Equal parts are
        drawn by the seed alone, and their number is 0.
    replicates, part_size
        Number of parts, and number of examples in each part; with a size of 0 the parts contain
        all examples.
    """

    examples: int
    seed: int
    number: int
    replicates: int
    part_size: int

    @classmethod
    def of(cls, this_round: Round, examples: int) -> DataSplit:
        """Return the split that a round with several replicates requests."""
        number = 0 if this_round.part_size else this_round.number
        return cls(examples, this_round.seed, number, this_round.replicates, this_round.part_size)

    @property
    def remainder(self) -> int:
        """Number of examples that are in no part."""
        return self.examples - self.replicates * self.part_size if self.part_size else 0

    @property
    def equations(self) -> int:
        """Largest number of equations that the split's sums add to the sum over all examples."""
        return self.replicates - 1 + (self.remainder > 0)

    def resembles(self, other: DataSplit) -> bool:
        """Return whether both have the same number and size of parts, and number of examples."""
        return replace(self, seed=other.seed, number=other.number) == other

    def parts(self, key: int) -> list[NDArray[np.int64]]:
        """Return the examples of each part; identical examples count as different ones.

        An engine puts identical examples into one part. The record must not do so: whether a query
        is refused would then depend on the data.
        """
        drawn = Round(
            self.number,
            LocalTraining(),
            self.seed,
            replicates=self.replicates,
            part_size=self.part_size,
        )
        places = range(self.replicates)
        return [
            replace(drawn, part=(k, self.replicates)).examples(self.examples, key) for k in places
        ]


def largest_shares(splits: Sequence[DataSplit], key: int, examples: int) -> NDArray[np.float64]:
    """Return each example's largest share in any combination of sums over parts of splits, ``[n]``.

    A combination Σ_p c_p 1_p of the parts' indicators weighs example i by v_i. The largest v_i² /
    Σ_j v_j² over all combinations is the i-th diagonal entry of the projection onto the span of the
    indicators. The sum over all examples belongs to the span, since a server has it from ordinary
    training.
    """
    columns = [np.ones(examples)]
    for split in splits:
        for part in split.parts(key):
            column = np.zeros(examples)
            column[part] = 1.0
            columns.append(column)
    # Indicators may be linearly dependent, such as the parts of a split and the sum over all
    # examples. Left singular vectors with nonzero singular values are a basis of their span.
    basis, strengths, _ = np.linalg.svd(np.stack(columns, axis=1), full_matrices=False)
    basis = basis[:, strengths > 1e-9 * strengths[0]]
    return (basis**2).sum(1)


@dataclass
class _Record:
    """Splits that a client has used, and digests of its latest queries for replicates."""

    splits: list[DataSplit] = field(default_factory=list[DataSplit])
    answered: list[str] = field(default_factory=list[str])


class SplitLog:
    """Record of a client's splits, over all its runs.

    Parameters
    ----------
    folder
        Folder of the client; None if it has none.
    key
        The client's key, by which its parts are drawn.
    policy
        Policy with the limits.
    usage
        Record of the client's usage, which counts equations.
    """

    def __init__(self, folder: Path | None, key: int, policy: Policy, usage: UsageLog) -> None:
        self._key = key
        self._policy = policy
        self._usage = usage
        self._stored = LastingRecord(folder, _KIND)

    def admit(self, this_round: Round, examples: int, state: RecordDict | None = None) -> Round:
        """Record the split of a round, and return the round to be trained.

        Its parts may be those of an earlier split, see the module's documentation.

        Raises
        ------
        PolicyError
            If the split is not allowed and no earlier one can replace it.
        """
        if this_round.replicates == 1:
            return this_round
        wanted = DataSplit.of(this_round, examples)
        with self._stored.alone():
            record = self._stored.read(state)
            if wanted in record.splits:
                return this_round
            try:
                self._check(record, wanted)
                self._usage.book(
                    Usage(partings=wanted.equations),
                    lambda usage: self._policy.check_usage(usage, examples),
                    state,
                )
            except PolicyError:
                similar = [split for split in record.splits if split.resembles(wanted)]
                if not similar:
                    raise
                used = similar[0]  # always the first, so that a repeated query has the same reply
                _log.info(
                    "the parts of round %d are those of an earlier split: %s",
                    this_round.number,
                    used,
                )
                return replace(this_round, parts_from=(used.seed, used.number))
            record.splits.append(wanted)
            self._stored.write(record, state)
        return this_round

    def is_repeated(self, content: Content, state: RecordDict | None = None) -> bool:
        """Return whether a query for replicates was counted before.

        Training is a function of the query, so the reply is the same as before and reveals nothing
        new.
        """
        if not _is_in_parts(content):
            return False
        with self._stored.alone():
            return digest_of_query(content) in self._stored.read(state).answered

    def remember(self, content: Content, state: RecordDict | None = None) -> None:
        """Store the digest of a query for several updates from splits of the data, after it counted."""
        if not _is_in_parts(content):
            return
        with self._stored.alone():
            record = self._stored.read(state)
            record.answered = [*record.answered, digest_of_query(content)][-MOST_REPEATS:]
            self._stored.write(record, state)

    def _check(self, record: _Record, wanted: DataSplit) -> None:
        """Check that no combination of sums consists mostly of one example.

        The first equal parts may leave a few examples out, and the server knows their sum: the sum
        over all examples minus the parts' sums. Such an example may additionally have its share of
        that sum. Otherwise clients would need a multiple of the number of parts.
        """
        known = [split for split in record.splits if split.examples == wanted.examples]
        together = [*known, wanted]
        shares = largest_shares(together, self._key, wanted.examples)
        besides = np.zeros(wanted.examples)
        first = next((split for split in together if split.part_size), None)
        if first is not None and 0 < first.remainder < self._policy.min_part:
            besides[:] = 1 / first.remainder
            besides[np.concatenate(first.parts(self._key))] = 0
        worst = int((shares - besides).argmax())
        self._policy.check_share(float(shares[worst]), float(besides[worst]))


def _is_in_parts(content: Content) -> bool:
    replicates = content.values.get("replicates")
    return type(replicates) is int and replicates > 1


def digest_of_query(content: Content) -> str:
    """Return a digest of a query, independent of its number among the queries of its round."""
    values = {name: value for name, value in content.values.items() if name != "query"}
    names = sorted(content.vectors)
    # All lengths come first, so that no two queries hash the same bytes.
    framed = [values, [[name, len(content.vectors[name])] for name in names]]
    found = hashlib.sha256(json.dumps(framed, sort_keys=True, default=repr).encode())
    for name in names:
        found.update(content.vectors[name])
    return found.hexdigest()


def _encoded(record: _Record) -> dict[str, Any]:
    return {"splits": [asdict(split) for split in record.splits], "answered": record.answered}


def _decoded(stored: dict[str, Any]) -> _Record:
    splits = stored["splits"]
    answered = stored["answered"]
    if not isinstance(splits, list) or not isinstance(answered, list):
        raise ValueError("splits and answered should be lists")
    if any(not isinstance(digest, str) for digest in cast("list[Any]", answered)):
        raise ValueError(f"{shown(cast('list[Any]', answered))} are no digests")
    return _Record(
        [_checked(split) for split in cast("list[dict[str, Any]]", splits)],
        cast("list[str]", answered),
    )


def _combined(one: _Record, other: _Record) -> _Record:
    """Return the splits of both records: this process may serve the client in another run, too."""
    more = [split for split in other.splits if split not in one.splits]
    return _Record([*one.splits, *more], one.answered)


def _checked(stored: dict[str, Any]) -> DataSplit:
    if {*stored} != {each.name for each in fields(DataSplit)}:
        raise ValueError(f"{stored} is no split")
    if any(type(value) is not int or value < 0 for value in stored.values()):
        raise ValueError(f"{stored} is no split")
    return DataSplit(**stored)


_KIND = RecordKind(
    file=FILE,
    what="the record of how this client has split its examples",
    consequence="no update of a part leaves it",
    empty=_Record,
    encoded=_encoded,
    decoded=_decoded,
    combined=_combined,
)
