"""Engines by name, and the one that chooses by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from fedclade.core import ConfigError, EngineError, unknown
from fedclade.training.augmentation import is_augmented
from fedclade.training.autotune import fastest, forget
from fedclade.training.channels_last import ChannelsLastLoop
from fedclade.training.jobs import Engine, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import StackedEngine
from fedclade.training.stacking.replay import Replay, can_record
from fedclade.training.threads import using_threads
from fedclade.training.trial import objection
from fedclade.training.vmap import VmapEngine
from fedclade.training.workers import WorkersEngine, cannot_work

ENGINES: Mapping[str, str] = {
    "auto": "measures, chooses, remembers",
    "stacked": "all clients in one batched program",
    "workers": "clients side by side, in a process for each core (CPU, Linux)",
    "vmap": "all clients by torch.func.vmap",
    "loop": "one client after another",
}
"""Every engine with a line for people."""

TOGETHER: Mapping[str, Callable[[], Engine]] = {"stacked": StackedEngine, "vmap": VmapEngine}
"""Engines that train clients together, the faster first; not every module can be trained so."""

REPLAYED = "stacked, replayed"
"""The stacked engine that records its steps."""

FITTED = "loop, channels last"
"""The loop on a module that has been fitted to one thread of a CPU."""

REMOTE: Mapping[str, str] = {"ray": "clients on the actors of a Ray cluster, each with an engine of its own"}
"""Engines that are no engines of one process, with a line for people."""

_log = logging.getLogger(__name__)


def build_engine(name: str, resolved: str | None = None) -> ChosenEngine:
    """Return an engine by its name, one of :data:`ENGINES`.

    ``resolved`` is what :attr:`ChosenEngine.resolved` was in the part of the run that is continued, and is used again
    without a trial.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    check_engine(name, ENGINES)
    return ChosenEngine(name, resolved)


def check_engine(name: str, known: Collection[str] = (*ENGINES, *REMOTE)) -> None:
    """Check the name of an engine.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    if name not in known:
        raise ConfigError(unknown("engine", name, known))


class ChosenEngine:
    """The engine of a name; or the fastest that can train the module, chosen in the first call and kept.

    A module that cannot be stacked goes to ``vmap``, and if that fails to the loop or the workers; that is logged. So
    it is where a worker process dies, by ``auto`` to the loop. Local rules are for ``vmap`` and the loop alone: of
    another name, it is the faster of these.
    """

    def __init__(self, name: str, resolved: str | None = None) -> None:
        self.resolved = resolved
        """The engine that trains, with the way inside worker processes, on which rounding depends; None at first."""
        self._name = name
        self._engine = None if resolved is None else _named(resolved)

    @property
    def name(self) -> str:
        """Name of the engine; ``auto`` as long as nothing has been chosen."""
        return self._name if self.resolved is None else self.resolved.split(",")[0]

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :class:`~fedclade.training.jobs.Engine`.

        Raises
        ------
        ConfigError
            If the engine of this name cannot train this module.
        EngineError
            If worker processes die whatever they train with, and the name is theirs.
        """
        if self._engine is None:
            chosen = self._name == "auto" or (work.rule is not None and self._name in ("stacked", "workers"))
            self.resolved, self._engine = _chosen(work) if chosen else _by_name(self._name, work)
        try:
            return self._engine.train(work, out)
        except EngineError as error:
            instead = {"auto": "loop", "workers": "workers, loop"}.get(self._name, self.resolved)
            if instead == self.resolved:
                raise
            forget(str(self.resolved))
            _log.warning("%s; training with engine %s from now on", error, instead)
            self.resolved, self._engine = instead, _named(str(instead))
            return self.train(work.redrawn(), out)


def _chosen(work: Workload) -> tuple[str, Engine]:
    engines: dict[str, Engine] = {}
    objections: list[str] = []
    for name in TOGETHER if work.rule is None else ("vmap",):
        found, reason = _together(name, work)
        if found is not None:
            engines[name] = found
            break
        objections.append(f"{name}: {reason}")
    if "stacked" in engines:
        engines |= _replaying(work)
    if torch.get_num_threads() > 1 and len(work.jobs) > 1 and not cannot_work(work):
        engines |= _workers(work, stackable="stacked" in engines)
    elif torch.get_num_threads() == 1 and work.models.device.type == "cpu" and _takes_plain_steps(work):
        engines |= {FITTED: ChannelsLastLoop()} if _keeps_channels_last(work) else {}
    engines["loop"] = LoopEngine()
    chosen = fastest(engines, work) if len(engines) > 1 else "loop"
    if objections:
        _log.warning("%s; training with engine %s", "; ".join(objections), chosen.split(",")[0])
    return chosen, engines[chosen]


def _by_name(name: str, work: Workload) -> tuple[str, Engine]:
    engines: dict[str, Engine] = {}
    reason = None
    if name == "loop":
        return name, LoopEngine()
    if name in TOGETHER:
        engine, reason = _together(name, work)
        if engine is not None:
            engines = {name: engine} | (_replaying(work) if name == "stacked" else {})
    elif (reason := cannot_work(work)) is None:
        engines = _workers(work, stackable=_together("stacked", work)[0] is not None)
    if not engines:
        raise ConfigError(f"engine {name!r} cannot train this model: {reason}; use --engine auto")
    chosen = fastest(engines, work) if name == "workers" or len(engines) > 1 else name
    return chosen, engines[chosen]


def _named(resolved: str) -> Engine:
    name, _, inside = resolved.partition(", ")
    if name == "workers":
        return WorkersEngine(inside)
    if resolved == REPLAYED:
        return StackedEngine(Replay())
    if resolved == FITTED:
        return ChannelsLastLoop()
    return TOGETHER.get(name, LoopEngine)()


def _together(name: str, work: Workload) -> tuple[Engine | None, str | None]:
    """Return an engine that trains clients together, or why it cannot."""
    engine = TOGETHER[name]()
    reason = objection(engine, work)
    return (engine, None) if reason is None else (None, reason)


def _replaying(work: Workload) -> dict[str, Engine]:
    """Return the stacked engine that records its steps, if this is a GPU, and nothing of them resists."""
    # What an augmentation or DP-SGD draws or decides on the CPU would be the same in every launch of a recording.
    if not can_record(work.models.device) or is_augmented(work.module) or work.private is not None:
        return {}
    engine = StackedEngine(Replay())
    # In the first round steps are met, in the second recorded, in the third only launched.
    reason = objection(engine, work, rounds=3)
    if reason is not None:
        _log.info("steps are not recorded as CUDA graphs: %s", reason)
    return {REPLAYED: engine} if reason is None else {}


def _workers(work: Workload, stackable: bool) -> dict[str, Engine]:
    """Return the ways in which worker processes can train the clients."""
    one_by_one = "channels last" if _keeps_channels_last(work) else "loop"
    inside = [*(["stacked"] if stackable else []), one_by_one]
    return {f"workers, {way}": WorkersEngine(way) for way in inside}


def _takes_plain_steps(work: Workload) -> bool:
    return work.rule is None and work.private is None and not work.spec.keep_state


def _keeps_channels_last(work: Workload) -> bool:
    """Whether the module has convolutions, and one thread can train them with their channels last."""
    if not any(parameter.dim() == 4 for parameter in work.module.parameters()):
        return False
    with using_threads(1):  # as in a worker process
        reason = objection(ChannelsLastLoop(), work)
    if reason is not None:
        _log.info("convolutions do not keep their channels last: %s", reason)
    return reason is None
