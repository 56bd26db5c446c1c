"""Record of the sketches of masked updates that a client has sent, over all runs.

A sketch contains the signs of an update in some directions. With enough different projections a
server could learn every direction, so a client counts the directions of all projections together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from flwr.app import RecordDict

from fedclade.flower.lasting_record import LastingRecord, RecordKind
from fedclade.flower.wire import shown

FILE = "sketches.json"  # in the client's folder


@dataclass(frozen=True)
class Projection:
    """Projection of updates: seed, dimension R, and patterns of the projected parameters."""

    seed: int
    dim: int
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sketched:
    """Projections that a client has used, and number of sketches that it has sent."""

    projections: tuple[Projection, ...] = ()
    sketches: int = 0

    @property
    def directions(self) -> int:
        """Number of directions in which signs of updates have left the client."""
        return sum(projection.dim for projection in self.projections)

    def plus(self, projection: Projection, count: int) -> Sketched:
        """Return the record after ``count`` further sketches by a projection."""
        projections = self.projections
        if projection not in projections:
            projections = (*projections, projection)
        return Sketched(projections, self.sketches + count)


class SketchLog:
    """Record of a client's sketches, over all its runs.

    Sketches are counted before they are made, so one that fails counts too.
    """

    def __init__(self, folder: Path | None) -> None:
        self._record = LastingRecord(folder, _KIND)

    def book(
        self,
        projection: Projection,
        count: int,
        check: Callable[[Sketched], object],
        state: RecordDict | None = None,
    ) -> None:
        """Count sketches.

        No sketch may leave if this fails, or if ``check`` rejects the new total.

        Raises
        ------
        PolicyError
            If the file is damaged.
        """
        with self._record.alone():
            after = self._record.read(state).plus(projection, count)
            check(after)
            self._record.write(after, state)


def _projection(stored: Mapping[str, Any]) -> Projection:
    names = stored["of"]
    has_names = isinstance(names, list) and all(
        isinstance(name, str) for name in cast("list[Any]", names)
    )
    if type(stored["seed"]) is not int or not has_names:
        raise ValueError(f"{shown(dict(stored))} is no projection")
    return Projection(stored["seed"], stored["dim"], tuple(cast("list[str]", names)))


def _decoded(stored: Mapping[str, Any]) -> Sketched:
    if not isinstance(stored["projections"], list):
        raise ValueError("projections should be a list")
    projections = tuple(_projection(each) for each in stored["projections"])
    counts = [stored["sketches"], *(projection.dim for projection in projections)]
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError("a number that is no count")
    return Sketched(projections, stored["sketches"])


def _combined(one: Sketched, other: Sketched) -> Sketched:
    """Return the projections of both, and the larger count of sketches."""
    more = [projection for projection in other.projections if projection not in one.projections]
    return Sketched((*one.projections, *more), max(one.sketches, other.sketches))


_KIND = RecordKind(
    file=FILE,
    what="the count of the sketches that this client has sent",
    consequence="none leaves it",
    empty=Sketched,
    encoded=asdict,
    decoded=_decoded,
    combined=_combined,
)
