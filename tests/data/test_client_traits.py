"""Traits of clients' training data."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.tiny import federation_of, task_federation

import fedclade
from fedclade.data import Trait, describe_clients


def test_label_shares_are_as_the_client_sees_its_labels():
    federation = federation_of([0, 1])
    traits, values = describe_clients(federation, [0, 1])
    places = [i for i, trait in enumerate(traits) if trait.kind == "label share"]
    for row, client in enumerate((0, 1)):
        _, seen = federation.examples(client, "train")
        shares = torch.bincount(seen, minlength=4) / len(seen)
        assert values[row, places] == pytest.approx(shares.numpy())


def test_means_of_a_scaled_table_are_in_the_units_of_its_columns():
    rows = {
        "site": ["a"] * 5 + ["b"] * 5,
        "age": [50.0, 60, 70, 65, 55, 20, 30, 40, 35, 25],
        "ill": [0, 1, 1, 1, 0, 1, 0, 0, 0, 1],
    }
    federation = fedclade.federation_from_frame(
        pa.table(rows), client="site", target="ill", task="binary", standardize="federated"
    )
    traits, values = describe_clients(federation, [0, 1])
    assert traits == (
        Trait("label share", "ill = 1"),
        Trait("input mean", "age"),
        Trait("input–target correlation", "age"),
    )
    for row, client in enumerate(federation.clients):
        ages = np.array(rows["age"])[client.train]
        ill = np.array(rows["ill"])[client.train]
        expected = [ill.mean(), ages.mean(), np.corrcoef(ages, ill)[0, 1]]
        assert values[row] == pytest.approx(expected, rel=1e-4)


def test_means_of_inputs_that_each_client_scaled_itself_are_left_out():
    federation = fedclade.federation_from_frame(
        pa.table({"site": ["a"] * 5 + ["b"] * 5, "age": range(10), "dose": [0.5] * 9 + [1.5]}),
        client="site",
        target="dose",
        standardize="client",
    )
    traits, _ = describe_clients(federation, [0, 1])
    assert [trait.kind for trait in traits] == ["target level", "input–target correlation"]
    assert traits[0].name == "dose"


def test_a_constant_column_and_a_constant_target_have_no_correlation():
    federation = fedclade.federation(
        {
            name: (torch.stack([torch.ones(9), torch.arange(9.0)], 1), torch.full((9,), level))
            for name, level in (("a", 0.5), ("b", 1.5))
        }
    )
    traits, values = describe_clients(federation, [0, 1])
    relations = [i for i, trait in enumerate(traits) if "correlation" in trait.kind]
    assert len(relations) == 2
    assert np.isnan(values[:, relations]).all()
    assert values[:, 0] == pytest.approx([0.5, 1.5])


def test_several_targets_are_named_in_their_relations():
    federation = task_federation("multilabel", [0, 1], outputs=2)
    traits, values = describe_clients(federation, [0, 1])
    assert values.shape == (2, len(traits))
    assert Trait("label share", "label 1") in traits
    assert Trait("input–target correlation", "input 5 and label 1") in traits


def test_images_are_described_by_their_labels_only():
    federation = fedclade.load_federation("digits", clients=2)
    traits, _ = describe_clients(federation, [0, 1])
    assert {trait.kind for trait in traits} == {"label share"}
    assert len(traits) == 10
