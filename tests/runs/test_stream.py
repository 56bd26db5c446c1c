"""Whether a run streams, and what it warns of: a table of all cases."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fedclade import CFL, IFCA, Aggregation, FedAvg, LocalTraining, Signature
from fedclade.algorithms import Algorithm
from fedclade.channel import CentralPrivacy
from fedclade.runs.models import (
    EXPECTED_CLIENTS,
    LARGEST_STORED,
    decide_network_stream,
    decide_stream,
)
from fedclade.runs.settings import RunSettings

BUDGET = 4000
FITS = 1000
"""Bytes of updates that are just a quarter of the budget."""

PROJECTED = {"signature": Signature(kind="projected")}
COMPARES = CFL(eps2=0.5)


class NeedsUpdates(FedAvg):
    """An algorithm that needs the updates of single clients."""

    requires = replace(FedAvg.requires, updates=True)


@dataclass(frozen=True)
class Case:
    """Settings, and what is decided of them."""

    streams: bool
    algorithm: Algorithm = field(default_factory=FedAvg)
    settings: dict[str, Any] = field(default_factory=dict)
    size: int = FITS
    remote: bool = False
    warns: bool = False


CASES = {
    "updates that fit are kept": Case(False),
    "of updates that do not fit, sums are kept": Case(True, size=FITS + 1),
    "updates that are compared are kept, with a warning where they do not fit": Case(
        False, COMPARES, size=FITS + 1, warns=True
    ),
    "updates that are compared and fit are kept without one": Case(False, COMPARES),
    "projections are compared in a stream": Case(True, COMPARES, PROJECTED, size=FITS + 1),
    "projections of updates that fit are not": Case(False, COMPARES, PROJECTED),
    "actors send sums even where updates fit": Case(True, remote=True),
    "actors send projections": Case(True, COMPARES, PROJECTED, remote=True),
    "actors send updates that are compared and fit, which is no reason to warn": Case(
        False, COMPARES, remote=True
    ),
    "actors send those that do not fit, with a warning": Case(
        False, COMPARES, size=FITS + 1, remote=True, warns=True
    ),
    "what needs single updates has them": Case(
        False, NeedsUpdates(), size=10 * BUDGET, remote=True
    ),
    "a robust rule has them": Case(
        False, settings={"aggregate": Aggregation(rule="median")}, size=10 * BUDGET
    ),
    "who says true streams": Case(True, settings={"stream": True}),
    "who says false does not": Case(False, settings={"stream": False}, size=10 * BUDGET),
    "central noise is on sums": Case(
        True,
        settings={"privacy": CentralPrivacy(clip_norm=1.0, noise_multiplier=1.0), "stream": False},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_run_streams(case: Case, caplog: pytest.LogCaptureFixture):
    settings = RunSettings(local=LocalTraining(), **case.settings)
    assert decide_stream(settings, case.algorithm, case.size, BUDGET, case.remote) is case.streams
    assert ("signature.kind = 'projected'" in caplog.text) is case.warns


def test_the_warning_says_how_much_there_is_and_how_much_there_may_be(
    caplog: pytest.LogCaptureFixture,
):
    decide_stream(RunSettings(), COMPARES, 3_000_000_000, 2_000_000_000)
    assert (
        "the updates of all clients take 3.0 GB of memory, but the run is limited to 2.0 GB"
        in caplog.text
    )


LARGE = LARGEST_STORED // EXPECTED_CLIENTS + 1
"""Bytes of an update above which the server of a network streams, with few clients."""


@pytest.mark.parametrize(
    ("streams", "algorithm", "settings", "joined", "bytes_each"),
    [
        pytest.param(True, FedAvg(), {}, 2, LARGE, id="large-updates"),
        pytest.param(False, FedAvg(), {}, 2, LARGE - 1, id="small-updates"),
        pytest.param(True, FedAvg(), {}, 2 * EXPECTED_CLIENTS, LARGE - 1, id="many-clients"),
        pytest.param(True, CFL(), PROJECTED, 2, LARGE, id="projections"),
        pytest.param(False, CFL(), {}, 2, LARGE, id="whole-updates-are-compared"),
        pytest.param(False, FedAvg(), {"stream": False}, 2, LARGE, id="false"),
        pytest.param(False, IFCA(clusters=2), {}, 2, LARGE, id="opposed-updates-are-left-out"),
        pytest.param(
            True,
            IFCA(clusters=2),
            {"aggregate": Aggregation(leave_out_opposed=False)},
            2,
            LARGE,
            id="opposed-updates-stay",
        ),
    ],
)
def test_the_server_of_a_network_streams_large_updates(
    streams: bool, algorithm: Algorithm, settings: dict[str, Any], joined: int, bytes_each: int
):
    settings = RunSettings(local=LocalTraining(), **settings)
    found = decide_network_stream(settings, algorithm, joined, bytes_each, budget=10**12)
    assert found is streams
