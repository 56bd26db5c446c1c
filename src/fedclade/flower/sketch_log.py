"""Which sketches of its masked updates a client has sent, over all runs: by which projections, and how many.

A sketch tells the signs of an update in some directions. By enough different projections a server
could learn every direction, so a client counts the directions that all projections have together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedclade.core import PolicyError, alone, appear

FILE = "sketches.json"  # in the client's folder

_STATE = "fedclade.sketches"
_FORMAT = 1


@dataclass(frozen=True)
class Projection:
    """A projection of updates: its seed, its length R, and the parameters that it is of."""

    seed: int
    dim: int
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sketched:
    """The projections that a client has used, and how many sketches it has sent."""

    projections: tuple[Projection, ...] = ()
    sketches: int = 0

    @property
    def directions(self) -> int:
        """In how many directions the signs of updates have left."""
        return sum(projection.dim for projection in self.projections)

    def plus(self, projection: Projection, count: int) -> Sketched:
        """Return the same after ``count`` further sketches by a projection."""
        projections = self.projections
        if projection not in projections:
            projections = (*projections, projection)
        return Sketched(projections, self.sketches + count)

    @property
    def text(self) -> str:
        """The same as JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)})


class SketchLog:
    """A client's sketches: in a file in its folder, for its life, or else in memory and Flower's state of it.

    Sketches are counted before they are made, so one that fails counts too.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._latest = Sketched()

    def book(
        self, projection: Projection, count: int, check: Callable[[Sketched], object], state: RecordDict | None = None
    ) -> None:
        """Count sketches; if that fails, or ``check`` refuses what there would be in all, none may leave.

        Raises
        ------
        PolicyError
            If the file is damaged.
        """
        with nullcontext() if self._path is None else alone(self._path):
            after = self._read(state).plus(projection, count)
            check(after)
            self._latest = after
            if self._path is not None:
                appear(self._path, lambda beside: beside.write_text(after.text), private=True)
            elif state is not None:
                state[_STATE] = ConfigRecord({"sketched": after.text})

    def _read(self, state: RecordDict | None) -> Sketched:
        if self._path is None:
            kept = (state or {}).get(_STATE)
            text = kept.get("sketched") if isinstance(kept, ConfigRecord) else None
            if text is None:
                return self._latest
            kept_here = _parsed(str(text), "Flower's state of this client")
            others = [each for each in self._latest.projections if each not in kept_here.projections]
            sketches = max(kept_here.sketches, self._latest.sketches)
            return Sketched((*kept_here.projections, *others), sketches)
        try:
            return _parsed(self._path.read_text(), str(self._path))
        except FileNotFoundError:
            return Sketched()


def _parsed(text: str, where: str) -> Sketched:
    try:
        kept: Mapping[str, Any] = json.loads(text)
        if kept["format"] != _FORMAT:
            raise ValueError("another format")
        found = tuple(Projection(each["seed"], each["dim"], tuple(each["of"])) for each in kept["projections"])
        counts = [kept["sketches"], *(projection.dim for projection in found)]
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError("a number that is no count")
        return Sketched(found, kept["sketches"])
    except (ValueError, TypeError, KeyError) as error:
        raise PolicyError(
            f"{where}, the count of the sketches that this client has sent, is damaged, so none leaves it; restore "
            f"the file from a backup ({type(error).__name__}: {error})"
        ) from error
