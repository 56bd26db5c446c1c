"""Program that writes the documentation pages on all results of the experiments.

Run it with ``python -m fedclade_papers.docs results docs/reproduce.md``. The program reads the JSON
files of the results, measures nothing, and draws the figures again. It writes an overview, and next
to the overview a folder with a page for each result and a page on claims that could not be
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
from fedclade_papers.times import GPU, count_examples, estimate_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_DPI = 80
COLOURS = 48
"""Number of colours of the figures on the pages, few enough for files of less than 60 KB."""

INTRODUCTION = """\
# The papers' tables and figures, measured again

This page answers one question: does fedclade reproduce the results of three papers on clustered federated learning?
The papers are Sattler et al. 2019 (method [CFL](methods/cfl.md)), Briggs et al. 2020 ([FL+HC](methods/fl_hc.md)) and
Duan et al. 2020 ([FedGroup](methods/fedgroup.md)). The table has a row for each experiment, which is a table, a figure
or a statement of a paper. The link in a row leads to a page with the paper's numbers next to ours, and a picture. Two
more pages summarize all experiments: [the results in sentences](reproduce/sentences.md) and [what we could not
confirm](reproduce/unconfirmed.md), with reasons.

To measure an experiment again, run the command at the end of its page. It is `fedclade reproduce NAME` with the scale
and the changed settings of the result, and prints a table like the one on the page. `fedclade reproduce --list` lists
the experiments. These commands need the package `fedclade-papers`, which is installed from a clone of the repository:
`pip install -c constraints.txt -e ".[all]" -e packages/fedclade-papers`. All pages are written from the files in the
folder `results/`. [How long the experiments take with the papers' settings](reproduce/times.md) has estimates for a
GPU, and the command that runs them there.

The columns of the table are:

- **experiment**: name of the experiment, for the command line.
- **source**: the paper, and the place in the paper.
- **scale**: set of values of all settings from which the measurement starts: *paper*, the values of the paper, or
  *laptop*, in which some are changed to save time on two CPU cores.
- **changed settings**: settings with values other than in the paper, as "paper's value → our value". After "also"
  follow settings whose values only the experiment's page shows. "3 of 16 cells" means that we measured 3 of the 16
  cells of the paper's table. The names are those of the command; for example, `cohort` states [how many clients of a
  cluster train in a round](methods/fl_hc.md#configuration).
- **rows**: number of rows on the experiment's page with each verdict; a row compares one number of the paper with
  ours. If several rows of a page show the same run, they are counted as one row.
- **claims**: number of statements of the paper with each verdict.
- **time**: duration of the measurement on 2 CPU cores, or on the GPU that the cell names.

A dash means that there is nothing to count. Each row has one of these verdicts:

- *reached*: the difference is within the experiment's tolerance.
- *exceeded* or *short*: our number is better or worse than the paper's by more than the tolerance.
- *off*: our number differs by more than the tolerance, in a quantity for which neither direction is better.
- *short as seeds differ* or *off as seeds differ*: as above, but there are at least three seeds, and their results
  differ so much that the paper's number could be the result of one more seed (95 % prediction interval).

Each claim has one of these verdicts:

- *seen*: we observed everything that the statement says. If it states a number or a range, our number, rounded as in
  the paper, equals the number or is in the range.
- *direction only*: our result goes in the stated direction, but by another amount or not steadily.
- *not seen*: we observed something else.
- *not tested*: our settings are too small to decide.
"""

RESULT = """\
The column *paper* has the numbers that the paper prints; a dash means that it prints none. The column *ours* has the
mean over the seeds and, after ±, half of its 95 % interval (Student's t). The page with [all
results](../reproduce.md) explains the verdicts.
"""

SENTENCES = (
    "experiment",
    "the paper shows",
    "measured here",
    "why they differ",
    "changed settings",
)
COUNTS = ("experiment", "source", "scale", "changed settings", "rows", "claims", "time")

SEEN = {
    "yes": "seen",
    "direction only": "direction only",
    "no": "not seen",
    "not tested": "not tested",
}
"""Words for the values of :attr:`Claim.seen` on the overview page."""


def write_page(results: Path, page: Path) -> None:
    """Write the overview page of a folder of results, and a page and a figure for each result."""
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
    """Read all results in a folder.

    The results are in the order of the experiments, and for one experiment in the order of scales.

    Raises
    ------
    DataError
        If the folder contains no results, or a result of an unknown experiment.
    RunError
        If the file of a result is damaged.
    """
    found = [Result.load(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise DataError(
            f"the folder {folder} contains no results of experiments; write some with: "
            f"fedclade reproduce all --out {folder}"
        )
    if lost := [result.name for result in found if result.name not in EXPERIMENTS]:
        raise DataError(
            f"the folder {folder} contains results of unknown experiments: {', '.join(lost)}; "
            "remove their files"
        )
    names = list(EXPERIMENTS)
    scales = ("smoke", "laptop", "paper")
    return sorted(found, key=lambda result: (names.index(result.name), scales.index(result.scale)))


def page_of(results: Sequence[Result], folder: str) -> str:
    """Return the text of the overview page, with a row for each result.

    ``folder`` is the name of the folder with the results' own pages, for links. Each row has an
    anchor ``NAME-SCALE``.
    """
    lines = (
        (f'<a id="{result.stem}"></a>{_link(result, folder)}', *_count_verdicts(result))
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
    """Return the text of each page other than the overview, by file name.

    The pages refer to figures ``NAME-SCALE.png`` in the same folder.
    """
    pages = {
        f"{result.stem}.md": f"{to_markdown(result, f'{result.stem}.png')}\n{RESULT}"
        for result in results
    }
    sentences = table(
        SENTENCES, ((_link(result), *_collect_sentences(result)) for result in results)
    )
    pages["sentences.md"] = (
        "# What the papers show, and what was measured\n\n"
        "Each row of the table is an experiment: what the paper reports, what we measured, known "
        "reasons for a difference, and the settings with values other than in the paper.\n\n"
        f"{sentences}\n"
    )
    pages["times.md"] = "\n".join(_list_times(results))
    pages["unconfirmed.md"] = "\n".join(_list_unconfirmed(results))
    return pages


def _save_small(picture: Figure, path: Path) -> None:
    """Write a figure as a PNG with few colours, which reduces the file to a third of its size."""
    from PIL import Image  # a dependency of matplotlib

    whole = io.BytesIO()
    picture.savefig(whole, dpi=FIGURE_DPI, format="png")
    Image.open(whole).convert("RGB").quantize(COLOURS).save(path, format="png", optimize=True)


def _link(result: Result, folder: str = ".") -> str:
    if folder == ".":
        place = f"{result.stem}.md"
    else:
        place = f"{folder}/{result.stem}.md"
    return f"[{result.name}]({place})"


def _collect_sentences(result: Result) -> tuple[str, ...]:
    summary = result.outcome.summary
    sentences = (summary.shows, summary.found, summary.because)
    return *(sentence or NONE for sentence in sentences), _describe_departures(result)


def _describe_departures(result: Result) -> str:
    return departures(result, EXPERIMENTS[result.name].cells)


def _count_verdicts(result: Result) -> tuple[str, ...]:
    outcome = result.outcome
    verdicts = Counter(_shorten_verdict(row) for row in outcome.rows if row.counts)
    claims = Counter(SEEN[claim.seen] for claim in outcome.claims if not claim.own)
    return (
        result.source,
        result.scale,
        _describe_departures(result),
        ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items()) or NONE,
        ", ".join(f"{claims[word]} {word}" for word in SEEN.values() if claims[word]) or NONE,
        _write_time(result),
    )


def _write_time(result: Result) -> str:
    """Write the duration of a measurement, with the name of the GPU if one was used."""
    device = result.machine["device"]
    if device == "cpu":
        return duration(result.seconds)
    return f"{duration(result.seconds)} on {device}"


def _shorten_verdict(row: Row) -> str:
    """Return the verdict of a row without its number: ``short``, ``off as seeds differ``, ..."""
    kind, _, rest = row.verdict.partition(" by ")
    if rest.endswith(AS_SEEDS_DIFFER):
        return f"{kind}{AS_SEEDS_DIFFER.removeprefix(',')}"
    return kind


def _list_unconfirmed(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the page on claims and numbers of the papers that were not confirmed."""
    claims = [
        (_link(result), claim.text, claim.seen, claim.measured)
        for result in results
        for claim in result.outcome.claims
        if not claim.own and claim.seen in ("no", "direction only")
    ]
    yield (
        "# What we could not confirm\n\n"
        "This page lists the statements of the papers that our measurements do not confirm (*no* "
        "in the column *seen*) or confirm only in their direction (*direction only*), and the "
        "numbers of the papers that we did not reach. The page with [all "
        "results](../reproduce.md) explains the verdicts.\n"
    )
    if claims:
        yield table(("experiment", "the paper's claim", "seen", "our measurement"), claims)
    else:
        yield "All claims that were tested are confirmed."
    yield ""
    rows = [row for result in results for row in _list_missed(result)]
    if rows:
        yield (
            "The next table counts, for each experiment, the rows in which our number is worse than "
            "the paper's (*short*) or differs from it in a quantity without a better direction "
            "(*off*), with the range of the differences.\n"
        )
        yield table(("experiment", "rows", "known reasons"), rows)
        yield ""


def _list_times(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the page on the times of experiments with all settings of the papers."""
    measured = {
        result.name: _write_time(result)
        for result in results
        if result.scale == "paper" and not result.differences
    }
    rows: list[tuple[str, ...]] = []
    for experiment in EXPERIMENTS.values():
        examples = count_examples(experiment.name, experiment.paper)
        if examples is None:
            continue
        millions = ", ".join(f"{number / 1e6:.0f} ({model})" for model, number in examples.items())
        minutes = f"{estimate_seconds(examples) / 60:.0f} min"
        rows.append((experiment.name, millions, minutes, measured.get(experiment.name, NONE)))
    yield (
        "# How long experiments take with the papers' settings\n\n"
        "This page is for readers who have a GPU, and want to measure experiments that 2 CPU cores "
        "cannot finish in hours. In a clone of the repository, this command measures an experiment, "
        "or without a name all experiments whose data is available. It stops after 8 minutes; run "
        "it again until it reports that all are finished, and it continues where it stopped:\n\n"
        "```sh\n"
        "sh benchmarks/gpu_reproduce.sh reproduced/paper flhc-table1\n"
        "```\n\n"
        f"The times in the table are estimates for one {GPU}, and not measurements, except in the "
        "last column. An estimate is the number of training examples that the runs of an experiment "
        "process, divided by the number of examples per second that this GPU trains on with the same "
        "network (`benchmarks/engine.py --device cuda --clients 100`; for `cifar_cnn`, the measured "
        "time of `cfl-fig8-cifar`). It contains neither the evaluations nor the loading of data. "
        "With fewer clients, such as the two of `cfl-fig7-...`, a GPU trains on fewer examples per "
        "second, so that these experiments take longer than the estimate. For "
        "FL+HC (`flhc-...`), the number of examples is an upper bound: after the clustering step at "
        "most all clients train, and some tables share runs, which are measured once.\n"
    )
    columns = (
        "experiment",
        "training examples, in millions (network)",
        f"estimate on one {GPU}",
        "measured",
    )
    yield table(columns, rows)
    yield ""
    yield (
        "Experiments that are missing here have been measured with the papers' settings on 2 CPU "
        "cores, show runs of the experiments above, or need data that we do not have.\n"
    )


def _list_missed(result: Result) -> list[tuple[str, str, str]]:
    """Return a table row on the numbers of the paper that a result did not reach.

    The list is empty if the result reached all numbers of the paper.
    """
    missed = [
        row
        for row in result.outcome.rows
        if row.counts and _shorten_verdict(row).startswith(("short", "off"))
    ]
    if not missed:
        return []
    reasons = result.outcome.summary.because or NONE
    return [(_link(result), _describe_differences(missed), reasons)]


def _describe_differences(rows: Sequence[Row]) -> str:
    """Write for each unit the number of rows and the range of their differences from the paper."""
    by_unit = defaultdict[str, list[float]](list)
    for row in rows:
        by_unit[row.unit].append(row.ours - (row.paper or 0))
    ranges: list[str] = []
    for unit, gaps in by_unit.items():
        low = figure(min(gaps), unit)
        high = figure(max(gaps), unit)
        text = f"{len(gaps)}, by {low}"
        if len(gaps) > 1:
            text += f" to {high}"
        ranges.append(text)
    return "; ".join(ranges)


def _not_measured(measured: Collection[str]) -> Iterator[str]:
    """Yield the lines of the overview's section on experiments that have no result."""
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
            "The experiments in this table have no results here, since we do not have the data sets "
            "or the experiments take too many hours on 2 CPU cores. The command in the last column "
            "measures the experiment. If the command is interrupted, run it again: it continues "
            "with the parts that are missing.\n"
        )
        yield table(("experiment", "source", "data", "command"), cells)
        yield ""


if __name__ == "__main__":
    write_page(Path(sys.argv[1]), Path(sys.argv[2]))
