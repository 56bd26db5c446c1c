"""Trial of a user's own loss function before round 1.

The trial finds the shapes in which the loss function accepts outputs and targets, and checks that
the loss of an example does not depend on the other examples of its batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn

from fedclade.core import ConfigError
from fedclade.data import Federation
from fedclade.tasks import SHAPES, FittedTask
from fedclade.training.jobs import full

EXAMPLES = 8
"""Number of examples on which a loss function is tried.

The examples are taken from several clients, since all targets of one client may be equal.
"""

TOLERANCE = 1e-5
"""Largest difference between losses of an example in two batches that counts as rounding.

It is relative to the largest loss.
"""


def try_loss(
    task: FittedTask, module: nn.Module, federation: Federation, device: torch.device
) -> FittedTask:
    """Try a user's own loss function, and return the task with the shapes that it accepts.

    A built-in loss function is not tried.

    Parameters
    ----------
    task
        The task of the federation.
    module
        A model that fits the task, on the device.
    federation
        The clients on whose training examples the loss function is tried.
    device
        Device of the model.

    Raises
    ------
    ConfigError
        If the loss raises an exception or does not return one number for each example; or if the
        loss of an example depends on the other examples of its batch, and the loss is not declared
        to be over the batch.
    """
    if not task.has_own_loss:
        return task
    module.eval()
    places = torch.tensor(list(islice(_choose_examples(federation), EXAMPLES)))
    targets = federation.pool.y[places].to(device)
    with torch.no_grad():
        outputs = full(module(federation.pool.inputs(places.numpy()).to(device)))
        tried = _find_shapes(task, outputs, targets)
        if not task.over_batch:
            _check_independence(tried, outputs, targets)
    return tried


def _choose_examples(federation: Federation) -> Iterator[int]:
    """Yield row numbers in the data pool of a few training examples of each client."""
    each = max(2, EXAMPLES // len(federation))
    for client in federation.clients:
        yield from (int(place) for place in client.train[:each])


def _find_shapes(task: FittedTask, outputs: Tensor, targets: Tensor) -> FittedTask:
    """Return the task with the first shapes of outputs and targets that its loss function accepts.

    Raises
    ------
    ConfigError
        If the loss function fails on all of these shapes.
    """
    first: ConfigError | None = None
    shapes_to_try = [task.shapes]
    if task.kind in ("binary", "multilabel", "regression"):
        shapes_to_try = list(SHAPES)
    for shapes in shapes_to_try:
        candidate = replace(task, shapes=shapes)
        try:
            _compute_losses(candidate, outputs, targets)
        except ConfigError as error:
            first = first or error
        except Exception as error:  # a user's loss may raise any exception
            first = first or ConfigError(
                f"task.loss = {task.loss_name} fails on outputs of shape {tuple(outputs.shape)} "
                f"and targets of shape {tuple(targets.shape)}: {type(error).__name__}: {error}"
            )
        else:
            return candidate
    assert first is not None  # the loop has at least one candidate
    raise first


def _compute_losses(task: FittedTask, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each example, without class weights, or the loss over the whole batch."""
    if task.over_batch:
        return task.batch_loss(outputs, targets)
    return replace(task, weights=None, balanced=False).losses(outputs, targets)


def _check_independence(task: FittedTask, outputs: Tensor, targets: Tensor) -> None:
    """Check that an example's loss is the same in the whole batch, in half of the batch, and alone.

    The check is skipped if the loss function is random, or fails on smaller batches.

    Raises
    ------
    ConfigError
        If the loss of an example depends on the other examples of its batch.
    """
    together, again = (_compute_losses(task, outputs, targets).double() for _ in range(2))
    tolerance = TOLERANCE * float(together.abs().nan_to_num(0.0, 0.0, 0.0).max())
    if not torch.allclose(together, again, rtol=0, atol=tolerance, equal_nan=True):
        return  # the loss draws at random, so its values cannot be compared
    n = len(targets)
    for size in sorted({-(-n // 2), 1}, reverse=True):
        for start in range(0, n, size):
            some = slice(start, start + size)
            try:
                apart = _compute_losses(task, outputs[some], targets[some]).double()
            except Exception:  # the loss may need more examples
                return
            different = ~torch.isclose(
                apart, together[some], rtol=0, atol=tolerance, equal_nan=True
            )
            if bool(different.any()):
                k = int(different.nonzero()[0])
                raise ConfigError(
                    f"task.loss = {task.loss_name}: the loss of an example should not depend on "
                    "the other examples of its batch, but the loss of one example is "
                    f"{float(apart[k]):.4g} in a batch of {len(apart)} and "
                    f"{float(together[some][k]):.4g} in a batch of {n}; compute the loss of each "
                    "example separately, or declare a loss over the batch with "
                    "Task(loss_over='batch')"
                )
