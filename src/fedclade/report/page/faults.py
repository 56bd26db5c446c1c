"""Whose answers were left out, when, and why."""

from __future__ import annotations

import re
from collections import Counter

from fedclade.report import facts
from fedclade.report.formats import count
from fedclade.report.page import plot
from fedclade.report.page.palette import series
from fedclade.report.page.run_view import RunView
from fedclade.report.page.section import Section, Table

LISTED = 20
"""So many clients are listed, the most affected first."""

REASONS = 6
"""So many reasons have a colour of their own."""

OTHER = "other reasons"


def faults_section(subject: RunView) -> Section | None:
    """Return answers left out by round and reason, and the clients it happened to most; None if there were none."""
    lost = [
        (event["round"], client, _kind(why))
        for event in facts.events_of(subject.run, "left_out")
        for client, why in event["clients"].items()
    ]
    retries = sum(event["clients"] for event in facts.events_of(subject.run, "retried"))
    if not lost:
        return None
    counts = Counter(why for _, _, why in lost)
    kept = [why for why, _ in counts.most_common(REASONS)]
    reasons = kept if len(counts) <= REASONS else [*kept[:-1], OTHER]
    by_round = Counter((number, why if why in reasons else OTHER) for number, _, why in lost)
    rounds = sorted({number for number, _ in by_round})
    legend = series(reasons)
    bars = [
        {
            "type": "bar",
            "x": rounds,
            "y": [by_round[number, key.label] for number in rounds],
            "name": plot.escaped(key.label),
            "marker": {"color": key.colour},
            "hovertemplate": f"round %{{x}}<br>%{{y}} {plot.escaped(key.label)}<extra></extra>",
        }
        for key in legend
    ]
    figure = plot.figure(
        bars,
        300,
        barmode="stack",
        xaxis=plot.rounds_axis(subject.rounds),
        yaxis=plot.axis("answers left out", tickformat="d", rangemode="tozero"),
    )
    caption = f"{count(len(lost), 'answer')} left out, by round and reason."
    caption += f" Absent clients were asked again {retries:,} times." if retries else ""
    per_client = Counter(client for _, client, _ in lost)
    who = [[_name(subject, client), str(n)] for client, n in per_client.most_common(LISTED)]
    more = f"{count(len(per_client) - LISTED, 'more client')} not listed." if len(per_client) > LISTED else ""
    tables = [
        Table("By reason", ["reason", "answers"], [[why, str(n)] for why, n in counts.most_common(LISTED)]),
        Table("By client", ["client", "answers"], who, more),
    ]
    return Section("faults", "Answers left out", caption, {"": figure}, legend, tables)


def _kind(why: str) -> str:
    """Return a reason without its numbers, so that alike ones are counted together."""
    return re.sub(r"\d[\d.e+]*", "#", why)


def _name(subject: RunView, client: str) -> str:
    return subject.outcome.name(int(client)) if client.isdecimal() else client
