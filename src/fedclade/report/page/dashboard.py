"""Dashboard: live report of a run in progress, for browsers on the same machine only.

The run is either in this process, which calls the dashboard after every round, or in another
process, whose run folder the dashboard follows.
"""

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
from fedclade.report.page.address import HOST, PORT
from fedclade.report.page.one_run import run_cards, run_page
from fedclade.report.page.section import Page, cards_html, page_html, state_json
from fedclade.report.run_view import RunView
from fedclade.report.score import Score
from fedclade.runs import Callback, EndRecord, FollowedRun, RoundRecord, Run

TIMES_A_BUILD = 100
"""Pause between two builds of the page, as a multiple of the duration of a build.

Builds thus take at most 1 % of a run's time. The pause is measured in wall-clock time, as a build
blocks all threads of the run while it holds Python's global interpreter lock. The build itself is
measured in processor time, so that other load on the machine does not prolong the pause.
"""

WATCHED = 5.0
"""Seconds after a browser's last request during which the browser is assumed to be open."""

PATIENCE = 3.0
"""Seconds that the server waits at the end of a run for an open browser to fetch the end."""

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""HTTP headers of every response.

They keep browsers from caching the page, and websites from embedding or reading it.
"""

_log = logging.getLogger(__name__)


class Dashboard(Callback):
    """Callback that serves a live report of a run at 127.0.0.1; to be used as a context manager.

    After every round, the callback only copies the lists of the run's records. The report is built
    when a browser requests it, in a thread of the server. After each build, the report is not built
    again for :data:`TIMES_A_BUILD` times the duration of the build, so that the run keeps most of
    the processor time. The numbers at the head of the page are always from the last round.

    Parameters
    ----------
    name
        Title of the page.
    rounds
        Planned number of rounds.
    folder
        Folder of the run.
    port
        Port to listen on; 0 for any free port.

    Raises
    ------
    MissingExtraError
        If jinja2 or plotly is not installed.
    RunError
        If the port cannot be used, for example because another program uses it.
    """

    def __init__(self, name: str, rounds: int, folder: Path, port: int = PORT) -> None:
        self._rounds = rounds
        self._folder = folder
        self.page = page_html(Page(name, "", [], []), live=True).encode()
        self._run: Run | None = None
        self._over = False
        self._ended = ""
        """How the run ended before its last round; empty for a run that is on or finished."""
        self._progress: tuple[int, str] = (0, "")
        """Last round, which may be later than the round of the run, and its score as a text."""
        self._built: tuple[int, str] = (0, "{}")
        """Round for which the page was last built, and the parts of this page as JSON."""
        self._built_end = False
        self._not_before = 0.0
        """Monotonic time from which on the page may be built again."""
        self._head: tuple[tuple[object, ...], dict[str, Any]] = ((), {})
        """State for which the head of the page was last written, and this head."""
        self._last_request = -WATCHED
        self._building = Lock()
        self._sent = Condition()
        self._sent_the_end = False
        try:
            self._server = ThreadingHTTPServer((HOST, port), _make_handler(self))
        except OSError as error:
            raise RunError(
                f"the dashboard cannot listen on port {port}: {error}; choose another port with "
                "--port"
            ) from error
        self._server.daemon_threads = True
        serve = self._server.serve_forever
        self._thread = Thread(target=serve, kwargs={"poll_interval": 0.1}, daemon=True)

    def __enter__(self) -> Dashboard:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A browser also shows how a run failed; only after Ctrl-C twice it is not waited for.
        is_waiting = kind is None or issubclass(kind, Exception)
        if is_waiting and monotonic() - self._last_request < WATCHED:
            with self._sent:
                self._sent.wait_for(lambda: self._sent_the_end, PATIENCE)
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Address of the dashboard for browsers."""
        return f"http://{HOST}:{self.port}/"

    @property
    def port(self) -> int:
        """Port on which the dashboard's server listens."""
        return self._server.server_port

    def show(self, run: Run, *, over: bool = False) -> None:
        """Replace the state of the run that the dashboard displays.

        Parameters
        ----------
        run
            Records of the run so far.
        over
            Whether the run has ended.
        """
        self._run = run
        self._over = over

    def on_round(self, record: RoundRecord, /) -> None:
        """Display the state of the run after a round, from the first evaluated round on."""
        if (run := record.so_far()) is not None:
            self.show(run)

    def on_end(self, record: EndRecord, /) -> None:
        """Display the final state of a run, and how it ended if it did not finish."""
        if record.reason == "finished":
            if record.run is not None:
                self.show(record.run, over=True)
            return
        number = 0 if record.run is None else record.run.summary["rounds"]
        why = "" if record.reason == "interrupted" else str(record.error)
        self._ended = _describe_end(record.reason, number, self._rounds, why)
        self._run = record.run
        self._over = True

    def follow(self, followed: FollowedRun) -> None:
        """Display the present state of a run folder; call it repeatedly while the run is on.

        Parameters
        ----------
        followed
            Reader of the folder. The run may belong to another process.
        """
        progress = followed.progress()
        run = followed.run()
        self._rounds = progress.rounds
        score = ""
        if run is not None and progress.metrics:
            kind = Score.of_run(run)
            value = progress.metrics[-1].get(f"{kind.name}_mean")
            score = "" if value is None else f"{kind.label} {kind.text(value)}"
        self._progress = (progress.round, score)
        self._ended = ""
        if progress.state in ("interrupted", "failed"):
            self._ended = _describe_end(
                progress.state, progress.round, progress.rounds, progress.error
            )
        if run is not None:
            self.show(run, over=progress.state == "finished")

    def state(self, seen: str) -> str:
        """Return the updates of a page as JSON, for the script that runs in the browser.

        Parameters
        ----------
        seen
            Version of the run that the page displays; empty if it displays none.
        """
        self._last_request = monotonic()
        # Each attribute is read only once, as the run's thread can replace it at any time.
        run = self._run
        over = self._over
        if run is None:
            waiting = f"Waiting for the first of {self._rounds} rounds …"
            if number := self._progress[0]:
                waiting = f"Round {number} of {self._rounds}; waiting for the first evaluation …"
            with self._sent:
                self._sent_the_end |= over
                self._sent.notify_all()
            status = {"round": 0, "status": self._ended or waiting}
            return json.dumps(status | ({"finished": True, "latest": ""} if over else {}))
        number, parts = self._build_parts(run, over)
        head = self._write_head(run, over)
        with self._sent:
            self._sent_the_end |= over and number == run.summary["rounds"]
            self._sent.notify_all()
        version = _write_version(number, over)
        if version == seen:
            return json.dumps(head)
        # The parts are JSON already: they are inserted instead of being parsed and written again.
        head_json = json.dumps(head | {"version": version})
        return f'{head_json[:-1]}, "page": {parts}}}'

    def _build_parts(self, run: Run, over: bool) -> tuple[int, str]:
        """Return the content of the page (except its head) as JSON, with the round that it shows.

        Outdated content is built again. Only during the pause after a build, the outdated content
        is returned.
        """
        with self._building:
            number = run.summary["rounds"]
            # The page of the last round may have been built before its evaluation, or the run
            # stores the models of another round.
            has_other_models = "stopped" in run.summary or run.model_round < number
            must_build_end = over and not self._built_end and has_other_models
            is_due = over or monotonic() >= self._not_before
            if must_build_end or (self._built[0] < number and is_due):
                start = thread_time()
                page = run_page(RunView(run, folder=self._folder))
                self._built = number, state_json(page)
                self._built_end = over
                self._not_before = monotonic() + TIMES_A_BUILD * (thread_time() - start)
            return self._built

    def _write_head(self, run: Run, over: bool) -> dict[str, Any]:
        """Return the head of the page: a line with the status, and the cards with main results.

        Repeated calls for the same state of the run return the same stored head.
        """
        state = (run, over, self._ended, self._progress)
        if self._head[0] != state:
            number = run.summary["rounds"]
            head = {
                "round": number,
                "status": self._write_status(run, over=over),
                "finished": over,
                "latest": _write_version(number, over),
                "cards": cards_html(run_cards(RunView(run))),
            }
            self._head = state, head
        return self._head[1]

    def _write_status(self, run: Run, *, over: bool) -> str:
        """Return the line with the status of the run: its round and its mean score."""
        number = run.summary["rounds"]
        score = Score.of_run(run)
        mean = f"{score.label} {score.text(score.mean(run.summary))}"
        if self._ended:
            return f"{self._ended} ({mean})"
        if over:
            return f"Finished after {number} rounds, {mean}"
        latest, latest_score = self._progress
        if latest <= number:
            return f"Round {number} of {self._rounds}, {mean}"
        now = f"Round {latest} of {self._rounds}"
        if latest_score:
            now += f", {latest_score}"
        return f"{now}; below is round {number}, the newest checkpoint"


def _describe_end(reason: str, number: int, rounds: int, why: str) -> str:
    """Describe the end of a run before its last round.

    Parameters
    ----------
    reason
        ``interrupted`` or ``failed``.
    number, rounds
        Number of the last round, and the planned number of rounds.
    why
        Message of the error that ended the run; empty for an interrupted run.
    """
    ended = f"{reason.capitalize()} after {number} of {rounds} rounds"
    return f"{ended}: {why}" if why else ended


def _write_version(number: int, over: bool) -> str:
    """Return a text that identifies a state of the run, by which a browser detects updates.

    Parameters
    ----------
    number
        Round of the state.
    over
        Whether the run has ended.
    """
    return f"{number}{' over' if over else ''}"


def _make_handler(dashboard: Dashboard) -> type[BaseHTTPRequestHandler]:
    """Return the class that handles HTTP requests to a dashboard."""

    class Handler(BaseHTTPRequestHandler):
        """Handler of HTTP requests for the page (``/``) and the state of a run (``/state``)."""

        protocol_version = "HTTP/1.1"
        server_version = "fedclade"
        sys_version = ""

        def do_GET(self) -> None:
            """Send the page or its state as the response to a GET request."""
            # Requests with other host names are refused: a website could bind its own name to
            # 127.0.0.1 and read the page with a script (DNS rebinding).
            known_hosts = [f"{name}:{dashboard.port}" for name in (HOST, "localhost")]
            if self.headers.get("Host", "") not in known_hosts:
                body = f"this host name is not allowed: open {dashboard.url}".encode()
                self._reply(HTTPStatus.FORBIDDEN, body, "text/plain")
                return
            url = urlsplit(self.path)
            if url.path == "/":
                self._reply(HTTPStatus.OK, dashboard.page, "text/html; charset=utf-8")
            elif url.path == "/state":
                status, body = self._read_state(url.query)
                self._reply(status, body, "application/json")
            else:
                body = b"not found: the pages are / and /state"
                self._reply(HTTPStatus.NOT_FOUND, body, "text/plain")

        def _read_state(self, query: str) -> tuple[HTTPStatus, bytes]:
            """Return the status and body of the response to a request for the state of the run."""
            seen = parse_qs(query).get("seen", [""])[0]
            try:
                return HTTPStatus.OK, dashboard.state(seen).encode()
            except Exception:  # an error of the dashboard must not end the run
                _log.exception("the dashboard cannot build its page; the run continues")
                return HTTPStatus.INTERNAL_SERVER_ERROR, b"{}"

        def _reply(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
            """Send an HTTP response with this status and body."""
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- named by the standard library
            """Suppress the log lines of requests: the terminal shows the progress of the run."""

    return Handler
