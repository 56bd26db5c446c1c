"""How many actors there are, and what each gets of a cluster."""

from __future__ import annotations

import pytest

from fedclade import Actors, ConfigError
from fedclade.training.remote.cluster import Room, actors_from


@pytest.mark.parametrize(
    ("nodes", "actors", "device", "expected"),
    [
        ([(8, 0)], Actors(), "auto", Room(1, 8, 0, 1)),
        ([(8, 0), (8, 0)], Actors(), "auto", Room(2, 8, 0, 1)),
        ([(2, 0), (9, 0)], Actors(), "auto", Room(5, 2, 0, 4)),
        ([(8, 0)], Actors(cores=1), "auto", Room(8, 1, 0, 8)),
        ([(8, 0)], Actors(cores=4), "auto", Room(2, 4, 0, 2)),
        ([(8, 0), (4, 0)], Actors(count=9), "cpu", Room(9, 1, 0, 8)),
        ([(8, 2), (8, 2)], Actors(), "auto", Room(4, 1, 1, 2)),
        ([(8, 2), (8, 2)], Actors(cores=4), "cuda", Room(4, 4, 1, 2)),
        ([(8, 2)], Actors(), "cpu", Room(1, 8, 0, 1)),
        ([(0, 0), (2, 0)], Actors(), "auto", Room(1, 2, 0, 1)),
    ],
)
def test_one_for_each_gpu_or_node(nodes, actors, device, expected):
    assert Room.of(nodes, actors, device) == expected


def test_more_than_there_is_room_for_are_refused():
    with pytest.raises(ConfigError, match=r"3 actors of 4 cores each do not fit .* has room for 2"):
        Room.of([(8, 0)], Actors(count=3, cores=4), "auto")
    with pytest.raises(ConfigError, match=r"1 actors of 16 cores each .* room for 0"):
        Room.of([(8, 0)], Actors(cores=16), "auto")
    with pytest.raises(
        ConfigError, match="device 'cuda' was requested, but the Ray cluster has no GPU"
    ):
        Room.of([(8, 0)], Actors(), "cuda")
    with pytest.raises(ConfigError, match="device 'cuda:1' is not possible with the engine ray"):
        Room.of([(8, 2)], Actors(), "cuda:1")


def test_numbers_and_engines_are_checked():
    with pytest.raises(
        ConfigError,
        match=r"actors should be at least 1, got 0\nactor cores should be at least 1, got -1",
    ):
        Actors(count=0, cores=-1)
    with pytest.raises(ConfigError, match="unknown engine 'ray'"):
        Actors(engine="ray")
    with pytest.raises(
        ConfigError,
        match=r"actors can be used with engine 'ray' only, but this run has engine 'loop'",
    ):
        actors_from(2, "loop")
    assert actors_from(2, "ray") == Actors(count=2)
    assert actors_from(None, "loop") == Actors()
