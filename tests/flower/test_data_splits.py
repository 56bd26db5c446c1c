"""Sums over parts of a client's data: how many it sends, and that no combination of them singles an example out."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from fedclade import Federation, LocalTraining, simulate
from fedclade.algorithms import PFedMe, ReplicatedCFL
from fedclade.algorithms.rcfl import method
from fedclade.channel.accounting import Budget
from fedclade.channel.privacy import DifferentialPrivacy
from fedclade.core import Interpolation, LocalRule, MetaLearning, MoreauEnvelope, Related, SplitPart
from fedclade.core.errors import PolicyError, UpdateError
from fedclade.flower import data_splits, wire
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.data_splits import DataSplit, digest_of_query, largest_shares
from fedclade.flower.policy import (
    EXAMPLES_AN_EQUATION,
    FORBIDS,
    MOST_EQUATIONS,
    Policy,
    Usage,
    squared_weights_of_envelope,
)
from fedclade.flower.wire import Content
from tests.flower.grids import federated, grid_of, handler_of, reasons
from tests.flower.test_client_handler import LAYOUT, MODEL, ask
from tests.tiny import federation_of, perceptron

ONE_STEP = wire.to_json(LocalTraining(batch_size=1000, lr=1.0))


def client_with(examples: int, **settings: Any) -> ClientHandler:
    return handler_of(0, federation_of([0], sizes=[examples]), **settings)


def parts(client: ClientHandler, replicates: int, **words: Any) -> torch.Tensor:
    """Return the updates of parts, ``[replicates, D]``, each of one step with all examples of the part."""
    reply = ask(client, replicates=replicates, **{"spec": ONE_STEP, **words})
    update = np.frombuffer(reply.vector("update"), "<f4")
    return torch.tensor(update[LAYOUT.size :].reshape(replicates, -1))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether updates are of the same parts; their sums are in the order of each round."""
    return torch.allclose(one, other, rtol=0, atol=1e-5)


def usage_in(folder: Path) -> Usage:
    stored = json.loads((folder / "policy.json").read_text())
    return Usage(**{name: value for name, value in stored.items() if name != "format"})


def test_queries_for_new_parts_get_the_same_parts_again_once_equations_are_used_up(tmp_path: Path):
    """A quarter as many queries for eight replicates as there are examples would be enough to solve for all."""
    client = client_with(88, folder=tmp_path)
    first = parts(client, 8, round=1)
    for number in (2, 3, 22):
        assert same(parts(client, 8, round=number), first)
    assert usage_in(tmp_path).partings == 7 <= 88 // EXAMPLES_AN_EQUATION


def test_the_first_splits_are_those_of_a_simulation():
    federation = federation_of([0], sizes=[80])
    client = handler_of(0, federation)
    halves = [parts(client, 2, round=number) for number in (1, 2, 3)]
    alone = [parts(handler_of(0, federation), 2, round=number) for number in (1, 2, 3)]
    assert all(torch.equal(one, other) for one, other in zip(halves, alone, strict=True))
    assert not same(halves[0], halves[1])


def test_two_sizes_of_parts_that_differ_in_one_example_are_refused():
    client = client_with(40)
    parts(client, 2, part_size=10)
    with pytest.raises(
        PolicyError,
        match=r"forbids a further split of its examples into parts, since in a combination of the sums over parts "
        r"one example would have a share of 1.00, so that the server could isolate it; the policy allows at most 0.25 "
        r"\(min-part in its node config\)",
    ):
        parts(client, 2, part_size=11)
    parts(client, 2, part_size=10)


def test_halves_that_differ_in_a_pair_of_examples_are_not_both_sent():
    """The server chooses the seed, and can look for two that suit it."""
    key, examples = federation_of([0], sizes=[20]).keys[0], 20
    known: dict[frozenset[int], int] = {}
    pair: tuple[int, int] | None = None
    for seed in range(3000):
        first = frozenset(DataSplit(examples, seed, 1, 2, 0).parts(key)[0].tolist())
        near = next((known[other] for other in known if len(first - other) == 1), None)
        if near is not None:
            pair = seed, near
            break
        known[first] = seed
    assert pair is not None
    client = client_with(examples)
    assert same(parts(client, 2, round=1, seed=pair[0]), parts(client, 2, round=1, seed=pair[1]))


def test_equations_are_counted_and_limited_by_the_policy(tmp_path: Path):
    client = client_with(300, folder=tmp_path, policy=Policy(max_partings=6))
    parts(client, 4, part_size=70)  # 20 examples are in no part: one more equation
    assert usage_in(tmp_path).partings == 4
    parts(client, 2, round=1)
    parts(client, 2, round=2)
    assert usage_in(tmp_path).partings == 6
    parts(client, 2, round=3)  # as in round 1
    assert usage_in(tmp_path).partings == 6
    why = (
        r"forbids 8 equations from sums over parts of its examples in all; it "
        r"allows at most 6 .max-partings in its node config"
    )
    with pytest.raises(PolicyError, match=why):
        parts(client, 3, round=3)
    with pytest.raises(
        PolicyError, match=r"forbids 1 equations from sums over parts .* at most 0 .max-partings"
    ):
        parts(client_with(300, policy=Policy(max_partings=0)), 2)


def test_of_many_examples_no_more_than_a_fixed_number_of_equations_is_had():
    Policy().check_usage(Usage(partings=MOST_EQUATIONS), 10**6)
    with pytest.raises(
        PolicyError, match=rf"forbids {MOST_EQUATIONS + 1} equations .* at most {MOST_EQUATIONS} "
    ):
        Policy().check_usage(Usage(partings=MOST_EQUATIONS + 1), 10**6)


def test_a_few_examples_that_equal_parts_leave_over_do_not_keep_a_client_out():
    client = client_with(41)
    parts(client, 4, part_size=10)
    parts(client, 2)
    # another single example would be left over
    with pytest.raises(PolicyError, match=r"a share of"):
        parts(client, 2, part_size=20, seed=1)


def test_many_examples_that_equal_parts_leave_over_are_checked_as_others_are():
    """Else a server would ask for small parts first, and be free with all others."""
    examples, key = 40, federation_of([0], sizes=[40]).keys[0]
    first = DataSplit(examples, 0, 0, 2, 10)
    left_over = {*range(examples)}.difference(*(part.tolist() for part in first.parts(key)))
    client = client_with(examples)
    parts(client, 2, part_size=10)
    alone = next(
        seed
        for seed in range(1000)
        if {*range(examples)}.difference(
            *(p.tolist() for p in DataSplit(examples, seed, 0, 3, 13).parts(key))
        )
        <= left_over
    )
    with pytest.raises(
        PolicyError,
        match=r"a share of 1.00, so that .* isolate it; the policy allows at most 0.25 ",
    ):
        parts(client, 3, part_size=13, seed=alone)


@pytest.mark.parametrize("lasting", ["folder", "state"])
def test_splits_are_recorded_over_all_processes(lasting: str, tmp_path: Path):
    settings: dict[str, Any] = {"folder": tmp_path} if lasting == "folder" else {}
    state = None if lasting == "folder" else RecordDict()
    first = parts(client_with(88, **settings), 8, round=1, state=state)
    assert same(parts(client_with(88, **settings), 8, round=2, state=state), first)
    if lasting == "folder":
        assert stat.S_IMODE((tmp_path / "splits.json").stat().st_mode) == 0o600


def test_splits_of_two_runs_are_known_together_without_a_folder():
    client, one_run, other_run = client_with(40), RecordDict(), RecordDict()
    parts(client, 2, part_size=10, state=one_run)
    parts(client, 2, round=5, state=other_run)
    for state in (one_run, other_run, RecordDict()):
        with pytest.raises(PolicyError, match=r"a share of 1.00"):
            parts(client, 2, part_size=11, state=state)


@pytest.mark.parametrize("lasting", ["folder", "state", "memory"])
def test_a_repeated_query_for_parts_has_the_same_reply_and_counts_once(
    lasting: str, tmp_path: Path
):
    settings: dict[str, Any] = {"folder": tmp_path} if lasting == "folder" else {}
    state = RecordDict() if lasting == "state" else None
    client = client_with(40, policy=Policy(max_releases=4), **settings)
    first = parts(client, 4, part_size=10, round=1, state=state)
    for query in range(1, 4):  # as rcfl asks for them in its checks
        if lasting != "memory":
            client = client_with(40, policy=Policy(max_releases=4), **settings)
        assert torch.equal(parts(client, 4, part_size=10, round=1, query=query, state=state), first)
    with pytest.raises(
        PolicyError, match=r"forbids 8 updates in all; it allows at most 4 .max-releases"
    ):
        parts(client, 4, part_size=10, round=1, state=state, sent={"model": MODEL + 1})
    with pytest.raises(
        PolicyError, match=r"forbids 8 updates in all; it allows at most 4 .max-releases"
    ):
        # a refusal is not for free
        parts(client, 4, part_size=10, round=1, state=state, sent={"model": MODEL + 1})


def test_only_the_latest_queries_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_splits, "MOST_REPEATS", 2)
    client = client_with(40, folder=tmp_path)
    for purpose in ("first", "second", "third"):
        ask(client, replicates=2, round=1, purpose=purpose, spec=ONE_STEP)
    assert len(json.loads((tmp_path / "splits.json").read_text())["answered"]) == 2
    assert usage_in(tmp_path).releases == 6
    ask(client, replicates=2, round=1, purpose="third", spec=ONE_STEP)
    assert usage_in(tmp_path).releases == 6
    ask(client, replicates=2, round=1, purpose="first", spec=ONE_STEP)
    assert usage_in(tmp_path).releases == 8


def test_a_repeated_query_counts_where_its_reply_is_another_one(tmp_path: Path):
    """Noise is drawn again, and a client's own optimizer state changes the update."""
    privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)
    private = client_with(
        40, folder=tmp_path / "private", privacy=privacy, budget=Budget(epsilon=1e6)
    )
    stateful = client_with(40, folder=tmp_path / "stateful")
    spec = wire.to_json(LocalTraining(batch_size=1000, momentum=0.9, keep_state=True))
    for client, name, words in ((private, "private", {}), (stateful, "stateful", {"spec": spec})):
        (tmp_path / name).mkdir(exist_ok=True)
        for times in (1, 2):
            parts(client, 2, round=1, **words)
            assert usage_in(tmp_path / name).releases == 2 * times


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 2}',
        '{"format": 1, "splits": [{"seed": 1}], "answered": []}',
        '{"format": 1, "splits": {}, "answered": []}',
        '{"format": 1, "splits": [], "answered": "abc"}',
        '{"format": 1, "splits": [], "answered": [1]}',
        "\xff",
    ],
)
def test_a_damaged_record_of_splits_keeps_parts_back(text: str, tmp_path: Path):
    (tmp_path / "splits.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(
        PolicyError,
        match=r"splits.json, the record of how this client has split its examples, is da",
    ):
        parts(client_with(40, folder=tmp_path), 2)


def test_a_split_with_a_negative_number_is_damage(tmp_path: Path):
    split = {"examples": 40, "seed": -1, "number": 0, "replicates": 2, "part_size": 0}
    text = json.dumps({"format": 1, "splits": [split], "answered": []})
    (tmp_path / "splits.json").write_text(text)
    with pytest.raises(
        PolicyError,
        match=r"is damaged, .* \(ValueError: the values of a split in a client's record .* whole .*'seed': -1",
    ):
        parts(client_with(40, folder=tmp_path), 2)


def test_steps_take_as_many_examples_as_a_part_must_have():
    """Otherwise a server would ask for one step with one example, and need no parts."""
    client = client_with(40)
    for spec in (LocalTraining(steps=1, batch_size=9), LocalTraining(steps=9, batch_size=1)):
        with pytest.raises(
            PolicyError,
            match=r"forbids an update from 9 training examples, .* at least 10 \(min-part",
        ):
            ask(client, spec=wire.to_json(spec))
    ask(client, spec=wire.to_json(LocalTraining(steps=1, batch_size=10)))
    # all that there are
    ask(client_with(6), spec=wire.to_json(LocalTraining(steps=2, batch_size=3)))


def test_what_a_client_keeps_takes_as_many_since_it_may_be_shared_later():
    client = client_with(40)
    with pytest.raises(PolicyError, match="forbids an update from 1 training examples"):
        ask(client, own=True, spec=wire.to_json(LocalTraining(steps=1, batch_size=1)))


def test_the_size_of_a_part_comes_with_several_parts():
    """The limits would be those of the part, and the training that of all examples."""
    with pytest.raises(
        UpdateError, match="the query requests 1 parts of size 1 of 40 training examples"
    ):
        ask(
            client_with(40),
            replicates=1,
            part_size=1,
            spec=wire.to_json(LocalTraining(steps=1, batch_size=1)),
        )


def test_momentum_is_not_dampened():
    """With dampening = 1 the first batch alone would make the update."""
    spec = {"epochs": 1, "batch_size": 1, "momentum": 0.9, "options": {"dampening": 1.0}}
    with pytest.raises(UpdateError, match="the query requests momentum with dampening"):
        ask(client_with(40), spec=json.dumps(spec))


ONE_BY_ONE = LocalTraining(batch_size=1, lr=0.1)


@pytest.mark.parametrize(
    "spec",
    [
        replace(ONE_BY_ONE, weight_decay=10.0),
        replace(ONE_BY_ONE, weight_decay=9.0),
        replace(ONE_BY_ONE, weight_decay=1e4),
        replace(ONE_BY_ONE, mu=10.0),
        replace(ONE_BY_ONE, weight_decay=5.0, mu=5.0),
        replace(ONE_BY_ONE, weight_decay=2.0, momentum=0.5),
        replace(ONE_BY_ONE, lr=20.0, lr_decay=0.005, weight_decay=10.0),
        replace(ONE_BY_ONE, weight_decay=10.0, batch_size=13),
        replace(ONE_BY_ONE, optimizer="adagrad", options={"lr_decay": 1e9}),
        replace(ONE_BY_ONE, optimizer="asgd", options={"alpha": 1e3, "lambd": 1.0}),
        replace(ONE_BY_ONE, optimizer="asgd", lr=1e4),
        replace(ONE_BY_ONE, optimizer="adafactor", lr=1e3),
        replace(ONE_BY_ONE, optimizer="rprop", options={"etas": (0.5, 1e3)}),
        replace(ONE_BY_ONE, optimizer="adam", weight_decay=1e-4),
        replace(ONE_BY_ONE, optimizer="adam", mu=1e-4),
        replace(ONE_BY_ONE, optimizer="adam", options={"eps": 1e3}),
        replace(ONE_BY_ONE, optimizer="adamw", mu=1e-4),
        replace(ONE_BY_ONE, optimizer="adamw", weight_decay=10.0),
        replace(ONE_BY_ONE, optimizer="rmsprop", weight_decay=1e-4),
        replace(ONE_BY_ONE, optimizer="adagrad", options={"initial_accumulator_value": 1e6}),
        replace(ONE_BY_ONE, optimizer="adagrad", mu=0.1),
    ],
)
def test_steps_that_undo_those_before_are_refused(spec: LocalTraining):
    """With weight_decay = 1/lr the update is the gradient of the last batch, here of one example."""
    assert 40 % 13 == 1
    with pytest.raises(
        PolicyError,
        match=r"forbids local training in which later steps undo earlier steps, .* "
        r"only about \d\.?\d* training examples, .* at least 10 "
        r"\(min-part in its node config\); lower local.weight_decay",
    ):
        ask(client_with(40), spec=wire.to_json(spec))


@pytest.mark.parametrize(
    "spec",
    [
        replace(ONE_BY_ONE, weight_decay=0.1),
        replace(ONE_BY_ONE, mu=0.1, momentum=0.9),
        replace(ONE_BY_ONE, momentum=0.9),
        replace(ONE_BY_ONE, weight_decay=10.0, batch_size=10),
        replace(ONE_BY_ONE, mu=10.0, batch_size=40),
        replace(ONE_BY_ONE, optimizer="adagrad"),
        replace(ONE_BY_ONE, optimizer="adam"),
        replace(ONE_BY_ONE, optimizer="adamw", lr=0.001),
        replace(ONE_BY_ONE, optimizer="adam", weight_decay=1e-4, batch_size=20),
        LocalTraining(batch_size=39, optimizer="adam", weight_decay=1e-4, smallest_batch=10),
    ],
)
def test_weight_decay_and_proximal_terms_of_ordinary_size_are_allowed(spec: LocalTraining):
    assert ask(client_with(40), spec=wire.to_json(spec))


def test_a_little_weight_decay_is_allowed_where_there_are_only_just_enough_examples():
    assert ask(
        client_with(10), spec=wire.to_json(LocalTraining(batch_size=5, lr=0.1, weight_decay=1e-3))
    )


ENVELOPE = MoreauEnvelope(lam=5e4, steps=1, lr=1e-5)
META = MetaLearning(alpha=0.1, hessian=False, delta=1e-3)


@pytest.mark.parametrize(
    ("rule", "spec"),
    [
        (ENVELOPE, replace(ONE_BY_ONE, lr=31 / 5e4)),
        (replace(ENVELOPE, lr=1.5 / 5e4), replace(ONE_BY_ONE, lr=1.5 / 5e4, momentum=0.9)),
        (replace(ENVELOPE, lr=3 / 5e4), replace(ONE_BY_ONE, lr=0.5 / 5e4)),
        (ENVELOPE, replace(ONE_BY_ONE, lr=0.5 / 5e4, weight_decay=2e5)),
        (replace(META, alpha=3e4), replace(ONE_BY_ONE, lr=1e-3, weight_decay=1.0)),
        (replace(META, alpha=3e2, hessian=True), replace(ONE_BY_ONE, lr=1e-3, weight_decay=1.0)),
        (replace(META, alpha=0.0), replace(ONE_BY_ONE, weight_decay=10.0)),
    ],
)
def test_rules_whose_steps_undo_or_outweigh_those_before_are_refused(
    rule: LocalRule, spec: LocalTraining
):
    """The server chooses their numbers, too; one batch of one example would make the update."""
    with pytest.raises(
        PolicyError,
        match=r"forbids local training in which later steps undo earlier steps, .* only about \d\.?\d* training",
    ):
        ask(client_with(40), spec=wire.to_json(spec), rule=json.dumps(rule.described()))


@pytest.mark.parametrize(
    ("rule", "spec"),
    [
        (PFedMe().rule, replace(ONE_BY_ONE, lr=0.005)),
        (PFedMe().rule, LocalTraining(batch_size=5, lr=0.05)),
        (META, replace(ONE_BY_ONE, weight_decay=0.01)),
        (Interpolation(alpha=0.5), replace(ONE_BY_ONE, weight_decay=0.01)),
    ],
)
def test_rules_of_ordinary_numbers_are_allowed(rule: LocalRule, spec: LocalTraining):
    assert ask(client_with(40), spec=wire.to_json(spec), rule=json.dumps(rule.described()))
    assert ask(client_with(10), spec=wire.to_json(spec), rule=json.dumps(rule.described()))


def test_the_squared_weights_of_pfedme_are_those_of_its_steps():
    """Of a loss whose gradient is another unit vector in each step, the model has the weights as its entries."""
    rule, lr, decay, momentum = MoreauEnvelope(lam=3.0, steps=2, lr=0.2), 0.25, 0.3, 0.5
    w, theta, velocity = np.zeros((6, 2)), np.zeros((6, 2)), np.zeros((6, 2))
    for step in range(6):
        for inner in range(rule.steps):
            gradient = np.zeros((6, 2))
            gradient[step, inner] = 1.0
            theta = theta - rule.lr * (gradient + decay * theta + rule.lam * (theta - w))
        velocity = momentum * velocity + rule.lam * (w - theta)
        w = w - lr * velocity
    spec = LocalTraining(steps=6, lr=lr, momentum=momentum, weight_decay=decay)
    found = squared_weights_of_envelope(rule, spec, 1, 6)
    np.testing.assert_allclose(np.array(found[::-1]) * rule.lr**2, (w**2).sum(1), rtol=1e-12)


@pytest.mark.parametrize("sizes", [(21, 2), (31, 3)])
def test_every_part_is_checked_where_parts_are_unequal(sizes: tuple[int, int]):
    """The larger part ends with a batch of one example, the smaller one with a full batch."""
    examples, replicates = sizes
    spec = LocalTraining(batch_size=10, lr=0.1, weight_decay=10.0)
    with pytest.raises(PolicyError, match="on only about 1 training examples"):
        ask(client_with(examples), spec=wire.to_json(spec), replicates=replicates)
    assert ask(client_with(10 * replicates), spec=wire.to_json(spec), replicates=replicates)


def test_queries_whose_vectors_hold_the_same_bytes_in_other_places_are_different():
    first = Content({"what": "train"}, {"a": b"q 3 xyz", "b": b""})
    second = Content({"what": "train"}, {"a": b"q 3 xy", "b": b"z"})
    assert digest_of_query(first) != digest_of_query(second)
    renumbered = Content({"what": "train", "query": 2}, first.vectors)
    assert digest_of_query(first) == digest_of_query(renumbered)


def test_a_share_is_the_largest_of_all_combinations():
    split, examples = DataSplit(12, 0, 1, 3, 0), 12
    shares = largest_shares([split], 5, examples)
    np.testing.assert_allclose(shares, 1 / 4)  # a part by itself
    together = largest_shares([split, DataSplit(12, 1, 1, 2, 0)], 5, examples)
    columns = np.zeros((examples, 5))
    for k, part in enumerate([*split.parts(5), *DataSplit(12, 1, 1, 2, 0).parts(5)]):
        columns[part, k] = 1
    draw = np.random.default_rng(0)
    weights = columns @ draw.normal(size=(5, 20_000))
    found = (weights**2 / (weights**2).sum(0)).max(1)
    assert np.all(found <= together + 1e-9)
    assert np.all(found > 0.9 * together)


def test_parts_of_an_earlier_round_are_those_of_its_seed_and_number():
    early = SplitPart(0, 2).of_client(20, key=1, seed=7, number=3)
    late = SplitPart(0, 2, parts_from=(7, 3)).of_client(20, key=1, seed=8, number=9)
    assert np.array_equal(late, early)
    early = SplitPart(0, 2, 4).of_client(20, key=1, seed=7, number=1)
    late = SplitPart(0, 2, 4, parts_from=(7, 0)).of_client(20, key=1, seed=8, number=9)
    assert np.array_equal(late, early)


@pytest.mark.parametrize(
    ("clients", "rounds", "check_every", "examples"),
    [
        (4, 10, 1, 40),
        pytest.param(4, 20, 1, 80, id="four splits in later checks"),
        pytest.param(12, 100, 2, 40, marks=pytest.mark.slow),
    ],
)
def test_rcfl_does_not_end_with_few_examples_a_client(
    clients: int, rounds: int, check_every: int, examples: int, monkeypatch: pytest.MonkeyPatch
):
    """Every other check asks for new splits, which a client cannot make again and again."""
    monkeypatch.setattr(method, "FEW_CLIENTS", 4)  # from which on there are checks by halves
    sizes = [examples] * clients
    federation = federation_of([0, 1] * (clients // 2), sizes=sizes, validation=1, test=2)
    algorithm = ReplicatedCFL(check_every=check_every)
    settings: dict[str, Any] = {
        "local": LocalTraining(batch_size=40, lr=0.5),
        "evaluate_every": rounds,
    }
    settings["rounds"] = rounds
    there = federated(grid_of(federation), algorithm, **settings)
    here = simulate(algorithm, perceptron(), federation, engine="loop", device="cpu", **settings)
    assert reasons(there) == {}
    assert len(there.metric_rows) == rounds
    assert [leaf.members for leaf in there.tree.leaves] == [
        leaf.members for leaf in here.tree.leaves
    ]
    assert len(there.tree.leaves) == 2
    assert FORBIDS not in str(there.events)
    if examples > 40:
        assert max(event.get("tests", 0) for event in there.events) > 3, "none was by an e-value"


def grouped(sizes: list[int], of: int, few: dict[int, int] | None = None) -> Federation:
    """Return clients whose training examples form groups of equal size; ``few`` has other sizes."""
    federation = federation_of([0] * len(sizes), sizes=sizes)
    groups = np.arange(len(federation.pool.x))
    for client in federation.clients:
        each = (few or {}).get(client.id, of)
        groups[client.train] = 1000 * client.id + np.arange(len(client.train)) // each
    return replace(federation, pool=replace(federation.pool, related=groups))


def test_parts_over_a_network_are_the_whole_groups_of_a_simulation():
    federation = grouped([80] * 6, 5)
    algorithm = ReplicatedCFL(check_every=4)
    settings: dict[str, Any] = {"rounds": 4, "local": LocalTraining(batch_size=10, lr=0.1)}
    there = federated(grid_of(federation), algorithm, **settings)
    here = simulate(algorithm, perceptron(), federation, engine="loop", device="cpu", **settings)
    for ours, theirs in zip(here.tree.nodes, there.tree.nodes, strict=True):
        torch.testing.assert_close(theirs.params, ours.params, rtol=0, atol=1e-6)
    plain = federated(grid_of(federation_of([0] * 6, sizes=[80] * 6)), algorithm, **settings)
    assert not torch.allclose(plain.tree.nodes[0].params, there.tree.nodes[0].params, atol=1e-4)


def test_a_client_with_few_groups_refuses_updates_from_parts():
    federation = grouped([80], 5, {0: 12})
    client = handler_of(0, federation)
    with pytest.raises(
        PolicyError,
        match=r"forbids updates from 2 parts of its examples, since they form fewer than 8 groups .* \('groups'",
    ):
        parts(client, 2)
    parts(handler_of(0, grouped([80], 5, {0: 10})), 2)


def test_a_part_of_whole_groups_has_enough_different_examples():
    """Eight groups, of which all except one have a single example, and parts of one group each."""
    federation = grouped([88], 1)
    related = federation.pool.related
    assert related is not None
    related[federation.clients[0].train[:81]] = 0
    client = handler_of(0, federation)
    with pytest.raises(
        PolicyError,
        match=r"since a part of whole groups has fewer than 10 different examples \(min-part in its node config\)",
    ):
        parts(client, 4, part_size=20)


def test_shares_and_equations_are_those_of_whole_groups(tmp_path: Path):
    related = Related(np.arange(24) // 3)  # eight groups of three examples
    split = DataSplit(24, 0, 0, 3, 8)
    owners = [set((part // 3).tolist()) for part in split.parts(5, related)]
    assert not owners[0] & owners[1] | owners[0] & owners[2] | owners[1] & owners[2]
    assert [len(groups) for groups in owners] == [2, 2, 2]
    assert split.remainder == 0
    assert split.count_left_out(5, related) == 6  # two groups
    assert split.count_left_out(5) == 0
    shares = largest_shares([split], 5, 24, related)
    columns = np.ones((24, 4))
    for k, part in enumerate(split.parts(5, related)):
        columns[:, k] = np.bincount(part, minlength=24)  # two of six examples are repeated
        assert sorted(columns[:, k])[-7:] == [0, 1, 1, 1, 1, 2, 2]
    weights = columns @ np.random.default_rng(0).normal(size=(4, 50_000))
    found = (weights**2 / (weights**2).sum(0)).max(1)
    assert np.all(found <= shares + 1e-9)
    assert np.all(found > 0.9 * shares)
    federation = grouped([80], 5)
    parts(handler_of(0, federation, folder=tmp_path), 2, part_size=40)
    assert usage_in(tmp_path).partings == 2, "examples may be left out or repeated"
