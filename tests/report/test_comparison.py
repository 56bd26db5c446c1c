import csv
import io
import json

import pytest
from rich.console import Console

from fedclade.core.errors import ConfigError, MissingExtraError, RunError
from fedclade.report import Comparison
from fedclade.tasks.metrics import spread


@pytest.fixture
def two_seeds(summary_run) -> Comparison:
    """CFL closes half the gap for seed 0 and all of it for seed 1."""

    def runs(algorithm, first, second):
        return [summary_run(algorithm, first, seed=0), summary_run(algorithm, second, seed=1)]

    return Comparison(
        {
            "mine": runs("cfl", 0.7, 0.9),
            "fedavg": runs("fedavg", 0.5, 0.6),
            "best": runs("oracle", 0.9, 0.9),
        }
    )


def test_accuracy_has_the_interval_of_students_t(two_seeds):
    accuracy = two_seeds.rows[0].scores["accuracy"]
    assert accuracy.mean == pytest.approx(0.8)
    # Two values 0.2 apart: t(0.975, 1) · s / √2 with s = 0.2 / √2
    assert accuracy.half_width == pytest.approx(12.7062 * 0.1, rel=1e-5)


def test_gap_closed_is_paired_by_seed_and_then_averaged(two_seeds):
    mine, fedavg, best = two_seeds.rows
    assert mine.gap_closed.values == pytest.approx(
        [(0.7 - 0.5) / (0.9 - 0.5), (0.9 - 0.6) / (0.9 - 0.6)]
    )
    assert mine.gap_closed.mean == pytest.approx(0.75)
    assert fedavg.gap_closed.mean == 0
    assert best.gap_closed.mean == 1


@pytest.mark.parametrize("other", [{"seed": 1}, {"data": "mnist, 4 clients"}, {"model": "cnn"}])
def test_there_is_no_gap_without_baselines_of_the_same_seed_data_and_model(summary_run, other):
    baselines = {name: [summary_run(name, 0.5, **other)] for name in ("fedavg", "oracle")}
    assert Comparison({"cfl": [summary_run("cfl")], **baselines}).rows[0].gap_closed is None


def test_there_is_no_gap_where_the_oracle_is_no_better(summary_run):
    runs = {name: [summary_run(name, 0.5)] for name in ("cfl", "fedavg", "oracle")}
    assert [row.gap_closed for row in Comparison(runs).rows] == [None, None, None]


def test_the_first_of_several_baselines_counts(summary_run):
    runs = {"cfl": 0.7, "fedavg": 0.5, "fedavg again": 0.6, "oracle": 0.9}
    comparison = Comparison(
        {label: [summary_run(label.split()[0], value)] for label, value in runs.items()}
    )
    assert comparison.rows[0].gap_closed.mean == pytest.approx(0.5)


def test_rounds_to_target_are_of_the_runs_that_reached_it(summary_run):
    def target(rounds):
        return {
            "accuracy": 0.9,
            "share_of_clients": 1.0,
            "rounds_to_target": rounds,
            "bytes_to_target": 1,
        }

    runs = [
        summary_run(seed=seed, target=target(rounds)) for seed, rounds in enumerate([10, None, 13])
    ]
    comparison = Comparison({"cfl": runs})
    assert comparison.rows[0].rounds_to_target.values == (10, 13)
    assert "11.5 (2 of 3)" in comparison.markdown()


def test_markdown(two_seeds):
    assert two_seeds.markdown().splitlines() == [
        "**Comparison of 3 configurations**",
        "",
        "| config | algorithm | seeds | accuracy, % | worst tenth, % | ARI | clusters | gap closed | traffic | time |",
        "| :-- | :-- | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| mine | cfl | 2 | 80.0 ± 127.1 | 80.0 | – | 1 | 0.75 | 3.0 kB | 1 min 01 s |",
        "| fedavg | fedavg | 2 | 55.0 ± 63.5 | 55.0 | – | 1 | 0.00 | 3.0 kB | 1 min 01 s |",
        "| best | oracle | 2 | 90.0 ± 0.0 | 90.0 | – | 1 | 1.00 | 3.0 kB | 1 min 01 s |",
        "",
        "digits, 4 clients. ±: 95 % interval of the mean over seeds. Gap closed: 0 is FedAvg, 1 the oracle.",
    ]


def test_one_run_without_baselines(summary_run):
    line = Comparison({"a|b": [summary_run("flhc")]}).markdown().splitlines()[4]
    assert line == "| a\\|b | flhc | 1 | 70.0 | 70.0 | – | 1 | – | 3.0 kB | 1 min 01 s |"


def test_table_holds_what_the_markdown_holds_and_fits_a_terminal(summary_run):
    runs = {
        name: [summary_run(name, 0.5 + 0.1 * i)]
        for i, name in enumerate(["fedavg", "cfl", "oracle"])
    }
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Comparison(runs).table())
    text = console.export_text()
    # The label says the algorithm, so there is no column for it.
    assert "algorithm" not in text
    (line,) = [line.split() for line in text.splitlines() if line.strip().startswith("cfl")]
    assert "3 configurations, 1 seed each" in text  # instead of a column of ones
    assert line == ["cfl", "60.0", "60.0", "–", "1", "0.50", "3.0", "kB", "1", "min", "01", "s"]


def test_what_all_labels_end_in_is_said_once_and_a_narrow_terminal_gets_fewer_columns(summary_run):
    runs = {f"{name}-mnist-label-swap": [summary_run(name, 0.5)] for name in ("fedavg", "cfl")}
    text = {}
    for width in (50, 100):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(Comparison(runs).table(width))
        text[width] = console.export_text()
    assert "Comparison of 2 configurations, 1 seed each, mnist-label-swap" in text[100]
    assert "cfl-mnist" not in text[100]
    assert "traffic" in text[100]
    assert "traffic" not in text[50]
    assert all("config" in each and "…" not in each for each in text.values())


def test_csv_and_json_hold_plain_numbers(two_seeds):
    mine, *_ = csv.DictReader(io.StringIO(two_seeds.csv()))
    assert (mine["label"], mine["algorithm"], mine["data"], mine["seeds"]) == (
        "mine",
        "cfl",
        "digits, 4 clients",
        "2",
    )
    assert float(mine["accuracy"]) == pytest.approx(0.8)
    assert float(mine["accuracy_half_width"]) == pytest.approx(1.27062, rel=1e-5)
    assert (mine["ari"], mine["bytes"], mine["runs_at_target"]) == ("", "3000.0", "0")

    row = json.loads(two_seeds.json())["rows"][0]
    assert row["seeds"] == [0, 1]
    assert row["accuracy"]["values"] == pytest.approx([0.7, 0.9])
    assert row["ari"] is None


def test_different_data_and_language_models_have_columns(summary_run):
    comparison = Comparison(
        {
            "a": [summary_run(data="news", perplexity=spread([32.0, 40.0]))],
            "b": [summary_run(data="tiny")],
        }
    )
    header, _, first, second = comparison.markdown().splitlines()[2:6]
    assert header.startswith(
        "| config | algorithm | data | seeds | accuracy, % | worst tenth, % | perplexity |"
    )
    assert first.startswith("| a | cfl | news | 1 | 70.0 | 70.0 | 36.0 |")
    assert second.startswith("| b | cfl | tiny | 1 | 70.0 | 70.0 | – |")


def test_figure_has_a_mean_an_interval_and_the_runs_of_every_configuration(two_seeds):
    (axes,) = two_seeds.figure().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mine", "fedavg", "best"]
    means = [container.lines[0].get_xdata()[0] for container in axes.containers]
    assert means == pytest.approx([0.8, 0.55, 0.9])
    assert [len(line.get_xdata()) for line in axes.lines if line.get_gid() == "runs"] == [2, 2, 2]
    assert [text.get_text() for text in axes.texts if text.get_gid() == "value"] == [
        "80.0 ± 127.1",
        "55.0 ± 63.5",
        "90.0 ± 0.0",
    ]
    (segment,) = two_seeds.figure().axes[0].containers[0].lines[2][0].get_segments()
    assert [end[0] for end in segment] == [0.0, 1.0]  # 0.8 ± 1.27: there is no accuracy beyond


def test_figure_of_language_models_shows_perplexity(summary_run):
    (axes,) = Comparison({"a": [summary_run(perplexity=spread([32.0, 40.0]))]}).figure().axes
    assert "perplexity" in axes.get_xlabel()
    assert axes.containers[0].lines[0].get_xdata()[0] == 36.0


def test_save_writes_four_files(two_seeds, tmp_path):
    folder = two_seeds.save(tmp_path / "new" / "folder")
    assert sorted(path.name for path in folder.iterdir()) == [
        f"comparison.{s}" for s in ("csv", "json", "md", "png")
    ]
    assert (folder / "comparison.md").read_text(encoding="utf-8") == two_seeds.markdown()
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_save_into_a_file_is_an_error(two_seeds, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=f"cannot write the comparison to {tmp_path}/file"):
        two_seeds.save(tmp_path / "file")


def test_save_without_matplotlib_leaves_nothing(two_seeds, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"'matplotlib'.*pip install 'fedclade\[report\]'"):
        two_seeds.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ({}, "at least 1 configuration, got 0"),
        ({"cfl": []}, r"at least 1 run of each configuration, got none of \['cfl'\]"),
    ],
)
def test_nothing_to_compare_is_an_error(runs, message):
    with pytest.raises(ConfigError, match=message):
        Comparison(runs)


def test_the_round_that_validation_data_chose_has_a_column(summary_run):
    """Beside the last round's score, and only where there is one."""

    def chosen(number, validation, test):
        scores = {"validation": {"accuracy": validation}, "test": {"accuracy": test}}
        return {"chosen": {"metric": "accuracy", "round": number, **scores}}

    runs = [
        summary_run("cfl", 0.7, seed=seed, **chosen(2 + seed, 0.8, 0.75 + seed / 10))
        for seed in (0, 1)
    ]
    comparison = Comparison(
        {"cfl": runs, "fedavg": [summary_run("fedavg", 0.5, seed=seed) for seed in (0, 1)]}
    )
    heading, _, *rows = comparison.markdown().splitlines()[2:6]
    place = heading.split(" | ").index("chosen round, %")
    assert rows[0].split(" | ")[place - 1 : place + 1] == ["70.0 ± 0.0", "80.0 ± 63.5"]
    assert rows[1].split(" | ")[place] == "–"
    assert "test score of the round that is best on validation data" in comparison.markdown()
    first, second = json.loads(comparison.json())["rows"]
    assert first["chosen"]["values"] == pytest.approx([0.75, 0.85])
    assert first["chosen_round"]["mean"] == 2.5
    assert "chosen" not in second
    assert "chosen" not in Comparison({"fedavg": [summary_run("fedavg")]}).markdown()
