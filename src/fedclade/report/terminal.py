"""Console of the command line, which shows no control characters of names and messages."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Text in a report can come from other parties, such as names of clients and errors of nodes. Its
# control characters must not reach a terminal, which would execute them.

_CONTROL_CODES = [*range(9), *range(11, 32), *range(127, 160)]  # all but tab and new line
_DIRECTION_CODES = [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F]
_HIDDEN = dict.fromkeys(_CONTROL_CODES + _DIRECTION_CODES)


def visible(text: str) -> str:
    r"""Remove from a text all control characters and all marks that change its direction.

    >>> visible("client \x1b[31m7\x07")
    'client [31m7'
    """
    return text.translate(_HIDDEN)


class Terminal(Console):
    """Console that removes control characters from all text, such as names and error messages."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render an object as segments, and remove the control characters from their text."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
