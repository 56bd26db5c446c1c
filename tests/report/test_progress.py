"""Bars on a terminal and in a notebook, and where there are none."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import fedclade
from fedclade.core import RunInterrupted
from fedclade.report.progress import NotebookProgress, RunProgress, progress_bars
from tests.tiny import federation_of, linear

FEDERATION = federation_of([0, 1])


@pytest.fixture
def notebook(monkeypatch) -> list[dict]:
    """Pretend to be a notebook's kernel; return what its output showed, one after the other."""
    pytest.importorskip("IPython")
    shown = []
    place = SimpleNamespace(update=lambda content, raw: shown.append(content))
    monkeypatch.setattr(
        "IPython.display.display", lambda content, raw, display_id: shown.append(content) or place
    )
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=1))
    monkeypatch.setattr(sys, "ps1", "In: ", raising=False)
    return shown


def run(**options):
    return fedclade.simulate("fedavg", linear(), FEDERATION, rounds=3, engine="loop", **options)


def test_a_notebook_shows_how_a_run_goes_and_ended(notebook):
    assert isinstance(progress_bars(), NotebookProgress)
    seen = []
    run(on_round=lambda row, tree: seen.append(row["round"]))
    assert seen == [1, 2, 3], "the user's own is called as well"
    assert "fedavg 0/3" in notebook[0]["text/plain"] or notebook[0]["text/plain"] == ""
    assert notebook[-1]["text/plain"].startswith("fedavg 3/3 accuracy ")
    assert '<progress max="3" value="3">' in notebook[-1]["text/html"]


def test_a_run_that_is_not_to_show_a_bar_shows_none(notebook):
    run(progress=False)
    assert notebook == []


def test_the_bar_of_a_run_that_ends_early_stays_where_it_was(notebook, tmp_path):
    with pytest.raises(RunInterrupted):
        run(folder=tmp_path / "run", stop=lambda: True)
    assert notebook[-1]["text/plain"].startswith("fedavg 1/3")


def test_the_name_of_a_run_is_shown_as_it_is(notebook):
    bars = NotebookProgress()
    with bars.shown():
        bars.start("<b>x", 3)
    assert "&lt;b&gt;x" in notebook[-1]["text/html"]


def test_a_script_shows_a_bar_if_it_asks_for_one_and_has_a_terminal(capsys, monkeypatch):
    assert isinstance(progress_bars(), RunProgress)
    run()
    run(progress=True)
    assert capsys.readouterr().out == "", "no terminal"
    monkeypatch.setenv("FORCE_COLOR", "1")
    run(progress=True)
    assert "3/3" in capsys.readouterr().out
