"""Every experiment's smoke scale is measured once for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from fedclade_papers import EXPERIMENTS
from fedclade_papers.cache import is_at_hand
from fedclade_papers.result import Result, measure


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """Return what measures an experiment at the scale ``smoke``; without its data the test is skipped."""
    shared = tmp_path_factory.mktemp("pieces")
    beside = Path(__file__).parents[3] / "shared" / "data"
    given = os.environ.get("FEDCLADE_DATA_DIR") or (beside if beside.exists() else None)
    data_dir = Path(given) if given else None

    @cache
    def of(name: str) -> Result:
        experiment = EXPERIMENTS[name]
        for data in experiment.needs("smoke"):
            if not is_at_hand(data, data_dir):
                pytest.skip(f"the data set {data} is not at hand")
        folder = shared / experiment.pieces if experiment.pieces else None
        return measure(experiment, "smoke", data_dir=data_dir, device="cpu", folder=folder)

    return of
