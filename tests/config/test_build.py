"""What ``fedclade data build`` takes, and that a config runs from the folder that it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedclade.cli.app import app
from fedclade.config import Building, build_schema, check_config, read_config
from fedclade.core import ConfigError, DataError
from fedclade.data import DataSchema
from fedclade.runs import Run


def test_a_config_is_built_and_run_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text("rounds = 2\n[data]\nfolder = 'out'\n[model]\nname = 'mclr'\n")
    call = CliRunner().invoke
    built = call(
        app, ["data", "build", "planted", "--out", "out", "--set", "data.clients=20", "--seed", "3"]
    )
    assert built.exit_code == 0, built.output
    assert "planted, 20 clients, 4 clusters: 0." in built.output
    assert call(app, ["run", "c.toml", "--out", "run", "-q"]).exit_code == 0
    assert call(app, ["resume", "run", "--rounds", "3", "-q"]).exit_code == 0
    run = Run.load(Path("run"))
    assert (run.summary["rounds"], run.summary["clients"], run.summary["clusters"]["true"]) == (
        3,
        20,
        4,
    )
    assert run.config["data"]["name"] == "out"


def test_files_data_sets_and_configs_are_sources(tmp_path: Path):
    for client in ("north", "south"):
        (tmp_path / f"{client}.csv").write_text(
            "age,ill\n" + "".join(f"{k},{k % 2}\n" for k in range(9))
        )
    (tmp_path / "c.toml").write_text(
        "[data]\nfiles = '*.csv'\ntarget = 'ill'\n[algorithm]\nname = 'not read'\n"
    )
    described = {
        "folder": Building.read(str(tmp_path), ["data.target=ill"]).build(tmp_path / "a"),
        "config": Building.read(str(tmp_path / "c.toml")).build(tmp_path / "b"),
        "digits": Building.read("digits", ["data.clients=3"]).build(tmp_path / "c"),
    }
    assert described == {
        "folder": f"{tmp_path.name}, 2 clients",
        "config": f"{tmp_path.name}, 2 clients",
        "digits": "digits, 3 clients, partition iid",
    }
    federation = check_config({"data": {"folder": str(tmp_path / "b")}}).federation()
    assert list(federation.roster.names.values()) == ["north", "south"]


def test_a_folder_is_found_beside_its_config(tmp_path: Path):
    Building.read("planted", ["data.clients=3"]).build(tmp_path / "out")
    (tmp_path / "c.toml").write_text("[data]\nfolder = 'out'\n")
    config = read_config(tmp_path / "c.toml")
    assert (config.data["folder"], len(config.federation())) == (str(tmp_path / "out"), 3)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (
            {"clients": 5},
            "data.clients cannot be combined with data.folder, in which the data is divided among",
        ),
        ({"target": "y"}, "data.target cannot be combined with data.folder"),
        ({"folders": 1}, "unknown key of [data]: 'folders'; did you mean 'folder'?"),
    ],
)
def test_other_keys_make_no_sense(data: dict[str, Any], told: str):
    with pytest.raises(ConfigError) as caught:
        check_config({"data": {"folder": "out", **data}})
    assert told in str(caught.value)


def test_what_cannot_be_built_is_told(tmp_path: Path):
    with pytest.raises(DataError, match=r"contains no file that ends in \.csv, \.tsv, \.parquet"):
        Building.read(str(tmp_path))
    with pytest.raises(ConfigError, match=r"unknown key of \[data\]: 'client'"):
        Building.read("planted", ["data.client=3"])
    with pytest.raises(ConfigError, match="unknown config 'digit'"):
        Building.read("digit")
    with pytest.raises(DataError, match="exists already"):
        Building.read("digits").build(tmp_path)
    with pytest.raises(DataError, match=r"it has no federation\.json"):
        check_config({"data": {"folder": str(tmp_path)}}).federation()


def test_the_schema_of_files_is_written_and_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("h").mkdir()
    for name, city in (("north", "bern"), ("south", "rome")):
        rows = ["city,age,back", f"{city},3,no", "oslo,4,yes", "oslo,5,yes"]
        Path(f"h/{name}.csv").write_text("\n".join(rows) + "\n")
    call = CliRunner().invoke
    written = call(
        app, ["data", "schema", "h", "--set", "data.target=back", "--out", "schema.json"]
    )
    assert written.exit_code == 0, written.output
    assert DataSchema.load("schema.json").as_dict() == {
        "inputs": {"city": ["bern", "oslo", "rome"], "age": "number"},
        "target": ["back"],
        "task": "classification",
        "labels": ["no", "yes"],
    }
    again = call(app, ["data", "schema", "h", "--set", "data.target=back", "--out", "schema.json"])
    assert again.exit_code != 0
    with pytest.raises(
        ConfigError, match="no schema can be proposed for 'digits', which names no files"
    ):
        build_schema("digits")
    one = [
        "data",
        "schema",
        "h/north.csv",
        "--set",
        "data.target=back",
        "--set",
        "data.schema=schema.json",
    ]
    assert call(app, [*one, "--out", "again.json"]).exit_code == 0
    assert Path("again.json").read_text() == Path("schema.json").read_text()


def test_a_schema_has_no_empty_columns_and_fills_empty_cells(tmp_path: Path):
    rows = ["age,note,back", "4,,no", ",,yes", "4,,yes", "4,,no"]
    (tmp_path / "h.csv").write_text("\n".join(rows) + "\n")
    written = build_schema(str(tmp_path / "h.csv"), ["data.target=back"]).as_dict()
    assert written["inputs"] == {"age": {"kind": "number", "fill": 4.0}}


def test_a_folder_may_have_brackets_in_its_name(tmp_path: Path):
    folder = tmp_path / "h[1]"
    folder.mkdir()
    (folder / "north.csv").write_text("age,back\n3,no\n4,yes\n5,yes\n")
    schema = build_schema(str(folder), ["data.target=back"])
    assert schema.as_dict()["inputs"] == {"age": "number"}
