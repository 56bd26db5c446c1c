"""What docs/track.md shows works as shown."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fedclade.cli import main
from tests.trackers.test_tensorboard import scalars

PAGE = (Path(__file__).parents[2] / "docs" / "track.md").read_text()


@pytest.mark.slow
def test_commands_and_python_of_the_page_run(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    commands, python = re.findall(r"```(?:python|)\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in commands.splitlines():
        monkeypatch.setattr(sys, "argv", line.split())
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code, line
    assert [step for step, _ in scalars(tmp_path / "tracked" / "tensorboard")["clusters/found"]] == [*range(1, 9)]
    capsys.readouterr()
    exec(compile(python, "track.md", "exec"), {})
    split, end, why = capsys.readouterr().out.splitlines()
    assert split.startswith("round 3: 0 became {1: (")
    assert end == "interrupted after 3 rounds"
    assert why.startswith("interrupted after round 3")
