"""Queries about mixtures over a network: what travels, and what is refused."""

from __future__ import annotations

import pytest
import torch

from fedclade.channel import decode, encode, encoded_bytes
from fedclade.core import (
    ClientWork,
    ConfigError,
    Em,
    LocalTraining,
    Mixture,
    Models,
    PolicyError,
    Round,
    TrainQuery,
    UpdateError,
)
from fedclade.flower import Network, wire
from fedclade.flower.models_sent import (
    ModelsSent,
    as_values,
    read_mixture,
    read_model,
    training_values,
)
from fedclade.flower.policy import QUERIES, Policy, cost_of
from fedclade.flower.replies import read_update
from fedclade.flower.wire import Content
from tests.tiny import LABELS, federation_of, perceptron, simulated

from .grids import CFL_OF_TWO, FOUR, LOCAL, federated, grid_of, handler_of, network_of
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


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_a_client_trains_from_the_decoded_model(encoding: str):
    """Its update is the same as from a model that is sent as float32 after it was decoded."""
    start = MODEL + 1 / 3  # no number of the encodings
    sizes = LAYOUT.size, encoding, LAYOUT.n_parameters
    decoded = decode(encode(start, encoding, LAYOUT.n_parameters), *sizes)
    assert not torch.equal(decoded, start)
    updates: list[bytes] = []
    for model, how in ((start, encoding), (decoded, "float32")):
        query = TrainQuery([0], Models(model[None], [0]), Round(1, LOCAL))
        sent = ModelsSent.of(query, how, LAYOUT.n_parameters)
        [vectors], [name] = sent.vectors.values(), sent.names.values()
        values = {
            "what": "train",
            "run": "here",
            "layout": wire.layout_digest(LAYOUT),
            **training_values(query, None),
            **sent.values,
        }
        asked = Content.of(wire.record(values, vectors))
        reply = Content.of(handler_of().answer(asked))
        assert reply.get("model", str) == name
        updates.append(reply.vector("update"))
    assert updates[0] == updates[1]
    assert len(vectors["model"].data) == 4 * LAYOUT.size


def test_an_encoded_model_that_cannot_be_read_is_refused():
    values = {"download": "topk"}
    with pytest.raises(UpdateError, match="the unknown encoding 'topk', expected one of float32"):
        read_model(Content(values, {"model": b""}), "model", LAYOUT)
    with pytest.raises(UpdateError, match="the update has 3 bytes, expected"):
        read_model(Content({"download": "int8"}, {"model": b"abc"}), "model", LAYOUT)


def test_downloads_are_smaller_and_clusters_the_same():
    runs = {}
    for encoding in ("float32", "int8"):
        grid = grid_of(federation_of(FOUR))
        network = network_of(grid, download=encoding)
        runs[encoding] = federated(grid, CFL_OF_TWO, network=network, evaluate_every=4, rounds=3)
    found = {
        encoding: {frozenset(leaf.members) for leaf in run.tree.leaves if leaf.members}
        for encoding, run in runs.items()
    }
    assert found["int8"] == found["float32"] == {frozenset({0, 2}), frozenset({1, 3})}
    down = {encoding: run.metric_rows[0]["bytes_down"] for encoding, run in runs.items()}
    exact = 4 * LAYOUT.size
    coded = encoded_bytes(LAYOUT.size, "int8", LAYOUT.n_parameters)
    assert down["float32"] - down["int8"] == len(FOUR) * (exact - coded)


def test_encoded_downloads_are_refused_with_secure_aggregation():
    with pytest.raises(ConfigError, match="download = 'int8' is not possible with network"):
        Network(secure_aggregation=True, secure_norm=1.0, clients=8, download="int8")


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
