from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from fedclade import ConfigError
from fedclade.config import read_config
from fedclade.config.scenario import read_scenario
from fedclade.config.toml_files import apply_overrides, find_config, read_toml

LONG = "9" * 5000
DEEP = 100_000

ODD = {
    f"clients = {LONG}": "is not a TOML file",
    f"clients = -{LONG}": "is not a TOML file",
    f"clients = 0x{LONG}": "whole numbers should have at most 64 bits, as in TOML, got",
    f"clients = {10**400}": "whole numbers should have at most 64 bits, as in TOML, got 1000000",
    f"clients = {2**63}": "whole numbers should have at most 64 bits, as in TOML, got 9223372036854775808",
    f"clients = {'[' * DEEP}{']' * DEEP}": "tables and lists should be nested at most 20 deep",
    f"clients = {'[' * 30}{']' * 30}": "tables and lists should be nested at most 20 deep",
    f"clients = {'{a = ' * 5000}1{'}' * 5000}": "tables and lists should be nested at most 20 deep",
    f"{'.'.join('a' * 3000)} = 1": "tables and lists should be nested at most 20 deep",
}


@pytest.mark.parametrize(("line", "told"), ODD.items(), ids=[line[:20] for line in ODD])
def test_a_file_with_numbers_too_long_or_tables_too_deep_is_refused(tmp_path, line, told):
    (path := tmp_path / "odd.toml").write_text(f"rounds = 2\n[data]\n{line}\n")
    with pytest.raises(ConfigError, match=re.escape(told)) as error:
        read_config(path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("line", "told"), [each for each in ODD.items() if each[0].startswith("clients")]
)
def test_an_override_with_numbers_too_long_or_tables_too_deep_is_refused(line, told):
    key, _, value = line.partition(" = ")
    with pytest.raises(ConfigError, match=re.escape(told)) as error:
        read_config(find_config("cfl-digits-label-swap"), [f"data.{key}={value}"])
    assert str(error.value).startswith("--set 'data.clients=")
    assert len(str(error.value)) < 1000


def test_an_override_that_is_no_toml_is_still_a_string():
    apply_overrides(raw := {}, ["data.name=digits", "model.name=[[["])
    assert raw == {"data": {"name": "digits"}, "model": {"name": "[[["}}


def test_the_seeds_of_a_scenario_may_not_be_too_long_either(tmp_path):
    (path := tmp_path / "scenario.toml").write_text(f"seeds = 0x{LONG}\n[algorithms.cfl]\n")
    with pytest.raises(ConfigError, match="whole numbers should have at most 64 bits"):
        read_scenario(path)


def test_a_name_that_no_file_can_have_is_no_config():
    for name in ("x" * 5000, "a\0b", f"{'x' * 5000}.toml"):
        with pytest.raises(ConfigError, match="config"):
            find_config(name)


def test_a_file_is_utf8_whatever_the_locale(tmp_path):
    (path := tmp_path / "utf8.toml").write_bytes("# Größe: 漢\nrounds = 2\n".encode())
    assert read_toml(path) == {"rounds": 2}
    code = f"from fedclade.config.toml_files import *; from pathlib import Path; print(read_toml(Path({str(path)!r})))"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False
    )
    assert (told.returncode, told.stdout.decode()) == (0, "{'rounds': 2}\n"), told.stderr.decode()


def test_overrides_reach_tables_within_sections():
    apply_overrides(
        raw := {"data": {"drift": {"rounds": [2]}}}, ["data.drift.share=0.5", "target.auroc=0.9"]
    )
    assert raw == {"data": {"drift": {"rounds": [2], "share": 0.5}}, "target": {"auroc": 0.9}}
    with pytest.raises(ConfigError, match=r"'data\.drift\.share' has a value and is not a section"):
        apply_overrides(raw, ["data.drift.share.deep=1"])
    with pytest.raises(ConfigError, match=r"should have the form section\.key=value"):
        apply_overrides(raw, ["data..share=1"])
