"""Models by name: the papers', those of installed packages, and the user's own by ``module:factory``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from fedclade.core import (
    ConfigError,
    ModelError,
    TaskKind,
    check_arguments,
    check_function,
    checked,
    known_arguments,
    named,
    require,
    rng,
    shown,
    unknown,
)
from fedclade.models.convolutional import cifar_cnn, cnn, lenet
from fedclade.models.dense import mclr, mlp
from fedclade.models.recurrent import lstm, vector_lstm

Factory = Callable[..., object]
"""What it returns is checked: a user's own may return anything."""


@dataclass(frozen=True)
class Model:
    """A model of the library, with a line for people."""

    factory: (
        Factory  #: called with those of :data:`FROM_DATA` that it takes, and the options of the ``[model]`` section
    )
    summary: str


MODELS: Mapping[str, Model] = {
    "mclr": Model(mclr, "multinomial logistic regression: one dense layer"),
    "mlp": Model(mlp, "one hidden layer (hidden = 128; FEMNIST in the FedGroup paper: 512)"),
    "cnn": Model(cnn, "FL+HC's: two 5×5 convolutions (32, 64) with max-pools, dense 512"),
    "lenet": Model(lenet, "LeNet-5 with average pools, of FLUX and ANDA: 5×5 convolutions (6, 16), dense 120 and 84"),
    "cifar_cnn": Model(cifar_cnn, "five layers: three 3×3 convolutions with max-pools, two dense"),
    "lstm": Model(lstm, "two-layer LSTM over words: predicts the next one, or classifies the text"),
    "vector_lstm": Model(vector_lstm, "two-layer LSTM over word vectors: classifies the text (FedGroup's Sent140)"),
}

MOST_PARAMETERS = 2**30
"""Of a model of the library: more are taken for a mistake, such as labels that are not numbered from 0 on."""

FROM_DATA = ("input_shape", "outputs", "task", "vocabulary_size")
"""Parameters of a factory that the data gives; all others are options of the ``[model]`` section."""


@checked()
def build_model(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    task: str = "classification",
    vocabulary_size: int = 0,
    seed: int = 0,
    arguments: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a model for the data, with initial parameters that depend on the seed alone.

    Parameters
    ----------
    name
        One of :data:`MODELS` or of an installed package's entry points ``fedclade.models``, or ``module:factory``: a
        function of the user's own that returns a ``nn.Module``, or a class of one.
    input_shape, outputs, task, vocabulary_size
        What the data is like; a factory gets those of them that it has parameters for.
    seed
        Keys the initial parameters.
    arguments
        Further arguments of the factory.

    Raises
    ------
    ConfigError
        If the name is unknown or an argument is.
    ModelError
        If the factory fails, or returns something that is not a module, or a model of the library would be too large.
    """
    if task not in get_args(TaskKind):
        raise ConfigError(unknown("task:", task, get_args(TaskKind)))
    require(
        ("input_shape", input_shape, all(size >= 1 for size in input_shape), "sizes of at least 1"),
        ("outputs", outputs, outputs >= 1, "at least 1"),
        ("vocabulary_size", vocabulary_size, vocabulary_size >= 0, "at least 0"),
        ("seed", seed, seed >= 0, "at least 0"),
    )
    factory = model_factory(name)
    given = {"input_shape": input_shape, "outputs": outputs, "task": task, "vocabulary_size": vocabulary_size}
    from_data = {key: value for key, value in given.items() if key in known_arguments(factory, positional=True)}
    arguments = check_arguments(f"model {name!r}", factory, arguments or {}, besides=FROM_DATA, positional=True)
    check_widths(name, arguments)
    if name in MODELS:
        _check_size(name, factory, {**from_data, **arguments})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.torch_seed(seed, "init"))
        try:
            module = factory(**from_data, **arguments)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"building model {name!r} with {arguments} failed: {error}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{name!r} should return a torch.nn.Module, got {type(module).__name__}")
    return module


def _check_size(name: str, factory: Factory, given: Mapping[str, Any]) -> None:
    """Check the number of parameters of one of :data:`MODELS` before it takes any memory; a ModelError names it."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = factory(**given)
    except ModelError:
        raise
    except Exception:  # which building it in earnest raises again, and tells
        return
    assert isinstance(module, nn.Module)  # as the library's own are
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if parameters > MOST_PARAMETERS:
        raise ModelError(
            f"model {name!r} would have {parameters:,} parameters for inputs of shape {list(given['input_shape'])} and "
            f"{given['outputs']:,} outputs, and models of the library have at most {MOST_PARAMETERS:,}; number labels "
            "from 0 on, or take smaller layers"
        )


def check_widths(name: str, arguments: Mapping[str, Any]) -> None:
    """Check that the sizes of one of :data:`MODELS` are at least 1; a ConfigError names those that are not."""
    sizes = {key: value for key, value in arguments.items() if name in MODELS and type(value) is int}
    require(*((f"model.{key}", value, value >= 1, "at least 1") for key, value in sizes.items()))


def model_factory(name: object) -> Factory:
    """Return the function that builds a model of this name.

    Raises
    ------
    ConfigError
        If the name is unknown, or a ``module:factory`` cannot be imported.
    """
    found = named("models", name, {key: model.factory for key, model in MODELS.items()}, "model")
    return check_function(found, f"model {shown(name)}", "a module")
