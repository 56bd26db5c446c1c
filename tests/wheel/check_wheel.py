"""Build the wheels and source archives, and use the wheels as a newcomer does: in an environment with nothing else.

`python tests/wheel/check_wheel.py`, or `make wheel`. In turn: the archives of fedclade and of fedclade-papers are
built; their metadata and contents are what a package index and a user expect; the Python of the README runs; the core
alone works, and says what needs which extra (``core_only.py``); the wheels of ``examples/plugins`` run beside it; with
fedclade-papers added, ``fedclade reproduce`` works; with ``[report]`` added, the first shell commands of
docs/quick-start.md lead to a report.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata
from packaging.utils import parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).parents[2]
MARKER = "<!-- test: wheel -->"
"""Where a page has it, the commands are those of the first block after it, else those of its first block."""
RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")
"""A link of a README that only the repository can follow."""
LONGEST = 10
"""Lines that lead from pip to a report are fewer."""
LARGEST = 2_000_000
"""Bytes of an archive."""


@dataclass(frozen=True)
class Distribution:
    """A distribution of this repository, and what must be in its archives."""

    root: Path
    package: str
    in_wheel: tuple[str, ...]
    in_sources: tuple[str, ...]
    folders: frozenset[str]  # of the source archive
    extras: frozenset[str] = frozenset()


LIBRARY = Distribution(
    ROOT,
    "fedclade",
    in_wheel=(
        *(
            "fedclade/py.typed",
            "fedclade/configs/cfl-digits-label-swap.toml",
            "fedclade/configs/suite/iid.toml",
        ),
        "fedclade/report/citations.bib",
        *(
            "fedclade/cli/examples/hospitals/hospital-00.csv",
            "fedclade/cli/examples/hospitals/hospitals.toml",
        ),
        *(
            f"fedclade/report/page/templates/{name}"
            for name in ("page.html.jinja", "page.js", "live.js", "style.css")
        ),
    ),
    in_sources=(
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "hatch_build.py",
        "pyproject.toml",
    ),
    folders=frozenset({"configs", "examples", "src"}),
    extras=frozenset({"all", "data", "flower", "privacy", "ray", "report"}),
)
PAPERS = Distribution(
    ROOT / "packages/fedclade-papers",
    "fedclade_papers",
    in_wheel=("fedclade_papers/py.typed", "fedclade_papers/cfl/experiments.toml"),
    in_sources=("LICENSE", "README.md", "hatch_build.py", "pyproject.toml"),
    folders=frozenset({"src"}),
)


def main() -> None:
    """Build, look, install and use; the first thing that is not as it should be ends it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="folder to leave the archives in (default: nowhere)"
    )
    parser.add_argument("--tag", help="the version should be this one; a leading v is passed over")
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs/quick-start.md", help="the page with the commands"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        out = (arguments.out or work / "dist").resolve()
        tag = (arguments.tag or "").removeprefix("v")
        if out.exists() and any(out.iterdir()):
            sys.exit(f"--out should be empty, but there is {next(out.iterdir())}")
        wheel = checked_wheel(LIBRARY, out, tag)
        papers = checked_wheel(PAPERS, out, tag)
        python = environment_with(wheel, work / "environment")
        first_run(python, folder(work / "first"))
        step("use the core")
        run([python, ROOT / "tests/wheel/core_only.py"], folder(work / "core"))
        run([python.with_name("fedclade"), "--version"], work)
        use_plugins(python, folder(work / "plugins"))
        reproduce(papers, python, folder(work / "reproduced"))
        follow(arguments.page, wheel, python, folder(work / "newcomer"))
    step("the wheels are fine")


def checked_wheel(distribution: Distribution, out: Path, tag: str) -> Path:
    """Build the archives of a distribution, check them, and return the wheel."""
    wheel, sources = build(distribution, out)
    check_metadata(distribution, wheel, sources, tag)
    check_contents(distribution, wheel, sources)
    return wheel


def build(distribution: Distribution, out: Path) -> tuple[Path, Path]:
    """Build the source archive, a wheel from it and another from the tree; return the wheel and the archive."""
    root, package = distribution.root, distribution.package
    step(f"build the source archive and the wheel of {package}")
    python_build = [sys.executable, "-m", "build", "--no-isolation"]
    run([*python_build, "--outdir", out, root], root, quiet=True)
    (wheel,), (sources,) = out.glob(f"{package}-*.whl"), out.glob(f"{package}-*.tar.gz")
    with tempfile.TemporaryDirectory() as other:
        run([*python_build, "--wheel", "--outdir", other, root], root, quiet=True)
        here, there = files_of(wheel), files_of(Path(other) / wheel.name)
    check(
        here == there,
        f"the wheel of the archive and that of the tree differ in {different(here, there)}",
    )
    return wheel, sources


def check_metadata(distribution: Distribution, wheel: Path, sources: Path, tag: str) -> None:
    """Check what a package index would: the metadata are valid, the same in both, and the names fit."""
    step("look at the metadata")
    name, version, *_ = parse_wheel_filename(wheel.name)
    check(
        (name, version) == parse_sdist_filename(sources.name),
        f"{wheel.name} and {sources.name} are of two versions",
    )
    found = [text for path, text in files_of(wheel).items() if path.endswith(".dist-info/METADATA")]
    with tarfile.open(sources) as archive:
        member = archive.extractfile(f"{sources.name.removesuffix('.tar.gz')}/PKG-INFO")
        found.append(member.read() if member else b"")
    metadata = [Metadata.from_email(text, validate=True) for text in found]
    check(found[0] == found[1], "the metadata of the two archives differ")
    check(
        metadata[0].description_content_type == "text/markdown", "the description is not Markdown"
    )
    check(not tag or str(version) == tag, f"the version is {version}, and the tag {tag}")
    relative = RELATIVE_LINK.findall(metadata[0].description or "")
    check(
        not tag or not relative,
        f"a package index cannot follow the links {relative[:3]}: set FEDCLADE_REPOSITORY_URL",
    )
    extras = set(metadata[0].provides_extra or [])
    check(distribution.extras <= extras, f"extras are {extras}")


def check_contents(distribution: Distribution, wheel: Path, sources: Path) -> None:
    """Check that data files are there, and that nothing else is that is no part of the package."""
    step("look at the contents")
    names = set(files_of(wheel))
    check(not (missing := set(distribution.in_wheel) - names), f"the wheel lacks {missing}")
    top = {name.split("/")[0] for name in names}
    check(
        all(each == distribution.package or each.endswith(".dist-info") for each in top),
        f"the wheel has {top}",
    )
    with tarfile.open(sources) as archive:
        inside = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }
    check(
        not (missing := set(distribution.in_sources) - inside),
        f"the source archive lacks {missing}",
    )
    folders = {name.split("/")[0] for name in inside if "/" in name}
    wanted = distribution.folders
    check(folders == wanted, f"the source archive has the folders {folders}, and not {set(wanted)}")
    for archive_file in (wheel, sources):
        check(
            archive_file.stat().st_size < LARGEST,
            f"{archive_file.name} has more than {LARGEST} bytes",
        )


def environment_with(wheel: Path, where: Path) -> Path:
    """Make an environment that has the wheel and what its core needs; return its Python."""
    step("install the wheel, and no extra")
    venv.create(where, with_pip=True)
    python = where / "bin/python"
    run([python, "-m", "pip", "install", wheel], where)
    return python


def first_run(python: Path, work: Path) -> None:
    """Run the first Python of the README, which leaves a run folder."""
    step("run the Python of the README")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    if block is None:
        sys.exit("check_wheel.py: README.md has no Python")
    run([python, "-c", block[1]], work, quiet=True)
    check((work / "runs/first/summary.json").is_file(), "the README's run has left no summary")


def use_plugins(python: Path, work: Path) -> None:
    """Add the wheels of the plug-ins, each with training code of its own, and run their configs."""
    step("build, install and run the plug-ins")
    plugins = sorted(path.parent for path in (ROOT / "examples/plugins").glob("*/pyproject.toml"))
    for plugin in plugins:
        run(
            [sys.executable, "-m", "build", "--no-isolation", "-w", "-o", work, plugin],
            work,
            quiet=True,
        )
    wheels = sorted(work.glob("*.whl"))
    check(len(wheels) == len(plugins) > 0, f"the plug-ins have the wheels {wheels}")
    run([python, "-m", "pip", "install", *wheels], work)
    for plugin in plugins:
        config = plugin / f"{plugin.name}.toml"
        command = [python.with_name("fedclade"), "run", config, "--rounds", "2"]
        run([*command, "--out", plugin.name, "-q"], work, quiet=True)
        check((work / plugin.name / "summary.json").is_file(), f"{config} has left no summary")


def reproduce(wheel: Path, python: Path, work: Path) -> None:
    """Add the wheel of fedclade-papers, whose command works without an extra, and then draws no figure."""
    step("reproduce a figure of a paper")
    run([python, "-m", "pip", "install", wheel], work)
    command = [python.with_name("fedclade"), "reproduce"]
    run([*command, "--list"], work, quiet=True)
    run([*command, "cfl-fig3-theory", "--scale", "smoke", "--out", "again"], work, quiet=True)
    written = {path.suffix for path in (work / "again").glob("cfl-fig3-theory-smoke.*")}
    check(written == {".json", ".csv", ".md"}, f"fedclade reproduce has written {written}")


def follow(page: Path, wheel: Path, python: Path, work: Path) -> None:
    """Run the commands of a page in an empty folder: they lead to a report."""
    step(f"follow {page.name}")
    commands = commands_of(page)
    lines = [line for line in commands.splitlines() if line.strip()]
    check(
        len(lines) < LONGEST,
        f"{page} takes {len(lines)} lines from pip to a report, which is not below {LONGEST}",
    )
    installed, count = re.subn(
        r"""(pip install .*?)fedclade(\[[\w,]+\])?""", rf"\g<1>{wheel}\g<2>", commands
    )
    check(count == 1, f"the commands of {page} install fedclade {count} times")
    print(commands)
    activated = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "BROWSER": "true"}
    run(["bash", "-euo", "pipefail", "-c", installed], work, activated)
    reports = [*work.rglob("report.html")]
    check(len(reports) >= 1, f"after the commands of {page} there is no report.html")
    for report in reports:
        check("</html>" in report.read_text(encoding="utf-8"), f"{report} is not a whole page")


def commands_of(page: Path) -> str:
    """Return the first shell block of a page, or of what comes after its marker."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(
        r"^```(?:ba|)sh\n(.*?)^```",
        text.partition(MARKER)[2] or text,
        flags=re.DOTALL | re.MULTILINE,
    )
    check(blocks, f"{page} has no shell block")
    return blocks[0]


def files_of(wheel: Path) -> dict[str, bytes]:
    """Return the contents of a wheel by name."""
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def different(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    """Return the names of what is in one alone, or differs."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def folder(path: Path) -> Path:
    """Make a folder, and return it."""
    path.mkdir()
    return path


def run(
    command: list[object],
    where: Path,
    more: Mapping[str, str] | None = None,
    *,
    quiet: bool = False,
) -> None:
    """Run a command as somebody would who has this torch and no data; end where it fails."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "FEDCLADE_DATA_DIR")
    }
    settings = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_QUIET": "1", **(more or {})}
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(
        [str(part) for part in command],
        cwd=where,
        env=kept | settings,
        stdout=output,
        stderr=output,
        check=False,
    )
    if done.returncode:
        told = b"" if not quiet else done.stdout + done.stderr
        sys.exit(f"{told.decode()}\n{' '.join(map(str, command))}: exit status {done.returncode}")


_START = time.monotonic()


def step(what: str) -> None:
    """Say what is done next, and when."""
    print(f"[{time.monotonic() - _START:5.0f} s] {what}", flush=True)


def check(holds: object, what: str) -> None:
    """End with a message if something does not hold."""
    if not holds:
        sys.exit(f"check_wheel.py: {what}")


if __name__ == "__main__":
    main()
