"""How things show themselves: what draws them is in a room above, and is imported when something is to be drawn."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_room = ""


def draw_with(room: str) -> None:
    """Say which room draws the things of the rooms below it; the package says it, which is above all of them."""
    global _room
    _room = room


def drawn(maker: str, *things: Any, **options: Any) -> Any:
    """Return what a function of the room that draws makes of things, such as ``html_of`` of a run."""
    return getattr(import_module(_room), maker)(*things, **options)


class Displayed:
    """Something that a notebook shows as HTML: a small part of a page, which needs nothing else."""

    def _repr_html_(self) -> str:
        return drawn("html_of", self)


def at_prompt() -> bool:
    """Whether somebody types: in a notebook, or at Python's prompt; no script runs, and no test."""
    return hasattr(sys, "ps1")  # which IPython has as well, in a terminal and in a notebook


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
