"""Networks for text, which are built by the factories in :mod:`fedclade.models.build`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class VectorClassifier(nn.Module):
    """LSTM classifier of sequences of vectors, as in FedProx.

    The model maps vectors ``[n, T, d]`` (n sequences of T vectors) to logits ``[n, outputs]``. It
    classifies a sequence by the LSTM's state after the last vector, even if this vector is padding.

    The LSTM of FedProx has one bias vector per layer, while torch's has two. Here, torch's biases
    are turned off, and the weights of an additional input that is always 1 act as the single bias
    vector. The biases of the forget gate are initially 1. The logit of the first label is always 0:
    a model with two labels therefore computes only one logit, as in binary logistic regression.
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
        """Return the logits ``[n, outputs]`` of n sequences of word vectors ``[n, T, d]``."""
        for layer in (self.first, self.second):
            x = layer(functional.pad(x, (0, 1), value=1.0))[0]
        return functional.pad(self.output(self.dense(x[:, -1])), (1, 0))


class WordLSTM(nn.Module):
    """LSTM language model, as in CFL's Ag-News experiment (section VI-C).

    At every position of a text it predicts the next word: it maps tokens ``[n, T]`` (n texts of T
    words) to logits ``[n, T, outputs]``.
    """

    def __init__(self, vocabulary_size: int, outputs: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[n, T, outputs]`` of the next word at each position of n texts."""
        return self.output(self.lstm(self.embedding(tokens))[0])


class TextClassifier(nn.Module):
    """LSTM that classifies a text by its state after the last word (FedGroup, Sent140, Table II).

    The model maps tokens ``[n, T]`` (n texts of T words, padded with 0 at the end) to logits ``[n,
    outputs]``. It trains its embedding of words. The paper uses fixed GloVe vectors instead;
    :func:`~fedclade.models.build.vector_lstm` is a model for such vectors.
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
        """Return the logits ``[n, outputs]`` of n texts of tokens ``[n, T]``."""
        states = self.lstm(self.embedding(tokens))[0]
        last = (tokens != 0).sum(1).clamp(min=1) - 1
        final = states[torch.arange(len(tokens), device=tokens.device), last]
        return self.output(torch.relu(self.dense(final)))
