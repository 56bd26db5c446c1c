"""FLUX: against the authors' order of steps, when and how clients are clustered, who waits, newcomers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedclade import FLUX, ConfigError, LocalTraining
from fedclade.clustering.descriptors import DescriptorSpace, apart, epsilon_by_knee, knee
from fedclade.core import Round, UpdateError
from tests.reference.fedavg import as_numpy
from tests.reference.flux import flux, kneedle, scaled
from tests.tiny import LABELS, Around, Metered, federation_of, perceptron, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH, SIZES = [0, 1, 2, 0, 1, 2, 0, 1], [60, 66, 81, 74, 90, 72, 78, 85]


def clusters(tree) -> set[tuple[int, ...]]:
    return {leaf.members for leaf in tree.leaves if leaf.members}


class Silent(Around):
    """Clients of whom some send no descriptor."""

    silent: tuple[int, ...] = ()

    def ask(self, query):
        found = super().ask(query)
        if type(query).__name__ == "DescriptorQuery":
            found = found.clone()
            found[[client in self.silent for client in query.ids]] = 0.0
        return found


@pytest.mark.parametrize(("seed", "th_round", "latest", "known"), [(1, 0.06, 8, None), (5, -1.0, 4, None), (1, 0.06, 8, 3)])
def test_equals_the_authors_steps_round_by_round(seed, th_round, latest, known):
    federation = federation_of(TRUTH, SIZES, seed=seed)
    clients, params = simulated(federation, perceptron(seed))
    algorithm = FLUX(th_round=th_round, latest=latest, clusters=known)
    played = play(algorithm, clients, params, 6, spec=SPEC, seed=seed)
    options = {"labels": LABELS, "th_round": th_round, "latest": latest, "seed": seed, "rounds": 6, "known": known}
    expected = flux(as_numpy(params), federation, perceptron(), SPEC, **options)
    for state, wanted in zip(played.states[1:], expected, strict=True):
        assert clusters(state.tree) == {tuple(members) for members in wanted.clusters}
        for members, model in zip(wanted.clusters, wanted.models, strict=True):
            ours = state.tree.nodes[state.tree.leaf_of[members[0]]].params
            np.testing.assert_allclose(ours.numpy(), model, atol=1e-5)
    first = next(number for number, each in enumerate(expected, start=1) if len(each.clusters) > 1)
    assert first == (latest + 1 if th_round < 0 else 4)
    assert 1 < len(expected[-1].clusters) < len(TRUTH)
