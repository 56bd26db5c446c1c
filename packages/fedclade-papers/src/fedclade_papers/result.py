"""Result of an experiment: its outcome, and the settings, machine, date and versions of the run."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedclade import DataError, RunError
from fedclade.runs import versions
from fedclade.training import choose_device
from fedclade_papers.cache import ResultCache, Settings, is_at_hand
from fedclade_papers.experiment import Experiment, Scale
from fedclade_papers.outcome import Outcome

FORMAT = 2
"""Version of the layout of the JSON files with results."""


@dataclass(frozen=True)
class Result:
    """Result of an experiment at a scale, as stored in the file ``NAME-SCALE.json``."""

    name: str
    source: str
    title: str
    scale: Scale
    outcome: Outcome
    #: Settings of the measurement.
    settings: Settings
    #: Settings that differ from the paper's, by name: the paper's value, and ours.
    differences: Mapping[str, tuple[Any, Any]]
    #: Number of CPUs, kind of machine, and the device used for training.
    machine: Mapping[str, Any]
    #: Date of the end of the measurement, ISO, UTC.
    date: str
    #: Versions of Python and of packages on which results can depend.
    versions: Mapping[str, str]
    #: Command that repeats the measurement.
    command: str
    #: Duration of all pieces together.
    seconds: float
    #: Seeds with which the experiment was repeated; empty if nothing is random.
    seeds: tuple[int, ...] = ()

    @property
    def stem(self) -> str:
        """Name of the result's files without suffix: the experiment's name and the scale."""
        return f"{self.name}-{self.scale}"

    def save(self, path: Path) -> None:
        """Write the result as a JSON file. Other programs never see a partly written file."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
        write_text(path, text + "\n")

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a result that :meth:`save` wrote.

        Raises
        ------
        RunError
            If the file is missing, damaged, or was written in another format.
        """
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise RunError(
                    f"the result {path} has format {found['format']}, but this version of fedclade "
                    f"reads format {FORMAT}; measure the experiment again"
                )
            found["outcome"] = Outcome.from_json(found["outcome"])
            found["differences"] = {
                key: tuple(values) for key, values in found["differences"].items()
            }
            found["seeds"] = tuple(found["seeds"])
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"cannot read the result of an experiment from {path}: {type(error).__name__}: "
                f"{error}; measure the experiment again"
            ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file so that other programs never see a partly written file.

    The text is written to a file with another name, which is then renamed.
    """
    beside = path.with_name(f".{path.name}.writing")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def measure(
    experiment: Experiment,
    scale: Scale,
    *,
    changed: Settings | None = None,
    data_dir: Path | None = None,
    device: str = "auto",
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Measure an experiment at a scale, and return the result.

    Parameters
    ----------
    experiment, scale
        The experiment, and the scale that determines the settings.
    changed
        Settings that the user changed, by name. None: no changes.
    data_dir, device, folder, say, stop
        Data folder, device, folder for pieces, and functions for messages and interruption, as in
        :class:`ResultCache`.

    Raises
    ------
    ConfigError
        If a key of ``changed`` is not a setting.
    DataError
        If a data set that the experiment needs is not in the data folder.
    RunInterrupted
        If ``stop`` returned True.
    """
    if missing := missing_data(experiment, scale, data_dir):
        raise DataError(
            f"experiment {experiment.name} needs the data set {missing[0]!r}, which is not in "
            f"{data_dir}; set --data-dir or the environment variable FEDCLADE_DATA_DIR to a folder "
            "that has it"
        )
    settings = experiment.settings(scale, changed)
    cache = ResultCache(
        settings, data_dir=data_dir, device=device, folder=folder, say=say, stop=stop
    )
    # A round trip through JSON, so that figures and tables made now equal those made from the file
    # later.
    outcome = json.loads(json.dumps(asdict(experiment.measure(cache, settings)), default=_plain))
    by_hand = [
        shlex.join(["--set", f"{key}={json.dumps(value)}"])
        for key, value in (changed or {}).items()
    ]
    return Result(
        **{key: getattr(experiment, key) for key in ("name", "source", "title")},
        scale=scale,
        outcome=Outcome.from_json(outcome),
        settings=settings,
        differences=experiment.differences(settings),
        machine=_describe_machine(device),
        date=datetime.now(UTC).date().isoformat(),
        versions=versions(),
        command=" ".join([f"fedclade reproduce {experiment.name} --scale {scale}", *by_hand]),
        seconds=round(cache.seconds, 1),
        seeds=tuple(settings.get("seeds", ())),
    )


def missing_data(experiment: Experiment, scale: Scale, data_dir: Path | None) -> list[str]:
    """Return the names of the data sets that an experiment needs and a data folder lacks.

    If ``data_dir`` is None, no data set is missing, since data sets are then downloaded.
    """
    return [
        data
        for data in experiment.needs(scale)
        if data_dir is not None and not is_at_hand(data, data_dir)
    ]


def _plain(value: Any) -> Any:
    """Convert a NumPy number to a Python number, which JSON can represent.

    Raises
    ------
    TypeError
        If the value is of another type.
    """
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"an outcome should contain only values that JSON can represent, got {value!r}")


def _describe_machine(device: str) -> dict[str, Any]:
    """Return the properties of this machine on which the time of a measurement depends.

    The machine's name is not included.
    """
    if choose_device(device) == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = "cpu"
    return {
        "cpus": os.cpu_count(),
        "kind": platform.machine(),
        "device": name,
        "threads": torch.get_num_threads(),
    }
