from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedclade.core.errors import ConfigError, DataError
from fedclade.data import load_federation, load_pool

Write = Callable[..., Path]
Png = Callable[..., dict[str, Any]]


def grey(value: int, size: int = 28) -> np.ndarray:
    """A picture that is not the same when turned: one bright pixel at the top right."""
    picture = np.full((size, size), value)
    picture[0, -1] = 255
    return picture


def test_digits() -> None:
    pool = load_pool("digits")
    assert pool.x.shape == (1797, 1, 8, 8)
    assert str(pool.x.dtype) == "torch.uint8"
    assert (int(pool.x.min()), int(pool.x.max())) == (0, 255)
    assert (len(pool.train), len(pool.test)) == (1437, 360)
    assert sorted([*pool.train, *pool.test]) == list(range(1797))
    assert np.bincount(pool.groups[pool.test]).min() == 35, "stratified: 174 to 183 of each digit"
    inputs = pool.inputs(np.arange(1797))
    assert (float(inputs.mean()), float(inputs.std())) == pytest.approx((0, 1), abs=1e-3)
    assert (load_pool("digits", seed=7).train == pool.train).all()


def test_mnist_from_a_folder(write_parquet: Write, png: Png, tmp_path: Path) -> None:
    write_parquet(
        "mnist/train.parquet", {"image": [png(grey(v)) for v in (10, 20, 30)], "label": [1, 0, 9]}
    )
    write_parquet("mnist/test.parquet", {"image": [png(grey(40))], "label": [7]})
    pool = load_pool("mnist", data_dir=tmp_path / "data")
    assert pool.x.shape == (4, 1, 28, 28)
    assert pool.x[:, 0, 5, 5].tolist() == [10, 20, 30, 40]
    assert pool.x[:, 0, 0, -1].tolist() == [255] * 4
    assert pool.y.tolist() == pool.groups.tolist() == [1, 0, 9, 7]
    assert (pool.train.tolist(), pool.test.tolist(), pool.outputs) == ([0, 1, 2], [3], 10)
    assert pool.natural is None


def test_shards_are_read_in_order_and_the_folder_can_come_from_the_environment(
    write_parquet: Write, png: Png, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in (1, 0):
        columns = {"image": [png(grey(shard))], "label": [shard]}
        write_parquet(f"mnist/train-0000{shard}-of-00002.parquet", columns)
    write_parquet("mnist/test-00000-of-00001.parquet", {"image": [png(grey(2))], "label": [2]})
    monkeypatch.setenv("FEDCLADE_DATA_DIR", str(tmp_path / "data"))
    assert load_pool("mnist").y.tolist() == [0, 1, 2]


def test_cifar10_has_its_colours_first(write_parquet: Write, png: Png, tmp_path: Path) -> None:
    picture = np.zeros((32, 32, 3))
    picture[..., 0], picture[..., 1], picture[..., 2] = 1, 2, 3
    picture[0, 5] = 9  # in the first row
    for split in ("train", "test"):
        write_parquet(f"cifar10/{split}.parquet", {"img": [png(picture)], "label": [5]})
    pool = load_pool("cifar10", data_dir=tmp_path / "data")
    assert pool.x.shape == (2, 3, 32, 32)
    assert pool.x[0, :, 0, 0].tolist() == [1, 2, 3]
    assert pool.x[0, :, 0, 5].tolist() == [9, 9, 9]


def test_femnist_in_the_hubs_layout_has_writers_and_no_test_split(
    write_parquet: Write, png: Png, tmp_path: Path
) -> None:
    columns = {
        "image": [png(grey(1)), png(grey(2))],
        "writer_id": ["f01", "f00"],
        "character": [61, 0],
    }
    write_parquet("femnist/train.parquet", columns)
    pool = load_pool("femnist", data_dir=tmp_path / "data")
    assert pool.natural is not None
    assert pool.natural.tolist() == ["f01", "f00"]
    assert (pool.y.tolist(), pool.outputs, len(pool.test)) == ([61, 0], 62, 0)


@pytest.mark.parametrize(
    ("characters", "labels"), [("all", [61, 0, 36, 40, 35]), ("lowercase", [25, 0, 4])]
)
def test_femnist_with_small_letters_alone(
    characters: str, labels: list[int], write_parquet: Write, png: Png, tmp_path: Path
) -> None:
    columns = {
        "image": [png(grey(n)) for n in range(5)],
        "writer_id": [*"abcde"],
        "character": [61, 0, 36, 40, 35],
    }
    write_parquet("femnist/train.parquet", columns)
    pool = load_pool("femnist", data_dir=tmp_path / "data", characters=characters)
    assert pool.y[pool.train].tolist() == pool.groups[pool.train].tolist() == labels
    assert pool.outputs == (62 if characters == "all" else 26)
    if characters == "lowercase":
        assert pool.x[pool.train, 0, 0, 0].tolist() == [0, 2, 3]
        (client,) = load_federation(
            pool, clients=1, partition="power_law", partition_arguments={"min_samples": 1}
        ).clients
        assert {*client.train, *client.test} <= {0, 2, 3}, "nobody gets what is no small letter"


def test_femnist_with_other_characters_is_refused(
    write_parquet: Write, png: Png, tmp_path: Path
) -> None:
    write_parquet(
        "femnist/train.parquet", {"image": [png(grey(1))], "writer_id": ["a"], "character": [61]}
    )
    with pytest.raises(
        ConfigError, match=r"characters .*should be 'all' or 'lowercase', got 'upper'"
    ):
        load_pool("femnist", data_dir=tmp_path / "data", characters="upper")


def leaf(**users: tuple[list[Any], list[Any]]) -> dict[str, Any]:
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": data,
    }


def test_femnist_in_leafs_layout(write_json: Write, tmp_path: Path) -> None:
    row = [0.0] * 784
    row[1] = 1.0  # top row, second pixel
    write_json(
        "femnist/train/all_data_0.json", leaf(ann=([row, row], [3, 4]), bob=([[0.5] * 784], [61]))
    )
    write_json("femnist/test/all_data_0.json", leaf(ann=([row], [5])))
    pool = load_pool("femnist", data_dir=tmp_path / "data")
    assert pool.natural is not None
    assert pool.natural.tolist() == ["ann", "ann", "bob", "ann"]
    assert (pool.y.tolist(), pool.test.tolist()) == ([3, 4, 61, 5], [3])
    assert pool.x[0, 0, 0, :3].tolist() == [0, 255, 0]
    assert pool.x[2].unique().tolist() == [128]


def test_leaf_files_without_a_split_are_all_for_training(write_json: Write, tmp_path: Path) -> None:
    write_json("femnist/data.json", leaf(ann=([[0.0] * 784], [3])))
    pool = load_pool("femnist", data_dir=tmp_path / "data")
    assert (pool.train.tolist(), pool.test.tolist()) == ([0], [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"users": ["ann"]},
            "data.json should have the layout of LEAF JSON (users, user_data -> user -> x, y): KeyError('user_",
        ),
        ([1, 2], "data.json should have the layout of LEAF JSON"),
        (
            leaf(ann=([[0.0] * 784], [])),
            "user 'ann' should have as many inputs x as targets y, got 1 inputs and 0 targets",
        ),
        (leaf(ann=([[0.0] * 783], [1])), "x should have 784 numbers from 0 to 1 for each image"),
        (
            leaf(ann=([[0.0] * 784], [62])),
            "column 'y' should have whole numbers from 0 to 61, got 62 in row 0",
        ),
    ],
)
def test_bad_leaf_files(write_json: Write, tmp_path: Path, content: Any, message: str) -> None:
    write_json("femnist/data.json", content)
    with pytest.raises(DataError) as caught:
        load_pool("femnist", data_dir=tmp_path / "data")
    assert message in str(caught.value)
    assert str(tmp_path / "data" / "femnist") in str(caught.value)


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    file = tmp_path / "data" / "femnist" / "data.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with pytest.raises(DataError) as caught:
        load_pool("femnist", data_dir=tmp_path / "data")
    assert f"cannot read {file}, which should be LEAF JSON: Expecting" in str(caught.value)


@pytest.mark.parametrize(
    "cell", [{"bytes": b"no picture", "path": None}, {"bytes": None, "path": "x.png"}]
)
def test_an_image_that_cannot_be_decoded(
    write_parquet: Write, png: Png, tmp_path: Path, cell: Any
) -> None:
    file = write_parquet("mnist/train.parquet", {"image": [png(grey(1)), cell], "label": [1, 2]})
    write_parquet("mnist/test.parquet", {"image": [png(grey(1))], "label": [1]})
    with pytest.raises(DataError) as caught:
        load_pool("mnist", data_dir=tmp_path / "data")
    assert f"{file}: cannot decode column 'image' in row 1" in str(caught.value)


def test_an_image_of_another_size(write_parquet: Write, png: Png, tmp_path: Path) -> None:
    file = write_parquet(
        "mnist/train.parquet", {"image": [png(grey(1)), png(grey(1, 20))], "label": [1, 2]}
    )
    write_parquet("mnist/test.parquet", {"image": [png(grey(1))], "label": [1]})
    with pytest.raises(DataError) as caught:
        load_pool("mnist", data_dir=tmp_path / "data")
    assert (
        str(caught.value)
        == f"{file}: images in column 'image' should be 28×28 pixels, got 20×20 in row 1"
    )
