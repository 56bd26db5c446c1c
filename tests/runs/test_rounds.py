from __future__ import annotations

import dataclasses
import re
from importlib.metadata import version

import pytest
import torch
from torch import nn

import fedclade
from fedclade import (
    CFL,
    ConfigError,
    FedAvg,
    LocalTraining,
    ModelError,
    Oracle,
    Requires,
    Run,
    RunError,
    RunInterrupted,
    Signature,
    UpdateError,
    simulate,
)
from fedclade.algorithms import IFCA, PACFL, FedGroup, Local, RoundLog, State, describe
from fedclade.core.queries import RoundPlan
from fedclade.core.tree import ParameterTree
from fedclade.data.federation import Federation
from fedclade.models import build_model
from fedclade.runs.evaluation import panel
from tests.tiny import FEATURES, LABELS, federation_of, linear, simulated

TRUTH = [0, 1, 0, 1]
SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
SIZE = FEATURES * LABELS + LABELS
"""Entries of a linear model's vector."""


def run_of(algorithm="fedavg", federation: Federation | None = None, model=None, **settings):
    settings = {"local": SPEC, "rounds": 3} | settings
    return simulate(algorithm, model or linear(), federation or federation_of(TRUTH), **settings)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("rounds", -1, "at least 0"),
        ("seed", -1, "at least 0"),
        ("client_fraction", 0.0, "greater than 0 and at most 1"),
        ("client_fraction", 1.5, "greater than 0 and at most 1"),
        ("evaluate_every", 0, "at least 1"),
        ("evaluate_clients", 0, "at least 1, or left out for all"),
        ("min_clients", 0, "at least 1"),
        ("target", 0.0, "greater than 0 and at most 1"),
        ("target", 1.01, "greater than 0 and at most 1"),
        ("stream", "yes", "true, false or 'auto'"),
        ("checkpoint_every", -1, "a number of rounds, 0 for none, or 'auto'"),
        ("checkpoint_every", "often", "a number of rounds, 0 for none, or 'auto'"),
    ],
)
def test_a_setting_out_of_range_is_refused(name, value, rule):
    shown = "target.accuracy" if name == "target" else name
    with pytest.raises(ConfigError, match=re.escape(f"{shown} should be {rule}, got {value!r}")):
        run_of(**{name: value})


def test_an_unknown_algorithm_device_or_model_is_refused():
    with pytest.raises(ConfigError, match="unknown algorithm 'fedavq'; did you mean 'fedavg'"):
        run_of("fedavq")
    with pytest.raises(ConfigError, match=r"device should be auto, cpu, cuda, or .*, got 'gpu'"):
        run_of(device="gpu")
    with pytest.raises(ConfigError, match="unknown model 'mclrr'; did you mean 'mclr'"):
        run_of(model="mclrr")


def test_a_model_that_does_not_fit_and_training_that_diverges_are_refused():
    with pytest.raises(ModelError, match="got \\(2, 9\\)"):
        run_of(model=nn.Linear(FEATURES, 9))
    text = (
        r"round 1: no client replied to any of 3 queries: client 0: (\d+) of \1 entries of the update are NaN or "
        r"infinite \(and \d+ more with a similar reason\); if training diverged, lower local.lr"
    )
    with pytest.raises(UpdateError, match=text):
        run_of(local=LocalTraining(lr=1e38, epochs=30, weight_decay=0.1))


def test_a_model_that_diverges_on_the_server_ends_the_run_and_is_named():
    """Every update is finite, but the step along the other groups' models takes their entries beyond float32."""
    text = (
        r"round 1: the model of cluster [12] has diverged: \d+ of its \d+ entries are NaN or infinite; its clients are "
        r"\[\d.*\]; lower the step size local.lr, or algorithm.eta_g if the algorithm has this setting"
    )
    with pytest.raises(RunError, match=text):
        run_of(TwoGroups(groups=2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoGroups(FedGroup):
    """FedGroup whose steps along other groups are infinite, as those of many rounds with a huge eta_g may become."""

    def step(self, state: State, cohort, clients, this_round: RoundPlan) -> tuple[State, RoundLog]:
        state, log = super().step(state, cohort, clients, this_round)
        leaf = state.tree.leaves[0]
        return State(state.tree.with_model(leaf.id, leaf.params * torch.inf)), log


def test_a_huge_step_along_other_groups_ends_in_an_error_that_names_the_fix():
    with pytest.raises((RunError, UpdateError), match=r"lower (the step size )?local\.lr"):
        run_of(FedGroup(groups=2, eta_g=1e30), model="mlp", rounds=4)


def test_losses_that_are_not_finite_are_told_of_as_training_and_evaluation_meet_them(caplog):
    """Products of the two layers' weights are beyond float32: first the test losses are, then nobody can train."""
    with pytest.raises(UpdateError, match="no client replied to any of"):
        run_of(FedGroup(groups=2, eta_g=1e30), model="mlp", rounds=4)
    assert (
        "round 1: the test losses of 4 of 4 clients are NaN or infinite, the first of them for client 0"
        in caplog.text
    )


def test_several_initial_models_that_take_more_than_the_memory_are_refused():
    text = "IFCA starts from 2000000 models, which take 0.2 GB, but the run is limited to 0.0 GB; use fewer"
    with pytest.raises(ConfigError, match=re.escape(text)):
        run_of(IFCA(restarts=10**6), model=linear, memory="10MB")


def test_more_clusters_than_clients_are_refused_before_a_model_is_made():
    with pytest.raises(
        ConfigError,
        match=re.escape("algorithm.clusters should be at most the number of clients, 4"),
    ):
        run_of(IFCA(clusters=10**9), model=linear)
    with pytest.raises(
        ConfigError,
        match=re.escape("algorithm.base_directions should be at most 4, since 4 clients"),
    ):
        run_of(FedGroup(groups=2, base_directions=10**9))


def test_more_vectors_than_an_input_has_entries_are_refused():
    text = f"algorithm.vectors should be at most {FEATURES}, since an input of .* has no more entries, got 1000000000"
    with pytest.raises(ConfigError, match=text):
        run_of(PACFL(vectors=10**9))


def test_a_model_can_be_made_by_a_function_of_the_seed():
    run, same = run_of(model=linear, seed=4), run_of(model=linear(4), seed=4)
    assert torch.equal(run.tree.nodes[0].params, same.tree.nodes[0].params)
    assert run.config["model"] == {"name": "Sequential"}


def test_a_round_says_whether_it_is_evaluated():
    """Every second round, and the last."""

    @dataclasses.dataclass(frozen=True)
    class Listening(FedAvg):
        heard: list = dataclasses.field(default_factory=list)

        def step(self, state, cohort, clients, this_round):
            self.heard.append(this_round.evaluated)
            return super().step(state, cohort, clients, this_round)

    algorithm = Listening()
    run_of(algorithm, rounds=5, evaluate_every=2)
    assert algorithm.heard == [False, True, False, True, True]


def test_the_given_module_is_not_touched():
    module = linear()
    before = module[1].weight.clone()
    run_of(model=module)
    assert torch.equal(module[1].weight, before)


def test_a_modules_own_parameters_are_the_initial_ones():
    """One tiny step away from them."""
    run = run_of(rounds=1, local=LocalTraining(lr=1e-6))
    theta = torch.cat([linear()[1].weight.detach().flatten(), linear()[1].bias.detach()])
    torch.testing.assert_close(run.tree.nodes[0].params, theta, rtol=0, atol=1e-4)


def test_evaluation_every_second_round_and_after_the_last():
    run = run_of(rounds=5, evaluate_every=2)
    assert [row["accuracy_mean"] is not None for row in run.metric_rows] == [
        False,
        True,
        False,
        True,
        True,
    ]
    assert sorted({row["round"] for row in run.client_rows}) == [2, 4, 5]
    assert len(run.client_rows) == 3 * 4
    assert run.metric_rows[0].keys() == run.metric_rows[1].keys()
    assert run.metric_rows[0]["loss_mean"] is None
    assert all(row["train_loss"] > 0 for row in run.metric_rows)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_bytes_are_one_model_down_and_one_update_up_for_each_client_that_trains(fraction):
    """float32: 4 bytes an entry."""
    run = run_of(client_fraction=fraction)
    trained = round(4 * fraction)
    for row in run.metric_rows:
        assert row["clients_trained"] == trained
        assert row["bytes_up"] == row["bytes_down"] == trained * SIZE * 4
    assert run.summary["bytes_up"] == run.summary["bytes_down"] == 3 * trained * SIZE * 4


def test_a_split_round_pays_for_the_absent_members_too():
    run = run_of(CFL(eps2=1e-3, split_rounds=(2,)), client_fraction=0.5)
    assert [row["phase"] for row in run.metric_rows] == ["train", "split", "train"]
    assert [row["bytes_up"] for row in run.metric_rows] == [
        2 * SIZE * 4,
        4 * SIZE * 4,
        2 * SIZE * 4,
    ]
    assert [row["clusters"] for row in run.metric_rows] == [1, 2, 2]


def test_of_local_training_the_initial_model_alone_travels():
    run = run_of(Local())
    assert [(row["bytes_up"], row["bytes_down"]) for row in run.metric_rows] == [
        (0, 4 * SIZE * 4),
        (0, 0),
        (0, 0),
    ]


def test_target_numbers_are_of_the_first_round_whose_mean_reaches_it():
    run = run_of("oracle", rounds=8)
    means = [row["accuracy_mean"] for row in run.metric_rows]
    target = means[4]
    first = next(k for k, mean in enumerate(means, start=1) if mean >= target)
    summary = run_of("oracle", rounds=8, target=target).summary["target"]
    assert summary["accuracy"] == target
    assert summary["rounds_to_target"] == first
    assert summary["bytes_to_target"] == first * 2 * 4 * SIZE * 4
    final = [row["accuracy"] for row in run.client_rows if row["round"] == 8]
    assert summary["share_of_clients"] == sum(accuracy >= target for accuracy in final) / 4


def test_a_target_that_is_never_reached_has_no_numbers():
    summary = run_of(rounds=1, local=LocalTraining(lr=1e-6), target=1.0).summary
    assert summary["target"] == {
        "accuracy": 1.0,
        "share_of_clients": 0.0,
        "rounds_to_target": None,
        "bytes_to_target": None,
    }


def test_the_summary_says_what_was_run_and_found():
    run = run_of("oracle", seed=3)
    final = [row["accuracy"] for row in run.client_rows if row["round"] == 3]
    assert run.summary["algorithm"] == "oracle"
    assert (run.summary["seed"], run.summary["rounds"], run.summary["clients"]) == (3, 3, 4)
    assert run.summary["accuracy"]["mean"] == pytest.approx(sum(final) / 4)
    assert run.summary["accuracy"]["min"] == min(final)
    assert run.summary["clusters"] == {
        "found": 2,
        "true": 2,
        "ari": 1.0,
        "nmi": 1.0,
        "sizes": [2, 2],
    }
    assert run.summary["target"]["accuracy"] is None
    seconds = run.summary["seconds"]
    assert seconds["total"] == pytest.approx(
        seconds["train"] + seconds["evaluate"] + seconds["server"]
    )
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
            State(state.tree.reassigned(dict.fromkeys(clients.ids, 2))),
            clients.ids,
            clients,
            this_round,
        )


def test_clients_in_no_cluster_yet_are_served_with_the_root_and_an_empty_cluster_is_not_counted():
    run = run_of(Gathering(), rounds=2)
    assert [(row["round"], row["served_by"]) for row in run.client_rows] == [
        *((1, 0) for _ in TRUTH),
        *((2, 2) for _ in TRUTH),
    ]
    assert [row["clusters"] for row in run.metric_rows] == [0, 1]
    assert [row["ari"] for row in run.metric_rows] == [0.0, 0.0]
    assert run.summary["clusters"]["found"] == 1
    assert run.summary["clusters"]["sizes"] == [4]


def test_without_a_truth_there_are_no_scores():
    run = run_of("fedavg", dataclasses.replace(federation_of(TRUTH), true_clusters=None))
    assert run.summary["clusters"] == {
        "found": 1,
        "true": None,
        "ari": None,
        "nmi": None,
        "sizes": [4],
    }
    assert {row["true_cluster"] for row in run.client_rows} == {None}
    assert {row["separation_gap"] for row in run.cluster_rows} == {None}


def test_every_round_tells_norms_bounds_and_the_separation_gap_of_each_cluster():
    run = run_of(CFL(eps2=1e-3, split_rounds=(2,)), rounds=3)
    assert [(row["round"], row["node"], row["clients"]) for row in run.cluster_rows] == [
        *((1, 0, 4), (2, 0, 4)),
        *((3, 1, 2), (3, 2, 2)),
    ]
    last = run.cluster_rows[2:]
    assert run.metric_rows[2]["max_norm"] == max(row["max_norm"] for row in last)
    assert run.metric_rows[2]["mean_norm"] == max(row["mean_norm"] for row in last)
    assert run.metric_rows[2]["alpha_cross_max"] == min(row["alpha_cross_max"] for row in last)
    assert run.metric_rows[2]["separation_gap"] == max(row["separation_gap"] for row in last)
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
    run = run_of("oracle", on_round=lambda row, tree: seen.append((row["round"], len(tree.leaves))))
    assert seen == [(1, 2), (2, 2), (3, 2)]
    assert len(run.tree.leaves) == 2


def test_an_on_round_that_fails_costs_one_warning_and_not_the_run(caplog):
    seen = []

    def on_round(row, tree):
        seen.append(row["round"])
        raise ZeroDivisionError("in a callback")

    run = run_of("local", on_round=on_round)
    assert (run.summary["rounds"], seen) == (3, [1, 2, 3])
    assert len(caplog.records) == 1
    assert "callback on_round failed in round 1; the run continues" in caplog.text
    assert "ZeroDivisionError: in a callback" in caplog.text


def test_an_on_round_may_end_the_run_by_an_error_of_fedclades_own():
    def on_round(row, tree):
        raise RunInterrupted("enough", "nothing more")

    with pytest.raises(RunInterrupted, match="enough"):
        run_of("local", on_round=on_round)


@pytest.mark.parametrize("thing", ["run", "tree", "federation", "pool"])
def test_what_a_run_is_made_of_looks_like_one_line(thing):
    federation = federation_of(TRUTH)
    run = run_of("oracle", federation)
    things = {"run": run, "tree": run.tree, "federation": federation, "pool": federation.pool}
    assert (
        repr(things[thing])
        == {
            "run": "Run(algorithm='oracle', data='tiny', model='Sequential', seed=0, rounds=3)",
            "tree": "ParameterTree(nodes=3, clusters=2, clients=4)",
            "federation": "Federation('tiny')",
            "pool": "Pool('tiny', torch.float32 [216, 6], outputs=4, task='classification')",
        }[thing]
    )


def test_fedclade_tells_its_version():
    assert fedclade.__version__ == version("fedclade")


def test_the_rows_of_clients_say_who_serves_them():
    run = run_of("oracle", rounds=1)
    assert [
        (row["client"], row["cluster"], row["served_by"], row["true_cluster"], row["n_train"])
        for row in run.client_rows
    ] == [*((0, 1, 1, 0, 24), (1, 2, 2, 1, 24)), *((2, 1, 1, 0, 24), (3, 2, 2, 1, 24))]


def test_fallback_is_evaluated_with_the_served_model():
    """At most as many right answers on validation data as the served model; the row names it."""
    run = run_of(CFL(eps2=1e-3, split_rounds=(1,), fallback=True), rounds=2)
    assert {row["served_by"] for row in run.client_rows} <= {0, 1, 2}
    assert {row["cluster"] for row in run.client_rows} == {1, 2}


def test_a_language_model_is_told_by_its_perplexity():
    federation = federation_of([0, 0])
    n = len(federation.pool.x)
    tokens = torch.randint(1, 5, (n, 3), generator=torch.Generator().manual_seed(0))
    pool = dataclasses.replace(federation.pool, x=tokens, y=tokens, outputs=5, task="language")
    run = run_of(
        "fedavg", dataclasses.replace(federation, pool=pool), nn.Embedding(5, 5), evaluate_every=2
    )
    losses = torch.tensor([row["loss"] for row in run.client_rows if row["round"] == 3])
    assert run.summary["perplexity"]["mean"] == pytest.approx(float(losses.exp().mean()))
    assert run.summary["perplexity"]["max"] == pytest.approx(float(losses.exp().max()))
    assert run.metric_rows[0]["perplexity_mean"] is None


@pytest.mark.parametrize("engine", ["stacked", "vmap", "loop"])
def test_the_engine_changes_nothing_but_rounding_and_is_recorded(engine):
    run, expected = run_of(engine=engine), run_of(engine="loop", memory="1KB")
    torch.testing.assert_close(
        run.tree.nodes[0].params, expected.tree.nodes[0].params, rtol=1e-4, atol=1e-6
    )
    assert run.summary["engine"] == run.config["engine"] == engine


def test_of_auto_the_engine_is_recorded_that_was_taken():
    run = run_of()
    assert run.summary["engine"] == run.config["engine"]
    assert run.config["engine"] in ("stacked", "loop")


def test_an_engine_or_memory_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=re.escape("unknown engine 'vamp'; did you mean 'vmap'?")):
        run_of(engine="vamp")
    with pytest.raises(
        ConfigError,
        match="memory should be a size such as 2GB, 500MiB or a number of bytes, got 'x'",
    ):
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
    # torch.__version__ may name its build as well
    assert run.config["versions"]["torch"] == version("torch")


# Signatures and streams

FOUR_GROUPS = federation_of([0, 1, 2, 3] * 5, seed=1)
SPLITS = CFL(eps2=0.05, split_rounds=(4, 8))
PROJECTED = Signature(kind="projected")


def wide() -> nn.Module:
    """Return a model of 4,404 parameters, more than a sketch has entries."""
    return build_model("mlp", input_shape=(FEATURES,), outputs=LABELS, arguments={"hidden": 400})


def wide_run(**settings) -> Run:
    spec = LocalTraining(epochs=2, batch_size=10, lr=0.1)
    return simulate(
        SPLITS,
        wide(),
        FOUR_GROUPS,
        **({"local": spec, "rounds": 9, "engine": "stacked"} | settings),
    )


@pytest.fixture(scope="module")
def full() -> Run:
    return wide_run()


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_sketches_of_1024_entries_find_the_clusters_that_whole_updates_do(full, stream, permute):
    run = wide_run(signature=PROJECTED, stream=stream, permute=permute)
    assert [row["ari"] for row in run.metric_rows] == [row["ari"] for row in full.metric_rows]
    assert full.metric_rows[-1]["ari"] == 1.0
    assert [node.members for node in run.tree.nodes] == [node.members for node in full.tree.nodes]
    for ours, theirs in zip(full.tree.nodes, run.tree.nodes, strict=True):
        torch.testing.assert_close(theirs.params, ours.params, rtol=0, atol=1e-4)
        assert theirs.cached is None or theirs.cached.shape == (len(theirs.members), 1024)
    for ours, theirs in zip(full.cluster_rows, run.cluster_rows, strict=True):
        assert theirs["max_norm"] == pytest.approx(ours["max_norm"], rel=1e-4), (
            "norms are of whole updates"
        )
        assert theirs["mean_norm"] == pytest.approx(ours["mean_norm"], rel=1e-4)
        assert theirs["alpha_cross_max"] == pytest.approx(ours["alpha_cross_max"], abs=5 / 32)
    assert [row["bytes_up"] for row in run.metric_rows] == [
        row["bytes_up"] for row in full.metric_rows
    ]
    assert run.summary["seconds"]["train"] > 0


@pytest.mark.parametrize("permute", [False, True])
def test_a_stream_has_the_signatures_of_a_run_that_keeps_its_updates(permute):
    plain, stream = (
        wide_run(signature=PROJECTED, stream=s, permute=permute, memory="1MB")
        for s in (False, True)
    )
    for ours, theirs in zip(plain.tree.nodes, stream.tree.nodes, strict=True):
        assert (theirs.cached is None) == (ours.cached is None)
        if ours.cached is not None:
            torch.testing.assert_close(theirs.cached, ours.cached, rtol=0, atol=1e-4)
    for ours, theirs in zip(plain.similarities, stream.similarities, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(theirs.alpha), torch.from_numpy(ours.alpha), rtol=0, atol=1e-3
        )
    assert (plain.config["stream"], stream.config["stream"]) == (False, True)


def test_a_saved_run_tells_how_to_project_what_a_newcomer_sends(tmp_path):
    """From its config and models alone: client 5 trains at the root's model once more."""
    run = Run.load(
        wide_run(signature=Signature(kind="projected", dim=100), engine="loop").save(
            tmp_path / "run"
        )
    )
    clients, _ = simulated(FOUR_GROUPS, wide())
    root, node = run.tree.nodes[0], run.tree.nodes[2]
    this_round = RoundPlan(root.split_in, LocalTraining(**run.config["local"]), run.config["seed"])
    sent = clients.train([5], root.params[None], [0], this_round).required_deltas[0]
    sketch = Signature(**run.config["signature"]).sketch(run.config["seed"], run.layout)
    torch.testing.assert_close(
        sketch.apply(sent), node.cached[node.members.index(5)], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("memory", "streams"), [(4 * 4 * SIZE * 4, False), (4 * 4 * SIZE * 4 - 1, True)]
)
def test_auto_streams_when_updates_take_more_than_a_quarter_of_the_memory(memory, streams):
    """Four clients' updates in float32: 4·SIZE·4 bytes."""
    for algorithm in ("fedavg", "oracle", "local", "cfl"):
        assert (
            run_of(algorithm, rounds=1, signature=PROJECTED, memory=memory).config["stream"]
            is streams
        )


def test_auto_never_streams_full_signatures_but_says_what_would_help(caplog):
    assert run_of("cfl", memory=1000).config["stream"] is False
    assert "with signature.kind = 'projected' and signature.dim = 4096 the server" in caplog.text
    caplog.clear()
    run_of("cfl", memory="1GB")
    assert caplog.text == ""
    assert run_of("fedavg", memory=1000).config["stream"] is True, "which compares none"


class LooksAtEach(FedAvg):
    """An algorithm that needs the updates of single clients, and compares them."""

    requires = Requires(updates=True, signatures=True)

    def step(self, state, cohort, clients, this_round):
        models, rows = state.tree.models([0] * len(cohort))
        clients.train(cohort, models, rows, this_round).required_deltas.sum()
        return super().step(state, cohort, clients, this_round)


def test_an_algorithm_that_needs_single_updates_never_streams():
    assert run_of(LooksAtEach(), signature=PROJECTED, memory=1000).config["stream"] is False
    text = "stream = true: LooksAtEach needs the updates of single clients; set stream = false"
    with pytest.raises(ConfigError, match=text):
        run_of(LooksAtEach(), signature=PROJECTED, stream=True)


def test_to_stream_full_signatures_is_refused():
    text = re.escape(
        "stream = true: signatures of kind 'full' take as much memory as the updates; set signature.kind = 'projected'"
    )
    with pytest.raises(ConfigError, match=text):
        run_of("cfl", stream=True)
    with pytest.raises(ConfigError) as caught:
        run_of(LooksAtEach(), stream=True)
    assert len(str(caught.value).splitlines()) == 2


class LooksAtSignatures(FedAvg):
    """An algorithm that compares updates, and does not say so."""

    def step(self, state, cohort, clients, this_round):
        models, rows = state.tree.models([0] * len(cohort))
        clients.train(cohort, models, rows, this_round).signatures.sum()
        return super().step(state, cohort, clients, this_round)


def test_signatures_that_a_stream_does_not_keep_are_not_taken_for_equal_ones():
    run_of(LooksAtSignatures(), rounds=1)
    with pytest.raises(
        UpdateError,
        match="this run streams, and so stores signatures only if the algorithm requires them",
    ):
        run_of(LooksAtSignatures(), rounds=1, stream=True)
    run_of(LooksAtSignatures(), rounds=1, stream=True, signature=PROJECTED)


def test_a_sample_of_the_clients_is_evaluated() -> None:
    whole = run_of(FedAvg(), rounds=2)
    part = run_of(FedAvg(), rounds=2, evaluate_clients=2)
    asked = [row["client"] for row in part.client_rows if row["round"] == 1]
    assert len(asked) == 2 < len({row["client"] for row in whole.client_rows})
    assert (
        asked == sorted(asked) == [row["client"] for row in part.client_rows if row["round"] == 2]
    )
    assert part.client_rows == [row for row in whole.client_rows if row["client"] in asked]
    assert part.summary["accuracy"]["mean"] == pytest.approx(
        sum(row["accuracy"] for row in part.client_rows if row["round"] == 2) / 2
    )
    assert run_of(FedAvg(), rounds=2, evaluate_clients=99).client_rows == whole.client_rows


def test_clients_of_a_cluster_are_evaluated_before_others() -> None:
    params = torch.zeros(3)
    tree = ParameterTree.star([[2, 5], [7]], params, unassigned=[1, 3, 4, 6])
    ids = [1, 2, 3, 4, 5, 6, 7]
    assert panel(tree, ids, 3, seed=0) == [2, 5, 7]
    assert set(panel(tree, ids, 4, seed=0)) > {2, 5, 7}
    assert {client for seed in range(20) for client in panel(tree, ids, 2, seed)} == {2, 5, 7}
    assert panel(tree, ids, None, seed=0) is ids
