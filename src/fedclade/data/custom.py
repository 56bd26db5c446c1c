"""Any torch data set as a pool, or as all that one client has."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from fedclade.core import ConfigError, DataError, TaskKind, checked, require
from fedclade.data.arrays import InputKind, check_input_kind, inputs_as, outputs_of
from fedclade.data.federation import ClientData, Federation
from fedclade.data.pool import Pool
from fedclade.data.reading import Examples, read_parts


@checked("dataset", "test")
def pool_from_torch(
    dataset: Dataset[Any],
    test: Dataset[Any] | None = None,
    name: str = "custom",
    task: TaskKind = "classification",
    inputs_are: InputKind = "auto",
) -> Pool:
    """Read a map-style torch data set of pairs ``(x, y)`` into a pool.

    Every example is read once. A random transform is frozen by that, which is warned of.

    Parameters
    ----------
    dataset
        Examples to train on. All ``x`` are tensors or arrays of one shape: bytes become uint8 images (scaled to [0, 1]
        on the way to the model), other whole numbers int64 tokens, the rest float32. Labels may be whole numbers of any
        type; for the targets of other tasks see :class:`Pool`.
    test
        Examples to test on; None lets every client hold back a part of its own examples.
    name
        What to call it.
    task
        What the targets are.
    inputs_are
        ``numbers``, ``tokens`` or ``auto``; see :class:`OwnSettings`.

    Raises
    ------
    ConfigError
        If ``inputs_are`` is unknown.
    DataError
        If there are no examples, they are not pairs, inputs differ in shape or kind, or a target is not as the task has
        it, such as a label that is no whole number ≥ 0.
    """
    given = {f"data set {name!r}": dataset} | ({} if test is None else {f"test data of {name!r}": test})
    read = read_parts(given, task)
    train, *tested = read.parts
    check_input_kind(inputs_are)
    x = inputs_as(_numbers(read), inputs_are, f"inputs of {name!r}")
    return Pool.of_examples(name, x, read.y, train, tested[0] if tested else train[:0], task=task)


@checked("train", "test", "validation")
def one_client(
    train: Dataset[Any],
    test: Dataset[Any],
    *,
    labels: int | None = None,
    task: TaskKind = "classification",
    validation: Dataset[Any] | None = None,
    name: str = "client",
    key: int = 0,
    mean: float = 0.0,
    std: float = 1.0,
    inputs_are: InputKind = "auto",
) -> Federation:
    """Read the data sets of one client into a federation of this client alone, as an app for Flower takes it.

    To a Flower server the name of its data is ``custom``.

    Parameters
    ----------
    train, test, validation
        Map-style torch data sets of pairs ``(x, y)``, as :func:`pool_from_torch` takes them.
    labels
        Number of labels among all clients: a client that lacks the last of them needs the same model as the others. For
        language data the size of the vocabulary; left out for other tasks.
    task
        What the targets are.
    name
        For people.
    key
        The client's own number for its random draws, such as the order of its batches; at least 0.
    mean, std
        Of the pixels in [0, 1], where ``x`` are bytes: the same for all clients.
    inputs_are
        ``numbers``, ``tokens`` or ``auto``; see :class:`OwnSettings`.

    Raises
    ------
    ConfigError
        If ``labels`` is missing, or there are none; or if ``inputs_are`` is unknown.
    DataError
        If a data set cannot be read, or does not look like ``train``, a label is not below ``labels``, or the key is
        negative.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> mine = TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)
    >>> len(one_client(mine, mine, labels=10, name="hospital-1"))
    1
    """
    labelled = task in ("classification", "language")
    rule = "the number of labels among all clients" if labelled else f"left out for a {task} task"
    require(("labels", labels, (labels is not None) == labelled, rule))
    given = {f"training data of {name!r}": train, f"test data of {name!r}": test}
    given |= {} if validation is None else {f"validation data of {name!r}": validation}
    read = read_parts(given, task)
    trained, tested, *validated = read.parts
    if labels is not None and (needed := outputs_of(read.y, task)) > labels:
        raise DataError(
            f"client {name!r} has examples of label {needed - 1}, so labels should be above that, got {labels}"
        )
    if key < 0:
        raise DataError(f"the key of client {name!r} should be at least 0, got {key}")
    more = {"task": task, "mean": mean, "std": std}
    check_input_kind(inputs_are)
    x = inputs_as(_numbers(read), inputs_are, f"inputs of client {name!r}")
    pool = Pool.of_examples("custom", x, read.y, trained, tested, outputs=labels, **more)
    client = ClientData(0, name, key, trained, validated[0] if validated else trained[:0], tested)
    return Federation(pool, (client,), description="clients with data of their own")


def _numbers(read: Examples) -> torch.Tensor:
    if isinstance(read.x, torch.Tensor):
        return read.x
    raise ConfigError(
        "inputs should be numbers, got texts; fedclade.federation makes a vocabulary of all clients' texts"
    )
