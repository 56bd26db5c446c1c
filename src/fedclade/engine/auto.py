"""Engines by name, and the one that chooses by itself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fedclade.engine.choice import Task, fastest
from fedclade.engine.jobs import Engine, Job
from fedclade.engine.loop import LoopEngine
from fedclade.engine.stacked import CannotStack, StackedEngine
from fedclade.engine.vmap import CannotMapError, VmapEngine
from fedclade.errors import ConfigError, unknown
from fedclade.local import LocalSpec
from fedclade.params import Layout

BUILDERS: Mapping[str, Callable[[], Engine]] = {"stacked": StackedEngine, "vmap": VmapEngine, "loop": LoopEngine}

ENGINES: Mapping[str, str] = {
    "auto": "measures, chooses, remembers",
    "stacked": "all clients in one batched program",
    "vmap": "all clients by torch.func.vmap",
    "loop": "one client after another",
}
"""Every engine with a line for people."""

TOGETHER = ("stacked", "vmap")
"""Engines that train clients together, the faster first; not every module can be trained so."""

TOLERANCE = 1e-3
"""How far the updates of two engines may be apart after a few steps, relative to their norm."""

_log = logging.getLogger(__name__)


class NamedEngine(Engine, Protocol):
    """An engine that can tell what it is called."""

    @property
    def name(self) -> str:
        """One of :data:`ENGINES`; ``auto`` as long as nothing has been chosen."""
        ...


def build_engine(name: str) -> NamedEngine:
    """Return an engine by its name.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    check_engine(name)
    return AutoEngine() if name == "auto" else GivenEngine(name)


def check_engine(name: str) -> None:
    """Check the name of an engine.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    if name not in ENGINES:
        raise ConfigError(unknown("engine", name, ENGINES))


class GivenEngine:
    """The engine that the user asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._engine = BUILDERS[name]()
        self._checked = name not in TOGETHER

    def train(
        self, module: nn.Module, layout: Layout, models: Tensor, jobs: Sequence[Job], spec: LocalSpec, lr: float
    ) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :class:`~fedclade.engine.jobs.Engine`.

        Raises
        ------
        ConfigError
            If the engine cannot train this module.
        """
        task = Task(module, layout, models, jobs, spec, lr)
        if not self._checked and (reason := objection(self._engine, task)):
            raise ConfigError(f"engine {self.name!r} cannot train this model: {reason}; use --engine auto")
        self._checked = True
        return task.done_by(self._engine)


class AutoEngine:
    """The fastest engine that can train the module, chosen in the first call and kept.

    A module that cannot be stacked goes to ``vmap``, and if that fails to the loop; that is logged.
    """

    def __init__(self) -> None:
        self.name = "auto"
        self._engine: Engine | None = None

    def train(
        self, module: nn.Module, layout: Layout, models: Tensor, jobs: Sequence[Job], spec: LocalSpec, lr: float
    ) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :class:`~fedclade.engine.jobs.Engine`."""
        task = Task(module, layout, models, jobs, spec, lr)
        if self._engine is None:
            self.name, self._engine = self._chosen(task)
        return task.done_by(self._engine)

    def _chosen(self, task: Task) -> tuple[str, Engine]:
        engines: dict[str, Engine] = {}
        objections: list[str] = []
        for name in TOGETHER:
            engine = BUILDERS[name]()
            if reason := objection(engine, task):
                objections.append(f"{name}: {reason}")
            else:
                engines[name] = engine
                break
        engines["loop"] = LoopEngine()
        name = fastest(engines, task) if len(engines) > 1 else "loop"
        if objections:
            _log.warning("%s; training with engine %s", "; ".join(objections), name)
        return name, engines[name]


def objection(engine: Engine, task: Task) -> str | None:
    """Say why an engine cannot train the clients of a task, or return None.

    It has to give the same updates as the loop on two steps of three clients. What this finds besides layers that the
    engine does not know: modules whose forward pass mixes the examples of a batch, which would mix clients.
    """
    clients, batch = 3, task.spec.batch_size
    examples = 2 * batch + min(2, batch - 1)  # a ragged batch, but not of one example, which BatchNorm does not take
    calm = replace(task, module=without_dropout(task.module))  # whose draws differ between engines
    expected, _ = calm.cut(clients, examples).done_by(LoopEngine())
    try:
        task.cut(clients, examples).done_by(engine)
        got, _ = calm.cut(clients, examples).done_by(engine)
    except (CannotStack, CannotMapError) as error:
        return str(error)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return f"{type(task.module).__name__} fails on clients together: {error}"
    apart, norms = (torch.linalg.vector_norm(difference, dim=1) for difference in (got - expected, expected))
    # Updates are differences of models: tiny ones keep few digits. Those that diverge are left to the run to tell.
    rounding = 1e-5 * torch.linalg.vector_norm(task.models[[job.row for job in task.jobs[:clients]]], dim=1)
    if bool((apart > TOLERANCE * norms + rounding).any()):
        worst = float((apart / norms).max())
        return f"{type(task.module).__name__} gives other updates for clients together (relative error {worst:.1e})"
    return None


def without_dropout(module: nn.Module) -> nn.Module:
    """Return a copy of a module that drops nothing."""
    calm = copy.deepcopy(module)
    for layer in calm.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    return calm
