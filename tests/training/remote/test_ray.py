"""Runs on a Ray cluster of several nodes, on this machine, end as in one process, whoever is killed in a round."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import fedclade
from fedclade import Actors, ConfigError, LocalTraining, Signature
from tests.structured import Reader, named
from tests.tiny import federation_of, perceptron

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.slow

TRUTH = [0, 1, 0, 1, 0, 1, 0, 1]
FEDERATION = federation_of(TRUTH, [40, 24, 33, 40, 24, 40, 35, 24])
LOCAL = LocalTraining(epochs=2, batch_size=10, lr=0.2)
DP_SGD = fedclade.ExamplePrivacy(clip_norm=1.0, noise_multiplier=0.5)
METHODS = {
    "cfl": {"algorithm": fedclade.CFL(criterion="thresholds", eps1=0.6, eps2=0.1, gamma_max=0.5)},
    "fedgroup": {"algorithm": fedclade.FedGroup(groups=2)},
    "auto": {"algorithm": fedclade.Auto(budget=8.0, level=0.5)},
    "fedper": {},
    "local": {},
}


@pytest.fixture(scope="module", autouse=True)
def _at_the_priority_of_other_tests():
    """By default Ray's processes wait for all else on the machine, and that is other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of two cores each."""
    started = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    started.add_node(num_cpus=2)
    ray.init(address=started.address, log_to_driver=False, logging_level=logging.ERROR)
    yield started
    ray.shutdown()
    started.shutdown()


def run(method: str = "cfl", federation=FEDERATION, actors=None, **settings):
    algorithm = METHODS[method].get("algorithm", method)
    engine = {"engine": "loop"} if actors is None else {"engine": "ray", "actors": actors}
    settings = {"rounds": 3, "local": LOCAL, "seed": 2, "device": "cpu", **engine, **settings}
    return fedclade.simulate(algorithm, lambda seed: perceptron(seed), federation, **settings)


def assert_same(got, expected):
    assert [node.members for node in got.tree.nodes] == [
        node.members for node in expected.tree.nodes
    ]
    for mine, theirs in zip(got.tree.nodes, expected.tree.nodes, strict=True):
        torch.testing.assert_close(mine.model, theirs.model, rtol=1e-4, atol=1e-5)
    for name in ("bytes_up", "bytes_down"):
        assert [row[name] for row in got.metric_rows] == [row[name] for row in expected.metric_rows]
    assert got.kept.keys() == expected.kept.keys()
    for client, kept in expected.kept.items():
        for name, tensor in kept.items():
            torch.testing.assert_close(got.kept[client][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("method", "actors", "privacy"), [("cfl", 4, None), ("fedgroup", 2, None), ("local", 1, DP_SGD)]
)
def test_runs_end_the_same_on_any_number_of_actors(method, actors, privacy):
    expected = run(method, privacy=privacy)
    assert len(expected.tree.leaves) == {"cfl": 4, "fedgroup": 2, "local": 1}[method]
    got = run(method, actors=Actors(count=actors, engine="loop"), privacy=privacy)
    assert_same(got, expected)
    assert got.summary.get("privacy") == expected.summary.get("privacy")


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("rounds", [pytest.param(4, marks=pytest.mark.scheduled), 7])
def test_auto_serves_the_same_models(rounds):
    """In four rounds clients make copies of models; in seven they train own models as well."""
    expected = run("auto", rounds=rounds, evaluate_every=rounds)
    got = run("auto", actors=Actors(count=2, engine="loop"), rounds=rounds, evaluate_every=rounds)
    assert_same(got, expected)
    assert got.summary["served"] == expected.summary["served"]
    assert expected.kept


@pytest.mark.usefixtures("cluster")
def test_what_lies_between_clients_and_server_is_the_same():
    both = {
        "privacy": fedclade.DifferentialPrivacy(clip_norm=1.0, noise_multiplier=0.01),
        "permute": True,
        "signature": Signature(kind="projected", dim=32),
        "faults": fedclade.Faults(dropout=0.1, corrupt=0.1),
    }
    expected = run("cfl", stream=False, **both)
    got = run("cfl", actors=2, **both)
    assert got.config["stream"] is True
    assert_same(got, expected)
    assert [len(row) for row in got.events] == [len(row) for row in expected.events]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "kind", [pytest.param("label_flip", marks=pytest.mark.scheduled), "minmax"]
)
def test_adversaries_lie_the_same_wherever_they_are(kind):
    adversary = fedclade.Adversary(kind=kind, share=0.3, from_round=2)
    expected = run("cfl", stream=False, adversary=adversary)
    got = run("cfl", actors=2, stream=False, adversary=adversary)
    assert_same(got, expected)
    assert got.summary["adversary"]["ids"] == expected.summary["adversary"]["ids"]


@pytest.mark.usefixtures("cluster")
def test_more_actors_than_the_cluster_has_cores_for_are_refused():
    with pytest.raises(ConfigError, match=r"5 actors of 1 core each do not fit .* has room for 4"):
        run(actors=5)
    assert ray.is_initialized(), "whose cluster it is ends it"


def noticed(inputs, folder: Path):
    """Leave a note of this process and its node, as long as nobody has, and give whoever reads it time to kill."""
    if (folder / "in a round").exists() and not (folder / "note").exists():
        note = folder / f"{os.getpid()}"
        note.write_text(f"{os.getpid()} {ray.get_runtime_context().get_node_id()}")
        note.rename(folder / "note")
        time.sleep(2)
    return inputs


def watched(tmp_path: Path, act, actors: int, number: int = 1):
    """Run while ``act`` is called in a round with the process and the node of an actor that trains."""

    def wait():
        while not (tmp_path / "note").exists():
            time.sleep(0.02)
        act(*(tmp_path / "note").read_text().split())

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()

    def on_round(row, _):
        if row["round"] == number:
            (tmp_path / "in a round").touch()

    federation = replace(FEDERATION, augment=partial(noticed, folder=tmp_path))
    found = run("cfl", federation, actors=Actors(count=actors, engine="loop"), on_round=on_round)
    waiting.join(10)
    assert not waiting.is_alive()
    return found


@pytest.mark.usefixtures("cluster")
def test_an_actor_that_is_killed_in_a_round_changes_nothing(tmp_path, caplog):
    got = watched(tmp_path, lambda process, _: os.kill(int(process), signal.SIGKILL), actors=2)
    assert "an actor died, and its part of the round is repeated" in caplog.text
    assert_same(got, run("cfl"))


def test_a_node_that_is_removed_in_a_round_changes_nothing(cluster, tmp_path, caplog):
    more = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()

    def remove(_, node):
        there = {each.node_id: each for each in cluster.list_all_nodes()}
        if node == more.node_id or node != cluster.head_node.node_id:
            cluster.remove_node(there[node], allow_graceful=False)
        else:
            cluster.remove_node(more, allow_graceful=False)

    got = watched(tmp_path, remove, actors=6)
    assert "of the dead actor are assigned to the other" in caplog.text
    assert_same(got, run("cfl"))


@pytest.mark.usefixtures("cluster")
def test_a_run_that_was_interrupted_goes_on(tmp_path):
    settings = {"folder": tmp_path / "run", "actors": 2, "config": None}
    with pytest.raises(fedclade.RunInterrupted):
        run("fedper", stop=lambda: True, **settings)
    assert_same(run("fedper", **settings), run("fedper"))


def test_a_cluster_that_a_run_starts_ends_with_it():
    script = """
import fedclade, ray
federation = fedclade.load_federation("digits", clients=4)
run = fedclade.simulate("fedavg", "mclr", federation, rounds=2, engine="ray", actors=2)
assert run.config["engine"] == "ray", run.config
assert not ray.is_initialized()
try:
    fedclade.simulate("fedavg", "mclr", federation, rounds=2, engine="ray", on_round=lambda *_: 1 / 0, stop=int("x"))
except ValueError:
    pass
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.usefixtures("cluster")
def test_examples_of_several_tensors():
    data = named()
    expected = fedclade.simulate("fedavg", Reader, data, rounds=2, engine="loop", local=LOCAL)
    actors = Actors(count=2, engine="loop")
    got = fedclade.simulate(
        "fedavg", Reader, data, rounds=2, engine="ray", actors=actors, device="cpu", local=LOCAL
    )
    assert_same(got, expected)
