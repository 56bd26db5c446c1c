"""Tables for papers, paired tests, and tables in narrow terminals."""

from __future__ import annotations

import re

import pytest
from rich.console import Console
from scipy import stats

from fedclade.core import ConfigError
from fedclade.report import Comparison, holm, new_table
from fedclade.report.latex import escape_latex
from fedclade.tasks.metrics import spread

SCORES = {
    "fedavg": [0.50, 0.52, 0.51, 0.49],
    "cfl": [0.80, 0.82, 0.81, 0.80],
    "ifca": [0.60, 0.63, 0.60, 0.59],
    "oracle": [0.90, 0.91, 0.90, 0.91],
}


@pytest.fixture
def four_seeds(summary_run) -> Comparison:
    """Each method with four seeds; the methods differ far more than the seeds do."""
    return Comparison(
        {
            name: [summary_run(name, score, seed=seed) for seed, score in enumerate(scores)]
            for name, scores in SCORES.items()
        }
    )


def cells(latex: str, beginning: str) -> list[str]:
    (line,) = [each for each in latex.splitlines() if each.strip().startswith(beginning)]
    return [cell.strip() for cell in line.removesuffix(r"\\").split(" & ")]


def test_latex_is_a_booktabs_table_with_mean_and_standard_deviation(four_seeds):
    latex = four_seeds.latex()
    lines = latex.splitlines()
    rules = [r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    assert [line.strip() for line in lines if line.strip() in rules] == rules
    assert r"\begin{tabular}{lrrrrrrr}" in latex
    assert cells(latex, "config")[:2] == ["config", r"accuracy, \%"]
    # the standard deviation of 50, 52, 51, 49 is 1.29, and the mean 50.5
    assert cells(latex, "fedavg")[:2] == ["fedavg", r"50.5 $\pm$ 1.3"]
    assert "standard deviation over 4 seeds" in latex
    # a row of a table has as many cells as the table has columns
    assert {line.count(" & ") for line in lines if line.endswith(r"\\")} == {7}


def test_latex_can_have_the_interval_and_some_columns(four_seeds):
    latex = four_seeds.latex(spread="interval", columns=["accuracy, %", "config"], label="tab:a-1")
    half_width = stats.t.ppf(0.975, 3) * stats.sem([50, 52, 51, 49])
    assert cells(latex, rf"50.5 $\pm$ {half_width:.1f}") == [
        rf"50.5 $\pm$ {half_width:.1f}",
        "fedavg",
    ]
    assert r"\begin{tabular}{rl}" in latex
    assert r"\label{tab:a-1}" in latex
    assert r"95 \% interval" in latex


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["acuracy, %"]}, "unknown column 'acuracy, %'; did you mean 'accuracy, %'?"),
        ({"label": "a}b"}, "label should be letters, digits and .*, got 'a}b'"),
        ({"bold": "always"}, "bold should be one of significant, best, none, got 'always'"),
    ],
)
def test_latex_refuses_what_it_does_not_know(four_seeds, options, message):
    with pytest.raises(ConfigError, match=message):
        four_seeds.latex(**options)


def test_the_best_is_bold_only_if_a_test_says_so(four_seeds, summary_run):
    # The oracle has the best mean, but is given the true clusters.
    assert cells(four_seeds.latex(), "cfl")[1] == r"\textbf{80.8 $\pm$ 1.0}"
    assert four_seeds.latex().count("textbf") == 1
    assert "textbf" not in four_seeds.latex(bold="none")
    close = Comparison(
        {
            "cfl": [summary_run("cfl", score, seed=i) for i, score in enumerate([0.7, 0.8, 0.6])],
            "ifca": [summary_run("ifca", score, seed=i) for i, score in enumerate([0.8, 0.6, 0.6])],
        }
    )
    assert "textbf" not in close.latex()
    assert cells(close.latex(bold="best"), "cfl")[1].startswith(r"\textbf{70.0")
    assert "Bold: best mean, without a test." in close.latex(bold="best")


def test_a_mean_over_fewer_seeds_is_not_bold(summary_run):
    scores = {"fedavg": [0.5, 0.6], "cfl": [0.7, 0.6], "ifca": [0.9]}
    latex = Comparison(
        {
            name: [summary_run(name, score, seed=seed) for seed, score in enumerate(values)]
            for name, values in scores.items()
        }
    ).latex(bold="best")
    assert cells(latex, "ifca")[1:3] == ["1", "90.0"]
    assert cells(latex, "cfl")[2].startswith(r"\textbf{65.0")
    assert "Bold: best mean over 2 seeds, without a test." in latex


def test_a_single_seed_has_no_spread_and_no_test(summary_run):
    comparison = Comparison({name: [summary_run(name, 0.5)] for name in ("fedavg", "cfl")})
    assert cells(comparison.latex(), "fedavg")[1] == "50.0"
    assert "textbf" not in comparison.latex()
    (test,) = comparison.paired_tests()
    assert (test.seeds, test.p_value, test.better) == (1, None, None)


def test_paired_tests_are_students_corrected_by_holm(four_seeds):
    tests = four_seeds.paired_tests()
    raw = {}
    for test in tests:
        first, second = SCORES[test.first], SCORES[test.second]
        raw[test.first, test.second] = stats.ttest_rel(first, second).pvalue
        assert test.difference.p_value == pytest.approx(raw[test.first, test.second])
        assert test.difference.mean == pytest.approx(sum(first) / 4 - sum(second) / 4)
    assert len(raw) == 6
    assert {(t.first, t.second): t.p_value for t in tests} == pytest.approx(holm(raw))
    assert [t.better for t in tests] == ["cfl", "ifca", "oracle", "cfl", "oracle", "oracle"]


def test_tests_against_one_configuration_are_fewer_and_corrected_for_fewer(four_seeds):
    tests = four_seeds.paired_tests("cfl")
    raw = {t.second: stats.ttest_rel(SCORES["cfl"], SCORES[t.second]).pvalue for t in tests}
    assert set(raw) == {"fedavg", "ifca", "oracle"}
    assert {t.second: t.p_value for t in tests} == pytest.approx(holm(raw))
    with pytest.raises(ConfigError, match="unknown configuration 'clf'; did you mean 'cfl'"):
        four_seeds.paired_tests("clf")
    with pytest.raises(ConfigError, match="test_to_train should be at least 0, got -1"):
        four_seeds.paired_tests(test_to_train=-1.0)


def test_seeds_that_share_their_rows_are_weaker_evidence(four_seeds):
    plain = [test.difference for test in four_seeds.paired_tests()]
    shared = [test.difference for test in four_seeds.paired_tests(test_to_train=0.25)]
    for one, other in zip(plain, shared, strict=True):
        assert other.p_value > one.p_value
        assert other.half_width == pytest.approx(one.half_width * (0.25 + 0.25) ** 0.5 / 0.5)


def test_only_common_seeds_are_paired_and_lower_can_be_better(summary_run):
    def run(name, loss, seed):
        metric = {"name": "mae", "higher_is_better": False, "share": False}
        return summary_run(name, seed=seed, metrics=[metric], mae=spread([loss] * 4))

    runs = {
        "fedavg": [run("fedavg", 2.0 + 0.1 * seed, seed) for seed in (0, 1, 2)],
        "cfl": [run("cfl", 1.0, seed) for seed in (1, 2, 3)],
    }
    (test,) = Comparison(runs).paired_tests()
    assert test.seeds == 2
    assert test.difference.mean == pytest.approx(-1.15)
    text = str_of(Comparison(runs).paired_tests().table(), 100)
    assert re.search(r"fedavg +cfl +2 +−1\.15 ± 0\.64 +0\.028 +0\.028", text)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a_b & 50 % #1", r"a\_b \& 50 \% \#1"),
        (r"\input{x}", r"\textbackslash{}input\{x\}"),
        (
            "$x^2$ ~<|>",
            r"\$x\textasciicircum{}2\$ \textasciitilde{}\textless{}\textbar{}\textgreater{}",
        ),
        ("[3cm] *", "{[}3cm] {*}"),
        ("−0.3 ± 0.1 – α", r"$-$0.3 $\pm$ 0.1 -- $\alpha$"),
        ("a\nb\x1b[31m", "a b{[}31m"),
    ],
)
def test_no_character_of_a_label_is_a_command_of_latex(text, escaped, summary_run):
    assert escape_latex(text) == escaped
    latex = Comparison({text: [summary_run("cfl")]}).latex()
    (row,) = latex.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert row.startswith(f"{escaped} & cfl &")


def str_of(table, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


@pytest.fixture
def wide(summary_run) -> Comparison:
    """Three seeds of three methods with eight metrics, whose table is wider than 120 characters."""
    metrics = [f"metric_{letter}" for letter in "abcdefgh"]
    notes = [{"name": name, "higher_is_better": True, "share": True} for name in metrics]

    def run(name, i, seed):
        scores = {
            metric: spread([0.123456 * (i + 1) + 0.0111 * j + 0.01 * seed] * 4)
            for j, metric in enumerate(metrics)
        }
        return summary_run(name, seed=seed, metrics=notes, **scores)

    names = ["fedavg", "cfl", "clients_with_a_long_name"]
    return Comparison(
        {name: [run(name, i, seed) for seed in range(3)] for i, name in enumerate(names)}
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_wide_tables_never_cut_digits(wide, width, monkeypatch):
    numbers = re.compile(r"\d+\.\d ± \d+\.\d")
    complete = str_of(wide.table(), 500)
    assert len(complete.splitlines()[3]) > 120
    wanted = sorted(numbers.findall(complete))
    assert len(wanted) == 3 * 8
    monkeypatch.setenv("COLUMNS", str(width))
    for text in (str_of(wide.table(), width), str_of(wide.table(width), width), str(wide)):
        assert sorted(numbers.findall(text)) == wanted
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
        assert text.count("clients_with_a_long_name") > 1  # each part names its rows


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_a_table_that_does_not_fit_is_split_and_keeps_title_caption_and_footer(width):
    table = new_table("Title", caption="Caption", show_footer=True, collapse_padding=True)
    table.add_column("name", footer="mean")
    for i in range(12):
        table.add_column(f"column {i}", justify="right", footer=f"{10**5 + i}")
    table.add_row("row", *(f"{10**6 + i}" for i in range(12)))
    text = str_of(table, width)
    numbers = re.findall(r"\d{6,}", text)
    assert sorted(numbers) == sorted(f"{10**k + i}" for i in range(12) for k in (5, 6))
    assert (text.count("Title"), text.count("Caption")) == (1, 1)
    assert text.count("row") == text.count("mean") >= (1 if width == 120 else 2)


def test_print_shows_the_table(four_seeds, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    print(four_seeds)
    out = capsys.readouterr().out
    assert out.startswith("Comparison of 4 configurations, 4 seeds each\n")
    assert re.search(r"^ ?cfl +80\.8 ± 1\.5 ", out, re.MULTILINE)
    assert repr(four_seeds) == "Comparison(fedavg, cfl, ifca, oracle)"


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_run_that_diverged_is_neither_tested_nor_best(summary_run):
    infinite = float("inf")
    scores = {"ifca": [infinite, 0.9], "cfl": [0.8, 0.7], "fedavg": [infinite, -infinite]}
    comparison = Comparison(
        {
            name: [summary_run(name, score, seed=seed) for seed, score in enumerate(values)]
            for name, values in scores.items()
        }
    )
    assert cells(comparison.latex(), "ifca")[1] == "inf"
    assert cells(comparison.latex(), "fedavg")[1] == "--"
    assert cells(comparison.latex(bold="best"), "cfl")[1] == r"\textbf{75.0 $\pm$ 7.1}"
    assert [test.p_value for test in comparison.paired_tests()] == [None, None, None]
    assert comparison.paired_tests().table().row_count == 3
