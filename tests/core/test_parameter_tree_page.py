"""What docs/parameter-tree.md shows works as shown, from the first line to the last."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedclade import ParameterTree
from fedclade.cli import main
from fedclade.config import check_config

PAGE = (Path(__file__).parents[2] / "docs" / "parameter-tree.md").read_text()


def blocks() -> list[tuple[str, str]]:
    return re.findall(r"^```(python|bash)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_commands_and_python_of_the_page_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    seen: dict[str, Any] = {}
    for language, block in blocks():
        if language == "python":
            exec(compile(block, "parameter-tree.md", "exec"), seen)
        for line in block.splitlines() if language == "bash" else ():
            if line.startswith("fedclade "):
                monkeypatch.setattr(sys, "argv", line.split())
                with pytest.raises(SystemExit) as left:
                    main()
                assert not left.value.code, line
    printed = capsys.readouterr().out
    assert "split at mean norm" in printed
    assert "\n[0, 1, 4]\n" in printed
    tree: ParameterTree = seen["run"].tree
    loaded = torch.cat([p.detach().flatten() for p in seen["model"].parameters()])
    assert torch.equal(loaded, tree.model_for(3))
    x, y = check_config(seen["run"].config).federation().examples(3, "test")
    told = seen["run"].client_rows[-20 + 3]
    assert told["client"] == 3
    assert float((seen["model"](x).argmax(1) == y).double().mean()) == pytest.approx(told["accuracy"])
