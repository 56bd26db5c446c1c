"""Commands that run something: ``demo``, ``run``, ``compare``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedclade.cli.console import new_console
from fedclade.cli.interrupt import interruptible
from fedclade.cli.options import (
    DataDirOption,
    DeviceOption,
    EngineOption,
    MemoryOption,
    OutOption,
    QuietOption,
    RoundsOption,
    SetOption,
    check_machine,
    overrides,
    target_folder,
)
from fedclade.cli.progress import RunProgress
from fedclade.cli.watch import PORT, DashboardOption, LogOption, PortOption, Watching
from fedclade.config import (
    Config,
    find_config,
    find_configs,
    is_scenario,
    read_config,
    read_scenario,
)
from fedclade.core import (
    ConfigError,
    FedcladeError,
    RunError,
    RunInterrupted,
)
from fedclade.report import (
    Comparison,
    SuiteComparison,
    add_figures,
    event_table,
    shortened,
    show_run,
    tree_view,
    without_figures_if_need_be,
)
from fedclade.runs import Run

_log = logging.getLogger(__name__)

DEMO = ("fedavg", "cfl", "oracle", "local")


def demo(
    out: OutOption = None,
    engine: EngineOption = None,
    memory: MemoryOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run FedAvg, CFL, the oracle and local training on handwritten digits whose labels are swapped in four ways.

    Needs no data and takes less than a minute: the digits come with scikit-learn.
    """
    console = new_console()
    target = target_folder(out, "demo")
    changes = overrides(None, engine=engine)
    configs = {name: read_config(find_config(f"{name}-digits-label-swap"), changes) for name in DEMO}
    check_machine("auto", memory)
    console.print(
        "20 clients hold handwritten digits. Four hidden groups each swap another pair of labels, so no single model "
        "can suit everybody. The server sees nothing but model updates. Will it find the groups?\n"
    )
    runner = _Runner(None, "auto", memory, console, RunProgress(console, quiet=quiet))
    with runner.progress.shown(), interruptible(lambda: "start again with: fedclade demo") as runner.stop:
        runs = runner.run(configs, 1, target)
    runner.raise_failures()
    comparison, cfl = Comparison(runs), runs["cfl"][0]
    console.print(comparison.table(console.width))
    _save_comparison(comparison, target, console)
    console.print(event_table(cfl))
    console.print(tree_view(cfl.tree, cfl))
    figures = target / "cfl" / "seed-0" / "figures"
    pictures = f"; the pictures of CFL in {figures}" if figures.is_dir() else ""  # not without the extra 'report'
    console.print(f"\nEverything is in {target}{pictures}.", markup=False)
    if pictures:
        look = f"Look at all four in a browser with: fedclade report {target} --open"
        console.print(look, soft_wrap=True, markup=False)
    console.print("Next: fedclade ls configs, then fedclade run CONFIG --data-dir DIR")


def run_config(
    config: Annotated[str, typer.Argument(help="A TOML file, or a name of 'fedclade ls configs'.")],
    out: OutOption = None,
    data_dir: DataDirOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Override the seed.")] = None,
    rounds: RoundsOption = None,
    override: SetOption = None,
    device: DeviceOption = "auto",
    engine: EngineOption = None,
    memory: MemoryOption = None,
    dashboard: DashboardOption = False,
    port: PortOption = PORT,
    log: LogOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run one config and keep everything about it in a run folder.

    Example: fedclade run configs/cfl-mnist-label-swap.toml --data-dir DIR --seed 1 --set algorithm.eps2=0.9
    """
    console = new_console()
    path = find_config(config)
    checked = read_config(path, overrides(override, seed=seed, rounds=rounds, engine=engine))
    target = target_folder(out, f"{path.stem}-seed{checked.top.seed}")
    check_machine(device, memory)
    progress = RunProgress(console, quiet=quiet)
    watching = Watching(dashboard, port, log)
    run_and_show(
        checked, target, path.stem, console, progress, watching, data_dir=data_dir, device=device, memory=memory
    )


def run_and_show(
    config: Config,
    folder: Path,
    name: str,
    console: Console,
    progress: RunProgress,
    watching: Watching,
    *,
    data_dir: Path | None,
    device: str,
    memory: str | None,
) -> None:
    """Run a config in a folder, from where it stands, and print what came out.

    Raises
    ------
    RunInterrupted
        If the user pressed Ctrl-C.
    """

    def then() -> str:
        return f"continue with: fedclade resume {folder}" if folder.exists() else "nothing was kept"

    onlookers = watching.begun(name, config.top.rounds, folder, console)
    with progress.shown(), interruptible(then) as stop, onlookers as watched:
        on_round = watched.with_log(progress.start(name, config.top.rounds))
        run = config.run(
            config.federation(data_dir),
            device=device,
            memory=memory,
            on_round=on_round,
            folder=folder,
            stop=stop,
            follow=watched.follow,
        )
        watched.finished(run)
    add_figures(run, folder, console)
    if not progress.quiet:
        show_run(run, console)
    console.print(f"run folder: {folder}", soft_wrap=True, markup=False)
    if not progress.quiet:
        console.print(f"look at it with: fedclade report {folder} --open", soft_wrap=True, markup=False)


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
    out: OutOption = None,
    data_dir: DataDirOption = None,
    rounds: RoundsOption = None,
    override: SetOption = None,
    device: DeviceOption = "auto",
    engine: EngineOption = None,
    memory: MemoryOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in the folder --out: finished runs are read, others go on.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Run several configs, each with several seeds, and put them in one table with 95 % intervals.

    The gap closed is (method - FedAvg) / (oracle - FedAvg); it needs a FedAvg and an oracle config of the same data.

    Scenarios, such as those in configs/suite, set all their algorithms the same task, and get a table each.
    Example: fedclade compare suite --scale smoke
    """
    console = new_console()
    paths = [path for config in configs for path in find_configs(config)]
    labels = [path.stem for path in paths]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(f"each config can be compared once, got more than one named {', '.join(twice)}")
    changes = overrides(override, rounds=rounds, engine=engine)
    ordinary = [path.stem for path in paths if not is_scenario(path)]
    if ordinary and (scale is not None or len(ordinary) < len(paths)):
        why = "has no scales" if scale is not None else "cannot be compared with scenarios"
        raise ConfigError(f"the config {ordinary[0]} {why}; name scenarios only, such as those in configs/suite")
    runner = _Runner(data_dir, device, memory, console, RunProgress(console, quiet=quiet), figures=bool(ordinary))

    def then() -> str:
        return f"continue with the same command and --out {target} --resume"

    if ordinary:
        checked = {path.stem: read_config(path, changes) for path in paths}
        target = target_folder(out, "compare", resume=resume)
        check_machine(device, memory)
        with runner.progress.shown(), interruptible(then) as runner.stop:
            runs = runner.run(checked, seeds or 1, target)
        comparison = Comparison(runs) if runs else None
    else:
        scenarios = [read_scenario(path, changes, scale) for path in paths]
        target = target_folder(out, "compare", resume=resume)
        check_machine(device, memory)
        found: dict[str, Comparison] = {}
        with runner.progress.shown(), interruptible(then) as runner.stop:
            for each in scenarios:
                if runs := runner.run(each.configs, seeds or each.seeds, target / each.name, f"{each.name}: "):
                    found[each.name] = Comparison(runs, each.name)
        comparison = SuiteComparison(found) if found else None
    if comparison is not None:
        console.print(comparison.table(console.width))
        try:
            _save_comparison(comparison, target, console)
            console.print(f"comparison folder: {target}", soft_wrap=True, markup=False)
        except RunError as error:
            runner.failures[str(error)] = ["comparison"]
    runner.raise_failures()


def _save_comparison(comparison: Comparison | SuiteComparison, target: Path, console: Console) -> None:
    with without_figures_if_need_be(console):
        comparison.save(target)
        return
    comparison.save(target, figure=False)


@dataclass
class _Runner:
    """Runs configs one after the other, and goes on with the next when one fails.

    What an earlier call finished is read, and what it left unfinished is continued.
    """

    data_dir: Path | None
    device: str
    memory: str | None
    console: Console
    progress: RunProgress
    figures: bool = True
    stop: Callable[[], bool] = lambda: False
    failures: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """By what went wrong: the names of the runs."""

    def run(self, configs: Mapping[str, Config], seeds: int, target: Path, prefix: str = "") -> dict[str, list[Run]]:
        """Run every config with every seed into ``target/LABEL/seed-N``; return the runs that finished."""
        runs: dict[str, list[Run]] = {}
        for label, config in configs.items():
            for seed in range(seeds):
                name = f"{prefix}{label}" + (f" seed {seed}" if seeds > 1 else "")
                folder = target / label / f"seed-{seed}"
                try:
                    run = self._run(replace(config, top=replace(config.top, seed=seed)), name, folder)
                except RunInterrupted:
                    raise
                except FedcladeError as error:
                    self.failures.setdefault(str(error), []).append(name)
                    continue
                except Exception as error:  # of a model or data of the user's own, or of ours: the others go on
                    _log.exception("%s failed", name)
                    self.failures.setdefault(f"{type(error).__name__}: {error}", []).append(name)
                    continue
                if self.figures:
                    add_figures(run, folder, self.console)
                runs.setdefault(label, []).append(run)
        return runs

    def _run(self, config: Config, name: str, folder: Path) -> Run:
        if self.stop():
            raise RunInterrupted(f"interrupted before {name}", "")
        on_round = self.progress.start(name, config.top.rounds)
        return config.run(
            config.federation(self.data_dir),
            device=self.device,
            memory=self.memory,
            on_round=on_round,
            folder=folder,
            stop=self.stop,
        )

    def raise_failures(self) -> None:
        """Tell what failed, each error once with the runs that it ended; nothing if all finished."""
        if self.failures:
            raise RunError("\n".join(f"{shortened(names)}: {error}" for error, names in self.failures.items()))
