"""Trial of a user's own loss before round 1: shapes of its arguments, independence of examples."""

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
"""Number of examples on which a loss is tried.

They are of several clients, since all targets of one client may be equal.
"""

TOLERANCE = 1e-5
"""Largest change of an example's loss with its batch, relative to the largest loss, by rounding."""


def try_loss(
    task: FittedTask, module: nn.Module, federation: Federation, device: torch.device
) -> FittedTask:
    """Return the task with the shapes in which its loss takes outputs and targets.

    A built-in loss is not tried.

    Parameters
    ----------
    task
        The task of the federation.
    module
        A model that fits it, on the device.
    federation
        The clients on whose training examples the loss is tried.
    device
        The device.

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
    places = torch.tensor(list(islice(_places(federation), EXAMPLES)))
    targets = federation.pool.y[places].to(device)
    with torch.no_grad():
        outputs = full(module(federation.pool.inputs(places.numpy()).to(device)))
        tried = _fitting(task, outputs, targets)
        if not task.over_batch:
            _check_independence(tried, outputs, targets)
    return tried


def _places(federation: Federation) -> Iterator[int]:
    """Yield the pool's rows of some training examples of each client."""
    each = max(2, EXAMPLES // len(federation))
    for client in federation.clients:
        yield from (int(place) for place in client.train[:each])


def _fitting(task: FittedTask, outputs: Tensor, targets: Tensor) -> FittedTask:
    """Return the task with the first shapes that its loss accepts."""
    first: ConfigError | None = None
    has_shapes = task.kind in ("binary", "multilabel", "regression")
    for shapes in SHAPES if has_shapes else (task.shapes,):
        candidate = replace(task, shapes=shapes)
        try:
            _values(candidate, outputs, targets)
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


def _values(task: FittedTask, outputs: Tensor, targets: Tensor) -> Tensor:
    if task.over_batch:
        return task.batch_loss(outputs, targets)
    return replace(task, weights=None, balanced=False).losses(outputs, targets)


def _check_independence(task: FittedTask, outputs: Tensor, targets: Tensor) -> None:
    """Check that an example's loss is the same in the whole batch, in half of it, and alone."""
    together, again = (_values(task, outputs, targets).double() for _ in range(2))
    tolerance = TOLERANCE * float(together.abs().nan_to_num(0.0, 0.0, 0.0).max())
    if not torch.allclose(together, again, rtol=0, atol=tolerance, equal_nan=True):
        return  # the loss draws at random, so its values cannot be compared
    n = len(targets)
    for size in sorted({-(-n // 2), 1}, reverse=True):
        for start in range(0, n, size):
            some = slice(start, start + size)
            try:
                apart = _values(task, outputs[some], targets[some]).double()
            except Exception:  # the loss may need more examples
                return
            different = ~torch.isclose(
                apart, together[some], rtol=0, atol=tolerance, equal_nan=True
            )
            if bool(different.any()):
                k = int(different.nonzero()[0])
                raise ConfigError(
                    f"task.loss = {task.loss_name}: the loss of an example should not depend on "
                    f"the other examples of its batch, and one is {float(apart[k]):.4g} in a batch "
                    f"of {len(apart)} and {float(together[some][k]):.4g} in a batch of {n}; let it "
                    "give the loss of each example by itself, or declare it with "
                    "Task(loss_over='batch')"
                )
