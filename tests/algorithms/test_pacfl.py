"""PACFL: against the paper's steps, and what each kind of angle can see."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade import (
    PACFL,
    Adversary,
    ConfigError,
    FedAvg,
    LocalTraining,
    Oracle,
    RunFacts,
    load_federation,
    simulate,
)
from fedclade.algorithms import SubspaceQuery
from fedclade.clustering.similarity import compute_angles, compute_nearest_angles
from fedclade.data.federation import ClientData, Federation, Pool
from fedclade.report.curves import Merges, clustering_step, dendrogram_picture
from fedclade.report.run_view import RunView
from tests.reference.pacfl import (
    distance_of_code,
    distance_of_paper,
    distance_per_label,
    hierarchical_clustering,
    principal_vectors,
)
from tests.tiny import Around, Metered, details, play, simulated

SPEC = LocalTraining(epochs=1, batch_size=10, lr=0.1)
D, LABELS, P = 12, 4, 2


def federation(kind: str, clients: int = 8, examples: int = 40) -> Federation:
    """Two true clusters, of even and odd clients, that differ in their labels or in their inputs.

    The inputs of each label scatter about a centre; the centres lie at different distances from zero, so that the
    order of singular vectors is clear.
    """
    draw = np.random.default_rng(1)
    y = draw.integers(LABELS, size=clients * examples)
    centres = np.array([[8], [5], [3], [1.5]]) * draw.normal(size=(LABELS, D))
    x = (centres[y] + 0.5 * draw.normal(size=(len(y), D))).astype(np.float32)
    odd = np.repeat(np.arange(clients) % 2, examples) == 1
    if kind == "inputs":
        x[odd] = np.roll(x[odd], 3, axis=1)
    swapped = torch.tensor([1, 0, 2, 3]) if kind == "labels" else None
    parts = np.split(np.arange(len(y)), clients)
    data = [
        ClientData(i, f"c{i}", i, part[:-10], part[:0], part[-10:], swapped if i % 2 else None)
        for i, part in enumerate(parts)
    ]
    pool = Pool(
        "made up",
        torch.from_numpy(x),
        torch.from_numpy(y),
        y,
        np.arange(len(y)),
        np.arange(0),
        LABELS,
    )
    return Federation(pool, tuple(data), {i: i % 2 for i in range(clients)}, "made up")


def found(world: Federation, **options) -> set[frozenset[int]]:
    clients, _ = simulated(world, torch.nn.Linear(D, LABELS))
    state = play(
        PACFL(**options), clients, clients.layout.flatten(torch.nn.Linear(D, LABELS)), 1, spec=SPEC
    ).states[-1]
    return {frozenset(leaf.members) for leaf in state.tree.leaves}


TRUE = {frozenset(range(0, 8, 2)), frozenset(range(1, 8, 2))}
DISTANCES = [
    {"distance": "paper", "angle": "smallest"},
    {"distance": "paper", "angle": "same_place"},
    {"distance": "code", "angle": "smallest"},
    {"distance": "per_label", "angle": "smallest"},
    {"distance": "per_label", "angle": "same_place"},
]
PER_LABEL = PACFL(distance="per_label")


def distances_by_hand(world: Federation, distance: str, angle: str) -> np.ndarray:
    """The distance of every two clients by the literal twin of one kind of distance."""
    twins = {
        "paper": lambda U, V: distance_of_paper(U, V, angle),
        "code": distance_of_code,
        "per_label": lambda U, V: distance_per_label(U, V, angle),
    }
    labels = [None] if distance == "paper" else range(LABELS)
    vectors = {i: [principal_vectors(world, i, P, label) for label in labels] for i in world.ids}
    by_hand = np.zeros((len(world.ids), len(world.ids)))
    for row, i in enumerate(world.ids):
        for column, j in enumerate(world.ids):
            by_hand[row, column] = twins[distance](vectors[i], vectors[j]) if i != j else 0.0
    return by_hand


@pytest.mark.parametrize("options", DISTANCES)
def test_each_distance_equals_its_literal_twin(options):
    world = federation("labels")
    clients, _ = simulated(world, torch.nn.Linear(D, LABELS))
    method = PACFL(vectors=P, **options)
    found = method._compute_distances(clients.ask(SubspaceQuery(world.ids, P, method.per_label)))
    np.testing.assert_allclose(found, distances_by_hand(world, **options), atol=1e-2)
    np.testing.assert_allclose(found, found.T, atol=1e-9)


@pytest.mark.parametrize("options", DISTANCES)
@pytest.mark.parametrize("threshold", [5.0, 15.0, 25.0, 40.0, 90.0])
def test_clusters_equal_those_by_hand_at_every_threshold(options, threshold):
    world = federation("inputs")
    by_hand = hierarchical_clustering(distances_by_hand(world, **options), threshold)
    assert found(world, vectors=P, threshold=threshold, **options) == by_hand


def test_the_default_is_the_distance_of_the_paper():
    assert PACFL().distance == "paper"
    assert not PACFL().per_label
    world = federation("inputs")
    assert found(world, vectors=P, n_clusters=2) == found(
        world, vectors=P, n_clusters=2, distance="paper"
    )


@pytest.mark.parametrize("options", DISTANCES)
def test_only_the_variant_per_label_finds_swapped_labels(options):
    clusters = found(federation("labels"), vectors=P, n_clusters=2, **options)
    assert (clusters == TRUE) is (options["distance"] == "per_label")


@pytest.mark.parametrize("angle", ["smallest", "same_place"])
def test_the_distance_of_the_paper_finds_other_inputs(angle):
    assert found(federation("inputs"), vectors=P, n_clusters=2, angle=angle) == TRUE


def test_the_distance_of_the_code_finds_other_labels_of_the_same_inputs():
    """Clients with labels 0 and 1, and clients with labels 2 and 3: the case of the authors' script."""
    world = federation("labels")
    y = world.pool.y
    keep = {True: y < 2, False: y >= 2}
    clients = tuple(
        replace(c, train=c.train[keep[c.id % 2 == 0][c.train].numpy()], label_map=None)
        for c in world.clients
    )
    assert found(replace(world, clients=clients), vectors=1, n_clusters=2, distance="code") == TRUE


def test_a_label_that_a_client_lacks_does_not_count_in_the_distance_of_the_code():
    """Two labels in two dimensions: client 1 lacks the second one, and has its one vector at 60° and 30° to those."""
    vectors = torch.zeros(2, 2, 2, 1)
    vectors[0, 0, :, 0] = torch.tensor([1.0, 0.0])
    vectors[0, 1, :, 0] = torch.tensor([0.0, 1.0])
    vectors[1, 0, :, 0] = torch.tensor([-0.5, -(0.75**0.5)])
    assert compute_nearest_angles(vectors)[0, 1] == pytest.approx(30, abs=1e-4)
    assert compute_nearest_angles(vectors)[1, 0] == pytest.approx(30, abs=1e-4)


def test_the_number_of_clusters_is_found():
    assert found(federation("labels"), distance="per_label") == TRUE
    assert found(federation("inputs")) == TRUE


def test_mnist_like_label_swaps_are_found_on_digits():
    world = load_federation("digits", clients=12, shift="label_swap", clusters=3, seed=0)
    run = simulate(PER_LABEL, "mclr", world, local=SPEC, rounds=2, seed=0)
    assert run.summary["clusters"] | {"sizes": None} == {
        "found": 3,
        "true": 3,
        "ari": 1.0,
        "nmi": 1.0,
        "sizes": None,
    }
    assert [event["kind"] for event in run.events] == ["clustered"]


def test_each_cluster_is_trained_as_the_oracle_trains_it():
    world = federation("labels")
    clients, params = simulated(world, torch.nn.Linear(D, LABELS))
    ours = play(PER_LABEL, clients, params, 3, spec=SPEC, seed=2).states[-1].tree
    oracle = (
        play(Oracle(world.true_clusters), clients, params, 3, spec=SPEC, seed=2).states[-1].tree
    )
    assert [node.members for node in ours.nodes] == [node.members for node in oracle.nodes]
    assert all(
        torch.equal(a.params, b.params) for a, b in zip(ours.leaves, oracle.leaves, strict=True)
    )


def test_where_it_finds_one_cluster_it_is_fedavg():
    """As with swapped labels, which the distances of the paper and of the code do not see."""
    world = federation("labels")
    clients, params = simulated(world, torch.nn.Linear(D, LABELS))
    fedavg = play(FedAvg(), clients, params, 3, spec=SPEC, seed=2).states[-1].tree
    for distance in ("paper", "code"):
        ours = (
            play(PACFL(distance=distance, n_clusters=1), clients, params, 3, spec=SPEC, seed=2)
            .states[-1]
            .tree
        )
        assert torch.equal(ours.leaves[0].params, fedavg.nodes[0].params)


def test_all_clients_are_compared_once_whoever_is_in_the_cohort():
    clients, params = simulated(federation("labels"), torch.nn.Linear(D, LABELS))
    played = play(PER_LABEL, clients, params, 3, spec=SPEC, fraction=0.25)
    assert {frozenset(leaf.members) for leaf in played.states[1].tree.leaves} == TRUE
    assert [call.ids for call in played.clients.calls if call.what == "subspaces"] == [
        tuple(range(8))
    ]
    assert [len(log.losses) for log in played.logs] == [2, 2, 2]


def test_labels_that_one_of_two_lacks_count_as_90_degrees_and_those_that_both_lack_not_at_all():
    """Three labels in two dimensions: both hold the first, one the second, none the third."""
    vectors = torch.zeros(2, 3, 2, 1)
    vectors[0, 0, :, 0] = torch.tensor([1.0, 0.0])
    vectors[1, 0, :, 0] = torch.tensor([0.5, 0.75**0.5])
    vectors[1, 1, :, 0] = torch.tensor([0.0, 1.0])
    for angle in ("smallest", "same_place"):
        assert compute_angles(vectors, angle)[0, 1] == pytest.approx((60 + 90) / 2, abs=1e-4)


@given(st.integers(0, 2**31), st.integers(1, 4))
@settings(max_examples=20)
def test_signs_of_vectors_mean_nothing_and_angles_lie_between_0_and_90(seed, p):
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(3, 2, 6, p, generator=draw))[0]
    signs = torch.randint(0, 2, (3, 2, 1, p), generator=draw) * 2.0 - 1
    for angle in ("smallest", "same_place"):
        plain = compute_angles(vectors, angle)
        np.testing.assert_allclose(compute_angles(vectors * signs, angle), plain, atol=1e-4)
        assert plain.min() >= 0
        assert plain.max() <= 90


def test_few_clients_make_one_cluster_unless_told_otherwise():
    for n in (1, 2, 3):
        assert found(federation("labels", clients=n)) == {frozenset(range(n))}
    assert found(federation("labels", clients=1), threshold=3.0) == {frozenset([0])}
    assert found(federation("labels", clients=2), n_clusters=2) == {frozenset([0]), frozenset([1])}


def test_clients_that_all_see_the_same_are_one_cluster():
    world = federation("labels")
    assert found(
        replace(world, clients=tuple(replace(c, label_map=None) for c in world.clients))
    ) == {frozenset(range(8))}


def test_the_event_tells_what_a_dendrogram_needs():
    clients, params = simulated(federation("labels"), torch.nn.Linear(D, LABELS))
    (event,) = play(PER_LABEL, clients, params, 1, spec=SPEC).logs[0].events
    assert (event.kind, event.node, details(event)["metric"], details(event)["linkage"]) == (
        *("clustered", 0, "angle", "average"),
    )
    assert (details(event)["sizes"], details(event)["clients"]) == ([4, 4], list(range(8)))
    heights = [height for _, _, height in details(event)["merges"]]
    assert heights[5] < details(event)["threshold"] < heights[6]


def test_its_dendrogram_shows_angles_and_the_clusters_that_were_trained():
    world = load_federation("digits", clients=12, shift="label_swap", clusters=3, seed=0)
    run = simulate(PER_LABEL, "mclr", world, local=SPEC, rounds=2, seed=0)
    found = clustering_step(run)
    assert found is not None
    at, step = found
    assert dict(zip(step.clients, Merges(run, at, step).found, strict=True)) == run.tree.leaf_of
    assert len(run.tree.leaves) == 3
    picture = dendrogram_picture(RunView(run), at, step)
    assert picture.title == "Dendrogram of the clients’ data, round 1"
    assert picture.panels[0].y.title == "angle in degrees, average linkage"


def test_more_clusters_than_clients_and_a_threshold_beside_a_number_are_refused():
    text = re.escape("algorithm.n_clusters should be at most the number of clients, 2, got 3")
    with pytest.raises(ConfigError, match=text):
        PACFL(n_clusters=3).check(RunFacts(clients=2))
    with pytest.raises(
        ConfigError, match=r"algorithm\.threshold should be left out if n_clusters is set, got 10"
    ):
        PACFL(n_clusters=3, threshold=10.0)


def test_clients_with_few_examples_of_a_label_are_compared_by_what_they_have():
    """One or two examples of a label, or none, against three vectors."""
    world = federation("labels")
    clients = tuple(replace(c, train=c.train[: 6 if c.id < 4 else 30]) for c in world.clients)
    assert (
        found(replace(world, clients=clients), vectors=3, n_clusters=2, distance="per_label")
        == TRUE
    )


def test_the_meter_counts_the_vectors():
    world = federation("labels")
    metered = Metered(simulated(world, torch.nn.Linear(D, LABELS))[0])
    metered.ask(SubspaceQuery(world.ids, P, per_label=True))
    assert metered.meter.readings()["bytes_up"] == 8 * LABELS * D * P * 4
    assert metered.meter.readings()["bytes_down"] == 0
    assert metered.meter.readings()["seconds_train"] > 0


def test_permuted_clients_send_the_same_vectors():
    plain, hidden = (
        simulate(PER_LABEL, "mclr", federation("labels"), local=SPEC, rounds=2, permute=permute)
        for permute in (False, True)
    )
    assert plain.tree.nodes
    for ours, theirs in zip(plain.tree.nodes, hidden.tree.nodes, strict=True):
        assert ours.members == theirs.members
        torch.testing.assert_close(ours.params, theirs.params, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("vectors", 0, "at least 1"),
        ("angle", "largest", "'smallest' or 'same_place'"),
        ("distance", "per label", "'paper', 'code' or 'per_label'"),
        ("threshold", 91.0, "greater than 0 and at most 90 degrees, or 'auto'"),
        ("threshold", 0.0, "greater than 0 and at most 90 degrees, or 'auto'"),
        ("threshold", "automatic", "greater than 0 and at most 90 degrees, or 'auto'"),
        ("n_clusters", 0, "at least 1"),
        ("set_apart", 0.5, "at least 0 and below 0.5, or left out"),
    ],
)
def test_an_option_out_of_range_is_refused(option, value, rule):
    with pytest.raises(
        ConfigError, match=re.escape(f"algorithm.{option} should be {rule}, got {value!r}")
    ):
        PACFL(**{option: value})


def test_an_angle_that_does_not_suit_the_distance_of_the_code_is_refused():
    text = "algorithm.angle should be 'smallest' if distance is 'code', got 'same_place'"
    with pytest.raises(ConfigError, match=re.escape(text)):
        PACFL(distance="code", angle="same_place")


class Shy(Around):
    """Clients of whom some do not send their vectors the first so many times that they are asked."""

    def __init__(self, clients, times: dict[int, int]) -> None:
        super().__init__(clients)
        self.times, self.asked = dict(times), []
        self.train, self.evaluate = clients.train, clients.evaluate

    def data(self, query):
        self.asked.append(tuple(query.ids))
        vectors = super().data(query)
        for place, client in enumerate(query.ids):
            self.times[client] = self.times.get(client, 0) - 1
            vectors[place] *= self.times[client] < 0
        return vectors


def shy(times: dict[int, int], rounds: int, **options):
    world = federation("labels")
    clients, params = simulated(world, torch.nn.Linear(D, LABELS))
    shy = Shy(clients, times)
    return play(PACFL(distance="per_label", **options), shy, params, rounds, spec=SPEC, seed=2), shy


def test_who_sends_no_vectors_waits_and_then_joins_whom_it_is_like():
    played, clients = shy({0: 1, 3: 2}, 4)
    everybody = tuple(sorted(federation("labels").ids))
    members = tuple(client for client in everybody if client not in (0, 3))
    assert clients.asked == [everybody, (0, 3), members, (3,), tuple(sorted({*members, 0}))]
    assert [state.tree.stragglers for state in played.states[1:]] == [
        {0: (0, 3)},
        {0: (3,)},
        {},
        {},
    ]
    assert played.logs[0].losses.keys() == set(federation("labels").ids) - {0, 3}
    assert [event.kind for log in played.logs for event in log.events] == [
        "clustered",
        "joined",
        "joined",
    ]
    assert {frozenset(leaf.members) for leaf in played.states[-1].tree.leaves} == TRUE


def test_who_still_sends_nothing_goes_on_waiting_and_troubles_nobody():
    played, clients = shy({0: 9}, 3)
    assert clients.asked[1:] == [(0,), (0,)]
    assert played.states[-1].tree.stragglers == {0: (0,)}


def test_too_few_vectors_leave_the_clusters_to_the_next_round():
    everybody = federation("labels").ids
    played, _ = shy(dict.fromkeys(everybody[1:], 1), 2, n_clusters=2)
    assert [(e.kind, details(e)) for e in played.logs[0].events] == [
        ("postponed", {"clients": 1, "needed": 2})
    ]
    assert len(played.states[1].tree.nodes) == 1
    assert played.logs[0].losses.keys() == set(everybody)
    assert {frozenset(leaf.members) for leaf in played.states[2].tree.leaves} == TRUE


def test_vectors_that_both_clients_lack_do_not_count():
    """Of p = 3 vectors both clients have two, which are 30° and 60° apart; of another label one has one, alone."""
    turn = torch.deg2rad(torch.tensor([30.0, 60.0]))
    vectors = torch.zeros(2, 2, 4, 3)
    vectors[0, 0, 0, 0] = vectors[0, 0, 2, 1] = 1
    vectors[1, 0, [0, 1], 0] = torch.stack([turn[0].cos(), turn[0].sin()])
    vectors[1, 0, [2, 3], 1] = torch.stack([turn[1].cos(), turn[1].sin()])
    assert compute_angles(vectors, "same_place")[0, 1] == pytest.approx(45.0, abs=1e-4)
    vectors[0, 1, 0, 0] = 1
    assert compute_angles(vectors, "same_place")[0, 1] == pytest.approx((45 + 90) / 2, abs=1e-4)


def per_label(**options) -> PACFL:
    return PACFL(distance="per_label", **options)


RANDOM = Adversary(lies="subspaces", share=0.08)
DIGITS = load_federation(
    "digits", clients=12, samples_per_client=60, shift="label_swap", clusters=2
)
RUN = {"rounds": 1, "local": SPEC, "seed": 2}


def members_of(run) -> set[tuple[int, ...]]:
    return {leaf.members for leaf in run.tree.leaves if leaf.members}


def test_random_subspaces_do_not_join_the_clusters_of_others():
    """They are far from all others, so the largest gap is below them: all others would be one cluster."""
    honest = members_of(simulate(PER_LABEL, "mclr", DIGITS, **RUN))
    attacked = simulate(PER_LABEL, "mclr", DIGITS, adversary=RANDOM, **RUN)
    (adversary,) = attacked.summary["adversary"]["ids"]
    without = {tuple(c for c in members if c != adversary) for members in honest} - {()}
    assert len(without) > 1
    assert members_of(attacked) == {*without, (adversary,)}
    (event,) = [event for event in attacked.events if event["kind"] == "set_apart"]
    assert event["clients"] == [adversary]
    assert event["distance"] > 2 * event["usual"]
    assert attacked.tree.leaf_of[adversary] == event["node"]
    open_to_it = members_of(
        simulate(per_label(set_apart=0.0), "mclr", DIGITS, adversary=RANDOM, **RUN)
    )
    assert open_to_it == {(adversary,), tuple(c for c in DIGITS.ids if c != adversary)}


@pytest.mark.parametrize("options", [{"threshold": 16.0}, {"n_clusters": 2}])
def test_what_the_paper_says_is_done_where_its_threshold_or_a_number_is_given(options):
    given = members_of(simulate(per_label(**options), "mclr", DIGITS, adversary=RANDOM, **RUN))
    assert given == members_of(
        simulate(per_label(**options, set_apart=0.0), "mclr", DIGITS, adversary=RANDOM, **RUN)
    )
    apart = simulate(per_label(**options, set_apart=0.2), "mclr", DIGITS, adversary=RANDOM, **RUN)
    assert [event["kind"] for event in apart.events].count("set_apart") == 1


def test_honest_clients_are_clustered_the_same_with_and_without():
    with_it, without = (
        simulate(per_label(set_apart=share), "mclr", DIGITS, **RUN) for share in (0.2, 0.0)
    )
    assert [event["kind"] for event in with_it.events] == ["clustered"]
    for one, other in zip(with_it.tree.nodes, without.tree.nodes, strict=True):
        assert one.members == other.members
        assert torch.equal(one.model, other.model)
