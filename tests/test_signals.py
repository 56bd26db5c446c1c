"""Tests pass wherever they are started from: in the background, under nohup, without a terminal."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SENDS = re.compile(
    r"raise_signal\(|send_signal\(|os\.kill\(os\.getpid\(\), signal\.SIG(?!KILL)|\.terminate\(\)"
)


def test_tests_that_send_signals_set_the_handlers_that_they_need():
    """A test file that sends one names the fixture ``default_signals``."""
    senders = [path for path in sorted(TESTS.rglob("test_*.py")) if SENDS.search(path.read_text())]
    assert len(senders) >= 4
    missing = [str(path.relative_to(TESTS)) for path in senders if path.name != Path(__file__).name]
    missing = [name for name in missing if "default_signals" not in names_in(TESTS / name)]
    assert missing == []


def names_in(path: Path) -> set[str]:
    """Return the strings and the parameters of a test file."""
    tree = ast.parse(path.read_text())
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return strings | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


PROGRAM = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.setsid()
os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
"""
"""Starts pytest as nohup and a script's background job do: with signals that are ignored, and no terminal."""


@pytest.mark.slow
def test_interruptions_are_tested_where_the_parent_ignores_signals():
    files = [
        "tests/cli/test_interrupt.py",
        "tests/e2e/test_reproduce_command.py",
        "tests/e2e/test_command_line.py",
    ]
    options = ["-q", "-p", "no:cacheprovider", "-n", "0", "-k", "interrupt or signal or terminal"]
    environment = {**os.environ, "TERM": "dumb", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    environment.pop("COLUMNS", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *files, *options],
        cwd=TESTS.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 10, done.stdout
