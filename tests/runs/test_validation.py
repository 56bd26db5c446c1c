"""Scores on validation data: what they choose, what they leave alone, and what they need."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedclade import ConfigError, LocalTraining, Run, load_federation, simulate
from fedclade.config import check_config
from fedclade.runs import chosen_round
from fedclade.tasks import Metric

ACCURACY, LOSS = Metric("accuracy", True), Metric("mae", False)
SPEC = LocalTraining(lr=0.3, batch_size=10)


@pytest.fixture(scope="module")
def federation():
    return load_federation("digits", clients=4, samples_per_client=40, validation_fraction=0.25)


def run_of(federation, rounds=4, **settings) -> Run:
    return simulate(
        "fedavg", "mclr", federation, local=SPEC, rounds=rounds, engine="loop", **settings
    )


def rows(metric: str, *scores) -> list[dict]:
    return [
        {
            "round": number,
            f"{metric}_mean": 0.5,
            **({} if score is None else {f"validation_{metric}": score}),
        }
        for number, score in enumerate(scores, start=1)
    ]


def test_the_first_of_the_best_rounds_is_chosen_in_the_metrics_direction():
    assert chosen_round(rows("accuracy", 0.1, 0.4, None, 0.4, 0.3), ACCURACY)["round"] == 2
    assert chosen_round(rows("mae", 3.0, math.nan, 1.0, 2.0), LOSS)["round"] == 3
    assert chosen_round(rows("accuracy", None, math.nan), ACCURACY) is None


def test_training_does_not_depend_on_it_and_the_summary_has_the_chosen_round(federation):
    plain, scored = run_of(federation), run_of(federation, evaluate_validation=True)
    assert plain.tree.nodes[0].model.equal(scored.tree.nodes[0].model)
    assert "chosen" not in plain.summary
    assert not any("validation" in key for row in plain.metric_rows for key in row)
    assert "evaluate_validation" not in plain.config
    by_round = {row["round"]: row for row in scored.metric_rows}
    best = max(by_round, key=lambda number: by_round[number]["validation_accuracy"])
    assert scored.summary["chosen"] == {
        "metric": "accuracy",
        "round": best,
        "validation": {"accuracy": by_round[best]["validation_accuracy"]},
        "test": {"accuracy": by_round[best]["accuracy_mean"]},
    }
    assert scored.summary["accuracy"] == plain.summary["accuracy"]


def test_scores_are_those_of_examples_that_are_not_trained_on(federation):
    run = run_of(federation, rounds=1, evaluate_validation=True)
    model = run.tree.nodes[0].model
    weight, bias = model[: 64 * 10].view(10, -1), model[64 * 10 :]
    shares = []
    for client in federation.clients:
        assert not set(client.validation) & (set(client.train) | set(client.test))
        inputs, targets = federation.examples(client.id, "validation")
        shares.append(
            float(((inputs.flatten(1) @ weight.T + bias).argmax(1) == targets).double().mean())
        )
    assert run.metric_rows[0]["validation_accuracy"] == pytest.approx(np.mean(shares))


def test_a_run_that_is_continued_chooses_as_if_it_had_not_been(federation, tmp_path):
    whole = run_of(federation, evaluate_validation=True, evaluate_every=2)
    run_of(federation, 2, evaluate_validation=True, evaluate_every=2, folder=tmp_path / "run")
    run_of(federation, evaluate_validation=True, evaluate_every=2, folder=tmp_path / "run")
    again = Run.load(tmp_path / "run")
    assert again.summary["chosen"] == whole.summary["chosen"]
    assert again.config["evaluate_validation"] is True


def test_without_validation_data_it_cannot_be():
    with pytest.raises(
        ConfigError,
        match=r"evaluate_validation = true needs validation data .* set data.validation_fr",
    ):
        run_of(
            load_federation("digits", clients=2, samples_per_client=20), evaluate_validation=True
        )


def test_a_config_says_it_only_where_it_is_so():
    # so that runs of earlier versions can be continued
    assert "evaluate_validation" not in check_config({}).as_dict()
    config = check_config({"evaluate_validation": True})
    assert config.as_dict()["evaluate_validation"] is True
    assert config.settings.evaluate_validation
