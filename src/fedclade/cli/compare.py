"""Commands ``compare`` and ``demo``: run several configs, each with several seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from time import monotonic

from rich.console import Console

from fedclade.cli import arguments, options
from fedclade.cli.compare_tuned import TunedOptions, compare_tuned
from fedclade.cli.options import interruptible, new_console, say
from fedclade.config import (
    Batch,
    Scenario,
    find_config,
    find_configs,
    is_scenario,
    read_config,
    read_scenarios,
    run_name,
)
from fedclade.core import ConfigError, RunError, shown
from fedclade.report import (
    Comparison,
    RunProgress,
    SuiteComparison,
    add_figures,
    count,
    event_table,
    shortened,
    tolerate_missing_figures,
    tree_view,
)
from fedclade.runs import Run

DEMO = ("fedavg", "cfl", "oracle", "local")
"""Algorithms of the demo."""


def demo(*, out: Path | None, engine: str | None, memory: str | None, quiet: bool) -> None:
    """Carry out the command ``fedclade demo``."""
    console = new_console()
    target = arguments.target_folder(out, "demo")
    changes = options.overrides(None, engine=engine)
    configs = {
        name: read_config(find_config(f"{name}-digits-label-swap"), changes) for name in DEMO
    }
    arguments.check_machine("auto", memory)
    console.print(
        "20 clients have handwritten digits. Each of four hidden groups swaps another pair of "
        "labels, so that no single model suits all clients. The server receives only model "
        "updates. Does it find the groups?\n"
    )
    progress = RunProgress(console, quiet=quiet)
    batch = Batch(progress.start, memory=memory, finished=_make_figure_drawer(console))
    with progress.shown(), interruptible(lambda: "start again with: fedclade demo") as batch.stop:
        runs = batch.run(configs, 1, target)
    _raise_failures(batch)
    comparison = Comparison(runs)
    cfl = runs["cfl"][0]
    console.print(comparison.table(console.width))
    _save_comparison(comparison, target, console)
    console.print(event_table(cfl))
    console.print(tree_view(cfl.tree, cfl))
    figures = target / "cfl" / "seed-0" / "figures"
    if figures.is_dir():  # not without the extra 'report'
        say(console, f"\nAll results are in {target}; the figures of CFL are in {figures}.")
        say(console, f"Compare all four in a browser with: fedclade report {target} --open")
    else:
        say(console, f"\nAll results are in {target}.")
    console.print("Next: fedclade ls configs, then fedclade run CONFIG --data-dir DIR")


def _make_figure_drawer(console: Console) -> Callable[[Run, Path], object]:
    """Return a function that draws the figures of a finished run into its folder."""
    return lambda run, folder: add_figures(run, folder, console)


def compare(
    *,
    configs: list[str],
    seeds: int | None,
    scale: str | None,
    out: Path | None,
    data_dir: Path | None,
    rounds: int | None,
    override: list[str] | None,
    device: str,
    engine: str | None,
    memory: str | None,
    log: list[str] | None,
    resume: bool,
    only: str,
    methods: str | None,
    at_most: float | None,
    quiet: bool,
) -> None:
    """Carry out the command ``fedclade compare``."""
    console = new_console()
    changes = options.overrides(override, rounds=rounds, engine=engine)
    paths = _find_paths(configs, scale)
    is_suite = is_scenario(paths[0])
    if is_suite:
        scenarios = _read_suite(paths, changes, scale)
        if any(scenario.tuning is not None for scenario in scenarios):
            _refuse_log(log)
            tuned = TunedOptions(only, methods, seeds, at_most, quiet=quiet)
            compare_tuned(scenarios, tuned, out, data_dir, device=device, memory=memory)
            return
    else:  # ordinary configs are treated as one scenario without a name
        scenarios = [Scenario("", {path.stem: read_config(path, changes) for path in paths}, 1)]
    if methods is not None:
        raise ConfigError(
            f"--methods {methods} applies only to suites whose methods are tuned, such as natural; "
            "use --only with a pattern instead"
        )
    target = arguments.target_folder(out, "compare", resume=resume)
    arguments.check_machine(device, memory)
    # Trackers that cannot be used are reported before the first run. Each run gets its own.
    arguments.build_callbacks(log)
    progress = RunProgress(console, quiet=quiet)
    batch = Batch(
        progress.start, data_dir, device, memory, callbacks=lambda: arguments.build_callbacks(log)
    )
    batch.only = only
    if at_most is not None:
        end = monotonic() + 60 * at_most
        batch.over = lambda: monotonic() > end
    if not is_suite:
        batch.finished = _make_figure_drawer(console)
    comparisons: dict[str, Comparison] = {}
    requested = _match_runs(only, scenarios, seeds)
    advice = f"continue with the same command and --out {target} --resume"
    with progress.shown(), interruptible(lambda: advice) as batch.stop:
        for scenario in scenarios:
            n_seeds = seeds or scenario.seeds
            folder = target / scenario.folder
            runs = batch.run(scenario.configs, n_seeds, folder, _run_prefix(scenario))
            if runs:
                comparisons[scenario.name] = Comparison(runs, scenario.name)
    if comparisons:
        comparison = _compare_suite(scenarios, comparisons) if is_suite else comparisons[""]
        console.print(comparison.table(console.width))
        try:
            _save_comparison(comparison, target, console)
            say(console, f"comparison folder: {target}")
        except RunError as error:
            batch.failures[str(error)] = ["comparison"]
    if left := requested & {*batch.left}:
        say(console, f"{len(left):,} of {count(len(requested), 'run')} left: {advice}")
    _raise_failures(batch)


def _refuse_log(log: Sequence[str] | None) -> None:
    """Check that no trackers are requested for a suite whose methods are tuned."""
    if log:
        raise ConfigError(
            f"--log {log[0]} cannot be combined with a suite whose methods are tuned; leave it out"
        )


def _find_paths(names: Sequence[str], scale: str | None) -> list[Path]:
    """Return the files of the configs or scenarios to compare.

    Raises
    ------
    ConfigError
        If two files have the same name, configs are mixed with scenarios, or a scale is given for
        configs, which have no scales.
    """
    paths: list[Path] = []
    for name in names:
        paths += find_configs(name)
    labels = [path.stem for path in paths]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise ConfigError(
            "configs to compare should have different names, got several named "
            f"{', '.join(repeated)}; rename the files"
        )
    ordinary = [path.stem for path in paths if not is_scenario(path)]
    if ordinary and scale is not None:
        raise ConfigError(
            f"the config {ordinary[0]} is not a scenario, so it does not support --scale; leave "
            "out --scale, or pass only scenarios, such as those in configs/suite"
        )
    if 0 < len(ordinary) < len(paths):
        raise ConfigError(
            f"the config {ordinary[0]} is not a scenario, so it cannot be compared with scenarios; "
            "pass only scenarios, such as those in configs/suite, or only configs"
        )
    return paths


def _read_suite(paths: Sequence[Path], changes: Sequence[str], scale: str | None) -> list[Scenario]:
    """Read the scenarios of all files, and check that they use different folders."""
    scenarios: list[Scenario] = []
    for path in paths:
        scenarios += read_scenarios(path, changes, scale)
    _check_folders(scenarios)
    return scenarios


def _check_folders(scenarios: Sequence[Scenario]) -> None:
    """Check that no two scenarios use the same folder, in which their runs would be mixed."""
    names: dict[str, str] = {}
    for scenario in scenarios:
        if scenario.folder in names:
            raise ConfigError(
                f"scenarios should have different names, got {shown(names[scenario.folder])} and "
                f"{shown(scenario.name)}, which would share the folder {scenario.folder}; rename "
                "one of them"
            )
        names[scenario.folder] = scenario.name


def _run_prefix(scenario: Scenario) -> str:
    """Return the beginning of the names of a scenario's runs; empty for ordinary configs."""
    return f"{scenario.name}: " if scenario.name else ""


def _match_runs(pattern: str, scenarios: Sequence[Scenario], seeds: int | None) -> set[str]:
    """Return the names of runs that match a pattern; raise a ConfigError if no run matches."""
    names: list[str] = []
    for scenario in scenarios:
        prefix = _run_prefix(scenario)
        n_seeds = seeds or scenario.seeds
        for label in scenario.configs:
            names += [run_name(prefix, label, seed, n_seeds) for seed in range(n_seeds)]
    matching = {name for name in names if fnmatch(name, pattern)}
    if not matching:
        raise ConfigError(
            f"--only {pattern!r} matches none of the runs, which are {shortened(names)}; correct "
            "the pattern"
        )
    return matching


def _compare_suite(
    scenarios: Sequence[Scenario], comparisons: dict[str, Comparison]
) -> SuiteComparison:
    """Return the comparison of several scenarios, with published results where they are known."""
    published = {s.printed.name: s.printed for s in scenarios if s.printed is not None}
    return SuiteComparison(comparisons, list(published.values()))


def _save_comparison(
    comparison: Comparison | SuiteComparison, target: Path, console: Console
) -> None:
    """Write a comparison to a folder, with its figures if these can be drawn."""
    with tolerate_missing_figures(console):
        comparison.save(target)
        return
    comparison.save(target, figure=False)


def _raise_failures(batch: Batch) -> None:
    """Raise a RunError that lists each error with the failed runs; do nothing without errors."""
    if batch.failures:
        problems = [f"{shortened(names)}: {error}" for error, names in batch.failures.items()]
        raise RunError("\n".join(problems))
