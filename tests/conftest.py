"""What all tests share: one thread, and no deadlines, so that a busy machine changes nothing; a cache of their own."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.long_tests import read_list

MEMORY = Path("/dev/shm")

ENOUGH = 4 * 2**30
"""Bytes: some times what all tests write."""

torch.set_num_threads(1)
settings.register_profile("fedclade", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fedclade")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory):
    """Nothing that is remembered from earlier runs decides what the tests see, and they leave nothing behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCLADE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk():
    """Files need to outlive processes that are killed, but not the machine: thousands of them wait for no disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def pytest_configure():
    """Let temporary files lie in memory where there is much of it: removing tens of thousands takes a disk a minute."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Mark the tests that take long, by the list of ``long_tests.py``."""
    long_functions = read_list()
    for item in items:
        if item.nodeid.partition("[")[0] in long_functions:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish():
    """Thousands of collected tests, and all that they import, live to the end: garbage is not looked for among them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Set the signal handlers of a program that was started in a terminal, here and in processes that are started here.

    A program inherits which signals are ignored: Ctrl-C in a background job of a script, SIGHUP under nohup. A test
    that sends a signal to itself or to a child process uses this fixture.
    """
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def unpainted() -> Iterator[pytest.MonkeyPatch]:
    """Figures are drawn up, but painted only once this is undone: it takes longer than the runs that they show."""
    from matplotlib.figure import Figure

    def leave_file(_: Figure, path: Path, **_options: Any) -> None:
        path.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", leave_file)
        yield patch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Whatever a test lets torch use, the next one has one thread: what it forks would wait for ever for others."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_modules_are_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the modules that a test has imported from a temporary folder of the tests.

    Otherwise a later test that writes a module of the same name would be given the old one.
    """
    yield
    temporary = f"{tmp_path_factory.getbasetemp()}/"
    for name in set(sys.modules) - _checked_modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and file.startswith(temporary):
            del sys.modules[name]
        else:
            _checked_modules.add(name)


_checked_modules: set[str] = set()
"""Names of the imported modules that do not lie in a temporary folder."""
