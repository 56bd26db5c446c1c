"""What is printed and drawn at the end of a run: pictures that fail cost a warning and nothing else."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from fedclade.report import add_figures
from fedclade.report import tables as show_module


def printed(run, folder: Path) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=100)
    return add_figures(run, folder, console), console.file.getvalue()


def test_figures_on_a_full_disk_are_a_warning_and_leave_nothing_half_drawn(
    make_run, tmp_path, monkeypatch
):
    def full(self, path, **_):
        Path(path).write_bytes(b"half a pict")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert printed(make_run(), tmp_path) == (
        False,
        "cannot draw the figures: [Errno 28] No space left on device\n",
    )
    assert list((tmp_path / "figures").iterdir()) == []


def test_figures_in_a_folder_that_cannot_be_made_are_a_warning_with_its_name(make_run, tmp_path):
    (tmp_path / "[bold]").write_text("a file where a folder should be")
    drawn, told = printed(make_run(), tmp_path / "[bold]")
    assert not drawn
    assert told.startswith("cannot draw the figures: [Errno 20] Not a directory: ")
    assert told.endswith("[bold]/figures'\n")


def test_a_figure_that_breaks_is_a_warning(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(show_module, "save_figures", lambda *_: {}["a client that left"])
    assert printed(make_run(), tmp_path) == (
        False,
        "cannot draw the figures: KeyError: 'a client that left'\n",
    )


def test_figures_that_are_drawn_are_told_of(make_run, tmp_path):
    assert printed(make_run(), tmp_path) == (True, "")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "accuracy.png",
        "norms.png",
        "similarity.png",
    }
