"""Which clients' answers were left out or limited, when, and why."""

from __future__ import annotations

import re
from collections import Counter

from fedclade.core import LeftOut, Limited, Retried, SumClipped, SumRejected, SumUnguarded
from fedclade.report.colours import series
from fedclade.report.formats import count
from fedclade.report.page.section import Section, Table
from fedclade.report.picture import Axis, Bars, Panel, Picture, rounds_axis
from fedclade.report.run_view import RunView
from fedclade.runs import events_of

LISTED = 20
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
        Table("By reason", ["reason", "answers"], [[why, str(n)] for why, n in counts.most_common(LISTED)]),
        Table.first("By client", ["client", "answers"], clients, LISTED, "more client"),
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
        Table("Limited, by how", ["what was done", "times"], [[what, str(n)] for what, n in how.most_common(LISTED)]),
        Table.first("Limited, by client", ["client", "times"], clients, LISTED, "more client"),
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
    return [Table.first("Sums", columns, rows, LISTED, "more sum")]


def _kind(why: str) -> str:
    """Return a reason without its numbers, so that alike ones are counted together; a limit, in times, stays."""
    alike = re.sub(r"(?<![\d.])\d[\d.e+]*(?![\d.e+]| times)", "#", why)
    return re.sub(r"^(norm|norm of its buffers) #, (.*?)(, #)?$", r"\1 \2", alike)
