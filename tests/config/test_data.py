"""The ``[data]`` section where clients have data of their own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import csv
from pyarrow import parquet as pq
from torch.utils.data import TensorDataset

from fedclade import ConfigError, DataError, FedcladeError, Federation, Pool, federation
from fedclade.config import check_config, read_config, read_scenario, settings
from fedclade.core import installed

ROWS = "age,ward,back\n" + "".join(
    f"{30 + k}.5,{'ab'[k % 2]},{'yes' if k % 3 else 'no'}\n" for k in range(10)
)


def part(n: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(n, 3), torch.arange(n) % 2


def two_clients() -> dict[str, Any]:
    return {"a": part(), "b": (part(), part(4))}


def some_clients(clients: int, seed: int, data_dir: Any, *, width: int = 10) -> dict[str, Any]:
    assert (seed, str(data_dir)) == (7, "here")
    return {f"client {k}": part(width) for k in range(clients)}


def with_own_test(test: str = "random", stratify: str = "some") -> dict[str, Any]:
    assert (test, stratify) == ("random", "none")
    return two_clients()


def finished(newcomers: int = 0) -> Federation:
    return federation(two_clients(), newcomers=newcomers)


def pool() -> Pool:
    x, y = part(40)
    return Pool.of_examples("forty", x, y, np.arange(40), np.arange(0))


def bytes_of_tables() -> dict[str, Any]:
    x, y = part(20)
    return {"a": ((9 * x).to(torch.uint8), y)}


def pool_of_bytes() -> Pool:
    x, y = part(40)
    return Pool.of_examples("forty", (9 * x).to(torch.uint8), y, np.arange(40), np.arange(0))


def dataset_of_bytes() -> TensorDataset:
    x, y = part(40)
    return TensorDataset((9 * x).to(torch.uint8), y)


def dataset() -> TensorDataset:
    return TensorDataset(*part(40))


def fails() -> None:
    raise ValueError("no such bucket")


def seven() -> int:
    return 7


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.fixture(autouse=True)
def _own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_data_of_tests")
    module.__dict__.update(
        {key: value for key, value in globals().items() if callable(value)}, no_function=3
    )
    monkeypatch.setitem(sys.modules, "own_data_of_tests", module)


def named(function: str, **data: Any) -> dict[str, Any]:
    return {"name": f"own_data_of_tests:{function}", **data}


def made(data: dict[str, Any], data_dir: Any = None, **raw: Any) -> Federation:
    config = check_config({"data": data, **raw})
    assert check_config(config.as_dict()) == config
    return config.federation(data_dir)


def files(folder: Path, names: str = "ab", rows: str = ROWS) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.csv").write_text(rows)
    return {"files": f"{folder}/*.csv", "target": "back"}


def test_each_file_is_a_client(tmp_path: Path) -> None:
    built = made(files(tmp_path / "hospitals", "cab"))
    assert [client.name for client in built.clients] == ["a", "b", "c"]
    assert [len(client.train) for client in built.clients] == [8, 8, 8]
    assert (built.pool.name, built.pool.task, built.pool.input_shape) == (
        "hospitals",
        "classification",
        (3,),
    )


def test_a_column_says_whose_a_row_is(tmp_path: Path) -> None:
    files(tmp_path, "a")
    pq.write_table(csv.read_csv(tmp_path / "a.csv"), tmp_path / "all.parquet")
    built = made(
        {
            "files": str(tmp_path / "all.parquet"),
            "client": "ward",
            "target": "back",
            "inputs": ["age"],
        }
    )
    assert [client.name for client in built.clients] == ["a", "b"]
    assert (built.pool.name, built.pool.input_shape) == ("all", (1,))


def test_the_task_and_the_other_settings_reach_the_data(tmp_path: Path) -> None:
    data = files(tmp_path, "abcd") | {
        "test_fraction": 0.5,
        "validation_fraction": 0.2,
        "samples_per_client": 8,
    }
    built = made(
        data | {"standardize": "federated", "augment": "own_data_of_tests:twice"},
        task={"name": "binary"},
        newcomers={"clients": 1, "samples_per_client": 6, "join_round": 2},
    )
    assert built.pool.task == "binary"
    assert [(len(c.train), len(c.validation), len(c.test)) for c in built.clients] == [
        (3, 1, 4)
    ] * 3
    assert built.newcomers is not None
    assert len(built.newcomers.clients[0].train) == 2
    assert built.augment is twice
    assert built.pool.columns is not None
    assert built.pool.columns.mean is not None


def test_texts_are_read_as_words(tmp_path: Path) -> None:
    rows = "note,topic\n" + "a good day,1\nsuch a bad night,0\n" * 4
    built = made(
        {"files": f"{tmp_path}/*.csv", "target": "topic", "text": "note", "max_words": 3}
        if files(tmp_path, rows=rows)
        else {}
    )
    assert built.pool.x.shape == (16, 3)
    assert "night" in built.pool.vocabulary


def test_files_are_looked_for_beside_the_config_and_in_the_data_folder(
    tmp_path: Path, monkeypatch: Any
) -> None:
    files(tmp_path / "hospitals")
    text = '[data]\nfiles = "hospitals/*.csv"\ntarget = "back"\n'
    (tmp_path / "my.toml").write_text(text)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "my.toml").write_text(text)
    monkeypatch.delenv("FEDCLADE_DATA_DIR", raising=False)
    monkeypatch.chdir(elsewhere)
    config = read_config(tmp_path / "my.toml")
    # so that the run's config finds them
    assert config.data["files"] == str(tmp_path / "hospitals/*.csv")
    assert len(config.federation()) == 2
    assert len(read_config(elsewhere / "my.toml").federation(tmp_path)) == 2
    with pytest.raises(
        DataError,
        match=r"files = 'hospitals/\*.csv' matches no file in .*elsewhere; check the path, or",
    ):
        read_config(elsewhere / "my.toml").federation()
    (tmp_path / "all.toml").write_text(text + "[algorithms]\nfedavg = {}\ncfl = {}\n")
    scenario = read_scenario(tmp_path / "all.toml")
    assert {len(each.federation()) for each in scenario.configs.values()} == {2}


def test_the_settings_of_tables_reach_the_reader(tmp_path: Path) -> None:
    rows = "id;age;seen;back\n" + "".join(
        f"p{k};{30 + k},5;{k + 1}/2/70;{k % 2}\n" for k in range(12)
    )
    data = files(tmp_path, rows=rows) | {
        "drop": ["id"],
        "separator": ";",
        "decimal": ",",
        "dates": "%d/%m/%y",
        "standardize": "none",
    }
    built = made(data | {"encoding": "ascii"})
    assert built.pool.columns is not None
    assert built.pool.columns.inputs == ("age", "seen")
    assert built.pool.x[1].tolist() == [31.5, 32]


def test_all_wrong_settings_of_tables_are_told_at_once(tmp_path: Path) -> None:
    data = files(tmp_path) | {"separator": ";;", "decimal": "x", "encoding": "excel", "dates": "%d"}
    with pytest.raises(ConfigError) as caught:
        check_config({"data": data})
    named = [line.partition(" should")[0] for line in str(caught.value).splitlines()]
    assert named == [f"[data] {each}" for each in ("separator", "encoding", "decimal", "dates")]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"partition": "iid"},
            "data.partition cannot be combined with data.files, in which the rows are divided among",
        ),
        (
            {"clients": 3, "shift": "none"},
            "data.clients cannot be combined with data.files, in which the rows are divided among",
        ),
        ({"traget": "x"}, "unknown key of [data]: 'traget'; did you mean 'target'?"),
        (
            {"target": 3},
            "target of [data] should be a string, or a list with entries that are each a string, got 3",
        ),
        ({"target": None}, "data.target should name the column to predict, got none"),
        (
            {"files": "all.csv"},
            "files = 'all.csv' is a single file, so client should be the name of the column with",
        ),
        (
            {"inputs": ["age", "back"]},
            "inputs should name other columns than target and client, got 'back'",
        ),
        (
            {"text": "age", "inputs": ["ward"]},
            "text should be the only input, got text = 'age' and inputs = ['ward']",
        ),
        (
            {"standardize": "all"},
            "standardize of [data] should be 'auto' or 'none' or 'client' or 'federated', got 'all'",
        ),
        ({"test_fraction": 1.5}, "test_fraction should be greater than 0 and less than 1, got 1.5"),
        (
            {"drop": "age"},
            "drop of [data] should be a list with entries that are each a string, got 'age'",
        ),
        (
            {"drop": ["age", "back"]},
            "exclude (or drop) should name columns that have no other role, got 'back'",
        ),
        ({"seperator": ";"}, "unknown key of [data]: 'seperator'; did you mean 'separator'?"),
        (
            {"separator": ";;"},
            "separator should be a character such as ';' or '\\t', and not the decimal mark, got ';;'",
        ),
        ({"decimal": "comma"}, "decimal should be '.' or ',', got 'comma'"),
        (
            {"encoding": "excel"},
            "encoding should be an encoding that Python knows, such as 'cp1252' or 'utf-16', got 'excel'",
        ),
        ({"dates": "%d.%m."}, "such as '%d.%m.%Y', got '%d.%m.'"),
        (
            {"augment": "own_data_of_tests:no_function"},
            "augment should be a function of a batch of inputs, got 'own_data",
        ),
    ],
)
def test_what_is_wrong_with_a_section_of_files(changes: dict[str, Any], told: str) -> None:
    section = {"files": "*.csv", "target": "back", **changes}
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_config({"data": {key: value for key, value in section.items() if value is not None}})


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", "", r"a.csv is empty; remove it, or write its header and rows"),
        ("a.csv", "age,ward,back\n1\n", r"cannot read .*a.csv: CSV parse error"),
        ("a.parquet", "no", r"cannot read .*a.parquet"),
        ("a.xlsx", "no", r"a.xlsx should end in .csv, .tsv or .parquet"),
        (
            "sub/b.csv",
            ROWS,
            r"matches several files named 'b'; each client has the name of its file, so file names",
        ),
    ],
)
def test_files_that_cannot_be_read(name: str, text: str, told: str, tmp_path: Path) -> None:
    files(tmp_path, "b")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=told):
        made(
            {"files": f"{tmp_path}/**/*", "target": "back"}
            if "/" not in name
            else {"files": f"{tmp_path}/**/*.csv", "target": "back"}
        )


def test_a_function_returns_a_mapping() -> None:
    built = made(named("two_clients", validation_fraction=0.2, standardize="client"))
    assert [(c.name, len(c.train), len(c.validation), len(c.test)) for c in built.clients] == [
        ("a", 6, 2, 2),
        ("b", 8, 2, 4),
    ]
    assert built.pool.name == "two_clients"


def test_a_function_is_called_with_what_it_takes() -> None:
    data = named("some_clients", clients=3, width=20)
    assert [len(c.train) for c in made(data, "here", seed=7).clients] == [16] * 3
    with pytest.raises(
        ConfigError, match=r"unknown key of \[data\]: 'widht'; did you mean 'width'\?"
    ):
        check_config({"data": named("some_clients", clients=3, widht=20)})
    with pytest.raises(ConfigError, match=r"width of \[data\] should be a whole number, got 'x'"):
        check_config({"data": named("some_clients", clients=3, width="x")})


def test_arguments_of_a_function_are_saved_whatever_their_names() -> None:
    data = named("with_own_test", test="random", stratify="none")
    saved = check_config({"data": data}).as_dict()["data"]
    assert (saved["test"], saved["stratify"]) == ("random", "none")
    assert len(made(data).clients) == 2


def test_a_function_returns_a_federation() -> None:
    assert str(made(named("finished"))) == "custom, 2 clients"
    assert made(named("finished", augment="own_data_of_tests:twice")).augment is twice


@pytest.mark.parametrize("function", ["pool", "dataset"])
def test_what_a_function_returns_is_shared_out(function: str) -> None:
    built = made(
        named(
            function,
            clients=4,
            partition="dirichlet",
            alpha=5.0,
            min_samples=2,
            shift="label_swap",
            clusters=1,
        )
    )
    assert len(built) == 4
    assert built.clients[0].label_map is not None


@pytest.mark.parametrize("function", ["bytes_of_tables", "pool_of_bytes", "dataset_of_bytes"])
def test_a_section_says_whether_inputs_are_numbers_or_tokens(function: str) -> None:
    clients = {} if function == "bytes_of_tables" else {"clients": 2}
    kinds = {"auto": torch.uint8, "numbers": torch.float32, "tokens": torch.int64}
    for inputs_are, dtype in kinds.items():
        built = made(named(function, **clients, inputs_are=inputs_are))
        assert built.pool.x.dtype == dtype
        assert built.pool.x.max() > 1
    with pytest.raises(ConfigError, match=r"inputs_are.*'words'"):
        check_config({"data": named(function, inputs_are="words")})


def test_a_table_of_files_can_be_tokens(tmp_path: Path) -> None:
    rows = "first,second,back\n" + "".join(
        f"{k},{k % 4},{'yes' if k % 3 else 'no'}\n" for k in range(10)
    )
    assert (
        made({**files(tmp_path / "d", rows=rows), "inputs_are": "tokens"}).pool.x.dtype
        == torch.int64
    )


def test_an_installed_package_adds_data_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, dist = "hospitals", None

        def load(self) -> Any:
            return two_clients

    monkeypatch.setattr("fedclade.core.plugins.installed", lambda kind: {"hospitals": Point()})
    assert len(made({"name": "hospitals"})) == 2
    assert "hospitals" not in installed("data")


@pytest.mark.parametrize(
    ("data", "raw", "told"),
    [
        (
            named("two_clients", partition="iid"),
            {},
            "data.partition cannot be combined with the function 'own_data_of_tests:two_clients', ",
        ),
        (
            named("two_clients", clients=2),
            {},
            "which returns a mapping of clients to data and has no such",
        ),
        (named("finished", test_fraction=0.5), {}, "data.test_fraction cannot be combined with "),
        (
            named("finished"),
            {"newcomers": {"clients": 2}},
            "newcomers.clients should be 0, the number of newcomers of the Federation that",
        ),
        (named("fails"), {}, "data 'own_data_of_tests:fails' failed: ValueError: no such bucket"),
        (
            named("seven"),
            {},
            "a torch Dataset, or a mapping of client names to (train, test), got int",
        ),
        (named("no_function"), {}, "should name a function that returns clients' data, got 3"),
        (named("nothing"), {}, "dataset in [data]: 'own_data_of_tests:nothing' cannot be imported"),
        ({"name": "digts"}, {}, "unknown dataset in [data]: 'digts'; did you mean 'digits'?"),
    ],
)
def test_functions_that_cannot_be_used(
    data: dict[str, Any], raw: dict[str, Any], told: str
) -> None:
    with pytest.raises(FedcladeError, match=re.escape(told)):
        made(data, **raw)


def test_the_data_of_the_library_can_be_augmented() -> None:
    assert (
        made({"name": "digits", "clients": 2, "augment": "own_data_of_tests:twice"}).augment
        is twice
    )
    with pytest.raises(ConfigError, match="augment 'own_data_of_tests:flip' cannot be imported"):
        check_config({"data": {"augment": "own_data_of_tests:flip"}})


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"shift": "anda", "level": 9}, "[data] level should be from 1 to 8, got 9"),
        ({"partition": "dirichlet", "alpha": 0.0}, "[data] alpha should be above 0, got 0.0"),
        (
            {"partition": "shards", "shards_per_client": 0},
            "[data] shards_per_client should be at least 1, got 0",
        ),
    ],
)
def test_options_out_of_range_are_told_before_there_is_any_data(section, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_config({"data": {"name": "mnist", **section}})


# Attributes of clients, and references.


def test_attributes_are_read_from_a_file_beside_the_config(tmp_path: Path) -> None:
    files(tmp_path / "hospitals")
    (tmp_path / "sites.csv").write_text("client,country\na,Bern\nb,Oslo\n")
    config = tmp_path / "run.toml"
    config.write_text(
        '[data]\nfiles = "hospitals/*.csv"\ntarget = "back"\nattributes = "sites.csv"\n'
    )
    checked = read_config(config)
    assert checked.data["attributes"] == str(tmp_path / "sites.csv")
    federation = checked.federation()
    assert federation.attributes == {"a": {"country": "Bern"}, "b": {"country": "Oslo"}}


def test_data_of_any_kind_may_have_attributes(tmp_path: Path) -> None:
    (tmp_path / "sites.csv").write_text("client,country\nclient-0,Bern\n")
    built = made({"clients": 2, "attributes": str(tmp_path / "sites.csv")})
    assert built.attributes == {"client-0": {"country": "Bern"}}


def test_attributes_that_are_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.attributes should be a file .*, got 3"):
        check_config({"data": {"attributes": 3}})
    missing = {**files(tmp_path / "hospitals"), "attributes": str(tmp_path / "sites.csv")}
    with pytest.raises(DataError, match=r"attributes of clients: there is no file .*sites\.csv"):
        made(missing)


@pytest.mark.parametrize(
    ("setting", "engine", "wanted"),
    [("auto", "auto", True), ("auto", "ray", False), (False, "auto", False), (True, "ray", True)],
)
def test_references_of_a_small_table_are_trained_by_default(
    tmp_path: Path, setting: Any, engine: str, wanted: bool
) -> None:
    config = check_config({"data": files(tmp_path / "a"), "report": {"references": setting}})
    federation = config.federation()
    assert config.report.wants_references(config.data, federation, engine) is wanted


def test_references_of_other_data_are_trained_on_request_only() -> None:
    config = check_config({"data": {"clients": 2}})
    assert not config.report.wants_references(config.data, config.federation(), "auto")
    assert "report" not in config.as_dict()
    config = check_config({"data": {"clients": 2}, "report": {"references": True}})
    assert config.as_dict()["report"] == {"references": True}


def test_a_large_table_has_no_references_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = check_config({"data": files(tmp_path / "a")})
    federation = config.federation()
    monkeypatch.setattr(settings, "MOST_ROWS", 15)
    assert not config.report.wants_references(config.data, federation, "auto")
    monkeypatch.setattr(settings, "MOST_ROWS", 100)
    monkeypatch.setattr(settings, "MOST_CLIENTS", 1)
    assert not config.report.wants_references(config.data, federation, "auto")


def test_a_setting_of_references_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"references of \[report\] .*got 'maybe'"):
        check_config({"report": {"references": "maybe"}})


def test_over_a_network_there_are_no_references() -> None:
    with pytest.raises(ConfigError, match=r"report\.references should be false or left out over"):
        check_config({"report": {"references": True}}, on_network=True)
