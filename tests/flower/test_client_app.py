"""What a SuperNode runs: every error becomes a refusal that says why, and a run goes on without it."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch import nn

from fedclade.algorithms import CFL, IFCA, Algorithm, FedAvg, FedRep
from fedclade.channel.accounting import Budget, Ledger
from fedclade.channel.encoding import DENSE_ENCODINGS
from fedclade.channel.privacy import DifferentialPrivacy
from fedclade.core.errors import ConfigError, UpdateError
from fedclade.data import DataSchema
from fedclade.flower import LocalGrid, LocalNode, client_app, server_app, wire
from fedclade.flower.client_app import MOST_READY, app_for, node_settings
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.node_store import Residuals
from fedclade.flower.policy import Policy
from fedclade.flower.private_replies import BUDGET_SPENT
from fedclade.flower.server_log import show_end
from fedclade.flower.wire import Content
from fedclade.runs.store import Run
from fedclade.training import split_batches
from tests.flower.grids import (
    CFL_OF_TWO,
    FOUR,
    LOCAL,
    app_of,
    federated,
    grid_of,
    handler_of,
    hello_to,
    network_of,
    node_of,
    reasons,
    request_to,
)
from tests.tiny import federation_of, perceptron


def context_of(**config: Any) -> Context:
    return Context(1, 100, config, RecordDict(), {})


def hello_of(app: Callable[[Message, Context], Message], **config: Any) -> dict[str, Any]:
    """Return what a node says of itself."""
    grid = LocalGrid({100: LocalNode(app, config)})
    (reply,) = grid.send_and_receive([hello_to(100)])
    return dict(Content.of(reply.content).values)


def test_a_node_config_names_one_gpu_of_several(monkeypatch: pytest.MonkeyPatch):
    app = app_of(federation_of(FOUR))
    assert "refused" not in hello_of(app, **{"partition-id": 0, "device": "cpu"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refused = hello_of(app, **{"partition-id": 1, "device": "cuda:2"})["refused"]
    assert "this machine has the devices cpu, cuda:0, cuda:1; choose one of them" in refused


def test_a_client_splits_its_batches_among_several_devices(monkeypatch: pytest.MonkeyPatch):
    """Its updates are those of one device, up to rounding."""
    federation = federation_of(FOUR)
    passes: list[int] = []

    def counted(module: nn.Module, inputs: Any, outputs: Any) -> None:
        passes.append(len(outputs))

    def split(module: nn.Module, devices: Any) -> nn.Module:
        found = split_batches(module, devices)
        found[0].register_forward_hook(counted)
        return found

    monkeypatch.setattr(sys.modules[ClientHandler.__module__], "split_batches", split)
    models: list[torch.Tensor] = []
    sizes: list[set[int]] = []
    for devices in (("cpu",), ("cpu", "cpu")):
        monkeypatch.setattr(sys.modules[app_for.__module__], "choose_devices", lambda _: devices)  # noqa: B023
        passes.clear()
        run = federated(grid_of(federation), FedAvg(), rounds=2)
        models.append(run.tree.nodes[0].model)
        sizes.append(set(passes))
    assert LOCAL.batch_size in sizes[0]
    assert LOCAL.batch_size / 2 in sizes[1]
    torch.testing.assert_close(models[1], models[0], rtol=1e-5, atol=1e-6)


def test_several_devices_that_a_client_cannot_use_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config = {"partition-id": 0, "device": "cuda:0,cuda:1"}
    app = app_of(federation_of(FOUR), engine="stacked")
    assert "which the engine stacked does not do" in hello_of(app, **config)["refused"]
    config["device"] = "cuda:0,cuda:7"
    assert "device 'cuda:7' was requested" in hello_of(app, **config)["refused"]


def missing(context: Context) -> Any:
    raise FileNotFoundError(2, "No such file or directory", "/data/mine.csv")


@pytest.mark.parametrize(
    ("data_fn", "why"),
    [
        (lambda context: [1, 2], "data_fn should return a Federation with one client, got a list"),
        (
            lambda context: None,
            "data_fn should return a Federation with one client, got a NoneType",
        ),
        (
            lambda context: federation_of(FOUR),
            "data_fn should return a federation of one client, got 4 clients; select one with Federation.alone(number)",
        ),
        (
            lambda context: federation_of(FOUR).alone(9),
            "the federation has no client 9; tiny has clients 0 to 3",
        ),
        (missing, "[Errno 2] No such file or directory: '/data/mine.csv'"),
    ],
)
def test_data_that_is_not_there_is_refused_with_the_reason(
    data_fn: Any, why: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, "fedclade"):
        assert hello_of(client_app(perceptron, data_fn))["refused"] == why
    assert caplog.messages == [f"refused query: {why}"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            {"secret-file": "SECRET"},
            "the clients' secret .*secret has 5 characters, expected at least 32",
        ),
        (
            {"secret-file": "/nowhere/secret"},
            "cannot read the file /nowhere/secret with the clients' secret: .*No such file",
        ),
        ({"folder": "SECRET"}, "cannot create the client's folder .*secret: File exists"),
        (
            {"folder": "SECRET/below"},
            "cannot create the client's folder .*secret/below: Not a directory",
        ),
        (
            {"partition-id": "two"},
            "partition-id in the node config should be a whole number of at least 0, got 'two'",
        ),
        (
            {"partition-id": -1},
            "partition-id in the node config should be a whole number of at least 0, got -1",
        ),
        (
            {"partition-id": True},
            "partition-id in the node config should be a whole number of at least 0, got True",
        ),
    ],
)
def test_so_is_a_node_config_that_is_wrong(config: dict[str, Any], why: str, tmp_path: Path):
    (tmp_path / "secret").write_text("short")
    config = {
        k: v.replace("SECRET", str(tmp_path / "secret")) if isinstance(v, str) else v
        for k, v in config.items()
    }
    app = client_app(perceptron, lambda context: federation_of(FOUR).alone(1))
    refused = hello_of(app, **config)["refused"]
    with pytest.raises(ConfigError, match=why):
        raise ConfigError(refused)


def test_so_is_a_model_that_is_unknown_and_a_private_client_without_a_folder():
    alone = federation_of(FOUR).alone(1)
    assert (
        "unknown model 'mpl'; did you mean 'mlp'?"
        in hello_of(client_app("mpl", lambda context: alone))["refused"]
    )
    private = client_app(
        perceptron, lambda context: alone, privacy=DifferentialPrivacy(clip_norm=1.0)
    )
    assert hello_of(private)["refused"] == (
        "a client with differential privacy needs a folder for its privacy ledger; set folder in its node config"
    )


def test_what_a_node_config_leaves_out_is_none(tmp_path: Path):
    none = dict.fromkeys(("number", "folder", "secret", "peers"))
    assert node_settings(context_of()) == {**none, "policy": Policy()}
    assert node_settings(context_of(**{"partition-id": 3}))["number"] == 3
    assert (
        node_settings(context_of(folder=str(tmp_path / "a" / "b")))["folder"]
        == tmp_path / "a" / "b"
    )
    assert (tmp_path / "a" / "b").is_dir()
    assert (
        hello_of(client_app(perceptron, lambda context: federation_of(FOUR).alone(2)))["number"]
        == -1
    )


def test_a_client_is_made_once_and_the_oldest_of_very_many_let_go():
    made: list[int] = []

    def make(context: Context, agreed: DataSchema | None) -> Any:
        assert agreed is None
        made.append(context.node_id)
        return handler_of(0)

    app = app_for(make)
    question = hello_to(1)
    for node in (1, 1, *range(2, MOST_READY + 2), 1, MOST_READY + 1):
        app(question, Context(1, node, {}, RecordDict(), {}))
    assert made == [1, *range(2, MOST_READY + 2), 1]


def test_a_broken_client_does_not_keep_the_others_from_running():
    federation = federation_of(FOUR)
    grid = grid_of(federation)
    grid.nodes[node_of(1)].app = client_app(perceptron, lambda context: [])  # type: ignore[arg-type,return-value]
    run = federated(grid, FedAvg(), rounds=2, network=network_of(grid, clients=3))
    assert run.tree.leaf_of.keys() == {0, 2, 3}
    (event,) = run.events
    assert event["nodes"] == {
        "101": "it has not registered: data_fn should return a Federation with one client, got a list"
    }


def test_a_received_model_takes_no_memory_while_the_update_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
):
    """The caller of an app refers to the message until the app has replied."""
    grid = grid_of(federation_of(FOUR))
    node = grid.nodes[node_of(0)]
    app, taken, at_encoding, in_message = node.app, list[Content](), list[int](), list[bool]()
    take, encoded = Content.taken_from, Residuals.encoded

    def recorded_take(self: Content, record: RecordDict) -> Content:
        content = take(self, record)
        if content.values["what"] == "train":
            assert len(content.vectors["model"]) > 0
            taken.append(content)
        return content

    def recorded_encoded(self: Residuals, *arguments: Any, **named: Any) -> Any:
        at_encoding.append(taken[-1].size)
        return encoded(self, *arguments, **named)

    def recording(message: Message, context: Context) -> Message:
        reply = app(message, context)
        in_message.append("vectors" in message.content)
        return reply

    monkeypatch.setattr(sys.modules[app_for.__module__], "LARGE_MESSAGE", 0)
    monkeypatch.setattr(Content, "taken_from", recorded_take)
    monkeypatch.setattr(Residuals, "encoded", recorded_encoded)
    node.app = recording
    federated(grid, FedAvg(), rounds=2)
    assert at_encoding == [0] * 2 * len(FOUR)
    assert in_message
    assert not any(in_message)


@pytest.mark.parametrize("encoding", DENSE_ENCODINGS)
def test_however_updates_travel_the_clusters_are_the_right_ones(encoding: str, tmp_path: Path):
    federation = federation_of(FOUR, sizes=[80] * 4)
    grid = grid_of(federation, encoding=encoding)
    for client in range(4):
        grid.nodes[node_of(client)].config = {
            "partition-id": client,
            "folder": str(tmp_path / str(client)),
        }
    run = federated(grid, CFL_OF_TWO, rounds=4)
    assert {frozenset(leaf.members) for leaf in run.tree.leaves} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }
    kept = sorted(path.parent.name for path in tmp_path.rglob("residual-*.safetensors"))
    assert kept == ([] if encoding == "float32" else list("0123"))


def private_grid(
    tmp_path: Path,
    budget: Budget = Budget(epsilon=math.inf),  # noqa: B008
    noise: float = 0.0,
    **model: Any,
) -> LocalGrid:
    federation, privacy = (
        federation_of(FOUR),
        DifferentialPrivacy(clip_norm=0.5, noise_multiplier=noise),
    )
    app = app_of(federation, privacy=privacy, budget=budget, **model)
    return LocalGrid(
        {
            node_of(client): LocalNode(
                app, {"partition-id": client, "folder": str(tmp_path / f"client-{client}")}
            )
            for client in range(4)
        }
    )


def test_a_run_of_private_clients_is_reported_without_their_losses(tmp_path: Path):
    folder = tmp_path / "run"
    run = federated(private_grid(tmp_path), CFL_OF_TWO, rounds=3, folder=folder)
    assert [row["train_loss"] for row in run.metric_rows] == [None] * 3
    assert {row["train_loss"] for row in run.cluster_rows} == {None}
    assert reasons(run, of_training=True) == {}
    kept = Run.load(folder)
    assert [row["train_loss"] for row in kept.metric_rows] == [None] * 3
    show_end(kept, folder)
    assert list((folder / "figures").iterdir())


@pytest.mark.parametrize("algorithm", [CFL(eps1=1e-9), FedRep(head_epochs=1, last_fit=3)])
def test_what_the_server_says_was_spent_is_what_the_ledgers_say(
    tmp_path: Path, algorithm: Algorithm
):
    """The ledger of the client that sent most; both ask for updates only, and all are asked in every round."""
    privacy = DifferentialPrivacy(clip_norm=0.5, noise_multiplier=8.0)
    part = algorithm.requires.personal
    personal = {"personal": part} if part else {}
    grid = private_grid(tmp_path, noise=8.0, **personal)
    run = federated(grid, algorithm, rounds=3, privacy=privacy, **personal)
    ledgers = [Ledger(tmp_path / f"client-{client}" / "privacy.json") for client in range(4)]
    assert {sum(entry.releases for entry in ledger.entries()) for ledger in ledgers} == {3}
    assert run.summary["privacy"]["releases"] == 3
    assert run.summary["privacy"]["epsilon"] == ledgers[0].spent(privacy.delta)


def test_who_has_spent_its_budget_is_left_out_and_says_so(tmp_path: Path):
    noise = 4.0
    once = DifferentialPrivacy(clip_norm=0.5, noise_multiplier=noise).epsilon(2)
    grid = private_grid(tmp_path, noise=noise)
    grid.nodes[node_of(1)].app = (
        private_grid(tmp_path, Budget(epsilon=1.01 * once), noise).nodes[node_of(1)].app
    )
    run = federated(grid, FedAvg(), rounds=4)
    left_out = [
        event for event in run.events if event["kind"] == "left_out" and event["query"] == "train"
    ]
    assert {event["round"] for event in left_out} == {3, 4}
    assert list(reasons(run, of_training=True)) == [1]
    assert reasons(run, of_training=True)[1] == BUDGET_SPENT


def test_algorithms_that_ask_private_clients_for_training_losses_are_told(tmp_path: Path):
    run = federated(private_grid(tmp_path), FedAvg(), rounds=1)
    assert reasons(run, of_training=True) == {}
    with pytest.raises(
        UpdateError,
        match=r"no client replied.*do not reveal training losses.*settings that need only updates",
    ):
        federated(private_grid(tmp_path), IFCA(clusters=2), rounds=2)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: client_app(perceptron(), 3), "data_fn of client_app should be a function, got 3"),
        (
            lambda: server_app(3, perceptron()),
            "algorithm of server_app should be of type Algorithm",
        ),
    ],
)
def test_apps_look_at_their_arguments_when_they_are_built(build, told):
    with pytest.raises(ConfigError, match=told):
        build()


def test_a_servers_text_cannot_forge_lines_of_a_clients_log(caplog: pytest.LogCaptureFixture):
    grid = grid_of(federation_of(FOUR))
    forged = "hello\nERROR the disk is full"
    request = request_to(node_of(0), wire.record({"what": forged}), "query")
    (identity,) = grid.push_messages([request])
    list(grid.pull_messages([identity]))
    refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert refused
    assert not any("\n" in line for line in refused)
