"""What is printed and drawn at the end of a run: pictures that fail cost a warning and nothing else."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedclade.cli import compare as compare_module
from fedclade.cli import main
from fedclade.cli.progress import RunProgress
from fedclade.config import Batch, read_config
from fedclade.report import add_figures
from fedclade.report import show as show_module


def printed(run, folder: Path) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=100)
    return add_figures(run, folder, console), console.file.getvalue()


def test_figures_on_a_full_disk_are_a_warning_and_leave_nothing_half_drawn(make_run, tmp_path, monkeypatch):
    def full(self, path, **_):
        Path(path).write_bytes(b"half a pict")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert printed(make_run(), tmp_path) == (False, "no figures: [Errno 28] No space left on device\n")
    assert list((tmp_path / "figures").iterdir()) == []


def test_figures_in_a_folder_that_cannot_be_made_are_a_warning_with_its_name(make_run, tmp_path):
    (tmp_path / "[bold]").write_text("a file where a folder should be")
    drawn, told = printed(make_run(), tmp_path / "[bold]")
    assert not drawn
    assert told.startswith("no figures: [Errno 20] Not a directory: ")
    assert told.endswith("[bold]/figures'\n")


def test_a_figure_that_breaks_is_a_warning(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(show_module, "save_figures", lambda *_: {}["a client that left"])
    assert printed(make_run(), tmp_path) == (False, "no figures: KeyError: 'a client that left'\n")


def test_figures_that_are_drawn_are_told_of(make_run, tmp_path):
    assert printed(make_run(), tmp_path) == (True, "")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"accuracy.png", "norms.png", "similarity.png"}


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


def test_a_batch_goes_on_when_figures_or_a_run_of_it_break(tmp_path, monkeypatch, caplog):
    """The first run's figures break, the second run itself does, and the third is well."""
    for name in "abc":
        (tmp_path / f"{name}.toml").write_text(SMALL)
    monkeypatch.setattr(show_module, "save_figures", lambda run, folder: {}["figure"] if "a" in folder.parts else [])
    console = Console(file=io.StringIO(), width=100)
    progress = RunProgress(console, quiet=True)
    batch = Batch(progress.start, finished=lambda run, folder: add_figures(run, folder, console))
    begin = batch._run
    monkeypatch.setattr(
        batch, "_run", lambda config, name, folder: begin(config if name != "b" else None, name, folder)
    )
    configs = {name: read_config(tmp_path / f"{name}.toml") for name in "abc"}
    runs = batch.run(configs, 1, tmp_path / "out")
    assert list(runs) == ["a", "c"]
    assert batch.failures == {"AttributeError: 'NoneType' object has no attribute 'top'": ["b"]}
    assert "no figures: KeyError: 'figure'" in console.file.getvalue()
    assert "b failed" in caplog.text
    assert "Traceback" in caplog.text


def test_a_comparison_that_cannot_be_written_was_shown_before(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(SMALL)

    monkeypatch.setattr(compare_module, "add_figures", lambda *_: True)
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
