"""The demo and comparisons: what they say of pictures that there are, or are not, and of what cannot be written."""

import sys
from pathlib import Path

import pytest

from fedclade.cli import compare, main
from fedclade.config import check_config

DIGITS = {
    "rounds": 1,
    "data": {"name": "digits", "clients": 2, "samples_per_client": 40},
    "model": {"name": "mclr"},
}


@pytest.mark.parametrize("extras", [True, False])
def test_pictures_are_announced_if_there_are_some(
    extras, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """Without the extra ``report`` nothing can draw them."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(compare, "read_config", lambda *_: check_config(DIGITS))
    if not extras:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    compare.demo(out=tmp_path / "demo", engine=None, memory=None, quiet=True)
    told = capsys.readouterr().out
    assert (tmp_path / "demo" / "cfl" / "seed-0" / "summary.json").is_file()
    for announced in ("the figures of CFL are in", "fedclade report"):
        assert (announced in told) == extras
    assert ("pip install 'fedclade[report]'" in told) != extras


SMALL = """
rounds = 1
engine = "loop"
[data]
name = "digits"
clients = 2
samples_per_client = 40
[model]
name = "mclr"
[algorithm]
name = "fedavg"
"""


def test_a_comparison_goes_on_when_the_figures_of_a_run_break(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text(SMALL)
    monkeypatch.setattr(
        "fedclade.report.tables.save_figures",
        lambda run, folder: {}["figure"] if "a" in folder.parts else [],
    )
    monkeypatch.setattr(
        sys, "argv", ["fedclade", "compare", "a.toml", "b.toml", "--out", "out", "--quiet"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    out = capsys.readouterr().out
    assert "cannot draw the figures: KeyError: 'figure'" in out
    assert "Comparison of 2 configurations" in out


def test_a_comparison_that_cannot_be_written_was_shown_before(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(SMALL)

    monkeypatch.setattr(compare, "add_figures", lambda *_: True)
    monkeypatch.setattr("fedclade.core.files.take_place", _full)
    monkeypatch.setattr("sys.argv", ["fedclade", "compare", "a.toml", "--out", "out", "-q"])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    assert left.value.code == 2
    assert "Comparison of 1 configuration" in out
    assert "error: comparison: cannot write the comparison to out: " in err


def _full(source, target):
    if target.name.startswith("comparison."):
        raise OSError(28, "No space left on device")
    source.replace(target)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["compare", "own.toml", "--only", "fedavgg*"],
            "--only 'fedavgg*' matches none of the runs, which are own",
        ),
        (
            ["run", "own.toml", "--set", "min_clients=3"],
            "min_clients should be at most the number of clients that train in a round (2 of 2), since no model would "
            "ever change otherwise, got 3",
        ),
        (
            ["run", "own.toml", "--set", "model.name=mlp", "--set", "model.hidden=0"],
            "model.hidden should be at least 1, got 0",
        ),
        (
            ["compare", "a b.toml", "a-b.toml"],
            "should have different names, got 'a b' and 'a-b', which would share the folder a-b",
        ),
        (["run", "own.toml", "--out", "x" * 300], "file name too long: 'xxx"),
        (
            ["report", "several/one", "several/../several/one"],
            "each run can be compared only once, got",
        ),
        (["report", "several"], "choose one of the folders several/one, several/two"),
        (
            ["reproduce", "cfl-fig1-xor", "--scale", "smoke", "--out", "own.toml"],
            "cannot create the folder own.toml",
        ),
        (
            ["reproduce", "cfl-fig1-xor", "--scale", "smoke", "--set", "seeds=x"],
            "experiment cfl-fig1-xor: the setting seeds should be a value like [0, 1, 2",
        ),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_runs(
    arguments, why, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(SMALL)
    for name in ("a b.toml", "a-b.toml"):
        (tmp_path / name).write_text(SMALL.replace("[algorithm]", "[algorithms.fedavg]"))
    for scenario in ("one", "two"):
        (tmp_path / "several" / scenario / "fedavg" / "seed-0").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["fedclade", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert why in " ".join((told.out + told.err).split())
    assert {path.name for path in tmp_path.iterdir()} == {
        "own.toml",
        "a b.toml",
        "a-b.toml",
        "several",
    }


def test_the_help_of_an_argument_is_shown(monkeypatch, capsys):
    """Of click from 8.5 on it is lost with the typer that Flower allows."""
    monkeypatch.setattr(sys, "argv", ["fedclade", "run", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "TOML file, or name of" in capsys.readouterr().out


def test_a_report_makes_its_folder_or_says_so_before_it_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(SMALL)
    for arguments, code in (
        (["run", "own.toml", "--out", "one", "-q"], 0),
        (["report", "one", "--out", "new/folder/page.html"], 0),
        (["report", "one", "--out", "own.toml/page.html"], 2),
    ):
        monkeypatch.setattr(sys, "argv", ["fedclade", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (code, code or None)
    assert (tmp_path / "new" / "folder" / "page.html").is_file()
    assert "cannot create the folder own.toml" in " ".join(capsys.readouterr().err.split())
