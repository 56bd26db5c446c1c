"""Answers in the name of another: who does not have a client's key, or the nonce of the question, is not heard."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedclade.algorithms import FedAvg
from fedclade.core.errors import ConfigError, UpdateError
from fedclade.flower import LocalGrid, LocalNode, Network, wire
from fedclade.flower.signing import (
    KEY_FILE,
    Key,
    Request,
    key_of,
    nonce_of,
    read_keys,
    signed,
    verified,
    with_nonce,
)
from fedclade.flower.wire import Content
from tests.flower.grids import (
    FOUR,
    app_of,
    federated,
    grid_of,
    housed,
    network_of,
    node_of,
    reasons,
    words_of,
)
from tests.tiny import federation_of

VICTIM, THIEF = 1, 2
KEY = Key.new()


def asked() -> tuple[Message, Request]:
    LocalGrid({})  # tells Flower who sends
    group_id, nonce = with_nonce("3")
    message = Message(wire.record({"what": "train"}), 7, "train", group_id=group_id)
    assert nonce_of(message) == nonce
    return message, Request.of(message, nonce)


def answer() -> RecordDict:
    return wire.record({"size": 3, "raw": b"\x00"}, {"update": wire.raw_vector(torch.ones(2))})


def test_a_signed_answer_is_its_signers():
    message, this = asked()
    content = verified(signed(answer(), message, KEY), this)
    assert content.signer is not None
    assert (content.signer.key, content.signer.lasts) == (KEY.public, False)
    assert content.values["size"] == 3


def changed(record: RecordDict, name: str, **values: Any) -> RecordDict:
    """Return a reply with other values in ``values`` or in ``proof``."""
    plain = dict(record.config_records["fedclade"])
    packed = plain[name]
    assert isinstance(packed, bytes)
    plain[name] = wire.pack(wire.unpack(packed) | values)
    return RecordDict({**record, "fedclade": ConfigRecord(plain)})


def without_proof(record: RecordDict) -> RecordDict:
    return wire.with_proof(record, b"")


FORGED: dict[str, tuple[Callable[[RecordDict], RecordDict], str]] = {
    "no signature": (without_proof, "is not signed"),
    "another nonce": (
        lambda told: changed(told, "proof", nonce="0" * 32),
        "does not return the nonce of its request",
    ),
    "another key": (
        lambda told: changed(told, "proof", key=Key.new().public),
        "has no valid signature by the key",
    ),
    "no key": (lambda told: changed(told, "proof", key="zz"), "no valid signature by the key 'zz'"),
    "a short signature": (
        lambda told: changed(told, "proof", signature=b"\0"),
        "has no valid signature by the key",
    ),
    "another word": (
        lambda told: changed(told, "values", size=4),
        "has no valid signature by the key",
    ),
    "one word more": (
        lambda told: changed(told, "values", more=True),
        "has no valid signature by the key",
    ),
    "text for bytes": (
        lambda told: changed(told, "values", raw="00"),
        "has no valid signature by the key",
    ),
    "another vector": (
        lambda told: RecordDict({**told, "vectors": answered_zeros().array_records["vectors"]}),
        "has no valid signature by the key",
    ),
}


def answered_zeros() -> RecordDict:
    return wire.record({}, {"update": wire.raw_vector(torch.zeros(2))})


@pytest.mark.parametrize("name", FORGED)
def test_an_answer_that_was_changed_on_its_way_is_nobodys(name: str):
    change, why = FORGED[name]
    message, this = asked()
    with pytest.raises(UpdateError, match=why):
        verified(change(signed(answer(), message, KEY)), this)


def test_an_answer_to_one_question_is_none_to_another():
    """Neither of the same node and kind, nor that of another node."""
    (message, this), (other, that) = asked(), asked()
    told = signed(answer(), message, KEY)
    with pytest.raises(UpdateError, match="does not return the nonce"):
        verified(told, that)
    for fields in ({"node": 8}, {"kind": "evaluate"}, {"run": 2}):
        with pytest.raises(UpdateError, match="no valid signature"):
            verified(told, Request(**{**vars(this), **fields}))
    assert this.nonce != that.nonce
    assert nonce_of(other) == that.nonce


def test_every_question_has_a_nonce_of_its_own():
    seen: list[str] = []
    grid = grid_of(federation_of(FOUR))
    push = grid.push_messages

    def pushed(messages: Any) -> Any:
        messages = list(messages)
        seen.extend(nonce_of(message) or "" for message in messages)
        return push(messages)

    grid.push_messages = pushed  # type: ignore[method-assign]
    federated(grid, FedAvg(), rounds=2)
    # Each client is asked to register, twice to train and to evaluate, and for its gains.
    assert len(seen) == len(set(seen)) == 4 + 2 * 2 * 4 + 4
    assert min(map(len, seen)) == 32


def forging(grid: LocalGrid, forge: Callable[[Message, RecordDict, Key], RecordDict]) -> None:
    """Let the thief answer, before the victim can, each question that the victim is asked to train.

    As with Flower, an answer counts as that of the node that it says it is from.
    """
    thief, victim = grid.nodes[node_of(THIEF)], grid.nodes[node_of(VICTIM)]
    honest = victim.app
    key = Key.new()
    context = Context(1, node_of(VICTIM), dict(victim.config), RecordDict(), {})

    def forged(message: Message, own: Context) -> Message:
        reply = honest(message, own)
        if Content.of(message.content).values["what"] != "train":
            return reply
        theirs = thief.app(message, context).content  # trained on other data, and well-formed
        return Message(forge(message, theirs, key), reply_to=message)

    victim.app = forged


def unanswered(message: Message, told: RecordDict, key: Key) -> RecordDict:
    """Answer without having seen the question, as who guesses the id of a message has not."""
    blind = Message(message.content, reply_to=message)
    blind.metadata.__dict__["_dst_node_id"] = message.metadata.dst_node_id
    blind.metadata.__dict__["_group_id"] = with_nonce("1")[0]
    return signed(told, blind, key)


@pytest.mark.parametrize(
    ("forge", "why"),
    [
        (
            unanswered,
            "the reply does not return the nonce of its request; it may be a copy of an old reply",
        ),
        (
            lambda message, told, key: signed(told, message, key),
            "the reply is signed by another key than the one that the client registered with, so the server ignores "
            "the client until it registers again",
        ),
        (
            lambda message, told, key: without_proof(told),
            "the reply is not signed, so the server ignores it; run the client as a fedclade.flower.client_app, which "
            "signs every reply",
        ),
    ],
    ids=["blind", "another key", "unsigned"],
)
def test_an_answer_in_the_name_of_another_client_is_not_used_and_is_told(
    forge: Any, why: str, tmp_path: Path
):
    grid = housed(grid_of(federation_of(FOUR)), tmp_path)
    forging(grid, forge)
    run = federated(grid, FedAvg(), rounds=1)
    assert reasons(run) == {VICTIM: why}
    assert run.metric_rows[0]["clients_trained"] == 3


def test_a_client_that_lost_its_key_with_its_supernode_misses_one_round():
    """Without a folder; that it is the same one rests on its node's key."""
    grid = grid_of(federation_of(FOUR))

    def restart(row: dict[str, Any], tree: Any) -> None:
        if row["round"] == 1:
            grid._states.pop(node_of(VICTIM))

    run = federated(grid, FedAvg(), rounds=4, on_round=restart)
    left_out = {
        (event["round"], *event["clients"]) for event in run.events if event["kind"] == "left_out"
    }
    assert left_out == {(2, str(VICTIM))}
    assert [row["clients_trained"] for row in run.metric_rows] == [4, 3, 4, 4]


def test_a_key_that_lasts_is_the_client_wherever_its_node_is(tmp_path: Path):
    """Its number cannot be claimed by another, whether the client is there or not."""
    federation = federation_of(FOUR)
    grid = housed(grid_of(federation), tmp_path)
    settings = {"rounds": 2, "folder": tmp_path / "run", "checkpoint_every": 1}
    settings["network"] = network_of(grid, clients=3, identity="number")
    victim = grid.nodes[node_of(VICTIM)]

    def leave(row: dict[str, Any], tree: Any) -> None:
        victim.connected = False
        config = {"partition-id": VICTIM, "folder": str(tmp_path / "thief")}
        grid.nodes[666] = LocalNode(app_of(federation), config)

    run = federated(grid, FedAvg(), on_round=leave, **settings)
    (why,) = [event["nodes"] for event in run.events if event["kind"] == "refused"]
    assert why == {
        "666": (
            "it registers as client 1, but has another key; start it with the "
            "folder that contains this client's client.key"
        )
    }
    del grid.nodes[666]
    grid.nodes[777] = grid.nodes.pop(node_of(VICTIM))
    victim.connected = True
    again = federated(grid, FedAvg(), **{**settings, "rounds": 4})
    assert [row["clients_trained"] for row in again.metric_rows] == [4, 3, 4, 4]
    assert [event["clients"] for event in again.events if event["kind"] == "reconnected"] == [
        [VICTIM]
    ]


def test_a_number_belongs_to_the_key_that_the_operator_lists(tmp_path: Path):
    """Also if another claims it first; and who is not listed is not let in."""
    federation = federation_of(FOUR)
    grid = housed(grid_of(federation), tmp_path)
    contexts = {
        client: Context(
            1, node_of(client), dict(grid.nodes[node_of(client)].config), RecordDict(), {}
        )
        for client in range(4)
    }
    for context in contexts.values():
        key_of(context)  # makes one
    public = {
        c: (tmp_path / str(node_of(c)) / f"{KEY_FILE}.pub").read_text().strip() for c in range(4)
    }
    listed = tmp_path / "clients.keys"
    listed.write_text(
        "# the hospitals\n\n" + "".join(f"{c} {public[c]} hospital-{c}\n" for c in range(3))
    )
    assert read_keys(listed) == {key_of(contexts[c]).public: c for c in range(3)}
    config = {"partition-id": 1, "folder": str(tmp_path / "thief")}
    grid.nodes = {50: LocalNode(app_of(federation), config), **grid.nodes}  # the first to be seen
    network = Network(clients=3, wait=0.5, deadline=0.5, keys=str(listed))
    run = federated(grid, FedAvg(), rounds=1, network=network)
    assert set(run.tree.leaf_of) == {0, 1, 2}
    (refused,) = [event["nodes"] for event in run.events if event["kind"] == "refused"]
    assert set(refused) == {"50", str(node_of(3))}
    assert all("is not in the list of keys, network.keys" in why for why in refused.values())


def test_a_listed_key_has_its_number_and_no_other(tmp_path: Path):
    federation = federation_of(FOUR)
    grid = housed(grid_of(federation), tmp_path)
    keys: dict[int, str] = {}
    for client in range(4):
        node = grid.nodes[node_of(client)]
        key_of(Context(1, 1, dict(node.config), RecordDict(), {}))
        keys[client] = (tmp_path / str(node_of(client)) / f"{KEY_FILE}.pub").read_text()
    grid.nodes[node_of(3)].config = {**grid.nodes[node_of(3)].config, "partition-id": 2}
    (tmp_path / "keys").write_text("".join(f"{client} {key}" for client, key in keys.items()))
    network = Network(clients=3, wait=0.5, deadline=0.5, keys=str(tmp_path / "keys"))
    run = federated(grid, FedAvg(), rounds=1, network=network)
    (refused,) = [event["nodes"] for event in run.events if event["kind"] == "refused"]
    assert refused == {"103": "it registers as client 2, but its key belongs to client 3"}
    assert grid.nodes[node_of(2)].connected
    assert set(run.tree.leaf_of) == {0, 1, 2}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty; add a line for each client"),
        ("ssh-ed25519 AAAA", r"line 1: expected a client's number and its public key"),
        ("-1 KEY", "line 1: expected a client's number"),
        ("x KEY", "line 1: expected a client's number"),
        ("0 KEY\n0 OTHER", "line 2: client 0 or its key occurs twice"),
        ("0 KEY\n1 KEY", "line 2: client 1 or its key occurs twice"),
        ("0 ssh-ed25519 AAAA", "line 1: expected"),
    ],
)
def test_a_list_that_is_none_is_one_clear_error(text: str, why: str, tmp_path: Path):
    for name in ("KEY", "OTHER"):
        key_of(Context(1, 1, {"folder": str(tmp_path / name)}, RecordDict(), {}))
        text = text.replace(name, (tmp_path / name / f"{KEY_FILE}.pub").read_text().strip())
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"cannot read the list of clients' keys .*nowhere"):
        read_keys(tmp_path / "nowhere")


def test_a_key_lasts_in_its_folder_and_is_its_owners_alone(tmp_path: Path):
    context = Context(1, 1, {"folder": str(tmp_path / "mine")}, RecordDict(), {})
    first = key_of(context)
    assert first.lasts
    assert key_of(context).public == first.public
    assert stat.S_IMODE((tmp_path / "mine" / KEY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in sorted((tmp_path / "mine").iterdir())] == [
        KEY_FILE,
        f"{KEY_FILE}.pub",
    ]


def test_without_a_folder_it_lasts_as_long_as_the_supernode():
    context = Context(1, 1, {}, RecordDict(), {})
    first = key_of(context)
    assert not first.lasts
    assert key_of(context).public == first.public
    assert key_of(Context(1, 1, {}, RecordDict(), {})).public != first.public


def test_a_key_file_that_holds_none_is_one_clear_error(tmp_path: Path):
    (tmp_path / KEY_FILE).write_text("no key")
    context = Context(1, 1, {"folder": str(tmp_path)}, RecordDict(), {})
    with pytest.raises(
        ConfigError, match=r"cannot read the client's key .*client.key: .*make one with: ssh-keygen"
    ):
        key_of(context)
    grid = housed(grid_of(federation_of(FOUR)), tmp_path / "clients")
    grid.nodes[node_of(0)].config = {"partition-id": 0, "folder": str(tmp_path)}
    run = federated(grid, FedAvg(), rounds=1, network=network_of(grid, clients=3))
    (refused,) = [event["nodes"] for event in run.events if event["kind"] == "refused"]
    assert "it has not registered: cannot read the client's key" in refused["100"]


def test_a_question_without_a_nonce_is_refused():
    grid = grid_of(federation_of(FOUR))
    (reply,) = grid.send_and_receive([Message(wire.record({"what": "hello"}), node_of(0), "query")])
    assert words_of(reply.content)["refused"] == (
        "the request contains no nonce, which every request must have, so this client does not reply; run the server "
        "with fedclade.flower.federate or server_app"
    )
