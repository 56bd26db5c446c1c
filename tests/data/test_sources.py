from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedclade.core.errors import ConfigError, DataError
from fedclade.data import SOURCES, load_pool


def test_every_source_has_a_one_line_description() -> None:
    assert list(SOURCES) == [
        *(
            "digits",
            "mnist",
            "cifar10",
            "femnist",
            "ag_news",
            "sent140",
            "tiny_shakespeare",
            "synthetic",
        )
    ]
    for source in SOURCES.values():
        assert source.description
        assert "\n" not in source.description


def test_unknown_source_and_argument() -> None:
    with pytest.raises(ConfigError, match="unknown data source 'minst'; did you mean 'mnist'"):
        load_pool("minst")
    with pytest.raises(
        ConfigError, match="unknown key of data source 'synthetic': 'aplha'; did you mean 'alpha'"
    ):
        load_pool("synthetic", aplha=1)
    with pytest.raises(
        ConfigError, match="task of data source 'ag_news' should be 'classification' or 'language'"
    ):
        load_pool("ag_news", task="translation")


def test_data_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_pool("mnist", data_dir=tmp_path / "nowhere")
    assert str(caught.value) == (
        f"the data folder {tmp_path / 'nowhere'} does not exist; it should contain mnist/; "
        "check --data-dir / FEDCLADE_DATA_DIR"
    )


def test_bundled_data_needs_no_folder(tmp_path: Path) -> None:
    assert load_pool("digits", data_dir=tmp_path / "nowhere").outputs == 10


def test_synthetic_follows_its_definition() -> None:
    pool = load_pool("synthetic", clients=400, alpha=4.0, beta=0.25, max_samples=200)
    assert pool.natural is not None
    owners, sizes = np.unique(pool.natural, return_counts=True)
    assert (len(owners), owners[0], owners[-1]) == (400, "client-000", "client-399")
    assert (sizes.min(), sizes.max()) == (50, 200)
    assert np.median(sizes) == pytest.approx(50 + np.exp(4), rel=0.1), (
        "a log-normal's median is exp(4)"
    )
    assert (tuple(pool.x.shape[1:]), str(pool.x.dtype), pool.outputs) == (
        (60,),
        "torch.float32",
        10,
    )
    x = pool.x.double().numpy()
    of_client = [x[pool.natural == owner] for owner in owners]
    within = np.mean([part.var(axis=0, ddof=1) for part in of_client], axis=0)
    np.testing.assert_allclose(within, np.arange(1, 61) ** -1.2, rtol=0.1)  # Σ_jj = j^-1.2
    means = np.stack([part.mean(axis=0) for part in of_client])
    assert means.mean(axis=1).var() == pytest.approx(0.25 + 1 / 60, rel=0.25), "B_k has variance β"
    assert means[:, 20:].std(axis=1).mean() == pytest.approx(1, rel=0.1), "v_k ~ N(B_k, 1)"


def test_synthetic_alpha_changes_no_label() -> None:
    one, other = (
        load_pool("synthetic", clients=30, max_samples=100, alpha=alpha) for alpha in (0, 9)
    )
    assert (one.x == other.x).all()
    assert (one.y == other.y).float().mean() > 0.999, "up to rounding"


def test_synthetic_clients_do_not_depend_on_how_many_there_are() -> None:
    few, many = (
        load_pool("synthetic", clients=9, seed=3),
        load_pool("synthetic", clients=12, seed=3),
    )
    n = len(few.train)
    assert (many.x[:n] == few.x).all()
    assert (many.y[:n] == few.y).all()
    assert not (load_pool("synthetic", clients=9, seed=4).x[:50] == few.x[:50]).all()


def test_synthetic_out_of_range() -> None:
    with pytest.raises(ConfigError) as caught:
        load_pool("synthetic", alpha=-1, beta=float("inf"), clients=0, max_samples=1)
    assert str(caught.value).splitlines() == [
        "alpha should be at least 0, got -1",
        "beta should be at least 0, got inf",
        "clients should be at least 1, got 0",
        "max_samples should be at least 2, got 1",
    ]
