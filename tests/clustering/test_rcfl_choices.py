"""The alternatives of ``studies/rcfl_choices.py``, on updates that are made up."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedclade.clustering.similarity import cosine_similarity
from fedclade.clustering.split_half import (
    Replicates,
    compute_gain,
    find_clusters,
    is_same_partition,
)

STUDIES = Path(__file__).parents[2] / "studies"
TRUTH = np.arange(12) % 3


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(STUDIES))
    return importlib.import_module("rcfl_ways")


def parts_of(m: int, noise: float, seed: int = 0) -> list[torch.Tensor]:
    """Return m updates of each client: unit means of three clusters at right angles, and noise of this size."""
    draw = torch.Generator().manual_seed(seed)
    means = torch.eye(60)[torch.from_numpy(TRUTH)] * 60**0.5
    return [means + noise * torch.randn(means.shape, generator=draw) for _ in range(m)]


@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_two_halves_and_average_linkage_are_the_librarys_way(ways, noise):
    halves = parts_of(2, noise)
    usual = find_clusters(Replicates(*halves))
    alike = [cosine_similarity(half) for half in halves]
    found = ways.found_on(
        alike, ways.noise_of(halves), lambda half: ways.partitions(half, "average")
    )
    assert is_same_partition(found.labels, usual.labels)
    assert (found.gain, found.noise) == pytest.approx((usual.gain, usual.noise))
    labels, p_value = ways.each_way(halves, np.random.default_rng(0))
    assert is_same_partition(labels, usual.labels)
    assert p_value == pytest.approx(
        usual.compute_p_value(ways.COARSE, np.random.default_rng(0)), abs=0.05
    )


@pytest.mark.parametrize("m", [3, 4])
def test_more_parts_find_clusters_and_part_nobody_without(ways, m):
    labels, p_value = ways.each_way(parts_of(m, 0.5), np.random.default_rng(0))
    assert is_same_partition(labels, TRUTH)
    assert p_value < 0.005
    alone = [torch.randn(12, 60, generator=torch.Generator().manual_seed(k)) for k in range(m)]
    assert ways.each_way(alone, np.random.default_rng(0))[1] > 0.05


def test_the_gain_of_more_parts_is_judged_on_the_mean_of_the_others_in_every_order(ways):
    alike, draw = [cosine_similarity(part) for part in parts_of(3, 2.0)], np.random.default_rng(0)
    cuts = [ways.partitions(each, "average") for each in alike]
    orders = [draw.permutation(12) for _ in alike]
    found = ways.gains_each_way(alike, cuts, 0.3, [order[None] for order in orders])[0]
    shuffled = [each[np.ix_(order, order)] for each, order in zip(alike, orders, strict=True)]
    for k in range(12):
        one_way = [
            compute_gain(
                np.mean([shuffled[other] for other in range(3) if other != part], axis=0),
                cuts[part][k][orders[part]],
                0.3,
            )
            for part in range(3)
        ]
        assert found[k] == pytest.approx(np.mean(one_way))


def test_nested_splits_stop_where_too_few_clients_are_left_to_tell_from_chance(ways):
    """Of 8 clients 4 and 4 can have no p-value below 1/35: all are told apart at 0.05, one cluster alone at 0.005."""
    halves = parts_of(2, 0.2)
    alike, noise = [cosine_similarity(half) for half in halves], ways.noise_of(halves)
    at = {
        level: ways.nested(alike, noise, level, np.random.default_rng(0)) for level in (0.05, 0.005)
    }
    assert is_same_partition(at[0.05], TRUTH)
    assert at[0.005].max() == 1


def test_all_alternatives_are_judged(ways):
    recorded = {
        f"{number} in {m}": parts_of(m, 0.3, number) for number in ways.CHECKED for m in (2, 3, 4)
    }
    recorded["11 as 3"] = parts_of(2, 0.3, 5)
    found = ways.outcomes(recorded, TRUTH, 0)
    assert {way for way, score in found.items() if not score["right"]} == {
        f"{n} nested at 0.005" for n in ways.CHECKED
    }
    assert {"3 ward", "11 in 4", "3 across", "11 and 3, the same halves"} <= set(found)
    alone = ways.outcomes(recorded, np.zeros_like(TRUTH), 0)
    assert not any("across" in way for way in alone)


def test_updates_are_recorded_from_parts_of_the_data(ways):
    from tests.tiny import federation_of

    recorded = ways.record(federation_of([0, 0, 1, 1]), 0)
    assert {name: len(parts) for name, parts in recorded.items()} == {
        **{f"{number} in {m}": m for number in ways.CHECKED for m in (2, 3, 4)},
        "11 as 3": 2,
    }
    assert all(
        part.shape == recorded["3 in 2"][0].shape for parts in recorded.values() for part in parts
    )


def test_the_tables_show_paired_differences(tmp_path: Path):
    def run(method: str, seed: int, accuracy: float) -> str:
        line = {"part": "schedule", "task": "rotation 40", "method": method, "seed": seed}
        return json.dumps(line | {"accuracy": accuracy, "ari": 1.0, "ari_by_15": 0.5})

    lines = [run("every 7", 0, 0.5), run("every 7", 1, 0.6)]
    lines += [run("every 4", 0, 0.51), run("every 4", 1, 0.61)]
    (out := tmp_path / "choices.jsonl").write_text("\n".join(lines))
    script = [sys.executable, str(STUDIES / "rcfl_choices.py"), "--out", str(out), "--table"]
    shown = subprocess.run(script, check=True, capture_output=True, text=True, timeout=200).stdout
    row = next(line for line in shown.splitlines() if "every 4" in line)
    assert row.split()[-7:] == ["2", "56.0", "+1.00", "±", "0.00", "1.000", "0.500"]
