"""The checks of replicated clustering, or of CFL with its test: what was found on parts of the data, and how sure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from fedclade.core import Check, Checked, ClusterSplit, Regrouped, Tested
from fedclade.report.decisions import CHECK_COLUMNS, check_rows, clusters_text
from fedclade.report.page.section import Section, Table
from fedclade.report.picture import Axis, Dots, LegendEntry, Line, Panel, Picture, rounds_axis
from fedclade.report.run_view import RunView
from fedclade.runs import events_of

Checks: TypeAlias = Sequence[tuple[int, Check]]
"""Checks with their rounds."""

SMALLEST = 1e-6
"""p-values below are drawn here: the axis is logarithmic, and a p-value can be as small as one draw in many."""

LISTED = 60
"""So many checks are listed."""


def checks_section(view: RunView) -> Section | None:
    """Return p-value and gain of every check over the rounds; None for a run without checks."""
    checks = events_of(view.run.events, Tested, Checked, Regrouped)
    if not checks:
        return None
    splits = {(at, split.node) for at, split in events_of(view.run.events, ClusterSplit)}
    changes = [isinstance(check, Regrouped) or (at, check.node) in splits for at, check in checks]
    caption = (
        "Checks of the clusters on updates from parts of each client’s data. Above, the chance that clusters as "
        "good as those found come from nothing, which must fall below the level (line); below, the gain of the "
        f"clusters found (dots) and of those kept until then (rings). After {sum(changes)} of {len(checks)} checks "
        f"{'a cluster was split' if splits else 'the clients were regrouped'} (large dots)."
    )
    table = Table.first("Checks", CHECK_COLUMNS, check_rows(checks), LISTED, "later check")
    return Section.of("checks", caption, _picture(view, checks, changes), [table])


def _picture(view: RunView, checks: Checks, changes: Sequence[bool]) -> Picture:
    rounds, levels = [at for at, _ in checks], [check.level for _, check in checks]
    p_values = _dots(checks, changes, [max(check.p_value, SMALLEST) for _, check in checks], "p %{y:.2g}")
    before = _dots(
        checks, changes, [check.gain_before for _, check in checks], "gain until then %{y:.3g}", "@muted", ring=True
    )
    gains = _dots(checks, changes, [check.gain for _, check in checks], "gain %{y:.3g}")
    p_axis = Axis("p-value", log=True)
    panels = [
        Panel([Line(x=rounds, y=levels, colour="@c1", width=1.5, dots=len(checks) == 1), p_values], p_axis),
        Panel([before, gains], Axis("gain")),
    ]
    legend = [
        LegendEntry("@c0", "clusters found", "dot"),
        LegendEntry("@muted", "clusters until then", "ring"),
        LegendEntry("@c1", "level needed"),
    ]
    return Picture("Checks of the clusters", panels, rounds_axis(view.rounds), 440, legend)


def _dots(
    checks: Checks, changes: Sequence[bool], values: Sequence[float], what: str, colour: str = "@c0", ring: bool = False
) -> Dots:
    return Dots(
        x=[at for at, _ in checks],
        y=values,
        colour=colour,
        ring=ring,
        size=[12 if new else 7 for new in changes],
        texts=[clusters_text(check) for _, check in checks],
        hover=f"round %{{x}}, %{{text}}<br>{what}",
    )
