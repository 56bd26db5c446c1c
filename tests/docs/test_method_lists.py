"""The lists of methods in texts are those that docs/method_lists.py writes from the records."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from fedclade import FedAvg, Requires
from fedclade.algorithms import METHODS, Method, Paper
from tests.docs.blocks import ROOT

NAMES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "configs").glob("*/*.toml"))]
FILES = ["README.md", "docs/methods/index.md", "mkdocs.yml", *NAMES]


@dataclass(frozen=True)
class Newest(FedAvg):
    """A method that is added."""

    requires = Requires(simulation="it is made up")


NEW = Method(
    name="newest",
    algorithm=Newest,
    description="the newest of all",
    papers=(Paper(("Doe", "Roe"), 2026, "The newest"), Paper(("Poe",), 2027, "Again")),
    family="models",
    options={"eta": 0.5, "kind": "new", "rounds": [2, 4]},
    clusters_as="clusters",
    scenarios=("suite", "natural", "arena/cifar10"),
    page="methods/newest.md",
)


@pytest.fixture
def method_lists(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("method_lists")


def test_eleven_scenarios_have_a_list(method_lists: ModuleType):
    assert [path.relative_to(ROOT).as_posix() for path in method_lists.list_files()] == FILES
    assert len(NAMES) == 11


@pytest.mark.parametrize("name", FILES)
def test_a_list_is_as_the_records_have_it(method_lists: ModuleType, name: str):
    written = method_lists.written_list(ROOT / name)
    assert written == (ROOT / name).read_text(encoding="utf-8"), (
        "write it with: python docs/method_lists.py"
    )


def test_a_new_record_is_in_every_list(method_lists: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(method_lists, "METHODS", (*METHODS, NEW))
    lists = {name: method_lists.written_list(ROOT / name) for name in FILES}
    assert (
        "\n| [`newest`](docs/methods/newest.md) | Doe and Roe 2026; Poe 2027 | the newest of all; simulations only |\n"
        in lists["README.md"]
    )
    assert re.search(
        r"\| models or losses \| .*, \[newest\]\(newest\.md\) \|\n", lists["docs/methods/index.md"]
    )
    assert "      - newest: methods/newest.md\n" in lists["mkdocs.yml"]
    options = 'eta = 0.5, kind = "new", rounds = [2, 4] }'
    for name in NAMES:
        line = (
            f"newest = {{ {options}"
            if "arena" in name
            else f"newest = {{ clusters = \\d, {options}"
        )
        expected = name != "configs/arena/mnist.toml"  # which the record does not name
        line = re.escape(line).replace(r"\\d", r"\d")
        assert bool(re.search(f"^{line}$", lists[name], re.MULTILINE)) is expected, name


def test_a_line_of_the_scenarios_own_takes_the_place_of_the_records(method_lists: ModuleType):
    text = (ROOT / "configs/arena/mnist.toml").read_text(encoding="utf-8")
    assert len(re.findall("^ditto = ", text, re.MULTILINE)) == 1
    rest = text.partition("# methods: end")[2].replace("ditto = { lam = 0.1 }\n", "")
    lines = method_lists.scenario_lines(ROOT / "configs/arena/mnist.toml", rest, None)
    assert "ditto = {}" in lines


def test_a_method_of_the_true_clusters_is_left_out_where_they_are_not_known(
    method_lists: ModuleType,
):
    oracle = {name for name in NAMES if "\noracle = {}\n" in method_lists.written_list(ROOT / name)}
    known = ("label-groups", "label-permutation", "label-swap", "rotation")
    assert oracle == {"configs/arena/mnist.toml", *(f"configs/suite/{name}.toml" for name in known)}


def test_a_record_without_a_family_is_refused(
    method_lists: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(method_lists, "METHODS", (replace(NEW, family=None),))
    with pytest.raises(
        SystemExit, match="the record of newest has no family: one of updates, models, data, "
    ):
        method_lists.written_list(ROOT / "README.md")


def test_a_file_without_the_two_comments_is_refused(
    method_lists: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(method_lists, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(
        "# methods: written by docs/method_lists.py\n", encoding="utf-8"
    )
    with pytest.raises(SystemExit, match=r"README\.md has no comments around a list of methods"):
        method_lists.written_list(tmp_path / "README.md")


def test_check_names_the_files_that_differ_and_writes_none(
    method_lists: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    index = tmp_path / "docs" / "methods" / "index.md"
    index.parent.mkdir(parents=True)
    before = "<!-- methods: written by docs/method_lists.py -->\n<!-- methods: end -->\n"
    index.write_text(before, encoding="utf-8")
    monkeypatch.setattr(method_lists, "ROOT", tmp_path)
    monkeypatch.setattr(method_lists, "list_files", lambda: [index])
    monkeypatch.setattr("sys.argv", ["method_lists.py", "--check"])
    with pytest.raises(SystemExit, match=r"write them with: python docs/method_lists\.py"):
        method_lists.main()
    assert capsys.readouterr().out == "docs/methods/index.md\n"
    assert index.read_text(encoding="utf-8") == before
    monkeypatch.setattr("sys.argv", ["method_lists.py"])
    method_lists.main()
    assert "| data | [pacfl](pacfl.md), [flux](flux.md) |" in index.read_text(encoding="utf-8")
