"""FL+HC's options, and what ``threshold = "auto"`` makes of clients that agree and of clients that do not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fedclade import FLHC, ConfigError, LocalTraining, RunFacts, load_federation, simulate
from fedclade.algorithms import build_algorithm, fl_hc
from fedclade.config import check_config
from fedclade.report.tables import event_table
from tests.tiny import federation_of, linear

LOCAL = LocalTraining(epochs=3, batch_size=20, lr=0.1)


@pytest.mark.parametrize(("metric", "linkage"), [("l2", "ward"), ("cosine", "average")])
@pytest.mark.parametrize(
    ("shift", "found", "seed"),
    [("none", 1, 0), ("none", 1, 1), ("label_swap", 4, 1), ("label_permutation", 4, 2)],
)
def test_auto_finds_the_clusters_of_digits_and_none_where_there_are_none(
    metric, linkage, seed, shift, found
):
    """The paper: "in the iid setting, the Euclidean and cosine distance metrics correctly failed to split"."""
    federation = load_federation("digits", clients=20, shift=shift, seed=seed)
    algorithm = FLHC(rounds_before=3, metric=metric, linkage=linkage, threshold="auto")
    run = simulate(
        algorithm,
        "mlp",
        federation,
        local=LOCAL,
        rounds=4,
        seed=seed,
        engine="stacked",
        evaluate_every=4,
    )
    assert run.summary["clusters"]["found"] == found
    assert run.summary["clusters"]["ari"] == (None if found == 1 else 1.0)


def test_the_defaults_are_the_papers_for_unknown_heterogeneity():
    usual = FLHC(rounds_before=10, metric="l1", linkage="complete", threshold=None, cohort="of_all")
    assert build_algorithm("fl_hc") == usual
    assert build_algorithm("fl_hc", {"threshold": 3}) == FLHC(threshold=3.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rounds_before": -1}, "algorithm.rounds_before should be at least 0, got -1"),
        ({"linkage": "ward"}, "algorithm.metric should be 'l2' with linkage 'ward', got 'l1'"),
        (
            {"linkage": "ward", "metric": "cosine"},
            "algorithm.metric should be 'l2' with linkage 'ward', got 'cosine'",
        ),
        ({"threshold": 0.0}, "algorithm.threshold should be greater than 0, or 'auto', got 0.0"),
        (
            {"threshold": float("nan")},
            "algorithm.threshold should be greater than 0, or 'auto', got nan",
        ),
        (
            {"threshold": "gap"},
            "algorithm.threshold should be greater than 0, or 'auto', got 'gap'",
        ),
        ({"n_clusters": 0}, "algorithm.n_clusters should be at least 1, got 0"),
        ({"sample": 3}, "algorithm.sample should be at least 4, got 3"),
        ({"sample": 6, "n_clusters": 7}, "algorithm.sample should be at least 7, got 6"),
        (
            {"sample": 9, "linkage": "single"},
            "algorithm.sample should be left out, since linkage 'single' is exact for any number of clients, got 9",
        ),
        (
            {"compare": "models"},
            "algorithm.compare should be 'updates' or 'parameters', got 'models'",
        ),
        ({"cohort": "all"}, "algorithm.cohort should be 'of_all' or 'of_cluster', got 'all'"),
        (
            {"n_clusters": 4, "threshold": 2.0},
            "algorithm.threshold should be left out if n_clusters is set, got 2.0",
        ),
        (
            {"n_clusters": 4, "threshold": "auto"},
            "algorithm.threshold should be left out if n_clusters is set, got 'auto'",
        ),
        ({"metric": "cos"}, "unknown metric 'cos'; did you mean 'cosine'? (known: cosine, l1, l2)"),
        (
            {"linkage": "wards"},
            "unknown linkage 'wards'; did you mean 'ward'? (known: average, centroid, complete, single, ward)",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(options, text):
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        FLHC(**options)


def test_a_threshold_of_the_wrong_kind_is_refused_by_name():
    text = "threshold of algorithm 'fl_hc' should be a number or 'auto' or left out, got 'high'"
    with pytest.raises(ConfigError, match=re.escape(text)):
        build_algorithm("fl_hc", {"threshold": "high"})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fl_hc", {"compare": "parameters"}),
        ("fl_hc", {"keep_updates": True}),
        ("cfl", {"weighted": False}),
    ],
)
def test_what_works_on_single_updates_cannot_stream(name, options):
    signature = {"kind": "projected", "dim": 64}
    streams = {"stream": True, "signature": signature, "algorithm": {"name": name}}
    assert check_config(streams)
    text = (
        f"stream = true: {type(build_algorithm(name)).__name__} needs the updates of single clients"
    )
    with pytest.raises(ConfigError, match=text):
        check_config({**streams, "algorithm": {"name": name, **options}})
    run = check_config(
        {"signature": signature, "algorithm": {"name": name, **options}, "rounds": 2}
    )
    assert run.run(run.federation()).summary["rounds"] == 2


def test_all_errors_come_at_once():
    with pytest.raises(ConfigError) as caught:
        FLHC(rounds_before=-1, linkage="ward", threshold=-1.0, n_clusters=0)
    assert len(str(caught.value).splitlines()) == 5


def test_more_clusters_than_clients_are_refused():
    FLHC(n_clusters=3).check(RunFacts(clients=3))
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.n_clusters should be at most the number of clients, 3, got 4",
    ):
        FLHC(n_clusters=4).check(RunFacts(clients=3))


@pytest.mark.parametrize(("rounds", "told"), [(3, True), (4, False)])
def test_a_run_too_short_to_be_clustered_is_told_so(rounds, told, caplog):
    simulate(FLHC(rounds_before=3), linear(), federation_of([0, 1]), rounds=rounds, engine="loop")
    text = (
        "FLHC needs 4 rounds until it has clustered the clients, but this run has only 3, "
        "so that it will be plain federated averaging; "
        "set more rounds, or a smaller algorithm.rounds_before"
    )
    assert (text in caplog.text) == told


def test_a_config_names_the_cohort():
    assert (
        check_config({"algorithm": {"name": "fl_hc", "cohort": "of_cluster"}}).algorithm["cohort"]
        == "of_cluster"
    )
    assert build_algorithm("fl_hc", {"cohort": "of_cluster"}) == FLHC(cohort="of_cluster") != FLHC()


# Of many clients


TRUTH = [client % 4 for client in range(80)]


def clustered(algorithm: FLHC, seed: int = 0):
    federation = federation_of(TRUTH, [150] * len(TRUTH), seed=1)
    run = simulate(
        algorithm,
        linear(1),
        federation,
        local=LocalTraining(lr=0.1),
        rounds=4,
        seed=seed,
        engine="stacked",
    )
    (event,) = (event for event in run.events if event["kind"] == "clustered")
    return run, event


@pytest.mark.parametrize(
    ("metric", "linkage"), [("l2", "ward"), ("cosine", "average"), ("l1", "complete")]
)
def test_all_but_a_sample_join_the_nearest_mean(metric, linkage):
    run, event = clustered(
        FLHC(rounds_before=2, metric=metric, linkage=linkage, n_clusters=4, sample=20)
    )
    assert run.summary["clusters"]["ari"] == 1.0
    assert event["sizes"] == [20, 20, 20, 20]
    assert (len(event["clients"]), len(event["merges"])) == (20, 19)
    found = f"4 clusters by {metric} distance and {linkage} linkage of 20 clients drawn from 80"
    assert found in str(event_table(run).caption)


def test_the_sample_depends_on_the_seed_alone():
    algorithm = FLHC(rounds_before=2, metric="l2", linkage="ward", n_clusters=4, sample=20)
    drawn = [clustered(algorithm, seed)[1]["clients"] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_sample_of_all_changes_nothing():
    with_it = FLHC(rounds_before=2, metric="l2", linkage="ward", sample=80)
    assert clustered(with_it)[1] == clustered(replace(with_it, sample=None))[1]


def test_single_linkage_of_many_is_that_of_few(monkeypatch):
    algorithm = FLHC(rounds_before=2, metric="cosine", linkage="single", n_clusters=4)
    _, few = clustered(algorithm)
    monkeypatch.setattr(fl_hc, "MOST_PAIRED", 10)
    _, many = clustered(algorithm)
    assert many["sizes"] == few["sizes"]
    heights = [[height for _, _, height in event["merges"]] for event in (few, many)]
    assert heights[0] == pytest.approx(heights[1], abs=1e-5)


def test_more_clients_than_can_be_clustered_exactly_need_a_sample():
    text = (
        "algorithm.sample should be set, for example to 4096, for 20,001 clients: "
        "ward linkage stores the distances of all"
    )
    with pytest.raises(ConfigError, match=text):
        FLHC(metric="l2", linkage="ward").check(RunFacts(clients=20_001))
    FLHC(metric="l2", linkage="ward").check(RunFacts(clients=20_000))
    FLHC(metric="l2", linkage="ward", sample=4096).check(RunFacts(clients=10**6))
    FLHC(linkage="single").check(RunFacts(clients=10**6))
