"""What clients describe their data by: which layer's input, of which examples, and what cannot be described."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedclade import ConfigError, ModelError
from fedclade.algorithms import DescriptorQuery
from fedclade.algorithms.descriptor_query import latent_layer, latents, projection
from fedclade.channel import Channel, Permutation
from fedclade.channel.signature import Permuting
from fedclade.models import LoRA, build_model
from fedclade.training import SimulatedClients
from tests.tiny import (
    FEATURES,
    LABELS,
    federation_of,
    linear,
    perceptron,
    simulated,
    task_federation,
)


def test_the_latent_is_what_goes_into_the_first_dense_layer_behind_the_last_convolution():
    images = torch.rand(3, 1, 28, 28)
    lenet = build_model("lenet", input_shape=(1, 28, 28), outputs=10, seed=0)
    assert latent_layer(lenet, images[:1]) is lenet[7]
    torch.testing.assert_close(latents(lenet, images), lenet[:7](images))
    assert latents(lenet, images).shape == (3, 400)


def test_without_convolutions_it_is_the_input_of_the_last_dense_layer_also_under_adapters():
    inputs, module = torch.rand(3, FEATURES), perceptron()
    assert latent_layer(module, inputs) is [*module.modules()][-1]
    LoRA(targets=("3",), rank=2).added_to(module)
    assert latents(module, inputs).shape == (3, 8)


def test_a_model_without_a_dense_layer_cannot_describe():
    with pytest.raises(
        ModelError, match=r"Sequential has no dense layer \(nn\.Linear\) after its last convolution"
    ):
        latents(nn.Sequential(nn.Conv2d(1, 2, 3)), torch.rand(1, 1, 5, 5))


def test_directions_are_those_of_points_in_a_cube_whatever_its_side():
    directions, centre = projection(7, 30, 4)
    torch.testing.assert_close(directions.T @ directions, torch.eye(4, dtype=torch.float64))
    assert (directions.gather(0, directions.abs().argmax(0)[None]) > 0).all()
    assert centre.shape == (4,)
    assert not torch.equal(directions, projection(8, 30, 4)[0])


def test_means_and_deviations_are_of_all_examples_and_of_each_label_as_the_client_sees_it():
    one_less = torch.tensor([0, 0, 2, 3])  # who has no label 1
    world = federation_of([0, 1], [40, 50])
    world = replace(
        world, clients=(world.clients[0], replace(world.clients[1], label_map=one_less))
    )
    clients, params = simulated(world, linear())
    found = clients.ask(DescriptorQuery([1, 0], params, 3))
    assert found.shape == (2, 2 + 2 + 2 * LABELS, LABELS)
    directions, centre = projection(3, FEATURES, LABELS)
    for row, client in zip(found.double(), (1, 0), strict=True):
        x, y = world.examples(client, "train")
        parts = x.double() @ directions
        torch.testing.assert_close(row[0], x.max().double().expand(LABELS))
        torch.testing.assert_close(row[1], centre, atol=1e-6, rtol=0)
        groups = [parts, *(parts[y == label] for label in range(LABELS))]
        absent = torch.full((LABELS,), -1.0, dtype=torch.float64)
        means, stds = ([f(g) if len(g) > 1 else absent for g in groups] for f in (mean, std))
        torch.testing.assert_close(
            row[2:], torch.stack([means[0], stds[0], *means[1:], *stds[1:]]), atol=1e-5, rtol=0
        )
    assert (found[0, [5, 9]] == -1).all()
    assert torch.equal(clients.ask(DescriptorQuery([0], params, 3, per_label=False)), found[1:, :4])


def mean(group):
    return group.mean(0)


def std(group):
    return torch.from_numpy(np.std(group.numpy(), axis=0))


def test_a_permuted_model_describes_as_the_model_does():
    clients, params = simulated(federation_of([0, 1]), perceptron())
    permutation = Permutation(5, clients.layout.size, clients.layout.n_parameters)
    hidden = Channel(clients, Permuting(permutation))
    assert torch.equal(
        hidden.ask(DescriptorQuery([0, 1], permutation.apply(params), 1)),
        clients.ask(DescriptorQuery([0, 1], params, 1)),
    )


def test_a_personal_part_is_each_clients_own():
    module = perceptron()
    clients = SimulatedClients(federation_of([0, 1]), module, engine="loop", personal=("1.*",))
    shared = clients.layout.flatten(module)
    before = clients.ask(DescriptorQuery([0, 1], shared, 1))
    clients.store.keep(1, 1, {"personal": 2 * clients.whole.initial})
    after = clients.ask(DescriptorQuery([0, 1], shared, 1))
    assert torch.equal(before[0], after[0])
    assert after[1, 0, 0] > before[1, 0, 0]


def test_what_is_not_possible_is_said():
    clients, params = simulated(federation_of([0]), linear())
    told = f"algorithm.components should be at most {FEATURES} for this model, whose latent (the layer's input that"
    with pytest.raises(ConfigError, match=re.escape(told)):
        clients.ask(DescriptorQuery([0], params, 1, 7))
    numbers, module = task_federation("regression", [0]), nn.Sequential(nn.Linear(FEATURES, 1))
    clients, params = simulated(numbers, module)
    with pytest.raises(
        ConfigError,
        match=r"describe the data of each label separately in a regression task.*algorithm\.per_label = false",
    ):
        clients.ask(DescriptorQuery([0], params, 1))
    assert clients.ask(DescriptorQuery([0], params, 1, 3, per_label=False)).shape == (1, 4, 3)
    assert DescriptorQuery([0], params, 1, per_label=False).shape(numbers.pool.schema) == (4, 10)


def test_components_beyond_a_narrow_latent_are_zeros():
    """Unless told how many, there are as many as labels; the latent of a linear model has an entry for each input."""
    federation = federation_of([0, 1], [20, 26])
    narrow = replace(federation, pool=replace(federation.pool, x=federation.pool.x[:, :3]))
    clients, params = simulated(narrow, nn.Linear(3, LABELS))
    found, exact = (
        clients.ask(DescriptorQuery([0, 1], params, 1)),
        clients.ask(DescriptorQuery([0, 1], params, 1, 3)),
    )
    assert found.shape[2] == LABELS == 4
    torch.testing.assert_close(found[:, :, :3], exact)
    absent = (found == -1).all(2)
    assert (found[:, 1:, 3] == torch.where(absent, -1.0, 0.0)[:, 1:]).all()
