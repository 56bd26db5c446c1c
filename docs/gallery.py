"""Make the pictures of the gallery, which are screenshots of reports.

``python docs/gallery.py`` runs four methods on digits, and makes screenshots of their reports.

``python docs/gallery.py DATA`` makes screenshots of reports on real data instead, and prints the
gains that ``docs/report.md`` quotes. DATA has two folders of CSV files with a header, one file for
each client:

- ``landmine/field01.csv`` to ``field29.csv``: the landmine data of Xue et al. (2007), with the nine
  inputs as ``x0`` to ``x8``, and 0 or 1 as ``mine``;
- ``heart/cleveland.csv``, ``hungarian.csv``, ``switzerland.csv`` and ``va.csv``: the UCI heart
  disease data, with at least the columns of ``HEART_COLUMNS`` and the grade of the disease, from 0
  to 4, as ``target``. Cells with missing values are empty.

The script needs the extra ``dev`` and the browser Chromium, whose path or name may be in the
environment variable ``CHROME``.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

import fedclade
from fedclade.report.gains import GainView

PICTURES = Path(__file__).parent / "gallery"
COLOURS = 128
WIDTH = 1100
"""Width of the browser window, in pixels."""

METHODS = {
    "rcfl": fedclade.ReplicatedCFL(),
    "cfl": fedclade.CFL(eps1=0.2, eps2=0.5),
    "ifca": fedclade.IFCA(clusters=4),
    "fedavg": fedclade.FedAvg(),
}


LANDMINE = """
rounds = 30
[data]
files = "landmine/*.csv"
target = "mine"
standardize = "federated"
[task]
name = "binary"
metrics = ["auroc", "accuracy"]
class_weights = "balanced"
[algorithm]
name = "rcfl"
"""

HEART = """
rounds = 20
[data]
files = "heart/*.csv"
target = "ill"
attributes = "hospitals.csv"
standardize = "federated"
[task]
name = "binary"
[algorithm]
name = "rcfl"
"""

HEART_COLUMNS = ("age", "sex", "cp", "thalach", "exang", "oldpeak")
"""Columns of the heart data in which few values are missing."""

HOSPITALS = """client,country
cleveland,USA
hungarian,Hungary
switzerland,Switzerland
va,USA
"""


def main() -> None:
    """Make the pictures of the digits, or of the real data in a folder."""
    if len(sys.argv) > 1:
        photograph_real_data(Path(sys.argv[1]).absolute())
    else:
        photograph_digits()


def photograph_real_data(data: Path) -> None:
    """Run rcfl on the landmine and the heart data, and save the top of each report as a picture."""
    with tempfile.TemporaryDirectory() as name, browser() as chromium:
        folder = Path(name)
        shutil.copytree(data / "landmine", folder / "landmine")
        prepare_heart(data / "heart", folder / "heart")
        (folder / "hospitals.csv").write_text(HOSPITALS)
        (folder / "landmine.toml").write_text(LANDMINE)
        (folder / "heart.toml").write_text(HEART)
        # rcfl finds one cluster in the heart data, and then a report has no section "distinction".
        last_sections = {"landmine": "distinction", "heart": "gains"}
        for run, last_section in last_sections.items():
            call(folder, "run", f"{run}.toml", "--out", f"{run}-run", "--quiet")
            call(folder, "report", f"{run}-run")
            print_gains(folder / f"{run}-run")
            page = folder / f"{run}-run" / "report.html"
            photograph_head(chromium, page, last_section=last_section, name=f"report-{run}")


def print_gains(folder: Path) -> None:
    """Print the mean gains of a run, and the clients whose models are clearly better alone."""
    run = fedclade.Run.load(folder)
    view = GainView.of(run)
    print(f"{folder.name}:")
    for gain in view.mean_gains:
        print(f"  gain over {gain.model}: {view.describe_mean_gain(gain)}")
    for client in view.clients:
        over_alone = client.gains["alone"]
        if over_alone.trend == "bad":
            print(f"  {client.name}: gain over alone: {view.write_gain(over_alone)} {view.unit}")


def prepare_heart(source: Path, target: Path) -> None:
    """Write the complete rows of some columns, with 1 for ill patients in place of the grade."""
    target.mkdir()
    for path in sorted(source.glob("*.csv")):
        with path.open() as file:
            rows = [row for row in csv.DictReader(file) if all(row[name] for name in HEART_COLUMNS)]
        with (target / path.name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*HEART_COLUMNS, "ill"])
            for row in rows:
                ill = int(float(row["target"]) > 0)
                writer.writerow([*(row[name] for name in HEART_COLUMNS), ill])


def photograph_digits() -> None:
    """Run four methods on digits, and save sections of their reports as pictures."""
    federation = fedclade.load_federation("digits", clients=20, shift="label_swap", clusters=4)
    local = fedclade.LocalTraining(epochs=3, batch_size=20, lr=0.1)
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        for name, method in METHODS.items():
            run = fedclade.simulate(method, "mlp", federation, local=local, rounds=30, seed=0)
            run.save(Path(folder) / name)
        report(folder, "cfl", "--against", "fedavg")
        report(folder, "rcfl")
        report(folder, *METHODS, "--out", "all.html")
        of_cfl = {
            "scores": "scores",
            "tree": "tree",
            "similarity": "similarity",
            "clients": "clients",
        }
        photograph(chromium, Path(folder) / "cfl" / "report.html", of_cfl)
        photograph_head(
            chromium,
            Path(folder) / "cfl" / "report.html",
            last_section="tree",
            name="report",
            hidden=("gains", "distinction"),
        )
        photograph(chromium, Path(folder) / "rcfl" / "report.html", {"checks": "checks"})
        photograph(
            chromium,
            Path(folder) / "all.html",
            {"overview": "comparison", "scores": "comparison-scores"},
        )


def report(folder: str, *arguments: str) -> None:
    """Write a report with the command line, in a folder."""
    call(Path(folder), "report", *arguments)


def call(folder: Path, *arguments: str) -> None:
    """Call fedclade's command line in a folder."""
    subprocess.run(
        [sys.executable, "-m", "fedclade", *arguments], cwd=folder, check=True, capture_output=True
    )


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium without a window."""
    # CHROME may be a path or the name of a program, which playwright does not look for itself.
    names = [os.environ["CHROME"]] if "CHROME" in os.environ else ["chromium", "google-chrome"]
    chrome = next((path for name in names if (path := shutil.which(name))), None)
    if chrome is None:
        raise SystemExit(
            f"no browser {' or '.join(names)} was found; install Chromium, such as with apt-get "
            "install chromium, or set the environment variable CHROME to its path"
        )
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chrome, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def photograph(chromium: Browser, page: Path, sections: dict[str, str]) -> None:
    """Save sections of a page as PNG files; ``sections`` maps ids of sections to file names."""
    shown = open_page(chromium, page)
    for section, name in sections.items():
        whole = shown.locator(f"#{section}")
        whole.scroll_into_view_if_needed()
        shown.wait_for_timeout(500)
        save_picture(whole.screenshot(), PICTURES / f"{name}.png")
    shown.close()


def photograph_head(
    chromium: Browser, page: Path, *, last_section: str, name: str, hidden: Sequence[str] = ()
) -> None:
    """Save a page from its top to the end of a section as PNG file, without ``hidden`` sections."""
    shown = open_page(chromium, page)
    for section in hidden:
        shown.locator(f"#{section}").evaluate("section => section.remove()")
    last = shown.locator(f"#{last_section}")
    last.scroll_into_view_if_needed()  # figures are drawn when they become visible
    shown.wait_for_timeout(500)
    shown.evaluate("window.scrollTo(0, 0)")
    end = last.evaluate("section => section.getBoundingClientRect().bottom + window.scrollY")
    whole = {"x": 0, "y": 0, "width": WIDTH, "height": end + 16}
    save_picture(shown.screenshot(full_page=True, clip=whole), PICTURES / f"{name}.png")
    shown.close()


def open_page(chromium: Browser, page: Path) -> Page:
    """Open a report in the browser, and wait until the page has drawn its figures."""
    shown = chromium.new_page(viewport={"width": WIDTH, "height": 900}, reduced_motion="reduce")
    shown.goto(page.resolve().as_uri())
    shown.wait_for_selector("html[data-drawn]", state="attached")
    return shown


def save_picture(screenshot: bytes, path: Path, colours: int = COLOURS) -> None:
    """Save a screenshot with few colours, so that the file is small."""
    picture = Image.open(io.BytesIO(screenshot)).convert("RGB").quantize(colours)
    picture.save(path, optimize=True)


if __name__ == "__main__":
    main()
