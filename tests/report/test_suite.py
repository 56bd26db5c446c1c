import csv
import io
import json

import pytest
from rich.console import Console

from fedclade.config import Printed
from fedclade.core.errors import ConfigError
from fedclade.report import Comparison, SuiteComparison


@pytest.fixture
def suite(summary_run) -> SuiteComparison:
    """Two scenarios; the first has no oracle."""
    reached = {
        "accuracy": 0.6,
        "share_of_clients": 1.0,
        "rounds_to_target": 3,
        "bytes_to_target": 1500,
    }
    iid = {"cfl": [summary_run("cfl", 0.8)], "local": [summary_run("local", 0.7)]}
    swap = {
        "fedavg": [summary_run("fedavg", 0.5)],
        "oracle": [summary_run("oracle", 0.9)],
        "cfl": [summary_run("cfl", 0.7, target=reached), summary_run("cfl", 0.9, seed=1)],
    }
    return SuiteComparison({"iid": Comparison(iid, "iid"), "swap": Comparison(swap, "swap")})


def test_every_scenario_has_a_table(suite):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(suite.table(console.width))
    text = console.export_text()
    assert text.index("iid: comparison of 2") < text.index("swap: comparison of 3 configurations")
    markdown = suite.markdown()
    assert "**iid: comparison of 2 configurations**\n\n| config |" in markdown
    (cfl,) = [line for line in markdown.splitlines() if line.startswith("| cfl | 2 |")]
    assert (
        cfl
        == "| cfl | 2 | 80.0 ± 127.1 | 80.0 | – | 1 | 0.50 | 3 (1 of 2) | 1.5 kB | 3.0 kB | 1 min 01 s |"
    )


def test_the_overview_has_algorithms_by_scenarios(suite, summary_run):
    known = {**summary_run("cfl", 0.8).summary["clusters"], "ari": 0.5}
    rotation = Comparison({"cfl": [summary_run("cfl", 0.8, clusters=known)]}, "rotation")
    suite = SuiteComparison({**suite.scenarios, "rotation": rotation})
    lines = suite.markdown().splitlines()
    assert lines[0].startswith("**Accuracy in percent")
    assert lines[2:8] == [
        "| config | iid | swap | rotation |",
        "| :-- | --: | --: | --: |",
        "| fedavg |  | 50.0 |  |",
        "| oracle |  | 90.0 |  |",
        "| cfl | 80.0 | 80.0 ± 127.1 | 80.0  0.50 |",
        "| local | 70.0 |  |  |",
    ]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(*suite.overview())
    (cfl,) = [
        line.split()
        for line in console.export_text().splitlines()
        if line.lstrip().startswith("cfl")
    ]
    assert cfl == ["cfl", "80.0", "80.0", "80.0", "0.50"]


@pytest.mark.parametrize(("width", "tables"), [(40, 10), (80, 4), (120, 3), (None, 1)])
def test_an_overview_too_wide_for_the_terminal_is_several_tables(summary_run, width, tables):
    """Nothing is cut off, and who is in none of a table's scenarios is not in the table."""
    scores = {f"mnist P(X|Y) {k}": 0.101 + k / 100 for k in range(20)}
    each = {
        name: Comparison({"fedavg": [summary_run("fedavg", score)]}, name)
        for name, score in scores.items()
    }
    first = Comparison(
        {"fedavg": [summary_run("fedavg", 0.1)], "cfl_rounds": [summary_run("cfl", 0.9)]}, "first"
    )
    found = SuiteComparison({"first": first, **each}).overview(width)
    assert len(found) == tables
    console = Console(width=width or 1000, record=True, file=io.StringIO())
    console.print(*found)
    text = console.export_text()
    assert "…" not in text
    assert [f"{100 * score:.1f}" in text.split() for score in scores.values()] == [True] * 20
    assert text.count("fedavg") == tables
    assert text.count("cfl_rounds") == 1
    assert max(len(line.rstrip()) for line in text.splitlines()) <= console.width


@pytest.mark.parametrize("width", range(30, 70))
def test_no_width_cuts_an_overview_off(summary_run, width):
    each = {f"s{k}": Comparison({"m": [summary_run("m", 0.5)]}, f"s{k}") for k in range(8)}
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*SuiteComparison(each).overview(width))
    assert "…" not in console.export_text()


def test_csv_and_json_have_the_scenario(suite):
    rows = list(csv.DictReader(io.StringIO(suite.csv())))
    assert [(row["scenario"], row["label"]) for row in rows] == [
        ("iid", "cfl"),
        ("iid", "local"),
        ("swap", "fedavg"),
        ("swap", "oracle"),
        ("swap", "cfl"),
    ]
    assert [row["bytes_to_target"] for row in rows] == ["", "", "", "", "1500.0"]
    assert float(rows[-1]["gap_closed"]) == pytest.approx(0.5)
    assert json.loads(suite.json())["scenarios"]["iid"]["rows"][0]["label"] == "cfl"


def test_an_algorithm_is_on_the_same_line_in_every_panel(suite):
    iid, swap = suite.figure().axes
    assert (iid.get_title(loc="left"), swap.get_title(loc="left")) == ("iid", "swap")
    labels = [label.get_text() for label in iid.get_yticklabels()]
    assert labels == ["fedavg", "oracle", "cfl", "local"]
    dots = {
        labels[int(place)]: mean
        for mean, place in (c.lines[0].get_xydata()[0] for c in iid.containers)
    }
    assert dots == pytest.approx({"cfl": 0.8, "local": 0.7})
    assert [text.get_text() for text in swap.texts] == ["50.0", "90.0", "80.0"]
    (interval,) = swap.containers[2].lines[2][0].get_segments()
    # 0.8 ± 1.27: there is no accuracy beyond
    assert [end[0] for end in interval] == pytest.approx([0.0, 1.0])


def test_save_writes_all_four(suite, tmp_path):
    suite.save(tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        f"comparison.{s}" for s in ("md", "csv", "json", "png")
    }


def ranked(summary_run, scenarios: int) -> SuiteComparison:
    """In every scenario fedavg is last, and nearly always cfl before rcfl; the oracle is ahead of all."""

    def runs(k: int) -> dict:
        scores = {"fedavg": 0.5, "rcfl": 0.75 if k == 0 else 0.6, "cfl": 0.7, "oracle": 0.9}
        return {
            name: [summary_run(name, score + seed / 100, seed=seed) for seed in (0, 1)]
            for name, score in scores.items()
        }

    return SuiteComparison({f"s{k}": Comparison(runs(k), f"s{k}") for k in range(scenarios)})


def test_several_scenarios_have_mean_ranks_of_all_but_the_oracle(summary_run, tmp_path):
    suite = ranked(summary_run, 5)
    assert suite.ranks is not None
    assert suite.ranks.mean == {"cfl": 1.2, "rcfl": 1.8, "fedavg": 3.0}
    assert (suite.ranks.scenarios, suite.ranks.sets) == (5, 10)
    # q of Demšar's table 5
    assert suite.ranks.critical == pytest.approx(2.343 * (3 * 4 / (6 * 10)) ** 0.5, abs=1e-3)
    assert suite.ranks.alike() == [("cfl", "rcfl")]
    lines = suite.markdown().splitlines()
    at = lines.index("**Mean ranks over 5 scenarios, 10 runs each**")
    assert lines[at + 4 : at + 7] == ["| cfl | 1.2 |", "| rcfl | 1.8 |", "| fedavg | 3.0 |"]
    assert lines[at + 8].startswith("1 is the best. Friedman's p = 0.0002")  # exp(-8.4)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(suite.table(console.width))
    assert "Mean ranks over 5 scenarios" in console.export_text()
    assert json.loads(suite.json())["ranks"]["mean"]["rcfl"] == 1.8
    suite.save(tmp_path / "out")
    assert (tmp_path / "out" / "ranks.png").stat().st_size > 10_000


def test_the_picture_of_ranks_joins_those_that_are_alike(summary_run):
    (axes,) = ranked(summary_run, 5).figures()["ranks"].axes
    assert [text.get_text().split() for text in axes.texts[3:6]] == [
        ["cfl", "1.2"],
        ["rcfl", "1.8"],
        ["3.0", "fedavg"],
    ]
    (bar,) = [line for line in axes.lines if line.get_gid() == "alike"]
    assert bar.get_xdata() == pytest.approx([1.2, 1.8], abs=0.05)


def test_of_few_scenarios_there_are_no_ranks(summary_run):
    suite = ranked(summary_run, 1)
    assert suite.ranks is None
    assert "ank" not in suite.markdown()
    assert "ranks" not in json.loads(suite.json())


def test_equal_scores_have_ranks_without_a_p_value(summary_run):
    runs = {name: [summary_run(name, 0.5)] for name in ("cfl", "fedavg", "rcfl")}
    ranks = SuiteComparison({f"s{k}": Comparison(runs) for k in range(4)}).ranks
    assert ranks is not None
    assert (set(ranks.mean.values()), ranks.p_value) == ({2.0}, None)
    assert "Friedman's p = –" in ranks.note


def test_published_figures_are_next_to_own_means_if_all_scenarios_of_a_group_have_run(summary_run):
    runs = {"s 1": {"cfl": 0.8, "fedavg": 0.5}, "s 2": {"cfl": 0.9}, "t": {"fedavg": 0.7}}
    scenarios = {
        name: Comparison(
            {label: [summary_run(label, score)] for label, score in each.items()}, name
        )
        for name, each in runs.items()
    }
    both = Printed("A paper", "both", ("s 1", "s 2"), {"fedavg": 55.5, "cfl": 84})
    third = Printed("A paper", "third", ("t",), {"ifca": 60.0})
    suite = SuiteComparison(scenarios, [both, third])
    lines = suite.markdown().splitlines()
    at = lines.index("**Published by A paper, and reproduced with fedclade**")
    assert lines[at + 2 : at + 7] == [
        "| config | both, published | both, fedclade | third, published | third, fedclade |",
        "| :-- | --: | --: | --: | --: |",
        "| cfl | 84.0 | 85.0 |  |  |",
        "| fedavg | 55.5 |  |  | 70.0 |",
        "| ifca |  |  | 60.0 |  |",
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(suite.table(console.width))
    assert "Published by A paper, and reproduced with fedclade" in console.export_text()
    first, second = json.loads(suite.json())["printed"]
    assert (first["name"], first["ours"]) == ("both", {"cfl": pytest.approx(85)})
    assert second["figures"] == {"ifca": 60.0}


def test_a_suite_needs_a_scenario():
    with pytest.raises(ConfigError, match="at least 1 scenario, got 0"):
        SuiteComparison({})
