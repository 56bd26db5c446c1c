from __future__ import annotations

from fedclade.config import check_config
from fedclade.trackers import TAGS, numbers_of, scores
from fedclade.trackers.tracker import MOST_SIZES
from tests.trackers.runs import round_record


def test_the_tags_are_columns_of_a_run():
    config = check_config(
        {"rounds": 1, "data": {"name": "digits", "clients": 2, "samples_per_client": 30}}
    )
    (row,) = config.run(config.federation()).metric_rows
    assert set(TAGS.values()) <= set(row)
    assert scores(row) == {
        "accuracy/mean": "accuracy_mean",
        "accuracy/worst tenth": "accuracy_worst10_mean",
        "accuracy/10th percentile": "accuracy_p10",
        "accuracy/weighted": "accuracy_weighted",
    }
    assert set(scores(row).values()) <= set(row)


def test_of_many_clusters_the_sizes_of_the_largest_and_the_smallest_are_written():
    numbers = numbers_of(round_record(1, None, (3, *[1] * MOST_SIZES)))
    assert numbers == {"clusters/found": 21.0, "clusters/largest": 3.0, "clusters/smallest": 1.0}
