from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedclade import LocalTraining, UpdateError
from fedclade.algorithms import SubspaceQuery
from fedclade.channel.retry import MOST_SILENT_ROUNDS
from fedclade.core import (
    REJECTED_SUM,
    ClientWork,
    LeftOut,
    NoReply,
    Proximal,
    Released,
    Retried,
    SumRejected,
)
from fedclade.core.queries import Round
from fedclade.core.updates import DROPPED_OUT
from tests.tiny import Attended, ScriptedClients, SpyClients, details

ROUND = Round(3, LocalTraining())
AT_HOME = ClientWork(reply=NoReply())
MODELS = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
DELTAS = {5: (1.0, 2.0), 2: (3.0, 4.0), 9: (5.0, 6.0)}


class Moody(ScriptedClients):
    """Clients of whom some do not answer, query by query."""

    def hear(self, *silent: set[int], why: str | None = "asleep") -> Moody:
        self.silent, self.why = silent, why
        return self

    def train(self, ids, models, assignment, this_round, work=None, **more):
        silent = self.silent[this_round.query] if this_round.query < len(self.silent) else set()
        updates = (
            super()
            .train(ids, models, assignment, this_round, work)
            .select([i for i in ids if i not in silent])
        )
        left_out = {i: self.why for i in ids if i in silent} if self.why else {}
        return replace(updates, left_out={**updates.left_out, **left_out})

    gradients = train


def asked(clients: Moody, this_round: Round = ROUND, what: str = "train", **more):
    attended, spy = attending(clients)
    updates = getattr(attended, what)((5, 2, 9), MODELS, [0, 1, 0], this_round, **more)
    return updates, attended, spy


def attending(clients: Moody) -> tuple[Attended, SpyClients]:
    spy = SpyClients(clients)
    return Attended(spy), spy


def test_when_all_answer_there_is_nothing_to_tell():
    updates, attended, _ = asked(Moody(DELTAS).hear())
    assert updates.ids == (5, 2, 9)
    assert attended.closed(3) == ()
    assert attended.ids == (5, 2, 9)
    assert attended.sizes == {5: 1, 2: 1, 9: 1}
    assert attended.evaluate([2], MODELS, [0], "test").ids == (2,)


@pytest.mark.parametrize(("what", "query"), [("train", "pretrain"), ("gradients", "gradients")])
def test_a_round_tells_once_for_each_query_who_was_left_out_and_why(what, query):
    updates, attended, spy = asked(
        Moody(DELTAS).hear({9, 2}), replace(ROUND, purpose="pretrain"), what
    )
    assert updates.ids == (5,)
    assert attended.closed(3) == (LeftOut(0, query, {2: "asleep", 9: "asleep"}),)
    assert len(spy.calls) == 1
    assert attended.closed(4) == ()


def test_who_says_nothing_at_all_has_dropped_out():
    updates, _, _ = asked(Moody(DELTAS).hear({9}, why=None))
    assert updates.left_out == {9: DROPPED_OUT}


def test_a_query_that_nobody_answers_is_put_again():
    updates, attended, spy = asked(Moody(DELTAS).hear({5, 2, 9}, {5, 2, 9}, {2}))
    assert updates.ids == (5, 9)
    assert [call.ids for call in spy.calls] == [(5, 2, 9)] * 3
    assert attended.closed(3) == (
        Retried(0, "train", clients=3, answered=0),
        Retried(0, "train", clients=3, answered=2),
        LeftOut(0, "train", {2: "asleep"}),
    )


@pytest.mark.parametrize("what", ["train", "gradients"])
def test_one_that_insists_is_put_again_to_those_who_did_not_answer(what):
    """With the models that they have in the first place; and answers come in the order in which they were asked for."""
    clients = Moody(DELTAS).hear({5, 2}, {5})
    updates, attended, spy = asked(clients, what=what, require_all=True)
    assert updates.ids == (5, 2, 9)
    assert updates.deltas.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert updates.left_out == {}
    assert [call.ids for call in spy.calls] == [(5, 2, 9), (5, 2), (5,)]
    assert torch.equal(spy.calls[1].models[2], MODELS[1])
    assert [details(event)["answered"] for event in attended.closed(3)] == [1, 1]


def test_who_is_asked_again_is_pulled_to_the_same_model():
    attended, spy = attending(Moody(DELTAS).hear({2, 9}))
    attended.train(
        (5, 2, 9),
        MODELS,
        [0, 0, 0],
        ROUND,
        ClientWork(steps=Proximal(1.0)),
        anchors=[0, 1, 0],
        require_all=True,
    )
    assert torch.equal(spy.calls[1].anchors[2], MODELS[1])
    assert torch.equal(spy.calls[1].anchors[9], MODELS[0])


def test_a_round_goes_on_if_somebody_answered_another_query():
    attended, _ = attending(Moody(DELTAS).hear(set(), {2}, {2}, {2}))
    attended.train((5, 2), MODELS, [0, 0], ROUND)
    assert attended.train((2,), MODELS, [0], ROUND).ids == ()
    assert [event.kind for event in attended.closed(3)] == ["retried", "retried", "left_out"]


def test_a_round_in_which_nobody_answers_is_an_error_once_it_is_closed():
    updates, attended, _ = asked(Moody(DELTAS).hear(*[{5, 2, 9}] * 3, why=None))
    assert updates.ids == ()
    text = (
        r"^round 3: no client replied to any of 3 queries: client 5: dropped out \(and 2 more with a similar reason\); "
        "raise client_fraction to query more clients$"
    )
    with pytest.raises(UpdateError, match=text):
        attended.closed(3)


def test_where_training_diverged_the_error_says_what_to_do():
    """Reasons that differ in their numbers are one kind; the most frequent kind comes first."""
    deltas = {5: (math.nan, 2.0), 2: (1e30, 4.0), 9: (math.nan, math.inf)}
    attended, _ = attending(Moody(deltas).hear())
    attended.train((5, 2, 9), MODELS, [0, 0, 0], ROUND)
    text = (
        r"client 5: 1 of 2 entries of the update are NaN or infinite \(and 1 more with a similar reason\); "
        r"client 2: norm 1e\+30, more than 1e\+18; if training diverged, lower local.lr$"
    )
    with pytest.raises(UpdateError, match=text):
        attended.closed(3)


def test_what_clients_train_at_home_is_no_answer_to_a_server_that_awaits_one():
    attended, _ = attending(Moody(DELTAS).hear(set(), *[{5, 2, 9}] * 3))
    attended.train((5, 2, 9), MODELS, [0, 0, 0], ROUND, AT_HOME)
    attended.train((5, 2, 9), MODELS, [0, 0, 0], ROUND)
    with pytest.raises(UpdateError, match="round 3: no client replied to any of 4 queries"):
        attended.closed(3)


def test_where_nothing_travels_training_at_home_is_all_there_is():
    attended, _ = attending(Moody(DELTAS).hear())
    attended.train((5, 2, 9), MODELS, [0, 0, 0], ROUND, AT_HOME)
    assert attended.closed(3) == ()
    attended, _ = attending(Moody(DELTAS).hear(*[{5, 2, 9}] * 3, why="loss nan"))
    attended.train((5, 2, 9), MODELS, [0, 0, 0], ROUND, AT_HOME)
    text = (
        r"^round 3: no client replied to any of 3 queries: client 5: loss nan "
        r"\(and 2 more with a similar reason\); if training diverged, lower local.lr$"
    )
    with pytest.raises(UpdateError, match=text):
        attended.closed(3)


def test_a_round_in_which_nobody_is_asked_is_none_of_its_business():
    attended, _ = attending(Moody(DELTAS).hear())
    assert attended.closed(1) == ()


class Shy(ScriptedClients):
    """Clients whose subspaces are their ids, and come the second or the third time that they are asked."""

    def data(self, query):
        self.asked = [*getattr(self, "asked", []), tuple(query.ids)]
        there = [client + 2 < 4 + 2 * len(self.asked) for client in query.ids]
        return (
            torch.tensor(query.ids)[:, None, None, None] * torch.tensor(there)[:, None, None, None]
        )


@pytest.mark.parametrize(("last", "events"), [(7, 0), (9, 1)])
def test_who_sends_no_subspaces_is_asked_again_and_then_left_out(last, events):
    """2 comes at once, 5 the second time, 7 the third, and 9 would come the fourth time."""
    clients = Shy({2: (0.0,), 5: (0.0,), last: (0.0,)})
    attended = Attended(clients)
    vectors = attended.ask(SubspaceQuery((5, last, 2), 1, False))
    assert clients.asked == [(5, last, 2), (5, last), (last,)]
    assert vectors.flatten().tolist() == [5, 0 if events else last, 2]
    told = LeftOut(0, "subspaces", {9: DROPPED_OUT})
    attended.train((2,), torch.zeros(1, 1), [0], ROUND)
    assert attended.closed(3) == (told,) * events


def test_an_evaluation_after_the_step_is_told_of_in_its_own_round():
    class Absent(Moody):
        def evaluate(self, ids, models, assignment, split):
            return replace(
                super().evaluate(ids[1:], models, assignment[1:], split),
                left_out={ids[0]: "asleep"},
            )

    attended, _ = attending(Absent(DELTAS))
    attended.evaluate([5, 2], MODELS, [0, 0], "test")
    assert attended.told() == (LeftOut(0, "evaluate on test data", {5: "asleep"}),)
    assert attended.told() == ()


def test_a_round_tells_who_sent_how_many_updates_where_that_is_asked_for():
    """At first 9 drops out; a retry brings its update. What a client trains for itself is not sent."""
    clients = Moody(DELTAS).hear({9}, why=DROPPED_OUT)
    attended = Attended(clients, tells_releases=True)
    attended.train((5, 2, 9), MODELS, [0, 1, 0], ROUND, require_all=True)
    attended.gradients((5,), MODELS, [0], ROUND)
    attended.train((2,), MODELS, [0], ROUND, AT_HOME)
    assert attended.closed(3)[-1] == Released(0, {2: 1, 5: 2, 9: 1})
    assert attended.closed(4) == ()


def test_an_answer_that_is_not_used_was_sent_all_the_same():
    attended = Attended(Moody(DELTAS).hear({9}, why="too late"), tells_releases=True)
    attended.train((5, 2, 9), MODELS, [0, 1, 0], ROUND)
    assert attended.closed(3)[-1] == Released(0, {2: 1, 5: 1, 9: 1})


class Rejected(Moody):
    """Clients of one cluster, whose sum is rejected."""

    def train(self, ids, models, assignment, this_round, work=None, **more):
        updates = super().train(ids, models, assignment, this_round, work)
        silent = tuple(updates.left_out)
        return updates.with_common(events=(SumRejected(0, "train", silent, "too long"),))


def test_clients_of_a_rejected_sum_are_not_asked_again_and_the_round_goes_on():
    updates, attended, spy = asked(
        Rejected(DELTAS).hear({5, 2, 9}, why=f"{REJECTED_SUM}: too long")
    )
    assert updates.ids == ()
    assert set(updates.left_out) == {5, 2, 9}
    assert len(spy.calls) == 1
    assert attended.closed(3) == (SumRejected(0, "train", (5, 2, 9), "too long"),)


def test_events_of_all_queries_are_reported_once():
    updates, attended, _ = asked(Rejected(DELTAS).hear({5, 2}, {5}), require_all=True)
    assert updates.ids == (5, 2, 9)
    events = [event for event in attended.closed(3) if isinstance(event, SumRejected)]
    assert [event.clients for event in events] == [(5, 2), (5,), ()]


def test_a_few_unreachable_cohorts_in_a_row_are_allowed_while_others_are_available():
    clients = Moody(DELTAS)
    attended, _ = attending(clients)

    def put(number: int, *silent: set[int]) -> None:
        clients.hear(*silent, why=DROPPED_OUT)
        attended.train((5, 2, 9), MODELS, [0, 1, 0], replace(ROUND, number=number))
        attended.closed(number, has_others=True)

    nobody = [{5, 2, 9}] * 3  # the query and its two repetitions
    for number in range(1, MOST_SILENT_ROUNDS + 1):
        put(number, *nobody)
    put(6)  # a reply ends the row
    for number in range(7, 7 + MOST_SILENT_ROUNDS):
        put(number, *nobody)
    with pytest.raises(UpdateError, match="round 12: no client replied to any of 3 queries"):
        put(12, *nobody)


@pytest.mark.parametrize(("why", "has_others"), [(DROPPED_OUT, False), ("asleep", True)])
def test_a_silent_round_ends_the_run_without_other_clients_or_for_another_reason(why, has_others):
    _, attended, _ = asked(Moody(DELTAS).hear(*[{5, 2, 9}] * 3, why=why))
    with pytest.raises(UpdateError, match="round 3: no client replied to any of 3 queries"):
        attended.closed(3, has_others=has_others)
