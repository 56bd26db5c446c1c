"""Page sections on adversaries, newcomers, divergence, and replies left out or limited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from fedclade.core import (
    Diverged,
    Joined,
    Left,
    LeftOut,
    Limited,
    Retried,
    SumClipped,
    SumRejected,
    SumUnguarded,
    generalize_reason,
)
from fedclade.report.colours import series
from fedclade.report.formats import NONE, count, number, percent, shortened
from fedclade.report.page.section import Section, Table
from fedclade.report.picture import FEW_ROUNDS, Axis, Bars, Dots, Line, Panel, Picture, rounds_axis
from fedclade.report.queries import leaves_in_tree_order
from fedclade.report.run_view import RunView
from fedclade.report.score import Score
from fedclade.runs import ADVICE, Row, events_of, score_columns
from fedclade.tasks import OLD_METRIC, RIGHT

# Adversaries of a simulation: scores of adversaries and honest clients, and their clusters.

CLUSTERS_LISTED = 40
"""Largest number of clusters that are listed."""


def adversaries_section(view: RunView) -> Section | None:
    """Return the page section with scores and clusters of adversaries and honest clients.

    None for a run without adversaries.
    """
    adversary = view.run.summary.get("adversary")
    if adversary is None:
        return None
    ids = adversary["ids"]
    clusters = adversary["clusters"]
    mixed = count(clusters["adversaries_with_honest"], "adversary")
    caption = (
        f"Mean test {view.score.label} of honest clients and of {count(len(ids), 'adversary')} "
        f"{_describe_adversary(adversary)}.{view.score.remark} "
        f"{count(clusters['of_adversaries'], 'cluster')} without honest clients; "
        f"{mixed} in clusters with honest clients."
    )
    if adversary["ari_honest"] is not None:
        caption += f" ARI of honest clients: {number(adversary['ari_honest'])}."
    if adversary["attack_success"] is not None:
        success = percent(adversary["attack_success"])
        caption += f" The backdoor succeeds with {success} of their test examples."
    table = _adversary_table(view, frozenset(ids))
    return Section.of("adversaries", caption, _adversary_picture(view), [table])


def _describe_adversary(adversary: Mapping[str, Any]) -> str:
    """Describe an attack: its kind, and which values (such as losses) the adversaries falsify."""
    words: list[str] = []
    if adversary["kind"]:
        words.append(f"of kind {adversary['kind']}")
    if lies := adversary.get("lies"):
        words.append(f"with false {', '.join(lies)}")
    return " ".join(words)


def _adversary_picture(view: RunView) -> Picture:
    """Return a picture of the mean scores of honest clients and adversaries over the rounds.

    If the attack is a backdoor, its success rate is drawn below.
    """
    name = view.score.name
    columns = {"honest clients": f"{name}_honest", "adversaries": f"{name}_adversaries"}
    lines = _draw_lines(view, columns, view.score.hover())
    panels = [Panel(lines, view.score.axis("mean test"), share=2)]
    success = _draw_lines(view, {"backdoor": "attack_success"}, "%{y:.1%}")
    if success:
        panels.append(Panel(success, Axis("success of the backdoor", "share", from_zero=True)))
    height = 440 if success else 300
    legend = series(list(columns))
    return Picture("Adversaries", panels, rounds_axis(view.rounds), height, legend=legend)


def _draw_lines(view: RunView, columns: Mapping[str, str], hover: str) -> list[Line]:
    """Return a line over the rounds for each column of ``metrics.parquet`` that has numbers.

    Parameters
    ----------
    view
        The run.
    columns
        Columns by the labels of their lines.
    hover
        Plotly's template for the text that is shown at the mouse pointer.
    """
    lines: list[Line] = []
    for entry, column in zip(series(list(columns)), columns.values(), strict=True):
        rows = [row for row in view.run.metric_rows if row.get(column) is not None]
        if rows:
            line = Line(
                x=[row["round"] for row in rows],
                y=[row[column] for row in rows],
                colour=entry.colour,
                name=entry.label,
                hover=f"{{name}}, round %{{x}}<br>{hover}",
                dots=view.rounds <= FEW_ROUNDS or len(rows) == 1,
            )
            lines.append(line)
    return lines


def _adversary_table(view: RunView, ids: Collection[int]) -> Table:
    """Return a table of the numbers of honest clients and adversaries in each cluster.

    ``ids`` are the ids of the adversaries.
    """
    rows: list[list[str]] = []
    for leaf in leaves_in_tree_order(view.run.tree):
        names = [view.outcome.name(client) for client in leaf.members if client in ids]
        n_honest = len(leaf.members) - len(names)
        rows.append([str(leaf.id), f"{n_honest:,}", f"{len(names):,}", shortened(names)])
    columns = ["cluster", "honest clients", "adversaries", "names of adversaries"]
    return Table.first(
        "Adversaries by cluster", columns, rows, limit=CLUSTERS_LISTED, noun="more cluster"
    )


# Clients whose training diverged.


def warnings_section(view: RunView) -> Section | None:
    """Return the page section with the warnings about the run's clients; None without warnings."""
    warnings: Sequence[str] = view.run.summary.get("warnings", ())
    if not warnings:
        return None
    return Section("warnings", "Warnings", ". ".join(warnings) + ".")


def divergence_section(view: RunView) -> Section | None:
    """Return the page section with the clients whose training diverged; None if no client's did.

    The training of a client diverges if its loss grows a thousandfold or is no longer a number.
    """
    events = events_of(view.run.events, Diverged)
    if not events:
        return None
    caption = (
        "Clients whose loss on held-out data grew a thousandfold, or is no longer a number: "
        f"training diverged. Advice: {ADVICE}."
    )
    if view.run.has_diverged:
        caption += (
            " With so many diverged clients, neither the models nor the clusters carry information."
        )
    rows: list[list[str]] = []
    for round_number, event in events:
        rows += [[str(round_number), view.outcome.name(client)] for client in event.clients]
    columns = ["round", "client"]
    table = Table.first("Diverged clients", columns, rows, limit=FAULTS_LISTED, noun="more client")
    return Section("diverged", "Diverged", caption, tables=[table])


# Newcomers: clients that joined or left during the run, and the scores of models for new clients.

MODELS = ("assigned model", "root model", "trained alone", "assigned and fine-tuned")
"""Names of the models with which newcomers are evaluated."""

SYMBOLS: Mapping[str, Literal["circle", "diamond", "square", "cross"]] = {
    "dot": "circle",
    "diamond": "diamond",
    "box": "square",
    "cross": "cross",
}
"""Symbol of the points of each model, by the shape of the model's legend entry."""

DRAWN = 200
"""Largest number of newcomers that are drawn and listed."""

NAMED = 30
"""Largest number of newcomers with which their names are written below the picture."""


def newcomers_section(view: RunView) -> Section | None:
    """Return the page section with clients that joined or left the run, and scores of newcomers.

    None if no client joined or left and no newcomers were evaluated.
    """
    tables = _move_tables(view)
    if view.newcomers is not None:
        summary = view.newcomers["summary"]
        rows = view.newcomers["newcomers"]
        score = Score.named(summary.get("metric", OLD_METRIC), view.run.summary)
        caption = _describe_newcomers(summary, score)
        picture = _newcomers_picture(rows[:DRAWN], score)
        tables = [_newcomers_table(summary, rows, score), *tables]
        return Section.of("newcomers", caption, picture, tables)
    if not tables:
        return None
    caption = (
        "Clients that joined the run or were assigned to a cluster later, and clients that left."
    )
    return Section("newcomers", "Newcomers", caption, tables=tables)


def _move_tables(view: RunView) -> list[Table]:
    """Return a table of the clients that joined or left the run; empty if no client did."""
    rows: list[list[str]] = []
    for round_number, event in events_of(view.run.events, Joined, Left):
        if event.clients:
            clients = shortened([str(client) for client in event.clients])
            rows.append([str(round_number), event.kind, str(event.node), clients])
    if not rows:
        return []
    columns = ["round", "event", "cluster", "clients"]
    return [Table("Clients that joined or left", columns, rows[:DRAWN])]


def _describe_newcomers(summary: Row, score: Score) -> str:
    """Return the caption on the evaluated newcomers.

    Parameters
    ----------
    summary
        Summary of the newcomers in ``newcomers.json``.
    score
        Metric of the newcomers' scores.
    """
    total = summary["newcomers"]
    sentences = [f"Test {score.label} of {count(total, 'newcomer')} with four models."]
    if summary[RIGHT] is not None:
        sentences.append(
            f"{percent(summary[RIGHT], 0)} were assigned to clients of the same true cluster."
        )
    if without := summary.get("without_score", 0):
        have = "has" if without == 1 else "have"
        sentences.append(
            f"{without} of {total} {have} no score: it is undefined for their test data."
        )
    if summary["fit_nowhere"]:
        model = "that of the leaf that they reached"
        if summary.get("only_fitting"):
            model = "the deepest model that fits"
        sentences.append(f"{summary['fit_nowhere']} fit no cluster, and got {model}.")
    if total > DRAWN:
        sentences.append(f"The first {DRAWN} are drawn.")
    return " ".join(sentences)


def _newcomers_picture(rows: Sequence[Row], score: Score) -> Picture:
    """Return a picture with a dot for the score of each newcomer with each model."""
    entries = zip(series(MODELS), SYMBOLS, strict=True)
    legend = [replace(entry, shape=shape) for entry, shape in entries]
    marks: list[Dots] = []
    for column, entry in zip(score_columns(score.name), legend, strict=True):
        scored = [(place, row) for place, row in enumerate(rows, 1) if row[column] is not None]
        dots = Dots(
            x=[place for place, _ in scored],
            y=[row[column] for _, row in scored],
            texts=[row["name"] for _, row in scored],
            colour=entry.colour,
            size=9,
            symbol=SYMBOLS[entry.shape],
            name=entry.label,
            hover=f"%{{text}}, {{name}}<br>{score.label} {score.hover()}",
        )
        marks.append(dots)
    names: dict[float, str] | None = None
    if len(rows) <= NAMED:
        names = {float(place): row["name"] for place, row in enumerate(rows, 1)}
    x_axis = Axis("newcomers", "whole", range=(0, len(rows) + 1), grid=False, ticks=names)
    panel = Panel(marks, score.axis("test"))
    return Picture("Newcomers", [panel], x_axis, height=340, legend=legend)


def _newcomers_table(summary: Row, rows: Sequence[Row], score: Score) -> Table:
    """Return a table of newcomers: path in the tree, smallest margin on it, score with each model.

    The margin of a step on the path is the difference between the chosen branch and the second
    best.

    Parameters
    ----------
    summary
        Summary of the newcomers in ``newcomers.json``.
    rows
        Row of each newcomer in ``newcomers.json``.
    score
        Metric of the newcomers' scores.
    """
    score_names = score_columns(score.name)
    lines: list[list[str]] = []
    for row in rows[:DRAWN]:
        path = " › ".join(str(node) for node in row["path"])
        if not row["fits"]:
            path += " (fits no cluster)"
        scores = [score.text(row[column]) for column in score_names]
        lines.append([row["name"], path, number(row["margin"]), *scores])
    means = [score.text(summary[column]) for column in score_names]
    lines.append(["mean", NONE, NONE, *means])
    columns = ["client", "path in tree", "smallest margin", *MODELS]
    return Table("Newcomers", columns, lines)


# Replies that were left out, and updates and sums that were limited.

FAULTS_LISTED = 20
"""Largest number of clients that are listed, the most affected clients first."""

REASONS = 6
"""Largest number of reasons with a distinct colour; further reasons have one common colour."""

OTHER = "other reasons"
"""Label of the bars that count all further reasons."""


def faults_section(view: RunView) -> Section | None:
    """Return the page section on replies and sums that were left out, changed or doubtful.

    The section lists replies that were left out; updates that were scaled down, or have a smaller
    weight than the client claims; and sums that were rejected, clipped or unguarded (too few to
    detect an outlier among them). None for a run without any of these.
    """
    lost: list[tuple[int, int, str]] = []
    for round_number, event in events_of(view.run.events, LeftOut):
        for client, reason in event.clients.items():
            lost.append((round_number, client, generalize_reason(reason)))
    limited = [*_sum_tables(view), *_limited_tables(view)]
    if not lost and not limited:
        return None
    if not lost:
        caption = "Effects of the limits on updates, weights and sums."
        return Section("faults", "Limited replies", caption, tables=limited)
    caption = f"{count(len(lost), 'reply')} left out, by round and reason."
    retries = sum(event.clients for _, event in events_of(view.run.events, Retried))
    if retries:
        caption += f" Absent clients were queried again {retries:,} times."
    by_reason = Counter(reason for _, _, reason in lost)
    by_client = Counter(client for _, client, _ in lost)
    tables = [
        Table("By reason", ["reason", "replies"], _list_counts(by_reason, FAULTS_LISTED)),
        _client_table(view, "By client", "replies", by_client),
        *limited,
    ]
    return Section.of("faults", caption, _faults_picture(view, lost, by_reason), tables)


def _faults_picture(
    view: RunView, lost: Sequence[tuple[int, int, str]], by_reason: Counter[str]
) -> Picture:
    """Return a picture with stacked bars of the replies left out in each round, by reason.

    Parameters
    ----------
    view
        The run.
    lost
        Replies left out: round, client id and reason.
    by_reason
        Number of replies left out for each reason.
    """
    reasons = [reason for reason, _ in by_reason.most_common(REASONS)]
    if len(by_reason) > REASONS:
        reasons[-1] = OTHER
    by_round: Counter[tuple[int, str]] = Counter()
    for round_number, _, reason in lost:
        by_round[round_number, reason if reason in reasons else OTHER] += 1
    rounds = sorted({round_number for round_number, _ in by_round})
    legend = series(reasons)
    marks: list[Bars] = []
    for entry in legend:
        bars = Bars(
            x=rounds,
            y=[by_round[round_number, entry.label] for round_number in rounds],
            colour=entry.colour,
            name=entry.label,
            hover="round %{x}<br>%{y} {name}",
        )
        marks.append(bars)
    panel = Panel(marks, Axis("replies left out", "whole", from_zero=True))
    x_axis = rounds_axis(view.rounds)
    return Picture("Replies left out", [panel], x_axis, height=300, legend=legend)


def _list_counts(counts: Counter[str], limit: int | None = None) -> list[list[str]]:
    """Return table rows of names and counts, the largest count first; at most ``limit`` rows."""
    return [[name, str(n)] for name, n in counts.most_common(limit)]


def _client_table(view: RunView, title: str, noun: str, by_client: Counter[int]) -> Table:
    """Return a table of clients with a count for each client, the largest count first.

    Parameters
    ----------
    view
        The run.
    title
        Title of the table.
    noun
        Heading of the counts.
    by_client
        Count of each client, such as its number of replies left out.
    """
    rows = [[view.outcome.name(client), str(n)] for client, n in by_client.most_common()]
    return Table.first(title, ["client", noun], rows, limit=FAULTS_LISTED, noun="more client")


def _limited_tables(view: RunView) -> list[Table]:
    """Return two tables that count the limited updates; empty if there are none.

    An update is limited if it is scaled down or has a smaller weight than the client claims. One
    table counts by measure, a text that describes the limit, and the other counts by client.
    """
    by_client: Counter[int] = Counter()
    by_measure: Counter[str] = Counter()
    for _, event in events_of(view.run.events, Limited):
        for client, measures in event.clients.items():
            for measure in measures.split("; "):
                by_client[client] += 1
                by_measure[generalize_reason(measure)] += 1
    if not by_client:
        return []
    rows = _list_counts(by_measure, FAULTS_LISTED)
    return [
        Table("Limited updates, by measure", ["measure", "times"], rows),
        _client_table(view, "Limited updates, by client", "times", by_client),
    ]


def _sum_tables(view: RunView) -> list[Table]:
    """Return a table of the sums of updates that were rejected, clipped or unguarded.

    A sum is unguarded if the server has too few sums of a cluster to detect an outlier, so that one
    malicious client could change the mean in any direction. Only runs with secure aggregation have
    sums of updates. The list is empty if there are no such sums.
    """
    rows: list[list[str]] = []
    for round_number, event in events_of(view.run.events, SumRejected):
        n_clients = str(len(event.clients))
        rows.append([str(round_number), "rejected", event.query, n_clients, event.because])
    for round_number, event in events_of(view.run.events, SumUnguarded):
        n_clients = str(len(event.clients))
        rows.append([str(round_number), "unguarded", event.query, n_clients, event.because])
    for round_number, event in events_of(view.run.events, SumClipped):
        n_clients = str(len(event.clients))
        reason = f"{event.clipped} updates to norm {event.norm:.3g}"
        rows.append([str(round_number), "clipped", event.query, n_clients, reason])
    if not rows:
        return []
    columns = ["round", "event", "query", "clients", "details"]
    return [Table.first("Sums", columns, rows, limit=FAULTS_LISTED, noun="more sum")]
