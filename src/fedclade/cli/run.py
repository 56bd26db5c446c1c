"""Commands ``run`` and ``resume``: start a run, or continue one from its last checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fedclade.cli import arguments, options
from fedclade.cli.options import interruptible, new_console, say
from fedclade.cli.references import references_announced
from fedclade.config import Config, find_config, read_config
from fedclade.core import (
    ConfigError,
    RunError,
    UntrustedNameError,
    has_imported_names,
    reading_folder,
)
from fedclade.report import RunProgress, add_figures, show_run
from fedclade.report.page import Dashboard
from fedclade.runs import (
    CONFIG,
    Callback,
    Run,
    has_begun_references,
    is_finished,
    is_unfinished,
    lacks_references,
    read_run_config,
)
from fedclade.training import Actors


@dataclass(frozen=True, kw_only=True)
class _Execution:
    """Options of a run that are not stored in its config, such as the device and callbacks."""

    data_dir: Path | None
    device: str
    actors: Actors | None
    memory: str | None
    callbacks: list[Callback]
    port: int | None
    """Port of the dashboard; None for no dashboard."""
    quiet: bool


def run_config(
    *,
    config: str,
    out: Path | None,
    data_dir: Path | None,
    seed: int | None,
    rounds: int | None,
    override: list[str] | None,
    device: str,
    engine: str | None,
    actors: int | None,
    actor_cores: int | None,
    ray_address: str | None,
    memory: str | None,
    dashboard: bool,
    port: int,
    log: list[str] | None,
    quiet: bool,
) -> None:
    """Carry out the command ``fedclade run``."""
    path = find_config(config)
    overrides = options.overrides(override, seed=seed, rounds=rounds, engine=engine)
    checked = read_config(path, overrides)
    target = arguments.target_folder(out, f"{path.stem}-seed{checked.top.seed}")
    arguments.check_machine(device, memory)
    execution = _Execution(
        data_dir=data_dir,
        device=device,
        actors=arguments.collect_actors(actors, actor_cores, ray_address),
        memory=memory,
        callbacks=arguments.build_callbacks(log),
        port=port if dashboard else None,
        quiet=quiet,
    )
    _run_and_show(checked, target, path.stem, execution)


def resume(
    *,
    folder: Path,
    data_dir: Path | None,
    rounds: int | None,
    app: Path | None,
    superlink: str | None,
    finish: bool,
    device: str,
    actors: int | None,
    actor_cores: int | None,
    ray_address: str | None,
    memory: str | None,
    dashboard: bool,
    port: int,
    log: list[str] | None,
    trust: bool,
    quiet: bool,
) -> None:
    """Carry out the command ``fedclade resume``."""
    if not folder.exists():
        raise RunError(f"there is no folder {folder}; name the folder of a run")
    if not is_finished(folder) and not is_unfinished(folder):
        raise RunError(
            f"{folder} is not a run folder: it has no {CONFIG}; name the folder of a run"
        )
    if finish and rounds is not None:
        raise ConfigError(
            f"--finish trains no further rounds, but --rounds {rounds} requests a number of "
            "rounds; use only one of both options"
        )
    if is_finished(folder):
        run = Run.load(folder)
        done = run.summary["rounds"]
        if done >= (rounds or 0) and (finish or not lacks_references(run, folder)):
            message = f"{folder} is finished after {done} rounds; there is nothing to continue"
            say(new_console(), message)
            return
    if "network" in read_run_config(folder):
        with reading_folder(trust=trust):
            if finish:
                _finish_and_show(folder, quiet)
            else:
                _continue_network(folder, rounds, app, superlink)
        return
    if app is not None:
        raise ConfigError(
            f"--app {app} starts the app of a network again, but {folder} is the run of a "
            "simulation; leave --app out"
        )
    # The user names the callbacks, not the folder: their code may be imported without --trust.
    callbacks = arguments.build_callbacks(log)
    with reading_folder(trust=trust):
        config = _read_config_of_folder(folder, rounds)
        arguments.check_machine(device, memory)
        execution = _Execution(
            data_dir=data_dir,
            device=device,
            actors=arguments.collect_actors(actors, actor_cores, ray_address),
            memory=memory,
            callbacks=callbacks,
            port=port if dashboard else None,
            quiet=quiet,
        )
        # The references of a run may have been begun by 'fedclade report RUN --references'.
        references = True if has_begun_references(folder) else None
        _run_and_show(config, folder, folder.name, execution, finish=finish, references=references)


def _read_config_of_folder(folder: Path, rounds: int | None) -> Config:
    """Read the config in a run folder, with another number of rounds if given.

    Raises
    ------
    RunError
        If ``fedclade.simulate`` started the run: its data are not described by the config.
    """
    if options.is_from_program(read_run_config(folder)):
        change = "" if rounds is None else f" and rounds={rounds}"
        raise RunError(
            f"{folder} is the run of a Python program, which called fedclade.simulate, and only this "
            "program has its data and its model; to continue the run after its last checkpoint, run "
            f"the program again, with folder={str(folder)!r}{change} in this call"
        )
    try:
        return read_config(folder / CONFIG, options.overrides(None, rounds=rounds))
    except UntrustedNameError:
        raise
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nif fedclade.simulate started the run, repeat the same call to continue it"
        ) from error


def _continue_network(
    folder: Path, rounds: int | None, app: Path | None, superlink: str | None
) -> None:
    """Continue the run of a network, by a ServerApp that ``flwr run`` starts.

    Raises
    ------
    RunError
        If no app is given, or the run does not reach its end.
    """
    if app is None:
        more = "" if rounds is None else f", but with rounds = {rounds}"
        option = "" if rounds is None else f" --rounds {rounds}"
        raise RunError(
            f"{folder} is the run of a network, which can continue only with its clients: start "
            f"its ServerApp again with the same run config{more}, and the run continues after the "
            "last checkpoint; if the app is here and is configured by its pyproject.toml: "
            f"fedclade resume {folder}{option} --app DIR"
        )
    from fedclade.flower import continue_run  # an optional dependency

    continue_run(folder, app, rounds, superlink)
    say(new_console(), f"run folder: {folder}")


def _finish_and_show(folder: Path, quiet: bool) -> None:
    """Finish the run of a network from its folder, without clients, and print the results."""
    from fedclade.flower import finish_run  # an optional dependency

    run = finish_run(folder)
    console = new_console()
    add_figures(run, folder, console)
    if not quiet:
        show_run(run, console)
    say(console, f"run folder: {folder}")


def _run_and_show(
    config: Config,
    folder: Path,
    name: str,
    execution: _Execution,
    *,
    finish: bool = False,
    references: bool | None = None,
) -> None:
    """Run a config in a folder, from the last checkpoint if there is one, and print the results.

    Parameters
    ----------
    config
        The config.
    folder
        Run folder.
    name
        Name of the run in progress bars and on the dashboard.
    execution
        Options that are not stored in the config.
    finish
        Whether to train no further round, and only evaluate and write the results.
    references
        Whether to train the references of the run (each client alone, and one model for all); None:
        the config decides.
    """

    def advise_after_interrupt() -> str:
        if not folder.exists():
            return "nothing was stored"
        trust = " --trust" if has_imported_names() else ""
        return f"continue with: fedclade resume {folder}{trust}"

    console = new_console()
    rounds = config.top.rounds
    callbacks = list(execution.callbacks)
    progress = RunProgress(console, quiet=execution.quiet)
    with ExitStack() as stack:
        stack.enter_context(progress.shown())
        if not execution.quiet:
            stack.enter_context(references_announced(console))
        stop = stack.enter_context(interruptible(advise_after_interrupt))
        if execution.port is not None:
            dashboard = stack.enter_context(Dashboard(name, rounds, folder, execution.port))
            say(console, f"dashboard: {dashboard.url}")
            callbacks.append(dashboard)
        run = config.run(
            config.federation(execution.data_dir),
            device=execution.device,
            actors=execution.actors,
            memory=execution.memory,
            callbacks=callbacks,
            on_round=progress.start(name, rounds),
            folder=folder,
            stop=stop,
            finish=finish,
            references=references,
        )
    add_figures(run, folder, console)
    if not execution.quiet:
        show_run(run, console)
    say(console, f"run folder: {folder}")
    if not execution.quiet:
        say(console, f"open its report with: fedclade report {folder} --open")
