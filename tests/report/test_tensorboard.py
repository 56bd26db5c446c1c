import sys
from pathlib import Path

import pytest
import torch

from fedclade.core.errors import MissingExtraError
from fedclade.core.tree import ParameterTree
from fedclade.report.tensorboard import TAGS, TensorBoardLog, scores

TREE = ParameterTree.root_only(range(2), torch.zeros(1))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, round(e.value, 5)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def row(number: int, **numbers: float | None) -> dict:
    return {"round": number, "phase": "", "clusters": 2, **numbers}


def test_every_number_of_a_round_is_a_scalar(tmp_path: Path):
    log = TensorBoardLog(tmp_path)
    assert list(tmp_path.iterdir()) == [], "before the first round the run has no folder"
    log(row(1, accuracy_mean=0.5, ari=None, bytes_up=7), TREE)
    log(row(2, accuracy_mean=0.75, ari=1.0, bytes_up=7), TREE)
    log.close()
    assert scalars(tmp_path) == {
        "accuracy/mean": [(1, 0.5), (2, 0.75)],
        "clusters/found": [(1, 2), (2, 2)],
        "clusters/ARI": [(2, 1)],
        "traffic/bytes up": [(1, 7), (2, 7)],
    }


def test_a_run_that_is_continued_replaces_what_it_does_again(tmp_path: Path):
    first, second = TensorBoardLog(tmp_path), TensorBoardLog(tmp_path)
    for number in (1, 2, 3):
        first(row(number, accuracy_mean=0.1), TREE)
    first.close()
    for number in (3, 4):
        second(row(number, accuracy_mean=0.9), TREE)
    second.close()
    assert scalars(tmp_path)["accuracy/mean"] == [(1, 0.1), (2, 0.1), (3, 0.9), (4, 0.9)]


def test_a_log_of_no_rounds_leaves_nothing(tmp_path: Path):
    TensorBoardLog(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_the_tags_are_columns_of_a_run():
    from fedclade.config import check_config

    config = check_config({"rounds": 1, "data": {"name": "digits", "clients": 2, "samples_per_client": 30}})
    (row,) = config.run(config.federation()).metric_rows
    assert set(TAGS.values()) <= set(row)
    assert scores(row) == {
        "accuracy/mean": "accuracy_mean",
        "accuracy/worst tenth": "accuracy_worst10_mean",
        "accuracy/10th percentile": "accuracy_p10",
        "accuracy/weighted": "accuracy_weighted",
    }
    assert set(scores(row).values()) <= set(row)


def test_without_tensorboard_the_log_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"--log tensorboard needs .*'tensorboard'.*fedclade\[tensorboard\]"):
        TensorBoardLog(tmp_path)
