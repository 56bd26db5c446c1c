"""Results as Markdown and CSV, and the format of their numbers."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from fedclade.report import duration
from fedclade.tasks import mean_and_interval
from fedclade_papers.outcome import NONE, Claim, Row, Summary
from fedclade_papers.result import Result

Cells = tuple[Sequence[str], list[Sequence[str]]]
"""Columns and rows of a table."""

LONGEST = 80
"""Largest number of characters of a setting that are shown."""

SHOWN_FIRST = (
    *(
        "model",
        "clients",
        "client_fraction",
        "client_fractions",
        "rounds",
        "rounds_before",
        "cohort",
    ),
    *("samples_per_client", "batch_size", "lr", "cuts", "seeds"),
)
"""Settings whose difference from the paper is shown with its values; others are only named."""

OWN = "Quantities of ours, which the paper does not have; they count in no verdict:"
"""Sentence above quantities that are not in the paper."""


def figure(value: float | None, unit: str = "") -> str:
    """Format a figure.

    Percentages have one decimal, other numbers three digits and at most six decimals.

    >>> figure(98.456, "%"), figure(0.01234), figure(-2.5, "rounds")
    ('98.5 %', '0.0123', '−2.5 rounds')
    >>> figure(-2e-8), figure(None, "%"), figure(7850)
    ('0', '–', '7,850')
    """
    if value is None:
        return NONE
    if unit == "%":
        digits = f"{round(value, 1) + 0.0:.1f}"
    else:
        digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 6) + 0.0:.3g}"
    return f"{digits} {unit}".strip().replace("-", "−")


def ours(row: Row) -> str:
    """Format our figure, with its 95 % interval if there are several seeds.

    >>> ours(Row("x", 98.0, 97.0, seeds=(96.5, 97.5)))
    '97.0 ± 6.4 %'
    """
    half = mean_and_interval(row.seeds)[1] if row.seeds else None
    if half is None:
        return figure(row.ours, row.unit)
    mean, around = (
        figure(value, row.unit).removesuffix(row.unit).strip() for value in (row.ours, half)
    )
    return f"{mean} ± {around} {row.unit}".strip()


def difference(row: Row) -> str:
    """Format the difference of our figure from the paper's, with its sign."""
    if row.paper is None:
        return NONE
    written = figure(row.ours - row.paper, row.unit)
    return written if written.startswith("−") else f"+{written}"


def parted(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows with quantities of the paper, and the other rows."""
    return [row for row in rows if row.is_of_paper], [row for row in rows if not row.is_of_paper]


def row_table(rows: Sequence[Row]) -> Cells:
    """Return a table of rows."""
    return ("what", "paper", "ours", "difference", "verdict"), [
        (
            row.what,
            row.told or figure(row.paper, row.unit),
            ours(row),
            difference(row),
            row.verdict or NONE,
        )
        for row in rows
    ]


def claim_table(claims: Sequence[Claim], head: str = "the paper's claim") -> Cells:
    """Return a table of claims."""
    return (head, "seen", "measured"), [(each.text, each.seen, each.measured) for each in claims]


def change_table(result: Result) -> Cells:
    """Return a table of the settings that differ from the paper's."""
    changes = [
        (key, setting(paper), setting(now)) for key, (paper, now) in result.differences.items()
    ]
    return ("setting", "paper", "here"), [*changes]


def departures(result: Result, cells: Sequence[str] = ()) -> str:
    """Describe all differences from the paper: ``3 of 16 cells; rounds 100 → 10; also lr``.

    ``cells`` are the cells that the paper prints, see :attr:`Experiment.cells`.
    """
    shown = list[str]()
    others = list[str]()
    for key, paper, now in _leaves(result.differences):
        text = f"{key} {setting(paper)} → {setting(now)}"
        if key in SHOWN_FIRST and len(text) <= LONGEST:
            shown.append(text)
        else:
            others.append(key)
    shown = list(dict.fromkeys(shown))
    others = list(dict.fromkeys(others))
    if others:
        shown.append(f"also {', '.join(others)}" if shown else ", ".join(others))
    run = [cell for cell in cells if _has_row(result.outcome.rows, cell)]
    if len(run) < len(cells):
        shown.insert(0, f"{len(run)} of {len(cells)} cells")
    return "; ".join(shown) or "nothing"


def _leaves(differences: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting that differs, with the paper's value and ours.

    Of nested tables only the innermost settings are yielded. An entry that is missing from our
    table, such as a figure that was not measured, is not a setting that differs.
    """
    for key, (paper, now) in differences.items():
        if isinstance(paper, Mapping) and isinstance(now, Mapping) and set(now) <= set(paper):
            inner = {name: (paper[name], now[name]) for name in now if paper[name] != now[name]}
            yield from _leaves(cast("Mapping[str, tuple[Any, Any]]", inner))
        else:
            yield key, paper, now


def _has_row(rows: Sequence[Row], cell: str) -> bool:
    """Return whether a row belongs to a cell of the paper: its name begins with the cell's name."""
    return any(row.what.startswith((f"{cell} · ", f"{cell}, ")) for row in rows)


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """Return the sentences of a summary that are not empty, each with its title."""
    lines = [
        ("The paper shows", summary.shows),
        ("Measured here", summary.found),
        ("Why they differ", summary.because),
    ]
    return [(about, sentence) for about, sentence in lines if sentence]


def setting(value: Any) -> str:
    """Format a setting, shortened if it is long.

    >>> setting([1, 2]), setting("mnist"), setting(None)
    ('[1, 2]', 'mnist', '–')
    """
    text = (
        NONE
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
    )
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def circumstances(result: Result) -> str:
    """Return scale, seeds, time, machine and date in a line."""
    seeds = f"seeds {', '.join(map(str, result.seeds))} · " if result.seeds else ""
    machine = result.machine
    installed = result.versions
    where = "" if machine["device"] == "cpu" else f" and {machine['device']}"
    return (
        f"scale {result.scale} · {seeds}{duration(result.seconds)} on {machine['cpus']} CPUs "
        f"({machine['kind']}){where} · Python {installed['python']}, torch {installed['torch']} · "
        f"{result.date}"
    )


def to_markdown(result: Result, picture: str | None = None, level: int = 1) -> str:
    """Return a result as Markdown.

    Parameters
    ----------
    result
        The result.
    picture
        Path of its figure. None: no figure.
    level
        Level of the heading, from 1.
    """
    outcome = result.outcome
    parts = [f"{'#' * level} {result.name}, {result.scale}", f"{result.title} ({result.source})."]
    if picture:
        parts.append(f"![{result.title}]({picture})")
    if lines := summary_lines(outcome.summary):
        parts.append("\n".join(f"- **{about}:** {sentence}" for about, sentence in lines))
    of_paper, own = parted(outcome.rows)
    claims = [claim for claim in outcome.claims if not claim.own]
    own_claims = [claim for claim in outcome.claims if claim.own]
    if of_paper:
        parts.append(table(*row_table(of_paper)))
    if claims:
        parts.append(table(*claim_table(claims)))
    if own or own_claims:
        parts.append(OWN)
    if own:
        parts.append(table(*row_table(own)))
    if own_claims:
        parts.append(table(*claim_table(own_claims, "sentence of ours")))
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
    writer.writerow(
        ("what", "unit", "paper", "ours", "half_width_95", "difference", "verdict", "seeds")
    )
    for row in result.outcome.rows:
        half = mean_and_interval(row.seeds)[1] if row.seeds else None
        gap = None if row.paper is None else row.ours - row.paper
        seeds = " ".join(map(str, row.seeds))
        writer.writerow((row.what, row.unit, row.paper, row.ours, half, gap, row.verdict, seeds))
    return text.getvalue()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [
        columns,
        ["---"] * len(columns),
        *([cell.replace("|", "\\|") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
