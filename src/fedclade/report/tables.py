"""Tables and the parameter tree of a run, for the terminal.

All results are `rich` renderables: coloured in a terminal, plain text anywhere else.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement, measure_renderables
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fedclade.core import (
    DROPPED_OUT,
    TOO_LATE,
    Check,
    Checked,
    Clustered,
    ClusterSplit,
    Disconnected,
    FedcladeError,
    LeftOut,
    Limited,
    Node,
    ParameterTree,
    Reconnected,
    Refused,
    Regrouped,
    Rejected,
    SumClipped,
    SumRejected,
    SumUnguarded,
    Tested,
    Withheld,
)
from fedclade.report import queries, run_view
from fedclade.report.figures import save_figures
from fedclade.report.formats import count, duration, number, percent, shortened, traffic
from fedclade.report.run_view import Outcome
from fedclade.report.score import Score
from fedclade.runs import (
    ADVICE,
    Newcomers,
    NewScores,
    Run,
    diverged_clients,
    events_of,
    score_columns,
)
from fedclade.tasks import RIGHT

HEADING_WIDTH = 10
"""Number of characters beyond which headings of tables are broken at spaces."""


UNLIMITED = 100_000
"""Number of characters in a line that no table fills."""


class FittedTable(Table):
    """Table that breaks no number, however narrow the terminal is.

    ``rich`` narrows the columns of a table that is wider than the terminal, and breaks numbers over
    lines. This table is instead split into several tables below each other if its columns do not
    fit side by side. Each of them begins with the first column, which names the rows.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, as several tables if it is wider than the terminal."""
        room = options.max_width
        if self.width is not None:
            room = self.width
        unlimited = options.update_width(UNLIMITED)
        if Measurement.get(console, unlimited, self).maximum <= room:
            yield from super().__rich_console__(console, options)
            return
        measured = [
            measure_renderables(console, unlimited, [column.header, column.footer, *column.cells])
            for column in self.columns
        ]
        needed: list[int] = []
        for i, (column, cells) in enumerate(zip(self.columns, measured, strict=True)):
            width = cells.maximum if column.no_wrap else cells.minimum
            if column.justify == "left":  # names and sentences, which may be broken
                width = min(width, room // 3 if i else room // 2)
            needed.append(width)
        groups = self._group_columns(needed, room)
        for place, group in enumerate(groups):
            widths = {i: needed[i] for i in group}
            spare = room - self._total(list(widths.values()))
            for i in group:
                more = min(max(0, spare), max(0, measured[i].maximum - widths[i]))
                widths[i] += more
                spare -= more
            part = self._take_columns(widths)
            part.title = self.title if place == 0 else None
            part.caption = self.caption if place == len(groups) - 1 else None
            yield from Table.__rich_console__(part, console, options)

    def _total(self, widths: Sequence[int]) -> int:
        """Return the largest width of a table with columns of these widths, gaps and edges."""
        # Between two columns: padding at both sides, of which rich may leave one out, and a line.
        return sum(widths) + 3 * (len(widths) - 1) + 2

    def _group_columns(self, needed: Sequence[int], room: int) -> list[list[int]]:
        """Return the columns of each table, as places; each table begins with the first column."""
        groups = [[0]]
        for i in range(1, len(needed)):
            widths = [needed[j] for j in (*groups[-1], i)]
            if len(groups[-1]) > 1 and self._total(widths) > room:
                groups.append([0])
            groups[-1].append(i)
        return groups

    def _take_columns(self, widths: Mapping[int, int]) -> Table:
        """Return a table with some of the columns, by place, each with the given width."""
        part = copy(self)
        part.columns = []
        part.rows = []
        cells: list[list[RenderableType]] = []
        for i, width in widths.items():
            column = self.columns[i]
            part.add_column(
                column.header,
                column.footer,
                justify=column.justify,
                no_wrap=column.no_wrap,
                overflow=column.overflow,
                width=width,
            )
            cells.append(list(column.cells))
        for row, line in zip(self.rows, zip(*cells, strict=True), strict=True):
            part.add_row(*line, style=row.style, end_section=row.end_section)
        return part


def new_table(title: str, **changes: Any) -> FittedTable:
    """Return an empty table in the common style; ``changes`` are arguments of ``rich.Table``."""
    look: dict[str, Any] = {
        "box": box.SIMPLE_HEAD,
        "header_style": "bold cyan",
        "pad_edge": False,
        "title_justify": "left",
        "caption_justify": "left",
    }
    look.update(changes)
    return FittedTable(title=Text(title, style="bold") if title else None, **look)


def wrap_heading(name: str, width: int = HEADING_WIDTH) -> str:
    """Break a heading at spaces into lines of at most ``width`` characters."""
    return fill(name, width, break_long_words=False)


# Decisions about clusters: splits and their criteria, steps of hierarchical clustering, checks.

CRITERIA = {
    "mean_norm": "mean norm",
    "max_norm": "max norm",
    "alpha_cross_max": "α cross max",
    "gamma_bound": "γ bound",
}
"""Headings of the numbers that decide a split by CFL's thresholds."""

TEST_CRITERIA = {"p_value": "p-value", "gain": "gain"}
"""Headings of the numbers that decide a split by a statistical test."""

CHECK_COLUMNS = (
    "round",
    "clusters",
    "p-value",
    "significance level",
    "e-value",
    "test",
    "level left",
    "smallest group",
    "gain per client",
    "gain of current clusters",
    "median γ",
    "stable groups",
)
"""Headings of the table of checks."""

MAIN_CHECK_COLUMNS = ("round", "clusters", "p-value", "significance level", "smallest group")
"""Headings of the columns that fit into a terminal of 80 characters."""


def decision_tables(run: Run) -> list[Table]:
    """Return the tables of a run's decisions about clusters: splits and checks.

    A table without rows is left out.
    """
    tables: list[Table] = []
    if events_of(run.events, ClusterSplit, Rejected):
        tables.append(event_table(run))
    if events_of(run.events, Tested, Checked, Regrouped):
        tables.append(check_table(run))
    return tables


def event_table(run: Run) -> Table:
    """Return the table of a run's splits with their criteria (CFL eqs. 25, 32, 33 and 39)."""
    table = new_table("Splits", collapse_padding=True)
    splits = events_of(run.events, ClusterSplit)
    is_tested = any(split.p_value is not None for _, split in splits)
    criteria = TEST_CRITERIA if is_tested else CRITERIA
    for column in ("round", "cluster"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("children", "sizes"):
        table.add_column(column, justify="left", no_wrap=True)
    for column in criteria.values():
        table.add_column(column, justify="right", no_wrap=True)
    for round_number, split in splits:
        cells = [str(round_number), str(split.node)]
        cells.append(" + ".join(str(child) for child in split.children))
        cells.append(cluster_sizes(split))
        # Similarities of very many clients are not stored, so their criteria can be missing.
        cells += [criterion_text((key, getattr(split, key)))[1] for key in criteria]
        table.add_row(*cells)
    table.caption = "\n".join(_list_remarks_on_splits(run)) or None
    return table


def _list_remarks_on_splits(run: Run) -> list[str]:
    """Return the lines below the table of splits: clustering steps and rejected bi-partitions."""
    remarks: list[str] = []
    if not events_of(run.events, ClusterSplit):
        remarks.append("No cluster was split.")
    for round_number, step in events_of(run.events, Clustered):
        remarks.append(_describe_clustering(round_number, step))
    rejected = events_of(run.events, Rejected)
    if rejected:
        round_number, last = rejected[-1]
        remarks.append(
            f"{count(len(rejected), 'bi-partition')} rejected, the last in round {round_number}: "
            f"{escape(last.because)}"
        )
    return remarks


def check_table(run: Run) -> Table:
    """Return the table of a run's checks of its clusters, with the result and decision of each.

    A check is a statistical test of the clusters, in replicated clustering or in CFL with a test.
    The table has the main columns only, so that it fits into a terminal; the page of the report has
    all of them (:data:`CHECK_COLUMNS`).
    """
    table = new_table("Checks", collapse_padding=True)
    for column in MAIN_CHECK_COLUMNS:
        heading = wrap_heading(column)
        if column == "clusters":
            table.add_column(heading, justify="left")
        else:
            table.add_column(heading, justify="right", no_wrap=True)
    places = [CHECK_COLUMNS.index(column) for column in MAIN_CHECK_COLUMNS]
    for row in check_rows(events_of(run.events, Tested, Checked, Regrouped)):
        table.add_row(*(row[place] for place in places))
    table.caption = (
        "A check accepts new clusters only if its p-value is at most its significance level. The "
        "report page has more columns, and explains them."
    )
    return table


UNIT_OF_GAIN = (
    "This gain is about updates, not about scores: the mean squared error of a client’s update that "
    "the clusters’ means avoid, with updates of length 1; 0 is one cluster for all."
)
"""Sentence that explains in captions what the gain of clusters in a check is."""


SMALLEST_GROUP_NOTE = (
    "A group with fewer clients than the smallest group could not have been found by this check "
    "alone, however much it differs from all other clients. Each of the first tests has a "
    "significance level of its own. All later tests share one level: their p-value is the inverse "
    "of the running sum of their e-values. In parentheses after the number of stable groups is their "
    "stability, or the stability of the clusters if no groups are stable: 1 if other examples of the "
    "same clients would give the same groups, 0 if they would agree by chance only."
)
"""Sentences that explain in captions the smallest group, levels, and stable groups of checks."""


def check_rows(checks: Sequence[tuple[int, Check]]) -> list[list[str]]:
    """Return the rows of a table of checks; consecutive checks with equal results share a row.

    Parameters
    ----------
    checks
        Checks with their rounds.
    """
    rows: list[list[str]] = []
    for cells, equal in groupby(checks, key=lambda entry: _check_cells(entry[1])):
        rounds = [round_number for round_number, _ in equal]
        if len(rounds) == 1:
            rows.append([str(rounds[0]), *cells])
        else:
            rows.append([f"{rounds[0]}–{rounds[-1]}, {len(rounds)} ×", *cells])
    return rows


def _check_cells(check: Check) -> list[str]:
    """Return the cells of a check's row, without the round."""
    if check.gamma is None:
        gamma = "∞"
    else:
        gamma = number(check.gamma)
    return [
        clusters_text(check),
        f"{check.p_value:.2g}",
        f"{check.level:.2g}",
        _write_if_known(check.e_value),
        "" if check.tests is None else str(check.tests),
        _write_if_known(check.level_left),
        _describe_smallest_group(check),
        f"{check.gain:.2g}",
        f"{check.gain_before:.2g}",
        gamma,
        _describe_stability(check),
    ]


def _write_if_known(value: float | None) -> str:
    """Return a number as text with two significant digits; empty for None."""
    if value is None:
        return ""
    return f"{value:.2g}"


def _describe_smallest_group(check: Check) -> str:
    """Return the size of the smallest group that a check could find, as text.

    The text is "none" if the check could find no group, and empty if the size is unknown.
    """
    if check.smallest_group is None:
        return ""
    if check.smallest_group == 0:
        return "none"
    return str(check.smallest_group)


def _describe_stability(check: Check) -> str:
    """Return the number of stable groups of a check, with their stability, as text.

    The text is empty if the stability of the clusters is unknown.
    """
    if check.stability is None:
        return ""
    groups = len(check.stable_groups or ()) or "none"
    return f"{groups} ({check.stability:.2f})"


def clusters_text(check: Check) -> str:
    """Return the sizes of the clusters that a check found, and the decision about them."""
    if isinstance(check, Regrouped):
        decision = "changed to"
    elif isinstance(check, Tested):
        decision = "found"
    else:
        decision = "unchanged"
    where = ""
    if check.node:
        where = f" in cluster {check.node}"
    return f"{decision} {cluster_sizes(check)}{where}"


def cluster_sizes(event: ClusterSplit | Check, limit: int = 12) -> str:
    """Return the sizes of an event's clusters as text; at most ``limit`` clusters are listed."""
    sizes = [str(len(cluster)) for cluster in event.clusters[:limit]]
    n_hidden = len(event.clusters) - limit
    if n_hidden > 0:
        sizes.append(f"{n_hidden} more")
    return " + ".join(sizes)


def criterion_text(criterion: tuple[str, float]) -> tuple[str, str]:
    """Convert a number that decided a split, given as key and value, to a label and a text."""
    key, value = criterion
    if key == "p_value":
        return "p-value", f"{value:.2g}"
    name = key.removesuffix("_value").replace("_", " ")
    return CRITERIA.get(key, name), number(value)


def _describe_clustering(round_number: int, step: Clustered) -> str:
    """Describe the result of a step of hierarchical clustering in one line."""
    n_clients = sum(step.sizes)
    text = f"Round {round_number}: {count(len(step.sizes), 'cluster')} by {step.metric} distance"
    text += f" and {step.linkage} linkage"
    if len(step.clients) < n_clients:
        text += f" of {len(step.clients):,} clients drawn from {n_clients:,}"
    if step.threshold is None:
        text += ", not cut"
    else:
        text += f", cut at {number(step.threshold)}"
    return escape(text)


# Newcomers: the assigned cluster of each, and the scores of four models.


def new_scores_table(scores: NewScores, run: Run) -> Table:
    """Return the table of scores of a run's models on new data, with means in the footer.

    Parameters
    ----------
    scores
        Result of :func:`fedclade.evaluate`.
    run
        The run.
    """
    table = new_table("New data", show_footer=True)
    named = {metric: Score.named(metric, run.summary) for metric in scores.metrics}
    summary = scores.summary
    table.add_column("client", footer="mean", no_wrap=True)
    table.add_column("model")
    table.add_column("rows", justify="right", footer=str(sum(r["examples"] for r in scores.rows)))
    for metric, score in named.items():
        footer = score.text(summary[metric]["mean"])
        table.add_column(escape(score.label), justify="right", footer=footer)
    table.add_column("loss", justify="right")
    for row in scores.rows:
        model = f"node {row['node']}"
        if row["own"]:
            model = "its own"
        cells = [score.text(row[metric]) for metric, score in named.items()]
        name = escape(str(row["name"]))
        table.add_row(name, model, str(row["examples"]), *cells, number(row["loss"]))
    return table


def newcomer_table(newcomers: Newcomers, run: Run) -> Table:
    """Return the table of newcomers to a run, with means in the footer.

    Parameters
    ----------
    newcomers
        Result of assigning the newcomers to clusters of the run.
    run
        The run.
    """
    table = new_table("Newcomers", show_footer=True, collapse_padding=True)
    summary = newcomers.summary
    score = Score.named(newcomers.metric, run.summary)
    columns = score_columns(score.name)
    measure = next((row["by"] for row in newcomers.rows if row["by"]), "similarity")
    right = summary[RIGHT]

    table.add_column("client", footer="mean", no_wrap=True)
    footer = ""
    if right is not None:
        footer = f"assigned correctly {number(right)}"
    table.add_column("path in tree", footer=footer)
    for name in (f"{measure} to chosen child", f"{measure} to other child", "smallest margin"):
        table.add_column(escape(wrap_heading(name)), justify="right")
    models = (
        f"{score.label} of assigned model",
        "of root model",
        "trained alone",
        "assigned and fine-tuned",
    )
    for name, column in zip(models, columns, strict=True):
        heading = escape(wrap_heading(name))
        footer = score.text(summary[column])
        table.add_column(heading, justify="right", no_wrap=True, footer=footer)

    for row in newcomers.rows:
        cells = [score.text(row[column]) for column in columns]
        path = [escape(row["name"]), _describe_path(row)]
        similarities = [_join_numbers(row["scores"]), _join_numbers(row["others"])]
        table.add_row(*path, *similarities, number(row["margin"]), *cells)
    table.caption = "\n".join(_list_remarks_on_newcomers(summary))
    return table


def _list_remarks_on_newcomers(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table of newcomers, which explain its columns."""
    rounds = count(summary["rounds_alone"], "round")
    total = summary["newcomers"]
    remarks = [
        f"trained alone: for {rounds} on the client's own data, as many as the run had; "
        "assigned and fine-tuned: the assigned model after one epoch on its data"
    ]
    if without := summary["without_score"]:
        have = "has" if without == 1 else "have"
        remarks.append(
            f"{without} of {count(total, 'newcomer')} {have} no score: undefined for their test "
            "data, and are left out of the means"
        )
    if misfits := summary["fit_nowhere"]:
        reached = "the leaf that they reached"
        if summary["only_fitting"]:
            reached = "the deepest node that fits"
        remarks.append(
            f"{count(misfits, 'newcomer')} of {total} fit no cluster, and got the model of "
            f"{reached}"
        )
    return remarks


def _describe_path(row: Mapping[str, Any]) -> Text:
    """Return a newcomer's path from the root to its assigned node in the parameter tree.

    The text states if the newcomer fits no cluster, or if the clients of its assigned cluster have
    another true cluster.
    """
    text = Text(" > ".join(str(node) for node in row["path"]))
    if not row["fits"]:
        text.append(" fits no cluster", style="bold yellow")
    if row["right"] is False:
        text.append(" wrong cluster", style="bold red")
    return text


def _join_numbers(values: Sequence[float | None]) -> str:
    """Return numbers as text, separated by spaces; a dash if there are no numbers."""
    if not values:
        return number(None)
    return " ".join(number(value) for value in values)


# The summary of a run, its clusters and its tree.

MAX_CLUSTERS = 40
"""Largest number of clusters that a table lists; further clusters are only counted."""

QUANTILES = {
    "min": "min",
    "p10": "p10",
    "median": "p50",
    "p90": "p90",
    "worst tenth": "worst10_mean",
}
"""Keys of quantiles in ``summary.json``, by their names in the summary of a run."""

MAX_DEPTH = 12
"""Number of levels of the tree that are shown: deeper levels would leave no room for text."""


def run_table(run: Run) -> Table:
    """Return the summary of a run as a table for the terminal, with one fact per line."""
    table = new_table(queries.heading(run), show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in facts(run):
        table.add_row(name, escape(value))
    return table


def cluster_table(run: Run) -> Table:
    """Return a run's table of current clusters: members, scores, and norms of the last updates."""
    outcome = Outcome.of(run)
    norms = {row["node"]: row for row in run.cluster_rows}
    table = new_table("Clusters")
    for column in ("cluster", "size", outcome.score.label, "mean norm", "max norm"):
        table.add_column(column, justify="right", no_wrap=True)
    if outcome.truth is not None:
        table.add_column("true clusters")
    table.add_column("clients")
    leaves = queries.leaves_in_tree_order(run.tree)
    for leaf in leaves[:MAX_CLUSTERS]:
        last = norms.get(leaf.id, {})
        mean_score = outcome.mean_score(leaf.members)
        cells = [str(leaf.id), str(len(leaf.members)), outcome.score.text(mean_score)]
        cells += [number(last.get("mean_norm")), number(last.get("max_norm"))]
        if outcome.truth is not None:
            cells.append(_write_composition(leaf.members, outcome.truth))
        table.add_row(*cells, escape(_list_members(leaf, outcome)))
    if len(leaves) > MAX_CLUSTERS:
        table.caption = f"and {count(len(leaves) - MAX_CLUSTERS, 'more cluster')}"
    return table


def tree_view(tree: ParameterTree, run: Run | None = None) -> Tree:
    """Return a parameter tree, from the root to the current clusters, for the terminal.

    Parameters
    ----------
    tree
        Parameter tree of a finished run or of a run in progress.
    run
        Source of the clients' names, the clusters' scores and, if known, the true clusters.
        Without it, the view contains only data of the tree.
    """
    if run is None:
        last_round = None
        outcome = None
    else:
        last_round = run.model_round
        outcome = Outcome.of(run)
    root = tree.nodes[0]
    view = Tree(_describe_node(root, tree, last_round, outcome), guide_style="dim")
    # No recursion: a tree can be deeper than Python's recursion limit.
    pending = [(root, view, 0)]
    while pending:
        node, branch, depth = pending.pop()
        children = tree.children(node.id)
        n_listed = MAX_CLUSTERS if depth < MAX_DEPTH else 0
        for child in children[:n_listed]:
            text = _describe_node(child, tree, last_round, outcome)
            pending.append((child, branch.add(text), depth + 1))
        unlisted: set[int] = set()
        for child in children[n_listed:]:
            unlisted.update(tree.leaf_of[client] for client in child.members)
        if unlisted:
            branch.add(Text(f"and {count(len(unlisted), 'more cluster')}", style="dim"))
    return view


def facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the lines of a run's summary as pairs of name and value.

    The name is empty for a line that continues the line before.
    """
    summary = run.summary
    yield "model", f"{summary['model']}, {count(summary['rounds'], 'round')} on {summary['device']}"
    if fallback := summary.get("engine_fallback"):
        yield "engine", fallback
    for warning in summary.get("warnings", ()):
        yield "warning", warning
    if progress := summary.get("unfinished"):
        yield "unfinished", f"state after round {progress['round']} of {progress['of']}"
    if stopped := summary.get("stopped"):
        planned = run.config.get("rounds")
        yield "stopped", f"after round {stopped['round']} of {planned}: {stopped['why']}"
    if personal := queries.personal_part(run):
        names = shortened(personal.names)
        yield "personal", f"{names}: {personal.numbers} of each client's model stay on the client"
    yield from _score_facts(summary)
    yield from _chosen_round_facts(summary)
    yield from _cluster_facts(summary)
    yield from _adversary_facts(summary)
    if own := summary.get("own_models"):
        yield "own models", f"evaluated for {own} of {count(summary['clients'], 'client')}"
    if served := summary.get("served"):
        kinds = ", ".join(f"{kind} {clients:,}" for kind, clients in served.items())
        noun = "client" if list(served.values())[-1] == 1 else "clients"
        yield "served", f"{kinds} {noun}"
    yield from _target_facts(summary)
    yield from _connection_facts(run)
    yield from _reply_facts(run)
    if not run.has_diverged:
        yield from _divergence_facts(run)
    yield from _sum_facts(run)
    if privacy := summary.get("privacy"):
        yield "privacy", _describe_privacy(**privacy)
    if withheld := sum(event.clusters for _, event in events_of(run.events, Withheld)):
        least = summary["clusters"].get("min_size", 1)
        clusters = count(withheld, "cluster")
        yield "withheld", f"{clusters} of fewer than {least} members, merged into others"
    yield "traffic", f"{traffic(summary['bytes_up'])} up, {traffic(summary['bytes_down'])} down"
    if steps := summary.get("steps"):
        yield "training", _describe_steps(**steps)
    seconds = summary["seconds"]
    phases = [f"{phase} {duration(seconds[phase])}" for phase in ("train", "evaluate", "server")]
    total = duration(seconds["total"])
    if queries.waits_for_nodes(run):
        total += " in rounds"
    yield "time", f"{total}: {', '.join(phases)}"


def _score_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield summary lines with mean, standard deviation and quantiles of each metric."""
    for score in Score.all_of(summary):
        spread = summary[score.name]
        scored = score.clients(summary)
        if spread["mean"] is None:
            reason = "no client was evaluated"
            if scored.without:
                reason = f"undefined for the test data of {count(scored.without, 'client')}"
            yield score.label, f"no score: {reason}"
            continue
        mean = score.text(spread["mean"])
        std = score.text(spread["std"])
        yield score.label, f"mean {mean}, std {std} over {scored.of_clients}"
        quantiles = [f"{name} {score.text(spread[key])}" for name, key in QUANTILES.items()]
        yield "", ", ".join(quantiles)


def _chosen_round_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield summary lines about the round that is best on validation data, if there is any."""
    chosen = summary.get("chosen")
    if not chosen:
        return
    score = Score.named(chosen["metric"], summary)
    validation = score.text(score.of_chosen(summary, "validation"))
    yield (
        "chosen",
        f"round {chosen['round']}, best on validation data: {score.label} {validation} on them",
    )
    tested = [
        f"{each.label} {each.text(each.of_chosen(summary))}" for each in Score.all_of(summary)
    ]
    yield "", f"on test data {', '.join(tested)}"
    if last := summary.get("last"):
        text = score.text(last["test"].get(score.name))
        yield (
            "",
            f"its models are stored; the last round, {last['round']}, had {score.label} {text}",
        )


def _cluster_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield summary lines about the clusters: number, sizes, and agreement with the true clusters.

    For a run that diverged, the lines instead report the number of diverged clients.
    """
    if diverged := summary.get("diverged"):
        clients = f"{diverged['clients']:,} of {count(diverged['of'], 'client')}"
        yield "diverged", f"{clients}, from round {diverged['round']} on; no clusters are shown"
        yield "", f"the models are of no use: {ADVICE}"
        return
    clusters = summary["clusters"]
    if clusters["true"] is None:
        known = ""
    else:
        known = f", {clusters['true']} true"
    sizes = shortened([str(size) for size in clusters["sizes"]])
    yield "clusters", f"{clusters['found']} found{known}; sizes {sizes}"
    if sentence := queries.describe_stable_groups(clusters):
        yield "", sentence
    if clusters["ari"] is None:
        return
    yield "recovery", f"ARI {number(clusters['ari'])}, NMI {number(clusters['nmi'])}"
    n_clustered = sum(clusters["sizes"])
    ari_clustered = clusters.get("ari_assigned")
    if n_clustered < summary["clients"] and ari_clustered is not None:
        yield "", f"ARI {number(ari_clustered)} of the {count(n_clustered, 'client')} in a cluster"


def _reply_facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield summary lines with the numbers of clients' replies that were left out or limited.

    An update is limited if it was scaled down or has a smaller weight than the client claims.
    """
    reasons: list[str] = []
    for _, event in events_of(run.events, LeftOut):
        reasons.extend(event.clients.values())
    if reasons:
        absent = sum(reason in (DROPPED_OUT, TOO_LATE) for reason in reasons)
        invalid = len(reasons) - absent
        replies = count(len(reasons), "reply")
        yield "left out", f"{replies}: {absent:,} absent, {invalid:,} invalid"
    limited: list[int] = []
    for _, event in events_of(run.events, Limited):
        limited.extend(event.clients)
    if limited:
        yield "limited", f"{count(len(limited), 'reply')} of {count(len(set(limited)), 'client')}"


def _divergence_facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield a summary line about clients whose training diverged; nothing if no client's did."""
    first_rounds = diverged_clients(run.events)
    if first_rounds:
        clients = count(len(first_rounds), "client")
        yield "diverged", f"loss of {clients}, from round {min(first_rounds.values())} on"


def _sum_facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield summary lines about sums of updates that were rejected, clipped or unguarded.

    A sum is unguarded if the server has too few sums of a cluster to detect an outlier, so that one
    malicious client could change the mean in any direction. Only runs with secure aggregation have
    sums of updates.
    """
    rejected = events_of(run.events, SumRejected)
    if rejected:
        yield "sums rejected", f"{len(rejected):,}; the models of their clusters were not changed"
    clipped = events_of(run.events, SumClipped)
    if clipped:
        updates = sum(event.clipped for _, event in clipped)
        yield (
            "updates clipped",
            f"{updates:,} in {count(len(clipped), 'sum')}, by network.secure_norm",
        )
    unguarded = events_of(run.events, SumUnguarded)
    if unguarded:
        first_round = unguarded[0][0]
        yield (
            "sums unguarded",
            f"from round {first_round} on, a single client can determine the mean of a cluster",
        )


def _adversary_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield summary lines about adversaries, with the scores of honest clients."""
    adversary = summary.get("adversary")
    if adversary is None:
        return
    score = Score.all_of(summary)[0]
    scores = adversary["scores"][score.name]
    kinds = [adversary["kind"]] if adversary["kind"] else []
    if lies := adversary.get("lies"):
        kinds.append(f"false {', '.join(lies)}")
    yield (
        "adversaries",
        f"{len(adversary['ids']):,} of {count(summary['clients'], 'client')}, {', '.join(kinds)}; "
        f"honest clients: {score.label} {score.text(scores['honest'])}, "
        f"worst tenth {score.text(scores['honest_worst10'])}",
    )
    clusters = adversary["clusters"]
    alone = count(clusters["of_adversaries"], "cluster")
    mixed = count(clusters["adversaries_with_honest"], "adversary")
    text = f"{alone} of adversaries alone, {mixed} in clusters with honest clients"
    if adversary["ari_honest"] is not None:
        text += f"; ARI {number(adversary['ari_honest'])} of honest clients"
    yield "", text
    if adversary["attack_success"] is not None:
        success = percent(adversary["attack_success"])
        yield "", f"backdoor: succeeds with {success} of honest clients' test examples"


def _describe_steps(total: int, of_cohorts: int, ratio: float | None) -> str:
    """Describe the number of training steps in one line, see ``steps`` in ``summary.json``.

    Parameters
    ----------
    total
        Number of training steps that clients were requested to take.
    of_cohorts
        Number of steps if each sampled client had trained once in each round.
    ratio
        ``total`` as a multiple of ``of_cohorts``; None if no client was sampled.
    """
    text = count(total, "step")
    if ratio is None:
        return text
    return f"{text}, {ratio:.2f} × FedAvg's ({of_cohorts:,})"


def _describe_privacy(
    epsilon: float | None,
    delta: float,
    releases: int,
    steps: int | None = None,
    model: str = "local",
    **more: Any,
) -> str:
    """Describe the spent privacy budget in one line.

    Parameters
    ----------
    epsilon, delta
        Spent budget ε, and δ; ε is None if updates were clipped without noise.
    releases
        Number of noisy updates or sums that were released.
    steps
        Number of noisy training steps at example level; None at client level.
    model
        Where noise is added: ``local`` on each client, or ``central`` on the server.
    **more
        Further entries of ``summary["privacy"]``.
    """
    if epsilon is not None:
        spent = f"{_write_epsilon(epsilon)} at δ = {delta:g}"
    elif model == "central":
        spent = "clipped, without noise on everything"
    else:
        spent = "clipped, without noise"
    if steps is not None:
        noisy_steps = count(steps, "noisy step")
        return f"{spent} for each example; {noisy_steps} of the client that spent most"
    if epsilon is not None:
        spent += f", client level, towards {more.get('towards', 'everybody')}"
    if model != "central":
        return f"{spent}; {count(releases, 'update')} of the client that sent most"
    epsilon_public = more.get("epsilon_public")
    if epsilon is not None and epsilon_public not in (None, epsilon):
        spent += (
            f", and {_write_epsilon(epsilon_public)} towards an observer that does not know the "
            "sampled clients"
        )
    return f"{spent}; {count(releases, 'release')}"


def _write_epsilon(epsilon: float) -> str:
    """Return the privacy budget ε as text."""
    if epsilon >= 100:
        return f"ε = {epsilon:,.0f}"
    return f"ε = {epsilon:.3g}"


def _connection_facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield summary lines about connections to nodes of a network: lost, restored and refused."""
    lost = sum(len(event.clients) for _, event in events_of(run.events, Disconnected))
    restored = sum(len(event.clients) for _, event in events_of(run.events, Reconnected))
    if lost or restored:
        yield "connections", f"{lost:,} lost, {restored:,} restored"
    refused: dict[int, str] = {}
    for _, event in events_of(run.events, Refused):
        refused.update(event.nodes)
    if refused:
        node, reason = list(refused.items())[-1]
        yield "refused", f"{count(len(refused), 'node')}, the last {node}: {reason}"


def _target_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the summary line about the target score, if a target is set.

    The line names the metric of the target unless it is the main metric.
    """
    target = summary["target"]
    scores = Score.all_of(summary)
    score = next((score for score in scores if target.get(score.name) is not None), None)
    if score is None:
        return
    words = ["target"]
    if score != scores[0]:
        words.append(score.label)
    words.append(percent(target[score.name], 0) if score.share else f"{target[score.name]:g}")
    share = f"{percent(target['share_of_clients'], 0)} of the clients at the end"
    if target["rounds_to_target"] is None:
        yield " ".join(words), f"not reached by the mean; {share}"
        return
    spent = f"{target['rounds_to_target']} rounds and {traffic(target['bytes_to_target'])}"
    yield " ".join(words), f"reached by the mean after {spent}; {share}"


def _describe_node(
    node: Node, tree: ParameterTree, last_round: int | None, outcome: Outcome | None
) -> Text:
    """Describe a tree node: its id, size, rounds, members and, if it was split, the criteria.

    Parameters
    ----------
    node
        Node of the parameter tree.
    tree
        Parameter tree.
    last_round
        Last round of the run; None if it is unknown.
    outcome
        Names, scores and true clusters of the clients; None if they are unknown.
    """
    is_leaf = not tree.children(node.id)
    text = Text(str(node.id), style="bold green" if is_leaf else "bold")
    last = last_round if node.split_in is None else node.split_in
    parts = [count(len(node.members), "client"), _describe_lifetime(node, last)]
    if node.continued is not None:
        parts.append("its model is trained further")
    members = _list_members(node, outcome)
    if outcome is not None:
        if is_leaf:
            mean_score = outcome.score.text(outcome.mean_score(node.members))
            parts.append(f"{outcome.score.label} {mean_score}")
        if outcome.truth is not None:
            members += _describe_purity(node.members, outcome.truth)
    text.append("  " + " · ".join(parts), style="not bold default")
    if members:
        text.append(f"\n{members}", style="not bold dim default")
    if node.criteria:
        criteria = [" ".join(criterion_text(criterion)) for criterion in node.criteria.items()]
        text.append(f"\nsplit at {', '.join(criteria)}", style="not bold yellow")
    return text


def _describe_lifetime(node: Node, last: int | None) -> str:
    """Return the rounds in which a cluster was trained, as text.

    A cluster is created at the end of the round before its first training. ``last`` is its last
    round; None if it is unknown.
    """
    first = node.born + 1
    if last is None:
        return f"since round {first}"
    if last < first:
        return "not trained yet" if node.born else "never trained"
    if last == first:
        return f"round {first}"
    return f"rounds {first}–{last}"


def _list_members(node: Node, outcome: Outcome | None) -> str:
    """Return the names (without ``outcome`` the ids) of a cluster's members as text."""
    if outcome is None:
        return shortened([str(client) for client in node.members])
    return shortened([outcome.name(client) for client in node.members])


def _describe_purity(members: Sequence[int], truth: Mapping[int, int]) -> str:
    """Describe the true clusters of a cluster's members, in brackets; empty if none is known."""
    composition = run_view.composition(members, truth)
    if not composition:
        return ""
    if len(composition) == 1:
        return f"  (true cluster {composition[0][0]})"
    purity = percent(run_view.purity(members, truth), 0)
    return f"  (true clusters {_write_composition(members, truth)}; purity {purity})"


def _write_composition(members: Sequence[int], truth: Mapping[int, int]) -> str:
    """Return the true clusters of a cluster's members with their sizes: ``2 (5), 0 (1)``."""
    composition = run_view.composition(members, truth)
    return shortened([f"{label} ({n})" for label, n in composition], limit=6)


# Output of finished runs.


@contextmanager
def tolerate_missing_figures(console: Console) -> Generator[None]:
    """Catch any exception while figures are drawn in the ``with`` block, and print a warning."""
    try:
        yield
    except Exception as error:  # whatever the error, the results of the run are already stored
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, FedcladeError | OSError):
            reason = str(error)
        console.print(
            Text.assemble(("cannot draw the figures: ", "yellow"), reason), soft_wrap=True
        )


def add_figures(run: Run, folder: Path, console: Console) -> bool:
    """Draw a run's figures into its folder; if that fails, print the reason and return False."""
    with tolerate_missing_figures(console):
        save_figures(run, folder / "figures")
        return True
    return False


def show_run(run: Run, console: Console) -> None:
    """Print the tables of a run: its summary, its splits or checks, and its parameter tree."""
    console.print(run_table(run))
    if run.has_diverged:
        return
    for table in decision_tables(run):
        console.print(table)
    console.print(tree_view(run.tree, run))
