"""Models for text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedclade.errors import ModelError


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

    Tokens ``[n, T]``, padded with 0 at the end, to logits ``[n, outputs]``. The paper's embedding is a frozen GloVe;
    this one is trained.
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
