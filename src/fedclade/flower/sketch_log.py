"""Record of the sketches of masked updates that a client has sent, over all its runs.

A sketch contains the signs of random projections of an update, by which the server compares
clients. With enough different projections a server could reconstruct an update, so a client counts
the directions of all projections that it has used.
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
    """Random projection of updates.

    Parameters
    ----------
    seed
        Seed of the projection.
    dim
        Dimension R, the number of projected entries.
    of
        Name patterns of the projected parameters; empty for all parameters.
    """

    seed: int
    dim: int
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sketched:
    """Record of a client's sketches: the used projections, and the number of sent sketches."""

    projections: tuple[Projection, ...] = ()
    sketches: int = 0

    @property
    def directions(self) -> int:
        """Number of directions, over all used projections, of which the client has sent signs."""
        return sum(projection.dim for projection in self.projections)

    def plus(self, projection: Projection, count: int) -> Sketched:
        """Return the counts after ``count`` further sketches by a projection."""
        projections = self.projections
        if projection not in projections:
            projections = (*projections, projection)
        return Sketched(projections, self.sketches + count)


class SketchLog:
    """Record of the sketches that a client has sent, over all its runs.

    A sketch is counted before it is computed, so a sketch whose computation fails counts, too.

    Parameters
    ----------
    folder
        Folder of the client; None if the client has no folder.
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
        """Count sketches that are about to be sent; if this raises an error, they must not be sent.

        Parameters
        ----------
        projection
            Projection of the sketches.
        count
            Number of sketches.
        check
            Function that raises an error if the new counts exceed a limit.
        state
            Record that Flower stores for the client between two messages.

        Raises
        ------
        PolicyError
            If the record is damaged, or the new counts exceed a limit.
        """
        with self._record.alone():
            after = self._record.read(state).plus(projection, count)
            check(after)
            self._record.write(after, state)


def _read_projection(stored: Mapping[str, Any]) -> Projection:
    """Read a projection from JSON values; raise a ValueError if a value has a wrong type."""
    names = stored["of"]
    has_names = isinstance(names, list) and all(
        isinstance(name, str) for name in cast("list[Any]", names)
    )
    if type(stored["seed"]) is not int or not has_names:
        raise ValueError(
            "in a record of sent sketches, a projection should have 'dim', 'seed' (a whole number) "
            f"and 'of' (a list of name patterns of parameters), got {shown(dict(stored))}"
        )
    return Projection(stored["seed"], stored["dim"], tuple(cast("list[str]", names)))


def _decoded(stored: Mapping[str, Any]) -> Sketched:
    """Read from JSON values how many sketches a client has sent, and by which projections.

    Raise a ValueError if a value is malformed.
    """
    if not isinstance(stored["projections"], list):
        raise ValueError(
            "in a record of sent sketches, 'projections' should be a list, got "
            f"{shown(stored['projections'])}"
        )
    projections = tuple(_read_projection(each) for each in stored["projections"])
    counts = [stored["sketches"], *(projection.dim for projection in projections)]
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError(
            "in a record of sent sketches, 'sketches' (their number) and each 'dim' (the number of "
            f"entries of a sketch) should be whole numbers of at least 0, got {shown(counts)}"
        )
    return Sketched(projections, stored["sketches"])


def _combined(one: Sketched, other: Sketched) -> Sketched:
    """Return a record with the projections of two records and the larger number of sketches."""
    more = [projection for projection in other.projections if projection not in one.projections]
    return Sketched((*one.projections, *more), max(one.sketches, other.sketches))


_KIND = RecordKind(
    file=FILE,
    what="the count of the sketches that this client has sent",
    consequence="this client sends no further sketch",
    empty=Sketched,
    encoded=asdict,
    decoded=_decoded,
    combined=_combined,
)
