"""Colours of the page by name: a figure says ``@ink``, and the style sheet what that is by day and by night."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedclade.report import facts, style
from fedclade.report.formats import count
from fedclade.runs import Run

DAY: Mapping[str, str] = {
    "ink": style.INK,
    "muted": "#5F666D",
    "faint": "#E3E6E8",
    "paper": "#F5F6F7",
    "panel": "#FFFFFF",
    "accent": style.ACCENT,
    "good": "#1A7F37",
    "bad": "#C4341C",
    **{"low2": "#2166AC", "low1": "#92C5DE", "middle": "#F7F7F7", "high1": "#F4A582", "high2": "#B2182B"},
}
"""Colours on a light page."""

NIGHT: Mapping[str, str] = {
    "ink": "#E8EAED",
    "muted": "#A3ABB3",
    "faint": "#343A40",
    "paper": "#121417",
    "panel": "#1B1F23",
    "accent": "#4BA3D9",
    "good": "#57C278",
    "bad": "#FF8A73",
    **{"low2": "#6CB2E8", "low1": "#2F618C", "middle": "#24292E", "high1": "#94463A", "high2": "#FF9077"},
}
"""Colours on a dark page."""

CONTRAST = 4.0
"""What the lines of clusters have against a dark ground; WCAG 2.2, criterion 1.4.11, asks for 3."""


def variables(*, night: bool) -> dict[str, str]:
    """Return all colours of the page by name, with those of clusters ``c0 ...`` and of true clusters ``t0 ...``."""
    base = NIGHT if night else DAY
    clusters = [lightened(colour, base["panel"]) if night else colour for colour in style.CLUSTERS]
    return {
        **base,
        **{f"c{i}": colour for i, colour in enumerate(clusters)},
        **{f"t{i}": colour for i, colour in enumerate(style.TRUTH)},
    }


def lightened(colour: str, ground: str) -> str:
    """Return a colour, mixed with white until it stands out from a dark ground.

    >>> lightened("#332288", "#1B1F23"), lightened("#E0A800", "#1B1F23")
    ('#857AB8', '#E0A800')
    """
    for step in range(21):
        mixed = tuple(round(channel + (255 - channel) * step / 20) for channel in _channels(colour))
        lighter = "#" + "".join(f"{channel:02X}" for channel in mixed)
        if contrast(lighter, ground) >= CONTRAST:
            return lighter
    return "#FFFFFF"


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21 (WCAG 2.2, relative luminance)."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    shares = [channel / 255 for channel in _channels(colour)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def truth_colour(cluster: int) -> str:
    """Return the colour of a true cluster."""
    return f"@t{cluster % len(style.TRUTH)}"


@dataclass(frozen=True)
class Key:
    """An entry of a legend.

    Parameters
    ----------
    colour
        By name.
    label
        What it stands for.
    shape
        What it is in the figure: ``line``, ``dashed``, ``dot``, ``ring`` or ``box``.
    """

    colour: str
    label: str
    shape: str = "line"

    @property
    def dashed(self) -> bool:
        """Whether its lines are dashed."""
        return self.shape == "dashed"


def series(labels: Sequence[str]) -> list[Key]:
    """Return a colour for each of some names; from the sixth on, dashes help to tell them apart."""
    n = len(style.CLUSTERS)
    return [Key(f"@c{i % n}", label, "dashed" if i % n >= n // 2 else "line") for i, label in enumerate(labels)]


@dataclass(frozen=True)
class ClusterColours:
    """The colour of every cluster of a run, the same in all of its figures.

    Current clusters have colours as long as there are enough; those that were split are grey, the root the darkest.
    """

    run: Run

    @cached_property
    def leaves(self) -> list[int]:
        """The current clusters that have members, in the order of the tree."""
        return [leaf.id for leaf in facts.leaves_in_tree_order(self.run.tree) if leaf.members]

    @property
    def crowded(self) -> bool:
        """Whether there are more clusters than colours."""
        return len(self.leaves) > len(style.CLUSTERS)

    @cached_property
    def _keys(self) -> dict[int, Key]:
        return {} if self.crowded else dict(zip(self.leaves, series([""] * len(self.leaves)), strict=True))

    def of(self, node: int) -> str:
        """Return the colour of a node."""
        if node in self._keys:
            return self._keys[node].colour
        return "@accent" if node in self.leaves else "@ink" if node == 0 else "@muted"

    def dashed(self, node: int) -> bool:
        """Tell whether the lines of a node are dashed."""
        return node in self._keys and self._keys[node].dashed

    def current(self, shape: str = "") -> list[Key]:
        """Return what the colours of the current clusters stand for, in a figure of lines or of another shape."""
        size = {node.id: count(len(node.members), "client") for node in self.run.tree.nodes}
        if self.crowded:
            return [Key("@accent", count(len(self.leaves), "cluster"), shape or "line")]
        return [
            Key(self.of(leaf), f"cluster {leaf} ({size[leaf]})", shape or self._keys[leaf].shape)
            for leaf in self.leaves
        ]

    def legend(self) -> list[Key]:
        """Return what the colours of lines stand for, those of clusters that were split among them."""
        split = [node for nodes in facts.splits_by_round(self.run.tree).values() for node in nodes]
        keys = [*self.current(), Key("@ink", "root, until its split")] if 0 in split else self.current()
        return [*keys, Key("@muted", "other clusters, until their split")] if any(split) else keys
