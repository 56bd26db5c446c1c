"""Engines by name, and the one that chooses by itself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from fedclade.core import (
    ConfigError,
    EngineError,
    Layout,
    LocalTraining,
    set_unsent_buffers,
    unknown,
)
from fedclade.training.autotune import fastest, forget
from fedclade.training.channels_last import ChannelsLastLoop
from fedclade.training.data import is_augmented, remove_augmentation
from fedclade.training.input_hooks import cast_inputs_to
from fedclade.training.jobs import CannotTrainTogether, Engine, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.stacked import StackedEngine
from fedclade.training.stacking.replay import Replay, can_record
from fedclade.training.threads import using_threads
from fedclade.training.vmap import VmapEngine
from fedclade.training.workers import WorkersEngine, cannot_fork, cannot_work, tried

# Whether an engine can be trusted with a module: a trial on three clients, whose updates have to be
# the loop's.

TOLERANCE = 1e-3
"""How far the updates of two engines may be apart after a few steps, relative to their norm."""

FINE_TOLERANCE = 1e-9
"""The same in float64."""

LONGEST = 60.0
TIMES_THE_LOOP = 30
"""Seconds that a trial may take, and how many times what the loop took besides."""


def objection(engine: Engine, work: Workload, rounds: int = 1) -> str | None:
    """Return why an engine cannot train the clients of a workload, whose generators stay unused; or None.

    It has to give the same updates as the loop on two steps of three clients, in each of some
    rounds, which it may go about in different ways. What this finds besides layers that the engine
    does not know: modules whose forward pass mixes the examples of a batch, which would mix
    clients.

    Some layers in some layout make torch end the process. So the engine is tried in another one,
    wherever a process can be forked; elsewhere only engines are tried for which no such layer is
    known.
    """
    clients = 3
    batch = work.spec.batch_size
    # a ragged batch, but not of one example, which BatchNorm does not take
    examples = 2 * batch + min(2, batch - 1)
    small = _apart(work.cut(clients, examples))
    if small.private is not None:
        small = replace(small, private=small.private.as_trial())
    # Without dropout, whose draws differ between engines; and with SGD, as others make much of what
    # is only rounding.
    calm = replace(small, module=without_dropout(work.module), **_by_sgd(work))
    start = monotonic()
    expected = _by_loop(calm)
    limit = LONGEST + TIMES_THE_LOOP * (monotonic() - start)

    def attempt() -> str | None:
        try:
            for _ in range(rounds):
                engine.train(small)
            error = max(_relative_error(engine, calm, expected) for _ in range(rounds))
            if error <= TOLERANCE or _rounding_explains(engine, calm):
                return None
        except CannotTrainTogether as reason:
            return str(reason)
        except Exception as failure:  # whatever a user's forward raises
            return f"{type(work.module).__name__} fails on clients together: {failure}"
        return (
            f"{type(work.module).__name__} gives other updates for clients together (relative "
            f"error {error:.1e}): its forward mixes the examples of a batch, or gives a layer "
            "something else than the batch, such as positions that are not expanded to it"
        )

    return attempt() if cannot_fork(work.models.device) else tried(attempt, limit)


def _by_sgd(work: Workload) -> dict[str, Any]:
    """Return what makes plain SGD in float32 of the local training of a workload, if that is another."""
    if LocalOptimizer.of(work.spec, work.lr).is_plain and work.spec.precision == "float32":
        return {}
    spec = work.spec
    sgd = LocalTraining(batch_size=spec.batch_size, smallest_batch=spec.smallest_batch, mu=spec.mu)
    return {"spec": sgd, "lr": 0.1}


def _apart(work: Workload) -> Workload:
    """Return the workload with a model for each client, near its own: one would hide that they are mixed."""
    jobs = work.jobs
    layout = work.layout
    noise = torch.randn(len(jobs), layout.n_parameters, generator=torch.Generator().manual_seed(0))
    models, anchors = (
        work.models[rows] for rows in ([job.row for job in jobs], [job.anchor_row for job in jobs])
    )
    models[:, : layout.n_parameters] += 0.01 * noise.to(models)
    own = [replace(job, row=k, anchor=len(jobs) + k) for k, job in enumerate(jobs)]
    return replace(work, models=torch.cat([models, anchors]), jobs=own)


def _by_loop(work: Workload) -> Tensor:
    return LoopEngine().train(work.redrawn())[0]


def _relative_error(engine: Engine, work: Workload, expected: Tensor) -> float:
    """Return how far an engine's updates are from those expected, relative to their norms: that of the worst client."""
    got, _ = engine.train(work.redrawn())
    apart, norms = (
        torch.linalg.vector_norm(difference, dim=1) for difference in (got - expected, expected)
    )
    # Updates are differences of models: tiny ones keep few digits. Those that diverge are left to
    # the run.
    models = torch.linalg.vector_norm(work.models[[job.row for job in work.jobs]], dim=1)
    rounding = 100 * torch.finfo(models.dtype).eps * models
    return float(((apart - rounding).clamp(min=0) / norms).nan_to_num(0).max())


def _rounding_explains(engine: Engine, work: Workload) -> bool:
    """Return whether an engine and the loop differ only because rounding has fallen on two sides of a kink.

    Where the input of a ReLU is all but 0, its sign, and with it the gradient, is a matter of
    rounding. In float64 that is so fine that both agree to many more digits; and in float32 they
    agree for other orders of the examples. What mixes clients does it in float64 too, and what
    computes coarsely does it in any order.
    """
    fine = _in_float64(work)
    try:
        if _relative_error(engine, fine, _by_loop(fine)) > FINE_TOLERANCE:
            return False
    except Exception:  # such as of a module that makes float32 tensors in its forward pass
        return False
    others = (work.redrawn(by) for by in range(1, 4))
    return any(_relative_error(engine, other, _by_loop(other)) <= TOLERANCE for other in others)


def _in_float64(work: Workload) -> Workload:
    module = copy.deepcopy(work.module).double()
    # by its state now, which may have diverged, others might be
    set_unsent_buffers(module, work.layout.unsent)
    work.layout.set_training(module)  # checks leave modules in evaluation mode
    cast_inputs_to(module, torch.float64)
    layout = Layout.of(module)
    jobs = [
        replace(j, inputs=j.inputs.double() if j.inputs.is_floating_point() else j.inputs)
        for j in work.jobs
    ]
    return replace(work, module=module, layout=layout, models=work.models.double(), jobs=jobs)


def without_dropout(module: nn.Module) -> nn.Module:
    """Return a copy of a module that drops nothing, and takes its inputs as they are."""
    calm = copy.deepcopy(module)
    remove_augmentation(calm)
    for layer in calm.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    return calm


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

REMOTE: Mapping[str, str] = {
    "ray": "clients on the actors of a Ray cluster, each with an engine of its own"
}
"""Engines that are no engines of one process, with a line for people."""

_log = logging.getLogger(__name__)


def build_engine(name: str, resolved: str | None = None) -> ChosenEngine:
    """Return an engine by its name, one of :data:`ENGINES`.

    ``resolved`` is what :attr:`ChosenEngine.resolved` was in the part of the run that is continued,
    and is used again without a trial.

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

    A module that cannot be stacked goes to ``vmap``, and if that fails to the loop or the workers;
    that is logged. So it is where a worker process dies, by ``auto`` to the loop. Local rules are
    for ``vmap`` and the loop alone: of another name, it is the faster of these.
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
            chosen = self._name == "auto" or (
                work.rule is not None and self._name in ("stacked", "workers")
            )
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
    elif (
        torch.get_num_threads() == 1
        and work.models.device.type == "cpu"
        and _takes_plain_steps(work)
    ):
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
    # What an augmentation or DP-SGD draws or decides on the CPU would be the same in every launch
    # of a recording.
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
