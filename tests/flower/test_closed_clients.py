"""What leaves a client with a privacy budget or secure aggregation in clear: what its policy names, and no more."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedclade import (
    ConfigError,
    DifferentialPrivacy,
    EarlyStopping,
    ExamplePrivacy,
    LocalTraining,
    Signature,
    Task,
    UpdateError,
)
from fedclade.algorithms import PACFL, Local
from fedclade.channel import Budget, Channel, Ledger, noisy_steps
from fedclade.channel.example_privacy import StepLedger
from fedclade.core import (
    ClientWork,
    DataSpec,
    FedcladeError,
    LocalData,
    LocalStore,
    Models,
    PolicyError,
    PrivacyError,
    Round,
    RowQuery,
    SplitPart,
    Splits,
    TrainQuery,
)
from fedclade.flower import wire
from fedclade.flower.client_handler import ClientHandler, score_noise_of
from fedclade.flower.kinds import KINDS, kind_of_rows
from fedclade.flower.policy import FORBIDS, MOST_CLOSED_SCORES, NotDisclosedError, Policy
from fedclade.flower.private_replies import BUDGET_SPENT, FAILED, FORBIDDEN
from fedclade.flower.secure.member import sent_in_clear
from fedclade.flower.sketch_log import FILE as SKETCHES
from fedclade.flower.wire import Content
from fedclade.report.page import RunView, page_html, run_page
from fedclade.runs import Run
from tests.flower.grids import (
    CFL_OF_TWO,
    FOUR,
    LOCAL,
    Spoilt,
    federated,
    grid_of,
    handler_of,
    housed,
    network_of,
    node_of,
    reasons,
)
from tests.flower.test_client_handler import LAYOUT, MODEL, ask
from tests.tiny import federation_of, task_federation

WHOLE = DifferentialPrivacy(clip_norm=0.5, noise_multiplier=2.0)
EXAMPLE = ExamplePrivacy(clip_norm=0.5, noise_multiplier=2.0)
SECURE = Policy(secure_aggregation=True, trust_server_keys=True)
SCORES = replace(SECURE, disclose=("scores",))
SIX = (0, 1, 0, 1, 0, 1)


def private_client(
    folder: Path,
    policy: Policy | None = None,
    level: str = "client",
    epsilon: float = 8.0,
    **more: Any,
):
    privacy = WHOLE if level == "client" else EXAMPLE
    budget = Budget(epsilon=epsilon, level=level)
    return handler_of(privacy=privacy, budget=budget, folder=folder, policy=policy, **more)


def score(client: ClientHandler, models: int = 1, **words: Any) -> Content:
    return ask(client, "evaluate", {str(k): MODEL for k in range(models)}, **words)


def secure_run(
    algorithm: Any, config: Mapping[str, Any], home: Path | None = None, **settings: Any
) -> Run:
    node_config = {
        "secure-aggregation": True,
        "trust-server-keys": True,
        "min-honest": 2,
        "max-colluders": 0,
        **config,
    }
    grid = grid_of(federation_of(SIX), config=node_config)
    if home is not None:
        housed(grid, home / "clients")
    network = network_of(
        grid, secure_aggregation=True, secure_norm=10.0, secure_fewest=2, secure_colluders=0
    )
    return federated(grid, algorithm, network=network, **{"rounds": 2, **settings})


# Scores


def test_a_client_with_secure_aggregation_scores_no_model_unless_its_policy_says_so():
    why = rf'{FORBIDS} the query .evaluate.: a client with secure-aggregation .* set disclose="scores"'
    with pytest.raises(NotDisclosedError, match=why):
        score(handler_of(policy=SECURE))
    assert score(handler_of()).values["losses"]


def test_a_client_with_a_budget_scores_no_model_unless_its_policy_says_so(tmp_path: Path):
    with pytest.raises(
        NotDisclosedError,
        match=r'a client with a privacy budget discloses .* set disclose="scores"',
    ):
        score(private_client(tmp_path))
    assert not (tmp_path / "privacy.json").exists()


@pytest.mark.parametrize(
    "words", [{"split": "train"}, {"compares": True}], ids=["training data", "comparison"]
)
def test_not_even_then_it_scores_training_data_or_compares_models(words: dict[str, Any]):
    with pytest.raises(
        NotDisclosedError, match=f"{FORBIDS} (scores on training data|counts of the examples)"
    ):
        score(handler_of(policy=SCORES), **words)


def test_a_score_is_one_number_of_two_digits_and_counts(tmp_path: Path):
    exact = score(handler_of()).values["scores"]
    task = Task(metrics=["accuracy", "f1"])
    reply = score(handler_of(policy=SCORES, folder=tmp_path, task=task), models=3)
    assert set(reply.values) == {"scores"}
    assert reply.values["scores"] == [round(exact[0], 2)] * 3
    assert json.loads((tmp_path / "policy.json").read_text())["evaluations"] == 3


def test_a_score_without_bounds_has_two_digits():
    federation = task_federation("regression", FOUR)
    made = lambda seed=0: torch.nn.Linear(federation.pool.x.shape[1], 1)  # noqa: E731
    client = ClientHandler(federation.alone(0), made, number=0, policy=SCORES)
    values = {"what": "evaluate", "split": "test", "own": False, "compares": False, "run": "r"}
    model = wire.raw_vector(client._layout.flatten(made()))
    content = Content.of(
        wire.record({**values, "layout": wire.layout_digest(client._layout)}, {"0": model})
    )
    (told,) = Content.of(client.answer(content)).values["scores"]
    assert float(f"{told:.2g}") == told


def test_closed_clients_score_few_models_by_default():
    client = handler_of(policy=SCORES)
    for _ in range(MOST_CLOSED_SCORES // 50):
        score(client, models=50)
    with pytest.raises(
        PolicyError,
        match=r"forbids 101 scored models in all; it allows at most 100 .max-evaluations",
    ):
        score(client)
    more = handler_of(policy=replace(SCORES, max_evaluations=101))
    score(more, models=60)
    score(more, models=41)


@pytest.mark.parametrize("level", ["client", "example"])
def test_scores_of_a_private_client_are_noisy_and_booked_before_they_leave(
    level: str, tmp_path: Path
):
    policy = Policy(disclose=("scores",), max_evaluations=40, scores_epsilon=0.5)
    client = private_client(tmp_path, policy, level, task=Task(metrics=["accuracy", "f1"]))
    first, second = (score(client, models=20).values["scores"] for _ in range(2))
    assert [first, second] != [first] * 2
    assert all(0 <= value <= 1 and round(value, 2) == value for value in (*first, *second))
    if level == "client":
        ledger: Any = Ledger(tmp_path / "privacy.json")
        (entry,) = ledger.entries()
        assert (entry.run, entry.releases) == ("scores", 40)
    else:
        ledger = StepLedger(tmp_path / "example-privacy.json")
        (entry,) = ledger.entries()
        assert (entry.run, entry.steps, entry.rate) == ("scores", 40, 1.0)
    assert ledger.spent(1e-5) == pytest.approx(0.5, rel=0.01)


def test_the_noise_of_scores_is_that_of_their_sensitivity(tmp_path: Path):
    whole = score_noise_of(Budget(epsilon=1.0), tmp_path, most=9, epsilon=0.5)
    single = score_noise_of(
        Budget(epsilon=1.0, level="example"), tmp_path, most=9, epsilon=0.5, examples=50
    )
    assert single.deviation == pytest.approx(whole.deviation / 50)
    assert score_noise_of(Budget(epsilon=5.0), tmp_path, most=9).deviation == pytest.approx(
        whole.deviation
    )
    assert (
        score_noise_of(Budget(epsilon=math.inf), tmp_path, most=9, epsilon=math.inf).deviation
        == 0.0
    )


@pytest.mark.parametrize(
    ("metric", "is_a_mean"), [("accuracy", True), ("balanced_accuracy", False)]
)
def test_one_example_moves_a_mean_alone_by_its_share(metric: str, is_a_mean: bool, tmp_path: Path):
    policy = Policy(disclose=("scores",), max_evaluations=9, scores_epsilon=0.5)
    client = private_client(tmp_path, policy, level="example", task=Task(metrics=[metric]))
    scores = client._closed_scores(Budget(epsilon=8.0, level="example"))
    assert scores is not None
    assert scores.noise is not None
    whole = score_noise_of(Budget(epsilon=1.0), tmp_path, most=9, epsilon=0.5)
    examples = client._fewest_scored() if is_a_mean else 1
    assert scores.noise.deviation == pytest.approx(whole.deviation / examples)


def test_scores_that_the_budget_does_not_allow_stay(tmp_path: Path):
    client = private_client(
        tmp_path, Policy(disclose=("scores",), scores_epsilon=9.0, max_evaluations=1), epsilon=1.0
    )
    with pytest.raises(PrivacyError, match=BUDGET_SPENT):
        score(client)


def test_what_cannot_be_scored_is_noise_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    client = private_client(tmp_path, Policy(disclose=("scores",)), level="example")

    def fail(query: Any) -> Any:
        raise RuntimeError("no test examples")

    monkeypatch.setattr(client._trainer.workers, "handle_evaluation", fail)
    reply = score(client)
    assert len(reply.values["scores"]) == 1
    assert "evaluation failed; the reported scores consist of noise only" in caplog.text


def test_noise_hides_no_score_without_bounds(tmp_path: Path):
    federation = task_federation("regression", FOUR)
    made = lambda seed: torch.nn.Linear(federation.pool.x.shape[1], 1)  # noqa: E731
    budget = Budget(epsilon=1.0)
    with pytest.raises(
        ConfigError, match=r"the first metric, 'mae', has no bounds.*leave scores out of disclose"
    ):
        ClientHandler(
            *(federation.alone(0), made),
            privacy=WHOLE,
            budget=budget,
            folder=tmp_path,
            policy=Policy(disclose=("scores",)),
        )


# What a client keeps


@pytest.mark.parametrize("lr", [0.5, 1e25])
def test_of_a_model_that_the_client_keeps_no_loss_leaves_with_secure_aggregation(lr: float):
    words: dict[str, Any] = {"own": True, "spec": wire.to_json(replace(LOCAL, lr=lr))}
    told = ask(handler_of(policy=SECURE), **words).values
    assert set(told) == {"what", "round", "query", "purpose", "model", "size", "encoding"}
    assert "loss" in ask(handler_of(), own=True).values


def test_a_gradient_is_masked_or_refused_also_of_a_model_that_the_client_keeps():
    client = handler_of(policy=replace(SECURE, allow=("train", "gradients")))
    for own in (False, True):
        with pytest.raises(PolicyError, match="forbids updates without secure aggregation"):
            ask(client, "gradients", own=own)
    with pytest.raises(
        UpdateError, match="the query requests the gradient at a model that the client stores"
    ):
        ask(handler_of(policy=Policy(allow=("train", "gradients"))), "gradients", own=True)


def test_a_refusal_of_training_says_nothing_of_the_number_of_examples():
    with pytest.raises(FedcladeError) as refused:
        ask(handler_of(policy=SECURE), own=True, replicates=10**9)
    assert not re.search(r"\d", str(refused.value))


CLASS_OF_32 = (32, 33, 63)
"""Numbers of examples that a closed client reports as 32."""

PART_QUERIES: list[dict[str, Any]] = [
    *({"replicates": 2, "part_size": size} for size in (0, 1, 8, 15, 16, 17, 23, 31, 32, 47)),
    *({"replicates": count} for count in (3, 4, 8, 31, 32, 33, 63, 64)),
    *(
        {"spec": wire.to_json(LocalTraining(steps=1, batch_size=size))}
        for size in (9, 10, 31, 32, 33, 48, 63, 64)
    ),
    *({"spec": wire.to_json(LocalTraining(epochs=count, batch_size=8))} for count in (4, 8, 9, 11)),
    *(
        {"spec": wire.to_json(LocalTraining(steps=count, batch_size=8))}
        for count in (8, 17, 31, 57, 65)
    ),
    *(
        {"spec": wire.to_json(LocalTraining(batch_size=size, weight_decay=10.0))}
        for size in (9, 10, 31, 32, 62, 63)
    ),
]
"""Queries of which a client with limits of its own may have to refuse some."""


class AcceptedError(Exception):
    """Raised in place of training."""


def refusals(client: ClientHandler, queries: list[dict[str, Any]]) -> list[str]:
    """Return the refusal of each of some queries, put to one client in this order; empty if it would train."""

    def accept(sketch: Any = None) -> Channel:
        raise AcceptedError

    client._clients = accept
    texts: list[str] = []
    for round_number, query in enumerate(queries, start=1):
        values = {"round": round_number, "compares_parts": False, "signs": False, **query}
        try:
            if client._is_private:
                ask(client, **values)
            else:
                summed(client, **values)
        except AcceptedError:
            texts.append("")
        except FedcladeError as error:
            texts.append("" if str(error) == FAILED else str(error))
    return texts


@pytest.mark.parametrize("kind", ["private", "secure"])
@pytest.mark.parametrize("min_part", [1, 10])
def test_refusals_are_the_same_for_all_numbers_of_examples_of_a_size_class(
    kind: str, min_part: int, tmp_path: Path
):
    policy = Policy(min_part=min_part, max_epochs=10, max_steps=64, max_replicates=40)
    found: list[list[str]] = []
    for count in CLASS_OF_32:
        federation = federation_of([0], sizes=[count])
        if kind == "secure":
            secure = replace(policy, secure_aggregation=True, trust_server_keys=True)
            client = handler_of(federation=federation, policy=secure)
        else:
            client = private_client(
                tmp_path / str(count), policy, epsilon=math.inf, federation=federation
            )
        found.append(refusals(client, PART_QUERIES))
    assert found == [found[0]] * len(CLASS_OF_32)
    refused = [text for text in found[0] if text]
    assert 0 < len(refused) < len(PART_QUERIES)
    assert not any(re.search(r"\d", text) for text in refused)


@pytest.mark.parametrize("batch_size", [32, 62])
@pytest.mark.parametrize("examples", [32, 33, 63])
def test_steps_are_counted_for_all_numbers_of_examples_of_a_size_class(
    examples: int, batch_size: int
):
    """The smallest takes one step with all examples; others end with a batch of one, whose gradient is left."""
    client = handler_of(federation=federation_of([0], sizes=[examples]), policy=SECURE)
    plain = LocalTraining(batch_size=batch_size, lr=0.1)
    undoing = replace(plain, weight_decay=10.0)
    assert refusals(client, [{"spec": wire.to_json(spec)} for spec in (undoing, plain)]) == [
        FORBIDDEN,
        "",
    ]


@pytest.mark.parametrize("part_size", [0, 5])
def test_a_closed_client_draws_parts_from_as_many_examples_as_it_reports(part_size: int):
    drawn = [
        (SplitPart(place, 3, part_size, drawn_from=16), seed)
        for seed in (1, 2)
        for place in range(3)
    ]

    def examples(part: SplitPart, count: int, seed: int) -> set[int]:
        return set(part.of_client(count, key=7, seed=seed, number=2).tolist())

    parts = [examples(part, 29, seed) for part, seed in drawn]
    assert [len(part) for part in parts[:3]] == ([5, 5, 5] if part_size else [6, 5, 5])
    assert not parts[0] & parts[1]
    assert parts[0] != parts[3]
    if not part_size:
        assert set.union(*parts[:3]) == set.union(*parts[3:])
    with_all = [examples(replace(part, drawn_from=None), 16, seed) for part, seed in drawn]
    assert [examples(part, 16, seed) for part, seed in drawn] == with_all


def test_steps_of_parts_of_some_examples_are_booked_at_their_rate():
    def steps(drawn_from: int | None, examples: int) -> dict[float, int]:
        work = ClientWork(data=Splits(2, drawn_from=drawn_from))
        this_round = Round(1, LocalTraining(batch_size=8))
        query = TrainQuery([0], Models(torch.zeros(1, 1), [0]), this_round, work)
        return noisy_steps(query, examples)

    assert steps(32, 63) == steps(None, 32) == {0.5: 2}


def test_training_a_model_of_its_own_costs_a_closed_client_no_scores(tmp_path: Path):
    client = handler_of(policy=replace(SECURE, max_evaluations=0), folder=tmp_path)
    ask(client, own=True)
    assert not (tmp_path / "policy.json").exists()


# What a client's data looks like


@pytest.mark.parametrize("name", ["subspaces", "shifts", "descriptors"])
def test_what_tells_of_the_data_is_disclosed_by_name_alone(name: str):
    allow = ("train", name)
    words = {"vectors": 1, "per_label": False, "share": 0.1, "by_label": True, "components": 1}
    sent = {"model": MODEL} if name == "descriptors" else {}
    with pytest.raises(
        NotDisclosedError, match=rf'the query .{name}.: .* set disclose="{name}" in its node config'
    ):
        ask(handler_of(policy=replace(SECURE, allow=allow)), name, sent, **words)
    named = replace(SECURE, allow=allow, disclose=(name,))
    assert ask(handler_of(policy=named), name, sent, **words)


def test_sums_of_one_clients_examples_are_disclosed_by_name_alone():
    weights = Task(class_weights="balanced")
    with pytest.raises(NotDisclosedError, match='set disclose="statistics" in its node config'):
        ask(handler_of(policy=SECURE, task=weights), "statistics", {})
    named = replace(SECURE, disclose=("statistics",))
    assert ask(handler_of(policy=named, task=weights), "statistics", {}).values["labels"]


# Sketches


def summed(
    client: ClientHandler, seed: int = 3, state: RecordDict | None = None, **words: Any
) -> Tensor:
    """Return what leaves a client unmasked beside one masked update."""
    values = {
        **{
            "what": "train",
            "round": 2,
            "query": 0,
            "purpose": "train",
            "seed": seed,
            "replicates": 1,
        },
        **{
            "part_size": 0,
            "compares_parts": True,
            "dim": 8,
            "own": False,
            "shares": False,
            "personal_epochs": 0,
        },
        **{
            "spec": wire.to_json(LOCAL),
            "signs": True,
            "layout": wire.layout_digest(LAYOUT),
            "run": "here",
        },
    }
    content = Content.of(wire.record({**values, **words}, {"model": wire.raw_vector(MODEL)}))
    return sent_in_clear(client._trained_for_sum(content, state))


def test_a_client_with_secure_aggregation_sends_no_sketch_unless_its_policy_says_so():
    with pytest.raises(
        NotDisclosedError,
        match=r'forbids sketches of its updates: .* set disclose="sketch" in its node',
    ):
        summed(handler_of(policy=SECURE))
    for policy in (replace(SECURE, max_clear=90), SCORES):
        with pytest.raises(NotDisclosedError, match="forbids sketches of its updates"):
            summed(handler_of(policy=policy))


@pytest.mark.parametrize("replicates", [1, 2])
def test_beside_a_masked_update_only_signs_leave(replicates: int):
    client = handler_of(policy=replace(SECURE, disclose=("sketch",), min_part=8))
    clear = summed(client, replicates=replicates)
    assert len(clear) == (8 if replicates == 1 else 24)
    assert set(clear.tolist()) == {1.0, -1.0}


@pytest.mark.parametrize("has_folder", [False, True])
def test_projections_are_few_in_all_so_that_they_cannot_be_added_up(
    has_folder: bool, tmp_path: Path
):
    """Of 92 parameters at most 46 directions: a server with three seeds would have more than half of them."""
    policy, folder = replace(SECURE, disclose=("sketch",)), tmp_path if has_folder else None
    client, state = handler_of(policy=policy, folder=folder), RecordDict()
    for _ in range(2):
        summed(client, seed=1, dim=30, state=state)
    client = handler_of(policy=policy, folder=folder)  # as after a restart
    with pytest.raises(
        PolicyError,
        match=r"signs of updates in 60 directions would be sent in all; it allows at most 46 .max-clear",
    ):
        summed(client, seed=2, dim=30, state=state)
    summed(client, seed=2, dim=16, state=state)


def test_sketches_are_counted_in_all(tmp_path: Path):
    policy = replace(SECURE, disclose=("sketch",), max_sketches=3, min_part=8)
    client = handler_of(policy=policy, folder=tmp_path)
    summed(client, replicates=2)  # of both parts and of the update
    with pytest.raises(
        PolicyError,
        match=r"forbids 4 sketches in all; it allows at most 3 .max-sketches in its node config",
    ):
        summed(client)
    assert json.loads((tmp_path / SKETCHES).read_text())["sketches"] == 3


def test_a_damaged_count_of_sketches_lets_none_leave(tmp_path: Path):
    (tmp_path / SKETCHES).write_text('{"format": 1, "projections": [], "sketches": -1}')
    client = handler_of(policy=replace(SECURE, disclose=("sketch",)), folder=tmp_path)
    with pytest.raises(
        PolicyError,
        match=r"sketches.json, the count of the sketches .* is damaged.*should be whole numbers",
    ):
        summed(client)
    for seed, names in (('"x"', "[]"), ("1", "[[1]]"), ("1", '"abc"')):
        projection = f'{{"seed": {seed}, "dim": 1, "of": {names}}}'
        (tmp_path / SKETCHES).write_text(
            f'{{"format": 1, "projections": [{projection}], "sketches": 1}}'
        )
        with pytest.raises(PolicyError, match=r"is damaged.*a projection should have .*'seed': "):
            summed(client)
    (tmp_path / SKETCHES).write_text('{"format": 1, "projections": {}, "sketches": 1}')
    with pytest.raises(PolicyError, match=r"is damaged.*'projections' should be a list"):
        summed(client)


def test_all_numbers_of_an_update_are_no_sketch():
    with pytest.raises(
        UpdateError, match="the query requests the signs of a projection without dimensions"
    ):
        summed(handler_of(), dim=0)


def test_a_method_that_needs_sketches_says_so_at_start_and_runs_where_clients_disclose_them(
    caplog: pytest.LogCaptureFixture,
):
    settings: dict[str, Any] = {"signature": Signature(kind="projected", dim=46), "rounds": 3}
    run = secure_run(CFL_OF_TWO, {"disclose": "sketch"}, **settings)
    assert len(run.tree.leaves) == 2
    assert run.config["signature"]["kind"] == "signs"
    assert (
        "this run of CFL needs more data of each client than sums (sketch: the signs of 46 random projections of each"
        in caplog.text
    )
    assert 'can join only with disclose="sketch" in its node config' in caplog.text
    with pytest.raises(
        UpdateError, match=r'all 6 clients refuse the query .train.*set disclose="sketch"'
    ):
        secure_run(CFL_OF_TWO, {}, **{**settings, "rounds": 1})


def test_subspaces_leave_where_clients_disclose_them():
    algorithm, allow = PACFL(n_clusters=2), {"allow": "train subspaces"}
    run = secure_run(algorithm, {**allow, "disclose": "subspaces"})
    assert run.summary["rounds"] == 2
    with pytest.raises(
        UpdateError, match=r'all 6 clients refuse the query .subspaces.*disclose="subspaces"'
    ):
        secure_run(algorithm, allow)


# Runs without scores


def test_a_run_in_which_nobody_is_scored_ends_and_is_reported(tmp_path: Path):
    folder = tmp_path / "run"
    run = secure_run("fedavg", {}, tmp_path, folder=folder, target=0.9)
    assert run.summary["accuracy"]["clients"] == 0
    assert run.summary["accuracy"]["mean"] is None
    left_out = [event for event in run.events if event["kind"] == "left_out"]
    assert {event["query"] for event in left_out} == {"evaluate on test data"}
    assert 'disclose="scores"' in reasons(run)[0]
    kept = Run.load(folder)
    assert kept.summary == run.summary
    assert "<html" in page_html(run_page(RunView(kept)))


def test_scores_of_clients_that_disclose_them_are_had_without_losses(tmp_path: Path):
    folder = tmp_path / "run"
    run = secure_run("fedavg", {"disclose": "scores"}, tmp_path, folder=folder)
    assert reasons(run) == {}
    assert run.summary["accuracy"]["clients"] == 6
    assert {round(row["accuracy"], 2) == row["accuracy"] for row in run.client_rows} == {True}
    assert [row["loss_mean"] for row in run.metric_rows] == [None, None]
    kept = Run.load(folder)
    assert all(math.isnan(row["loss"]) for row in kept.client_rows)
    assert "<html" in page_html(run_page(RunView(kept)))


def test_a_client_that_discloses_no_scores_is_sent_no_models_for_them():
    questions: dict[int, list[str]] = {0: [], 1: []}
    grid = grid_of(
        federation_of((0, 1)), config={"secure-aggregation": True, "trust-server-keys": True}
    )
    grid.nodes[node_of(1)].config = {**grid.nodes[node_of(1)].config, "disclose": "scores"}
    for client, seen in questions.items():
        node = grid.nodes[node_of(client)]
        node.app = Spoilt(
            node.app, lambda question, honest, seen=seen: seen.append(question.values["what"])
        )
    run = federated(grid, Local(), rounds=1)
    assert "evaluate" not in questions[0]
    assert "evaluate" in questions[1]
    assert {row["client"] for row in run.client_rows if not math.isnan(row["accuracy"])} == {1}
    assert "forbids scores, as the client reported when it joined" in reasons(run)[0]


@pytest.mark.parametrize(
    ("policy", "private", "scores"),
    [
        (Policy(), False, True),
        (Policy(allow=("train",)), False, False),
        (SECURE, False, False),
        (SCORES, False, True),
        (Policy(), True, False),
        (Policy(disclose=("scores",)), True, True),
    ],
)
def test_a_client_registers_whether_it_discloses_scores(
    policy: Policy, private: bool, scores: bool
):
    assert policy.discloses_scores(private=private) == scores


def test_some_clients_may_disclose_scores_and_others_not():
    grid = grid_of(
        federation_of(SIX), config={"secure-aggregation": True, "trust-server-keys": True}
    )
    some = list(grid.nodes.values())[:2]
    for node in some:
        node.config = {**node.config, "disclose": "scores"}
    some[0].config = {
        name: value for name, value in some[0].config.items() if name != "secure-aggregation"
    }
    run = federated(grid, "fedavg", network=network_of(grid, secure_aggregation=True), rounds=1)
    assert run.summary["accuracy"]["clients"] == 2
    losses = [row["loss"] for row in run.client_rows]
    assert run.metric_rows[-1]["loss_mean"] == losses[0]  # of the client that is not closed


@pytest.mark.parametrize(
    ("config", "stopping", "why"),
    [
        (
            {},
            EarlyStopping(),
            r"stop.patience = 10 needs scores on validation data.*client 0: .*disclose=.scores.",
        ),
        (
            {"disclose": "scores"},
            EarlyStopping("loss"),
            r"stop.patience = 10 needs the loss on validation data \(stop.metric = 'loss'\), but clients with",
        ),
    ],
)
def test_early_stopping_that_can_see_nothing_is_refused_at_the_first_evaluation(
    config: dict[str, Any], stopping: EarlyStopping, why: str
):
    with pytest.raises(ConfigError, match=f"round 1: {why}"):
        secure_run("fedavg", config, early_stopping=stopping)


# New kinds of questions


@dataclass(frozen=True, eq=False)
class LongestInput(RowQuery):
    """A kind of query that a package could add: how long each client's longest input is."""

    kind = "longest"
    dtype = torch.int64

    def shape(self, spec: DataSpec) -> tuple[int, ...]:
        return ()

    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        return torch.tensor(7)


@dataclass(frozen=True, eq=False)
class NamedLongestInput(LongestInput):
    """The same, with what it discloses."""

    kind = "named"
    mechanism = "none"
    discloses = "longest_input"


@pytest.fixture
def with_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "longest", kind_of_rows(LongestInput))
    monkeypatch.setitem(KINDS, "named", kind_of_rows(NamedLongestInput))


@pytest.mark.usefixtures("with_kind")
@pytest.mark.parametrize("level", ["", "client", "example"])
def test_a_new_kind_of_question_is_closed_to_clients_that_are(level: str, tmp_path: Path):
    policy = Policy(allow=("longest",), secure_aggregation=not level, trust_server_keys=True)
    client = private_client(tmp_path, policy, level) if level else handler_of(policy=policy)
    why = (
        r"forbids the query 'longest': .* refuse queries of the class LongestInput, which declares "
        r"mechanism = '' and discloses = ''; in the class, set 'mechanism' to one of 'noise', "
    )
    with pytest.raises(NotDisclosedError, match=why):
        ask(client, "longest", {})


@pytest.mark.usefixtures("with_kind")
def test_a_new_kind_of_question_is_answered_where_it_may_be(tmp_path: Path):
    assert ask(handler_of(policy=Policy(allow=("longest",))), "longest", {}).values["longest"] == 7
    with pytest.raises(PolicyError, match="forbids the query 'longest'; to allow it, set allow="):
        ask(handler_of(), "longest", {})
    closed = replace(SECURE, allow=("named",))
    with pytest.raises(NotDisclosedError, match='set disclose="longest_input" in its node config'):
        ask(handler_of(policy=closed), "named", {})
    open_to = replace(closed, disclose=("longest_input",))
    client = handler_of(policy=open_to, folder=tmp_path)
    assert ask(client, "named", {}).values["named"] == 7
    assert json.loads((tmp_path / "policy.json").read_text())["releases"] == 1


@pytest.mark.usefixtures("with_kind")
def test_no_name_in_a_policy_opens_a_private_client_to_what_no_noise_is_put_on(tmp_path: Path):
    client = private_client(tmp_path, Policy(allow=("named",), disclose=("longest_input",)))
    with pytest.raises(
        ConfigError, match=r"do not reveal the longest_input that a NamedLongestInput requests"
    ):
        ask(client, "named", {})


# The policy


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"disclose": "sketches"}, "name in disclose: 'sketches'.*sketch"),
        (
            {"disclose": 3},
            "disclose in the node config should be names of data that may leave the client in clear, got 3",
        ),
        (
            {"scores-epsilon": "much"},
            "scores-epsilon in the node config should be a number, got 'much'",
        ),
        ({"scores-epsilon": 0}, "scores-epsilon should be greater than 0, got 0"),
        ({"max-sketches": -1}, "max-sketches should be at least 0, got -1"),
    ],
)
def test_a_policy_says_what_is_wrong_with_it(config: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        Policy.of(config)


def test_a_policy_is_read_from_a_node_config():
    read = Policy.of({"disclose": "scores, sketch", "scores-epsilon": 2, "max-sketches": 5})
    assert read == Policy(disclose=("scores", "sketch"), scores_epsilon=2.0, max_sketches=5)
