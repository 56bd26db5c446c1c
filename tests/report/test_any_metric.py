"""Reports of tasks of any kind: every label has the name of the task's own metric."""

import csv
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedclade.core.errors import ConfigError
from fedclade.report import Comparison, SuiteComparison, newcomer_table
from fedclade.report.curves import score_picture
from fedclade.report.figures import save_figures
from fedclade.report.page import Page, RunView, comparison_page, page_html, run_page
from fedclade.report.page.dashboard import Dashboard
from fedclade.report.tables import cluster_table, run_table, tree_view
from fedclade.runs import Newcomers, Run
from fedclade.trackers import scores
from tests.report.conftest import scored
from tests.report.page.test_document import own_parts
from tests.report.test_tables import lines


@dataclass(frozen=True)
class Case:
    """A metric, what reports call it, and how they write 0.64."""

    name: str
    label: str
    higher: bool
    share: bool
    written: str
    target: str

    def of(self, run: Run) -> Run:
        return scored(run, self.name, higher=self.higher, share=self.share, target=0.7)


@pytest.fixture(
    params=[
        Case("mae", "MAE", higher=False, share=False, written="0.640", target="target 0.7"),
        Case("auroc", "AUROC", higher=True, share=True, written="64.0 %", target="target 70 %"),
    ],
    ids=lambda case: case.name,
)
def case(request) -> Case:
    return request.param


@pytest.fixture
def run(make_run, case) -> Run:
    """0 splits into 1 and 2 after round 2; they score 0.64 and 0.74 at the end."""
    rounds = [
        {
            **{
                "round": n,
                "accuracy_mean": 1 / n,
                "accuracy_worst10_mean": 0.5,
                "clusters": 1,
                "ari": 0.0,
            },
            **{"bytes_up": 10, "bytes_down": 20},
        }
        for n in (1, 2, 3, 4)
    ]
    return case.of(replace(make_run([(2, 0)], truth=[0, 0, 1, 1]), metric_rows=rounds))


def newcomers_of(case: Case) -> Newcomers:
    row = {
        "client": 7,
        "name": "late",
        "path": [0, 1],
        "fits": True,
        "by": "loss",
        "scores": [0.1],
        "others": [0.2],
    }
    row |= {"margin": 0.1, "right": True}
    row |= {f"{case.name}{of}": 0.64 for of in ("", "_root", "_own", "_fine_tuned")}
    return Newcomers([], [row], 4, metric=case.name)


def text_of(page: Page) -> str:
    return own_parts(page_html(page))


def test_the_page_of_a_run_names_its_metric_and_no_other(run, make_run, case):
    newcomers = newcomers_of(case)
    written = json.loads(json.dumps({"summary": newcomers.summary, "newcomers": newcomers.rows}))
    page = run_page(RunView(run, case.of(make_run()), "fedavg", written))
    text = text_of(page)
    assert "accuracy" not in text.lower()
    axes = [
        figure["layout"]["yaxis"] for figure in page.figures.values() if "yaxis" in figure["layout"]
    ]
    titles = [
        axis["title"]["text"]
        for axis in axes
        if case.label in axis.get("title", {}).get("text", "")
    ]
    assert titles == [f"mean test {case.label}", f"test {case.label}", f"test {case.label}"]
    assert page.cards[0].label == case.label
    # The run's clients score 0.69 in the mean, those of the other 0.54.
    assert page.cards[0].trend == ("good" if case.higher else "bad")
    assert page.cards[1].note == f"mean {case.label} of the worst 1 client"
    assert page.cards[1].value == (case.written if case.higher else "0.740")
    for told in (
        f"{case.label} of the clusters",
        f"clients’ {case.label}",
        f"Test {case.label} of 1 newcomer",
    ):
        assert told in text
    assert ("Lower is better" in text) != case.higher


def test_the_clients_that_lost_are_those_with_a_worse_score(run, make_run, case):
    section = next(
        each
        for each in run_page(RunView(run, case.of(make_run()), "fedavg")).sections
        if each.id == "clients"
    )
    assert ("no client is worse off" in section.caption) == case.higher
    assert ("4 clients are worse off" in section.caption) != case.higher
    worst_first = section.figures[""]["data"][-1]["y"]
    assert worst_first == sorted(worst_first, reverse=not case.higher)


def test_the_page_of_several_runs_names_their_metric_and_no_other(run, case):
    page = comparison_page(
        [RunView(run), RunView(replace(run, summary=run.summary | {"algorithm": "fedavg"}))], Path()
    )
    text = text_of(page)
    assert "accuracy" not in text.lower()
    assert f"{case.label} over the rounds" in text
    assert page.cards[1].note == case.label


def test_terminal_tables_name_the_metric_and_no_other(run, case):
    newcomers = newcomer_table(newcomers_of(case), run)
    tables = [run_table(run), cluster_table(run), tree_view(run.tree, run), newcomers]
    compared = Comparison({"a": [run], "fedavg": [run]})
    tables += [compared.table(), SuiteComparison({"one": compared}).table()]
    for i, table in enumerate(tables):
        text = "\n".join(lines(table, 160))
        assert "accuracy" not in text.lower()
        assert case.label in text
        assert case.written in text or i > 3, "comparisons have means and the worst"
    assert any(line.startswith(case.target) for line in lines(run_table(run)))
    for text in (compared.markdown(), compared.csv(), compared.json()):
        assert "accuracy" not in text


def test_pictures_dashboard_and_tensorboard_name_the_metric(run, case, tmp_path):
    picture = score_picture(RunView(run))
    assert (picture.title, picture.panels[0].y.log) == (f"{case.label} of the clusters", False)
    assert picture.panels[0].y.form == ("share" if case.share else "number")
    assert [
        each.name for each in save_figures(replace(run, cluster_rows=[], similarities=()), tmp_path)
    ] == [f"{case.name}.png"]
    with Dashboard("mine", 9, tmp_path, 0) as dashboard:
        dashboard.show(run, over=True)
        status = json.loads(dashboard.state(""))["status"]
    assert status.startswith(f"Finished after 4 rounds, {case.label} ")
    tags = scores(run.metric_rows[0])
    assert tags[f"{case.name}/worst tenth"] == f"{case.name}_worst10_mean"
    assert not any("accuracy" in tag for tag in tags)


@pytest.mark.parametrize(("fedavg", "oracle", "expected"), [(0.9, 0.5, 0.5), (0.5, 0.9, None)])
def test_where_less_is_better_the_gap_closes_downwards(summary_run, fedavg, oracle, expected):
    means = {"cfl": 0.7, "fedavg": fedavg, "oracle": oracle}
    noted = {"metrics": [{"name": "mae", "higher_is_better": False, "share": False}]}
    runs = {name: [summary_run(name, mean)] for name, mean in means.items()}
    errors = {
        name: [replace(run, summary=run.summary | noted | {"mae": run.summary["accuracy"]})]
        for name, (run,) in runs.items()
    }
    gap = Comparison(errors).rows[0].gap_closed
    assert (None if gap is None else gap.mean) == (
        None if expected is None else pytest.approx(expected)
    )


def test_runs_of_different_tasks_have_a_table_but_no_picture(run, make_run, case):
    mixed = Comparison({"numbers": [run], "labels": [make_run()]})
    text = "\n".join(lines(mixed.table(), 160))
    assert case.label in text
    assert "accuracy" in text
    told = f"compared runs should have at least one metric in common, got runs with {case.name} against accuracy"
    with pytest.raises(ConfigError, match=told):
        mixed.figure()
    with pytest.raises(ConfigError, match=told):
        comparison_page([RunView(run), RunView(make_run())], Path())


def test_scenarios_of_different_tasks_have_their_own_metrics_in_one_suite(run, make_run, case):
    suite = SuiteComparison(
        {"one": Comparison({"cfl": [run]}), "two": Comparison({"cfl": [make_run()]})}
    )
    heading = f"{case.label}, %" if case.share else case.label
    assert f"| config | one: {heading} | two: accuracy, % |" in suite.markdown()
    assert suite.markdown().startswith("**Scores, mean of the clients and seeds")
    one, two = suite.figure().axes
    assert (one.get_xlabel(), two.get_xlabel()) == (
        case.label + ("" if case.higher else " (lower is better)"),
        "accuracy",
    )
    first, second = csv.DictReader(io.StringIO(suite.csv()))
    assert (float(first[case.name]), first["accuracy"]) == (pytest.approx(0.69), "")
    assert (second[case.name], float(second["accuracy"])) == ("", pytest.approx(0.75))
