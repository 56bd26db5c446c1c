"""Commands ``predict`` and ``evaluate``: use the models of a finished run on new data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedclade.cli import arguments
from fedclade.cli.options import new_console, say
from fedclade.config import Config, check_config, find_config, read_config
from fedclade.core import ConfigError, RunError, UntrustedNameError, reading_folder
from fedclade.data import Federation
from fedclade.report import new_scores_table
from fedclade.runs import Run, check_table_file, evaluate, predict

TABLES = (".csv", ".tsv", ".parquet")
"""Endings of files that the argument DATA of ``fedclade evaluate`` may name."""


def predict_rows(
    *,
    folder: Path,
    rows: Path,
    out: Path,
    client: str | None,
    node: int | None,
    level: int | None,
    keep: list[str] | None,
    device: str,
    trust: bool,
) -> None:
    """Carry out the command ``fedclade predict``."""
    check_table_file(out)
    arguments.check_machine(device, None)
    run = Run.load(folder, trust=trust)
    found = predict(
        run, rows, client=client, node=node, level=level, keep=keep or (), device=device
    )
    written = found.save(out)
    by = f"the model of node {found.node}"
    if found.is_own:
        by = f"the own model of client {client}"
    say(new_console(), f"predictions of {len(found):,} rows by {by}: {written}")


def evaluate_data(
    *,
    folder: Path,
    data: str,
    split: str | None,
    out: Path | None,
    data_dir: Path | None,
    device: str,
    trust: bool,
) -> None:
    """Carry out the command ``fedclade evaluate``."""
    if out is not None:
        check_table_file(out)
    arguments.check_machine(device, None)
    run = Run.load(folder, trust=trust)
    if Path(data).is_dir():
        raise ConfigError(
            f"{data} is a folder; name its files by a pattern in quotation marks, such as "
            f"'{Path(data) / '*.csv'}'"
        )
    is_table = Path(data).suffix.lower() in TABLES
    with reading_folder(trust=trust):
        if is_table:
            federation = _load_files(run, folder, data, data_dir)
        else:
            federation = _load_config(run, data, data_dir)
    scores = evaluate(
        run, federation, split=split or ("all" if is_table else "test"), device=device
    )
    console = new_console()
    console.print(new_scores_table(scores, run))
    if out is not None:
        say(console, f"written: {scores.save(out)}")


def _load_files(run: Run, folder: Path, files: str, data_dir: Path | None) -> Federation:
    """Read files with the columns of a run, as the config of the run describes its own files."""
    if "files" not in run.config["data"]:
        raise ConfigError(
            f"the data of {folder} was not read from files, so the columns of {files} are unknown; "
            "name a config with the data in place of files"
        )
    section = {**run.config["data"], "files": files, "attributes": None}
    # As on a network, the file of a single client is enough.
    return _read_own_config(run, folder, section).own_files(data_dir).federation()


def _read_own_config(run: Run, folder: Path, section: dict[str, Any]) -> Config:
    """Return the config of a run with another section ``[data]``, encoded by the run's schema."""
    if run.schema is not None:
        section["schema"] = run.schema.as_dict()
    section = {key: value for key, value in section.items() if value is not None}
    kept = ("seed", "model", "local", "algorithm", "task")
    own = {key: value for key, value in run.config.items() if key in kept}
    own["data"] = section
    try:
        return check_config(own, on_network=True)
    except UntrustedNameError:
        raise
    except ConfigError as error:
        raise RunError(
            f"{folder} was not made from a config, so its data cannot be described; use "
            f"fedclade.evaluate in Python ({str(error).splitlines()[0]})"
        ) from error


def _load_config(run: Run, name: str, data_dir: Path | None) -> Federation:
    """Return the data of a config, encoded by the schema of the run if it is read from files."""
    config = read_config(find_config(name))
    if run.schema is not None and "files" in config.data and not config.data.get("schema"):
        config = replace(config, data={**config.data, "schema": run.schema.as_dict()})
    return config.federation(data_dir)
