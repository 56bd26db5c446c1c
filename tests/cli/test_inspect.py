"""The commands ``inspect`` and ``init``, and ``validate`` with data."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fedclade.cli import app
from fedclade.config import TableFiles, read_config
from fedclade.core import ConfigError, DataError, RunError
from fedclade.report.page import section

ROWS = 24


def call(*arguments: str) -> str:
    """Run a command; return its output in one line."""
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    return " ".join(result.output.split())


def hospital(number: int) -> dict[str, list[Any]]:
    return {
        "pid": [f"p{number}-{row}" for row in range(ROWS)],
        "age": [None if row == number else 30 + (7 * row) % 11 for row in range(ROWS)],
        "dose": [(row % 9) / 2 for row in range(ROWS)],
        'a "stage"': [row % 3 for row in range(ROWS)],
        "ward": ["ab"[row % 2] for row in range(ROWS)],
        "back": [row // 2 % 2 for row in range(ROWS)],
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of three hospitals, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FEDCLADE_DATA_DIR", raising=False)
    made = tmp_path / "hospitals"
    made.mkdir()
    for number in range(3):
        pyarrow.csv.write_csv(pa.table(hospital(number)), made / f"h{number}.csv")
    return made


def test_inspect_shows_clients_columns_and_how_they_are_understood(folder: Path) -> None:
    shown = call("inspect", "hospitals")
    assert "h0 24 1.0% 50% 50%" in shown
    assert "pid text 0.0% 72" in shown
    assert "excluded: it has 72 different texts" in shown
    assert "target: 'back' (it is the last possible column" in shown
    assert "task: binary (the target has two values, 0 and 1)" in shown
    assert "no problems found" in shown


def test_inspect_writes_a_page_that_needs_no_other_file_and_no_plotly(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section._plotly_script.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    (folder / "h3.csv").write_text('pid,age,dose,"a ""stage""",ward,back\n<b>,1,2,3,a,1\n')
    assert "page: page.html" in call("inspect", "hospitals", "--out", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert "Contents of hospitals" in page
    assert "fewer than 10 rows at h3" in page
    assert "<b>" not in page.partition("<main")[2].partition("</main")[0]
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="http', page)
    with pytest.raises(RunError, match=r"--out should end in .html, got page.txt"):
        call("inspect", "hospitals", "--out", "page.txt")


def test_init_writes_a_config_that_runs_unchanged(folder: Path) -> None:
    assert "config: hospitals.toml; read it" in call("init", "hospitals")
    text = Path("hospitals.toml").read_text(encoding="utf-8")
    assert 'files = "hospitals/*.csv"' in text
    assert re.search(r'missing = "mean" +# or median, indicator, drop; empty cells: age 4%', text)
    assert all(not line.rstrip().endswith("#") for line in text.splitlines())
    config = read_config("hospitals.toml")
    assert config.data["drop"] == ("pid",)
    assert config.data["standardize"] == "auto"
    assert config.data["categorical"] == ('a "stage"',)
    assert config.task.name == "binary"
    assert config.algorithm["name"] == "auto"
    assert config.data["validation_fraction"] == 0.2
    federation = config.federation()
    assert len(federation.clients) == 3
    assert federation.pool.columns is not None
    assert len(federation.pool.columns.fill) == len(federation.pool.columns.inputs)
    call(
        "run", "hospitals.toml", "--rounds", "1", "--out", "run", "--quiet", "--set", "engine=loop"
    )
    assert Path("run/summary.json").is_file()


def test_a_config_of_init_may_be_made_private(folder: Path) -> None:
    call("init", "hospitals", "--client", "ward", "--target", "back")
    text = Path("hospitals.toml").read_text(encoding="utf-8").replace('"mean"', '"drop"')
    Path("hospitals.toml").write_text(
        text + "[privacy]\nclip_norm = 1.0\nnoise_multiplier = 1.0\n", encoding="utf-8"
    )
    overrides = ["--set", "algorithm.name=fedavg", "--set", "engine=loop"]
    call("run", "hospitals.toml", "--rounds", "1", "--out", "run", "--quiet", *overrides)
    assert Path("run/summary.json").is_file()


def test_a_config_in_another_folder_finds_its_files(folder: Path, tmp_path: Path) -> None:
    call("init", "hospitals/*.csv", "--out", "configs/mine.toml", "--target", "ward")
    config = read_config("configs/mine.toml")
    assert config.data["target"] == "ward"
    assert len(config.federation().clients) == 3


def test_init_leaves_out_small_clients_and_takes_what_is_given(folder: Path) -> None:
    (folder / "h3.csv").write_text('pid,age,dose,"a ""stage""",ward,back\nx,1,2,3,a,1\n')
    notation = ["--decimal", ".", "--separator", ",", "--dates", "%d.%m.%Y"]
    call("init", "hospitals", *notation, "--encoding", "cp1250")
    config = read_config("hospitals.toml")
    assert config.data["fewest_rows"] == 10
    assert config.data["decimal"] == "."
    assert config.data["separator"] == ","
    assert config.data["dates"] == "%d.%m.%Y"
    assert config.data["encoding"] == "cp1250"
    assert len(config.federation().clients) == 3


def test_files_are_read_in_the_encoding_that_is_given(folder: Path) -> None:
    path = folder / "h0.csv"
    path.write_bytes(path.read_bytes().replace(b"ward", b"Wo\xbfd"))
    one = ["inspect", "hospitals/h0.csv", "--client", "dose"]
    assert "Wo¿d text" in call(*one)
    assert "Wożd text" in call(*one, "--encoding", "cp1250")


def test_a_format_that_is_not_possible_is_refused(folder: Path) -> None:
    for command in ("inspect", "init"):
        with pytest.raises(ConfigError, match=r"separator should be a character .*, got 'ab'"):
            call(command, "hospitals", "--separator", "ab")
        with pytest.raises(
            ConfigError, match=r"encoding should be an encoding that Python knows.* 'cp1'"
        ):
            call(command, "hospitals", "--encoding", "cp1")


def test_init_of_one_file_names_the_client(folder: Path) -> None:
    table = {name: values * 2 for name, values in hospital(0).items()}
    table["site"] = ["north"] * ROWS + ["south"] * ROWS
    table["pid"] = [str(row) for row in range(2 * ROWS)]
    pyarrow.csv.write_csv(pa.table(table), "all.csv")
    call("init", "all.csv")
    config = read_config("all.toml")
    assert (config.data["client"], config.data["files"]) == (
        "site",
        str(Path("all.csv").absolute()),
    )


def test_files_that_no_pattern_matches_are_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the 2 files should be all \.csv files of the folder hospitals, since"
    ):
        call("init", "hospitals/h0.csv", "hospitals/h1.csv")
    with pytest.raises(DataError, match=r"there is no file .*hospitals/h9.csv; check the path"):
        call("inspect", "hospitals/h0.csv", "hospitals/h9.csv")
    with pytest.raises(DataError, match=r"'nothing/\*.csv' matches no file in"):
        call("inspect", "nothing/*.csv")
    (folder.parent / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty contains no file that ends in \.csv, \.tsv"):
        call("inspect", "empty")
    (folder.parent / "a.xlsx").write_text("")
    with pytest.raises(
        ConfigError, match=r"a.xlsx should have an ending of a table: .csv, .tsv, .parquet"
    ):
        call("inspect", "a.xlsx")
    all_three = [str(folder / f"h{number}.csv") for number in range(3)]
    assert TableFiles.find(all_three).pattern == str(folder / "*.csv")


def test_files_are_found_next_to_tables_of_another_format(folder: Path) -> None:
    paths = [folder / f"h{number}.parquet" for number in range(2)]
    for number, path in enumerate(paths):
        pq.write_table(pa.table(hospital(number)), path)
    found = TableFiles.find([str(path) for path in paths])
    assert (found.pattern, found.paths) == (str(folder / "*.parquet"), tuple(paths))


def test_init_replaces_no_file(folder: Path) -> None:
    Path("hospitals.toml").write_text("")
    with pytest.raises(ConfigError, match=r"hospitals.toml exists already; choose another file"):
        call("init", "hospitals")
    with pytest.raises(ConfigError, match=r"--out should end in .toml, got mine.txt"):
        call("init", "hospitals", "--out", "mine.txt")
    Path("file").write_text("")
    with pytest.raises(RunError, match="cannot create the folder file"):
        call("init", "hospitals", "--out", "file/mine.toml")


def test_validate_opens_the_data_and_says_what_it_has(folder: Path) -> None:
    call("init", "hospitals")
    shown = call("validate", "hospitals.toml")
    assert "hospitals.toml is valid" in shown
    assert "data: hospitals, 3 clients, 24 examples each, 72 in all, of which 15" in shown
    assert "inputs: 7 for each example" in shown
    assert "target: binary, 1 output of a model" in shown
    assert "labels: 0, 1" in shown
    (folder / "h1.csv").write_text("")
    result = CliRunner().invoke(app, ["validate", "hospitals.toml"])
    assert isinstance(result.exception, DataError)
    assert "h1.csv is empty" in str(result.exception)
    assert "is valid" not in result.output
    assert call("validate", "hospitals.toml", "--without-data") == "hospitals.toml is valid"


def test_validate_opens_no_data_set_of_fedclade_unless_a_folder_is_given(folder: Path) -> None:
    Path("mnist.toml").write_text('algorithm.name = "fedavg"\n[data]\nname = "mnist"\n')
    assert call("validate", "mnist.toml") == "mnist.toml is valid"
    with pytest.raises(DataError):
        call("validate", "mnist.toml", "--data-dir", str(folder))
