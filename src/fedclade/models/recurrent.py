"""Models for text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade.core import ModelError


def lstm(
    outputs: int, task: str, vocabulary_size: int, *, embedding: int = 64, hidden: int = 128, dense: int = 30
) -> nn.Module:
    """Return a two-layer LSTM over words: a language model, or a classifier of the whole text.

    Raises
    ------
    ModelError
        If the data is not text.
    """
    if vocabulary_size == 0:
        raise ModelError("'lstm' takes tokens, but the data is not text; use 'mclr', 'mlp' or 'cnn'")
    if task == "language":
        return WordLSTM(vocabulary_size, outputs, embedding, hidden)
    return TextClassifier(vocabulary_size, outputs, embedding, hidden, dense)


def vector_lstm(input_shape: tuple[int, ...], outputs: int, *, hidden: int = 100, dense: int = 30) -> nn.Module:
    """Return a two-layer LSTM over word vectors that classifies a text (Sent140 in FedProx and FedGroup).

    243,861 parameters for two labels and vectors of 300 numbers, as FedGroup's Table II has it.

    Raises
    ------
    ModelError
        If the data is not sequences of vectors.
    """
    if len(input_shape) != 2:
        raise ModelError(
            f"'vector_lstm' takes sequences of vectors, got input shape {input_shape}; give the data word vectors, as "
            "by sent140's vectors = 'glove.6B.300d.txt', or take 'lstm'"
        )
    return VectorClassifier(input_shape[1], outputs, hidden, dense)


class VectorClassifier(nn.Module):
    """Classifies a sequence of vectors by the state behind its last place, padding included, as FedProx's code does.

    Vectors ``[n, T, d]`` to logits ``[n, outputs]``. There is one vector of biases for each layer of the LSTM, which
    torch's has twice: they are the weights of an input that is always 1, for the forget gate from 1 on. The first label
    has logit 0: of two labels that leaves one number, as before a sigmoid.
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
    """Predicts the next word at every place, as in CFL's Ag-News experiment (section VI-C).

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
    """Classifies a text from the state behind its last word, as in FedGroup's Sent140 experiment (Table II).

    Tokens ``[n, T]``, padded with 0 at the end, to logits ``[n, outputs]``. The paper's embedding is a frozen GloVe
    (:func:`vector_lstm`); this one is trained.
    """

    def __init__(self, vocabulary_size: int, outputs: int, embedding: int, hidden: int, dense: int) -> None:
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
