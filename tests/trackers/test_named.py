from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedclade import Callback, ConfigError
from fedclade.trackers import build_callback

OWN = """
import fedclade

class Mine(fedclade.Callback):
    "A callback of one's own."

def made():
    return Mine()

def nothing():
    return 1
"""


def test_a_callback_of_ones_own_is_a_class_or_a_function_that_makes_one(
    tmp_path: Path, monkeypatch
):
    (tmp_path / "own_callbacks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("Mine", "made"):
        assert isinstance(build_callback(f"own_callbacks:{name}"), Callback)
    with pytest.raises(
        ConfigError,
        match=r"callback 'own_callbacks:nothing' should create a fedclade.Callback, got 1",
    ):
        build_callback("own_callbacks:nothing")


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match=r"unknown callback 'mlfow'; did you mean 'mlflow'"):
        build_callback("mlfow")


@pytest.mark.slow
def test_fedclade_imports_no_tracker():
    code = (
        "import sys, fedclade; print({'mlflow', 'wandb', 'tensorboard', 'rich'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
