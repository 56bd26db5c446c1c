"""Write ``docs/arena-judged.md`` and its two pictures from the runs of ``arena_judged.py``.

    python studies/arena_page.py            # writes them
    python studies/arena_page.py --check    # fails if they are not as they would be written

Whatever the page states about methods is computed from the runs. The text that does not depend on
them is ``arena_page.md``.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import arena
import arena_judged
import jsonl
import matplotlib as mpl
from matplotlib.figure import Figure
from scipy import stats

from fedclade.report.comparison_files import markdown_table
from fedclade.report.suite import Ranks, rank_figure, rank_methods
from fedclade.sweeps import holm

DOCS = Path(__file__).parent.parent / "docs"
TEXT = Path(__file__).with_suffix(".md")
PAGE = DOCS / "arena-judged.md"
RANKS_PICTURE = DOCS / "arena-judged.svg"
COSTS_PICTURE = DOCS / "arena-judged-costs.svg"

REFERENCE = "rcfl"
"""Method with which each other method is compared."""

BASE = "fedavg"
"""Method whose costs are 1."""

TITLES: Mapping[str, str] = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
"""Names of the data sets in sentences."""

LEVEL = 0.05

LABEL_GAP = 0.5
"""Smallest distance between two names in the picture of costs, in points of accuracy."""

Line = Mapping[str, Any]


def judged_lines(lines: Sequence[Line]) -> list[Line]:
    """Return the judged runs, with the names of fields that ``arena.py`` uses."""
    return [{**line, "seed": line["fold"]} for line in lines if line["stage"] == "judged"]


def shift_table(lines: Sequence[Line]) -> str:
    """Return the table of the four kinds of shift: a row for each method, a column for each kind."""
    cells = arena_judged.JUDGED_CELLS["mnist"]
    by_cell = {cell: [line for line in lines if line["cell"] == cell] for cell in cells}
    best = {cell: arena.best_of(found) for cell, found in by_cell.items()}
    rows: list[list[str]] = []
    for method in order_methods("mnist"):
        row = [f"`{method}`"]
        for cell, found in by_cell.items():
            folds = [line for line in found if line["method"] == method]
            row.append(arena.cell_of(folds, method, best=best[cell] == method))
        rows.append(row)
    kinds = [cell.split()[1].replace("|", "\\|") for cell in cells]
    return markdown_table(["method", *kinds], rows)


def dirichlet_table(lines: Sequence[Line]) -> str:
    """Return the table of CIFAR-10: accuracy and numbers of clusters."""
    found = [line for line in lines if line["data"] == "cifar10"]
    best = arena.best_of(found)
    rows: list[list[str]] = []
    for method in order_methods("cifar10"):
        folds = [line for line in found if line["method"] == method]
        clusters = ", ".join(str(line["clusters"]) for line in folds)
        if method not in arena.CLUSTERED:
            clusters = ""
        rows.append([f"`{method}`", arena.cell_of(folds, method, best=method == best), clusters])
    return markdown_table(["method", "accuracy, %", "clusters"], rows)


def order_methods(data: str) -> list[str]:
    """Return the methods of a data set in the order of the tables: methods that cluster first."""
    return sorted(arena_judged.methods_of(data), key=arena.place_of)


def rank_lines(lines: Sequence[Line]) -> Ranks | None:
    """Rank the methods over pairs of a cell and a fold, if enough of these have all methods.

    Methods that use true clusters are left out.
    """
    by_set: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for line in lines:
        if line["method"] not in arena_judged.UNKNOWN_CLUSTERS:
            by_set[line["cell"], line["fold"]][line["method"]] = line["accuracy"]
    methods = {method for found in by_set.values() for method in found}
    whole = {key: found for key, found in by_set.items() if found.keys() == methods}
    return rank_methods(whole)


def state_summary(found: Ranks | None) -> str:
    """Return the paragraph at the start of the page: which methods are first."""
    if found is None:
        return "The runs are not finished yet, so this page does not name a best method."
    first, *others = found.mean
    equal = [name for name in others if found.mean[name] - found.mean[first] < found.critical]
    text = f"In short: `{first}` has the best mean rank"
    if not equal:
        return f"{text}, significantly better than that of all other methods."
    named = ", ".join(f"`{name}`" for name in equal)
    return f"{text}, but not significantly better than {named}. [Who is first](#who-is-first) has the tests."


def state_ranks(found: Ranks | None) -> str:
    """Return the paragraphs about ranks, with a reference to the picture."""
    if found is None:
        return "Too few cells have runs of all methods to compute ranks."
    listed = ", ".join(f"`{name}` {rank:.1f}" for name, rank in found.mean.items())
    p_value = "not defined" if found.p_value is None else f"{found.p_value:.1g}"
    return (
        "In each cell and fold, the methods are ranked by accuracy; rank 1 is the most accurate. "
        "`oracle`, which uses the true clusters, is left out. The mean ranks over "
        f"{found.sets} pairs of a cell and a fold, in {found.scenarios} cells, are: {listed}. The "
        "p-value of Friedman's test, which is the probability of such differences if all methods "
        f"were equally good, is {p_value}. Two mean ranks that differ by less than "
        f"{found.critical:.2f} do not differ significantly, by Nemenyi's test at the level of 5 %, "
        "which is corrected for the comparison of all pairs of methods. A bar in the picture "
        "connects such methods. The folds of a cell are different draws of the data of one kind of "
        "shift, so the tests tell less about other kinds.\n\n"
        "![Critical-difference diagram: methods by mean rank, from the best on the left]"
        f"({RANKS_PICTURE.name})"
    )


def paired_differences(lines: Sequence[Line]) -> dict[str, list[float]]:
    """Return how much more accurate each method is than ``REFERENCE``, in points, by cell and fold."""
    scores = {
        (line["method"], line["cell"], line["fold"]): 100 * line["accuracy"] for line in lines
    }
    differences: dict[str, list[float]] = defaultdict(list)
    for (method, cell, fold), score in scores.items():
        reference = scores.get((REFERENCE, cell, fold))
        if method != REFERENCE and reference is not None:
            differences[method].append(score - reference)
    return differences


def holm_p_values(differences: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return p-values of Wilcoxon's signed-rank test for each method, with Holm's correction."""
    raw: dict[str, float] = {}
    for method, values in differences.items():
        raw[method] = float(stats.wilcoxon(values).pvalue) if any(values) else 1.0
    return holm(raw)


def difference_table(lines: Sequence[Line]) -> str:
    """Return the table that compares each method with ``REFERENCE``, and a sentence on the result."""
    differences = paired_differences(lines)
    if not differences:
        return ""
    p_values = holm_p_values(differences)
    rows: list[list[str]] = []
    for method in sorted(differences, key=lambda name: -mean(differences[name])):
        values = differences[method]
        better = sum(value > 0 for value in values)
        rows.append(
            [
                f"`{method}`",
                f"{mean(values):+.1f}",
                f"{better} of {len(values)}",
                f"{p_values[method]:.2g}",
            ]
        )
    significant = {name for name, p_value in p_values.items() if p_value < LEVEL}
    above = [name for name in significant if mean(differences[name]) > 0]
    below = [name for name in significant if mean(differences[name]) < 0]
    return (
        f"The next table compares each method with `{REFERENCE}` on the same cells and folds. The "
        "p-values are of Wilcoxon's signed-rank test, with Holm's correction for the number of "
        f"methods. At the level of 5 %, {list_names(above)} more accurate than `{REFERENCE}`, and "
        f"{list_names(below)} less accurate.\n\n"
    ) + markdown_table(["method", f"points above `{REFERENCE}`", "better in", "p-value"], rows)


def list_names(names: Sequence[str]) -> str:
    """Return names as the subject of a sentence, with its verb."""
    listed = ", ".join(f"`{name}`" for name in sorted(names, key=arena.place_of))
    if not names:
        return "no method is"
    return f"{listed} {'is' if len(names) == 1 else 'are'}"


def cost_ratios(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Return the mean costs of each method as multiples of ``BASE``'s, and its rounds to the best score."""
    base = {(line["cell"], line["fold"]): line for line in lines if line["method"] == BASE}
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        other = base.get((line["cell"], line["fold"]))
        if other is None:
            continue
        for key in ("steps", "bytes_up", "bytes_down"):
            ratios[line["method"]][key].append(line[key] / other[key] if other[key] else 0.0)
        if line["rounds_to_best"] is not None:
            ratios[line["method"]]["rounds_to_best"].append(line["rounds_to_best"])
        ratios[line["method"]]["accuracy"].append(100 * line["accuracy"])
    return {
        method: {key: mean(values) for key, values in found.items()}
        for method, found in ratios.items()
    }


def cost_table(lines: Sequence[Line]) -> str:
    """Return the table of costs beside the mean accuracy."""
    found = cost_ratios(lines)
    keys = ("steps", "bytes_up", "bytes_down")
    rows: list[list[str]] = []
    for method in sorted(found, key=arena.place_of):
        cost = found[method]
        ratios = [f"{cost[key]:.1f}" for key in keys]
        rounds = f"{cost['rounds_to_best']:.1f}" if "rounds_to_best" in cost else ""
        rows.append([f"`{method}`", f"{cost['accuracy']:.1f}", *ratios, rounds])
    head = ["method", "mean accuracy, %", "steps", "bytes up", "bytes down", "rounds to best"]
    return markdown_table(head, rows) if rows else "Nothing has run yet."


def draw_costs(lines: Sequence[Line]) -> bytes:
    """Draw mean accuracy against training steps and against bytes; return the picture as SVG."""
    found = {
        method: cost
        for method, cost in cost_ratios(lines).items()
        if method not in arena_judged.UNKNOWN_CLUSTERS
    }
    figure = Figure(figsize=(9, 6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.set(xlabel="training steps, multiple of FedAvg's", ylabel="mean accuracy, %")
    right.set(xlabel="bytes up and down, multiple of FedAvg's")
    heights = spread_out({name: cost["accuracy"] for name, cost in found.items()}, LABEL_GAP)
    costs = {
        left: {name: cost["steps"] for name, cost in found.items()},
        right: {name: (cost["bytes_up"] + cost["bytes_down"]) / 2 for name, cost in found.items()},
    }
    for axes, values in costs.items():
        beside = 1.12 * max(values.values())
        axes.set_xlim(right=1.35 * max(values.values()))
        for name, value in values.items():
            colour = "tab:orange" if name in arena.CLUSTERED else "tab:gray"
            accuracy = found[name]["accuracy"]
            axes.plot([value, beside], [accuracy, heights[name]], color="0.85", linewidth=0.6)
            axes.plot(value, accuracy, "o", color=colour, markersize=4)
            axes.text(beside, heights[name], f" {name}", va="center", fontsize=7)
    return as_svg(figure)


def spread_out(values: Mapping[str, float], gap: float) -> dict[str, float]:
    """Return the values, moved up as far as needed so that no two are nearer than ``gap``."""
    moved: dict[str, float] = {}
    lowest = -math.inf
    for name in sorted(values, key=lambda name: values[name]):
        moved[name] = max(values[name], lowest)
        lowest = moved[name] + gap
    return moved


def as_svg(figure: Figure) -> bytes:
    """Return a figure as SVG, with the same bytes for the same figure."""
    with mpl.rc_context({"svg.hashsalt": "arena"}):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def settings_table(lines: Sequence[Line]) -> str:
    """Return the table of the settings that were chosen for each method, and their validation scores."""
    rows: list[list[str]] = []
    for method in order_methods("mnist"):
        row = [f"`{method}`"]
        chosen = {
            data: arena_judged.chosen_setting(lines, method, data)
            for data in arena_judged.TUNING_CELLS
            if method in arena_judged.methods_of(data)
        }
        mnist = chosen["mnist"]
        options = ", ".join(
            f"`{name} = {json.dumps(value)}`"
            for name, value in (mnist or {"options": {}})["options"].items()
        )
        row.append(options)
        for data in arena_judged.TUNING_CELLS:
            setting = chosen.get(data)
            row.append("" if setting is None else f"{setting['lr']:g}")
        scores = arena_judged.scores_of(lines, method, "mnist")
        row.append("" if mnist is None else f"{100 * scores[json.dumps(mnist)]:.1f}")
        rows.append(row)
    head = ["method", "options", "step size, MNIST", "step size, CIFAR-10", "validation, MNIST, %"]
    return markdown_table(head, rows)


def state_largest(lines: Sequence[Line]) -> str:
    """Return the sentence that states for how many methods the largest step size was the best."""
    parts: list[str] = []
    for data, title in TITLES.items():
        chosen = {
            method: arena_judged.chosen_setting(lines, method, data)
            for method in arena_judged.methods_of(data)
        }
        known = {method: setting for method, setting in chosen.items() if setting is not None}
        largest = sum(
            setting["lr"] == max(step_sizes(method, data)) for method, setting in known.items()
        )
        parts.append(f"for {largest} of {len(known)} methods on {title}")
    return (
        f"The largest step size that a method tried was the best {' and '.join(parts)}; a still "
        "larger one might be better for these."
    )


def step_sizes(method: str, data: str) -> tuple[float, ...]:
    """Return the step sizes that a method tried on a data set."""
    if data == "mnist" and not arena_judged.SETTINGS[method]:
        return arena_judged.STEP_SIZES + arena_judged.FURTHER_STEP_SIZES
    return arena_judged.STEP_SIZES


def number_needed() -> int:
    """Return the number of judged runs of the whole arena."""
    return sum(
        len(arena_judged.methods_of(data)) * len(cells) * len(arena_judged.FOLDS)
        for data, cells in arena_judged.JUDGED_CELLS.items()
    )


def write_page(lines: Sequence[Line]) -> dict[Path, bytes]:
    """Return the contents of the page and of its pictures, by path."""
    judged = judged_lines(lines)
    found = rank_lines(judged)
    scatter = ""
    files: dict[Path, bytes] = {}
    if found is not None:
        files[RANKS_PICTURE] = as_svg(rank_figure(found))
    if judged:
        files[COSTS_PICTURE] = draw_costs(judged)
        scatter = (
            "![Mean accuracy against training steps, and against traffic, of each method]"
            f"({COSTS_PICTURE.name})"
        )
    text = TEXT.read_text(encoding="utf-8").format(
        summary=state_summary(found),
        step_sizes=list_numbers(arena_judged.STEP_SIZES),
        further=list_numbers(arena_judged.FURTHER_STEP_SIZES),
        mnist_images=arena_judged.IMAGES["mnist"],
        hours=sum(line.get("seconds", 0.0) for line in lines) / 3600,
        judged=len(judged),
        needed=number_needed(),
        mnist=shift_table(judged),
        cifar10=dirichlet_table(judged),
        ranks=state_ranks(found),
        differences=difference_table(judged),
        costs=cost_table(judged),
        scatter=scatter,
        largest=state_largest(lines),
        settings=settings_table(lines),
    )
    files[PAGE] = text.encode()
    return files


def list_numbers(numbers: Sequence[float]) -> str:
    """Return numbers as a list in words, such as "0.01, 0.02 and 0.05"."""
    *first, last = (f"{number:g}" for number in numbers)
    return f"{', '.join(first)} and {last}"


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if files differ")
    given = parser.parse_args()
    files = write_page(jsonl.read(arena_judged.RESULTS))
    stale = [path for path, data in files.items() if not path.exists() or path.read_bytes() != data]
    if given.check and stale:
        raise SystemExit(f"not as written from the runs: {', '.join(path.name for path in stale)}")
    for path in stale:
        path.write_bytes(files[path])
        print(path.name)


if __name__ == "__main__":
    main()
