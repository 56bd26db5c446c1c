"""Record of the ways in which a client has split its training data, to protect single examples.

Some methods request a separate update from each of several disjoint parts of a client's training
data. A split is one division of the data into such parts. An update is a sum of contributions of
the examples of its part, and the server knows which example is in which part. Each update is
therefore a linear equation in the contributions of single examples. With as many independent
equations as examples, a server could compute the contribution of every example. If two parts, from
different splits, differ in a single example, the difference of their sums is enough to compute the
contribution of this example. So a client counts equations, and checks all sums together:

- A new split into p parts adds at most p − 1 equations, since the server already knows the sum over
  all examples, or p equations if some examples are in no part. The total number of equations is
  limited by ``max-partings``.
- A linear combination of all sums, including the sum over all examples, gives each example a
  weight. The share of an example is its squared weight, divided by the total of the squared
  weights. The largest share of an example in any combination (:func:`largest_shares`) is limited.
  The difference of two parts that differ in one example would give this example a share of 1.
- A split that would exceed one of these limits is replaced by the first recorded split with the
  same number and size of parts. If no such split is recorded, the query is refused.

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

from fedclade.core import (
    FORBIDS,
    LEAST_DIVIDED,
    Indices,
    PolicyError,
    Related,
    Round,
    SplitPart,
    Splits,
    draw_examples,
)
from fedclade.flower.lasting_record import LastingRecord, RecordKind
from fedclade.flower.policy import Policy, Usage, UsageLog
from fedclade.flower.wire import Content, shown

FILE = "splits.json"  # in the client's folder

MOST_REPEATS = 256
"""Number of most recent queries for updates from parts whose digests are stored."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSplit:
    """Division of a client's training data into disjoint parts.

    These parameters and the client's key determine which examples are in which part.

    Parameters
    ----------
    examples
        Number n of training examples of the client.
    seed, number
        Seed of the run and number of the round, which determine the random assignment of examples
        to parts. The number is 0 for parts of a fixed size, which are the same in all rounds.
    replicates, part_size
        Number of parts, and fixed number of examples in each part. With a ``part_size`` of 0, all
        examples are divided among the parts.
    """

    examples: int
    seed: int
    number: int
    replicates: int
    part_size: int

    @classmethod
    def of(cls, splits: Splits, this_round: Round, examples: int) -> DataSplit:
        """Return the split of ``examples`` training examples that a query of a round requests."""
        number = 0 if splits.size else this_round.number
        return cls(examples, this_round.seed, number, splits.count, splits.size)

    @property
    def remainder(self) -> int:
        """Number of examples that are in no part."""
        return self.examples - self.replicates * self.part_size if self.part_size else 0

    def count_equations(self, *, leaves_out: bool) -> int:
        """Return the number of linear equations that the sums over the parts add.

        The server is assumed to know the sum over all examples already. The number is an upper
        bound.

        Parameters
        ----------
        leaves_out
            Whether some examples may be in no part, or repeated in a part.
        """
        return self.replicates - 1 + leaves_out

    def resembles(self, other: DataSplit) -> bool:
        """Return whether two splits have the same numbers of examples and of parts, and part size.

        Such splits differ only in the examples that each part contains.
        """
        return replace(self, seed=other.seed, number=other.number) == other

    def parts(self, key: int, related: Related | None = None) -> list[NDArray[np.int64]]:
        """Return the indices of the examples in each part.

        An example that a part repeats has its index repeated. Training leaves copies of an example
        out. This method treats them as different examples. Otherwise, whether a query is refused
        would depend on the inputs and targets of the examples.

        Parameters
        ----------
        key
            The client's key.
        related
            The groups of dependent examples that the client's owner specifies; None without groups.
        """
        return [
            SplitPart(place, self.replicates, self.part_size).of_client(
                self.examples, key, self.seed, self.number, related
            )
            for place in range(self.replicates)
        ]

    def count_left_out(self, key: int, related: Related | None = None) -> int:
        """Return the number of examples that are in no part; see :meth:`parts`."""
        if related is None:
            return self.remainder
        return self.examples - len(np.unique(np.concatenate(self.parts(key, related))))


def largest_shares(
    splits: Sequence[DataSplit], key: int, examples: int, related: Related | None = None
) -> NDArray[np.float64]:
    """Return how well a server could isolate each example by combining sums over parts.

    A linear combination of the sums gives each example i a weight v_i, and the share of example i
    is v_i² / Σ_j v_j². The result is the largest share of each example in any combination. A share
    near 1 means that a server could isolate the contribution of this example. The largest share of
    example i is the i-th diagonal entry of the projection onto the span of the parts' indicators,
    which are vectors with 1 for each example of the part and 0 for all others. The sum over all
    examples is one of the sums, since a server has it from ordinary training.

    Parameters
    ----------
    splits
        Splits of the data whose sums the server knows.
    key
        The client's key, by which examples are assigned to parts.
    examples
        Number n of training examples.
    related
        The groups of dependent examples, by which examples are assigned to parts; None without
        groups.

    Returns
    -------
    ndarray
        Largest share of each example, float64 ``[n]``, each in [0, 1].
    """
    columns = [np.ones(examples)]
    for split in splits:
        for part in split.parts(key, related):
            column = np.zeros(examples)
            np.add.at(column, part, 1.0)
            columns.append(column)
    # Indicators may be linearly dependent, such as the parts of a split and the sum over all
    # examples. Left singular vectors with nonzero singular values are a basis of their span.
    basis, strengths, _ = np.linalg.svd(np.stack(columns, axis=1), full_matrices=False)
    basis = basis[:, strengths > 1e-9 * strengths[0]]
    return (basis**2).sum(1)


@dataclass
class _Record:
    """Record of a client's splits of its data, and digests of queries that it has replied to.

    ``answered`` contains the digests of the most recent queries for updates from parts of the data.
    """

    splits: list[DataSplit] = field(default_factory=list[DataSplit])
    answered: list[str] = field(default_factory=list[str])


class SplitLog:
    """Record of all splits of a client's training data, over all its runs.

    Parameters
    ----------
    folder
        Folder of the client; None if the client has no folder.
    key
        The client's key, by which examples are assigned to parts.
    policy
        Policy of the client, which limits the splits.
    usage
        Counts of the client's replies, which include the equations from splits.
    groups
        Group of each training example, ``[n]``; None without groups of dependent examples.
    """

    def __init__(
        self,
        folder: Path | None,
        key: int,
        policy: Policy,
        usage: UsageLog,
        groups: Indices | None = None,
    ) -> None:
        self._key = key
        self._groups = groups
        self._policy = policy
        self._usage = usage
        self._stored = LastingRecord(folder, _KIND)

    def admit(
        self, splits: Splits, this_round: Round, examples: int, state: RecordDict | None = None
    ) -> Splits:
        """Record the split that a query requests, and return the split to train on.

        The returned split is an earlier one of the same form if the requested split exceeds a
        limit.

        Parameters
        ----------
        splits
            Number and size of the parts that the query requests.
        this_round
            Round of the query, which determines the examples of each part.
        examples
            Number of training examples of the client.
        state
            Record that Flower stores for the client between two messages.

        Raises
        ------
        PolicyError
            If the requested split exceeds a limit of the policy, and no earlier split has the same
            form.
        """
        wanted = DataSplit.of(splits, this_round, examples)
        with self._stored.alone():
            record = self._stored.read(state)
            if wanted in record.splits:
                return splits
            try:
                related = self._related_of(examples)
                self._check(record, wanted, related)
                # Parts of whole groups may leave out and repeat examples.
                leaves_out = related is not None or wanted.remainder > 0
                self._usage.book(
                    Usage(partings=wanted.count_equations(leaves_out=leaves_out)),
                    lambda usage: self._policy.check_usage(usage, examples),
                    state,
                )
            except PolicyError:
                similar = [split for split in record.splits if split.resembles(wanted)]
                if not similar:
                    raise
                used = similar[0]  # always the first, so that a repeated query has the same reply
                _log.info(
                    "the client trains on an earlier split of its data in round %d: %s",
                    this_round.number,
                    used,
                )
                return replace(splits, parts_from=(used.seed, used.number))
            record.splits.append(wanted)
            self._stored.write(record, state)
        return splits

    def is_repeated(self, content: Content, state: RecordDict | None = None) -> bool:
        """Return whether the client has counted this query for updates from parts before.

        Training without noise is a function of the query, so the second reply equals the first
        reply and reveals nothing new.
        """
        if not _is_in_parts(content):
            return False
        with self._stored.alone():
            return digest_of_query(content) in self._stored.read(state).answered

    def remember(self, content: Content, state: RecordDict | None = None) -> None:
        """Store the digest of a query for updates from parts, once the query has been counted."""
        if not _is_in_parts(content):
            return
        with self._stored.alone():
            record = self._stored.read(state)
            record.answered = [*record.answered, digest_of_query(content)][-MOST_REPEATS:]
            self._stored.write(record, state)

    def _related_of(self, examples: int) -> Related | None:
        """Return the groups of the examples from which the client draws parts; None without groups.

        ``examples`` is the number of these examples. A client that reports a rounded number of
        examples draws parts from this number of its examples.
        """
        if self._groups is None:
            return None
        if examples == len(self._groups):
            return Related(self._groups)
        return Related(self._groups[draw_examples(len(self._groups), examples, self._key)])

    def _check(self, record: _Record, wanted: DataSplit, related: Related | None) -> None:
        """Check that a server could not isolate an example by combining sums over parts.

        The share of a single example in any combination of sums is limited; see
        :func:`largest_shares`. One exception is necessary. A split whose parts all have the same
        size may leave r examples over, which are in no part. The server then knows the sum over
        these r examples, as the sum over all examples minus the sums over the parts, and each of
        them has the share 1/r in it. If r is below ``min-part``, this share exceeds the limit,
        although each part is large enough. For the first recorded split of this kind, the limit for
        the r examples is therefore raised by 1/r. Otherwise, clients would refuse the split only
        because a few examples are left over.

        Parts of whole groups may have fewer different examples than their size, which is therefore
        checked here as well.
        """
        if related is not None:
            self._check_groups(wanted, related)
        known = [split for split in record.splits if split.examples == wanted.examples]
        together = [*known, wanted]
        shares = largest_shares(together, self._key, wanted.examples, related)
        besides = np.zeros(wanted.examples)
        first = next((split for split in together if split.part_size), None)
        left_out = 0 if first is None else first.count_left_out(self._key, related)
        if first is not None and 0 < left_out < self._policy.min_part:
            besides[:] = 1 / left_out
            besides[np.concatenate(first.parts(self._key, related))] = 0
        worst = int((shares - besides).argmax())
        self._policy.check_share(float(shares[worst]), float(besides[worst]))

    def _check_groups(self, wanted: DataSplit, related: Related) -> None:
        """Check that each part has enough groups, and enough different examples."""
        least = max(LEAST_DIVIDED, wanted.replicates)
        if len(np.unique(related.groups)) < least:
            raise PolicyError(
                f"{FORBIDS} updates from {wanted.replicates} parts of its examples, since they form "
                f"fewer than {least} groups of examples that depend on each other ('groups' in its "
                "data settings)"
            )
        different = min(len(np.unique(part)) for part in wanted.parts(self._key, related))
        if different < self._policy.min_part:
            raise PolicyError(
                f"{FORBIDS} updates from {wanted.replicates} parts of its examples, since a part of "
                f"whole groups has fewer than {self._policy.min_part} different examples (min-part "
                "in its node config)"
            )


def _is_in_parts(content: Content) -> bool:
    """Return whether a query requests several updates, from disjoint parts of the data."""
    replicates = content.values.get("replicates")
    return type(replicates) is int and replicates > 1


def digest_of_query(content: Content) -> str:
    """Return a SHA-256 digest of a query's values and vectors, to recognize a repeated query.

    The digest does not depend on the number of the query within its round.
    """
    values = {name: value for name, value in content.values.items() if name != "query"}
    names = sorted(content.vectors)
    # All lengths come first, so that no two queries hash the same bytes.
    framed = [values, [[name, len(content.vectors[name])] for name in names]]
    found = hashlib.sha256(json.dumps(framed, sort_keys=True, default=repr).encode())
    for name in names:
        found.update(content.vectors[name])
    return found.hexdigest()


def _encoded(record: _Record) -> dict[str, Any]:
    """Return a record of splits as JSON values."""
    return {"splits": [asdict(split) for split in record.splits], "answered": record.answered}


def _decoded(stored: dict[str, Any]) -> _Record:
    """Read a record of splits from JSON values; raise a ValueError if they are malformed."""
    splits = stored["splits"]
    answered = stored["answered"]
    if not isinstance(splits, list) or not isinstance(answered, list):
        raise ValueError(
            "'splits' and 'answered' in a client's record of data splits should be lists, got "
            f"{shown(stored['splits'])} and {shown(stored['answered'])}"
        )
    if any(not isinstance(digest, str) for digest in cast("list[Any]", answered)):
        raise ValueError(
            "'answered' in a client's record of data splits should be a list of texts, got "
            f"{shown(cast('list[Any]', answered))}"
        )
    return _Record(
        [_checked(split) for split in cast("list[dict[str, Any]]", splits)],
        cast("list[str]", answered),
    )


def _combined(one: _Record, other: _Record) -> _Record:
    """Return a record with the splits of two records of the same client.

    ``one`` is the record in Flower's state, which belongs to a single run. ``other`` is the record
    in the memory of this process, which may run the same client in another run, too. The digests of
    queries are those of ``one``.
    """
    more = [split for split in other.splits if split not in one.splits]
    return _Record([*one.splits, *more], one.answered)


def _checked(stored: dict[str, Any]) -> DataSplit:
    """Read a split from JSON values; raise a ValueError if a value is missing or invalid."""
    names = [each.name for each in fields(DataSplit)]
    if {*stored} != {*names}:
        raise ValueError(
            "a split in a client's record of data splits should have the keys "
            f"{', '.join(names)}, got {stored}"
        )
    if any(type(value) is not int or value < 0 for value in stored.values()):
        raise ValueError(
            "the values of a split in a client's record of data splits should be whole numbers of "
            f"at least 0, got {stored}"
        )
    return DataSplit(**stored)


_KIND = RecordKind(
    file=FILE,
    what="the record of how this client has split its examples",
    consequence="this client sends no updates from parts of its data",
    empty=_Record,
    encoded=_encoded,
    decoded=_decoded,
    combined=_combined,
)
