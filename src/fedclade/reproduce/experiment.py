"""An experiment of a paper: what is set, what is measured, how it is drawn; and the bench that it is measured on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedclade.reproduce.outcome import Outcome

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
        The paper's own settings, as JSON has them.
    changes
        What is set otherwise at the scales ``smoke`` (under 20 seconds) and ``laptop`` (under 10 minutes on 2 cores).
    measure
        Makes the outcome of settings.
    draw
        Draws the outcome of settings, in the manner of the paper's figure; only matplotlib's object interface.
    data
        The data sets that must be at hand, as of ``fedclade ls datasets``.
    """

    name: str
    source: str
    title: str
    paper: Settings
    changes: Mapping[Literal["smoke", "laptop"], Settings]
    measure: Callable[[Bench, Settings], Outcome]
    draw: Callable[[Outcome, Settings], Figure]
    data: tuple[str, ...] = ()

    def settings(self, scale: Scale) -> Settings:
        """Return the settings of a scale."""
        return self.paper if scale == "paper" else {**self.paper, **self.changes[scale]}

    def differences(self, scale: Scale) -> Mapping[str, tuple[Any, Any]]:
        """Return by name what is set otherwise than in the paper: the paper's value, and this scale's."""
        ours = self.settings(scale)
        return {key: (value, ours[key]) for key, value in self.paper.items() if ours[key] != value}


class Bench:
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
    """

    def __init__(
        self,
        settings: Settings,
        *,
        data_dir: Path | None = None,
        device: str = "auto",
        folder: Path | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.data_dir, self.device, self._say = data_dir, device, say
        self.seconds = 0.0
        """What the pieces took, those of earlier calls included."""
        digest = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        self._file = None if folder is None else folder / f"pieces-{digest}.jsonl"
        self._done = {} if self._file is None or not self._file.exists() else _read(self._file)

    def piece(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what ``make`` makes, as JSON has it; it is called only if no earlier call has kept this piece.

        Parameters
        ----------
        key
            Names the piece within the experiment: ``"c_max, seed 1"``.
        make
            Returns what JSON can hold.
        """
        if key not in self._done:
            self._say(key)
            start = time.perf_counter()
            value = json.loads(json.dumps(make()))
            self._done[key] = {"key": key, "seconds": time.perf_counter() - start, "value": value}
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a") as file:
                    file.write(json.dumps(self._done[key]) + "\n")
        self.seconds += self._done[key]["seconds"]
        return self._done[key]["value"]


def _read(file: Path) -> dict[str, Any]:
    """Return the pieces of a file by key; a last line that was cut off is none."""
    lines = file.read_text().splitlines(keepends=True)
    pieces = [json.loads(line) for line in lines if line.endswith("\n")]
    return {piece["key"]: piece for piece in pieces}
