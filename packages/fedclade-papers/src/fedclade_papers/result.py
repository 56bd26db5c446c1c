"""Result of an experiment: its outcome, and the circumstances of the measurement."""

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
"""Version of the JSON file's layout."""


@dataclass(frozen=True)
class Result:
    """Contents of the file ``NAME-SCALE.json``."""

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
        """Stem of the result's file names."""
        return f"{self.name}-{self.scale}"

    def save(self, path: Path) -> None:
        """Write the result as a JSON file, which is never visible in part."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
        write_text(path, text + "\n")

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a result that :meth:`save` wrote.

        Raises
        ------
        RunError
            If the file is missing, damaged or of another format.
        """
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise RunError(
                    f"{path} has format {found['format']}, this version of fedclade reads format "
                    f"{FORMAT}"
                )
            found["outcome"] = Outcome.from_json(found["outcome"])
            found["differences"] = {
                key: tuple(values) for key, values in found["differences"].items()
            }
            found["seeds"] = tuple(found["seeds"])
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path} holds no result of an experiment: {type(error).__name__}: {error}"
            ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file under another name, then rename it, so that it is never seen in part."""
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
    """Measure an experiment at a scale.

    Parameters
    ----------
    experiment, scale
        The experiment, and the scale that gives its settings.
    changed
        Further changes of settings.
    data_dir, device, folder, say, stop
        As in :class:`ResultCache`.

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
            f"{experiment.name} needs the data set {missing[0]!r}, which is not in {data_dir}; "
            "name a folder that has it with --data-dir / FEDCLADE_DATA_DIR"
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
        machine=_machine(device),
        date=datetime.now(UTC).date().isoformat(),
        versions=versions(),
        command=" ".join([f"fedclade reproduce {experiment.name} --scale {scale}", *by_hand]),
        seconds=round(cache.seconds, 1),
        seeds=tuple(settings.get("seeds", ())),
    )


def missing_data(experiment: Experiment, scale: Scale, data_dir: Path | None) -> list[str]:
    """Return the data sets that an experiment needs and that a data folder lacks.

    Without a data folder none is missing, since data sets are then downloaded.
    """
    return [
        data
        for data in experiment.needs(scale)
        if data_dir is not None and not is_at_hand(data, data_dir)
    ]


def _plain(value: Any) -> Any:
    """Convert a NumPy number to a Python number for JSON; other types remain an error."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"an outcome should hold what JSON can, got {value!r}")


def _machine(device: str) -> dict[str, Any]:
    """Return the properties of the machine on which the time depends, without its name."""
    name = torch.cuda.get_device_name() if choose_device(device) == "cuda" else "cpu"
    return {
        "cpus": os.cpu_count(),
        "kind": platform.machine(),
        "device": name,
        "threads": torch.get_num_threads(),
    }
