"""Lying servers against real clients: the attacks of a benchmark program, which must stay unsuccessful."""

from __future__ import annotations

import random
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "attacks" / "secure_sums.py"


@cache
def program() -> Any:
    spec = spec_from_file_location("secure_sums", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["secure_sums"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("attack", ["neighbourhoods", "isolate", "grind", "replay", "twice", "roster", "collide"])
def test_an_attack_on_sums_fails(attack: str, tmp_path: Path):
    outcome = getattr(program(), f"try_{attack}")(tmp_path)
    assert outcome.attack == attack
    assert not outcome.succeeded, outcome.detail


def test_a_server_that_keeps_to_the_protocol_learns_the_sum_of_all(tmp_path: Path):
    """Or the attacks could fail for any reason."""
    server = program().LyingServer(tmp_path, 6)
    everybody = (*range(6), *server.spoilers)
    server.play(dict.fromkeys(range(6), program().View(everybody, everybody, everybody)))
    assert server.refused == {}
    assert server.learned() == [{*range(6)}]


def test_whatever_a_server_shows_no_client_gives_shares_of_both_secrets_of_another(tmp_path: Path):
    draw, server = random.Random(1), program().LyingServer(tmp_path, 5)
    for _ in range(8):
        server.begin()
        server.play(program().draw_views(draw, 5, tuple(server.spoilers)))
        assert not program().is_small(server.learned())
        for dealer in server.clients:
            holders = [{*server.shares.get((dealer, which), {})} for which in ("seed", "key")]
            assert holders[0] & holders[1] <= {*server.spoilers}
        before = dict(server.agreements)
        assert not any(server.ask_agree(client) for client in before)
        assert not any(server.ask_unmask(client) for client in before)
