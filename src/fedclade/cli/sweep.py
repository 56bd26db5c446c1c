"""The command ``sweep``: a search for the settings that do best on validation data."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from fedclade.cli import options
from fedclade.cli.options import interruptible, new_console, say
from fedclade.config import find_config
from fedclade.core import ConfigError
from fedclade.report import RunProgress, Score, without_figures_if_need_be
from fedclade.sweeps import Outcome, short, sweep
from fedclade.training import Actors


class Sampler(StrEnum):
    """How trials are drawn."""

    TPE = "tpe"
    RANDOM = "random"
    GRID = "grid"


def sweep_config(
    config: options.ConfigFile,
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="KEY=VALUES",
            help="What to vary, any key of the config: 'local.lr=0.01..0.3(log)' for a range, on a logarithmic scale; "
            "'local.epochs=1..5' for whole numbers; 'model.name=mlp,cnn' for a list. May be repeated.",
        ),
    ],
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="How many settings to try; 20, or all of a grid, if left out.")
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Runs of each trial, with seeds 0, 1, ...; their mean counts.")
    ] = 1,
    sampler: Annotated[
        Sampler,
        typer.Option("--sampler", help="How trials are drawn: by what those before came to (tpe), or regardless."),
    ] = Sampler.TPE,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what is drawn.")] = 0,
    metric: Annotated[
        str | None, typer.Option("--metric", help="What to go by, on validation data; the task's first if left out.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="How many trials run side by side on this machine.")
    ] = 1,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run trials as tasks of a Ray cluster; see --actors, --actor-cores.")
    ] = False,
    actors: Annotated[
        int | None, typer.Option("--actors", min=1, help="Of --ray: how many trials run side by side.")
    ] = None,
    actor_cores: Annotated[int | None, typer.Option("--actor-cores", min=1, help="Of --ray: of each trial.")] = None,
    ray_address: options.RayAddress = None,
    out: options.Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in the folder --out: trials that ended are read, others go on.")
    ] = False,
    data_dir: options.DataDir = None,
    rounds: options.Rounds = None,
    override: options.Set = None,
    device: options.Device = "auto",
    engine: options.Engine = None,
    memory: options.Memory = None,
    quiet: options.Quiet = False,
) -> None:
    """Search for the settings of a config that do best on validation data.

    Clients need validation data, such as with --set data.validation_fraction=0.2; test data have no part in it.

    The folder is that of a comparison, for 'fedclade report'; the best config is in best.toml, for 'fedclade run'.

    Example: fedclade sweep my.toml --over "local.lr=0.01..0.3(log)" --trials 20
    """
    console, path = new_console(), find_config(config)
    on = options.actors_of(actors, actor_cores, ray_address)
    if on is not None and not ray:
        raise ConfigError("--actors, --actor-cores and --ray-address are those of Ray; add --ray")
    target = options.target_folder(out, f"sweep-{path.stem}", resume=resume or out is not None)
    options.check_machine(device, memory)
    progress = RunProgress(console, quiet=quiet)

    def on_trial(number: int, values: Mapping[str, Any], outcome: Outcome, score: Score) -> None:
        if not quiet:
            drawn = ", ".join(f"{key} {short(value)}" for key, value in values.items())
            came_to = f"{score.label} {score.text(outcome.score)} on validation data"
            say(console, f"trial {number}: {drawn}: {outcome.failure or came_to}")

    then = f"continue with the same command and --out {target} --resume"
    with progress.shown(), interruptible(lambda: then) as stop:
        found = sweep(
            path,
            over,
            target,
            trials=trials,
            seeds=seeds,
            sampler=sampler.value,
            seed=seed,
            metric=metric,
            processes=processes,
            ray=(on or Actors()) if ray else None,
            overrides=options.overrides(override, rounds=rounds, engine=engine),
            data_dir=data_dir,
            device=device,
            memory=memory,
            resume=resume,
            on_start=progress.start,
            on_trial=on_trial,
            stop=stop,
        )
    console.print(found.table())
    with without_figures_if_need_be(console):
        found.save_pictures()
    found.save()
    say(console, f"comparison folder: {target}")
    if not quiet:
        say(console, f"run the best with: fedclade run {target / 'best.toml'}")
