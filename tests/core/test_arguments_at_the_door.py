"""The door of the Python API: wrong types are one error of fedclade's own, before anything is trained."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fedclade
from fedclade import ConfigError, LocalTraining, ModelError, Run, simulate
from fedclade.algorithms import ALGORITHMS
from fedclade.core.params import Layout
from tests.tiny import FEATURES, LABELS, federation_of, linear

ODD = (
    None,
    "x",
    1.5,
    np.float32(2.5),
    [1],
    {"a": 1},
    object(),
    print,
    True,
    np.arange(2),
    torch.ones(2),
)


def run_of(**settings: Any) -> Run:
    settings = {
        "algorithm": "fedavg",
        "model": linear(),
        "federation": federation_of([0, 1]),
    } | settings
    return simulate(**{"rounds": 1, "engine": "loop"} | settings)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        (
            "algorithm",
            None,
            "algorithm of simulate should be of type Algorithm or a string, got None",
        ),
        (
            "local",
            {"lr": 0.1},
            "local of simulate should be of type LocalTraining or left out, got {'lr': 0.1}",
        ),
        ("on_round", "x", "on_round of simulate should be a function or left out, got 'x'"),
        ("rounds", "5", "rounds of simulate should be a whole number, got '5'"),
        ("rounds", 5.0, "rounds of simulate should be a whole number, got 5.0"),
        (
            "federation",
            "digits",
            "federation of simulate should be of type Federation, got 'digits'",
        ),
        ("folder", 3, "folder of simulate should be a string or of type Path or left out, got 3"),
        (
            "target",
            "0.9",
            "target of simulate should be a number or a table or left out, got '0.9'",
        ),
        ("tf32", "yes", "tf32 of simulate should be true or false, got 'yes'"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_by_name(name: str, value: Any, told: str):
    with pytest.raises(ConfigError) as caught:
        run_of(**{name: value})
    assert str(caught.value) == told


def test_numbers_of_numpy_work_through_to_the_config_that_is_written(tmp_path: Path):
    local = LocalTraining(epochs=np.int64(2), lr=np.float32(0.25), batch_size=np.uint8(10))
    given = {
        "rounds": np.int64(5),
        "seed": np.int32(3),
        "client_fraction": np.float32(0.5),
        "target": np.float16(0.5),
    }
    run_of(
        **given,
        algorithm=fedclade.CFL(split_rounds=[np.int64(2)]),
        local=local,
        folder=tmp_path / "run",
    )
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (config["rounds"], config["seed"], config["client_fraction"]) == (5, 3, 0.5)
    assert (
        config["local"]["epochs"],
        config["local"]["lr"],
        config["algorithm"]["split_rounds"],
    ) == (2, 0.25, [2])
    assert Run.load(tmp_path / "run").summary["target"]["accuracy"] == 0.5


SETTINGS = {
    kind: list(fedclade.core.arguments.known_arguments(kind))
    for kind in (
        *(entry.algorithm for entry in ALGORITHMS.values()),
        *(
            fedclade.LocalTraining,
            fedclade.Faults,
            fedclade.Signature,
            fedclade.DifferentialPrivacy,
        ),
    )
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in SETTINGS.items() for name in names]
)
def test_settings_take_what_they_are_or_refuse_it_in_their_own_words(kind: type, name: str):
    """Each odd value in each place: no other error than fedclade's own."""
    given = {"clip_norm": 1.0} if kind is fedclade.DifferentialPrivacy else {}
    refused: list[str] = []
    for value in ODD:
        try:
            kind(**{**given, name: value})
        except fedclade.FedcladeError as error:
            refused.append(str(error))
    assert len(refused) >= len(ODD) - 5
    assert all(name in told for told in refused)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in fedclade.core.arguments.known_arguments((simulate, fedclade.RunSettings))
        if n != "stop"
    ],
)
def test_simulate_takes_what_it_is_given_or_refuses_it_in_its_own_words(
    name: str, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where "x" becomes a folder
    refused = 0
    for value in ODD:
        try:
            run_of(**{name: value})
        except fedclade.FedcladeError:
            refused += 1
    assert refused >= len(ODD) - 5


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: fedclade.load_federation("digits", clients="3"),
            "clients of load_federation should be a whole number",
        ),
        (lambda: fedclade.Federation(1, ()), "pool of Federation should be of type Pool, got 1"),
        (
            lambda: fedclade.one_client([], [], labels="2"),
            "labels of one_client should be a whole number or left out, got '2'",
        ),
        (lambda: fedclade.assign(1, 2), "run of assign should be of type Run, got 1"),
        (lambda: fedclade.export_model(1, 2), "run of export_model should be of type Run, got 1"),
        (lambda: Run.load(3), "folder of load should be a string or of type Path, got 3"),
        (
            lambda: run_of().save(None),
            "folder of save should be a string or of type Path, got None",
        ),
    ],
)
def test_so_are_those_of_the_other_functions(call: Callable[[], object], told: str):
    with pytest.raises(ConfigError) as caught:
        call()
    assert told in str(caught.value)


def net(wrap: Callable[[nn.Module], Any], *more: Any) -> nn.Module:
    layer = nn.Linear(FEATURES, LABELS)
    return nn.Sequential(nn.Flatten(), wrap(layer, *more) or layer)


COMPUTED = {
    "weight norm": lambda: net(parametrizations.weight_norm),
    "spectral norm": lambda: net(parametrizations.spectral_norm),
    "orthogonal": lambda: net(parametrizations.orthogonal),
    "spectral norm as it was": lambda: net(nn.utils.spectral_norm),
    "pruned": lambda: net(prune.l1_unstructured, "weight", 0.5),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_model_that_computes_its_weights_is_one_clear_error(name: str):
    with pytest.raises(
        ModelError,
        match=r"'1' \(\w*Linear\) computes its weights from other parameters.*use a layer without",
    ):
        run_of(model=COMPUTED[name]())


def test_weight_norm_as_it_was_is_told_before_it_is_copied():
    with pytest.warns(FutureWarning):
        model = net(nn.utils.weight_norm)
    with pytest.raises(
        ModelError, match=r"'1' \(Linear\) computes its weights from other parameters"
    ):
        run_of(model=model)


def test_a_parametrisation_that_was_removed_is_none():
    model = COMPUTED["weight norm"]()
    nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    assert Layout.of(model).n_parameters == Layout.of(linear()).n_parameters


def test_a_lazy_model_is_told_to_be_given_a_batch_first():
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(LABELS))
    with pytest.raises(
        ModelError, match=r"'1' \(LazyLinear\) is lazy: .*pass a batch through the model first"
    ):
        run_of(model=model)
    model(torch.zeros(1, FEATURES))
    assert run_of(model=model).summary["rounds"] == 1


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: linear(), "making the model from seed 0 failed: TypeError"),
        (
            lambda seed: None,
            "the function that makes the model should return a torch.nn.Module, got NoneType",
        ),
        (
            lambda seed: 1 / 0,
            "making the model from seed 0 failed: ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_function_that_makes_no_model_is_one_clear_error(make: Callable[..., Any], told: str):
    with pytest.raises(ModelError) as caught:
        run_of(model=make)
    assert told in str(caught.value)


WITHOUT_VALUES = {
    "scripted": (
        lambda: torch.jit.script(linear()),
        "'?RecursiveScriptModule.* is a TorchScript module, .*give the",
    ),
    "a scripted part": (
        lambda: nn.Sequential(nn.Flatten(), torch.jit.script(nn.Linear(FEATURES, LABELS))),
        r"'1' \(RecursiveScriptModule\) is a TorchScript module, .*; give the module that torch.jit.script",
    ),
    "on the meta device": (
        lambda: nn.Linear(FEATURES, LABELS, device="meta"),
        "'weight' of the model is on the 'meta' device and has no values; make the model on the CPU",
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_a_model_that_cannot_be_copied_is_one_clear_error(kind: str):
    make, told = WITHOUT_VALUES[kind]
    for model in (make(), lambda seed: make()):
        with pytest.raises(ModelError, match=told):
            run_of(model=model)


@pytest.mark.parametrize("folder", ["x" * 300, "x/" * 3000, "a\0b"], ids=["name", "path", "null"])
def test_a_folder_that_no_file_system_has_is_refused_everywhere(folder: str, tmp_path: Path):
    run = run_of()
    calls: list[Callable[[], object]] = [
        lambda: run_of(folder=folder),
        lambda: Run.load(folder),
        lambda: run.save(folder),
        lambda: fedclade.export_model(run, folder, node=0),
        lambda: fedclade.compare(["fedavg"], linear(), federation_of([0, 1]), folder=folder),
        lambda: fedclade.config.read_config(folder),
        lambda: fedclade.load_federation("digits", data_dir=folder),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="should be a valid file path, got"):
            call()


def test_a_client_that_a_run_has_not_has_no_personal_parameters():
    run = run_of()
    assert run.personal(0) == {}
    for client in (99, -1, "x", [0]):
        with pytest.raises(
            fedclade.TreeError,
            match=r"^client .* is not in the parameter tree, which has 2 clients",
        ):
            run.personal(client)


@pytest.mark.parametrize(
    ("clusters", "told"),
    [
        ({"a": 0, "b": 1}, "each key of true_clusters of Oracle should be a whole number, got 'a'"),
        ({0: "a", 1: "b"}, "true_clusters[0] of Oracle should be a whole number, got 'a'"),
        ("ab", "true_clusters of Oracle should be a table, got 'ab'"),
    ],
)
def test_an_oracle_of_strings_is_refused(clusters: Any, told: str):
    with pytest.raises(ConfigError) as caught:
        fedclade.Oracle(clusters)
    assert str(caught.value) == told


def test_a_config_is_read_by_its_path_or_its_name(tmp_path: Path):
    (tmp_path / "own.toml").write_text("rounds = 3\n")
    for path in (tmp_path / "own.toml", str(tmp_path / "own.toml")):
        assert fedclade.config.read_config(path).top.rounds == 3
    assert fedclade.config.read_config("cfl-digits-label-swap").algorithm["name"] == "cfl"
    for path, told in (
        ("str", "unknown config 'str'"),
        (Path("str"), "cannot read the config str"),
        (3, "got 3"),
    ):
        with pytest.raises(ConfigError, match=told):
            fedclade.config.read_config(path)


def test_a_run_folder_may_have_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_of(folder="runs:1/first")
    assert Run.load("runs:1/first").summary["rounds"] == 1
