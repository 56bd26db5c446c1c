"""What installed packages add, as ``ls`` and ``cite`` show it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedclade.cli import main
from fedclade.core import installed

OWN = '''
from dataclasses import dataclass
import fedclade
from fedclade.algorithms import Method, Paper
from fedclade.tasks import Task

@dataclass(frozen=True, kw_only=True)
class Clusters(fedclade.FedAvg):
    """Clusters of one's own.

    More about it.
    """
    citation = """
        @article{own2026,
        }
        """

RECORD = Method(
    name="recorded",
    algorithm=Clusters,
    description="Clusters with a record",
    papers=(Paper(("Doe", "Roe", "Poe"), 2026, "Records"),),
    citations=("@misc{record2026}", "sattler2021cfl"),
)
UNCITED = Method(name="uncited", algorithm=Clusters)
MISCITED = Method(name="miscited", algorithm=Clusters, citations=("satler2021cfl",))

@dataclass(frozen=True)
class Unfinished(fedclade.Algorithm):
    """Has neither init nor step."""

def shallow(outputs):
    "A shallow model."

def rare():
    """Weighs rare labels more."""
    return Task("classification", class_weights="balanced")

smooth = Task("regression", loss="huber", metrics=["mae"])
'''

POINTS = """
[fedclade.algorithms]
clusters = users_package:Clusters
recorded = users_package:RECORD
uncited = users_package:UNCITED
miscited = users_package:MISCITED
gone = users_package:Gone
function = users_package:shallow
unfinished = users_package:Unfinished
cfl = users_package:Clusters
[fedclade.models]
shallow = users_package:shallow
[fedclade.tasks]
rare = users_package:rare
smooth = users_package:smooth
wrong = users_package:Clusters
[fedclade.partitions]
shallow = users_package:shallow
"""


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[list[str], str]]]:
    """Call the command line where a package is installed; return its lines, and its error."""
    (tmp_path / "users_package.py").write_text(OWN)
    info = tmp_path / "users_package-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: users-package\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    installed.cache_clear()

    def call(*arguments: str) -> tuple[list[str], str]:
        monkeypatch.setattr(sys, "argv", ["fedclade", *arguments])
        with pytest.raises(SystemExit):
            main()
        captured = capsys.readouterr()
        return [" ".join(line.split()) for line in captured.out.splitlines()], captured.err

    yield call
    installed.cache_clear()
    sys.modules.pop("users_package", None)


def test_ls_lists_what_packages_add_and_what_is_wrong_with_it_in_a_line(
    command: Callable[..., tuple[list[str], str]],
):
    package = "(users-package 1.2)"
    lines, _ = command("ls", "algorithms")
    assert f"clusters Clusters of one's own {package}" in lines
    assert f"recorded Clusters with a record (Doe et al. 2026) {package}" in lines
    assert (
        "gone algorithm 'gone' of package users-package cannot be imported (users_package:Gone): module "
        f"'users_package' has no attribute 'Gone'; install a working version of the package, or uninstall it {package}"
    ) in lines
    assert any(
        line.startswith("function algorithm 'function' should be a subclass of fedclade.Algo")
        for line in lines
    )
    assert any(
        line.startswith(
            "unfinished algorithm 'unfinished' should define the methods of fedclade.Algorithm, but lacks init, step"
        )
        for line in lines
    )
    assert (
        f"cfl hidden by the built-in entry of this name: use users_package:Clusters {package}"
        in lines
    )
    assert sum(line.startswith("cfl ") for line in lines) == 2
    assert f"shallow A shallow model {package}" in command("ls", "models")[0]
    (line,) = (line for line in command("ls", "partitions")[0] if line.startswith("shallow "))
    assert line.startswith(
        "shallow partition 'shallow' should have the parameters (pool, clients, seed), and options"
    )


def test_ls_lists_tasks(command: Callable[..., tuple[list[str], str]]):
    lines, _ = command("ls", "tasks")
    assert "regression one number or several: squared error" in lines
    assert "rare Weighs rare labels more (users-package 1.2)" in lines
    assert "smooth name smooth, loss huber, metrics ['mae'] (users-package 1.2)" in lines
    assert any(line.startswith("wrong task 'wrong' should be a fedclade.Task") for line in lines)


def test_ls_alone_lists_everything(command: Callable[..., tuple[list[str], str]]):
    lines, _ = command("ls")
    for heading in ("algorithms", "datasets", "partitions", "shifts", "models", "tasks", "configs"):
        assert heading in lines
    assert "clusters Clusters of one's own (users-package 1.2)" in lines


def test_cite_asks_what_is_not_fedclades_own_for_its_citation(
    command: Callable[..., tuple[list[str], str]],
):
    for name in ("clusters", "users_package:Clusters"):
        assert command("cite", name) == (["@article{own2026,", "}"], "")
    assert command("cite", "shallow")[1].endswith(
        "the attribute citation of shallow should be a string with BibTeX entries, but it is "
        "missing, empty or not a string\n"
    )
    assert (
        "unknown algorithm, data set or other component 'cluster'; did you mean 'clusters'?"
        in command("cite", "cluster")[1]
    )
    assert (
        "cited component 'users_package:Cluster' cannot be imported"
        in command("cite", "users_package:Cluster")[1]
    )


def test_cite_prints_the_citations_of_a_record(command: Callable[..., tuple[list[str], str]]):
    for name in ("recorded", "users_package:RECORD"):
        lines, error = command("cite", name)
        assert error == ""
        assert lines[:3] == ["@misc{record2026}", "", "@article{sattler2021cfl,"]
    assert command("cite", "uncited")[1].endswith(
        "the record of algorithm uncited should name its citations, but its field citations is empty\n"
    )
    assert (
        "the record of algorithm local should name its citations, but its field citations is empty"
        in command("cite", "local")[1]
    )
    message = "unknown BibTeX key 'satler2021cfl'; did you mean 'sattler2021cfl'? (known: "
    error = command("cite", "miscited")[1]
    assert message in error
    assert "; a citation should be a key in fedclade's citations.bib or a BibTeX entry" in error
    assert (
        "unknown algorithm, data set or other component 'recordet'; did you mean 'recorded'?"
        in command("cite", "recordet")[1]
    )


def test_ls_lists_engines_and_those_of_a_cluster(command: Callable[..., tuple[list[str], str]]):
    lines, _ = command("ls", "engines")
    assert "stacked all clients in one batched program" in lines
    assert "ray clients on the actors of a Ray cluster, each with an engine of its own" in lines
