"""What all tests share: one thread, and no deadlines, so that a busy machine changes nothing; a cache of their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fedclade", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fedclade")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory):
    """Nothing that is remembered from earlier runs decides what the tests see, and they leave nothing behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCLADE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Whatever a test lets torch use, the next one has one thread: what it forks would wait for ever for others."""
    torch.set_num_threads(1)
