"""Command ``sweep``: search for the settings with the best score on validation data."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from fedclade.cli import options
from fedclade.cli.options import interruptible, new_console, say
from fedclade.config import find_config
from fedclade.core import ConfigError
from fedclade.report import RunProgress, Score, tolerate_missing_figures
from fedclade.sweeps import Outcome, short, sweep
from fedclade.training import Actors


class Sampler(StrEnum):
    """Name of a sampler, which chooses the settings of the trials of a sweep."""

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
            help="Config key to vary, with its values: 'local.lr=0.01..0.3(log)' is a range on a "
            "logarithmic scale, 'local.epochs=1..5' a range of whole numbers, and "
            "'model.name=mlp,cnn' a list. Can be repeated.",
        ),
    ],
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", min=1, help="Number of trials. Default: 20, or all combinations of a grid."
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds",
            min=1,
            help="Runs of each trial, with seeds 0, 1, ...; their mean is the score.",
        ),
    ] = 1,
    sampler: Annotated[
        Sampler,
        typer.Option(
            "--sampler", help="Sampler of the trials; only tpe uses the scores of earlier trials."
        ),
    ] = Sampler.TPE,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampler.")] = 0,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            help="Metric on validation data to optimize. Default: the first metric of the task.",
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Number of parallel trials on this machine.")
    ] = 1,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run trials as tasks on a Ray cluster; see --actors.")
    ] = False,
    actors: Annotated[
        int | None, typer.Option("--actors", min=1, help="Number of parallel trials with --ray.")
    ] = None,
    actor_cores: Annotated[
        int | None, typer.Option("--actor-cores", min=1, help="CPU cores of each trial with --ray.")
    ] = None,
    ray_address: options.RayAddress = None,
    out: options.Out = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the sweep in --out: finished trials are read, others are continued.",
        ),
    ] = False,
    data_dir: options.DataDir = None,
    rounds: options.Rounds = None,
    override: options.Set = None,
    device: options.Device = "auto",
    engine: options.Engine = None,
    memory: options.Memory = None,
    quiet: options.Quiet = False,
) -> None:
    """Search for the settings of a config with the best score on validation data.

    Clients need validation data, such as with --set data.validation_fraction=0.2. Test data are not
    used for the search.

    'fedclade report' compares the trials in the folder, and 'fedclade run' takes best.toml, the
    best config.

    Example: fedclade sweep my.toml --over "local.lr=0.01..0.3(log)" --trials 20
    """
    console = new_console()
    path = find_config(config)
    ray_actors = options.collect_actors(actors, actor_cores, ray_address)
    if ray_actors is not None and not ray:
        raise ConfigError("--actors, --actor-cores and --ray-address need --ray; add it")
    if ray and ray_actors is None:
        ray_actors = Actors()
    target = options.target_folder(out, f"sweep-{path.stem}", resume=resume or out is not None)
    options.check_machine(device, memory)
    progress = RunProgress(console, quiet=quiet)

    def on_trial(number: int, values: Mapping[str, Any], outcome: Outcome, score: Score) -> None:
        if quiet:
            return
        settings = ", ".join(f"{key} {short(value)}" for key, value in values.items())
        result = f"{score.label} {score.text(outcome.score)} on validation data"
        say(console, f"trial {number}: {settings}: {outcome.failure or result}")

    then = f"continue with the same command and --out {target} --resume"
    with progress.shown(), interruptible(lambda: then) as stop:
        result = sweep(
            path,
            over,
            target,
            trials=trials,
            seeds=seeds,
            sampler=sampler.value,
            seed=seed,
            metric=metric,
            processes=processes,
            ray=ray_actors,
            overrides=options.overrides(override, rounds=rounds, engine=engine),
            data_dir=data_dir,
            device=device,
            memory=memory,
            resume=resume,
            on_start=progress.start,
            on_trial=on_trial,
            stop=stop,
        )
    console.print(result.table())
    with tolerate_missing_figures(console):
        result.save_pictures()
    result.save()
    say(console, f"comparison folder: {target}")
    if not quiet:
        say(console, f"run the best config with: fedclade run {target / 'best.toml'}")
