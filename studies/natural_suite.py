"""Write ``docs/natural.md`` and its pictures from the results of ``fedclade compare natural``.

The summary of the results in ``docs/choose-an-algorithm.md`` is also written.

    fedclade compare natural --data-dir DIR --out natural
    python studies/natural_suite.py --runs natural
    python studies/natural_suite.py

The option --runs first stores the results of a comparison's folder in
``results/natural/runs.parquet``. The text of the page is in ``studies/natural_suite.md``, in which
names in double braces stand for the tables and sentences that this script makes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

from fedclade.config import Scenario, find_configs, read_scenarios
from fedclade.report import LEVEL, rank_figure, style
from fedclade.sweeps import SetResults, TunedResults, TunedRun, read_folder, read_table, write_table
from fedclade.sweeps.tuned_results import HEADINGS, set_rows, write_p_value, write_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "natural.md"
CHOICE = ROOT / "docs" / "choose-an-algorithm.md"
RESULTS = ROOT / "results" / "natural" / "runs.parquet"
TEXT = Path(__file__).with_suffix(".md")

COSTS = ("steps", "bytes_up", "bytes_down", "rounds")
COST_HEADINGS = ("steps", "bytes up", "bytes down", "rounds")

METRICS = {"accuracy": "accuracy, %", "auroc": "AUROC, %", "mae": "mean absolute error"}
"""Names of metrics in headings; shares are in percent."""

PANEL_COLUMNS = 3


def scenarios() -> list[Scenario]:
    """Return the scenarios of the suite."""
    (path,) = find_configs("natural")
    return read_scenarios(path)


def in_order(runs: Sequence[TunedRun]) -> list[TunedRun]:
    """Return runs in the order of the suite: by data set and method, trials before other runs."""
    known = scenarios()
    sets = [scenario.name for scenario in known]
    methods = list(known[0].configs)
    purposes = ("trial", "test", "cost")

    def place(run: TunedRun) -> tuple[int, int, int, int]:
        return (
            sets.index(run.set),
            methods.index(run.method),
            purposes.index(run.purpose),
            run.number,
        )

    return sorted(runs, key=place)


# Tables and sentences.


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a Markdown table, whose first ``words`` columns are aligned at the left."""
    sides = [":--" if i < words else "--:" for i in range(len(headings))]
    lines = [headings, sides, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def list_names(names: Sequence[str]) -> str:
    """Return names of methods as code, with commas and a final 'and'."""
    codes = [f"`{name}`" for name in names]
    if len(codes) < 2:
        return "".join(codes)
    return f"{', '.join(codes[:-1])} and {codes[-1]}"


def sources_table() -> str:
    """Return the table of the data sets with sources and licences."""
    rows: list[list[str]] = []
    for scenario in scenarios():
        source = scenario.source
        if source is None:
            raise SystemExit(f"{scenario.name} has no source in configs/natural/natural.toml")
        config = next(iter(scenario.configs.values()))
        rows.append(
            [
                f"`{scenario.name}`",
                f"[{source.about}]({source.address})",
                source.licence,
                f"{len(source.sha256)}",
                f"`{config.data['target']}`",
                f"`{source.digest[:12]}`",
            ]
        )
    headings = ["data set", "source", "licence", "files", "target", "SHA-256 of all files"]
    return table(headings, rows, words=3)


def checksums() -> str:
    """Return an indented list of all files with checksums, in the format of ``sha256sum``."""
    lines: list[str] = []
    for scenario in scenarios():
        if scenario.source is not None:
            lines += [f"    {value}  {name}" for name, value in scenario.source.sha256.items()]
    return "\n".join(lines)


def settings_table() -> str:
    """Return the table of the main settings that are tuned."""
    tuning = scenarios()[0].tuning
    configs = scenarios()[0].configs
    if tuning is None:
        raise SystemExit("the suite has no tuning")
    rows: list[list[str]] = []
    for label, (setting, values) in tuning.settings.items():
        first = configs[label].algorithm[setting]
        tried = ", ".join(str(value) for value in (first, *values))
        rows.append([f"`{label}`", f"`{setting}`", tried])
    return table(["method", "main setting", "values"], rows, words=3)


def overview(results: TunedResults) -> str:
    """Return the table of mean scores by method and data set, the best mean rank first."""
    ranks = results.ranks
    methods = list(ranks.mean) if ranks is not None else results.methods
    rows: list[list[str]] = []
    for method in methods:
        cells = [_overview_cell(each, method) for each in results.sets]
        rank = "" if ranks is None else f"{ranks.mean[method]:.1f}"
        p_value = results.p_values.get(method)
        costs = [_write_cost(results.mean_cost(method, name)) for name in COSTS]
        p_text = "" if p_value is None else write_p_value(p_value)
        rows.append([f"`{method}`", *cells, rank, p_text, *costs])
    sets = [f"{each.name}: {METRICS[each.metric]}" for each in results.sets]
    return table(["method", *sets, "mean rank", "p (Holm)", *COST_HEADINGS], rows)


def _overview_cell(results: SetResults, method: str) -> str:
    """Return a method's mean score in a data set; the best one is bold."""
    if method not in results.complete:
        return "failed" if method in results.tests else ""
    text = write_score(results, results.mean(method))
    return f"**{text}**" if method == results.complete[0] else text


def _write_cost(cost: float | None) -> str:
    return "" if cost is None else f"{cost:.2f}"


def set_section(results: SetResults) -> str:
    """Return the section about a data set: its table, the first place, and the chosen settings."""
    rows: list[list[str]] = []
    for row in set_rows(results):
        method = row[0]
        chosen = next(iter(results.tests[method].values()))
        setting = f"`{chosen.setting}`" if chosen.setting else ""
        rows.append([f"`{method}`", *row[1:], f"{chosen.step_size:g}", setting])
    head = f"### {results.name}\n\n{results.clients} clients; score: {METRICS[results.metric]}."
    headings = [*HEADINGS, "step size", "main setting"]
    return f"{head} {first_place(results)}\n\n{table(headings, rows)}"


def first_place(results: SetResults) -> str:
    """Return the sentence about the best method of a data set, as the corrected tests allow it."""
    best = results.complete[0]
    if results.sole_best is not None:
        return f"`{best}` is significantly better than every other method."
    alike = [method for method, p_value in results.p_values.items() if p_value >= LEVEL]
    incomplete = [method for method in results.tests if method not in results.complete]
    text = (
        f"`{best}` has the best mean, and {len(alike)} of {len(results.p_values)} other methods do "
        "not differ from it significantly, so there is no first place."
    )
    if incomplete:
        text += f" Runs of {list_names(incomplete)} failed."
    return text


def summary(results: TunedResults) -> str:
    """Return the sentences about mean ranks and first places."""
    ranks = results.ranks
    if ranks is None:
        return f"There are results of {len(results.sets)} data sets, which are too few for ranks."
    best = next(iter(ranks.mean))
    alike = [name for name, rank in ranks.mean.items() if rank - ranks.mean[best] < ranks.critical]
    worse = [name for name in ranks.mean if name not in alike]
    p_value = "" if ranks.p_value is None else f"Friedman's test gives p = {ranks.p_value:.1g}"
    lines = [
        f"- Mean ranks: {p_value}, and the critical difference of {len(ranks.mean)} methods on "
        f"{ranks.sets} data sets is {ranks.critical:.1f} ranks (Nemenyi, 5 %). The best mean rank "
        f"has `{best}`, with {ranks.mean[best]:.1f}."
    ]
    if worse:
        lines.append(
            f"- By the critical difference, `{best}` is better than {list_names(worse)}, and does "
            "not differ from the other methods."
        )
    else:
        lines.append("- By the critical difference, no method differs from it.")
    significant = [name for name, p_value in results.p_values.items() if p_value < LEVEL]
    if significant:
        lines.append(f"- By Holm's procedure, it is better than {list_names(significant)}.")
    else:
        lines.append("- By Holm's procedure, it is not significantly better than any method.")
    if results.sole_best is None:
        lines.append(
            f"- So no method is first over all data sets: `{best}` is not significantly better than "
            "all others."
        )
    else:
        lines.append(f"- So `{best}` is first over all data sets.")
    firsts = [f"`{each.sole_best}` on `{each.name}`" for each in results.sets if each.sole_best]
    if firsts:
        lines.append(f"- Within single data sets, first places are: {', '.join(firsts)}.")
    else:
        lines.append("- On no single data set is a method better than all others.")
    return "\n".join(lines)


def against_fedavg(results: TunedResults) -> str:
    """Return the table of data sets in which each method is significantly better than FedAvg, or worse.

    A difference counts if its 95 % interval excludes zero; the tests are not corrected.
    """
    rows: list[list[str]] = []
    for method in results.methods:
        if method == "fedavg":
            continue
        better: list[str] = []
        worse: list[str] = []
        for each in results.sets:
            difference = each.difference(method, "fedavg")
            if difference is None or difference.half_width is None:
                continue
            if abs(difference.mean) > difference.half_width:
                (better if difference.mean > 0 else worse).append(each.name)
        rows.append([f"`{method}`", ", ".join(better) or "none", ", ".join(worse) or "none"])
    return table(["method", "better than `fedavg` on", "worse on"], rows, words=3)


def progress(results: TunedResults) -> str:
    """Return the sentence about the numbers of runs, and a warning if the suite is incomplete."""
    known = scenarios()
    tuning = known[0].tuning
    trials = 0 if tuning is None else tuning.trials
    each = trials + known[0].seeds + 1
    wanted = len(known) * len(known[0].configs) * each
    versions = results.runs[-1].versions
    text = (
        f"{len(results.runs):,} runs, {each} of each method and data set (2 CPU cores, Python "
        f"{versions['python']}, torch {versions['torch']})."
    )
    if len(results.runs) < wanted:
        sets = [each.name for each in results.sets]
        missing = [each.name for each in known if each.name not in sets]
        text += f" **The measurement is incomplete: {list_names(missing)} are missing.**"
    return text


def failures_text(results: TunedResults) -> str:
    """Return the sentence about failed runs."""
    failed = [run for run in results.runs if run.failure]
    if not failed:
        return "No run failed."
    trials = sum(run.purpose == "trial" for run in failed)
    by_method: dict[str, list[str]] = {}
    for run in failed:
        names = by_method.setdefault(run.method, [])
        if run.set not in names:
            names.append(run.set)
    names = "; ".join(f"`{method}` on {', '.join(sets)}" for method, sets in by_method.items())
    return (
        f"{len(failed)} runs failed, most often because training diverged at a large step size; "
        f"{trials} of them are trials, which then are not chosen: {names}."
    )


def complete_sets(runs: Sequence[TunedRun]) -> list[TunedRun]:
    """Return the runs on data sets on which every method has all its runs to compare."""
    known = scenarios()[0]
    found: list[TunedRun] = []
    for scenario in scenarios():
        own = [run for run in runs if run.set == scenario.name]
        tests = [run for run in own if run.purpose == "test" and run.method in known.configs]
        if len(tests) == len(known.configs) * known.seeds:
            found += own
    return found


def pictures(results: TunedResults) -> str:
    """Return the pictures of the page; without mean ranks only the one of scores."""
    lines: list[str] = []
    if results.ranks is not None:
        lines += [
            "![Critical-difference diagram of mean ranks](natural-ranks.svg)",
            "",
            "![Mean rank against training steps and bytes](natural-cost.svg)",
            "",
        ]
    lines += [
        "![Score against training steps on each data set](natural-scores.svg)",
        "",
        "In the picture of scores, a method is blue if no other method is both cheaper and better.",
    ]
    return "\n".join(lines)


def page(results: TunedResults) -> str:
    """Return the page."""
    known = scenarios()
    tuning = known[0].tuning
    config = known[0].configs["fedavg"]
    if tuning is None:
        raise SystemExit("the suite has no tuning")
    seeds = [known[0].first_seed + i for i in range(known[0].seeds)]
    values: Mapping[str, str] = {
        "against_fedavg": against_fedavg(results),
        "checksums": checksums(),
        "failures": failures_text(results),
        "hidden": str(config.model["hidden"]),
        "methods": str(len(known[0].configs)),
        "overview": overview(results),
        "pictures": pictures(results),
        "progress": progress(results),
        "rounds": str(config.top.rounds),
        "seeds": ", ".join(map(str, seeds)),
        "sets": "\n\n".join(set_section(each) for each in results.sets),
        "settings": settings_table(),
        "sources": sources_table(),
        "step_sizes": ", ".join(f"{size:g}" for size in tuning.step_sizes),
        "summary": summary(results),
        "trials": str(tuning.trials),
        "tuning_seed": str(tuning.seed),
    }
    text = TEXT.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], text)


MARKED = re.compile(
    r"(<!-- natural: written by studies/natural_suite\.py -->\n\n).*?(\n?<!-- natural: end -->)",
    re.DOTALL,
)
"""The summary in the page about choosing a method, between its two comments."""


def choice_page(results: TunedResults) -> str:
    """Return the page about choosing a method, with the summary of the results."""
    text = CHOICE.read_text(encoding="utf-8")
    return MARKED.sub(lambda found: f"{found[1]}{summary(results)}\n\n<!-- natural: end -->", text)


# Pictures.


def cost_figure(results: TunedResults) -> Figure:
    """Draw mean ranks against training steps and against bytes, as multiples of FedAvg's."""
    figure = style.new_figure(12, style.HEADER + 7.6)
    left, right = figure.subplots(1, 2)
    _draw_ranks(left, results, ("steps",), "training steps, as a multiple of FedAvg's")
    _draw_ranks(right, results, ("bytes_up", "bytes_down"), "bytes, as a multiple of FedAvg's")
    style.set_title(
        figure,
        "Mean rank against cost",
        "the best at the lower left; blue: no other method is both cheaper and better",
    )
    return figure


def _draw_ranks(axes: Axes, results: TunedResults, costs: Sequence[str], label: str) -> None:
    """Draw the methods' mean ranks against the mean of some costs."""
    ranks = results.ranks
    points: dict[str, tuple[float, float]] = {}
    for method in results.methods:
        found = [results.mean_cost(method, name) for name in costs]
        known = [cost for cost in found if cost is not None]
        if ranks is not None and method in ranks.mean and len(known) == len(costs):
            points[method] = (sum(known) / len(known), ranks.mean[method])
    _draw_points(axes, points, lower_is_better=True)
    axes.set_xlabel(label)
    axes.set_ylabel("mean rank")


def score_figure(results: TunedResults) -> Figure:
    """Draw mean scores against training steps, in a panel for each data set."""
    n_rows = -(-len(results.sets) // PANEL_COLUMNS)
    figure = style.new_figure(12, style.HEADER + 3.6 * n_rows)
    panels = figure.subplots(n_rows, PANEL_COLUMNS, squeeze=False)
    for place, axes in enumerate(panels.flat):
        if place >= len(results.sets):
            axes.set_axis_off()
            continue
        each = results.sets[place]
        unit = 100 if each.sign > 0 else 1
        points: dict[str, tuple[float, float]] = {}
        for method in each.complete:
            steps = each.steps(method)
            if steps is not None:
                points[method] = (steps, unit * each.mean(method))
        _draw_points(axes, points, lower_is_better=each.sign < 0, label_all=False)
        axes.set_title(f"{each.name}: {METRICS[each.metric]}", loc="left", fontsize=10)
        axes.set_xlabel("training steps, as a multiple of FedAvg's")
    style.set_title(
        figure,
        "Score against training steps",
        "blue and with a name: no other method is both cheaper and better; an error is better if lower",
    )
    return figure


def _draw_points(
    axes: Axes,
    points: Mapping[str, tuple[float, float]],
    *,
    lower_is_better: bool,
    label_all: bool = True,
) -> None:
    """Draw methods as points of cost and score; the efficient ones are blue and have names."""
    sign = -1 if lower_is_better else 1
    best = efficient(points, sign)
    axes.set_xscale("log")
    for name, (cost, score) in points.items():
        colour = style.ACCENT if name in best else style.MUTED
        axes.plot(cost, score, "o", ms=6, color=colour, alpha=0.85, mew=0, gid=name)
    shown = [name for name in points if label_all or name in best]
    _write_names(axes, points, shown, best)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 3, 5, 10) if _is_in_range(tick, points)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(color=style.FAINT, lw=0.6)
    axes.margins(x=0.16, y=0.08)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _is_in_range(tick: float, points: Mapping[str, tuple[float, float]]) -> bool:
    costs = [cost for cost, _ in points.values()]
    return bool(costs) and 0.8 * min(costs) <= tick <= 1.3 * max(costs)


def _write_names(
    axes: Axes, points: Mapping[str, tuple[float, float]], names: Sequence[str], best: Sequence[str]
) -> None:
    """Write the names of methods next to their points, moved apart where they would overlap."""
    scores = [score for _, score in points.values()]
    span = (max(scores) - min(scores)) or 1.0
    least = span / 38  # about the height of a line of text
    taken: list[tuple[float, float]] = []
    for name in sorted(names, key=lambda each: points[each][1]):
        cost, score = points[name]
        height = score
        while any(_overlap(cost, other) and abs(height - at) < least for other, at in taken):
            height += least / 4
        taken.append((cost, height))
        axes.annotate(
            f"  {name}",
            (cost, score),
            (cost, height),
            fontsize=7.5,
            va="center",
            color=style.ACCENT if name in best else style.INK,
        )


def _overlap(cost: float, other: float) -> bool:
    """Return whether names at two costs could overlap horizontally."""
    return max(cost, other) / min(cost, other) < 1.9


def efficient(points: Mapping[str, tuple[float, float]], sign: int) -> list[str]:
    """Return the methods to which no other one is at least as good in both cost and score.

    Parameters
    ----------
    points
        Cost and score of each method.
    sign
        1 if higher scores are better, otherwise -1.
    """
    found: list[str] = []
    for name, (cost, score) in points.items():
        is_beaten = any(
            other_cost <= cost
            and sign * other_score >= sign * score
            and (other_cost, other_score) != (cost, score)
            for other_cost, other_score in points.values()
        )
        if not is_beaten:
            found.append(name)
    return found


def save(figure: Figure, name: str) -> None:
    """Write a figure as SVG next to the page, the same bytes for the same results."""
    # The salt makes the identifiers in the file reproducible.
    with mpl.rc_context({"svg.hashsalt": "fedclade", "svg.fonttype": "none"}):
        figure.savefig(PAGE.with_name(name), format="svg", metadata={"Date": None})


def main() -> None:
    """Store results if a folder is given, and write the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder of 'fedclade compare natural'")
    given = parser.parse_args()
    if given.runs is not None:
        write_table(RESULTS, in_order(read_folder(given.runs)))
    results = TunedResults(complete_sets(read_table(RESULTS)))
    PAGE.write_text(page(results), encoding="utf-8")
    CHOICE.write_text(choice_page(results), encoding="utf-8")
    save(score_figure(results), "natural-scores.svg")
    if results.ranks is not None:
        save(cost_figure(results), "natural-cost.svg")
        save(rank_figure(results.ranks), "natural-ranks.svg")


if __name__ == "__main__":
    main()
