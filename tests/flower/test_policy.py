"""What a client allows: what lies outside of its own policy it refuses, whatever the run says."""

from __future__ import annotations

import json
import logging
import math
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from flwr.app import Context, RecordDict

from fedclade import LocalTraining
from fedclade.algorithms import (
    ALGORITHMS,
    CFL,
    FLUX,
    IFCA,
    PACFL,
    FedAvg,
    FedDrift,
    FlexCFL,
    build_algorithm,
    feddrift,
)
from fedclade.channel.accounting import Budget
from fedclade.channel.privacy import DifferentialPrivacy
from fedclade.channel.signature import Sketch
from fedclade.core.errors import ConfigError, FedcladeError, PolicyError, UpdateError
from fedclade.core.updates import Updates
from fedclade.flower import LocalGrid, LocalNode, wire
from fedclade.flower.client_app import node_settings
from fedclade.flower.policy import FORBIDS, QUERIES, Policy, Usage, UsageLog
from fedclade.flower.wire import Content
from tests.flower.grids import (
    CFL_OF_TWO,
    FOUR,
    LOCAL,
    app_of,
    federated,
    grid_of,
    handler_of,
    hello_to,
    node_of,
    reasons,
    request_to,
)
from tests.flower.test_client_handler import MODEL, SECRET, ask
from tests.tiny import LABELS, federation_of

EXAMPLES = 24
"""Of each client."""


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (
            {"replicates": EXAMPLES},
            "24 replicates; it allows at most 8 .max-replicates in its node config",
        ),
        (
            {"replicates": 3},
            "3 separate updates from 3 parts of 24 training examples, since each part needs at least 10",
        ),
        (
            {"spec": wire.to_json(LocalTraining(epochs=101))},
            "101 epochs; it allows at most 100 .max-epochs in its node config",
        ),
        (
            {"what": "gradients"},
            "the query 'gradients'; to allow it, set allow=.train evaluate statistics gradients. in",
        ),
        (
            {"what": "subspaces", "vectors": 3, "per_label": True},
            "the query 'subspaces'; to allow it, set allow=",
        ),
        (
            {"what": "evaluate", "sent": {str(k): MODEL for k in range(65)}},
            "65 models in one query; it allows at most 64 .max-models",
        ),
    ],
)
def test_a_server_cannot_ask_for_more_than_the_client_allows(question: dict[str, Any], why: str):
    with pytest.raises(PolicyError, match=f"{FORBIDS} {why}"):
        ask(handler_of(), **question)


def test_steps_are_those_of_all_parts():
    spec = LocalTraining(epochs=3, batch_size=5)  # 5 batches of 24 examples, 3 of each half
    Policy(max_steps=15).check_training(spec, 1, EXAMPLES)
    Policy(max_steps=18).check_training(spec, 2, EXAMPLES)
    for most, replicates in ((14, 1), (17, 2)):
        with pytest.raises(
            PolicyError,
            match=f"forbids {most + 1} steps; it allows at most {most} .max-steps in its node conf",
        ):
            Policy(max_steps=most).check_training(spec, replicates, EXAMPLES)


def test_a_step_counts_as_many_times_as_it_takes_gradients():
    spec = LocalTraining(batch_size=5)
    Policy(max_steps=20).check_training(spec, 1, EXAMPLES, times=4)
    with pytest.raises(PolicyError, match="forbids 20 steps; it allows at most 19"):
        Policy(max_steps=19).check_training(spec, 1, EXAMPLES, times=4)


def test_steps_in_place_of_epochs_are_bounded_by_both_limits():
    spec = LocalTraining(steps=11, batch_size=5)  # 5 batches of 24 examples, so they begin 3 epochs
    Policy(max_steps=11, max_epochs=3).check_training(spec, 1, EXAMPLES)
    with pytest.raises(PolicyError, match="forbids 22 steps; it allows at most 21"):
        Policy(max_steps=21).check_training(spec, 2, EXAMPLES)
    with pytest.raises(PolicyError, match="forbids 3 epochs; it allows at most 2"):
        Policy(max_epochs=2).check_training(spec, 1, EXAMPLES)


def test_initial_models_are_no_more_than_it_draws_in_one_question():
    with pytest.raises(
        PolicyError, match="forbids 1000000 models in one query; it allows at most 64"
    ):
        ask(handler_of(secret=SECRET), "initial", {}, models=10**6)


def test_vectors_of_its_data_are_few_even_where_they_are_allowed():
    client = handler_of(policy=Policy(allow=("subspaces",)))
    assert ask(client, "subspaces", {}, vectors=5, per_label=False).vector("subspaces")
    with pytest.raises(
        PolicyError, match=r"forbids 6 vectors of its data; it allows at most 5 .max-vectors"
    ):
        ask(client, "subspaces", {}, vectors=6, per_label=False)


def test_whether_its_labels_have_shifted_is_told_where_it_is_allowed_and_possible():
    client = handler_of(policy=Policy(allow=("shifts",)))
    answer = ask(client, "shifts", {}, round=2, share=0.2, by_label=True)
    assert (answer.get("round", int), answer.get("shifted", bool)) == (2, False)
    with pytest.raises(
        UpdateError,
        match=r"the query for shifts has an invalid value: .*shift_share should be in \[0, 2\], got -1",
    ):
        ask(client, "shifts", {}, round=2, share=-1.0, by_label=True)
    with pytest.raises(PolicyError, match="forbids the query 'shifts'"):
        ask(handler_of(), "shifts", {}, round=2, share=0.2, by_label=True)


def test_its_data_is_described_where_it_is_allowed_by_few_components_and_of_enough_examples():
    client, how = handler_of(policy=Policy(allow=("descriptors",))), {"seed": 1, "per_label": True}
    descriptor = ask(client, "descriptors", components=3, **how).vector("descriptor")
    assert len(descriptor) == 4 * 3 * (2 + 2 + 2 * LABELS)
    with pytest.raises(
        PolicyError,
        match=r"forbids 101 components of a descriptor; it allows at most 100 .max-components",
    ):
        ask(client, "descriptors", components=101, **how)
    with pytest.raises(
        UpdateError, match=r"the query for descriptors has an invalid value: .* at least 0, got -1"
    ):
        ask(client, "descriptors", components=-1, **how)
    with pytest.raises(
        PolicyError, match=r"forbids descriptors of 24 training examples, .* at least 30"
    ):
        ask(
            handler_of(policy=Policy(allow=("descriptors",), min_part=30)),
            "descriptors",
            components=3,
            **how,
        )
    with pytest.raises(PolicyError, match="forbids the query 'descriptors'"):
        ask(handler_of(), "descriptors", components=3, **how)


def test_a_client_that_comes_back_with_other_labels_says_so_once(tmp_path: Path):
    """It keeps in its folder how often it had each."""
    told: list[bool] = []
    for number, truth in ((1, [0]), (2, [3]), (3, [3])):
        client = handler_of(
            0, federation_of(truth), policy=Policy(allow=("shifts",)), folder=tmp_path
        )
        answer = ask(client, "shifts", {}, round=number, share=0.1, by_label=True)
        told.append(answer.get("shifted", bool))
    assert told == [False, True, False]


@pytest.mark.parametrize(
    ("policy", "question", "times", "why"),
    [
        (Policy(max_releases=3), {}, 3, "4 updates in all; it allows at most 3 .max-releases"),
        (
            Policy(max_releases=3),
            {"replicates": 2},
            1,
            "4 updates in all; it allows at most 3 .max-releases",
        ),
        (
            Policy(max_evaluations=5),
            {"what": "evaluate", "sent": {"0": MODEL, "1": MODEL}},
            2,
            "6 scored models in all; it allows at most 5 .max-evaluations",
        ),
    ],
)
@pytest.mark.parametrize("lasting", ["folder", "state"])
def test_what_it_has_answered_is_counted_over_all_processes(
    policy: Policy, question: dict[str, Any], times: int, why: str, lasting: str, tmp_path: Path
):
    settings: dict[str, Any] = {"folder": tmp_path} if lasting == "folder" else {}
    state = None if lasting == "folder" else RecordDict()
    for _ in range(times):
        ask(handler_of(policy=policy, **settings), state=state, **question)
    with pytest.raises(PolicyError, match=f"{FORBIDS} {why}"):
        ask(handler_of(policy=policy, **settings), state=state, round=3, **question)


def test_a_query_counts_as_soon_as_it_is_accepted_and_one_that_fails_as_well(tmp_path: Path):
    client = handler_of(folder=tmp_path)
    ask(client, "hello", {})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UpdateError):
        ask(client, spec=wire.to_json(LocalTraining(lr=1e30, epochs=5)))  # diverges
    with pytest.raises(UpdateError, match="the query requests -9 parts"):
        ask(client, replicates=-9)
    ask(client)
    ask(client, replicates=2)
    ask(client, "evaluate", {"0": MODEL})
    stored = json.loads((tmp_path / "policy.json").read_text())
    assert stored == {"format": 1, "releases": 5, "partings": 1, "evaluations": 1}
    assert stat.S_IMODE((tmp_path / "policy.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("what", "question", "counted"),
    [
        ("train", {"spec": wire.to_json(LocalTraining(lr=1e30, epochs=5))}, Usage(releases=1)),
        ("train", {"replicates": 3}, Usage(releases=3)),
        ("train", {"own": True, "spec": "no JSON"}, Usage(evaluations=1)),
        ("train", {"mixture": 2, "by_label": False}, Usage(releases=2)),
        ("gradients", {"sent": {"model": MODEL * math.nan}}, Usage(releases=1)),
        ("masked", {"instance": "none", "signs": False}, Usage(releases=1)),
        ("evaluate", {"sent": {"0": MODEL, "1": MODEL}, "split": "all"}, Usage(evaluations=2)),
        ("choose", {"sent": {}}, Usage(evaluations=1)),
        ("subspaces", {"sent": {}, "vectors": 99, "per_label": False}, Usage(releases=1)),
        ("descriptors", {"components": -1, "per_label": False}, Usage(releases=1)),
        ("shifts", {"sent": {}, "share": -1.0, "by_label": True}, Usage(evaluations=1)),
    ],
)
@pytest.mark.parametrize("lasting", ["folder", "state"])
def test_a_query_of_every_kind_counts_in_all_if_its_answer_fails(
    what: str, question: dict[str, Any], counted: Usage, lasting: str, tmp_path: Path
):
    folder, state = (tmp_path, None) if lasting == "folder" else (None, RecordDict())
    with pytest.raises(FedcladeError):
        ask(handler_of(folder=folder, policy=Policy(allow=QUERIES)), what, state=state, **question)
    assert UsageLog(folder).usage(state) == counted


@pytest.mark.parametrize(
    ("models", "bits"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (64, 6)]
)
def test_a_choice_counts_by_the_bits_that_it_tells(models: int, bits: int, tmp_path: Path):
    client = handler_of(
        folder=tmp_path,
        policy=Policy(secure_aggregation=True, trust_server_keys=True, disclose=("choice",)),
    )
    ask(client, "choose", {str(k): MODEL * k for k in range(models)})
    assert UsageLog(tmp_path).usage() == Usage(evaluations=bits)


def test_nobody_else_counts_between_reading_and_writing(tmp_path: Path):
    lock = FileLock(tmp_path / ".policy.json.lock")

    def another_waits(usage: Usage) -> None:
        with pytest.raises(Timeout):
            lock.acquire(timeout=0)

    UsageLog(tmp_path).book(Usage(releases=1), another_waits)
    with lock.acquire(timeout=0):
        assert UsageLog(tmp_path).usage() == Usage(releases=1)


def test_two_processes_that_answer_for_a_client_share_its_limits(tmp_path: Path):
    """One answers while the other, which began below the limit, still trains; then nothing more may leave."""
    policy = Policy(max_releases=1)
    first, second = (handler_of(folder=tmp_path, policy=policy) for _ in range(2))
    trained = second._trained  # pyright: ignore[reportPrivateUsage]

    def overtaken(
        content: Content, state: RecordDict | None, sketch: Sketch | None = None, **more: Any
    ) -> Updates:
        updates = trained(content, state, sketch, **more)
        ask(first)
        return updates

    second._trained = overtaken  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(PolicyError, match=r"2 updates in all; it allows at most 1 \(max-releases"):
        ask(second)
    assert json.loads((tmp_path / "policy.json").read_text())["releases"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 1, "releases": -5, "partings": 0, "evaluations": 0}',
        '{"format": 1, "releases": true, "partings": 0, "evaluations": 0}',
        '{"format": 1, "releases": 0, "partings": 0, "evaluations": 0, "x": 1}',
        "\xff",
    ],
)
def test_a_damaged_count_keeps_everything_back(text: str, tmp_path: Path):
    (tmp_path / "policy.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(
        PolicyError, match=r"policy.json, the count of this client's replies, is damaged, so"
    ):
        ask(handler_of(folder=tmp_path))


def test_a_policy_is_in_the_node_config():
    config = {
        "allow": "train, gradients",
        "max-epochs": 7,
        "min-part": 2,
        "max-partings": 0,
        "num-partitions": 4,
    }
    config |= {"secure-aggregation": True, "min-honest": 5, "max-colluders": 0}
    policy = node_settings(Context(1, 100, config, RecordDict(), {}))["policy"]
    assert policy == Policy(
        allow=("train", "gradients"),
        max_epochs=7,
        min_part=2,
        max_partings=0,
        secure_aggregation=True,
        min_honest=5,
        max_colluders=0,
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"allow": "train steal"}, "unknown query in allow: 'steal'"),
        ({"allow": 3}, "allow in the node config should be names of kinds of queries, got 3"),
        (
            {"imports": 3},
            "imports in the node config should be names such as 'my_models:resnet', got 3",
        ),
        (
            {"max-epoch": 3},
            "unknown limit in the node config: 'max-epoch'; did you mean 'max-epochs'?",
        ),
        ({"max-epochs": 3.0}, "max-epochs in the node config should be a whole number, got 3.0"),
        ({"max-epochs": True}, "max-epochs in the node config should be a whole number, got True"),
        (
            {"max-epochs": 0, "min-part": -1},
            "(?s)max-epochs should be at least 1, got 0.*min-part should be at least",
        ),
        ({"max-releases": -1}, "max-releases should be at least 0, got -1"),
        ({"min-honest": 1}, "min-honest should be at least 2, got 1"),
        ({"max-colluders": -1}, "max-colluders should be at least 0, got -1"),
        (
            {"min-group": 3},
            "min-group in the node config is no longer supported; set max-colluders and min-honest",
        ),
        (
            {"secure-aggregation": 1},
            "secure-aggregation in the node config should be true or false, got 1",
        ),
    ],
)
def test_a_policy_that_is_none_is_refused_and_not_left_out(config: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        node_settings(Context(1, 100, config, RecordDict(), {}))


def test_privacy_without_a_limit_of_its_own_is_refused(tmp_path: Path):
    """The noise is the run's to set: it could be none."""
    privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(
        ConfigError, match=r"clip_norm, and this client has no privacy budget; set eps"
    ):
        handler_of(privacy=privacy, folder=tmp_path)
    ask(handler_of(privacy=privacy, folder=tmp_path, budget=Budget(epsilon=math.inf)))


def test_what_it_refuses_it_logs(caplog: pytest.LogCaptureFixture):
    grid = grid_of(federation_of(FOUR))
    grid.nodes[node_of(1)].config = {"partition-id": 1, "max-epochs": 2}
    with caplog.at_level(logging.WARNING, "fedclade"):
        run = federated(grid, FedAvg(), rounds=2, local=LocalTraining(epochs=3))
    why = f"{FORBIDS} 3 epochs; it allows at most 2 (max-epochs in its node config)"
    assert reasons(run) == {1: why}
    assert caplog.messages == 2 * [f"refused train: {why}"]


OTHERS = ("pacfl", "flexcfl", "flux", "fedbn", "fedbuff", "private_choice")


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in OTHERS])
def test_the_defaults_let_every_algorithm_run_with_its_defaults(name: str):
    federation = federation_of(FOUR, sizes=[40] * 4)
    grid = grid_of(federation, personal=ALGORITHMS[name].requires.personal or ())
    truth = federation.true_clusters
    run = federated(
        grid,
        lambda told: build_algorithm(name, true_clusters=truth),
        rounds=8,
        local=LocalTraining(lr=0.3),
    )
    assert reasons(run) == {}
    assert len(run.metric_rows) == 8


@pytest.mark.parametrize(
    ("algorithm", "question"),
    [
        (CFL(split_rounds=(2,), eps2=1e-6, similarity="gradients"), "gradients"),
        (IFCA(clusters=2, average="gradients"), "gradients"),
        (PACFL(n_clusters=2), "subspaces"),
        (FlexCFL(groups=2), "shifts"),
        (FLUX(earliest=1, latest=1), "descriptors"),
    ],
)
def test_what_nobody_allows_ends_the_run_with_one_clear_error_on_both_sides(
    algorithm: Any, question: str, caplog: pytest.LogCaptureFixture
):
    federation = federation_of(FOUR)
    allow = f"train evaluate statistics {question}"
    why = f'{FORBIDS} the query {question!r}; to allow it, set allow="{allow}" in its node config'
    with caplog.at_level(logging.WARNING, "fedclade.flower"), pytest.raises(UpdateError) as error:
        federated(grid_of(federation), algorithm)
    assert (
        str(error.value) == f"all 4 clients refuse the query {question!r}; client 0 reports: {why}"
    )
    refused = [message for message in caplog.messages if message.startswith("refused")]
    assert len(refused) == 4  # each once: it is not asked again
    assert all(message.endswith(why) for message in refused)
    run = federated(grid_of(federation, config={"allow": allow}), algorithm)
    assert reasons(run) == {}


@pytest.mark.parametrize("algorithm", [IFCA(clusters=2), FedDrift(step_rounds=1)])
def test_a_choice_of_models_that_nobody_allows_ends_the_run(algorithm: Any):
    with pytest.raises(
        UpdateError,
        match=r"all 4 clients refuse the query 'evaluate'; client 0 reports: .* forbids",
    ):
        federated(grid_of(federation_of(FOUR), config={"allow": "train"}), algorithm)


def test_clients_score_as_many_models_as_they_allow_and_more_in_several_questions(
    monkeypatch: pytest.MonkeyPatch,
):
    federation, few = federation_of(FOUR), {"max-models": 2}
    with pytest.raises(UpdateError, match="forbids 4 models in one query; it allows at most 2"):
        federated(grid_of(federation, config=few), FedDrift(step_rounds=1))
    everything = federated(grid_of(federation), FedDrift(step_rounds=1))
    monkeypatch.setattr(feddrift, "MODELS_PER_QUERY", 2)
    run = federated(grid_of(federation, config=few), FedDrift(step_rounds=1))
    assert reasons(run) == {}
    torch.testing.assert_close(
        run.tree.models([0, 1])[0], everything.tree.models([0, 1])[0], rtol=0, atol=0
    )
    assert [leaf.members for leaf in run.tree.leaves] == [
        leaf.members for leaf in everything.tree.leaves
    ]


def test_a_few_that_forbid_do_not_end_the_run():
    grid = grid_of(federation_of(FOUR, sizes=[40] * 4))
    allow = {"allow": "train evaluate gradients"}
    for client in range(3):
        grid.nodes[node_of(client)].config = {"partition-id": client, **allow}
    run = federated(grid, CFL(split_rounds=(2,), eps2=1e-6, similarity="gradients"), rounds=3)
    assert list(reasons(run)) == [3]
    assert len(run.metric_rows) == 3


def test_a_server_that_wants_single_examples_gets_none():
    """Replicates of one example each are that example's gradients, from which an image can be read."""
    federation = federation_of(FOUR)
    grid = LocalGrid({node_of(0): LocalNode(app_of(federation), {"partition-id": 0})})
    wanted = wire.record(
        {
            **{"what": "train", "round": 1, "query": 0, "purpose": "train", "seed": 0, "dim": 0},
            **{
                "replicates": EXAMPLES,
                "spec": wire.to_json(LOCAL),
                "own": False,
                "personal_epochs": 0,
            },
            "part_size": 0,
            "compares_parts": True,
            "layout": Content.of(_hello(grid)).values["layout"],
        },
        {"model": wire.raw_vector(MODEL)},
    )
    (reply,) = grid.send_and_receive([request_to(node_of(0), wanted)])
    answer = Content.of(reply.content)
    assert answer.vectors == {}
    assert answer.values["refused"].startswith(f"{FORBIDS} {EXAMPLES} replicates")


def _hello(grid: LocalGrid) -> RecordDict:
    (reply,) = grid.send_and_receive([hello_to(node_of(0))])
    return reply.content


def test_sums_of_what_was_answered():
    assert Usage(releases=2, partings=1) + Usage(releases=1, evaluations=4) == Usage(
        releases=3, partings=1, evaluations=4
    )


def test_a_run_that_outlasts_a_budget_is_told_why(tmp_path: Path):
    grid = grid_of(federation_of(FOUR), config={"max-releases": 2})
    with pytest.raises(
        UpdateError, match=r"all 4 clients refuse the query 'train'; .* 3 updates in all; it"
    ):
        federated(grid, CFL_OF_TWO, rounds=4, folder=tmp_path / "run")
    for node in grid.nodes.values():
        node.config = {**node.config, "max-releases": 99}
    assert len(federated(grid, CFL_OF_TWO, rounds=4, folder=tmp_path / "run").metric_rows) == 4
    assert torch.isfinite(
        federated(grid, CFL_OF_TWO, rounds=4, folder=tmp_path / "run").tree.nodes[0].params
    ).all()
