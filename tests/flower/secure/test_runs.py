"""Whole runs with secure aggregation: those without it, but for rounding; and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedclade import Aggregation, DifferentialPrivacy, Run, Signature
from fedclade.algorithms import CFL, FLHC, Auto, FeSEM, ReplicatedCFL
from fedclade.channel import Budget
from fedclade.core.errors import ConfigError, UpdateError
from fedclade.flower import LocalGrid, Network, wire
from fedclade.flower.from_config import RunConfig
from fedclade.flower.policy import Policy
from fedclade.flower.secure.member import SumState
from fedclade.flower.secure.secrets import digest_of_numbers
from fedclade.flower.signing import KEY_FILE, key_of
from fedclade.flower.wire import Content
from tests.flower.grids import (
    CFL_OF_TWO,
    federated,
    grid_of,
    handler_of,
    housed,
    network_of,
    node_of,
    reasons,
    spoil,
    worded,
)
from tests.tiny import federation_of

SIX = (0, 1, 0, 1, 0, 1)
OF_THREE = {"min-honest": 2}
"""The node config of clients that take part in sums of three, of which one may collude with the server."""

OF_TWO = {"network": {"secure_fewest": 2, "secure_colluders": 0}}
SIGNS = Signature(kind="signs", dim=46)
SKETCHES = Signature(kind="projected", dim=46)


def run_of(
    algorithm: Any, secure: bool = True, grid: LocalGrid | None = None, **settings: Any
) -> Run:
    grid = grid or grid_of(federation_of(SIX), config=OF_THREE)
    rules = {"secure_fewest": 3, **settings.pop("network", {})}
    network = network_of(grid, secure_aggregation=secure, **rules)
    return federated(grid, algorithm, network=network, **{"rounds": 2, **settings})


def assert_same(here: Run, there: Run) -> None:
    assert [node.members for node in here.tree.nodes] == [node.members for node in there.tree.nodes]
    for ours, theirs in zip(here.tree.nodes, there.tree.nodes, strict=True):
        torch.testing.assert_close(ours.params, theirs.params, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("oracle", {}),
        (CFL_OF_TWO, {"signature": SIGNS, "rounds": 3, **OF_TWO}),
        (
            FLHC(rounds_before=1, n_clusters=2, metric="cosine"),
            {"signature": SIGNS, "rounds": 3, **OF_TWO},
        ),
        (
            ReplicatedCFL(level=0.5, check_every=2),
            {"signature": Signature(kind="signs", dim=15), "rounds": 3},
        ),
        (
            Auto(level=0.5, budget=8.0, check_every=2),
            {"signature": Signature(kind="signs", dim=15), "rounds": 5, "evaluate_every": 5},
        ),
    ],
    ids=["oracle", "cfl", "fl_hc", "rcfl", "auto"],
)
def test_a_run_ends_as_one_that_streams_does(algorithm: Any, settings: dict[str, Any]):
    grid = grid_of(federation_of(SIX), config={"min-honest": 2, "max-colluders": 0})
    plain, run = (
        run_of(algorithm, secure=False, stream=True, **settings),
        run_of(algorithm, grid=grid, **settings),
    )
    assert reasons(run) == {}
    assert_same(run, plain)


def test_clients_have_any_number_of_examples():
    """Those of rcfl weigh alike in rounds in which they train on equal parts, and later by their examples."""
    settings = {"signature": Signature(kind="signs", dim=9), "rounds": 4}
    sizes = [61, 67, 71, 73, 79, 83]
    algorithm = ReplicatedCFL(check_every=9)
    plain = run_of(algorithm, False, grid_of(federation_of(SIX, sizes)), stream=True, **settings)
    run = run_of(algorithm, grid=grid_of(federation_of(SIX, sizes), config=OF_THREE), **settings)
    assert reasons(run) == {}
    assert_same(run, plain)


class Overheard:
    """An app whose answers are noted."""

    def __init__(self, app: Callable[[Message, Context], Message], heard: list[Content]) -> None:
        self.app, self.heard = app, heard

    def __call__(self, message: Message, context: Context) -> Message:
        answer = self.app(message, context)
        self.heard.append(Content.of(answer.content))
        return answer


def test_no_update_leaves_a_client_and_a_run_repeats():
    heard: list[Content] = []
    grid = grid_of(federation_of(SIX), config=OF_THREE)
    for node in grid.nodes.values():
        node.app = Overheard(node.app, heard)
    run = run_of("oracle", grid=grid)
    assert {name for content in heard for name in content.vectors} == {"masked"}
    again = run_of("oracle")
    assert all(
        torch.equal(ours.params, theirs.params)
        for ours, theirs in zip(run.tree.nodes, again.tree.nodes, strict=True)
    )


def test_a_run_that_was_stopped_goes_on(tmp_path: Path):
    grid = housed(grid_of(federation_of(SIX), config=OF_THREE), tmp_path / "clients")

    def stop(row: Any, tree: Any) -> None:
        raise UpdateError("stopped")

    with pytest.raises(UpdateError, match="stopped"):
        run_of("oracle", grid=grid, folder=tmp_path / "run", checkpoint_every=1, on_round=stop)
    grid = housed(grid_of(federation_of(SIX), config=OF_THREE), tmp_path / "clients")
    run = run_of("oracle", grid=grid, folder=tmp_path / "run", checkpoint_every=1)
    assert run.config["network"]["secure_colluders"] == 1
    assert_same(run, run_of("oracle"))


def test_clients_that_fail_at_a_stage_are_left_out_and_the_run_goes_on():
    grid = grid_of(federation_of((0,) * 9))
    for client, stage in ((1, "keys"), (2, "shares"), (3, "masked")):
        spoil(grid, client, stage, lambda honest: RecordDict({"nothing": ConfigRecord()}))
    run = run_of("fedavg", grid=grid, rounds=1)
    assert set(reasons(run)) == {1, 2, 3}
    assert run.summary["rounds"] == 1


def test_a_group_with_garbage_in_it_keeps_its_model():
    grid = grid_of(federation_of(SIX), config=OF_THREE)

    def noise(honest: RecordDict) -> RecordDict:
        size = len(honest.array_records["vectors"]["masked"].data)
        data = bytes(
            torch.randint(
                256, (size,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
            )
        )
        state = grid._states[node_of(0)]
        key = key_of(Context(0, 0, {}, state, {}))
        kept = SumState(**dict(state.config_records["fedclade.secure"]))  # pyright: ignore[reportArgumentType]
        signature = key.private.sign(kept.statements.masked(0, digest_of_numbers(data)))
        vectors = ArrayRecord({"masked": wire.raw(data, "uint8", size)})
        return RecordDict({**worded(signature=signature)(honest), "vectors": vectors})

    spoil(grid, 0, "masked", noise)
    run, plain = run_of("oracle", grid=grid), run_of("oracle", secure=False)
    assert reasons(run) == {}  # of which client spoilt the sum nothing is known
    rejected = [event for event in run.events if event["kind"] == "sum_rejected"]
    assert [(event["round"], event["clients"]) for event in rejected] == [
        (1, [0, 2, 4]),
        (2, [0, 2, 4]),
    ]
    assert (
        "8 of the 8 check entries of the sum do not equal its number of clients, 3"
        in rejected[0]["because"]
    )
    mine, theirs = (
        {leaf.members: leaf.params for leaf in each.tree.leaves} for each in (run, plain)
    )
    torch.testing.assert_close(mine[1, 3, 5], theirs[1, 3, 5], rtol=0, atol=5e-6)
    assert float((mine[0, 2, 4] - theirs[0, 2, 4]).abs().max()) > 0.01


@pytest.mark.parametrize("rule", ["mean", "trimmed_mean"])
def test_a_run_with_three_sums_for_each_cluster_learns_like_one_with_a_single_sum(rule: Any):
    """Clients are alike, so the median of three means is about the mean of all."""
    network = {"secure_parts": 3, "secure_fewest": 3}
    runs = [
        run_of(
            "fedavg", grid=grid_of(federation_of((0,) * 9), config=OF_THREE), rounds=1, **settings
        )
        for settings in (
            {"aggregate": Aggregation(rule=rule), "network": network},
            {"network": {"secure_fewest": 3}},
        )
    ]
    three, one = (run.tree.nodes[0].params for run in runs)
    assert float((three - one).norm()) < 0.1 * float(one.norm())
    unguarded = [[event["kind"] for event in run.events].count("sum_unguarded") for run in runs]
    assert unguarded == [0, 1]


def test_clients_are_weighted_by_their_examples_though_they_register_with_size_classes():
    sizes = [20, 40, 60, 20, 40, 60]
    config = {**OF_THREE, "secure-aggregation": True, "trust-server-keys": True}
    plain = run_of("fedavg", False, grid_of(federation_of((0,) * 6, sizes)), stream=True, rounds=1)
    run = run_of("fedavg", grid=grid_of(federation_of((0,) * 6, sizes), config=config), rounds=1)
    assert_same(run, plain)


def test_a_cluster_that_is_too_small_keeps_its_model_and_an_event_says_why():
    run = run_of("oracle", grid=grid_of(federation_of((0, 0, 0, 1)), config=OF_THREE), rounds=1)
    assert reasons(run) == {
        3: "not asked: its cluster has 1 clients in this round, and a sum needs at least 3 (network.secure_fewest)"
    }


def test_a_client_may_insist_on_sums():
    trusts = {"secure-aggregation": True, "trust-server-keys": True}
    insists = grid_of(federation_of(SIX), config={**OF_THREE, **trusts})
    with pytest.raises(
        UpdateError,
        match=r"forbids updates without secure aggregation .* set network.secure_aggregation = true",
    ):
        run_of("fedavg", secure=False, grid=insists)
    assert_same(run_of("fedavg", grid=insists), run_of("fedavg", secure=False))
    # of which no update leaves
    assert run_of("local", secure=False, grid=insists).summary["rounds"] == 2


def test_a_client_that_insists_knows_the_others_keys(tmp_path: Path):
    """Or says that it does without: a server that lies could play them all."""
    insists = grid_of(federation_of(SIX), config={"secure-aggregation": True})
    with pytest.raises(
        UpdateError,
        match="secure-aggregation=true in the node config needs a peers-file, a list of",
    ):
        run_of("fedavg", grid=insists)
    with pytest.raises(
        ConfigError,
        match="or set trust-server-keys=true, which gives no protection against a malicious server",
    ):
        handler_of(policy=Policy(secure_aggregation=True))
    with pytest.raises(
        ConfigError, match="secure-aggregation=true in the node config needs a folder"
    ):
        handler_of(policy=Policy(secure_aggregation=True), peers={"00" * 32: 1})
    handler_of(policy=Policy(secure_aggregation=True), peers={"00" * 32: 1}, folder=tmp_path)
    handler_of(policy=Policy(secure_aggregation=True, trust_server_keys=True))


def test_what_is_masked_is_private_and_permuted_as_without(tmp_path: Path):
    """Clipped to a norm below any update's, so that it shows, and with no noise, which would hide all else."""
    (tmp_path / "secret").write_text("0123456789abcdef" * 2)
    privacy, runs = DifferentialPrivacy(clip_norm=0.1), list[Run]()
    for secure in (False, True):
        config = {"secret-file": str(tmp_path / "secret")}
        grid = grid_of(
            federation_of(SIX), config=config, privacy=privacy, budget=Budget(epsilon=math.inf)
        )
        grid = housed(grid, tmp_path / str(secure))
        runs.append(run_of("fedavg", secure, grid, privacy=privacy, permute=True, rounds=1))
    assert_same(runs[1], runs[0])
    assert "released" in {event["kind"] for event in runs[1].events}


def test_clients_that_know_the_others_keys_check_them(tmp_path: Path):
    grid = housed(grid_of(federation_of(SIX), config=OF_THREE), tmp_path)
    run_of("fedavg", grid=grid, rounds=1)
    lines = [
        f"{k} {(tmp_path / str(node_of(k)) / f'{KEY_FILE}.pub').read_text()}" for k in range(6)
    ]
    (tmp_path / "peers").write_text("".join(lines))
    (tmp_path / "others").write_text("".join(lines[:5]))
    for client, node in enumerate(grid.nodes.values()):
        node.config = {
            **node.config,
            "peers-file": str(tmp_path / ("others" if client == 0 else "peers")),
        }
    run = run_of("fedavg", grid=grid, rounds=1)
    (why,) = reasons(run).values()
    assert set(reasons(run)) == {0}
    assert why == "clients [5] of the sum are not in this client's peers-file; add their keys there"


@pytest.mark.parametrize(
    ("algorithm", "settings", "why"),
    [
        (
            FeSEM(clusters=2),
            {},
            "FeSEM needs the updates of single clients; use another algorithm, or leave network.secure_aggregation out",
        ),
        (
            CFL(),
            {},
            "CFL would compare whole updates, which clients would have to send "
            "unmasked; set signature.kind = 'projected'",
        ),
        (
            "fedavg",
            {"stream": False},
            "the server stores only sums of updates, as in a streaming run; leave stream = false out",
        ),
        (
            CFL(),
            {"signature": Signature(kind="projected", dim=64)},
            "64 unmasked numbers .* 92 parameters; lower signature.dim",
        ),
        (
            "fedavg",
            {"aggregate": Aggregation(rule="median")},
            "aggregate.rule = 'median' needs the updates of single cl",
        ),
        (
            "fedavg",
            {"aggregate": Aggregation(clip_above=3.0)},
            "the server cannot scale down single updates of a sum; l",
        ),
        (
            "fedem",
            {},
            "FedEM queries the component that they weigh most of each client, which reveal its training data",
        ),
        (
            "ifca",
            {},
            "IFCA queries training losses of each client, which reveal its training data; use anot",
        ),
        (
            "flux",
            {},
            "FLUX queries training accuracies and descriptors of their data of each client, which",
        ),
        ("scaffold", {}, "Scaffold needs the updates of single clients"),
        (
            CFL(similarity="gradients"),
            {"signature": SKETCHES},
            "CFL queries gradients, which clients would send unmasked",
        ),
        (
            FLHC(),
            {"signature": SKETCHES},
            "FLHC compares the norms of updates, but signs of sketches give only their d",
        ),
    ],
)
def test_what_needs_single_updates_is_refused(algorithm: Any, settings: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=rf"network.secure_aggregation = true.*{why}"):
        run_of(algorithm, **settings)


def test_rules_have_to_be_possible():
    with pytest.raises(
        ConfigError,
        match=r"(?s)secure_colluders should be at least 0, got -1.*secure_neighbours should be at least 0, got -1.*"
        r"secure_parts should be 1, or at least 3: of two sums either could be the wrong one, got 2.*"
        r"secure_norm should be greater than 0 and finite, got 0",
    ):
        Network(secure_colluders=-1, secure_neighbours=-1, secure_norm=0.0, secure_parts=2)
    with pytest.raises(
        ConfigError,
        match=r"secure_fewest should be at least network.secure_colluders \+ 2, 5, got 4",
    ):
        Network(clients=9, secure_colluders=3, secure_aggregation=True)
    with pytest.raises(
        ConfigError,
        match=r"secure_fewest should be at most network.clients, 2, since otherwise no sum would be possible",
    ):
        Network(clients=2, secure_aggregation=True)
    with pytest.raises(
        ConfigError,
        match=r"neighbours should be 0, or at least 28 for 100 clients of which 10 may collude, got 27",
    ):
        Network(
            clients=100,
            secure_aggregation=True,
            secure_colluders=10,
            secure_fewest=12,
            secure_neighbours=27,
        )
    config = {
        "data.name": "digits",
        "data.clients": 4,
        "algorithm.name": "fedavg",
        "model.name": "mclr",
    }
    config |= {"network.clients": 4, "network.secure_aggregation": True}
    with pytest.raises(
        ConfigError, match=r"secure_norm should be set with .*, 10 for a model .* None"
    ):
        RunConfig.read(config)
    config["network.secure_norm"] = 3
    assert RunConfig.read(config).network.rules == replace(Network().rules, norm=3.0)
    with pytest.raises(ConfigError, match=r"IFCA queries training losses of each client"):
        RunConfig.read({**config, "algorithm.name": "ifca"})
    with pytest.raises(
        ConfigError,
        match=r"network.encoding = 'int8' is not possible with network.secure_aggregation",
    ):
        RunConfig.read({**config, "network.encoding": "int8"})


def test_without_secure_aggregation_a_config_notes_nothing_of_it():
    assert set(asdict(Network())) - set(Network().described) == {
        *(
            "secure_aggregation",
            "secure_fewest",
            "secure_colluders",
            "secure_neighbours",
            "secure_norm",
            "secure_parts",
        ),
        "newcomers",
        # Settings that were added later are noted only if they are set.
        "log",
        "metrics",
        "metrics_address",
        "download",
        "stream_buffer",
    }


def test_a_client_adds_up_updates_alone():
    handler = handler_of()
    with pytest.raises(UpdateError, match="the query requests a sum of models that clients store"):
        handler._trained_for_sum(Content({"own": True}))
