"""A result in words: tables of Markdown and CSV, and how its numbers are written."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

from fedclade.papers.outcome import Claim, Row, Summary
from fedclade.papers.result import Result
from fedclade.report import NONE, duration
from fedclade.tasks import mean_and_interval

Cells = tuple[Sequence[str], list[Sequence[str]]]
"""Of a table: its columns, and its rows."""

LONGEST = 80
"""Letters of a setting that are shown."""

SHOWN_FIRST = ("model", "clients", "rounds", "samples_per_client", "seeds")
"""Settings whose difference from the paper's is shown in full in the overview; others are named."""


def figure(value: float | None, unit: str = "") -> str:
    """Write a figure of a paper or of ours: per cent to one decimal, all else to three digits, six decimals at most.

    >>> figure(98.456, "%"), figure(0.01234), figure(-2.5, "rounds"), figure(-2e-8), figure(None, "%"), figure(7850)
    ('98.5 %', '0.0123', '−2.5 rounds', '0', '–', '7,850')
    """
    if value is None:
        return NONE
    if unit == "%":
        digits = f"{round(value, 1) + 0.0:.1f}"
    else:
        digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 6) + 0.0:.3g}"
    return f"{digits} {unit}".strip().replace("-", "−")


def ours(row: Row) -> str:
    """Write our figure, with its 95 % interval if there are several seeds.

    >>> ours(Row("x", 98.0, 97.0, seeds=(96.5, 97.5)))
    '97.0 ± 6.4 %'
    """
    half = mean_and_interval(row.seeds)[1] if row.seeds else None
    if half is None:
        return figure(row.ours, row.unit)
    mean, around = (figure(value, row.unit).removesuffix(row.unit).strip() for value in (row.ours, half))
    return f"{mean} ± {around} {row.unit}".strip()


def difference(row: Row) -> str:
    """Write by how much ours is above the paper's, with its sign."""
    if row.paper is None:
        return NONE
    written = figure(row.ours - row.paper, row.unit)
    return written if written.startswith("−") else f"+{written}"


def row_table(rows: Sequence[Row]) -> Cells:
    """Return the cells of rows."""
    return ("what", "paper", "ours", "difference", "verdict"), [
        (row.what, row.told or figure(row.paper, row.unit), ours(row), difference(row), row.verdict or NONE)
        for row in rows
    ]


def claim_table(claims: Sequence[Claim]) -> Cells:
    """Return the cells of claims."""
    return ("the paper's claim", "seen", "measured"), [(each.text, each.seen, each.measured) for each in claims]


def change_table(result: Result) -> Cells:
    """Return the cells of all that is set otherwise than in the paper."""
    changes = [(key, setting(paper), setting(now)) for key, (paper, now) in result.differences.items()]
    return ("setting", "paper", "here"), [*changes]


def departures(result: Result) -> str:
    """Say what differs from the paper: ``rounds 100 → 10; also lr``; nothing is left out."""
    written = {key: f"{key} {setting(paper)} → {setting(now)}" for key, (paper, now) in result.differences.items()}
    shown = [text for key, text in written.items() if key in SHOWN_FIRST and len(text) <= LONGEST]
    others = [key for key, text in written.items() if text not in shown]
    if others:
        shown.append(f"also {', '.join(others)}" if shown else ", ".join(others))
    return "; ".join(shown) or "nothing"


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """Return what of a summary there is: what it is about, and a sentence."""
    lines = [("The paper shows", summary.shows), ("Measured here", summary.found), ("Why they differ", summary.because)]
    return [(about, sentence) for about, sentence in lines if sentence]


def setting(value: Any) -> str:
    """Write a setting, cut if it is long.

    >>> setting([1, 2]), setting("mnist"), setting(None)
    ('[1, 2]', 'mnist', '–')
    """
    text = NONE if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def circumstances(result: Result) -> str:
    """Say scale, seeds, time, machine and date in a line."""
    seeds = f"seeds {', '.join(map(str, result.seeds))} · " if result.seeds else ""
    machine, installed = result.machine, result.versions
    where = "" if machine["device"] == "cpu" else f" and {machine['device']}"
    return (
        f"scale {result.scale} · {seeds}{duration(result.seconds)} on {machine['cpus']} CPUs ({machine['kind']}){where}"
        f" · Python {installed['python']}, torch {installed['torch']} · {result.date}"
    )


def to_markdown(result: Result, picture: str | None = None, level: int = 1) -> str:
    """Return a result as Markdown, with a figure that lies at ``picture``, and a heading of a level."""
    outcome = result.outcome
    parts = [f"{'#' * level} {result.name}, {result.scale}", f"{result.title} ({result.source})."]
    if picture:
        parts.append(f"![{result.title}]({picture})")
    if lines := summary_lines(outcome.summary):
        parts.append("\n".join(f"- **{about}:** {sentence}" for about, sentence in lines))
    if outcome.rows:
        parts.append(table(*row_table(outcome.rows)))
    if outcome.claims:
        parts.append(table(*claim_table(outcome.claims)))
    if outcome.remarks:
        parts.append("\n".join(f"- {remark}" for remark in outcome.remarks))
    if result.differences:
        parts += [f"What the scale {result.scale} changes:", table(*change_table(result))]
    parts.append(f"`{result.command}` · {circumstances(result)}")
    return "\n\n".join(parts) + "\n"


def to_csv(result: Result) -> str:
    """Return the rows of a result as CSV, numbers unrounded."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("what", "unit", "paper", "ours", "half_width_95", "difference", "verdict", "seeds"))
    for row in result.outcome.rows:
        half = mean_and_interval(row.seeds)[1] if row.seeds else None
        gap = None if row.paper is None else row.ours - row.paper
        seeds = " ".join(map(str, row.seeds))
        writer.writerow((row.what, row.unit, row.paper, row.ours, half, gap, row.verdict, seeds))
    return text.getvalue()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
