"""Cache of measured pieces of experiments, so that an interrupted command can continue."""

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
"""Settings that are passed to :func:`fedclade.load_federation`."""


def local_of(settings: Settings) -> LocalTraining:
    """Return the local training that the settings describe."""
    return LocalTraining(
        **{
            each.name: settings[each.name]
            for each in fields(LocalTraining)
            if each.name in settings
        }
    )


def maker_of(federation: Federation, model: str, arguments: Settings | None = None) -> Maker:
    """Return a function that builds a model for a federation's data from a seed."""
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
    """Cache that makes the pieces of an experiment and stores them in a folder.

    An interrupted command continues after the last stored piece. Pieces made with other settings
    are not used.

    Parameters
    ----------
    settings
        The settings on which the pieces depend.
    data_dir
        Folder with data sets. None: they are downloaded.
    device
        Device for training.
    folder
        Folder for the pieces. None: they are not stored.
    say
        Function that is called with the key of each piece before it is made.
    stop
        Function that is queried before every piece and after every round of its runs; if it returns
        True, the measurement is interrupted.

    Raises
    ------
    RunError
        If a file of pieces is damaged.
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
        self._folder = None if folder is None else folder / digest
        self._file = None if self._folder is None else self._folder / "pieces.jsonl"
        self._done = {} if self._file is None or not self._file.exists() else _read(self._file)

    @property
    def seconds(self) -> float:
        """Time that the pieces took, also in earlier calls; each piece counts once."""
        return self._seconds + sum(cache.seconds for cache in self._within.values())

    def within(self, settings: Settings) -> ResultCache:
        """Return the cache for a part of the settings.

        Its pieces are shared by all experiments with this part of the settings, if they also share
        their folder, see :attr:`Experiment.pieces`.
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
        """Return the value of ``make``, in JSON's types, from the cache if it is stored there.

        Parameters
        ----------
        key
            Name of the piece within the experiment: ``"c_max, seed 1"``.
        make
            Function that makes the piece; called only if no earlier call has stored it.

        Raises
        ------
        RunInterrupted
            If ``stop`` returned True.
        """
        if key not in self._done:
            if self.stop():
                raise RunInterrupted(
                    f"interrupted before the piece {key!r}", "the pieces before it are kept"
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
                shutil.rmtree(folder)  # a run's folder can hold the updates of all clients
        if key not in self._used:
            self._used.add(key)
            self._seconds += self._done[key]["seconds"]
        return self._done[key]["value"]

    def by_seed(self, key: str, seeds: Sequence[int], make: Callable[[int], Any]) -> list[Any]:
        """Return the value of ``make`` for each seed, each from :meth:`piece`."""
        return [self.piece(f"{key}, seed {seed}", partial(make, seed)) for seed in seeds]

    def federation(self, data: str, settings: Settings, seed: int, **more: Any) -> Federation:
        """Return the clients of a data set with the given settings.

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
        """Run an algorithm with the given settings.

        Parameters
        ----------
        algorithm, model, federation, seed
            As in :func:`fedclade.simulate`.
        settings
            Settings with the number of rounds and the local training.
        key
            Key of the piece that the run belongs to; an interrupted run then continues from the run
            folder of the piece.
        **more
            Further arguments of :func:`fedclade.simulate`.
        """
        more = {
            "local": local_of(settings),
            "rounds": settings["rounds"],
            "device": self.device,
            **more,
        }
        folder = None if key is None else self.folder_for(key)
        return simulate(
            algorithm, model, federation, seed=seed, folder=folder, stop=self.stop, **more
        )

    def folder_for(self, key: str) -> Path | None:
        """Return the run folder of a long piece; None if pieces are not stored.

        An interrupted run continues from its last checkpoint; the time of the piece then counts
        from that point. The folder is removed when the piece is stored.
        """
        if self._folder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / re.sub(r"[^\w.=-]+", "-", key)

    def may_have(self, data: str) -> bool:
        """Return whether a data set is available, or can be downloaded as no data folder is set."""
        return self.data_dir is None or is_at_hand(data, self.data_dir)


def is_at_hand(data: str, data_dir: Path | None) -> bool:
    """Return whether a data set comes with the package or is in a data folder.

    Data sets that would have to be downloaded do not count.
    """
    folder = None if data_dir is None else data_dir.expanduser() / data
    return SOURCES[data].hub is None or (
        folder is not None and folder.is_dir() and any(folder.iterdir())
    )


def _read(file: Path) -> dict[str, Any]:
    """Return the stored pieces of a file by key.

    An incomplete last line is removed from the file.
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
            f"{file} is damaged: {type(error).__name__}: {error}; remove it to measure anew"
        ) from error
    file.write_text("".join(whole))
    return done
