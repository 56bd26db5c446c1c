"""End of a run before its last round: the value that requests it, and the recorded reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final


class Finish(Enum):
    """Type of the value :data:`FINISH`, which a callback returns to finish a run early."""

    FINISH = "finish"

    def __repr__(self) -> str:
        return "fedclade.FINISH"


FINISH: Final = Finish.FINISH
"""Return value of :meth:`Callback.on_round <fedclade.Callback.on_round>` that finishes the run.

The run is evaluated after the round, its results are written, and it can be loaded, exported and
reported as after its last round. To interrupt a run instead, so that it can be continued, return
True.
"""


@dataclass(frozen=True)
class Stopped:
    """Reason for finishing a run before its last round, as recorded in ``summary.json``.

    Parameters
    ----------
    round
        The last round of the run.
    by
        The name of the callback's class, such as ``EarlyStopping``; ``on_round`` or ``stop`` for
        these functions; ``user`` for ``fedclade resume RUN --finish``.
    why
        The reason, as text.
    """

    round: int
    by: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, as they are stored in ``summary.json``."""
        return asdict(self)
