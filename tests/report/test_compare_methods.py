"""Several methods over one federation, from Python."""

from __future__ import annotations

import re

import pytest

import fedclade
from fedclade.config import check_config
from fedclade.core import ConfigError
from tests.tiny import federation_of, linear

FEDERATION = federation_of([0, 1, 0, 1])
SETTINGS = {"rounds": 2, "engine": "loop"}


def compared(methods, **changes):
    return fedclade.compare(
        methods, **{"model": linear(), "federation": FEDERATION, **SETTINGS, **changes}
    )


def test_methods_are_run_with_the_same_seeds():
    seen = []

    def federation(seed):
        seen.append(seed)
        return FEDERATION

    found = compared(
        {"all": fedclade.FedAvg(), "best": "oracle"},
        seeds=[3, 5],
        federation=federation,
        name="here",
    )
    assert isinstance(found, fedclade.Comparison)
    seeds = {label: [run.summary["seed"] for run in runs] for label, runs in found.runs.items()}
    assert seeds == {"all": [3, 5], "best": [3, 5]}
    assert seen == [3, 5] * 2
    assert found.title == "here: comparison of 2 configurations"
    assert found.rows[0].gap_closed.mean == 0
    alone = fedclade.simulate("fedavg", linear(), FEDERATION, seed=5, **SETTINGS)
    assert found.runs["all"][1].client_rows == alone.client_rows


def test_runs_that_a_folder_has_are_read(tmp_path):
    first = compared({"all": "fedavg"}, seeds=[5], folder=tmp_path).runs["all"][0]
    assert fedclade.Run.load(tmp_path / "all" / "seed-5").client_rows == first.client_rows
    again = compared({"all": "fedavg"}, seeds=[5], folder=tmp_path).runs["all"][0]
    assert again.summary["seconds"] == first.summary["seconds"], "it was read, not run again"


def test_names_alone_are_what_they_are_called():
    assert list(compared(["fedavg", "local"]).runs) == ["fedavg", "local"]
    assert list(compared("fedavg", settings=fedclade.RunSettings(rounds=1), rounds=1).runs) == [
        "fedavg"
    ]


def config(name):
    data = {"name": "digits", "clients": 2, "samples_per_client": 40}
    return check_config(
        {
            "rounds": 1,
            "engine": "loop",
            "data": data,
            "model": {"name": "mclr"},
            "algorithm": {"name": name},
        }
    )


def test_configs_have_a_model_and_settings_of_their_own():
    found = fedclade.compare({"a": config("fedavg"), "b": config("local")}, seeds=2)
    assert [[run.summary["seed"] for run in runs] for runs in found.runs.values()] == [
        [0, 1],
        [0, 1],
    ]
    assert found.runs["a"][0].summary["model"] == "mclr"


@pytest.mark.parametrize(
    ("methods", "changes", "message"),
    [
        ({}, {}, "methods should be a list or mapping with at least 1 method, got {}"),
        (
            ["fedavg"],
            {"seeds": 0},
            "seeds should be a number of at least 1, or a list of numbers of at least 0, got 0",
        ),
        (["fedavg"], {"seeds": [0, -1]}, "or a list of numbers of at least 0, got [0, -1]"),
        (["fedavg"], {"seed": 4}, "seed should be omitted (use seeds instead), got 4"),
        (["fedavg"], {"model": None}, "fedclade.compare needs a model to run algorithms, got None"),
        (
            ["fedavg"],
            {"federation": None},
            "fedclade.compare needs a federation to run algorithms, got None",
        ),
        (
            {"a": config("fedavg")},
            {},
            "model, settings and engine should be omitted with configs, as the config 'a'",
        ),
        (
            {"a": config("fedavg")},
            {"model": None, "engine": "loop"},
            "model, settings and engine should be omitted with configs, as the config 'a'",
        ),
        ({"a": "fedavg", "b": config("fedavg")}, {}, "got both: 'b' is a config"),
        (
            ["fedavg"],
            {"seeds": [0, 1, 0]},
            "seeds should be distinct, as the run of a repeated seed would count more than once",
        ),
        (["fedavg"], {"seeds": ["a"]}, "seeds[0] of compare should be a whole number, got 'a'"),
        (
            ["fedavg", "fedavg"],
            {},
            "methods should contain each name once, got 'fedavg' more than once",
        ),
        (
            [3],
            {},
            "methods should be a list of names of algorithms or a mapping from labels to algorithms, got a list with 3",
        ),
        ({"a": 3}, {}, "methods['a'] should be an Algorithm, a name or a Config, got 3"),
        ({3: "fedavg"}, {}, "each label in methods should be a string, got 3"),
        (["fedagv"], {}, "unknown algorithm 'fedagv'; did you mean 'fedavg'?"),
        (["fedavg"], {"engine": "lop"}, "'lop'"),
    ],
)
def test_what_cannot_be_compared_is_said(methods, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        compared(methods, **changes)


def test_one_bar_shows_all_seeds_of_a_method(monkeypatch):
    started, shown = [], []

    class Bars:
        def shown(self):
            return memoryview(b"")  # something that can be entered

        def start(self, name, rounds):
            started.append((name, rounds))
            return lambda row, tree: shown.append(row["round"])

    monkeypatch.setattr("fedclade.report.compare_methods.progress_bars", Bars)
    compared(["fedavg", "local"], seeds=2, progress=True)
    assert started == [("fedavg", 4), ("local", 4)]
    assert shown == [1, 2, 3, 4] * 2
    compared(["fedavg"])
    assert len(started) == 2, "a script sees no bars unless it asks for them"


LABELS = {
    "../x": "the name contains a '/', which would make it a path",
    "a/b": "the name contains a '/', which would make it a path",
    "a\\b": "which would make it a path",
    "..": "the name refers to another folder",
    "": "the name is empty",
    "a\n": "the name contains characters that cannot be displayed",
    "x" * 300: "a name in the path has 300 bytes, but file systems allow at most 255",
}


@pytest.mark.parametrize("label", LABELS)
def test_a_method_whose_folder_would_lie_elsewhere_is_refused(label, tmp_path):
    with pytest.raises(ConfigError, match="should be a valid name of a folder: ") as caught:
        compared({"fine": "fedavg", label: "fedavg"}, folder=tmp_path / "all" / "runs")
    assert LABELS[label] in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_run_counts_once():
    run, other = (compared(["fedavg"], seeds=[seed]).runs["fedavg"][0] for seed in (0, 1))
    with pytest.raises(
        ConfigError,
        match=r"the runs of configuration 'a' should have distinct seeds, got seed 0 on .* than once",
    ):
        fedclade.Comparison({"a": [run, other, run]})
    assert fedclade.Comparison({"a": [run, other], "b": [run]}).rows[0].seeds == (0, 1)
