"""Runs that finish before their last round: by a callback, by early stopping, by hand; and the round that they keep."""

from __future__ import annotations

import json
import math
import re

import pytest

import fedclade
from fedclade import (
    CFL,
    FINISH,
    Callback,
    CheckpointError,
    ConfigError,
    EarlyStopping,
    LocalTraining,
    Run,
    RunInterrupted,
    assign,
    export_model,
    simulate,
)
from fedclade.config import check_config
from fedclade.runs import rounds as rounds_module
from fedclade.tasks import Metric
from tests.properties.test_resume import bytes_of
from tests.tiny import federation_of, linear, perceptron

ACCURACY, LOSS = Metric("accuracy", True), Metric("loss", False)
FEDERATION = federation_of([0, 1, 0, 1])
SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)


def run_of(algorithm="fedavg", federation=FEDERATION, **settings) -> Run:
    settings = {"local": SPEC, "rounds": 6, "engine": "loop"} | settings
    return simulate(algorithm, linear(), federation, **settings)


class At(Callback):
    """Answers after one round."""

    def __init__(self, number: int, answer: object) -> None:
        self.number, self.answer, self.ends = number, answer, []

    def on_round(self, record, /):
        return self.answer if record.round == self.number else None

    def on_end(self, record, /):
        self.ends.append(record.reason)


def rows_of(*scores, metric: str = "accuracy") -> list[dict]:
    return [
        {"round": number, f"validation_{metric}": score}
        for number, score in enumerate(scores, start=1)
    ]


def scripted(monkeypatch: pytest.MonkeyPatch, *scores: float | None) -> None:
    """Let the mean accuracy on validation data be what a script says, round by round."""
    run_round = rounds_module.run_round

    def scripted_round(algorithm, backend, clients, training, settings, number):
        row, events = run_round(algorithm, backend, clients, training, settings, number)
        if "validation_accuracy" in row:
            row["validation_accuracy"] = scores[number - 1]
        return row, events

    monkeypatch.setattr(rounds_module, "run_round", scripted_round)


# What a callback returns


def test_a_callback_that_returns_finish_finishes_the_run(tmp_path):
    callback = At(2, FINISH)
    run = run_of(callbacks=[callback], folder=tmp_path / "run")
    assert callback.ends == ["finished"]
    assert run.summary["rounds"] == 2
    assert run.summary["stopped"] == {"round": 2, "by": "At", "why": "on_round returned FINISH"}
    assert Run.load(tmp_path / "run").summary == run.summary
    assert run_of(callbacks=[callback], folder=tmp_path / "run").summary == run.summary, (
        "the same call reads it"
    )
    assert repr(FINISH) == "fedclade.FINISH"


def test_all_that_can_be_done_with_a_finished_run_can_be_done_with_one_that_finished_early(
    tmp_path,
):
    federation = federation_of([0, 1, 0, 1, 0, 1])
    run_of(
        CFL(eps2=1e-3, split_rounds=(2,)),
        federation,
        callbacks=[At(3, FINISH)],
        folder=tmp_path / "run",
    )
    run = Run.load(tmp_path / "run")
    assert len(run.tree.leaves) == 2
    assert export_model(run, tmp_path / "m.safetensors", client=1).exists()
    assert json.loads((tmp_path / "m.json").read_text())["rounds"]["trained_until"] == 3
    newcomers = federation_of([0, 1], seed=0)
    assert len(assign(run, newcomers, model=linear()).rows) == 2


@pytest.mark.parametrize("kind", ["on_round", "stop"])
def test_functions_in_place_of_a_callback_can_finish_a_run_too(kind):
    seen = []

    def function(*_):
        seen.append(1)
        return FINISH if len(seen) == 2 else None

    run = run_of(**{kind: function})
    assert run.summary["stopped"] == {"round": 2, "by": kind, "why": "on_round returned FINISH"}


def test_to_interrupt_a_run_stays_as_it_was_and_finishing_wins(tmp_path):
    with pytest.raises(
        RunInterrupted, match="interrupted after round 2; the same call continues from"
    ):
        run_of(callbacks=[At(2, True)], folder=tmp_path / "run")
    with pytest.raises(
        fedclade.RunError, match=re.escape("is unfinished; continue with: fedclade resume")
    ):
        Run.load(tmp_path / "run")
    run = run_of(callbacks=[At(4, True), At(4, FINISH)], folder=tmp_path / "run")
    assert run.summary["stopped"]["round"] == 4


def test_after_the_last_round_there_is_nothing_to_finish():
    assert "stopped" not in run_of(rounds=2, callbacks=[At(2, FINISH)]).summary


def test_a_run_that_was_killed_when_a_callback_had_finished_it_ends_there(tmp_path, monkeypatch):
    """Its checkpoint says so: the callback, which is not asked again, would let it go on."""
    with monkeypatch.context() as patched:
        patched.setattr(Run, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_of(callbacks=[At(2, FINISH)], folder=tmp_path / "run", checkpoint_every=1)
    run = run_of(folder=tmp_path / "run", checkpoint_every=1)
    assert run.summary["stopped"] == {"round": 2, "by": "At", "why": "on_round returned FINISH"}
    longer = run_of(rounds=8, folder=tmp_path / "run", checkpoint_every=1)
    assert (longer.summary["rounds"], "stopped" in longer.summary) == (8, False), (
        "more rounds were asked for"
    )


# Finishing by hand


@pytest.mark.parametrize("every", [1, 4])
def test_an_interrupted_run_is_finished_where_it_stands(tmp_path, every):
    """Evaluated after its last round, also if that was none to evaluate."""
    with pytest.raises(RunInterrupted):
        run_of(callbacks=[At(3, True)], folder=tmp_path / "run", evaluate_every=every)
    run = run_of(folder=tmp_path / "run", evaluate_every=every, finish=True)
    short = run_of(rounds=3, evaluate_every=every)
    assert run.summary["stopped"] == {
        "round": 3,
        "by": "user",
        "why": "finished by hand after an interruption",
    }
    assert run.summary["rounds"] == 3
    for name in ("accuracy", "clusters", "bytes_up", "bytes_down"):
        assert run.summary[name] == short.summary[name]
    assert list(run.client_rows) == list(short.client_rows)
    assert run.tree.nodes[0].model.equal(short.tree.nodes[0].model)
    timeless = [
        [{k: v for k, v in row.items() if "seconds" not in k} for row in r.metric_rows]
        for r in (run, short)
    ]
    assert timeless[0] == timeless[1]
    assert run_of(folder=tmp_path / "run", evaluate_every=every, finish=True).summary == run.summary
    assert run_of(folder=tmp_path / "run", evaluate_every=every, rounds=7).summary["rounds"] == 7


def test_only_a_run_in_a_folder_that_has_a_round_can_be_finished(tmp_path):
    with pytest.raises(
        ConfigError, match=r"finish = True finishes the unfinished run .* as folder="
    ):
        run_of(finish=True)
    with pytest.raises(
        CheckpointError,
        match=re.escape(f"the run in {tmp_path / 'run'} cannot be finished, since the folder"),
    ):
        run_of(finish=True, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Early stopping


@pytest.mark.parametrize(
    ("stopping", "scores", "why"),
    [
        (EarlyStopping(patience=2), [0.5, 0.6, 0.6], None),
        (
            EarlyStopping(patience=2),
            [0.5, 0.6, 0.6, 0.5],
            "has not improved in 2 evaluations, since round 2",
        ),
        (EarlyStopping(patience=1), [0.5, 0.6, 0.7], None),
        (EarlyStopping(patience=1), [0.5], None),
        (
            EarlyStopping(patience=2),
            [0.5, math.nan, None],
            "has not improved in 2 evaluations, since round 1",
        ),
        (EarlyStopping(patience=2), [math.nan, None], "has not improved in 2 evaluations, at all"),
        (EarlyStopping(patience=2), [math.nan, None, 0.1], None),
        (EarlyStopping(patience=2, min_delta=0.1), [0.5, 0.55, 0.61], None),
        (
            EarlyStopping(patience=2, min_delta=0.1),
            [0.5, 0.55, 0.6],
            "in 2 evaluations, since round 1",
        ),
        (EarlyStopping(patience=2, start_round=3), [0.9, 0.1, 0.2, 0.1], None),
        (
            EarlyStopping(patience=2, start_round=3),
            [0.9, 0.1, 0.2, 0.1, 0.2],
            "in 2 evaluations, since round 3",
        ),
    ],
    ids=str,
)
def test_it_stops_after_so_many_evaluations_without_an_improvement(stopping, scores, why):
    found = stopping.reason_in(rows_of(*scores), ACCURACY)
    assert (found is None) if why is None else (found is not None and found.endswith(why))


def test_it_goes_by_the_metric_s_direction_and_does_not_count_rounds_that_were_not_evaluated():
    rows = rows_of(2.0, 1.0, 1.5, metric="loss")
    assert EarlyStopping("loss", 1).reason_in(rows, LOSS) == (
        "validation_loss has not improved in 1 evaluations, since round 2"
    )
    assert EarlyStopping("loss", 1).reason_in(rows[:2], LOSS) is None
    assert EarlyStopping("loss", 2).reason_in([*rows, {"round": 4}, {"round": 5}], LOSS) is None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"patience": 0}, "stop.patience should be at least 1, got 0"),
        ({"min_delta": -0.1}, "stop.min_delta should be at least 0, and finite, got -0.1"),
        ({"min_delta": math.nan}, "stop.min_delta should be at least 0, and finite, got nan"),
        ({"start_round": 0}, "stop.start_round should be at least 1, got 0"),
        ({"patience": "ten"}, "patience"),
    ],
)
def test_a_value_out_of_range_is_refused(settings, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        EarlyStopping(**settings)


@pytest.mark.parametrize("way", ["callback", "setting"])
def test_a_run_stops_early_by_validation_data_and_says_why(monkeypatch, way):
    scripted(monkeypatch, 0.1, 0.4, 0.3, 0.4, 0.9, 0.9)
    stopping = EarlyStopping("accuracy", 2)
    run = run_of(
        **({"callbacks": [stopping]} if way == "callback" else {"early_stopping": stopping})
    )
    assert run.summary["rounds"] == 4
    assert run.summary["stopped"] == {
        "round": 4,
        "by": "EarlyStopping",
        "why": "validation_accuracy has not improved in 2 evaluations, since round 2",
    }
    assert run.summary["chosen"]["round"] == 2
    assert run.config["stop"] == {
        "metric": "accuracy",
        "patience": 2,
        "min_delta": 0.0,
        "start_round": 1,
    }
    assert "keep_best" not in run.config


def test_test_data_have_no_part_in_it(monkeypatch):
    """Scores on test data rise in every round."""
    numbers = iter(range(1, 100))
    columns = rounds_module.History._evaluation_columns

    def rising(self, evaluation):
        return columns(self, evaluation) | {"accuracy_mean": next(numbers) / 100}

    monkeypatch.setattr(rounds_module.History, "_evaluation_columns", rising)
    scripted(monkeypatch, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
    run = run_of(callbacks=[EarlyStopping(patience=2)])
    assert [row["accuracy_mean"] for row in run.metric_rows] == [0.01, 0.02, 0.03]


def test_clients_without_validation_data_or_an_unknown_metric_are_refused_before_the_first_round(
    tmp_path,
):
    bare = federation_of([0, 1], validation=0)
    folder = {"folder": tmp_path / "run"}
    with pytest.raises(
        ConfigError,
        match=r"stop.patience = 3 needs validation data of every client, but no client has",
    ):
        run_of(federation=bare, callbacks=[EarlyStopping(patience=3)], **folder)
    with pytest.raises(
        ConfigError,
        match=r"keep_best = true needs validation data of every client, .*set\s+data\.val",
    ):
        run_of(federation=bare, keep_best=True, **folder)
    with pytest.raises(
        ConfigError,
        match=r"unknown metric: stop.metric = 'acuracy'; did you mean 'accuracy'\? .*loss",
    ):
        run_of(callbacks=[EarlyStopping("acuracy")], **folder)
    text = r"a run can have only one EarlyStopping .*section \[stop\] .*, got \[EarlyStopping\(.*patience=1.*patience=2"
    with pytest.raises(ConfigError, match=text):
        run_of(
            callbacks=[EarlyStopping(patience=2)],
            early_stopping=EarlyStopping(patience=1),
            **folder,
        )
    with pytest.raises(ConfigError, match=text):
        run_of(callbacks=[EarlyStopping(patience=1), EarlyStopping(patience=2)], **folder)
    assert not (tmp_path / "run").exists()


class Wrapped(Callback):
    """A callback of a user's own that asks early stopping, which the run does not know of."""

    def on_round(self, record, /):
        return EarlyStopping(patience=1).on_round(record)


def test_inside_of_another_callback_it_says_what_it_needs(monkeypatch):
    text = r"round 1: EarlyStopping needs scores on validation data, but no client has any; set evaluate_valid"
    with pytest.raises(ConfigError, match=text):
        run_of(callbacks=[Wrapped()])
    scripted(monkeypatch, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
    assert run_of(callbacks=[Wrapped()], evaluate_validation=True).summary["stopped"]["round"] == 2


@pytest.mark.parametrize("stops", [1, 2, 3])
def test_a_run_that_is_continued_stops_in_the_same_round_with_the_same_bytes(
    tmp_path, monkeypatch, stops
):
    scripted(monkeypatch, 0.1, 0.4, 0.3, 0.4, 0.9, 0.9)
    settings = {"early_stopping": EarlyStopping(patience=2), "keep_best": True}
    settings["algorithm"] = CFL(eps2=1e-3, split_rounds=(1, 3))
    run_of(folder=tmp_path / "whole", **settings)
    for number in range(1, stops + 1):
        with pytest.raises(RunInterrupted):
            run_of(folder=tmp_path / "cut", callbacks=[At(number, True)], **settings)
    run = run_of(folder=tmp_path / "cut", **settings)
    assert (run.summary["stopped"]["round"], run.model_round) == (4, 2)
    whole, cut = bytes_of(tmp_path / "whole"), bytes_of(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert [name for name in whole if whole[name] != cut[name]] == []


def test_more_rounds_change_nothing_of_a_run_that_has_stopped_early(tmp_path, monkeypatch):
    """As a run that was given them from the start would have stopped there too."""
    scripted(monkeypatch, 0.1, 0.4, 0.3, 0.4, 0.9, 0.9, 0.9, 0.9)
    stopping = {"early_stopping": EarlyStopping(patience=2), "checkpoint_every": 1}
    run = run_of(folder=tmp_path / "run", **stopping)
    longer = run_of(folder=tmp_path / "run", rounds=8, **stopping)
    assert longer.summary["stopped"] == run.summary["stopped"]
    assert longer.tree.nodes[0].model.equal(run.tree.nodes[0].model)
    other = {**stopping, "early_stopping": EarlyStopping(patience=3)}
    with pytest.raises(
        fedclade.RunError,
        match=r"contains a run with another config: its stop.patience is 2, not 3",
    ):
        run_of(folder=tmp_path / "run", rounds=8, **other)


# The round that is kept


@pytest.fixture
def kept(monkeypatch, tmp_path) -> Run:
    """A run that splits in rounds 1 and 3, of which the second is the best."""
    scripted(monkeypatch, 0.1, 0.4, 0.3, 0.4, 0.2, 0.1)
    federation = federation_of([0, 1, 2, 3] * 2)
    run_of(CFL(eps2=1e-3, split_rounds=(1, 3)), federation, keep_best=True, folder=tmp_path / "run")
    return Run.load(tmp_path / "run")


def test_the_models_are_those_of_the_best_round_and_the_summary_has_both_rounds(kept, monkeypatch):
    run = kept
    monkeypatch.undo()
    federation = federation_of([0, 1, 2, 3] * 2)
    best = run_of(CFL(eps2=1e-3, split_rounds=(1, 3)), federation, rounds=2)
    last = run_of(CFL(eps2=1e-3, split_rounds=(1, 3)), federation)
    assert len(run.tree.nodes) == len(best.tree.nodes) < len(last.tree.nodes)
    assert all(a.model.equal(b.model) for a, b in zip(run.tree.nodes, best.tree.nodes, strict=True))
    assert (run.model_round, run.summary["rounds"], len(run.metric_rows)) == (2, 6, 6)
    assert run.summary["accuracy"] == best.summary["accuracy"]
    assert run.summary["clusters"] == best.summary["clusters"]
    assert run.summary["bytes_up"] == last.summary["bytes_up"]
    assert run.summary["chosen"] == {
        "metric": "accuracy",
        "round": 2,
        "validation": {"accuracy": 0.4},
        "test": {"accuracy": best.summary["accuracy"]["mean"]},
        "kept": True,
    }
    assert run.summary["last"] == {
        "round": 6,
        "validation": {"accuracy": 0.1},
        "test": {"accuracy": last.summary["accuracy"]["mean"]},
    }
    assert (
        max(row["round"] for row in run.client_rows)
        == max(row["round"] for row in run.cluster_rows)
        == 2
    )
    assert last.model_round == 6


def test_it_is_exported_and_used_for_newcomers(kept, tmp_path):
    leaf = kept.tree.node_for(1)
    export_model(kept, tmp_path / "m.safetensors", client=1)
    card = json.loads((tmp_path / "m.json").read_text())
    assert card["node"] == leaf.id
    assert card["rounds"] == {"run": 6, "born": 1, "trained_until": 2}
    assert card["accuracy"]["round"] == 2
    newcomers = assign(kept, federation_of([0, 1]), model=linear())
    assert newcomers.rounds_alone == 2
    assert all(row["node"] < len(kept.tree.nodes) for row in newcomers.rows)


def test_it_is_chosen_by_the_metric_of_early_stopping(monkeypatch):
    run = run_of(early_stopping=EarlyStopping("loss", 6), keep_best=True)
    losses = [row["validation_loss"] for row in run.metric_rows]
    best = losses.index(min(losses)) + 1
    assert run.model_round == run.summary["chosen"]["round"] == best
    assert run.summary["chosen"]["metric"] == "loss"
    assert run.summary["chosen"]["validation"]["loss"] == min(losses)


def test_without_any_score_the_last_round_is_kept_with_a_warning(monkeypatch, caplog):
    scripted(monkeypatch, math.nan, None)
    run = run_of(rounds=2, keep_best=True)
    assert run.model_round == 2
    assert "chosen" not in run.summary
    assert (
        "keep_best = true: no round has a finite score on validation data, so the models of the last round are stored"
        in caplog.text
    )


def test_a_best_round_that_is_the_last_is_a_run_as_any(monkeypatch):
    scripted(monkeypatch, 0.1, 0.2)
    run, plain = run_of(rounds=2, keep_best=True), run_of(rounds=2)
    assert (run.model_round, run.summary["last"]["round"]) == (2, 2)
    assert list(run.client_rows) == list(plain.client_rows)
    assert run.tree.nodes[0].model.equal(plain.tree.nodes[0].model)


@pytest.mark.parametrize("engine", ["loop", "stacked", "workers"])
def test_every_engine_keeps_what_clients_keep_of_that_round(monkeypatch, engine):
    scripted(monkeypatch, 0.1, 0.4, 0.3)
    settings = {"local": SPEC, "engine": engine}
    best = simulate("ditto", perceptron(), FEDERATION, rounds=3, keep_best=True, **settings)
    short = simulate("ditto", perceptron(), FEDERATION, rounds=2, **settings)
    assert best.kept.keys() == short.kept.keys() == {0, 1, 2, 3}
    assert all(
        best.kept[client]["model"].equal(short.kept[client]["model"]) for client in best.kept
    )
    assert best.summary["own_models"] == 4
    settings["personal"] = "head"
    best = simulate("fedavg", perceptron(), FEDERATION, rounds=3, keep_best=True, **settings)
    short = simulate("fedavg", perceptron(), FEDERATION, rounds=2, **settings)
    assert best.kept.keys() == short.kept.keys() == {0, 1, 2, 3}
    assert all(
        best.kept[client]["personal"].equal(short.kept[client]["personal"]) for client in best.kept
    )


# In a config


CONFIG = {
    "rounds": 6,
    "data": {"name": "digits", "clients": 2, "samples_per_client": 30, "validation_fraction": 0.3},
}


def test_a_config_has_a_section_for_it():
    config = check_config(
        {**CONFIG, "keep_best": True, "stop": {"patience": 2, "metric": "loss", "min_delta": 1}}
    )
    assert config.settings.early_stopping == EarlyStopping("loss", 2, 1.0)
    assert config.settings.keep_best
    noted = config.as_dict()
    assert noted["keep_best"] is True
    assert check_config(noted) == config
    plain = check_config(CONFIG)
    assert plain.settings.early_stopping is None
    assert not {"stop", "keep_best"} & plain.as_dict().keys(), (
        "so that runs of earlier versions can be continued"
    )


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"patience": 0}, "stop.patience should be at least 1, got 0"),
        (
            {"metric": "loss"},
            "stop.patience should be a number of evaluations if other keys of [stop] are set, got None",
        ),
        ({"patience": "2"}, "[stop]"),
        ({"patiense": 2}, "unknown key of [stop]: 'patiense'; did you mean 'patience'?"),
    ],
)
def test_a_wrong_section_is_refused(section, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_config({**CONFIG, "stop": section})


def test_a_run_of_a_config_stops_early_and_is_noted_so_that_it_can_be_run_again(
    monkeypatch, tmp_path
):
    scripted(monkeypatch, 0.1, 0.4, 0.3, 0.2, 0.1, 0.0)
    config = check_config(
        {**CONFIG, "keep_best": True, "model": {"name": "mclr"}, "stop": {"patience": 1}}
    )
    config.run(config.federation(), folder=tmp_path / "run")
    run = Run.load(tmp_path / "run")
    assert (run.summary["stopped"]["round"], run.model_round) == (3, 2)
    assert check_config(run.config).settings.early_stopping == EarlyStopping(patience=1)
    assert check_config(run.config).settings.keep_best
