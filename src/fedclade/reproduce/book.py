"""The page of all results: ``python -m fedclade.reproduce.book results docs/reproduce.md``.

Written from the JSON files alone: nothing is measured, and the figures are drawn again.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedclade.errors import DataError
from fedclade.files import appear
from fedclade.report.formats import duration
from fedclade.reproduce import EXPERIMENTS
from fedclade.reproduce.result import Result
from fedclade.reproduce.writing import table, to_markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_DPI, COLOURS = 80, 64
"""The page's figures are for reading on a screen, and stay below 60 KB."""

INTRODUCTION = """\
# The papers' tables and figures, measured again

Written from the files in `results/` by `python -m fedclade.reproduce.book results docs/reproduce.md`; please change
those, not this page. `fedclade reproduce --list` lists all experiments, and the command below each repeats it.

**Paper** is a figure of the paper's own text; a dash stands where it shows none. **Ours** is the mean over seeds with
its 95 % interval by Student's t. A verdict is *reached* within what does not count as a difference, *exceeded* or
*short by* where one side is better, and *off by* where either side may be.
"""


def write_book(results: Path, page: Path) -> None:
    """Write the page, and its figures into a folder of its name beside it.

    Parameters
    ----------
    results
        Folder of JSON files.
    page
        The Markdown file.

    Raises
    ------
    DataError
        If the folder has no results.
    RunError
        If one is damaged.
    """
    found = read_results(results)
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for result in found:
        picture = EXPERIMENTS[result.name].draw(result.outcome, result.settings)
        _save_small(picture, folder / f"{result.stem}.png")
    text = book(found, folder.name)
    appear(page, lambda beside: beside.write_text(text, encoding="utf-8"))


def read_results(folder: Path) -> list[Result]:
    """Return the results of a folder, in the order of the experiments, the smaller scale first.

    Raises
    ------
    DataError
        If there are none, or one is of an experiment that is not known.
    RunError
        If one is damaged.
    """
    found = [Result.load(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise DataError(f"{folder} holds no results; make some with: fedclade reproduce all --out {folder}")
    if lost := [result.name for result in found if result.name not in EXPERIMENTS]:
        raise DataError(f"{folder} holds results of experiments that are not known: {', '.join(lost)}")
    order = list(EXPERIMENTS)
    return sorted(
        found, key=lambda result: (order.index(result.name), ("smoke", "laptop", "paper").index(result.scale))
    )


def book(results: Sequence[Result], pictures: str) -> str:
    """Return the page.

    Parameters
    ----------
    results
        In the order of the page.
    pictures
        Folder of the figures ``NAME-SCALE.png``, seen from the page.
    """
    parts = [INTRODUCTION, "## Overview\n", table(OVERVIEW, map(_overview, results)), "", *_unconfirmed(results)]
    parts += [to_markdown(result, f"{pictures}/{result.stem}.png", level=2) for result in results]
    return "\n".join(parts)


def _save_small(picture: Figure, path: Path) -> None:
    """Write a figure as a PNG of few colours, a third of the size."""
    from PIL import Image  # which matplotlib comes with

    whole = io.BytesIO()
    picture.savefig(whole, dpi=FIGURE_DPI, format="png")
    Image.open(whole).convert("RGB").quantize(COLOURS).save(path, format="png", optimize=True)


OVERVIEW = ("experiment", "source", "scale", "rows", "claims", "time")


def _overview(result: Result) -> tuple[str, ...]:
    outcome = result.outcome
    verdicts = Counter(row.verdict.partition(" by ")[0] for row in outcome.rows if row.paper is not None)
    claims = Counter(claim.holds for claim in outcome.claims)
    named = {"seen": claims[True], "not seen": claims[False], "not tested": claims[None]}
    return (
        f"[{result.name}](#{result.stem})",
        result.source,
        result.scale,
        ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items()) or "–",
        ", ".join(f"{n} {word}" for word, n in named.items() if n) or "–",
        duration(result.seconds),
    )


def _unconfirmed(results: Sequence[Result]) -> Iterator[str]:
    """Yield the section on what could not be confirmed; which rows fall short is told with each experiment."""
    claims = [
        (f"{result.name}, {result.scale}", claim.text, claim.measured)
        for result in results
        for claim in result.outcome.claims
        if claim.holds is False
    ]
    yield "## What we could not confirm\n"
    if claims:
        yield table(("experiment", "the paper's claim", "measured instead"), claims)
    else:
        yield "No claim that was tested failed."
    yield ""


if __name__ == "__main__":
    write_book(Path(sys.argv[1]), Path(sys.argv[2]))
