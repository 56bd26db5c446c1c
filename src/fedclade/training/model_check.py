"""Whether a model fits the data of a federation."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fedclade.core import ModelError
from fedclade.data import Federation, Pool
from fedclade.training.jobs import Workload

MODULE_ERRORS = (RuntimeError, ValueError, IndexError)
"""What a module raises that does not fit a client's data."""


def check_model_fits(module: nn.Module, federation: Federation, device: torch.device) -> None:
    """Run two examples through the model and compare its outputs with the targets; a ModelError if they differ."""
    pool = federation.pool
    inputs = pool.inputs(federation.clients[0].train[:2])
    module.eval()
    try:
        with torch.inference_mode():
            outputs = module(inputs.to(device))
    except Exception as error:
        raise ModelError(f"the model cannot take inputs of shape {pool.input_shape} ({pool.name}): {error}") from error
    got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if pool.task in ("classification", "language"):
        expected, of_what = (len(inputs), *pool.y.shape[1:], pool.outputs), f"{pool.outputs} labels"
    else:
        expected, of_what = (len(inputs), pool.outputs), f"the targets of a {pool.task} task"
        got = (*got, 1) if got == (len(inputs),) and pool.outputs == 1 else got
    if got != expected:
        raise ModelError(
            f"the model should give {expected} outputs for {of_what} of {pool.name}, got {got}"
            f"{_ignored_hint(pool, got, expected)}"
        )


def _ignored_hint(pool: Pool, got: object, expected: tuple[int, ...]) -> str:
    """Return advice if a model lacks outputs only for a last label that may mean "no label", such as 255."""
    if pool.task != "classification" or not isinstance(got, tuple) or got[:-1] != expected[:-1]:
        return ""
    outputs, largest = int(got[-1]), int(pool.y.max())
    beyond = pool.y[pool.y >= outputs]
    if len(beyond) == 0 or int(beyond.min()) < largest:
        return ""
    return f"; if label {largest} means that there is no label, leave its {len(beyond)} examples out"


def model_error(
    error: Exception,
    each: Iterable[tuple[int, Workload]],
    federation: Federation,
    number: int,
    engine: str,
    train: Callable[[Workload], object],
) -> ModelError:
    """Return the error of clients that could not be trained together in a round, given the workload of each by itself.

    It names the client on whose data training by ``train`` fails.
    """
    together = list(each)
    for client, work in together:
        try:
            train(work)
        except MODULE_ERRORS as its_own:
            return ModelError(
                f"round {number}: the model fails on the data of client {client} "
                f"({federation.by_id[client].name!r}): {its_own}"
            )
    return ModelError(
        f"round {number}: engine {engine!r} fails on {len(together)} clients together, each of whom trains alone: "
        f"{error}; use --engine loop, or less memory"
    )
