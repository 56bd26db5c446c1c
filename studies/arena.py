"""Collect the runs of ``fedclade compare arena``, and write ``docs/arena.md`` from them.

    fedclade compare arena --out arena --resume
    python studies/arena.py --runs arena --page

The option --runs adds the finished runs of a folder to ``arena_results.json``. Results that were
added earlier remain in the file, so runs can be made on several machines. The option --page writes
the page and its picture ``docs/arena.svg``.

``studies/arena_judged.py`` makes runs whose settings are chosen with one budget for all methods;
``studies/arena_page.py`` writes a page from them.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

from fedclade.config import find_configs, read_scenarios
from fedclade.report.comparison_files import markdown_table
from fedclade.report.suite import PublishedFigures, Ranks, rank_figure, rank_methods
from fedclade.runs import Run, is_finished
from fedclade.tasks import mean_and_interval

ROOT = Path(__file__).parent.parent
PAGE, PICTURE, TEXT = (
    ROOT / "docs" / "arena.md",
    ROOT / "docs" / "arena.svg",
    Path(__file__).with_suffix(".md"),
)
RESULTS = Path(__file__).with_name("arena_results.json")
KINDS = ("P(Y|X)", "P(X)", "P(X|Y)", "P(Y)")
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
"""Title of each data set, by the first word of the names of its cells."""

CLUSTERED = (
    *(
        "rcfl",
        "cfl",
        "cfl_rounds",
        "fl_hc",
        "fedgroup",
        "flexcfl",
        "ifca",
        "fesem",
        "pacfl",
        "pacfl_per_label",
        "stocfl",
        "clove",
        "ocfl",
        "feddrift",
    ),
    *("flux", "fedem", "fedrc", "fedsoft"),
)
SAME_RUNS = "mnist P(Y|X) 1"
"""Cell whose runs are those of P(Y) at level 1; it is in the tables, but counts only once."""

NEAR = 1.0
"""Percentage points by which rcfl may be less accurate than the best method that clusters."""

Line = Mapping[str, Any]


def gathered(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a line (the results of a run) for each finished run of the folder."""
    for path in find_configs("arena"):
        for scenario in read_scenarios(path):
            for method in scenario.configs:
                for seed in sorted((folder / scenario.folder / method).glob("seed-*")):
                    if is_finished(seed):
                        yield {"cell": scenario.name, "method": method, **line_of(Run.load(seed))}


def line_of(run: Run) -> dict[str, Any]:
    """Return the results of a run."""
    summary, rounds = run.summary, run.metric_rows
    found = summary["clusters"]
    return {
        "seed": run.config["seed"],
        "accuracy": round(summary["accuracy"]["mean"], 5),
        "ari": None if found["ari"] is None else round(found["ari"], 4),
        "clusters": found["found"],
        "true": found["true"],
        "megabytes": round((summary["bytes_up"] + summary["bytes_down"]) / 1e6, 1),
        "seconds": round(summary["seconds"]["total"]),
        "right_in_round_3": rounds[2].get("ari") == 1.0,
    }


def merged(old: Sequence[Line], new: Sequence[Line]) -> list[Line]:
    """Return all lines, sorted by cell, method and seed; new lines replace old ones of a run."""
    by_run = {(line["cell"], line["method"], line["seed"]): line for line in (*old, *new)}
    return [by_run[key] for key in sorted(by_run)]


def data_of(line: Line) -> str:
    """Return the data set of a run."""
    return line["cell"].split()[0]


def methods_of(lines: Sequence[Line]) -> list[str]:
    """Return the methods that have runs, in the order of the tables."""
    return sorted({line["method"] for line in lines}, key=place_of)


def table_of(kind: str, lines: Sequence[Line]) -> str:
    """Return a table of methods by levels, with the result of :func:`cell_of` in each cell.

    The most accurate method that clusters is bold in each column.
    """
    by_cell: dict[tuple[int, str], list[Line]] = defaultdict(list)
    for line in lines:
        name, _, level = line["cell"].rpartition(" ")
        if name.endswith(f" {kind}"):
            by_cell[int(level), line["method"]].append(line)
    levels = sorted({level for level, _ in by_cell}, reverse=True)
    best = {
        level: best_of([line for (of, _), mine in by_cell.items() if of == level for line in mine])
        for level in levels
    }
    rows: list[list[str]] = []
    for method in methods_of(lines):
        cells = [
            cell_of(by_cell[level, method], method, best=best[level] == method) for level in levels
        ]
        if any(cells):
            rows.append([f"`{method}`", *cells])
    return markdown_table(["config", *(f"level {level}" for level in levels)], rows)


def table_without_kinds(data: str, lines: Sequence[Line]) -> str:
    """Return a table of the methods on a data set that has one cell and no true clusters.

    The columns are accuracy and the number of clusters found.
    """
    mine = [line for line in lines if data_of(line) == data]
    best = best_of(mine)
    rows: list[list[str]] = []
    for method in methods_of(mine):
        folds = [line for line in mine if line["method"] == method]
        found = ", ".join(str(line["clusters"]) for line in folds) if method in CLUSTERED else ""
        rows.append([f"`{method}`", cell_of(folds, method, best=method == best), found])
    return (
        markdown_table(["config", "accuracy, %", "clusters"], rows)
        if rows
        else "Nothing has run yet."
    )


def place_of(method: str) -> tuple[int, str]:
    """Return the sort key of a method in tables: methods that cluster come first."""
    return (CLUSTERED.index(method), "") if method in CLUSTERED else (len(CLUSTERED), method)


def best_of(lines: Sequence[Line]) -> str:
    """Return the most accurate method that clusters, by the mean over the folds that it has run."""
    scores: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line["method"] in CLUSTERED:
            scores[line["method"]].append(line["accuracy"])
    return max(scores, key=lambda method: mean(scores[method]), default="")


def cell_of(lines: Sequence[Line], method: str, *, best: bool = False) -> str:
    """Return the text of a table cell: the results of a method in some folds.

    The text contains the accuracy with its interval; for methods that cluster, also the ARI and the
    numbers of found and of true clusters; and the number of folds if it is not three.
    """
    if not lines:
        return ""
    middle, half = mean_and_interval([100 * line["accuracy"] for line in lines])
    text = f"**{middle:.1f}**" if best else f"{middle:.1f}"
    # The interval of two folds is too wide to be of use.
    text += "" if half is None or len(lines) < 3 else f" ± {half:.1f}"
    if method in CLUSTERED and all(line["ari"] is not None for line in lines):
        found, true = mean(line["clusters"] for line in lines), mean(line["true"] for line in lines)
        text += f" · {mean(line['ari'] for line in lines):.2f} · {found:.2g}/{true:.2g}"
    return text + ("" if len(lines) == 3 else f" ({len(lines)})")


def standings(lines: Sequence[Line]) -> tuple[list[str], list[str]]:
    """Compare rcfl with the other methods that cluster, in each cell.

    Two methods are compared on the folds that both have run.

    Returns
    -------
    tuple of two lists of str
        The names of the cells in which rcfl is at most ``NEAR`` points behind the best method; and
        for each other cell a text with its name, the best method, and the difference.
    """
    by_cell: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        if line["method"] in CLUSTERED:
            by_cell[line["cell"]][line["method"]][line["seed"]] = 100 * line["accuracy"]
    near: list[str] = []
    behind: list[str] = []
    for cell, each in by_cell.items():
        ours = each.pop("rcfl", {})
        gaps = {
            method: mean(theirs[seed] - ours[seed] for seed in common)
            for method, theirs in each.items()
            if (common := theirs.keys() & ours.keys())
        }
        first = max(gaps, key=lambda method: gaps[method], default="")
        if gaps and gaps[first] <= NEAR:
            near.append(cell)
        elif gaps:
            where = cell.removeprefix("mnist ").replace("cifar10", DATA["cifar10"])
            behind.append(f"{where}, where `{first}` is {gaps[first]:.1f} points more accurate")
    return near, behind


def exact(lines: Sequence[Line], method: str = "rcfl") -> str:
    """Return how many runs found exactly the true clusters, as "3 of 4".

    Only runs of the method on data with known clusters are counted.
    """
    found = [line["ari"] for line in lines if line["method"] == method and line["ari"] is not None]
    return f"{found.count(1.0)} of {len(found)}"


def ahead(lines: Sequence[Line], method: str) -> str:
    """Return a text that compares accuracy and traffic of a method with those of rcfl on MNIST.

    Accuracy is compared on the folds that both have run.
    """
    mnist = [line for line in lines if data_of(line) == "mnist"]
    of = {(line["cell"], line["method"], line["seed"]): 100 * line["accuracy"] for line in mnist}
    gaps: dict[str, list[float]] = defaultdict(list)
    for (cell, name, seed), accuracy in of.items():
        if name == method and (cell, "rcfl", seed) in of:
            gaps[cell].append(accuracy - of[cell, "rcfl", seed])
    if not gaps:
        return "not compared with `rcfl` yet: no fold has both"
    each = [mean(mine) for mine in gaps.values()]
    sent = {
        name: mean(line["megabytes"] for line in mnist if line["method"] == name)
        for name in (method, "rcfl")
    }
    return (
        f"more accurate than `rcfl` in {sum(gap > 0 for gap in each)} of {len(each)} cells, by up to "
        f"{max(each):.1f} points, at {sent[method] / sent['rcfl']:.1f} times the traffic. It finds exactly the true "
        f"clusters in {exact(lines, method)} runs"
    )


def ranks(lines: Sequence[Line]) -> Ranks | None:
    """Return mean ranks over cells and folds; None if too few of these have runs of all methods."""
    by_set: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for line in lines:
        by_set[line["cell"], line["seed"]][line["method"]] = line["accuracy"]
    return rank_methods(by_set)


def picture(lines: Sequence[Line], path: Path) -> str:
    """Draw the picture of the ranks; return the part of the page about them."""
    if (found := ranks(lines)) is None:
        return "Too few cells have runs of all methods to compute ranks."
    with mpl.rc_context({"svg.hashsalt": "arena"}):
        rank_figure(found).savefig(path, metadata={"Date": None})
    shown = f"![Critical-difference diagram: methods by mean rank, from the best on the left]({path.name})"
    return f"{said(found)}\n\n{shown}"


def said(found: Ranks) -> str:
    """Return the paragraph before the picture of ranks."""
    ahead = {
        a: found.mean[b] - found.mean[a] for a, b in combinations(found.mean, 2) if b == "rcfl"
    }
    surely = [f"`{a}`" for a, by in ahead.items() if by >= found.critical]
    unsure = [f"`{a}`" for a, by in ahead.items() if 0 < by < found.critical]
    p_value = "not defined" if found.p_value is None else f"{found.p_value:.1g}"
    text = (
        "In each cell and fold, methods are ranked by accuracy; rank 1 is the most accurate. The picture "
        "shows the mean ranks of all methods, whether they cluster or not, that have run in all of these "
        f"cells. Each is a mean over {found.sets} pairs of a cell and a fold, in {found.scenarios} cells. The "
        "p-value of Friedman's test, which is the probability of such differences between ranks if all "
        f"methods were equally good, is {p_value}. Two mean ranks that differ by less than "
        f"{found.critical:.2f} (the *critical difference* in the picture) do not differ significantly, by "
        "Nemenyi's test at the level of 5 %. A bar connects such methods."
    )
    if surely:
        text += f" Methods with a significantly better mean rank than `rcfl`: {', '.join(surely)}."
    if unsure:
        text += (
            " Methods with a better mean rank than `rcfl`, but not significantly: "
            f"{', '.join(unsure)}."
        )
    return text


def costs(lines: Sequence[Line]) -> str:
    """Return a table with time and traffic of each method on each data set."""
    of_data = {data: [line for line in lines if data_of(line) == data] for data in DATA}
    rows = [
        [f"`{method}`", *(each for mine in of_data.values() for each in cost_of(mine, method))]
        for method in methods_of(lines)
    ]
    return markdown_table(
        ["config", *(f"{title}, {unit}" for title in DATA.values() for unit in ("s", "MB"))], rows
    )


def cost_of(lines: Sequence[Line], method: str) -> tuple[str, str]:
    """Return the mean seconds and megabytes of a method's runs as text; empty if not measured."""
    mine = [line for line in lines if line["method"] == method]
    # None: the time of a run that was suspended for a while is not counted.
    seconds = [line["seconds"] for line in mine if line["seconds"] is not None]
    megabytes = [line["megabytes"] for line in mine]
    return (
        f"{mean(seconds):.0f}" if seconds else "",
        f"{mean(megabytes):.1f}" if megabytes else "",
    )


def printed(lines: Sequence[Line]) -> str:
    """Return a table that compares the published accuracies of FLUX's paper with ours, by level.

    The published numbers are means over the four kinds of shift.
    """
    (path,) = (each for each in find_configs("arena") if each.stem == "mnist")
    groups = {
        each.printed.name: each.printed for each in read_scenarios(path) if each.printed is not None
    }
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        scores[line["method"]][line["cell"]].append(100 * line["accuracy"])
    means = {
        method: {cell: mean(each) for cell, each in scores[method].items()}
        for method in methods_of(lines)
    }
    table = PublishedFigures([*groups.values()], means)
    return markdown_table(table.columns, [[f"`{method}`", *cells] for method, *cells in table.rows])


def page(lines: Sequence[Line]) -> str:
    """Return the page: the text of ``arena.md`` in the folder of this script, with the tables."""
    counted = [line for line in lines if line["cell"] != SAME_RUNS]
    near, behind = standings(counted)
    fedavg = [
        100 * line["accuracy"]
        for line in lines
        if (line["cell"], line["method"]) == ("mnist P(Y|X) 8", "fedavg")
    ]
    middle, half = mean_and_interval(fedavg) if fedavg else (float("nan"), None)
    tables = [
        f"### {kind}\n\n{found}"
        for kind in KINDS
        if (found := table_of(kind, lines)).count("\n") > 1
    ]
    return TEXT.read_text(encoding="utf-8").format(
        tables="\n\n".join(tables),
        runs=len(lines),
        near=len(near),
        cells=len(near) + len(behind),
        behind=f"It is further behind in the remaining {'cell' if len(behind) == 1 else 'cells'}: {'; '.join(behind)}."
        if behind
        else "",
        exact=exact(counted),
        feddrift=ahead(counted, "feddrift"),
        cifar10=table_without_kinds("cifar10", lines),
        ranks=picture(counted, PICTURE),
        costs=costs(lines),
        printed=printed(lines),
        fedavg=f"{middle:.1f}" + ("" if half is None else f" ± {half:.1f}"),
    )


def main() -> None:
    """Collect results and write the page, as the options state."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, help="folder of the comparison, to collect results")
    parser.add_argument("--page", action="store_true", help="write docs/arena.md and its picture")
    given = parser.parse_args()
    lines: list[Line] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    if given.runs is not None:
        lines = merged(lines, [*gathered(given.runs)])
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n", encoding="utf-8")
    if given.page:
        PAGE.write_text(page(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
