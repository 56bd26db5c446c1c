"""FL+HC's tables: what they show at the smallest scale, and what their claims say of made-up runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedclade import FLHC, FedAvg
from fedclade_papers import EXPERIMENTS, Claim, Outcome, ResultCache
from fedclade_papers.experiment import Paper
from fedclade_papers.fl_hc import EXPERIMENTS as OF_PAPER
from fedclade_papers.fl_hc import tables
from fedclade_papers.fl_hc.claims import (
    Cell,
    claim_on_curve,
    claim_on_speed,
    claims_on,
    claims_on_iid,
    why_differ,
)
from fedclade_papers.fl_hc.runs import Runs, clusters_at, key_of, labels_of
from fedclade_papers.fl_hc.tables import cuts_of
from fedclade_papers.result import Result

Smoke = Callable[[str], Result]

NAMES = [each.name for each in OF_PAPER]
TABLES = [name for name in NAMES if "table" in name]

OF_CURVES = EXPERIMENTS["flhc-fig1-6"].paper

SMALL: dict[str, Any] = {**EXPERIMENTS["flhc-table2"].settings("smoke"), "rounds": 4}


def paper_of(name: str) -> Paper:
    """Return what the paper says of an experiment."""
    measure: Any = EXPERIMENTS[name].measure
    return measure.args[0]


def claim(outcome: Outcome, text: str) -> Claim:
    """Return the one claim that has this in its text."""
    (found,) = (each for each in outcome.claims if text in each.text)
    return found


def test_the_papers_settings_name_every_cell_of_its_tables():
    cells = [list(paper_of(name).numbers["cells"]) for name in TABLES]
    fractions = EXPERIMENTS["flhc-table1"].paper["client_fractions"]
    assert (
        cells[0]
        == cells[1]
        == cells[2]
        == [f"cf {f:.1f}, n {n}" for f in fractions for n in (1, 3, 5, 10)]
    )
    assert cells[3] == cells[4] == cells[5]
    assert sorted(cells[3]) == EXPERIMENTS["flhc-table4"].paper["hows"]
    of_tables = [f"flhc-table{number}" for number in range(1, 4)]
    of_linkages = [f"flhc-table{number}" for number in range(4, 7)]
    assert ["flhc-iid", *of_tables, "flhc-cohort", *of_linkages, "flhc-fig1-6"] == NAMES


def test_the_figure_of_a_table_names_its_panels_and_its_marks(smoke: Smoke):
    result = smoke("flhc-table1")
    figure = EXPERIMENTS["flhc-table1"].draw(result.outcome, result.settings)
    assert [panel.get_xlabel() for panel in figure.axes] == [
        "accuracy at the end, %",
        "clients at the target at the end, %",
    ]
    legend = figure.axes[1].get_legend() or figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [
        "FL+HC, paper",
        "FL, ours",
        "FL+HC, ours",
    ]


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_has_its_rows(name: str, smoke: Smoke):
    found = smoke(name).outcome
    cells = found.series["cells"]
    settings = EXPERIMENTS[name].settings("smoke")
    assert len(cells) == (2 if "client_fractions" in settings else 10)
    for cell in cells:
        rows = {
            row.what.removeprefix(f"{cell} · ")
            for row in found.rows
            if row.what.startswith(f"{cell} · ")
        }
        assert rows >= {
            "accuracy post cluster",
            "accuracy at the end",
            "clients at the target post cluster",
        }
    assert all(
        0 <= row.ours <= 100 and len(row.seeds) == len(settings["seeds"]) for row in found.rows
    )
    assert sum("FL · " in row.what for row in found.rows) == 2


@pytest.mark.parametrize("name", NAMES)
def test_figures_have_a_panel_for_all_there_is(name: str, smoke: Smoke):
    figure = EXPERIMENTS[name].draw(smoke(name).outcome, smoke(name).settings)
    assert len(figure.axes) == ({"flhc-fig1-6": 12, "flhc-iid": 1}.get(name, 2))


def test_label_swapped_clients_are_told_apart_and_gain_by_it(smoke: Smoke):
    found = smoke("flhc-table2").outcome
    assert claim(found, "FL can only achieve an accuracy of 80 %").holds
    assert claim(found, "finds the 4 clusters").holds
    assert claim(found, "significantly better than FL").holds
    assert claim(found, "at the end FL+HC has").holds is None  # too few rounds to tell


def test_where_a_threshold_misses_the_four_groups_a_cut_at_four_stands_beside_it():
    settings = {
        **EXPERIMENTS["flhc-table2"].settings("smoke"),
        "threshold": 1e-3,
        "rounds_before": [1],
    }
    found = EXPERIMENTS["flhc-table2"].measure(ResultCache({}), settings)
    ours = {row.what: row.ours for row in found.rows}
    by_truth = "cf 0.5, n 1, cut at 4 clusters, the true number"
    assert ours[f"{by_truth} · accuracy at the end"] > ours["cf 0.5, n 1 · accuracy at the end"]
    assert list(found.series["cells"]) == ["cf 0.5, n 1", by_truth]
    assert all(row.own for row in found.rows if row.what.startswith(by_truth)), (
        "no count is chosen by the truth"
    )
    assert not any(row.counts and "from their mean" in row.what for row in found.rows)
    assert [remark for remark in found.remarks if remark.startswith("cf 0.5, n 1: every T from ")]
    assert "At cf 0.5, n 1 T = 0.001 makes 12 clusters in place of 4" in found.summary.because


def test_the_other_reading_of_the_cohort_stands_below_the_papers_rows():
    settings = {
        **EXPERIMENTS["flhc-cohort"].settings("smoke"),
        "rounds_before": [1, 2],
        "rounds": 3,
        "threshold": 1e-3,
    }
    found = EXPERIMENTS["flhc-cohort"].measure(ResultCache({}), settings)
    other = [row for row in found.rows if "K is the cluster's clients" in row.what]
    assert other
    assert not any(row.counts for row in other)
    assert [row.what for row in found.rows if row.own and row not in other] == [
        "cf 0.5, n 1 · accuracy post cluster, from their mean",
        "cf 0.5, n 2 · accuracy post cluster, from their mean",
    ]


def test_each_metric_and_linkage_has_thresholds_of_its_own_and_auto():
    merges = {"l1 average": [[0, 1, 100.0, 2], [2, 3, 400.0, 2], [4, 5, 1000.0, 4]]}
    settings = {"setting": "label-swapped", "threshold_shares": [0.9, 0.3], "cuts": [4, 2]}
    assert cuts_of([merges], settings, "l1 average") == {
        "T = 0.9 of the last merge": [2],
        "T = 0.3 of the last merge": [3],
        "cut at 4 clusters, the true number": [4],
        "cut at 2 clusters": [2],
        "T = auto": [1],
    }
    assert "cut at 4 clusters" in cuts_of(
        [merges], {**settings, "setting": "pathological"}, "l1 average"
    )


def test_pairs_of_fraction_and_rounds_can_be_left_out():
    settings = {
        **EXPERIMENTS["flhc-table1"].settings("smoke"),
        "client_fractions": [0.5, 1.0],
        "left_out": [[1.0, 3]],
    }
    found = EXPERIMENTS["flhc-table1"].measure(ResultCache({}), settings)
    assert list(found.series["cells"]) == ["cf 0.5, n 1", "cf 0.5, n 3", "cf 1.0, n 1"]


def test_runs_of_equal_partitions_are_measured_once_and_the_best_cut_is_shown(
    monkeypatch: pytest.MonkeyPatch,
):
    hows = list(paper_of("flhc-table5").numbers["cells"])
    alike = {how: how.startswith("l1") for how in hows}
    merges = {
        way: [[0, 1, 1.0, 2], [int(way_is_l1), 2, 2.0, 3]] for way, way_is_l1 in alike.items()
    }
    merges["cosine complete, parameters"] = merges["cosine complete"]
    monkeypatch.setattr(Runs, "merges", lambda self, *_: [merges] * len(self.settings["seeds"]))
    monkeypatch.setattr(
        tables,
        "labels_of",
        lambda merged, n_clusters: [merged[1][0], n_clusters, *range(int(n_clusters))],
    )
    monkeypatch.setattr(tables, "_remark_on_parameters", lambda *_: "")
    monkeypatch.setattr(tables, "count_clusters_by_gap", lambda _: 2)
    runs: list[str] = []

    def scripted(_: Runs, algorithm: Any, fraction: float, seed: int) -> dict[str, Any]:
        key = key_of(algorithm, fraction, seed)
        if key not in runs:
            runs.append(key)
        return made_up(0.75 if key.startswith("FL") else 0.9 + 0.01 * algorithm.n_clusters)

    monkeypatch.setattr(Runs, "run", scripted)
    cuts = {"cuts": [2, 3], "threshold_shares": [], "hows": hows}
    settings = {**EXPERIMENTS["flhc-table5"].settings("laptop"), **cuts}
    found = EXPERIMENTS["flhc-table5"].measure(ResultCache({}), settings)
    tried = [
        f"{how}, {cut} clusters, n 10, K of_all, cf 0.2"
        for how in ("cosine average", "l1 average")
        for cut in (2, 3)
    ]
    tried = [f"{key}, seed {seed}" for key in tried for seed in settings["seeds"]]
    assert set(runs) == {*(f"FL, cf 0.2, seed {seed}" for seed in settings["seeds"]), *tried}
    at_the_end = {how: f"{how} · accuracy at the end" for how in ("FL", *hows)}
    assert {row.ours for row in found.rows if row.what in at_the_end.values()} == {75.0, 93.0}
    assert {row.ours for row in found.rows if ", T = auto · " in row.what} == {92.0}
    assert any("l2 ward cut at 3 clusters, 92.0 to 93.0 %" in remark for remark in found.remarks)
    counted = [row for row in found.rows if row.counts]
    assert len(counted) == 4, "ten ways are one run"
    assert {row.what.partition(" · ")[0] for row in counted} == {hows[0]}
    repeated = [row for row in found.rows if row.repeats]
    assert {row.repeats for row in repeated} == {hows[0]}
    assert {row.verdict for row in repeated if row.is_of_paper} == {f"the run of {hows[0]}"}


def test_the_clustering_step_is_no_round_and_moves_nothing():
    runs = Runs(ResultCache({}), SMALL)
    fl = runs.run(FedAvg(), 0.5, 0)
    clustered = FLHC(rounds_before=2, metric="l2", linkage="ward", n_clusters=4)
    hc = runs.run(clustered, 0.5, 0)
    assert fl["rounds"] == hc["rounds"] == [1, 2, 3, 4]
    assert fl["accuracy"][:2] == hc["accuracy"][:2]
    assert hc["accuracy"][2:] != fl["accuracy"][2:]
    assert (hc["clusters"], hc["ari"], fl["clusters"]) == (4, 1.0, 1)


def test_only_clusters_that_were_found_have_a_mean_to_start_from():
    one = FLHC(rounds_before=1, metric="l2", linkage="ward", n_clusters=1)
    assert Runs(ResultCache({}), SMALL).run(one, 0.5, 0)["at_the_mean"] is None
    each = FLHC(rounds_before=1, metric="l2", linkage="ward", n_clusters=SMALL["clients"])
    apart = Runs(ResultCache({}), SMALL).run(each, 1.0, 0)
    # A client alone is moved by its own update, as in the round after the step, but for other draws of its batches.
    assert apart["at_the_mean"] == pytest.approx(apart["accuracy"][1], abs=0.06)


def test_label_swapped_clients_are_tested_on_images_of_their_own():
    clients = Runs(ResultCache({}), SMALL).federation(0).clients
    tested = [set(client.test.tolist()) for client in clients]
    assert [len(each) for each in tested] == [25] * 12
    assert len(set.union(*tested)) == 12 * 25


def test_writers_are_natural_clients(tmp_path: Path):
    user = {"x": [[0.1 * number] * 784 for number in range(6)], "y": [0, 1, 2, 3, 4, 61]}
    leaf = {"users": ["ann", "bob"], "num_samples": [6, 6], "user_data": {"ann": user, "bob": user}}
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "data.json").write_text(json.dumps(leaf))
    settings = {**OF_CURVES["settings"]["by writer"], "clients": 2}
    federation = Runs(ResultCache({}, data_dir=tmp_path), settings).federation(0)
    assert sorted(client.name for client in federation.clients) == ["ann", "bob"]
    assert federation.pool.outputs == 62


def test_figures_whose_data_is_missing_are_named(tmp_path: Path):
    settings = {
        "settings": {"by writer": OF_CURVES["settings"]["by writer"]},
        "figures": {"figure 4": OF_CURVES["figures"]["figure 4"]},
        "seeds": [0],
    }
    found = EXPERIMENTS["flhc-fig1-6"].measure(ResultCache({}, data_dir=tmp_path), settings)
    assert found.remarks[-1] == "figure 4 was not measured: femnist is not at hand."
    assert found.series == {}
    assert EXPERIMENTS["flhc-fig1-6"].draw(found, settings).axes


def made_up(accuracy: float, reached: float = 0.0, ari: float = 1.0) -> dict[str, Any]:
    """Return a run of 20 rounds that is as good in all of them."""
    rounds = list(range(1, 21))
    shares = {"accuracy": [accuracy] * 20, "reached": [reached] * 20}
    return {"rounds": rounds, **shares, "ari": ari, "clusters": 4, "at_the_mean": None}


def cells(fl: dict[str, Any], **runs: dict[str, Any]) -> list[Cell]:
    return [
        Cell(key.replace("_", " "), n, [run], [fl])
        for n, (key, run) in enumerate(runs.items(), start=1)
    ]


def holds(claims: list[Claim]) -> list[bool | None]:
    return [each.holds for each in claims]


def claims(name: str, fl: dict[str, Any], rounds: int = 20, **runs: dict[str, Any]) -> list[Claim]:
    """Return the claims on a table of made-up runs."""
    return claims_on(paper_of(name), cells(fl, **runs), {"rounds": rounds})


def test_claims_on_label_swapped_clients():
    good = claims("flhc-table2", made_up(0.79), a=made_up(0.986), b=made_up(0.985))
    assert holds(good) == [True, True, True, True, True]
    bad = claims("flhc-table2", made_up(0.9), a=made_up(0.91, ari=0.5), b=made_up(0.99))
    assert holds(bad) == [False, False, False, False, False]
    assert bad[0].measured == "best of all rounds 90.0 %"
    assert bad[2].measured == "+1.0 to +9.0 points beside FL"


def test_claims_on_pathological_clients():
    fl = made_up(0.5, 0.1)
    good = claims("flhc-table1", fl, a=made_up(0.9, 0.3), b=made_up(0.6, 0.2))
    assert holds(good) == [True, True, True]
    assert good[1].measured == "n = 1: 1.80x to 1.80x, later: 1.20x to 1.20x"
    loss = claims("flhc-table1", made_up(0.5, 0.3), a=made_up(0.9, 0.29), b=made_up(0.6, 0.5))
    assert (loss[2].seen, loss[2].measured[:13]) == ("no", "1.0x to 1.7x:"), "0.97x is a loss"
    little = claims("flhc-table1", made_up(0.5, 0.3), a=made_up(0.9, 0.33), b=made_up(0.6, 0.5))
    assert little[2].seen == "direction only", "1.1x is no 1.2x"
    # 3.0 times the clients, the paper 2.0
    assert [each.seen for each in good] == ["yes", "yes", "direction only"]
    bad = claims("flhc-table1", fl, a=made_up(0.45, 0.1), b=made_up(0.6, 0.0))
    assert holds(bad) == [False, False, False]
    assert bad[0].measured == "at the end in 1 of 2, in the round after clustering in 1"


def test_claims_on_iid_clients():
    counts = {
        "n 1, l2 ward": [7],
        "n 2, l2 ward": [1],
        "n 2, cosine average": [1],
        "n 2, l1 average": [10],
    }
    settings = {"rounds_before": [1, 2]}
    (cell,) = cells(made_up(0.99), a=made_up(0.985))
    good = claims_on_iid(paper_of("flhc-iid"), counts, cell, settings)
    assert [each.seen for each in good] == ["yes"] * 3
    assert good[1].measured == "7 clusters, and 0.5 points less at the end"
    (far,) = cells(made_up(0.99), a=made_up(0.9))
    assert [each.seen for each in claims_on_iid(paper_of("flhc-iid"), counts, far, settings)] == [
        "yes",
        "direction only",
        "yes",
    ]
    other = {
        "n 1, l2 ward": [1],
        "n 2, l2 ward": [1, 2],
        "n 2, cosine average": [1],
        "n 2, l1 average": [1],
    }
    assert holds(claims_on_iid(paper_of("flhc-iid"), other, cell, settings)) == [False] * 3


def test_a_merge_tells_the_clusters_at_every_threshold_and_cut():
    merges = [[0, 1, 0.5, 2], [2, 3, 1.0, 2], [4, 5, 4.0, 4]]
    assert [clusters_at(merges, T) for T in (0.1, 0.5, 0.9, 1.0, 3.9, 4.0)] == [4, 3, 3, 2, 2, 1]
    assert [labels_of(merges, n) for n in (1, 2, 4)] == [[0] * 4, [0, 0, 1, 1], [0, 1, 2, 3]]


def test_clients_merge_by_updates_and_by_parameters(tmp_path: Path):
    (merges,) = Runs(ResultCache({}, folder=tmp_path), SMALL).merges(2, 0.5)
    assert len(merges) == 11
    truth = [client % 4 for client in range(SMALL["clients"])]
    assert labels_of(merges["l2 ward"], 4) == truth
    # The joint model, which all parameters share, leaves the angles between them small.
    assert merges["cosine complete, parameters"][-1][2] < merges["cosine complete"][-1][2]


def test_claims_on_writers():
    fl = made_up(0.7)
    worse = claims("flhc-table3", fl, a=made_up(0.6), b=made_up(0.65))
    better = claims("flhc-table3", fl, a=made_up(0.8), b=made_up(0.65))
    assert (holds(worse), holds(better)) == ([True], [False])
    runs = {"cosine_average": made_up(0.6), "l2_ward": made_up(0.8)}
    assert holds(claims("flhc-table6", fl, **runs)) == [True]
    runs["cosine_single"] = made_up(0.71)
    assert holds(claims("flhc-table6", fl, **runs)) == [False]


@pytest.mark.parametrize(
    ("name", "ranked"),
    [("flhc-table4", ("l1", "l2", "cosine")), ("flhc-table5", ("cosine", "l2", "l1"))],
)
def test_claims_on_metrics(name: str, ranked: tuple[str, ...]):
    scores = dict(zip(ranked, (0.99, 0.987, 0.984), strict=True))
    runs = {f"{metric}_average": made_up(score, 0.5) for metric, score in scores.items()}
    good = claims(name, made_up(0.79, 0.1), **runs)
    assert holds(good) == [True] * len(good)
    runs[f"{ranked[0]}_average"] = made_up(0.7, 0.0)
    assert not any(holds(claims(name, made_up(0.9, 0.1), **runs)))


def test_clusters_that_are_not_the_true_ones_are_named():
    runs = {
        "cosine_average": made_up(0.99),
        "l2_ward": made_up(0.9, ari=0.5),
        "l1_single": made_up(0.91),
    }
    found = claims("flhc-table5", made_up(0.8), **runs)[-1]
    assert found.measured == "90.0 to 99.0 %; other clusters than the true ones with l2 ward"
    because = why_differ(paper_of("flhc-table5"), cells(made_up(0.8), **runs), {"cuts": [4]})
    assert because.endswith(
        "At the best of the cuts tried, l2 ward finds others than the 4 groups; the paper does not tell its thresholds."
    )


def test_metrics_that_were_not_measured_leave_their_order_open():
    runs = {"l2_ward": made_up(0.9), "l1_single": made_up(0.91)}
    found = claims("flhc-table4", made_up(0.8), **runs)[1]
    assert found.holds is None
    assert found.measured == "l1 91.0 %, l2 90.0 %; not measured: cosine"


def test_runs_of_few_rounds_tell_little():
    few = claims("flhc-table1", made_up(0.5), 8, a=made_up(0.9), b=made_up(0.6))
    assert holds(few) == [None] * 3


def test_curves_are_compared_from_the_clustering_step_on(smoke: Smoke):
    found = smoke("flhc-fig1-6").outcome
    assert claim(found, "figure 3: in any given round").measured
    before = {**made_up(0.9), "reached": [0.0] + [0.5] * 19}
    paper = paper_of("flhc-fig1-6")
    (cell,) = cells(made_up(0.8, 0.4), a=before)
    assert claim_on_curve(paper, cell).seen == "yes"
    (cell,) = cells(made_up(0.8, 0.4), a={**before, "reached": [0.0] + [0.5] * 18 + [0.4]})
    assert claim_on_curve(paper, cell).seen == "direction only", "in any given round"
    (cell,) = cells(made_up(0.9, 0.6), a={**before, "reached": [1.0] + [0.5] * 19})
    lost = claim_on_curve(paper, cell)
    measured = "in 0 of 19 rounds; on the mean of these rounds FL+HC 50.0 %, FL 60.0 %"
    assert (lost.seen, lost.measured) == ("no", measured)


def test_fl_hc_is_sooner_if_it_gets_in_fewer_rounds_to_where_fl_ends():
    slow = {**made_up(0.9), "accuracy": [0.1] * 10 + [0.9] * 10}
    (cell,) = cells(slow, a={**slow, "accuracy": [0.1] * 5 + [0.9] * 15})
    good = claim_on_speed(paper_of("flhc-fig1-6"), cell)
    measured = "FL first has the 90.0 % at which it ends in round 11, FL+HC in 6"
    assert (good.seen, good.measured) == ("yes", measured)
    (cell,) = cells(slow, a=made_up(0.89))
    assert claim_on_speed(paper_of("flhc-fig1-6"), cell).measured.endswith("FL+HC in none")
    assert claim_on_speed(paper_of("flhc-fig1-6"), cell).seen == "no"


def test_iid_clients_are_said_to_be_one_from_three_rounds_on_if_three_were_tried():
    settings = {"rounds_before": [1, 10], "rounds": 20}
    counts = {"n 1, l2 ward": [7], "n 10, l2 ward": [1], "n 10, cosine average": [1]}
    counts["n 10, l1 average"] = [5]
    (cell,) = cells(made_up(0.99), a=made_up(0.985))
    (one, *_) = claims_on_iid(paper_of("flhc-iid"), counts, cell, settings)
    assert one.seen == "direction only"


def test_a_slightly_negative_effect_is_one_of_at_most_five_points():
    fl = made_up(0.7)
    (slight,) = claims("flhc-table3", fl, a=made_up(0.66), b=made_up(0.69), c=made_up(0.5))
    (large,) = claims("flhc-table3", fl, a=made_up(0.6), b=made_up(0.6), c=made_up(0.69))
    (none,) = claims("flhc-table3", fl, a=made_up(0.7), b=made_up(0.7), c=made_up(0.69))
    assert [claim.seen for claim in (slight, large, none)] == ["yes", "direction only", "no"]
    assert slight.measured == "below FL in 3 of 3, by at most five points in 2"
