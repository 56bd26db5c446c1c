"""Measure how much the dashboard slows down a run, and how soon it shows the results of a round.

A config runs alternately with and without the dashboard, so that changes of the machine's speed
affect both. The script compares the seconds of the rounds, and the processor time of the process of
the run, which contains the dashboard's server. If the machine's speed varies by more than the cost,
the share of the dashboard's threads is a better measure: while such a thread computes, the run may
have to wait. A browser on the same machine uses the same processor cores as the run;
``--viewer questions`` sends the same requests as a browser, as often, but displays nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

from playwright.sync_api import Page, sync_playwright

PORT = 8377

Delays = dict[str, list[float]]
Viewer = Callable[["subprocess.Popen[str]", Path], Delays]

RUN = """
import resource, sys, threading, time
from fedclade.cli import main

served, run_thread = [], threading.Thread.run

def run_and_count(thread):
    serves = "socketserver" in getattr(getattr(thread, "_target", None), "__module__", "")
    run_thread(thread)
    if serves:
        served.append(time.thread_time())

threading.Thread.run = run_and_count
sys.argv = ["fedclade", *sys.argv[1:]]
try:
    main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("processor seconds", used.ru_utime + used.ru_stime, sum(served))
"""


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--config",
        default="cfl-mnist-label-swap",
        help="config to run (default: cfl-mnist-label-swap)",
    )
    options.add_argument("--rounds", type=int, default=120, help="rounds of a run (default: 120)")
    options.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: 3)")
    options.add_argument(
        "--viewer",
        default="browser",
        choices=["browser", "questions"],
        help="a browser, or only its requests (default: browser)",
    )
    options.add_argument(
        "--chromium",
        default="/usr/bin/chromium",
        help="path of the browser (default: /usr/bin/chromium)",
    )
    given = options.parse_args()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, list[float]] = {False: [], True: []}
    shares: list[float] = []
    delays: dict[str, list[float]] = {"round": [], "version": []}
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=given.chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for repeat in range(given.repeats):
            for watched in (False, True) if repeat % 2 == 0 else (True, False):
                out = Path(folder) / f"{repeat}-{watched}"
                viewer = None
                if watched:
                    viewer = (
                        ask if given.viewer == "questions" else partial(watch, browser.new_page())
                    )
                spent, served, found = one_run(given, out, viewer)
                seconds[watched].append(
                    json.loads((out / "summary.json").read_text())["seconds"]["total"]
                )
                processor[watched].append(spent)
                shares += [100 * served / spent] if watched else []
                for what, each in found.items():
                    delays[what] += each
                print(
                    f"repeat {repeat}, dashboard {watched}: {seconds[watched][-1]:.1f} s, processor {spent:.1f} s,"
                    f" of which {served:.2f} s the dashboard's threads"
                )
        browser.close()
    for name, values in (
        ("seconds of the rounds", seconds),
        ("processor seconds of the process", processor),
    ):
        watched, alone = (statistics.median(values[each]) for each in (True, False))
        print(
            f"{name}: median {watched:.2f} with, {alone:.2f} without, {100 * (watched / alone - 1):+.1f} %"
        )
    print(
        f"the dashboard's threads: median {statistics.median(shares):.2f} % of the processor's seconds"
    )
    for what, name in (("round", "the numbers"), ("version", "the figures")):
        if not (found := sorted(delays[what])):
            continue
        shown = f"{len(found)} of {given.rounds * given.repeats} rounds"
        print(
            f"{name} of {shown} were on the page {statistics.median(found):.2f} s after their end, "
            f"at most {found[-1]:.2f} s"
        )


def one_run(
    given: argparse.Namespace, out: Path, viewer: Viewer | None
) -> tuple[float, float, Delays]:
    """Run the config once.

    Returns
    -------
    tuple
        Processor seconds of the run, those of the dashboard's threads, and the delays with which
        rounds were shown.
    """
    command = [
        sys.executable,
        "-c",
        RUN,
        "run",
        given.config,
        "--out",
        str(out),
        "--rounds",
        str(given.rounds),
    ]
    command += ["--quiet", "--set", "checkpoint_every=0", "--log", "tensorboard"]
    command += ["--dashboard", "--port", str(PORT)] if viewer is not None else []
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    delays = {} if viewer is None else viewer(run, out)
    told, _ = run.communicate()
    spent, served = map(float, told.split("processor seconds ")[1].split())
    return spent, served, delays


def ask(run: subprocess.Popen[str], out: Path) -> Delays:
    """Send the requests of the dashboard's page, every second until the run ends."""
    assert run.stdout is not None
    run.stdout.readline()
    seen, over = "", False
    while run.poll() is None and not over:
        with urlopen(f"http://127.0.0.1:{PORT}/state?seen={quote(seen)}") as answer:
            state = json.load(answer)
        seen, over = state.get("version", seen), state.get("finished", False)
        time.sleep(1)
    return {}


def watch(page: Page, run: subprocess.Popen[str], out: Path) -> Delays:
    """Watch the page until the run ends; return the delays of each round's numbers and figures.

    A delay is the time from the end of a round until the page shows it, in seconds.
    """
    assert run.stdout is not None
    run.stdout.readline()
    page.goto(f"http://127.0.0.1:{PORT}/")
    shown: dict[str, dict[int, float]] = {"round": {}, "version": {}}
    while run.poll() is None and "finished" not in page.locator("#status").inner_text().lower():
        now = page.evaluate(
            "[document.documentElement.dataset.round, document.documentElement.dataset.version]"
        )
        for what, told in zip(shown, now, strict=True):
            if told and int(told.split()[0]) not in shown[what]:
                shown[what][int(told.split()[0])] = time.time()
        time.sleep(0.05)
    page.close()
    ended = ends(out)
    return {
        what: [at - ended[number] for number, at in each.items() if number]
        for what, each in shown.items()
    }


def ends(out: Path) -> dict[int, float]:
    """Return the time at which each round ended, from the event files of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {event.step: event.wall_time for event in events.Scalars("clusters/found")}


if __name__ == "__main__":
    main()
