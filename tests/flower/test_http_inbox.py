"""Answers out of a SuperLink: what one client sends costs no other's, and no more is fetched than may be."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from threading import Barrier, Lock

import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    GetNodesRequest,
    GetNodesResponse,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.constant import HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid
from google.protobuf.message import DecodeError

from fedclade.channel.traffic import Meter
from fedclade.core.updates import TOO_LATE
from fedclade.flower import LocalGrid, wire
from fedclade.flower.exchange import (
    MOST_FETCHED,
    MOST_FETCHES_FAR,
    MOST_FETCHES_NEAR,
    Exchange,
    HttpInbox,
    Inbox,
    ReplyLimit,
    inbox_of,
)
from fedclade.flower.wire import Content
from tests.flower.grids import Clock, answered

LENGTH = 1000
"""Entries of the vector that is asked for."""

MALFORMED = b"\xff\xff\xff"


@dataclass
class Parcel:
    """An answer as a SuperLink has it: its objects by id, and which of them there are said to be."""

    message: Message
    tree: ObjectTree
    contents: dict[str, bytes]

    @classmethod
    def of(cls, message: Message) -> Parcel:
        contents = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
        message.metadata.__dict__["_message_id"] = message.object_id
        return cls(message, get_object_tree(message), contents)

    def replaced(self, kind: str, change: Callable[[bytes], bytes]) -> Parcel:
        """Change the bodies of all objects of a kind, under the ids that they have."""
        for name, content in self.contents.items():
            if content.startswith(kind.encode() + HEAD_VALUE_DIVIDER.encode()):
                head, _, body = content.partition(HEAD_BODY_DIVIDER)
                words = head.decode().split(HEAD_VALUE_DIVIDER)
                changed = change(body)
                head = HEAD_VALUE_DIVIDER.join([*words[:2], str(len(changed))]).encode()
                self.contents[name] = head + HEAD_BODY_DIVIDER + changed
        return self


@dataclass
class SuperLink:
    """What an ``HttpGrid`` talks to: a reply that was looked at once is forgotten, as a SuperLink does."""

    spoil: dict[int, Callable[[Parcel], Parcel]] = field(default_factory=dict)
    nodes: tuple[int, ...] = (7, 8, 9)
    replies: dict[str, Parcel] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    fetched: int = 0
    """Bytes."""

    def PushMessages(self, request: PushAppMessagesRequest) -> PushAppMessagesResponse:  # noqa: N802
        raise NotImplementedError  # the grid below takes questions as they are

    def GetNodes(self, request: GetNodesRequest) -> GetNodesResponse:  # noqa: N802
        return GetNodesResponse(nodes=[NodeInfo(node_id=node) for node in self.nodes])

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        there = [self.replies.pop(each) for each in request.message_ids if each in self.replies]
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(each.message) for each in there],
            message_object_trees=[each.tree for each in there],
        )

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        content = self.contents.get(request.object_id)
        if content is None:
            return PullObjectResponse(object_found=False, object_available=False)
        self.fetched += len(content)
        return PullObjectResponse(
            object_found=True, object_available=content != b"", object_content=content
        )

    def ConfirmMessageReceived(self, request: ConfirmMessageReceivedRequest) -> None:  # noqa: N802
        pass


class Grid(HttpGrid):
    """Flower's grid, before a SuperLink that is in this process."""

    def __init__(self, superlink: SuperLink) -> None:
        super().__init__(token="none")
        self._client = superlink  # type: ignore[assignment]
        self.superlink = superlink
        self.set_run(Run.create_empty(1))
        LocalGrid({})  # tells Flower who sends

    def push_messages(self, messages: list[Message]) -> list[str]:  # type: ignore[override]
        """Take questions; every node answers with a vector at once."""
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            node = message.metadata.dst_node_id
            parcel = Parcel.of(answered(message, self.answer(message)))
            parcel = self.superlink.spoil.get(node, lambda honest: honest)(parcel)
            self.superlink.replies[message.metadata.message_id] = parcel
            self.superlink.contents |= parcel.contents
        return [message.metadata.message_id for message in messages]

    def answer(self, message: Message) -> RecordDict:
        node = message.metadata.dst_node_id
        vector = wire.raw_vector(torch.full((LENGTH,), float(node)))
        return wire.record({"node": node}, {"update": vector})


def ask(superlink: SuperLink, largest: int = 4 * LENGTH) -> dict[int, Content | str]:
    clock = Clock()
    exchange = Exchange(Grid(superlink), Meter(), 5.0, clock, clock.sleep)
    questions = {node: wire.record({"what": "train"}) for node in superlink.nodes}
    return dict(exchange.ask(questions, "train", "1", largest))


def said(answer: Content | str) -> str | int:
    return answer if isinstance(answer, str) else answer.get("node", int)


def test_flower_has_inside_what_is_used_here():
    assert type(inbox_of(Grid(SuperLink()))) is HttpInbox
    assert type(inbox_of(LocalGrid({}))) is Inbox


def test_all_answers_come_with_their_vectors():
    answers = ask(SuperLink())
    assert {node: said(answer) for node, answer in answers.items()} == {7: 7, 8: 8, 9: 9}
    for node, answer in answers.items():
        assert not isinstance(answer, str)
        assert answer.vector("update") == torch.full((LENGTH,), float(node)).numpy().tobytes()


def cut(kind: str) -> Callable[[Parcel], Parcel]:
    return lambda parcel: parcel.replaced(kind, lambda body: MALFORMED)


def headless(parcel: Parcel) -> Parcel:
    parcel.contents = dict.fromkeys(parcel.contents, b"no head")
    return parcel


def unknown(parcel: Parcel) -> Parcel:
    return Parcel(parcel.message, ObjectTree(object_id="f" * 64), {})


def deep(parcel: Parcel) -> Parcel:
    tree = parcel.tree
    for _ in range(80):
        tree = ObjectTree(object_id=parcel.tree.object_id, children=[tree])
    return Parcel(parcel.message, tree, parcel.contents)


SPOILT: dict[str, tuple[Callable[[Parcel], Parcel], str]] = {
    "a malformed config record": (cut("ConfigRecord"), "the message cannot be read: DecodeError"),
    "a malformed message": (cut("Message"), "the message cannot be read: DecodeError"),
    "a malformed record of arrays": (cut("ArrayRecord"), "the message cannot be read: "),
    "a malformed array": (cut("Array"), "the message cannot be read: "),
    "a malformed dictionary": (cut("RecordDict"), "the message cannot be read: "),
    "no head": (headless, "the message cannot be read: ValueError"),
    "an answer that is announced and does not come": (
        unknown,
        "the SuperLink has announced a part of the client's reply that it does not have",
    ),
    "a tree of many objects": (deep, "the reply should consist of at most 64 objects, got more"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_an_answer_that_cannot_be_read_costs_only_its_own(name: str):
    spoil, why = SPOILT[name]
    answers = ask(SuperLink({8: spoil}))
    assert said(answers[8]) == answers[8]
    assert why in str(answers[8])
    assert (said(answers[7]), said(answers[9])) == (7, 9)


def test_flowers_own_grid_loses_them_all():
    """Which is why it is not asked: one malformed answer ends the call, and the others are forgotten."""
    superlink = SuperLink({8: cut("ConfigRecord")})
    grid = Grid(superlink)
    ids = grid.push_messages([Message(wire.record({}), node, "train") for node in superlink.nodes])
    with pytest.raises(DecodeError):
        grid.pull_messages(ids)
    assert list(grid.pull_messages(ids)) == []


def repeated(times: int) -> Callable[[Parcel], Parcel]:
    def change(body: bytes) -> bytes:
        told = json.loads(body)
        return json.dumps({**told, "arraychunk_ids": times * told["arraychunk_ids"]}).encode()

    return lambda parcel: parcel.replaced("Array", change)


def test_repeated_pieces_are_counted_before_they_are_unpacked():
    """4 kB that name themselves 250,000 times would be a gigabyte."""
    answers = ask(SuperLink({8: repeated(250_000)}))
    assert "the reply takes 100" in str(answers[8])
    assert "bytes once it is unpacked, expected at most" in str(answers[8])
    assert (said(answers[7]), said(answers[9])) == (7, 9)


def larger(parcel: Parcel) -> Parcel:
    """Send forty pieces of 1 MiB each."""
    pieces = {
        sha256(bytes([k])).hexdigest(): b"ArrayChunk  1048576\0" + bytes(2**20) for k in range(40)
    }
    trees = [ObjectTree(object_id=name) for name in pieces]
    tree = ObjectTree(object_id=parcel.tree.object_id, children=[*trees, *parcel.tree.children])
    return Parcel(parcel.message, tree, {**parcel.contents, **pieces})


def test_of_an_answer_that_is_too_large_little_more_is_fetched_than_it_may_take():
    superlink = SuperLink({8: larger})
    answers = ask(superlink)
    assert f"the reply takes more than {4 * LENGTH + wire.LARGEST_VALUES} bytes" in str(answers[8])
    assert superlink.fetched < 3 * 2**20
    assert (said(answers[7]), said(answers[9])) == (7, 9)


def wordy(parcel: Parcel) -> Parcel:
    answer = RecordDict(parcel.message.content)
    answer["more"] = wire.record({"text": (wire.LARGEST_VALUES + 1) * "x"})["fedclade"]
    return Parcel.of(Message(answer, reply_to=_question_of(parcel)))


def _question_of(parcel: Parcel) -> Message:
    data = parcel.message.metadata
    question = Message(RecordDict(), data.src_node_id, data.message_type)
    question.metadata.__dict__["_message_id"] = data.reply_to_message_id
    return question


def test_words_are_few_also_where_vectors_may_be_long():
    answers = ask(SuperLink({8: wordy}), largest=2**22)
    assert "bytes without its vectors, expected at most 1048576" in str(answers[8])
    assert (said(answers[7]), said(answers[9])) == (7, 9)


def test_who_announces_an_answer_and_does_not_send_it_holds_up_nobody():
    """It is too late like everybody who is; the others' answers are there before."""
    superlink = SuperLink(
        {8: lambda parcel: Parcel(parcel.message, parcel.tree, dict.fromkeys(parcel.contents, b""))}
    )
    assert {node: said(answer) for node, answer in ask(superlink).items()} == {
        7: 7,
        9: 9,
        8: TOO_LATE,
    }


def test_what_arrives_piece_by_piece_is_taken_when_it_is_whole():
    superlink = SuperLink()
    grid = Grid(superlink)
    (question,) = grid.push_messages([Message(wire.record({}), 7, "train")])
    inbox, whole = inbox_of(grid), dict(superlink.contents)
    superlink.contents = dict.fromkeys(whole, b"")
    assert list(inbox.read({question: ReplyLimit(4 * LENGTH)})) == []
    superlink.contents = whole
    ((answers, message),) = inbox.read({question: ReplyLimit(4 * LENGTH)})
    assert answers == question
    assert isinstance(message, Message)
    assert list(inbox.read({question: ReplyLimit(4 * LENGTH)})) == []


def test_of_any_other_grid_one_that_cannot_be_read_costs_only_its_own():
    class Brittle(LocalGrid):
        """It forgets what it was asked for, and breaks at one of them."""

        def pull_messages(self, message_ids):
            found = list(super().pull_messages(message_ids))
            if any(message.metadata.src_node_id == 8 for message in found):
                raise DecodeError("Error parsing message")
            return found

    from fedclade.flower import LocalNode

    def app(message: Message, context: Context) -> Message:
        return answered(message, wire.record({"node": message.metadata.dst_node_id}))

    grid, clock = Brittle({node: LocalNode(app) for node in (7, 8, 9)}), Clock()
    exchange = Exchange(grid, Meter(), 5.0, clock, clock.sleep)
    answers = dict(exchange.ask({node: wire.record({}) for node in grid.nodes}, "train", "1"))
    assert {node: said(answer) for node, answer in answers.items()} == {
        7: 7,
        8: "the message cannot be read: DecodeError: Error parsing message",
        9: 9,
    }


def test_an_array_more_than_was_asked_for_is_not_taken():
    def more(parcel: Parcel) -> Parcel:
        arrays = ArrayRecord(
            {"update": Array("float32", (2 * LENGTH,), wire.RAW, bytes(8 * LENGTH))}
        )
        return Parcel.of(
            Message(
                RecordDict({**parcel.message.content, "vectors": arrays}),
                reply_to=_question_of(parcel),
            )
        )

    assert said(ask(SuperLink({8: more}))[8]) == (
        f"the reply has vectors of {8 * LENGTH} bytes, expected at most {4 * LENGTH} for this request, so the server "
        "ignores the reply"
    )


@dataclass
class CountingSuperLink(SuperLink):
    """A SuperLink that counts the objects that are fetched from it at the same time."""

    together: int = 0
    """Number of fetches that wait for each other, so that they have to run at the same time."""
    most: int = 0
    now: int = 0
    travels: float = 0.0
    """Seconds for which each object travels."""
    lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.barrier = Barrier(max(1, self.together))

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.travels)
        if self.together:
            self.barrier.wait(timeout=20)
        found = super().PullObject(request)
        with self.lock:
            self.now -= 1
        return found


def test_several_replies_are_fetched_at_the_same_time():
    """Each object waits until an object of all other replies is being fetched, too."""
    superlink = CountingSuperLink(nodes=(7, 8, 9), together=3)
    answers = ask(superlink)
    assert {node: said(answer) for node, answer in answers.items()} == {7: 7, 8: 8, 9: 9}
    assert superlink.most == 3


@pytest.mark.parametrize(
    ("largest", "near", "most"),
    [
        (4 * LENGTH, 60.0, MOST_FETCHES_NEAR),
        (4 * LENGTH, 0.0, MOST_FETCHES_FAR),
        (MOST_FETCHED, 0.0, 1),
    ],
    ids=["near", "far", "large"],
)
def test_the_number_of_replies_fetched_at_the_same_time_is_bounded(
    largest: int, near: float, most: int, monkeypatch: pytest.MonkeyPatch
):
    """By a number, which depends on the distance, and by the memory that the largest replies would take."""
    monkeypatch.setattr("fedclade.flower.exchange.NEAR", near)
    nodes = tuple(range(1, 3 * MOST_FETCHES_FAR))
    superlink = CountingSuperLink(nodes=nodes, travels=0.002)
    clock = Clock()
    exchange = Exchange(Grid(superlink), Meter(), 5.0, clock, clock.sleep)
    questions = {node: wire.record({"what": "train"}) for node in nodes}
    answers = dict(exchange.ask(questions, "train", "1", largest))
    assert {node: said(answer) for node, answer in answers.items()} == {n: n for n in nodes}
    assert (most > MOST_FETCHES_NEAR) == (superlink.most > MOST_FETCHES_NEAR)
    assert 1 <= superlink.most <= most
