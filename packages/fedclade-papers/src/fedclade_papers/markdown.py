"""Functions that write the result of an experiment as Markdown or CSV, and format its numbers."""

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
"""A table: the headings of its columns, and its rows of cells."""

LONGEST = 80
"""Largest number of characters with which the value of a setting is shown."""

SHOWN_FIRST = (
    "model",
    "clients",
    "client_fraction",
    "client_fractions",
    "rounds",
    "rounds_before",
    "cohort",
    "samples_per_client",
    "batch_size",
    "lr",
    "cuts",
    "seeds",
)
"""Settings that are shown with the paper's value and ours if the two differ.

Other settings that differ from the paper are only named.
"""

OWN = "Quantities that the paper does not report; they are not counted in any verdict:"
"""Sentence above the table of quantities that are not in the paper."""


def figure(value: float | None, unit: str = "") -> str:
    """Format a number with its unit, or a dash if the number is None.

    Percentages get one decimal, other numbers three digits and at most six decimals.

    >>> figure(98.456, "%"), figure(0.01234), figure(-2.5, "rounds")
    ('98.5 %', '0.0123', '−2.5 rounds')
    >>> figure(-2e-8), figure(None, "%"), figure(7850)
    ('0', '–', '7,850')
    """
    if value is None:
        return NONE
    if unit == "%":
        digits = f"{round(value, 1) + 0.0:.1f}"
    elif abs(value) >= 1000:
        digits = f"{value:,.0f}"
    else:
        digits = f"{round(value, 6) + 0.0:.3g}"  # + 0.0 turns −0 into 0
    return f"{digits} {unit}".strip().replace("-", "−")


def ours(row: Row) -> str:
    """Format our number of a row, with half of its 95 % interval if there are several seeds.

    >>> ours(Row("x", 98.0, 97.0, seeds=(96.5, 97.5)))
    '97.0 ± 6.4 %'
    """
    half = _half_width(row)
    if half is None:
        return figure(row.ours, row.unit)
    mean = figure(row.ours, row.unit).removesuffix(row.unit).strip()
    around = figure(half, row.unit).removesuffix(row.unit).strip()
    return f"{mean} ± {around} {row.unit}".strip()


def _half_width(row: Row) -> float | None:
    """Return half the width of the 95 % interval over a row's seeds; None below two seeds."""
    if not row.seeds:
        return None
    return mean_and_interval(row.seeds)[1]


def difference(row: Row) -> str:
    """Format the difference of our number from the paper's number, with its sign.

    The result is a dash if the paper has no number.
    """
    if row.paper is None:
        return NONE
    written = figure(row.ours - row.paper, row.unit)
    if written.startswith("−"):
        return written
    return f"+{written}"


def parted(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Separate rows with a number of the paper from rows without one, and return both lists."""
    return [row for row in rows if row.is_of_paper], [row for row in rows if not row.is_of_paper]


def row_table(rows: Sequence[Row]) -> Cells:
    """Return a table that compares the paper's number with ours in each row."""
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
    """Return a table of claims: the statement, whether it was observed, and the measurement."""
    return (head, "seen", "measured"), [(each.text, each.seen, each.measured) for each in claims]


def change_table(result: Result) -> Cells:
    """Return a table of the settings that differ from the paper: name, paper's value, our value."""
    changes = [
        (key, setting(paper), setting(now)) for key, (paper, now) in result.differences.items()
    ]
    return ("setting", "paper", "here"), [*changes]


def departures(result: Result, cells: Sequence[str] = ()) -> str:
    """Describe the settings that differ from the paper in one line.

    An example is ``3 of 16 cells; rounds 100 → 10; also lr``: three of the table's 16 cells were
    measured, with 10 rounds in place of 100, and with another ``lr``. ``cells`` are the names of
    the cells that the paper prints, see :attr:`Experiment.cells`.
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
    """Yield the name, the paper's value and our value of each setting that differs.

    If a setting is a table, the differing settings within the table are yielded. An entry that is
    missing from our table, such as a panel that was not measured, does not count as a difference.
    """
    for key, (paper, now) in differences.items():
        if isinstance(paper, Mapping) and isinstance(now, Mapping) and set(now) <= set(paper):
            inner = {name: (paper[name], now[name]) for name in now if paper[name] != now[name]}
            yield from _leaves(cast("Mapping[str, tuple[Any, Any]]", inner))
        else:
            yield key, paper, now


def _has_row(rows: Sequence[Row], cell: str) -> bool:
    """Return whether one of the rows belongs to a cell of the paper.

    The name of such a row begins with the cell's name.
    """
    return any(row.what.startswith((f"{cell} · ", f"{cell}, ")) for row in rows)


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """Return the non-empty sentences of a summary, each with a title such as "Measured here"."""
    lines = [
        ("The paper shows", summary.shows),
        ("Measured here", summary.found),
        ("Why they differ", summary.because),
    ]
    return [(about, sentence) for about, sentence in lines if sentence]


def setting(value: Any) -> str:
    """Format the value of a setting, shortened if it is longer than :data:`LONGEST`.

    >>> setting([1, 2]), setting("mnist"), setting(None)
    ('[1, 2]', 'mnist', '–')
    """
    if value is None:
        return NONE
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False)
    if len(text) <= LONGEST:
        return text
    return text[: LONGEST - 1] + "…"


def circumstances(result: Result) -> str:
    """Describe in one line the scale, seeds, time, machine, versions and date of a measurement."""
    seeds = ""
    if result.seeds:
        seeds = f"seeds {', '.join(map(str, result.seeds))} · "
    machine = result.machine
    installed = result.versions
    if machine["device"] == "cpu":
        where = ""
    else:
        where = f" and {machine['device']}"
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
        Path of the result's figure. None: no figure.
    level
        Level of the heading: 1 for a page of its own.
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
        parts.append(table(*claim_table(own_claims, "our own statement")))
    if outcome.remarks:
        parts.append("\n".join(f"- {remark}" for remark in outcome.remarks))
    if result.differences:
        parts += [
            f"Settings of the scale {result.scale} that differ from the paper's:",
            table(*change_table(result)),
        ]
    parts.append(f"`{result.command}` · {circumstances(result)}")
    return "\n\n".join(parts) + "\n"


def to_csv(result: Result) -> str:
    """Return the rows of a result as CSV, with unrounded numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("what", "unit", "paper", "ours", "half_width_95", "difference", "verdict", "seeds")
    )
    for row in result.outcome.rows:
        gap = None
        if row.paper is not None:
            gap = row.ours - row.paper
        numbers = (row.paper, row.ours, _half_width(row), gap)
        writer.writerow((row.what, row.unit, *numbers, row.verdict, " ".join(map(str, row.seeds))))
    return text.getvalue()


def _escape_bars(row: Sequence[str]) -> list[str]:
    """Escape vertical bars in the cells of a Markdown table, where a bar would end the cell."""
    return [cell.replace("|", "\\|") for cell in row]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with the given headings and rows."""
    lines: list[Sequence[str]] = [columns, ["---"] * len(columns)]
    lines += [_escape_bars(row) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
