"""Queries about mixtures over a network: what travels, and what is refused."""

from __future__ import annotations

import pytest
import torch

from fedclade.channel import decode
from fedclade.core import (
    ClientWork,
    Em,
    LocalTraining,
    Mixture,
    Models,
    PolicyError,
    Round,
    TrainQuery,
    UpdateError,
)
from fedclade.flower import wire
from fedclade.flower.models_sent import ModelsSent, as_values, read_mixture
from fedclade.flower.policy import QUERIES, Policy, cost_of
from fedclade.flower.replies import read_update
from fedclade.flower.wire import Content
from tests.tiny import LABELS, federation_of, perceptron, simulated

from .grids import FOUR, LOCAL, handler_of
from .test_client_handler import LAYOUT, MODEL, ask

MODELS = torch.arange(12, dtype=torch.float32).view(3, 4)
RATES = torch.full((3, 2), 0.5, dtype=torch.float64)


def content(**changes) -> Content:
    mixture = Mixture(True, RATES)
    work = ClientWork(steps=Em(mixture))
    query = TrainQuery([1], Models(MODELS, [0]), Round(1, LocalTraining()), work)
    [vectors] = ModelsSent.of(query).vectors.values()
    return Content(
        as_values(MODELS, mixture) | changes, {name: array.data for name, array in vectors.items()}
    )


def test_all_models_and_rates_are_sent_and_read():
    names, mixture = read_mixture(content(), 2)
    assert names == ["0", "1", "2"]
    assert mixture.by_label
    assert torch.equal(mixture.rates, RATES)
    assert read_mixture(Content({}), 2) == ([], None)
    assert (
        cost_of("train", Content({"own": False, "replicates": 1, **content().values})).releases == 3
    )


def test_what_cannot_be_a_mixture_is_refused():
    for models in (-1, 10**9):
        with pytest.raises(
            UpdateError,
            match=f"the query is about a mixture of {models} models, but contains 4 vectors",
        ):
            read_mixture(content(mixture=models), 2)
    with pytest.raises(
        UpdateError, match=r"contains label frequencies .* do not have one label each"
    ):
        read_mixture(content(), None)
    with pytest.raises(UpdateError, match=r"rates has 48 bytes, expected 24"):
        read_mixture(content(), 1)


def test_a_policy_counts_the_steps_of_all_models():
    policy, spec = Policy(max_steps=5), LocalTraining(batch_size=10)
    policy.check_training(spec, 1, 20, times=2)
    with pytest.raises(PolicyError, match="6 steps; it allows at most 5"):
        policy.check_training(spec, 1, 20, times=3)


def test_a_component_that_does_not_exist_is_refused():
    sent = {"encoding": "float32", "size": 5, "loss": 1.0}
    reply = {"update": wire.raw_vector(torch.zeros(4)).data}
    assert (
        read_update(
            Content(sent | {"component": 2}, reply), 4, 4, torch.float32, 5, {}, 3
        ).component
        == 2
    )
    with pytest.raises(
        UpdateError, match="the reply names component 3 of the mixture, expected 0 to 2"
    ):
        read_update(Content(sent | {"component": 3}, reply), 4, 4, torch.float32, 5, {}, 3)
    with pytest.raises(UpdateError, match="'component' should be of type int"):
        read_update(Content(sent, reply), 4, 4, torch.float32, 5, {}, 3)


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_a_client_answers_with_all_updates_and_its_table_in_one_vector(encoding: str):
    federation, models = federation_of(FOUR), torch.stack([MODEL, 1.5 * MODEL])
    clients, _ = simulated(federation, perceptron())
    work = ClientWork(steps=Em(Mixture(by_label=True)))
    here = clients.train([2], models, [0], Round(2, LOCAL, 3), work)
    sent = {"mixture": 2, "by_label": True, "sent": {"0": models[0], "1": models[1]}}
    there = ask(handler_of(2, federation, encoding=encoding), **sent)
    assert there.values["component"] == int(here.components[0])
    length, n_parameters = 2 * (LAYOUT.size + LABELS), 2 * LAYOUT.n_parameters
    update = decode(there.vector("update"), length, encoding, n_parameters)
    torch.testing.assert_close(
        update, here.deltas[0], rtol=0, atol=0 if encoding == "float32" else 0.01
    )
    assert torch.equal(update[n_parameters:], here.deltas[0, n_parameters:])


@pytest.mark.parametrize("words", [{"replicates": 2}, {"own": True}, {"what": "gradients"}])
def test_nothing_else_is_asked_of_a_mixture(words):
    client = handler_of(2, federation_of(FOUR), policy=Policy(allow=QUERIES))
    with pytest.raises(UpdateError, match="with a mixture, a client can only train each model"):
        ask(client, words.pop("what", "train"), {"0": MODEL}, mixture=1, by_label=False, **words)
