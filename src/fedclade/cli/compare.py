"""The commands ``compare`` and ``demo``: several configs, each with several seeds, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.console import Console

from fedclade.cli import options
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
    tree_view,
    without_figures_if_need_be,
)

DEMO = ("fedavg", "cfl", "oracle", "local")


def demo(
    out: options.Out = None, engine: options.Engine = None, memory: options.Memory = None, quiet: options.Quiet = False
) -> None:
    """Run FedAvg, CFL, the oracle and local training on handwritten digits whose labels are swapped in four ways.

    Needs no data and takes less than a minute: the digits come with scikit-learn.
    """
    console = new_console()
    target = options.target_folder(out, "demo")
    changes = options.overrides(None, engine=engine)
    configs = {name: read_config(find_config(f"{name}-digits-label-swap"), changes) for name in DEMO}
    options.check_machine("auto", memory)
    console.print(
        "20 clients hold handwritten digits. Four hidden groups each swap another pair of labels, so no single model "
        "can suit everybody. The server sees nothing but model updates. Will it find the groups?\n"
    )
    progress = RunProgress(console, quiet=quiet)
    batch = Batch(progress.start, memory=memory, finished=lambda run, folder: add_figures(run, folder, console))
    with progress.shown(), interruptible(lambda: "start again with: fedclade demo") as batch.stop:
        runs = batch.run(configs, 1, target)
    _raise_failures(batch)
    comparison, cfl = Comparison(runs), runs["cfl"][0]
    console.print(comparison.table(console.width))
    _save_comparison(comparison, target, console)
    console.print(event_table(cfl))
    console.print(tree_view(cfl.tree, cfl))
    figures = target / "cfl" / "seed-0" / "figures"
    pictures = f"; the pictures of CFL in {figures}" if figures.is_dir() else ""  # not without the extra 'report'
    console.print(f"\nEverything is in {target}{pictures}.", markup=False)
    if pictures:
        say(console, f"Look at all four in a browser with: fedclade report {target} --open")
    console.print("Next: fedclade ls configs, then fedclade run CONFIG --data-dir DIR")


def compare(
    configs: Annotated[
        list[str], typer.Argument(help="TOML files, folders of them, or names of 'fedclade ls configs'.")
    ],
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Runs of each config, with seeds 0, 1, ...; 1 if left out.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option("--scale", help="Size of a scenario, such as smoke or laptop; as it stands without.")
    ] = None,
    out: options.Out = None,
    data_dir: options.DataDir = None,
    rounds: options.Rounds = None,
    override: options.Set = None,
    device: options.Device = "auto",
    engine: options.Engine = None,
    memory: options.Memory = None,
    log: options.Log = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in the folder --out: finished runs are read, others go on.")
    ] = False,
    only: Annotated[
        str, typer.Option("--only", metavar="PATTERN", help="Runs of such names, as '*rcfl*'; others are read.")
    ] = "*",
    at_most: Annotated[
        float | None, typer.Option("--at-most", metavar="MINUTES", min=0, help="Begin no run after so many.")
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Run several configs, each with several seeds, and put them in one table with 95 % intervals.

    The gap closed is (method - FedAvg) / (oracle - FedAvg); it needs a FedAvg and an oracle config of the same data.

    Scenarios, such as those in configs/suite, set all their algorithms the same task, and get a table each. Several
    also get mean ranks, with a critical-difference diagram in ranks.png; what a paper has printed may stand beside.
    Example: fedclade compare suite --scale smoke

    Many runs can be made in pieces, and by several processes at once, in one folder.
    Example: fedclade compare arena --out arena --resume --only '*P(Y|X) 8*' --at-most 10
    """
    console = new_console()
    paths = [path for config in configs for path in find_configs(config)]
    labels = [path.stem for path in paths]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(f"each config can be compared once, got more than one named {', '.join(twice)}")
    changes = options.overrides(override, rounds=rounds, engine=engine)
    ordinary = [path.stem for path in paths if not is_scenario(path)]
    if ordinary and (scale is not None or len(ordinary) < len(paths)):
        why = "has no scales" if scale is not None else "cannot be compared with scenarios"
        raise ConfigError(f"the config {ordinary[0]} {why}; name scenarios only, such as those in configs/suite")
    if ordinary:  # all that is not said for each scenario is as if they were one without a name
        scenarios = [Scenario("", {path.stem: read_config(path, changes) for path in paths}, 1)]
    else:
        scenarios = [each for path in paths for each in read_scenarios(path, changes, scale)]
    _check_folders(scenarios)
    target = options.target_folder(out, "compare", resume=resume)
    options.check_machine(device, memory)
    options.callbacks_of(log)  # to find out now whether they can be had; each run gets its own
    progress = RunProgress(console, quiet=quiet)
    batch = Batch(progress.start, data_dir, device, memory, callbacks=lambda: options.callbacks_of(log))
    batch.only, end = only, None if at_most is None else monotonic() + 60 * at_most
    batch.over = lambda: end is not None and monotonic() > end
    if ordinary:
        batch.finished = lambda run, folder: add_figures(run, folder, console)
    found: dict[str, Comparison] = {}
    asked_for = _matching(only, scenarios, seeds)
    then = f"continue with the same command and --out {target} --resume"
    with progress.shown(), interruptible(lambda: then) as batch.stop:
        for each in scenarios:
            prefix = f"{each.name}: " if each.name else ""
            if runs := batch.run(each.configs, seeds or each.seeds, target / each.folder, prefix):
                found[each.name] = Comparison(runs, each.name)
    if found:
        printed = list({each.printed.name: each.printed for each in scenarios if each.printed is not None}.values())
        comparison = found[""] if ordinary else SuiteComparison(found, printed)
        console.print(comparison.table(console.width))
        try:
            _save_comparison(comparison, target, console)
            say(console, f"comparison folder: {target}")
        except RunError as error:
            batch.failures[str(error)] = ["comparison"]
    if left := asked_for & {*batch.left}:
        say(console, f"{len(left):,} of {count(len(asked_for), 'run')} left: {then}")
    _raise_failures(batch)


def _check_folders(scenarios: Sequence[Scenario]) -> None:
    """Check that no two scenarios share a folder, where the runs of one would count for both."""
    names: dict[str, str] = {}
    for each in scenarios:
        if each.folder in names:
            raise ConfigError(
                f"scenarios should have names of their own, got {shown(names[each.folder])} and {shown(each.name)}, "
                f"which share the folder {each.folder}"
            )
        names[each.folder] = each.name


def _matching(pattern: str, scenarios: Sequence[Scenario], seeds: int | None) -> set[str]:
    """Return the names of runs that a pattern matches; a ConfigError if there is none."""
    names = [
        run_name(f"{each.name}: " if each.name else "", label, seed, seeds or each.seeds)
        for each in scenarios
        for label in each.configs
        for seed in range(seeds or each.seeds)
    ]
    if found := {name for name in names if fnmatch(name, pattern)}:
        return found
    raise ConfigError(f"--only {pattern!r} matches none of the runs, which are {shortened(names)}")


def _save_comparison(comparison: Comparison | SuiteComparison, target: Path, console: Console) -> None:
    with without_figures_if_need_be(console):
        comparison.save(target)
        return
    comparison.save(target, figure=False)


def _raise_failures(batch: Batch) -> None:
    """Raise a RunError that says what failed, each error once with the runs that it ended; none if all finished."""
    if batch.failures:
        raise RunError("\n".join(f"{shortened(names)}: {error}" for error, names in batch.failures.items()))
