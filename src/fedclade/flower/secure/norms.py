"""Limit C on the norm of an update in secure aggregation, adapted to the sums of earlier rounds.

Each client scales its update down to norm C, since the server cannot limit masked updates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from fedclade.core import RunError, appear
from fedclade.flower.secure.secrets import ClusterSum

NORMS = "norms.json"
"""File of a run folder with the limit C on the norm of updates for each round."""

HEADROOM = 2.0
"""Limit C divided by the root mean square of the norms of earlier updates.

With this factor few honest updates exceed C and are scaled down.
"""

SHRINKS = 0.5
GROWS = 1.5
"""Largest factor by which the limit C grows from one query to the next.

:data:`SHRINKS` is the smallest factor.
"""

SMALLEST_SHARE = 0.01
"""Smallest limit C, as a share of the largest limit C.

A malicious client may report a small norm, so that C shrinks and other clients' updates are scaled
down. With this bound it can slow training down, but not stop it.
"""


@dataclass(frozen=True)
class Norms:
    """Limits C on the norm of an update: for the parameters and for the buffers of a model."""

    parameters: float
    buffers: float

    def follow(self, sums: Sequence[ClusterSum]) -> Norms:
        """Return the limits for the next query, given the sums of this query.

        The limits follow the median over the sums, so that with three or more sums a single
        malicious client cannot choose the limits.
        """
        if not sums:
            return self
        return Norms(
            _adapt_limit(self.parameters, median_low(each.norm for each in sums)),
            _adapt_limit(self.buffers, median_low(each.norm_of_buffers for each in sums)),
        )

    def within(self, largest: Norms) -> Norms:
        """Return the limits, each restricted to 1 % to 100 % of the limit in ``largest``."""
        return Norms(
            _within(self.parameters, largest.parameters), _within(self.buffers, largest.buffers)
        )


def _adapt_limit(now: float, typical: float) -> float:
    """Return the next limit C, given the current limit and the typical norm of an update."""
    return min(max(HEADROOM * typical, SHRINKS * now), GROWS * now)


def _within(norm: float, largest: float) -> float:
    """Return a limit C, restricted to the range from 1 % to 100 % of the limit ``largest``."""
    return min(max(norm, SMALLEST_SHARE * largest), largest)


class NormsByRound:
    """Limits C on the norm of updates for each round of a run, stored in the run folder.

    A resumed run continues with the limits of its next round. If clients train separately on
    several disjoint parts of their data (replicates), each part takes fewer steps than all
    examples, so updates are shorter. So each number of replicates has separate limits.

    Parameters
    ----------
    largest
        Limit C for the parameters in the first round, and its largest value:
        ``network.secure_norm``.
    folder
        Folder of the run; None if the run has no folder.
    """

    def __init__(self, largest: float, folder: Path | None = None) -> None:
        self._largest = largest
        self._path: Path | None = None
        if folder is not None:
            self._path = folder / NORMS
        self._by_round: dict[int, dict[int, Norms]] = self._read()
        """Limits C by the number of replicates and the round."""
        self._now: dict[int, tuple[int, Norms]] = {}
        """Round of the last query, and the limits C after it, by the number of replicates."""

    def in_round(self, number: int, norm_of_buffers: float, replicates: int = 1) -> Norms:
        """Return the limits C on the norm of updates for the next query of a round.

        Parameters
        ----------
        number
            Number of the round.
        norm_of_buffers
            Largest norm of the buffers of the query's models, which limits updates of buffers; 0
            without buffers.
        replicates
            Number of disjoint parts of the data on which clients train separately.
        """
        largest = Norms(self._largest, norm_of_buffers or self._largest)
        latest = self._now.get(replicates)
        if latest is not None and latest[0] == number:
            norms = latest[1]
        else:
            by_round = self._by_round.get(replicates, {})
            # Later rounds were stored before a run was interrupted; it resumed at an earlier round.
            earlier = [at for at in by_round if at <= number]
            norms = largest
            if earlier:
                norms = by_round[max(earlier)]
        norms = norms.within(largest)
        self._now[replicates] = (number, norms)
        return norms

    def take(
        self, number: int, norms: Norms, sums: Sequence[ClusterSum], replicates: int = 1
    ) -> None:
        """Adapt the limits C to the accepted sums of a query, and store them.

        Parameters
        ----------
        number
            Number of the round.
        norms
            Limits that applied to the query.
        sums
            Accepted sums of the query.
        replicates
            Number of disjoint parts of the data on which clients trained separately.
        """
        followed = norms.follow(sums)
        self._now[replicates] = (number, followed)
        self._by_round.setdefault(replicates, {})[number + 1] = followed
        self._write()

    def _write(self) -> None:
        """Write the limits of all rounds to the run folder; raise a RunError if that fails."""
        if self._path is None:
            return
        stored: dict[str, dict[str, list[float]]] = {}
        for replicates, by_round in self._by_round.items():
            stored[str(replicates)] = {
                str(at): [norms.parameters, norms.buffers] for at, norms in by_round.items()
            }
        text = json.dumps({"replicates": stored})
        try:
            appear(self._path, lambda beside: beside.write_text(text))
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error}") from error

    def _read(self) -> dict[int, dict[int, Norms]]:
        """Read the limits of all rounds from the run folder; raise a RunError if damaged."""
        if self._path is None or not self._path.exists():
            return {}
        found: dict[int, dict[int, Norms]] = {}
        try:
            stored = json.loads(self._path.read_text())["replicates"]
            for replicates, by_round in stored.items():
                found[int(replicates)] = {
                    int(at): Norms(*map(float, norms)) for at, norms in by_round.items()
                }
            return found
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise RunError(
                f"{self._path} is damaged ({why}); restore it, or name another run folder"
            ) from error
