import csv
import io
import json

import pytest
from rich.console import Console

from fedclade.core.errors import ConfigError
from fedclade.report import Comparison, SuiteComparison


@pytest.fixture
def suite(summary_run) -> SuiteComparison:
    """Two scenarios; the first has no oracle."""
    reached = {"accuracy": 0.6, "share_of_clients": 1.0, "rounds_to_target": 3, "bytes_to_target": 1500}
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
    assert cfl == "| cfl | 2 | 80.0 ± 127.1 | 80.0 | – | 1 | 0.50 | 3 (1 of 2) | 1.5 kB | 3.0 kB | 1 min 01 s |"


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
    (cfl,) = [line.split() for line in console.export_text().splitlines() if line.lstrip().startswith("cfl")]
    assert cfl == ["cfl", "80.0", "80.0", "80.0", "0.50"]


@pytest.mark.parametrize(("width", "tables"), [(40, 10), (80, 4), (120, 3), (None, 1)])
def test_an_overview_too_wide_for_the_terminal_is_several_tables(summary_run, width, tables):
    """Nothing is cut off, and who is in none of a table's scenarios is not in the table."""
    scores = {f"mnist P(X|Y) {k}": 0.101 + k / 100 for k in range(20)}
    each = {name: Comparison({"fedavg": [summary_run("fedavg", score)]}, name) for name, score in scores.items()}
    first = Comparison({"fedavg": [summary_run("fedavg", 0.1)], "cfl_rounds": [summary_run("cfl", 0.9)]}, "first")
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
    dots = {labels[int(place)]: mean for mean, place in (c.lines[0].get_xydata()[0] for c in iid.containers)}
    assert dots == pytest.approx({"cfl": 0.8, "local": 0.7})
    assert [text.get_text() for text in swap.texts] == ["50.0", "90.0", "80.0"]
    (interval,) = swap.containers[2].lines[2][0].get_segments()
    assert [end[0] for end in interval] == pytest.approx([0.0, 1.0])  # 0.8 ± 1.27: there is no accuracy beyond


def test_save_writes_all_four(suite, tmp_path):
    suite.save(tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").iterdir()} == {f"comparison.{s}" for s in ("md", "csv", "json", "png")}


def test_a_suite_needs_a_scenario():
    with pytest.raises(ConfigError, match="at least 1 scenario, got 0"):
        SuiteComparison({})
