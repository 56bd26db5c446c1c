"""docs/arena.md and arena_results.json, from the runs of ``fedclade compare arena``.

    fedclade compare arena --out arena --resume
    python benchmarks/arena.py --runs arena --page      # gathers what is there, and writes the page

What was gathered before and is not in the folder stays: runs may be made in several places.
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

import numpy as np
from scipy import stats

from fedclade.config import find_configs, read_scenarios
from fedclade.report.comparison_files import markdown_table
from fedclade.runs import Run, is_finished
from fedclade.tasks import mean_and_interval

ROOT = Path(__file__).parent.parent
PAGE, TEXT = ROOT / "docs" / "arena.md", Path(__file__).with_suffix(".md")
RESULTS, PRINTED = Path(__file__).with_name("arena_results.json"), Path(__file__).with_name("arena_printed.json")
KINDS = ("P(Y|X)", "P(X)", "P(X|Y)", "P(Y)")
CLUSTERED = (
    *("rcfl", "cfl", "cfl_rounds", "fl_hc", "fedgroup", "flexcfl", "ifca", "fesem", "pacfl", "stocfl", "feddrift"),
    *("flux", "fedem", "fedrc", "fedsoft"),
)
NEAR = 1.0
"""Points by which rcfl may be behind the first clustered method."""

Line = Mapping[str, Any]


def gathered(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a line for each finished run of the folder."""
    for path in find_configs("arena"):
        for scenario in read_scenarios(path):
            for method in scenario.configs:
                for seed in sorted((folder / scenario.folder / method).glob("seed-*")):
                    if is_finished(seed):
                        yield {"cell": scenario.name, "method": method, **line_of(Run.load(seed))}


def line_of(run: Run) -> dict[str, Any]:
    """Return the numbers of a run."""
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
        "right_in_round_3": rounds[2]["ari"] == 1.0,
    }


def merged(old: Sequence[Line], new: Sequence[Line]) -> list[Line]:
    """Return all lines, of two about one run the new one, in the order of the scenarios."""
    by_run = {(line["cell"], line["method"], line["seed"]): line for line in (*old, *new)}
    return [by_run[key] for key in sorted(by_run)]


def table_of(kind: str, lines: Sequence[Line]) -> str:
    """Return methods by levels: mean accuracy in percent with its interval, ARI, and the number of folds."""
    by_cell: dict[tuple[int, str], list[Line]] = defaultdict(list)
    for line in lines:
        name, _, level = line["cell"].rpartition(" ")
        if name.endswith(f" {kind}"):
            by_cell[int(level), line["method"]].append(line)
    levels = sorted({level for level, _ in by_cell}, reverse=True)
    rows: list[list[str]] = []
    for method in dict.fromkeys(line["method"] for line in sorted(lines, key=lambda line: place_of(line["method"]))):
        cells = [cell_of(by_cell[level, method], method) for level in levels]
        if any(cells):
            rows.append([f"`{method}`", *cells])
    return markdown_table(["config", *(f"level {level}" for level in levels)], rows)


def place_of(method: str) -> tuple[int, str]:
    """Return where a method stands in a table: what is clustered first."""
    return (CLUSTERED.index(method), "") if method in CLUSTERED else (len(CLUSTERED), method)


def cell_of(lines: Sequence[Line], method: str) -> str:
    """Return accuracy, interval, ARI of what makes clusters, and the folds if they are not three."""
    if not lines:
        return ""
    middle, half = mean_and_interval([100 * line["accuracy"] for line in lines])
    text = f"{middle:.1f}" + ("" if half is None else f" ± {half:.1f}")
    aris = [line["ari"] for line in lines if line["ari"] is not None]
    text += f" · {mean(aris):.2f}" if aris and method in CLUSTERED else ""
    return text + ("" if len(lines) == 3 else f" ({len(lines)})")


def standings(lines: Sequence[Line]) -> tuple[list[str], list[str]]:
    """Return the cells in which rcfl is first or nearly, and those where it is not, with who is, and by how much."""
    means: dict[str, dict[str, float]] = defaultdict(dict)
    for cell in dict.fromkeys(line["cell"] for line in lines):
        for method in CLUSTERED:
            if found := [line["accuracy"] for line in lines if (line["cell"], line["method"]) == (cell, method)]:
                means[cell][method] = 100 * mean(found)
    near: list[str] = []
    behind: list[str] = []
    for cell, each in means.items():
        if "rcfl" not in each or len(each) < 2:
            continue
        first = max(each, key=lambda method: each[method])
        gap = each[first] - each["rcfl"]
        if gap <= NEAR:
            near.append(cell)
        else:
            behind.append(f"{cell.removeprefix('mnist ')}: `{first}` is {gap:.1f} points ahead")
    return near, behind


def ranks(lines: Sequence[Line]) -> str:
    """Return mean ranks over cells and folds of what ran in all of them, and Nemenyi's critical difference."""
    by_set: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for line in lines:
        by_set[line["cell"], line["seed"]][line["method"]] = line["accuracy"]
    most = max(map(len, by_set.values()), default=0)
    sets = [each for each in by_set.values() if len(each) == most]
    methods = [method for method in sets[0] if all(method in each for each in sets)] if sets else []
    if len(sets) < 2 or len(methods) < 3:
        return ""
    table = np.array([[each[method] for method in methods] for each in sets])
    mean_ranks = stats.rankdata(-table, axis=1).mean(0)
    p_value = stats.friedmanchisquare(*table.T).pvalue
    k, n = len(methods), len(sets)
    critical = stats.studentized_range.ppf(0.95, k, np.inf) / np.sqrt(2) * np.sqrt(k * (k + 1) / (6 * n))
    ordered = sorted(zip(mean_ranks.tolist(), methods, strict=True))
    alike = [a for (rank, a), (other, b) in combinations(ordered, 2) if b == "rcfl" and other - rank < critical]
    rows = [[f"`{method}`", f"{rank:.2f}"] for rank, method in ordered]
    said = f"Mean ranks over {n} cells and folds (Friedman's p = {p_value:.1g}); ranks that differ by less than "
    said += f"{critical:.2f} are not told apart (Nemenyi, 0.05)"
    said += f", so ahead of `rcfl`, but not surely: {', '.join(f'`{a}`' for a in alike)}" if alike else ""
    return f"{said}.\n\n{markdown_table(['config', 'mean rank'], rows)}"


def costs(lines: Sequence[Line]) -> str:
    """Return time and traffic of each method."""
    by_method: dict[str, list[Line]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: place_of(line["method"])):
        by_method[line["method"]].append(line)
    rows = [
        [
            f"`{method}`",
            f"{mean(each['seconds'] for each in mine):.0f}",
            f"{mean(each['megabytes'] for each in mine):.1f}",
        ]
        for method, mine in by_method.items()
    ]
    return markdown_table(["config", "seconds", "MB"], rows)


def printed(lines: Sequence[Line]) -> str:
    """Return FLUX's figures beside ours, by level: theirs are means over the four kinds of shift."""
    theirs = json.loads(PRINTED.read_text(encoding="utf-8"))
    levels = (8, 5, 3, 1)
    rows: list[list[str]] = []
    for method, name in theirs["names"].items():
        each = theirs["known"][name]
        ours = [of_level(lines, method, level) for level in levels]
        rows.append([name, *(f"{each[level - 1]:.1f}" for level in levels), *ours])
    columns = ["config", *(f"theirs, {level}" for level in levels), *(f"ours, {level}" for level in levels)]
    return markdown_table(columns, rows)


def of_level(lines: Sequence[Line], method: str, level: int) -> str:
    """Return the mean over the four kinds, or nothing if one has not run."""
    of_kind = [
        [line["accuracy"] for line in lines if line["method"] == method and line["cell"] == f"mnist {kind} {level}"]
        for kind in KINDS
    ]
    return f"{100 * mean(map(mean, of_kind)):.1f}" if all(of_kind) else ""


def page(lines: Sequence[Line]) -> str:
    """Return the page: the text beside this script, with the tables."""
    near, behind = standings(lines)
    fedavg = [
        100 * line["accuracy"] for line in lines if (line["cell"], line["method"]) == ("mnist P(Y|X) 8", "fedavg")
    ]
    middle, half = mean_and_interval(fedavg)
    tables = [f"### {kind}\n\n{found}" for kind in KINDS if (found := table_of(kind, lines)).count("\n") > 1]
    return TEXT.read_text(encoding="utf-8").format(
        tables="\n\n".join(tables),
        runs=len(lines),
        near=len(near),
        cells=len(near) + len(behind),
        behind="\n".join(f"- {each}" for each in behind) or "- none",
        ranks=ranks(lines),
        costs=costs(lines),
        printed=printed(lines),
        fedavg=f"{middle:.1f}" + ("" if half is None else f" ± {half:.1f}"),
    )


def main() -> None:
    """Gather, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="the folder of the comparison")
    parser.add_argument("--page", action="store_true", help="write docs/arena.md")
    given = parser.parse_args()
    lines: list[Line] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    if given.runs is not None:
        lines = merged(lines, [*gathered(given.runs)])
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n", encoding="utf-8")
    if given.page:
        PAGE.write_text(page(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
