"""Citations of runs: each part of a run has its entry, and every entry is well-formed BibTeX."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from typing import get_args

import pytest

from fedclade.algorithms import METHODS
from fedclade.channel.adversary import KINDS
from fedclade.core.server_steps import ServerOptimizerName
from fedclade.report import cite_name, cite_runs
from fedclade.report.citations import CITATIONS, read_entry
from fedclade.report.run_citations import _BY_CHOICE

NATURAL = ("heart", "student", "tcga_brca", "exam", "parkinsons", "landmine", "wisdm")

BIBLIOGRAPHY = files("fedclade.report").joinpath("citations.bib").read_text(encoding="utf-8")


def keys_of(bibtex: str) -> list[str]:
    return re.findall(r"^@\w+\{(\w+),", bibtex, re.MULTILINE)


@pytest.mark.parametrize("entry", BIBLIOGRAPHY.strip().split("\n\n"), ids=lambda e: keys_of(e)[0])
def test_an_entry_is_well_formed_and_complete(entry):
    assert re.match(r"@(article|inproceedings|misc|techreport|software)\{\w+,\n", entry)
    assert entry.endswith("\n}")
    depth = 0
    for character in re.sub(r"\\.", "", entry):
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    fields = dict(re.findall(r"^  (\w+) *= \{(.*?)\},?$", entry, re.MULTILINE | re.DOTALL))
    assert {"author", "title"} <= set(fields)
    if not entry.startswith("@software"):
        assert re.fullmatch(r"(19|20)\d\d", fields["year"])
    if entry.startswith("@article"):
        assert "journal" in fields
    if entry.startswith("@inproceedings"):
        assert "booktitle" in fields
    # Each author has a given name, and none is separated by a comma or a semicolon.
    assert not re.search(r"[,;]| AND ", fields["author"])
    assert entry.isascii(), "BibTeX of older installations reads ASCII alone"


def test_no_key_occurs_twice():
    keys = keys_of(BIBLIOGRAPHY)
    assert len(keys) == len(set(keys)) > 50


def test_every_key_that_is_named_has_an_entry_and_every_entry_is_named():
    named = set()
    for keys in CITATIONS.values():
        named.update(keys)
    for choices in _BY_CHOICE.values():
        for keys in choices.values():
            named.update(keys)
    for method in METHODS:
        named.update(method.citations)
    for key in named:
        assert read_entry(key)
    elsewhere = {
        *("allouah2023mixing", "beutel2020flower", "bonawitz2017secagg", "bell2020secaggplus"),
        *("suresh2017mean", "moritz2018ray", "paszke2019pytorch", "hu2022lora", "abadi2016dpsgd"),
        *("mcmahan2018dpfedavg", "dpaccounting", "doroshenko2022dots"),
    }
    assert set(keys_of(BIBLIOGRAPHY)) - named == elsewhere


def test_choices_are_those_of_the_settings():
    assert set(_BY_CHOICE["server", "optimizer"]) == {*get_args(ServerOptimizerName)} - {"none"}
    assert set(_BY_CHOICE["adversary", "kind"]) <= set(KINDS)


@pytest.fixture
def cited(summary_run):
    """Return the keys that are cited for a run with this config and summary."""

    def cite(algorithm="cfl", config=None, **summary):
        run = replace(summary_run(algorithm, **summary), config=config or {})
        return keys_of(cite_runs([run]))

    return cite


@pytest.mark.parametrize("name", NATURAL)
def test_natural_data_sets_are_known_by_their_folder(cited, name):
    (key,) = keys_of(cite_name(name))
    assert key in cited(config={"data": {"files": f"/data/natural/{name}/*.csv"}})
    assert key not in cited(config={"data": {"files": f"/data/{name}/*.csv"}})


@pytest.mark.parametrize(
    "name", ["digits", "mnist", "cifar10", "ag_news", "tiny_shakespeare", "femnist", "sent140"]
)
def test_data_sets_of_fedclade_are_cited(cited, name):
    assert set(keys_of(cite_name(name))) <= set(cited(config={"data": {"name": name}}))


def test_partition_and_shift_are_read_from_the_config_or_from_the_description(cited):
    wanted = {"yurochkin2019bayesian", "ghosh2020ifca"}
    section = {"name": "digits", "partition": "dirichlet", "shift": "rotation"}
    assert wanted <= set(cited(config={"data": section}))
    text = "digits, 6 clients, partition dirichlet, shift rotation, 2 clusters"
    assert wanted <= set(cited(data=text))
    assert not wanted & set(cited())


@pytest.mark.parametrize(
    ("config", "summary", "keys"),
    [
        (
            {"aggregate": {"rule": "krum", "mixing": True}},
            {},
            ["blanchard2017krum", "allouah2023mixing"],
        ),
        ({"server": {"optimizer": "fedyogi"}}, {}, ["reddi2021fedopt"]),
        ({"local": {"mu": 0.1}}, {}, ["li2020fedprox"]),
        ({"adversary": {"kind": "alie"}}, {}, ["baruch2019alie"]),
        ({"signature": {"kind": "projected"}}, {}, ["weinberger2009hashing"]),
        ({"model": {"adapter": {"rank": 4}}}, {}, ["hu2022lora"]),
        ({"engine": "ray"}, {}, ["moritz2018ray"]),
        ({"network": {"secure_aggregation": False}}, {}, ["beutel2020flower"]),
        (
            {"network": {"secure_aggregation": True}},
            {},
            ["beutel2020flower", "bonawitz2017secagg", "bell2020secaggplus", "suresh2017mean"],
        ),
        ({}, {"privacy": {"level": "client", "epsilon": None}}, ["mcmahan2018dpfedavg"]),
        (
            {},
            {"privacy": {"level": "example", "epsilon": 2.0}},
            ["abadi2016dpsgd", "dpaccounting", "doroshenko2022dots"],
        ),
    ],
)
def test_each_mechanism_of_a_run_adds_its_entries(cited, config, summary, keys):
    plain = cited()
    assert [key for key in cited(config=config, **summary) if key not in plain] == keys


def test_what_is_not_known_is_named_in_one_comment(summary_run):
    config = {"data": {"name": "my_data:load\n@article{x,"}, "versions": {"fedclade": "1.0.0"}}
    text = cite_runs([replace(summary_run("local", model="own:net"), config=config)])
    assert text.startswith("% software: fedclade 1.0.0\n@software{fedclade,")
    assert text.splitlines()[-1] == (
        "% Without an entry here, cite what they come from: data: my_data:load (at)article{x,; "
        "model: own:net"
    )
    assert keys_of(text) == ["fedclade", "paszke2019pytorch"]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_is_cited(cited, method):
    assert set(method.citations) <= set(cited(method.name))
