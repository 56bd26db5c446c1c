"""What the clients of a run gain: models on the same test rows, references, and their storage."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch

import fedclade
from fedclade.algorithms import Local
from fedclade.core import RunError, RunInterrupted
from fedclade.runs import FINISH, gains, lacks_references, references
from fedclade.runs.gain_outputs import predict_trivially
from fedclade.runs.reference_log import RunLog, log_of_reference
from fedclade.runs.references import is_small, settings_of_reference
from fedclade.runs.store.gains import GAINS, _sum_of
from fedclade.tasks import metric
from tests.tiny import federation_of, task_federation

FEDERATION = federation_of([0, 0, 1, 1])


def simulated(algorithm="fedavg", federation=FEDERATION, **options):
    return fedclade.simulate(algorithm, "mlp", federation, rounds=2, **options)


def scores_of(run, model: str) -> dict[int, float]:
    return {client.client: client.scores[model].value for client in run.gains.clients}


def last_scores(run, metric: str = "accuracy") -> dict[int, float]:
    last = run.model_round
    return {row["client"]: row[metric] for row in run.client_rows if row["round"] == last}


@pytest.mark.parametrize(
    ("algorithm", "deployed"),
    [
        ("fedavg", "cluster_model"),
        ("oracle", "cluster_model"),
        ("ditto", "own_model"),
        ("local", "own_model"),
        ("fedper", "own_model"),
        ("fedem", "own_model"),
    ],
)
def test_the_deployed_model_has_the_score_with_which_the_run_ended(algorithm, deployed):
    run = simulated(algorithm)
    assert {client.deployed for client in run.gains.clients} == {deployed}
    assert scores_of(run, deployed) == pytest.approx(last_scores(run))


def test_with_own_models_the_clusters_scores_stay_visible():
    run = simulated("ditto")
    one_model = simulated("fedavg")
    assert scores_of(run, "cluster_model") == pytest.approx(last_scores(one_model))
    first = run.gains.clients[0]
    difference = first.scores["own_model"].value - first.scores["cluster_model"].value
    assert first.gains["cluster_model"].value == pytest.approx(difference)


def test_references_have_the_scores_of_their_own_runs():
    run = simulated("oracle", references=True)
    assert run.gains.models == ("trivial", "alone", "one_model", "cluster_model")
    assert run.gains.missing == {}
    assert scores_of(run, "alone") == pytest.approx(last_scores(simulated("local")))
    assert scores_of(run, "one_model") == pytest.approx(last_scores(simulated("fedavg")))


@pytest.mark.parametrize(("algorithm", "nodes"), [("rcfl", 1), ("oracle", 3)])
def test_references_do_not_change_the_run(algorithm, nodes):
    one = simulated(algorithm)
    other = simulated(algorithm, references=True)
    assert len(one.tree.nodes) == nodes
    assert list(one.client_rows) == list(other.client_rows)
    for node, same in zip(one.tree.nodes, other.tree.nodes, strict=True):
        assert node.members == same.members
        assert torch.equal(node.params, same.params)


def test_a_client_has_its_name_rows_and_cluster():
    run = simulated("oracle")
    client = run.gains.clients[2]
    assert (client.name, client.n_train, client.n_test) == ("c2", 24, 20)
    assert client.cluster == run.tree.leaf_of[2]
    assert client.scores["trivial"].low < client.scores["trivial"].value


def test_a_method_that_is_a_reference_itself_is_not_compared_with_itself():
    run = simulated("fedavg", references=True)
    assert run.gains.missing == {"one_model": "it is the run itself"}
    assert "alone" in run.gains.models
    run = simulated("local", references=True)
    assert run.gains.missing["alone"] == "it is the run itself"
    assert "one_model" in run.gains.models


def test_a_model_that_was_not_measured_has_its_reason():
    assert "simulate(..., references=True)" in simulated("oracle").gains.missing["alone"]
    assert simulated("fedper").gains.missing["cluster_model"].startswith("the clusters share only")
    assert (
        simulated("fedem").gains.missing["cluster_model"].startswith("clients are evaluated with")
    )
    assert simulated("local").gains.missing["cluster_model"] == "clients share no model"


@pytest.mark.parametrize(
    ("kind", "seen", "targets", "expected"),
    [
        ("classification", [2, 2, 0], [0, 1], [2, 2]),
        ("binary", [1.0, 1.0, 0.0], [0.0, 1.0], [1, 1]),
        ("binary", [0.0, 0.0], [0.0, 1.0], [0, 0]),
    ],
)
def test_the_trivial_predictor_predicts_the_most_frequent_label(kind, seen, targets, expected):
    outputs = 3 if kind == "classification" else 1
    found = predict_trivially(kind, torch.tensor(seen), torch.tensor(targets), outputs)
    labels = found.argmax(-1) if kind == "classification" else (found > 0).long()
    assert labels.tolist() == expected


def test_the_trivial_predictor_of_numbers_predicts_their_mean():
    found = predict_trivially("regression", torch.tensor([1.0, 4.0]), torch.zeros(3), 1)
    assert found.tolist() == [2.5] * 3


def test_the_trivial_predictor_is_scored_in_the_unit_of_the_target():
    """A regression standardizes targets by default, and its scores are in the user's unit again."""
    draw = np.random.default_rng(0)
    clients = {}
    for name, level in (("low", 100.0), ("high", 200.0), ("middle", 150.0)):
        inputs = draw.normal(size=(40, 2)).astype(np.float32)
        targets = (level + draw.normal(size=40)).astype(np.float32)
        clients[name] = ((inputs[:30], targets[:30]), (inputs[30:], targets[30:]))
    federation = fedclade.federation(clients, "regression")
    run = fedclade.simulate("fedavg", "mlp", federation, rounds=2, references=True)
    assert run.gains is not None
    for client in run.gains.clients:
        assert 0.3 < client.scores["trivial"].value < 2, (
            "the targets' deviation is 1 in each client"
        )


def test_the_trivial_predictor_of_texts_predicts_the_most_frequent_token():
    seen = torch.tensor([[1, 1, -100], [2, 1, 0]])
    found = predict_trivially("language", seen, torch.zeros(4, 3, dtype=torch.int64), 3)
    assert found.shape == (4, 3, 3)
    assert (found.argmax(-1) == 1).all()


@pytest.mark.parametrize("positives", [1, 7, 31, 50])
def test_constant_predictions_have_ranks_that_tie(positives):
    seen = torch.zeros(100)
    seen[:positives] = 1
    auroc = metric("auroc", "binary", 1)
    for n in (5, 17, 89, 103):
        targets = (torch.arange(n) % 3 == 0).float()
        outputs = predict_trivially("binary", seen, targets, 1)
        assert auroc.whole(outputs, targets) == pytest.approx(0.5)


@pytest.mark.parametrize("task", ["regression", "binary", "multilabel"])
def test_other_tasks_are_compared_by_their_first_metric(task):
    federation = task_federation(task, [0, 1], outputs=2 if task == "multilabel" else 0)
    run = simulated("fedavg", federation, references=True)
    name = run.summary["metrics"][0]["name"]
    assert run.gains.metric.name == name
    assert scores_of(run, "cluster_model") == pytest.approx(last_scores(run, name), rel=1e-5)
    client = run.gains.clients[0]
    sign = -1 if task == "regression" else 1
    difference = client.scores["cluster_model"].value - client.scores["trivial"].value
    assert client.gains["trivial"].value == pytest.approx(sign * difference, abs=1e-6)


def test_attributes_and_traits_are_stored_with_the_clients():
    federation = FEDERATION.with_attributes({"c0": {"country": "Bern"}})
    run = simulated("fedavg", federation)
    assert run.gains.clients[0].attributes == {"country": "Bern"}
    assert run.gains.clients[1].attributes == {}
    assert len(run.gains.clients[0].traits) == len(run.gains.traits) > 0


# Storage: in the folder of a run, and again.


def test_a_folder_has_the_gains_and_runs_of_the_references(tmp_path):
    run = simulated("oracle", folder=tmp_path / "run", references=True)
    loaded = fedclade.Run.load(tmp_path / "run")
    assert loaded.gains.rows == run.gains.rows
    assert loaded.gains.traits == run.gains.traits
    references = {path.name for path in (tmp_path / "run" / "references").iterdir()}
    assert references == {"alone", "one_model"}
    assert fedclade.Run.load(tmp_path / "run" / "references" / "alone").gains is None


def test_a_saved_run_has_its_gains(tmp_path):
    run = simulated("oracle")
    run.save(tmp_path / "run")
    assert fedclade.Run.load(tmp_path / "run").gains.rows == run.gains.rows


def test_a_finished_run_gets_references_by_the_same_call(tmp_path):
    simulated("oracle", folder=tmp_path / "run")
    run = simulated("oracle", folder=tmp_path / "run", references=True)
    assert "alone" in run.gains.models
    assert "alone" in fedclade.Run.load(tmp_path / "run").gains.models


def test_interrupted_references_continue(tmp_path):
    stops = iter([False, True])  # after the first rounds of the run and of the first reference
    with pytest.raises(RunInterrupted):
        simulated("oracle", folder=tmp_path / "run", references=True, stop=lambda: next(stops))
    run = fedclade.Run.load(tmp_path / "run")
    assert lacks_references(run, tmp_path / "run")
    run = simulated("oracle", folder=tmp_path / "run", references=True)
    assert not lacks_references(run, tmp_path / "run")
    uninterrupted = simulated("oracle", references=True)
    assert run.gains.rows == uninterrupted.gains.rows


def test_more_rounds_measure_gains_again(tmp_path):
    simulated("oracle", folder=tmp_path / "run", references=True)
    options = {"folder": tmp_path / "run", "references": True}
    run = fedclade.simulate("oracle", "mlp", FEDERATION, rounds=3, **options)
    assert run.gains.round == 3
    assert scores_of(run, "cluster_model") == pytest.approx(last_scores(run))
    whole = fedclade.simulate("oracle", "mlp", FEDERATION, rounds=3, references=True)
    assert run.gains.rows == whole.gains.rows


def finish_first_round(row, tree):
    return FINISH


def test_references_have_the_rounds_that_the_run_had_and_continue_with_it(tmp_path):
    options = {"folder": tmp_path / "run", "references": True, "checkpoint_every": 1}
    run = fedclade.simulate(
        "oracle", "mlp", FEDERATION, rounds=3, on_round=finish_first_round, **options
    )
    one_round = fedclade.simulate("oracle", "mlp", FEDERATION, rounds=1, references=True)
    assert run.summary["rounds"] == 1
    assert run.gains.rows == one_round.gains.rows
    run = fedclade.simulate("oracle", "mlp", FEDERATION, rounds=4, **options)
    whole = fedclade.simulate("oracle", "mlp", FEDERATION, rounds=4, references=True)
    assert run.gains.rows == whole.gains.rows


def test_references_of_a_run_that_was_finished_before_newcomers_joined_are_trained():
    from fedclade.runs import Churn

    federation = fedclade.load_federation(
        "digits", clients=3, samples_per_client=40, newcomers=1, validation_fraction=0.0
    )
    run = fedclade.simulate(
        "cfl",
        "mclr",
        federation,
        rounds=3,
        presence=Churn(join_round=3),
        references=True,
        on_round=finish_first_round,
    )
    assert {"alone", "one_model"} <= set(run.gains.models)


def test_finishing_an_interrupted_run_trains_no_references(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(RunInterrupted):
        simulated("oracle", folder=folder, references=True, stop=lambda: True)
    run = simulated("oracle", folder=folder, references=True, finish=True)
    assert run.summary["rounds"] == 1
    assert run.gains.missing["alone"].startswith("not trained; to train: ")
    assert not (folder / "references").exists()
    assert simulated("oracle", folder=folder, references=True, finish=True).gains.models == (
        "trivial",
        "cluster_model",
    )


def test_a_run_that_diverged_gets_no_references(tmp_path):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=draw)
    federation = fedclade.federation(dict.fromkeys(("north", "south"), (x, x[:, 0])), seed=1)

    def run_it():
        return fedclade.simulate(
            "fedavg",
            "mclr",
            federation,
            rounds=4,
            local=fedclade.LocalTraining(lr=3.0, batch_size=40, steps=2),
            references=True,
            folder=tmp_path / "run",
        )

    for run in (run_it(), run_it()):
        assert "diverged" in run.summary
        assert run.gains.missing["alone"] == "not trained, since the run diverged"
    assert not (tmp_path / "run" / "references").exists()
    (tmp_path / "run" / "references").mkdir()  # as if references were begun before it diverged
    assert not lacks_references(run, tmp_path / "run")


class Counted(fedclade.Middleware):
    """Middleware that counts the queries that pass it."""

    def __init__(self) -> None:
        self.n_queries = 0

    def before(self, query):
        self.n_queries += 1
        return query


def test_only_one_model_for_all_has_the_middleware_of_the_run():
    plain = Counted()
    simulated("fedavg", middleware=[plain])
    with_alone = Counted()
    simulated("fedavg", middleware=[with_alone], references=True)
    assert with_alone.n_queries == plain.n_queries
    with_one_model = Counted()
    simulated("local", middleware=[with_one_model], references=True)
    of_local = Counted()
    simulated("local", middleware=[of_local])
    assert with_one_model.n_queries > of_local.n_queries


def test_a_reference_is_evaluated_as_often_as_the_run_if_evaluations_are_counted():
    settings = fedclade.RunSettings(evaluate_every=5)
    assert settings_of_reference(settings, is_alone=True).evaluate_every > 1000
    settings = fedclade.RunSettings(evaluate_every=5, keep_best=True)
    assert settings_of_reference(settings, is_alone=True).evaluate_every == 5


def test_other_data_than_that_of_the_run_is_refused(tmp_path):
    simulated("oracle", folder=tmp_path / "run")
    other = federation_of([0, 0, 1, 1], sizes=[24, 30, 24, 24])
    with pytest.raises(
        RunError, match=r"client 1 was 'c1' with 24 training rows, .* it is 'c1' with 30"
    ):
        simulated("oracle", other, folder=tmp_path / "run", references=True)
    assert not (tmp_path / "run" / "references").exists()


def test_damaged_gains_are_named(tmp_path):
    simulated("oracle", folder=tmp_path / "run")
    path = tmp_path / "run" / GAINS
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "round": 7}))
    with pytest.raises(RunError, match=r"gains\.json was changed"):
        fedclade.Run.load(tmp_path / "run")


def test_gains_of_another_format_are_refused(tmp_path):
    simulated("oracle", folder=tmp_path / "run")
    path = tmp_path / "run" / GAINS
    content = json.loads(path.read_text())
    content.pop("sha256")
    content["format"] = 9
    path.write_text(json.dumps({**content, "sha256": _sum_of(content)}))
    with pytest.raises(
        RunError, match=r"gains\.json has format 9, but this version of fedclade reads format 1"
    ):
        fedclade.Run.load(tmp_path / "run")


def test_an_interval_of_two_numbers_is_refused(tmp_path):
    simulated("oracle", folder=tmp_path / "run")
    path = tmp_path / "run" / GAINS
    content = json.loads(path.read_text())
    content.pop("sha256")
    content["clients"][0]["scores"]["trivial"] = [0.5, 0.4]
    path.write_text(json.dumps({**content, "sha256": _sum_of(content)}))
    with pytest.raises(RunError, match=r"an interval should have 3 numbers .*, got 2"):
        fedclade.Run.load(tmp_path / "run")


def test_the_csv_file_has_a_row_for_each_client_with_all_intervals(tmp_path):
    federation = FEDERATION.with_attributes({"c0": {"beds": 100}})
    run = simulated("oracle", federation, references=True)
    path = run.gains.save_csv(tmp_path / "gains.csv")
    head, *lines = path.read_text().splitlines()
    names = head.split(",")
    assert names[:6] == ["client", "name", "cluster", "n_train", "n_test", "deployed"]
    for name in ("trivial", "alone", "one_model", "cluster_model", "gain_over_alone"):
        assert {name, f"{name}_low", f"{name}_high"} <= set(names)
    assert names[-1] == "attribute_beds"
    assert len(lines) == 4
    assert lines[0].endswith(",100")
    assert lines[1].endswith(",")
    with pytest.raises(RunError, match="cannot write"):
        run.gains.save_csv(tmp_path)


# Runs whose gains are not measured, and failures that must not end a run.


def test_very_many_clients_are_measured_on_request_only(monkeypatch):
    assert is_small(FEDERATION)
    monkeypatch.setattr(references, "MOST_CLIENTS_MEASURED", 3)
    assert not is_small(FEDERATION)
    assert simulated().gains is None
    assert simulated(references=True).gains is not None


def test_a_run_whose_references_are_none_has_no_gains():
    assert simulated(references=None).gains is None


def test_a_reference_that_cannot_be_trained_is_left_out_with_the_reason(monkeypatch, caplog):
    def fail(*_, **__):
        raise ValueError("no step")

    monkeypatch.setattr(Local, "step", fail)
    run = simulated("oracle", references=True)
    assert run.gains.missing == {"alone": "its training failed: ValueError: no step"}
    assert "one_model" in run.gains.models
    assert "the reference alone could not be trained" in caplog.text


def test_a_failure_to_measure_does_not_end_the_run(monkeypatch, caplog):
    def fail(*_, **__):
        raise ValueError("no rows")

    monkeypatch.setattr(gains, "describe_clients", fail)
    with caplog.at_level(logging.WARNING):
        run = simulated("oracle")
    assert run.gains is None
    assert "the gains of clients could not be measured: ValueError: no rows" in caplog.text


def test_a_full_disk_does_not_end_a_complete_run(monkeypatch, caplog, tmp_path):
    def fail(*_):
        raise RunError("cannot write gains.json: no space left")

    monkeypatch.setattr(gains, "write_gains", fail)
    run = simulated("oracle", folder=tmp_path / "run")
    assert run.gains is not None
    assert fedclade.Run.load(tmp_path / "run").gains is None
    assert "cannot write gains.json: no space left; reports of this run folder" in caplog.text


def test_a_run_that_ended_before_its_gains_were_written_gets_them(tmp_path):
    run = simulated("oracle", folder=tmp_path / "run")
    (tmp_path / "run" / GAINS).unlink()
    again = simulated("oracle", folder=tmp_path / "run")
    assert scores_of(again, "cluster_model") == scores_of(run, "cluster_model")
    assert (tmp_path / "run" / GAINS).exists()


def test_a_run_without_a_folder_is_returned_if_its_references_are_interrupted(caplog):
    stops = iter([False, True])  # after the first rounds of the run and of the first reference
    run = simulated("oracle", references=True, stop=lambda: next(stops))
    assert run.summary["rounds"] == 2
    assert run.gains is None
    assert "the run has no gains, since a reference was interrupted after round 1" in caplog.text


def test_the_log_names_the_reference_that_is_trained(caplog):
    from fedclade.algorithms import FedAvg

    def warn(*_):
        return ["few rounds"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedAvg, "check", warn)
        with caplog.at_level(logging.INFO, "fedclade"):
            simulated("oracle", references=True)
    assert caplog.messages.count("training the reference alone, for the report") == 1
    assert caplog.messages.count("training the reference one_model, for the report") == 1
    assert "reference one_model: few rounds" in caplog.messages
    assert "few rounds" not in caplog.messages


def test_messages_name_the_reference_while_it_is_trained(caplog):
    log = RunLog(logging.getLogger("fedclade.tests"))
    with log_of_reference("alone"), caplog.at_level(logging.WARNING, "fedclade"):
        log.warning("round %d: client %s", 3, "50 %")
    log.warning("after it")
    assert caplog.messages == ["reference alone: round 3: client 50 %", "after it"]
