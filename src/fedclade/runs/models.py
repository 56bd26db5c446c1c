"""The models that a run starts from: by name, as a module, or made by a function from a seed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedclade.algorithms import Algorithm
from fedclade.core import ConfigError, DataSpec, FedcladeError, ModelError, check_module, rng
from fedclade.models import Parts, build_model
from fedclade.training import note_unsent_buffers

Maker = Callable[[int], nn.Module]
"""Makes a module whose initial parameters depend on a seed alone."""


def model_name(model: nn.Module | str | Maker, seed: int) -> str:
    """Return the name that a model was asked for by, or that of its class."""
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
    """Return a module of a run's own, and its initial models ``[S]`` or ``[initial_models, S]``, not permuted.

    Each model after the first is drawn from a seed of its own. Raises a ConfigError if the model is unknown, several
    are needed and the one given cannot be made anew, or they take more bytes than the ``budget``.
    """
    parts = parts or Parts()
    module = _module(model, schema, seed, parts)
    note_unsent_buffers(module, schema)
    first = (layout := parts.layout(module)).flatten(module)
    if algorithm.initial_models == 1:
        return module, first
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {algorithm.initial_models} different models, and a module is only "
            "one; give the model's name, or a function that makes a module from a seed"
        )
    if parts.adapter is not None and not parts.adapter.train:
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {algorithm.initial_models} different models, and adapters all "
            "begin as the base, since B is zero; name what is trained besides, such as a head, in model.adapter.train"
        )
    if budget is not None and (needed := algorithm.initial_models * first.numel() * first.itemsize) > budget:
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {algorithm.initial_models} models, which take "
            f"{needed / 1e9:.1f} GB, and the run may take {budget / 1e9:.1f} GB; ask for fewer, or raise the memory"
        )
    seeds = (rng.torch_seed(seed, "initial model", number) for number in range(1, algorithm.initial_models))
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
    """Return the module that a user's function makes from a seed, checked."""
    try:
        module: Any = make(seed)
    except FedcladeError:
        raise
    except Exception as error:
        raise ModelError(f"making the model from seed {seed} failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"a function that makes a model should return a torch.nn.Module, got {type(module).__name__}")
    return module


def module_for(name: str, schema: DataSpec, seed: int, arguments: Mapping[str, Any] | None = None) -> nn.Module:
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
