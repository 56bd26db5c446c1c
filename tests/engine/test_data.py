"""Training data lies on the device once, if it fits."""

from __future__ import annotations

import pytest
import torch

from fedclade.data.federation import Federation
from fedclade.engine.data import TrainingData
from tests.tiny import FEATURES, federation_of

CPU = torch.device("cpu")
EACH = FEATURES * 4 + 8
"""Bytes of an example: float32 features and an int64 label."""


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count who is asked for examples."""
    asked: list[int] = []
    examples = Federation.examples
    monkeypatch.setattr(
        Federation, "examples", lambda self, client, split: asked.append(client) or examples(self, client, split)
    )
    return asked


@pytest.mark.parametrize("fits", [True, False])
def test_every_client_sees_its_own_examples(fits):
    federation = federation_of([0, 1, 2], [5, 3, 4])
    data = TrainingData(federation, CPU, 12 * EACH - (not fits))
    assert data.bytes_kept == (12 * EACH if fits else 0)
    assert data.bytes_each == EACH
    for client in (2, 0, 1):
        for ours, theirs in zip(data.of(client), federation.examples(client, "train"), strict=True):
            assert torch.equal(ours, theirs)


def test_what_fits_is_gathered_once_and_lies_in_one_piece(gathered):
    data = TrainingData(federation_of([0, 1, 2], [5, 3, 4]), CPU, 10**6)
    first, second = data.of(0)[0], data.of(1)[0]
    assert data.of(0)[0] is first
    assert gathered == [0, 1, 2]
    assert second.data_ptr() == first.data_ptr() + first.nbytes


def test_what_does_not_fit_is_gathered_again(gathered):
    data = TrainingData(federation_of([0, 1], [5, 3]), CPU, 8 * EACH - 1)
    data.of(1), data.of(1)
    assert gathered == [1, 1]
