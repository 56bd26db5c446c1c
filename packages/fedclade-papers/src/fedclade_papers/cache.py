"""Cache of the parts of an experiment, so that an interrupted measurement can continue.

A *piece* is a part of an experiment that is measured and stored as a whole, such as one run with
one seed.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn

from fedclade import (
    Algorithm,
    Federation,
    LocalTraining,
    Run,
    RunError,
    RunInterrupted,
    build_model,
    load_federation,
    simulate,
)
from fedclade.data import SOURCES
from fedclade.runs import Maker

Settings = Mapping[str, Any]
"""Settings of an experiment at one scale, in JSON's types."""

OF_A_FEDERATION = ("clients", "samples_per_client", "test_samples", "source_arguments")
"""Names of the settings that are passed to :func:`fedclade.load_federation`."""


def local_of(settings: Settings) -> LocalTraining:
    """Return the options of local training, such as epochs, from an experiment's settings."""
    return LocalTraining(
        **{
            each.name: settings[each.name]
            for each in fields(LocalTraining)
            if each.name in settings
        }
    )


def maker_of(federation: Federation, model: str, arguments: Settings | None = None) -> Maker:
    """Return a function that builds a model for the data of a federation from a seed.

    Parameters
    ----------
    federation
        Federation that determines the input shape, the number of outputs and the task.
    model
        Name of the model, as in a config.
    arguments
        Further arguments of the model. None: no further arguments.
    """
    schema = federation.pool.schema

    def make(seed: int) -> nn.Module:
        return build_model(
            model,
            input_shape=schema.input_shape,
            outputs=schema.outputs,
            task=schema.task,
            vocabulary_size=schema.vocabulary_size,
            seed=seed,
            arguments=arguments,
        )

    return make


class ResultCache:
    """Cache that measures the pieces of an experiment and stores them in a folder.

    A piece is a part of an experiment, such as one run. An interrupted measurement continues after
    the last stored piece. Pieces that were measured with other settings are not used.

    Parameters
    ----------
    settings
        Settings of the experiment on which the pieces depend.
    data_dir
        Folder with data sets. None: data sets are downloaded.
    device
        Device for training.
    folder
        Folder for the pieces. None: pieces are not stored.
    say
        Function that is called with the key of each piece before the piece is measured.
    stop
        Function that is called before every piece and after every round of a run. If the function
        returns True, the measurement is interrupted.

    Raises
    ------
    RunError
        If the file with stored pieces is damaged.
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
        self.data_dir = data_dir
        self.device = device
        self.stop = stop
        self._say = say
        self._root = folder
        self._used = set[str]()
        self._seconds = 0.0
        self._within: dict[str, ResultCache] = {}
        digest = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        self._folder: Path | None = None
        self._file: Path | None = None
        self._done: dict[str, Any] = {}
        if folder is not None:
            self._folder = folder / digest
            self._file = self._folder / "pieces.jsonl"
            if self._file.exists():
                self._done = _read(self._file)

    @property
    def seconds(self) -> float:
        """Seconds that the used pieces took to measure, including stored pieces.

        Each piece is counted once.
        """
        return self._seconds + sum(cache.seconds for cache in self._within.values())

    def within(self, settings: Settings) -> ResultCache:
        """Return a cache whose pieces depend only on a part of the settings.

        All experiments that have equal values of these settings and the same folder for pieces (see
        :attr:`Experiment.pieces`) share the pieces of this cache.
        """
        part = json.dumps(settings, sort_keys=True)
        if part not in self._within:
            same: dict[str, Any] = {
                "data_dir": self.data_dir,
                "device": self.device,
                "stop": self.stop,
            }
            self._within[part] = ResultCache(settings, folder=self._root, say=self._say, **same)
        return self._within[part]

    def piece(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the value of a piece, which is measured only if the value is not stored yet.

        The value is converted to types that JSON has.

        Parameters
        ----------
        key
            Name of the piece within the experiment: ``"c_max, seed 1"``.
        make
            Function that measures the piece. It is called only if no earlier call has stored the
            piece.

        Raises
        ------
        RunInterrupted
            If ``stop`` returned True.
        """
        if key not in self._done:
            if self.stop():
                raise RunInterrupted(
                    f"interrupted before measuring the piece {key!r}",
                    "earlier pieces are stored, so measure again to continue",
                )
            self._say(key)
            start = time.perf_counter()
            value = json.loads(json.dumps(make()))
            self._done[key] = {"key": key, "seconds": time.perf_counter() - start, "value": value}
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a") as file:
                    file.write(json.dumps(self._done[key]) + "\n")
            folder = self.folder_for(key)
            if folder is not None and folder.exists():
                shutil.rmtree(folder)  # a run folder can be large: it may have all clients' updates
        if key not in self._used:
            self._used.add(key)
            self._seconds += self._done[key]["seconds"]
        return self._done[key]["value"]

    def by_seed(self, key: str, seeds: Sequence[int], make: Callable[[int], Any]) -> list[Any]:
        """Return the values of a piece for each seed, in the order of ``seeds``.

        ``make`` measures the piece for one seed. Each value is stored by :meth:`piece`.
        """
        return [self.piece(f"{key}, seed {seed}", partial(make, seed)) for seed in seeds]

    def federation(self, data: str, settings: Settings, seed: int, **more: Any) -> Federation:
        """Load a data set and divide it among clients, as the settings state.

        ``more`` are further arguments of :func:`fedclade.load_federation`.
        """
        given: dict[str, Any] = {key: settings[key] for key in OF_A_FEDERATION if key in settings}
        return load_federation(data, seed=seed, data_dir=self.data_dir, **{**given, **more})

    def simulate(
        self,
        algorithm: Algorithm,
        model: nn.Module | str | Maker,
        federation: Federation,
        settings: Settings,
        seed: int,
        *,
        key: str | None = None,
        **more: Any,
    ) -> Run:
        """Simulate a run with an algorithm and the settings of an experiment.

        Parameters
        ----------
        algorithm, model, federation, seed
            As in :func:`fedclade.simulate`.
        settings
            Settings that contain the number of rounds and the options of local training.
        key
            Key of the piece to which the run belongs. An interrupted run then continues from the
            run folder of the piece. None: the run is not stored.
        **more
            Further arguments of :func:`fedclade.simulate`.
        """
        more = {
            "local": local_of(settings),
            "rounds": settings["rounds"],
            "device": self.device,
            **more,
        }
        if key is None:
            folder = None
        else:
            folder = self.folder_for(key)
        return simulate(
            algorithm, model, federation, seed=seed, folder=folder, stop=self.stop, **more
        )

    def folder_for(self, key: str) -> Path | None:
        """Return the run folder for the run of a piece; None if pieces are not stored.

        With a run folder, an interrupted run continues from its last checkpoint. The seconds of the
        piece then count only from this checkpoint on. The folder is removed when the piece is
        stored.
        """
        if self._folder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / re.sub(r"[^\w.=-]+", "-", key)

    def may_have(self, data: str) -> bool:
        """Return whether a data set is in the data folder, or can be downloaded."""
        return self.data_dir is None or is_at_hand(data, self.data_dir)


def is_at_hand(data: str, data_dir: Path | None) -> bool:
    """Return whether a data set can be loaded without a download.

    This is the case if the data set comes with fedclade, or if the data folder contains it.
    """
    if data_dir is None:
        folder = None
    else:
        folder = data_dir.expanduser() / data
    return SOURCES[data].hub is None or (
        folder is not None and folder.is_dir() and any(folder.iterdir())
    )


def _read(file: Path) -> dict[str, Any]:
    """Read the stored pieces of a file, and return them by key.

    An incomplete last line, which an interrupted command can leave, is removed from the file.

    Raises
    ------
    RunError
        If a complete line of the file is damaged.
    """
    whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    try:
        pieces = [json.loads(line) for line in whole]
        done = {
            piece["key"]: {"seconds": float(piece["seconds"]), "value": piece["value"]}
            for piece in pieces
        }
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"the file of measured pieces {file} is damaged: {type(error).__name__}: {error}; "
            "remove the file to measure all pieces again"
        ) from error
    file.write_text("".join(whole))
    return done
