"""What a client of a network keeps: through restarts, questions that are put again, and from run to run."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from flwr.app import RecordDict

from fedclade.core import KEEPS_NONE, CheckpointError, UpdateError
from fedclade.flower import wire
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.node_store import FILE
from fedclade.flower.policy import Usage, UsageLog
from fedclade.flower.wire import Content
from fedclade.models import Parts
from tests.flower.grids import FOUR, LOCAL
from tests.tiny import federation_of, perceptron

PERSONAL = Parts(personal="head")


def client(folder: Path | None = None, parts: Parts | None = None) -> ClientHandler:
    return ClientHandler(federation_of(FOUR).alone(2), perceptron, folder=folder, parts=parts)


def asked(
    to: ClientHandler,
    number: int,
    what: str = "train",
    state: RecordDict | None = None,
    carries: str = "",
    **more,
) -> Content:
    layout = to._layout
    values = {
        **{
            "what": what,
            "round": number,
            "query": 0,
            "purpose": "train",
            "seed": 3,
            "replicates": 1,
            "dim": 0,
        },
        "part_size": 0,
        "compares_parts": True,
        **{
            "own": False,
            "shares": False,
            "compares": False,
            "personal_epochs": 0,
            "run": "a",
            "split": "test",
            "spec": wire.to_json(LOCAL),
        },
        **{"layout": wire.layout_digest(layout), **more},
    }
    name = carries or ("model" if what == "train" else "0")
    goes_on = values["own"] and (what == "evaluate" or number > 1)
    vectors = {} if goes_on else {name: wire.raw_vector(layout.flatten(perceptron(1)))}
    return Content.of(to.answer(Content.of(wire.record(values, vectors)), state))


def loss(to: ClientHandler, **more) -> float:
    """Return the loss on test data, which tells what the client keeps."""
    return asked(to, 0, "evaluate", **more).values["losses"][0]


@pytest.mark.parametrize(("parts", "own"), [(PERSONAL, False), (None, True)])
def test_it_goes_on_after_a_restart_and_answers_a_round_again_as_before(
    tmp_path: Path, parts: Parts | None, own: bool
):
    whole = client(None, parts)
    for number in (1, 2, 3):
        expected = asked(whole, number, own=own)
    for number in (1, 2, 3, 3):
        again = asked(client(tmp_path, parts), number, own=own)
    assert again.vectors == expected.vectors
    assert again.vectors.keys() == (set() if own else {"update"})
    assert (
        loss(client(tmp_path, parts), own=own) == loss(whole, own=own) != loss(client(None, parts))
    )
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_without_a_folder_flower_keeps_it(tmp_path: Path):
    state = RecordDict()
    for number in (1, 2):
        asked(client(tmp_path, PERSONAL), number)
        asked(client(None, PERSONAL), number, state=state)
    there = loss(client(None, PERSONAL), state=state)
    assert there == loss(client(tmp_path, PERSONAL)) != loss(client(None, PERSONAL))


@pytest.mark.parametrize("kept", [True, False])
def test_another_run_begins_with_nothing(tmp_path: Path, kept: bool):
    mine = client(tmp_path if kept else None, PERSONAL)
    new = loss(client(None, PERSONAL))
    asked(mine, 1)
    assert loss(mine) != new
    assert loss(mine, run="b") == new


@pytest.mark.parametrize(
    "words", [{"purpose": "replicate", "replicates": 2}, {"purpose": "pretrain"}]
)
def test_training_for_another_purpose_changes_nothing(words: dict):
    mine = client(None, PERSONAL)
    asked(mine, 1)
    before = loss(mine)
    asked(mine, 2, **words)
    assert loss(mine) == before


def test_what_is_not_personal_needs_no_store(tmp_path: Path):
    asked(client(tmp_path), 1)
    assert not (tmp_path / FILE).exists()


def test_a_model_of_its_own_is_no_release_but_counts_as_scored(tmp_path: Path):
    """Its training loss leaves, and later its scores."""
    answer = asked(client(tmp_path), 1, own=True)
    assert (answer.vectors, "loss" in answer.values) == ({}, True)
    assert UsageLog(tmp_path).usage() == Usage(evaluations=1)
    loss(client(tmp_path), own=True)
    assert UsageLog(tmp_path).usage() == Usage(evaluations=2)


def test_only_its_own_goes_on_without_a_model():
    """An anchor is none."""
    with pytest.raises(UpdateError, match=r"the message has no vector 'model', only \['anchor'\]"):
        asked(client(), 1, carries="anchor")


@pytest.mark.parametrize(("what", "number"), [("train", 2), ("evaluate", 0)])
def test_who_has_lost_its_model_says_so(what: str, number: int):
    with pytest.raises(
        UpdateError, match=f"^{KEEPS_NONE}: client 2 has not trained one, or has lost"
    ):
        asked(client(), number, what, own=True)


def test_a_damaged_store_is_said_and_stays(tmp_path: Path):
    (tmp_path / FILE).write_bytes(b"no tensors")
    with pytest.raises(
        CheckpointError,
        match=r"store.safetensors, which contains the client's own parameters, is damaged",
    ):
        asked(client(tmp_path, PERSONAL), 1)
    assert (tmp_path / FILE).read_bytes() == b"no tensors"


def test_personal_parameters_start_from_the_runs_seed():
    start = ClientHandler(
        federation_of(FOUR).alone(2), perceptron, parts=PERSONAL, seed=5
    )._trainer.workers.whole.initial
    assert torch.equal(start, PERSONAL.layout(perceptron(5)).flatten_personal(perceptron(5)))
