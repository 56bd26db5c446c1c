"""Shards take equally long by the speeds seen, and clients move only where that is worth it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedclade.training.remote.clients import Speeds, dealt, makespan

WORK = {client: float(size) for client, size in enumerate((60, 50, 40, 30, 20, 10))}


def test_actors_of_one_speed_get_as_many_examples():
    homes = dealt(WORK, [1.0, 1.0], {})
    assert makespan(WORK, [1.0, 1.0], homes) == 110  # 60 + 30 + 20 and 50 + 40 + 10 are 110 and 100


def test_one_that_is_twice_as_fast_gets_twice_as_many():
    homes = dealt(WORK, [2.0, 1.0], {})
    assert sum(WORK[client] for client, home in homes.items() if home == 0) == 140  # of 210


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=30),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_all_clients_have_a_home_and_none_waits_longer_than_one_client_more_than_its_share(
    sizes, speeds, draw
):
    work = {client: float(size) for client, size in enumerate(sizes)}
    before = {client: draw.randrange(-1, len(speeds) + 1) for client in work}
    homes = dealt(work, speeds, before)
    assert list(homes) == list(work)
    assert set(homes.values()) <= set(range(len(speeds)))
    fair = sum(work.values()) / sum(speeds)
    assert makespan(work, speeds, homes) <= fair + max(work.values()) / min(speeds) + 1e-9


def test_clients_of_an_actor_that_is_gone_go_to_the_others_and_nobody_else_moves():
    work = dict.fromkeys(range(9), 1.0)
    before = {client: client % 3 for client in work}
    homes = dealt(work, [1.0, 1.0], {client: home for client, home in before.items() if home < 2})
    assert all(homes[client] == before[client] for client in work if before[client] < 2)


def test_shards_are_dealt_anew_where_one_actor_was_seen_to_be_slower_and_then_less_often():
    homes = dealt(WORK, [1.0, 1.0], {})
    speeds = Speeds(2, needed=1.0)
    speeds.note(0, 300, 1.0)
    assert speeds.rebalanced(WORK, homes) is None, "as long as one is not known"
    speeds.note(1, 100, 1.0)
    new = speeds.rebalanced(WORK, homes)
    assert new is not None
    assert makespan(WORK, [300, 100], new) < makespan(WORK, [300, 100], homes)
    assert speeds.needed == 2.0
    speeds.note(0, 300, 1.5)
    speeds.note(1, 100, 1.5)
    assert speeds.known() is None, "what was seen before does not count, and more is to be seen now"


def test_a_little_slower_is_not_worth_moving():
    homes = dealt(WORK, [1.0, 1.0], {})
    speeds = Speeds(2)
    speeds.note(0, 100, 1.0)
    speeds.note(1, 105, 1.0)
    assert speeds.rebalanced(WORK, homes) is None


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 3.0]])
def test_nobody_is_no_work(speeds):
    assert dealt({}, speeds, {}) == {}
