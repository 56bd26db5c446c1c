"""The four stages with everything that can go wrong in them: a sum is right, or its clients are left out, and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import create_shares

from fedclade import LocalTraining
from fedclade.channel import CountSketch
from fedclade.core import (
    ClientWork,
    ConfigError,
    DistanceToAnchor,
    Em,
    FromStored,
    FullGradient,
    LocalModel,
    Mixture,
    PolicyError,
    Proximal,
    Round,
    Splits,
    SumClipped,
    SumRejected,
    SumUnguarded,
)
from fedclade.flower import wire
from fedclade.flower.policy import Policy
from fedclade.flower.secure import member
from fedclade.flower.secure.secrets import Numbers, new_key, unpack
from fedclade.flower.secure.terms import STAGES
from fedclade.flower.training_asked import TrainingFailedError
from fedclade.flower.wire import Content
from tests.flower.grids import words_of
from tests.flower.secure.sums import (
    LONGEST,
    RULES,
    D,
    Party,
    Room,
    S,
    Spoil,
    expected,
    query_of,
    setting_of,
    summed,
    worded,
)

CLOSE = {"rtol": 0.0, "atol": 2e-3}
"""Sums of up to nine clients that count with up to 18 examples, each entry off by half a step of 1e-5 at most."""


LENGTH = Numbers(
    clients=3, parameters=D, buffers=S - D, clip=1.0, clip_of_buffers=1.0, largest_weight=1, key=b""
).length


def of_group(room: Room, clients: list[int], assignment: list[int], **settings: object):
    updates = summed(room, assignment, **settings)  # pyright: ignore[reportArgumentType]
    assert updates.ids == tuple(clients)
    return updates


def test_the_server_gets_the_weighted_sum_of_each_cluster():
    room = Room.of(7)
    updates = of_group(room, list(range(7)), [0, 1, 0, 1, 0, 1, 0])
    assert updates.sums is not None
    assert updates.deltas is None
    assert updates.sums.groups.shape == (2, S)
    assert updates.sums.group.tolist() == [0, 1, 0, 1, 0, 1, 0]
    for row, clients in enumerate(([0, 2, 4, 6], [1, 3, 5])):
        torch.testing.assert_close(updates.sums.groups[row], expected(room, clients), **CLOSE)
    assert updates.left_out == {}


def test_clients_have_the_figures_of_their_cluster_and_none_of_their_own():
    room = Room.of(7)
    for client, party in room.parties.items():
        party.loss = 0.25 * client
    updates = summed(room, [0, 1, 0, 1, 0, 1, 0])
    for clients in ([0, 2, 4, 6], [1, 3, 5]):
        sizes = torch.tensor([10.0 + k for k in clients], dtype=torch.float64)
        norms = torch.stack([room.parties[k].update[:D].norm() for k in clients]).double()
        losses = torch.tensor([0.25 * k for k in clients], dtype=torch.float64)
        wanted = (updates.sizes, sizes.mean()), (updates.norms, norms.square().mean().sqrt())
        for found, value in (*wanted, (updates.losses, sizes @ losses / sizes.sum())):
            torch.testing.assert_close(
                found[clients], value.repeat(len(clients)), rtol=1e-5, atol=1e-5
            )
    assert math.isnan(float(summed(room, [0] * 7, setting_of(withholds_losses=True)).losses[0]))


def test_what_leaves_a_client_tells_nothing_of_its_update_alone():
    """The same update under fresh masks is another, uniform vector; the numbers it came from are small."""
    room = Room.of(3)
    seen: list[np.ndarray] = []
    for _ in range(2):
        summed(room, [0, 0, 0])
        seen.append(unpack(room.answers[1, "masked"].vector("masked")))
    assert len(set(seen[0].tolist()) & set(seen[1].tolist())) <= 1
    halves = np.concatenate(seen) >> 23
    assert 0.25 < halves.mean() < 0.75


@pytest.mark.parametrize("stage", STAGES)
def test_a_sum_survives_a_client_that_drops_out_at_any_stage(stage: str):
    room = Room.of(6)
    room.drop(2, stage)
    left = [0, 1, 3, 4, 5]
    if stage in ("agree", "unmask"):  # its update has come, and the others can take off its masks
        updates = of_group(room, [0, 1, 2, 3, 4, 5], [0] * 6)
        left = list(range(6))
    else:
        updates = of_group(room, left, [0] * 6)
        assert updates.left_out == {2: "dropped out"}
    assert updates.sums is not None
    torch.testing.assert_close(updates.sums.groups[0], expected(room, left), **CLOSE)


def test_clients_drop_out_at_every_stage_down_to_the_threshold():
    """Of nine the first is gone before shares are made; of eight holders five are needed, and five are left."""
    room = Room.of(9)
    for client, stage in ((0, "keys"), (1, "shares"), (2, "masked"), (8, "agree")):
        room.drop(client, stage)
    updates = of_group(room, [3, 4, 5, 6, 7, 8], [0] * 9)
    assert updates.sums is not None
    torch.testing.assert_close(updates.sums.groups[0], expected(room, [3, 4, 5, 6, 7, 8]), **CLOSE)
    room.drop(3, "masked")
    updates = of_group(room, [], [0] * 9)
    assert updates.left_out[4] == (
        "4 of the 9 clients of its cluster replied, and 5 have to agree on "
        "their sum (more than half of all clients, if those that may collude count twice: the 1 of "
        "network.secure_colluders)"
    )
    assert updates.left_out[3] == "dropped out"
    assert len(room.asked["unmask"]) == 5  # nobody tells anything of a sum that cannot be had


def test_too_many_may_be_gone_when_masks_are_to_come_off():
    room = Room.of(4)
    for client in (0, 1):
        room.drop(client, "unmask")
    updates = of_group(room, [], [0] * 4)
    assert updates.left_out[2] == (
        "2 clients have sent their shares of client 0's seed, and 3 are needed to remove the masks"
    )


def test_a_small_group_is_not_asked_and_the_other_is():
    room = Room.of(5)
    updates = of_group(room, [0, 1, 2], [0, 0, 0, 1, 1])
    why = "not asked: its cluster has 2 clients in this round, and a sum needs at least 3 (network.secure_fewest)"
    assert updates.left_out == {3: why, 4: why}
    assert {client for clients in room.asked.values() for client in clients} == {0, 1, 2}
    room.drop(0, "keys")
    updates = of_group(room, [], [0, 0, 0, 1, 1])
    assert updates.left_out[1] == (
        "2 of the 3 clients of its cluster replied, and a sum needs at least 3 (network.secure_fewest)"
    )


def other_shares(honest: RecordDict) -> RecordDict:
    """Tell shares as long as the right ones, and as well-formed."""
    shares = words_of(honest)["shares"]
    assert isinstance(shares, list)
    return worded(honest, shares=[bytes(share[:5]) + bytes(len(share) - 5) for share in shares])  # pyright: ignore


def no_shares(honest: RecordDict) -> RecordDict:
    """Say that no share could be read."""
    return worded(honest, shares=[b""] * len(words_of(honest)["shares"]))  # pyright: ignore


@pytest.mark.parametrize(
    "lie", [other_shares, no_shares, lambda honest: worded(honest, shares=[b"\1"] * 9)]
)
@pytest.mark.parametrize("gone", [None, 5])
def test_as_many_holders_may_lie_as_need_not_be_there(lie: Spoil, gone: int | None):
    """Of nine holders six are needed; one of the other three may be gone, whose key is put together, too."""
    room, setting = Room.of(9), setting_of()
    for client in (0, 4, 8) if gone is None else (0, 4):
        room.spoilt[client, "unmask"] = lie
    if gone is not None:
        room.drop(gone, "masked")
    left = [client for client in range(9) if client != gone]
    updates = of_group(room, left, [0] * 9, setting=setting)
    assert updates.sums is not None
    torch.testing.assert_close(updates.sums.groups[0], expected(room, left), **CLOSE)
    assert setting.barred == {}


def test_one_more_loses_the_sum_and_only_those_who_say_they_cannot_read_blame_the_dealer():
    """Then four of nine agree, which an honest dealer can only be told from a liar by fewer than."""
    for lie, barred in ((other_shares, set[int]()), (no_shares, {0})):
        room, setting = Room.of(9), setting_of()
        for client in (0, 4, 7, 8):
            room.spoilt[client, "unmask"] = lie
        of_group(room, [], [0] * 9, setting=setting)
        assert setting.barred.keys() == barred


@pytest.mark.parametrize("field", ["ciphertexts", "promises"])
def test_a_client_that_deals_what_nobody_can_read_spoils_one_sum_and_takes_no_further_part(
    field: str,
):
    room, setting = Room.of(5), setting_of()
    nonsense = {"ciphertexts": [b"nonsense"] * 4, "promises": [bytes(64)] * 5}
    room.say(1, "shares", **{field: nonsense[field]})
    updates = of_group(room, [], [0] * 5, setting=setting)
    why = "client 1 has dealt invalid shares of its secret: 4 of 5 holders report that they cannot read theirs"
    assert {updates.left_out[client] for client in (0, 2, 3, 4)} == {why}
    updates = of_group(room, [0, 2, 3, 4], [0] * 5, setting=setting)
    assert updates.left_out == {1: why}
    assert updates.sums is not None
    torch.testing.assert_close(updates.sums.groups[0], expected(room, [0, 2, 3, 4]), **CLOSE)


@pytest.mark.parametrize(
    ("silent", "gone"), [("masked", None), ("unmask", None), ("unmask", 7), (None, 7)]
)
def test_one_that_deals_nonsense_to_as_few_as_can_be_is_found_though_it_is_silent(
    silent: str | None, gone: int | None
):
    """Three of nine, which could all lie; its own silence, or that of another, makes one more than may be."""
    room, setting = Room.of(9), setting_of()

    def deals(honest: RecordDict) -> RecordDict:
        ciphertexts = [*words_of(honest)["ciphertexts"]]  # pyright: ignore
        return worded(honest, ciphertexts=[b"nonsense"] * 3 + ciphertexts[3:])

    room.spoilt[8, "shares"] = deals
    if silent is not None:
        room.drop(8, silent)
    if gone is not None:
        room.drop(gone, "unmask")
    of_group(room, [], [0] * 9, setting=setting)
    assert setting.barred == {
        8: "client 8 has dealt invalid shares of its secret: 3 of 9 holders report that they cannot read theirs"
    }
    room.spoilt.clear()
    of_group(room, list(range(8)), [0] * 9, setting=setting)


def test_nobody_is_barred_where_more_are_gone_than_may_be_whoever_lies():
    """One says that it cannot read, and three are gone, which would be as many too many if the dealer were a liar."""
    room, setting = Room.of(9), setting_of()
    room.spoilt[8, "unmask"] = no_shares
    for client in (2, 4, 6):
        room.drop(client, "unmask")
    of_group(room, [], [0] * 9, setting=setting)
    assert setting.barred == {}


def test_shares_longer_than_any_are_as_good_as_none(monkeypatch: pytest.MonkeyPatch):
    """Or holders would tell what the server does not take, and none of their shares would count."""
    room, setting = Room.of(5), setting_of()
    honest = room.parties[1].answer

    def deals(content: Content) -> RecordDict:
        with monkeypatch.context() as patch:
            patch.setattr(
                member,
                "create_shares",
                lambda *of: [share + bytes(150) for share in create_shares(*of)],
            )
            return honest(content)

    room.parties[1].answer = deals  # type: ignore[method-assign]
    of_group(room, [], [0] * 5, setting=setting)
    assert setting.barred.keys() == {1}
    of_group(room, [0, 2, 3, 4], [0] * 5, setting=setting)


@pytest.mark.parametrize("copied", [1, 4])
def test_who_shows_a_key_twice_is_left_out_and_the_others_go_on(
    copied: int, monkeypatch: pytest.MonkeyPatch
):
    """Its own for both uses, or that of another that is in it with the client."""
    room, keys = Room.of(6), [new_key(), new_key()]
    for client in {1, copied}:
        honest = room.parties[client].answer

        def shows(content: Content, honest: Callable[[Content], RecordDict] = honest) -> RecordDict:
            drawn = iter(keys if copied == 4 else keys[:1] * 2)
            with monkeypatch.context() as patch:
                patch.setattr(member, "new_key", lambda: next(drawn))
                return honest(content)

        room.parties[client].answer = shows  # type: ignore[method-assign]
    left = [client for client in range(6) if client not in (1, copied)]
    updates = of_group(room, left, [0] * 6)
    assert updates.left_out == dict.fromkeys(
        {1, copied}, "its public key for the sum is not unique"
    )


@pytest.mark.parametrize(("stage", "what"), [("unmask", "seed"), ("masked", "key")])
def test_so_does_one_that_deals_shares_of_another_secret(
    stage: str, what: str, monkeypatch: pytest.MonkeyPatch
):
    """Its promises hold, so it is not its holders who lie. Its key is needed where its update does not come."""
    room, setting = Room.of(5), setting_of()
    honest = room.parties[1].answer

    def deals(content: Content) -> RecordDict:
        with monkeypatch.context() as patch:
            patch.setattr(
                member, "create_shares", lambda secret, *of: create_shares(secret[::-1], *of)
            )
            return honest(content)

    room.parties[1].answer = deals  # type: ignore[method-assign]
    if stage == "masked":
        room.drop(1, "masked")
    of_group(room, [], [0] * 5, setting=setting)
    assert setting.barred == {
        1: (
            "client 1 has dealt invalid shares of its secret: together, the shares do not "
            f"give the {what} that the client has committed to; the client does not follow the protocol, and is left "
            "out of further sums"
        )
    }
    of_group(room, [0, 2, 3, 4], [0] * 5, setting=setting)


def test_garbage_for_a_masked_update_leaves_out_its_group_alone(caplog: pytest.LogCaptureFixture):
    room = Room.of(6)
    room.put(0, np.random.default_rng(0).bytes(3 * LENGTH))
    updates = of_group(room, [3, 4, 5], [0, 0, 0, 1, 1, 1])
    why = "8 of the 8 check entries of the sum do not equal its number of clients, 3"
    for client in range(3):
        assert updates.left_out[client].startswith(f"sum rejected: {why}")
    rejected = [event for event in updates.events if isinstance(event, SumRejected)]
    assert [(event.query, event.clients) for event in rejected] == [("train", (0, 1, 2))]
    assert why in rejected[0].because
    assert "a sum of train is rejected: 8 of the 8 check" in caplog.text
    assert updates.sums is not None
    torch.testing.assert_close(updates.sums.groups[0], expected(room, [3, 4, 5]), **CLOSE)


@pytest.mark.parametrize(
    ("stage", "values", "why"),
    [
        (
            "keys",
            {"masking": b"none"},
            "the keys of client 0 for the sum are not signed by this client's own key",
        ),
        (
            "keys",
            {"signature": bytes(64)},
            "the keys of client 0 for the sum are not signed by this client's own key",
        ),
        ("keys", {"has_peers": 3}, "'has_peers' should be of type bool, got 3"),
        ("shares", {"commitment": 3}, "'commitment' should be of type bytes, got 3"),
        (
            "shares",
            {"commitment": bytes(31)},
            "the hash of the client's seed has 31 bytes, expected 32",
        ),
        ("keys", {"instance": "another"}, "the reply belongs to another sum than the request"),
        (
            "shares",
            {"clients": [1, 2, 3, 5, 9]},
            "the client should deal shares to 5 different clients of the sum",
        ),
        (
            "shares",
            {"clients": [1, 2, 3, 4, 4]},
            "the client should deal shares to 5 different clients of the sum",
        ),
        (
            "shares",
            {"ciphertexts": [b""] * 4},
            "the client has dealt 4 encrypted shares, expected 5 shares of at most 512 bytes",
        ),
        (
            "shares",
            {"ciphertexts": [bytes(2000)] * 5},
            "the client has dealt 5 encrypted shares, expected 5 shares of at most 512 bytes",
        ),
        (
            "shares",
            {"promises": [bytes(64)] * 5},
            "the client has sent hashes for 5 holders of shares, expected 6, of 64 bytes each",
        ),
        (
            "shares",
            {"promises": [bytes(63)] * 6},
            "the client has sent hashes for 6 holders of shares, expected 6, of 64 bytes each",
        ),
        (
            "masked",
            {"signature": bytes(64)},
            "the masked update is not signed for this sum by the client's key",
        ),
        ("masked", {"round": 2}, "the reply has the round 2, expected 1"),
        ("masked", {"model": "other"}, "the reply has the model 'other', expected"),
    ],
)
def test_a_client_that_answers_wrongly_is_left_out_and_the_sum_is_had(
    stage: str, values: dict[str, object], why: str
):
    room = Room.of(6)
    room.say(0, stage, **values)
    updates = of_group(room, [1, 2, 3, 4, 5], [0] * 6)
    with pytest.raises(ValueError, match=why):
        raise ValueError(updates.left_out[0])
    assert updates.sums is not None
    torch.testing.assert_close(updates.sums.groups[0], expected(room, [1, 2, 3, 4, 5]), **CLOSE)


def test_a_masked_update_of_another_length_is_left_out():
    room = Room.of(4)
    short = ArrayRecord({"masked": wire.raw(bytes(8), "uint8", 8)})
    room.spoilt[0, "masked"] = lambda honest: RecordDict({**honest, "vectors": short})
    assert of_group(room, [1, 2, 3], [0] * 4).left_out == {
        0: f"the masked update has 8 bytes, expected {3 * LENGTH}"
    }


def test_shares_that_are_none_are_not_used():
    room = Room.of(5)
    room.say(0, "unmask", shares=[b""])
    updates = of_group(room, list(range(5)), [0] * 5)  # its update is in the sum
    assert updates.left_out == {}


def test_no_client_weighs_too_much():
    """The median of sizes 10 to 18 is 14; at 1.1 times that all count with at most 15."""
    room = Room.of(9)
    updates = of_group(room, list(range(9)), [0] * 9, setting=setting_of(weight=1.1))
    weights = [10, 11, 12, 13, 14, 15, 15, 15, 15]
    assert float(updates.sizes.sum()) == pytest.approx(sum(weights))
    exact = torch.stack([weight * room.parties[k].update for k, weight in enumerate(weights)]).sum(
        0
    )
    assert updates.sums is not None
    torch.testing.assert_close(updates.sums.groups[0], exact, rtol=0, atol=1e-3)


def test_longer_updates_are_shortened_and_an_event_counts_them(caplog: pytest.LogCaptureFixture):
    room = Room.of(3)
    room.parties[1].scale = 0.01
    updates = of_group(room, [0, 1, 2], [0] * 3, setting=setting_of(replace(RULES, norm=0.5)))
    shortened: list[torch.Tensor] = []
    for party in room.parties.values():
        scale = min(1.0, 0.5 / float(party.update[:D].norm()))
        shortened.append(party.size * torch.cat([scale * party.update[:D], party.update[D:]]))
    assert updates.sums is not None
    torch.testing.assert_close(updates.sums.groups[0], torch.stack(shortened).sum(0), **CLOSE)
    assert SumClipped(0, "train", (0, 1, 2), 2, 0.5) in updates.events
    assert (
        "2 of 3 clients have scaled their update down to norm 0.5 (network.secure_norm)"
        in caplog.text
    )


def test_c_follows_the_sums_of_a_run():
    """Norms of updates are about 6, so C = 20 becomes twice that."""
    setting, norms = setting_of(), list[float]()
    for number in range(1, 4):
        query = query_of([0] * 4, Round(number, LocalTraining(lr=0.1)))
        summed(Room.of(4), [0] * 4, setting, query)
        norms.append(setting.norms.in_round(number + 1, LONGEST).parameters)
    assert norms[0] == pytest.approx(norms[2], rel=1e-3)
    assert 11 < norms[0] < 14


@pytest.mark.parametrize(
    "failure", [TrainingFailedError("3 entries are NaN"), RuntimeError("out of memory")]
)
def test_a_client_whose_training_fails_adds_nothing_and_nobody_sees_it(failure: Exception):
    room = Room.of(4)
    room.parties[2].failure = failure
    updates = of_group(room, [0, 1, 2, 3], [0] * 4)
    assert updates.sums is not None
    torch.testing.assert_close(updates.sums.groups[0], expected(room, [0, 1, 3]), **CLOSE)
    assert float(updates.sizes.sum()) == pytest.approx(10 + 11 + 13)
    failed, trained = (room.answers[client, "masked"] for client in (2, 3))
    assert failed.values.keys() == trained.values.keys()
    assert len(failed.vector("masked")) == len(trained.vector("masked"))


def test_a_refusal_by_policy_is_no_failed_training():
    room = Room.of(4)
    room.parties[2].failure = PolicyError("the client's policy forbids it")
    assert summed(room, [0] * 4).left_out == {2: "the client's policy forbids it"}


def test_what_a_client_sends_beside_its_masks_does_not_depend_on_its_data():
    """Two clients with other data: all fields but the keys, the masked numbers and the signature are the same."""
    seen: list[object] = []
    for scale, loss in ((1.0, 0.5), (1e9, math.nan)):
        room = Room.of(4)
        room.parties[0].scale = scale
        room.parties[0].loss = loss
        summed(room, [0] * 4)
        reply = room.answers[0, "masked"]
        fixed = {
            name: value
            for name, value in reply.values.items()
            if name not in ("instance", "signature")
        }
        assert fixed.keys() == {"what", "round", "query", "purpose", "model"}
        seen.append((fixed, {name: len(data) for name, data in reply.vectors.items()}))
    assert seen[0] == seen[1]


def test_a_cluster_of_three_sums_holds_against_one_malicious_client():
    """It sends as much as it can against the others; with one sum their mean gets shorter, with three it does not."""
    left: list[float] = []
    for parts in (1, 3):
        room = Room.of(9)
        for party in room.parties.values():
            party.update_seed = 0  # all honest updates are alike
        room.parties[4].scale = -50.0
        updates = of_group(
            room, list(range(9)), [0] * 9, setting=setting_of(replace(RULES, parts=parts))
        )
        assert updates.sums is not None
        assert updates.sums.group.tolist() == [0] * 9
        mean = updates.sums.groups[0] / updates.sizes.sum()
        honest = room.parties[0].update[:D]
        left.append(float(mean[:D] @ honest / honest.square().sum()))
        unguarded = [event for event in updates.events if isinstance(event, SumUnguarded)]
        assert len(unguarded) == (parts == 1)
    assert left[0] < 0.6
    assert left[1] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("parts", "because"),
    [
        (1, "network.secure_parts = 1"),
        (3, "5 clients are too few for 3 sums of 3 (network.secure_fewest)"),
    ],
)
def test_an_event_says_that_a_cluster_is_not_guarded_against_one_client(parts: int, because: str):
    setting = setting_of(replace(RULES, parts=parts))
    updates = summed(Room.of(5), [0] * 5, setting)
    assert SumUnguarded(0, "train", (0, 1, 2, 3, 4), 1, because) in updates.events
    again = summed(Room.of(5), [0] * 5, setting)
    assert any(isinstance(event, SumUnguarded) for event in again.events) == (parts > 1)


def test_signatures_leave_beside_the_sum():
    """Of the parts of the data first, then of the update."""
    room = Room.of(3, beside=2 * 5 + 5)
    sketch = CountSketch(0, D, 5)
    query = query_of([0, 0, 0], work=ClientWork(data=Splits(2)))
    updates = of_group(
        room, [0, 1, 2], [0] * 3, setting=setting_of(compared=sketch), query=query, sketch=sketch
    )
    assert updates.parts is not None
    assert updates.parts.shape == (3, 2, 5)
    assert updates.signatures.shape == (3, 5)
    assert updates.signatures[2].tolist() == [1.0] * 5  # the signs alone
    room.spoilt[0, "masked"] = lambda honest: RecordDict(
        {
            **honest,
            "vectors": ArrayRecord(
                {**honest.array_records["vectors"], "clear": wire.raw_vector(NANS)}
            ),
        }
    )
    left_out = summed(room, [0] * 3, setting_of(compared=sketch), query, sketch).left_out
    assert left_out[0] == "15 of 15 entries of the client's unmasked sketches are NaN or infinite"


NANS = torch.full((15,), torch.nan)


def test_a_sketch_that_tells_too_much_is_not_asked_for_and_stays_with_its_client():
    sketch = CountSketch(0, D, 21)
    with pytest.raises(
        ConfigError,
        match=r"21 unmasked numbers .* of an update of 40 parameters; lower signature.dim \(21\) until",
    ):
        summed(Room.of(3), [0] * 3, setting_of(compared=sketch), sketch=sketch)
    forbids = (
        "the client's policy forbids 21 unmasked numbers in addition to a "
        "masked update of 40 parameters; it allows at most"
    )
    for policy, most in ((Policy(min_honest=2), 20), (Policy(min_honest=2, max_clear=0), 0)):
        left_out = summed(Room.of(3, beside=21, policy=policy), [0] * 3).left_out
        assert left_out[0] == f"{forbids} {most} (max-clear in its node config)"
    assert summed(Room.of(3, policy=Policy(min_honest=2, max_clear=0)), [0] * 3).ids == (0, 1, 2)


def test_where_nobody_answers_there_is_no_sum():
    room = Room.of(3)
    for client in range(3):
        room.drop(client, "masked")
    updates = of_group(room, [], [0] * 3)
    assert updates.sums is not None
    assert updates.sums.groups.shape == (0, S)
    assert updates.sketches is not None
    assert updates.sketches.shape == (0, 0)


def test_what_cannot_be_added_up_is_refused():
    with pytest.raises(
        ConfigError,
        match="supports only updates of one model for each cluster, but the algorithm queries gradients",
    ):
        summed(Room.of(3), [0] * 3, query=query_of([0] * 3, work=ClientWork(steps=FullGradient())))
    with pytest.raises(ConfigError, match="queries the models of a mixture"):
        summed(
            Room.of(3), [0] * 3, query=query_of([0] * 3, work=ClientWork(steps=Em(Mixture(False))))
        )
    work = ClientWork(start=FromStored(), store=LocalModel(), reply=DistanceToAnchor())
    with pytest.raises(ConfigError, match="queries models of clients; use another algorithm"):
        summed(Room.of(3), [0] * 3, query=query_of([0] * 3, work=work, anchors=[0] * 3))
    pulled = ClientWork(steps=Proximal(0.5))
    with pytest.raises(ConfigError, match="some of them have different anchors"):
        summed(
            Room.of(4),
            [0, 0, 0, 1],
            query=query_of([0, 0, 0, 1], work=pulled, anchors=[0, 0, 1, 1]),
        )


def test_clients_with_a_list_of_the_others_keys_take_part():
    keys = {client: Party(client).key for client in range(4)}
    peers = {key.public: client for client, key in keys.items()}
    room = Room({client: Party(client, key=key, peers=peers) for client, key in keys.items()})
    assert len(summed(room, [0] * 4).ids) == 4
    assert "signers" not in room.questions[0, "shares"].values
    # whom the server has put in the place of the client with that number
    room.parties[3] = Party(3, peers=peers)
    updates = summed(room, [0] * 4)
    assert updates.ids == ()
    assert updates.left_out[0] == (
        "the keys of client 3 for the sum are not signed by this client's own key, so they cannot be used; the client, "
        "or the server that has passed the keys on, does not follow the protocol"
    )
    assert (
        updates.left_out[3]
        == "the request addresses this client as client 3, but in this client's peers-file client 3 "
        "has another key, or this client's key belongs to another number; correct the peers-file, or "
        "network.keys of the server"
    )
    room.parties[3] = Party(
        3,
        key=keys[3],
        peers={public: 7 if client == 3 else client for public, client in peers.items()},
    )
    assert summed(room, [0] * 4).left_out == {
        3: "the request addresses this client as client 3, but in this client's peers-file client 3 "
        "has another key, or this client's key belongs to another number; correct the peers-file, or "
        "network.keys of the server"
    }
    room.parties[3] = Party(3, key=keys[3])
    room.parties[0].peers = {key: client for key, client in peers.items() if client != 1}
    assert summed(room, [0] * 4).left_out == {
        0: "clients [1] of the sum are not in this client's peers-file; add their keys there"
    }
