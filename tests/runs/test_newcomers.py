"""Newcomers to a finished run, by the Python API."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from functools import cache

import pyarrow as pa
import pytest
import torch
from torch import nn

import fedclade
from fedclade import (
    CFL,
    Clients,
    ClientWork,
    ConfigError,
    LocalTraining,
    Run,
    RunError,
    Signature,
    assign,
    simulate,
)
from fedclade.algorithms import ALGORITHMS, Local
from fedclade.data import Federation
from fedclade.runs.store.newcomers import score_columns

SPEC = LocalTraining(epochs=2, lr=0.2)
OPTIONS = {
    "feddrift": {"step_rounds": 2, "delta": 0.2},
    "cfl": {"eps1": 0.3, "eps2": 0.4},
    "ifca": {"clusters": 2},
    "fedgroup": {"groups": 2},
    "flexcfl": {"groups": 2},
    "flux": {"clusters": 2, "latest": 4},
    "ocfl": {"method": "hdbscan"},
    "stocfl": {"tau": 0.6, "anchor_epochs": 5},
}
CLUSTERED = (
    *(
        "cfl",
        "rcfl",
        "auto",
        "fl_hc",
        "fedgroup",
        "flexcfl",
        "ifca",
        "fedsoft",
        "clove",
        "ocfl",
        "fesem",
        "fedem",
        "fedrc",
        "feddrift",
    ),
    *("pacfl", "stocfl", "flux", "oracle", "private_choice"),
)

LABEL_FREE = ("flux",)
"""Newcomers are assigned without labels; and what labels are called, as in these tests, no image shows."""


@cache
def digits(**settings) -> Federation:
    arguments = {
        "clients": 8,
        "samples_per_client": 80,
        "shift": "label_swap",
        "clusters": 2,
        "newcomers": 4,
    }
    return fedclade.load_federation("digits", **{**arguments, **settings})


@cache
def run_of(name: str) -> Run:
    # auto chooses models by validation data
    federation = digits(validation_fraction=0.2) if name == "auto" else digits()
    options = {"fl_hc": {"rounds_before": 3, "n_clusters": 2, "metric": "l2"}, **OPTIONS}.get(
        name, {}
    )
    algorithm = fedclade.algorithms.build_algorithm(name, options, federation.true_clusters)
    return fedclade.simulate(
        algorithm, model_of(name) or "mclr", federation, local=SPEC, rounds=8, evaluate_every=8
    )


def model_of(name: str):
    """Return a model with a head, a body and normalisation for methods that keep one of them; None for others."""
    return parted if ALGORITHMS[name].requires.personal else None


def parted(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 10)
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_newcomers_to_a_run_of_every_algorithm_get_a_model(name):
    found = fedclade.assign(run_of(name), digits().newcomers, model=model_of(name))
    assert [row["client"] for row in found.rows] == [8, 9, 10, 11]
    assert found.rounds_alone == 8
    for row in found.rows:
        assert row["path"][0] == 0
        assert row["path"][-1] == row["node"]
        assert all(0 <= row[column] <= 1 for column in score_columns("accuracy"))
    # no image shows what labels are called
    if name in CLUSTERED and run_of(name).summary["clusters"]["ari"] == 1 and name != "flux":
        assert found.summary["assignment_accuracy"] == 1.0
        assert all(row["fits"] for row in found.rows)
        assert found.summary["accuracy"] > found.summary["accuracy_root"]
    elif name not in CLUSTERED:
        assert {row["node"] for row in found.rows} == {0}


def test_newcomers_fit_their_personal_part_to_the_model_that_they_get():
    summary = fedclade.assign(run_of("fedper"), digits().newcomers, model=parted).summary
    assert summary["accuracy"] == summary["accuracy_root"] > 0.6
    initial = fedclade.simulate(
        "fedper", parted, digits().newcomers, local=LocalTraining(lr=1e-9), rounds=1
    )
    assert summary["accuracy"] > 0.2 + initial.summary["accuracy"]["mean"]


@pytest.mark.parametrize("name", ["fedper", "finetune"])
def test_what_newcomers_train_for_their_scores_stays_with_them(name, monkeypatch):
    run = run_of(name)
    works: list[ClientWork | None] = []
    train = Clients.train

    def noting(self, ids, models, rows, this_round, work=None, **more):
        works.append(work)
        return train(self, ids, models, rows, this_round, work, **more)

    monkeypatch.setattr(Clients, "train", noting)
    fedclade.assign(run, digits().newcomers, model=model_of(name))
    assert len(works) > 8
    assert not any(work is None or work.sends_update for work in works)


def test_the_clustered_methods_of_these_tests_find_the_clusters():
    found = {name for name in CLUSTERED if run_of(name).summary["clusters"]["ari"] == 1}
    # pacfl compares inputs by default, and so cannot find clusters that differ in labels
    assert {"cfl", "rcfl", "fl_hc", "fedgroup", "oracle"} <= found


def test_accuracies_are_those_of_the_models_that_the_columns_name():
    run, newcomers = run_of("cfl"), digits().newcomers
    found = fedclade.assign(run, newcomers)
    alone = fedclade.simulate(Local(), "mclr", newcomers, local=SPEC, rounds=8, evaluate_every=8)
    assert [row["accuracy_own"] for row in found.rows] == [
        row["accuracy"] for row in alone.client_rows
    ]
    module = fedclade.models.build_model("mclr", input_shape=(64,), outputs=10)
    for row in found.rows:
        x, y = newcomers.examples(row["client"], "test")
        for column, node in (("accuracy", row["node"]), ("accuracy_root", 0)):
            torch.nn.utils.vector_to_parameters(run.tree.nodes[node].params, module.parameters())
            assert row[column] == pytest.approx(
                float((module(x).argmax(1) == y).double().mean()), abs=1e-6
            )


def test_a_stranger_is_told_to_fit_nowhere_and_gets_a_leaf_or_on_request_the_root():
    newcomers = digits().newcomers
    shifted = (torch.arange(10) + 1) % 10
    strangers = dataclasses.replace(
        newcomers,
        clients=tuple(
            dataclasses.replace(client, label_map=shifted) for client in newcomers.clients
        ),
    )
    for name in ("cfl", "fedgroup", "oracle"):
        found, fitting = (
            fedclade.assign(run_of(name), strangers, only_fitting=only) for only in (False, True)
        )
        assert [row["fits"] for row in (*found.rows, *fitting.rows)] == [False] * 8
        assert found.summary["fit_nowhere"] == fitting.summary["fit_nowhere"] == 4
        leaves = {leaf.id for leaf in run_of(name).tree.leaves}
        assert {row["node"] for row in found.rows} <= leaves
        assert [row["leaf"] for row in found.rows] == [row["leaf"] for row in fitting.rows]
        assert not leaves & {row["node"] for row in fitting.rows}
        assert not any(row["right"] for row in fitting.rows)
    assert {row["node"] for row in fitting.rows} == {0}


def test_newcomers_to_a_mixture_find_weights_of_their_own():
    run, newcomers = run_of("fedem"), digits().newcomers
    found = fedclade.assign(run, newcomers)
    module = fedclade.models.build_model("mclr", input_shape=(64,), outputs=10)
    assert found.rows
    for row in found.rows:
        (x, y), (seen, labels) = (
            newcomers.examples(row["client"], split) for split in ("test", "train")
        )
        logs, losses = [], []
        for leaf in run.tree.leaves:
            torch.nn.utils.vector_to_parameters(leaf.params, module.parameters())
            logs.append(module(x).log_softmax(1))
            losses.append(nn.functional.cross_entropy(module(seen), labels, reduction="none"))
        pi = (-torch.stack(losses)).softmax(0).mean(1)
        right = torch.logsumexp(torch.stack(logs) + pi.log()[:, None, None], 0).argmax(1) == y
        assert row["accuracy"] == pytest.approx(float(right.double().mean()), abs=1e-6)


def test_without_truth_there_is_no_assignment_accuracy():
    found = fedclade.assign(
        run_of("cfl"), dataclasses.replace(digits().newcomers, true_clusters=None)
    )
    assert found.summary["assignment_accuracy"] is None
    assert {row["right"] for row in found.rows} == {None}


def test_a_saved_run_that_permutes_and_projects_sends_newcomers_where_the_plain_one_does(tmp_path):
    settings = {"local": SPEC, "rounds": 8, "evaluate_every": 8}
    folder = fedclade.simulate(
        CFL(**OPTIONS["cfl"]),
        "mclr",
        digits(),
        permute=True,
        signature=Signature(kind="projected", dim=256),
        **settings,
    ).save(tmp_path / "run")
    found, plain = (
        fedclade.assign(run, digits().newcomers) for run in (Run.load(folder), run_of("cfl"))
    )
    assert [row["path"] for row in found.rows] == [row["path"] for row in plain.rows]
    assert [row["accuracy"] for row in found.rows] == pytest.approx(
        [row["accuracy"] for row in plain.rows], abs=0.01
    )


def test_models_without_a_name_are_given():
    def made(seed: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    run = fedclade.simulate("fedavg", made, digits(), rounds=1)
    with pytest.raises(
        ConfigError, match=r"fedclade\.assign needs the argument model=\.\.\., .*: unknown model "
    ):
        fedclade.assign(run, digits().newcomers)
    assert fedclade.assign(run, digits().newcomers, model=made).summary["newcomers"] == 4


@dataclasses.dataclass(frozen=True)
class Renamed(Local):
    """A method of a script."""


def test_so_is_an_algorithm_and_local_training():
    run = run_of("fedavg")
    for what, section, told in (
        ("algorithm", {"name": "Renamed"}, "unknown algorithm 'Renamed'"),
        (
            "local",
            {**run.config["local"], "optimizer": "script:Mine"},
            "optimizer 'script:Mine' cannot be imported",
        ),
    ):
        noted = dataclasses.replace(run, config={**run.config, what: section})
        with pytest.raises(
            ConfigError, match=rf"fedclade\.assign needs the argument {what}=\.\.\., .*: {told}"
        ):
            fedclade.assign(noted, digits().newcomers)
        given = {"algorithm": Renamed()} if what == "algorithm" else {"local": SPEC}
        assert fedclade.assign(noted, digits().newcomers, **given).summary["fit_nowhere"] == 0


def test_newcomers_with_other_inputs_are_refused():
    other = fedclade.load_federation("synthetic", clients=3)
    told = r"the run's models have 650 entries, but a mclr for the newcomers' data \(synthetic, 3 clients.*\) has \d+; "
    with pytest.raises(
        RunError,
        match=told
        + "newcomers need data with the same inputs and labels as the run's data: digits",
    ):
        fedclade.assign(run_of("cfl"), other)


def test_newcomers_whose_table_is_encoded_otherwise_are_refused():
    """With as many categories as the run's clients the models would fit, and mean something else."""

    def hospital(cities: tuple[str, str], **settings) -> Federation:
        back = {"city": [*cities] * 20, "back": ["yes", "no"] * 20, "id": ["a"] * 20 + ["b"] * 20}
        return fedclade.federation_from_frame(pa.table(back), "id", "back", **settings)

    run = simulate("fedavg", "mclr", hospital(("oslo", "bern")), rounds=1)
    with pytest.raises(
        RunError, match="encoded differently: column 'city=rome' is only in the newcomers' data"
    ):
        assign(run, hospital(("oslo", "rome")))
    schema = fedclade.DataSchema.read(
        {"inputs": {"city": ["bern", "oslo"]}, "labels": ["no", "yes"]}
    )
    assert len(assign(run, hospital(("oslo", "oslo"), schema=schema)).rows) == 2


def test_tables_are_written_as_csv_and_json_and_replace_older_ones(tmp_path):
    found = fedclade.assign(run_of("cfl"), digits().newcomers)
    for suffix in ("csv", "json"):
        path = tmp_path / f"them.{suffix}"
        path.write_text("older")
        assert found.save(path) == path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["them.csv", "them.json"]
    told = json.loads((tmp_path / "them.json").read_text())
    assert told["summary"] == found.summary
    assert told["newcomers"] == list(found.rows)
    with (tmp_path / "them.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["path"].split() for row in rows] == [
        [str(node) for node in row["path"]] for row in found.rows
    ]
    assert [float(row["accuracy"]) for row in rows] == [row["accuracy"] for row in found.rows]


def test_tables_that_cannot_be_written(tmp_path):
    found = fedclade.assign(run_of("fedavg"), digits().newcomers)
    with pytest.raises(
        RunError, match=re.escape("a file of newcomers should end in .csv or .json, got 'them.txt'")
    ):
        found.save(tmp_path / "them.txt")
    with pytest.raises(RunError, match=r"cannot write .*nowhere/them\.csv: "):
        found.save(tmp_path / "nowhere" / "them.csv")


@cache
def turned(**settings) -> Federation:
    return digits(**{"shift": "rotation", **settings})


@pytest.mark.parametrize("name", ["oracle", "fl_hc", "flux"])
def test_without_labels_newcomers_go_where_images_are_like_theirs(name):
    options = {
        "fl_hc": {"rounds_before": 3, "n_clusters": 2, "metric": "l2"},
        "flux": {"clusters": 2},
    }.get(name, {})
    algorithm = fedclade.algorithms.build_algorithm(name, options, turned().true_clusters)
    run = fedclade.simulate(algorithm, "mlp", turned(), local=SPEC, rounds=10, evaluate_every=10)
    assert run.summary["clusters"]["ari"] == 1
    no_labels = [
        dataclasses.replace(c, label_map=torch.zeros(10, dtype=torch.int64))
        for c in turned().newcomers.clients
    ]
    blind = dataclasses.replace(turned().newcomers, clients=tuple(no_labels))
    for newcomers in (turned().newcomers, blind):
        found = fedclade.assign(run, newcomers, members=turned())
        assert [row["by"] for row in found.rows] == ["distance"] * 4
        assert found.summary["assignment_accuracy"] == 1.0
    permuted = fedclade.simulate(
        algorithm, "mlp", turned(), local=SPEC, rounds=10, evaluate_every=10, permute=True
    )
    again = fedclade.assign(permuted, turned().newcomers, members=turned())
    assert [row["node"] for row in again.rows] == [row["node"] for row in found.rows]


def test_without_labels_one_cluster_is_where_all_go():
    run = fedclade.simulate("fedavg", "mclr", turned(), local=SPEC, rounds=1)
    assert {
        row["node"] for row in fedclade.assign(run, turned().newcomers, members=turned()).rows
    } == {0}


@pytest.mark.parametrize(
    "algorithm", [fedclade.PerFedAvg(alpha=0.3, adapt_steps=5), fedclade.FineTune(epochs=2)]
)
def test_newcomers_take_their_own_steps_before_they_are_scored_as_members_do(algorithm):
    settings = {"local": LocalTraining(lr=0.05, batch_size=80), "rounds": 2, "evaluate_every": 2}
    run = fedclade.simulate(algorithm, "mclr", digits(), **settings)
    found = fedclade.assign(run, digits().newcomers, algorithm=algorithm)
    assert all(row["accuracy"] > row["accuracy_root"] for row in found.rows)
    members = [row["accuracy"] for row in run.client_rows if row["round"] == 2]
    assert sum(row["accuracy"] for row in found.rows) / 4 == pytest.approx(
        sum(members) / len(members), abs=0.2
    )
