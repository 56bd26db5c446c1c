"""What operators see of a run over a network while it is on: files, metrics and log lines."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedclade.core import ConfigError, ParameterTree, RunError, RunInterrupted, UpdateError
from fedclade.flower import Network, server_app
from fedclade.flower.server_log import describe_round
from fedclade.report.page import Dashboard
from fedclade.runs import EVENTS, LIVE_METRICS, Callback, FollowedRun, RoundRecord, Row, Run
from tests.flower.grids import CFL_OF_TWO, FOUR, LOCAL, federated, grid_of, network_of, node_of
from tests.tiny import federation_of, perceptron

CONTEXT = Context(1, 0, {}, RecordDict(), {})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_and_metrics_can_be_read_while_the_run_is_on(tmp_path: Path):
    grid, folder, port = grid_of(federation_of(FOUR)), tmp_path / "run", free_port()
    seen: list[dict[str, Any]] = []

    def look(row: Row, tree: ParameterTree) -> None:
        if row["round"] == 2:
            grid.nodes.pop(node_of(3))  # a client whose node is switched off
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            text = reply.read().decode()
        progress = FollowedRun(folder).progress()
        seen.append(
            {
                "events": lines(folder / EVENTS),
                "metrics": lines(folder / LIVE_METRICS),
                "served": dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"),
                "progress": (progress.state, progress.round, progress.rounds),
                "mode": (folder / EVENTS).stat().st_mode & 0o777,
            }
        )

    run = federated(
        grid, CFL_OF_TWO, folder=folder, on_round=look, network=network_of(grid, metrics=port)
    )
    assert [each["progress"] for each in seen] == [("running", n, 4) for n in (1, 2, 3, 4)]
    for number, each in enumerate(seen, 1):
        assert [row["round"] for row in each["metrics"]] == list(range(1, number + 1))
        assert each["events"] == [row for row in run.events if row["round"] <= number]
        assert each["mode"] == 0o600
        served = each["served"]
        assert float(served["fedclade_round"]) == number
        assert float(served["fedclade_connected_clients"]) == (4 if number < 3 else 3)
    assert "split" in {row["kind"] for row in seen[1]["events"]}
    assert "disconnected" in {row["kind"] for row in seen[2]["events"]}
    assert [row["clients_present"] for row in run.metric_rows] == [4, 4, 3, 3]
    assert lines(folder / EVENTS) == run.events
    assert not (folder / LIVE_METRICS).exists(), "the table of the finished run has the metrics"
    assert FollowedRun(folder).progress().state == "finished"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_a_port_in_use_is_reported_before_a_client_is_asked(tmp_path: Path):
    grid = grid_of(federation_of(FOUR))
    asked: list[object] = []
    for node in grid.nodes.values():
        node.app = lambda message, context: asked.append(message)  # type: ignore[assignment]
    with socket.create_server(("127.0.0.1", 0)) as server:
        network = network_of(grid, metrics=server.getsockname()[1])
        with pytest.raises(RunError, match=r"cannot be served on 127\.0\.0\.1:\d+: .*in use"):
            federated(grid, "fedavg", folder=tmp_path / "run", network=network)
    assert asked == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("port", [0, 65536])
def test_a_port_that_cannot_be_is_refused(port: int):
    with pytest.raises(
        ConfigError, match=rf"network\.metrics should be in \[1, 65535\], got {port}"
    ):
        Network(metrics=port)


def test_a_continued_run_writes_no_round_twice(tmp_path: Path):
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"

    def stop(row: Row, tree: ParameterTree) -> None:
        if row["round"] == 3:
            raise UpdateError("the power is cut")

    settings: dict[str, Any] = {"folder": folder, "checkpoint_every": 1}
    with pytest.raises(UpdateError):
        federated(grid, CFL_OF_TWO, on_round=stop, **settings)
    progress = FollowedRun(folder).progress()
    assert (progress.state, progress.round, progress.error) == ("failed", 3, "the power is cut")
    assert [row["round"] for row in lines(folder / LIVE_METRICS)] == [1, 2, 3]
    (folder / LIVE_METRICS).write_text((folder / LIVE_METRICS).read_text()[:-5])  # a torn line
    assert [row["round"] for row in FollowedRun(folder).progress().metrics] == [1, 2]
    seen: list[list[int]] = []
    states: list[str] = []

    def look(row: Row, tree: ParameterTree) -> None:
        seen.append([each["round"] for each in lines(folder / LIVE_METRICS)])
        states.append(FollowedRun(folder).progress().state)

    run = federated(grid, CFL_OF_TWO, on_round=look, **settings)
    assert seen[0] == list(range(1, seen[0][-1] + 1))
    assert seen[-1] == [1, 2, 3, 4]
    assert set(states) == {"running"}
    assert lines(folder / EVENTS) == run.events
    assert {path.name for path in folder.iterdir()} >= {"summary.json"}
    assert not {"ended.json", LIVE_METRICS} & {path.name for path in folder.iterdir()}


def test_an_interrupted_run_and_a_killed_one_are_called_interrupted(tmp_path: Path):
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"
    with pytest.raises(RunInterrupted):
        federated(grid, "fedavg", folder=folder, callbacks=[_Interrupting()], checkpoint_every=1)
    assert FollowedRun(folder).progress().state == "interrupted"
    (folder / "ended.json").unlink()  # as a process that is killed leaves the folder
    (folder / ".lock").touch()
    followed = FollowedRun(folder)
    assert followed.progress().state == "interrupted"
    run = followed.run()
    assert run is not None
    assert followed.run() is run, "it is read again only if there is another checkpoint"


class _Interrupting(Callback):
    """Interrupts the run after round 2."""

    def on_round(self, record: RoundRecord, /) -> bool:
        return record.round == 2


def test_the_live_report_follows_a_run_by_its_folder(tmp_path: Path):
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"
    statuses: list[str] = []
    with Dashboard("run", 0, folder, 0) as dashboard:

        def look(row: Row, tree: ParameterTree) -> None:
            dashboard.follow(FollowedRun(folder))
            statuses.append(json.loads(dashboard.state(""))["status"])

        federated(grid, CFL_OF_TWO, folder=folder, on_round=look, checkpoint_every=1)
        dashboard.follow(FollowedRun(folder))
        end = json.loads(dashboard.state(""))
    assert statuses[0] == "Round 1 of 4; waiting for the first evaluation …"
    assert re.fullmatch(
        r"Round 2 of 4, accuracy [\d.]+ %; below is round 1, the newest checkpoint", statuses[1]
    )
    assert end["status"].startswith("Finished after 4 rounds, accuracy ")
    assert end["finished"]
    assert "tree" in {section["id"] for section in end["page"]["sections"]}


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match="contains no run yet; name the run folder"):
        FollowedRun(tmp_path)


def test_a_folder_that_is_removed_while_it_is_followed_is_named(tmp_path: Path):
    folder = tmp_path / "run"
    federated(grid_of(federation_of(FOUR)), "fedavg", folder=folder, rounds=1)
    followed = FollowedRun(folder)
    shutil.rmtree(folder)
    with pytest.raises(RunError, match=r"run has been removed, .* fails in its first round"):
        followed.progress()


def test_the_line_of_a_round_names_clients_bytes_and_seconds():
    row = {
        "round": 2,
        "clients_trained": 3,
        "clusters": 1,
        "accuracy_mean": 0.5,
        "ari": None,
        "clients_present": 5,
        "bytes_up": 1_250_000,
        "bytes_down": 990,
        "seconds": 1.25,
    }
    assert describe_round(row) == (
        "round 2, 3 clients trained, 1 cluster, accuracy 0.500, 5 connected, 1.2 MB up, 990 B down, "
        "1.2 s"
    )


def test_the_log_is_json_lines_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"
    before = [(each.handlers, each.propagate, each.level) for each in loggers()]
    app = server_app(
        CFL_OF_TWO,
        perceptron,
        rounds=3,
        local=LOCAL,
        network=network_of(grid, log="json"),
        folder=folder,
    )
    app(grid, CONTEXT)
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rounds = [each for each in out if each.get("event") == "round"]
    assert [each["round"] for each in rounds] == [1, 2, 3]
    assert rounds[2]["message"].startswith("round 3, 4 clients trained, 2 clusters, ")
    assert rounds[2]["clients_present"] == 4
    assert rounds[2]["level"] == "info"
    assert out[-1]["event"] == "finished"
    assert (out[-1]["clusters"], out[-1]["folder"]) == (2, str(folder))
    assert before == [(each.handlers, each.propagate, each.level) for each in loggers()]
    assert Run.load(folder).summary["rounds"] == 3


def test_an_error_is_a_json_line_as_well(capsys: pytest.CaptureFixture[str]):
    grid = grid_of(federation_of(FOUR))
    network = network_of(grid, log="json", wait=0.01)
    grid.nodes.clear()
    with pytest.raises(UpdateError):
        server_app("fedavg", perceptron, rounds=1, network=network)(grid, CONTEXT)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["level"] == "error"
    assert line["message"] == "the run has ended by an error"
    assert "UpdateError" in line["exception"]


def loggers() -> list[logging.Logger]:
    return [logging.getLogger(name) for name in ("fedclade", "flwr")]
