"""A setting of middleware outside of the package is written once: as one field of its class."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fedclade
from fedclade.config import read_config
from fedclade.core import ConfigError, installed
from fedclade.flower.from_config import RunConfig
from tests.flower.grids import FOUR, federated, grid_of
from tests.tiny import federation_of, linear

ROOT = Path(__file__).parents[1]

PLACE = '''
from dataclasses import dataclass

from fedclade import Middleware
from fedclade.core import TrainQuery, in_range, setting


@dataclass(frozen=True, kw_only=True)
class Shrinking(Middleware):
    """Shortens every update."""

    queries = (TrainQuery,)

    factor: float = setting(0.5, in_range("[0, 1]"), doc="Number that updates are multiplied by.")

    def after(self, query, updates):
        return updates.with_columns(deltas=self.factor * updates.required_deltas)
'''
"""The only place that knows of the setting."""

CONFIG = """
rounds = 1
algorithm.name = "fedavg"
model.name = "mclr"
data = { name = "digits", clients = 4, samples_per_client = 40 }
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with the middleware."""
    (tmp_path / "users_shrinking.py").write_text(PLACE)
    info = tmp_path / "users_shrinking-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: users-shrinking\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedclade.middleware]\nshrinking = users_shrinking:Shrinking\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    yield
    installed.cache_clear()
    sys.modules.pop("users_shrinking", None)


def config_with(tmp_path: Path, text: str = "", *overrides: str) -> fedclade.config.Config:
    path = tmp_path / "own.toml"
    path.write_text(CONFIG + text)
    return read_config(path, overrides)


def shrinking(**settings: float):
    return importlib.import_module("users_shrinking").Shrinking(**settings)


def test_a_config_sets_it_and_a_run_records_it(tmp_path: Path):
    config = config_with(tmp_path, "[middleware.shrinking]\nfactor = 0")
    assert config.as_dict()["middleware"] == {"shrinking": {"factor": 0.0}}
    run = config.run(config.federation())
    assert run.config["middleware"] == {"shrinking": {"factor": 0.0}}
    unchanged = config_with(tmp_path, "", "rounds=1")
    start = unchanged.built_model(config.federation().pool.schema, 0)
    weights = torch.cat([each.flatten() for each in start.parameters()])
    torch.testing.assert_close(run.tree.nodes[0].params, weights.detach())
    assert "middleware" not in unchanged.as_dict()


def test_its_default_is_filled_in_and_set_overrides_it(tmp_path: Path):
    assert config_with(tmp_path, "[middleware.shrinking]").middleware == {
        "shrinking": {"factor": 0.5}
    }
    config = config_with(
        tmp_path, "[middleware.shrinking]\nfactor = 0.1", "middleware.shrinking.factor=0.25"
    )
    assert config.middleware == {"shrinking": {"factor": 0.25}}


def test_the_config_of_a_folder_sets_it_again(tmp_path: Path):
    config = config_with(tmp_path, "[middleware.shrinking]\nfactor = 0.25")
    config.run(config.federation(), folder=tmp_path / "run")
    again = read_config(tmp_path / "run" / "config.toml")
    assert again.middleware == {"shrinking": {"factor": 0.25}}


def test_it_is_a_keyword_in_python_which_a_run_records():
    federation = federation_of([0, 1])
    own = [shrinking(factor=0.25)]
    run = fedclade.simulate("fedavg", linear(), federation, rounds=1, middleware=own)
    assert run.config["middleware"] == {"shrinking": {"factor": 0.25}}
    grid = grid_of(federation_of(FOUR))
    there = federated(grid, fedclade.FedAvg(), rounds=1, middleware=own)
    assert there.config["middleware"] == {"shrinking": {"factor": 0.25}}


def test_a_run_config_of_a_network_sets_it():
    read = RunConfig.read(
        {"data.name": "digits", "data.clients": 4, "middleware.shrinking.factor": 0.25}
    )
    assert read.config.middleware == {"shrinking": {"factor": 0.25}}
    assert read.as_dict()["middleware"] == {"shrinking": {"factor": 0.25}}


def test_problems_name_it_by_its_key(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"middleware.shrinking.factor should be in \[0, 1\], got 2.0"
    ):
        config_with(tmp_path, "[middleware.shrinking]\nfactor = 2")
    with pytest.raises(
        ConfigError, match=r"middleware.shrinking.factor should be in \[0, 1\], got 3"
    ):
        shrinking(factor=3)
    with pytest.raises(
        ConfigError,
        match=r"unknown key of \[middleware.shrinking\]: 'facto'; did you mean 'factor'",
    ):
        config_with(tmp_path, "[middleware.shrinking]\nfacto = 1")
    with pytest.raises(ConfigError, match=r"factor of \[middleware.shrinking\] should be a number"):
        config_with(tmp_path, "", "middleware.shrinking.factor=much")
    with pytest.raises(ConfigError, match="unknown middleware 'shrinkin'; did you mean 'shrinking"):
        config_with(tmp_path, "[middleware.shrinkin]")
    with pytest.raises(ConfigError, match=r"such as \[middleware.shrinking\], got 3"):
        config_with(tmp_path, "", "middleware.shrinking=3")


def test_only_middleware_can_be_named(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"'fedclade:FedAvg' should be a subclass of fedclade\.Middleware, got"
    ):
        config_with(tmp_path, '[middleware."fedclade:FedAvg"]')


def test_the_reference_has_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page = importlib.import_module("generated").config_page()
    assert "## [middleware.shrinking]\n\nShortens every update" in page
    row = "| `factor` | `0.5` | Number that updates are multiplied by. Allowed: in [0, 1]. |"
    assert row in page
