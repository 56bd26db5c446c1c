"""Every experiment's smoke scale is measured once for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from fedclade.reproduce import EXPERIMENTS
from fedclade.reproduce.experiment import is_at_hand
from fedclade.reproduce.result import Result, measure


@pytest.fixture(scope="session")
def smoke() -> Callable[[str], Result]:
    """Return what measures an experiment at the scale ``smoke``; without its data the test is skipped."""
    given = os.environ.get("FEDCLADE_DATA_DIR")
    data_dir = Path(given) if given else None

    @cache
    def of(name: str) -> Result:
        experiment = EXPERIMENTS[name]
        for data in experiment.data:
            if not is_at_hand(data, data_dir):
                pytest.skip(f"the data set {data} is not at hand")
        return measure(experiment, "smoke", data_dir=data_dir, device="cpu")

    return of
