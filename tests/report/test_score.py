import math

import pytest

from fedclade.core.errors import ConfigError
from fedclade.report.formats import significant
from fedclade.report.score import Score, compared_by, in_common
from fedclade.tasks import Metric, metric

ACCURACY = Score(Metric("accuracy", True, True))
MAE = Score(Metric("mae", False))


@pytest.mark.parametrize(
    ("name", "label", "title"),
    [
        ("accuracy", "accuracy", "Accuracy"),
        ("mae", "MAE", "MAE"),
        ("f1", "F1", "F1"),
        ("average_precision", "average precision", "Average precision"),
        ("binary_auroc", "binary AUROC", "Binary AUROC"),
        ("[b]<i>%{x}|my_loss", "bixmy loss", "Bixmy loss"),
    ],
)
def test_a_metric_is_called_by_its_name(name, label, title):
    score = Score(Metric(name, True))
    assert (score.label, score.title) == (label, title)


def test_names_of_a_folder_cannot_lead_out_of_it():
    assert Score(Metric("../my metric", True)).file == "_my_metric"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        *(
            (0.03124, "0.0312"),
            (-12.345, "−12.3"),
            (12345.6, "12346"),
            (9.999, "10.0"),
            (0, "0.00"),
            (1, "1.00"),
        ),
        *((3e-7, "3e-07"), (-2.5e9, "−2.5e+09"), (math.inf, "inf"), (math.nan, "–"), (None, "–")),
    ],
)
def test_what_is_no_share_has_three_significant_digits(value, written):
    assert MAE.text(value) == significant(value) == written


def test_shares_are_in_per_cent():
    assert (ACCURACY.text(0.1234), ACCURACY.digits(0.1234), ACCURACY.heading) == (
        "12.3 %",
        "12.3",
        "accuracy, %",
    )
    assert (ACCURACY.text(math.nan), ACCURACY.digits(None), MAE.heading) == ("–", "–", "MAE")


@pytest.mark.parametrize(
    ("score", "now", "before", "told"),
    [
        (ACCURACY, [0.7, 0.8, 0.9], [0.5, 0.6, 0.71], ("+19.7 points [18.2, 21.1]", "good")),
        (ACCURACY, [0.5, 0.7], [0.5, 0.6], ("+5.0 points [−58.5, 68.5]", "")),
        (ACCURACY, [0.7], [0.5], ("+20.0 points", "")),
        (MAE, [0.25, 0.26], [0.5, 0.52], ("−0.255 [−0.319, −0.191]", "good")),
        (MAE, [0.5, 0.52], [0.25, 0.26], ("+0.255 [0.191, 0.319]", "bad")),
        (ACCURACY, [0.5], [0.5001], ("−0.0 points", "")),
        (MAE, [0.00003], [0.00001], ("+2e-05", "")),
        (MAE, [math.nan, 1.0], [1.0, 1.0], ("–", "")),
    ],
)
def test_a_difference_has_a_trend_only_if_its_interval_excludes_zero(score, now, before, told):
    found = score.compare(dict(enumerate(now)), dict(enumerate(before)))
    assert found == told


def test_clients_of_one_run_only_are_not_compared():
    assert ACCURACY.compare({1: 0.5}, {2: 0.5}) == ("", "")
    assert ACCURACY.compare({1: 0.5, 2: 0.9}, {2: 0.5}) == ("+40.0 points", "")


def test_runs_are_compared_by_the_first_metric_that_all_have():
    # as earlier versions wrote them
    text, labels = ({"perplexity": {}, "accuracy": {}}, {"accuracy": {}})
    noted = {"metrics": [metric("accuracy", "classification", 2).noted], "accuracy": {}}
    errors = {"metrics": [metric(name, "regression", 1).noted for name in ("mae", "rmse")]}
    assert [score.name for score in compared_by([text, text])] == ["perplexity", "accuracy"]
    assert [score.name for score in compared_by([text, labels])] == ["accuracy", "perplexity"]
    assert in_common([labels, noted]) == ACCURACY
    assert in_common([errors]) == MAE
    with pytest.raises(
        ConfigError, match="at least one metric in common, got runs with accuracy against mae, rmse"
    ):
        in_common([labels, errors])
