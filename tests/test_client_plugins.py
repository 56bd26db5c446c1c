"""The packages in ``examples/plugins``: built as wheels, installed, and used as by a stranger.

Each has training code of its own. It runs in a simulation, and over Flower where the client's policy names it.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import fedclade

PLUGINS = Path(__file__).parents[1] / "examples" / "plugins"
NAMES = sorted(path.name for path in PLUGINS.iterdir() if path.is_dir())
LONGEST = 80
"""Lines of code of a package are fewer."""

each_plugin = pytest.mark.parametrize("name", NAMES)


def lines_of_code(source: str) -> int:
    """Return the number of lines of code, without blank lines, comments and docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [
        node.body[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    ]
    left_out = {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in (*skipped, tokenize.ENDMARKER)
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - left_out)


def test_there_are_three_packages():
    assert NAMES == ["fedala", "fedproto", "moon"]


@each_plugin
def test_a_package_is_short_and_uses_public_names(name: str):
    files = [*(PLUGINS / name / "src").rglob("*.py")]
    sources = [path.read_text(encoding="utf-8") for path in files]
    assert sum(map(lines_of_code, sources)) < LONGEST
    rooms = {"fedclade", "fedclade.algorithms", "fedclade.core"}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fedclade"):
                assert node.module in rooms


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the wheels of all packages are installed."""
    wheels = tmp_path_factory.mktemp("wheels")
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--no-deps", "--no-index"]
    sources = [str(PLUGINS / name) for name in NAMES]
    build = [*pip, "wheel", *quiet, "--no-build-isolation", "--wheel-dir", str(wheels), *sources]
    subprocess.run(build, check=True)
    built = sorted(map(str, wheels.glob("*.whl")))
    assert len(built) == len(NAMES)
    subprocess.run([*pip, "install", *quiet, "--target", str(site), *built], check=True)
    return site


def python(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with fedclade and the installed packages."""
    paths = [Path(fedclade.__file__).parents[1], site, Path(__file__).parents[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_the_tests_of_the_packages_pass_with_their_wheels(site: Path, tmp_path: Path):
    """They compare each method with a literal twin."""
    tests = [str(path) for path in PLUGINS.glob("*/tests/test_*.py")]
    assert len(tests) == len(NAMES)
    done = python(site, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


CALLS = """
import json, sys
from fedclade.cli import app
for arguments in json.loads(sys.argv[1]):
    app(arguments, standalone_mode=False)
"""


@pytest.mark.slow
def test_the_configs_of_the_packages_run(site: Path, tmp_path: Path):
    calls: list[list[str]] = []
    for name in NAMES:
        config = str(PLUGINS / name / f"{name}.toml")
        calls.append(["run", config, "--rounds", "2", "--out", name, "-q"])
        calls.append(["resume", name, "--rounds", "3", "-q"])
    done = python(site, tmp_path, "-c", CALLS, json.dumps([*calls, ["ls", "algorithms"]]))
    assert done.returncode == 0, done.stderr
    for name in NAMES:
        summary = json.loads((tmp_path / name / "summary.json").read_text(encoding="utf-8"))
        assert (summary["algorithm"], summary["rounds"]) == (name, 3)
        assert f"(fedclade-{name} 0.1.0)" in done.stdout


OVER_FLOWER = """
import json, sys
import torch
from fedclade import LocalTraining, simulate
from fedclade.algorithms import build_algorithm
from fedclade.core import UpdateError
from tests.flower.grids import federated, grid_of
from tests.tiny import federation_of, perceptron

def compare(name, options, policy):
    federation = federation_of([0, 0, 1, 1])
    local = LocalTraining(lr=0.1, epochs=2, batch_size=10)
    method = build_algorithm(name, options)
    grid = grid_of(federation, config=policy)
    try:
        there = federated(grid, method, local=local, rounds=3)
    except UpdateError as error:
        return str(error)
    here = simulate(method, perceptron(), federation, local=local, rounds=3, engine="loop")
    root, expected = (run.tree.nodes[0].params for run in (there, here))
    scores = [run.summary["accuracy"]["mean"] for run in (there, here)]
    return "equal" if torch.equal(root, expected) and scores[0] == scores[1] else str(scores)

print(json.dumps([compare(*case) for case in json.loads(sys.argv[1])]))
"""

OPTIONS = {"moon": {}, "fedproto": {"size": 8}, "fedala": {}}

POLICIES = {
    "moon": {"trainers": "moon"},
    "fedproto": {"trainers": "fedproto", "allow": "train evaluate statistics prototypes"},
    "fedala": {"trainers": "fedala"},
}


def compared(site: Path, folder: Path, policies: dict[str, dict[str, str]]) -> list[str]:
    """Return how a run over Flower compares with a simulation, for each package and policy.

    Runs are equal if their models are, bit for bit. For a run that fails, the result is the error.
    """
    cases = json.dumps([[name, OPTIONS[name], policy] for name, policy in policies.items()])
    done = python(site, folder, "-c", OVER_FLOWER, cases)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_packages_run_over_flower_where_the_policy_names_them(site: Path, tmp_path: Path):
    assert compared(site, tmp_path, POLICIES) == ["equal"] * len(NAMES)


@pytest.mark.slow
def test_the_default_policy_refuses_packages(site: Path, tmp_path: Path):
    policies: dict[str, dict[str, str]] = {name: {} for name in POLICIES}
    for name, reason in zip(policies, compared(site, tmp_path, policies), strict=True):
        why = (
            f"the client's policy forbids the training code '{name}', which is not part of "
            f'fedclade; if you trust the code, allow it with trainers="{name}" in the client\'s '
            "node config"
        )
        assert why in reason


@pytest.mark.slow
def test_the_default_policy_refuses_prototypes_also_if_it_names_the_code(
    site: Path, tmp_path: Path
):
    (reason,) = compared(site, tmp_path, {"fedproto": {"trainers": "fedproto"}})
    assert "forbids the query 'prototypes'; to allow it, set allow=" in reason
