"""The dashboard as a server: what it tells whom, how soon, and what it costs the run."""

import http.client
import json
import socket
import time
from pathlib import Path

import pytest

from fedclade.config import check_config
from fedclade.core.errors import RunError
from fedclade.report.page import dashboard as dashboard_module
from fedclade.report.page.dashboard import HOST, Dashboard
from fedclade.runs import Callback, RoundRecord
from fedclade.runs.store import Run

DIGITS = {
    "rounds": 3,
    "data": {
        "name": "digits",
        "clients": 4,
        "samples_per_client": 40,
        "shift": "label_swap",
        "clusters": 2,
    },
    "model": {"name": "mclr"},
    "algorithm": {"name": "cfl", "split_rounds": [2]},
}


class Seen(Callback):
    """Keeps the run after each round."""

    def __init__(self) -> None:
        self.runs = list[Run]()

    def on_round(self, record: RoundRecord, /) -> None:
        run = record.so_far()
        assert run is not None
        self.runs.append(run)


@pytest.fixture(scope="module")
def rounds() -> list[Run]:
    """A run after each of its three rounds."""
    config, seen = check_config(DIGITS), Seen()
    config.run(config.federation(), callbacks=[seen])
    return seen.runs


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_module, "PATIENCE", 0.0)


def ask(dashboard: Dashboard, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(HOST, dashboard.port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def state(dashboard: Dashboard, seen: str = "") -> dict:
    code, body, _ = ask(dashboard, f"/state?seen={seen}")
    assert code == 200
    return json.loads(body)


def test_it_serves_the_page_and_tells_how_far_the_run_has_come(rounds: list[Run], tmp_path: Path):
    with Dashboard("mine <b>", 3, tmp_path, 0) as dashboard:
        code, page, headers = ask(dashboard, "/")
        assert code == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert "<h1>mine &lt;b&gt;</h1>" in page
        assert "connect-src 'self'" in page
        assert state(dashboard) == {"round": 0, "status": "Waiting for the first of 3 rounds …"}
        dashboard.show(rounds[0])
        first = state(dashboard)
        assert (first["round"], first["version"], first["finished"]) == (1, "1", False)
        assert first["status"].startswith("Round 1 of 3, accuracy ")
        assert [part["id"] for part in first["page"]["sections"]][:2] == ["scores", "tree"]
        assert "scores-0" in first["page"]["figures"]
        again = state(dashboard, seen="1")
        assert "page" not in again, "what a browser has seen is not sent again"
        assert again["cards"] == first["cards"]


def test_the_numbers_are_always_those_of_the_last_round_and_figures_wait_until_they_may(
    rounds: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dashboard_module, "TIMES_A_BUILD", 1e6)
    with Dashboard("mine", 3, tmp_path, 0) as dashboard:
        dashboard.show(rounds[0])
        assert state(dashboard)["version"] == "1"
        dashboard.show(rounds[1])
        second = state(dashboard, seen="1")
        assert (second["round"], second["latest"]) == (2, "2")
        assert "page" not in second
        dashboard.show(rounds[2], over=True)
        third = state(dashboard, seen="1")
        assert (third["round"], third["version"], third["finished"]) == (3, "3 over", True), (
            "the end waits for nothing"
        )
        assert third["status"].startswith("Finished after 3 rounds, accuracy ")


def test_figures_are_built_once_for_all_browsers(
    rounds: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    built: list[int] = []
    build = dashboard_module.run_page
    monkeypatch.setattr(
        dashboard_module, "run_page", lambda s: built.append(s.run.summary["rounds"]) or build(s)
    )
    with Dashboard("mine", 3, tmp_path, 0) as dashboard:
        for run in rounds:
            dashboard.show(run)
        assert built == [], "nobody asked"
        for _ in range(3):
            state(dashboard)
        assert built == [3]


@pytest.mark.parametrize("name", ["evil.example", "evil.example:{port}", "127.0.0.1", ""])
def test_who_asks_by_another_name_is_refused(tmp_path: Path, name: str):
    with Dashboard("mine", 3, tmp_path, 0) as dashboard:
        for path in ("/", "/state"):
            code, body, _ = ask(dashboard, path, Host=name.format(port=dashboard.port))
            assert (code, body) == (403, f"this host name is not allowed: open {dashboard.url}")
        assert ask(dashboard, "/state", Host=f"localhost:{dashboard.port}")[0] == 200
        assert ask(dashboard, "/config.toml")[:2] == (404, "not found: the pages are / and /state")


def test_it_listens_on_this_machine_alone(tmp_path: Path):
    with Dashboard("mine", 3, tmp_path, 0) as dashboard:
        assert dashboard.url == f"http://127.0.0.1:{dashboard.port}/"
        others = {
            info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        }
        for address in others - {HOST}:
            with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
                socket.create_connection((address, dashboard.port), timeout=2)
        # whatever other addresses this machine has
        assert dashboard._server.socket.getsockname()[0] == HOST


def test_a_port_that_is_taken_is_told(tmp_path: Path):
    with (
        Dashboard("mine", 3, tmp_path, 0) as first,
        pytest.raises(
            RunError,
            match=rf"the dashboard cannot listen on port {first.port}: .*; choose another port with --port",
        ),
    ):
        Dashboard("second", 3, tmp_path, first.port)


def test_a_page_that_cannot_be_drawn_does_not_end_the_run(
    rounds: list[Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def fail(subject: object) -> None:
        raise ValueError("no such figure")

    monkeypatch.setattr(dashboard_module, "run_page", fail)
    with Dashboard("mine", 3, tmp_path, 0) as dashboard:
        dashboard.show(rounds[0])
        assert ask(dashboard, "/state")[:2] == (500, "{}")
    assert "the dashboard cannot build its page" in caplog.text


def test_the_end_waits_for_a_browser_that_is_there_and_for_nobody_else(
    rounds: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dashboard_module, "PATIENCE", 1.0)

    def seconds(*, watched: bool, told: bool) -> float:
        with Dashboard("mine", 3, tmp_path, 0) as dashboard:
            dashboard.show(rounds[1])
            if watched:
                state(dashboard)
            dashboard.show(rounds[2], over=True)
            if told:
                state(dashboard)
            start = time.perf_counter()
        return time.perf_counter() - start

    assert seconds(watched=True, told=False) >= 1.0
    assert seconds(watched=True, told=True) < 1.0
    assert seconds(watched=False, told=False) < 1.0
