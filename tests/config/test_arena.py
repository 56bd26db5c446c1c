"""The scenarios of the arena, and what ``studies/arena.py`` makes of their runs, on scores that are made up."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedclade.algorithms import ALGORITHMS
from fedclade.cli import app
from fedclade.config import find_configs, read_scenarios

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(STUDIES))
    return importlib.import_module("arena")


def line(cell: str, method: str, accuracy: float, seed: int = 0, **more: object) -> dict:
    given = {"cell": cell, "method": method, "accuracy": accuracy, "seed": seed}
    return {**given, "ari": None, "clusters": 3, "megabytes": 1.0, "seconds": 2, **more}


def test_the_arena_is_two_data_sets():
    found = {path.stem: read_scenarios(path) for path in find_configs("arena")}
    assert {name: len(cells) for name, cells in found.items()} == {"cifar10": 1, "mnist": 16}
    (cifar10,) = found["cifar10"]
    assert "oracle" not in cifar10.configs, (
        "nobody knows true clusters of clients that Dirichlet draws"
    )
    assert {*found["mnist"][0].configs} - {"oracle"} <= {*cifar10.configs}


def test_clustered_methods_of_the_arena_are_those_of_the_records(arena):
    finds_clusters: set[str] = set()
    for path in find_configs("arena"):
        for label, options in tomllib.loads(path.read_text(encoding="utf-8"))["algorithms"].items():
            if ALGORITHMS[options.get("name", label)].family in ("updates", "models", "data"):
                finds_clusters.add(label)
    assert {*arena.CLUSTERED} == finds_clusters


def test_both_run_in_one_folder_of_their_name_and_are_gathered_from_it(
    arena, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where "arena" is the results' folder once there are some
    out = Path("arena")
    given = [
        "compare",
        "arena",
        "--scale",
        "smoke",
        "--out",
        str(out),
        "--quiet",
        "--resume",
        "--rounds",
        "3",
    ]
    for pattern in ("cifar10: fedavg", "mnist P(Y) 8: rcfl"):
        done = CliRunner().invoke(app, [*given, "--only", pattern])
        assert done.exit_code == 0
        # what the pattern does not match, the same command would not run either
        assert "left" not in done.output
    late = CliRunner().invoke(app, [*given, "--only", "cifar10: fed[ap]*", "--at-most", "0"])
    assert (
        "1 of 2 runs left: continue with the same command and --out arena --resume" in late.output
    )
    lines = [*arena.gathered(out)]
    assert [(each["cell"], each["method"]) for each in lines] == [
        ("cifar10", "fedavg"),
        ("mnist P(Y) 8", "rcfl"),
    ]
    assert [each["true"] is None for each in lines] == [True, False]
    page = arena.page(lines)
    assert "| `fedavg` |" in page[page.index("CIFAR-10") :]


def test_the_page_is_that_of_the_committed_results(
    arena, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Tables and sentences; the picture, which is written beside, also depends on Matplotlib."""
    monkeypatch.setattr(arena, "PICTURE", tmp_path / arena.PICTURE.name)
    lines = json.loads(arena.RESULTS.read_text(encoding="utf-8"))
    assert arena.page(lines) == arena.PAGE.read_text(encoding="utf-8")


def test_a_method_is_ahead_only_on_folds_that_rcfl_has_run_too(arena):
    cell = "mnist P(X) 8"
    lines = [line(cell, "rcfl", 0.9), line(cell, "ifca", 0.905), line(cell, "ifca", 1.0, seed=1)]
    assert arena.standings(lines) == ([cell], [])
    lines += [
        line(cell, "rcfl", 0.95, seed=1),
        line(cell, "ditto", 1.0),
        line("cifar10", "ifca", 0.5),
    ]
    assert arena.standings(lines) == ([], ["P(X) 8, where `ifca` is 2.8 points more accurate"])


def test_what_rcfl_finds_is_counted_where_there_is_something_to_find(arena):
    lines = [
        line("mnist P(X) 8", "rcfl", 0.9, seed=k, ari=ari) for k, ari in enumerate((1.0, 0.5, None))
    ]
    assert arena.exact([*lines, line("mnist P(X) 8", "ifca", 0.9, ari=1.0)]) == "1 of 2"


def test_how_far_a_method_is_ahead_is_of_the_folds_that_both_have_run(arena):
    lines = [line("mnist P(X) 8", "rcfl", 0.9, seed=0), line("mnist P(X) 8", "rcfl", 0.8, seed=1)]
    assert arena.ahead(lines, "feddrift") == "not compared with `rcfl` yet: no fold has both"
    scores = {0: 0.92, 1: 0.83, 2: 1.0}  # 2.5 points ahead where both have run
    lines += [
        line("mnist P(X) 8", "feddrift", score, seed, megabytes=3.0, ari=1.0)
        for seed, score in scores.items()
    ]
    lines += [
        line("mnist P(Y) 3", name, score, ari=0.5)
        for name, score in {"rcfl": 0.9, "feddrift": 0.8}.items()
    ]
    lines += [
        line("cifar10", name, score) for name, score in {"rcfl": 0.1, "feddrift": 0.8}.items()
    ]
    assert arena.ahead(lines, "feddrift") == (
        "more accurate than `rcfl` in 1 of 2 cells, by up to 2.5 points, at 2.5 times the traffic. "
        "It finds exactly the true clusters in 3 of 4 runs"
    )


def test_each_data_set_has_columns_of_its_own_for_costs(arena):
    lines = [
        line("cifar10", "ifca", 0.5, seconds=40),
        line("mnist P(X) 8", "ifca", 0.5),
        line("cifar10", "apfl", 0.5),
    ]
    _, _, *rows = arena.costs(lines).splitlines()
    assert rows == ["| `ifca` | 2 | 1.0 | 40 | 1.0 |", "| `apfl` |  |  | 2 | 1.0 |"]
    assert "| `ifca` | **50.0** (1) | 3 |" in arena.table_without_kinds("cifar10", lines)


def test_the_best_of_the_clustered_is_bold_with_the_clusters_found_of_the_true(arena):
    truth = {"ari": 0.5, "true": 10}
    lines = [
        line("mnist P(X) 8", "rcfl", score, seed, **truth)
        for seed, score in enumerate((0.8, 0.8, 0.8))
    ]
    lines += [
        line("mnist P(X) 8", "cfl", 0.7, **truth),
        line("mnist P(X) 8", "apfl", 0.9),
        line("mnist P(X) 3", "cfl", 0.6, **truth),
    ]
    _, _, *rows = arena.table_of("P(X)", lines).splitlines()
    assert rows == [
        "| `rcfl` | **80.0** ± 0.0 · 0.50 · 3/10 |  |",
        "| `cfl` | 70.0 · 0.50 · 3/10 (1) | **60.0** · 0.50 · 3/10 (1) |",
        "| `apfl` | 90.0 (1) |  |",
    ]


def test_ranks_are_of_all_methods_that_have_run_in_all_cells_whoever_has_more_folds(arena):
    scores = {"feddrift": 0.95, "ifca": 0.9, "rcfl": 0.8, "cfl": 0.7}
    cells = [
        f"mnist {kind} {level}"
        for kind in ("P(X)", "P(Y)", "P(Y|X)", "P(X|Y)")
        for level in (1, 3, 5, 8)
    ]
    lines = [line(cell, name, score) for cell in cells for name, score in scores.items()]
    lines += [line(cell, name, 0.9, 1) for cell in cells for name in ("ifca", "rcfl", "cfl")]
    ranks = arena.ranks(lines)
    assert [*ranks.mean] == [*scores]
    assert (ranks.sets, ranks.scenarios) == (16, 16)
    told = arena.said(ranks)
    assert "Methods with a significantly better mean rank than `rcfl`: `feddrift`." in told
    assert "Methods with a better mean rank than `rcfl`, but not significantly: `ifca`." in told


def test_ranks_are_of_the_methods_and_cells_that_have_most_runs_without_a_gap(
    arena, tmp_path: Path
):
    scores = {"ifca": 0.9, "rcfl": 0.8, "cfl": 0.7}
    lines = [
        line(f"mnist P(X) {level}", name, score)
        for level in (1, 3, 5)
        for name, score in scores.items()
    ]
    assert arena.ranks(lines) is None, "three cells are too few"
    lines += [line("cifar10", name, score) for name, score in scores.items()]
    lines += [line("cifar10", name, 0.9) for name in ("apfl", "ditto")]
    ranks = arena.ranks(lines)
    assert ranks.mean == {"ifca": 1.0, "rcfl": 2.0, "cfl": 3.0}
    assert (ranks.sets, ranks.scenarios) == (4, 4)
    assert ranks.critical == pytest.approx(2.343 * (3 * 4 / (6 * 4)) ** 0.5, abs=1e-3), (
        "q of Demšar's table 5"
    )
    assert ranks.alike() == [("ifca", "rcfl"), ("rcfl", "cfl")]
    said = arena.picture(lines, tmp_path / "ranks.svg")
    assert "Methods with a better mean rank than `rcfl`, but not significantly: `ifca`." in said
    first = (tmp_path / "ranks.svg").read_bytes()
    arena.picture(lines, tmp_path / "ranks.svg")
    assert (tmp_path / "ranks.svg").read_bytes() == first, "same runs, same picture"
