"""Names and paths on the terminal and in pages: they are shown as they are, and do nothing."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedclade.cli import main
from fedclade.cli.options import new_console
from fedclade.core.errors import RunError
from fedclade.flower.server_log import show_end
from fedclade.report import RunProgress, cluster_table, show_run
from fedclade.report.page import RunView, run_page
from fedclade.report.terminal import Terminal, visible
from fedclade.runs.store.export import as_markdown
from fedclade.runs.store.run import FORMAT, Run

EVIL = "\x1b]0;owned\x07\x1b[31m\x1b[2Jward 7\r\x08\x9b1m\u202e"
"""Sets the title of a window, colours, clears the screen, goes back to the start of the line, turns the text around."""

SHOWN = "]0;owned[31m[2Jward 71m"


def named(run: Run, name: str) -> Run:
    return replace(run, client_rows=[{**row, "name": name} for row in run.client_rows])


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_of_client_names_do_not_reach_the_terminal(make_run, terminal):
    console = Terminal(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)
    run = named(make_run([(2, 0)]), EVIL)
    show_run(run, console)
    console.print(cluster_table(run))
    console.print(Text(EVIL), EVIL)
    table = Table("x")
    table.add_row(EVIL)
    console.print(table)
    told = console.file.getvalue()
    assert told.count(SHOWN) >= 5
    assert not {
        character for character in told if character != "\n" and not character.isprintable()
    }


def test_a_terminals_own_colours_are_kept():
    console = Terminal(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(Text.assemble(("red", "red"), EVIL))
    assert console.file.getvalue() == f"\x1b[31mred\x1b[0m{SHOWN}\n"


def test_text_in_other_scripts_is_left_alone():
    assert visible("Krankenhaus Zürich\t医院 ε₁ 👩‍⚕️\n") == "Krankenhaus Zürich\t医院 ε₁ 👩‍⚕️\n"


def test_the_console_of_the_commands_and_of_the_server_are_such(make_run, capsys):
    assert isinstance(new_console(), Terminal)
    show_end(named(make_run(), EVIL))
    out = capsys.readouterr().out
    assert SHOWN in out
    assert "\x1b" not in out


def test_errors_do_nothing_to_the_terminal(monkeypatch, capsys):
    def fails() -> None:
        raise RunError(f"no run of {EVIL} in [bold]here[/]")

    monkeypatch.setattr("fedclade.cli.app", fails)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == f"error: no run of {SHOWN} in [bold]here[/]\n"


def test_brackets_in_a_path_are_shown(make_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = make_run()
    summary = {**run.summary, "format": FORMAT}
    config = {"rounds": 4, "algorithm": {"name": "cfl"}, "model": {"name": "mclr"}}
    replace(run, summary=summary, config=config).save("a [bold] run [/x]")
    for command in (["report"], ["resume"]):
        monkeypatch.setattr(sys, "argv", ["fedclade", *command, "a [bold] run [/x]"])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 0
        assert "a [bold] run [/x]" in capsys.readouterr().out


def test_brackets_in_the_name_of_a_run_are_shown_beside_its_bar():
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    progress = RunProgress(console, quiet=False)
    progress.start("a [bold] name [/x]", 3)
    console.print(progress._bars)
    assert "a [bold] name [/x]" in console.file.getvalue()


def test_links_in_what_others_write_are_no_links_in_a_report(make_run):
    link = '<a href="javascript:alert(1)">look</a>'
    step = {
        "round": 1,
        "kind": "clustered",
        "node": 0,
        "clients": [0, 1, 2, 3],
        "threshold": None,
        "sizes": [2, 2],
    }
    step |= {"merges": [[0, 1, 1.0], [2, 3, 1.0], [4, 5, 2.0]], "metric": link, "linkage": link}
    run = replace(
        named(make_run([(2, 0)], truth=[0, 0, 1, 1], data=f"{link}, 4 clients"), link),
        events=[step],
    )
    page = run_page(RunView(run, make_run(), link))
    texts = list(strings(page.figures))
    assert any("javascript:alert(1)" in text for text in texts), "or nothing was tested"
    assert [text for text in texts if "<a" in text] == []


def strings(value):
    """Yield all texts within a figure."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from strings(entry)


def test_a_models_card_has_no_links_or_tags_of_others():
    name = "[look](javascript:alert(1)) <img src=x> | a\nb"
    card = {
        "node": 1,
        "path": [0, 1],
        "level": 1,
        "leaf": True,
        "exported_for": {"client": 3, "name": name},
        "members": [3],
        "rounds": {"run": 2, "born": 1, "trained_until": 2},
        "data": {"description": "digits", "training_examples": 9},
        "metric": {"name": "accuracy", "higher_is_better": True, "share": True},
        "accuracy": None,
        "algorithm": {"name": "cfl"},
        "model": {"name": "mclr"},
        "config": {},
        "versions": {},
        "tensors": {},
    }
    text = as_markdown(card, "m.safetensors")
    assert "client 3 ([look]\\(javascript:alert(1)) \\<img src=x> \\| a b)" in text
    assert "](" not in text
    assert Path("m.safetensors").suffix in text
