"""Default scaling of tables: inputs and targets, by the statistics of all clients."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv

from fedclade import ConfigError, Federation, federation, federation_from_frame
from fedclade.config import check_config
from fedclade.data import open_folder, scale_as_in_run, undo_default_scaling, write_federation

ROWS = 24


def columns_of(rows: int = ROWS) -> dict[str, Any]:
    """Return a table of two sites: sizes in metres, prices in thousands."""
    draw = np.random.default_rng(1)
    size = draw.normal(1.7, 0.1, rows)
    price = 5e4 + 1e4 * draw.normal(size=rows)
    return {
        "site": ["a", "b"] * (rows // 2),
        "size": size,
        "price": price,
        "ward": ["x", "y", "x", "y"] * (rows // 4),
        "cost": 100 * size + price / 100,
    }


def table(target: Any = "cost", **options: Any) -> Federation:
    return federation_from_frame(pa.table(columns_of()), "site", target, **options)


def train_inputs(made: Federation) -> torch.Tensor:
    return torch.cat([made.examples(client, "train")[0] for client in made.ids])


def test_numbers_of_a_table_are_scaled_by_all_clients_unless_the_user_says_otherwise() -> None:
    made = table()
    columns = made.pool.columns
    assert columns is not None
    assert columns.by_default
    assert columns.mean is not None
    x = train_inputs(made).double()
    torch.testing.assert_close(x[:, :2].mean(0), torch.zeros(2).double(), atol=1e-5, rtol=0)
    deviations = x[:, :2].std(0, correction=0)
    torch.testing.assert_close(deviations, torch.ones(2).double(), atol=1e-5, rtol=0)
    assert set(x[:, 2:].flatten().tolist()) == {0.0, 1.0}
    asked = table(standardize="federated", standardize_target="federated")
    assert asked.pool.columns is not None
    assert not asked.pool.columns.by_default
    assert torch.equal(asked.pool.x, made.pool.x)
    raw = table(standardize="none", standardize_target="none")
    assert raw.pool.columns is not None
    assert (raw.pool.columns.mean, raw.pool.columns.target_mean) == (None, None)
    assert raw.pool.x[0, 1] == pytest.approx(columns_of()["price"][0])


def test_targets_stay_in_the_users_unit_and_have_a_scale() -> None:
    made = table()
    columns = made.pool.columns
    assert columns is not None
    y = torch.cat([made.examples(client, "train")[1] for client in made.ids]).double()
    assert columns.target_mean == pytest.approx((float(y.mean()),))
    assert columns.target_std == pytest.approx((float(y.std(correction=0)),))
    assert made.pool.y[0] == pytest.approx(columns_of()["cost"][0])
    both = table(target=("cost", "price"), task="regression").pool.columns
    assert both is not None
    assert both.target_mean is not None
    assert len(both.target_mean) == 2


def test_only_targets_of_a_regression_are_scaled() -> None:
    columns = table(target="ward").pool.columns
    assert columns is not None
    assert columns.target_mean is None
    assert columns.mean is not None
    with pytest.raises(ConfigError) as caught:
        table(target="ward", standardize_target="federated")
    assert str(caught.value) == (
        "standardize_target should be 'auto' or 'none' for a task other than regression, got "
        "'federated'"
    )


def test_a_table_without_numbers_has_nothing_to_scale() -> None:
    frame = pa.table({**columns_of(), "kind": ["old", "new"] * (ROWS // 2)})
    made = federation_from_frame(frame, "site", "ward", inputs=("kind",))
    assert made.pool.columns is not None
    assert made.pool.columns.mean is None


def test_arrays_are_not_scaled_by_default() -> None:
    x = torch.randn(20, 3)
    clients = {"a": (x, x[:, 0]), "b": (x, x[:, 1])}
    made = federation(clients)
    assert made.pool.columns is None
    assert torch.equal(made.pool.x[:20], x)
    asked = federation(clients, standardize_target="federated").pool.columns
    assert asked is not None
    assert (asked.mean, asked.by_default) == (None, False)
    assert asked.target_std is not None


def test_a_misspelt_scaling_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="unknown value of standardize_target: 'federate'; did you mean"
    ):
        table(standardize_target="federate")
    with pytest.raises(ConfigError, match="unknown value of standardize: 'federate'; did you mean"):
        table(standardize="federate")


def reports_of_scales(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about scales, without the line on how the data is read."""
    return [each for each in caplog.messages if not each.startswith("how the data is read")]


def test_columns_that_differ_by_a_thousand_and_are_not_scaled_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "fedclade"):
        table()
        assert not reports_of_scales(caplog)
        table(standardize="none")
    (message,) = reports_of_scales(caplog)
    assert "their columns differ in scale by a factor of" in message
    assert "price is about 5" in message
    assert "set standardize = 'federated' or standardize = 'client'" in message


def test_columns_that_differ_less_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    near = {**columns_of(), "price": columns_of()["size"] * 500, "rare": [0.0] * (ROWS - 1) + [1.0]}
    with caplog.at_level(logging.WARNING, "fedclade"):
        federation_from_frame(pa.table(near), "site", "ward", standardize="none")
    assert not reports_of_scales(caplog)


def test_pixels_at_an_edge_that_are_rarely_not_0_are_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.full((2000, 2), 0.9)
    x[1:, 0] = 0.0
    with caplog.at_level(logging.WARNING, "fedclade"):
        federation({"a": ((x, torch.arange(2000) % 2), (x, torch.arange(2000) % 2))})
    assert not caplog.messages


def test_arrays_are_reported_too(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.tensor([[1.0, 2e4], [2.0, 3e4], [1.0, 0.0], [3.0, 1.0]])
    with caplog.at_level(logging.WARNING, "fedclade"):
        federation({"a": (x, torch.tensor([0, 1, 0, 1]))})
    assert "x1 is about" in caplog.text


def test_the_default_can_be_undone_to_the_last_bit() -> None:
    raw = table(standardize="none", standardize_target="none", newcomers=1)
    undone = undo_default_scaling(table(newcomers=1), "clients are private")
    assert undone.fingerprint == raw.fingerprint
    assert undone.newcomers is not None
    assert undone.newcomers.pool is undone.pool
    assert undone.pool.columns == raw.pool.columns
    asked = table(standardize="federated")
    assert undo_default_scaling(asked, "clients are private") is asked


def test_what_a_user_chose_for_a_part_is_kept_whole() -> None:
    """A private run then refuses all scaling, rather than undoing one part and keeping the other."""
    for chosen in ({"standardize": "federated"}, {"standardize_target": "federated"}):
        made = table(**chosen)  # pyright: ignore[reportArgumentType]
        columns = made.pool.columns
        assert columns is not None
        assert not columns.by_default
        assert undo_default_scaling(made, "clients are private") is made


def test_newcomers_are_scaled_as_the_run_was() -> None:
    run = table().pool.columns
    assert run is not None
    other = {**columns_of(), "price": columns_of()["price"] * 3}
    settings: list[Any] = [{}, {"standardize": "federated"}]
    for options in settings:
        late = federation_from_frame(pa.table(other), "site", "cost", **options)
        scaled = scale_as_in_run(late, run.described)
        assert scaled.pool.columns is not None
        assert scaled.pool.columns.mean == run.mean
        assert scaled.pool.columns.target_mean == run.target_mean
        assert run.mean is not None
        assert run.std is not None
        expected = (other["price"][0] - run.mean[1]) / run.std[1]
        assert scaled.pool.x[0, 1] == pytest.approx(expected, rel=1e-4)
    unscaled = scale_as_in_run(table(), {"columns": []})
    assert unscaled.pool.x[0, 1] == pytest.approx(columns_of()["price"][0])
    by_hand = table(standardize="none")
    assert torch.equal(scale_as_in_run(by_hand, run.described).pool.x, by_hand.pool.x)


def test_a_folder_keeps_the_scale_and_no_raw_inputs(tmp_path: Path) -> None:
    made = table()
    write_federation(made, tmp_path / "built")
    opened = open_folder(tmp_path / "built").pool
    assert opened.columns is not None
    assert made.pool.columns is not None
    assert opened.columns.target_mean == made.pool.columns.target_mean
    assert not opened.columns.by_default
    assert opened.raw is None


def test_the_config_of_an_earlier_run_scales_no_targets(tmp_path: Path) -> None:
    csv.write_csv(pa.table(columns_of()), tmp_path / "all.csv")
    data = {"files": str(tmp_path / "all.csv"), "client": "site", "target": "cost"}
    config = check_config({"data": data})
    saved = config.as_dict()
    assert (saved["data"]["standardize"], saved["data"]["standardize_target"]) == ("auto", "auto")
    assert check_config(saved).as_dict() == saved
    earlier = {
        key: value for key, value in saved["data"].items() if key != "standardize_target"
    } | {"standardize": "none"}
    again = check_config({**saved, "data": earlier})
    assert again.as_dict()["data"] == earlier
    columns = again.federation().pool.columns
    assert columns is not None
    assert (columns.mean, columns.target_mean) == (None, None)
    columns = check_config({"data": {**data, "standardize": "federated"}}).federation().pool.columns
    assert columns is not None
    assert columns.target_mean is not None
