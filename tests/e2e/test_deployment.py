"""Federations of real processes: what starts them, and what becomes of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import tomli_w
import torch
from credentials import make_certificates, make_node_key
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization.ssh import (
    load_ssh_private_key,
    load_ssh_public_key,
)
from deployment import HOST, Deployment, free_ports
from processes import DeploymentError, Process
from safetensors.torch import load_file

from fedclade import Run
from fedclade.config import Config
from fedclade.core.arguments import flat
from fedclade.core.updates import DROPPED_OUT, TOO_LATE
from fedclade.flower.from_config import RunConfig

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
SPLITS_IN_1 = {"rounds": 2, "evaluate_every": 2, "algorithm.eps1": 10.0}
SPLITS_IN_2 = {"rounds": 2, "evaluate_every": 2, "algorithm.eps1": 2.0}
"""By the norm of the clusters' mean update, which is above 2 in round 1, and below in round 2. Rounds are few, as each
question to the clients takes seconds."""
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes are looked up in /proc"
)


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of all living processes whose Flower home is in a folder."""
    marker, found = f"FLWR_HOME={folder}".encode(), list[str]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # which has ended meanwhile, or is another user's
            continue
    return found


def eventually(holds: Callable[[], bool], seconds: float = 5) -> None:
    """Wait for what the system does in its own time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str | None:
    """Connect over TLS; return the protocol."""
    with socket.create_server((HOST, 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):  # the client has told what it does not like
                server.wrap_socket(connection, server_side=True).close()

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            with (
                socket.create_connection(listening.getsockname()) as connection,
                client.wrap_socket(connection, server_hostname=name) as secured,
            ):
                return secured.version()
        finally:
            answering.join()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_certificates(tmp_path, (HOST, "localhost"))
    return tmp_path


def test_a_client_accepts_the_certificate_under_its_names_and_no_other(keys):
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(keys / "server.pem", keys / "server.key")
    client = ssl.create_default_context(cafile=keys / "ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    assert handshake(server, client, HOST) == "TLSv1.3"
    assert handshake(server, client, "localhost") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for 'example\.org'"):
        handshake(server, client, "example.org")
    with pytest.raises(
        ssl.SSLCertVerificationError, match="certificate verify failed: unable to get"
    ):
        handshake(server, ssl.create_default_context(), HOST)


def test_keys_are_private_of_the_right_curve_and_never_overwritten(keys):
    public = make_node_key(keys / "node")
    key = load_ssh_private_key((keys / "node").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert key.public_key() == load_ssh_public_key(public.read_bytes())
    assert [oct((keys / name).stat().st_mode)[-3:] for name in ("node", "server.key")] == [
        "600",
        "600",
    ]
    before = (keys / "node").read_bytes()
    with pytest.raises(FileExistsError, match="node"):
        make_node_key(keys / "node")
    with pytest.raises(FileExistsError, match=r"server\.key"):
        make_certificates(keys, (HOST,))
    assert (keys / "node").read_bytes() == before


def test_free_ports_are_free_and_differ():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as listening:
            listening.bind((HOST, port))


def test_a_list_of_node_configs_has_one_for_each_node(tmp_path):
    why = r"node_config has 1 texts, and there are 2 nodes; give one for each"
    with pytest.raises(DeploymentError, match=why):
        Deployment(tmp_path, EXAMPLE, nodes=2, node_config=["min-honest=2"])


def python(script: str, log: Path) -> Process:
    return Process("the script", [sys.executable, "-c", script], log, os.environ)


def test_a_process_that_ends_too_early_shows_the_end_of_its_log(tmp_path):
    process = python(
        "print('\\x1b[91mno port\\x1b[0m is free'); raise SystemExit(3)", tmp_path / "log"
    )
    with pytest.raises(
        DeploymentError,
        match=r"the script ended with exit status 3 before it answers; .*log:\n  no port is",
    ):
        process.wait_until(lambda: False, "answers", 30)


def test_a_process_that_is_never_ready_is_told(tmp_path):
    process = python("import time; time.sleep(60)", tmp_path / "log")
    try:
        with pytest.raises(
            DeploymentError, match=r"was not ready within 0\.2 s \(ready: it answers\)"
        ):
            process.wait_until(lambda: False, "answers", 0.2)
        assert process.running
        assert not process.wait(0.01)
    finally:
        process.kill()
    assert not process.running


@pytest.mark.usefixtures("default_signals")
def test_a_process_ends_with_all_that_it_started_even_if_that_outlives_it(tmp_path):
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time\\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\nprint(1, flush=True)\\ntime.sleep(60)'])\n"
        "print(child.pid, flush=True)\nchild.wait()"
    )
    process = python(script, tmp_path / "log")
    process.wait_until(lambda: len(process.output().split()) == 2, "starts its child", 30)
    child = next(int(number) for number in process.output().split() if number != "1")
    process.terminate()
    assert process.wait(10)
    os.kill(child, 0)  # it is still there
    process.kill()
    eventually(lambda: state(child) in ("gone", "Z"))


@needs_proc
def test_nothing_outlives_whoever_started_it_and_was_killed(tmp_path):
    """SIGKILL leaves no time to stop anything; neither does a child that ignores SIGTERM end by itself."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(300)"
    script = (
        "import os, sys, time\nfrom pathlib import Path\nfrom processes import Process\n"
        f"started = [Process(str(k), [sys.executable, '-c', {child!r}], Path(sys.argv[1]) / str(k), dict(os.environ))"
        " for k in range(2)]\n"
        "print(*(each.group for each in started), flush=True)\n"
        "while True:\n    time.sleep(1)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), *sys.path])}
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        children = [int(number) for number in parent.stdout.readline().split()]
        eventually(lambda: all((tmp_path / str(k)).read_text() for k in range(2)), 60)
        parent.kill()
    assert len(children) == 2
    eventually(lambda: {state(child) for child in children} <= {"gone", "Z"}, 60)


def state(process: int) -> str:
    """Return the state of a process as Linux names it, or ``gone``; a zombie (Z) only waits to be forgotten."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


@needs_proc
@pytest.mark.usefixtures("default_signals")
def test_the_command_stops_every_process_when_it_is_told_to_end(tmp_path):
    command = [
        sys.executable,
        str(EXAMPLE / "federation.py"),
        "--nodes",
        "1",
        "--out",
        str(tmp_path / "it"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as federation:
        assert federation.stdout is not None
        line = next(line for line in federation.stdout if "joined" in line or not line)
        assert "1 SuperNodes have joined over TLS" in line
        running = " ".join(processes_of(tmp_path / "it"))
        assert all(
            name in running for name in ("flower-superlink", "flower-superexec", "flower-supernode")
        )
        federation.send_signal(signal.SIGTERM)
        _, errors = federation.communicate(timeout=60)
    assert federation.returncode == 128 + signal.SIGTERM, errors
    eventually(lambda: not processes_of(tmp_path / "it"))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Four clients who are connected to a SuperLink over TLS; they can be told to hold or to spoil an answer."""
    folder = tmp_path_factory.mktemp("federation")
    app = folder / "app"
    app.mkdir()
    shutil.copy(EXAMPLE / "pyproject.toml", app)
    shutil.copy(Path(__file__).with_name("faulty_app.py"), app / "fedclade_app.py")
    with Deployment(folder / "it", app, node_config="min-honest=2 max-colluders=0") as deployment:
        yield deployment
    if Path("/proc/self/environ").exists():
        eventually(lambda: not processes_of(deployment.folder))


def test_a_federation_of_processes_ends_as_its_simulation_does(federation, tmp_path):
    """The same clusters, and the same models but for rounding."""
    federation.run({**SPLITS_IN_1, "network.out": str(tmp_path / "real")})
    config = RunConfig.read({**run_config(federation.app), **SPLITS_IN_1}).config
    config.run(config.federation(), folder=tmp_path / "simulated", device="cpu")
    real, simulated = Run.load(tmp_path / "real"), Run.load(tmp_path / "simulated")
    assert real.tree.leaf_of == simulated.tree.leaf_of == {0: 1, 2: 1, 1: 2, 3: 2}
    models = [
        load_file(tmp_path / name / "tree" / "tree.safetensors") for name in ("real", "simulated")
    ]
    assert len(models[0]) > 0
    torch.testing.assert_close(*models, rtol=0, atol=1e-5)
    assert (tmp_path / "real/figures/accuracy.png").is_file()


@pytest.mark.scheduled  # tests/flower/test_http_inbox.py has such replies, without processes
def test_what_one_client_sends_costs_no_other_its_answer(federation, tmp_path):
    """One signs as another, one sends what is no protobuf, one sends 40 kB that unpack to 77 MB; the fourth trains."""
    for node, what in enumerate(("forge", "garble", "bloat")):
        (federation.node_folder(node) / f"{what}-1").touch()
    try:
        federation.run(
            {"rounds": 1, "network.out": str(tmp_path / "run"), "network.deadline": 600.0}
        )
    finally:
        for node, what in enumerate(("forge", "garble", "bloat")):
            (federation.node_folder(node) / f"{what}-1").unlink()
    run = Run.load(tmp_path / "run")
    (why,) = [
        event["clients"]
        for event in run.events
        if event["kind"] == "left_out" and event["query"] == "train"
    ]
    assert sorted(why) == ["0", "1", "2"]
    assert why["0"] == (
        "the reply is signed by another key than the one that the client registered with, so the server ignores the "
        "client until it registers again"
    )
    assert why["1"].startswith("the message cannot be read: DecodeError")
    assert "bytes once it is unpacked, expected at most" in why["2"]
    assert run.metric_rows[0]["clients_trained"] == 1


def test_a_run_that_fails_is_told_though_flower_ends_well(federation, capfd):
    with pytest.raises(
        DeploymentError, match=r"run \d+ ended as 'finished:failed'; its log is above"
    ):
        federation.run({"rounds": -1})
    assert "rounds should be at least 0, got -1" in capfd.readouterr().out


def test_a_key_is_registered_once_and_a_key_that_is_none_is_refused(federation, tmp_path):
    federation.flwr.register(federation.key(0).with_suffix(".pub"))
    (tmp_path / "bad.pub").write_text("no key")
    with pytest.raises(DeploymentError, match=r"flwr supernode register .*bad.pub deployment: "):
        federation.flwr.register(tmp_path / "bad.pub")
    assert len(federation.flwr("supernode", "list", "deployment")["nodes"]) == 4


def run_config(app: Path) -> dict[str, bool | float | int | str]:
    """Return the run config of an app, as Flower gives it to a ServerApp."""
    return flat(
        tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    )


def test_a_federation_outlives_what_befalls_its_processes(federation, tmp_path):
    """In round 1 a client answers NaN, and another is killed; in round 2 the server is. A stranger wants to join."""
    out, settings = tmp_path / "run", {**SPLITS_IN_2, "network.out": str(tmp_path / "run")}
    spoil = federation.node_folder(3) / "spoil-1"
    spoil.touch()
    held = [federation.node_folder(1) / "hold-1", federation.node_folder(2) / "hold-2"]
    for file in held:
        file.touch()
    known = federation.node_ids()
    first = federation.submit(settings)

    eventually(held[0].with_name("holding-1").exists, 240)
    federation.kill_node(1)
    held[0].unlink()
    stranger = tmp_path / "stranger"
    make_node_key(stranger)
    with pytest.raises(
        DeploymentError,
        match=r"node-1 ended with exit status 1 before it joined(.|\n)*Failed to activate",
    ):
        federation.start_node(1, key=stranger)
    assert "No SuperNode found with the given public key" in federation.log("superlink")
    assert federation.start_node(1) == known[1]

    eventually(held[1].with_name("holding-2").exists, 240)
    federation.kill_server_app()
    assert not (out / "summary.json").exists()
    held[1].unlink()
    federation.flwr.stop(first)
    federation.run(settings)
    spoil.unlink()

    run = Run.load(out)
    assert run.tree.leaf_of == {0: 1, 2: 1, 1: 2, 3: 2}
    assert [(row["round"], row["clients_trained"]) for row in run.metric_rows] == [(1, 2), (2, 4)]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    left_out = {event["round"]: event["clients"] for event in events if event["kind"] == "left_out"}
    # Flower gives up the message of a dead node once its heartbeats are missed; who is back before never was away.
    assert left_out[1].pop("1") in (DROPPED_OUT, TOO_LATE)
    assert left_out == {1: {"3": "9610 of 9610 entries of the update are NaN or infinite"}}
    members = json.loads((out / "clients.json").read_text())["clients"]
    assert (
        {int(client): member["node"] for client, member in members.items()}
        == known
        == federation.node_ids()
    )


def app_of_sums(federation: Deployment, folder: Path, algorithm: str) -> tuple[Path, Config]:
    """Write the app with secure aggregation, one round of it; return its folder, and its config for a simulation."""
    app = folder / "app"
    shutil.copytree(federation.app, app)
    project = tomllib.loads((app / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    config |= {"rounds": 1, "evaluate_every": 1, "algorithm": {"name": algorithm}}
    config["network"] |= {
        "out": str(folder / "real"),
        "deadline": 600.0,
        "secure_aggregation": True,
        "secure_norm": 8.0,
        "secure_fewest": 2,
        "secure_colluders": 0,
    }
    (app / "pyproject.toml").write_text(tomli_w.dumps(project))
    return app, RunConfig.read(run_config(app)).config


def assert_same_models(real: Run, simulated: Run) -> None:
    """Whole numbers of 32 bits are added up in place of floats, so there is rounding."""
    assert real.tree.leaf_of == simulated.tree.leaf_of
    for ours, theirs in zip(real.tree.leaves, simulated.tree.leaves, strict=True):
        torch.testing.assert_close(ours.params, theirs.params, rtol=0, atol=1e-5)


@pytest.mark.scheduled  # tests/flower/secure/test_runs.py compares such runs on nodes in one process
def test_sums_of_two_clusters_end_as_the_simulation_does(federation, tmp_path):
    app, config = app_of_sums(federation, tmp_path, "oracle")
    federation.flwr.follow(federation.flwr.submit(app, {}))
    real = Run.load(tmp_path / "real")
    assert not [event for event in real.events if event["kind"] == "left_out"]
    assert real.tree.leaf_of == {0: 1, 2: 1, 1: 2, 3: 2}
    assert_same_models(real, config.run(config.federation(), device="cpu"))


@pytest.mark.scheduled  # tests/flower/secure has clients that stop at each step, without processes
def test_a_sum_outlives_a_node_that_is_killed_before_it_sends_its_update(federation, tmp_path):
    """The others have shares of its secrets, and take its masks off; the sum is that of the three. It stays dead."""
    app, config = app_of_sums(federation, tmp_path, "fedavg")
    hold = federation.node_folder(3) / "hold-1"
    hold.touch()
    run = federation.flwr.submit(app, {})
    eventually(hold.with_name("holding-1").exists, 480)
    federation.kill_node(3)
    federation.flwr.follow(run)
    real = Run.load(tmp_path / "real")
    (why,) = [
        event["clients"]
        for event in real.events
        if event["kind"] == "left_out" and event["query"] == "train"
    ]
    assert set(why) == {"3"}
    assert why["3"] in (DROPPED_OUT, TOO_LATE)
    three = config.run(config.federation().shard([0, 1, 2]), device="cpu")
    torch.testing.assert_close(
        real.tree.nodes[0].params, three.tree.nodes[0].params, rtol=0, atol=1e-5
    )
