"""Training code of a user: a Python function, or a class of steps, that trains one client.

A function ``fn(model, batches, context)`` is the setting :attr:`LocalTraining.trainer`. A federated
method whose training needs settings or stored tensors derives a class from :class:`ClientTrainer`.
Engines call both for one client after another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from fedclade.core.errors import ModelError
from fedclade.core.local import LocalTraining, trainer_name
from fedclade.core.structure import Tensors
from fedclade.core.work import Steps


class Batches(Protocol):
    """Mini-batches of a client's local training.

    One iteration yields the batches of all epochs or steps in the settings of local training, in
    the same order as for the steps of an optimizer. A further iteration yields newly drawn batches.
    """

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs ``[B, ...]`` and the targets ``[B, ...]`` of each batch."""
        ...

    def __len__(self) -> int:
        """Return the number of batches of one iteration."""
        ...


class TrainingContext(Protocol):
    """Access of a user's training code to the settings and the stored tensors of one client."""

    @property
    def local(self) -> LocalTraining:
        """Settings of local training."""
        ...

    @property
    def lr(self) -> float:
        """Step size of the round, after the decay :attr:`LocalTraining.lr_decay`."""
        ...

    @property
    def round(self) -> int:
        """Number of the round, from 1."""
        ...

    @property
    def dataset(self) -> TensorDataset:
        """All n training examples of the client, for a data loader of one's own."""
        ...

    @property
    def start(self) -> Tensor:
        """Whole model from which the client starts, as a vector ``[F]``."""
        ...

    @property
    def anchor(self) -> Tensor:
        """Vector ``[F]`` that the server sends in addition; by default the model of the start."""
        ...

    def unpack(self, inputs: Tensor) -> Tensor | Tensors:
        """Return the tensors of a batch of inputs, by name or by position.

        A batch of inputs that are dicts or tuples is one tensor, with a row of numbers for each
        example. The model takes such rows; code that needs the tensors themselves, for example to
        mask tokens, gets them by this method. Inputs of a single tensor are returned as they are.

        Parameters
        ----------
        inputs
            Inputs ``[B, ...]`` of a batch.
        """
        ...

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the run's task over a batch.

        Parameters
        ----------
        outputs
            Outputs ``[B, ...]`` of the model.
        targets
            Targets ``[B, ...]`` of the batch.
        """
        ...

    def minimize(
        self, model: nn.Module, batches: Batches, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> float:
        """Take one step of the run's optimizer on each batch, and return the mean loss.

        The steps have all settings of local training: the optimizer with its options, the clipping
        of gradients, and the proximal term.

        Parameters
        ----------
        model
            The model, which is trained in place.
        batches
            The client's mini-batches.
        loss
            Function of the inputs and the targets of a batch, which returns the loss to minimize, a
            tensor with one entry. It calls the model itself.
        """
        ...

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return a new optimizer of a model's trained parameters, with the settings of the run.

        The settings are the optimizer, its options, step size, momentum and weight decay. The
        setting :attr:`LocalTraining.clip_norm` is not applied.
        """
        ...

    def penalty(self, model: nn.Module) -> Tensor:
        """Return the proximal term μ/2·‖θ − θ_anchor‖² of the model's trained parameters θ.

        The term is 0 if μ (:attr:`LocalTraining.mu`) is 0. With a larger μ the code must add the
        term to its loss.
        """
        ...

    def vector_of(self, model: nn.Module) -> Tensor:
        """Return a model as a vector ``[F]``: its trained parameters, then its buffers."""
        ...

    def model_of(self, vector: Tensor) -> nn.Module:
        """Return a new model, in evaluation mode and without gradients, from a vector ``[F]``."""
        ...

    def stored(self, name: str) -> Tensor | None:
        """Return the tensor that the client stored under a name before the round.

        The result is None if there is none. The name must be in :attr:`ClientTrainer.stores`.
        """
        ...

    def store(self, name: str, tensor: Tensor) -> None:
        """Store a tensor for the client's later rounds; it never leaves the client.

        The name must be in :attr:`ClientTrainer.stores`. The tensor is not stored if the training
        turns out to have diverged.
        """
        ...

    def count_steps(self, steps: int) -> None:
        """Report the number of steps that the code has taken.

        Without a report, each batch that is read from the ``batches`` counts as a step.
        """
        ...


def with_features(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a model, and its representation of the inputs.

    The representation is the input of the model's last linear layer, in the order in which the
    layers are registered.

    Parameters
    ----------
    model
        The model.
    inputs
        Inputs of B examples, ``[B, ...]``.

    Returns
    -------
    tuple
        Outputs ``[B, ...]``, and representations ``[B, d]``.

    Raises
    ------
    ModelError
        If the model has no linear layer, or does not call its last one.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    caught: list[Tensor] = []

    def catch(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        caught.append(given[0])

    hooks = [layer.register_forward_pre_hook(catch) for layer in layers[-1:]]
    try:
        outputs = model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not caught:
        raise ModelError(
            f"{type(model).__name__} should have a linear layer as its last layer, whose inputs are "
            "the representation of an example; choose another model"
        )
    return outputs, caught[-1].flatten(1)


class ClientTrainer(Steps, ABC):
    """Base class of training steps that are Python code of one client.

    A subclass is a frozen dataclass. Its fields are what the server sends: numbers, texts, and
    tensors of any shape. Clients of a network take such steps only if their policy names the class
    (setting ``trainers``). Such steps are not available with DP-SGD, which needs to add noise to
    every gradient.

    Attributes
    ----------
    stores
        Names of the tensors that each client stores from round to round. Worker processes cannot
        train clients that store tensors.

    Examples
    --------
    Training by the run's optimizer, with a penalty on the outputs:

    >>> from dataclasses import dataclass
    >>> from fedclade import ClientTrainer
    >>> @dataclass(frozen=True)
    ... class SmallOutputs(ClientTrainer):
    ...     weight: float
    ...
    ...     def train_client(self, model, batches, context):
    ...         def loss(inputs, targets):
    ...             outputs = model(inputs)
    ...             return context.loss(outputs, targets) + self.weight * outputs.square().mean()
    ...
    ...         return context.minimize(model, batches, loss)
    """

    stores: ClassVar[tuple[str, ...]] = ()

    @property
    def label(self) -> str:
        """Name of the code in messages."""
        return type(self).__name__

    @property
    def vectors(self) -> int:
        """Number of vectors of the model's size that a client needs in addition to its model.

        They are the client's own copy, its gradient and one further model.
        """
        return 3

    @abstractmethod
    def train_client(self, model: nn.Module, batches: Batches, context: TrainingContext) -> float:
        """Train the model of one client in place, and return the mean training loss.

        Parameters
        ----------
        model
            The client's own copy of the model, in training mode. Parameters that the run does not
            train have ``requires_grad = False``.
        batches
            The client's mini-batches.
        context
            Settings, stored tensors and the loss of the task.
        """


@dataclass(frozen=True)
class FunctionTrainer(ClientTrainer):
    """Steps that a function ``fn(model, batches, context)`` takes.

    Parameters
    ----------
    function
        The function, see :attr:`LocalTraining.trainer`.
    """

    function: Callable[..., Any]

    @property
    def label(self) -> str:
        """Name of the function in messages."""
        return trainer_name(self.function)

    def train_client(self, model: nn.Module, batches: Batches, context: TrainingContext) -> float:
        """Train the model of one client by the function, and return the mean training loss."""
        return self.function(model, batches, context)
