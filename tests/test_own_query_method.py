"""The example of a method with a kind of client answer of its own: in simulations, on Ray actors and over Flower."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict

import fedclade
from fedclade import ConfigError, DifferentialPrivacy, RowQuery, UpdateError
from fedclade.channel import Channel, Lying, client_side, privatizing
from fedclade.data import LabelFlip, poison_federation
from fedclade.flower import wire
from fedclade.flower.kinds import KINDS
from tests.flower.grids import federated, grid_of, network_of, reasons, spoil
from tests.tiny import LABELS, federation_of, linear, perceptron, simulated

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_query_method.py"
OWN = runpy.run_path(str(EXAMPLE), run_name="example")
Query: type[RowQuery] = OWN["LabelHistogramQuery"]
Method: type[fedclade.Algorithm] = OWN["HistogramKMeans"]

FOUR = (0, 0, 1, 1)
ALLOWED = {"allow": "train evaluate label_histograms"}
SECURE = {
    **ALLOWED,
    "secure-aggregation": True,
    "trust-server-keys": True,
    "min-honest": 2,
    "max-colluders": 0,
}


def with_other_labels() -> fedclade.Federation:
    """Return four clients, of which the last two see every label as label 3."""
    federation = federation_of(FOUR)
    one_label = torch.full((LABELS,), 3)
    clients = [replace(c, label_map=one_label) if c.id > 1 else c for c in federation.clients]
    return replace(federation, clients=tuple(clients))


FEDERATION = with_other_labels()


@pytest.fixture
def own_kind() -> Iterator[dict[str, Any]]:
    """Yield the settings of an app that knows the kind, and let the process forget it afterwards."""
    yield {"queries": [Query]}
    KINDS.pop(Query.kind, None)


def leaves(run: fedclade.Run) -> list[tuple[int, ...]]:
    return sorted(leaf.members for leaf in run.tree.leaves)


def test_a_method_with_an_answer_of_its_own_is_one_file_with_public_names():
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 120
    assert "from fedclade." not in source, "what authors need is exported from fedclade itself"


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_it_runs_in_a_simulation(engine: str):
    run = fedclade.simulate(Method(), perceptron, FEDERATION, rounds=2, engine=engine)
    assert leaves(run) == [(0, 1), (2, 3)]


def test_each_client_answers_with_the_shares_of_the_labels_that_it_sees():
    rows = simulated(FEDERATION, linear())[0].ask(Query([2, 0]))
    _, targets = FEDERATION.examples(0, "train")
    assert rows[0].tolist() == [0, 0, 0, 1]
    assert rows[1].tolist() == [float((targets == label).float().mean()) for label in range(LABELS)]


@pytest.mark.slow
def test_it_runs_on_ray_actors():
    pytest.importorskip("ray")
    actors = fedclade.Actors(count=2, cores=1)
    there = fedclade.simulate(
        Method(), perceptron, FEDERATION, rounds=2, engine="ray", actors=actors
    )
    here = fedclade.simulate(Method(), perceptron, FEDERATION, rounds=2, engine="loop")
    assert leaves(there) == leaves(here) == [(0, 1), (2, 3)]


def test_it_runs_over_a_network_if_policies_name_the_kind(own_kind: dict[str, Any]):
    run = federated(grid_of(FEDERATION, config=ALLOWED, **own_kind), Method(), rounds=2)
    here = fedclade.simulate(Method(), perceptron, FEDERATION, rounds=2, engine="loop")
    assert leaves(run) == leaves(here) == [(0, 1), (2, 3)]
    assert not reasons(run)


def test_the_default_policy_refuses_it(own_kind: dict[str, Any]):
    why = r"all 4 clients refuse the query 'label_histograms'.*allow=\"train evaluate statistics label_histog"
    with pytest.raises(UpdateError, match=why):
        federated(grid_of(FEDERATION, **own_kind), Method(), rounds=2)


def test_an_app_that_does_not_know_the_kind_refuses_it(own_kind: dict[str, Any]):
    grid = grid_of(FEDERATION)
    with pytest.raises(
        UpdateError,
        match=r"'label_histograms', which is of an unknown kind; .*client_app\(queries=",
    ):
        federated(grid, Method(), rounds=2)


def test_a_client_with_secure_aggregation_discloses_it_if_its_policy_says_so(
    own_kind: dict[str, Any],
):
    def run(config: dict[str, Any]) -> fedclade.Run:
        grid = grid_of(FEDERATION, config=config, **own_kind)
        network = network_of(grid, secure_aggregation=True, secure_fewest=2, secure_colluders=0)
        return federated(grid, Method(), rounds=1, network=network)

    with pytest.raises(
        UpdateError, match=r'all 4 clients refuse .* disclose="label_histograms" in its node config'
    ):
        run(SECURE)
    assert leaves(run({**SECURE, "disclose": "label_histograms"})) == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    "change",
    [
        lambda row: 2 * row,
        lambda row: -row,
        lambda row: row[:-1],
        lambda row: torch.full_like(row, torch.nan),
    ],
    ids=["too large", "negative", "too short", "not finite"],
)
def test_an_answer_that_is_no_histogram_counts_as_none(own_kind: dict[str, Any], change: Any):
    def spoilt(honest: RecordDict) -> RecordDict:
        row = torch.frombuffer(
            bytearray(honest["vectors"]["label_histograms"].data), dtype=torch.float32
        )
        vectors = ArrayRecord({"label_histograms": wire.raw_vector(change(row).contiguous())})
        return RecordDict({**honest, "vectors": vectors})

    grid = grid_of(FEDERATION, config=ALLOWED, **own_kind)
    spoil(grid, 3, "label_histograms", spoilt)
    run = federated(grid, Method(), rounds=1)
    assert leaves(run) == [(0, 1), (2,)]
    assert reasons(run) == {3: "dropped out"}


def test_a_private_client_refuses_it():
    privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)
    clients, _ = simulated(FEDERATION, linear())
    sizes = dict(FEDERATION.sizes)
    private = Channel(clients, *client_side(privatizing(privacy, sizes, FEDERATION.keys)))
    with pytest.raises(
        ConfigError, match="with differential privacy do not reveal shares of their labels"
    ):
        private.ask(Query([0]))
    with pytest.raises(ConfigError, match="do not reveal shares of their labels"):
        fedclade.simulate(Method(), perceptron, FEDERATION, rounds=1, privacy=privacy)


def test_the_answer_of_an_adversary_is_about_its_poisoned_data():
    held = poison_federation(FEDERATION, [2], LabelFlip.of(FEDERATION.pool), 0)
    clients, _ = simulated(held, linear())
    lying = Lying(fedclade.Adversary(kind="label_flip", share=0.25), [2], FEDERATION.keys)
    honest, false = clients.ask(Query([3, 2])), Channel(clients, lying).ask(Query([3, 2]))
    assert torch.equal(false[0], honest[0])
    assert honest[1].tolist() == [0, 0, 0, 1]
    assert false[1].tolist() == [1, 0, 0, 0]
