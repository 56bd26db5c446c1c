"""The command ``assign``: newcomers to a finished run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli import options
from fedclade.cli.options import new_console, say
from fedclade.config import Config, check_config, find_config, read_config, read_toml
from fedclade.core import ConfigError, RunError, UntrustedNameError, reading_folder
from fedclade.data import Federation
from fedclade.report import newcomer_table
from fedclade.runs import Run, assign

SAME_VIEWS = ("name", "partition", "shift", "clusters")
"""Keys of ``[data]`` that, with the seed, say what a true cluster is."""


def assign_newcomers(
    folder: options.RunFolder,
    config: Annotated[
        str | None,
        typer.Option("--config", help="A TOML file whose clients are all newcomers, in place of those held back."),
    ] = None,
    data_dir: options.DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the table to this .csv or .json; RUN/newcomers.csv and .json if left out."),
    ] = None,
    device: options.Device = "auto",
    engine: options.Engine = None,
    memory: options.Memory = None,
    without_labels: Annotated[
        bool,
        typer.Option(
            "--without-labels",
            help="Assign by what the root's model makes of images, as if there were no labels; with the run's clients.",
        ),
    ] = False,
    only_fitting: Annotated[
        bool,
        typer.Option("--only-fitting", help="Give each the deepest model that fits it, not the leaf's it comes to."),
    ] = False,
    trust: options.Trust = False,
) -> None:
    """Send newcomers down the tree of a finished run, and measure what the model that each gets is worth.

    Newcomers are the clients that the run's config held back (newcomers.clients = 10), or those of another config.
    """
    if out is not None and out.suffix not in (".csv", ".json"):
        raise RunError(f"--out should end in .csv or .json, got {out}")
    options.made_for(out)
    options.check_machine(device, memory)
    console, run = new_console(), Run.load(folder, trust=trust)
    with reading_folder(trust=trust):
        own = _config_of(run, folder)
        needs_members = without_labels or own.newcomers.without_labels
        members = own.federation(data_dir) if needs_members else None
        held_back = _held_back(own, folder, data_dir) if config is None else None
    federation = held_back or _all_of(find_config(config or ""), own, data_dir)
    how = partial(assign, device=device, engine=engine, memory=memory)
    found = how(run, federation, only_fitting=only_fitting, members=members)
    written = [found.save(path) for path in ([out] if out else [folder / f"newcomers{s}" for s in (".csv", ".json")])]
    console.print(newcomer_table(found, run))
    say(console, f"written: {', '.join(str(path) for path in written)}")


def _config_of(run: Run, folder: Path) -> Config:
    """Return the config of a run that was made from one."""
    try:
        return check_config(run.config)
    except UntrustedNameError:
        raise
    except ConfigError as error:
        raise RunError(
            f"{folder} was not made from a config, so its clients cannot be loaded again; in Python, give them to "
            f"fedclade.assign ({str(error).splitlines()[0]})"
        ) from error


def _held_back(config: Config, folder: Path, data_dir: Path | None) -> Federation:
    if config.newcomers.clients == 0:
        raise RunError(
            f"{folder} held no clients back; name newcomers with --config NEW.toml, or run its config again with --set "
            "newcomers.clients=10"
        )
    newcomers = config.federation(data_dir).newcomers
    assert newcomers is not None  # as there are more than none
    return newcomers


def _all_of(path: Path, own: Config, data_dir: Path | None) -> Federation:
    """Return all clients of another config; their true clusters only if they are numbered as those of the run."""
    config = read_config(path)
    if "model" in read_toml(path) and config.model != own.model:
        raise ConfigError(
            f"{path}: [model] should be that of the run, {own.model}, or left out, got {config.model}: newcomers get "
            "one of the run's models"
        )
    trained = config.federation(data_dir)
    everybody = trained if trained.newcomers is None else trained.join(trained.newcomers)
    known = config.top.seed == own.top.seed and all(config.data.get(key) == own.data.get(key) for key in SAME_VIEWS)
    return everybody if known else replace(everybody, true_clusters=None)
