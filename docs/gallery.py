"""The pictures of the gallery: ``python docs/gallery.py`` runs four methods on digits, and photographs their reports.

It needs the extra ``dev`` and a Chromium, which ``CHROME`` may name.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

import fedclade

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


def main() -> None:
    """Run the methods, write their reports, and photograph these."""
    federation = fedclade.load_federation("digits", clients=20, shift="label_swap", clusters=4)
    local = fedclade.LocalTraining(epochs=3, batch_size=20, lr=0.1)
    chrome = os.environ.get("CHROME") or shutil.which("chromium") or shutil.which("google-chrome")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        for name, method in METHODS.items():
            run = fedclade.simulate(method, "mlp", federation, local=local, rounds=30, seed=0)
            run.save(Path(folder) / name)
        report(folder, "cfl", "--against", "fedavg")
        report(folder, "rcfl")
        report(folder, *METHODS, "--out", "all.html")
        browser = playwright.chromium.launch(executable_path=chrome, args=["--no-sandbox"])
        of_cfl = {
            "scores": "scores",
            "tree": "tree",
            "similarity": "similarity",
            "clients": "clients",
        }
        photograph(browser, Path(folder) / "cfl" / "report.html", of_cfl)
        photograph_head(
            browser, Path(folder) / "cfl" / "report.html", last_section="tree", name="report"
        )
        photograph(browser, Path(folder) / "rcfl" / "report.html", {"checks": "checks"})
        photograph(
            browser,
            Path(folder) / "all.html",
            {"overview": "comparison", "scores": "comparison-scores"},
        )
        browser.close()


def report(folder: str, *arguments: str) -> None:
    """Write a page by the command line, in a folder."""
    subprocess.run(
        [sys.executable, "-m", "fedclade", "report", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
    )


def photograph(browser: Browser, page: Path, sections: dict[str, str]) -> None:
    """Save sections of a page as small PNG files."""
    shown = open_page(browser, page)
    for section, name in sections.items():
        whole = shown.locator(f"#{section}")
        whole.scroll_into_view_if_needed()
        shown.wait_for_timeout(500)
        save_picture(whole.screenshot(), name)
    shown.close()


def photograph_head(browser: Browser, page: Path, *, last_section: str, name: str) -> None:
    """Save a page from its top to the end of a section as one small PNG file."""
    shown = open_page(browser, page)
    last = shown.locator(f"#{last_section}")
    last.scroll_into_view_if_needed()  # figures are drawn when they become visible
    shown.wait_for_timeout(500)
    shown.evaluate("window.scrollTo(0, 0)")
    end = last.evaluate("section => section.getBoundingClientRect().bottom + window.scrollY")
    whole = {"x": 0, "y": 0, "width": WIDTH, "height": end + 16}
    save_picture(shown.screenshot(full_page=True, clip=whole), name)
    shown.close()


def open_page(browser: Browser, page: Path) -> Page:
    """Open a report in the browser, and wait until its figures are drawn."""
    shown = browser.new_page(viewport={"width": WIDTH, "height": 900}, reduced_motion="reduce")
    shown.goto(page.resolve().as_uri())
    shown.wait_for_selector("html[data-drawn]", state="attached")
    return shown


def save_picture(screenshot: bytes, name: str) -> None:
    """Save a screenshot with few colours, so that the file is small."""
    picture = Image.open(io.BytesIO(screenshot)).convert("RGB").quantize(COLOURS)
    picture.save(PICTURES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
