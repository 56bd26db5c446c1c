"""The page of a run while it goes on, served to browsers on this machine and to nobody else."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Lock, Thread
from time import monotonic, thread_time
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedclade.core import RunError
from fedclade.report.page.one_run import run_cards, run_page
from fedclade.report.page.section import Page, cards_html, page_html, state_json
from fedclade.report.run_view import RunView
from fedclade.report.score import Score
from fedclade.runs import Callback, EndRecord, RoundRecord, Run

HOST = "127.0.0.1"

PORT = 8321
"""Where the dashboard is if nothing else is said."""

TIMES_A_BUILD = 100
"""So many times as long as a build of the page took passes until there is another: it takes 1 % of a run's time.

By the clock, since a build keeps all of a run's threads waiting while it holds Python's lock; but the build counts with
the processor's seconds, so that other things that keep the machine busy do not draw the pause out.
"""

WATCHED = 5.0
"""Seconds after its last request for which a browser is taken to be there still."""

PATIENCE = 3.0
"""Seconds that the end of a run is kept for a browser that is there."""

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_log = logging.getLogger(__name__)


class Dashboard(Callback):
    """Serves the page of a run at 127.0.0.1; a callback, to be used as a context. Port 0 is any that is free.

    What it costs the run is what it takes to copy its lists after every round. The page is built only when a browser
    asks, in a thread of its own, and no more often than :data:`TIMES_A_BUILD` allows; the numbers at its head are
    always those of the last round.

    Raises
    ------
    MissingExtraError
        If jinja2 or plotly is not installed.
    RunError
        If the port is taken.
    """

    def __init__(self, name: str, rounds: int, folder: Path, port: int = PORT) -> None:
        self._rounds, self._folder = rounds, folder
        self.page = page_html(Page(name, "", [], []), live=True).encode()
        self._run: Run | None = None
        self._over = False
        self._built: tuple[int, str] = (0, "{}")
        self._built_end = False
        """The round that the page was last built for, and its parts as JSON."""
        self._not_before = 0.0
        """When it may be built again, by the clock."""
        self._head: tuple[Run | None, dict[str, Any]] = (None, {})
        """The run that the page's head was last written for, and what that is."""
        self._last_request = -WATCHED
        self._building, self._sent = Lock(), Condition()
        self._sent_the_end = False
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(self))
        except OSError as error:
            raise RunError(f"port {port} cannot be listened at: {error}; name another with --port") from error
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    def __enter__(self) -> Dashboard:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and monotonic() - self._last_request < WATCHED:
            with self._sent:
                self._sent.wait_for(lambda: self._sent_the_end, PATIENCE)
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{HOST}:{self.port}/"

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_port

    def show(self, run: Run, *, over: bool = False) -> None:
        """Take over how far the run has come, or how it ended."""
        self._run, self._over = run, over

    def on_round(self, record: RoundRecord, /) -> None:
        """Take over how far the run has come, from its first evaluation on."""
        if (run := record.so_far()) is not None:
            self.show(run)

    def on_end(self, record: EndRecord, /) -> None:
        """Take over how the run ended, if it finished."""
        if record.reason == "finished" and record.run is not None:
            self.show(record.run, over=True)

    def state(self, seen: str) -> str:
        """Return, as JSON, what is new to a page that has seen this version of the run; empty for none."""
        self._last_request = monotonic()
        run, over = self._run, self._over
        if run is None:
            return json.dumps({"round": 0, "status": f"Waiting for the first of {self._rounds} rounds …"})
        number, parts = self._parts(run, over)
        head = self._head_of(run, over)
        with self._sent:
            self._sent_the_end |= over and number == run.summary["rounds"]
            self._sent.notify_all()
        if (version := _version(number, over)) == seen:
            return json.dumps(head)
        return f'{json.dumps(head | {"version": version})[:-1]}, "page": {parts}}}'

    def _parts(self, run: Run, over: bool) -> tuple[int, str]:
        """Return the round that the parts of the page are of, and these; they are built anew if it is time."""
        with self._building:
            number = run.summary["rounds"]
            # The page of the last round may have been built before that was evaluated, or another round was kept.
            differs = over and not self._built_end and ("stopped" in run.summary or run.model_round < number)
            if differs or (self._built[0] < number and (over or monotonic() >= self._not_before)):
                start = thread_time()
                page = run_page(RunView(run, folder=self._folder))
                self._built = number, state_json(page)
                self._built_end = over
                self._not_before = monotonic() + TIMES_A_BUILD * (thread_time() - start)
            return self._built

    def _head_of(self, run: Run, over: bool) -> dict[str, Any]:
        """Return the head of the page, which is written once for every round."""
        if self._head[0] is not run:
            number, score = run.summary["rounds"], Score.of_run(run)
            mean = f"{score.label} {score.text(score.mean(run.summary))}"
            so_far = f"Finished after {number} rounds" if over else f"Round {number} of {self._rounds}"
            head = {"round": number, "status": f"{so_far}, {mean}", "finished": over}
            head |= {"latest": _version(number, over), "cards": cards_html(run_cards(RunView(run)))}
            self._head = run, head
        return self._head[1]


def _version(number: int, over: bool) -> str:
    return f"{number}{' over' if over else ''}"


def _handler(dashboard: Dashboard) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests to a dashboard."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version = "fedclade"
        sys_version = ""

        def do_GET(self) -> None:
            """Send the page or its state; requests by another name than this machine's are refused."""
            if self.headers.get("Host", "") not in [f"{name}:{dashboard.port}" for name in (HOST, "localhost")]:
                # A name that others have bound to 127.0.0.1 would let their pages read this one (DNS rebinding).
                self._answer(HTTPStatus.FORBIDDEN, f"ask for {dashboard.url}".encode(), "text/plain")
                return
            requested = urlsplit(self.path)
            if requested.path == "/":
                self._answer(HTTPStatus.OK, dashboard.page, "text/html; charset=utf-8")
            elif requested.path == "/state":
                self._answer(*self._state(requested.query), "application/json")
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"there is / and /state", "text/plain")

        def _state(self, query: str) -> tuple[HTTPStatus, bytes]:
            try:
                return HTTPStatus.OK, dashboard.state(parse_qs(query).get("seen", [""])[0]).encode()
            except Exception:  # which must not end the run
                _log.exception("the dashboard cannot be drawn")
                return HTTPStatus.INTERNAL_SERVER_ERROR, b"{}"

        def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- named by the standard library
            """Leave the terminal to the run."""

    return Handler
