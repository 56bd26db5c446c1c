"""Clients that come with data of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import TensorDataset

import fedclade
from fedclade import ConfigError, DataError, FedcladeError, ModelError, federation, simulate
from fedclade.data import Federation, one_client, pool_from_torch


def part(n: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return n examples whose inputs are their own number."""
    numbers = torch.arange(first, first + n)
    return numbers[:, None].float(), numbers % 2


def held(made: Federation) -> dict[str, tuple[int, int, int]]:
    return {
        client.name: (len(client.train), len(client.validation), len(client.test))
        for client in made.clients
    }


def test_parts_in_every_form_keep_their_place() -> None:
    made = federation(
        {
            "pairs": (part(6), part(2, 100)),
            "three": (part(5), part(1), part(2)),
            "data sets": (TensorDataset(*part(4)), TensorDataset(*part(3))),
            "train alone": part(10),
            "no test": (TensorDataset(*part(5)), None),
            "numpy": (part(4)[0].numpy(), part(4)[1].numpy()),
        }
    )
    assert held(made) == {
        "pairs": (6, 0, 2),
        "three": (5, 1, 2),
        "data sets": (4, 0, 3),
        "train alone": (8, 0, 2),
        "no test": (4, 0, 1),
        "numpy": (3, 0, 1),
    }
    assert made.examples(0, "test")[0].flatten().tolist() == [100, 101]
    assert (str(made), made.pool.outputs, made.pool.task) == (
        "custom, 6 clients",
        2,
        "classification",
    )


def test_what_is_set_aside_depends_on_the_seed_and_the_client_alone() -> None:
    parts: dict[str, Any] = {"a": part(20), "b": part(20), "c": part(20)}

    def tests(data: dict[str, Any], seed: int) -> list[list[float]]:
        made = federation(data, seed=seed, validation_fraction=0.25)
        assert held(made)["a"] == (12, 4, 4)
        return [made.examples(client, "test")[0].flatten().tolist() for client in made.ids]

    assert tests(parts, 0) == tests(parts, 0) != tests(parts, 1)
    assert tests({"a": part(20)}, 0) == tests(parts, 0)[:1]


@pytest.mark.parametrize(
    ("y", "given", "task", "outputs"),
    [
        (torch.tensor([0, 1, 2, 0]), None, "classification", 3),
        (torch.tensor([False, True, True, False]), None, "classification", 2),
        (torch.tensor([0.5, 1.0, 2.0, 3.0]), None, "regression", 1),
        (torch.rand(4, 3), None, "regression", 3),
        (torch.tensor([0, 1, 1, 0]), "binary", "binary", 1),
        (torch.ones(4, 3), "multilabel", "multilabel", 3),
    ],
)
def test_targets_say_what_the_task_is(y: torch.Tensor, given: Any, task: str, outputs: int) -> None:
    for data in (
        (torch.rand(4, 2), y),
        (TensorDataset(torch.rand(4, 2), y),),
        (TensorDataset(torch.rand(4, 2), y), None),
    ):
        pool = federation({"a": data}, given).pool
        assert (pool.task, pool.outputs) == (task, outputs)
        assert torch.equal(pool.y, y.to(pool.y.dtype))


def test_newcomers_are_held_back_and_keep_their_draws() -> None:
    parts = {str(k): part(10, 10 * k) for k in range(5)}
    everyone, made = (
        federation(parts),
        federation(parts, newcomers=2, newcomer_samples=5, samples_per_client=9),
    )
    assert made.newcomers is not None
    assert (made.ids, made.newcomers.ids) == ((0, 1, 2), (3, 4))
    names = {client.name for client in (*made.clients, *made.newcomers.clients)}
    assert names == set(parts)
    assert [len(c.train) + len(c.test) for c in (*made.clients, *made.newcomers.clients)] == [
        9,
        9,
        9,
        5,
        5,
    ]
    keys = {client.name: client.key for client in everyone.clients}
    assert all(client.key == keys[client.name] for client in made.newcomers.clients)


def test_true_clusters_are_given_by_name() -> None:
    parts = {name: part(10) for name in "abc"}
    assert federation(parts, true_clusters={"a": 1, "b": 0, "c": 1}).true_clusters == {
        0: 1,
        1: 0,
        2: 1,
    }
    with pytest.raises(
        DataError,
        match=r"should name every client .* no other client; missing or unknown are: \['c', 'd'\]",
    ):
        federation(parts, true_clusters={"a": 1, "b": 0, "d": 1})


def test_texts_become_words_of_the_training_texts() -> None:
    data = {
        "a": ((["Good day!", "good dog"], [1, 0]), (["good cat"], [1])),
        "b": (["good"] * 3, [1, 1, 1]),
    }
    made = federation(data, max_words=3, vocabulary_size=5)
    assert made.pool.vocabulary == ("<pad>", "<unk>", "good", "!", "day")
    assert made.examples(0, "train")[0].tolist() == [[2, 4, 3], [2, 1, 0]]
    assert made.examples(0, "test")[0].tolist() == [[2, 1, 0]]
    assert made.pool.schema.vocabulary_size == 5


def test_each_client_is_scaled_by_its_own_training_examples() -> None:
    a, b = torch.tensor([[1.0, 0, 7], [3, 1, 7]]), torch.tensor([[10.0, 1, 7], [30, 0, 7]])
    y = torch.tensor([0, 1])
    made = federation(
        {"a": ((a, y), (a * torch.tensor([2, 1, 1]), y)), "b": ((b, y), (b, y))},
        standardize="client",
    )
    # the second is 0 or 1, the third constant
    assert made.examples(0, "train")[0].tolist() == [[-1, 0, 0], [1, 1, 0]]
    assert made.examples(0, "test")[0][:, 0].tolist() == [0, 4]
    assert made.examples(1, "train")[0].tolist() == [[-1, 1, 0], [1, 0, 0]]


def test_all_are_scaled_alike_by_what_their_training_examples_come_to() -> None:
    draw = np.random.default_rng(0)
    parts = {
        f"{k}": (draw.normal(1e6 + k, 1 + k, (20 + k, 3)), np.arange(20 + k) % 2) for k in range(4)
    }
    raw, made = (federation(parts, newcomers=1, standardize=how) for how in ("none", "federated"))  # pyright: ignore
    train = torch.cat([raw.examples(client, "train")[0] for client in raw.ids]).double()
    columns = made.pool.columns
    assert columns is not None
    assert columns.inputs == ("x0", "x1", "x2")
    torch.testing.assert_close(torch.tensor(columns.mean, dtype=torch.float64), train.mean(0))
    torch.testing.assert_close(
        torch.tensor(columns.std, dtype=torch.float64), train.std(0, correction=0)
    )
    for of, scaled in ((raw, made), (raw.newcomers, made.newcomers)):
        assert of is not None
        assert scaled is not None
        expected = (of.examples(of.ids[0], "test")[0].double() - train.mean(0)) / train.std(
            0, correction=0
        )
        torch.testing.assert_close(scaled.examples(of.ids[0], "test")[0], expected.float())


def test_it_trains() -> None:
    parts = {name: part(20) for name in "ab"}
    run = simulate(
        "fedavg", "mclr", federation(parts, standardize="federated"), rounds=1, engine="loop"
    )
    assert run.summary["clients"] == 2


@pytest.mark.parametrize(
    ("parts", "given", "message"),
    [
        (
            {},
            {},
            "clients should be a mapping of the name of at least 1 client to its data, got {}",
        ),
        (
            {"a": 7},
            {},
            "the data of client 'a' should be train, (train, test) or (train, validation, test), each "
            "of which is a torch data set, a pair (x, y) of arrays or a dict of columns",
        ),
        ({"a": (None, part(2))}, {}, "the data of client 'a' should be train, (train, test) or"),
        (
            {"a": part(5), "b": part(1)},
            {},
            "client 'b' has 1 example, but needs 2: one for training and one for testing",
        ),
        (
            {"a": part(5), "b": part(2)},
            {"validation_fraction": 0.2},
            "client 'b' has 2 examples, but needs 3: one for training, one for testing and one "
            "for validation; leave the client out (fewest_rows = 3 for tables)",
        ),
        (
            {"a": (torch.zeros(3, 1), torch.zeros(2))},
            {},
            "training data of 'a' should be arrays x and y of the same length",
        ),
        (
            {"a": (part(3), (torch.zeros(2, 1), torch.tensor([0, -1])))},
            {},
            "labels of test data of 'a' should be whole ",
        ),
        (
            {"a": part(3), "b": (torch.zeros(3, 2), torch.zeros(3))},
            {},
            "inputs of training data of 'b' should have the type and shape of inputs of training data of "
            "'a' (float32 [1]), got float32 [2]",
        ),
        (
            {"a": part(3), "b": (torch.zeros(3, 1), torch.tensor([0, 1, torch.nan]))},
            {},
            "targets of training data of 'b' should be finite numbers, one or several for each example, got nan in ",
        ),
        (
            {"a": (torch.zeros(3, 1), torch.zeros(3, 2).long())},
            {},
            "are several whole numbers for each example, which several",
        ),
        (
            {"a": part(3)},
            {"test_fraction": 0.0},
            "test_fraction should be greater than 0 and less than 1, got 0.0",
        ),
        (
            {"a": part(3)},
            {"newcomers": 1},
            "newcomers.clients should be below the number of clients (1), got 1",
        ),
        (
            {"a": part(3)},
            {"standardize": "clients"},
            "unknown value of standardize: 'clients'; did you mean 'client'?",
        ),
        (
            {"a": (["one", "two"], [0, 1])},
            {"standardize": "client"},
            "should be 'none' for inputs int64 [2, 50], as only columns of numbers [N, F] are scaled, got 'client'",
        ),
    ],
)
def test_what_cannot_be_used(parts: dict[str, Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(FedcladeError) as caught:
        federation(parts, **given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (
            lambda x, y: (x, y),
            r"of the inputs x alone, got .* with the parameters \(x, y\); an augmentation cannot change",
        ),
        ("nowhere:flip", "augment 'nowhere:flip' cannot be imported"),
        ("math:pi", "augment should be a function of a batch of inputs, got 'math:pi'"),
    ],
)
def test_augmentations_that_cannot_be_used(augment: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        federation({"a": part(3)}, augment=augment)


@pytest.mark.parametrize(
    ("dtype", "inputs_are", "expected"),
    [
        *(
            (np.uint8, "auto", torch.uint8),
            (np.uint8, "numbers", torch.float32),
            (np.uint8, "tokens", torch.int64),
        ),
        *(
            (np.int32, "auto", torch.int64),
            (np.int32, "numbers", torch.float32),
            (np.int32, "tokens", torch.int64),
        ),
        *((np.float64, "auto", torch.float32), (np.float64, "tokens", torch.int64)),
    ],
)
def test_inputs_are_numbers_or_tokens_as_it_is_said(
    dtype: Any, inputs_are: Any, expected: torch.dtype
) -> None:
    x, y = np.arange(40).reshape(20, 2).astype(dtype), np.arange(20) % 2
    made = federation({"a": (x, y)}, inputs_are=inputs_are)
    assert made.pool.x.dtype == expected
    assert made.pool.x.tolist() == x.tolist()
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    assert one_client(data, data, labels=2, inputs_are=inputs_are).pool.x.dtype == expected
    assert pool_from_torch(data, inputs_are=inputs_are).x.dtype == expected


@pytest.mark.parametrize("value", [0.5, -1.0, float("nan")])
def test_tokens_are_whole_numbers_of_at_least_0(value: float) -> None:
    x, y = torch.tensor([[1.0], [value]] * 10), torch.arange(20) % 2
    with pytest.raises(
        DataError, match=f"whole numbers of at least 0 where inputs_are = 'tokens', got {value}"
    ):
        federation({"a": (x, y)}, inputs_are="tokens")


def test_what_inputs_are_is_one_of_three_words() -> None:
    data = TensorDataset(*part(6))
    calls: list[Any] = [
        lambda: federation({"a": part(6)}, inputs_are="words"),  # type: ignore[arg-type]
        lambda: one_client(data, data, labels=2, inputs_are="words"),  # type: ignore[arg-type]
        lambda: pool_from_torch(data, inputs_are="words"),  # type: ignore[arg-type]
        lambda: pool_from_torch(data).with_inputs_as("words"),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"inputs_are.*'words'"):
            call()


def one(x: Any, y: Any) -> Federation:
    return federation({"a": (x, y), "b": part(4)})


@pytest.mark.parametrize("none", [-100, -1])
def test_examples_without_a_label_are_to_be_left_out(none: int) -> None:
    x, y = part(6)
    y[3:] = none
    told = (
        f"labels of training data of 'a' should be whole numbers from 0 on, got {none} in example 3"
    )
    advice = "; if a negative number means that the label is missing, leave these examples out"
    with pytest.raises(DataError) as caught:
        one(x, y)
    assert str(caught.value) == f"{told} (negative labels in all: 3){advice}"
    with pytest.raises(DataError) as caught:
        federation({"a": TensorDataset(x, y)})
    assert advice in str(caught.value)


def test_a_last_label_that_may_mean_none_is_named_where_the_model_lacks_it() -> None:
    x, y = part(6)
    y[4:] = 255
    told = r"for 256 labels of custom, got \(2, 2\); if label 255 stands for a missing label, remove the 2"
    with pytest.raises(ModelError, match=told):
        simulate("fedavg", torch.nn.Linear(1, 2), one(x, y), rounds=1, engine="loop")


UNREADABLE = {
    "masked": (
        np.ma.masked_array(np.zeros((6, 1)), mask=[[1]] * 2 + [[0]] * 4),
        "2 of 6 values are masked",
    ),
    "meta": (torch.zeros(6, 1, device="meta"), "the tensor is on the 'meta' device"),
    "sparse": (torch.zeros(6, 1).to_sparse(), "the tensor is sparse"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_arrays_whose_values_cannot_be_read_are_named(kind: str) -> None:
    odd, told = UNREADABLE[kind]
    with pytest.raises(
        DataError, match=f"inputs of training data of 'a' should be a plain array or tensor: {told}"
    ):
        one(odd, part(6)[1])
    with pytest.raises(
        DataError,
        match=f"targets of training data of 'a' should be a plain array or tensor: {told}",
    ):
        one(part(6)[0], odd[:, 0] if kind != "sparse" else odd)
    rows = [(odd[row] if kind != "sparse" else torch.zeros(1).to_sparse(), 0) for row in range(3)]
    with pytest.raises(
        DataError, match=r"the inputs of example 0 of training data of 'a' should be a plain array"
    ):
        federation({"a": Rows(rows)})
    rows = [(torch.zeros(1), row[0][0] if kind != "sparse" else row[0]) for row in rows]
    with pytest.raises(
        DataError, match=r"the target of example 0 of training data of 'a' should be a plain array"
    ):
        federation({"a": Rows(rows)})


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


def test_labels_of_a_billion_are_refused_for_every_source() -> None:
    x, y = part(6)
    y[0] = 10**9
    frame = pa.table({"x": x[:, 0].tolist(), "y": y.tolist(), "c": ["a"] * 6})
    for make in (
        lambda: one(x, y),
        lambda: federation({"a": TensorDataset(x, y)}),
        lambda: fedclade.pool_from_torch(TensorDataset(x, y)),
        lambda: fedclade.federation_from_frame(frame, "c", "y", task="classification"),
        lambda: fedclade.one_client(TensorDataset(x, y), TensorDataset(x, y), labels=10**9 + 1),
        lambda: federation({"a": (x, y % 2)}, labels=10**9),
    ):
        with pytest.raises(FedcladeError, match=r"1,000,000,00[01]"):
            make()


@pytest.mark.parametrize("data", [dict, torch.tensor(1.0), np.array(1.0)])
def test_a_data_set_without_a_length_is_refused(data: Any) -> None:
    with pytest.raises(
        DataError, match=r"should be a map-style torch data set \(with len\(\) and indexing\), got"
    ):
        fedclade.pool_from_torch(data)


def test_the_type_that_a_user_gave_is_named():
    with pytest.raises(DataError, match=r"targets of .* should be numbers, got list: "):
        federation({"a": (np.zeros((4, 2), "float32"), ["x", "y", "x", "y"])})
