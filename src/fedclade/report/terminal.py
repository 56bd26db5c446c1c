"""Terminals as commands and servers print to, and their tables: text of others is shown there, and does nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_HIDDEN = dict.fromkeys(
    # But for tab and new line; then the characters that turn the direction of what follows.
    [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F]
)


def visible(text: str) -> str:
    r"""Return a text without the characters that a terminal obeys: those that move, colour, ring or turn around.

    >>> visible("client \x1b[31m7\x07")
    'client [31m7'
    """
    return text.translate(_HIDDEN)


class Terminal(Console):
    """A console that lets through no control characters but its own, whoever named a client or wrote an error."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render something in parts, of which those with text are only that."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def new_table(title: str, **changes: Any) -> Table:
    """Return an empty table with the look that all share, and no more lines than it needs."""
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "header_style": "bold cyan", "pad_edge": False}
    look |= {"title_justify": "left", "caption_justify": "left", **changes}
    return Table(title=Text(title, style="bold") if title else None, **look)
