"""``reshuffle = false``: batches are split once per round, as in Algorithm 1 of FL+HC, line 27."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from fedclade import APFL, LocalTraining
from fedclade.config import check_config
from fedclade.core import rng
from fedclade.core.queries import Round
from fedclade.training.jobs import batches
from tests.reference.client_update import client_update
from tests.tiny import LABELS, federation_of, linear, perceptron, play, simulated

SIZES = [24, 31, 7, 1]
ONCE = LocalTraining(epochs=3, batch_size=10, lr=0.2, reshuffle=False)


def federation():
    return federation_of([0, 1, 2, 3], SIZES)


@pytest.mark.parametrize("engine", ["loop", "stacked", "vmap"])
def test_every_engine_equals_the_client_update_of_fl_hc_line_by_line(engine):
    clients, params = simulated(federation(), linear(), engine)
    updates = clients.train(range(4), params[None], [0] * 4, Round(2, ONCE, 5))
    w = params.double().numpy()
    for client in range(4):
        x, y = (part.numpy() for part in federation().examples(client, "train"))
        draw = rng.torch_generator(5, "train", 2, client)
        expected = client_update(w, x, y, B=10, E=3, eta=0.2, labels=LABELS, generator=draw)
        np.testing.assert_allclose(updates.deltas[client].numpy(), expected - w, atol=1e-6)


def test_batches_of_every_epoch_are_the_same_and_also_of_steps_beyond_an_epoch():
    for spec in (ONCE, replace(ONCE, epochs=None, steps=7)):
        drawn = [batch.tolist() for batch in batches(24, spec, rng.torch_generator(0, "t"))]
        first = drawn[:3]
        assert sorted(chain(*first)) == list(range(24))
        assert drawn == (first * 3)[: len(drawn)]
        assert len(drawn) == spec.steps_with(24)


def test_rounds_have_batches_of_their_own():
    orders = [
        [b.tolist() for b in batches(24, ONCE, rng.torch_generator(0, "train", t, 0))]
        for t in (1, 2)
    ]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("engine", ["stacked", "vmap"])
def test_steps_in_place_of_epochs_equal_the_loop(engine):
    spec = replace(ONCE, epochs=None, steps=8)
    results = []
    for name in ("loop", engine):
        clients, params = simulated(federation(), perceptron(), name)
        results.append(clients.train(range(4), params[None], [0] * 4, Round(1, spec)).deltas)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_the_default_draws_an_order_for_every_epoch():
    spec = LocalTraining(epochs=2, batch_size=10)
    assert spec.reshuffle
    drawn = [batch.tolist() for batch in batches(24, spec, rng.torch_generator(0, "t"))]
    assert drawn[:3] != drawn[3:]


def test_a_local_rule_takes_the_same_batches_in_every_epoch():
    """APFL with α = 0: w_i takes the plain steps."""
    clients, params = simulated(federation(), linear(), "loop")
    ruled = play(APFL(alpha=0.0), clients, params, 1, spec=ONCE).clients.asked("train", 1)[0].answer
    plain = simulated(federation(), linear(), "loop")[0].train(
        range(4), params[None], [0] * 4, Round(1, ONCE)
    )
    torch.testing.assert_close(ruled.deltas, plain.deltas, rtol=1e-4, atol=1e-6)


def test_a_config_sets_it():
    assert check_config({"local": {"reshuffle": False}}).settings.local.reshuffle is False
