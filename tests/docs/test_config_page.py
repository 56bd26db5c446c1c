"""The page of all keys of a config, made from the settings."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from fedclade.config.settings import FIXED, TopLevel
from fedclade.core import settings_of
from fedclade.flower import Network

DOCS = Path(__file__).parents[2] / "docs"
CLASSES = {**{f"[{name}]": kind for name, kind in FIXED.items()}, "Above the sections": TopLevel}


@pytest.fixture(name="page")
def page_of_keys(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("generated").config_page()


@pytest.mark.parametrize(("title", "kind"), [*CLASSES.items(), ("[network]", Network)])
def test_it_has_every_key_of_a_section_with_a_description(title: str, kind: type, page: str):
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", section, re.MULTILINE))
    assert settings_of(kind).keys() <= rows.keys()
    assert all(len(description) > 5 for description in rows.values())


@pytest.mark.parametrize("kind", CLASSES.values())
def test_every_key_of_a_section_is_a_setting_with_documentation(kind: type):
    assert list(settings_of(kind)) == list(kind.__dataclass_fields__)
