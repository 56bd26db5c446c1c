"""Limit C on the norm of an update in a sum, which follows the updates of earlier sums."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from fedclade.core import RunError, appear
from fedclade.flower.secure.secrets import ClusterSum

NORMS = "norms.json"
"""File of a run folder with C of each round."""

HEADROOM = 2.0
"""C divided by the root mean square of the norms of earlier updates.

With this factor few honest updates are shortened.
"""

SHRINKS = 0.5
GROWS = 1.5
"""Smallest and largest factor by which C changes from one query to the next."""

SMALLEST_SHARE = 0.01
"""Smallest C, as a share of the largest C.

A malicious client may claim short updates, so that other clients' updates are shortened. With this
bound it slows learning down, and does not end it.
"""


@dataclass(frozen=True)
class Norms:
    """C for the parameters and for the buffers of a model, in their units."""

    parameters: float
    buffers: float

    def follow(self, sums: Sequence[ClusterSum]) -> Norms:
        """Return the norms after a query with these sums.

        The median over the sums is used, so that with three or more sums one malicious client
        cannot choose C.
        """
        if not sums:
            return self
        return Norms(
            _next(self.parameters, median_low(each.norm for each in sums)),
            _next(self.buffers, median_low(each.norm_of_buffers for each in sums)),
        )

    def within(self, largest: Norms) -> Norms:
        """Return the norms, each between a hundredth of the largest and the largest."""
        return Norms(
            _within(self.parameters, largest.parameters), _within(self.buffers, largest.buffers)
        )


def _next(now: float, typical: float) -> float:
    return min(max(HEADROOM * typical, SHRINKS * now), GROWS * now)


def _within(norm: float, largest: float) -> float:
    return min(max(norm, SMALLEST_SHARE * largest), largest)


class NormsByRound:
    """C of each round of a run, stored in its folder.

    A resumed run continues with the C of its next round. Training in replicates takes fewer steps
    than training on all examples at once, so its updates are shorter. Each number of replicates
    therefore has a C of its own.

    Parameters
    ----------
    largest
        C of the parameters in the first round, and largest C: ``network.secure_norm``.
    folder
        Folder of the run; None if it has none.
    """

    def __init__(self, largest: float, folder: Path | None = None) -> None:
        self._largest = largest
        self._path = None if folder is None else folder / NORMS
        self._by_round: dict[int, dict[int, Norms]] = self._read()
        """C by the number of replicates and the round."""
        self._now: dict[int, tuple[int, Norms]] = {}
        """Round of the last query, and C after it, by the number of replicates."""

    def in_round(self, number: int, norm_of_buffers: float, replicates: int = 1) -> Norms:
        """Return C for the next query of a round, given the norm of the buffers of its models.

        No update of the buffers may be longer than the buffers themselves.
        """
        largest = Norms(self._largest, norm_of_buffers or self._largest)
        latest = self._now.get(replicates)
        if latest is not None and latest[0] == number:
            norms = latest[1]
        else:
            by_round = self._by_round.get(replicates, {})
            # Later rounds were stored before a run was interrupted; it resumed at an earlier round.
            earlier = [at for at in by_round if at <= number]
            norms = by_round[max(earlier)] if earlier else largest
        norms = norms.within(largest)
        self._now[replicates] = (number, norms)
        return norms

    def take(
        self, number: int, norms: Norms, sums: Sequence[ClusterSum], replicates: int = 1
    ) -> None:
        """Update C by the accepted sums of a query in a round, made with these norms."""
        followed = norms.follow(sums)
        self._now[replicates] = (number, followed)
        self._by_round.setdefault(replicates, {})[number + 1] = followed
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        stored = {
            str(replicates): {
                str(at): [norms.parameters, norms.buffers] for at, norms in by_round.items()
            }
            for replicates, by_round in self._by_round.items()
        }
        text = json.dumps({"replicates": stored})
        try:
            appear(self._path, lambda beside: beside.write_text(text))
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error}") from error

    def _read(self) -> dict[int, dict[int, Norms]]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            stored = json.loads(self._path.read_text())["replicates"]
            return {
                int(replicates): {
                    int(at): Norms(*map(float, norms)) for at, norms in by_round.items()
                }
                for replicates, by_round in stored.items()
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise RunError(
                f"{self._path} is damaged ({why}); restore it, or name another run folder"
            ) from error
