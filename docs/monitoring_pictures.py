"""Make the pictures of the page on monitoring: ``python docs/monitoring_pictures.py``.

The script trains ten clients over a network in this process, and follows the run as an operator
does: by the lines on the terminal, by ``fedclade report --live``, by the metrics, and by
Prometheus. It needs Chromium and Prometheus (``apt-get install chromium prometheus``).
"""

from __future__ import annotations

import io
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from urllib.parse import urlencode

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from gallery import browser, save_picture
from playwright.sync_api import Browser
from rich.text import Text
from terminal_pictures import save_terminal

import fedclade
from fedclade.flower import LocalGrid, LocalNode, Network, client_app, server_app
from fedclade.flower.server_log import print_round
from fedclade.report.page import Dashboard
from fedclade.runs import FollowedRun, Row

PICTURES = Path(__file__).parent / "gallery"
CLIENTS = 10
ROUNDS = 40
PHOTOGRAPHED = 30
"""Round after which the live report is photographed."""

LEAVES = 18
RETURNS = 26
"""Rounds after which the node of a client is switched off and on again."""

FAILING = 4
"""Client that sometimes fails."""

PAUSE = 1.0
"""Seconds between two rounds, so that Prometheus collects several values of each round."""

GRAPHS = {"score": "fedclade_score", "left-out": "fedclade_left_out_total"}
"""Expressions that Prometheus draws, by the name of the picture."""


def main() -> None:
    """Make all pictures."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as name,
        browser() as chromium,
        prometheus(Path(name), port) as prometheus_url,
    ):
        start = time.time()
        lines = run_federation(Path(name) / "run", port, chromium)
        save_lines(lines)
        time.sleep(2 * PAUSE)
        save_graphs(chromium, prometheus_url, time.time() - start)
    for picture in PICTURES.glob("monitoring-*"):
        picture.chmod(0o644)  # the files of a run over a network are for their owner only


def free_port() -> int:
    """Return a port that no program uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Failing:
    """App of a client that fails in some rounds, as a machine with too little memory does."""

    def __init__(self, app: ClientApp) -> None:
        self.app = app
        self.asked = 0

    def __call__(self, message: Message, context: Context) -> Message:
        """Reply to a message, or fail."""
        self.asked += 1
        if self.asked % 7 == 0:
            raise MemoryError("out of memory")
        return self.app(message, context)


def make_grid() -> LocalGrid:
    """Return a network in this process: ten clients with handwritten digits, in two groups."""
    federation = fedclade.load_federation(
        "digits", clients=CLIENTS, samples_per_client=100, shift="label_swap", clusters=2
    )
    app = client_app(
        "mlp", lambda context: federation.alone(int(context.node_config["partition-id"]))
    )
    nodes = {100 + client: LocalNode(app, {"partition-id": client}) for client in federation.ids}
    nodes[100 + FAILING].app = Failing(app)
    return LocalGrid(nodes)


def run_federation(folder: Path, port: int, chromium: Browser) -> list[str]:
    """Run the federation and photograph what an operator sees; return the lines on the terminal."""
    grid = make_grid()
    away: dict[int, LocalNode] = {}
    with Dashboard("digits", ROUNDS, folder, 0) as dashboard:

        def look(row: Row, tree: fedclade.ParameterTree) -> None:
            print_round(row, tree)
            if row["round"] == LEAVES:
                away[101] = grid.nodes.pop(101)
            if row["round"] == RETURNS:
                grid.nodes.update(away)
            if row["round"] == PHOTOGRAPHED:
                dashboard.follow(FollowedRun(folder))
                photograph(chromium, dashboard.url, "monitoring-live", height=900, live=True)
                url = f"http://127.0.0.1:{port}/metrics"
                photograph(chromium, url, "monitoring-metrics", height=1040)
            time.sleep(PAUSE)

        app = server_app(
            fedclade.CFL(split_rounds=(12,), eps2=1e-6),
            "mlp",
            rounds=ROUNDS,
            local=fedclade.LocalTraining(epochs=3, batch_size=20, lr=0.1),
            network=Network(clients=CLIENTS, wait=10.0, deadline=10.0, metrics=port),
            folder=folder,
            checkpoint_every=1,
            on_round=look,
        )
        output = io.StringIO()
        with redirect_stdout(output):
            app(grid, Context(1, 0, {}, RecordDict(), {}))
    return output.getvalue().splitlines()


def save_lines(lines: list[str]) -> None:
    """Save the lines of some rounds as they stand on the terminal."""
    rounds = [line for line in lines if line.startswith("round ")]
    path = PICTURES / "monitoring-terminal.svg"
    save_terminal(path, Text("\n".join(rounds[14:28])), width=120, title="one line a round")


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[str]:
    """Start Prometheus, which collects the metrics on a port; yield its address."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs: [{job_name: fedclade, static_configs: "
        f'[{{targets: ["127.0.0.1:{port}"]}}]}}]\n'
    )
    listen = f"127.0.0.1:{free_port()}"
    options = (f"--config.file={config}", f"--web.listen-address={listen}")
    storage = f"--storage.tsdb.path={folder / 'prometheus'}"
    process = subprocess.Popen(["prometheus", *options, storage], stderr=subprocess.DEVNULL)
    try:
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait()


def save_graphs(chromium: Browser, url: str, seconds: float) -> None:
    """Photograph graphs of Prometheus that show the whole run."""
    for name, expression in GRAPHS.items():
        query = {"g0.expr": expression, "g0.tab": "0", "g0.range_input": f"{int(seconds)}s"}
        page = f"{url}/classic/graph?{urlencode(query)}"
        photograph(chromium, page, f"monitoring-prometheus-{name}", height=850)


def photograph(chromium: Browser, url: str, name: str, *, height: int, live: bool = False) -> None:
    """Save a page as a PNG file with few colours, so that the file is small."""
    page = chromium.new_page(viewport={"width": 1200, "height": height}, reduced_motion="reduce")
    page.goto(url)
    if live:
        page.wait_for_selector("#sections section", state="attached")
    page.wait_for_timeout(3000)
    save_picture(page.screenshot(), PICTURES / f"{name}.png", colours=64)
    page.close()


if __name__ == "__main__":
    main()
