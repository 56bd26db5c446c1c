"""Models by name: models of papers, models of installed packages, and users' own factories.

A factory is a function or class that returns a model for the data at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, get_args

import torch

from fedclade import catalogue
from fedclade.core import (
    ConfigError,
    ModelError,
    TaskKind,
    check_arguments,
    check_function,
    checked,
    is_choice,
    known_arguments,
    lazy_names,
    named,
    require,
    rng,
    shown,
    unknown,
)

if TYPE_CHECKING:
    from fedclade.models.text_networks import TextClassifier as TextClassifier
    from fedclade.models.text_networks import VectorClassifier as VectorClassifier
    from fedclade.models.text_networks import WordLSTM as WordLSTM
else:  # files of models, pickled by earlier versions, name the classes as classes of this module
    __getattr__ = lazy_names(__name__)

# Models for images.


def cnn(input_shape: tuple[int, ...], outputs: int, *, hidden: int = 512) -> torch.nn.Module:
    """Return the CNN of the FL+HC paper: two 5×5 convolutions with max-pools, and two dense layers.

    The convolutions have 32 and 64 channels, and the pools are 2×2. On MNIST the model has 582,026
    parameters.

    Raises
    ------
    ModelError
        If images are smaller than 16 pixels.
    """
    from torch import nn

    channels, height, width = _check_image(input_shape, smallest=16)
    left = (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * left, hidden), nn.ReLU(), nn.Linear(hidden, outputs)),
    )


def lenet(input_shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
    """Return LeNet-5 with average pools, as in the experiments of FLUX and ANDA.

    The model has two 5×5 convolutions of 6 and 16 channels, and three dense layers. It has 61,706
    parameters on MNIST, 62,006 on MNIST with three channels, and 83,126 on CIFAR-10.

    Raises
    ------
    ModelError
        If images are smaller than 12 pixels.
    """
    from torch import nn

    channels, height, width = _check_image(input_shape, smallest=12)
    left = ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2)),
        *(
            nn.Flatten(),
            nn.Linear(16 * left, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, outputs),
        ),
    )


def cifar_cnn(input_shape: tuple[int, ...], outputs: int, *, width: int = 32) -> torch.nn.Module:
    """Return a CNN of five layers: three 3×3 convolutions, and two dense layers.

    The convolutions have 1, 2 and 2 times ``width`` channels. The model has 321,290 parameters on
    CIFAR-10. The sizes of the layers are chosen by fedclade, since the CFL papers specify only a
    "5-layer convolutional network".

    Raises
    ------
    ModelError
        If images are smaller than 8 pixels.
    """
    from torch import nn

    channels, rows, columns = _check_image(input_shape, smallest=8)
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * (rows // 8) * (columns // 8), 8 * width), nn.ReLU()),
        nn.Linear(8 * width, outputs),
    )


def _check_image(input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Check that inputs are images of at least ``smallest`` pixels a side.

    Returns
    -------
    tuple of int
        Number of channels, height and width.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise ModelError(
            f"a convolutional model takes images [channels, height, width] of at least {smallest} "
            f"pixels a side, got input shape {input_shape}; use 'mlp' or 'mclr'"
        )
    channels, height, width = input_shape
    return channels, height, width


# Models made of matrix products.


def mclr(input_shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
    """Return a model for multinomial logistic regression: one dense layer.

    It has 7,850 parameters on MNIST (FedGroup, Table II).
    """
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), outputs))


def mlp(input_shape: tuple[int, ...], outputs: int, *, hidden: int = 128) -> torch.nn.Module:
    """Return a multilayer perceptron with one hidden layer.

    It has 101,770 parameters on MNIST with 128 hidden units, and 415,258 on the 26 letters of
    FEMNIST with 512 hidden units (FedGroup, Table II).
    """
    from torch import nn

    return nn.Sequential(
        nn.Flatten(), nn.Linear(prod(input_shape), hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


# Models for text.


def lstm(
    outputs: int,
    task: str,
    vocabulary_size: int,
    *,
    embedding: int = 64,
    hidden: int = 128,
    dense: int = 30,
) -> torch.nn.Module:
    """Return a two-layer LSTM over words: a language model, or a classifier of texts.

    It is a language model for the task ``language``, and a classifier for all other tasks.

    Raises
    ------
    ModelError
        If the data is not text.
    """
    from fedclade.models.text_networks import TextClassifier, WordLSTM

    if vocabulary_size == 0:
        raise ModelError(
            "model 'lstm' takes tokens, but the data is not text; use 'mclr', 'mlp' or 'cnn'"
        )
    if task == "language":
        return WordLSTM(vocabulary_size, outputs, embedding, hidden)
    return TextClassifier(vocabulary_size, outputs, embedding, hidden=hidden, dense=dense)


def vector_lstm(
    input_shape: tuple[int, ...], outputs: int, *, hidden: int = 100, dense: int = 30
) -> torch.nn.Module:
    """Return a two-layer LSTM that classifies a text, given as a sequence of word vectors.

    The experiments with Sent140 in FedProx and FedGroup use this model. It has 243,861 parameters
    for two labels and vectors of 300 numbers, as in FedGroup's Table II.

    Raises
    ------
    ModelError
        If the data is not sequences of vectors.
    """
    from fedclade.models.text_networks import VectorClassifier

    if len(input_shape) != 2:
        raise ModelError(
            f"model 'vector_lstm' takes sequences of word vectors, [words, length of a vector], got "
            f"input shape {input_shape}; load word vectors, for example with data.vectors = "
            "'glove.6B.300d.txt' for sent140, or use model 'lstm', which takes tokens"
        )
    return VectorClassifier(input_shape[1], outputs, hidden, dense)


Factory = Callable[..., object]
"""Function or class that returns a model; a user's own may return anything, so this is checked."""


@dataclass(frozen=True)
class Model:
    """Record of a model that fedclade provides by name.

    Parameters
    ----------
    factory
        Function that builds the model. It is called with the options of the ``[model]`` section,
        and with those arguments in :data:`FROM_DATA`, such as the input shape, that it has as
        parameters.
    summary
        One line about the model for ``fedclade ls``.
    """

    factory: Factory
    summary: str


MODELS: Mapping[str, Model] = {
    "mclr": Model(mclr, catalogue.MODELS["mclr"]),
    "mlp": Model(mlp, catalogue.MODELS["mlp"]),
    "cnn": Model(cnn, catalogue.MODELS["cnn"]),
    "lenet": Model(lenet, catalogue.MODELS["lenet"]),
    "cifar_cnn": Model(cifar_cnn, catalogue.MODELS["cifar_cnn"]),
    "lstm": Model(lstm, catalogue.MODELS["lstm"]),
    "vector_lstm": Model(vector_lstm, catalogue.MODELS["vector_lstm"]),
}

MOST_PARAMETERS = 2**30
"""Largest number of parameters of a model that fedclade provides.

A larger model is a mistake, for example of labels that are not numbered from 0.
"""

FROM_DATA = ("input_shape", "outputs", "task", "vocabulary_size")
"""Arguments of a factory that the data determines; all others are options of ``[model]``."""


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
) -> torch.nn.Module:
    """Build a model for the data, with initial parameters that depend on the seed alone.

    Of the four arguments ``input_shape``, ``outputs``, ``task`` and ``vocabulary_size``, the
    model's factory receives those that it has as parameters.

    Parameters
    ----------
    name
        A name in :data:`MODELS`, the name of an entry point ``fedclade.models`` of an installed
        package, or ``module:factory``, where the factory is a function that returns a
        ``nn.Module``, or a subclass of ``nn.Module``.
    input_shape
        Shape of an example's input.
    outputs
        Number of outputs of the model, such as the number of labels.
    task
        Name of the task.
    vocabulary_size
        Number of different tokens; 0 if the data is not text.
    seed
        Seed of the initial parameters.
    arguments
        Further arguments of the factory by name.

    Raises
    ------
    ConfigError
        If the name or an argument is unknown, or an argument is out of range.
    ModelError
        If the factory fails or does not return a module, or if one of fedclade's own models would
        have more than :data:`MOST_PARAMETERS` parameters.
    """
    if not is_choice(task, TaskKind):
        raise ConfigError(unknown("task:", task, get_args(TaskKind)))
    require(
        ("input_shape", input_shape, all(size >= 1 for size in input_shape), "sizes of at least 1"),
        ("outputs", outputs, outputs >= 1, "at least 1"),
        ("vocabulary_size", vocabulary_size, vocabulary_size >= 0, "at least 0"),
        ("seed", seed, seed >= 0, "at least 0"),
    )
    factory = model_factory(name)
    given = {
        "input_shape": input_shape,
        "outputs": outputs,
        "task": task,
        "vocabulary_size": vocabulary_size,
    }
    from_data = {
        key: value
        for key, value in given.items()
        if key in known_arguments(factory, positional=True)
    }
    arguments = check_arguments(
        f"model {name!r}", factory, arguments or {}, besides=FROM_DATA, positional=True
    )
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
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"{name!r} should return a torch.nn.Module, got {type(module).__name__}")
    return module


def _check_size(name: str, factory: Factory, given: Mapping[str, Any]) -> None:
    """Check that one of fedclade's models is not too large, before memory for it is allocated.

    For this check, the model is built on torch's ``meta`` device, on which parameters have shapes
    but no values.

    Raises
    ------
    ModelError
        If the model has more than :data:`MOST_PARAMETERS` parameters.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = factory(**given)
    except ModelError:
        raise
    except Exception:  # the build on the real device raises it again, with a message
        return
    assert isinstance(module, torch.nn.Module)  # since the factory is fedclade's own
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if parameters > MOST_PARAMETERS:
        raise ModelError(
            f"model {name!r} would have {parameters:,} parameters for inputs of shape "
            f"{list(given['input_shape'])} and {given['outputs']:,} outputs, but fedclade's models "
            f"may have at most {MOST_PARAMETERS:,}; use smaller layers or, if labels are large "
            "numbers, number them from 0"
        )


def check_widths(name: str, arguments: Mapping[str, Any]) -> None:
    """Check that the integer options of one of fedclade's models, such as widths, are positive.

    Raises
    ------
    ConfigError
        If options are less than 1; the message has a line for each of them.
    """
    sizes = {
        key: value for key, value in arguments.items() if name in MODELS and type(value) is int
    }
    require(*((f"model.{key}", value, value >= 1, "at least 1") for key, value in sizes.items()))


def model_factory(name: object) -> Factory:
    """Return the factory (function or class) that builds the model of this name.

    Raises
    ------
    ConfigError
        If the name is unknown, or a ``module:factory`` cannot be imported.
    """
    found = named("models", name, {key: model.factory for key, model in MODELS.items()}, "model")
    return check_function(found, f"model {shown(name)}", "a module")
