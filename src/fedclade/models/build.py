"""Models by name: those of papers, of installed packages, and users' own factories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

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

# Models for images.


def cnn(input_shape: tuple[int, ...], outputs: int, *, hidden: int = 512) -> nn.Module:
    """Return the network of FL+HC: two 5×5 convolutions with max-pools, and two dense layers.

    The convolutions have 32 and 64 channels, the pools are 2×2.

    582,026 parameters on MNIST.

    Raises
    ------
    ModelError
        If images are smaller than 16 pixels.
    """
    channels, height, width = _image(input_shape, smallest=16)
    left = (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * left, hidden), nn.ReLU(), nn.Linear(hidden, outputs)),
    )


def lenet(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return LeNet-5 with average pools, as in FLUX and ANDA.

    It has 5×5 convolutions of 6 and 16 channels, and three dense layers.

    61,706 parameters on MNIST, 62,006 with three channels, 83,126 on CIFAR-10.

    Raises
    ------
    ModelError
        If images are smaller than 12 pixels.
    """
    channels, height, width = _image(input_shape, smallest=12)
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


def cifar_cnn(input_shape: tuple[int, ...], outputs: int, *, width: int = 32) -> nn.Module:
    """Return a network of five layers: three 3×3 convolutions, and two dense layers.

    The convolutions have 1, 2 and 2 times ``width`` channels.

    The CFL papers say "5-layer convolutional network" and no more; this one has 321,290 parameters
    on CIFAR-10.

    Raises
    ------
    ModelError
        If images are smaller than 8 pixels.
    """
    channels, rows, columns = _image(input_shape, smallest=8)
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * (rows // 8) * (columns // 8), 8 * width), nn.ReLU()),
        nn.Linear(8 * width, outputs),
    )


def _image(input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise ModelError(
            f"a convolutional model takes images [channels, height, width] of at least {smallest} "
            f"pixels a side, got input shape {input_shape}; use 'mlp' or 'mclr'"
        )
    channels, height, width = input_shape
    return channels, height, width


# Models made of matrix products.


def mclr(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return multinomial logistic regression: 7,850 parameters on MNIST (FedGroup, Table II)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), outputs))


def mlp(input_shape: tuple[int, ...], outputs: int, *, hidden: int = 128) -> nn.Module:
    """Return a perceptron with one hidden layer.

    101,770 parameters on MNIST with 128 hidden units, 415,258 on FEMNIST's 26 letters with 512
    (FedGroup, Table II).
    """
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
) -> nn.Module:
    """Return a two-layer LSTM over words: a language model, or a classifier of the whole text.

    Raises
    ------
    ModelError
        If the data is not text.
    """
    if vocabulary_size == 0:
        raise ModelError(
            "'lstm' takes tokens, but the data is not text; use 'mclr', 'mlp' or 'cnn'"
        )
    if task == "language":
        return WordLSTM(vocabulary_size, outputs, embedding, hidden)
    return TextClassifier(vocabulary_size, outputs, embedding, hidden=hidden, dense=dense)


def vector_lstm(
    input_shape: tuple[int, ...], outputs: int, *, hidden: int = 100, dense: int = 30
) -> nn.Module:
    """Return a two-layer LSTM over word vectors that classifies a text.

    Source: Sent140 in FedProx and FedGroup.

    243,861 parameters for two labels and vectors of 300 numbers, as FedGroup's Table II has it.

    Raises
    ------
    ModelError
        If the data is not sequences of vectors.
    """
    if len(input_shape) != 2:
        raise ModelError(
            f"'vector_lstm' takes sequences of vectors, got input shape {input_shape}; give the "
            "data word vectors, as by sent140's vectors = 'glove.6B.300d.txt', or take 'lstm'"
        )
    return VectorClassifier(input_shape[1], outputs, hidden, dense)


class VectorClassifier(nn.Module):
    """Classifier of sequences of vectors by the last state, padding included, as in FedProx.

    Vectors ``[n, T, d]`` to logits ``[n, outputs]``. There is one vector of biases for each layer
    of the LSTM, which torch's has twice: they are the weights of an input that is always 1, for the
    forget gate from 1 on. The first label has logit 0: of two labels that leaves one number, as
    before a sigmoid.
    """

    def __init__(self, width: int, outputs: int, hidden: int, dense: int) -> None:
        super().__init__()
        self.first = nn.LSTM(width + 1, hidden, bias=False, batch_first=True)
        self.second = nn.LSTM(hidden + 1, hidden, bias=False, batch_first=True)
        for layer in (self.first, self.second):
            biases = torch.zeros(4, hidden)
            biases[1] = 1.0  # torch's gates are input, forget, cell, output
            with torch.no_grad():
                layer.get_parameter("weight_ih_l0")[:, -1] = biases.flatten()
        self.dense = nn.Linear(hidden, dense)
        self.output = nn.Linear(dense, outputs - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the labels."""
        for layer in (self.first, self.second):
            x = layer(functional.pad(x, (0, 1), value=1.0))[0]
        return functional.pad(self.output(self.dense(x[:, -1])), (1, 0))


class WordLSTM(nn.Module):
    """Predictor of the next word at every place, as in CFL's Ag-News experiment (VI-C).

    Tokens ``[n, T]`` to logits ``[n, T, outputs]``.
    """

    def __init__(self, vocabulary_size: int, outputs: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next words."""
        return self.output(self.lstm(self.embedding(tokens))[0])


class TextClassifier(nn.Module):
    """Classifier of texts by the state after the last word (FedGroup, Sent140, Table II).

    Tokens ``[n, T]``, padded with 0 at the end, to logits ``[n, outputs]``. The paper's embedding
    is a frozen GloVe (:func:`vector_lstm`); this one is trained.
    """

    def __init__(
        self, vocabulary_size: int, outputs: int, embedding: int, hidden: int, dense: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.dense = nn.Linear(hidden, dense)
        self.output = nn.Linear(dense, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the labels."""
        states = self.lstm(self.embedding(tokens))[0]
        last = (tokens != 0).sum(1).clamp(min=1) - 1
        final = states[torch.arange(len(tokens), device=tokens.device), last]
        return self.output(torch.relu(self.dense(final)))


Factory = Callable[..., object]
"""What it returns is checked: a user's own may return anything."""


@dataclass(frozen=True)
class Model:
    """A model of the library.

    Parameters
    ----------
    factory
        Called with the values of :data:`FROM_DATA` that it takes, and with the options of the
        ``[model]`` section.
    summary
        Line for people.
    """

    factory: Factory
    summary: str


MODELS: Mapping[str, Model] = {
    "mclr": Model(mclr, "multinomial logistic regression: one dense layer"),
    "mlp": Model(mlp, "one hidden layer (hidden = 128; FEMNIST in the FedGroup paper: 512)"),
    "cnn": Model(cnn, "FL+HC's: two 5×5 convolutions (32, 64) with max-pools, dense 512"),
    "lenet": Model(
        lenet,
        "LeNet-5 with average pools, of FLUX and ANDA: 5×5 convolutions (6, 16), dense 120 and 84",
    ),
    "cifar_cnn": Model(cifar_cnn, "five layers: three 3×3 convolutions with max-pools, two dense"),
    "lstm": Model(lstm, "two-layer LSTM over words: predicts the next one, or classifies the text"),
    "vector_lstm": Model(
        vector_lstm, "two-layer LSTM over word vectors: classifies the text (FedGroup's Sent140)"
    ),
}

MOST_PARAMETERS = 2**30
"""Largest model of the library; a larger one is a mistake, such as labels not numbered from 0."""

FROM_DATA = ("input_shape", "outputs", "task", "vocabulary_size")
"""Parameters of a factory that the data determines; others are options of ``[model]``."""


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
        One of :data:`MODELS` or of an installed package's entry points ``fedclade.models``, or
        ``module:factory``: a function of the user's own that returns a ``nn.Module``, or a class of
        one.
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
        If the factory fails, or returns something that is not a module, or a model of the library
        would be too large.
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
    if not isinstance(module, nn.Module):
        raise ModelError(f"{name!r} should return a torch.nn.Module, got {type(module).__name__}")
    return module


def _check_size(name: str, factory: Factory, given: Mapping[str, Any]) -> None:
    """Check the number of parameters of one of :data:`MODELS` before it takes any memory."""
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
            f"model {name!r} would have {parameters:,} parameters for inputs of shape "
            f"{list(given['input_shape'])} and {given['outputs']:,} outputs, and models of the "
            f"library have at most {MOST_PARAMETERS:,}; number labels from 0 on, or take smaller "
            "layers"
        )


def check_widths(name: str, arguments: Mapping[str, Any]) -> None:
    """Check that the sizes of one of :data:`MODELS` are at least 1; else a ConfigError."""
    sizes = {
        key: value for key, value in arguments.items() if name in MODELS and type(value) is int
    }
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
