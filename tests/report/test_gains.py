"""Gains in reports: means with intervals, what is missing and why, and what distinguishes clusters."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import fedclade
from fedclade.core import DataError
from fedclade.data import Trait
from fedclade.report import gain_tables, with_attributes
from fedclade.report.gains import GainView, _standardize_columns, client_columns, identify
from fedclade.report.score import Score
from fedclade.runs import ClientGains, Gains
from fedclade.tasks import Interval, Metric
from tests.tiny import federation_of

ACCURACY = Metric("accuracy", True, True)
MAE = Metric("mae", False)


def client_of(number: int, cluster: int, gain: float, **changes) -> ClientGains:
    """Return a client that gains this over one model, with an interval of 0.1 to both sides."""
    values = {
        "client": number,
        "name": f"site {number}",
        "cluster": cluster,
        "n_train": 40,
        "n_test": 10,
        "deployed": "cluster_model",
        "scores": {
            "one_model": Interval(0.5, 0.4, 0.6),
            "cluster_model": Interval(0.5 + gain, 0.4 + gain, 0.6 + gain),
        },
        "gains": {"one_model": Interval(gain, gain - 0.1, gain + 0.1)},
    }
    return ClientGains(**values | changes)


def view_of(clients, metric: Metric = ACCURACY, **changes) -> GainView:
    gains = Gains(metric, 3, "shares", clients, **changes)
    return GainView(gains, Score(metric))


def printed(run) -> str:
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as capture:
        for table in gain_tables(run):
            console.print(table)
    return capture.get()


def test_a_mean_gain_has_an_interval_over_clients_and_counts_clear_ones():
    view = view_of([client_of(i, 1, gain) for i, gain in enumerate((0.2, 0.3, 0.05, -0.2))])
    (gain,) = view.mean_gains
    assert gain.mean.value == pytest.approx(0.0875)
    assert (gain.better, gain.worse, gain.clients) == (2, 1, 4)
    assert gain.trend == ""  # the interval of the mean includes 0
    assert view.write_gain(gain.mean) == "+8.8 [−25.9, 43.4]"


@pytest.mark.parametrize(("gain", "trend"), [(0.2, "good"), (-0.2, "bad")])
def test_a_mean_gain_is_coloured_only_if_its_interval_excludes_zero(gain, trend):
    view = view_of([client_of(i, 1, gain + 0.01 * i) for i in range(4)])
    assert view.mean_gains[0].trend == trend


def test_a_single_client_has_a_gain_without_an_interval():
    view = view_of([client_of(0, 1, 0.2)])
    assert view.mean_gains[0].trend == ""
    assert view.write_gain(view.mean_gains[0].mean) == "+20.0"
    assert "too few for an interval" in view.describe_mean_gain(view.mean_gains[0])


def test_equal_gains_have_no_interval_and_are_not_clear():
    (gain,) = view_of([client_of(i, 1, 0.25) for i in range(2)]).mean_gains
    assert (gain.mean, gain.trend) == (Interval(0.25), "")
    assert gain.without_interval == "2 clients: no interval, since all gain the same"


def test_a_client_without_a_score_is_left_out_of_means():
    undefined = Interval(math.nan)
    lost = client_of(2, 1, 0, scores={"cluster_model": undefined}, gains={"one_model": undefined})
    view = view_of([client_of(0, 1, 0.2), client_of(1, 1, 0.2), lost])
    assert view.mean_gains[0].clients == 2
    assert view.mean_score("cluster_model").value == pytest.approx(0.7)
    assert view.write_gain(undefined) == "–"


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        (ACCURACY, "in points: 1 point is 1 % on the scale of the accuracy from 0 to 100 %"),
        (
            MAE,
            "is lower than that of another model on the same test rows, in the unit of the target",
        ),
        (Metric("r2", True), "in the unit of the r2"),
    ],
)
def test_the_unit_of_a_gain_is_explained(metric, unit):
    text = view_of([client_of(0, 1, 0.2)], metric).explained_unit
    assert unit.lower() in text.lower()
    assert text.endswith("Above 0 the run is better.")


def test_missing_models_are_named_with_their_reason():
    missing = dict.fromkeys(("trivial", "alone", "one_model"), "no data")
    missing["cluster_model"] = "no model"
    view = view_of([client_of(0, 1, 0.2)], missing=missing)
    assert view.describe_missing() == [
        "Not shown: trivial, alone and one model (no data).",
        "Not shown: cluster model (no model).",
    ]


# What distinguishes the clusters.

TRAITS = (Trait("input mean", "age"), Trait("input mean", "height"))


def clients_by_age(n: int) -> list[ClientGains]:
    """Return n clients in two clusters, of which the second is older and as tall as the first."""
    heights = [170.0 + (7 * i) % 5 for i in range(n)]
    clients: list[ClientGains] = []
    for i in range(n):
        cluster = 1 + (2 * i >= n)
        traits = [30.0 * cluster + i % 3, heights[i]]
        country = "Norway" if cluster == 2 else "Italy"
        clients.append(client_of(i, cluster, 0.1, traits=traits, attributes={"country": country}))
    return clients


def test_traits_in_which_clusters_differ_come_first_with_their_means():
    view = view_of(clients_by_age(12), traits=TRAITS)
    first, second, last = view.differences
    assert {first.name, second.name} == {"age", "country"}
    assert last.name == "height"
    age = next(each for each in view.differences if each.name == "age")
    assert age.by_cluster == {1: "31.0", 2: "61.0"}
    country = next(each for each in view.differences if each.name == "country")
    assert country.by_cluster == {1: "Italy (6 of 6)", 2: "Norway (6 of 6)"}
    assert {each.name for each in view.clearly_different} == {"age", "country"}
    text = view.describe_differences()
    assert text.startswith("The clusters clearly differ in ")
    assert "weak" not in text


def test_of_few_clients_nothing_is_clear_and_the_evidence_is_called_weak():
    view = view_of(clients_by_age(4), traits=TRAITS)
    assert view.clearly_different == []
    text = view.describe_differences()
    assert text.startswith("In none of 3 traits do the clusters differ clearly")
    assert text.endswith("With only 4 clients this is weak evidence.")


def test_without_traits_none_are_counted():
    """Clients of a network report scores, and nothing about their data."""
    unknown = [replace(client, traits=(), attributes={}) for client in clients_by_age(4)]
    text = view_of(unknown).describe_differences()
    assert text.startswith("The clients' traits are not known here")
    assert "trait" not in text.partition("compared.")[2]


def test_what_the_clusters_explain_is_listed_by_what_clients_differ_in():
    view = view_of(clients_by_age(12), traits=TRAITS)
    explained = dict(view.explained)
    assert explained["attribute country"].share == pytest.approx(1.0)
    assert 0.4 < explained["input means"].share < 0.7  # of age and height with equal weights
    assert "accuracy, one model" not in explained  # equal for all clients
    assert explained["input means"].by_chance == pytest.approx(1 / 11, abs=0.03)


@pytest.mark.parametrize("n_traits", [50, 51])
def test_too_many_traits_are_said_to_be_too_many(n_traits):
    names = [Trait("input mean", f"input {i}") for i in range(n_traits)]
    clients = [client_of(i, 1 + i // 6, 0.1, traits=[i // 6] * n_traits) for i in range(12)]
    view = view_of(clients, traits=names)
    text = view.describe_differences()
    # Few random clusters are the same: p is nearly as small as it can be, 0.001.
    assert view.differences[0].explained.p_value < 0.01
    assert not view.clearly_different
    if n_traits == 51:
        assert text.startswith("51 traits are too many for a clear statement about all of them")
        assert "Holm" not in text
    else:
        assert text.startswith("In none of 50 traits do the clusters differ clearly")
        assert text.endswith("for all traits together (Holm, 5 %).")


def test_a_column_that_is_constant_up_to_rounding_has_no_weight():
    values = np.array([[0.1 + 0.2, 1.0], [0.3, 2.0], [0.3, 3.0], [np.nan, np.nan]])
    scaled = _standardize_columns(values)
    assert scaled[:, 0].tolist() == [0, 0, 0, 0]
    assert scaled[:, 1] == pytest.approx([-1.224745, 0, 1.224745, 0])


def test_one_cluster_has_nothing_to_distinguish():
    view = view_of([client_of(i, 1, 0.1, traits=[i, 1.0]) for i in range(5)], traits=TRAITS)
    assert view.differences == []
    assert view.explained == []


def test_attributes_that_some_clients_lack_are_compared_over_the_others():
    clients = [client_of(i, 1 + i % 2, 0.1, attributes={"beds": 10.0 * i}) for i in range(4)]
    clients[0] = replace(clients[0], attributes={})
    (beds,) = view_of(clients).differences
    assert beds.by_cluster == {1: "20.0", 2: "20.0"}


# Tables of runs.


def simulated(**options):
    return fedclade.simulate("oracle", "mlp", federation_of([0, 0, 1, 1]), rounds=1, **options)


def test_the_terminal_lists_means_and_clients_and_differences():
    text = printed(simulated(references=True))
    for title in ("What do the clients gain?", "Clients: test accuracy", "What distinguishes"):
        assert title in text
    for name in ("c0", "c1", "c2", "c3", "one model for all clients", "trains by itself"):
        assert name in text
    assert "weak evidence" in " ".join(text.split())


def test_a_run_over_a_network_lists_reported_scores_and_says_what_is_missing():
    run = simulated()
    run = replace(run, gains=None, config={**run.config, "network": {"clients": 4}})
    text = " ".join(printed(run).split())
    assert "What do the clients gain?" not in text
    assert "c3" in text
    assert "Not shown: trivial, alone and one model (measuring this" in text
    assert "never leave the clients of a network" in text


def test_a_run_without_measured_gains_says_how_to_measure_them():
    run = replace(simulated(), gains=None)
    text = " ".join(printed(run).split())
    assert "(not measured; simulate the run with references=True to measure this)" in text


@pytest.mark.parametrize(
    ("rows", "headings", "cells"),
    [
        ((10, None), ["client", "cluster", "test rows"], [["10"], ["–"]]),
        ((None, None), ["client", "cluster"], [[], []]),
    ],
)
def test_the_numbers_of_test_rows_are_left_out_if_no_client_states_one(rows, headings, cells):
    view = view_of([client_of(i, 1, 0.2, n_test=n_test) for i, n_test in enumerate(rows)])
    assert client_columns(view) == [
        *headings,
        *("one model", "cluster model", "gain over one model"),
    ]
    assert [identify(view, client)[2:] for client in view.clients] == cells


def test_attributes_can_be_given_to_the_report_of_any_run():
    run = simulated()
    run = replace(run, gains=None, config={**run.config, "network": {"clients": 4}})
    sites = {f"c{i}": {"country": "Italy" if i < 2 else "Norway"} for i in range(4)}
    text = printed(with_attributes(run, sites))
    assert "Norway (2 of 2)" in text
    with pytest.raises(DataError, match=r"the federation has no client of these names"):
        with_attributes(run, {"elsewhere": {"country": "Italy"}})


def test_the_terminal_shows_no_differences_of_the_clusters_of_a_run_that_diverged():
    run = simulated()
    assert "What distinguishes the clusters" in printed(run)
    run = replace(run, summary={**run.summary, "diverged": {"round": 1, "clients": 3, "of": 4}})
    text = printed(run)
    assert "Clients: test accuracy" in text
    assert "What distinguishes" not in text
    assert "that the clusters explain" not in text


def test_names_cannot_act_as_markup():
    run = simulated()
    clients = [replace(client, name="[red]x[/red]") for client in run.gains.clients]
    run = replace(run, gains=replace(run.gains, clients=clients))
    assert "[red]x[/red]" in printed(run)
