"""What all clients scale their inputs and weigh their labels by, which each tells its part of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from fedclade import Federation, Run, RunError, Task, assign, federation, simulate
from fedclade.channel import Budget, DifferentialPrivacy
from fedclade.core import Aggregation, UpdateError
from fedclade.core.errors import ConfigError
from fedclade.data import Statistics, bounded
from fedclade.flower import LocalGrid, LocalNode, client_app
from fedclade.flower.node_registry import CLIENTS
from fedclade.flower.replies import as_values, read_statistics
from fedclade.flower.wire import Content
from fedclade.runs.newcomers import Arrival
from tests.flower.grids import (
    LOCAL,
    Spoilt,
    federated,
    housed,
    network_of,
    node_of,
    only,
    reasons,
    spoil,
    worded,
    words_of,
)

NAMES = "abcd"
BALANCED = Task("binary", class_weights="balanced")
UNCLIPPED = Aggregation(clip_above=math.inf)
"""A simulation of honest clients clips nothing; one of these four sends more than twice as much as the median."""

BOTH: dict[str, Any] = {"task": BALANCED, "local": LOCAL, "rounds": 3, "aggregate": UNCLIPPED}
UNWEIGHTED: dict[str, Any] = {**BOTH, "task": "binary"}


def part(k: int, size: int = 24, seed: int = 0) -> Any:
    """Return a client's rows: a number far from 0, a small one, 0 or 1 (but for one client), and a constant."""
    draw = np.random.default_rng([seed, k])
    x = np.stack(
        [draw.normal(3000 + 40 * k, 9 + k, size), draw.normal(k, 0.1, size), np.arange(size) % 2.0],
        1,
    )
    x = np.concatenate([x, np.full((size, 1), 7.0)], 1)
    x[0, 2] = 5 if k == 2 else 0
    return x, (np.arange(size) % (k + 2) == 0).astype(np.float32)


def clients(standardize: Any = "federated") -> Federation:
    """Return all clients, as a simulation has them: of different sizes, each with test data of its own."""
    parts = {name: (part(k, 20 + 4 * k), part(k, 12, seed=1)) for k, name in enumerate(NAMES)}
    return federation(parts, "binary", standardize=standardize)


def alone(k: int, size: int | None = None, standardize: Any = "federated") -> Federation:
    """Return one client as its node makes it, of its own data and nothing else; with the draws of the simulated one."""
    rows = part(k, 20 + 4 * k if size is None else size), part(k, 12, seed=1)
    made = federation({NAMES[k]: rows}, "binary", standardize=standardize)
    return replace(made, clients=(replace(made.clients[0], id=k, key=k),))


def grid_of(
    task: Task = BALANCED, made: Callable[[int], Federation] = alone, **settings: Any
) -> LocalGrid:
    app = client_app(
        "mlp", lambda context: made(int(context.node_config["partition-id"])), task=task, **settings
    )
    return LocalGrid({node_of(k): LocalNode(app, {"partition-id": k}) for k in range(4)})


def asked_by(grid: LocalGrid) -> list[tuple[int, str]]:
    """Return a list that grows by the client and the kind of each question."""
    asked: list[tuple[int, str]] = []

    def note(k: int) -> Callable[[Content, RecordDict], None]:
        return lambda question, _: asked.append((k, question.values["what"]))

    for k in range(4):
        node = grid.nodes[node_of(k)]
        node.app = Spoilt(node.app, note(k))
    return asked


def largest_difference(one: Run, other: Run) -> float:
    pairs = zip(one.tree.nodes, other.tree.nodes, strict=True)
    return max(float((ours.params - theirs.params).abs().max()) for ours, theirs in pairs)


def test_a_network_scales_and_weighs_as_a_simulation_does():
    grid = grid_of()
    asked = asked_by(grid)
    there, here = (
        federated(grid, "fedavg", "mlp", **BOTH),
        simulate("fedavg", "mlp", clients(), engine="loop", **BOTH),
    )
    assert largest_difference(there, here) < 1e-5
    assert [row["accuracy"] for row in there.client_rows] == [
        row["accuracy"] for row in here.client_rows
    ]
    assert there.summary["inputs"]["mean"] == pytest.approx(
        here.summary["inputs"]["mean"], rel=1e-6
    )
    assert there.summary["inputs"]["std"] == pytest.approx(here.summary["inputs"]["std"], rel=1e-6)
    assert there.summary["inputs"]["std"][3] == 1
    assert sorted(k for k, what in asked if what == "statistics") == [0, 1, 2, 3]
    raw = federated(grid_of(made=lambda k: alone(k, standardize="none")), "fedavg", "mlp", **BOTH)
    assert largest_difference(there, raw) > 0.01


def test_all_files_of_the_others_give_the_same():
    """As in an app from a config, whose nodes have them all: what they were scaled by is taken off first."""
    whole = clients()
    there = federated(grid_of(made=whole.alone), "fedavg", "mlp", **BOTH)
    assert largest_difference(there, simulate("fedavg", "mlp", whole, engine="loop", **BOTH)) < 1e-5


def test_weights_alone_are_those_of_a_simulation():
    grid = grid_of(made=clients(standardize="client").alone)
    run = federated(grid, "fedavg", "mlp", **BOTH)
    here = simulate("fedavg", "mlp", clients(standardize="client"), engine="loop", **BOTH)
    assert largest_difference(run, here) < 1e-6
    assert run.summary["class_weights"] == here.summary["class_weights"]
    unweighted = simulate(
        "fedavg", "mlp", clients(standardize="client"), engine="loop", **UNWEIGHTED
    )
    assert largest_difference(run, unweighted) > 0.01


@pytest.mark.parametrize("network", [True, False])
def test_newcomers_weigh_labels_as_the_run_did(network: bool, tmp_path: Path):
    """Not by their own, of which nine in ten are 0: alone they train as with the run's weights given as numbers."""
    whole = clients(standardize="client")
    if network:
        run = federated(grid_of(made=whole.alone), "fedavg", "mlp", **BOTH)
    else:
        run = simulate("fedavg", "mlp", whole, engine="loop", **BOTH)
    run = Run.load(run.save(tmp_path / "run"))
    rows = (part(9, 40)[0], (np.arange(40) % 10 == 0).astype(np.float32))
    few = federation({"new": (rows, rows)}, "binary", standardize="client")
    arrival = Arrival.of(run, few, engine="loop")
    assert torch.equal(arrival.backend.task.weights, torch.tensor(run.summary["class_weights"]))
    by_rarity, same = (
        Task("binary", class_weights="balanced"),
        Task("binary", class_weights=[0.7, 1.9]),
    )
    assert torch.equal(
        Arrival.of(run, few, task=by_rarity).backend.task.weights, arrival.backend.task.weights
    )
    assert Arrival.of(run, few, task=same).backend.task.weights.tolist() == pytest.approx(
        [0.7, 1.9]
    )
    found = assign(run, few, engine="loop").rows
    numbers = Task("binary", class_weights=run.summary["class_weights"])
    assert found == assign(run, few, engine="loop", task=numbers).rows


def test_a_run_that_did_not_note_its_weights_says_so():
    run = simulate("fedavg", "mlp", clients(), engine="loop", **{**BOTH, "rounds": 1})
    run.summary.pop("class_weights")
    with pytest.raises(
        RunError,
        match=r"did not record balanced class weights, .*; call fedclade.assign with a task=",
    ):
        assign(run, clients())


def test_a_run_that_goes_on_asks_nobody_again(tmp_path: Path):
    """Not those that are back in another process, and not one that is new; who is new does not count."""
    folder = tmp_path / "run"
    grid = housed(grid_of(), tmp_path)
    grid.nodes[node_of(3)].connected = False
    federated(grid, "fedavg", "mlp", folder=folder, **{**BOTH, "rounds": 2})
    kept = json.loads((folder / CLIENTS).read_text())["statistics"]
    assert kept["count"] == 20 + 24 + 28
    grid = housed(grid_of(), tmp_path)
    asked = asked_by(grid)
    run = federated(
        grid, "fedavg", "mlp", folder=folder, network=network_of(grid, clients=3), **BOTH
    )
    assert {what for _, what in asked} == {"hello", "train", "evaluate", "gains"}
    assert sorted(row["client"] for row in run.client_rows if row["round"] == 3) == [0, 1, 2, 3]
    assert run.summary["inputs"]["mean"] == read_statistics(kept, 4, 2).mean.tolist()
    whole = housed(grid_of(), tmp_path / "again")
    whole.nodes[node_of(3)].connected = False
    uninterrupted = federated(whole, "fedavg", "mlp", **{**BOTH, "rounds": 2})
    assert uninterrupted.summary["inputs"]["mean"] == run.summary["inputs"]["mean"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            worded(means=[float("nan")] * 4),
            "client 2: 28 training examples cannot have these statistics: {",
        ),
        (
            worded(squares=[-1.0] * 4),
            "client 2: 28 training examples cannot have these statistics: {",
        ),
        (worded(labels=[20, 9]), "client 2: 28 training examples cannot have these statistics: {"),
        (
            worded(means=[1.0]),
            "client 2: 'means' should be a list of 4 values of type float, got [1.0]",
        ),
        (
            worded(numbers=[1, 1, 0, 0]),
            "client 2: 'numbers' should be a list of 4 values of type bool, got [1, 1, 0, 0]",
        ),
        (
            worded(labels=None),
            "client 2: 'labels' should be a list of 2 values of type int, got []",
        ),
        (
            worded(count=29),
            "client 2: the statistics are of 29 training examples, but the client registered with 28",
        ),
    ],
)
def test_sums_are_checked_and_those_of_most_will_do(
    change: Callable[[RecordDict], RecordDict], told: str, caplog: pytest.LogCaptureFixture
):
    grid = grid_of()
    spoil(grid, 2, "statistics", change)
    run = federated(grid, "fedavg", "mlp", **{**BOTH, "rounds": 1})
    (said,) = (message for message in caplog.messages if "report statistics for scaling" in message)
    assert said.startswith(f"3 of 4 clients report statistics for scaling or class weights: {told}")
    theirs = np.concatenate([part(k, 20 + 4 * k)[0] for k in (0, 1, 3)])
    assert run.summary["inputs"]["mean"][:2] == pytest.approx(theirs.mean(0)[:2])
    assert len({row["client"] for row in run.client_rows}) == 4


def test_sums_of_two_are_not_those_of_three():
    """Of two nobody's can be bounded."""
    grid = grid_of()
    grid.nodes[node_of(3)].connected = False
    spoil(grid, 2, "statistics", worded(count=29))
    with pytest.raises(
        UpdateError, match=r"2 of 3 clients report statistics .*, but at least 3 are needed: cl"
    ):
        federated(grid, "fedavg", "mlp", network=network_of(grid, clients=3), **BOTH)


def test_a_client_tells_no_sums_of_few_examples_or_against_its_policy():
    grid = grid_of(made=lambda k: alone(k, size=9 if k == 1 else None))
    grid.nodes[node_of(3)].config = {"partition-id": 3, "allow": "train evaluate"}
    with pytest.raises(UpdateError) as caught:
        federated(grid, "fedavg", "mlp", **BOTH)
    assert str(caught.value).endswith(
        "client 1: the client's policy forbids sums of 9 training examples, since they need at least 10 "
        "(min-part in its node config); client 3: the client's policy forbids the query 'statistics'; to allow it, "
        "set allow=\"train evaluate statistics\" in its node config; without scaling (data.standardize = 'none', "
        "data.standardize_target = 'none') and without task.class_weights = 'balanced', no statistics are needed"
    )


def test_a_client_tells_no_sums_that_it_does_not_need_itself():
    grid = grid_of(Task("binary"), lambda k: alone(k, standardize="none"))
    grid.nodes[node_of(2)] = grid_of().nodes[node_of(2)]
    run = federated(grid, "fedavg", "mlp", network=network_of(grid, clients=3), **UNWEIGHTED)
    (refused,) = (event for event in run.events if event["kind"] == "refused")
    assert (
        "its examples have the properties ((4,), 1, 'binary', 0, 'scaled')"
        in refused["nodes"]["102"]
    )
    grid = grid_of(Task("binary"), lambda k: alone(k, standardize="none"))
    for k in range(4):  # a server that asks all the same
        node = grid.nodes[node_of(k)]
        node.app = Spoilt(node.app, only("hello", worded(scaled=True)))
    with pytest.raises(
        UpdateError,
        match="client 0: the query requests statistics of this client's examples, but neither its inputs nor its",
    ):
        federated(grid, "fedavg", "mlp", **UNWEIGHTED)


def test_private_clients_tell_no_sums(tmp_path: Path):
    privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)
    grid = housed(grid_of(privacy=privacy, budget=Budget(epsilon=9.0)), tmp_path)
    with pytest.raises(
        UpdateError, match="clients with differential privacy do not reveal sums of their data"
    ):
        federated(grid, "fedavg", "mlp", **BOTH)


def test_a_client_does_not_train_without_the_sums_of_all():
    grid = grid_of()
    answering = grid.nodes[node_of(1)].app

    def forgetful(message: Any, context: Any) -> Any:
        if words_of(message.content)["what"] == "train":
            message.content = worded(means=None)(message.content)
        return answering(message, context)

    grid.nodes[node_of(1)].app = forgetful
    run = federated(grid, "fedavg", "mlp", **BOTH)
    assert reasons(run)[1] == "'means' should be a list of 4 values of type float, got []"


def test_data_that_cannot_be_scaled_says_so():
    with pytest.raises(ConfigError, match="standardize should be 'none' for inputs int64"):
        federation(
            {"a": (np.arange(40).reshape(20, 2), np.arange(20) % 2)}, standardize="federated"
        )


def test_statistics_survive_a_message_to_the_bit():
    one = Statistics(
        3,
        torch.tensor([0.1, 1e-300]).double(),
        torch.tensor([1 / 3, 0]),
        torch.tensor([True, False]),
    )
    again = read_statistics(json.loads(json.dumps(as_values(one))), 2, 0)
    assert torch.equal(again.means, one.means)
    assert again.numbers.tolist() == [True, False]
    assert again.labels.shape == (0,)


def honest(seed: int) -> Statistics:
    """Return what 100 examples come to, of two columns and two labels."""
    rows = torch.from_numpy(np.random.default_rng(seed).normal((0.5, 10.0), (1.0, 2.0), (100, 2)))
    mean = rows.mean(0)
    return Statistics(
        100,
        mean,
        (rows - mean).square().sum(0),
        torch.tensor([True, True]),
        torch.tensor([40 + seed, 60 - seed]),
    )


@pytest.mark.parametrize(
    "lie",
    [
        {"squares": torch.tensor([1e300, 1.0], dtype=torch.float64)},
        {"means": torch.tensor([1e308, 0.0], dtype=torch.float64)},
        {"count": 10**9, "means": torch.tensor([5.0, -3.0], dtype=torch.float64)},
        {"count": 10**9, "labels": torch.tensor([10**9, 0])},
    ],
)
def test_one_client_does_not_set_what_all_scale_by(lie):
    clients = [honest(seed) for seed in range(10)]
    true, found = (
        reduce(Statistics.plus, clients),
        reduce(Statistics.plus, bounded([*clients, replace(honest(10), **lie)], 2.0)),
    )
    assert ((found.mean - true.mean).abs() < 2 * true.std).all()
    assert (found.std < 5 * true.std).all()
    assert (found.std > true.std / 2).all()
    assert int(found.labels.sum()) <= found.count <= 1200


@pytest.mark.parametrize(("largest_weight", "counted"), [(2.0, 200), (1.5, 150), (math.inf, 900)])
def test_the_network_says_how_much_the_largest_client_counts(largest_weight: float, counted: int):
    clients = [*map(honest, range(4)), replace(honest(4), count=900)]
    assert [found.count for found in bounded(clients, largest_weight)] == [100] * 4 + [counted]


def test_honest_statistics_are_within_bounds_to_the_bit():
    clients = [honest(seed) for seed in range(5)]
    assert all(a is b for a, b in zip(bounded(clients, 2.0), clients, strict=True))
    assert bounded(clients[:2], 2.0) == clients[:2]
    alike = Statistics(
        9,
        torch.ones(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
        torch.ones(2) > 0,
    )
    assert bounded([alike] * 4, 2.0) == [alike] * 4
