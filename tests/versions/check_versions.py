"""Run tests with the lowest or the newest versions that the bounds in pyproject.toml allow.

``python tests/versions/check_versions.py lowest``, or ``make test-bounds`` for both. A new
environment gets all that a user can install, fedclade[all] and fedclade-papers, in these versions.
Then the tests run that use each of the packages (``TESTS``), or those that are named. At the end,
the bound and the tested version of each package are printed.

The lowest versions are constraints that are read from pyproject.toml, so that an installer cannot
go below them for other reasons. The bounds have to hold together: an extra's lowest version must
allow the lowest versions of all other packages, as far as pip can install them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]

TESTS: dict[str, tuple[str, ...]] = {
    "cryptography": ("tests/flower/test_signing.py", "tests/flower/secure/test_parts.py"),
    "datasets": ("tests/data/test_tables.py", "tests/data/test_sources.py"),
    "dp-accounting": ("tests/channel/test_accounting.py",),
    "filelock": ("tests/data/test_cache.py",),
    "click": ("tests/cli/test_ls.py", "tests/cli/test_plugged.py"),
    "flwr": ("tests/flower/test_local_grid.py", "tests/flower/test_http_inbox.py"),
    "flwr-datasets": ("tests/data/test_partition.py",),
    "httpx": ("tests/flower/test_http_inbox.py", "tests/flower/test_exchange.py"),
    "msgpack": ("tests/flower/test_wire.py", "tests/flower/test_signing.py"),
    "jinja2": ("tests/report/page",),
    "matplotlib": ("tests/report/test_figures.py", "tests/report/test_curves.py"),
    "mlflow-skinny": ("tests/trackers/test_mlflow.py",),
    "nbformat": ("tests/report/test_plots.py", "tests/report/test_notebook.py"),
    "numpy": ("tests/core", "tests/clustering"),
    "onnx": ("tests/runs/test_onnx_export.py",),
    "onnxscript": ("tests/runs/test_onnx_export.py",),
    "optuna": ("tests/sweeps/test_search.py", "tests/sweeps/test_study.py"),
    "pandas": ("tests/data/test_frames.py", "tests/report/test_comparison.py"),
    "pillow": ("tests/data/test_images.py",),
    "plotly": ("tests/report/test_plots.py",),
    "prometheus-client": ("tests/trackers/test_prometheus.py",),
    "pyarrow": ("tests/data/test_folder.py", "tests/runs/store"),
    "ray": ("tests/training/remote/test_packing.py", "tests/training/remote/test_cluster.py"),
    "rich": ("tests/report/test_tables.py", "tests/report/test_terminal.py"),
    "safetensors": ("tests/runs/store",),
    "scikit-learn": ("tests/clustering", "tests/tasks"),
    "scipy": ("tests/clustering",),
    "tensorboard": ("tests/trackers/test_tensorboard.py",),
    "tomli-w": ("tests/config",),
    "torch": ("tests/core", "tests/training/test_evaluation.py"),
    "torchmetrics": ("tests/tasks",),
    "typer": ("tests/cli",),
    "typing-extensions": ("tests/config",),
    "wandb": ("tests/trackers/test_wandb.py",),
}
"""Tests that use each of the packages that a user can install."""

TOOLS = ("hypothesis", "onnxruntime", "packaging", "pytest", "pyyaml")
"""Packages that these tests need in addition, in any version."""


def requirements() -> list[Requirement]:
    """Return what fedclade and the extras of a user require, each package once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"]]
    for extra, texts in project["optional-dependencies"].items():
        if extra not in ("all", "dev", "docs"):
            lists.append(texts)
    found: dict[str, Requirement] = {}
    for texts in lists:
        for text in texts:
            required = Requirement(text)
            found.setdefault(required.name, required)
    return list(found.values())


def lowest_version(required: Requirement) -> str | None:
    """Return the version of the bound ``>=`` of a requirement; None without such a bound."""
    versions = [each.version for each in required.specifier if each.operator == ">="]
    return versions[0] if versions else None


def lowest_constraints(required: Iterable[Requirement], keep: Sequence[str]) -> list[str]:
    """Return constraints for pip: the lowest version of each package, except those to keep.

    Parameters
    ----------
    required
        Requirements of fedclade.
    keep
        Constraints that replace the lowest version of their package, such as ``torch==2.13.0``.
    """
    kept = {Requirement(text).name: text for text in keep}
    constraints = dict(kept)
    for each in required:
        lowest = lowest_version(each)
        if lowest is not None and each.name not in kept:
            constraints[each.name] = f"{each.name}=={lowest}"
    return list(constraints.values())


def main() -> None:
    """Install the versions, run the tests, and print which versions were tested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=["lowest", "newest"])
    parser.add_argument("tests", nargs="*", help="tests to run (default: those in TESTS)")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="NAME==VERSION",
        help="take this version of a package, for example where only one build can be had",
    )
    parser.add_argument(
        "--environment", type=Path, help="folder of the environment (default: a temporary one)"
    )
    arguments = parser.parse_args()
    constraints = list(arguments.keep)
    if arguments.which == "lowest":
        constraints = lowest_constraints(requirements(), arguments.keep)
    tests = arguments.tests or sorted({test for each in TESTS.values() for test in each})
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.environment or Path(temporary) / "environment"
        python = install(folder, constraints, Path(temporary) / "constraints.txt")
        status = run_tests(python, tests)
        print_versions(python)
    sys.exit(status)


def install(folder: Path, constraints: Sequence[str], file: Path) -> Path:
    """Make an environment with fedclade in the constrained versions; return its Python."""
    file.write_text("\n".join(constraints) + "\n", encoding="utf-8")
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    packages = ["-e", f"{ROOT}[all]", "-e", str(ROOT / "packages/fedclade-papers"), *TOOLS]
    command = [python, "-m", "pip", "install", "--quiet", "--upgrade", "-c", file, *packages]
    subprocess.run(
        [*map(str, command), "--upgrade-strategy", "eager"], check=True, env=clean_environment()
    )
    return python


def run_tests(python: Path, tests: Sequence[str]) -> int:
    """Run tests that are neither slow nor long; return the exit status of pytest."""
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow and not long", *tests]
    settings = {**clean_environment(), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, check=False, env=settings).returncode


def clean_environment() -> dict[str, str]:
    """Return the environment variables without those that lead to other packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def print_versions(python: Path) -> None:
    """Print the bound and the installed version of each package."""
    script = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    for required in requirements():
        found = subprocess.run(
            [str(python), "-c", script, required.name], capture_output=True, text=True, check=True
        )
        print(f"{required.name:20} {required.specifier!s:20} {found.stdout.strip()}")


if __name__ == "__main__":
    main()
