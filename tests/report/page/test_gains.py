"""The page's sections on gains and on what distinguishes the clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fedclade
from fedclade.clustering import explain_differences
from fedclade.report import with_attributes
from fedclade.report.page.section import Cell, page_html
from fedclade.tasks import Interval
from tests.tiny import federation_of


@pytest.fixture(scope="module")
def run():
    federation = federation_of([0, 0, 1, 1])
    return fedclade.simulate("oracle", "mlp", federation, rounds=2, references=True)


def test_cards_tell_the_mean_gains_with_their_intervals(run, page_of):
    cards = {card.label: card for card in page_of(run).cards}
    for name in ("Gain over one model, points", "Gain over alone, points"):
        assert cards[name].value[0] in "+−"
        assert "95 % interval of the mean over 4 clients" in cards[name].note


def test_no_gain_is_coloured_whose_interval_includes_zero(run, page_of):
    clients = run.gains.clients
    sure = {"one_model": Interval(0.3, 0.2, 0.4), "alone": Interval(-0.3, -0.4, -0.2)}
    unsure = {"one_model": Interval(0.3, -0.2, 0.8), "alone": Interval(0.3)}
    changed = [replace(clients[0], gains=sure), replace(clients[1], gains=unsure)]
    page = page_of(replace(run, gains=replace(run.gains, clients=changed)))
    (table,) = [each for each in page.sections[0].open_tables if each.sortable]
    assert table.rows[0][-2:] == [
        Cell("+30.0 [20.0, 40.0]", "good"),
        Cell("−30.0 [−40.0, −20.0]", "bad"),
    ]
    assert table.rows[1][-2:] == [Cell("+30.0 [−20.0, 80.0]"), Cell("+30.0")]
    cards = {card.label: card for card in page.cards}
    assert cards["Gain over alone, points"].trend == ""


def test_the_table_of_clients_has_all_models_and_can_be_sorted(run, page_of, section):
    (table,) = [each for each in section(page_of(run), "gains").open_tables if each.sortable]
    assert table.columns == [
        *("client", "cluster", "test rows", "trivial", "alone", "one model", "cluster model"),
        *("gain over one model", "gain over alone"),
    ]
    assert [row[0] for row in table.rows] == ["c0", "c1", "c2", "c3"]
    assert table.rows[0][2] == "20"
    html = page_html(page_of(run))
    assert '<table class="sortable">' in html
    assert '<button type="button">gain over alone</button>' in html


def test_the_caption_explains_unit_intervals_and_chance(run, page_of, section):
    caption = section(page_of(run), "gains").caption
    assert "in points: 1 point is 1 %" in caption
    assert "Wilson" in caption
    assert "not that of training" in caption
    assert "1 client in 20" in caption


def test_the_picture_has_a_point_with_an_interval_for_each_client(run, page_of, section):
    figures = section(page_of(run), "gains").figures
    assert list(figures) == ["one model", "alone"]
    dots = figures["alone"]["data"][-1]
    values = [100 * client.gains["alone"].value for client in run.gains.clients]
    assert sorted(dots["y"]) == pytest.approx(sorted(values))


def test_against_another_run_the_table_has_its_scores(run, page_of, section):
    table = section(page_of(run, run, "other"), "gains").open_tables[-1]
    assert table.columns[-2:] == ["other", "difference to other"]
    assert [row[-1] for row in table.rows] == ["+0.0"] * 4
    assert "has no interval" in table.note


def test_own_models_are_shown_beside_those_of_the_clusters(page_of, section):
    run = fedclade.simulate("ditto", "mlp", federation_of([0, 1]), rounds=1)
    table = section(page_of(run), "gains").open_tables[-1]
    assert table.columns[3:6] == ["trivial", "cluster model", "own"]
    assert table.columns[-1] == "gain over cluster model"


def test_a_network_has_the_reported_scores_and_the_reason_for_what_is_missing(
    run, page_of, section
):
    remote = replace(run, gains=None, config={**run.config, "network": {"clients": 4}})
    page = page_of(remote)
    found = section(page, "gains")
    assert "never leave the clients of a network" in found.caption
    assert found.figures == {}
    (table,) = found.open_tables
    assert table.columns == ["client", "cluster", "cluster model"]
    assert all(section_.id != "distinction" for section_ in page.sections)


def test_a_run_in_progress_has_no_gains(run, page_of):
    running = replace(run, gains=None, layout=None)
    assert all(section.id != "gains" for section in page_of(running).sections)


def test_the_differences_of_clusters_are_listed_with_their_reference(run, page_of, section):
    found = section(page_of(run), "distinction")
    assert "weak evidence" in found.caption
    traits, explained = found.open_tables
    assert traits.columns[-3:] == ["explained", "by chance", "p"]
    assert explained.rows[0][0] == "label shares"


def test_clusters_without_data_are_distinguished_by_attributes_alone(run, page_of, section):
    remote = replace(run, gains=None, config={**run.config, "network": {"clients": 4}})
    sites = {f"c{i}": {"country": "Italy" if i < 2 else "Norway"} for i in range(4)}
    traits, _ = section(page_of(with_attributes(remote, sites)), "distinction").open_tables
    assert [row[0] for row in traits.rows] == ["country, attribute"]
    assert traits.note.startswith(
        "Labels and inputs are not compared: that needs the clients’ data"
    )


def test_a_page_draws_random_clusters_once(run, page_of, monkeypatch):
    from fedclade.report import gains

    calls: list[int] = []

    def counted(differences, clusters, draw):
        calls.append(len(differences))
        return explain_differences(differences, clusters, draw)

    monkeypatch.setattr(gains, "explain_differences", counted)
    page_of(run)
    assert len(calls) == 1


def test_clusters_of_a_run_that_diverged_are_not_distinguished(run, page_of):
    assert "distinction" in {section.id for section in page_of(run).sections}
    diverged = {"round": 1, "clients": 3, "of": 4}
    page = page_of(replace(run, summary={**run.summary, "diverged": diverged}))
    assert "distinction" not in {section.id for section in page.sections}


@pytest.mark.parametrize(("number", "are_named"), [(40, True), (41, False)])
def test_up_to_forty_clients_are_named_below_their_gains(
    run, page_of, section, number: int, are_named: bool
):
    clients = [replace(run.gains.clients[0], name=f"c{i}") for i in range(number)]
    many = replace(run, gains=replace(run.gains, clients=clients))
    axis = section(page_of(many), "gains").figures["alone"]["layout"]["xaxis"]
    assert ("ticktext" in axis) == are_named
