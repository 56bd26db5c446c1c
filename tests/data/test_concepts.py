"""Concepts that drift, made by seed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedclade import ConfigError
from fedclade.config import check_config
from fedclade.data import concepts
from fedclade.data.drift import PATTERNS

RULES = {
    "sea": lambda x, concept: x[:, 1] + x[:, 2] > (8, 9)[concept],
    "sine": lambda x, concept: (x[:, 1] <= torch.sin(x[:, 0])) ^ bool(concept),
    "circle": lambda x, concept: (
        (x - torch.tensor([[0.2, 0.5], [0.6, 0.5]][concept])).norm(dim=1) > (0.15, 0.25)[concept]
    ),
}


@pytest.mark.parametrize(("kind", "noise"), [("sea", 0.1), ("sine", 0.0), ("circle", 0.0)])
def test_labels_follow_the_concept_that_the_pattern_gives(kind, noise):
    federation = concepts(kind=kind, steps=4, step_rounds=3, samples=400, seed=5)
    assert [stage.first_round for stage in federation.stages] == [4, 7, 10]
    wrong: list[float] = []
    for step, number in enumerate((1, 4, 7, 10)):
        now = federation.in_round(number)
        assert [*now.true_clusters.values()] == list(PATTERNS["A"][step])
        for client, concept in now.true_clusters.items():
            x, y = now.examples(client, "train")
            one = RULES[kind](x, concept)
            wrong.append(float((one.long() != y).double().mean()))
    assert np.mean(wrong) == pytest.approx(noise, abs=0.01)


def test_clients_are_tested_on_what_they_train_on_next():
    federation = concepts(kind="sea", steps=3, step_rounds=2, samples=20)
    for before, after in ((1, 3), (3, 5)):
        for client in federation.ids:
            ours = federation.in_round(before).by_id[client].test
            assert np.array_equal(ours, federation.in_round(after).by_id[client].train)
    assert concepts(steps=1).stages == ()


def test_a_config_names_concepts():
    data = {
        "name": "fedclade.data:concepts",
        "kind": "circle",
        "steps": 2,
        "step_rounds": 5,
        "samples": 10,
    }
    federation = check_config({"data": data, "seed": 3}).federation()
    assert (
        federation.fingerprint
        == concepts(kind="circle", steps=2, step_rounds=5, samples=10, seed=3).fingerprint
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kind": "hyperplane"}, "kind should be 'sea', 'sine', 'circle', got 'hyperplane'"),
        (
            {"kind": "sine", "pattern": "B"},
            "pattern should be of the 2 concepts of 'sine', got 'B'",
        ),
        (
            {"steps": 11},
            "the pattern of drift should have at least 12 rows, one for each time step, got 11",
        ),
        ({"noise": 1.0}, "noise should be in [0, 1), got 1.0"),
    ],
)
def test_concepts_that_cannot_be_are_refused(options, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        concepts(**options)
