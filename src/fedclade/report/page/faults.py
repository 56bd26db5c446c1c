"""Which clients' answers were left out or limited, when, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from fedclade.core import Joined, Left, LeftOut, Limited, Retried, SumClipped, SumRejected, SumUnguarded
from fedclade.report.colours import series
from fedclade.report.formats import NONE, count, number, percent, shortened
from fedclade.report.page.section import Section, Table
from fedclade.report.picture import FEW_ROUNDS, Axis, Bars, Dots, Line, Panel, Picture, rounds_axis
from fedclade.report.queries import adversaries, leaves_in_tree_order
from fedclade.report.run_view import RunView
from fedclade.report.score import Score
from fedclade.runs import Row, events_of, score_columns
from fedclade.tasks import OLD_METRIC, RIGHT

# Adversaries of a simulation: how honest clients and they fare, and in which clusters they end.

CLUSTERS_LISTED = 40
"""So many clusters are listed."""


def adversaries_section(view: RunView) -> Section | None:
    """Return scores of honest clients and of adversaries by round, and who is in which cluster; None without any."""
    told = view.run.summary.get("adversary")
    if told is None:
        return None
    clusters = told["clusters"]
    caption = (
        f"Mean test {view.score.label} of honest clients and of {adversaries(len(told['ids']))} {_described(told)}."
        f"{view.score.remark} {count(clusters['of_adversaries'], 'cluster')} without honest clients; "
        f"{adversaries(clusters['adversaries_with_honest'])} in clusters with honest clients."
    )
    if told["ari_honest"] is not None:
        caption += f" ARI of honest clients: {number(told['ari_honest'])}."
    if told["attack_success"] is not None:
        caption += f" The backdoor succeeds with {percent(told['attack_success'])} of their test examples."
    return Section.of("adversaries", caption, _picture(view), [_table(view, frozenset(told["ids"]))])


def _described(told: Mapping[str, Any]) -> str:
    """Return what adversaries do: their kind, and their false statements."""
    words = [f"of kind {told['kind']}"] if told["kind"] else []
    if lies := told.get("lies"):
        words.append(f"with false {', '.join(lies)}")
    return " ".join(words)


def _picture(view: RunView) -> Picture:
    name = view.score.name
    scores = {"honest clients": f"{name}_honest", "adversaries": f"{name}_adversaries"}
    panels = [Panel(_lines(view, scores, view.score.hover()), view.score.axis("mean test"), 2)]
    if success := _lines(view, {"backdoor": "attack_success"}, "%{y:.1%}"):
        panels.append(Panel(success, Axis("success of the backdoor", "share", from_zero=True)))
    return Picture("Adversaries", panels, rounds_axis(view.rounds), 300 if len(panels) == 1 else 440, series([*scores]))


def _lines(view: RunView, columns: dict[str, str], hover: str) -> list[Line]:
    """Return a line for each column of ``metrics.parquet`` that has numbers."""
    lines: list[Line] = []
    for entry, column in zip(series([*columns]), columns.values(), strict=True):
        points = [(row["round"], row[column]) for row in view.run.metric_rows if row.get(column) is not None]
        if points:
            rounds, values = zip(*points, strict=True)
            dots = view.rounds <= FEW_ROUNDS or len(points) == 1
            hint = f"{{name}}, round %{{x}}<br>{hover}"
            lines.append(Line(x=rounds, y=values, colour=entry.colour, name=entry.label, hover=hint, dots=dots))
    return lines


def _table(view: RunView, liars: Collection[int]) -> Table:
    rows: list[list[str]] = []
    for leaf in leaves_in_tree_order(view.run.tree):
        mine = [client for client in leaf.members if client in liars]
        honest = len(leaf.members) - len(mine)
        rows.append([str(leaf.id), f"{honest:,}", f"{len(mine):,}", shortened([view.outcome.name(c) for c in mine])])
    columns = ["cluster", "honest clients", "adversaries", "who they are"]
    return Table.first("Where they end", columns, rows, CLUSTERS_LISTED, "more cluster")


# Newcomers: which came during the run and which left, and what the models of a finished run were
# worth to others.

MODELS = ("the model it got", "the root’s", "its own, trained alone", "the one it got, fine-tuned")
"""What the columns of scores are."""

SYMBOLS: Mapping[str, Literal["circle", "diamond", "square", "cross"]] = {
    **{"dot": "circle", "diamond": "diamond", "box": "square", "cross": "cross"}
}
"""Of each model's points, by the shape of its legend's entry."""

DRAWN = 200
"""So many newcomers are drawn and listed."""

NAMED = 30
"""So many have their names below the picture; of more, each point tells its own."""


def newcomers_section(view: RunView) -> Section | None:
    """Return what became of newcomers; None if there were none."""
    moves = [(at, event) for at, event in events_of(view.run.events, Joined, Left) if event.clients]
    rows = [
        [str(at), event.kind, str(event.node), shortened([str(client) for client in event.clients])]
        for at, event in moves[:DRAWN]
    ]
    tables = [Table("Who came and went", ["round", "", "cluster", "clients"], rows)] if rows else []
    if view.newcomers is not None:
        summary, rows = view.newcomers["summary"], view.newcomers["newcomers"]
        score = Score.named(summary.get("metric", OLD_METRIC), view.run.summary)
        tables = [_newcomers_table(summary, rows, score), *tables]
        return Section.of("newcomers", _caption(summary, score), _newcomers_picture(rows[:DRAWN], score), tables)
    caption = "Clients that joined during the run, or a cluster that they had waited for, and clients that left."
    return Section("newcomers", "Newcomers", caption, tables=tables) if tables else None


def _caption(summary: Row, score: Score) -> str:
    text = f"Test {score.label} of {count(summary['newcomers'], 'newcomer')} with four models. "
    if summary[RIGHT] is not None:
        text += f"{percent(summary[RIGHT], 0)} came into a cluster of their true one. "
    if without := summary.get("without_score", 0):
        have = "has" if without == 1 else "have"
        text += f"{without} of {summary['newcomers']} {have} no score: it is undefined for their test data. "
    if summary["fit_nowhere"]:
        only_fitting = summary.get("only_fitting")
        got = "the deepest model that still fits" if only_fitting else "that of the leaf that they came to"
        text += f"{summary['fit_nowhere']} fit nowhere, and got {got}. "
    return text + (f"The first {DRAWN} are drawn." if summary["newcomers"] > DRAWN else "")


def _newcomers_picture(rows: Sequence[Row], score: Score) -> Picture:
    legend = [replace(entry, shape=shape) for entry, shape in zip(series(MODELS), SYMBOLS, strict=True)]
    dots: list[Dots] = []
    for column, entry in zip(score_columns(score.name), legend, strict=True):
        scored = {place: row for place, row in enumerate(rows, start=1) if row[column] is not None}
        points = Dots(
            x=list(scored),
            y=[row[column] for row in scored.values()],
            texts=[row["name"] for row in scored.values()],
            colour=entry.colour,
            size=9,
            symbol=SYMBOLS[entry.shape],
            name=entry.label,
            hover=f"%{{text}}, {{name}}<br>{score.label} {score.hover()}",
        )
        dots.append(points)
    names = {float(at): row["name"] for at, row in enumerate(rows, 1)} if len(rows) <= NAMED else None
    x_axis = Axis("newcomers", "whole", range=(0, len(rows) + 1), grid=False, ticks=names)
    return Picture("Newcomers", [Panel(dots, score.axis("test"))], x_axis, 340, legend)


def _newcomers_table(summary: Row, rows: Sequence[Row], score: Score) -> Table:
    lines = [
        [
            row["name"],
            " › ".join(str(node) for node in row["path"]) + ("" if row["fits"] else " (fits nowhere)"),
            number(row["margin"]),
            *(score.text(row[column]) for column in score_columns(score.name)),
        ]
        for row in rows[:DRAWN]
    ]
    mean = [score.text(summary[column]) for column in score_columns(score.name)]
    columns = ["client", "path", "margin", "got", "root", "own", "tuned"]
    return Table("Newcomers", columns, [*lines, ["mean", NONE, NONE, *mean]])


FAULTS_LISTED = 20
"""So many clients are listed, the most affected first."""

REASONS = 6
"""So many reasons have a colour of their own."""

OTHER = "other reasons"


def faults_section(view: RunView) -> Section | None:
    """Return answers left out by round and reason, and the clients it happened to most; None if there were none.

    Besides, which clients' updates were limited, and how, and which sums of updates were rejected.
    """
    lost = [
        (at, client, _kind(why))
        for at, event in events_of(view.run.events, LeftOut)
        for client, why in event.clients.items()
    ]
    limited = [*_sum_tables(view), *_limited_tables(view)]
    if not lost and not limited:
        return None
    if not lost:
        caption = "What limits on updates, weights and sums did."
        return Section("faults", "Answers limited", caption, tables=limited)
    retries = sum(event.clients for _, event in events_of(view.run.events, Retried))
    counts = Counter(why for _, _, why in lost)
    kept = [why for why, _ in counts.most_common(REASONS)]
    reasons = kept if len(counts) <= REASONS else [*kept[:-1], OTHER]
    by_round = Counter((number, why if why in reasons else OTHER) for number, _, why in lost)
    rounds = sorted({number for number, _ in by_round})
    legend = series(reasons)
    bars = [
        Bars(
            x=rounds,
            y=[by_round[number, entry.label] for number in rounds],
            colour=entry.colour,
            name=entry.label,
            hover="round %{x}<br>%{y} {name}",
        )
        for entry in legend
    ]
    panel = Panel(bars, Axis("answers left out", "whole", from_zero=True))
    picture = Picture("Answers left out", [panel], rounds_axis(view.rounds), 300, legend)
    caption = f"{count(len(lost), 'answer')} left out, by round and reason."
    caption += f" Absent clients were asked again {retries:,} times." if retries else ""
    per_client = Counter(client for _, client, _ in lost)
    clients = [[view.outcome.name(client), str(n)] for client, n in per_client.most_common()]
    tables = [
        Table("By reason", ["reason", "answers"], [[why, str(n)] for why, n in counts.most_common(FAULTS_LISTED)]),
        Table.first("By client", ["client", "answers"], clients, FAULTS_LISTED, "more client"),
        *limited,
    ]
    return Section.of("faults", caption, picture, tables)


def _limited_tables(view: RunView) -> list[Table]:
    """Return how updates were limited, and those of which clients; nothing if none were."""
    limited = [
        (client, _kind(each))
        for _, event in events_of(view.run.events, Limited)
        for client, what in event.clients.items()
        for each in what.split("; ")
    ]
    if not limited:
        return []
    by_client, how = Counter(client for client, _ in limited), Counter(what for _, what in limited)
    clients = [[view.outcome.name(client), str(n)] for client, n in by_client.most_common()]
    return [
        Table(
            "Limited, by how",
            ["what was done", "times"],
            [[what, str(n)] for what, n in how.most_common(FAULTS_LISTED)],
        ),
        Table.first("Limited, by client", ["client", "times"], clients, FAULTS_LISTED, "more client"),
    ]


def _sum_tables(view: RunView) -> list[Table]:
    """Return which sums of updates were rejected, clipped or unguarded; nothing if none were."""
    rows = [
        [str(at), "rejected", event.query, str(len(event.clients)), event.because]
        for at, event in events_of(view.run.events, SumRejected)
    ]
    rows += [
        [str(at), "unguarded", event.query, str(len(event.clients)), event.because]
        for at, event in events_of(view.run.events, SumUnguarded)
    ]
    rows += [
        [str(at), "clipped", event.query, str(len(event.clients)), f"{event.clipped} updates to norm {event.norm:.3g}"]
        for at, event in events_of(view.run.events, SumClipped)
    ]
    if not rows:
        return []
    columns = ["round", "what", "query", "clients", "why"]
    return [Table.first("Sums", columns, rows, FAULTS_LISTED, "more sum")]


def _kind(why: str) -> str:
    """Return a reason without its numbers, so that alike ones are counted together; a limit, in times, stays."""
    alike = re.sub(r"(?<![\d.])\d[\d.e+]*(?![\d.e+]| times)", "#", why)
    return re.sub(r"^(norm|norm of its buffers) #, (.*?)(, #)?$", r"\1 \2", alike)
