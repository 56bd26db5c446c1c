"""Robust rules beside byzfl's, on the same inputs; where byzfl departs from the papers, so that it is seen to.

It is no part of the ``dev`` extra, since it asks for torchvision, whose wheels do not fit every build of torch; its
rules need none of that: ``pip install --no-deps byzfl``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fedclade.core import Aggregation
from fedclade.core import aggregate as rules

SHAPES = [(11, 2), (20, 4), (9, 1), (5, 1)]
"""Clients, and f."""


@pytest.fixture(scope="module")
def byzfl() -> Any:
    """Return byzfl's rules, without the rest of its package."""
    if (spec := importlib.util.find_spec("byzfl")) is None:
        pytest.skip("byzfl is not installed")
    package = ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations or ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "byzfl", package)
        yield importlib.import_module("byzfl.aggregators")
        for name in [name for name in sys.modules if name.startswith("byzfl.")]:
            patch.delitem(sys.modules, name)


def drawn(n: int, d: int = 40) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def theirs(rule: Any, rows: Tensor) -> Tensor:
    """Return what a rule of byzfl makes of rows, as arrays: it makes float32 of tensors."""
    return torch.from_numpy(rule(rows.numpy().copy()))


def made(rows: Tensor, rule: Any, f: int, **how: Any) -> Tensor:
    return rules.robust(rows, rows.shape[1], Aggregation(rule=rule, byzantine=f / len(rows), **how))


@pytest.mark.parametrize(("n", "f"), SHAPES)
def test_the_trimmed_mean_is_the_same(byzfl: Any, n: int, f: int):
    torch.testing.assert_close(
        made(drawn(n), "trimmed_mean", f), theirs(byzfl.TrMean(f=f), drawn(n))
    )


@pytest.mark.parametrize(("n", "f"), SHAPES)
def test_the_median_is_but_for_an_even_number(byzfl: Any, n: int, f: int):
    """On tensors byzfl takes the lower of both in the middle, on arrays their mean, as the paper does."""
    rows = drawn(n)
    torch.testing.assert_close(made(rows, "median", f), theirs(byzfl.Median(), rows))
    assert torch.equal(made(rows.float(), "median", f), byzfl.Median()(rows)) == bool(n % 2)


@pytest.mark.parametrize(("n", "f"), SHAPES)
def test_krum_counts_one_neighbour_less(byzfl: Any, n: int, f: int):
    """Byzfl takes the n − f − 1 nearest of others, the paper n − f − 2: it is the paper's of f − 1."""
    rows = drawn(n)
    order = rules.krum_order(rules.squared_distances(rows), f - 1)
    assert torch.equal(rows[order[0]], theirs(byzfl.Krum(f=f), rows))
    if n > 2 * f + 2:
        assert torch.equal(
            made(rows, "krum", f), rows[rules.krum_order(rules.squared_distances(rows), f)[0]]
        )


@pytest.mark.parametrize(("n", "f"), SHAPES)
def test_multi_krum_keeps_two_more(byzfl: Any, n: int, f: int):
    """Byzfl keeps n − f; this n − f − 2, the most that El Mhamdi et al. have."""
    rows = drawn(n)
    torch.testing.assert_close(
        rules.multi_krum(rows, f - 1, keep=n - f), theirs(byzfl.MultiKrum(f=f), rows)
    )
    torch.testing.assert_close(
        made(rows, "multi_krum", f), rules.multi_krum(rows, f, keep=n - f - 2)
    )


@pytest.mark.parametrize(("n", "f"), SHAPES)
@pytest.mark.parametrize(("nu", "steps"), [(0.1, 3), (1.0, 5), (1e-6, 300)])
def test_the_geometric_median_is_the_same_from_the_same_start(
    byzfl: Any, n: int, f: int, nu: float, steps: int
):
    rows, zeros = drawn(n), torch.zeros(40, dtype=torch.float64)
    here = rules.geometric_median(rows, zeros, nu=nu, steps=steps)
    there = theirs(byzfl.GeometricMedian(nu=nu, T=steps), rows)
    torch.testing.assert_close(here, there, rtol=0, atol=1e-4 if steps > 100 else 1e-7)
    if steps > 100:  # both have arrived, wherever they began
        torch.testing.assert_close(made(rows, "geometric_median", f), there, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("n", "f"), SHAPES)
@pytest.mark.parametrize("radius", [0.5, 5.0, 100.0])
def test_centred_clipping_is_the_same_in_a_first_round(byzfl: Any, n: int, f: int, radius: float):
    """Later on byzfl begins at its last result."""
    there = byzfl.CenteredClipping(L=5, tau=radius)
    torch.testing.assert_close(
        made(drawn(n), "centred_clipping", f, radius=radius), theirs(there, drawn(n))
    )
    if radius < 1:
        assert not torch.allclose(
            theirs(there, drawn(n)), made(drawn(n), "centred_clipping", f, radius=radius)
        )


@pytest.mark.parametrize(("n", "f"), SHAPES)
def test_mixing_is_the_same(byzfl: Any, n: int, f: int):
    torch.testing.assert_close(rules.mixed(drawn(n), f), theirs(byzfl.NNM(f=f), drawn(n)))
