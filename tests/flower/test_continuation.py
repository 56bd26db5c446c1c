"""A finished run of a network that continues for more rounds: from its end, and without charging a client twice."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.common.config import flatten_dict, fuse_dicts, parse_config_args

from fedclade import CheckpointError, ConfigError, Run, RunError
from fedclade.channel import Budget
from fedclade.channel.privacy import DifferentialPrivacy
from fedclade.cli import main
from fedclade.core.files import remove
from fedclade.flower import continuation, server_app_from_config
from fedclade.flower.continuation import as_toml, continued_settings
from tests.flower.grids import CFL_OF_TWO, FOUR, federated, grid_of, housed
from tests.flower.test_from_config import RUN_CONFIG
from tests.flower.test_from_config import grid_of as configured_grid
from tests.tiny import federation_of

METHODS = {"cfl": CFL_OF_TWO} | {
    name: name for name in ("fedavg", "ditto", "scaffold", "apfl", "fedem", "finetune", "ifca")
}


def run_on(folder: Path, algorithm: Any, rounds: int, **settings: Any) -> Run:
    """Run on the same clients as before: their folders are beside the run's folder."""
    grid = housed(grid_of(federation_of(FOUR), **settings.pop("app", {})), folder / "clients")
    return federated(
        grid, algorithm, rounds=rounds, folder=folder / "run", checkpoint_every=0, **settings
    )


def without_seconds(run: Run) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("seconds", "bytes"))}
        for row in run.metric_rows
    ]


@pytest.mark.parametrize("name", METHODS)
def test_it_equals_a_run_of_as_many_rounds_and_rewrites_none(name: str, tmp_path: Path):
    algorithm = METHODS[name]
    first = run_on(tmp_path / "continued", algorithm, 2).metric_rows
    continued = run_on(tmp_path / "continued", algorithm, 4)
    whole = run_on(tmp_path / "whole", algorithm, 4)
    assert continued.metric_rows[:2] == Run.load(tmp_path / "continued/run").metric_rows[:2]
    assert continued.metric_rows[:2] == first
    assert without_seconds(continued) == without_seconds(whole)
    assert continued.client_rows == whole.client_rows
    for ours, theirs in zip(continued.tree.nodes, whole.tree.nodes, strict=True):
        assert ours.members == theirs.members
        assert ours.params.equal(theirs.params)


def test_no_client_trains_or_pays_for_a_round_twice(tmp_path: Path):
    privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)
    app = {"privacy": privacy, "budget": Budget(epsilon=1e6)}

    def ledgers(folder: Path) -> list[Any]:
        files = sorted(folder.glob("clients/*/privacy.json"))
        assert len(files) == 4
        return [json.loads(file.read_text()) for file in files]

    run_on(tmp_path / "continued", "fedavg", 2, app=app, privacy=privacy)
    after_two = ledgers(tmp_path / "continued")
    run_on(tmp_path / "continued", "fedavg", 4, app=app, privacy=privacy)
    run_on(tmp_path / "whole", "fedavg", 4, app=app, privacy=privacy)
    assert ledgers(tmp_path / "continued") == ledgers(tmp_path / "whole") != after_two


def test_without_a_checkpoint_it_is_refused_and_left_as_it_is(tmp_path: Path):
    run_on(tmp_path, "fedavg", 2)
    remove(tmp_path / "run/checkpoints")
    text = "is finished after 2 rounds, but its folder has no checkpoint, so its clients would have"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        run_on(tmp_path, "fedavg", 4)
    assert Run.load(tmp_path / "run").summary["rounds"] == 2


def test_an_older_checkpoint_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "run"
    grid = grid_of(federation_of(FOUR))
    federated(grid, "fedavg", rounds=2, folder=folder, checkpoint_every=1)
    shutil.rmtree(folder / "checkpoints/round-000002")
    federated(
        grid_of(federation_of(FOUR)), "fedavg", rounds=3, folder=folder, network=network_by_number()
    )
    assert "is of round 1, so the clients repeat rounds 2 to 2, and clients with" in caplog.text


def network_by_number() -> Any:
    from fedclade.flower import Network

    return Network(clients=4, wait=0.5, deadline=0.5, identity="number")


# The command line


@pytest.fixture
def fedclade(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Call the command line; return its exit status and all that it prints."""
    monkeypatch.setenv("COLUMNS", "300")

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedclade", *arguments])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


APP: dict[str, Any] = {
    "rounds": 6,
    "seed": 0,
    "data": {"name": "digits", "clients": 4, "samples_per_client": 60},
    "model": {"name": "mclr"},
    "algorithm": {"name": "fedavg"},
    "local": {"epochs": 2, "lr": 0.5},
    "network": {"clients": 4, "wait": 1.0, "out": "runs/flower"},
}


def write_app(folder: Path, config: dict[str, Any]) -> Path:
    import tomli_w

    folder.mkdir()
    text = tomli_w.dumps({"tool": {"flwr": {"app": {"config": config}}}})
    (folder / "pyproject.toml").write_text(text)
    return folder


def serve(run_config: dict[str, Any]) -> None:
    context = Context(1, 0, {}, RecordDict(), run_config)
    server_app_from_config()(configured_grid(run_config), context)


class FlowerCommand:
    """Stands for the command ``flwr run``: reads its arguments by Flower's own code, and runs the app here."""

    def __init__(self) -> None:
        self.command: list[str] = []

    def __call__(self, command: list[str], *, check: bool) -> Any:
        self.command = command
        given = parse_config_args([command[command.index("--run-config") + 1]])
        serve(fuse_dicts(flatten_dict(APP), given))
        return SimpleNamespace(returncode=0)


def test_resume_starts_the_app_again_with_the_settings_of_the_run(
    fedclade: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "run"
    changed = {"rounds": 2, "seed": 7, "local.lr": 0.05, "network.out": str(folder)}
    serve({**flatten_dict(APP), **changed})
    app = write_app(tmp_path / "app", APP)
    flower = FlowerCommand()
    monkeypatch.setattr(continuation.subprocess, "run", flower)
    options = ["--rounds", "3", "--app", str(app), "--superlink", "deployment"]
    code, printed = fedclade("resume", str(folder), *options)
    assert code == 0, printed
    assert printed.strip().endswith(f"run folder: {folder}")
    assert Path(flower.command[0]).name == "flwr"
    assert flower.command[1:4] == ["run", str(app), "deployment"]
    assert flower.command[-1] == "--stream"
    run = Run.load(folder)
    settings = (run.summary["rounds"], run.config["seed"], run.config["local"]["lr"])
    assert settings == (3, 7, 0.05)
    serve({**flatten_dict(APP), **changed, "rounds": 3, "network.out": str(tmp_path / "whole")})
    whole = Run.load(tmp_path / "whole")
    assert torch.equal(run.tree.nodes[0].params, whole.tree.nodes[0].params)
    assert fedclade("resume", str(folder))[1].strip().endswith("there is nothing to continue")


def test_without_an_app_it_teaches_both_ways(
    fedclade: Callable[..., tuple[int, str]], tmp_path: Path
):
    folder = tmp_path / "run"
    serve({**RUN_CONFIG, "rounds": 1, "network.out": str(folder)})
    code, printed = fedclade("resume", str(folder), "--rounds", "9")
    assert code == 2
    assert "start its ServerApp again with the same run config, but with rounds = 9" in printed
    assert f"fedclade resume {folder} --rounds 9 --app DIR" in printed


def test_a_run_that_does_not_reach_its_end_is_an_error(
    fedclade: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "run"
    serve({**flatten_dict(APP), "rounds": 1, "network.out": str(folder)})
    app = write_app(tmp_path / "app", APP)

    def fails(command: list[str], *, check: bool) -> Any:
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(continuation.subprocess, "run", fails)
    code, printed = fedclade("resume", str(folder), "--rounds", "3", "--app", str(app))
    assert code == 2
    assert f"the run in {folder} has not reached the end of 3 rounds" in printed
    assert "ended with exit status 1" in printed

    def missing(command: list[str], *, check: bool) -> Any:
        raise FileNotFoundError("no flwr")

    monkeypatch.setattr(continuation.subprocess, "run", missing)
    with pytest.raises(RunError, match=r"cannot start .*flwr: no flwr; install Flower with"):
        continuation.continue_run(folder, app, 3, None)


def test_an_app_without_the_keys_or_without_a_file_is_an_error(tmp_path: Path):
    folder = tmp_path / "run"
    serve({**flatten_dict(APP), "rounds": 1, "network.out": str(folder)})
    app = write_app(tmp_path / "app", {k: v for k, v in APP.items() if k != "rounds"})
    text = "has no key rounds in [tool.flwr.app.config], and `flwr run` can change only keys that "
    with pytest.raises(ConfigError, match=re.escape(text) + r".*add a line: rounds = 3"):
        continued_settings(folder, app, 3)
    text = "pyproject.toml should be the pyproject.toml of a Flower app, with the run config in"
    with pytest.raises(ConfigError, match=re.escape(text)):
        continued_settings(folder, tmp_path, 3)


def test_only_differing_keys_are_passed(tmp_path: Path):
    folder = tmp_path / "run"
    serve({**flatten_dict(APP), "rounds": 1, "local.lr": 0.25, "network.out": str(folder)})
    app = write_app(tmp_path / "app", APP)
    found = continued_settings(folder, app, None)
    assert found == {"rounds": 1, "network.out": str(folder), "local.lr": 0.25}


def test_settings_are_written_as_flower_reads_them(tmp_path: Path):
    settings = {"rounds": 3, "a.b": "x 'y' \"ä\"", "c": True, "d": ["head.*", "e"], "f": 0.5}
    (tmp_path / "a.toml").write_text(as_toml(settings), encoding="utf-8")
    found = parse_config_args([str(tmp_path / "a.toml")])
    assert found == {**settings, "d": '["head.*", "e"]'}


def test_app_is_refused_for_a_simulation(fedclade: Callable[..., tuple[int, str]], tmp_path: Path):
    from fedclade import simulate
    from tests.tiny import linear

    simulate("fedavg", linear(), federation_of(FOUR), rounds=1, folder=tmp_path / "run")
    code, printed = fedclade("resume", str(tmp_path / "run"), "--rounds", "2", "--app", "x")
    assert code == 2
    assert "--app x starts the app of a network again, but" in printed


def test_a_run_of_no_rounds_evaluates_over_a_network_and_can_be_given_rounds(tmp_path: Path):
    run = run_on(tmp_path / "given", "fedavg", 0)
    assert [row["round"] for row in run.metric_rows] == [0]
    assert sorted(row["client"] for row in run.client_rows) == [0, 1, 2, 3]
    longer = run_on(tmp_path / "given", "fedavg", 2)
    whole = run_on(tmp_path / "whole", "fedavg", 2)
    assert longer.client_rows == whole.client_rows
