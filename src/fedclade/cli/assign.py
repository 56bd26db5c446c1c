"""Command ``assign``: assign newcomers to the clusters of a finished run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedclade.cli import arguments
from fedclade.cli.options import new_console, say
from fedclade.config import Config, check_config, find_config, read_config, read_toml
from fedclade.core import ConfigError, RunError, UntrustedNameError, reading_folder
from fedclade.data import Federation
from fedclade.report import newcomer_table
from fedclade.runs import Run, assign

TRUTH_KEYS = ("name", "partition", "shift", "clusters")
"""Keys of ``[data]`` that, together with the seed, determine the numbers of true clusters."""


def assign_newcomers(
    *,
    folder: Path,
    config: str | None,
    data_dir: Path | None,
    out: Path | None,
    device: str,
    engine: str | None,
    memory: str | None,
    without_labels: bool,
    only_fitting: bool,
    trust: bool,
) -> None:
    """Carry out the command ``fedclade assign``."""
    if out is not None and out.suffix not in (".csv", ".json"):
        raise RunError(f"--out should end in .csv or .json, got {out}")
    arguments.make_parent_folder(out)
    arguments.check_machine(device, memory)
    console = new_console()
    run = Run.load(folder, trust=trust)
    with reading_folder(trust=trust):
        run_config = _read_config_of_run(run, folder)
        needs_members = without_labels or run_config.newcomers.without_labels
        members = run_config.federation(data_dir) if needs_members else None
        federation = _load_held_back(run_config, folder, data_dir) if config is None else None
    if federation is None:
        assert config is not None
        federation = _load_all(find_config(config), run_config, data_dir)
    newcomers = assign(
        run,
        federation,
        device=device,
        engine=engine,
        memory=memory,
        only_fitting=only_fitting,
        members=members,
    )
    targets = [out] if out else [folder / "newcomers.csv", folder / "newcomers.json"]
    written = [newcomers.save(path) for path in targets]
    console.print(newcomer_table(newcomers, run))
    say(console, f"written: {', '.join(str(path) for path in written)}")


def _read_config_of_run(run: Run, folder: Path) -> Config:
    """Return the config of a run; raise a RunError if the run was not started from a config."""
    try:
        return check_config(run.config)
    except UntrustedNameError:
        raise
    except ConfigError as error:
        raise RunError(
            f"{folder} was not made from a config, so its clients cannot be loaded again; pass the "
            f"newcomers to fedclade.assign in Python ({str(error).splitlines()[0]})"
        ) from error


def _load_held_back(config: Config, folder: Path, data_dir: Path | None) -> Federation:
    """Return the newcomers that a run's config excluded from training."""
    if config.newcomers.clients == 0:
        raise RunError(
            f"the run {folder} held back no clients as newcomers; specify newcomers with --config "
            "NEW.toml, or run its config again with --set newcomers.clients=10"
        )
    newcomers = config.federation(data_dir).newcomers
    assert newcomers is not None  # their number is above 0
    return newcomers


def _load_all(path: Path, run_config: Config, data_dir: Path | None) -> Federation:
    """Return all clients of another config as newcomers.

    The true clusters of these clients are used only if they are numbered as in the run. This is the
    case if both configs have the same seed, and the same values of the keys :data:`TRUTH_KEYS`.
    """
    config = read_config(path)
    if "model" in read_toml(path) and config.model != run_config.model:
        raise ConfigError(
            f"{path}: [model] should be the model of the run, {run_config.model}, or left out, got "
            f"{config.model}, because newcomers receive one of the run's models"
        )
    federation = config.federation(data_dir)
    if federation.newcomers is not None:
        federation = federation.join(federation.newcomers)
    has_same_truth = config.top.seed == run_config.top.seed and all(
        config.data.get(key) == run_config.data.get(key) for key in TRUTH_KEYS
    )
    return federation if has_same_truth else replace(federation, true_clusters=None)
