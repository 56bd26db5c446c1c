"""Whatever drops out, and whatever bit is changed: the exact sum of those that are in it, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedclade.core import UpdateError, Updates
from fedclade.flower import wire
from fedclade.flower.secure import member
from fedclade.flower.secure.encoding import bitmap
from fedclade.flower.secure.group import Group
from fedclade.flower.secure.member import SumState
from fedclade.flower.secure.parameters import Graph, fewest_holders, quorum
from fedclade.flower.secure.secrets import MODULUS, Masked
from fedclade.flower.secure.terms import STAGES
from fedclade.flower.wire import Content
from tests.flower.secure.sums import RULES, Room, setting_of, summed, worded

FEWEST = RULES.fewest
SLOWLY = settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


class Noted:
    """The whole numbers that clients put under masks, and the sums that came out of it."""

    def __init__(self) -> None:
        self.numbers: dict[int, Masked] = {}
        self.sums: list[Masked] = []


@contextmanager
def noting() -> Iterator[Noted]:
    noted = Noted()
    mask, unmask = member.add_masks, Group.unmasked

    def masked(kept: SumState, numbers: Masked) -> Masked:
        noted.numbers[kept.client] = numbers
        return mask(kept, numbers)

    def unmasked(group: Group) -> Masked:
        noted.sums.append(unmask(group))
        return noted.sums[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "add_masks", masked)
        patch.setattr(Group, "unmasked", unmasked)
        yield noted


def check_exact(updates: Updates, noted: Noted) -> None:
    """Check that the server got the exact sum of those in it, or none and a reason for each client."""
    if updates.ids:
        exact = sum(
            (noted.numbers[client] for client in updates.ids), np.zeros_like(noted.sums[-1])
        )
        assert (noted.sums[-1] == exact % MODULUS).all()


def is_had(gone: Mapping[int, str | None]) -> bool:
    """Return whether enough clients are there at each question."""
    there = [set(gone)]
    for stage in STAGES:
        there.append({client for client in there[-1] if gone[client] != stage})
    _, shown, *later = there
    needed = quorum(len(shown), RULES.colluders)
    _, active, *_ = later
    return len(active) >= FEWEST and all(len(each) >= needed for each in later)


@SLOWLY
@given(st.lists(st.sampled_from([None, None, None, *STAGES]), min_size=4, max_size=7))
def test_whoever_drops_out_the_sum_is_exact_or_there_is_none(stages: list[str | None]):
    room, gone = Room.of(len(stages)), dict(enumerate(stages))
    for client, stage in gone.items():
        if stage is not None:
            room.drop(client, stage)
    with noting() as noted:
        updates = summed(room, [0] * len(stages))
    check_exact(updates, noted)
    late = {client for client, stage in gone.items() if stage in (None, "agree", "unmask")}
    assert {*updates.ids} == (late if is_had(gone) else set())
    assert {*updates.ids} | {*updates.left_out} == {*gone}


def flipped(
    values: Mapping[str, Any], vectors: Mapping[str, bytes], draw: Any
) -> tuple[dict[str, Any], bytes | None]:
    """Return values with one bit changed, or another masked vector."""
    names = sorted(
        name for name, value in values.items() if isinstance(value, bytes) or _is_of_bytes(value)
    )
    name = draw.draw(st.sampled_from([*names, *(["masked"] if "masked" in vectors else [])]))
    whole = vectors["masked"] if name == "masked" else values[name]
    place = draw.draw(st.integers(0, len(whole) - 1)) if isinstance(whole, list) else None
    data = bytearray(whole if place is None else whole[place])
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    data[bit // 8] ^= 1 << bit % 8
    if name == "masked":
        return dict(values), bytes(data)
    if place is None:
        return {**values, name: bytes(data)}, None
    return {**values, name: [*whole[:place], bytes(data), *whole[place + 1 :]]}, None


def _is_of_bytes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, bytes) and each for each in value)
    )


@pytest.mark.parametrize("stage", STAGES)
@SLOWLY
@given(draw=st.data())
def test_a_changed_bit_of_an_answer_gives_the_same_sum_or_none(stage: str, draw: Any):
    room = Room.of(4)

    def change(honest: RecordDict) -> RecordDict:
        content = Content.of(honest)
        values, vector = flipped(content.values, content.vectors, draw)
        changed = worded(
            honest, **{name: value for name, value in values.items() if name != "protocol"}
        )
        if vector is None:
            return changed
        return RecordDict(
            {**changed, "vectors": ArrayRecord({"masked": wire.raw(vector, "uint8", len(vector))})}
        )

    room.spoilt[2, stage] = change
    with noting() as noted:
        updates = summed(room, [0] * 4)
    check_exact(updates, noted)
    assert {*updates.ids} | {*updates.left_out} == {*range(4)}


@pytest.mark.parametrize("stage", STAGES[1:])
@SLOWLY
@given(draw=st.data())
def test_a_changed_bit_of_a_question_gives_the_same_sum_or_none(stage: str, draw: Any):
    room = Room.of(4)
    honest = room.parties[2].answer

    def answer(content: Content) -> RecordDict:
        if content.get("what", str) == stage:
            content = replace(content, values=flipped(content.values, {}, draw)[0])
        return honest(content)

    room.parties[2].answer = answer  # type: ignore[method-assign]
    with noting() as noted:
        updates = summed(room, [0] * 4)
    check_exact(updates, noted)
    assert {*updates.ids} | {*updates.left_out} == {*range(4)}


@pytest.mark.parametrize("stage", STAGES)
def test_the_sum_of_a_sparse_graph_is_exact_whoever_drops_out(
    stage: str, monkeypatch: pytest.MonkeyPatch
):
    """With a graph that is sparse already for eleven clients, of which seven hold a client's shares."""
    monkeypatch.setattr(Graph, "of", lambda *_: Graph(7, 5))
    room = Room.of(11)
    room.drop(4, stage)
    with noting() as noted:
        updates = summed(room, [0] * 11)
    assert updates.ids == tuple(
        client for client in range(11) if client != 4 or stage in ("agree", "unmask")
    )
    check_exact(updates, noted)
    assert len(room.answers[9, "shares"].values["clients"]) == 7
    assert any(
        len(room.questions[client, "masked"].values["sources"]) < 9 for client in (0, 1, 2, 3)
    )


@pytest.mark.slow
def test_a_long_list_has_a_sparse_graph():
    count = 66
    holders = fewest_holders(count, RULES.colluders)
    room, rules = Room.of(count), replace(RULES, neighbours=holders)
    for place, stage in enumerate(STAGES):
        room.drop(place, stage)
    with noting() as noted:
        updates = summed(room, [0] * count, setting_of(rules))
    assert updates.ids == tuple(range(3, count))
    check_exact(updates, noted)
    assert len(room.answers[9, "shares"].values["clients"]) == holders < count - 1


def test_in_a_sparse_graph_a_client_masks_with_few_and_needs_its_own_holders(
    monkeypatch: pytest.MonkeyPatch,
):
    """A server that names a client as everybody's holder, or shows it a D without its holders, gets nothing."""
    monkeypatch.setattr(Graph, "of", lambda *_: Graph(2, 2))
    room = Room.of(11)
    for client in range(11):
        room.drop(client, "masked")
    honest, refused = room.parties[0].answer, list[str]()

    def answer(content: Content) -> RecordDict:
        if content.get("what", str) != "masked":
            return honest(content)
        others = list(range(1, 10))
        dealt = {"sources": others, "ciphertexts": [b""] * 9, "promises": [b""] * 9}
        holders = room.answers[0, "shares"].values["clients"]
        without = {member for member in range(11) if member not in holders}
        few = {
            "sources": [],
            "ciphertexts": [],
            "promises": [],
            "dealt": bitmap(without, range(11)),
        }
        for wrong in (dealt, few):
            with pytest.raises(UpdateError) as error:
                honest(replace(content, values={**content.values, **wrong}))
            refused.append(str(error.value))
        return honest(content)

    room.parties[0].answer = answer  # type: ignore[method-assign]
    summed(room, [0] * 11)
    assert refused == [
        "9 clients have dealt shares to this client, expected at most 8, which is 4 times the number "
        "of clients to which each client deals shares (2)",
        "only 0 of the clients that hold shares of this client's secrets are still in the sum, and "
        "2 are needed to remove its masks later, so this client sends no update",
    ]
