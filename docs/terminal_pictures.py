"""Make the pictures of the how-to pages: ``python docs/terminal_pictures.py [NAME ...]``.

Each picture shows what a reader of a page sees. Most of them record the commands of the page in a
terminal. Commands run in an empty folder, on data that is part of fedclade or that this script
writes. Without names, the script makes all pictures, which takes some minutes.

The script needs the extra ``dev``, and for ``drift`` and ``track`` the browser Chromium, whose path
may be in the environment variable ``CHROME``.
"""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
WIDTH = 96
"""Columns of the terminal."""

BRANCHES = {
    "north": [
        ("4711", "31.12.2023", "1.234,50", "no"),
        ("4712", "14.02.2024", "310,00", "yes"),
        ("4713", "01.03.2024", "2.050,10", "no"),
        ("4714", "22.03.2024", "87,25", "yes"),
    ],
    "south": [
        ("5101", "17.01.2024", "640,00", "yes"),
        ("5102", "30.01.2024", "1.100,75", "no"),
        ("5103", "11.04.2024", "95,50", "no"),
        ("5104", "02.05.2024", "420,00", "yes"),
    ],
}
"""Rows of the files of an office: customer, since, spending, cancelled."""

FLOWER_APP = """
import sys
from flwr.app import Context, RecordDict
from fedclade.flower import LocalGrid, LocalNode

sys.path.insert(0, {quickstart!r})
from sklearnexample import client_app, clustered_server_app

config = {{"num-server-rounds": 3, "penalty-strength": 1.0}}
nodes = {{
    10 + k: LocalNode(client_app.app, {{"partition-id": k, "num-partitions": 4}}) for k in range(4)
}}
clustered_server_app.app(LocalGrid(nodes, config), Context(1, 0, {{}}, RecordDict(), config))
"""
"""The quickstart of scikit-learn without Flower's engine, whose output is not shown."""


@dataclass(frozen=True)
class Recording:
    """Commands to record in a terminal, and what has to be there before."""

    commands: tuple[str, ...]
    before: tuple[str, ...] = ()
    """Commands that run before, and are not shown."""

    files: Mapping[str, Callable[[], str]] = field(default_factory=dict[str, Callable[[], str]])
    """Files of the folder in which the commands run: what returns the text, by name."""

    lines: int = 60
    """Largest number of lines of output of each command; of more, the first ones are shown."""

    width: int = WIDTH
    """Columns of the terminal."""


def block(page: str, language: str, number: int = 0) -> Callable[[], str]:
    """Return a function that reads a block of a page, the first one by default."""

    def read() -> str:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        blocks = re.findall(rf"^```{language}\b[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        return blocks[number]

    return read


def office(branch: str) -> Callable[[], str]:
    """Return a function that writes the file of a branch, as a spreadsheet program does."""
    rows = [("customer", "since", "spending", "cancelled"), *BRANCHES[branch]]
    return lambda: "".join(";".join(row) + "\n" for row in rows)


def flower_app() -> str:
    """Return the program that runs the quickstart of scikit-learn in one process."""
    folder = DOCS.parent / "examples" / "flower" / "quickstarts" / "sklearn"
    return FLOWER_APP.format(quickstart=str(folder))


RECORDINGS = {
    "command-line": Recording(
        ("fedclade compare fedavg-digits-label-swap cfl-digits-label-swap --seeds 2",)
    ),
    "own-data": Recording(
        ("fedclade inspect hospitals --out page.html",),
        before=("fedclade example hospitals --out hospitals",),
    ),
    "bring-your-own": Recording(
        ("head -n 3 branches/north.csv", "fedclade inspect branches"),
        files={f"branches/{branch}.csv": office(branch) for branch in BRANCHES},
    ),
    "robustness": Recording(
        (
            "fedclade run fedavg-digits-label-swap --set rounds=10 --out RUN \\\n"
            "    --set adversary.kind=scaled --set adversary.factor=-3.0 --set adversary.share=0.2",
        )
    ),
    "own-task": Recording(
        (
            'fedclade run cfl-digits-label-swap --set \'task.metrics=["f1", "accuracy"]\' \\\n'
            "    --set 'target={f1 = 0.9}' --out RUN",
        ),
        lines=12,
    ),
    "own-model": Recording(
        (
            "fedclade run cfl-digits-label-swap --rounds 10 --out RUN \\\n"
            "    --set 'model.freeze=[\"1.bias\"]' --set model.personal=head",
        )
    ),
    "your-own": Recording(
        ("fedclade validate my.toml", "fedclade run my.toml"),
        files={"my.toml": block("your-own", "toml"), "my_models.py": block("your-own", "python")},
    ),
    "examples": Recording((f"python {DOCS.parent / 'examples' / 'hospitals.py'}",)),
    "newcomers": Recording(
        ("fedclade assign RUN",),
        before=(
            "fedclade run cfl-digits-label-swap --out RUN --set newcomers.clients=4 "
            "--set newcomers.samples_per_client=40",
        ),
        width=116,
    ),
    "personal": Recording(
        ("fedclade run fedavg-digits-label-swap --set model.personal=head --out RUN",)
    ),
    "from-flower": Recording(
        ("fedclade tree clusters",), before=("python app.py",), files={"app.py": flower_app}
    ),
    "partial-rounds": Recording(
        (
            "fedclade run cfl-digits-label-swap --quiet --out RUN \\\n"
            "    --set faults.dropout=0.1 --set faults.corrupt=0.01",
            "head -n 4 RUN/events.jsonl",
        )
    ),
    "asynchronous": Recording(
        (
            "fedclade run fedbuff-mnist-label-swap --set data.name=digits \\\n"
            "    --set data.samples_per_client=60 --out RUN",
        )
    ),
    "scale": Recording(
        (
            "fedclade data build planted --out million --set data.clients=10000",
            "fedclade run million.toml --out run",
        ),
        files={"million.toml": block("scale", "toml")},
        lines=24,
    ),
    "runs": Recording(
        ("ls RUN", "fedclade resume RUN --rounds 6"),
        before=("fedclade run cfl-digits-label-swap --rounds 3 --out RUN",),
    ),
    "sweep": Recording(
        (
            'fedclade sweep my.toml --over "local.lr=0.01..0.3(log)" \\\n'
            "    --over local.epochs=1..3 --trials 4 --out my-sweep",
        ),
        files={"my.toml": block("sweep", "toml")},
    ),
    "papers": Recording(
        ("python compare.py",),
        files={"compare.py": lambda: block("papers", "python")() + block("papers", "python", 1)()},
    ),
}
"""What is recorded, by the name of the picture."""


def main() -> None:
    """Make the pictures that are named, or all."""
    PICTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or [*RECORDINGS, *DRAWINGS]:
        print(name, flush=True)
        if name in RECORDINGS:
            save_recording(name, RECORDINGS[name])
        else:
            DRAWINGS[name]()


def save_recording(name: str, recording: Recording) -> None:
    """Run commands, and save what the terminal shows."""
    with tempfile.TemporaryDirectory() as folder:
        for file, text in recording.files.items():
            path = Path(folder, file)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text(), encoding="utf-8")
        for command in recording.before:
            output_of(command, Path(folder), recording.width)
        shown = Text()
        for command in recording.commands:
            output = output_of(command, Path(folder), recording.width)
            lines = as_lines(Text.from_ansi(output.rstrip()), recording.width)
            shown.append("$ ", style="bold green").append(relative(command) + "\n", style="bold")
            shown.append_text(Text("\n").join(lines[: recording.lines]))
            shown.append("\n…\n" if len(lines) > recording.lines else "\n")
    save_terminal(PICTURES / f"{name}.svg", shown, recording.width)


def as_lines(output: Text, width: int) -> list[Text]:
    """Divide output into lines, longer ones at the width, as a terminal does."""
    lines = output.split(allow_blank=True)
    return [part for line in lines for part in line.divide(range(width, len(line), width))]


def relative(command: str) -> str:
    """Return a command as a reader in a clone of the repository types it."""
    return command.replace(f"{DOCS.parent}/", "")


def output_of(command: str, folder: Path, width: int = WIDTH) -> str:
    """Run a command as in a terminal, and return its output with colours."""
    bin_folder = Path(sys.executable).parent
    # Coloured as in a terminal, but without a progress bar that is drawn again and again.
    terminal = {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(width)}
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **terminal, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}")
    return re.sub(r"\x1b\[\?25[lh]", "", done.stdout)  # codes that hide and show the cursor


def save_terminal(path: Path, shown: Text, width: int, title: str = "") -> None:
    """Save text as the SVG of a terminal, which loads no font from elsewhere."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(shown, soft_wrap=True)
    svg = console.export_svg(title=title, unique_id=path.stem).replace("Fira Code", "monospace")
    faces = svg.index("@font-face")
    end = svg.index(f".{path.stem}-matrix", faces)
    path.write_text(svg[:faces] + svg[end:], encoding="utf-8")


def draw_encodings() -> None:
    """Draw the bytes of an update in each encoding."""
    import matplotlib.pyplot as plt

    from fedclade.channel.encoding import ENCODINGS, encoded_bytes

    parameters = 101_770  # of the model mlp for MNIST
    kilobytes = [encoded_bytes(parameters, name, parameters) / 1000 for name in ENCODINGS]
    plt.rcParams["svg.hashsalt"] = "encodings"  # the same picture gets the same bytes
    figure, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
    bars = axes.barh(ENCODINGS, kilobytes, color="#3f51b5")
    axes.bar_label(bars, [f"{each:,.0f} kB" for each in kilobytes], padding=4)
    axes.set_xlabel("size of an update of 101,770 parameters, in kB")
    axes.set_xlim(0, 1.15 * max(kilobytes))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURES / "encodings.svg", metadata={"Date": None})
    plt.close(figure)


def photograph_drift() -> None:
    """Photograph the scores of the run of the page on drift, with its stages."""
    from gallery import browser, open_page, save_picture

    with tempfile.TemporaryDirectory() as name, browser() as chromium:
        folder = Path(name)
        (folder / "drift.toml").write_text(block("drift", "toml")(), encoding="utf-8")
        output_of("fedclade run drift.toml --out RUN && fedclade report RUN", folder)
        page = open_page(chromium, folder / "RUN" / "report.html")
        section = page.locator("#scores")
        section.scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        save_picture(section.screenshot(), PICTURES / "drift.png")


def photograph_tensorboard() -> None:
    """Photograph TensorBoard with the run of the page on trackers."""
    from gallery import browser, save_picture

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as name, browser() as chromium:
        output_of(
            "fedclade run cfl-digits-label-swap --rounds 20 --out tracked --log tensorboard",
            Path(name),
        )
        tensorboard = Path(sys.executable).parent / "tensorboard"
        command = [tensorboard, "--logdir", "tracked/tensorboard", "--port", str(port)]
        process = subprocess.Popen(
            command, cwd=name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for(port)
            page = chromium.new_page(viewport={"width": 1280, "height": 800})
            page.goto(f"http://127.0.0.1:{port}/?darkMode=false#timeseries")
            page.wait_for_selector("card-view", timeout=60_000)
            page.wait_for_timeout(6000)
            save_picture(page.screenshot(), PICTURES / "track.png")
        finally:
            process.terminate()
            process.wait()


def wait_for(port: int, seconds: int = 120) -> None:
    """Wait until a program accepts connections at a port."""
    for _ in range(seconds):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(1)
        else:
            return
    raise SystemExit(f"no program answered at port {port} within {seconds} s")


DRAWINGS: dict[str, Callable[[], None]] = {
    "encodings": draw_encodings,
    "drift": photograph_drift,
    "track": photograph_tensorboard,
}
"""What makes the pictures that are not recordings, by name."""

if __name__ == "__main__":
    main()
