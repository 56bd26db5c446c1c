"""Runs over Flower's grid for a SuperLink, with HTTP, whose objects are counted."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from flwr.superlink.grid import HttpGrid

from fedclade.algorithms import CFL, FedAvg
from fedclade.flower import Network, federate, wire
from fedclade.flower.exchange import MOST_SENT, MOST_SENT_BYTES, sent_at_once
from tests.flower.grids import CFL_OF_TWO, FOUR, LOCAL, app_of, federated, grid_of
from tests.tiny import federation_of, perceptron

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from scripted_superlink import ScriptedSuperLink, grid_at, server_of

ROUNDS = 3


class CountingSuperLink(ScriptedSuperLink):
    """SuperLink that counts the messages, and the objects that are sent to it and fetched."""

    def __init__(self, nodes: int) -> None:
        self.seen: Counter[str] = Counter()
        super().__init__(app_of(federation_of(FOUR)), nodes)

    def _push_messages(self, request: PushAppMessagesRequest) -> PushAppMessagesResponse:
        answer = super()._push_messages(request)
        self.seen["messages"] += len(answer.message_ids)
        self.seen["sent"] += len(answer.objects_to_push)
        return answer

    def _pull_object(self, request: PullObjectRequest) -> PullObjectResponse:
        self.seen["fetched"] += 1
        return super()._pull_object(request)


@contextmanager
def served(superlink: ScriptedSuperLink) -> Generator[HttpGrid]:
    with server_of(superlink) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        grid = grid_at(server.server_address[1])
        yield grid
        grid.close()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("algorithm", [FedAvg(), CFL_OF_TWO], ids=["fedavg", "cfl"])
def test_a_run_over_http_equals_one_without_a_network(algorithm: FedAvg | CFL):
    superlink = CountingSuperLink(len(FOUR))
    with served(superlink) as grid:
        network = Network(clients=len(FOUR), wait=10, deadline=60)
        over_http = federate(
            grid, algorithm, perceptron, network=network, local=LOCAL, rounds=ROUNDS
        )
    locally = federated(grid_of(federation_of(FOUR)), algorithm, rounds=ROUNDS)
    assert over_http.clusters.equals(locally.clusters)
    assert len(over_http.tree.nodes) == (1 if isinstance(algorithm, FedAvg) else 3)
    for one, other in zip(over_http.tree.nodes, locally.tree.nodes, strict=True):
        assert torch.equal(one.params, other.params)


def test_what_messages_have_in_common_is_sent_once():
    superlink = CountingSuperLink(len(FOUR))
    with served(superlink) as grid:
        network = Network(clients=len(FOUR), wait=10, deadline=60)
        federate(grid, FedAvg(), perceptron, network=network, local=LOCAL, rounds=ROUNDS)
    seen = superlink.seen
    # To register, to train and to be evaluated in each round, and for the gains.
    requests = 1 + 2 * ROUNDS + 1
    assert seen["messages"] == requests * len(FOUR)
    # Besides the messages: the record, its two records, an array, and a piece of it. An evaluation
    # has the model that the next training has, and the gains are those of two models.
    assert seen["sent"] <= seen["messages"] + 5 * requests
    # A reply is a message, a record and a record of values; an update, or a table of gains, has three
    # objects more.
    assert seen["fetched"] == 3 * seen["messages"] + 3 * (ROUNDS + 1) * len(FOUR)


def content_with(entries: int) -> RecordDict:
    return wire.record({}, {"model": wire.raw_vector(torch.zeros(entries))})


def test_messages_of_a_call_are_limited_in_number_and_in_different_bytes():
    small = content_with(1)
    shared = dict.fromkeys(range(2 * MOST_SENT + 1), small)
    assert list(map(len, sent_at_once(shared))) == [MOST_SENT, MOST_SENT, 1]
    half = MOST_SENT_BYTES // 2 // 4
    large = content_with(half)
    assert list(sent_at_once(dict.fromkeys(range(5), large))) == [[0, 1, 2, 3, 4]]
    different = {node: content_with(half) for node in range(5)}
    assert list(sent_at_once(different)) == [[0, 1], [2, 3], [4]]
    assert list(sent_at_once({7: content_with(3 * half), 8: small})) == [[7], [8]]
    assert list(sent_at_once({})) == []


def test_nodes_with_the_same_models_get_the_same_content():
    sent: list[Message] = []
    grid = grid_of(federation_of(FOUR))
    push = grid.push_messages

    def pushed(messages: list[Message]) -> list[str]:
        sent.extend(messages)
        return list(push(messages))

    grid.push_messages = pushed  # type: ignore[method-assign, assignment]
    federated(grid, CFL_OF_TWO, rounds=ROUNDS)
    of_training = [each for each in sent if each.metadata.message_type == "train"]
    contents = [id(each.content) for each in of_training]
    # One model in the rounds 1 and 2, and after the split one of each cluster.
    assert [len(set(contents[at : at + 4])) for at in range(0, len(contents), 4)] == [1, 1, 2]
