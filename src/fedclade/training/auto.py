"""Engines by name, and the engine ``auto``, which chooses the fastest."""

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

# Trial of an engine with a module: on three clients, its updates must equal those of the loop.

TOLERANCE = 1e-3
"""Largest difference between updates of two engines after a few steps, relative to their norm."""

FINE_TOLERANCE = 1e-9
"""Largest relative difference between updates in float64."""

LONGEST = 60.0
TIMES_THE_LOOP = 30
"""Limit of the duration of a trial: ``LONGEST`` seconds plus a multiple of the loop's time."""


def objection(engine: Engine, work: Workload, rounds: int = 1) -> str | None:
    """Return the reason why an engine cannot train the clients of a workload, or None.

    The engine has to give the same updates as the engine ``loop`` on two steps of three clients, in
    each of ``rounds`` rounds, since an engine may proceed differently in later rounds. This finds
    modules with layers that the engine does not support, and modules whose forward pass mixes the
    examples of a batch, which would mix clients. The trial draws nothing from the workload's
    generators.

    Some layers in some memory layouts make torch end the process. So the engine is tried in a
    forked process where the system supports that. Elsewhere, only engines are tried for which no
    such layer is known.
    """
    clients = 3
    batch = work.spec.batch_size
    # The second batch is smaller, but has more than one example, since BatchNorm cannot train on
    # one.
    examples = 2 * batch + min(2, batch - 1)
    small = _apart(work.cut(clients, examples))
    if small.private is not None:
        small = replace(small, private=small.private.as_trial())
    # Without dropout, whose draws differ between engines; and with SGD, since other optimizers
    # amplify differences by rounding.
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
        except Exception as failure:  # a user's forward may raise anything
            return f"{type(work.module).__name__} fails on clients together: {failure}"
        return (
            f"{type(work.module).__name__} gives other updates for clients together (relative "
            f"error {error:.1e}): its forward mixes the examples of a batch, or gives a layer "
            "something else than the batch, such as positions that are not expanded to it"
        )

    return attempt() if cannot_fork(work.models.device) else tried(attempt, limit)


def _by_sgd(work: Workload) -> dict[str, Any]:
    """Return the fields that turn a workload into plain SGD in float32, if it is another."""
    if LocalOptimizer.of(work.spec, work.lr).is_plain and work.spec.precision == "float32":
        return {}
    spec = work.spec
    sgd = LocalTraining(batch_size=spec.batch_size, smallest_batch=spec.smallest_batch, mu=spec.mu)
    return {"spec": sgd, "lr": 0.1}


def _apart(work: Workload) -> Workload:
    """Return the workload with a different model for each client, near its own.

    With equal models, an engine that mixes the models of clients would not be noticed.
    """
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
    """Return the largest relative distance of a client's update from the expected update."""
    got, _ = engine.train(work.redrawn())
    apart, norms = (
        torch.linalg.vector_norm(difference, dim=1) for difference in (got - expected, expected)
    )
    # Updates are differences of models, so tiny updates have few correct digits. Updates that
    # diverge (NaN) are no reason to refuse an engine: the run handles them.
    models = torch.linalg.vector_norm(work.models[[job.row for job in work.jobs]], dim=1)
    rounding = 100 * torch.finfo(models.dtype).eps * models
    return float(((apart - rounding).clamp(min=0) / norms).nan_to_num(0).max())


def _rounding_explains(engine: Engine, work: Workload) -> bool:
    """Return whether an engine and the loop differ only by rounding at a kink of an activation.

    Where the input of a ReLU is almost 0, its sign, and with it the gradient, depends on rounding.
    In float64, rounding is so fine that both agree to many more digits; in float32, both agree for
    other orders of the examples. An engine that mixes clients does so in float64 as well, and an
    engine that computes imprecisely does so in any order.
    """
    fine = _in_float64(work)
    try:
        if _relative_error(engine, fine, _by_loop(fine)) > FINE_TOLERANCE:
            return False
    except Exception:  # for example of a module that creates float32 tensors in its forward pass
        return False
    others = (work.redrawn(by) for by in range(1, 4))
    return any(_relative_error(engine, other, _by_loop(other)) <= TOLERANCE for other in others)


def _in_float64(work: Workload) -> Workload:
    module = copy.deepcopy(work.module).double()
    # The module's current state may have diverged, so that other buffers would count as unsent.
    set_unsent_buffers(module, work.layout.unsent)
    work.layout.set_training(module)  # earlier checks leave modules in evaluation mode
    cast_inputs_to(module, torch.float64)
    layout = Layout.of(module)
    jobs = [
        replace(j, inputs=j.inputs.double() if j.inputs.is_floating_point() else j.inputs)
        for j in work.jobs
    ]
    return replace(work, module=module, layout=layout, models=work.models.double(), jobs=jobs)


def without_dropout(module: nn.Module) -> nn.Module:
    """Return a copy of a module without dropout and without augmentation."""
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
"""Names of all engines of one process, with a line of help for each."""

TOGETHER: Mapping[str, Callable[[], Engine]] = {"stacked": StackedEngine, "vmap": VmapEngine}
"""Engines that train clients together, the faster first; they do not support every module."""

REPLAYED = "stacked, replayed"
"""Name of the stacked engine that records its steps."""

FITTED = "loop, channels last"
"""Name of the loop on a module that has been adapted to one thread of a CPU."""

REMOTE: Mapping[str, str] = {
    "ray": "clients on the actors of a Ray cluster, each with an engine of its own"
}
"""Names of engines that train in other processes or on other machines, with a line of help."""

_log = logging.getLogger(__name__)


def build_engine(name: str, resolved: str | None = None) -> ChosenEngine:
    """Return an engine by its name.

    Parameters
    ----------
    name
        One of :data:`ENGINES`.
    resolved
        Value of :attr:`ChosenEngine.resolved` in the part of the run that is continued. That engine
        is used again without a trial.

    Raises
    ------
    ConfigError
        If there is no engine of that name.
    """
    check_engine(name, ENGINES)
    return ChosenEngine(name, resolved)


def check_engine(name: str, known: Collection[str] = (*ENGINES, *REMOTE)) -> None:
    """Check the name of an engine.

    Raises
    ------
    ConfigError
        If there is no engine of that name.
    """
    if name not in known:
        raise ConfigError(unknown("engine", name, known))


class ChosenEngine:
    """Engine of a given name, or the fastest one that can train the module.

    The choice is made in the first call and is then kept. A module that cannot be stacked is
    trained by ``vmap``, and if that fails by the loop or by workers; this is logged. If a worker
    process dies, ``auto`` continues with the loop, and logs that, too. Local rules are supported by
    ``vmap`` and the loop only; with the names ``stacked`` and ``workers``, the faster of these two
    trains them.
    """

    def __init__(self, name: str, resolved: str | None = None) -> None:
        self.resolved = resolved
        """Engine that trains, with the one inside worker processes; None before the first call.

        Rounding depends on it.
        """
        self._name = name
        self._engine = None if resolved is None else _named(resolved)

    @property
    def name(self) -> str:
        """Name of the engine; ``auto`` until one has been chosen."""
        return self._name if self.resolved is None else self.resolved.split(",")[0]

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :class:`~fedclade.training.jobs.Engine`.

        Raises
        ------
        ConfigError
            If the engine of this name cannot train this module.
        EngineError
            If worker processes die with every engine inside them, and the name is ``workers``.
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
    """Return an engine that trains clients together, or the reason why it cannot."""
    engine = TOGETHER[name]()
    reason = objection(engine, work)
    return (engine, None) if reason is None else (None, reason)


def _replaying(work: Workload) -> dict[str, Engine]:
    """Return the stacked engine that records its steps, if a GPU and a trial allow it."""
    # Draws and decisions of an augmentation or of DP-SGD on the CPU would be the same in every
    # launch of a recording.
    if not can_record(work.models.device) or is_augmented(work.module) or work.private is not None:
        return {}
    engine = StackedEngine(Replay())
    # The first round runs the steps, the second records them, the third only launches them.
    reason = objection(engine, work, rounds=3)
    if reason is not None:
        _log.info("steps are not recorded as CUDA graphs: %s", reason)
    return {REPLAYED: engine} if reason is None else {}


def _workers(work: Workload, stackable: bool) -> dict[str, Engine]:
    """Return engines with worker processes, one for each way to train clients inside them."""
    one_by_one = "channels last" if _keeps_channels_last(work) else "loop"
    inside = [*(["stacked"] if stackable else []), one_by_one]
    return {f"workers, {way}": WorkersEngine(way) for way in inside}


def _takes_plain_steps(work: Workload) -> bool:
    return work.rule is None and work.private is None and not work.spec.keep_state


def _keeps_channels_last(work: Workload) -> bool:
    """Return whether one thread can train the module's convolutions with channels last.

    It is False if the module has no convolutions.
    """
    if not any(parameter.dim() == 4 for parameter in work.module.parameters()):
        return False
    with using_threads(1):  # as in a worker process
        reason = objection(ChannelsLastLoop(), work)
    if reason is not None:
        _log.info("convolutions do not keep their channels last: %s", reason)
    return reason is None
