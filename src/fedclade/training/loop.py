"""Reference engine: one client after another, one batch after another, as in the papers.

All other engines are compared with the results of this engine.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedclade.core import ClientTrainer, Layout, LocalTraining, ModelError, rng
from fedclade.tasks import FittedTask, count_targets
from fedclade.training.jobs import (
    Job,
    Places,
    PrivateSteps,
    Workload,
    batches,
    full,
    precision,
    refuse_rules,
)
from fedclade.training.local_rules import train_by_rule
from fedclade.training.memory import return_freed_memory
from fedclade.training.optimizer import LocalOptimizer, get_state
from fedclade.training.own_trainer import train_by_code
from fedclade.training.threads import threads_of_step, using_threads

# DP-SGD by the loop: one client, one step, one example after another, as in Algorithm 1 of Abadi et
# al. 2016.


def train_privately(work: Workload, private: PrivateSteps, updates: Tensor) -> Tensor:
    """Train every client of a workload by DP-SGD, one client after another.

    Parameters
    ----------
    work
        The clients and their settings.
    private
        Settings of DP-SGD.
    updates
        Memory ``[n, S]`` to which the updates are written.

    Returns
    -------
    Tensor
        Mean loss of each client over the sampled examples whose gradients are finite, float64
        ``[n]``; 0 for a client without such examples.

    Raises
    ------
    ConfigError
        If the workload has a local rule or weights of examples.
    ModelError
        If training changes a buffer, since DP-SGD adds no noise to buffers.
    """
    refuse_rules(work)
    losses = torch.empty(len(work.jobs), dtype=torch.float64)
    for k, job in enumerate(work.jobs):
        losses[k] = _train_client(work, private, job, updates[k])
    return losses


def _train_client(work: Workload, private: PrivateSteps, job: Job, out: Tensor) -> float:
    """Train one client by DP-SGD, write its update ``[S]`` to ``out``, and return its mean loss."""
    module = work.module
    layout = work.layout
    spec = work.spec
    model = work.models[job.row]
    layout.load(model, module)
    layout.set_training(module)
    trained = {
        n: p for n, p in module.named_parameters() if p.requires_grad and n not in work.fixed
    }
    parameters = list(trained.values())
    anchors: list[Tensor] = []
    if spec.mu:
        pulled_to = layout.unflatten(work.models[job.anchor_row])
        anchors = [pulled_to[name] for name in trained]
    rule = LocalOptimizer.of(spec, work.lr)
    optimizer = rule.for_one_client(parameters)
    if spec.keep_state:
        rule.set_state(optimizer, trained, job.state or {})
    draws = private.draws(job, spec.batch_size)
    losses = list[Tensor]()
    noise = torch.empty(layout.n_parameters)
    with rng.seeded_globally(job.generator.initial_seed(), model.device):
        for _ in range(spec.steps_with(job.size)):
            total = model.new_zeros(layout.n_parameters)
            for place in draws.sample().tolist():  # "compute gradient", "clip gradient"
                gradient, loss = _gradient(work, trained, job, place)
                factor = float(private.factors(gradient.square().sum()))
                if factor > 0:
                    total.add_(gradient, alpha=factor)
                    losses.append(loss)
            noisy = total / draws.expected + draws.noise(noise).to(total)  # "add noise"
            _set_gradients(layout, trained, noisy)
            rule.adjust(parameters, anchors)
            optimizer.step()  # "descent"
    if spec.keep_state:
        work.states[job.client] = get_state(optimizer, trained)
    layout.difference(module, model, out)
    layout.check_unsent(module)
    check_buffers(module, layout, out)
    if not losses:  # every sample was empty
        return 0.0
    return float(torch.stack(losses).double().mean())


def _gradient(
    work: Workload, trained: Mapping[str, nn.Parameter], job: Job, place: int
) -> tuple[Tensor, Tensor]:
    """Return the gradient of one example's loss, ``[D]`` for D parameters, and the loss.

    ``place`` is the index of the example among the job's examples. The gradient is zero at
    parameters that are not trained.
    """
    one = slice(place, place + 1)
    with precision(work.spec, job.inputs.device):
        outputs = work.module(job.inputs[one])
    loss = work.task.mean_loss(full(outputs), job.targets[one])
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    gradient = work.models.new_zeros(work.layout.n_parameters)
    of_name = dict(zip(trained, found, strict=True))
    for slot in work.layout.parameters:
        if (mine := of_name.get(slot.name)) is not None:
            gradient[slot.start : slot.stop] = mine.flatten()
    return gradient, loss.detach()


def _set_gradients(layout: Layout, trained: Mapping[str, nn.Parameter], gradient: Tensor) -> None:
    """Set the ``grad`` of each trained parameter to its part of a gradient vector, ``[D]``."""
    for slot in layout.parameters:
        if (parameter := trained.get(slot.name)) is not None:
            parameter.grad = (
                gradient[slot.start : slot.stop].view(slot.shape).to(parameter, copy=True)
            )


def check_buffers(module: nn.Module, layout: Layout, updates: Tensor) -> None:
    """Check that updates ``[..., S]`` leave the model's buffers unchanged, as DP-SGD requires.

    Raises
    ------
    ModelError
        If training has changed a buffer.
    """
    for slot in layout.buffers:
        if bool((updates[..., slot.start : slot.stop] != 0).any()):
            raise ModelError(
                f"privacy.level = 'example': training changes buffer {slot.name!r} of "
                f"{type(module).__name__}, but DP-SGD adds no noise to buffers; use a model "
                "without this buffer, such as a model with GroupNorm"
            )


LARGE = 2**22
"""Bytes of the parameters from which the memory of gradients is returned to the system."""

FIRST_STEPS = 8
"""Number of training steps after each of which the memory of large gradients is returned.

The C library of Linux often places the gradients of a step beside the freed gradients of the step
before, whose memory it keeps: the small results of a step lie between, so that a gradient with its
alignment does not fit into the gap. After some steps the same gaps are used again. So the memory is
returned after each of the first steps, and later only after steps 8, 16, 32 and so on, since
mapping it again takes time.
"""

LOGITS_AT_A_TIME = 2**24
"""Largest number of logits in a forward pass for a gradient over all examples of a client.

The logits take 64 MiB in float32.
"""


class LoopEngine:
    """Engine that trains one client after another; the reference for all other engines."""

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :meth:`fedclade.training.jobs.Engine.train`."""
        if work.private is not None:
            return _privately(work, work.private, out)
        if work.rule is not None:
            return _by_rule(work, out)
        if work.trainer is not None:
            return _by_code(work, work.trainer, out)
        module = work.module
        models = work.models
        updates = work.room(out)
        losses = torch.empty(len(work.jobs), dtype=torch.float64)
        states: dict[int, dict[str, Tensor]] = {}
        with using_threads(threads_of_step(module, work.jobs[0].inputs, work.batch_size)):
            for k, job in enumerate(work.jobs):
                state: dict[str, Tensor] | None = None
                if work.spec.keep_state:
                    state = dict(job.state or {})
                _, losses[k] = train(
                    module,
                    work.layout,
                    models[job.row],
                    examples=(job.inputs, job.targets),
                    spec=work.spec,
                    lr=work.lr,
                    task=work.task,
                    generator=job.generator,
                    anchor=models[job.anchor_row],
                    out=updates[k],
                    fixed=work.fixed,
                    state=state,
                    weights=job.weights,
                    returns_memory=work.returns_memory,
                )
                if state is not None:
                    states[job.client] = state
        work.states.update(states)
        return updates, losses


def chunk(logits_each: int) -> int:
    """Return the number of examples in a forward pass, to limit the memory of the logits.

    Each example has ``logits_each`` logits.
    """
    return max(1, min(1024, LOGITS_AT_A_TIME // logits_each))


def train(
    module: nn.Module,
    layout: Layout,
    model: Tensor,
    examples: tuple[Tensor, Tensor],
    spec: LocalTraining,
    lr: float,
    task: FittedTask,
    generator: torch.Generator,
    anchor: Tensor | None = None,
    out: Tensor | None = None,
    fixed: frozenset[str] = frozenset(),
    state: dict[str, Tensor] | None = None,
    weights: Tensor | None = None,
    returns_memory: bool = False,
) -> tuple[Tensor, float]:
    """Train one client by local SGD: compute the update SGD_n(θ, D_i) − θ (CFL eq. 1).

    The settings may specify another optimizer than SGD. The module's parameters and buffers are
    overwritten.

    Parameters
    ----------
    module
        The model's structure.
    layout
        Layout of the parameter vector.
    model
        The model θ from which training starts, as a parameter vector, ``[S]``.
    examples
        Inputs and targets ``[n, ...]``.
    spec
        Settings of local training.
    lr
        Step size of the round.
    task
        The loss.
    generator
        Generator that orders the batches; its seed is also the seed of dropout.
    anchor
        The model ``[S]`` to which the proximal term pulls; θ by default.
    out
        Memory ``[S]`` for the update; None for new memory.
    fixed
        Names of parameters that are not trained.
    state
        State of the optimizer at the start, which is replaced by the state at the end; None to
        start with a new optimizer and not to return its state.
    weights
        Weights ``[n]`` of the examples, see :class:`~fedclade.training.jobs.Job`.
    returns_memory
        Whether the memory of large gradients is returned to the system.

    Returns
    -------
    tuple
        The update ``[S]`` and the mean training loss.
    """
    returns_memory = returns_memory and layout.n_parameters * layout.dtype.itemsize >= LARGE
    layout.load(model, module)
    layout.set_training(module)
    held = [p for name, p in module.named_parameters() if name in fixed]
    trained = {
        name: p for name, p in module.named_parameters() if p.requires_grad and name not in fixed
    }
    parameters = list(trained.values())
    anchors: list[Tensor] = []
    if spec.mu:
        pulled_to = layout.unflatten(model if anchor is None else anchor)
        anchors = [pulled_to[name] for name in trained]
    rule = LocalOptimizer.of(spec, lr)
    optimizer = rule.for_one_client(parameters)
    if state is not None:
        rule.set_state(optimizer, trained, state)
    inputs, targets = examples
    losses: list[Tensor] = []
    with rng.seeded_globally(generator.initial_seed(), inputs.device), without_gradients(held):
        for step, batch in enumerate(batches(len(inputs), spec, generator, inputs.device)):
            optimizer.zero_grad(set_to_none=True)
            if returns_memory and (step < FIRST_STEPS or step.bit_count() == 1):
                return_freed_memory()
            with precision(spec, inputs.device):
                outputs = module(inputs[batch])
            of_batch = None if weights is None else weights[batch]
            loss = task.mean_loss(full(outputs), targets[batch], of_batch)
            loss.backward()
            rule.adjust(parameters, anchors)
            optimizer.step()
            # Weighted by size, since the last batch may be smaller: the mean is over examples.
            losses.append(loss.detach() * len(batch))
        optimizer.zero_grad(set_to_none=True)  # frees the gradients before the update takes memory
    if returns_memory:
        return_freed_memory()
    layout.check_unsent(module)
    if state is not None:
        state.clear()
        state.update(get_state(optimizer, trained))
    mean_loss = float(torch.stack(losses).sum()) / spec.passed(len(inputs))
    if out is None:
        out = torch.empty_like(model)
    return layout.difference(module, model, out), mean_loss


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Generator[None]:
    """Disable gradients of parameters in a ``with`` block, so that no optimizer changes them."""
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def gradient(
    module: nn.Module,
    layout: Layout,
    model: Tensor,
    examples: tuple[Tensor, Tensor],
    task: FittedTask,
    chunk: int,
) -> tuple[Tensor, float]:
    """Return −∇r_i(θ) over all examples of client i (CFL eq. 50), and the loss r_i(θ).

    The module is in evaluation mode, since r_i is the risk of the model as it is deployed.

    Parameters
    ----------
    module
        The model's structure; its parameters and buffers are overwritten.
    layout
        Layout of the parameter vector.
    model
        The model θ as a parameter vector, ``[S]``.
    examples
        Inputs and targets ``[n, ...]``.
    task
        The loss.
    chunk
        Number of examples in a forward pass.

    Returns
    -------
    tuple
        The negative gradient as an update, ``[S]``, and the loss.
    """
    layout.load(model, module)
    module.eval()
    module.zero_grad(set_to_none=True)
    inputs, targets = examples
    total = 0.0
    of_all = int(count_targets(targets).sum())
    # cuDNN's LSTM has no backward pass in evaluation mode.
    with torch.backends.cudnn.flags(enabled=False):
        for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
            loss = task.total_loss(full(module(x)), y) / of_all
            loss.backward()
            total += float(loss.detach())
    update = torch.zeros_like(model)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for slot in layout.parameters:
        if (g := gradients[slot.name]) is not None:
            update[slot.start : slot.stop] = -g.flatten()
    return update, total


def _privately(work: Workload, private: PrivateSteps, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Train the clients of a workload by DP-SGD, one client after another."""
    updates = work.room(out)
    with using_threads(threads_of_step(work.module, work.jobs[0].inputs, 1)):
        return updates, train_privately(work, private, updates)


def _by_rule(work: Workload, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Train the clients of a workload by its local rule, one client after another."""
    updates = work.room(out)
    losses = torch.empty(len(work.jobs), dtype=torch.float64)
    module = work.module
    with using_threads(threads_of_step(module, work.jobs[0].inputs, work.batch_size)):
        for k, job in enumerate(work.jobs):
            work.layout.set_training(module)
            with rng.seeded_globally(job.generator.initial_seed(), job.inputs.device):
                updates[k], losses[k] = train_by_rule(work, [job], _Gradients(work, job))
            work.layout.check_unsent(module)
    return updates, losses


def _by_code(work: Workload, trainer: ClientTrainer, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Train the clients of a workload by a user's own code, one client after another."""
    updates = work.room(out)
    losses = torch.empty(len(work.jobs), dtype=torch.float64)
    with using_threads(threads_of_step(work.module, work.jobs[0].inputs, work.batch_size)):
        for k, job in enumerate(work.jobs):
            losses[k] = train_by_code(work, job, trainer, updates[k])
    return updates, losses


class _Gradients:
    """Function that computes the gradient of one client's loss at any model, by autograd.

    It is the form of :data:`~fedclade.training.local_rules.Gradients` for a single client. If the
    module's forward pass changes buffers, such as the statistics of BatchNorm, their new values are
    written to the model.
    """

    def __init__(self, work: Workload, job: Job) -> None:
        self._work = work
        self._job = job
        self._layout = work.layout
        self._parameters = dict(work.module.named_parameters())

    def __call__(
        self, models: Tensor, places: Places, batch: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of the client's loss at a model, on one batch.

        Parameters
        ----------
        models
            The model, as a parameter vector in one row, ``[1, S]``.
        places
            Not used, since there is only one client.
        batch
            Indices of the batch's examples, ``[1, B]``.

        Returns
        -------
        tuple
            The gradient ``[1, D]`` for D parameters; the loss ``[1]``; and a mask ``[D]`` of the
            parameters on which the loss depends.
        """
        work = self._work
        layout = self._layout
        module = self._work.module
        layout.load(models[0], module)
        module.zero_grad(set_to_none=True)
        with precision(work.spec, models.device):
            outputs = module(self._job.inputs[batch[0]])
        loss = work.task.mean_loss(full(outputs), self._job.targets[batch[0]])
        loss.backward()
        gradients = models.new_zeros(1, layout.n_parameters)
        reached = torch.zeros(layout.n_parameters, dtype=torch.bool, device=models.device)
        for slot in layout.parameters:
            if (gradient := self._parameters[slot.name].grad) is not None:
                gradients[0, slot.start : slot.stop] = gradient.flatten()
                reached[slot.start : slot.stop] = True
        for slot in layout.buffers:
            models[0, slot.start : slot.stop] = module.get_buffer(slot.name).flatten().to(models)
        return gradients, loss.detach()[None], reached
