"""Evaluation as it is defined: one client after another, with its own model on its own examples, one at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade.core import IGNORED
from fedclade.core.params import Layout
from fedclade.core.queries import Split
from fedclade.data.federation import Federation


@torch.no_grad()
def evaluate(
    federation: Federation,
    module: nn.Module,
    ids: Sequence[int],
    models: Tensor,
    assignment: Sequence[int],
    split: Split,
) -> list[tuple[float, float, int]]:
    """Return accuracy, mean cross-entropy and number of targets of each asked client."""
    answers: list[tuple[float, float, int]] = []
    for client, row in zip(ids, assignment, strict=True):
        own = copy.deepcopy(module)
        Layout.of(own).load(models[row], own)
        own.eval()
        right = counted = 0
        nats = 0.0
        for x, y in zip(*federation.examples(client, split), strict=True):
            for logits, target in zip(own(x[None]).view(y.numel(), -1), y.flatten(), strict=True):
                if target != IGNORED:
                    right += int(logits.argmax() == target)
                    nats += float(functional.cross_entropy(logits, target))
                    counted += 1
        answers.append((right / counted, nats / counted, counted))
    return answers
