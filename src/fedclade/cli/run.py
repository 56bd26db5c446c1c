"""The commands ``run`` and ``resume``: one run, from its start or from its newest checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli import options
from fedclade.cli.options import interruptible, new_console, say
from fedclade.config import Config, find_config, read_config
from fedclade.core import ConfigError, RunError, UntrustedNameError, has_imported_names, reading_folder
from fedclade.report import RunProgress, add_figures, show_run
from fedclade.report.page import PORT, Dashboard
from fedclade.runs import CONFIG, Callback, Run, is_finished, is_unfinished, read_run_config
from fedclade.training import Actors


def run_config(
    config: options.ConfigFile,
    out: options.Out = None,
    data_dir: options.DataDir = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Override the seed.")] = None,
    rounds: options.Rounds = None,
    override: options.Set = None,
    device: options.Device = "auto",
    engine: options.Engine = None,
    actors: options.Actors = None,
    actor_cores: options.ActorCores = None,
    ray_address: options.RayAddress = None,
    memory: options.Memory = None,
    dashboard: options.Dashboard = False,
    port: options.Port = PORT,
    log: options.Log = None,
    quiet: options.Quiet = False,
) -> None:
    """Run one config and keep everything about it in a run folder.

    Example: fedclade run configs/cfl-mnist-label-swap.toml --data-dir DIR --seed 1 --set algorithm.eps2=0.9
    """
    path = find_config(config)
    checked = read_config(path, options.overrides(override, seed=seed, rounds=rounds, engine=engine))
    target = options.target_folder(out, f"{path.stem}-seed{checked.top.seed}")
    options.check_machine(device, memory)
    on = options.actors_of(actors, actor_cores, ray_address)
    callbacks, of_dashboard = options.callbacks_of(log), port if dashboard else None
    _run_and_show(checked, target, path.stem, data_dir, device, on, memory, of_dashboard, callbacks, quiet)


def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was interrupted.")],
    data_dir: options.DataDir = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Go on to more rounds than were asked for.")] = None,
    finish: Annotated[bool, typer.Option("--finish", help="Run no further round; finish the run where it is.")] = False,
    device: options.Device = "auto",
    actors: options.Actors = None,
    actor_cores: options.ActorCores = None,
    ray_address: options.RayAddress = None,
    memory: options.Memory = None,
    dashboard: options.Dashboard = False,
    port: options.Port = PORT,
    log: options.Log = None,
    trust: options.Trust = False,
    quiet: options.Quiet = False,
) -> None:
    """Continue a run from its newest checkpoint; it ends as if it had not been interrupted.

    The config is the run's own; the data is looked for as by 'fedclade run'. A finished run can be given more rounds.
    With --finish, an interrupted run gets none: it is evaluated after the last round that was saved, and its results
    are written, so that it can be exported, reported and compared.

    Example: fedclade resume runs/cfl-mnist-label-swap-seed0 --data-dir DIR
    """
    if not is_finished(folder) and not is_unfinished(folder):
        raise RunError(f"{folder} is not a run folder: it has no {CONFIG}")
    if finish and rounds is not None:
        raise ConfigError(f"--finish adds no rounds, and --rounds {rounds} would; leave one of them out")
    if is_finished(folder) and (done := Run.load(folder).summary["rounds"]) >= (rounds or 0):
        say(new_console(), f"{folder} is finished after {done} rounds; there is nothing to continue")
        return
    if finish and "network" in read_run_config(folder):
        with reading_folder(trust=trust):
            _finish_and_show(folder, quiet)
        return
    if "network" in read_run_config(folder):
        raise RunError(
            f"{folder} is the run of a network, which only its clients can continue: start its ServerApp again with "
            "the same run config, and it goes on after the last checkpoint"
        )
    callbacks = options.callbacks_of(log)  # the user names these, and not the folder
    with reading_folder(trust=trust):
        try:
            config = read_config(folder / CONFIG, options.overrides(None, rounds=rounds))
        except UntrustedNameError:
            raise
        except ConfigError as error:
            raise ConfigError(f"{error}\na run begun by fedclade.simulate is continued by the same call") from error
        options.check_machine(device, memory)
        on = options.actors_of(actors, actor_cores, ray_address)
        of_dashboard = port if dashboard else None
        _run_and_show(
            config,
            folder,
            folder.name,
            data_dir=data_dir,
            device=device,
            actors=on,
            memory=memory,
            port=of_dashboard,
            callbacks=callbacks,
            quiet=quiet,
            finish=finish,
        )


def _finish_and_show(folder: Path, quiet: bool) -> None:
    """Finish the run of a network on its server, without clients; print what came out."""
    from fedclade.flower import finish_run  # an extra

    run, console = finish_run(folder), new_console()
    add_figures(run, folder, console)
    if not quiet:
        show_run(run, console)
    say(console, f"run folder: {folder}")


def _run_and_show(
    config: Config,
    folder: Path,
    name: str,
    data_dir: Path | None,
    device: str,
    actors: Actors | None,
    memory: str | None,
    port: int | None,
    callbacks: list[Callback],
    quiet: bool,
    *,
    finish: bool = False,
) -> None:
    """Run a config in a folder, from where it stands, with a dashboard if it has a port; print what came out."""

    def then() -> str:
        if not folder.exists():
            return "nothing was kept"
        trust = " --trust" if has_imported_names() else ""
        return f"continue with: fedclade resume {folder}{trust}"

    console, rounds = new_console(), config.top.rounds
    progress = RunProgress(console, quiet=quiet)
    with ExitStack() as stack:
        stack.enter_context(progress.shown())
        stop = stack.enter_context(interruptible(then))
        dashboard = None if port is None else stack.enter_context(Dashboard(name, rounds, folder, port))
        if dashboard is not None:
            say(console, f"dashboard: {dashboard.url}")
            callbacks.append(dashboard)
        run = config.run(
            config.federation(data_dir),
            device=device,
            actors=actors,
            memory=memory,
            callbacks=callbacks,
            on_round=progress.start(name, rounds),
            folder=folder,
            stop=stop,
            finish=finish,
        )
    add_figures(run, folder, console)
    if not quiet:
        show_run(run, console)
    say(console, f"run folder: {folder}")
    if not quiet:
        say(console, f"look at it with: fedclade report {folder} --open")
