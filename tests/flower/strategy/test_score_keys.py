"""Which of a ClientApp's metrics is the score, and which the loss."""

from __future__ import annotations

from typing import Any

import pytest

from fedclade import ConfigError
from fedclade.core import UpdateError
from fedclade.flower.strategy.score_keys import ScoreKeys, find_train_loss


def find(*names: str, **given: Any) -> ScoreKeys:
    metrics = {**dict.fromkeys(names, 0.5), "num-examples": 7, "each": [1.0, 2.0]}
    return ScoreKeys.find(metrics, "num-examples", **given)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("eval_loss", "eval_acc"), ScoreKeys("eval_acc", "eval_loss", True)),
        (("accuracy",), ScoreKeys("accuracy", None, True)),
        (("loss",), ScoreKeys("loss", "loss", False)),
        (("rmse",), ScoreKeys("rmse", None, False)),
        (("test_logloss", "accuracy", "seconds"), ScoreKeys("accuracy", "test_logloss", True)),
    ],
)
def test_score_and_loss_are_found(names: tuple[str, ...], expected: ScoreKeys):
    assert find(*names) == expected


def test_given_names_come_first():
    keys = find("a", "b", "loss", score="b", loss="a", higher_is_better=False)
    assert keys == ScoreKeys("b", "a", False)
    assert keys.metric.name == "b"


def test_what_is_ambiguous_or_missing_is_named():
    with pytest.raises(
        ConfigError, match=r"may be the score: \['f1', 'acc'\]; name one as score_k"
    ):
        find("loss", "f1", "acc")
    with pytest.raises(
        ConfigError, match=r"may be the loss: \['a_loss', 'b_loss'\]; name one as l"
    ):
        find("a_loss", "b_loss", "acc")
    with pytest.raises(ConfigError, match=r"score_key = 'x' is not among .*: \['acc'\]"):
        find("acc", score="x")
    with pytest.raises(ConfigError, match=r"no metric that can be their score .*'num-examples'"):
        find()
    keys = find("loss", "acc")
    with pytest.raises(UpdateError, match=r"should have the metric 'loss' as a number, got"):
        keys.read({"acc": 0.5})


def test_the_training_loss_is_the_only_loss():
    assert find_train_loss({"train_loss": 0.25, "acc": 1.0}) == 0.25
    assert find_train_loss({"loss_a": 0.25, "loss_b": 1.0}) is None
    assert find_train_loss({"acc": 1.0}) is None
