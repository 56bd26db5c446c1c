"""What was decided about clusters in a run, as tables: splits and their criteria, steps of clustering, checks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.markup import escape
from rich.table import Table

from fedclade.core import Check, Checked, Clustered, ClusterSplit, Regrouped, Rejected, Tested
from fedclade.report.formats import count, number
from fedclade.report.terminal import new_table
from fedclade.runs import Run, events_of

CRITERIA = {
    "mean_norm": "mean norm",
    "max_norm": "max norm",
    "alpha_cross_max": "α cross max",
    "gamma_bound": "γ bound",
}
"""The numbers that a split is decided by, and what to call them."""

OF_TESTS = {"p_value": "p", "gain": "gain"}
"""The same where a test decides."""

CHECK_COLUMNS = ("round", "clusters", "p", "needed", "gain", "gain before", "median γ")


def decision_tables(run: Run) -> list[Table]:
    """Return the tables of what was decided in a run about clusters: splits, checks; none where there was nothing."""
    tables = [event_table(run)] if events_of(run.events, ClusterSplit, Rejected) else []
    return [*tables, check_table(run)] if events_of(run.events, Tested, Checked, Regrouped) else tables


def event_table(run: Run) -> Table:
    """Return the splits of a run, and the criteria by which they were decided (CFL eqs. 25, 32, 33 and 39)."""
    splits, table = events_of(run.events, ClusterSplit), new_table("Splits")
    decided_by = OF_TESTS if any(split.p_value is not None for _, split in splits) else CRITERIA
    for column in ("round", "node", "into", "sizes", *decided_by.values()):
        table.add_column(column, justify="left" if column in ("into", "sizes") else "right", no_wrap=True)
    for at, split in splits:
        into = " + ".join(str(child) for child in split.children)
        # Of very many clients no similarities are kept, and their criteria are missing.
        criteria = (criterion_text((key, getattr(split, key)))[1] for key in decided_by)
        table.add_row(str(at), str(split.node), into, cluster_sizes(split), *criteria)
    lines = [] if splits else ["No cluster was split."]
    lines += [_clustering(at, step) for at, step in events_of(run.events, Clustered)]
    if rejected := events_of(run.events, Rejected):
        at, last = rejected[-1]
        lines.append(f"{count(len(rejected), 'bi-partition')} rejected, the last in round {at}: {escape(last.because)}")
    table.caption = "\n".join(lines) or None
    return table


def check_table(run: Run) -> Table:
    """Return the checks of replicated clustering: what was found on parts of the data, and what was made of it."""
    table = new_table("Checks")
    for column in CHECK_COLUMNS:
        table.add_column(column, justify="left" if column == "clusters" else "right", no_wrap=True)
    for row in check_rows(events_of(run.events, Tested, Checked, Regrouped)):
        table.add_row(*row)
    return table


def check_rows(checks: Sequence[tuple[int, Check]]) -> list[list[str]]:
    """Return what a table says of checks with their rounds; those of which the same is said are in one row."""
    alike = groupby(checks, key=lambda each: _check_cells(each[1]))
    rounds = [(cells, [at for at, _ in together]) for cells, together in alike]
    return [[f"{at[0]}–{at[-1]}, {len(at)} ×" if len(at) > 1 else str(at[0]), *cells] for cells, at in rounds]


def _check_cells(check: Check) -> list[str]:
    numbers = [f"{value:.2g}" for value in (check.p_value, check.level, check.gain, check.gain_before)]
    return [clusters_text(check), *numbers, "∞" if check.gamma is None else number(check.gamma)]


def clusters_text(check: Check) -> str:
    """Return the sizes of a check's clusters, and what became of them."""
    word = "now" if isinstance(check, Regrouped) else "found" if isinstance(check, Tested) else "still"
    where = f" in node {check.node}" if check.node else ""
    return f"{word} {cluster_sizes(check)}{where}"


def cluster_sizes(event: ClusterSplit | Check, limit: int = 12) -> str:
    """Return how many clients the clusters of an event have; beyond a limit, only how many more there are."""
    sizes = [str(len(cluster)) for cluster in event.clusters[:limit]]
    more = len(event.clusters) - limit
    return " + ".join([*sizes, f"{more} more"] if more > 0 else sizes)


def criterion_text(criterion: tuple[str, float]) -> tuple[str, str]:
    """Return the name and the text of one number that a split was decided by."""
    key, value = criterion
    name = CRITERIA.get(key, key.removesuffix("_value").replace("_", " "))
    return name, f"{value:.2g}" if key == "p_value" else number(value)


def _clustering(at: int, step: Clustered) -> str:
    """Say what a step of hierarchical clustering found."""
    where = "not cut" if step.threshold is None else f"cut at {number(step.threshold)}"
    found = f"{count(len(step.sizes), 'cluster')} by {step.metric} distance and {step.linkage} linkage"
    if len(step.clients) < sum(step.sizes):
        found += f" of {len(step.clients):,} clients drawn from {sum(step.sizes):,}"
    return escape(f"Round {at}: {found}, {where}")
