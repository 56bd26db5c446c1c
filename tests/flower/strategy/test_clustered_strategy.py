"""The strategy over plain ClientApps: what runs, what it returns, what it refuses, and what it leaves out."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

from fedclade import (
    CFL,
    Aggregation,
    Callback,
    ConfigError,
    DifferentialPrivacy,
    EarlyStopping,
    RoundRecord,
    Run,
    RunError,
    RunSettings,
)
from fedclade.algorithms.registry import METHODS, build_algorithm
from fedclade.core import ModelError, UpdateError
from fedclade.flower import ClusteredStrategy, LocalGrid, LocalNode
from fedclade.flower.strategy.app_queries import PLAIN, WORKING, rehearse
from fedclade.report.page import RunView, run_page
from fedclade.report.tables import facts
from tests.flower.strategy.apps import app_of, grid_of, initial_arrays, settled, truth_of

TRUE = [(0, 2, 4), (1, 3, 5)]
CFL_OPTIONS = {"split_rounds": (1,), "eps2": 1e-6}


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch)


def clusters(strategy: ClusteredStrategy) -> list[tuple[int, ...]]:
    return sorted(leaf.members for leaf in strategy.run.tree.leaves if leaf.members)


def reasons(run: Run) -> dict[str, str]:
    """Return the reasons why clients were left out of training."""
    return {
        client: why
        for event in run.events
        if event["kind"] == "left_out" and event["query"] == "train"
        for client, why in event["clients"].items()
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fl_hc", {"n_clusters": 2, "rounds_before": 1}),
        ("fedgroup", {"groups": 2}),
        ("ifca", {"clusters": 2}),
        ("fesem", {"clusters": 2}),
        ("stocfl", {}),
        ("clove", {"clusters": 2}),
        ("oracle", {}),
    ],
)
def test_methods_find_the_true_clusters(name: str, options: dict[str, Any]):
    strategy = ClusteredStrategy(name, true_clusters=truth_of(), **options)
    strategy.start(grid_of(app_of()), initial_arrays(), num_rounds=3)
    assert clusters(strategy) == TRUE
    assert strategy.run.summary["clusters"]["ari"] == 1.0


def test_fedavg_is_flowers_fedavg():
    theirs = FedAvg().start(grid_of(app_of()), initial_arrays(), num_rounds=3)
    ours = ClusteredStrategy("fedavg").start(grid_of(app_of()), initial_arrays(), num_rounds=3)
    for name in ("w", "b"):
        expected = theirs.arrays[name].numpy()
        np.testing.assert_allclose(ours.arrays[name].numpy(), expected, rtol=1e-10)
    assert ours.train_metrics_clientapp.keys() == theirs.train_metrics_clientapp.keys()
    for number, metrics in theirs.evaluate_metrics_clientapp.items():
        assert dict(ours.evaluate_metrics_clientapp[number]) == pytest.approx(dict(metrics))


def test_evaluate_fn_is_called_for_each_cluster():
    called: list[tuple[int, float]] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        norm = float(np.linalg.norm(arrays["w"].numpy()))
        called.append((number, norm))
        return MetricRecord({"norm": norm})

    strategy = ClusteredStrategy("oracle", true_clusters=truth_of(5))
    result = strategy.start(
        grid_of(app_of(), 5), initial_arrays(), num_rounds=2, evaluate_fn=evaluate
    )
    assert [number for number, _ in called] == [0, 1, 1, 2, 2]
    of_nodes = strategy.central_metrics[2]
    three, two = (of_nodes[node]["norm"] for node in sorted(of_nodes))
    assert result.evaluate_metrics_serverapp[2]["norm"] == pytest.approx((3 * three + 2 * two) / 5)
    # three of the five clients are in the cluster of the even numbers
    largest = strategy.arrays_for(100)["w"].numpy()
    np.testing.assert_array_equal(result.arrays["w"].numpy(), largest)
    assert not np.array_equal(strategy.arrays_for(101)["w"].numpy(), largest)
    assert len(strategy.arrays_by_cluster()) == 2
    with pytest.raises(ConfigError, match=r"node 7 did not take part in the run"):
        strategy.arrays_for(7)


def test_an_evaluate_fn_that_fails_ends_the_run():
    def fail(number: int, arrays: ArrayRecord) -> MetricRecord:
        raise KeyError("acc")

    with pytest.raises(RunError, match=r"evaluate_fn failed in round 0: KeyError: 'acc'"):
        ClusteredStrategy("fedavg").start(
            grid_of(app_of(), 2), initial_arrays(), num_rounds=1, evaluate_fn=fail
        )


def test_the_config_reaches_clients_unchanged_with_the_round():
    seen: list[Any] = []
    given = ConfigRecord({"lr": 0.1, "names": ["a", "b"], "raw": b"\x00"})
    ClusteredStrategy("fedavg").start(
        grid_of(app_of(seen=seen), 2),
        initial_arrays(),
        num_rounds=2,
        train_config=given,
        evaluate_config=ConfigRecord({"split": "test"}),
    )
    trained = [msg.content["config"] for msg in seen if msg.metadata.message_type == "train"]
    assert [dict(each) for each in trained[::2]] == [{**given, "server-round": n} for n in (1, 2)]
    evaluated = [dict(m.content["config"]) for m in seen if m.metadata.message_type == "evaluate"]
    assert evaluated[-1] == {"split": "test", "server-round": 2}
    assert "server-round" not in given


def test_flowers_clipping_mod_clips_updates():
    app = app_of(mods=[fixedclipping_mod])
    strategy = ClusteredStrategy("oracle", true_clusters=truth_of(4))
    config = ConfigRecord({"clipping_norm": 0.05})
    strategy.start(grid_of(app, 4), initial_arrays(), num_rounds=1, train_config=config)
    norms = [row["max_norm"] for row in strategy.run.cluster_rows if row["max_norm"] is not None]
    assert norms == pytest.approx([0.05, 0.05], rel=1e-4)


def test_whole_numbers_and_running_statistics_do_not_count_in_comparisons():
    record = initial_arrays(
        **{"bn.running_mean": np.zeros(2), "count": np.array(3, dtype=np.int64)}
    )

    def change(client: int, content: RecordDict) -> None:
        if content.array_records:
            arrays = content.array_records["arrays"]
            arrays["count"] = Array(np.array(3 + 2 * client, dtype=np.int64))
            arrays["bn.running_mean"] = Array(np.full(2, 100.0 * client))

    strategy = ClusteredStrategy("fesem", clusters=1)
    result = strategy.start(grid_of(app_of(change=change), 3), record, num_rounds=1)
    assert [slot.name for slot in strategy.run.layout.buffers] == ["bn.running_mean", "count"]
    assert list(result.arrays) == list(record)
    assert result.arrays["count"].numpy().dtype == np.int64
    assert result.arrays["count"].numpy() == 5  # the mean of 3, 5 and 7
    assert all(row["max_norm"] < 10 for row in strategy.run.cluster_rows)


def lying(shape: tuple[int, ...], data: bytes, stype: str = "numpy.ndarray") -> Array:
    """Return an array that states another shape or content than it has."""
    return Array("float64", shape, stype, data)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("w", np.zeros(3), r"node 101: the array 'w' has the shape \(3,\), expected \(4,\)"),
        ("w", np.zeros(4, dtype=np.int64), r"node 101: the array 'w' has the type int64, expected"),
        ("b", np.full(1, np.nan), r"node 101: the array 'b' has entries that are NaN or infinite"),
        ("c", np.zeros(1), r"node 101: the reply has an array 'c' that the client did not receive"),
        ("w", None, r"node 101: the array 'w' is missing in the reply, which has \['b'\]"),
        (
            "w",
            lying((4,), Array(np.ones(1)).data),
            r"node 101: the array 'w' has numbers of the shape \(1,\), expected \(4,\)",
        ),
        ("x" * 10**4, np.zeros(1), r"node 101: the reply has an array 'x{500,600}…$"),
        ("w", lying((4,), b""), r"node 101: the message cannot be read: EOFError"),
        ("w", lying((4,), b"garbage"), r"node 101: the message cannot be read: ValueError"),
        ("w", lying((4,), bytes(32), "other"), r"node 101: the message cannot be read: TypeError"),
        ("w", np.ones(4, dtype=np.longdouble), r"node 101: the array 'w' has the type float128"),
    ],
)
def test_a_reply_with_other_arrays_is_left_out(name: str, value: Any, reason: str):
    def change(client: int, content: RecordDict) -> None:
        if client == 1 and content.array_records:
            arrays = content.array_records["arrays"]
            if value is None:
                del arrays[name]
            else:
                arrays[name] = value if isinstance(value, Array) else Array(value)

    strategy = ClusteredStrategy("fedavg")
    strategy.start(grid_of(app_of(change=change), 3), initial_arrays(), num_rounds=1)
    assert list(reasons(strategy.run)) == ["1"]
    assert re.match(reason, reasons(strategy.run)["1"])


@pytest.mark.parametrize("size", [0, 0.5, float("nan"), 2**54, 1e300])
@pytest.mark.parametrize("query", ["train", "evaluate on test data"])
def test_an_impossible_number_of_examples_leaves_a_client_out(size: float, query: str):
    def change(client: int, content: RecordDict) -> None:
        if client == 1 and bool(content.array_records) == (query == "train"):
            content.metric_records["metrics"]["num-examples"] = size

    strategy = ClusteredStrategy("fedavg")
    strategy.start(grid_of(app_of(change=change), 3), initial_arrays(), num_rounds=1)
    (event,) = [each for each in strategy.run.events if each["kind"] == "left_out"]
    assert event["query"] == query
    assert re.match(
        r"node 101: the metric 'num-examples' should be a number of examples from 1 to 2\*\*53, got",
        event["clients"]["1"],
    )


@pytest.mark.parametrize("name", ["eval_acc", "eval_loss"])
@pytest.mark.parametrize("algorithm", ["fedavg", "ifca"])
def test_a_metric_that_is_not_finite_leaves_a_client_out(name: str, algorithm: str):
    def change(client: int, content: RecordDict) -> None:
        if client == 1 and not content.array_records:
            content.metric_records["metrics"][name] = float("nan")

    strategy = ClusteredStrategy(algorithm)
    result = strategy.start(grid_of(app_of(change=change), 3), initial_arrays(), num_rounds=1)
    assert np.isfinite([*result.evaluate_metrics_clientapp[1].values()]).all()
    whys = [each["clients"]["1"] for each in strategy.run.events if each["kind"] == "left_out"]
    expected = rf"node 101: the metric '{name}' should be a finite number, got nan"
    assert all(re.match(expected, why) for why in whys)
    assert whys


def test_a_reply_without_examples_is_left_out_and_a_run_of_such_replies_ends():
    def change(client: int, content: RecordDict) -> None:
        if content.array_records:
            del content.metric_records["metrics"]["num-examples"]

    grid = grid_of(app_of(change=change), 2)
    with pytest.raises(UpdateError, match=r"node 100: the reply should have the metric 'num-ex"):
        ClusteredStrategy("fedavg").start(grid, initial_arrays(), num_rounds=1)


def test_the_methods_that_work_are_those_that_are_listed():
    refused: list[str] = []
    for method in METHODS:
        options = PLAIN.get(method.name, {})
        algorithm = build_algorithm(method.name, options, {k: k % 2 for k in range(12)})
        with suppress(ConfigError):
            rehearse(algorithm)
            continue
        refused.append(method.name)
    assert {method.name for method in METHODS}.difference(refused) == set(WORKING)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("pacfl", {}, r"PACFL .*: clients report numbers about their data \(subspaces\)"),
        ("flexcfl", {}, r"FlexCFL .*: clients report numbers about their data \(shifts\)"),
        ("scaffold", {}, r"a TrainQuery requests training steps of the kind ControlVariates"),
        ("stocfl", {"mu": 0.1}, r"a proximal term \(mu = 0\.1\) to a second model"),
        ("ditto", {}, r"clients store models of their own"),
        ("fedem", {}, r"clients train a mixture of models"),
        ("fedbuff", {}, r"it runs only in a simulation"),
        ("fedper", {}, r"the head of each client's model stays with the client"),
        ("ifca", {"average": "gradients"}, r"it requests full-batch gradients"),
    ],
)
def test_other_methods_are_refused_before_round_1(name: str, options: Any, reason: str):
    seen: list[Any] = []
    with pytest.raises(ConfigError, match=reason) as refusal:
        ClusteredStrategy(name, **options).start(grid_of(app_of(seen=seen), 4), initial_arrays())
    assert "choose one of cfl, clove" in str(refusal.value)
    assert not seen


def test_rcfl_needs_the_line_that_selects_a_part():
    seen: list[Any] = []
    with pytest.raises(
        ConfigError, match=r"node 100, asked for one of two parts, reports 60 of 60 examples"
    ):
        ClusteredStrategy("rcfl").start(grid_of(app_of(seen=seen)), initial_arrays())
    numbers = {msg.content["config"]["server-round"] for msg in seen}
    assert numbers == {0}  # before round 1

    strategy = ClusteredStrategy("rcfl")
    strategy.start(grid_of(app_of(selects_parts=True)), initial_arrays(), num_rounds=3)
    assert clusters(strategy) == TRUE


def test_rcfl_separates_clients_although_one_is_disconnected():
    """The round is not taken for one that trains only a sample of the clients."""
    grid = grid_of(app_of(selects_parts=True))

    class Leaving(Callback):
        def on_round(self, record: RoundRecord) -> None:
            grid.nodes[105].connected = False

    strategy = ClusteredStrategy("rcfl", callbacks=[Leaving()])
    strategy.start(grid, initial_arrays(), num_rounds=3)
    assert [leaf.members for leaf in strategy.run.tree.leaves] == [(0, 2, 4), (1, 3)]


def test_a_run_with_a_folder_continues(tmp_path):
    folder = tmp_path / "run"
    grid = grid_of(app_of())
    first = ClusteredStrategy("cfl", folder=folder, **CFL_OPTIONS)
    first.start(grid, initial_arrays(), num_rounds=2)
    more = ClusteredStrategy("cfl", folder=folder, **CFL_OPTIONS)
    result = more.start(grid, initial_arrays(), num_rounds=4)
    whole = ClusteredStrategy("cfl", **CFL_OPTIONS)
    expected = whole.start(grid_of(app_of()), initial_arrays(), num_rounds=4)
    assert list(result.evaluate_metrics_clientapp) == [3, 4]
    assert clusters(more) == clusters(whole) == TRUE
    np.testing.assert_array_equal(result.arrays["w"].numpy(), expected.arrays["w"].numpy())
    assert [row["round"] for row in Run.load(folder).metric_rows] == [1, 2, 3, 4]
    (folder / "nodes.json").write_text("{}")
    with pytest.raises(RunError, match=r"nodes.json is damaged"):
        more.start(grid, initial_arrays(), num_rounds=4)


def test_a_run_continues_with_fewer_nodes_than_it_began_with(tmp_path):
    """Fractions and numbers of clients stay those of the first start."""

    class Interrupting(Callback):
        def on_round(self, record: RoundRecord) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    grid = grid_of(app_of())
    options: dict[str, Any] = {
        "folder": tmp_path / "run",
        "fraction_train": 0.1,
        "fraction_evaluate": 0.5,
        "settings": RunSettings(checkpoint_every=1),
    }
    with pytest.raises(KeyboardInterrupt):
        ClusteredStrategy("fedavg", callbacks=[Interrupting()], **options).start(
            grid, initial_arrays(), num_rounds=3
        )
    for node in (101, 102, 103):
        grid.nodes[node].connected = False
    strategy = ClusteredStrategy("fedavg", **options)
    strategy.start(grid, initial_arrays(), num_rounds=3)
    assert [row["round"] for row in strategy.run.metric_rows] == [1, 2, 3]
    assert strategy.run.config["client_fraction"] == pytest.approx(2 / 6)


def test_a_continued_run_whose_nodes_are_all_new_warns(tmp_path, caplog):
    logging.getLogger("flwr").addHandler(caplog.handler)
    app = app_of()
    grid = grid_of(app, 2)
    strategy = ClusteredStrategy("fedavg", folder=tmp_path / "run")
    try:
        strategy.start(grid, initial_arrays(), num_rounds=1)
        assert "is connected, so all nodes join" not in caplog.text
        others = LocalGrid({500 + k: LocalNode(app, {"partition-id": k}) for k in range(2)})
        strategy.start(others, initial_arrays(), num_rounds=2)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert "none of the 2 clients of the run in" in caplog.text
    assert len(strategy.run.tree.leaf_of) == 4


def test_numbers_of_examples_survive_the_end_of_a_run(tmp_path):
    folder = tmp_path / "run"
    ClusteredStrategy("fedavg", folder=folder).start(
        grid_of(app_of(), 2), initial_arrays(), num_rounds=1
    )
    saved = json.loads((folder / "nodes.json").read_text())
    assert [each["size"] for each in saved["clients"].values()] == [60, 60]


def test_nodes_may_join_and_leave():
    grid = grid_of(app_of(), 7)
    grid.nodes[106].connected = False

    class Coming(Callback):
        def on_round(self, record: RoundRecord) -> None:
            grid.nodes[106].connected = record.round >= 2
            grid.nodes[101].connected = record.round >= 3

    strategy = ClusteredStrategy("cfl", callbacks=[Coming()], **CFL_OPTIONS)
    strategy.start(grid, initial_arrays(), num_rounds=4)
    assert clusters(strategy) == [(0, 2, 4, 6), (1, 3, 5)]
    kinds = [event["kind"] for event in strategy.run.events]
    assert "disconnected" in kinds
    assert "reconnected" in kinds
    assert [row["clients_present"] for row in strategy.run.metric_rows] == [6, 5, 6, 7]


def test_a_cluster_without_a_connected_member_is_reported():
    grid = grid_of(app_of(), 4)

    class Leaving(Callback):
        def on_round(self, record: RoundRecord) -> None:
            grid.nodes[101].connected = grid.nodes[103].connected = False

    strategy = ClusteredStrategy(
        "oracle", true_clusters=truth_of(4), callbacks=[Leaving()], min_train_nodes=1
    )
    strategy.start(grid, initial_arrays(), num_rounds=2)
    alone = strategy.run.tree.node_for(1).id
    events = [(e["node"], e["round"]) for e in strategy.run.events if e["kind"] == "too_few"]
    assert (alone, 2) in events


def test_a_later_node_without_a_true_cluster_does_not_take_part(caplog):
    grid = grid_of(app_of(), 3)
    grid.nodes[102].connected = False

    class Coming(Callback):
        def on_round(self, record: RoundRecord) -> None:
            grid.nodes[102].connected = True

    strategy = ClusteredStrategy("fedavg", true_clusters=truth_of(2), callbacks=[Coming()])
    strategy.start(grid, initial_arrays(), num_rounds=3)
    assert clusters(strategy) == [(0, 1)]
    assert caplog.text.count("node 102 does not take part, as true_clusters does not name it") == 1


def test_metrics_do_not_depend_on_the_order_of_replies():
    def run(grid: LocalGrid) -> Any:
        result = ClusteredStrategy("fedavg").start(grid, initial_arrays(), num_rounds=1)
        return result.train_metrics_clientapp[1], result.evaluate_metrics_clientapp[1]

    class Reversed(LocalGrid):
        """Grid on which the first clients reply only after all others."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            ids = list(message_ids)
            waiting = list(self._waiting)
            return super().pull_messages(ids) if waiting[-1] in ids else []

    assert run(Reversed(grid_of(app_of(), 7).nodes)) == run(grid_of(app_of(), 7))


def test_a_client_of_several_models_is_late_once_for_a_query():
    """With 2 models, a client has 2 requests, and one late query skips one further query."""
    late = {100}

    class Slow(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            ids = [each for each in message_ids if each in self._waiting]
            kept = [each for each in ids if self._waiting[each].metadata.dst_node_id not in late]
            return super().pull_messages(kept)

    strategy = ClusteredStrategy("ifca", clusters=2)
    strategy.start(Slow(grid_of(app_of(), 3).nodes), initial_arrays(), num_rounds=1, timeout=0.01)
    whys = [e["clients"]["0"] for e in strategy.run.events if e["kind"] == "left_out"]
    assert "not asked, as it was too late the last time" in whys[1]


def test_the_report_states_only_what_is_known_of_plain_apps(tmp_path):
    strategy = ClusteredStrategy("oracle", true_clusters=truth_of(4))
    strategy.start(grid_of(app_of(), 4), initial_arrays(), num_rounds=2)
    run = strategy.run
    assert "steps" not in run.summary
    assert not any("steps" in column for row in run.metric_rows for column in row)
    told = dict(facts(run))
    assert "training" not in told
    assert " in rounds: train " in told["time"]
    run.save(tmp_path / "run")
    page = run_page(RunView(Run.load(tmp_path / "run")))
    labels = [card.label for card in page.cards]
    assert "Training steps" not in labels
    assert "Time of the rounds" in labels
    (gains,) = [section for section in page.sections if section.id == "gains"]
    assert "Not shown: trivial, alone and one model (plain ClientApps" in gains.caption
    assert gains.open_tables[0].columns == ["client", "cluster", "cluster model"]


def test_a_line_of_progress_is_logged_for_each_round(caplog):
    caplog.set_level(logging.INFO, logger="flwr")
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        ClusteredStrategy("oracle", true_clusters=truth_of(4)).start(
            grid_of(app_of(), 4), initial_arrays(), num_rounds=2
        )
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    lines = {record.getMessage() for record in caplog.records if "[ROUND" in record.getMessage()}
    assert len(lines) == 2
    assert any(
        re.fullmatch(
            r"\[ROUND 2/2\] clients by cluster: 2, 2; eval_acc [01]\.\d{4}; 4 replies to training",
            line,
        )
        for line in lines
    )


def test_settings_that_need_clients_of_fedclade_are_refused():
    with pytest.raises(ConfigError, match=r"settings\.privacy needs clients that run"):
        ClusteredStrategy(
            "cfl",
            settings=RunSettings(privacy=DifferentialPrivacy(clip_norm=1, noise_multiplier=1)),
        )
    with pytest.raises(ConfigError, match=r"settings\.rounds is set by num_rounds"):
        ClusteredStrategy("cfl", settings=RunSettings(rounds=7))
    with pytest.raises(ConfigError, match=r"EarlyStopping needs scores on validation data"):
        ClusteredStrategy("cfl", callbacks=[EarlyStopping(patience=2)])
    with pytest.raises(ConfigError, match=r"the options \['eps1'\] belong to an algorithm"):
        ClusteredStrategy(CFL(), eps1=0.1)
    with pytest.raises(ConfigError, match=r"got the class CFL; pass CFL\(\)"):
        ClusteredStrategy(CFL)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"fraction_train should be in \(0, 1\], got 0"):
        ClusteredStrategy("cfl", fraction_train=0)


def test_a_wrapper_of_strategies_is_refused():
    wrapped = DifferentialPrivacyClientSideFixedClipping(ClusteredStrategy("cfl"), 1.0, 1.0, 2)
    with pytest.raises(ConfigError, match=r"cannot be wrapped by another strategy"):
        wrapped.start(grid_of(app_of(), 2), initial_arrays(), num_rounds=1)


def test_initial_arrays_have_to_be_a_model():
    grid = grid_of(app_of(), 2)
    only_ints = ArrayRecord({"n": Array(np.arange(3))})
    with pytest.raises(
        ModelError, match=r"at least one array of floating-point numbers .*n: int64"
    ):
        ClusteredStrategy("cfl").start(grid, only_ints)
    with pytest.raises(ModelError, match=r"the initial array 'z' has the type complex128"):
        ClusteredStrategy("cfl").start(grid, initial_arrays(z=np.zeros(1, dtype=complex)))


def test_whole_numbers_beyond_float32_come_back_exactly():
    numbers = np.array([2**24 + 1, 2**31 - 1])
    record = ArrayRecord(
        {
            "w": Array(np.full(4, 0.1, dtype=np.float32)),
            "b": Array(np.zeros(1, dtype=np.float32)),
            "n": Array(numbers),
        }
    )
    result = ClusteredStrategy("fedavg").start(grid_of(app_of(), 2), record, num_rounds=1)
    np.testing.assert_array_equal(result.arrays["n"].numpy(), numbers)
    assert result.arrays["w"].numpy().dtype == np.float32


@pytest.mark.parametrize(
    "value",
    [
        np.array([1.5], dtype=np.float16),
        np.array([1.5, 2.5], dtype=">f8"),
        np.array(2.5),
        np.zeros((0, 3)),
        np.array([], dtype=np.int64),
        np.array([True, False]),
        np.array([2**31 + 8], dtype=np.uint32),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ],
)
def test_arrays_of_every_type_and_shape_come_back(value: np.ndarray):
    result = ClusteredStrategy("fedavg").start(
        grid_of(app_of(), 2), initial_arrays(**{"any [a-z]*": value}), num_rounds=1
    )
    returned = result.arrays["any [a-z]*"].numpy()
    np.testing.assert_array_equal(returned, value)
    assert returned.dtype == value.dtype.newbyteorder("=")


def test_several_initial_models_have_to_differ():
    zeros = ArrayRecord({"w": Array(np.zeros(4)), "b": Array(np.zeros(1))})
    with pytest.raises(ConfigError, match=r"IFCA starts from 2 different models, but"):
        ClusteredStrategy("ifca", clusters=2).start(grid_of(app_of(), 4), zeros)

    def make(number: int) -> ArrayRecord:
        return ArrayRecord({"w": Array(np.full(4, 0.1 * number)), "b": Array(np.zeros(1))})

    strategy = ClusteredStrategy("ifca", clusters=2, initial_models=make)
    strategy.start(grid_of(app_of(), 4), zeros, num_rounds=1)
    assert len(strategy.run.tree.leaves) == 2

    def misshapen(number: int) -> ArrayRecord:
        return ArrayRecord({"w": Array(np.zeros(5)), "b": Array(np.zeros(1))})

    with pytest.raises(ConfigError, match=r"initial_models\(1\) does not fit: the array 'w'"):
        ClusteredStrategy("ifca", clusters=2, initial_models=misshapen).start(
            grid_of(app_of(), 4), zeros
        )


def test_a_client_that_cannot_evaluate_is_named_before_round_1():
    def change(client: int, content: RecordDict) -> None:
        if not content.array_records:
            del content["metrics"]

    grid = grid_of(app_of(change=change), 2)
    with pytest.raises(
        UpdateError,
        match=r"no node can evaluate the initial model: node 100: the reply should have exactly one "
        r"MetricRecord",
    ):
        ClusteredStrategy("cfl").start(grid, initial_arrays())
    strategy = ClusteredStrategy("cfl", fraction_evaluate=0, **CFL_OPTIONS)
    result = strategy.start(grid, initial_arrays(), num_rounds=1)
    assert result.evaluate_metrics_clientapp == {}


def test_a_method_of_choices_by_loss_needs_a_loss_before_round_1():
    seen: list[Message] = []

    def change(client: int, content: RecordDict) -> None:
        content.metric_records["metrics"].pop("eval_loss", None)

    grid = grid_of(app_of(change=change, seen=seen), 2)
    with pytest.raises(
        ConfigError, match=r"IFCA lets clients choose a model by its loss, but they"
    ):
        ClusteredStrategy("ifca").start(grid, initial_arrays())
    assert {msg.metadata.message_type for msg in seen} == {"evaluate"}


def test_a_method_of_choices_by_loss_runs_without_evaluations():
    strategy = ClusteredStrategy("ifca", fraction_evaluate=0)
    result = strategy.start(grid_of(app_of()), initial_arrays(), num_rounds=3)
    assert clusters(strategy) == TRUE
    assert result.evaluate_metrics_clientapp == {}


def test_a_failed_start_leaves_no_run_behind():
    strategy = ClusteredStrategy("fedavg")
    strategy.start(grid_of(app_of(), 2), initial_arrays(), num_rounds=1)
    with pytest.raises(ModelError):
        strategy.start(grid_of(app_of(), 2), ArrayRecord({}), num_rounds=1)
    with pytest.raises(RunError, match=r"has no finished run yet"):
        strategy.arrays_by_cluster()


def test_no_rounds_return_the_initial_model():
    result = ClusteredStrategy("cfl").start(grid_of(app_of(), 2), initial_arrays(), num_rounds=0)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), initial_arrays()["w"].numpy())


def test_a_finished_run_is_needed_for_results():
    strategy = ClusteredStrategy("cfl")
    with pytest.raises(RunError, match=r"has no finished run yet; call strategy\.start first"):
        _ = strategy.run
    with pytest.raises(RunError, match=r"has no finished run yet"):
        strategy.arrays_for(1)


def test_true_clusters_have_all_nodes():
    with pytest.raises(ConfigError, match=r"but node 101 is not among \[100\]"):
        ClusteredStrategy("oracle", true_clusters={100: 0}).start(
            grid_of(app_of(), 2), initial_arrays()
        )


def test_a_sampled_fraction_trains():
    seen: list[Any] = []
    strategy = ClusteredStrategy("fedavg", fraction_train=0.5, min_train_nodes=1)
    strategy.start(grid_of(app_of(seen=seen)), initial_arrays(), num_rounds=2)
    trained = [msg.metadata.dst_node_id for msg in seen if msg.metadata.message_type == "train"]
    assert len(trained) == 6
    assert len(set(trained[:3])) == 3


def test_a_robust_rule_applies():
    def change(client: int, content: RecordDict) -> None:
        if client == 0 and content.array_records:
            content.array_records["arrays"]["w"] = Array(np.full(4, 1e6))

    settings = RunSettings(aggregate=Aggregation(rule="median"))
    result = ClusteredStrategy("fedavg", settings=settings).start(
        grid_of(app_of(change=change), 5), initial_arrays(), num_rounds=1
    )
    assert np.abs(result.arrays["w"].numpy()).max() < 10
