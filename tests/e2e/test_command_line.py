"""The commands, as a user calls them: what they print, what they write, how they fail."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from fedclade import FedGroup, Run, UpdateError, load_federation, simulate
from fedclade.algorithms import ALGORITHMS
from fedclade.cli import main
from fedclade.config import Config, check_config
from fedclade.config.scenario import read_scenario
from fedclade.config.toml_files import find_configs

pytestmark = pytest.mark.usefixtures("unpainted", "default_signals")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def fedclade(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Outcome]:
    """Call the command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCLADE_DATA_DIR", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["fedclade", *arguments])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


SMALL = """
rounds = 2
[data]
name = "digits"
clients = 4
shift = "label_swap"
clusters = 2
[model]
name = "mclr"
[algorithm]
name = "cfl"
eps2 = 0.4
[target]
accuracy = 0.5
"""


SWAP = """
rounds = 3
[data]
shift = "label_swap"
clients = 8
clusters = 2
[model]
name = "mclr"
[algorithms]
fedavg = {}
oracle = {}
ifca = { clusters = 2 }
[target]
accuracy = 0.1
[scales.smoke]
seeds = 2
rounds = 2
data.clients = 4
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_export_writes_a_model_and_its_cards(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path
):
    assert fedclade("run", small, "--out", "result", "-q").code == 0
    outcome = fedclade(
        "export", "result", "--client", "3", "--level", "0", "--out", "models/three.safetensors"
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert (
        "model: models/three.safetensors; model card: models/three.json and models/three.md"
        in outcome.out
    )
    assert files_in(tmp_path / "models") == {"three.safetensors", "three.json", "three.md"}
    assert set(load_file(tmp_path / "models" / "three.safetensors")) == {"1.weight", "1.bias"}
    for name, asked, told in (
        (
            "four",
            ("--client", "9"),
            "error: the run has no client '9'; its clients are 'client-0', 'client-1'",
        ),
        ("four", (), "error: a model is chosen by either --client or --node, got neither"),
        ("three", ("--node", "0"), "error: models/three.safetensors exists already"),
    ):
        outcome = fedclade("export", "result", *asked, "--out", f"models/{name}.safetensors")
        assert (outcome.code, outcome.out) == (2, "")
        assert told in outcome.err


def test_run_writes_the_whole_run_folder(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path, unpainted: pytest.MonkeyPatch
):
    unpainted.undo()
    outcome = fedclade("run", small, "--out", "result")
    assert outcome.code == 0, outcome.err
    assert "run folder: result" in outcome.out
    files = files_in(tmp_path / "result")
    # How many checkpoints are written depends on how long a round takes.
    assert {file for file in files if not file.startswith("checkpoints/")} == {
        "config.toml",
        "gains.json",
        "summary.json",
        "manifest.json",
        "metrics.parquet",
        "clusters.parquet",
        "clients.parquet",
        "events.jsonl",
        "similarities.npz",
        "tree/tree.json",
        "tree/tree.safetensors",
        "figures/accuracy.png",
        "figures/norms.png",
        "figures/similarity.png",
    }


def test_a_dendrogram_is_drawn_from_the_run_folder_alone(
    fedclade: Callable[..., Outcome], tmp_path: Path, unpainted: pytest.MonkeyPatch
):
    unpainted.undo()
    fl_hc = SMALL.replace(
        'name = "cfl"\neps2 = 0.4', 'name = "fl_hc"\nrounds_before = 1\nn_clusters = 2'
    )
    (tmp_path / "fl_hc.toml").write_text(fl_hc)
    outcome = fedclade("run", "fl_hc.toml", "--out", "result")
    assert outcome.code == 0, outcome.err
    picture = tmp_path / "result/figures/dendrogram.png"
    drawn = picture.read_bytes()
    picture.unlink()
    outcome = fedclade("report", "result")
    assert "Round 2: 2 clusters by l1 distance and complete linkage, cut at" in outcome.out
    assert picture.read_bytes() == drawn


def test_a_run_folder_keeps_its_contract(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path
):
    """The columns and keys that others script against."""
    fedclade("run", small, "--out", "result")
    metrics = pq.read_table(tmp_path / "result/metrics.parquet")
    assert {
        *(
            "round",
            "phase",
            "accuracy_mean",
            "accuracy_std",
            "accuracy_min",
            "accuracy_p10",
            "accuracy_p50",
        ),
        *("accuracy_p90", "clusters", "ari", "nmi", "bytes_up", "bytes_down", "seconds"),
        *("mean_norm", "max_norm", "alpha_cross_max", "gamma_bound", "separation_gap"),
    } <= set(metrics.column_names)
    assert metrics.column("round").to_pylist() == [1, 2]
    clients = pq.read_table(tmp_path / "result/clients.parquet")
    assert {"round", "client", "cluster", "true_cluster", "n_train", "accuracy", "loss"} <= set(
        clients.column_names
    )
    assert clients.num_rows == 2 * 4
    summary = json.loads((tmp_path / "result/summary.json").read_text())
    assert {"algorithm", "seed", "rounds", "clients", "accuracy", "clusters", "target"} <= set(
        summary
    )
    assert set(summary["accuracy"]) >= {"mean", "std", "min", "p10", "p50", "p90", "worst10_mean"}
    assert set(summary["clusters"]) == {"found", "true", "ari", "nmi", "sizes"}
    assert set(summary["target"]) == {
        "accuracy",
        "share_of_clients",
        "rounds_to_target",
        "bytes_to_target",
    }
    assert set(summary["seconds"]) == {"total", "train", "evaluate", "server"}
    assert (summary["algorithm"], summary["seed"], summary["rounds"], summary["clients"]) == (
        "cfl",
        0,
        2,
        4,
    )
    # rounds × clients × parameters × float32
    assert summary["bytes_up"] == summary["bytes_down"] == 2 * 4 * 650 * 4


def test_the_written_config_repeats_the_run(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path
):
    fedclade("run", small, "--out", "first", "--seed", "3", "--set", "local.lr=0.05")
    config = tomllib.loads((tmp_path / "first/config.toml").read_text())
    assert (config["seed"], config["local"]["lr"], config["data"]["partition"]) == (3, 0.05, "iid")
    assert "torch" in config["versions"]
    assert fedclade("run", "first/config.toml", "--out", "second").code == 0
    first, second = (
        (tmp_path / f"{name}/tree/tree.safetensors").read_bytes() for name in ("first", "second")
    )
    assert first == second


@pytest.mark.parametrize("engine", ["stacked", "vmap", "loop"])
def test_the_engine_can_be_forced_and_is_written_down(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path, engine: str
):
    """The written config runs with the same engine; --engine overrides it."""
    outcome = fedclade("run", small, "--out", "first", "--engine", engine, "--memory", "10MB", "-q")
    assert outcome.code == 0, outcome.err
    fedclade("run", "first/config.toml", "--out", "second")
    fedclade("run", "first/config.toml", "--out", "third", "--engine", "auto")
    engines = [
        tomllib.loads((tmp_path / name / "config.toml").read_text())["engine"]
        for name in ("first", "second")
    ]
    assert engines == [engine, engine]
    assert json.loads((tmp_path / "first/summary.json").read_text())["engine"] == engine
    assert json.loads((tmp_path / "third/summary.json").read_text())["engine"] in (
        "stacked",
        "loop",
    )


def test_compare_takes_an_engine(fedclade: Callable[..., Outcome], small: str, tmp_path: Path):
    outcome = fedclade(
        "compare", "small.toml", "--engine", "loop", "--memory", "1GB", "--out", "both"
    )
    assert outcome.code == 0, outcome.err
    assert json.loads((tmp_path / "both/small/seed-0/summary.json").read_text())["engine"] == "loop"


def test_overrides_reach_every_section(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path
):
    outcome = fedclade(
        *(
            "run",
            small,
            "--out",
            "result",
            "--rounds",
            "1",
            "--set",
            "data.clients=5",
            "--set",
            "model.name=mlp",
        ),
        *(
            "--set",
            "model.hidden=7",
            "--set",
            "algorithm.split_rounds=[1]",
            "--set",
            "target.accuracy=0.25",
        ),
        *("--set", "privacy.permute=true", "--set", "client_fraction=0.5", "-q"),
    )
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip() == "run folder: result"
    config = tomllib.loads((tmp_path / "result/config.toml").read_text())
    assert config["rounds"] == 1
    assert config["data"]["clients"] == 5
    assert config["model"] == {"name": "mlp", "hidden": 7}
    assert config["algorithm"]["split_rounds"] == [1]
    assert config["target"]["accuracy"] == 0.25
    assert config["privacy"]["permute"] is True
    assert config["client_fraction"] == 0.5


def test_runs_without_out_never_overwrite(fedclade: Callable[..., Outcome], small: str):
    assert "run folder: runs/small-seed0" in fedclade("run", small).out
    assert "run folder: runs/small-seed0-2" in fedclade("run", small).out


HELD = """
rounds = 4
[data]
clients = 6
samples_per_client = 100
shift = "label_swap"
clusters = 2
[model]
name = "mclr"
[local]
epochs = 3
[newcomers]
clients = 3
samples_per_client = 50
[algorithm]
name = "fl_hc"
rounds_before = 2
metric = "l2"
n_clusters = 2
"""


@pytest.fixture(scope="module")
def held_run() -> Run:
    """Return a run of digits that finds both clusters and holds three clients back."""
    config = check_config(tomllib.loads(HELD))
    return config.run(config.federation())


@pytest.fixture
def with_newcomers(held_run: Run, fedclade: Callable[..., Outcome], tmp_path: Path) -> Path:
    (tmp_path / "held.toml").write_text(HELD)
    return held_run.save(tmp_path / "held")


def test_assign_prints_one_table_and_keeps_it(
    fedclade: Callable[..., Outcome], with_newcomers: Path
):
    before = {path: path.read_bytes() for path in with_newcomers.rglob("*") if path.is_file()}
    outcome = fedclade("assign", "held")
    assert outcome.code == 0, outcome.err
    for told in (
        "client-6",
        "client-8",
        "0 > 1",
        "0 > 2",
        "similarity",
        "assigned correctly 1.00",
        "4 rounds",
    ):
        assert told in outcome.out
    assert {path: path.read_bytes() for path in before} == before, "it touches nothing else"
    with (with_newcomers / "newcomers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == ["6", "7", "8"]
    told = json.loads((with_newcomers / "newcomers.json").read_text())
    assert told["summary"]["assignment_accuracy"] == 1.0
    assert [row["path"] for row in told["newcomers"]] == [
        [int(n) for n in row["path"].split()] for row in rows
    ]
    assert fedclade("assign", "held", "--out", "again.json").code == 0
    assert json.loads(Path("again.json").read_text()) == told, "the same again"
    assert Run.load(with_newcomers).summary["rounds"] == 4, "the folder is still read"
    assert {row["by"] for row in told["newcomers"]} == {"similarity"}


def test_assign_does_without_labels_where_it_is_told_to_or_the_config_says_so(
    fedclade: Callable[..., Outcome], with_newcomers: Path, held_run: Run
):
    outcome = fedclade("assign", "held", "--without-labels", "--out", "blind.json")
    assert outcome.code == 0, outcome.err
    blind = json.loads(Path("blind.json").read_text())
    assert {row["by"] for row in blind["newcomers"]} == {"distance"}
    section = {**held_run.config["newcomers"], "without_labels": True}
    replace(held_run, config={**held_run.config, "newcomers": section}).save(
        with_newcomers.parent / "blind"
    )
    outcome = fedclade("assign", "blind", "--out", "again.json")
    assert outcome.code == 0, outcome.err
    assert json.loads(Path("again.json").read_text()) == blind


def test_assign_takes_the_clients_of_another_config(
    fedclade: Callable[..., Outcome], with_newcomers: Path
):
    strangers = (
        '[data]\nclients = 2\nsamples_per_client = 50\nshift = "label_permutation"\nclusters = 2\n'
    )
    Path("strangers.toml").write_text(strangers)
    outcome = fedclade("assign", "held", "--config", "strangers.toml")
    assert outcome.code == 0, outcome.err
    assert (
        "2 newcomers of 2 fit no cluster, and got the model of the leaf that they reached"
        in outcome.out
    )
    assert "assigned correctly" not in outcome.out, "their clusters are not those of the run"
    leaves = [
        row["node"]
        for row in json.loads((with_newcomers / "newcomers.json").read_text())["newcomers"]
    ]
    assert 0 not in leaves
    outcome = fedclade(
        "assign", "held", "--config", "strangers.toml", "--only-fitting", "--out", "fitting.json"
    )
    assert (
        "2 newcomers of 2 fit no cluster, and got the model of the deepest node that fits"
        in outcome.out
    )
    fitting = json.loads(Path("fitting.json").read_text())
    assert fitting["summary"]["only_fitting"]
    assert {row["node"] for row in fitting["newcomers"]} == {0}
    Path("members.toml").write_text(Path("held.toml").read_text())
    outcome = fedclade("assign", "held", "--config", "members.toml")
    assert "assigned correctly 1.00" in outcome.out
    assert len(json.loads((with_newcomers / "newcomers.json").read_text())["newcomers"]) == 9


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere",), "there is no folder nowhere; name the folder of a run"),
        (
            ("plain",),
            "plain held back no clients as newcomers; specify newcomers with --config NEW.toml",
        ),
        (("held", "--out", "table.txt"), "--out should end in .csv or .json, got table.txt"),
        (("held", "--config", "missing.toml"), "there is no config missing.toml"),
        (
            ("held", "--config", "mlp.toml"),
            "mlp.toml: [model] should be the model of the run, {'name': 'mclr'}, or left out",
        ),
        (
            ("held", "--config", "other.toml"),
            "the run's models have 650 entries, but a mclr for the newcomers' data",
        ),
        (("held", "--config", "mnist.toml", "--data-dir", "nowhere"), "nowhere"),
        (("held", "--device", "tpu"), "device should be auto, cpu, cuda, or a numbered GPU"),
        (
            ("python",),
            "python was not made from a config, so its clients cannot be loaded again; pass the newcomers",
        ),
    ],
)
def test_assign_says_what_is_wrong(
    fedclade: Callable[..., Outcome], with_newcomers: Path, arguments: tuple[str, ...], told: str
):
    (Path("mlp.toml")).write_text('[model]\nname = "mlp"\n')
    (Path("other.toml")).write_text('[data]\nname = "synthetic"\nclients = 3\n')
    (Path("mnist.toml")).write_text('[data]\nname = "mnist"\nclients = 3\n')
    run = Run.load(with_newcomers)
    replace(run, config={**run.config, "newcomers": {}}).save("plain")
    replace(
        run, config={**run.config, "data": {"name": "digits", "description": "made by hand"}}
    ).save("python")
    before = files_in(Path())
    outcome = fedclade("assign", *arguments)
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert told in outcome.err
    assert files_in(Path()) == before


def test_report_and_tree_read_a_run_folder(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path
):
    fedclade("run", small, "--out", "result")
    (tmp_path / "result/figures/norms.png").unlink()
    report = fedclade("report", "result")
    assert report.code == 0, report.err
    accuracy = Run.load(tmp_path / "result").summary["accuracy"]["mean"]
    assert f"{100 * accuracy:.1f}" in report.out
    assert (tmp_path / "result/figures/norms.png").is_file()
    tree = fedclade("tree", "result")
    assert tree.code == 0, tree.err
    assert "4 clients" in tree.out


@pytest.mark.slow
def test_compare_puts_configs_and_seeds_in_one_table(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path
):
    for name in ("fedavg", "oracle"):
        (tmp_path / f"{name}.toml").write_text(
            SMALL.replace('name = "cfl"\neps2 = 0.4', f'name = "{name}"')
        )
    outcome = fedclade(
        "compare", "small.toml", "fedavg.toml", "oracle.toml", "--seeds", "2", "--out", "both"
    )
    assert outcome.code == 0, outcome.err
    assert all(label in outcome.out for label in ("small", "fedavg", "oracle", "±"))
    written = files_in(tmp_path / "both")
    assert {
        "comparison.md",
        "comparison.csv",
        "comparison.json",
        "oracle/seed-1/summary.json",
    } <= written


@pytest.mark.slow
def test_compare_runs_the_algorithms_of_scenarios_at_a_scale(
    fedclade: Callable[..., Outcome], tmp_path: Path
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "swap.toml").write_text(SWAP)
    no_oracle = SWAP.replace('shift = "label_swap"', "").replace("clusters = 2\n[model]", "[model]")
    (tmp_path / "mine" / "iid.toml").write_text(
        no_oracle.replace("oracle = {}\n", "").replace("data.clients = 4", "")
    )
    outcome = fedclade("compare", "mine", "--scale", "smoke", "--out", "suite")
    assert outcome.code == 0, outcome.err
    assert "swap: comparison of 3 configurations, 2 seeds each" in outcome.out
    rows = list(csv.DictReader((tmp_path / "suite/comparison.csv").open()))
    assert [(row["scenario"], row["label"], row["seeds"]) for row in rows] == [
        *(("iid", label, "2") for label in ("fedavg", "ifca")),
        *(("swap", label, "2") for label in ("fedavg", "oracle", "ifca")),
    ]
    assert [row["gap_closed"] for row in rows[:4]] == ["", "", "0.0", "1.0"]
    assert all(float(row["bytes_to_target"]) > 0 for row in rows)
    runs = {name: Run.load(tmp_path / f"suite/{name}/ifca/seed-1") for name in ("swap", "iid")}
    assert {
        name: (run.summary["rounds"], run.summary["clients"]) for name, run in runs.items()
    } == {"swap": (2, 4), "iid": (2, 8)}
    assert {"comparison.md", "comparison.json", "comparison.png"} <= files_in(tmp_path / "suite")


def test_resume_tells_that_a_run_is_finished_and_gives_it_more_rounds(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path
):
    fedclade("run", small, "--out", "result", "--set", "checkpoint_every=1")
    outcome = fedclade("resume", "result")
    assert (outcome.code, outcome.out) == (
        0,
        "result is finished after 2 rounds; there is nothing to continue\n",
    )
    assert fedclade("resume", "result", "--rounds", "2").out == outcome.out
    assert "run folder: result" in fedclade("resume", "result", "--rounds", "4").out
    fedclade("run", small, "--out", "long", "--rounds", "4")
    long, result = (
        (tmp_path / name / "tree/tree.safetensors").read_bytes() for name in ("long", "result")
    )
    assert result == long


STOPS = (
    SMALL.replace("rounds = 2", "rounds = 9\nkeep_best = true\ncheckpoint_every = 1")
    + """
[stop]
patience = 1
min_delta = 1.0
"""
)


def test_a_run_that_stops_early_can_be_used_by_every_command(
    fedclade: Callable[..., Outcome], tmp_path: Path
):
    (tmp_path / "stops.toml").write_text(STOPS)
    outcome = fedclade("run", "stops.toml", "--out", "bare")
    assert outcome.code == 2
    assert "stop.patience = 1 needs validation data of every client" in outcome.err
    outcome = fedclade(
        "run", "stops.toml", "--out", "result", "--set", "data.validation_fraction=0.2"
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert (
        "after round 2 of 9: validation_accuracy has not improved in 1 evaluations, since round 1"
        in outcome.out
    )
    assert "its models are stored; the last round, 2, had accuracy" in outcome.out
    summary = json.loads((tmp_path / "result/summary.json").read_text())
    assert (summary["rounds"], summary["stopped"]["round"], summary["last"]["round"]) == (2, 2, 2)
    assert summary["chosen"]["kept"] is True
    for command in (
        ("resume", "result"),
        ("tree", "result"),
        ("report", "result"),
        ("export", "result", "--client", "3", "--out", "m.safetensors"),
        (
            "compare",
            "stops.toml",
            "--seeds",
            "1",
            "--out",
            "both",
            "--set",
            "data.validation_fraction=0.2",
        ),
    ):
        outcome = fedclade(*command)
        assert (outcome.code, outcome.err) == (0, ""), command
    assert json.loads((tmp_path / "both/comparison.json").read_text())


def test_an_interrupted_run_is_finished_where_it_stands(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rounds = iter(range(1, 10))
    with monkeypatch.context() as patched:
        patched.setattr("fedclade.runs.callbacks._Stop.on_round", lambda *_: next(rounds) == 2)
        assert fedclade("run", small, "--out", "result", "--set", "rounds=9").code == 130
    assert (
        "--finish trains no further rounds, but --rounds 12 requests a number of rounds"
        in fedclade("resume", "result", "--finish", "--rounds", "12").err
    )
    outcome = fedclade("resume", "result", "--finish")
    assert (outcome.code, outcome.err) == (0, "")
    assert "after round 2 of 9: finished by hand after an interruption" in outcome.out
    assert Run.load(tmp_path / "result").summary["rounds"] == 2
    assert fedclade("export", "result", "--node", "0", "--out", "m.safetensors").code == 0
    assert (
        fedclade("resume", "result").out
        == "result is finished after 2 rounds; there is nothing to continue\n"
    )
    assert "run folder: result" in fedclade("resume", "result", "--rounds", "10").out
    assert Run.load(tmp_path / "result").summary["rounds"] == 10


def test_resume_refuses_what_it_cannot_continue(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path
):
    outcome = fedclade("resume", "nowhere")
    assert (outcome.code, outcome.err) == (
        2,
        "error: there is no folder nowhere; name the folder of a run\n",
    )
    fedclade("run", small, "--out", "result")
    (tmp_path / "result/summary.json").unlink()
    config = tmp_path / "result/config.toml"
    *lines, _ = (
        config.read_text().replace('name = "mclr"', 'name = "Sequential"').splitlines(keepends=True)
    )
    config.write_text("".join(lines))  # without the sum of what it was
    outcome = fedclade("resume", "result")
    assert outcome.code == 2
    assert "unknown model 'Sequential'" in outcome.err
    assert (
        "if fedclade.simulate started the run, repeat the same call to continue it" in outcome.err
    )


def test_resume_of_a_python_run_names_the_call_that_continues_it(
    fedclade: Callable[..., Outcome], tmp_path: Path
):
    digits = load_federation("digits", clients=3, samples_per_client=30)
    simulate("fedavg", "mclr", digits, rounds=1, folder=tmp_path / "result")
    outcome = fedclade("resume", "result", "--rounds", "2")
    assert outcome.code == 2
    assert outcome.err.startswith("error: result is the run of a Python program")
    assert "run the program again, with folder='result' and rounds=2 in this call" in outcome.err
    run = simulate("fedavg", "mclr", digits, rounds=2, folder=tmp_path / "result")
    assert run.summary["rounds"] == 2


def test_compare_reads_what_is_finished_and_continues_the_rest(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path
):
    (tmp_path / "fedavg.toml").write_text(
        SMALL.replace('name = "cfl"\neps2 = 0.4', 'name = "fedavg"')
    )
    asked = ("compare", "small.toml", "fedavg.toml", "--out", "both", "--set", "checkpoint_every=1")
    assert fedclade(*asked).code == 0
    table = (tmp_path / "both/comparison.csv").read_text()
    finished = tmp_path / "both/small/seed-0/metrics.parquet"
    before = finished.stat().st_mtime_ns
    (tmp_path / "both/fedavg/seed-0/summary.json").unlink()
    assert "both exists already" in fedclade(*asked).err
    assert fedclade(*asked, "--resume").code == 0
    assert finished.stat().st_mtime_ns == before
    columns = [line.split(",")[:6] for line in table.splitlines()]
    assert [
        line.split(",")[:6] for line in (tmp_path / "both/comparison.csv").read_text().splitlines()
    ] == columns
    assert (
        "--resume needs the folder of the sweep or comparison to continue; set it with --out"
        in fedclade(*asked[:3], "--resume").err
    )
    assert "its seed" not in fedclade(*asked, "--resume").err
    assert "contains a run with another config: its local.lr is 0.1, not 0.2" in (
        fedclade(*asked, "--resume", "--set", "local.lr=0.2").err
    )


def test_an_interrupted_compare_says_how_to_continue(
    fedclade: Callable[..., Outcome], small: str, monkeypatch: pytest.MonkeyPatch
):
    """The signal arrives while the data of the first run is loaded."""
    load = Config.federation
    monkeypatch.setattr(
        Config, "federation", lambda *a: (signal.raise_signal(signal.SIGINT), load(*a))[1]
    )
    outcome = fedclade("compare", small, "--seeds", "2", "--out", "both")
    assert outcome.code == 130
    told = "interrupted after round 1 of small seed 0; continue with the same command and --out both --resume\n"
    assert outcome.out == told
    monkeypatch.undo()


def test_compare_keeps_what_finished_when_a_run_fails(
    fedclade: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def diverges(*arguments: object) -> None:
        raise UpdateError("none of 8 clients has an update that is finite")

    more = "clusters = 2 }\nfedgroup = { groups = 2, pretrain_scale = 1 }"
    (tmp_path / "swap.toml").write_text(SWAP.replace("clusters = 2 }", more))
    with monkeypatch.context() as patched:
        patched.setattr(FedGroup, "step", diverges)
        outcome = fedclade("compare", "swap.toml", "--out", "suite")
    assert outcome.code == 2
    assert outcome.err.startswith(
        "error: swap: fedgroup: none of 8 clients has an update that is finite"
    )
    rows = csv.DictReader((tmp_path / "suite/comparison.csv").open())
    assert [row["label"] for row in rows] == ["fedavg", "oracle", "ifca"]
    nothing = fedclade("compare", "swap.toml", "--set", "data.clients=2000", "--out", "nothing")
    assert "swap: fedavg, swap: oracle, swap: ifca, swap: fedgroup: 2000 clients" in nothing.err
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_fedgroup_runs_reports_and_compares(fedclade: Callable[..., Outcome], tmp_path: Path):
    """With clients in no group yet, who are served with the global model; there are no splits to list."""
    fedgroup = 'name = "fedgroup"\ngroups = 2\npretrain_scale = 1\ncold_start = "sampled"'
    for name, algorithm in (
        ("fedgroup", fedgroup),
        ("fedgrouprox", f"{fedgroup}\nmu = 0.1"),
        ("fedavg", 'name = "fedavg"'),
    ):
        text = SMALL.replace('name = "cfl"\neps2 = 0.4', algorithm).replace(
            "clients = 4", "clients = 8"
        )
        (tmp_path / f"{name}.toml").write_text(text)
    outcome = fedclade("run", "fedgroup.toml", "--out", "result", "--set", "client_fraction=0.25")
    assert outcome.code == 0, outcome.err
    assert "Splits" not in outcome.out
    run = Run.load(tmp_path / "result")
    assert {row["served_by"] for row in run.client_rows} == {0, 1, 2}
    assert {event["kind"] for event in run.events} == {"group_founded", "joined"}
    assert "mu" not in tomllib.loads((tmp_path / "result/config.toml").read_text())["algorithm"]
    assert fedclade("run", "result/config.toml", "--out", "again", "-q").code == 0
    assert Run.load(tmp_path / "again").events == run.events
    assert fedclade("report", "result").code == 0
    assert fedclade("tree", "result").code == 0
    outcome = fedclade(
        "compare", "fedgroup.toml", "fedgrouprox.toml", "fedavg.toml", "--out", "both"
    )
    assert outcome.code == 0, outcome.err
    assert all(label in outcome.out for label in ("fedgroup", "fedgrouprox", "fedavg"))


PAINTED = ("fedavg", "fl_hc", "ifca", "fedem")
"""One for each kind of figures: of one model, with a dendrogram, of several models from the start, and of mixtures."""


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"cfl", "fedbn"}))
def test_every_algorithm_runs_by_its_name_and_can_be_looked_at(
    fedclade: Callable[..., Outcome], small: str, algorithm: str, unpainted: pytest.MonkeyPatch
):
    """The figures that a run ends with are those that its report draws anew, and may paint."""
    config = SMALL.replace('name = "cfl"\neps2 = 0.4', f'name = "{algorithm}"')
    if algorithm == "auto":
        config = config.replace("[data]", "[data]\nvalidation_fraction = 0.2")
    Path(small).write_text(config.replace('name = "mclr"', 'name = "mlp"\nhidden = 8'))
    for command in (
        ("run", small, "--out", "result"),
        ("report", "result"),
        ("tree", "result"),
        ("cite", algorithm),
    ):
        if command[0] == "report" and algorithm in PAINTED:
            unpainted.undo()
        if command[0] != "cite" or algorithm not in ("local", "oracle"):
            outcome = fedclade(*command)
            assert outcome.code == 0, outcome.err


def test_demo_configs_are_the_four_of_the_readme(fedclade: Callable[..., Outcome]):
    listed = fedclade("ls", "configs").out
    assert all(
        f"{name}-digits-label-swap" in listed for name in ("fedavg", "cfl", "oracle", "local")
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("algorithms", "cfl"),
        ("algorithms", "ifca"),
        ("datasets", "tiny_shakespeare"),
        ("partitions", "dirichlet"),
        ("shifts", "label_permutation"),
        ("models", "cifar_cnn"),
        ("tasks", "regression"),
        ("configs", "cfl-mnist-label-swap"),
    ],
)
def test_ls_lists_names_with_a_line_each(fedclade: Callable[..., Outcome], kind: str, name: str):
    lines = fedclade("ls", kind).out.splitlines()
    (line,) = [line for line in lines if line.split()[0] == name]
    assert len(line.split()) > 3


def test_cite_prints_bibtex(fedclade: Callable[..., Outcome]):
    assert "arXiv:1910.01991" in fedclade("cite", "cfl").out
    assert "arXiv:2010.06870" in fedclade("cite", "fedgroup").out
    outcome = fedclade("cite", "clf")
    assert outcome.code == 2
    assert (
        "unknown algorithm, data set or other component 'clf'; did you mean 'cfl'?" in outcome.err
    )


def test_every_shipped_config_is_valid(fedclade: Callable[..., Outcome]):
    names = [line.split()[0] for line in fedclade("ls", "configs").out.splitlines()]
    assert len(names) >= 12
    for name in names:
        outcome = fedclade("validate", name)
        assert outcome.code == 0, outcome.err
        assert outcome.out.strip().endswith("is valid")


def test_the_shipped_suite_has_every_algorithm_at_both_scales():
    files = find_configs("suite")
    assert len(files) == 8
    for file in files:
        for scale in ("smoke", "laptop"):
            scenario = read_scenario(file, scale=scale)
            data = next(iter(scenario.configs.values())).data
            known_truth = data["shift"] != "none" or data["partition"] == "label_groups"
            # which models must fit
            parted = {name for name, entry in ALGORITHMS.items() if entry.requires.personal}
            # whose rounds are buffers; for hundreds of private clients; which needs validation data
            apart = {"fedbuff", "private_choice", "auto"}
            expected = ALGORITHMS.keys() - parted - apart
            if not known_truth:
                expected = expected - {"oracle"}
            assert scenario.configs.keys() == expected | {"pacfl_per_label"}


def test_validate_says_all_errors_at_once(fedclade: Callable[..., Outcome], tmp_path: Path):
    (tmp_path / "bad.toml").write_text(
        'rounds = 0\nclient_fraction = 0\nseeed = 1\n[data]\nname = "mnits"\n[local]\nlr = -1\nbatch_size = "ten"\n'
        '[algorithm]\nname = "cfl"\neps1 = "atuo"\ngama_max = 0.1\n[modle]\n[target]\naccuracy = 1.5\n'
    )
    outcome = fedclade("validate", "bad.toml")
    assert outcome.code == 2
    for told in (
        "unknown key of the config: 'seeed'; did you mean 'seed'?",
        "unknown dataset in [data]: 'mnits'; did you mean 'mnist'?",
        "batch_size of [local] should be a whole number, got 'ten'",
        "unknown key of [algorithm]: 'gama_max'; did you mean 'gamma_max'?",
        "eps1 of [algorithm] should be a number or 'auto', got 'atuo'",
        "unknown section 'modle'; did you mean 'model'?",
    ):
        assert told in outcome.err
    (tmp_path / "ranges.toml").write_text(
        "rounds = -1\nclient_fraction = 0\n[data]\nclients = 0\nvalidation_fraction = 1.0\n"
        "[local]\nlr = -1\nmomentum = 1.0\n"
        '[algorithm]\nname = "cfl"\ngamma_max = 1.0\n[target]\naccuracy = 1.5\n'
    )
    outcome = fedclade("validate", "ranges.toml")
    for told in (
        "rounds should be at least 0, got -1",
        "client_fraction should be greater than 0 and at most 1, got 0.0",
        "clients should be at least 1, got 0",
        "validation_fraction should be in [0, 1), got 1.0",
        "local.lr should be greater than 0, got -1.0",
        "local.momentum should be in [0, 1), got 1.0",
        "algorithm.gamma_max should be in [0, 1), got 1.0",
        "target.accuracy should be greater than 0 and at most 1, got 1.5",
    ):
        assert told in outcome.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "missing.toml"), "there is no config missing.toml"),
        (("run", "cfl-mnits-label-swap"), "did you mean 'cfl-mnist-label-swap'?"),
        (
            ("run", "small.toml", "--set", "data.clients"),
            "--set should have the form section.key=value, got 'data.clients'",
        ),
        (("run", "small.toml", "--set", "data.clients=0"), "clients should be at least 1, got 0"),
        (
            ("run", "small.toml", "--set", "client_fraction=0"),
            "client_fraction should be greater than 0 and at most 1, got 0",
        ),
        (("run", "small.toml", "--set", "data.clients=2000"), "2000 clients"),
        (("run", "small.toml", "--set", "data.name=mnist", "--data-dir", "nowhere"), "nowhere"),
        (
            ("run", "small.toml", "--set", "local.lr=1e30"),
            "no client replied to any of 3 queries: client 0: norm",
        ),
        (
            ("run", "small.toml", "--set", "local.lr=1e38"),
            "entries of the update are NaN or infinite (and",
        ),
        (
            ("run", "small.toml", "--set", "algorithm.name=ifca"),
            "unknown key of [algorithm]: 'eps2'",
        ),
        (
            ("run", "small.toml", "--device", "tpu"),
            "device should be auto, cpu, cuda, or a numbered GPU",
        ),
        (
            ("run", "small.toml", "--engine", "staked"),
            "unknown engine 'staked'; did you mean 'stacked'?",
        ),
        (
            ("run", "small.toml", "--set", "engine=lop"),
            "unknown engine 'lop'; did you mean 'loop'?",
        ),
        (
            ("run", "small.toml", "--memory", "2 elephants"),
            "memory should be a size such as 2GB, 500MiB or a number",
        ),
        (
            ("run", "small.toml", "--set", "model.name=cnn"),
            "at least 16 pixels a side, got input shape (1, 8, 8)",
        ),
        (
            ("run", "small.toml", "--set", "model.name=torch.nn:Identity"),
            "Identity has no trainable parameters",
        ),
        (
            ("run", "small.toml", "--set", "model.name=nosuch:thing"),
            "model 'nosuch:thing' cannot be imported",
        ),
        (
            ("run", "small.toml", "--set", "algorithm.fallback=true"),
            "set data.validation_fraction above 0",
        ),
        (("report", "nowhere"), "there is no folder nowhere; name the folder of a run"),
        (("tree", "nowhere"), "there is no folder nowhere; name the folder of a run"),
        (
            ("compare", "small.toml", "small.toml"),
            "configs to compare should have different names, got several named small; rename the files",
        ),
        (
            ("compare", "small.toml", "--scale", "smoke"),
            "the config small is not a scenario, so it does not support --scale; leave out --scale",
        ),
        (
            ("compare", "small.toml", "swap.toml"),
            "the config small is not a scenario, so it cannot be compared with scenarios",
        ),
        (
            ("compare", "swap.toml", "--scale", "smok"),
            "unknown scale 'smok'; did you mean 'smoke'? (known: smoke)",
        ),
        (
            ("compare", "swap.toml", "--set", "algorithm.eps2=1"),
            "a scenario should have no section [algorithm]",
        ),
        (("compare", "empty"), "the folder empty contains no config"),
        (
            ("run", "swap.toml"),
            "swap.toml is a scenario: it has several [algorithms]; run it with 'fedclade compare'",
        ),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_nothing(
    fedclade: Callable[..., Outcome],
    small: str,
    tmp_path: Path,
    arguments: tuple[str, ...],
    told: str,
):
    (tmp_path / "swap.toml").write_text(SWAP)
    (tmp_path / "empty").mkdir()
    out = () if arguments[0] in ("report", "tree") else ("--out", "result")
    before = files_in(tmp_path)
    outcome = fedclade(*arguments, *out)
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert told in outcome.err
    assert "Traceback" not in outcome.err
    assert files_in(tmp_path) == before
    assert not (tmp_path / "result").exists()


def test_a_model_of_the_users_own_is_found_where_the_user_stands(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\ndef linear(outputs, width=64):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(width, outputs))\n"
        "def wrong():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n"
    )
    assert fedclade("run", small, "--out", "mine", "--set", "model.name=my_models:linear").code == 0
    config = tomllib.loads((tmp_path / "mine/config.toml").read_text())
    assert config["model"] == {"name": "my_models:linear", "width": 64}
    outcome = fedclade("run", small, "--out", "result", "--set", "model.name=my_models:wrong")
    assert outcome.code == 2
    assert (
        "the model should return outputs of shape (2, 10) for 10 labels of digits, got (2, 3)"
        in outcome.err
    )
    typo = ("--set", "model.name=my_models:linear", "--set", "model.witdh=3")
    outcome = fedclade("run", small, "--out", "result", *typo)
    assert "unknown key of [model]: 'witdh'; did you mean 'width'?" in outcome.err
    assert not (tmp_path / "result").exists()


def test_the_same_command_takes_over_what_it_left_when_it_was_killed_before_it_wrote_its_config(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path
):
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / ".config.toml.writing").write_text("rounds = ")
    (tmp_path / "result" / ".lock").touch()
    outcome = fedclade("run", small, "--out", "result", "-q")
    assert (outcome.code, outcome.err) == (0, "")
    assert Run.load(tmp_path / "result").summary["rounds"] == 2
    assert ".config.toml.writing" not in files_in(tmp_path / "result")


def test_an_existing_out_is_refused_before_anything_runs(
    fedclade: Callable[..., Outcome], small: str, tmp_path: Path
):
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "precious.txt").write_text("mine")
    outcome = fedclade("run", small, "--out", "result")
    assert outcome.code == 2
    assert (
        "result exists already; name another folder (on the command line with --out)" in outcome.err
    )
    assert (tmp_path / "result" / "precious.txt").read_text() == "mine"


def test_help_teaches(fedclade: Callable[..., Outcome]):
    assert "fedclade demo" in fedclade("--help").out
    run_help = fedclade("run", "--help").out
    assert all(
        option in run_help
        for option in (
            "--out",
            "--data-dir",
            "--seed",
            "--rounds",
            "--set",
            "--device",
            "--engine",
            "--memory",
        )
    )
    assert "Example:" in run_help


STEP = """
import torch
from fedclade.training.optimizer import LocalOptimizer
LocalOptimizer.of(fedclade.LocalTraining(), 0.1).for_one_client([torch.nn.Parameter(torch.ones(2))]).step()
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
"""A step of plain SGD does not need torch's compiler either."""


def test_import_needs_nothing_but_the_core():
    """What a command line or a report needs is imported where it is used, and SciPy's parts by their first use.

    Every process pays for an import: each command, and each answer of a Flower client.
    """
    packages = (
        *("typer", "rich", "matplotlib", "datasets", "flwr_datasets", "pyarrow", "PIL", "tomli_w"),
        *(
            "scipy.cluster",
            "scipy.linalg",
            "scipy.ndimage",
            "scipy.sparse",
            "scipy.spatial",
            "scipy.special",
        ),
    )
    code = (
        "import sys, fedclade; fedclade.simulate; fedclade.load_federation; "
        f"print([name for name in {packages} if name in sys.modules])"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code + STEP], capture_output=True, text=True, check=True
    )
    assert outcome.stdout.split() == ["[]", "[]"]
