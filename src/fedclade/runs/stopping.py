"""Ending a run before its last round: what a callback returns for it, and what the run notes of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final


class Finish(Enum):
    """The type of :data:`FINISH`."""

    FINISH = "finish"

    def __repr__(self) -> str:
        return "fedclade.FINISH"


FINISH: Final = Finish.FINISH
"""Returned by :meth:`Callback.on_round <fedclade.Callback.on_round>` to finish the run after the round.

The run is evaluated, its results are written, and it can be loaded, exported and reported as after
its last round. To interrupt a run in place of that, so that it can be continued, return True.
"""


@dataclass(frozen=True)
class Stopped:
    """Why a run was finished before its last round, as in ``summary.json``.

    Parameters
    ----------
    round
        The last round that it had.
    by
        The name of the callback's class, such as ``EarlyStopping``; ``on_round`` or ``stop`` for
        those functions; ``user`` for ``fedclade resume RUN --finish``.
    why
        The reason, in words.
    """

    round: int
    by: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)
