"""The checks of replicated clustering (rcfl): what was found on halves of the data, and how sure it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from fedclade.core import Checked, Regrouped
from fedclade.report.decisions import CHECK_COLUMNS, check_cells, cluster_sizes
from fedclade.report.page.section import Section, Table
from fedclade.report.picture import Axis, Dots, LegendEntry, Line, Panel, Picture, rounds_axis
from fedclade.report.run_view import RunView
from fedclade.runs import events_of

Checks: TypeAlias = Sequence[tuple[int, Checked | Regrouped]]
"""Checks with their rounds."""

SMALLEST = 1e-6
"""p-values below are drawn here: the axis is logarithmic, and a p-value can be as small as one draw in many."""

LISTED = 60
"""So many checks are listed."""


def checks_section(view: RunView) -> Section | None:
    """Return p-value and gain of every check over the rounds; None for a run without checks."""
    checks = events_of(view.run.events, Checked, Regrouped)
    if not checks:
        return None
    regrouped = sum(isinstance(check, Regrouped) for _, check in checks)
    caption = (
        "Checks of the clusters on updates from two halves of each client’s data. Above, the chance that clusters as "
        "good as those found come from nothing, which must fall below the level (line); below, the gain of the "
        f"clusters found (dots) and of those kept until then (rings). In {regrouped} of {len(checks)} checks the "
        "clients were regrouped (large dots)."
    )
    rows = [check_cells(at, check) for at, check in checks]
    table = Table.first("Checks", CHECK_COLUMNS, rows, LISTED, "later check")
    return Section.of("checks", caption, _picture(view, checks), [table])


def _picture(view: RunView, checks: Checks) -> Picture:
    rounds, levels = [at for at, _ in checks], [check.level for _, check in checks]
    p_values = _dots(checks, [max(check.p_value, SMALLEST) for _, check in checks], "p %{y:.2g}")
    before = _dots(checks, [check.gain_before for _, check in checks], "gain until then %{y:.3g}", "@muted", ring=True)
    gains = _dots(checks, [check.gain for _, check in checks], "gain %{y:.3g}")
    panels = [
        Panel([Line(x=rounds, y=levels, colour="@c1", width=1.5), p_values], Axis("p-value", log=True)),
        Panel([before, gains], Axis("gain")),
    ]
    legend = [
        LegendEntry("@c0", "clusters found", "dot"),
        LegendEntry("@muted", "clusters until then", "ring"),
        LegendEntry("@c1", "level needed"),
    ]
    return Picture("Checks of the clusters", panels, rounds_axis(view.rounds), 440, legend)


def _dots(checks: Checks, values: Sequence[float], what: str, colour: str = "@c0", ring: bool = False) -> Dots:
    regrouped = [isinstance(check, Regrouped) for _, check in checks]
    made = ["regrouped" if new else "kept" for new in regrouped]
    return Dots(
        x=[at for at, _ in checks],
        y=values,
        colour=colour,
        ring=ring,
        size=[12 if new else 7 for new in regrouped],
        texts=[f"{word}: {cluster_sizes(check)}" for word, (_, check) in zip(made, checks, strict=True)],
        hover=f"round %{{x}}, %{{text}}<br>{what}",
    )
