"""One client that answers, or says why it does not."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import RecordDict

from fedclade import LocalTraining
from fedclade.channel.accounting import Budget
from fedclade.channel.encoding import decode, encoded_bytes
from fedclade.channel.privacy import DifferentialPrivacy
from fedclade.channel.signature import CountSketch, Permutation, Signature
from fedclade.core import (
    ClientWork,
    DistanceToAnchor,
    FromStored,
    LocalModel,
    Nothing,
    Proximal,
    Splits,
    Updates,
    imported,
)
from fedclade.core.errors import ConfigError, DataError, PolicyError, PrivacyError, UpdateError
from fedclade.core.params import Layout
from fedclade.core.queries import Round
from fedclade.flower import wire
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.node_store import MOST_RESIDUALS
from fedclade.flower.policy import QUERIES, Policy
from fedclade.flower.replies import fits_size, read_update, read_wins, size_class
from fedclade.flower.signing import read_secret, secret_model, seed_of
from fedclade.flower.wire import Content
from tests.flower.grids import FOUR, LOCAL, handler_of
from tests.tiny import federation_of, perceptron, simulated

LAYOUT = Layout.of(perceptron())
MODEL = LAYOUT.flatten(perceptron())
SECRET = "f00d" * 16
OPEN = Policy(allow=QUERIES)


def ask(
    client: ClientHandler,
    what: str = "train",
    sent: dict[str, torch.Tensor] | None = None,
    state: RecordDict | None = None,
    **words: Any,
) -> Content:
    values = {
        "what": what,
        "round": 2,
        "query": 0,
        "purpose": "train",
        "replicates": 1,
        "part_size": 0,
        "compares_parts": True,
        "dim": 0,
        "own": False,
        "shares": False,
        "compares": False,
        "personal_epochs": 0,
        "run": "here",
        "seed": 3,
        "spec": wire.to_json(LOCAL),
        "split": "test",
        "digest": False,
        "layout": wire.layout_digest(LAYOUT),
        **words,
    }
    sent = {"model": MODEL} if sent is None else sent
    vectors = {name: wire.raw_vector(model) for name, model in sent.items()}
    return Content.of(client.answer(Content.of(wire.record(values, vectors)), state))


def update_of(content: Content, encoding: str = "float32") -> torch.Tensor:
    return decode(content.vector("update"), LAYOUT.size, encoding, LAYOUT.n_parameters)


@pytest.mark.parametrize("what", ["train", "gradients"])
def test_it_trains_as_a_simulated_client_does(what: str):
    federation = federation_of(FOUR)
    clients, _ = simulated(federation, perceptron())
    here = getattr(clients, what)([2], MODEL[None], [0], Round(2, LOCAL, 3))
    there = ask(handler_of(2, federation, policy=OPEN), what)
    assert torch.equal(update_of(there), here.required_deltas[0])
    told = there.values
    assert told["loss"] == float(here.losses[0])
    assert (told["what"], told["round"], told["query"], told["purpose"], told["size"]) == (
        what,
        2,
        0,
        "train",
        24,
    )
    assert told["model"] == wire.digest(wire.raw_vector(MODEL).data)


@pytest.mark.parametrize(("dim", "part_size"), [(0, 0), (5, 0), (5, 10)])
def test_it_sends_the_mean_of_all_replicates_and_their_signatures_in_one_answer(
    dim: int, part_size: int
):
    federation = federation_of(FOUR)
    clients, _ = simulated(federation, perceptron())
    sketch = CountSketch(3, LAYOUT.n_parameters, dim) if dim else None
    splits = Splits(2, part_size)

    def train_half(place: int) -> Updates:
        data, local = splits.split(place, LOCAL)
        this_round = Round(2, local, 3, purpose=f"train {place}")
        work = ClientWork(data=data, store=Nothing())
        return clients.train([2], MODEL[None], [0], this_round, work)

    halves = [train_half(place) for place in (0, 1)]
    signatures = [
        sketch.apply(half.signatures[0]) if sketch else half.signatures[0] for half in halves
    ]
    there = ask(
        handler_of(2, federation, encoding="int8"), replicates=2, dim=dim, part_size=part_size
    )
    received = decode(
        there.vector("update"), LAYOUT.size + 2 * (dim or LAYOUT.n_parameters), "float32", 0
    )
    torch.testing.assert_close(
        received[: LAYOUT.size], (halves[0].deltas[0] + halves[1].deltas[0]) / 2
    )
    assert torch.equal(received[LAYOUT.size :], torch.cat(signatures))
    assert there.values["encoding"] == "float32"
    assert there.values["size"] == (20 if part_size else 24)
    assert there.values["loss"] == pytest.approx(float((halves[0].losses + halves[1].losses) / 2))
    alone = ask(
        handler_of(2, federation), replicates=2, dim=dim, part_size=part_size, compares_parts=False
    )
    assert torch.equal(update_of(alone), received[: LAYOUT.size])


@pytest.mark.parametrize("dim", [0, 5])
def test_it_sends_the_signatures_of_those_parameters_that_it_is_asked_for(dim: int):
    federation = federation_of(FOUR)
    everything = ask(handler_of(2, federation), replicates=2)
    sketch = Signature(kind="projected" if dim else "full", dim=max(dim, 1), of="3").sketch(
        3, LAYOUT
    )
    length = LAYOUT.size + 2 * LAYOUT.n_parameters
    halves = decode(everything.vector("update"), length, "float32", 0)[LAYOUT.size :].view(2, -1)
    there = ask(handler_of(2, federation), replicates=2, dim=dim, of=["3"])
    received = decode(there.vector("update"), LAYOUT.size + 2 * sketch.dim, "float32", 0)
    assert torch.equal(received[LAYOUT.size :], sketch.apply(halves).flatten())


@pytest.mark.parametrize(
    ("of", "error", "text"),
    [
        (
            "3",
            UpdateError,
            "'of' in a query should be a list of name patterns of parameters, got '3'",
        ),
        (
            [3],
            UpdateError,
            r"'of' in a query should be a list of name patterns of parameters, got \[3\]",
        ),
        (["outptu"], ConfigError, "signature.of = 'outptu' matches no shared parameter"),
    ],
)
def test_parameters_that_are_not_there_are_refused(of: object, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        ask(handler_of(2, federation_of(FOUR)), replicates=2, of=of)


@pytest.mark.parametrize(
    ("replicates", "dim", "part_size", "parts"),
    [
        (0, 5, 0, "0 parts"),
        (25, 5, 0, "25 parts"),
        (2, -1, 0, "2 parts"),
        (3, 5, 9, "3 parts of size 9"),
        (2, 5, -1, "2 parts of size -1"),
    ],
)
def test_replicates_that_cannot_be_made_are_refused(
    replicates: int, dim: int, part_size: int, parts: str
):
    with pytest.raises(
        UpdateError,
        match=f"the query requests {parts} of 24 training examples, compared by {dim} numbers",
    ):
        ask(handler_of(2, federation_of(FOUR)), replicates=replicates, dim=dim, part_size=part_size)


def test_it_is_pulled_to_the_anchor_that_it_is_sent():
    federation = federation_of(FOUR)
    clients, _ = simulated(federation, perceptron())
    spec, models = LocalTraining(mu=0.5), torch.stack([MODEL, MODEL + 1])
    work = ClientWork(steps=Proximal(0.5))
    here = clients.train([2], models, [0], Round(2, LocalTraining(), 3), work, anchors=[1])
    there = ask(
        handler_of(2, federation),
        sent={"model": models[0], "anchor": models[1]},
        spec=wire.to_json(spec),
    )
    assert torch.equal(update_of(there), here.required_deltas[0])
    assert not torch.equal(
        update_of(ask(handler_of(2, federation), spec=wire.to_json(spec))), here.required_deltas[0]
    )


def test_it_evaluates_all_models_that_it_is_sent():
    federation = federation_of(FOUR)
    clients, _ = simulated(federation, perceptron())
    models = torch.stack([MODEL, -MODEL])
    here = clients.evaluate([1, 1], models, [0, 1], "validation")
    there = ask(
        handler_of(1, federation), "evaluate", {"0": models[0], "1": models[1]}, split="validation"
    )
    assert there.values["scores"] == here.scores[:, 0].tolist()
    assert there.values["losses"] == here.losses.tolist()
    assert there.values["examples"] == [10, 10]


def test_a_question_of_a_kind_that_it_does_not_know_is_refused():
    why = (
        r"forbids the query 'steal', which is of an unknown kind; "
        r".*client_app\(queries=.* known kinds are hello, initial, "
    )
    with pytest.raises(PolicyError, match=why):
        ask(handler_of(), "steal")
    why = r"the client's policy forbids the training code 'steal', which is not part of fedclade; "
    with pytest.raises(
        PolicyError, match=why + r'.* trainers="steal" in the client\'s node config'
    ):
        ask(handler_of(), rule='{"name": "steal"}')


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (
            {"layout": "0" * 32},
            "the query is about a model of structure 0{32}, and this client's model has structure [0-9a-f]{32}",
        ),
        (
            {"what": "initial", "models": 1},
            "requests initial models from the clients' shared secret, but this client has no secret",
        ),
        ({"round": "2"}, "'round' should be of type int, got '2'"),
        ({"sent": {}}, r"the message has no vector 'model', only \[\]"),
        (
            {"sent": {"model": MODEL[:-1]}},
            r"model 'model' has 364 bytes, expected 368 for shape \(92,\)",
        ),
        (
            {"sent": {"model": MODEL, "anchor": MODEL[:1]}},
            "model 'anchor' has 4 bytes, expected 368",
        ),
        ({"spec": "{"}, "'spec' in the message is not JSON"),
        (
            {"spec": '{"speed": 3}'},
            "the query requests local training that this client does not know: unknown key of .*'speed'",
        ),
        (
            {"spec": '{"epochs": "x"}'},
            "the query requests local training .* epochs .* should be a whole number or a number or left out, got 'x'",
        ),
        (
            {"spec": '{"optimizer": "adm"}'},
            "unknown optimizer in a query for local training: 'adm'; did you mean 'adam'",
        ),
        (
            {"spec": '{"optimizer": "tests.tiny:linear"}'},
            "unknown optimizer in a query for local training: 'tests.tiny:linear'",
        ),
        ({"spec": '{"optimizer": ["adam"]}'}, "unknown optimizer in a query for local training: "),
        (
            {"spec": '{"optimizer": "adam", "options": {"beta": 1}}'},
            "does not know: unknown key of the options of Adam",
        ),
        (
            {"spec": '{"steps": 1.5}'},
            "the query requests local training .* steps .* should be a whole number or left out, got 1.5",
        ),
        (
            {"spec": '{"lr": 1' + 400 * "0" + "}"},
            "the query requests local training .*: lr .* more than 64 bits",
        ),
        (
            {"replicates": 2, "dim": 2**40},
            "the query requests 2 parts of 24 training examples, compared by 1099511627776 numbers each",
        ),
        (
            {"rule": '{"name": "mixture", "alpha": 2.0}'},
            r"does not know: algorithm.alpha should be in \[0, 1\], got 2",
        ),
        (
            {"rule": '{"name": "mixture"}'},
            "does not know: local rule 'mixture' lacks a number: .* missing .* 'alpha'",
        ),
        ({"spec": '{"epochs": 0}'}, "local.epochs should be greater than 0, got 0"),
        (
            {"what": "evaluate", "split": "secrets"},
            "unknown data split 'secrets' in a query for scores; the server should request one of train, val",
        ),
        ({"what": "evaluate", "sent": {}}, "the query for scores contains no model"),
        (
            {"what": "evaluate", "sent": {"1": MODEL}},
            r"the message has no vector '0', only \['1'\]",
        ),
        ({"what": "subspaces", "vectors": "all"}, "'vectors' should be of type int, got 'all'"),
    ],
)
def test_what_it_cannot_answer_it_refuses(question: dict[str, Any], why: str):
    with pytest.raises((UpdateError, ConfigError), match=why):
        ask(handler_of(policy=OPEN), **question)


def test_training_that_diverges_is_said():
    with pytest.raises(UpdateError, match="entries of the update are NaN or infinite"):
        ask(handler_of(), spec=wire.to_json(LocalTraining(lr=1e30, epochs=5)))


def test_it_is_one_client():
    with pytest.raises(
        DataError,
        match="data_fn should return a federation of one client, got 4 clients; select one",
    ):
        ClientHandler(federation_of(FOUR), perceptron)
    with pytest.raises(ConfigError, match="unknown encoding 'zip'"):
        handler_of(encoding="zip")


def test_with_a_secret_all_vectors_travel_permuted():
    client, plain = handler_of(secret=SECRET), handler_of()
    permutation = Permutation(seed_of(SECRET), LAYOUT.size, LAYOUT.n_parameters)
    sent = update_of(ask(client, sent={"model": permutation.apply(MODEL)}))
    assert torch.equal(permutation.invert(sent), update_of(ask(plain)))
    scores = ask(client, "evaluate", {"0": permutation.apply(MODEL)}).values
    assert scores["scores"] == ask(plain, "evaluate", {"0": MODEL}).values["scores"]


def test_initial_models_are_the_secrets():
    found = [ask(handler_of(c, secret=SECRET), "initial", {}, models=2) for c in (0, 1)]
    assert found[0].vectors == found[1].vectors
    permutation = Permutation(seed_of(SECRET), LAYOUT.size, LAYOUT.n_parameters)
    for number, data in found[0].vectors.items():
        model = permutation.invert(wire.read_vector(data, (LAYOUT.size,), torch.float32, "it"))
        assert torch.equal(model, secret_model(perceptron, LAYOUT, seed_of(SECRET), int(number)))
    assert found[0].vector("0") != found[0].vector("1")


def test_a_secret_model_is_drawn_as_others_are_but_for_the_order():
    model = secret_model(perceptron, LAYOUT, seed := seed_of(SECRET))
    drawn = LAYOUT.flatten(perceptron(0))
    for slot in LAYOUT.parameters:
        mine, usual = model[slot.start : slot.stop], drawn[slot.start : slot.stop]
        assert float(mine.abs().max()) <= 1.5 * float(usual.abs().max())
    assert not torch.equal(model, secret_model(perceptron, LAYOUT, seed + 1))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            b"too short",
            "has 9 characters, expected at least 32; make one with: python -c 'import secrets",
        ),
        (b"\xff" * 40, "cannot read the file .* with the clients' secret: 'utf-8' codec"),
        (None, "cannot read the file .* with the clients' secret: .*No such file"),
    ],
)
def test_a_secret_that_is_none_is_refused(text: bytes | None, why: str, tmp_path: Path):
    path = tmp_path / "secret"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=why):
        read_secret(path)
    path.write_text(f"  {SECRET}\n")
    assert read_secret(path) == SECRET


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_what_an_encoding_loses_is_sent_later_even_by_another_process(
    encoding: str, tmp_path: Path
):
    """Two updates, decoded and added up, differ from the true sum by the last residual only."""
    exact = [update_of(ask(handler_of(), round=number)) for number in (1, 2)]
    sent = []
    for number in (1, 2):  # a process each: what one kept, the other reads
        answer = ask(handler_of(encoding=encoding, folder=tmp_path), round=number)
        assert len(answer.vector("update")) == encoded_bytes(
            LAYOUT.size, encoding, LAYOUT.n_parameters
        )
        assert answer.values["encoding"] == encoding
        sent.append(update_of(answer, encoding))
    assert len(list(tmp_path.glob("residual-*.safetensors"))) == 1
    forgetful = [update_of(ask(handler_of(encoding=encoding), round=n), encoding) for n in (1, 2)]
    assert torch.equal(sent[0], forgetful[0])
    assert not torch.equal(sent[1], forgetful[1])
    whole = sum(exact)
    step = float(exact[1].abs().max()) / (127 if encoding == "int8" else 2048)
    assert float((sum(sent) - whole).abs().max()) <= 0.51 * step * 1.1


def test_without_a_folder_residuals_last_as_long_as_the_process():
    client = handler_of(encoding="int8")
    first, second = (update_of(ask(client, round=1), "int8") for _ in range(2))
    assert not torch.equal(first, second)


def test_residuals_of_gradients_are_kept_apart(tmp_path: Path):
    client = handler_of(encoding="int8", folder=tmp_path, policy=OPEN)
    ask(client)
    ask(client, "gradients")
    ask(client, purpose="pretrain")
    assert len(list(tmp_path.glob("residual-*.safetensors"))) == 3


def test_what_a_server_calls_its_purposes_names_no_file(tmp_path: Path):
    """Nor do many purposes fill the disk."""
    (folder := tmp_path / "client").mkdir()
    client = handler_of(encoding="int8", folder=folder)
    for purpose in (
        "../escaped",
        "/tmp/escaped",
        "a\0b",
        1000 * "x",
        *map(str, range(MOST_RESIDUALS)),
    ):
        assert len(ask(client, purpose=purpose).vector("update")) > 0
    assert list(tmp_path.iterdir()) == [folder]
    names = [path.name for path in folder.glob("*.safetensors")]
    assert len(names) == MOST_RESIDUALS
    assert all(re.fullmatch(r"residual-[0-9a-f]{32}\.safetensors", name) for name in names)


CLIPPED = DifferentialPrivacy(clip_norm=0.01)
UNBOUNDED = Budget(epsilon=math.inf)


def test_a_private_client_needs_a_folder():
    with pytest.raises(
        ConfigError,
        match="a client with differential privacy needs a folder for its privacy ledger; set folder in its node",
    ):
        handler_of(privacy=CLIPPED)


def test_a_private_client_clips_and_withholds_its_loss(tmp_path: Path):
    answer = ask(handler_of(privacy=CLIPPED, budget=UNBOUNDED, folder=tmp_path))
    assert float(torch.linalg.vector_norm(update_of(answer))) == pytest.approx(0.01, rel=1e-5)
    assert "loss" not in answer.values
    read = read_update(answer, LAYOUT.size, LAYOUT.n_parameters, LAYOUT.dtype, 16, {"round": 2})
    assert read.loss is None


def test_a_client_with_a_budget_or_with_masks_reports_a_power_of_two_as_its_size(tmp_path: Path):
    closed = [
        handler_of(privacy=CLIPPED, budget=UNBOUNDED, folder=tmp_path),
        handler_of(policy=Policy(secure_aggregation=True, trust_server_keys=True)),
    ]
    for client in closed:
        assert Content.of(client.answer(Content({"what": "hello"}))).get("size", int) == 16
    assert ask(closed[0]).get("size", int) == 16
    assert Content.of(handler_of().answer(Content({"what": "hello"}))).get("size", int) == 24


@pytest.mark.parametrize(
    ("count", "registered", "fits"),
    [
        (24, 24, True),
        (25, 24, False),
        (23, 24, False),
        (16, 16, True),
        (31, 16, True),
        (32, 16, False),
        (1, 1, True),
    ],
)
def test_a_number_of_examples_fits_what_the_client_registered_with(
    count: int, registered: int, fits: bool
):
    assert fits_size(count, registered) == fits
    assert size_class(count) <= count < 2 * size_class(count)


def test_its_noise_is_its_own_and_never_the_same(tmp_path: Path):
    privacy = DifferentialPrivacy(clip_norm=0.01, noise_multiplier=1.0)
    client = handler_of(privacy=privacy, budget=UNBOUNDED, folder=tmp_path)
    first, second = update_of(ask(client)), update_of(ask(client))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("question", "what"),
    [
        ({"what": "evaluate", "split": "train", "sent": {"0": MODEL}}, "training losses"),
        ({"what": "subspaces", "vectors": 2, "per_label": True}, "subspaces of their data"),
        (
            {"what": "descriptors", "seed": 1, "components": 2, "per_label": True},
            "descriptors of their data",
        ),
    ],
)
def test_a_private_client_does_not_tell(question: dict[str, Any], what: str, tmp_path: Path):
    with pytest.raises(
        ConfigError, match=f"clients with differential privacy do not reveal {what}"
    ):
        ask(handler_of(privacy=CLIPPED, budget=UNBOUNDED, folder=tmp_path, policy=OPEN), **question)


def test_a_release_is_booked_before_the_update_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So that a crash on the way counts one too many, and never one too few."""
    privacy = DifferentialPrivacy(clip_norm=0.01, noise_multiplier=2.0)

    def crash(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    client = handler_of(privacy=privacy, budget=UNBOUNDED, folder=tmp_path)
    monkeypatch.setattr(client._residuals, "encoded", crash)
    with pytest.raises(KeyboardInterrupt):
        ask(client)
    (entry,) = json.loads((tmp_path / "privacy.json").read_text())["entries"]
    assert (entry["round"], entry["noise_multiplier"], entry["releases"]) == (2, 2.0, 1)


def test_beyond_its_budget_it_sends_nothing(tmp_path: Path):
    """Not even as another process, in another run."""
    privacy = DifferentialPrivacy(clip_norm=0.01, noise_multiplier=4.0)
    budget = Budget(epsilon=1.2 * privacy.epsilon(1), delta=privacy.delta)
    ask(handler_of(privacy=privacy, budget=budget, folder=tmp_path))
    with pytest.raises(
        PrivacyError, match="the privacy budget of this client allows no further update"
    ):
        ask(handler_of(privacy=privacy, budget=budget, folder=tmp_path))


def test_a_damaged_ledger_keeps_everything_back(tmp_path: Path):
    (tmp_path / "privacy.json").write_text("{")
    with pytest.raises(
        PrivacyError, match="the privacy budget of this client allows no further update"
    ):
        ask(handler_of(privacy=CLIPPED, budget=UNBOUNDED, folder=tmp_path))


def test_what_it_keeps_only_its_owner_reads(tmp_path: Path):
    before = os.umask(0o022)
    try:
        ask(handler_of(privacy=CLIPPED, budget=UNBOUNDED, encoding="int8", folder=tmp_path))
    finally:
        os.umask(before)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {"0o600"}
    assert {name.partition("-")[0] for name in modes} == {
        "privacy.json",
        ".privacy.json.lock",
        ".policy.json.lock",
        "policy.json",
        "residual",
    }


def test_answering_imports_nothing_that_a_server_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        ClientHandler, "_register", lambda self, content: imported("os:getcwd", "loss")()
    )
    with pytest.raises(ConfigError, match=r"loss 'os:getcwd' is not imported, because the server"):
        ask(handler_of(policy=OPEN), "hello")


def test_it_sends_how_far_its_own_model_is_from_the_anchor_where_it_shares_it():
    federation, anchor = federation_of(FOUR), MODEL + 0.5
    clients, _ = simulated(federation, perceptron())
    spec = replace(LOCAL, mu=0.1)
    work = ClientWork(
        start=FromStored(), steps=Proximal(0.1), store=LocalModel(), reply=DistanceToAnchor()
    )
    models = torch.stack([MODEL, anchor])
    here = clients.train([2], models, [0], Round(2, LOCAL, 3), work, anchors=[1])
    client, words = (
        handler_of(2, federation),
        {"own": True, "shares": True, "spec": wire.to_json(spec)},
    )
    there = ask(client, "train", {"model": MODEL, "anchor": anchor}, **words)
    assert torch.equal(update_of(there), here.required_deltas[0])
    again = ask(client, "train", {"anchor": anchor}, **words, round=3)  # from its own
    assert not torch.equal(update_of(again), update_of(there))
    assert (
        ask(
            client, "train", {"model": MODEL, "anchor": anchor}, **words | {"shares": False}
        ).vectors
        == {}
    )


@pytest.mark.parametrize("wins", [None, [3], [3, -1, 1], [3.0, 1, 0], [20, 5, 0], [0, 0, 0]])
def test_how_often_models_are_best_must_be_possible(wins: Any):
    with pytest.raises(UpdateError, match="how often each of 3 models is best"):
        read_wins(Content({"wins": wins}), 3, 24)
    assert read_wins(Content({"wins": [20, 4, 0]}), 3, 24) == [20, 4, 0]
