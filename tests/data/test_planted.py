"""Planted clusters: what a client has depends on the seed and its number alone, and its labels on its cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedclade.core import ConfigError
from fedclade.data import PlantedSettings, open_folder, write_planted
from fedclade.data.concepts import BLOCK


def test_labels_are_those_of_the_clusters_concept(tmp_path: Path):
    settings = PlantedSettings(
        clients=40, clusters=3, features=8, labels=4, noise=0.0, validation=2
    )
    assert write_planted(tmp_path / "out", settings, seed=5) == "planted, 40 clients, 3 clusters"
    found, concepts = open_folder(tmp_path / "out"), torch.from_numpy(settings.concepts(5))
    assert found.true_clusters is not None
    assert len(set(found.true_clusters.values())) == 3
    for client, cluster in found.true_clusters.items():
        x, y = found.examples(client, "train")
        assert torch.equal((x @ concepts[cluster].T).argmax(1), y)
        assert (len(found.by_id[client].validation), len(found.by_id[client].test)) == (2, 5)


def test_a_client_is_the_same_however_many_there_are():
    few, many = (next(PlantedSettings(clients=n, features=3).blocks(1)) for n in (7, BLOCK + 3))
    rows = len(few.x)
    assert torch.equal(few.x, many.x[:rows])
    assert torch.equal(few.y, many.y[:rows])
    assert np.array_equal(few.counts, many.counts[:7])
    first, second = PlantedSettings(clients=BLOCK + 3, features=3).blocks(1)
    assert len(second.counts) == 3
    assert not torch.equal(first.x[:5], second.x[:5])


def test_sizes_follow_zipfs_law():
    """P(size >= s) = (s / least)^-(zipf - 1), between least and most."""
    sizes = next(PlantedSettings(clients=BLOCK, features=1, most=1000).blocks(0)).counts[:, 0]
    assert (sizes.min(), sizes.max() <= 1000) == (10, True)
    assert np.mean(sizes >= 40) == pytest.approx(4**-1.5, abs=0.02)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"clients": 0}, "clients should be at least 1, got 0"),
        ({"most": 5}, "most should be at least 10, as data.least, got 5"),
        ({"zipf": 1.0}, "zipf should be greater than 1, got 1.0"),
        ({"noise": 1.0}, r"noise should be in \[0, 1\), got 1.0"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        PlantedSettings(**changes)
