"""Lying servers against real clients: the attacks of a benchmark program, which must stay unsuccessful."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import secure_sums
from lying_server import View
from secure_sums import ServerOfMembers


@pytest.mark.parametrize(
    "attack", ["neighbourhoods", "isolate", "grind", "replay", "twice", "roster", "collide"]
)
def test_an_attack_on_sums_fails(attack: str, tmp_path: Path):
    rows = [*getattr(secure_sums, f"try_{attack}")(tmp_path)]
    assert {row.attack.partition(",")[0] for row in rows} == {attack}
    assert [row for row in rows if row.succeeded] == []


def test_a_server_that_keeps_to_the_protocol_learns_the_sum_of_all(tmp_path: Path):
    """Or the attacks could fail for any reason."""
    server = ServerOfMembers(tmp_path, 6)
    server.play(dict.fromkeys(range(6), View.honest((*range(6), *server.spoilers))))
    assert server.refused == {}
    assert server.learned() == [{*range(6)}]


def test_whatever_a_server_shows_no_client_gives_shares_of_both_secrets_of_another(tmp_path: Path):
    draw, server = random.Random(1), ServerOfMembers(tmp_path, 5)
    for _ in range(8):
        server.begin()
        server.play(secure_sums.draw_views(draw, 5, server.spoilers))
        assert not secure_sums.is_small(server.learned())
        for dealer in server.clients:
            holders = [{*server.shares.get((dealer, which), {})} for which in ("seed", "key")]
            assert holders[0] & holders[1] <= {*server.spoilers}
        before = dict(server.agreements)
        assert not any(server.ask_agree(client) for client in before)
        assert not any(server.ask_unmask(client) for client in before)
