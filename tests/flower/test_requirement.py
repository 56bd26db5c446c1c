from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from fedclade.core.errors import ConfigError, MissingExtraError
from fedclade.flower import requirement
from fedclade.flower.requirement import check_flower


def found(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def installed(package: str) -> str:
        assert package == "flwr"
        if version is None:
            raise PackageNotFoundError(package)
        return version

    monkeypatch.setattr(requirement, "version", installed)


@pytest.mark.parametrize("version", ["1.41", "1.41.0", "1.42.3", "1.42.99", "1.41.0.dev20260101"])
def test_versions_that_it_works_with(version: str, monkeypatch: pytest.MonkeyPatch):
    found(monkeypatch, version)
    check_flower()


@pytest.mark.parametrize("version", ["1.40.9", "0.19", "1.43.0", "2.0.0", "3", "unknown"])
def test_others_are_refused_and_the_fix_named(version: str, monkeypatch: pytest.MonkeyPatch):
    found(monkeypatch, version)
    with pytest.raises(
        ConfigError,
        match=rf"flwr 1.41 or later, below 1.43, got {version}; .* 'fedclade\[flower\]'",
    ):
        check_flower()


def test_without_flower_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    found(monkeypatch, None)
    with pytest.raises(
        MissingExtraError,
        match=r"a federation over a network needs the package 'flwr'.*fedclade\[flow",
    ):
        check_flower()


def test_the_package_asks_for_the_same_versions():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["flower"] == [
        "click<8.5",
        "cryptography>=50.0",
        "flwr>=1.41,<1.43",
        "httpx>=0.28.1",
        "msgpack>=1.1",
    ]
