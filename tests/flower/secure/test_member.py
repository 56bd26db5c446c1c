"""What a client refuses, whatever the server asks: each of these questions would tell more than a sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedclade.core import PolicyError, UpdateError
from fedclade.flower import wire
from fedclade.flower.policy import Policy
from fedclade.flower.secure.adverts import Advert
from fedclade.flower.secure.numbers import Numbers
from fedclade.flower.secure.secrets import mask
from fedclade.flower.secure.terms import Terms
from fedclade.flower.wire import Content
from tests.flower.secure.sums import Room, S, expected, summed


def after(stage: str, clients: int = 5) -> Room:
    """Return a room in which client 0 has answered all questions up to a stage's, but not that."""
    room = Room.of(clients)
    for client in range(clients):
        room.drop(client, stage)
    held = room.parties[0].answer

    def stops(content: Content) -> Any:
        if content.get("what", str) == stage:
            raise UpdateError("held back")
        return held(content)

    room.parties[0].answer = stops  # type: ignore[method-assign]
    summed(room, [0] * clients)
    room.parties[0].answer = held  # type: ignore[method-assign]
    return room


def asked(room: Room, stage: str, **values: Any) -> None:
    """Put the stage's question to client 0, with other values."""
    question = room.questions[0, stage]
    room.parties[0].answer(replace(question, values={**question.values, **values}))


@pytest.mark.parametrize("stage", ["shares", "masked", "unmask"])
def test_every_question_of_a_sum_is_answered_once(stage: str):
    room = Room.of(4)
    summed(room, [0] * 4)
    with pytest.raises(UpdateError, match=rf"asked for the '{stage}' of a sum, which comes once and after"):
        asked(room, stage)
    with pytest.raises(UpdateError, match=rf"asked for the '{stage}' of a sum that this client has no part in"):
        asked(room, stage, instance="another")


def test_the_first_question_put_again_begins_anew_with_other_keys():
    room = Room.of(4)
    summed(room, [0] * 4)
    before = room.answers[0, "keys"].values
    again = Content.of(room.parties[0].answer(room.questions[0, "keys"])).values
    assert all(before[name] != again[name] for name in ("masking", "sealing", "commitment"))
    with pytest.raises(UpdateError, match="the last it answered was 'keys'"):
        asked(room, "unmask")


def test_what_was_secret_is_forgotten_at_the_end():
    room = Room.of(4)
    summed(room, [0] * 4)
    kept = dict(room.parties[0].state.config_records["fedclade.secure"])
    assert {kept[name] for name in ("masking", "sealing", "seed")} == {b""}
    assert kept["key_shares"] == kept["seed_shares"] == []


def test_a_client_begins_with_a_number_terms_and_a_key():
    room = Room.of(4)
    summed(room, [0] * 4)
    for values in ({"client": -1}, {"instance": "x"}):
        with pytest.raises(UpdateError, match="takes part in a sum under a number, by terms of that sum, and with a k"):
            asked(room, "keys", **values)
    room.parties[0].state = None  # type: ignore[assignment]
    with pytest.raises(UpdateError, match="only if Flower keeps a state for it"):
        asked(room, "keys")


def test_a_group_is_as_large_as_the_client_wants():
    room = Room.of(4)
    room.parties[0].policy = Policy(min_group=5)
    updates = summed(room, [0] * 4)
    assert updates.left_out == {
        0: "this client takes part in sums of at least 5 clients (min-group in its node config), and is asked for one "
        "of 4"
    }
    room = after("unmask")
    room.parties[0].policy = Policy(min_group=5)
    active = room.questions[0, "unmask"].values["active"]
    with pytest.raises(PolicyError, match=r"at least 5 clients .* is asked for one of 4"):
        asked(room, "unmask", active=active[:4], dead=active[4:])


def test_the_others_keys_are_those_of_the_group_and_all_different():
    room = after("shares")
    told = {name: list(room.questions[0, "shares"].values[name]) for name in ("clients", "maskings", "sealings")}
    with pytest.raises(UpdateError, match="two clients of the sum show the same key"):
        asked(room, "shares", sealings=[told["sealings"][0], *[told["sealings"][1]] * 4])
    with pytest.raises(UpdateError, match="the keys shown for the sum are not those of its 5 clients"):
        asked(room, "shares", maskings=[told["maskings"][1], *told["maskings"][1:]])
    with pytest.raises(UpdateError, match="client 1's keys for the sum are not signed by its key"):
        asked(room, "shares", sealings=[told["sealings"][0], bytes(33), *told["sealings"][2:]])
    with pytest.raises(UpdateError, match=r"keys of clients \[0, 1, 2, 3, 3\]: each client should be there once"):
        asked(room, "shares", clients=[0, 1, 2, 3, 3])
    with pytest.raises(UpdateError, match="'clients' should be a list of int, got 'all'"):
        asked(room, "shares", clients="all")


def test_what_is_trained_is_what_all_have_agreed_on():
    """Or a server could send the others models of which it knows the updates."""
    room = after("masked")
    with pytest.raises(UpdateError, match="asked to train something else than the terms of the sum say"):
        asked(room, "masked", seed=7)
    question = room.questions[0, "masked"]
    other = {"model": wire.raw_vector(room.parties[0].update).data}
    with pytest.raises(UpdateError, match="asked to train something else than the terms of the sum say"):
        room.parties[0].answer(replace(question, vectors=other))


@pytest.mark.parametrize("differ", [False, True])
def test_masks_of_clients_that_were_told_different_terms_do_not_cancel(differ: bool, monkeypatch: pytest.MonkeyPatch):
    """A server that tells client 0 other terms than the rest gets noise, even if it has everybody's seed."""
    room = Room.of(4)
    honest, terms_of = room.parties[0].answer, dict[int, Terms]()

    def told(content: Content) -> Any:
        if content.get("what", str) == "keys":
            terms = Terms.read(content)
            terms_of.update(dict.fromkeys(range(4), terms))
            terms_of[0] = replace(terms, weight=terms.weight + differ)
            content = replace(content, values={**content.values, "terms": terms_of[0].text})
        return honest(content)

    room.parties[0].answer = told  # type: ignore[method-assign]
    monkeypatch.setattr(Advert, "check", lambda *_: None)  # of a server that does not care
    for client in range(4):
        room.drop(client, "unmask")
    summed(room, [0] * 4)
    total = np.zeros(S, np.uint32)
    for client in range(4):
        seed = room.seeds[client]
        sent = np.frombuffer(room.answers[client, "masked"].vector("masked"), "<u4")
        total += sent - mask(seed, terms_of[client].context, S)
    numbers = Numbers(terms_of[1].clip, 4)
    if differ:
        with pytest.raises(UpdateError, match="entries of the sum are larger than 4 updates can come to"):
            numbers.decode(total, 4)
    else:
        torch.testing.assert_close(numbers.decode(total, 4).float() * 13, expected(room, range(4)), rtol=0, atol=1e-4)


def test_shares_are_taken_from_those_of_the_group_once():
    room = after("masked")
    ciphertexts, promises = (room.questions[0, "masked"].values[name] for name in ("ciphertexts", "promises"))
    with pytest.raises(UpdateError, match=r"got shares of \[1, 1, 2, 3\], expected some of \[1, 2, 3, 4\], each once"):
        asked(room, "masked", sources=[1, 1, 2, 3])
    with pytest.raises(UpdateError, match=r"got shares of \[1, 2, 3, 4\], expected some"):
        asked(room, "masked", promises=promises[:3])
    with pytest.raises(UpdateError, match="2 clients of the sum have sent shares, and 4 are needed"):
        asked(room, "masked", sources=[1], ciphertexts=ciphertexts[:1], promises=promises[:1])


def test_of_each_client_only_one_secret_is_told():
    """Whoever has a client's seed and its key has its update."""
    room = after("unmask")
    for active, dead in (([0, 1, 2, 3, 4], [1]), ([0, 1, 2, 3], []), ([0, 1, 2, 3, 4, 9], []), ([0, 1, 2, 3, 3], [4])):
        with pytest.raises(UpdateError, match=r"asked for shares of .* and .*, of \[0, 1, 2, 3, 4\]"):
            asked(room, "unmask", active=active, dead=dead)
    with pytest.raises(UpdateError, match="asked for shares of a sum that this client's update is not in"):
        asked(room, "unmask", active=[1, 2, 3, 4], dead=[0])
    with pytest.raises(UpdateError, match="asked to unmask a sum of 3 clients, and at least 4 are needed"):
        asked(room, "unmask", active=[0, 1, 2], dead=[3, 4])
    asked(room, "unmask")  # after all these it is still there to give


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"clients": 1}, "terms of a sum out of range"),
        ({"threshold": 0.5}, "terms of a sum out of range"),
        ({"weight": 0}, "terms of a sum out of range"),
        ({"clip": float("inf")}, "terms of a sum out of range"),
        ({"clients": 4.5}, "are no terms of a sum"),
        ({"clients": None}, "are no terms of a sum"),
    ],
)
def test_terms_have_to_be_possible(change: dict[str, Any], why: str):
    room = Room.of(4)
    summed(room, [0] * 4)
    terms = Terms.read(room.questions[0, "keys"])
    with pytest.raises(UpdateError, match=why):
        asked(room, "keys", terms=replace(terms, **change).text)
