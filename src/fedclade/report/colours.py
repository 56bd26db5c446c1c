"""Colours of reports by name, such as ``@ink``, and the choice of colours for clusters.

HTML pages have a light and a dark palette; figures in files use the light palette.
"""

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
"""Colours on a light page, by name."""

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
"""Colours on a dark page, by name."""

CONTRAST = 4.0
"""Smallest contrast of a cluster's line on a dark page; WCAG 2.2, criterion 1.4.11, requires 3."""


def palette(*, night: bool) -> dict[str, str]:
    """Return the colours of light or dark pages (``#RRGGBB``) by name.

    The names include the colours of clusters (``c0``, ``c1``, ...) and of true clusters (``t0``,
    ``t1``, ...).
    """
    base = NIGHT if night else DAY
    colours = dict(base)
    for i, colour in enumerate(style.CLUSTERS):
        if night:
            colours[f"c{i}"] = lightened(colour, base["panel"])
        else:
            colours[f"c{i}"] = colour
    for i, colour in enumerate(style.TRUTH):
        colours[f"t{i}"] = colour
    return colours


def lightened(colour: str, ground: str) -> str:
    """Mix a colour with white until its contrast to a dark background is at least ``CONTRAST``.

    >>> lightened("#332288", "#1B1F23"), lightened("#E0A800", "#1B1F23")
    ('#857AB8', '#E0A800')
    """
    for step in range(21):
        mixed = tuple(
            round(channel + (255 - channel) * step / 20) for channel in _split_channels(colour)
        )
        lighter = "#" + "".join(f"{channel:02X}" for channel in mixed)
        if contrast(lighter, ground) >= CONTRAST:
            return lighter
    return "#FFFFFF"


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21 (WCAG 2.2, relative luminance)."""
    low, high = sorted((_compute_luminance(one), _compute_luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _split_channels(colour: str) -> tuple[int, int, int]:
    """Return the red, green and blue channel of a colour ``#RRGGBB``, each from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _compute_luminance(colour: str) -> float:
    """Return the relative luminance of a colour, from 0 for black to 1 for white (WCAG 2.2)."""
    shares = [channel / 255 for channel in _split_channels(colour)]
    red, green, blue = (_linearize_channel(share) for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linearize_channel(share: float) -> float:
    """Return the linear intensity of an sRGB channel in [0, 1] (WCAG 2.2)."""
    if share <= 0.04045:
        return share / 12.92
    return ((share + 0.055) / 1.055) ** 2.4


def truth_colour(cluster: int) -> str:
    """Return the colour name (``@t0``, ``@t1``, ...) of a true cluster, given its number."""
    return f"@t{cluster % len(style.TRUTH)}"


def series(labels: Sequence[str]) -> list[LegendEntry]:
    """Return one legend entry per label, with a colour and a line style for each label.

    The labels take the n colours in ``style.CLUSTERS`` in turn, so a colour is repeated after n
    labels. The dash pattern changes after every n/2 labels, so that two lines of the same colour
    differ in their dash pattern.
    """
    n_colours = len(style.CLUSTERS)
    shapes = list(DASHES)
    entries: list[LegendEntry] = []
    for i, label in enumerate(labels):
        shape = shapes[2 * i // n_colours % len(shapes)]
        entries.append(LegendEntry(f"@c{i % n_colours}", label, shape))
    return entries


@dataclass(frozen=True)
class ClusterColours:
    """Colours of a run's clusters, equal in all pictures of the run.

    Each current cluster (leaf of the parameter tree) has a distinct colour if there are enough
    colours. Clusters that were split are grey, and the root is dark.
    """

    run: Run

    @cached_property
    def leaves(self) -> list[int]:
        """Ids of the current clusters that have members, in the order of the parameter tree."""
        return [leaf.id for leaf in queries.leaves_in_tree_order(self.run.tree) if leaf.members]

    @property
    def crowded(self) -> bool:
        """Whether the run has more current clusters than there are colours."""
        return len(self.leaves) > len(style.CLUSTERS)

    @cached_property
    def _entries(self) -> dict[int, LegendEntry]:
        """Legend entry of each current cluster by node id; empty if there are too few colours."""
        if self.crowded:
            return {}
        return dict(zip(self.leaves, series([""] * len(self.leaves)), strict=True))

    def of(self, node: int) -> str:
        """Return the colour name of a node of the parameter tree."""
        if node in self._entries:
            return self._entries[node].colour
        if node in self.leaves:
            return "@accent"
        return "@ink" if node == 0 else "@muted"

    def dash(self, node: int) -> Dash:
        """Return the dash pattern of the lines of a node of the parameter tree."""
        if node in self._entries:
            return self._entries[node].dash
        return "solid"

    def current(self, shape: str = "") -> list[LegendEntry]:
        """Return one legend entry per current cluster, with its number of clients.

        If there are more clusters than colours, a single entry stands for all clusters.

        Parameters
        ----------
        shape
            Shape of the legend entries, such as ``dot``; by default lines with the clusters'
            dash patterns.
        """
        if self.crowded:
            return [LegendEntry("@accent", count(len(self.leaves), "cluster"), shape or "line")]
        size = {node.id: count(len(node.members), "client") for node in self.run.tree.nodes}
        return [
            LegendEntry(entry.colour, f"cluster {leaf} ({size[leaf]})", shape or entry.shape)
            for leaf, entry in self._entries.items()
        ]

    def legend(self) -> list[LegendEntry]:
        """Return the legend of a picture of lines.

        Its entries are the current clusters, the root until its split, and other clusters that were
        split.
        """
        entries = self.current()
        nodes = self.run.tree.nodes
        if nodes[0].split_in:
            entries.append(LegendEntry("@ink", "root, until its split"))
        elif nodes[0].split_in == 0 and any(row["cluster"] == 0 for row in self.run.client_rows):
            entries.append(LegendEntry("@ink", "root, for clients in no cluster yet"))
        if any(node.split_in for node in nodes[1:]):
            entries.append(LegendEntry("@muted", "other clusters, until their split"))
        return entries
