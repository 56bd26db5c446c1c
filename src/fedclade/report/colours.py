"""Colours by name, such as ``@ink``: pages have light and dark ones, files the light ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedclade.report import queries, style
from fedclade.report.formats import count
from fedclade.report.picture import DASHES, Dash, LegendEntry
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
    **{
        "low2": "#2166AC",
        "low1": "#92C5DE",
        "middle": "#F7F7F7",
        "high1": "#F4A582",
        "high2": "#B2182B",
    },
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
    **{
        "low2": "#6CB2E8",
        "low1": "#2F618C",
        "middle": "#24292E",
        "high1": "#94463A",
        "high2": "#FF9077",
    },
}
"""Colours on a dark page."""

CONTRAST = 4.0
"""Contrast of the lines of clusters on a dark page; WCAG 2.2, criterion 1.4.11, requires 3."""


def palette(*, night: bool) -> dict[str, str]:
    """Return all colours by name, including clusters (``c0``) and true clusters (``t0``)."""
    base = NIGHT if night else DAY
    colours = dict(base)
    for i, colour in enumerate(style.CLUSTERS):
        colours[f"c{i}"] = lightened(colour, base["panel"]) if night else colour
    for i, colour in enumerate(style.TRUTH):
        colours[f"t{i}"] = colour
    return colours


def lightened(colour: str, ground: str) -> str:
    """Mix a colour with white until it has enough contrast to a dark ground.

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


def series(labels: Sequence[str]) -> list[LegendEntry]:
    """Return a legend entry for each label, with colours and, from the sixth on, dashed lines."""
    n_colours = len(style.CLUSTERS)
    shapes = list(DASHES)
    entries: list[LegendEntry] = []
    for i, label in enumerate(labels):
        shape = shapes[2 * i // n_colours % len(shapes)]
        entries.append(LegendEntry(f"@c{i % n_colours}", label, shape))
    return entries


@dataclass(frozen=True)
class ClusterColours:
    """Colours of a run's clusters, the same in all pictures.

    Current clusters have colours of their own if there are enough. Split clusters are grey, the
    root is the darkest.
    """

    run: Run

    @cached_property
    def leaves(self) -> list[int]:
        """The current clusters that have members, in the order of the tree."""
        return [leaf.id for leaf in queries.leaves_in_tree_order(self.run.tree) if leaf.members]

    @property
    def crowded(self) -> bool:
        """Whether the run has more clusters than there are colours."""
        return len(self.leaves) > len(style.CLUSTERS)

    @cached_property
    def _entries(self) -> dict[int, LegendEntry]:
        return (
            {}
            if self.crowded
            else dict(zip(self.leaves, series([""] * len(self.leaves)), strict=True))
        )

    def of(self, node: int) -> str:
        """Return the colour of a node."""
        if node in self._entries:
            return self._entries[node].colour
        if node in self.leaves:
            return "@accent"
        return "@ink" if node == 0 else "@muted"

    def dash(self, node: int) -> Dash:
        """Return the dashes of a node's lines."""
        return self._entries[node].dash if node in self._entries else "solid"

    def current(self, shape: str = "") -> list[LegendEntry]:
        """Return the legend of the current clusters, in a picture of lines or of another shape."""
        if self.crowded:
            return [LegendEntry("@accent", count(len(self.leaves), "cluster"), shape or "line")]
        size = {node.id: count(len(node.members), "client") for node in self.run.tree.nodes}
        return [
            LegendEntry(entry.colour, f"cluster {leaf} ({size[leaf]})", shape or entry.shape)
            for leaf, entry in self._entries.items()
        ]

    def legend(self) -> list[LegendEntry]:
        """Return the legend of lines, with those of split clusters."""
        entries = self.current()
        nodes = self.run.tree.nodes
        if nodes[0].split_in:
            entries.append(LegendEntry("@ink", "root, until its split"))
        elif nodes[0].split_in == 0 and any(row["cluster"] == 0 for row in self.run.client_rows):
            entries.append(LegendEntry("@ink", "root, for clients in no cluster yet"))
        if any(node.split_in for node in nodes[1:]):
            entries.append(LegendEntry("@muted", "other clusters, until their split"))
        return entries
