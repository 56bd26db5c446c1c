"""An experiment of a paper: what is set, what is measured, how it is drawn; and the bench that it is measured on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedclade.core import (
    ConfigError,
    RunError,
    RunInterrupted,
    remove,
    unknown,
)
from fedclade.data import SOURCES
from fedclade.papers.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["smoke", "laptop", "paper"]
Settings = Mapping[str, Any]
"""Of one scale; the paper's own are ``scales["paper"]``, and the others differ from them in what they name."""


@dataclass(frozen=True, eq=False)
class Experiment:
    """A table or figure of a paper.

    Parameters
    ----------
    name
        As it is asked for: ``cfl-fig5-data``.
    source
        Paper and place: ``"Sattler et al. 2019, figure 5"``.
    title
        What is shown, in a line.
    paper
        The paper's own settings, as JSON has them; those that it repeats with other draws are ``seeds``, a list.
    changes
        What is set otherwise at the scales ``smoke`` (under 20 seconds) and ``laptop`` (under 10 minutes on 2 cores).
    measure
        Makes the outcome of settings.
    draw
        Draws the outcome of settings, in the manner of the paper's figure; only matplotlib's object interface.
    data
        The data sets that it cannot do without, as of ``fedclade ls datasets``.
    pieces
        Names the folder of pieces that it shares with other experiments of the same settings, or of parts that are the
        same (see :meth:`ResultCache.within`); empty where it has its own.
    smoke_data
        The same as ``data`` at the scale ``smoke``; None where that needs the same.

    Raises
    ------
    ConfigError
        If a scale changes what is no setting of the paper's.
    """

    name: str
    source: str
    title: str
    paper: Settings
    changes: Mapping[Literal["smoke", "laptop"], Settings]
    measure: Callable[[ResultCache, Settings], Outcome]
    draw: Callable[[Outcome, Settings], Figure]
    data: tuple[str, ...] = ()
    pieces: str = ""
    smoke_data: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for scale, changes in self.changes.items():
            if odd := sorted(set(changes) - set(self.paper)):
                raise ConfigError(
                    f"{self.name}: the scale {scale!r} changes {odd}, which the paper's settings have not; "
                    "add them there"
                )

    def needs(self, scale: Scale) -> tuple[str, ...]:
        """Return the data sets that a scale cannot do without."""
        return self.smoke_data if scale == "smoke" and self.smoke_data is not None else self.data

    def settings(self, scale: Scale, changed: Settings | None = None) -> Settings:
        """Return the settings of a scale.

        Parameters
        ----------
        scale
            The scale.
        changed
            What is set otherwise besides.

        Raises
        ------
        ConfigError
            If that is no setting.
        """
        for key in changed or {}:
            if key not in self.paper:
                raise ConfigError(unknown(f"setting of {self.name}", key, self.paper))
        return {**self.paper, **({} if scale == "paper" else self.changes[scale]), **(changed or {})}

    def differences(self, settings: Settings) -> Mapping[str, tuple[Any, Any]]:
        """Return by name what is set otherwise than in the paper: the paper's value, and ours."""
        return {key: (value, settings[key]) for key, value in self.paper.items() if settings[key] != value}


class ResultCache:
    """Where experiments are measured, piece by piece; a piece that is done is kept.

    Parameters
    ----------
    settings
        Pieces made with other settings are not taken.
    data_dir
        As of ``--data-dir``.
    device
        ``auto``, ``cpu`` or ``cuda``.
    folder
        Keeps the pieces, so that an interrupted call goes on where it stopped; None keeps none.
    say
        Is told of each piece as it begins.
    stop
        Asked before every piece, and by :func:`fedclade.simulate` after every round.

    Raises
    ------
    RunError
        If the file of the pieces is damaged.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        data_dir: Path | None = None,
        device: str = "auto",
        folder: Path | None = None,
        say: Callable[[str], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.data_dir, self.device, self.stop = data_dir, device, stop
        self._say, self._root = say, folder
        self._taken = set[str]()
        self._seconds = 0.0
        self._within: dict[str, ResultCache] = {}
        digest = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        self._folder = None if folder is None else folder / digest
        self._file = None if self._folder is None else self._folder / "pieces.jsonl"
        self._done = {} if self._file is None or not self._file.exists() else _read(self._file)

    @property
    def seconds(self) -> float:
        """What the pieces took, those of earlier calls included, and each counted once."""
        return self._seconds + sum(bench.seconds for bench in self._within.values())

    def within(self, settings: Settings) -> ResultCache:
        """Return the bench of a part of the settings: its pieces are shared by all experiments that have the part.

        Their folder has to be one, too, see :attr:`Experiment.pieces`.
        """
        part = json.dumps(settings, sort_keys=True)
        if part not in self._within:
            how: dict[str, Any] = {"data_dir": self.data_dir, "device": self.device, "stop": self.stop}
            self._within[part] = ResultCache(settings, folder=self._root, say=self._say, **how)
        return self._within[part]

    def piece(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what ``make`` makes, as JSON has it; it is called only if no earlier call has kept this piece.

        Parameters
        ----------
        key
            Names the piece within the experiment: ``"c_max, seed 1"``.
        make
            Returns what JSON can hold.

        Raises
        ------
        RunInterrupted
            If the bench was asked to stop.
        """
        if key not in self._done:
            if self.stop():
                raise RunInterrupted(f"interrupted before the piece {key!r}", "the pieces before it are kept")
            self._say(key)
            start = time.perf_counter()
            value = json.loads(json.dumps(make()))
            self._done[key] = {"key": key, "seconds": time.perf_counter() - start, "value": value}
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a") as file:
                    file.write(json.dumps(self._done[key]) + "\n")
            if (folder := self.folder_for(key)) is not None:
                remove(folder)  # a run's folder can hold the updates of all clients
        if key not in self._taken:
            self._taken.add(key)
            self._seconds += self._done[key]["seconds"]
        return self._done[key]["value"]

    def folder_for(self, key: str) -> Path | None:
        """Return the run folder of a long piece, for ``simulate(folder=..., stop=bench.stop)``; None if none is kept.

        So a run that is interrupted goes on from its newest checkpoint. The seconds of a piece are those since then.
        Once the piece is kept, the folder is removed.
        """
        if self._folder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / re.sub(r"[^\w.=-]+", "-", key)

    def has(self, data: str) -> bool:
        """Tell whether a data set is at hand; of what may be left out where the data is not present."""
        return is_at_hand(data, self.data_dir)


def is_at_hand(data: str, data_dir: Path | None) -> bool:
    """Tell whether a data set comes with the package or lies in a data folder; the Hub is not asked.

    Parameters
    ----------
    data
        As of ``fedclade ls datasets``.
    data_dir
        As of ``--data-dir``; None is no folder.
    """
    folder = None if data_dir is None else data_dir.expanduser() / data
    return SOURCES[data].hub is None or (folder is not None and folder.is_dir() and any(folder.iterdir()))


def _read(file: Path) -> dict[str, Any]:
    """Return the pieces of a file by key; a last line that was cut off is none, and is taken away."""
    whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    try:
        pieces = [json.loads(line) for line in whole]
        done = {piece["key"]: {"seconds": float(piece["seconds"]), "value": piece["value"]} for piece in pieces}
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is damaged: {type(error).__name__}: {error}; remove it to measure anew") from error
    file.write_text("".join(whole))
    return done
