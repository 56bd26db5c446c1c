"""Pages of all results, for the documentation site.

``python -m fedclade_papers.docs results docs/reproduce.md`` writes them. The pages are made from
the JSON files alone: nothing is measured, and the figures are drawn again. The page itself is an
overview. A folder next to it has a page for each result, and a page of the claims that could not be
confirmed.
"""

from __future__ import annotations

import io
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedclade import DataError
from fedclade.report import duration
from fedclade_papers import EXPERIMENTS
from fedclade_papers.markdown import departures, figure, table, to_markdown
from fedclade_papers.outcome import AS_SEEDS_DIFFER, NONE, Row
from fedclade_papers.result import Result, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_DPI = 80
COLOURS = 48
"""Number of colours of the pages' figures, which are for screens and stay below 60 KB."""

INTRODUCTION = """\
# The papers' tables and figures, measured again

A line for each experiment; its page has the paper's figures beside ours, and the picture. These pages are made from
`results/`; `fedclade reproduce NAME`, of the package `fedclade-papers`, measures one again and prints the same, and
`--list` lists them all. Read also [what was found, in sentences](reproduce/sentences.md), and
[what we could not confirm](reproduce/unconfirmed.md), with why.

A row is *reached* within what does not count as a difference, *exceeded* or *short* where one side is better, and
*off* where either may be; *as seeds differ* stands where there are three seeds or more, and the paper's figure lies
where one more of them would, with 95 %. Rows count once for each run, and only for quantities that the paper has. A
claim is *seen* if all that its sentence says was seen: where it says how much, ours is that figure, or in that range,
rounded as the paper prints it. It is *direction only* if ours goes the same way by another amount, or not steadily. The
scale *paper* has the paper's settings but for those that the next column names; so has *laptop*.
"""

RESULT = """\
**Paper** is a figure of the paper's own text; a dash stands where it shows none. **Ours** is the mean over seeds with
its 95 % interval by Student's t. What the verdicts mean: [all results](../reproduce.md).
"""

SENTENCES = (
    "experiment",
    "the paper shows",
    "measured here",
    "why they differ",
    "set otherwise than in the paper",
)
COUNTS = (
    "experiment",
    "source",
    "scale",
    "set otherwise than in the paper",
    "rows",
    "claims",
    "time",
)

SEEN = {
    "yes": "seen",
    "direction only": "direction only",
    "no": "not seen",
    "not tested": "not tested",
}
"""Words of the overview for :attr:`Claim.seen`."""


def write_page(results: Path, page: Path) -> None:
    """Write the overview of a folder of JSON files, and a folder with a page and figure of each."""
    found = read_results(results)
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for result in found:
        picture = EXPERIMENTS[result.name].draw(result.outcome, result.settings)
        _save_small(picture, folder / f"{result.stem}.png")
    pages = {page: page_of(found, folder.name)}
    pages |= {folder / name: text for name, text in detail_pages(found).items()}
    for path, text in pages.items():
        write_text(path, text)


def read_results(folder: Path) -> list[Result]:
    """Return the results in a folder, in the order of the experiments, smaller scales first.

    Raises
    ------
    DataError
        If there are no results, or one belongs to an unknown experiment.
    RunError
        If a result is damaged.
    """
    found = [Result.load(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise DataError(
            f"{folder} holds no results; make some with: fedclade reproduce all --out {folder}"
        )
    if lost := [result.name for result in found if result.name not in EXPERIMENTS]:
        raise DataError(
            f"{folder} holds results of experiments that are not known: {', '.join(lost)}"
        )
    names = list(EXPERIMENTS)
    scales = ("smoke", "laptop", "paper")
    return sorted(found, key=lambda result: (names.index(result.name), scales.index(result.scale)))


def page_of(results: Sequence[Result], folder: str) -> str:
    """Return the overview of results; its anchors are the results' names.

    ``folder`` is the name of the folder with the pages of the results.
    """
    lines = (
        (f'<a id="{result.stem}"></a>{_link(result, folder)}', *_counts(result))
        for result in results
    )
    parts = [
        INTRODUCTION,
        table(COUNTS, lines),
        "",
        *_not_measured({result.name for result in results}),
    ]
    return "\n".join(parts)


def detail_pages(results: Sequence[Result]) -> dict[str, str]:
    """Return the pages in the folder of the overview, by file name.

    Figures ``NAME-SCALE.png`` are in the same folder.
    """
    pages = {
        f"{result.stem}.md": f"{to_markdown(result, f'{result.stem}.png')}\n{RESULT}"
        for result in results
    }
    sentences = table(SENTENCES, ((_link(result), *_sentences(result)) for result in results))
    pages["sentences.md"] = f"# What the papers show, and what was measured\n\n{sentences}\n"
    pages["unconfirmed.md"] = "\n".join(_unconfirmed(results))
    return pages


def _save_small(picture: Figure, path: Path) -> None:
    """Write a figure as a PNG with few colours, which has a third of the size."""
    from PIL import Image  # a dependency of matplotlib

    whole = io.BytesIO()
    picture.savefig(whole, dpi=FIGURE_DPI, format="png")
    Image.open(whole).convert("RGB").quantize(COLOURS).save(path, format="png", optimize=True)


def _link(result: Result, folder: str = ".") -> str:
    place = f"{result.stem}.md" if folder == "." else f"{folder}/{result.stem}.md"
    return f"[{result.name}]({place})"


def _sentences(result: Result) -> tuple[str, ...]:
    summary = result.outcome.summary
    sentences = (summary.shows, summary.found, summary.because)
    return *(sentence or NONE for sentence in sentences), _departures(result)


def _departures(result: Result) -> str:
    return departures(result, EXPERIMENTS[result.name].cells)


def _counts(result: Result) -> tuple[str, ...]:
    outcome = result.outcome
    verdicts = Counter(_kind(row) for row in outcome.rows if row.counts)
    claims = Counter(SEEN[claim.seen] for claim in outcome.claims if not claim.own)
    return (
        result.source,
        result.scale,
        _departures(result),
        ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items()) or NONE,
        ", ".join(f"{claims[word]} {word}" for word in SEEN.values() if claims[word]) or NONE,
        duration(result.seconds),
    )


def _kind(row: Row) -> str:
    """Return a verdict without its number, such as ``short`` or ``off as seeds differ``."""
    kind, _, rest = row.verdict.partition(" by ")
    return f"{kind}{AS_SEEDS_DIFFER.removeprefix(',')}" if rest.endswith(AS_SEEDS_DIFFER) else kind


def _unconfirmed(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the page on claims and rows that could not be confirmed, with reasons."""
    claims = [
        (_link(result), claim.text, claim.seen, claim.measured)
        for result in results
        for claim in result.outcome.claims
        if not claim.own and claim.seen in ("no", "direction only")
    ]
    yield "# What we could not confirm\n"
    if claims:
        yield table(("experiment", "the paper's claim", "seen", "measured instead"), claims)
    else:
        yield "No claim that was tested failed."
    yield ""
    apart = [
        (
            result,
            [
                row
                for row in result.outcome.rows
                if row.counts and _kind(row).startswith(("short", "off"))
            ],
        )
        for result in results
    ]
    rows = [
        (_link(result), _range(rows), result.outcome.summary.because or NONE)
        for result, rows in apart
        if rows
    ]
    if rows:
        yield "Rows that are short of the paper's figures, or off them:\n"
        yield table(("experiment", "rows", "why, as far as it is known"), rows)
        yield ""


def _range(rows: Sequence[Row]) -> str:
    """Return for each unit the number of rows and the range of their differences from the paper."""
    by_unit = defaultdict[str, list[float]](list)
    for row in rows:
        by_unit[row.unit].append(row.ours - (row.paper or 0))
    ranges: list[str] = []
    for unit, gaps in by_unit.items():
        low = figure(min(gaps), unit)
        high = figure(max(gaps), unit)
        ranges.append(f"{len(gaps)}, by {low}" + (f" to {high}" if len(gaps) > 1 else ""))
    return "; ".join(ranges)


def _not_measured(measured: Collection[str]) -> Iterator[str]:
    """Yield the lines of the section on experiments without a result."""
    cells = [
        (
            each.name,
            each.source,
            ", ".join(each.data) or NONE,
            f"`fedclade reproduce {each.name} --scale paper`",
        )
        for each in EXPERIMENTS.values()
        if each.name not in measured
    ]
    if cells:
        yield "## Not measured\n"
        yield (
            "There are no results of these here: the data sets are not at hand, or 2 cores take "
            "too many hours. Each is measured by its command, which goes on where it was "
            "stopped:\n"
        )
        yield table(("experiment", "source", "data", "command"), cells)
        yield ""


if __name__ == "__main__":
    write_page(Path(sys.argv[1]), Path(sys.argv[2]))
