"""What a mixture of models predicts."""

from __future__ import annotations

import pytest
import torch

from fedclade.tasks import mix_outputs

OUTPUTS, PI = (
    torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)),
    torch.tensor([[0.2, 0.3, 0.5]] * 5),
)


def by_hand(probabilities):
    return sum(PI[0, k] * probabilities[k] for k in range(3))


def test_probabilities_are_mixed_and_come_as_logits():
    torch.testing.assert_close(
        mix_outputs("classification", OUTPUTS, PI).softmax(-1), by_hand(OUTPUTS.softmax(-1))
    )
    places = OUTPUTS.view(3, 5, 2, 2)
    torch.testing.assert_close(
        mix_outputs("language", places, PI).exp(), by_hand(places.softmax(-1))
    )
    for kind in ("binary", "multilabel"):
        torch.testing.assert_close(
            mix_outputs(kind, OUTPUTS, PI).sigmoid(), by_hand(OUTPUTS.sigmoid())
        )


def test_numbers_are_mixed_as_they_are():
    torch.testing.assert_close(mix_outputs("regression", OUTPUTS, PI), by_hand(OUTPUTS))


@pytest.mark.parametrize("kind", ["classification", "binary", "regression"])
def test_a_model_without_weight_has_no_part(kind):
    pi = torch.tensor([[1.0, 0.0]] * 5)
    alone, both = mix_outputs(kind, OUTPUTS[:1], pi[:, :1]), mix_outputs(kind, OUTPUTS[:2], pi)
    torch.testing.assert_close(both, alone)
