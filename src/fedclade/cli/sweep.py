"""Command ``sweep``: search for the settings with the best score on validation data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedclade.cli import arguments, options
from fedclade.cli.options import Sampler, interruptible, new_console, say
from fedclade.config import find_config
from fedclade.core import ConfigError
from fedclade.report import RunProgress, Score, tolerate_missing_figures
from fedclade.sweeps import Outcome, short, sweep
from fedclade.training import Actors


def sweep_config(
    *,
    config: str,
    over: list[str],
    trials: int | None,
    seeds: int,
    sampler: Sampler,
    seed: int,
    metric: str | None,
    processes: int,
    ray: bool,
    actors: int | None,
    actor_cores: int | None,
    ray_address: str | None,
    out: Path | None,
    resume: bool,
    data_dir: Path | None,
    rounds: int | None,
    override: list[str] | None,
    device: str,
    engine: str | None,
    memory: str | None,
    quiet: bool,
) -> None:
    """Carry out the command ``fedclade sweep``."""
    console = new_console()
    path = find_config(config)
    ray_actors = arguments.collect_actors(actors, actor_cores, ray_address)
    if ray_actors is not None and not ray:
        raise ConfigError("--actors, --actor-cores and --ray-address need --ray; add it")
    if ray and ray_actors is None:
        ray_actors = Actors()
    target = arguments.target_folder(out, f"sweep-{path.stem}", resume=resume or out is not None)
    arguments.check_machine(device, memory)
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
