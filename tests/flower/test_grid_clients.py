"""Clients behind a grid that answer wrongly: left out by name and with the reason, while the run goes on."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedclade import Signature
from fedclade.algorithms import FLUX, IFCA, PACFL, Ditto, FedAvg, FineTune, Local
from fedclade.channel.encoding import ENCODINGS, encoded_bytes
from fedclade.core import KEEPS_NONE, ParameterTree, UpdateError
from fedclade.core.params import Layout
from fedclade.core.updates import LARGEST_NORM
from fedclade.flower import wire
from fedclade.flower.node_store import FILE
from fedclade.flower.replies import Scores, read_scores, read_update
from fedclade.flower.wire import RAW, Content
from fedclade.runs.store.contents import Row
from fedclade.tasks import FittedTask
from tests.flower.grids import (
    ALL_ALLOWED,
    CFL_OF_TWO,
    FOUR,
    app_of,
    federated,
    grid_of,
    housed,
    node_of,
    reasons,
    spoil,
    worded,
    words_of,
)
from tests.tiny import LABELS, federation_of, perceptron

LAYOUT = Layout.of(perceptron())
BAD = 2
"""The client that answers wrongly."""

Change = Callable[[RecordDict], RecordDict | None]


def vectors(**arrays: Array) -> Change:
    def change(honest: RecordDict) -> RecordDict:
        return RecordDict({**honest, "vectors": ArrayRecord(arrays)})

    return change


def updated(data: bytes) -> Change:
    return vectors(update=Array("float32", (LAYOUT.size,), RAW, data))


def with_entry(value: float) -> Change:
    def change(honest: RecordDict) -> RecordDict:
        update = bytearray(honest.array_records["vectors"]["update"].data)
        update[:4] = torch.tensor([value], dtype=torch.float32).numpy().tobytes()
        return updated(bytes(update))(honest)

    return change


WRONG: dict[str, tuple[Change, str]] = {
    "one entry too few": (
        updated(bytes(4 * LAYOUT.size - 4)),
        "the update has 364 bytes, expected 368 bytes in the encoding 'float32'",
    ),
    "far too long": (
        updated(bytes(4000 * LAYOUT.size)),
        "the reply has vectors of 368000 bytes, expected at most 368",
    ),
    "another encoding than said": (
        worded(encoding="int8"),
        "the update has 368 bytes, expected 96 bytes in the encoding 'int8' for 92 entries",
    ),
    "an unknown encoding": (worded(encoding="zip"), "the update has the unknown encoding 'zip'"),
    "no encoding": (worded(encoding=None), "'encoding' should be of type str, got None"),
    "NaN": (with_entry(math.nan), "1 of 92 entries of the update are NaN or infinite"),
    "infinite": (with_entry(-math.inf), "1 of 92 entries of the update are NaN or infinite"),
    "huge": (with_entry(10 * LARGEST_NORM), "norm 1e+19, more than 1e+18"),
    "no example": (worded(size=0), "'size' should be 1 to 2**53 examples, got 0"),
    "negative": (worded(size=-5), "'size' should be 1 to 2**53 examples, got -5"),
    "more examples than can be counted": (
        worded(size=2**53 + 1),
        "'size' should be 1 to 2**53 examples, got 9007199254740993",
    ),
    "true": (worded(size=True), "'size' should be of type int, got True"),
    "a fraction": (worded(size=24.0), "'size' should be of type int, got 24.0"),
    "another round": (worded(round=9), "the reply has the round 9, expected 1"),
    "the round as true": (worded(round=True), "'round' should be of type int, got True"),
    "another query": (worded(query=5), "the reply has the query 5, expected 0"),
    "another purpose": (
        worded(purpose="attack"),
        "the reply has the purpose 'attack', expected 'train'",
    ),
    "another question": (
        worded(what="gradients"),
        "the reply has the what 'gradients', expected 'train'",
    ),
    "another model": (
        worded(model="0" * 32),
        "the reply has the model '000000000000...0000000000000', expected '",
    ),
    "more examples than it joined with": (
        worded(size=10**9),
        "the update is from 1000000000 training examples, expected 24",
    ),
    "fewer examples than it joined with": (
        worded(size=23),
        "23 training examples, expected 24 by the query and the client's registration",
    ),
    "a loss that is NaN": (worded(loss=math.nan), "loss is nan"),
    "a loss that is infinite": (
        worded(loss=math.inf),
        "the training loss is inf, expected a magnitude of at most 1e+18",
    ),
    "a loss that sums would overflow": (
        worded(loss=1e300),
        "the training loss is 1e+300, expected a magnitude of at most 1e+18",
    ),
    "a loss below all others": (
        worded(loss=-1e19),
        "the training loss is -1e+19, expected a magnitude of at most 1e+18",
    ),
    "vectors that nobody asked for": (
        vectors(
            update=Array("float32", (1,), RAW, bytes(100)),
            more=Array("float32", (1,), RAW, bytes(100)),
        ),
        "the message contains 1 unexpected vectors: ['more']",
    ),
    "a loss that is text": (worded(loss="0.1"), "'loss' should be of type float, got '0.1'"),
    "no update": (vectors(), "the message has no vector 'update', only []"),
    "a foreign array": (
        vectors(update=Array("float32", (LAYOUT.size,), "numpy.ndarray", bytes(4 * LAYOUT.size))),
        "vector 'update' of the message has the type 'numpy.ndarray', expected 'fedclade.raw'",
    ),
    "another protocol": (
        lambda honest: RecordDict(
            {
                **honest,
                "fedclade": ConfigRecord(
                    {**dict(honest.config_records["fedclade"]), "protocol": 1}
                ),
            }
        ),
        f"the sender uses version 1 of the message format, and the receiver uses version {wire.PROTOCOL}",
    ),
    "nothing": (
        lambda honest: RecordDict(),
        "a message of fedclade should have the record 'fedclade', got the records []",
    ),
    "records of other kinds": (
        lambda honest: RecordDict(
            {"fedclade": MetricRecord({"size": 3}), "vectors": ConfigRecord()}
        ),
        "got the records ['fedclade', 'vectors']",
    ),
    "a refusal": (lambda honest: wire.refusal("my budget is spent"), "my budget is spent"),
    "a refusal without a reason": (
        worded(refused=[1, 2]),
        "'refused' should be of type str, got [1, 2]",
    ),
    "a refusal that would spoil the log": (
        lambda honest: wire.refusal("\x1b[2Jgone\n" + 10_000 * "!"),
        " [2Jgone " + (wire.LONGEST_REASON - 10) * "!" + "…",
    ),
    "a long text for a number": (
        worded(size=100_000 * "9"),
        "'size' should be of type int, got '999999999999",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_left_out_and_the_run_goes_on(name: str):
    change, why = WRONG[name]
    grid = grid_of(federation_of(FOUR))
    spoil(grid, BAD, "train", change)
    run = federated(grid, CFL_OF_TWO, rounds=3)
    assert list(reasons(run)) == [BAD]
    assert why in reasons(run)[BAD]
    assert len(reasons(run)[BAD]) <= wire.LONGEST_REASON
    assert reasons(run)[BAD].isprintable()
    assert {frozenset(leaf.members) for leaf in run.tree.leaves} == {
        frozenset({0}),
        frozenset({1, 3}),
    }
    assert run.tree.stragglers == {0: (BAD,)}


def test_what_is_left_out_is_in_the_run_folder(tmp_path: Path):
    grid = grid_of(federation_of(FOUR))
    spoil(grid, BAD, "train", with_entry(math.nan))
    federated(grid, FedAvg(), rounds=2, folder=tmp_path / "run")
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert [(event["round"], event["kind"], event["clients"]) for event in events] == [
        (number, "left_out", {"2": "1 of 92 entries of the update are NaN or infinite"})
        for number in (1, 2)
    ]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_update_that_is_too_large_is_refused_before_it_is_decoded(encoding: str):
    """What is read has the length that the server knows beforehand; ``decode`` allocates nothing by what came."""
    expected = encoded_bytes(LAYOUT.size, encoding, LAYOUT.n_parameters)
    words = {"what": "train", "size": 3, "encoding": encoding, "loss": 0.5}
    data = bytes(1000 * expected)
    content = Content.of(wire.record(words, {"update": wire.raw(data, encoding, LAYOUT.size)}))
    with pytest.raises(
        UpdateError, match=f"the update has {1000 * expected} bytes, expected {expected} bytes"
    ):
        read_update(content, LAYOUT.size, LAYOUT.n_parameters, LAYOUT.dtype, 3, {"what": "train"})


NOT_LISTS = (
    "a reply with scores should have three lists for 1 models, scores of 1 numbers, losses of 1 numbers and examples "
    "of 1 whole numbers, got "
)
EVALUATIONS: dict[str, tuple[Change, str]] = {
    "an accuracy above 1": (
        worded(scores=[1.5]),
        "the score by accuracy is 1.5, expected a number in [0, 1]",
    ),
    "a negative accuracy": (
        worded(scores=[-0.5]),
        "the score by accuracy is -0.5, expected a number in [0, 1]",
    ),
    "an accuracy that is NaN": (
        worded(scores=[math.nan]),
        "the score by accuracy is nan, expected a number in [0, 1]",
    ),
    "a loss that is NaN": (worded(losses=[math.nan]), "loss nan on 20 examples"),
    "a cross-entropy below 0": (worded(losses=[-3.0]), "loss -3 on 20 examples"),
    "a loss below all others": (worded(losses=[-1e19]), "loss -1e+19 on 20 examples"),
    "negative examples": (worded(examples=[-3]), "on -3 examples"),
    "a loss that sums would overflow": (worded(losses=[1e300]), "loss 1e+300 on 20 examples"),
    "vectors that nobody asked for": (
        vectors(more=Array("float32", (1,), RAW, bytes(100))),
        "vectors of 100 bytes",
    ),
    "more than can be counted": (worded(examples=[2**60]), "on 1152921504606846976 examples"),
    "too many": (worded(scores=[0.5, 0.5]), NOT_LISTS + "[[0.5, 0.5]"),
    "none": (worded(examples=[]), NOT_LISTS),
    "no list": (worded(losses=0.3), NOT_LISTS),
    "of another type": (worded(scores=["0.5"]), NOT_LISTS),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_so_is_a_wrong_evaluation(name: str):
    change, why = EVALUATIONS[name]
    grid = grid_of(federation_of(FOUR))
    spoil(grid, BAD, "evaluate", change)
    run = federated(grid, FedAvg(), rounds=1)
    assert list(reasons(run)) == [BAD]
    assert why in reasons(run)[BAD]
    assert [row["client"] for row in run.client_rows] == [0, 1, 3]
    assert math.isfinite(run.metric_rows[-1]["loss_mean"])


def test_a_client_is_scored_on_as_many_examples_as_before(tmp_path: Path):
    grid = grid_of(federation_of(FOUR))
    told = iter([20, 20, 21])
    spoil(grid, BAD, "evaluate", lambda honest: worded(examples=[next(told)])(honest))
    run = federated(grid, FedAvg(), rounds=3)
    left_out = [
        (event["round"], event["clients"]) for event in run.events if event["kind"] == "left_out"
    ]
    assert left_out == [
        (
            3,
            {
                str(
                    BAD
                ): "the client reports scores of the models on [21] examples, expected 20 for all models, since "
                "all are scored on the same data"
            },
        )
    ]


def test_on_its_training_data_it_is_scored_on_all_of_it():
    """Where those scores choose a cluster, as in IFCA."""
    grid = grid_of(federation_of(FOUR))
    spoil(
        grid,
        BAD,
        "evaluate",
        lambda honest: worded(examples=[9 for _ in words_of(honest)["examples"]])(honest),
    )
    run = federated(grid, IFCA(clusters=2), rounds=1, evaluate_every=2)
    assert reasons(run) == {
        BAD: "the client reports scores of the models on [9] examples, expected 24 for all models, since all are "
        "scored on the same data"
    }


def test_subspaces_that_are_none_are_asked_for_again_and_then_left_out():
    for change in (
        vectors(subspaces=Array("float32", (3,), RAW, bytes(12))),
        vectors(),
        lambda honest: vectors(
            subspaces=Array(
                "float32", (1,), RAW, torch.full((4 * 6 * 3,), math.nan).numpy().tobytes()
            )
        )(honest),
        lambda honest: vectors(
            subspaces=Array("float32", (1,), RAW, torch.full((4 * 6 * 3,), 1e6).numpy().tobytes())
        )(honest),
    ):
        grid = grid_of(federation_of(FOUR), config=ALL_ALLOWED)
        spoil(grid, BAD, "subspaces", change)
        run = federated(grid, PACFL(n_clusters=2), rounds=2)
        assert reasons(run) == {BAD: "dropped out"}
        assert sorted(client for leaf in run.tree.leaves for client in leaf.members) == [0, 1, 3]


def test_descriptors_that_are_none_are_asked_for_again_and_then_left_out():
    shape = (2 + 2 + 2 * LABELS) * LABELS
    for change in (
        vectors(descriptor=Array("float32", (3,), RAW, bytes(12))),
        vectors(),
        vectors(
            descriptor=Array(
                "float32", (shape,), RAW, torch.full((shape,), math.nan).numpy().tobytes()
            )
        ),
    ):
        grid = grid_of(federation_of(FOUR), config=ALL_ALLOWED)
        spoil(grid, BAD, "descriptors", change)
        run = federated(grid, FLUX(earliest=1, latest=1), rounds=2)
        assert reasons(run) == {BAD: "dropped out"}
        assert run.tree.leaf_of[BAD] == 0


def test_nobody_who_answers_in_a_round_ends_the_run_and_says_why(tmp_path: Path):
    grid = grid_of(federation_of(FOUR))
    for client in range(4):
        spoil(grid, client, "train", worded(size=0))
    with pytest.raises(
        UpdateError,
        match=r"round 1: no client replied to any of .* client 0: 'size' should be .*3 more with a similar reason",
    ):
        federated(grid, FedAvg(), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()  # nothing is half-written


WORDS = st.dictionaries(
    st.sampled_from(
        [
            "what",
            "round",
            "query",
            "purpose",
            "model",
            "size",
            "encoding",
            "loss",
            "refused",
            "protocol",
        ]
    ),
    st.one_of(
        st.integers(-(2**63), 2**63 - 1),
        st.floats(),
        st.text(max_size=30),
        st.booleans(),
        st.binary(max_size=9),
        st.lists(st.integers(-9, 9), min_size=1, max_size=3),
        st.sampled_from(["float32", "float16", "int8"]),
    ),
    min_size=1,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(words=WORDS, data=st.one_of(st.binary(max_size=64), st.binary(min_size=368, max_size=368)))
def test_whatever_comes_is_left_out_or_can_be_used(words: dict[str, Any], data: bytes):
    honest = wire.record(
        {
            "what": "train",
            "round": 1,
            "query": 0,
            "purpose": "train",
            "size": 9,
            "encoding": "float32",
            "loss": 0.5,
        },
        {"update": wire.raw(data, "float32", LAYOUT.size)},
    )
    expected = {"what": "train", "round": 1, "query": 0, "purpose": "train"}
    why = ""
    try:
        content = Content.of(worded(**words)(honest))
        answer = read_update(content, LAYOUT.size, LAYOUT.n_parameters, LAYOUT.dtype, 9, expected)
    except UpdateError as error:
        why = str(error)
    else:
        assert answer.update.shape == (LAYOUT.size,)
        assert answer.size == 9
    assert len(why) <= wire.LONGEST_REASON
    assert why.isprintable()


NUMBERS = st.one_of(
    st.floats(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=5), st.booleans()
)
COLUMN = st.one_of(
    NUMBERS, st.lists(st.floats(-0.5, 1.5), max_size=3), st.lists(st.integers(-1, 9), max_size=3)
)


@settings(max_examples=100)
@given(scores=COLUMN, losses=COLUMN, examples=COLUMN, count=st.integers(1, 3))
def test_whatever_scores_come_they_are_scores_or_none(
    scores: Any, losses: Any, examples: Any, count: int
):
    values = {"scores": scores, "losses": losses, "examples": examples}
    why, found = "", list[Scores]()
    try:
        found = read_scores(
            Content.of(worded(**values)(wire.record({}))), count, FittedTask().metrics
        )
    except UpdateError as error:
        why = str(error)
    assert len(found) == (0 if why else count)
    assert all(
        0 <= accuracy <= 1 and math.isfinite(loss) and n >= 1 for (accuracy,), loss, n in found
    )
    assert len(why) <= wire.LONGEST_REASON


def test_an_error_by_the_superlink_belongs_to_the_question_that_it_answers():
    """Its source is the SuperLink's own node id, which is nobody's."""
    grid = grid_of(federation_of(FOUR))
    honest = grid.nodes[node_of(BAD)].app

    def failing(message: Message, context: Any) -> Message:
        reply = honest(message, context)
        if Content.of(message.content).values["what"] != "train":
            return reply
        error = Message(Error(3, "the message is no longer there"), reply_to=message)
        error.metadata.__dict__["_src_node_id"] = 1
        return error

    grid.nodes[node_of(BAD)].app = failing
    assert reasons(federated(grid, FedAvg(), rounds=1)) == {
        BAD: "error 3: the message is no longer there"
    }


def test_a_client_app_that_breaks_is_left_out():
    grid = grid_of(federation_of(FOUR))
    honest = grid.nodes[node_of(BAD)].app

    def breaking(message: Message, context: Any) -> Message:
        if Content.of(message.content).values["what"] == "train":
            raise OSError("disk full\x07")
        return honest(message, context)

    grid.nodes[node_of(BAD)].app = breaking
    assert reasons(federated(grid, FedAvg(), rounds=1)) == {BAD: "error 2: OSError: disk full "}


def test_a_client_that_shares_no_secret_sends_no_initial_model(tmp_path: Path):
    (tmp_path / "secret").write_text("ab" * 32)
    grid = grid_of(federation_of(FOUR), config={"secret-file": str(tmp_path / "secret")})
    for client in range(4):
        spoil(grid, client, "initial", vectors())
    with pytest.raises(
        UpdateError,
        match=r"no client has sent the initial models: client 0: the message has no vector '0'.*client 3",
    ):
        federated(grid, FedAvg(), permute=True)


def test_the_first_that_sends_an_initial_model_is_enough(tmp_path: Path):
    (tmp_path / "secret").write_text("ab" * 32)
    grid = grid_of(federation_of(FOUR), config={"secret-file": str(tmp_path / "secret")})
    spoil(grid, 0, "initial", lambda honest: wire.refusal("not by me"))
    assert (
        federated(grid, IFCA(clusters=2), permute=True, rounds=2).summary["clusters"]["found"] >= 1
    )


def initially(models: dict[str, Array], digest: str | None = None) -> Change:
    """Return a change of the answer to the question for initial models: of what is said of them, and of themselves."""
    data = b"".join(array.data for array in models.values())

    def change(honest: RecordDict) -> RecordDict:
        said = worded(digest=wire.digest(data) if digest is None else digest)(honest)
        return vectors(**models)(said) if "vectors" in honest else said

    return change


def model_of(value: float) -> dict[str, Array]:
    return {"0": wire.raw_vector(torch.full((LAYOUT.size,), value))}


LIES: dict[str, Change] = {
    "NaN": initially(model_of(math.nan)),
    "huge": initially(model_of(1e30)),
    "another, of its own": initially(model_of(7.0)),
    "another than said": lambda honest: (
        vectors(**model_of(7.0))(honest) if "vectors" in honest else honest
    ),
    "too long": initially({"0": wire.raw_vector(torch.zeros(9 * LAYOUT.size))}),
    "of another length": initially({"0": wire.raw_vector(torch.zeros(3))}),
    "one too many": initially({**model_of(7.0), "1": wire.raw_vector(torch.zeros(1))}),
    "no digest": worded(digest=None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_client_that_would_like_another_initial_model_has_no_say(lie: str, tmp_path: Path):
    """Be it the first to answer: all draw the same from their secret, and what most draw is taken."""
    (tmp_path / "secret").write_text("ab" * 32)
    settings: Any = {"permute": True, "rounds": 1, "evaluate_every": 2}
    grid = grid_of(federation_of(FOUR), config={"secret-file": str(tmp_path / "secret")})
    honest = federated(grid, FedAvg(), **settings)
    spoil(grid, 0, "initial", LIES[lie])
    run = federated(grid, FedAvg(), **settings)
    assert torch.equal(run.tree.nodes[0].params, honest.tree.nodes[0].params)
    assert run.metric_rows[-1]["clients_trained"] == 4


def test_who_draws_another_initial_model_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "secret").write_text("ab" * 32)
    grid = grid_of(federation_of(FOUR), config={"secret-file": str(tmp_path / "secret")})
    spoil(grid, 1, "initial", LIES["another, of its own"])
    with caplog.at_level(logging.WARNING, "fedclade"):
        federated(grid, FedAvg(), permute=True, rounds=1)
    (told,) = [message for message in caplog.messages if "initial model" in message]
    assert told.startswith(
        "3 of 4 clients draw the same initial models, which the run uses; clients 1 draw other models"
    )


def test_models_that_clients_keep_are_never_sent():
    """Down goes what is scored in FedAvg, fine-tuned, or pulls Ditto's, which begin from the initial model besides."""
    methods = (Local(), FedAvg(), FineTune(), Ditto())
    runs = [federated(grid_of(federation_of(FOUR)), each, rounds=2) for each in methods]
    all_once = 4 * LAYOUT.size * 4
    assert [run.summary["bytes_up"] // all_once for run in runs] == [0, 2, 2, 2]
    assert [run.summary["bytes_down"] // all_once for run in runs] == [1, 2 + 2, 2 + 2, 2 + 2 + 1]
    assert {(len(run.tree.nodes), len(run.kept)) for run in runs} == {(1, 0)}


def test_who_has_lost_its_model_is_sent_the_initial_one_again(tmp_path: Path):
    grid = housed(grid_of(federation := federation_of(FOUR)), tmp_path)

    def lose(row: Row, _: ParameterTree) -> None:
        if row["round"] == 2:
            (tmp_path / str(node_of(BAD)) / FILE).unlink()
            grid.nodes[node_of(BAD)].app = app_of(federation)

    run = federated(grid, Local(), rounds=4, on_round=lose, evaluate_every=4)
    assert reasons(run) == {
        BAD: f"{KEEPS_NONE}: client {BAD} has not trained one, or has lost its stored tensors; "
        "in the next round it starts again from the model that the server sends"
    }
    assert [row["clients_trained"] for row in run.metric_rows] == [4, 4, 3, 4]
    assert [row["bytes_down"] // (LAYOUT.size * 4) for row in run.metric_rows] == [4, 0, 0, 1]


def test_a_stream_leaves_out_whom_it_must_too():
    grid = grid_of(federation_of(FOUR))
    spoil(grid, BAD, "train", with_entry(math.nan))
    run = federated(
        grid,
        CFL_OF_TWO,
        rounds=3,
        signature=Signature(kind="projected", dim=LAYOUT.size),
        stream=True,
    )
    assert list(reasons(run)) == [BAD]
    assert {frozenset(leaf.members) for leaf in run.tree.leaves} == {
        frozenset({0}),
        frozenset({1, 3}),
    }


def test_what_travels_is_counted():
    """Down: to train and to evaluate, each a model to each client and round; up: an update of each, encoded."""
    federation = federation_of(FOUR)
    run = federated(grid_of(federation), FedAvg(), rounds=2)
    assert run.summary["bytes_down"] == 2 * 2 * 4 * 4 * LAYOUT.size
    assert run.summary["bytes_up"] == 2 * 4 * 4 * LAYOUT.size
    grid = grid_of(federation)
    for node in grid.nodes.values():
        node.app = app_of(federation, encoding="int8")
    small = federated(grid, FedAvg(), rounds=2)
    assert small.summary["bytes_up"] == 2 * 4 * encoded_bytes(
        LAYOUT.size, "int8", LAYOUT.n_parameters
    )
