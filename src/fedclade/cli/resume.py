"""The command ``resume``: go on with a run that was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli.console import new_console
from fedclade.cli.options import DataDirOption, DeviceOption, MemoryOption, QuietOption, check_machine, overrides
from fedclade.cli.progress import RunProgress
from fedclade.cli.run import run_and_show
from fedclade.cli.watch import PORT, DashboardOption, LogOption, PortOption, Watching
from fedclade.config import read_config
from fedclade.core import (
    ConfigError,
    RunError,
)
from fedclade.runs import (
    CONFIG,
    Run,
    is_finished,
    is_unfinished,
    read_run_config,
)


def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was interrupted.")],
    data_dir: DataDirOption = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Go on to more rounds than were asked for.")] = None,
    device: DeviceOption = "auto",
    memory: MemoryOption = None,
    dashboard: DashboardOption = False,
    port: PortOption = PORT,
    log: LogOption = None,
    quiet: QuietOption = False,
) -> None:
    """Continue a run from its newest checkpoint; it ends as if it had not been interrupted.

    The config is the run's own; the data is looked for as by 'fedclade run'. A finished run can be given more rounds.

    Example: fedclade resume runs/cfl-mnist-label-swap-seed0 --data-dir DIR
    """
    console = new_console()
    if not is_finished(folder) and not is_unfinished(folder):
        raise RunError(f"{folder} is not a run folder: it has no {CONFIG}")
    if is_finished(folder) and (done := Run.load(folder).summary["rounds"]) >= (rounds or 0):
        console.print(
            f"{folder} is finished after {done} rounds; there is nothing to continue", soft_wrap=True, markup=False
        )
        return
    if "network" in read_run_config(folder):
        raise RunError(
            f"{folder} is the run of a network, which only its clients can continue: start its ServerApp again with "
            "the same run config, and it goes on after the last checkpoint"
        )
    try:
        config = read_config(folder / CONFIG, overrides(None, rounds=rounds))
    except ConfigError as error:
        raise ConfigError(f"{error}\na run begun by fedclade.simulate is continued by the same call") from error
    check_machine(device, memory)
    progress = RunProgress(console, quiet=quiet)
    watching = Watching(dashboard, port, log)
    run_and_show(
        config, folder, folder.name, console, progress, watching, data_dir=data_dir, device=device, memory=memory
    )
