"""Scenarios with named data sets and a tuning, and the suite ``natural``, which has both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedclade.config import Source, find_configs, read_scenarios
from fedclade.core import ConfigError, DataError

SUITE = """
seeds = 2
first_seed = 3
rounds = 1
[tuning]
seed = 9
step_sizes = [0.1, 1]
[tuning.settings]
ditto = { lam = [0.1, 0.3] }
[algorithms]
fedavg = {}
ditto = {}
[sets.one.data]
name = "digits"
clients = 3
[sets.two]
local.epochs = 2
algorithms.ditto.lam = 0.5
[sets.two.source]
about = "two"
licence = "CC0"
address = "https://example.org"
sha256 = { "two/a.csv" = "CHECKSUM" }
""".replace("CHECKSUM", "0" * 64)


def read(folder: Path, old: str = "", new: str = ""):
    assert old in SUITE
    path = folder / "suite.toml"
    path.write_text(SUITE.replace(old, new) if old else SUITE, encoding="utf-8")
    return read_scenarios(path)


def test_each_set_is_a_scenario_with_the_shared_settings(tmp_path):
    one, two = read(tmp_path)
    assert (one.name, two.name) == ("one", "two")
    assert (one.configs["fedavg"].data["clients"], two.configs["fedavg"].local.epochs) == (3, 2)
    assert (one.configs["ditto"].algorithm["lam"], two.configs["ditto"].algorithm["lam"]) == (
        1.0,
        0.5,
    )
    assert (one.seeds, one.first_seed, one.source) == (2, 3, None)
    assert two.source == Source("two", "CC0", "https://example.org", {"two/a.csv": "0" * 64})
    assert one.tuning == two.tuning
    assert one.tuning.trials == 4
    assert one.tuning.step_sizes == (0.1, 1.0)
    assert one.tuning.settings == {"ditto": ("lam", (0.1, 0.3))}


WRONG = [
    (
        "first_seed = 3",
        "first_seed = -1",
        "first_seed should be a whole number of at least 0, got -1",
    ),
    ("seed = 9", "seed = 4", "should be none of the seeds 3 to 4 of the runs to compare, got 4"),
    ("seed = 9", "seed = 0.5", "seed of [tuning] should be a whole number of at least 0, got 0.5"),
    ("[0.1, 1]", "[0.1, -1]", "step_sizes of [tuning] should be a list of positive numbers"),
    ("[0.1, 1]", "[]", "step_sizes of [tuning] should be a list of positive numbers, got []"),
    ("step_sizes", "sizes", "unknown key of [tuning]: 'sizes'; did you mean 'step_sizes'"),
    ("ditto = { lam = [0.1, 0.3] }", "dito = {}", "unknown algorithm of [tuning.settings]: 'dito'"),
    (
        "[0.1, 0.3]",
        "[0.1]",
        "ditto of [tuning.settings] should be a table with 1 setting and a list of 2",
    ),
    ("[sets.one.data]", '[sets."a/b"]\n[sets.one.data]', "a key of [sets] is invalid, 'a/b'"),
    (
        "[algorithms]",
        '[cells]\n"local.lr" = [1]\n[algorithms]',
        "[sets] cannot be combined with [cells]",
    ),
    ('about = "two"', "about = 2", "about of [sets.two.source] should be a text, got 2"),
    ('about = "two"', 'abut = "two"', "unknown key of [sets.two.source]: 'abut'"),
    ("0" * 64, "0" * 63, "two/a.csv of [sets.two.source] should have a SHA-256 checksum of 64"),
    ('{ "two/a.csv" = "' + "0" * 64 + '" }', "{}", "should name at least 1 file, got none"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_invalid_entries_are_named(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(tmp_path, old, new)


def test_files_are_looked_up_in_the_data_folder(tmp_path, monkeypatch):
    # the checksum of an empty file
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    source = Source("two", "CC0", "https://example.org", {"two/a.csv": empty})
    with pytest.raises(
        DataError, match=rf"cannot read .*a\.csv: No such file .*{empty}.*--data-dir"
    ):
        source.check_files(tmp_path)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.csv").touch()
    source.check_files(tmp_path)
    monkeypatch.setenv("FEDCLADE_DATA_DIR", str(tmp_path))
    source.check_files(None)
    (tmp_path / "two" / "a.csv").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match=rf"should have the SHA-256 checksum {empty}, got 2d711642"):
        source.check_files(None)
    others = Source("two", "CC0", "https://example.org", {"two/a.csv": "0" * 64})
    assert source.digest != others.digest


def test_the_natural_suite_is_tuned_on_other_seeds_than_it_compares():
    (path,) = find_configs("natural")
    scenarios = read_scenarios(path)
    assert [each.name for each in scenarios] == [
        "heart",
        "student",
        "tcga_brca",
        "exam",
        "parkinsons",
        "landmine",
        "wisdm",
    ]
    for scenario in scenarios:
        assert len(scenario.configs) >= 14
        assert scenario.seeds == 5
        assert scenario.tuning.trials == 5
        # the seeds on which the rules of auto were chosen, and the seed of the tuning
        assert not {*range(25), scenario.tuning.seed} & {*range(40, 45)}
        assert scenario.first_seed == 40
        assert scenario.source.sha256
        for config in scenario.configs.values():
            assert config.data["validation_fraction"] == 0.2
            assert (config.top.rounds, config.local.batch_size) == (20, 20)
    assert not any(each.configs["flux"].algorithm["per_label"] for each in scenarios[1:2])


def test_the_smoke_scale_of_the_natural_suite_is_small():
    scenarios = read_scenarios(find_configs("natural")[0], scale="smoke")
    assert {(each.seeds, each.tuning.trials) for each in scenarios} == {(2, 3)}
    assert {config.top.rounds for config in scenarios[0].configs.values()} == {2}
