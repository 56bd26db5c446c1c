"""Choice of the fastest engine (``auto``), and trials of engines.

An engine is tried on a few clients before it is used, to check that the engine gives the same
updates as the loop.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from fedclade.core import ConfigError, EngineError, Layout, LocalTraining, set_unsent_buffers
from fedclade.training.autotune import fastest, forget
from fedclade.training.channels_last import ChannelsLastLoop
from fedclade.training.data import is_augmented, remove_augmentation
from fedclade.training.engine_names import ENGINES, check_engine
from fedclade.training.input_hooks import cast_inputs_to
from fedclade.training.jobs import CannotTrainTogether, Engine, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.stacked import StackedEngine
from fedclade.training.stacking.replay import Replay, can_record
from fedclade.training.threads import float32_products, using_threads
from fedclade.training.vmap import VmapEngine
from fedclade.training.workers import WorkersEngine, cannot_fork, cannot_work, tried

# Trial of an engine with a module: for three clients, the engine must give the same updates as the
# loop.

TOLERANCE = 1e-3
"""Largest difference between updates of two engines after a few steps, relative to their norm."""

FINE_TOLERANCE = 1e-9
"""Largest relative difference between updates in float64."""

TIMES_ROUNDING = 3
"""Largest error of updates in a lower precision, as a multiple of the loop's error.

Both errors are distances from the loop's updates in float32.
"""

LONGEST = 60.0
TIMES_THE_LOOP = 30
"""Time limit of a trial: ``LONGEST`` seconds plus ``TIMES_THE_LOOP`` times the loop's duration."""


def objection(engine: Engine, work: Workload, rounds: int = 1) -> str | None:
    """Return the reason why an engine cannot train the clients of a workload; None if it can.

    The engine is tried: on two steps of three clients, it has to give the same updates as the
    engine ``loop``, in each of ``rounds`` rounds, since some engines work differently in later
    rounds. The trial finds modules with layers that the engine does not support, and modules whose
    forward pass mixes the examples of a batch, which would mix the examples of several clients. The
    trial does not use the workload's random generators. It computes float32 products without TF32,
    even if the run uses TF32, whose rounding a deep network would amplify beyond any useful limit.

    Some layers in some memory layouts crash the process inside torch, so the trial runs in a forked
    process if the system and the device allow that, and otherwise in this process.
    """
    clients = 3
    batch = work.spec.batch_size
    # The second batch is smaller, but has more than one example, since BatchNorm cannot train on
    # one.
    examples = 2 * batch + min(2, batch - 1)
    small = _separate_models(work.cut(clients, examples))
    if small.private is not None:
        small = replace(small, private=small.private.as_trial())
    # Without dropout, whose draws differ between engines; and with SGD, since other optimizers
    # amplify differences by rounding.
    calm = replace(small, module=without_dropout(work.module), **_by_sgd(work))
    start = monotonic()
    with float32_products(tf32=False):
        expected = _by_loop(calm)
    limit = LONGEST + TIMES_THE_LOOP * (monotonic() - start)

    def attempt() -> str | None:
        try:
            for _ in range(rounds):
                engine.train(small)
            error = max(_relative_error(engine, calm, expected) for _ in range(rounds))
            if error <= TOLERANCE or _rounding_explains(engine, calm):
                return _imprecision(engine, calm, expected, work.spec.precision)
        except CannotTrainTogether as reason:
            return str(reason)
        except Exception as failure:  # a user's forward may raise anything
            return (
                f"{type(work.module).__name__} fails when several clients are trained together: "
                f"{failure}"
            )
        return (
            f"{type(work.module).__name__} gives different updates when several clients are "
            f"trained together (relative error {error:.1e}): its forward method mixes the examples of "
            "a batch, or passes to a layer something other than the batch, such as positions that are "
            "not expanded to the size of the batch"
        )

    with float32_products(tf32=False):
        if cannot_fork(work.models.device):
            return attempt()
        return tried(attempt, limit)


def _imprecision(engine: Engine, work: Workload, expected: Tensor, precision: str) -> str | None:
    """Return the reason why an engine is too coarse in a lower precision; None if it is not.

    The loop in the lower precision is the measure: it shows how much rounding alone changes the
    updates of the model.

    Parameters
    ----------
    engine
        The engine, which agrees with the loop in float32.
    work
        Training in float32.
    expected
        Updates of the loop in float32.
    precision
        Precision of the run's forward passes.
    """
    if precision == "float32":
        return None
    coarse = replace(work, spec=replace(work.spec, precision=precision))
    error = _relative_error(engine, coarse, expected)
    of_loop = _relative_error(LoopEngine(), coarse, expected)
    if error <= max(TOLERANCE, TIMES_ROUNDING * of_loop):
        return None
    return (
        f"in {precision}, {type(work.module).__name__} differs more from float32 if several clients "
        f"are trained together (relative error {error:.1e}) than if one client is trained "
        f"({of_loop:.1e})"
    )


def _by_sgd(work: Workload) -> dict[str, Any]:
    """Return the fields to change so that a workload's clients train by plain SGD in float32.

    The result maps names of fields to new values. It is empty if the workload already uses plain
    SGD in float32.
    """
    if LocalOptimizer.of(work.spec, work.lr).is_plain and work.spec.precision == "float32":
        return {}
    spec = work.spec
    sgd = LocalTraining(batch_size=spec.batch_size, smallest_batch=spec.smallest_batch, mu=spec.mu)
    return {"spec": sgd, "lr": 0.1}


def _separate_models(work: Workload) -> Workload:
    """Return a workload in which every client has a different model, close to its original model.

    With equal models, a trial could not detect an engine that mixes the models of clients.
    """
    jobs = work.jobs
    layout = work.layout
    noise = torch.randn(len(jobs), layout.n_parameters, generator=torch.Generator().manual_seed(0))
    models = work.models[[job.row for job in jobs]]
    anchors = work.models[[job.anchor_row for job in jobs]]
    models[:, : layout.n_parameters] += 0.01 * noise.to(models)
    own = [replace(job, row=k, anchor=len(jobs) + k) for k, job in enumerate(jobs)]
    return replace(work, models=torch.cat([models, anchors]), jobs=own)


def _by_loop(work: Workload) -> Tensor:
    """Return the updates of the reference engine, the loop, for a workload."""
    return LoopEngine().train(work.redrawn())[0]


def _relative_error(engine: Engine, work: Workload, expected: Tensor) -> float:
    """Return the largest distance, over clients, of an update from the expected update.

    The distance is relative to the norm of the expected update.
    """
    got, _ = engine.train(work.redrawn())
    distances = torch.linalg.vector_norm(got - expected, dim=1)
    norms = torch.linalg.vector_norm(expected, dim=1)
    # Updates are differences of models, so tiny updates have few correct digits. Updates that
    # diverge (NaN) are no reason to refuse an engine: the run handles them.
    models = torch.linalg.vector_norm(work.models[[job.row for job in work.jobs]], dim=1)
    rounding = 100 * torch.finfo(models.dtype).eps * models
    return float(((distances - rounding).clamp(min=0) / norms).nan_to_num(0).max())


def _rounding_explains(engine: Engine, work: Workload) -> bool:
    """Return whether the updates of an engine and of the loop differ only by rounding.

    If the input of a ReLU is almost 0, rounding decides its sign and can thereby change the
    gradient. Differences count as rounding if the engine agrees with the loop in float64, to many
    more digits, and in float32 for at least one of three other random orders of the examples. An
    engine that mixes the data of clients fails in float64, too, and an engine that computes
    imprecisely fails for every order.
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
    """Return a workload with module, models and inputs in float64."""
    module = copy.deepcopy(work.module).double()
    # The module's current state may have diverged, so that other buffers would count as unsent.
    set_unsent_buffers(module, work.layout.unsent)
    work.layout.set_training(module)  # earlier checks leave modules in evaluation mode
    cast_inputs_to(module, torch.float64)
    layout = Layout.of(module)
    jobs = list(work.jobs)
    if jobs[0].inputs.is_floating_point():  # otherwise they are token ids
        jobs = [replace(job, inputs=job.inputs.double()) for job in jobs]
    return replace(work, module=module, layout=layout, models=work.models.double(), jobs=jobs)


def without_dropout(module: nn.Module) -> nn.Module:
    """Return a copy of a module without dropout and without augmentation of inputs."""
    calm = copy.deepcopy(module)
    remove_augmentation(calm)
    for layer in calm.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    return calm


TOGETHER: Mapping[str, Callable[[], Engine]] = {"stacked": StackedEngine, "vmap": VmapEngine}
"""Engines that train clients together, the faster engine first; not all modules are supported."""

REPLAYED = "stacked, replayed"
"""Name of the stacked engine that records its steps as CUDA graphs."""

FITTED = "loop, channels last"
"""Name of the loop on a copy of the module that is faster on one CPU thread."""

_log = logging.getLogger(__name__)


def build_engine(name: str, resolved: str | None = None) -> ChosenEngine:
    """Return an engine, given its name.

    Parameters
    ----------
    name
        One of :data:`ENGINES`.
    resolved
        Value of :attr:`ChosenEngine.resolved` in the earlier part of a run that is continued: this
        engine is used without a trial. None for a new run.

    Raises
    ------
    ConfigError
        If the name is not the name of an engine.
    """
    check_engine(name, ENGINES)
    return ChosenEngine(name, resolved)


class ChosenEngine:
    """Engine that the user has named, or, with the name ``auto``, the fastest suitable engine.

    The choice is made in the first call of :meth:`train`, and is used from then on. With the name
    ``auto``, a module that the stacked engine does not support is trained by ``vmap``, or else by
    the loop or by workers; a warning gives the reasons. If a worker process dies, ``auto``
    continues with the loop, and logs a warning. Training by a local rule is supported only by
    ``vmap`` and the loop, so the faster of these two is used even if the user has named ``stacked``
    or ``workers``. A user's own training code is supported only by the loop and by workers, so the
    faster of these two is used even if the user has named ``stacked`` or ``vmap``.
    """

    def __init__(self, name: str, resolved: str | None = None) -> None:
        self.resolved = resolved
        """Name of the engine that trains, with its form, such as ``workers, loop``.

        It is None before the first call of :meth:`train`. Rounding depends on the engine.
        """
        self.fallback: str | None = None
        """Engine that trains in place of a faster one, and the reason, such as ``loop, because …``.

        It is None if no engine was refused, or if the choice of an earlier part of the run is used.
        """
        self._name = name
        self._engine = None if resolved is None else _build_by_name(resolved)

    @property
    def name(self) -> str:
        """Name of the engine; ``auto`` until an engine has been chosen."""
        if self.resolved is None:
            return self._name
        return self.resolved.split(",")[0]

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :meth:`fedclade.training.jobs.Engine.train`.

        Raises
        ------
        ConfigError
            If the engine was named by the user, and cannot train the module.
        EngineError
            If the engine ``workers`` was named by the user, and its worker processes die, also when
            they train with the engine ``loop`` in place of a faster engine.
        """
        if self._engine is None:
            lacks_rules = self._name in ("stacked", "workers")
            lacks_code = self._name in TOGETHER
            is_unsupported = (work.rule is not None and lacks_rules) or (
                work.trainer is not None and lacks_code
            )
            if self._name == "auto" or is_unsupported:
                self.resolved, self._engine, reasons = _choose_engine(work)
            else:
                self.resolved, self._engine, reasons = _find_engine(self._name, work)
            if reasons:
                self.fallback = f"{self.resolved}, because {'; '.join(reasons)}"
                _log.warning("engine: %s", self.fallback)
        try:
            return self._engine.train(work, out)
        except EngineError as error:
            instead = {"auto": "loop", "workers": "workers, loop"}.get(self._name, self.resolved)
            if instead == self.resolved:
                raise
            forget(str(self.resolved))
            _log.warning("%s; training with engine %s from now on", error, instead)
            self.fallback = f"{instead}, because {error}"
            self.resolved = instead
            self._engine = _build_by_name(str(instead))
            return self.train(work.redrawn(), out)


def _choose_engine(work: Workload) -> tuple[str, Engine, list[str]]:
    """Choose the engine that trains a workload fastest.

    Returns
    -------
    tuple
        Name of the engine; the engine; and the reasons why faster engines were refused.
    """
    engines: dict[str, Engine] = {}
    objections: list[str] = []
    # Of the engines that train clients together, only vmap supports local rules. A user's own code
    # trains one client at a time.
    names = ["vmap"] if work.rule is not None else list(TOGETHER)
    if work.trainer is not None:
        names = []
    for name in names:
        found, reason = _try_together(name, work)
        if found is not None:
            engines[name] = found
            break
        objections.append(f"{name}: {reason}")
    if "stacked" in engines:
        replaying, reason = _build_replaying(work)
        engines |= replaying
        if reason is not None:
            objections.append(reason)
    if torch.get_num_threads() > 1 and len(work.jobs) > 1 and not cannot_work(work):
        engines |= _build_workers(work, stackable="stacked" in engines)
    elif (
        torch.get_num_threads() == 1
        and work.models.device.type == "cpu"
        and _takes_plain_steps(work)
        and _keeps_channels_last(work)
    ):
        engines[FITTED] = ChannelsLastLoop()
    engines["loop"] = LoopEngine()
    chosen = "loop"
    if len(engines) > 1:
        chosen = fastest(engines, work)
    return chosen, engines[chosen], objections


def _find_engine(name: str, work: Workload) -> tuple[str, Engine, list[str]]:
    """Choose the fastest form of an engine that the user has named.

    A form is, for example, the engine inside worker processes.

    Returns
    -------
    tuple
        Name of the engine, with its form; the engine; and the reasons why faster forms were
        refused.

    Raises
    ------
    ConfigError
        If the engine cannot train the workload.
    """
    engines: dict[str, Engine] = {}
    objections: list[str] = []
    reason = None
    if name == "loop":
        return name, LoopEngine(), objections
    if name in TOGETHER:
        engine, reason = _try_together(name, work)
        if engine is not None:
            engines[name] = engine
            if name == "stacked":
                replaying, not_recorded = _build_replaying(work)
                engines |= replaying
                if not_recorded is not None:
                    objections.append(not_recorded)
    elif (reason := cannot_work(work)) is None:
        stackable = work.trainer is None and _try_together("stacked", work)[0] is not None
        engines = _build_workers(work, stackable)
    if not engines:
        raise ConfigError(f"engine {name!r} cannot train this model: {reason}; use --engine auto")
    chosen = name
    if name == "workers" or len(engines) > 1:
        chosen = fastest(engines, work)
    return chosen, engines[chosen], objections


def _build_by_name(resolved: str) -> Engine:
    """Return the engine for a value of :attr:`ChosenEngine.resolved`, such as ``workers, loop``."""
    name, _, inside = resolved.partition(", ")
    if name == "workers":
        return WorkersEngine(inside)
    if resolved == REPLAYED:
        return StackedEngine(Replay())
    if resolved == FITTED:
        return ChannelsLastLoop()
    return TOGETHER.get(name, LoopEngine)()


def _try_together(name: str, work: Workload) -> tuple[Engine | None, str | None]:
    """Try an engine that trains clients together.

    Returns
    -------
    tuple
        The engine, or None if it cannot train the workload; and the reason if it cannot, or None.
    """
    engine = TOGETHER[name]()
    reason = objection(engine, work)
    if reason is not None:
        return None, reason
    return engine, None


def _build_replaying(work: Workload) -> tuple[dict[str, Engine], str | None]:
    """Return a dict with the stacked engine that records its steps as CUDA graphs, by its name.

    The dict is empty if the device is not a GPU, if training needs random numbers or decisions from
    the CPU (with augmentation or DP-SGD), or if a trial of the engine fails. In the last case, the
    second result is the reason; otherwise it is None.
    """
    # A recording contains only operations on the GPU: random numbers and decisions on the CPU, by
    # an augmentation or by DP-SGD, would be the same in every launch of the recording.
    if not can_record(work.models.device) or is_augmented(work.module) or work.private is not None:
        return {}, None
    engine = StackedEngine(Replay())
    # The first round runs the steps, the second records them, the third only launches them.
    reason = objection(engine, work, rounds=3)
    if reason is not None:
        return {}, f"steps are not recorded as CUDA graphs: {reason}"
    return {REPLAYED: engine}, None


def _build_workers(work: Workload, stackable: bool) -> dict[str, Engine]:
    """Return engines that train in worker processes, by name.

    The engines differ in how each process trains its clients: by the loop, or by the loop in the
    channels-last memory format if it supports the module; and, if ``stackable``, also by the
    stacked engine.
    """
    ways = ["channels last" if _keeps_channels_last(work) else "loop"]
    if stackable:
        ways.insert(0, "stacked")
    return {f"workers, {way}": WorkersEngine(way) for way in ways}


def _takes_plain_steps(work: Workload) -> bool:
    """Return whether clients train by optimizer steps alone and do not store the optimizer's state.

    This is not the case for clients that train by a local rule, a user's own code or DP-SGD.
    """
    has_own_steps = work.rule is not None or work.trainer is not None
    return not has_own_steps and work.private is None and not work.spec.keep_state


def _keeps_channels_last(work: Workload) -> bool:
    """Return whether :class:`ChannelsLastLoop` can train the clients of a workload.

    The engine is tried on one thread. The result is False for a module without convolutions.
    """
    has_convolutions = any(parameter.dim() == 4 for parameter in work.module.parameters())
    if not has_convolutions or work.trainer is not None:
        return False
    with using_threads(1):  # as in a worker process
        reason = objection(ChannelsLastLoop(), work)
    if reason is not None:
        _log.info("convolutions are not trained in the channels-last memory format: %s", reason)
    return reason is None
