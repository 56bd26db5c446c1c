"""The federation of ``containers/compose.yaml``, its very commands as processes of this machine: no engine is needed.

What is put in place of what a container has: a folder for each volume, a port for each container, and 127.0.0.1 for the
name of the server. What only an engine does (images, networks, users, and so the proxy between networks) is not tested.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import HOST, OFFLINE, free_ports
from processes import Process
from test_deployment import eventually, needs_proc, processes_of

from fedclade import Run

CONTAINERS = Path(__file__).parents[2] / "containers"
APP = CONTAINERS.parent / "examples" / "flower"
COMPOSITION: dict[str, Any] = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = {
    name: service for name, service in COMPOSITION["services"].items() if "profiles" not in service
}
OBSERVERS: dict[str, dict[str, Any]] = {
    name: service for name, service in COMPOSITION["services"].items() if "profiles" in service
}
MINE = "/var/lib/fedclade"


@dataclass
class Composed:
    """The services as processes; a service is started when those are ready that it depends on."""

    folder: Path
    environment: dict[str, str]
    ports: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = ["superlink", *(name for name in SERVICES if name.startswith("node-"))]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        for name in named_volumes():
            (self.folder / name).mkdir()

    def here(self, service: str, words: list[str]) -> list[str]:
        """Return a container's command as it is on this machine."""
        mounts = {target: source for source, target in mounts_of(service)}
        found = []
        for word in words:
            for target, source in sorted(mounts.items(), key=lambda each: -len(each[0])):
                there = {"../examples/flower": APP, ".": CONTAINERS}.get(
                    source, self.folder / source
                )
                word = re.sub(rf"{target}(?=[/\"]|$)", str(there), word)
            if word == "/volumes":
                word = str(self.folder)
            word = re.sub(
                r"\b(superlink|proxy|localhost):9092", f"{HOST}:{self.ports['superlink']}", word
            )
            found.append({"0.0.0.0": HOST, "9092": str(self.ports["superlink"])}.get(word, word))
        program = (
            Path(sys.executable)
            if found[0] == "python"
            else Path(sys.executable).with_name(found[0])
        )
        node = ["--port", str(self.ports[service])] if service.startswith("node-") else []
        return [str(program), *found[1:], *node]

    def command(self, service: str) -> list[str]:
        """Return the command of a service; files belong to who runs the tests."""
        return self.here(
            service, shlex.split(SERVICES[service]["command"].replace("--owner 10001 ", ""))
        )

    def run(self, service: str) -> subprocess.CompletedProcess[str]:
        """Run a service to its end."""
        return subprocess.run(
            self.command(service), env=self.environment, capture_output=True, text=True, check=False
        )

    def start(self, service: str) -> Process:
        """Start a service that goes on, in the folder that is its volume."""
        moved = ["env", "-C", str(self.folder / service), *self.command(service)]
        return Process(service, moved, self.folder / f"{service}.log", self.environment)

    def healthy(self, service: str) -> bool:
        """Ask as the service's own health check does."""
        check = self.here(service, SERVICES[service]["healthcheck"]["test"][1:])
        return (
            subprocess.run(check, env=self.environment, capture_output=True, check=False).returncode
            == 0
        )


def mounts_of(service: str) -> list[tuple[str, str]]:
    """Return what a service mounts, and where."""
    return [tuple(each.split(":")[:2]) for each in SERVICES[service]["volumes"]]


def named_volumes() -> set[str]:
    return {source for service in SERVICES for source, _ in mounts_of(service) if source[0] != "."}


def conditions(service: str) -> dict[str, str]:
    return {
        other: each["condition"] for other, each in SERVICES[service].get("depends_on", {}).items()
    }


def test_every_service_sees_its_own_volume_alone():
    for service in SERVICES:
        seen = {source for source, target in mounts_of(service) if source[0] != "."}
        if service == "credentials":
            assert seen == named_volumes()
        else:
            assert seen == {"operator" if service == "registration" else service}
            assert (next(iter(seen)), MINE) in mounts_of(service)
    assert SERVICES["credentials"]["user"] == "root"
    assert {name: service["user"] for name, service in SERVICES.items() if "user" in service} == {
        "credentials": "root",
        "proxy": "10001",
    }
    assert all(
        service["cap_drop"] == ["ALL"] and "ports" not in service for service in SERVICES.values()
    )


def test_clients_reach_the_proxy_alone_which_passes_on_the_interface_of_nodes_alone():
    """Whoever reaches the SuperLink's control interface can start code on every node: it asks for no password."""
    networks = {name: {*service["networks"]} for name, service in SERVICES.items()}
    nodes = {name for name in SERVICES if name.startswith("node-")}
    assert {name for name, of_service in networks.items() if "clients" in of_service} == {
        *nodes,
        "proxy",
    }
    assert all(networks[name] == {"clients"} for name in nodes)
    assert networks["proxy"] == {"clients", "server"}
    closed = {name: {"internal": True} for name in ("clients", "server", "metrics")}
    assert COMPOSITION["networks"] == {**closed, "page": {}}
    assert all("proxy:9092" in SERVICES[name]["command"] for name in nodes)
    config = (CONTAINERS / "nginx.conf").read_text()
    locations = dict(re.findall(r"location (\S+) \{\s*(\S+ [^;]+);", config))
    assert locations == {"/v1/fleet/": "proxy_pass https://superlink:9092", "/": "return 403"}
    assert "proxy_ssl_verify on;" in config


def test_prometheus_and_grafana_reach_the_metrics_alone_and_have_what_they_read():
    assert {name: service["networks"] for name, service in OBSERVERS.items()} == {
        "prometheus": ["metrics"],
        "grafana": ["metrics", "page"],
    }
    assert [name for name, each in SERVICES.items() if "metrics" in each["networks"]] == [
        "superexec"
    ]
    for service in OBSERVERS.values():
        assert service["profiles"] == ["monitoring"]
        assert service["cap_drop"] == ["ALL"]
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"])
        for mount in service["volumes"]:
            assert (CONTAINERS / mount.split(":")[0]).exists()
    assert OBSERVERS["grafana"]["ports"] == ["127.0.0.1:3000:3000"], "for this machine alone"
    collected = yaml.safe_load((CONTAINERS / "monitoring/prometheus.yml").read_text())
    (job,) = collected["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["superexec:9100"]}]
    (source,) = yaml.safe_load((CONTAINERS / "monitoring/grafana/datasources.yaml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    image = SERVICES["superexec"]["build"]["args"]["EXTRAS"]
    assert "monitoring" in image.split(",")


def test_the_image_asks_nobody_on_the_network_and_has_a_user_of_its_own():
    image = (CONTAINERS / "Containerfile").read_text()
    assert all(f"{name}={value}" in image for name, value in OFFLINE.items())
    assert re.findall(r"^USER (\d+)$", image, flags=re.MULTILINE) == ["10001"]
    copied = {
        word
        for line in re.findall(r"^COPY (?!--)(.*) ", image, flags=re.MULTILINE)
        for word in line.split()
    }
    sent = {
        line[1:]
        for line in (CONTAINERS / "Containerfile.dockerignore").read_text().splitlines()
        if line[0] == "!"
    }
    assert copied == sent
    assert all((CONTAINERS.parent / each).exists() for each in copied)


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    """Start all that ``operator`` depends on, in its order; stop it in the end."""
    settings = {
        "APP": str(APP),
        "FLWR_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "RUN_CONFIG": "rounds=1 evaluate_every=1 algorithm.eps1=10.0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    it = Composed(tmp_path, {**os.environ, **OFFLINE, **settings})
    order = [
        *TopologicalSorter({service: conditions(service) for service in SERVICES}).static_order()
    ]
    waited = {other: each for service in SERVICES for other, each in conditions(service).items()}
    with ExitStack() as stack:
        for service in order:
            if service in ("operator", "proxy"):  # nodes of this machine reach the SuperLink itself
                continue
            if waited[service] == "service_completed_successfully":
                done = it.run(service)
                assert done.returncode == 0, done.stdout + done.stderr
                continue
            process = it.start(service)
            stack.callback(process.kill)
            stack.callback(process.wait, 10)
            stack.callback(process.terminate)
            if waited[service] == "service_healthy":
                process.wait_until(lambda service=service: it.healthy(service), "is healthy", 60)
        yield it
    eventually(lambda: not processes_of(tmp_path))


@pytest.mark.scheduled  # test_deployment.py runs such a federation of processes, started by an example
@needs_proc
def test_the_composed_commands_make_a_federation_that_finds_its_clusters(composed: Composed):
    done = composed.run("operator")
    logs = [f"{path.name}\n{path.read_text()[-2000:]}" for path in composed.folder.glob("*.log")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    assert "finished:completed" in done.stdout.splitlines()[-1]
    run = Run.load(composed.folder / "superexec/run")
    assert run.tree.leaf_of == {0: 1, 2: 1, 1: 2, 3: 2}
    assert {path.name for path in (composed.folder / "node-3").glob("*.key")} == {
        "client.key",
        "node.key",
    }
    assert "the keys are there already" in composed.run("credentials").stdout
