from __future__ import annotations

from functools import cache

import pytest
import torch

from fedclade import ConfigError, LocalTraining, Run, RunFacts, RunInterrupted, simulate
from fedclade.algorithms import PrivateChoice
from fedclade.channel import CentralPrivacy
from fedclade.channel.retry import Faults
from fedclade.clustering.sampling import draw_cell_points, find_cell_centres, find_directions
from fedclade.core import Cells, Joined, Moments, RoundPlan, rng
from fedclade.runs import Backend
from fedclade.tasks.metrics import cluster_scores
from tests.reference.fedavg import as_numpy
from tests.reference.private_choice import private_choice
from tests.tiny import ScriptedClients, federation_of, linear, renamed

TRUTH = [0, 1, 3] * 10
FEDERATION = federation_of(TRUTH)
LOCAL = LocalTraining(epochs=3, batch_size=10, lr=0.3)
CHOICE = PrivateChoice(clusters=3, rounds_before=2, sketch=28, cells=12)
PRIVACY = CentralPrivacy(
    clip_norm=0.5, noise_multiplier=0.5, signature_noise=0.5, signature_epsilon=6.0
)


def run(privacy=None, federation=FEDERATION, algorithm=CHOICE, rounds=5, engine="stacked", **more):
    settings = {"privacy": privacy, **more}
    return simulate(
        algorithm, linear(), federation, rounds=rounds, local=LOCAL, engine=engine, **settings
    )


@cache
def plain() -> Run:
    """Return the run that others are compared with."""
    return run(stream=False)


def members(made) -> set[tuple[int, ...]]:
    return {leaf.members for leaf in made.tree.leaves if leaf.members}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("clusters", 1, "at least 2"),
        ("rounds_before", -1, "at least 0"),
        ("sketch", 2, "at least clusters, 3"),
        ("cells", 2, "at least clusters, 3"),
    ],
)
def test_a_setting_out_of_range_is_named(name, value, rule):
    with pytest.raises(ConfigError, match=f"algorithm.{name} should be {rule}, got {value}"):
        PrivateChoice(**{"clusters": 3, name: value})


def mixture(n: int, d: int = 4, R: int = 20):
    """Return unit signatures [4n, R] around four orthogonal directions, and which of them each is near."""
    draw = torch.Generator().manual_seed(0)
    frame = torch.linalg.qr(torch.randn(R, d, generator=draw, dtype=torch.float64))[0].T
    truth = torch.arange(4 * n) % 4
    u = frame[truth] + 0.1 * torch.randn(4 * n, R, generator=draw, dtype=torch.float64)
    return torch.nn.functional.normalize(u, dim=1), truth


@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_centres_come_from_sums_alone(noise):
    """The directions span the clusters, and the centres part all clients of 4 × 200, with noise of z' = 4.2 too."""
    u, truth = mixture(200)
    draw = torch.Generator().manual_seed(1)

    def total(question):
        sums = question.answered(u).sum(0)
        return sums + noise * torch.randn(len(sums), generator=draw, dtype=torch.float64)

    basis = find_directions(total(Moments(0, 20)), 20, 4)
    torch.testing.assert_close(basis.T @ basis, torch.eye(4, dtype=torch.float64))
    points = draw_cell_points(32, 4, rng.generator(0, "cells"))
    torch.testing.assert_close(points.norm(dim=1), torch.ones(32, dtype=torch.float64))
    cells = Cells(0, 20, basis, points)
    centres = find_cell_centres(total(cells), 32, 4, noise, rng.generator(0, "centres"))
    found = (cells.directions(u) @ centres.T).argmax(1)
    scores = cluster_scores(dict(enumerate(found.tolist())), dict(enumerate(truth.tolist())))
    assert scores["ari"] > 0.99


def test_under_very_much_noise_there_are_still_as_many_centres():
    u, _ = mixture(2)
    cells = Cells(
        0,
        20,
        torch.eye(20, 4, dtype=torch.float64),
        draw_cell_points(8, 4, rng.generator(0, "cells")),
    )
    found = find_cell_centres(cells.answered(u).sum(0), 8, 4, 1e6, rng.generator(0, "centres"))
    assert found.shape == (4, 4)
    assert found.isfinite().all()


def test_without_privacy_it_finds_the_true_clusters():
    made = plain()
    assert made.summary["clusters"]["ari"] == 1.0
    assert "privacy" not in made.summary
    assert [row["phase"] for row in made.metric_rows] == [
        "train",
        "train",
        "cluster",
        "train",
        "train",
    ]


def test_without_noise_it_is_its_literal_twin():
    start = Backend.simulated_by(FEDERATION, linear(), CHOICE, local=LOCAL).initial
    twin = private_choice(
        *(as_numpy(start), FEDERATION, linear(), LOCAL),
        **{"k": 3, "rounds_before": 2, "R": 28, "B": 12, "seed": 0, "rounds": 5},
    )
    trees = []
    run(engine="loop", on_round=lambda _, tree: trees.append(tree))
    for tree, expected in zip(trees, twin, strict=True):
        leaves = [leaf for leaf in tree.leaves if leaf.members]
        assert [list(leaf.members) for leaf in leaves] == expected.clusters
        for leaf, model in zip(leaves, expected.models, strict=True):
            assert as_numpy(leaf.params) == pytest.approx(model, abs=1e-5)
    assert [len(each.clusters) for each in twin] == [1, 1, 3, 3, 3]


def test_clusters_begin_at_the_joint_model_and_go_on_by_themselves():
    trees = []
    run(rounds=4, on_round=lambda _, tree: trees.append(tree))
    _, before, at, after = trees
    assert all(torch.equal(leaf.params, before.nodes[0].params) for leaf in at.leaves)
    assert len({tuple(leaf.params.tolist()) for leaf in after.leaves}) == 3


def test_it_does_not_depend_on_what_clients_are_called():
    """But for rounding: sums add the same in another order."""
    new = {old: 100 - old for old in range(len(TRUTH))}
    one, other = plain(), run(federation=renamed(FEDERATION, new))
    assert {tuple(sorted(new[c] for c in cluster)) for cluster in members(one)} == members(other)


def test_a_stream_finds_the_same_clusters():
    assert members(run(stream=True)) == members(plain())


def test_under_privacy_all_releases_are_composed():
    made = run(PRIVACY)
    told = [event["about"] for event in made.events if event["kind"] == "private_release"]
    assert told == ["updates", "updates", "moments", "cells", "choice", "updates", "updates"]
    spent = made.summary["privacy"]
    assert (spent["releases"], spent["level"]) == (7, "client")
    assert spent["epsilon"] > 6
    assert made.summary["clusters"]["ari"] > 0.7


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path):
    whole = run(PRIVACY, min_cluster_size=3)
    for stop_after in (2, 3):
        folder, seen = tmp_path / str(stop_after), []
        with pytest.raises(RunInterrupted):
            run(
                PRIVACY,
                min_cluster_size=3,
                folder=folder,
                stop=lambda s=seen, n=stop_after: s.append(1) or len(s) == n,
            )
        again = run(PRIVACY, min_cluster_size=3, folder=folder)
        assert members(again) == members(whole)
        assert again.summary["privacy"] == whole.summary["privacy"]
        for one, other in zip(whole.tree.nodes, again.tree.nodes, strict=True):
            assert torch.equal(one.params, other.params)


def test_clients_that_do_not_answer_wait_with_the_joint_model():
    """Dropped in half of all queries: asked again, and those that never answer are in no cluster."""
    made = run(faults=Faults(dropout=0.7))
    inside = {client for cluster in members(made) for client in cluster}
    waiting = set(range(len(TRUTH))) - inside
    assert waiting == {client for ids in made.tree.stragglers.values() for client in ids}
    assert waiting
    trained = [event for event in made.events if event["kind"] == "left_out" and event["round"] > 3]
    assert all(int(client) in inside for event in trained for client in event["clients"])


def test_newcomers_wait_at_the_root():
    state = CHOICE.init(
        torch.zeros(3), clients := ScriptedClients(dict.fromkeys(range(30), [0.0] * 3))
    )
    joined, events = CHOICE.join(state, [30, 31], clients, RoundPlan(4, LOCAL))
    assert joined.tree.nodes[0].members == tuple(range(32))
    assert events == [Joined(0, (30, 31))]


def test_too_few_rounds_are_said(caplog):
    run(rounds=2)
    assert "PrivateChoice needs 3 rounds until it has clustered the clients" in caplog.text


def test_a_sketch_that_the_model_or_the_memory_cannot_have_is_refused_before_round_1():
    rounds = []

    def refused(**settings):
        with pytest.raises(ConfigError) as caught:
            run(
                algorithm=PrivateChoice(clusters=3, **settings),
                on_round=lambda row, tree: rounds.append(row),
            )
        return str(caught.value)

    for sketch in (65, 10**6):
        rule = f"algorithm.sketch should be at most 64 for a model of 28 parameters, got {sketch}"
        assert refused(sketch=sketch) == rule
    assert refused(cells=10**9).startswith(
        "algorithm.cells = 1000000000 needs 1120.0 GB for the replies of 30 clients"
    )
    with pytest.raises(
        ConfigError,
        match=r"algorithm.sketch = 50000 needs 350.0 GB .*, but a round may use 1.0 GB; set",
    ):
        PrivateChoice(sketch=50_000).check(RunFacts(parameters=10**6, replies=30, memory=10**9))
    assert rounds == []
