"""Whether an engine can be trusted with a module: a trial on three clients, whose updates have to be the loop's."""

from __future__ import annotations

import copy
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from fedclade.core import Layout, LocalTraining, set_unsent_buffers
from fedclade.training.augmentation import remove_augmentation
from fedclade.training.input_hooks import cast_inputs_to
from fedclade.training.jobs import CannotTrainTogether, Engine, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.processes import cannot_fork, tried

TOLERANCE = 1e-3
"""How far the updates of two engines may be apart after a few steps, relative to their norm."""

FINE_TOLERANCE = 1e-9
"""The same in float64."""

LONGEST, TIMES_THE_LOOP = 60.0, 30
"""Seconds that a trial may take, and how many times what the loop took besides."""


def objection(engine: Engine, work: Workload, rounds: int = 1) -> str | None:
    """Return why an engine cannot train the clients of a workload, whose generators stay unused; or None.

    It has to give the same updates as the loop on two steps of three clients, in each of some rounds, which it may go
    about in different ways. What this finds besides layers that the engine does not know: modules whose forward pass
    mixes the examples of a batch, which would mix clients.

    Some layers in some layout make torch end the process. So the engine is tried in another one, wherever a process can
    be forked; elsewhere only engines are tried for which no such layer is known.
    """
    clients, batch = 3, work.spec.batch_size
    examples = 2 * batch + min(2, batch - 1)  # a ragged batch, but not of one example, which BatchNorm does not take
    small = _apart(work.cut(clients, examples))
    if small.private is not None:
        small = replace(small, private=small.private.as_trial())
    # Without dropout, whose draws differ between engines; and with SGD, as others make much of what is only rounding.
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
            f"{type(work.module).__name__} gives other updates for clients together (relative error {error:.1e}): its "
            "forward mixes the examples of a batch, or gives a layer something else than the batch, such as positions "
            "that are not expanded to it"
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
    jobs, layout = work.jobs, work.layout
    noise = torch.randn(len(jobs), layout.n_parameters, generator=torch.Generator().manual_seed(0))
    models, anchors = (work.models[rows] for rows in ([job.row for job in jobs], [job.anchor_row for job in jobs]))
    models[:, : layout.n_parameters] += 0.01 * noise.to(models)
    own = [replace(job, row=k, anchor=len(jobs) + k) for k, job in enumerate(jobs)]
    return replace(work, models=torch.cat([models, anchors]), jobs=own)


def _by_loop(work: Workload) -> Tensor:
    return LoopEngine().train(work.redrawn())[0]


def _relative_error(engine: Engine, work: Workload, expected: Tensor) -> float:
    """Return how far an engine's updates are from those expected, relative to their norms: that of the worst client."""
    got, _ = engine.train(work.redrawn())
    apart, norms = (torch.linalg.vector_norm(difference, dim=1) for difference in (got - expected, expected))
    # Updates are differences of models: tiny ones keep few digits. Those that diverge are left to the run.
    models = torch.linalg.vector_norm(work.models[[job.row for job in work.jobs]], dim=1)
    rounding = 100 * torch.finfo(models.dtype).eps * models
    return float(((apart - rounding).clamp(min=0) / norms).nan_to_num(0).max())


def _rounding_explains(engine: Engine, work: Workload) -> bool:
    """Return whether an engine and the loop differ only because rounding has fallen on two sides of a kink.

    Where the input of a ReLU is all but 0, its sign, and with it the gradient, is a matter of rounding. In float64 that
    is so fine that both agree to many more digits; and in float32 they agree for other orders of the examples. What
    mixes clients does it in float64 too, and what computes coarsely does it in any order.
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
    set_unsent_buffers(module, work.layout.unsent)  # by its state now, which may have diverged, others might be
    work.layout.set_training(module)  # checks leave modules in evaluation mode
    cast_inputs_to(module, torch.float64)
    layout = Layout.of(module)
    jobs = [replace(j, inputs=j.inputs.double() if j.inputs.is_floating_point() else j.inputs) for j in work.jobs]
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
