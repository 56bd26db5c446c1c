"""The page of several runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedclade.config import check_config
from fedclade.report.page import Card, RunView, Section, Table, comparison_page, run_labels
from fedclade.report.page.one_run import run_cards
from fedclade.runs.store.run import Run
from fedclade.tasks.metrics import spread


@pytest.fixture
def subject(make_run) -> Callable[..., RunView]:
    """A run of an algorithm whose mean accuracy is given, with its rounds."""

    def make(
        algorithm: str, mean: float = 0.5, folder: str | None = None, seed: int = 0, **changes
    ) -> RunView:
        run: Run = make_run(
            [(2, 0)], algorithm=algorithm, seed=seed, accuracy=spread([mean] * 4), **changes
        )
        rounds = [
            {
                "round": n,
                "accuracy_mean": mean,
                "clusters": 1 + (n > 2),
                "ari": None,
                "bytes_up": 500_000,
                "bytes_down": 0,
            }
            for n in (1, 2, 3, 4)
        ]
        return RunView(
            replace(run, metric_rows=rounds), folder=None if folder is None else Path(folder)
        )

    return make


def found(subjects: list[RunView], name: str, beside: Path = Path()) -> Section | None:
    return next(
        (each for each in comparison_page(subjects, beside).sections if each.id == name), None
    )


def test_runs_are_called_by_what_tells_them_apart(subject):
    assert run_labels([subject("cfl"), subject("fedavg")]) == ["cfl", "fedavg"]
    assert run_labels([subject("cfl", seed=1), subject("cfl", seed=2), subject("fedavg")]) == [
        *("cfl, seed 1", "cfl, seed 2", "fedavg")
    ]
    twice = [subject("cfl", folder="a"), subject("cfl", folder="b")]
    assert run_labels(twice) == ["cfl, seed 0, a", "cfl, seed 0, b"]
    trials = [subject("cfl", folder=f"runs/s/trial-0{number}/seed-0") for number in (1, 2)]
    assert run_labels(trials) == ["cfl, seed 0, trial-01", "cfl, seed 0, trial-02"]
    assert run_labels([subject("cfl"), subject("cfl")]) == [
        "cfl, seed 0, None (1)",
        "cfl, seed 0, None (2)",
    ]


def test_the_score_of_the_round_that_validation_data_chose_stands_beside_the_last(subject):
    of = {
        "metric": "accuracy",
        "round": 2,
        "validation": {"accuracy": 0.8},
        "test": {"accuracy": 0.75},
    }
    page = comparison_page([subject("cfl", 0.7, chosen=of), subject("fedavg", 0.5)], Path())
    (table,) = page.sections[0].open_tables
    place = table.columns.index("chosen round")
    assert [row[place - 1 : place + 1] for row in table.rows] == [
        ["70.0 %", "75.0 %"],
        ["50.0 %", "–"],
    ]
    (card,) = [
        card for card in run_cards(subject("cfl", 0.7, chosen=of)) if card.label == "Chosen round"
    ]
    assert (card.value, card.note) == (
        "75.0 %",
        "test accuracy of round 2; 80.0 % on validation data",
    )


def scored(view: RunView, scores: list[float]) -> RunView:
    """Return a run whose clients, 0 to 3, have these scores."""
    rows = [row | {"accuracy": scores[row["client"]]} for row in view.run.client_rows]
    return replace(view, run=replace(view.run, client_rows=rows))


def test_each_run_has_a_card_and_is_measured_by_fedavg(subject):
    runs = [
        scored(subject("cfl", 0.7), [0.68, 0.72, 0.7, 0.7]),
        scored(subject("fedavg", 0.5), [0.5, 0.5, 0.5, 0.5]),
        scored(subject("local", 0.4), [0.1, 0.9, 0.2, 0.4]),
    ]
    assert comparison_page(runs, Path()).cards == [
        Card("cfl", "70.0 %", "+20.0 points [17.4, 22.6] against fedavg", "good", "@c0"),
        Card("fedavg", "50.0 %", "accuracy", "", "@c1"),
        Card("local", "40.0 %", "−10.0 points [−66.6, 46.6] against fedavg", "", "@c2"),
    ]


def test_without_one_fedavg_nothing_is_measured_by_it(subject):
    several = [subject("cfl"), subject("fedavg", seed=1), subject("fedavg", seed=2)]
    assert {card.note for card in comparison_page(several, Path()).cards} == {"accuracy"}


def test_the_table_has_a_row_for_each_run(subject):
    overview = found([subject("cfl", 0.7), subject("fedavg")], "overview")
    assert overview is not None
    (table,) = overview.open_tables
    assert table.rows == [
        ["cfl", "70.0 %", "70.0 %", "2", "–", "3.0 kB", "1 min 01 s", "4"],
        ["fedavg", "50.0 %", "50.0 %", "2", "–", "3.0 kB", "1 min 01 s", "4"],
    ]


def test_runs_with_a_page_of_their_own_are_linked_from_where_the_comparison_lies(
    subject, tmp_path: Path
):
    (tmp_path / "runs" / "my cfl").mkdir(parents=True)
    (tmp_path / "runs" / "my cfl" / "report.html").touch()
    two = [
        subject("cfl", folder=str(tmp_path / "runs" / "my cfl")),
        subject("fedavg", folder=str(tmp_path / "other")),
    ]
    overview = found(two, "overview", tmp_path / "pages")
    assert overview is not None
    assert overview.links == {"cfl": "../runs/my%20cfl/report.html"}


def test_scores_are_drawn_over_rounds_and_over_traffic(subject):
    two = [subject("cfl", 0.7), subject("fedavg", 0.5)]
    rounds, spent = found(two, "scores"), found(two, "traffic")
    assert rounds is not None
    assert spent is not None
    (cfl, fedavg), (cheap, _) = rounds.figures[""]["data"], spent.figures[""]["data"]
    assert (cfl["x"], cfl["y"], fedavg["y"]) == ([1, 2, 3, 4], [0.7] * 4, [0.5] * 4)
    assert cheap["x"] == [0.5, 1.0, 1.5, 2.0]
    assert rounds.tables[0].rows[0] == ["1", "70.0 %", "50.0 %"]


def test_runs_that_send_nothing_have_no_traffic(subject):
    alone = subject("local")
    free = RunView(
        replace(alone.run, metric_rows=[row | {"bytes_up": 0} for row in alone.run.metric_rows])
    )
    assert found([free, free], "traffic") is None


def test_clusters_and_ari_are_drawn_where_there_are_any(subject):
    plain = found([subject("cfl"), subject("rcfl")], "clusters")
    assert plain is not None
    assert "yaxis2" not in plain.figures[""]["layout"]
    known = subject("cfl")
    known = RunView(
        replace(known.run, metric_rows=[row | {"ari": 0.25} for row in known.run.metric_rows])
    )
    both = found([known, subject("rcfl")], "clusters")
    assert both is not None
    assert [trace["y"] for trace in both.figures[""]["data"]] == [
        [1, 1, 2, 2],
        [1, 1, 2, 2],
        [0.25] * 4,
    ]
    one = {"found": 1, "true": None, "ari": None, "nmi": None, "sizes": [4]}
    assert (
        found([subject("fedavg", clusters=one), subject("local", clusters=one)], "clusters") is None
    )


def test_the_share_of_clients_at_most_at_a_score_is_drawn(subject):
    fared = found([subject("cfl"), subject("rcfl")], "clients")
    assert fared is not None
    curve = fared.figures[""]["data"][0]
    # After the split of round 2 nodes 1 and 2 score 0.5 + 0.04 + 0.1 node in round 4.
    assert curve["x"] == pytest.approx([0.64, 0.64, 0.74, 0.74])
    assert curve["y"] == [0.25, 0.5, 0.75, 1.0]


def test_only_settings_that_differ_are_told_and_each_command(subject):
    configs = [
        check_config({"seed": seed, "data": {"name": "digits", "clients": 4}}).as_dict()
        for seed in (0, 1)
    ]
    runs = [subject("fedavg", seed=seed, folder=f"r{seed}") for seed in (0, 1)]
    subjects = [
        RunView(replace(s.run, config=c), folder=s.folder)
        for s, c in zip(runs, configs, strict=True)
    ]
    differ = found(subjects, "config")
    assert differ is not None
    assert differ.open_tables == [
        Table("", ["setting", "fedavg, seed 0", "fedavg, seed 1"], [["seed", "0", "1"]])
    ]
    assert differ.texts == {
        "The commands that repeat the runs": "fedclade run r0/config.toml\nfedclade run r1/config.toml"
    }
    same = found([subjects[0], subjects[0]], "config")
    assert same is not None
    assert same.caption == "The runs have the same settings."


def test_every_run_shows_its_tree(subject):
    trees = found([subject("cfl"), subject("rcfl")], "tree")
    assert trees is not None
    assert list(trees.trees) == ["cfl", "rcfl"]
    assert [branch.id for branch in trees.trees["rcfl"].branches] == [0, 1, 2]
