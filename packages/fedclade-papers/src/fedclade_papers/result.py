"""The result of an experiment: its outcome, and all that says how it came about."""

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
    """What ``NAME-SCALE.json`` holds."""

    name: str
    source: str
    title: str
    scale: Scale
    outcome: Outcome
    #: What it was measured with.
    settings: Settings
    #: By name what is set otherwise than in the paper: the paper's value, and ours.
    differences: Mapping[str, tuple[Any, Any]]
    #: Number of CPUs, kind of machine, the device that trained.
    machine: Mapping[str, Any]
    #: When it was finished, ISO, UTC.
    date: str
    #: Of Python and the packages that it can depend on.
    versions: Mapping[str, str]
    #: Repeats it.
    command: str
    #: What all its pieces took.
    seconds: float
    #: What was repeated with other draws; empty where nothing is drawn.
    seeds: tuple[int, ...] = ()

    @property
    def stem(self) -> str:
        """What its files are called."""
        return f"{self.name}-{self.scale}"

    def save(self, path: Path) -> None:
        """Write it as a JSON file, which appears whole."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
        write_text(path, text + "\n")

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what :meth:`save` wrote; a file that is missing, damaged or of another format raises RunError."""
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
    """Write a text file under another name and rename it, so that no reader finds half of it."""
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
    """Measure an experiment at a scale, with ``changed`` settings; for the others see :class:`ResultCache`.

    Raises
    ------
    ConfigError
        If one of ``changed`` is no setting.
    DataError
        If a data set that it needs is not in the data folder.
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
    # As JSON has it, so that what is drawn and written now is what is drawn and written of the
    # file.
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
    """Return the data sets that an experiment needs and a data folder lacks; without a folder they are fetched."""
    return [
        data
        for data in experiment.needs(scale)
        if data_dir is not None and not is_at_hand(data, data_dir)
    ]


def _plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python; what else JSON does not know stays an error."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"an outcome should hold what JSON can, got {value!r}")


def _machine(device: str) -> dict[str, Any]:
    """Return what the time depends on; never what the machine is called."""
    name = torch.cuda.get_device_name() if choose_device(device) == "cuda" else "cpu"
    return {
        "cpus": os.cpu_count(),
        "kind": platform.machine(),
        "device": name,
        "threads": torch.get_num_threads(),
    }
