"""The example app in Flower's own simulation engine: on Ray, started by ``flwr run``, as its users do."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from deployment import HOST, OFFLINE, free_ports
from flower_command import FlowerCommand, program
from processes import Process
from safetensors.torch import load_file
from test_deployment import EXAMPLE, SPLITS_IN_1, eventually, needs_proc, processes_of, run_config

from fedclade import Run
from fedclade.flower.from_config import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_signals")]

ENGINE = "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2"


@pytest.fixture
def flwr(tmp_path: Path) -> Iterator[FlowerCommand]:
    """Start a SuperLink that simulates its SuperNodes; in the end see that nothing runs any more."""
    port, control = free_ports(2)
    (home := tmp_path / "home").mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{HOST}:{port}"\ninsecure = true\n'
    )
    environment = {
        **{**os.environ, **OFFLINE, "FLWR_HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    }
    addresses = ["--host", HOST, "--port", str(port), "--control-api-address", f"{HOST}:{control}"]
    options = [
        "--insecure",
        "--simulation",
        "--disable-runtime-dependency-installation",
        *addresses,
    ]
    superlink = Process(
        "superlink",
        [program("flower-superlink"), *options],
        tmp_path / "superlink.log",
        environment,
    )
    try:
        superlink.wait_until(lambda: answers(f"http://{HOST}:{port}/health"), "answers", 60)
        yield FlowerCommand("here", environment)
        superlink.terminate()
        superlink.wait(30)
    finally:
        superlink.kill()
    eventually(lambda: not processes_of(tmp_path), 30)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except (URLError, TimeoutError):
        return False


def simulated_by_flower(
    flwr: FlowerCommand, settings: Mapping[str, object]
) -> tuple[Run, set[int]]:
    """Run the example app; return the run, and the ids of its nodes."""
    chosen = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    run = str(
        flwr("run", str(EXAMPLE), "here", "--run-config", chosen, "--federation-config", ENGINE)[
            "run-id"
        ]
    )
    flwr.follow(run)
    assert flwr.status(run) == "finished:completed"
    out = Path(str(settings["network.out"]))
    members = json.loads((out / "clients.json").read_text())["clients"]
    return Run.load(out), {member["node"] for member in members.values()}


@needs_proc
def test_flowers_simulation_ends_as_ours_does_and_goes_on_with_more_rounds(
    tmp_path: Path, flwr: FlowerCommand
):
    """The same clusters, and the same models but for rounding. When it goes on all nodes are new, and known again."""
    settings = {**SPLITS_IN_1, "network.identity": "number", "network.out": str(tmp_path / "there")}
    there, nodes = simulated_by_flower(flwr, settings)
    assert there.tree.leaf_of == {0: 1, 2: 1, 1: 2, 3: 2}
    compare(tmp_path, settings)

    more, others = simulated_by_flower(flwr, {**settings, "rounds": 3})
    assert not nodes & others
    assert [row["round"] for row in more.metric_rows] == [1, 2, 3]
    compare(tmp_path, {**settings, "rounds": 3})


def compare(folder: Path, settings: Mapping[str, object]) -> None:
    """Compare the run in ``there`` with a simulation of the same config."""
    config = RunConfig.read({**run_config(EXAMPLE), **settings}).config
    here = folder / f"here-{settings['rounds']}"
    assert (
        config.run(config.federation(), folder=here, device="cpu").tree.leaf_of
        == Run.load(folder / "there").tree.leaf_of
    )
    ours, theirs = (
        load_file(run / "tree" / "tree.safetensors") for run in (here, folder / "there")
    )
    assert len(ours) > 0
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
