"""Initial models of a run: by name, as a module, or made by a function from a seed.

Also the automatic choice of streaming, and the target score of a run.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedclade.algorithms import Algorithm
from fedclade.core import (
    ConfigError,
    DataSpec,
    FedcladeError,
    ModelError,
    check_module,
    require,
    rng,
    unknown,
)
from fedclade.models import Parts, build_model
from fedclade.runs.settings import RunSettings
from fedclade.tasks import FittedTask
from fedclade.training import note_unsent_buffers

# Automatic choice of streaming.

SHARE_OF_UPDATES = 4
"""Divisor of a run's memory that gives the limit for updates in it.

With ``auto``, a run streams if the updates of all clients take more than that limit.
"""

_log = logging.getLogger(__name__)


def decide_stream(
    settings: RunSettings, algorithm: Algorithm, size: int, budget: int, remote: bool = False
) -> bool:
    """Decide whether a run streams, so that the server stores sums of updates only.

    Parameters
    ----------
    settings
        Settings of the run; with ``stream="auto"`` this function decides.
    algorithm
        The algorithm.
    size
        Bytes of the updates of all clients.
    budget
        Bytes of memory that the run may occupy.
    remote
        Whether updates come from actors. With ``auto``, the run then streams whenever the
        algorithm, the signatures and the aggregation rule permit it.
    """
    if settings.is_central:
        return True
    if settings.stream != "auto":
        return settings.stream
    needs_updates = algorithm.needs_updates or settings.aggregate.is_robust
    needs_updates |= settings.aggregate.leave_out_opposed is True
    if needs_updates or (size <= budget // SHARE_OF_UPDATES and not remote):
        return False
    can = settings.signature.kind != "full" or not algorithm.compares
    if not can and size > budget // SHARE_OF_UPDATES:
        _log.warning(
            "the updates of all clients take %.1f GB, the run may take %.1f GB; with "
            "signature.kind = 'projected' it would stream and keep none of them",
            size / 1e9,
            budget / 1e9,
        )
    return can


# Target score of a run.


def target_of(settings: RunSettings, task: FittedTask) -> tuple[str, float] | None:
    """Return the name of the metric with a target, and the score to reach; None without a target.

    Raises
    ------
    ConfigError
        If the task has no such metric, several metrics are named, or the score is out of range.
    """
    if settings.target is None:
        return None
    given = (
        settings.target
        if isinstance(settings.target, Mapping)
        else {task.metrics[0].name: settings.target}
    )
    if not given:
        return None
    if len(given) > 1:
        raise ConfigError(f"[target] should name one metric, got {', '.join(given)}")
    ((name, score),) = given.items()
    known = {metric.name: metric for metric in task.metrics}
    if name not in known:
        raise ConfigError(
            f"{unknown('metric in [target]:', name, known)}; others can be added to task.metrics"
        )
    if known[name].share:
        require((f"target.{name}", score, 0 < score <= 1, "greater than 0 and at most 1"))
    return name, float(score)


Maker = Callable[[int], nn.Module]
"""Function that makes a module whose initial parameters depend on a seed only."""


def model_name(model: nn.Module | str | Maker, seed: int) -> str:
    """Return the name by which a model was requested, or that of its class."""
    if isinstance(model, str):
        return model
    return type(model if isinstance(model, nn.Module) else _made(model, seed)).__name__


def initial_models(
    model: nn.Module | str | Maker,
    schema: DataSpec,
    seed: int,
    algorithm: Algorithm,
    budget: int | None = None,
    parts: Parts | None = None,
) -> tuple[nn.Module, Tensor]:
    """Return a module for the run, and its initial models.

    Each initial model after the first is drawn from a separate seed. If ``model`` is a module, the
    returned module is a copy.

    Parameters
    ----------
    model
        Name of a model, a module, or a function that makes one from a seed.
    schema
        Inputs and outputs of the data.
    seed
        Seed of the run.
    algorithm
        The algorithm, which says from how many models it starts.
    budget
        Bytes of memory that the models may occupy; None for no limit.
    parts
        Frozen, personal and common parts of the model, and adapters; none if left out.

    Returns
    -------
    tuple
        The module, and its initial models, ``[S]``, or ``[initial_models, S]`` for an algorithm
        that starts from several. Their entries are not permuted.

    Raises
    ------
    ConfigError
        If the model is unknown, several are needed and the given one cannot be made again, or they
        take more bytes than the ``budget``.
    """
    parts = parts or Parts()
    module = _module(model, schema, seed, parts)
    note_unsent_buffers(module, schema)
    first = (layout := parts.layout(module)).flatten(module)
    if algorithm.initial_models == 1:
        return module, first
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {algorithm.initial_models} different models, "
            "and a module is only one; give the model's name, or a function that makes a module "
            "from a seed"
        )
    if parts.adapter is not None and not parts.adapter.train:
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {algorithm.initial_models} different models, "
            "and adapters all begin as the base, since B is zero; name what is trained besides, "
            "such as a head, in model.adapter.train"
        )
    if (
        budget is not None
        and (needed := algorithm.initial_models * first.numel() * first.itemsize) > budget
    ):
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {algorithm.initial_models} models, which take "
            f"{needed / 1e9:.1f} GB, and the run may take {budget / 1e9:.1f} GB; ask for fewer, or "
            "raise the memory"
        )
    seeds = (
        rng.torch_seed(seed, "initial model", number)
        for number in range(1, algorithm.initial_models)
    )
    others = (layout.flatten(_module(model, schema, each, parts)).to(first) for each in seeds)
    return module, torch.stack([first, *others])


def _module(model: nn.Module | str | Maker, schema: DataSpec, seed: int, parts: Parts) -> nn.Module:
    if isinstance(model, str):
        return parts.applied(module_for(model, schema, seed), seed)
    if isinstance(model, nn.Module):
        check_module(model)  # before it is copied, which can fail for the same reason
        model = copy.deepcopy(model)
    return parts.applied(model if isinstance(model, nn.Module) else _made(model, seed), seed)


def _made(make: Maker, seed: int) -> nn.Module:
    """Return the module that a user's function makes from a seed, after checking its type."""
    try:
        module: Any = make(seed)
    except FedcladeError:
        raise
    except Exception as error:
        raise ModelError(
            f"making the model from seed {seed} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            "a function that makes a model should return a torch.nn.Module, got "
            f"{type(module).__name__}"
        )
    return module


def module_for(
    name: str, schema: DataSpec, seed: int, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build a model by name for some data; see :func:`fedclade.models.build_model`."""
    return build_model(
        name,
        input_shape=schema.input_shape,
        outputs=schema.outputs,
        task=schema.task,
        vocabulary_size=schema.vocabulary_size,
        seed=seed,
        arguments=arguments,
    )
