"""Reading a run folder runs no code that its config names, unless its origin is trusted."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

import fedclade
from fedclade import CFL, ConfigError, Run
from fedclade.cli import app
from fedclade.core import importing_only, reading_folder
from fedclade.core.errors import UntrustedNameError
from fedclade.core.plugins import imported

CONFIG = """
rounds = 1
[data]
name = "digits"
clients = 4
samples_per_client = 40
[newcomers]
clients = 1
[model]
name = "mclr"
[algorithm]
name = "fedavg"
"""
CODE = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
def model(input_shape, outputs):
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
"""
REFUSAL = (
    r"'planted_code:model' is not imported, because the config of the run folder names it, and importing it would run "
    r"code; if you trust the source of the folder, allow the import with --trust, or in Python with "
    r"Run.load\(folder, trust=True\)"
)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that names nothing."""
    place = tmp_path_factory.mktemp("honest")
    config = place / "config.toml"
    config.write_text(CONFIG)
    result = CliRunner().invoke(
        app, ["run", str(config), "--out", str(place / "run"), "-q"], catch_exceptions=False
    )
    assert result.exit_code == 0
    return place / "run"


@pytest.fixture
def planted(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of it whose config names code, which lies where modules are imported from."""
    folder = tmp_path / "run"
    shutil.copytree(honest, folder)
    config = tomllib.loads((folder / "config.toml").read_text())
    config["model"] = {"name": "planted_code:model"}
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    (folder / "manifest.json").unlink(missing_ok=True)
    summary = folder / "summary.json"
    summary.write_text(summary.read_text().replace('"format": 3', '"format": 2'))
    (tmp_path / "planted_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planted_code", raising=False)
    return folder


def has_run(folder: Path) -> bool:
    return (folder.parent / "planted_code.ran").exists()


@pytest.mark.parametrize(
    "command", [["report"], ["tree"], ["assign"], ["export", "--node", "0", "--out"], ["resume"]]
)
def test_commands_that_read_a_folder_run_nothing_that_it_names(command: list[str], planted: Path):
    name, *options = command
    values = [str(planted.parent / "model.safetensors")] if options else []
    if name == "resume":
        (planted / "summary.json").unlink()
    result = CliRunner().invoke(app, [name, str(planted), *options, *values])
    assert not has_run(planted)
    if name in ("assign", "resume"):
        with pytest.raises(UntrustedNameError, match=REFUSAL):
            raise result.exception or AssertionError(result.output)
    else:
        assert result.exit_code == 0, result.exception


@pytest.mark.parametrize("command", ["assign", "resume"])
def test_with_trust_they_import_it(command: str, planted: Path):
    if command == "resume":
        (planted / "summary.json").unlink()
    result = CliRunner().invoke(app, [command, str(planted), "--trust"])
    assert has_run(planted), result.exception


def test_a_loaded_run_is_not_trusted_and_one_that_was_made_here_is(planted: Path):
    newcomers = fedclade.load_federation("digits", clients=2, samples_per_client=40)
    with pytest.raises(UntrustedNameError, match=REFUSAL):
        fedclade.assign(Run.load(planted), newcomers)
    assert not has_run(planted)
    assert Run.load(planted, trust=True).is_trusted
    made = fedclade.simulate(CFL(), "mclr", newcomers, rounds=1)
    assert made.is_trusted


def test_what_the_user_gives_is_imported_whatever_the_folder(planted: Path):
    newcomers = fedclade.load_federation("digits", clients=2, samples_per_client=40)
    found = fedclade.assign(Run.load(planted), newcomers, model="mclr")
    assert len(found.assignments) == 2
    assert not has_run(planted)


def test_the_page_still_says_how_to_repeat_a_run_with_code_of_ones_own(planted: Path):
    result = CliRunner().invoke(app, ["report", str(planted)])
    assert result.exit_code == 0
    assert f"fedclade run {planted / 'config.toml'}" in (planted / "report.html").read_text()


def test_limits_end_with_their_block_and_nest():
    with importing_only(["math:pi"]):
        assert imported("math:pi", "number") == pytest.approx(3.14159, abs=1e-4)
        with (
            reading_folder(trust=False),
            pytest.raises(
                UntrustedNameError, match="number 'math:pi' is not imported, because the config of"
            ),
        ):
            imported("math:pi", "number")
        with pytest.raises(
            ConfigError, match="number 'math:e' is not imported, because the server chose"
        ):
            imported("math:e", "number")
    assert imported("math:e", "number") > 2.7
