"""What the page on own data shows works as shown."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

from fedclade.config import check_config

PAGE = (Path(__file__).parents[1] / "docs/own-data.md").read_text()


def test_the_config_is_right():
    (config,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert check_config(tomllib.loads(config)).data["name"] == "hospitals"
    assert len([line for line in config.splitlines() if line]) < 10


def test_the_python_runs(capsys: pytest.CaptureFixture[str]):
    frame, objects, augment = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(frame, "own-data.md", "exec"), names)
    assert [client.name for client in names["federation"].clients] == ["a", "b"]  # pyright: ignore
    exec(compile(objects, "own-data.md", "exec"), names)
    assert "houses, 6 clients regression" in capsys.readouterr().out
    exec(compile(augment, "own-data.md", "exec"), names)
    pictures = torch.arange(48.0).view(8, 1, 2, 3)
    assert torch.equal(names["flip"](pictures).sort()[0], pictures)  # pyright: ignore
