"""The records of methods: each agrees with the class, the page, the paper, the config and the golden run it names."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedclade import ConfigError, FedAvg, Run
from fedclade.algorithms import (
    ALGORITHMS,
    METHODS,
    Method,
    Paper,
    algorithm_class,
    build_algorithm,
    describe,
    method_named,
    method_of_run,
)
from fedclade.config import check_config, find_config, read_config
from fedclade.core import installed
from fedclade.report import cite_name
from fedclade.runs.store.served_models import serves_mixtures, serves_own

ROOT = Path(__file__).parents[2]
DATA = {"name": "digits", "clients": 8, "shift": "label_swap", "clusters": 2}

each_method = pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])


@cache
def bibliography() -> dict[str, dict[str, str]]:
    """Return the fields of each entry of citations.bib, by its key, in plain letters."""
    text = (ROOT / "src/fedclade/report/citations.bib").read_text(encoding="utf-8")
    text = " ".join(text.replace('{\\"u}', "ü").split())
    entries: dict[str, dict[str, str]] = {}
    for entry in re.split(r"(?=@\w+\{)", text)[1:]:
        key = entry.split("{")[1].split(",")[0]
        found = re.findall(r"(\w+) *= *\{(.*?)\}(?=, \w+ *=| *\})", entry)
        entries[key] = {name: re.sub("[{}]", "", value) for name, value in found}
    return entries


def test_a_record_has_no_attributes_besides_its_fields():
    with pytest.raises(AttributeError, match="object has no attribute 'algoritm'"):
        _ = METHODS[0].algoritm  # type: ignore[attr-defined]


def test_no_name_is_taken_twice():
    assert len(ALGORITHMS) == len(METHODS)
    assert list(ALGORITHMS) == [method.name for method in METHODS]


@each_method
def test_a_record_leads_to_its_class_and_back(method: Method):
    assert method_named(method.name) is method
    assert algorithm_class(method.name) is method.algorithm
    built = build_algorithm(method.name, method.options, true_clusters={0: 0})
    assert describe(built)["name"] == method.name
    assert describe(built).items() >= method.options.items()


@each_method
def test_a_record_has_a_page_with_a_heading(method: Method):
    text = (ROOT / "docs" / method.page).read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert method.family is not None


@each_method
def test_the_citations_of_a_record_are_in_the_bibliography(method: Method):
    assert set(method.citations) <= set(bibliography())
    if method.citations:
        printed = cite_name(method.name)
        assert [f"{{{key}," in printed for key in method.citations] == [True] * len(
            method.citations
        )


@each_method
def test_the_papers_of_a_record_are_as_in_the_bibliography(method: Method):
    by_title = {entry["title"]: key for key, entry in bibliography().items() if "title" in entry}
    keys = [by_title[paper.title] for paper in method.papers]
    assert set(keys[:1]) <= set(method.citations)
    for key, paper in zip(keys, method.papers, strict=True):
        names = bibliography()[key]["author"].split(" and ")
        ends = [name.endswith(author) for name, author in zip(names, paper.authors, strict=True)]
        assert all(ends), (names, paper.authors)
        assert paper.year <= int(bibliography()[key]["year"])  # which may have been printed later


@each_method
def test_a_config_with_the_options_of_a_record_holds(method: Method):
    about = {"algorithm": {"name": method.name, **method.options}}
    if method.requires.simulation.startswith("queries for sums over clients"):
        about["privacy"] = {"model": "central", "clip_norm": 1.0, "noise_multiplier": 1.0}
        about["privacy"] |= {"signature_noise": 1.0, "signature_epsilon": 1.0}
    config = check_config({"data": DATA, **about})
    assert config.algorithm["name"] == method.name


@pytest.mark.parametrize("method", [m for m in METHODS if m.config], ids=lambda method: method.name)
def test_the_config_of_a_record_is_shipped_and_runs_the_method(method: Method):
    assert read_config(find_config(method.config)).algorithm["name"] == method.name


def test_only_a_method_for_normalisation_layers_has_no_shipped_config():
    assert [method.name for method in METHODS if not method.config] == ["fedbn"]


@each_method
def test_a_method_has_a_golden_run(method: Method):
    figures = json.loads((ROOT / "benchmarks/golden_runs/figures.json").read_text(encoding="utf-8"))
    assert f"method: {method.name}" in figures


@pytest.mark.parametrize(
    ("authors", "short"),
    [
        (("Dinh",), "Dinh 2020"),
        (("Ruan", "Joe-Wong"), "Ruan and Joe-Wong 2020"),
        (("A", "B", "C"), "A et al. 2020"),
    ],
)
def test_a_paper_is_cited_by_at_most_two_names(authors: tuple[str, ...], short: str):
    assert Paper(authors, 2020, "Any").short == short


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (
            {"papers": Paper(("A",), 2020, "Any")},
            "papers of a Method should be a tuple of Paper, got Paper",
        ),
        (
            {"citations": "@misc{a}"},
            "citations of a Method should be a tuple of texts, got '@misc{a}'",
        ),
        (
            {"scenarios": ["suite"]},
            r"scenarios of a Method should be a tuple of names, got \['suite'\]",
        ),
    ],
)
def test_a_single_thing_in_place_of_a_tuple_is_refused(given: dict[str, Any], error: str):
    with pytest.raises(ConfigError, match=error):
        Method(name="mine", algorithm=FedAvg, **given)


@pytest.mark.parametrize("authors", ["Dinh", ()])
def test_the_authors_of_a_paper_are_a_tuple_of_names(authors: Any):
    with pytest.raises(
        ConfigError, match=f"authors of a Paper should be a tuple of family names, got {authors!r}"
    ):
        Paper(authors, 2020, "Any")


def test_the_line_about_a_method_is_its_description_or_the_classs_with_its_only_paper():
    first, second = Paper(("A",), 2020, "Any"), Paper(("B",), 2021, "Other")
    assert Method(name="mine", algorithm=FedAvg, description="Mine").summary == "Mine"
    assert (
        Method(name="mine", algorithm=FedAvg, description="Mine", papers=(first,)).summary
        == "Mine (A 2020)"
    )
    assert (
        Method(name="mine", algorithm=FedAvg, description="Mine", papers=(first, second)).summary
        == "Mine"
    )
    assert Method(name="mine", algorithm=FedAvg).summary == str(FedAvg.__doc__).splitlines()[
        0
    ].rstrip(".")


PACKAGE = '''
from dataclasses import dataclass
import fedclade
from fedclade.algorithms import Method, OwnModels, Paper

@dataclass(frozen=True)
class Means(fedclade.FedAvg):
    """Means of means."""

@dataclass(frozen=True)
class Alone(fedclade.Local):
    """Every client alone."""

@dataclass(frozen=True)
class Mixed(fedclade.FedEM):
    """Mixtures."""

@dataclass(frozen=True)
class Plain(fedclade.FedAvg):
    """Has no record."""

MEANS = Method(name="means", algorithm=Means, papers=(Paper(("Doe",), 2026, "Means"),))
ALONE = Method(name="alone", algorithm=Alone)
MIXED = Method(name="mixed", algorithm=Mixed)
RENAMED = Method(name="old_name", algorithm=Plain)
NO_CLASS = Method(name="no_class", algorithm="Means")
'''

POINTS = """
[fedclade.algorithms]
means = methods_package:MEANS
alone = methods_package:ALONE
mixed = methods_package:MIXED
new_name = methods_package:RENAMED
no_class = methods_package:NO_CLASS
plain = methods_package:Plain
"""


@pytest.fixture
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the package as if it were installed."""
    (tmp_path / "methods_package.py").write_text(PACKAGE)
    info = tmp_path / "methods_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: methods-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    yield
    installed.cache_clear()
    sys.modules.pop("methods_package", None)


@pytest.mark.usefixtures("_package")
def test_the_record_of_a_package_is_found_by_its_name_and_its_class_by_the_record():
    means = method_named("means")
    assert (means.name, means.summary) == ("means", "Means of means (Doe 2026)")
    assert describe(build_algorithm("means"))["name"] == "means"
    assert describe(means.algorithm()) == {"name": "means"}
    assert method_named("methods_package:MEANS") is means


@pytest.mark.usefixtures("_package")
def test_a_class_without_a_record_gets_one_of_its_attributes():
    plain = method_named("plain")
    assert plain == Method(name="plain", algorithm=plain.algorithm)
    assert method_named("methods_package:Plain").name == "methods_package:Plain"


@pytest.mark.usefixtures("_package")
def test_errors_about_records_name_them():
    with pytest.raises(
        ConfigError,
        match=r"unknown algorithm 'meens'; did you mean 'means'\? \(known: alone, apfl, ",
    ):
        method_named("meens")
    with pytest.raises(
        ConfigError,
        match=r"entry point 'new_name' of fedclade\.algorithms provides a Method with another name, 'old_name'; set",
    ):
        method_named("new_name")
    with pytest.raises(
        ConfigError,
        match=r"algorithm 'no_class' should be a subclass of fedclade\.Algorithm, got 'Me",
    ):
        method_named("no_class")


@pytest.mark.usefixtures("_package")
def test_a_run_folder_leads_to_installed_methods_and_imports_nothing_else():
    names = ("cfl", "alone", "mixed", "new_name", "gone", "methods_package:MEANS")
    found = {name: method_of_run(name) for name in names}
    assert found["cfl"] is ALGORITHMS["cfl"]
    assert found["alone"] is not None
    assert found["mixed"] is not None
    assert found["mixed"].requires.mixture is not None
    assert [name for name, method in found.items() if method is None] == [
        "new_name",
        "gone",
        "methods_package:MEANS",
    ]


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize(
    ("name", "own", "mixtures"),
    [("means", False, False), ("alone", True, False), ("mixed", False, True)],
)
def test_the_models_of_clients_are_known_from_the_class_of_a_package(
    name: str, own: bool, mixtures: bool
):
    run = cast(
        "Run", SimpleNamespace(config={"algorithm": {"name": name}}, kept={}, is_trusted=False)
    )
    assert serves_own(run) == own
    assert serves_mixtures(run) == mixtures
