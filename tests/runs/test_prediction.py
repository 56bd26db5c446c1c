"""Predictions for new rows, and scores on new data: the same as what the run's clients were evaluated with."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import fedclade
from fedclade import ConfigError, DataError, LocalTraining, ModelError, Run, RunError, simulate
from fedclade.algorithms import ALGORITHMS, build_algorithm
from fedclade.cli import main
from fedclade.core.errors import TreeError
from fedclade.data import encode_new_rows, federation_from_frame
from fedclade.runs.prediction import input_encoding
from tests.properties.test_resume import OPTIONS
from tests.tiny import FEATURES, LABELS, federation_of, linear, perceptron

WARDS = ("heart", "ear", "eye")


def frame_of(clients: int = 4, rows: int = 60, seed: int = 0) -> pd.DataFrame:
    """A table with numbers, categories and empty cells, whose targets depend on both."""
    draw = np.random.default_rng(seed)
    n = clients * rows
    age = draw.normal(50, 12, n).round(1)
    stay = draw.exponential(5, n).round(2)
    ward = draw.choice(WARDS, n)
    risk = (age - 50) / 12 + (ward == "heart") - (ward == "eye") + draw.normal(0, 0.3, n)
    age[draw.random(n) < 0.05] = np.nan
    ward[draw.random(n) < 0.05] = ""
    return pd.DataFrame(
        {
            "hospital": np.repeat([f"hospital-{i}" for i in range(clients)], rows),
            "age": age,
            "ward": ward,
            "stay": stay,
            "outcome": np.where(risk > 0, "ill", "well"),
            "grade": np.where(risk > 0.7, "high", np.where(risk > -0.7, "middle", "low")),
            "cost": 1000 * risk + 5000 + draw.normal(0, 50, n),
            "days": 4 * risk + 9,
        }
    )


FRAME = frame_of()
INPUTS = ("age", "ward", "stay")


def federation_for(target: Any, **settings: Any) -> fedclade.Federation:
    return federation_from_frame(
        FRAME, target=target, client="hospital", inputs=INPUTS, missing="mean", **settings
    )


def run_on(federation: fedclade.Federation, algorithm: Any = "cfl", **settings: Any) -> Run:
    settings = {"rounds": 2, "engine": "loop", "local": LocalTraining(lr=0.1)} | settings
    return simulate(algorithm, settings.pop("model", "mlp"), federation, **settings)


def test_rows_of_a_table_are_encoded_and_scaled_as_those_of_the_clients():
    federation = federation_for("outcome")
    run = run_on(federation)
    shuffled = FRAME[["stay", "outcome", "ward", "hospital", "age"]]  # in another order
    for rows in (FRAME, shuffled, FRAME.to_dict("records"), FRAME.to_dict("list")):
        encoded = encode_new_rows(rows, input_encoding(run))
        assert encoded.x.equal(federation.pool.x)
    few = encode_new_rows(FRAME.iloc[7:10], input_encoding(run))  # without most categories
    assert few.x.equal(federation.pool.x[7:10])


def test_outputs_are_those_of_the_exported_model(tmp_path: Path):
    federation = federation_for("grade")
    run = run_on(federation)
    predictions = run.predict(FRAME, client="hospital-2")
    path = fedclade.export_model(run, tmp_path / "m.safetensors", client="hospital-2")
    module = fedclade.models.build_model("mlp", input_shape=(5,), outputs=3, seed=9)
    with torch.no_grad():
        outputs = fedclade.load_export(path, module)(federation.pool.x)
    assert predictions.outputs.equal(outputs)
    labels = run.schema.label_names
    expected = [labels[place] for place in outputs.argmax(1).tolist()]
    assert predictions.columns["prediction"] == expected
    shares = np.exp(outputs.double().numpy())
    shares /= shares.sum(1, keepdims=True)
    for place, label in enumerate(labels):
        found = predictions.columns[f"probability of {label}"]
        np.testing.assert_allclose(found, shares[:, place], rtol=1e-12)


def score_of(run: Run, client: int, metric: str) -> float:
    (row,) = (r for r in run.client_rows if r["client"] == client and r["round"] == run.model_round)
    return row[metric]


@pytest.mark.parametrize("target", ["outcome", "grade"])
def test_the_share_of_right_labels_is_the_accuracy_of_the_client(target: str):
    federation = federation_for(target)
    run = run_on(federation)
    for client, data in federation.by_id.items():
        rows = FRAME.iloc[data.test]
        found = run.predict(rows, client=data.name).columns["prediction"]
        right = np.mean(np.array(found) == rows[target].to_numpy())
        assert right == pytest.approx(score_of(run, client, "accuracy"), abs=1e-12)


def test_numbers_are_in_the_unit_of_the_target():
    federation = federation_for("cost")
    run = run_on(federation)
    assert run.summary["inputs"]["target_mean"][0] == pytest.approx(5000, rel=0.1)
    for client, data in federation.by_id.items():
        rows = FRAME.iloc[data.test]
        found = run.predict(rows, client=client).columns["prediction"]
        error = np.abs(np.array(found) - rows["cost"].to_numpy()).mean()
        assert error == pytest.approx(score_of(run, client, "mae"), rel=1e-5)


def test_several_targets_have_a_column_each():
    run = run_on(federation_for(("cost", "days")))
    found = run.predict(FRAME[:3], client=0)
    assert list(found.columns) == ["row", "prediction of cost", "prediction of days"]
    assert [row["row"] for row in found.rows] == [1, 2, 3]


@pytest.mark.parametrize("name", ["ditto", "fedper", "fedem", "local", "finetune", "oracle", "cfl"])
def test_a_client_gets_the_model_with_which_it_was_evaluated(name: str):
    federation = federation_of([0, 1, 0, 1])
    algorithm = build_algorithm(name, OPTIONS.get(name, {}), federation.true_clusters)
    run = run_on(federation, algorithm, model=perceptron)
    for client in federation.ids:
        x, y = federation.examples(client, "test")
        found = run.predict(x, client=client, model=perceptron)
        right = float((found.outputs.argmax(1) == y).double().mean())
        assert right == pytest.approx(score_of(run, client, "accuracy"))
        assert found.is_own == (name in ("ditto", "local", "finetune"))


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"fedbn"}))
def test_data_of_the_run_have_the_scores_of_the_run(name: str, tmp_path: Path):
    federation = federation_of([0, 1, 2, 3] * 2)
    algorithm = build_algorithm(name, OPTIONS.get(name, {}), federation.true_clusters)
    run_on(federation, algorithm, model=perceptron, rounds=3, folder=tmp_path / "run")
    run = Run.load(tmp_path / "run")
    last = {r["client"]: r for r in run.client_rows if r["round"] == run.model_round}
    scores = run.evaluate(federation, model=perceptron)
    assert [row["client"] for row in scores.rows] == list(federation.ids)
    for row in scores.rows:
        assert row["accuracy"] == last[row["client"]]["accuracy"]
        assert row["loss"] == pytest.approx(last[row["client"]]["loss"], rel=1e-6)
        assert row["node"] == last[row["client"]]["served_by"]


def test_clients_are_recognized_by_their_names_and_all_rows_can_count():
    federation = federation_for("outcome")
    run = run_on(federation)
    some = replace(
        federation,
        clients=tuple(
            replace(client, id=place) for place, client in enumerate(federation.clients[2:])
        ),
        true_clusters=None,
    )
    scores = run.evaluate(some)
    assert [(row["client"], row["name"]) for row in scores.rows] == [
        (2, "hospital-2"),
        (3, "hospital-3"),
    ]
    assert [row["accuracy"] for row in scores.rows] == [
        score_of(run, c, "accuracy") for c in (2, 3)
    ]
    assert [row["examples"] for row in run.evaluate(some, split="all").rows] == [60, 60]
    mean = np.mean([row["accuracy"] for row in scores.rows])
    assert scores.summary["accuracy"]["mean"] == pytest.approx(mean)
    stranger = replace(some, clients=(replace(some.clients[0], name="clinic"), some.clients[1]))
    with pytest.raises(DataError, match="clients that the run does not have: clinic; rename them"):
        run.evaluate(stranger)
    with pytest.raises(
        ConfigError, match="split should be train, validation, test or all, got 'x'"
    ):
        run.evaluate(some, split="x")


def test_images_are_scaled_as_in_the_run():
    federation = fedclade.load_federation("digits", clients=2, samples_per_client=40)
    run = run_on(federation)
    client = federation.by_id[1]
    images = federation.pool.x[torch.from_numpy(client.test)]
    x, y = federation.examples(1, "test")
    encoded = encode_new_rows(images, input_encoding(run))
    assert encoded.x.equal(x)
    found = run.predict(images.numpy(), client=1)
    assert float((found.outputs.argmax(1) == y).double().mean()) == score_of(run, 1, "accuracy")
    if images.dtype == torch.uint8:
        with pytest.raises(DataError, match=r"should be images of type uint8 .* got float32"):
            run.predict(images.float(), client=1)


def test_texts_are_encoded_by_the_words_of_the_run():
    texts = ["good film", "bad film", "good play", "bad play", "a good one", "a bad one"] * 10
    labels = [1, 0] * 30
    data = {"a": (texts, labels), "b": (texts[::-1], labels[::-1])}
    federation = fedclade.federation(data, max_words=4)
    run = run_on(federation, model="lstm" if "lstm" in fedclade.models.MODELS else "gru")
    encoded = encode_new_rows(["good unheard film"], input_encoding(run)).x
    words = run.schema.words
    assert encoded.tolist() == [[words.index("good"), 1, words.index("film"), 0]]
    assert len(run.predict(["good film", "bad film"], client="a")) == 2
    with pytest.raises(DataError, match="the inputs of the run are not the columns of a table"):
        run.predict(FRAME, client="a")


def test_the_folder_of_a_run_has_all_that_predictions_need(tmp_path: Path):
    federation = federation_for("grade")
    first = run_on(federation, folder=tmp_path / "run")
    run = Run.load(tmp_path / "run")
    assert run.schema == first.schema == federation.encoding.schema
    FRAME.to_csv(tmp_path / "rows.csv", index=False)
    predictions = run.predict(tmp_path / "rows.csv", client="hospital-1", keep=["hospital"])
    assert predictions.outputs.equal(first.predict(FRAME, client=1).outputs)
    for ending in (".csv", ".json", ".parquet"):
        path = predictions.save(tmp_path / f"found{ending}")
        if ending == ".csv":
            with path.open() as file:
                rows = list(csv.DictReader(file))
        elif ending == ".json":
            rows = json.loads(path.read_text())
        else:
            rows = pq.read_table(path).to_pylist()
        assert [row["prediction"] for row in rows] == predictions.columns["prediction"]
        assert [row["hospital"] for row in rows] == FRAME["hospital"].tolist()
        with pytest.raises(RunError, match="exists already; name another file"):
            predictions.save(path)
    with pytest.raises(ConfigError, match=r"should end in .csv, .parquet, .json, got"):
        predictions.save(tmp_path / "found.xlsx")
    assert list(predictions.frame.columns) == list(predictions.columns)


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (FRAME[["age", "stay"]], DataError, "lacks 'ward'; it has 'age', 'stay'"),
        (FRAME.assign(ward="kidney"), DataError, "'kidney'"),
        (FRAME.assign(age="old"), DataError, "column 'age' should have numbers"),
        (
            np.zeros((3, 4)),
            DataError,
            r"of shape [N, 5], as the inputs of the run, got shape [3, 4]",
        ),
        (np.zeros((0, 5)), DataError, "the rows should be at least 1 row, got none"),
        ("missing.csv", DataError, "missing.csv is not a file; name a CSV, TSV or Parquet file"),
        (["a text"], DataError, "the rows are texts, such as 'a text', but the inputs of the run"),
    ],
)
def test_rows_that_do_not_fit_are_one_clear_error(rows: Any, error: type, text: str):
    run = run_on(federation_for("outcome"), rounds=1)
    with pytest.raises(error, match=re.escape(text)):
        run.predict(rows, client=0)


def test_what_cannot_be_predicted_says_so():
    run = run_on(federation_for("outcome", standardize="client"), rounds=1)
    with pytest.raises(DataError, match=r"scales its inputs by .* its own examples \(standardize"):
        run.predict(FRAME, client=0)
    run = run_on(federation_for("outcome"), rounds=1)
    with pytest.raises(ConfigError, match="chosen by either --client or --node, got neither"):
        run.predict(FRAME)
    with pytest.raises(TreeError, match="no client 'clinic'; its clients are 'hospital-0', 'hosp"):
        run.predict(FRAME, client="clinic")
    with pytest.raises(ConfigError, match=r"keep should name columns .* got \['id'\]"):
        run.predict(FRAME, client=0, keep=["id"])
    with pytest.raises(ConfigError, match="keep names columns of a table, got"):
        run.predict(np.zeros((3, 5)), client=0, keep=["id"])
    own = run_on(federation_of([0, 1]), model=nn.Linear(FEATURES, LABELS), rounds=1)
    with pytest.raises(ConfigError, match=r"fedclade.predict needs the argument model=..., since"):
        own.predict(np.zeros((3, FEATURES)), client=0)
    with pytest.raises(ModelError, match="the models of the run do not fit into this Linear"):
        own.predict(np.zeros((3, FEATURES)), client=0, model=nn.Linear(FEATURES, 2))
    found = own.predict(np.zeros((3, FEATURES)), client=0, model=nn.Linear(FEATURES, LABELS))
    assert found.outputs.shape == (3, LABELS)


def test_a_name_that_is_also_an_id_of_another_client_is_ambiguous():
    federation = federation_of([0, 1])
    clients = tuple(replace(client, name=str(1 - client.id)) for client in federation.clients)
    run = run_on(replace(federation, clients=clients), model=linear, rounds=1)
    with pytest.raises(TreeError, match=r"'1' is the name or the id of several clients, .* 0, 1;"):
        run.predict(np.zeros((1, FEATURES)), client="1", model=linear)
    assert run.predict(np.zeros((1, FEATURES)), client=1, model=linear).client == 1


# The command line


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Call the command line; return its exit status and all that it prints."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: Any) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedclade", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


def test_the_commands_predict_and_evaluate_a_run_of_files(
    run_command: Callable[..., tuple[int, str]], tmp_path: Path
):
    for name, rows in FRAME.groupby("hospital"):
        rows.drop(columns=["hospital", "grade", "cost", "days"]).to_csv(
            tmp_path / f"{name}.csv", index=False
        )
    config = f'rounds = 2\n[data]\nfiles = "{tmp_path}/hospital-*.csv"\ntarget = "outcome"\n'
    config += 'missing = "mean"\n[report]\nreferences = false\n'
    (tmp_path / "my.toml").write_text(config)
    folder = tmp_path / "run"
    assert run_command("run", tmp_path / "my.toml", "--out", folder, "-q")[0] == 0
    out = tmp_path / "found.csv"
    rows = tmp_path / "hospital-1.csv"
    code, printed = run_command("predict", folder, rows, "--client", "hospital-1", "--out", out)
    assert (code, "predictions of 60 rows by the model of node" in printed) == (0, True)
    with out.open() as file:
        found = [row["prediction"] for row in csv.DictReader(file)]
    run = Run.load(folder)
    assert found == run.predict(rows, client=1).columns["prediction"]
    assert run_command("predict", folder, rows, "--client", "hospital-1", "--out", out)[0] == 2
    # The accuracy over all rows of the files, as counted here.
    right = np.mean(np.array(found) == FRAME[FRAME.hospital == "hospital-1"].outcome.to_numpy())
    scores = tmp_path / "scores.json"
    code, printed = run_command("evaluate", folder, f"{tmp_path}/hospital-1.csv", "--out", scores)
    assert code == 0, printed
    (row,) = json.loads(scores.read_text())
    assert (row["name"], row["examples"]) == ("hospital-1", 60)
    assert row["accuracy"] == pytest.approx(right)
    code, printed = run_command("evaluate", folder, tmp_path / "my.toml")
    assert code == 0, printed
    assert all(f"hospital-{i}" in printed for i in range(4))
    code, printed = run_command("evaluate", folder, tmp_path)
    assert (code, "is a folder; name its files by a pattern" in printed) == (2, True)
    code, printed = run_command(
        "export", folder, "--client", "hospital-1", "--out", tmp_path / "m.safetensors"
    )
    assert (code, (tmp_path / "m.safetensors").exists()) == (0, True)


def test_files_cannot_be_evaluated_by_a_run_that_was_not_made_from_files(
    run_command: Callable[..., tuple[int, str]], tmp_path: Path
):
    run_on(federation_for("outcome"), folder=tmp_path / "run", rounds=1)
    code, printed = run_command("evaluate", tmp_path / "run", "a/*.csv")
    assert code == 2
    assert "was not read from files, so the columns of a/*.csv are unknown" in printed


# A run without rounds


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_run_of_no_rounds_evaluates_the_initial_models(name: str, tmp_path: Path):
    federation = federation_of([0, 1, 2, 3])
    algorithm = build_algorithm(name, OPTIONS.get(name, {}), federation.true_clusters)
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, LABELS))
    several = algorithm.requires.initial_models > 1
    model = perceptron if several else module
    run_on(federation, algorithm, model=model, rounds=0, folder=tmp_path / "run")
    run = Run.load(tmp_path / "run")
    assert (run.summary["rounds"], run.model_round) == (0, 0)
    assert [row["round"] for row in run.metric_rows] == [0]
    assert run.summary["steps"]["total"] == 0
    if not several and algorithm.requires.mixture is None:
        for row in run.client_rows:
            x, y = federation.examples(row["client"], "test")
            with torch.no_grad():
                right = (module(x).argmax(1) == y).double().mean()
            assert row["accuracy"] == pytest.approx(float(right))
    scores = run.evaluate(federation, model=model)
    assert [row["accuracy"] for row in scores.rows] == [r["accuracy"] for r in run.client_rows]


def test_a_run_of_no_rounds_can_be_given_rounds(tmp_path: Path):
    federation = federation_of([0, 1])
    run_on(federation, model=linear(), rounds=0, folder=tmp_path / "run")
    longer = run_on(federation, model=linear(), rounds=2, folder=tmp_path / "run")
    whole = run_on(federation, model=linear(), rounds=2)
    assert [row["round"] for row in longer.metric_rows] == [1, 2]
    assert longer.client_rows == whole.client_rows


def test_a_run_of_no_rounds_has_a_report(
    run_command: Callable[..., tuple[int, str]], tmp_path: Path
):
    run_on(federation_for("outcome"), rounds=0, folder=tmp_path / "run")
    code, printed = run_command("report", tmp_path / "run")
    assert code == 0, printed
    assert (tmp_path / "run/report.html").exists()
    assert run_command("tree", tmp_path / "run")[0] == 0
    assert run_command("resume", tmp_path / "run")[1].strip().endswith("nothing to continue")
