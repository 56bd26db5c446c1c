"""Processes import what they need: the command line starts without torch, and a ClientApp without a server."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import typer

import fedclade
from fedclade import catalogue
from fedclade.algorithms import ALGORITHMS
from fedclade.cli.app import app
from fedclade.core import summary_of
from fedclade.data import PARTITIONS, SHIFTS, SOURCES
from fedclade.models import MODELS
from fedclade.tasks import TASKS
from fedclade.trackers import TRACKERS

HEAVY = ("torch", "numpy", "scipy", "sklearn", "pyarrow", "matplotlib", "flwr", "ray", "tomli_w")


METHODS_OF_ONE_FILE = tuple(
    f"fedclade.algorithms.{name}" for name in ("apfl", "ditto", "fedem", "ifca", "pacfl", "stocfl")
)
"""Modules of methods on which no other module depends."""


def modules_after(code: str, **variables: str) -> list[str]:
    """Return the names of all modules that a program has imported at its end."""
    program = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    return json.loads(done.stderr.splitlines()[-1])


def command(arguments: Sequence[str]) -> str:
    """Return a program that calls the command line."""
    return "\n".join(
        [
            "import sys",
            f"sys.argv = ['fedclade', *{list(arguments)}]",
            "from fedclade.cli import main",
            "try: main()",
            "except SystemExit as leaving: assert not leaving.code",
        ]
    )


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["ls"], ["run", "--help"], ["data", "build", "--help"]]
)
def test_a_command_that_computes_nothing_imports_no_heavy_package(arguments: list[str]):
    assert {*HEAVY} & {*modules_after(command(arguments))} == set()


@pytest.mark.parametrize("words", ["fedclade ru", "fedclade run --da", "fedclade data build --o"])
def test_shell_completion_imports_no_heavy_package(words: str):
    typed = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    modules = modules_after(command([]), _FEDCLADE_COMPLETE="complete_bash", **typed)
    assert "fedclade.cli.commands" in modules
    assert {*HEAVY} & {*modules} == set()


def test_the_package_imports_nothing_before_a_name_is_used():
    code = "import fedclade; assert fedclade.__version__ and 'simulate' in fedclade.__all__"
    assert {*HEAVY} & {*modules_after(code)} == set()


def test_a_run_needs_no_optional_package(tmp_path: Path):
    """Run a config whose results are stored, where the packages cannot be imported."""
    blocked = ("tomli_w", "matplotlib", "flwr", "jinja2", "plotly")
    code = f"""
import sys
for name in {blocked}:
    sys.modules[name] = None  # an import then raises a ModuleNotFoundError
"""
    arguments = ["run", "cfl-digits-label-swap", "--rounds", "1", "--out", str(tmp_path / "run")]
    modules_after(code + command([*arguments, "--quiet", "--device", "cpu", "--engine", "loop"]))
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_client_app_imports_neither_the_server_nor_the_report():
    pytest.importorskip("flwr")
    modules = modules_after("from fedclade.flower import client_app, client_app_from_config")
    assert "fedclade.flower.client_handler" in modules
    unneeded = ("sqlalchemy", "fedclade.flower.federate", "fedclade.report")
    assert {*unneeded} & {*modules} == set()


def test_a_client_app_of_a_program_imports_nothing_that_reads_whole_runs():
    pytest.importorskip("flwr")
    modules = modules_after(
        "from fedclade.flower import client_app; client_app('mlp', lambda context: None)"
    )
    assert "fedclade.flower.client_handler" in modules
    unneeded = (
        "fedclade.algorithms.registry",
        "fedclade.flower.network_gains",
        "fedclade.runs.settings",
        "fedclade.runs.store.run",
    )
    assert {*unneeded} & {*modules} == set()


@pytest.mark.parametrize("method", ["fedavg", "cfl", "pacfl"])
def test_a_config_is_checked_without_the_modules_of_runs_reports_and_other_methods(method: str):
    modules = modules_after(command(["validate", f"{method}-mnist-label-swap"]))
    assert "fedclade.config.check" in modules
    assert set(METHODS_OF_ONE_FILE) & set(modules) <= {f"fedclade.algorithms.{method}"}
    unneeded = (
        "fedclade.report.page.section",
        "fedclade.runs.history",
        "fedclade.runs.simulation",
        "fedclade.runs.store.run",
        "fedclade.training.auto",
        "fedclade.training.jobs",
    )
    assert {*unneeded} & {*modules} == set()


CONFIGS = Path(__file__).parents[1] / "configs"
SECTIONS = """
client_fraction = 0.5
[data]
name = "mnist"
partition = "dirichlet"
alpha = 0.3
shift = "rotation"
drift = { rounds = [2] }
[model]
name = "lstm"
freeze = ["embedding.*"]
personal = "head"
adapter = { targets = ["dense"] }
[local]
momentum = 0.9
mu = 0.1
lr_schedule = "cosine"
[privacy]
clip_norm = 1.0
noise_multiplier = 1.0
delta = 1e-5
[task]
metrics = ["accuracy", "auroc"]
[aggregate]
rule = "median"
[server]
optimizer = "fedadam"
[newcomers]
clients = 2
"""
"""Config with many sections, all of fedclade's own settings."""


def test_configs_are_checked_without_torch(tmp_path: Path):
    """All of fedclade's configs in one process, and one with many sections."""
    (tmp_path / "sections.toml").write_text(SECTIONS)
    configs = [tmp_path / "sections.toml", *sorted(CONFIGS.glob("*.toml"))]
    configs += [CONFIGS / "arena" / "mnist.toml", CONFIGS / "suite" / "label-swap.toml"]
    assert len(configs) > 40
    code = "\n".join(command(["validate", str(path)]) for path in configs)
    modules = modules_after(code)
    assert "fedclade.algorithms.ocfl" in modules
    unneeded = ("torch.nn", "safetensors.torch", "scipy.stats", "matplotlib", "flwr", "tomli_w")
    assert {*unneeded} & {*modules} == set()


def test_no_method_needs_torch_when_its_module_is_imported():
    code = """
from fedclade.cli.deferred_torch import defer_torch
defer_torch()
from fedclade.algorithms import ALGORITHMS, algorithm_class
for name in ALGORITHMS:
    algorithm_class(name)
"""
    modules = modules_after(code)
    assert {*METHODS_OF_ONE_FILE} <= {*modules}
    assert "torch.nn" not in modules


def test_a_config_may_need_torch(tmp_path: Path):
    """An optimizer other than plain SGD is checked by a trial step."""
    (tmp_path / "adam.toml").write_text("[local]\noptimizer = 'adam'\noptions = { amsgrad = true }")
    modules = modules_after(command(["validate", str(tmp_path / "adam.toml")]))
    assert "torch.nn" in modules


def test_a_run_imports_no_other_method():
    """The run's config names the method, which is found without its rivals' modules."""
    program = """
import fedclade
federation = fedclade.load_federation("digits", clients=2, samples_per_client=10)
run = fedclade.simulate("ditto", "mclr", federation, rounds=0, device="cpu", engine="loop")
assert run.config["algorithm"]["name"] == "ditto"
"""
    modules = modules_after(program)
    assert set(METHODS_OF_ONE_FILE) & set(modules) == {"fedclade.algorithms.ditto"}


def test_the_catalogue_has_the_names_and_descriptions_of_all_registries():
    registries = {
        "CREDITED": ALGORITHMS,
        "DATASETS": SOURCES,
        "PARTITIONS": PARTITIONS,
        "SHIFTS": SHIFTS,
        "MODELS": MODELS,
        "TRACKERS": TRACKERS,
    }
    for name, registry in registries.items():
        described = {entry: summary_of(value) for entry, value in registry.items()}
        assert getattr(catalogue, name) == described
        assert list(getattr(catalogue, name)) == list(described)
    assert list(catalogue.TASKS) == list(TASKS)


def test_each_declared_command_is_carried_out_with_its_options():
    """The function of a command has the parameters of its declaration, which Typer passes by name."""
    groups = [app, data_commands()]
    declared = [each.callback for group in groups for each in group.registered_commands]
    assert len(declared) > 15
    for declaration in declared:
        assert declaration is not None
        function = getattr(import_module(declaration.module), declaration.__name__)  # type: ignore[attr-defined]
        assert list(inspect.signature(function).parameters) == list(
            inspect.signature(declaration).parameters
        )


def data_commands() -> typer.Typer:
    """Return the app of the commands ``fedclade data``."""
    (group,) = app.registered_groups
    assert group.typer_instance is not None
    return group.typer_instance


def test_every_public_name_can_be_used():
    assert [name for name in fedclade.__all__ if not hasattr(fedclade, name)] == []
    with pytest.raises(AttributeError, match="module 'fedclade' has no attribute 'simulat'"):
        _ = fedclade.simulat  # type: ignore[attr-defined]


def test_a_submodule_does_not_hide_a_public_function_of_its_name():
    import fedclade.data.federation  # noqa: F401 -- the import stores the module in the package
    from fedclade.data import federation

    assert callable(federation)


@pytest.mark.parametrize("package", ["fedclade", "fedclade.flower", "fedclade.runs"])
def test_all_public_names_are_listed_before_their_first_use(package: str):
    """For completion in a shell."""
    program = f"import {package} as p; print(sorted(set(p.__all__).difference(dir(p))))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
