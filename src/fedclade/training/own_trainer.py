"""Local training by a user's own code: a training function, or a class of client trainers.

The code trains one client on a copy of the model. All engines that can train such clients use this
module: the loop, and with it worker processes, Ray actors and clients of a network.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from fedclade.core import (
    Batches,
    ClientTrainer,
    ConfigError,
    Layout,
    LocalTraining,
    Tensors,
    call_own,
    rng,
)
from fedclade.training.input_hooks import input_structure
from fedclade.training.jobs import Job, Workload, batches, full, precision
from fedclade.training.optimizer import LocalOptimizer

_log = logging.getLogger(__name__)


class BatchReader:
    """Mini-batches of one client, in the order in which the plain loop uses them.

    Parameters
    ----------
    job
        The client's training job.
    spec
        Settings of local training.
    """

    def __init__(self, job: Job, spec: LocalTraining) -> None:
        self._job = job
        self._spec = spec
        self.count = 0
        """Number of batches that have been read."""

    def __len__(self) -> int:
        return self._spec.steps_with(self._job.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        job = self._job
        for batch in batches(job.size, self._spec, job.generator, job.inputs.device):
            self.count += 1
            yield job.inputs[batch], job.targets[batch]


class ClientContext:
    """Settings, loss and stored tensors of one client, for a user's training code.

    The class implements the protocol :class:`~fedclade.core.TrainingContext`.

    Parameters
    ----------
    work
        The workload that the client belongs to.
    job
        The client's training job.
    trainer
        The user's code.
    """

    def __init__(self, work: Workload, job: Job, trainer: ClientTrainer) -> None:
        self._work = work
        self._job = job
        self._trainer = trainer
        self.local = work.spec
        self.lr = work.lr
        self.round = work.number
        self.state: dict[str, Tensor] = dict(job.state or {})
        """Tensors that the client stores after the training, by name."""
        self.adds_penalty = False
        """Whether the code has requested the proximal term."""
        self.steps: int | None = None
        """Number of steps that the code has reported; None without a report."""

    @property
    def dataset(self) -> TensorDataset:
        """All training examples of the client."""
        return TensorDataset(self._job.inputs, self._job.targets)

    @property
    def start(self) -> Tensor:
        """Whole model from which the client starts, as a vector ``[F]``."""
        return self._work.models[self._job.row].clone()

    @property
    def anchor(self) -> Tensor:
        """Vector ``[F]`` that the server sends in addition; by default the model of the start."""
        return self._work.models[self._job.anchor_row].clone()

    def unpack(self, inputs: Tensor) -> Tensor | Tensors:
        """Return the tensors of a batch of inputs, by name or by position."""
        structure = input_structure(self._work.module)
        return inputs if structure is None else structure.unpack(inputs)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the run's task over a batch."""
        return self._work.task.mean_loss(full(outputs), targets)

    def minimize(
        self, model: nn.Module, batches: Batches, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> float:
        """Take one step of the run's optimizer on each batch, and return the mean loss."""
        self.adds_penalty = True
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parameters = list(trained.values())
        anchors: list[Tensor] = []
        if self.local.mu:
            pulled_to = self._work.layout.unflatten(self._work.models[self._job.anchor_row])
            anchors = [pulled_to[name] for name in trained]
        rule = LocalOptimizer.of(self.local, self.lr)
        optimizer = rule.for_one_client(parameters)
        losses: list[Tensor] = []
        examples = 0
        for inputs, targets in batches:
            optimizer.zero_grad(set_to_none=True)
            with precision(self.local, inputs.device):
                of_batch = loss(inputs, targets)
            of_batch.backward()
            rule.adjust(parameters, anchors)
            optimizer.step()
            losses.append(of_batch.detach() * len(inputs))
            examples += len(inputs)
        return float(torch.stack(losses).sum()) / examples

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return a new optimizer of a model's trained parameters, with the settings of the run."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return LocalOptimizer.of(self.local, self.lr).torch_optimizer(trained)

    def penalty(self, model: nn.Module) -> Tensor:
        """Return the proximal term μ/2·‖θ − θ_anchor‖² of the model's trained parameters θ."""
        self.adds_penalty = True
        total = self._work.models.new_zeros(())
        if not self.local.mu:
            return total
        anchors = self._work.layout.unflatten(self._work.models[self._job.anchor_row])
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                total = total + (parameter - anchors[name]).square().sum()
        return self.local.mu / 2 * total

    def vector_of(self, model: nn.Module) -> Tensor:
        """Return a model as a vector ``[F]``: its trained parameters, then its buffers."""
        return self._work.layout.flatten(model)

    def model_of(self, vector: Tensor) -> nn.Module:
        """Return a new model, in evaluation mode and without gradients, from a vector ``[F]``."""
        model = copy_of(self._work.module, self._work.layout)
        self._work.layout.load(vector.to(self._work.models), model)
        return model.eval().requires_grad_(False)

    def stored(self, name: str) -> Tensor | None:
        """Return the tensor that the client stored under a name before the round, or None."""
        self._check_name(name)
        tensor = (self._job.state or {}).get(name)
        return None if tensor is None else tensor.to(self._work.models.device)

    def store(self, name: str, tensor: Tensor) -> None:
        """Store a tensor for the client's later rounds."""
        self._check_name(name)
        self.state[name] = tensor.detach().clone()

    def count_steps(self, steps: int) -> None:
        """Report the number of steps that the code has taken."""
        self.steps = steps

    def _check_name(self, name: str) -> None:
        """Raise a ConfigError if the class of the code does not declare a stored tensor."""
        if name not in self._trainer.stores:
            label = self._trainer.label
            raise ConfigError(
                f"trainer {label} uses a stored tensor {name!r} that it does not declare; write the "
                f"trainer as a subclass of fedclade.ClientTrainer with stores = ({name!r},)"
            )


def copy_of(module: nn.Module, layout: Layout) -> nn.Module:
    """Return a copy of a module that shares its frozen parameters, which may be large."""
    shared: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        if name in layout.frozen:
            shared[id(parameter)] = parameter
    return copy.deepcopy(module, shared)


def train_by_code(work: Workload, job: Job, trainer: ClientTrainer, out: Tensor) -> float:
    """Train one client by a user's code, and write its update ``[S]`` to ``out``.

    The tensors that the client should store are written to ``work.states``, and the number of its
    steps to ``work.taken``.

    Parameters
    ----------
    work
        The workload that the client belongs to.
    job
        The client's training job.
    trainer
        The user's code.
    out
        Memory for the update, ``[S]``.

    Returns
    -------
    float
        The mean training loss that the code has returned.

    Raises
    ------
    ConfigError
        If the code returns no number, leaves out the proximal term, changes frozen parameters, or
        stores tensors that its class does not declare.
    DataError
        If the code raises any other error.
    """
    if job.weights is not None:
        raise ConfigError(
            f"trainer {trainer.label} cannot train a mixture of models, which weights the examples "
            "of a client; choose another algorithm, or leave local.trainer out"
        )
    layout = work.layout
    layout.load(work.models[job.row], work.module)
    model = copy_of(work.module, layout)
    model.zero_grad(set_to_none=True)
    layout.set_training(model)
    for name, parameter in model.named_parameters():
        if name in work.fixed:
            parameter.requires_grad_(False)
    frozen = {name: p._version for name, p in model.named_parameters() if name in layout.frozen}
    reader = BatchReader(job, work.spec)
    context = ClientContext(work, job, trainer)
    with rng.seeded_globally(job.generator.initial_seed(), work.models.device):
        loss = call_own(f"trainer {trainer.label}", trainer.train_client, model, reader, context)
    for name, parameter in work.module.named_parameters():
        if name in layout.frozen:  # shared with the copy
            parameter.requires_grad_(False)
    _check_result(trainer, loss, model, frozen=frozen, context=context)
    work.taken[job.client] = _count_steps(trainer, reader, context)
    layout.difference(model, work.models[job.row], out)
    layout.check_unsent(model)
    if trainer.stores:
        work.states[job.client] = context.state
    mean = float(loss)
    if not all(tensor.isfinite().all() for tensor in context.state.values()):
        mean = math.nan  # marks the client as diverged, so that its tensors are not stored
    return mean


def _check_result(
    trainer: ClientTrainer,
    loss: object,
    model: nn.Module,
    *,
    frozen: Mapping[str, int],
    context: ClientContext,
) -> None:
    """Raise a ConfigError if a user's code has not trained as its contract requires.

    ``frozen`` has the version of each frozen parameter before the training. Torch increments the
    version with every change.
    """
    is_number = isinstance(loss, Real) or (isinstance(loss, Tensor) and loss.numel() == 1)
    if not is_number or isinstance(loss, bool):
        raise ConfigError(
            f"trainer {trainer.label} should return the mean training loss, a number, got "
            f"{type(loss).__name__}"
        )
    if context.local.mu and not context.adds_penalty:
        raise ConfigError(
            f"trainer {trainer.label} leaves out the proximal term, but its weight μ is "
            f"{context.local.mu:g}; add context.penalty(model) to the loss, or choose a method and "
            "settings without the term (local.mu = 0)"
        )
    now = {name: p._version for name, p in model.named_parameters() if name in frozen}
    if changed := [name for name, version in frozen.items() if now.get(name) != version]:
        raise ConfigError(
            f"trainer {trainer.label} changes the frozen parameter {changed[0]!r}; pass only "
            "parameters with requires_grad = True to the optimizer"
        )


def _count_steps(trainer: ClientTrainer, reader: BatchReader, context: ClientContext) -> int:
    """Return the number of steps that a user's code has taken.

    If the code neither reads batches nor reports its steps, the number is the one in the settings
    of local training, and the log says so, once for each trainer.
    """
    if context.steps is not None:
        return context.steps
    if reader.count > 0:
        return reader.count
    _warn_once(
        f"trainer {trainer.label} reads no batches and does not report its steps by "
        "context.count_steps(n); the run counts the steps in the settings of local training"
    )
    return len(reader)


@lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    """Log a warning, unless the same warning was logged before."""
    _log.warning(text)
