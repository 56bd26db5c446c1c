"""What a client refuses, whatever the server asks: each of these questions would tell more than a sum."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from fedclade import LocalTraining
from fedclade.core import PolicyError, Round, UpdateError
from fedclade.flower import wire
from fedclade.flower.policy import Policy
from fedclade.flower.secure import group, server
from fedclade.flower.secure.adverts import Advert
from fedclade.flower.secure.encoding import bitmap
from fedclade.flower.secure.member import SumState
from fedclade.flower.secure.secrets import RejectedSumError, own_mask, unpack
from fedclade.flower.secure.spent import SpentQuestions
from fedclade.flower.secure.terms import Terms
from fedclade.flower.wire import Content
from tests.flower.secure.sums import D, Room, S, expected, query_of, summed


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
    asked_of(room, 0, stage, **values)


def asked_of(room: Room, party: int, stage: str, **values: Any) -> None:
    """Put the stage's question to a client, with other values."""
    question = room.questions[party, stage]
    room.parties[party].answer(replace(question, values={**question.values, **values}))


@pytest.mark.parametrize("stage", ["shares", "masked", "agree", "unmask"])
def test_every_question_of_a_sum_is_answered_once(stage: str):
    room = Room.of(4)
    summed(room, [0] * 4)
    with pytest.raises(
        UpdateError, match=rf"the request '{stage}' of a sum is possible once, and only after"
    ):
        asked(room, stage)
    with pytest.raises(
        UpdateError, match=rf"the request '{stage}' is about a sum that this client has not joined"
    ):
        asked(room, stage, instance="another")


def test_the_first_question_put_again_begins_anew_with_other_keys():
    room = after("masked")
    before = room.answers[0, "keys"].values
    again = Content.of(room.parties[0].answer(room.questions[0, "keys"])).values
    assert all(before[name] != again[name] for name in ("masking", "sealing"))
    with pytest.raises(
        UpdateError, match="the last request that this client replied to was 'keys'"
    ):
        asked(room, "masked")


def test_what_was_secret_is_forgotten_at_the_end():
    room = Room.of(4)
    summed(room, [0] * 4)
    kept = dict(room.parties[0].state.config_records["fedclade.secure"])
    names = ("masking", "sealing", "seed", "own_seed_share", "own_key_share")
    assert {kept[name] for name in names} == {b""}
    assert kept["key_shares"] == kept["seed_shares"] == []


def test_a_client_begins_with_a_number_terms_and_a_key():
    room = Room.of(4)
    summed(room, [0] * 4)
    for values in ({"client": -1}, {"instance": "x"}):
        with pytest.raises(
            UpdateError,
            match="to join a sum, a client needs a signature key, a number of at least 0, and te",
        ):
            asked(room, "keys", **values)
    room.parties[0].state = None  # type: ignore[assignment]
    with pytest.raises(UpdateError, match="only if Flower keeps a state for the client"):
        asked(room, "keys")


def test_a_group_is_as_large_as_the_client_wants():
    room = Room.of(4)
    room.parties[0].policy = Policy(max_colluders=1, min_honest=4)
    updates = summed(room, [0] * 4)
    least = "this client joins only sums of at least 5 clients (min-honest in its node config, and 1 that may "
    assert updates.left_out == {
        0: f"{least}collude), and the requested sum has 4; let more clients join, or lower min-honest"
    }
    room = after("shares")
    room.parties[0].policy = Policy(min_honest=5)
    with pytest.raises(PolicyError, match=r"at least 6 clients .* the requested sum has 5"):
        asked(room, "shares")
    room = after("agree")
    room.parties[0].policy = Policy(min_honest=4)
    with pytest.raises(PolicyError, match=r"at least 5 clients .* the requested sum has 4"):
        asked(room, "agree", active=bitmap({0, 1, 2, 3}, range(5)))


def test_a_sum_copes_with_as_many_colluders_as_the_client_fears():
    room = Room.of(4)
    room.parties[0].policy = Policy(max_colluders=2, min_honest=2)
    assert summed(room, [0] * 4).left_out == {
        0: "this client joins only sums that tolerate 2 colluding clients (max-colluders in its node config), and "
        "the requested sum tolerates 1; set network.secure_colluders = 2"
    }


INSISTS = Policy(min_honest=2, secure_aggregation=True, trust_server_keys=True)


def insisting(room: Room, *clients: int, min_honest: int = 2) -> None:
    """Let clients of a room insist on sums."""
    for client in clients:
        room.parties[client].policy = replace(INSISTS, min_honest=min_honest)


def too_few_insist(count: int, *, client: int, least: int) -> str:
    return (
        f"with {count} clients that have secure-aggregation=true in their node config, since client {client} joins "
        f"only sums with at least {least} (its min-honest, and 1 that may "
        "collude); set secure-aggregation=true for more "
        "clients, or lower its min-honest"
    )


def test_a_client_that_insists_on_sums_counts_only_others_that_do():
    """Another one answers the same training without masks, and the server takes its update off the sum."""
    room = Room.of(5)
    insisting(room, 0, 1)
    found = summed(room, [0] * 5)
    assert found.left_out == dict.fromkeys(
        (0, 1), f"left out of a sum {too_few_insist(2, client=0, least=3)}"
    )
    assert len(found.ids) == 3
    insisting(room, 2)
    assert not summed(room, [0] * 5).left_out


def test_a_client_that_wants_more_others_than_insist_is_left_out_and_then_those_that_counted_on_it():
    room = Room.of(5)
    insisting(room, 0, 1, 2)
    insisting(room, 3, min_honest=4)
    found = summed(room, [0] * 5)
    assert found.left_out == {3: f"left out of a sum {too_few_insist(4, client=3, least=5)}"}
    insisting(room, 2, min_honest=3)
    room.sums += 1
    found = summed(room, [0] * 5)
    assert {client: why.split(",")[0] for client, why in found.left_out.items()} == {
        3: "left out of a sum with 4 clients that have secure-aggregation=true in their node config",
        2: "left out of a sum with 3 clients that have secure-aggregation=true in their node config",
        0: "left out of a sum with 2 clients that have secure-aggregation=true in their node config",
        1: "left out of a sum with 2 clients that have secure-aggregation=true in their node config",
        4: "1 of the 5 clients of its cluster replied",
    }


def test_it_counts_them_again_in_the_sum_that_it_agrees_to():
    room = Room.of(5)
    insisting(room, 0, 1, 2)
    room.drop(2, "masked")
    found = summed(room, [0] * 5)
    assert found.left_out[0] == f"no sum is possible {too_few_insist(2, client=0, least=3)}"
    assert "agree" not in room.asked


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server ask all questions, whatever clients want of a sum."""
    monkeypatch.setattr(group, "without_protection", lambda *_: [])


@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize("refuses", [True, False])
def test_bystanders_do_not_open_a_sum_with_a_client_that_insists(refuses: bool):
    """They do not need its agreement: it is opened by T signatures and t shares of others."""
    room = Room.of(9)
    insisting(room, 0, 1, 2)
    room.drop(1, "masked")
    room.drop(2, "masked")
    if refuses:
        room.drop(0, "agree")
    found = summed(room, [0] * 9)
    assert not found.ids
    assert not [client for client, what in room.answers if what == "agree"]


@pytest.mark.usefixtures("careless")
def test_nor_do_clients_that_insist_and_want_less():
    room = Room.of(9)
    insisting(room, *range(1, 9))
    insisting(room, 0, min_honest=7)
    room.drop(1, "masked")
    room.drop(2, "masked")
    found = summed(room, [0] * 9)
    assert not found.ids
    assert not [client for client, what in room.answers if what == "agree"]
    for client in range(3, 9):
        room.parties[client].state.config_records["fedclade.secure"]["stage"] = "masked"
        with pytest.raises(
            UpdateError,
            match=re.escape(
                f"this client refuses a sum of too few honest clients, {too_few_insist(7, client=0, least=8)}"
            ),
        ):
            asked_of(room, client, "agree", active=bitmap({0, *range(3, 9)}, range(9)))


def test_those_that_do_not_insist_count_among_the_colluders_where_others_do():
    """So T and t hold although all of them sign two sums, and give shares of both."""
    room = Room.of(9)
    insisting(room, 0, 1, 2, 3, 4)
    room.drop(8, "masked")
    room.drop(7, "masked")
    why = summed(room, [0] * 9).left_out[0]
    assert why == (
        "7 of the 9 clients of its cluster replied, and 8 have to agree on "
        "their sum (more than half of all clients, if those that may collude count twice: the 1 of "
        "network.secure_colluders, and the 4 without secure-aggregation=true in their node config: set it for all "
        "clients)"
    )
    kept = [
        SumState(**dict(room.parties[client].state.config_records["fedclade.secure"]))
        for client in range(7)
    ]
    assert {each.quorum for each in kept} == {each.graph.needed for each in kept} == {8}


def test_a_server_cannot_say_that_another_client_insists_on_sums():
    room = after("shares")
    with pytest.raises(
        UpdateError,
        match="the keys of client 1 for the sum are not signed by this client's own key",
    ):
        asked(room, "shares", min_honests=[0, 2, 2, 2, 0])
    with pytest.raises(
        UpdateError,
        match=re.escape(
            f"this client refuses a sum of too few honest clients, {too_few_insist(1, client=1, least=3)}"
        ),
    ):
        asked(room, "shares", min_honests=[0, 2, 0, 0, 0])
    with pytest.raises(
        UpdateError,
        match=r"'min_honests' should be a list of values of type int, got \[True, False, ",
    ):
        asked(room, "shares", min_honests=[True, False, False, False, False])
    with pytest.raises(
        UpdateError, match=r"should contain each client once, .* with all of its keys"
    ):
        asked(room, "shares", min_honests=[0] * 4)


@pytest.mark.parametrize("number", [-1, 1, 2**20 + 1])
def test_a_client_cannot_want_an_impossible_number_of_honest_ones(number: int):
    room = after("shares")
    with pytest.raises(
        UpdateError,
        match=rf"the client demands {number} honest clients .*; expected 0, or 2 to 1048576",
    ):
        asked(room, "shares", min_honests=[0, number, 0, 0, 0])
    room = Room.of(4)
    room.say(1, "keys", min_honest=number)
    assert f"the client demands {number} honest clients" in summed(room, [0] * 4).left_out[1]


def test_the_others_keys_are_those_of_the_group_and_all_different():
    room = after("shares")
    told = {
        name: list(room.questions[0, "shares"].values[name])
        for name in ("maskings", "sealings", "signers")
    }
    with pytest.raises(UpdateError, match="two clients of the sum have the same public key"):
        asked(room, "shares", sealings=[told["sealings"][0], *[told["sealings"][1]] * 4])
    with pytest.raises(
        UpdateError,
        match="should have at most 5 clients, and contain this client with its own keys",
    ):
        asked(room, "shares", maskings=[told["maskings"][1], *told["maskings"][1:]])
    with pytest.raises(UpdateError, match="two clients of the sum have the same public key"):
        asked(room, "shares", signers=[told["signers"][0], *[told["signers"][1]] * 4])
    with pytest.raises(
        UpdateError,
        match="the keys of client 1 for the sum are not signed by this client's own key",
    ):
        asked(room, "shares", sealings=[told["sealings"][0], bytes(33), *told["sealings"][2:]])
    for clients in ([0, 1, 2, 3, 3], [0, 1, 2, 4, 3], [0, 1, 2, 3]):
        with pytest.raises(
            UpdateError,
            match=r"keys of clients .* should contain each client once, in ascending ord",
        ):
            asked(room, "shares", clients=clients)
    with pytest.raises(
        UpdateError, match="'clients' should be a list of values of type int, got 'all'"
    ):
        asked(room, "shares", clients="all")


def test_what_is_trained_is_what_all_have_agreed_on():
    """Or a server could send the others models of which it knows the updates."""
    room = after("masked")
    with pytest.raises(
        UpdateError, match="the training request differs from the training in the terms of the sum"
    ):
        asked(room, "masked", seed=7)
    question = room.questions[0, "masked"]
    other = {"model": wire.raw_vector(room.parties[0].update).data}
    with pytest.raises(
        UpdateError, match="the training request differs from the training in the terms of the sum"
    ):
        room.parties[0].answer(replace(question, vectors=other))


@pytest.mark.parametrize("differ", ["nothing", "terms", "list"])
def test_masks_of_clients_that_were_told_different_things_do_not_cancel(
    differ: str, monkeypatch: pytest.MonkeyPatch
):
    """A server that tells client 0 other terms than the rest gets noise, even if it has everybody's seed."""
    room = Room.of(4)
    honest, terms_of = room.parties[0].answer, dict[int, Terms]()

    def told(content: Content) -> Any:
        what = content.get("what", str)
        if what == "keys":
            terms = Terms.read(content)
            terms_of.update(dict.fromkeys(range(4), terms))
            terms_of[0] = replace(terms, weight=terms.weight + (differ == "terms"))
            content = replace(content, values={**content.values, "terms": terms_of[0].text})
        if what == "shares" and differ == "list":
            signatures = [*content.values["signatures"][:-1], bytes(64)]
            content = replace(content, values={**content.values, "signatures": signatures})
        return honest(content)

    room.parties[0].answer = told  # type: ignore[method-assign]
    # of a server, or of a client, that does not care
    monkeypatch.setattr(Advert, "check", lambda *_: None)
    monkeypatch.setattr(server, "is_signed", lambda *_: True)
    for client in range(4):
        room.drop(client, "agree")
    summed(room, [0] * 4)
    numbers = terms_of[1].numbers(D, S)
    total = np.zeros(numbers.length, np.uint32)
    for client in range(4):
        kept = room.parties[client].state.config_records["fedclade.secure"]
        scope = terms_of[client].context, kept["listing"]
        sent = unpack(room.answers[client, "masked"].vector("masked"))
        total += sent - own_mask(room.seeds[client], scope, client, len(sent))  # pyright: ignore[reportArgumentType]
    if differ == "nothing":
        found = numbers.decode(total, 4).total.float()
        torch.testing.assert_close(found, expected(room, range(4)), rtol=0, atol=1e-3)
    else:
        with pytest.raises(
            RejectedSumError,
            match="8 of the 8 check entries of the sum do not equal its number of clients, 4",
        ):
            numbers.decode(total, 4)


def test_shares_of_another_list_are_not_read():
    """So a holder that accepted another list can help to open nothing."""
    room = after("masked")
    party = room.parties[0]
    before = party.state.copy()
    asked(room, "masked")
    opened = party.state.config_records["fedclade.secure"]
    assert all(opened["seed_shares"])  # pyright: ignore[reportArgumentType]
    party.state = before
    kept = party.state.config_records["fedclade.secure"]
    kept["listing"] = bytes(32)
    asked(room, "masked")
    opened = party.state.config_records["fedclade.secure"]
    assert opened["seed_shares"] == opened["key_shares"] == [b""] * 4


def test_shares_are_taken_from_those_of_the_group_once():
    room = after("masked")
    ciphertexts, promises = (
        room.questions[0, "masked"].values[name] for name in ("ciphertexts", "promises")
    )
    whole = {"ciphertexts": ciphertexts, "promises": promises}
    for wrong in (
        {"sources": [1, 1, 2, 3], **whole},
        {"sources": [1, 2, 4, 3], **whole},
        {"promises": promises[:3]},
    ):
        with pytest.raises(
            UpdateError,
            match=r"has shares of clients .*, expected clients out of \[1, 2, 3, 4\], each once, in asc",
        ):
            asked(room, "masked", **wrong)
    with pytest.raises(
        UpdateError,
        match=r"has shares of clients \[1, 2, 3\], expected clients out of \[1, 2, 3, 4\]",
    ):
        asked(room, "masked", sources=[1, 2, 3], ciphertexts=ciphertexts[:3], promises=promises[:3])
    with pytest.raises(
        UpdateError, match="the request is about a sum in which this client has not dealt shares"
    ):
        asked(room, "masked", dealt=bitmap({1, 2, 3, 4}, range(5)))
    few = {"sources": [1], "ciphertexts": ciphertexts[:1], "promises": promises[:1]}
    with pytest.raises(
        UpdateError,
        match=r"only 2 of the clients that hold shares of this client's secrets .* and 4 are nee",
    ):
        asked(room, "masked", dealt=bitmap({0, 1}, range(5)), **few)
    for bits in (b"", bytes(2), b"\xff"):
        with pytest.raises(
            UpdateError,
            match=rf"a bitmap of {len(bits)} bytes does not have one bit for each of 5 clients",
        ):
            asked(room, "masked", dealt=bits)


def test_a_client_agrees_to_one_sum_of_those_that_masked_as_it_did():
    room = after("agree")
    told = room.questions[0, "agree"].values
    digests, signatures = list(told["digests"]), list(told["signatures"])
    with pytest.raises(
        UpdateError, match="the request is about a sum without this client's update"
    ):
        asked(room, "agree", active=bitmap({1, 2, 3, 4}, range(5)))
    with pytest.raises(UpdateError, match="the requested sum has 3 clients, expected at least 4"):
        asked(room, "agree", active=bitmap({0, 1, 2}, range(5)))
    with pytest.raises(
        UpdateError, match="has 3 signatures and 4 digests of masked vectors, expected 4"
    ):
        asked(room, "agree", signatures=signatures[:3])
    for name, values in (("digests", digests), ("signatures", signatures)):
        changed = [*values[:2], bytes([values[2][0] ^ 1, *values[2][1:]]), values[3]]
        with pytest.raises(
            UpdateError,
            match="client 3 has not signed that it has masked its update with the same clients as",
        ):
            asked(room, "agree", **{name: changed})
    asked(room, "agree")
    with pytest.raises(
        UpdateError, match="the request 'agree' of a sum is possible once, and only after 'masked'"
    ):
        asked(room, "agree", active=bitmap({0, 1, 2, 3}, range(5)))


def test_only_those_that_dealt_shares_are_added_up():
    room = Room.of(6)
    room.drop(5, "shares")
    for client in range(6):
        room.drop(client, "agree")
    summed(room, [0] * 6)
    room.parties[0].state.config_records["fedclade.secure"]["stage"] = "masked"
    with pytest.raises(
        UpdateError, match=r"the requested sum contains clients that have dealt no shares: \[5\]"
    ):
        asked(room, "agree", active=bitmap({0, 1, 2, 3, 4, 5}, range(6)))


def test_shares_are_given_if_enough_agree_to_the_same_sum():
    """Whoever has a client's seed and its key has its update; so all give shares of the same."""
    room = after("unmask")
    told = room.questions[0, "unmask"].values
    clients, signatures = list(told["clients"]), list(told["signatures"])
    assert len(clients) == 4
    with pytest.raises(UpdateError, match="3 clients have agreed to the sum, expected at least 4"):
        asked(room, "unmask", clients=clients[:3], signatures=signatures[:3])
    twice = {"clients": [*clients[:3], clients[0]], "signatures": [*signatures[:3], signatures[0]]}
    for wrong in (twice, {"clients": [0, 1, 2, 9]}, {"signatures": signatures[:3]}):
        with pytest.raises(
            UpdateError,
            match=r"signatures of clients .* should come from clients of the sum, \[0, 1, 2, 3, 4\], each once",
        ):
            asked(room, "unmask", **wrong)
    other = room.parties[3].key.private.sign(b"another sum")
    with pytest.raises(UpdateError, match="client 3 has not signed the same sum as this client"):
        asked(room, "unmask", signatures=[*signatures[:3], other])
    asked(room, "unmask")  # after all these it is still there to give


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_question_is_answered_for_one_sum(has_folder: bool, tmp_path: Path):
    room = Room.of(4)
    if has_folder:
        for client, party in room.parties.items():
            party.folder = tmp_path / str(client)
            party.folder.mkdir()
    summed(room, [0] * 4)
    room.sums -= 1
    updates = summed(room, [0] * 4)
    why = "this client's reply to this training request is already part of a sum and cannot become part of another"
    assert {reason[: len(why)] for reason in updates.left_out.values()} == {why}
    room.drop(0, "masked")
    room.drop(1, "masked")
    for _ in range(3):
        assert "2 of the 4 clients" in summed(room, [0] * 4).left_out[2]
        room.sums -= 1
    assert summed(room, [0] * 4).left_out[2] == (
        "this client has already joined 3 sums for this training request and "
        "joins no more; send a request with another seed"
    )
    assert (
        len(summed(room, [0] * 4, query=query_of([0] * 4, Round(2, LocalTraining(lr=0.1)))).ids)
        == 0
    )
    room.spoilt.clear()
    assert len(summed(room, [0] * 4).ids) == 4


@pytest.mark.parametrize("stage", ["shares", "masked", "agree", "unmask"])
def test_two_messages_that_come_together_are_answered_once(stage: str, tmp_path: Path):
    """Flower gives each of them the state from before the other. With both answers single updates can be opened."""
    room = Room.of(4)
    for client, party in room.parties.items():
        party.folder = tmp_path / str(client)
        party.folder.mkdir()
    before: dict[str, RecordDict] = {}
    answer = room.parties[0].answer

    def noting(content: Content) -> RecordDict:
        before[content.get("what", str)] = copy.deepcopy(room.parties[0].state)
        return answer(content)

    room.parties[0].answer = noting  # type: ignore[method-assign]
    summed(room, [0] * 4)
    room.parties[0].answer = answer  # type: ignore[method-assign]
    room.parties[0].state = before[stage]
    with pytest.raises(
        UpdateError,
        match=rf"the request '{stage}' of a sum was received twice, or the sum has ended|already",
    ):
        asked(room, stage)


def test_two_processes_of_one_client_open_one_sum(tmp_path: Path):
    """Each has masked for a sum of its own, from the same question; the folder is one."""
    begun, again = SpentQuestions(tmp_path), SpentQuestions(tmp_path)
    begun.begin("question", None)
    again.begin("question", None)
    begun.spend("question", None)
    with pytest.raises(
        UpdateError, match="is already part of a sum and cannot become part of another"
    ):
        again.spend("question", None)


@pytest.mark.parametrize(
    "damage",
    [
        "[]",
        "{",
        '{"format": 2}',
        '{"format": 1, "questions": {"a": "b"}}',
        '{"format": 1, "questions": {"a": true}}',
        '{"format": 1, "questions": {"a": -5}}',
        '{"format": 1, "questions": {"a": 0}}',
        '{"format": 1, "questions": [["a", 1]]}',
    ],
)
def test_a_damaged_list_of_sums_stops_the_client(damage: str, tmp_path: Path):
    (tmp_path / "sums.json").write_text(damage)
    with pytest.raises(
        PolicyError,
        match=r"sums.json, the list of the sums .* is damaged, so this client joins no further sum",
    ):
        SpentQuestions(tmp_path).begin("question", None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"clients": 1}, "the terms of a sum should have 2 to .* clients, fewer colluders"),
        ({"colluders": -1}, "the terms of a sum should have 2 to .* clients, fewer colluders"),
        ({"colluders": 4}, "the terms of a sum should have 2 to .* clients, fewer colluders"),
        ({"neighbours": -1}, "the terms of a sum should have 2 to .* clients, fewer colluders"),
        ({"weight": 0}, "the terms of a sum should have 2 to .* clients, fewer colluders"),
        ({"norm": float("inf")}, "the terms of a sum should have 2 to .* clients, fewer colluders"),
        (
            {"norm_of_buffers": 0.0},
            "the terms of a sum should have 2 to .* clients, fewer colluders",
        ),
        (
            {"clients": 4.5},
            "the terms of a sum should have the keys instance .str., .* clients .int.,",
        ),
        (
            {"clients": None},
            "the terms of a sum should have the keys instance .str., .* clients .int.,",
        ),
    ],
)
def test_terms_have_to_be_possible(change: dict[str, Any], why: str):
    room = Room.of(4)
    summed(room, [0] * 4)
    terms = Terms.read(room.questions[0, "keys"])
    with pytest.raises(UpdateError, match=why):
        asked(room, "keys", terms=replace(terms, **change).text)
