from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from fedclade.core.errors import DataError, MissingExtraError
from fedclade.data.tables import FolderTables, HubTables, open_tables, to_labels, to_texts

Write = Callable[..., Path]


def test_missing_folder_names_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        FolderTables(tmp_path / "mnist").read("train", ["image", "label"])
    assert str(caught.value) == (
        f"no data in {tmp_path / 'mnist'}: expected the file "
        f"{tmp_path / 'mnist' / 'train.parquet'} or shards train-*.parquet (columns image, label); "
        "check --data-dir / FEDCLADE_DATA_DIR"
    )


def test_the_key_of_a_folder_changes_with_its_files(write_parquet: Write) -> None:
    file = write_parquet("it/train.parquet", {"label": [1]})
    tables = FolderTables(file.parent)
    first = tables.key
    assert tables.key == first
    write_parquet("it/test.parquet", {"label": [1]})
    second = tables.key
    write_parquet("it/test.parquet", {"label": [1, 2, 3]})
    assert len({str(first), str(second), str(tables.key)}) == 3


def test_corrupt_file(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    file.write_bytes(b"PAR1 this is not parquet")
    with pytest.raises(DataError) as caught:
        FolderTables(tmp_path).read("train", ["label"])
    assert f"cannot read {file}, which should be a parquet file: " in str(caught.value)


def test_missing_column(write_parquet: Write) -> None:
    file = write_parquet("it/train.parquet", {"img": [1], "label": [2]})
    with pytest.raises(DataError) as caught:
        FolderTables(file.parent).read("train", ["label", "image"])
    assert str(caught.value) == f"{file} should have a column 'image', got the columns img, label"


def test_no_rows(write_parquet: Write) -> None:
    file = write_parquet("it/train.parquet", {"label": []})
    with pytest.raises(DataError) as caught:
        FolderTables(file.parent).read("train", ["label"])
    assert str(caught.value) == f"{file} should have at least 1 row, got none"


@pytest.mark.parametrize("value", [10, -1, None, 1.5, "3"])
def test_labels_out_of_range(value: Any) -> None:
    with pytest.raises(DataError) as caught:
        to_labels([0, value], 10, "file", "label")
    assert (
        str(caught.value)
        == f"file: column 'label' should have whole numbers from 0 to 9, got {value!r} in row 1"
    )


def test_texts_that_are_missing() -> None:
    with pytest.raises(DataError, match="file: column 'text' should have texts, got None in row 1"):
        to_texts(["a", None], "file", "text")


def test_hub_without_a_data_folder() -> None:
    assert open_tables("mnist", None) == HubTables("ylecun/mnist")
    assert open_tables("sent140", None) == HubTables(
        "stanfordnlp/sentiment140", "refs/convert/parquet"
    )
    assert open_tables("mnist", Path("there")) == FolderTables(Path("there/mnist"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """A Hub with one data set; returns what was asked of it."""
    asked: list[tuple[str, str | None]] = []
    content = datasets.DatasetDict(
        {"train": datasets.Dataset.from_dict({"label": [3, 1], "text": ["a", "b"]})}
    )

    def load_dataset(name: str, revision: str | None = None) -> datasets.DatasetDict:
        asked.append((name, revision))
        return content

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_hub_is_asked_once(hub: list[tuple[str, str | None]]) -> None:
    tables = HubTables("a/b", "branch")
    assert (tables.has("train"), tables.has("test")) == (True, False)
    assert tables.read("train", ["label"]) == {"label": [3, 1]}
    assert hub == [("a/b", "branch")]
    assert tables.key == ["a/b", "branch"]


def test_hub_without_that_split_or_column(hub: list[tuple[str, str | None]]) -> None:
    with pytest.raises(
        DataError, match="Hub data set a/b should have a split 'test', got the splits train"
    ):
        HubTables("a/b").read("test", ["label"])
    with pytest.raises(
        DataError,
        match=r"Hub data set a/b \(train\) should have a column 'image', got the columns label, text",
    ):
        HubTables("a/b").read("train", ["image"])


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, revision: str | None = None) -> None:
        raise ConnectionError("no route\nand many more lines")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError) as caught:
        HubTables("a/b").has("train")
    assert str(caught.value) == (
        "cannot load a/b from the Hugging Face Hub (ConnectionError: no route); set a folder "
        "with the data by --data-dir or FEDCLADE_DATA_DIR, or use the bundled data set "
        "'digits'"
    )


def test_hub_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(
        MissingExtraError, match="loading a/b from the Hub needs the package 'datasets'"
    ):
        HubTables("a/b").has("train")
