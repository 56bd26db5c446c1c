"""The same run in Flower's own simulation engine: on Ray, started by ``flwr run``, as its users do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest
import torch

from fedclade import Run
from fedclade.flower.from_config import RunConfig

HOST = "127.0.0.1"
LONGEST = 150
"""Seconds for the run; on two idle cores it takes about 40, most of them until Ray is up."""

APP = """
from fedclade.flower import client_app_from_config, server_app_from_config

server = server_app_from_config()
client = client_app_from_config()
"""

PROJECT = """
[project]
name = "digits"
version = "1.0.0"

[tool.flwr.app]
publisher = "tests"
fab-include = ["app.py"]

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
"""

CONFIG = {
    **{"rounds": 3, "data.name": "digits", "data.clients": 4, "data.shift": "label_swap", "data.clusters": 2},
    **{"model.name": "mlp", "local.epochs": 3, "network.clients": 4},
    **{"algorithm.name": "cfl", "algorithm.eps1": 1.3, "algorithm.eps2": 0.3, "algorithm.min_cluster_size": 2},
}


def app_in(folder: Path, config: Mapping[str, object]) -> Path:
    """Write an app of the given run config, whose values TOML writes as JSON does."""
    folder.mkdir()
    (folder / "app.py").write_text(APP)
    (folder / "pyproject.toml").write_text(PROJECT + "".join(f"{k} = {json.dumps(v)}\n" for k, v in config.items()))
    return folder


def eventually(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until something holds, for so long; return whether it does."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.2)
    return holds()


def answers(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/health", timeout=1).is_success
    except httpx.HTTPError:
        return False


def processes_of(home: Path) -> dict[int, str]:
    """Return the command lines of all living processes with this FLWR_HOME, by process id."""
    found: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={home}\0".encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # which has ended meanwhile, or is another user's
            continue
    return found


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Offline, with a home of its own; what still runs at the end is killed."""
    (home := tmp_path / "home").mkdir()
    yield {
        **os.environ,
        **{"FLWR_HOME": str(home), "NO_PROXY": HOST, "RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0"},
        **{"FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"},
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    }
    for process in processes_of(home):
        os.kill(process, signal.SIGKILL)


@pytest.fixture
def superlink(tmp_path: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Start a SuperLink that simulates its SuperNodes; return its address."""
    with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as other:
        port, control = one.getsockname()[1], other.getsockname()[1]
    command = ["flower-superlink", "--insecure", "--simulation", "--host", HOST, "--port", str(port)]
    with (tmp_path / "superlink.log").open("wb") as log:
        running = subprocess.Popen(
            [*command, "--control-api-address", f"{HOST}:{control}", "--disable-runtime-dependency-installation"],
            **{"env": environment, "stdout": log, "stderr": log},
        )
    assert eventually(lambda: answers(f"{HOST}:{port}"), 60), (tmp_path / "superlink.log").read_text()
    yield f"{HOST}:{port}"
    running.terminate()
    running.wait(30)


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert eventually(lambda: not processes_of(tmp_path / "home"), 30), processes_of(tmp_path / "home")


def test_flowers_simulation_finds_the_same_clusters_and_models(
    tmp_path: Path, environment: dict[str, str], nothing_left: None, superlink: str
):
    out = tmp_path / "run"
    config = {**CONFIG, "network.out": str(out)}
    (tmp_path / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{superlink}"\ninsecure = true\n'
    )
    resources = "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2"
    ended = subprocess.run(
        ["flwr", "run", app_in(tmp_path / "app", config), "here", "--stream", "--federation-config", resources],
        **{"env": environment, "timeout": LONGEST, "capture_output": True, "text": True},
    )
    assert (out / "summary.json").exists(), ended.stdout + ended.stderr  # flwr returns 0 for a run that failed

    there, here = Run.load(out), (same := RunConfig.read(config).config).run(same.federation())
    assert [node.members for node in there.tree.nodes] == [node.members for node in here.tree.nodes]
    assert [node.members for node in there.tree.leaves] == [(0, 2), (1, 3)]
    for ours, theirs in zip(here.tree.nodes, there.tree.nodes, strict=True):
        torch.testing.assert_close(theirs.params, ours.params, rtol=0, atol=1e-5)
    assert there.summary["accuracy"] == pytest.approx(here.summary["accuracy"], abs=1e-3)
