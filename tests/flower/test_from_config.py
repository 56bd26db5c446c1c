"""Apps whose settings are Flower's run config; and what the command line does with the run folder that they leave."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from fedclade import Callback, RoundRecord, RunInterrupted, TensorBoardTracker
from fedclade.cli import main
from fedclade.config.data import FolderSettings
from fedclade.core import known_arguments
from fedclade.core.errors import ConfigError
from fedclade.data import PARTITIONS, SHIFTS, SOURCES, FilesSettings, OwnSettings, load_federation
from fedclade.flower import (
    LocalGrid,
    LocalNode,
    Network,
    client_app_from_config,
    server_app_from_config,
)
from fedclade.flower.from_config import DATA_KEYS, AppSettings, RunConfig, check_keys
from fedclade.flower.wire import Content
from fedclade.runs.store import Run
from fedclade.runs.store.contents import without_unset
from tests.flower.grids import FOUR, federated, hello_to
from tests.flower.grids import grid_of as small_grid
from tests.tiny import federation_of

RUN_CONFIG: dict[str, bool | float | int | str] = {
    "rounds": 3,
    "seed": 1,
    "data.name": "digits",
    "data.clients": 4,
    "data.samples_per_client": 60,
    "data.shift": "label_swap",
    "data.clusters": 2,
    "model.name": "mclr",
    "algorithm.name": "fl_hc",
    "algorithm.rounds_before": 1,
    "algorithm.n_clusters": 2,
    "local.epochs": 2,
    "network.clients": 4,
    "network.wait": 1.0,
}


def grid_of(run_config: dict[str, Any], config: dict[str, Any] | None = None) -> LocalGrid:
    app = client_app_from_config()
    nodes = {
        100 + i: LocalNode(app, {"partition-id": i, "num-partitions": 4, **(config or {})})
        for i in range(4)
    }
    return LocalGrid(nodes, run_config)


def serve(
    run_config: dict[str, Any], config: dict[str, Any] | None = None, *callbacks: Callback
) -> None:
    server_app_from_config(callbacks)(
        grid_of(run_config, config), Context(1, 0, {}, RecordDict(), run_config)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a network."""
    out = tmp_path_factory.mktemp("network") / "run"
    serve({**RUN_CONFIG, "network.out": str(out)}, None, TensorBoardTracker())
    return out


def test_a_tracker_follows_the_server(folder: Path):
    (events,) = (folder / "tensorboard").iterdir()
    assert events.name.startswith("events.out.tfevents")


def test_one_config_gives_the_same_run_over_a_grid_and_in_a_simulation(folder: Path):
    there = Run.load(folder)
    config = RunConfig.read(RUN_CONFIG).config
    here = config.run(config.federation(), device="cpu")
    assert [node.members for node in there.tree.nodes] == [node.members for node in here.tree.nodes]
    for ours, theirs in zip(here.tree.nodes, there.tree.nodes, strict=True):
        assert float((ours.params - theirs.params).abs().max()) < 1e-6
    assert there.summary["accuracy"] == pytest.approx(here.summary["accuracy"])
    assert there.summary["data"] == here.summary["data"]
    assert there.config["network"] == {
        "clients": 4,
        "wait": 1.0,
        "deadline": 600.0,
        "identity": "node",
        "largest_weight": 2.0,
        "largest_norm": 20.0,
        "out": str(folder),
        "encoding": "float32",
    }
    assert there.config["algorithm"] == without_unset(here.config["algorithm"])
    assert (folder / "figures").is_dir()


def test_lists_and_tables_are_given_as_text(tmp_path: Path):
    parts = {
        "model.name": "mlp",
        "model.freeze": '["3.bias"]',
        "model.adapter": '{targets = ["1"], rank = 2, train = ["3"]}',
        "signature.of": '["lora_B", "3.weight"]',
    }
    serve({**RUN_CONFIG, **parts, "network.out": str(tmp_path / "run")})
    run = Run.load(tmp_path / "run")
    assert [slot.name for slot in run.layout.parameters] == [
        "1.lora_A.weight",
        "1.lora_B.weight",
        "3.weight",
    ]
    assert {node.cached.shape[1] for node in run.tree.nodes[1:]} == {128 * 2 + 10 * 128}
    with pytest.raises(
        ConfigError,
        match=r"freeze of \[model\] should be a list with entries that are each a string, got '\[3'",
    ):
        RunConfig.read({"model.freeze": "[3"})


def test_its_rounds_and_tables_are_told(capsys: pytest.CaptureFixture[str], folder: Path):
    serve({**RUN_CONFIG, "network.out": str(folder), "rounds": 4})  # one round more
    told = capsys.readouterr().out
    assert "round 4, 4 clients trained, 2 clusters, accuracy " in told
    assert "round 3" not in told.splitlines()[0]
    assert "clusters" in told
    assert f"run folder: {folder}" in told.splitlines()[-1]


@pytest.fixture
def fedclade(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Call the command line; return its exit status and all that it says."""
    monkeypatch.setenv("COLUMNS", "300")

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedclade", *arguments])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


def test_the_command_line_does_not_resume_the_run_of_a_network(
    fedclade: Callable[..., tuple[int, str]], tmp_path: Path
):
    out = tmp_path / "run"

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    grid = grid_of(RUN_CONFIG)
    pull, pulls = grid.pull_messages, iter(range(1000))
    grid.pull_messages = lambda ids: stop() if next(pulls) > 4 else pull(ids)  # type: ignore[method-assign]
    context = Context(1, 0, {}, RecordDict(), {**RUN_CONFIG, "network.out": str(out)})
    with pytest.raises(KeyboardInterrupt):
        server_app_from_config()(grid, context)
    assert (out / "config.toml").exists()
    assert not (out / "summary.json").exists()
    before = sorted(out.rglob("*"))
    code, said = fedclade("resume", str(out))
    assert code == 2
    assert (
        f"{out} is the run of a network, which can continue only with its clients: start its ServerApp again"
        in said
    )
    assert sorted(out.rglob("*")) == before


class Interrupting(Callback):
    """Interrupts a run after its second round."""

    def on_round(self, record: RoundRecord, /) -> bool:
        return record.round == 2


def test_but_it_finishes_it_without_clients(
    fedclade: Callable[..., tuple[int, str]], tmp_path: Path
):
    config = {
        **RUN_CONFIG,
        "network.out": str(tmp_path / "run"),
        "rounds": 5,
        "stop.patience": 4,
        "keep_best": True,
    }
    config["data.validation_fraction"] = 0.2
    with pytest.raises(RunInterrupted):
        serve(config, None, Interrupting())
    code, said = fedclade("resume", str(tmp_path / "run"), "--finish")
    assert (code, "finished by hand after an interruption" in " ".join(said.split())) == (0, True)
    run = Run.load(tmp_path / "run")
    assert (run.summary["rounds"], run.config["stop"]["patience"], run.config["keep_best"]) == (
        2,
        4,
        True,
    )
    assert (
        fedclade(
            "export",
            str(tmp_path / "run"),
            "--client",
            "1",
            "--out",
            str(tmp_path / "m.safetensors"),
        )[0]
        == 0
    )


def test_a_server_app_that_is_started_again_finishes_it(tmp_path: Path):
    config = {**RUN_CONFIG, "network.out": str(tmp_path / "run"), "evaluate_every": 3}
    with pytest.raises(RunInterrupted):
        serve(config, None, Interrupting())
    serve({**config, "network.finish": True})
    run = Run.load(tmp_path / "run")
    assert (run.summary["stopped"]["by"], run.summary["rounds"]) == ("user", 2)
    assert "finish" not in run.config["network"]


def test_the_run_of_an_app_of_one_s_own_is_not_finished_by_its_config(
    fedclade: Callable[..., tuple[int, str]], tmp_path: Path
):
    with pytest.raises(RunInterrupted):
        federated(
            small_grid(federation_of(FOUR)),
            "fedavg",
            callbacks=[Interrupting()],
            folder=tmp_path / "run",
        )
    code, said = fedclade("resume", str(tmp_path / "run"), "--finish")
    assert code == 2
    assert (
        "the run cannot be finished from its saved config alone; start its ServerApp again with network.finish = true"
        in said
    )


def test_nor_gives_it_more_rounds(fedclade: Callable[..., tuple[int, str]], folder: Path):
    assert fedclade("resume", str(folder))[1].strip().endswith("there is nothing to continue")
    code, said = fedclade("resume", str(folder), "--rounds", "9")
    assert (code, "start its ServerApp again" in said) == (2, True)


def test_newcomers_are_assigned_to_the_run_of_a_network(
    fedclade: Callable[..., tuple[int, str]], folder: Path, tmp_path: Path
):
    (tmp_path / "new.toml").write_text(
        'seed = 1\n[data]\nname = "digits"\nclients = 8\nsamples_per_client = 40\nshift = "label_swap"\nclusters = 2\n'
    )
    code, said = fedclade(
        "assign", str(folder), "--config", str(tmp_path / "new.toml"), "--device", "cpu"
    )
    assert code == 0, said
    assert (folder / "newcomers.json").exists()


def test_a_permuted_run_is_nobodys_but_its_clients(
    fedclade: Callable[..., tuple[int, str]], tmp_path: Path
):
    (tmp_path / "secret").write_text("ab" * 32)
    out, new = tmp_path / "run", tmp_path / "new.toml"
    run_config = {**RUN_CONFIG, "rounds": 2, "privacy.permute": True, "network.out": str(out)}
    serve(run_config, {"secret-file": str(tmp_path / "secret")})
    new.write_text('[data]\nname = "digits"\nclients = 4\n')
    why = "the models of this run are permuted by a secret that only its clients know"
    for command in (
        ("assign", str(out), "--config", str(new)),
        ("export", str(out), "--client", "1", "--out", "m.safetensors"),
    ):
        code, said = fedclade(*command)
        assert (code, why in said) == (2, True), said
    code, said = fedclade("report", str(out))
    assert code == 0, said


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"a.b.c": 1}, "a key of the run config should be KEY or SECTION.KEY, got 'a.b.c'"),
        (
            {"data": '{name = "digits"}'},
            "a key of the run config should be KEY or SECTION.KEY, got 'data'",
        ),
        (
            {"network": '{out = "/tmp"}'},
            "a key of the run config should be KEY or SECTION.KEY, got 'network'",
        ),
        (
            {"presence": '{trace = "x"}'},
            "a key of the run config should be KEY or SECTION.KEY, got 'presence'",
        ),
        ({"round": 3}, "run config: unknown key 'round'; did you mean 'rounds'?"),
        ({"date.name": "digits"}, "unknown section 'date'; did you mean 'data'?"),
        ({"versions.fedclade": "1"}, "unknown section 'versions'"),
        ({"data.data_dir": "/etc"}, "data. of the run config: unknown key 'data_dir'"),
        (
            {"data.source_arguments": "{}"},
            "data. of the run config: unknown key 'source_arguments'",
        ),
        ({"network.clients": 0}, "network.clients should be at least 1, got 0"),
        ({"network.wait": 0.0}, "network.wait should be greater than 0, got 0.0"),
        ({"network.deadline": -1.0}, "network.deadline should be greater than 0, got -1.0"),
        (
            {"network.identity": "name"},
            "identity of .network. should be 'node' or 'number', got 'name'",
        ),
        ({"network.encoding": "zip"}, "unknown encoding 'zip'"),
        ({"network.clocks": 3}, "'clocks'"),
        ({"network.clients": "four"}, "clients"),
        ({"algorithm.name": "clf"}, ".algorithm. unknown algorithm 'clf'; did you mean 'cfl'?"),
        ({"algorithm.name": "clf", "network.clients": 0}, "(?s)'clf'.*network.clients"),
    ],
)
def test_a_run_config_is_checked(changes: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        RunConfig.read({**RUN_CONFIG, **changes})


def test_sections_have_defaults():
    read = RunConfig.read({})
    assert (read.network, read.apps) == (Network(), AppSettings())
    assert read.config.algorithm["name"] == "fedavg"


def refusal_of(config: dict[str, Any], run_config: dict[str, Any] | None = None) -> str:
    return reply_of(config, run_config)["refused"]


def reply_of(config: dict[str, Any], run_config: dict[str, Any] | None = None) -> Mapping[str, Any]:
    grid = LocalGrid({5: LocalNode(client_app_from_config(), config)}, run_config or RUN_CONFIG)
    (reply,) = grid.send_and_receive([hello_to(5)])
    return Content.of(reply.content).values


def test_a_node_says_what_is_wrong_with_its_config():
    assert refusal_of({}) == (
        "partition-id is missing in the node config of this client; set the "
        "number of the client whose data the node has, from 0"
    )
    assert "the federation has no client 4" in refusal_of({"partition-id": 4})
    assert "epsilon in the node config should be a number, got 'much'" in refusal_of(
        {"partition-id": 0, "epsilon": "much"}
    )
    assert "budget.epsilon should be greater than 0, got 0.0" in refusal_of(
        {"partition-id": 0, "epsilon": 0}
    )
    assert "unknown model" in refusal_of({"partition-id": 0}, {**RUN_CONFIG, "model.name": "mpl"})


def test_central_privacy_is_refused_by_the_server_and_by_each_client():
    config = {
        **RUN_CONFIG,
        "privacy.model": "central",
        "privacy.clip_norm": 1.0,
        "network.wait": 100.0,
    }
    config = {key: value for key, value in config.items() if not key.startswith("algorithm.")}
    why = 'privacy.model = "central" works only in a simulation'
    with pytest.raises(ConfigError, match=why):
        server_app_from_config()(LocalGrid({}, config), Context(1, 0, {}, RecordDict(), config))
    assert why in refusal_of({"partition-id": 0}, config)


OWN = """
from dataclasses import dataclass
from torch import nn
import fedclade
from fedclade.core import setting

@dataclass(frozen=True, kw_only=True)
class Mine(fedclade.FedAvg):
    unused: int = 1

@dataclass(frozen=True, kw_only=True)
class Passing(fedclade.Middleware):
    unused: int = setting(1, doc="Nothing depends on it.")

def linear(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[-1] ** 2, outputs))
"""


@pytest.fixture
def users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "users_app.py").write_text(OWN)
    (tmp_path / "users_trap.py").write_text("raise SystemExit('a client ran what a server named')")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("users_app", None)


def test_a_client_imports_nothing_that_a_run_names(users_own: Path):
    trace = users_own / "was-here"
    attack = {"model.name": "os:system", "model.command": f"touch {trace}"}
    told = "[model] model 'os:system' is not imported, because the server chose the name, and "
    assert told in refusal_of({"partition-id": 0}, {**RUN_CONFIG, **attack})
    assert not trace.exists()
    for key in ("model.name", "data.partition", "data.shift", "task.name", "task.loss"):
        assert "is not imported, because the server" in refusal_of(
            {"partition-id": 0}, {**RUN_CONFIG, key: "users_trap:f"}
        )


@pytest.mark.parametrize("files", ["/etc/*.csv", "../*.csv", "mine/../../*.csv"])
def test_a_client_reads_no_files_that_a_run_names_elsewhere(files: str):
    run_config = {"data.files": files, "data.target": "y", "network.clients": 1}
    told = (
        f"data.files should be a pattern inside a node's data folder (data-dir in its node config: mine), got "
        f"{files!r}; in the run config, give a path without '..' that is relative to this folder"
    )
    assert refusal_of({"partition-id": 0, "data-dir": "mine"}, run_config) == told


@pytest.mark.parametrize("files", ["/etc/*.csv", "*.csv"])
def test_a_table_in_text_does_not_stand_for_the_whole_data_section(files: str, tmp_path: Path):
    """Its keys would escape all that is said of data.files."""
    run_config = {"data": f'{{files = "{files}", target = "y"}}', "network.clients": 1}
    for key in ("data", "data.drift.files", "data.x.y"):
        refused = refusal_of(
            {"partition-id": 0, "data-dir": str(tmp_path)}, {**run_config, key: run_config["data"]}
        )
        assert "a key of the run config should be KEY or SECTION.KEY, got 'data'" in refused


def test_a_client_opens_no_trace_of_presence_that_a_run_names(tmp_path: Path):
    run_config = {**RUN_CONFIG, "presence.trace": str(tmp_path / "secret.csv")}
    assert refusal_of({"partition-id": 0}, run_config) == (
        "section [presence] of the run config is for simulations only; leave it out"
    )


@pytest.mark.parametrize("vectors", ["/etc/passwd", "../../secret.txt"])
def test_a_client_reads_no_word_vectors_that_a_run_names_elsewhere(vectors: str):
    told = (
        f"data.vectors should be a path inside a node's data folder (data-dir in its node config: mine), got "
        f"{vectors!r}; in the run config, give a path without '..' that is relative to this folder"
    )
    run_config = {"data.name": "sent140", "data.vectors": vectors, "network.clients": 1}
    assert refusal_of({"partition-id": 0, "data-dir": "mine"}, run_config) == told


def test_the_list_of_keys_has_all_keys_of_data_that_comes_along():
    functions: list[Any] = [load_federation, FilesSettings, OwnSettings, FolderSettings]
    functions += [source.load for source in SOURCES.values()]
    functions += [partition.split for partition in PARTITIONS.values()]
    functions += [shift.views for shift in SHIFTS.values()]
    keys = {"name"}.union(*(known_arguments(function) for function in functions))
    others = {"data_dir", "seed", "newcomers", "newcomer_samples"}
    assert {key for key in keys - others if not key.endswith("_arguments")} == DATA_KEYS


def test_data_of_ones_own_has_keys_of_its_own():
    check_keys({"data.name": "my_data:hospitals", "data.ward": "north"})
    with pytest.raises(ConfigError, match="unknown key 'ward'"):
        check_keys({"data.name": "digits", "data.ward": "north"})


@pytest.mark.parametrize("folder", ["/etc", "../other"])
def test_a_client_maps_no_folder_that_a_run_names_elsewhere(folder: str):
    told = (
        f"data.folder should be a path inside a node's data folder (data-dir in its node config: mine), got "
        f"{folder!r}; in the run config, give a path without '..' that is relative to this folder"
    )
    run_config = {"data.folder": folder, "network.clients": 1}
    assert refusal_of({"partition-id": 0, "data-dir": "mine"}, run_config) == told


def test_a_client_imports_what_its_node_config_or_its_app_names(users_own: Path):
    run_config = {**RUN_CONFIG, "model.name": "users_app:linear"}
    assert "is not imported, because the server" in refusal_of(
        {"partition-id": 0, "imports": "users_app:other"}, run_config
    )
    node = LocalNode(client_app_from_config(), {"partition-id": 0, "imports": "users_app:linear"})
    of_its_app = LocalNode(client_app_from_config(["users_app:linear"]), {"partition-id": 0})
    for each in (node, of_its_app):
        (reply,) = LocalGrid({5: each}, run_config).send_and_receive([hello_to(5)])
        assert Content.of(reply.content).values["size"] == 60


def test_the_algorithm_is_the_servers_affair(users_own: Path):
    run_config = {
        **RUN_CONFIG,
        "algorithm.name": "users_app:Mine",
        "network.out": str(users_own / "run"),
        "rounds": 1,
    }
    without = {key: value for key, value in run_config.items() if not key.startswith("algorithm.")}
    serve({**without, "algorithm.name": "users_app:Mine", "algorithm.unused": 3})
    run = Run.load(users_own / "run")
    assert run.summary["algorithm"] == "users_app:Mine"
    assert run.config["algorithm"] == {"name": "users_app:Mine", "unused": 3}


def test_middleware_is_the_servers_affair(users_own: Path):
    run_config = {
        **RUN_CONFIG,
        "middleware.users_app:Passing.unused": 3,
        "network.out": str(users_own / "run"),
        "rounds": 1,
    }
    serve(run_config)
    config = Run.load(users_own / "run").config
    assert config["middleware"] == {"users_app:Passing": {"unused": 3}}


def test_what_only_a_simulation_can_draw_is_refused():
    config = {**RUN_CONFIG, "faults.dropout": 0.1, "newcomers.clients": 2}
    with pytest.raises(
        ConfigError,
        match=r"(?s)\[faults\] of the run config is for simulations.*\[newcomers\] of the run config is",
    ):
        RunConfig.read(config)


def test_files_are_read_in_the_nodes_own_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("FEDCLADE_DATA_DIR", raising=False)
    rows = "age,back\n" + "".join(f"{30 + k}.5,{'yes' if k % 3 else 'no'}\n" for k in range(10))
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(rows)
    config = {
        "data.files": "*.csv",
        "data.target": "back",
        "data.standardize": "client",
        "model.name": "mclr",
    }
    node = {"partition-id": 1, "data-dir": str(tmp_path)}
    assert "refused" not in reply_of(node, config)
    assert "(data-dir in its node config: not set)" in refusal_of({"partition-id": 1}, config)


def test_clients_are_scaled_and_weighed_by_the_examples_of_all(tmp_path: Path):
    for k, name in enumerate("abcd"):
        rows = (
            f"{30 * k + row}.5,{'icu' if row % 4 else 'surgery'},{'yes' if row % 3 else 'no'}"
            for row in range(20)
        )
        (tmp_path / f"{name}.csv").write_text("age,ward,back\n" + "\n".join(rows) + "\n")
    run_config = {
        **{
            "data.files": "*.csv",
            "data.target": "back",
            "data.standardize": "federated",
            "task.name": "binary",
        },
        **{
            "task.class_weights": "balanced",
            "model.name": "mclr",
            "rounds": 2,
            "network.clients": 4,
        },
        "aggregate.clip_above": 1e9,  # as in a simulation of honest clients
    }
    serve({**run_config, "network.out": str(tmp_path / "run")}, {"data-dir": str(tmp_path)})
    there, config = Run.load(tmp_path / "run"), RunConfig.read(run_config).config
    here = config.run(config.federation(tmp_path), device="cpu")
    torch.testing.assert_close(
        there.tree.nodes[0].params, here.tree.nodes[0].params, rtol=0, atol=1e-6
    )
    assert there.summary["inputs"]["mean"] == pytest.approx(here.summary["inputs"]["mean"])
    assert (there.config["data"]["standardize"], there.config["task"]["class_weights"]) == (
        "federated",
        "balanced",
    )


def test_an_app_does_not_need_the_parts_of_flower_that_the_local_grid_is_made_of():
    script = "import sys, fedclade.flower; assert 'fedclade.flower.local_grid' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_lists_of_a_config_are_strings_with_commas():
    given = {
        "task.metrics": "balanced_accuracy, f1",
        "task.class_weights": "1,2,0.5",
        "signature.of": "*.weight",
    }
    config = RunConfig.read({**RUN_CONFIG, **given, "model.freeze": "a.*,b"}).config
    assert config.task.metrics == ("balanced_accuracy", "f1")
    assert config.task.class_weights == (1.0, 2.0, 0.5)
    assert config.parts.freeze == ("a.*", "b")
    assert config.signature.of == ("*.weight",)


def test_columns_to_drop_are_a_string_with_commas():
    data = {
        "data.files": "*.csv",
        "data.target": "back",
        "data.drop": "id, note",
        "data.separator": ";",
    }
    config = RunConfig.read({**data, "network.clients": 4}).config
    assert (config.data["drop"], config.data["separator"]) == (("id", "note"), ";")


@pytest.mark.parametrize(
    ("key", "word"), [("task.class_weights", "balanced"), ("model.personal", "head")]
)
def test_words_that_stand_for_lists_stay_words(key: str, word: str):
    section, name = key.split(".")
    assert RunConfig.read({**RUN_CONFIG, key: word}).as_dict()[section][name] == word


def test_class_weights_that_are_no_numbers_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"task.class_weights should be 'balanced' or a list of numbers, got '1,x'",
    ):
        RunConfig.read({**RUN_CONFIG, "task.class_weights": "1,x"})
