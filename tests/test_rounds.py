from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

from fedclade import CFL, ConfigError, FedAvg, LocalSpec, ModelError, Oracle, UpdateError, simulate
from fedclade.algorithms import RoundLog, State
from fedclade.data.federation import Federation
from fedclade.rounds import describe
from fedclade.tree import ParameterTree
from tests.tiny import FEATURES, LABELS, federation_of, linear

TRUTH = [0, 1, 0, 1]
SPEC = LocalSpec(epochs=2, batch_size=10, lr=0.2)
SIZE = FEATURES * LABELS + LABELS
"""Entries of a linear model's vector."""


def run_of(algorithm="fedavg", federation: Federation | None = None, model=None, **settings):
    settings = {"local": SPEC, "rounds": 3} | settings
    return simulate(algorithm, model or linear(), federation or federation_of(TRUTH), **settings)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("rounds", 0, "at least 1"),
        ("seed", -1, "at least 0"),
        ("client_fraction", 0.0, "greater than 0 and at most 1"),
        ("client_fraction", 1.5, "greater than 0 and at most 1"),
        ("evaluate_every", 0, "at least 1"),
        ("target", 0.0, "greater than 0 and at most 1"),
        ("target", 1.01, "greater than 0 and at most 1"),
    ],
)
def test_a_setting_out_of_range_is_refused(name, value, rule):
    shown = "target.accuracy" if name == "target" else name
    with pytest.raises(ConfigError, match=re.escape(f"{shown} should be {rule}, got {value!r}")):
        run_of(**{name: value})


def test_an_unknown_algorithm_device_or_model_is_refused():
    with pytest.raises(ConfigError, match="unknown algorithm 'fedavq'; did you mean 'fedavg'"):
        run_of("fedavq")
    with pytest.raises(ConfigError, match="device should be auto, cpu or cuda, got 'gpu'"):
        run_of(device="gpu")
    with pytest.raises(ConfigError, match="unknown model 'mclrr'; did you mean 'mclr'"):
        run_of(model="mclrr")


def test_a_model_that_does_not_fit_and_training_that_diverges_are_refused():
    with pytest.raises(ModelError, match="got \\(2, 9\\)"):
        run_of(model=nn.Linear(FEATURES, 9))
    with pytest.raises(UpdateError, match="round 1: the update of client 0 has"):
        run_of(local=LocalSpec(lr=1e38, epochs=30, weight_decay=0.1))


def test_the_given_module_is_not_touched():
    module = linear()
    before = module[1].weight.clone()
    run_of(model=module)
    assert torch.equal(module[1].weight, before)


def test_a_modules_own_parameters_are_the_initial_ones():
    """One tiny step away from them."""
    run = run_of(rounds=1, local=LocalSpec(lr=1e-6))
    theta = torch.cat([linear()[1].weight.detach().flatten(), linear()[1].bias.detach()])
    torch.testing.assert_close(run.tree.nodes[0].params, theta, rtol=0, atol=1e-4)


def test_evaluation_every_second_round_and_after_the_last():
    run = run_of(rounds=5, evaluate_every=2)
    assert [row["accuracy_mean"] is not None for row in run.metrics] == [False, True, False, True, True]
    assert sorted({row["round"] for row in run.clients}) == [2, 4, 5]
    assert len(run.clients) == 3 * 4
    assert run.metrics[0].keys() == run.metrics[1].keys()
    assert run.metrics[0]["loss_mean"] is None
    assert all(row["train_loss"] > 0 for row in run.metrics)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_bytes_are_one_model_down_and_one_update_up_for_each_client_that_trains(fraction):
    """float32: 4 bytes an entry."""
    run = run_of(client_fraction=fraction)
    trained = round(4 * fraction)
    for row in run.metrics:
        assert row["clients_trained"] == trained
        assert row["bytes_up"] == row["bytes_down"] == trained * SIZE * 4
    assert run.summary["bytes_up"] == run.summary["bytes_down"] == 3 * trained * SIZE * 4


def test_a_split_round_pays_for_the_absent_members_too():
    run = run_of(CFL(eps2=1e-3, split_rounds=(2,)), client_fraction=0.5)
    assert [row["phase"] for row in run.metrics] == ["train", "split", "train"]
    assert [row["bytes_up"] for row in run.metrics] == [2 * SIZE * 4, 4 * SIZE * 4, 2 * SIZE * 4]
    assert [row["clusters"] for row in run.metrics] == [1, 2, 2]


def test_target_numbers_are_of_the_first_round_whose_mean_reaches_it():
    run = run_of("oracle", rounds=8)
    means = [row["accuracy_mean"] for row in run.metrics]
    target = means[4]
    first = next(k for k, mean in enumerate(means, start=1) if mean >= target)
    summary = run_of("oracle", rounds=8, target=target).summary["target"]
    assert summary["accuracy"] == target
    assert summary["rounds_to_target"] == first
    assert summary["bytes_to_target"] == first * 2 * 4 * SIZE * 4
    final = [row["accuracy"] for row in run.clients if row["round"] == 8]
    assert summary["share_of_clients"] == sum(accuracy >= target for accuracy in final) / 4


def test_a_target_that_is_never_reached_has_no_numbers():
    summary = run_of(rounds=1, local=LocalSpec(lr=1e-6), target=1.0).summary
    assert summary["target"] == {
        "accuracy": 1.0,
        "share_of_clients": 0.0,
        "rounds_to_target": None,
        "bytes_to_target": None,
    }


def test_the_summary_says_what_was_run_and_found():
    run = run_of("oracle", seed=3)
    final = [row["accuracy"] for row in run.clients if row["round"] == 3]
    assert run.summary["algorithm"] == "oracle"
    assert (run.summary["seed"], run.summary["rounds"], run.summary["clients"]) == (3, 3, 4)
    assert run.summary["accuracy"]["mean"] == pytest.approx(sum(final) / 4)
    assert run.summary["accuracy"]["min"] == min(final)
    assert run.summary["clusters"] == {"found": 2, "true": 2, "ari": 1.0, "nmi": 1.0, "sizes": [2, 2]}
    assert run.summary["target"]["accuracy"] is None
    seconds = run.summary["seconds"]
    assert seconds["total"] == pytest.approx(seconds["train"] + seconds["evaluate"] + seconds["server"])
    assert run.summary["device"] == "cpu"
    assert "torch" in run.summary["versions"]


@dataclasses.dataclass(frozen=True)
class Gathering(FedAvg):
    """FedAvg in one of two clusters, whose members join in round 2; the other cluster stays empty."""

    def init(self, params, clients):
        return State(ParameterTree.star([(), ()], params, unassigned=clients.ids))

    def step(self, state, cohort, clients, this_round):
        if this_round.number == 1:
            return state, RoundLog({}, {})
        return super().step(
            State(state.tree.reassigned(dict.fromkeys(clients.ids, 2))), clients.ids, clients, this_round
        )


def test_clients_in_no_cluster_yet_are_served_with_the_root_and_an_empty_cluster_is_not_counted():
    run = run_of(Gathering(), rounds=2)
    assert [(row["round"], row["served_by"]) for row in run.clients] == [
        *((1, 0) for _ in TRUTH),
        *((2, 2) for _ in TRUTH),
    ]
    assert [row["clusters"] for row in run.metrics] == [0, 1]
    assert [row["ari"] for row in run.metrics] == [0.0, 0.0]
    assert run.summary["clusters"]["found"] == 1
    assert run.summary["clusters"]["sizes"] == [4]


def test_without_a_truth_there_are_no_scores():
    run = run_of("fedavg", dataclasses.replace(federation_of(TRUTH), true_clusters=None))
    assert run.summary["clusters"] == {"found": 1, "true": None, "ari": None, "nmi": None, "sizes": [4]}
    assert {row["true_cluster"] for row in run.clients} == {None}
    assert {row["separation_gap"] for row in run.clusters} == {None}


def test_every_round_tells_norms_bounds_and_the_separation_gap_of_each_cluster():
    run = run_of(CFL(eps2=1e-3, split_rounds=(2,)), rounds=3)
    assert [(row["round"], row["node"], row["clients"]) for row in run.clusters] == [
        *((1, 0, 4), (2, 0, 4)),
        *((3, 1, 2), (3, 2, 2)),
    ]
    last = run.clusters[2:]
    assert run.metrics[2]["max_norm"] == max(row["max_norm"] for row in last)
    assert run.metrics[2]["mean_norm"] == max(row["mean_norm"] for row in last)
    assert run.metrics[2]["alpha_cross_max"] == min(row["alpha_cross_max"] for row in last)
    assert run.metrics[2]["separation_gap"] == max(row["separation_gap"] for row in last)
    assert all(row["separation_gap"] <= 0 for row in last), "finished clusters have no gap"


def test_the_similarities_kept_are_the_last_of_every_cluster():
    run = run_of(CFL(eps2=1e-3, split_rounds=(2,)), rounds=4)
    assert [(s.node, s.round, s.clients) for s in run.similarities] == [
        (0, 2, (0, 1, 2, 3)),
        (1, 4, (0, 2)),
        (2, 4, (1, 3)),
    ]


def test_events_are_kept_with_their_round():
    run = run_of(CFL(eps2=1e-3, split_rounds=(2,)))
    (event,) = run.events
    assert (event["round"], event["kind"], event["node"]) == (2, "split", 0)
    assert event["clusters"] == [[0, 2], [1, 3]]
    assert event["children"] == [1, 2]


def test_on_round_is_called_after_every_round():
    seen = []
    run = run_of("local", on_round=lambda row, tree: seen.append((row["round"], len(tree.leaves))))
    assert seen == [(1, 4), (2, 4), (3, 4)]
    assert len(run.tree.leaves) == 4


def test_the_rows_of_clients_say_who_serves_them():
    run = run_of("oracle", rounds=1)
    assert [
        (row["client"], row["cluster"], row["served_by"], row["true_cluster"], row["n_train"]) for row in run.clients
    ] == [
        *((0, 1, 1, 0, 24), (1, 2, 2, 1, 24)),
        *((2, 1, 1, 0, 24), (3, 2, 2, 1, 24)),
    ]


def test_fallback_is_evaluated_with_the_served_model():
    """At most as many right answers on validation data as the served model; the row names it."""
    run = run_of(CFL(eps2=1e-3, split_rounds=(1,), fallback=True), rounds=2)
    assert {row["served_by"] for row in run.clients} <= {0, 1, 2}
    assert {row["cluster"] for row in run.clients} == {1, 2}


def test_a_language_model_is_told_by_its_perplexity():
    federation = federation_of([0, 0])
    n = len(federation.pool.x)
    tokens = torch.randint(1, 5, (n, 3), generator=torch.Generator().manual_seed(0))
    pool = dataclasses.replace(federation.pool, x=tokens, y=tokens, outputs=5, task="language")
    run = run_of("fedavg", dataclasses.replace(federation, pool=pool), nn.Embedding(5, 5), evaluate_every=2)
    losses = torch.tensor([row["loss"] for row in run.clients if row["round"] == 3])
    assert run.summary["perplexity"]["mean"] == pytest.approx(float(losses.exp().mean()))
    assert run.summary["perplexity"]["max"] == pytest.approx(float(losses.exp().max()))
    assert run.metrics[0]["perplexity_mean"] is None


@pytest.mark.parametrize("engine", ["stacked", "vmap", "loop"])
def test_the_engine_changes_nothing_but_rounding_and_is_recorded(engine):
    run, expected = run_of(engine=engine), run_of(engine="loop", memory="1KB")
    torch.testing.assert_close(run.tree.nodes[0].params, expected.tree.nodes[0].params, rtol=1e-4, atol=1e-6)
    assert run.summary["engine"] == run.config["engine"] == engine


def test_of_auto_the_engine_is_recorded_that_was_taken():
    run = run_of()
    assert run.summary["engine"] == run.config["engine"]
    assert run.config["engine"] in ("stacked", "loop")


def test_an_engine_or_memory_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=re.escape("unknown engine 'vamp'; did you mean 'vmap'?")):
        run_of(engine="vamp")
    with pytest.raises(ConfigError, match="memory should be a size such as 2GB, 500MiB or a number of bytes, got 'x'"):
        run_of(memory="x")


def test_describe_gives_name_and_hyper_parameters_but_not_the_oracles_truth():
    assert describe(CFL(eps2=0.5))["name"] == "cfl"
    assert describe(CFL(eps2=0.5))["eps2"] == 0.5
    assert describe(Oracle({0: 1})) == {"name": "oracle"}


def test_the_config_is_put_together_from_the_arguments():
    run = run_of(CFL(eps2=0.5), client_fraction=0.5, target=0.9, permute=True)
    assert run.config["algorithm"]["eps2"] == 0.5
    assert run.config["local"]["lr"] == 0.2
    assert run.config["client_fraction"] == 0.5
    assert run.config["target"] == {"accuracy": 0.9}
    assert run.config["privacy"] == {"permute": True}
    assert run.config["versions"]["torch"] == torch.__version__
