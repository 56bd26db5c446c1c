from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedclade import ConfigError, LocalTraining, Signature
from fedclade.channel.middleware import Channel
from fedclade.channel.signature import CountSketch, Permutation, Permuting, SignSketch, Sketching
from fedclade.core import ClientWork, Proximal
from fedclade.core.params import Layout
from fedclade.core.queries import Round
from tests.tiny import ScriptedClients, SpyClients


@given(st.integers(0, 2**63 - 1), st.integers(1, 40), st.integers(0, 10))
def test_it_is_a_bijection_within_parameters_and_within_buffers(seed, parameters, buffers):
    P = Permutation(seed, parameters + buffers, parameters)
    image = P.apply(torch.arange(parameters + buffers))
    assert sorted(image[:parameters].tolist()) == list(range(parameters))
    assert sorted(image[parameters:].tolist()) == list(range(parameters, parameters + buffers))


@given(st.integers(0, 2**63 - 1), st.integers(1, 40))
def test_invert_undoes_apply_on_vectors_and_on_stacks_of_them(seed, size):
    """Eq. 46: P⁻¹P is the identity, bit for bit."""
    P = Permutation(seed, size, size // 2 + 1)
    stack = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed % 1000))
    assert torch.equal(P.invert(P.apply(stack)), stack)
    assert torch.equal(P.apply(P.invert(stack)), stack)
    assert torch.equal(P.apply(stack)[1, 2], P.apply(stack[1, 2]))


def test_inner_products_and_norms_stay():
    """Eq. 45, on numbers whose sums are exact."""
    P = Permutation(3, 50, 50)
    a, b = torch.arange(50.0), torch.arange(50.0).flip(0)
    assert P.apply(a) @ P.apply(b) == a @ b
    assert P.apply(a) @ P.apply(a) == a @ a
    assert not torch.equal(P.apply(a), a)


def test_the_seed_alone_decides():
    v = torch.arange(1000)
    assert torch.equal(Permutation(1, 1000, 900).apply(v), Permutation(1, 1000, 900).apply(v))
    assert not torch.equal(Permutation(1, 1000, 900).apply(v), Permutation(2, 1000, 900).apply(v))


@pytest.mark.parametrize("bit", [32, 63, 64, 127, 255])
def test_every_bit_of_the_secret_counts(bit):
    """A generator that takes 32 bits of its seed would leave the server few enough secrets to try them all."""
    v = torch.arange(1000)
    assert not torch.equal(
        Permutation(1, 1000, 900).apply(v), Permutation(1 + 2**bit, 1000, 900).apply(v)
    )


def test_anchors_are_undone_as_all_models_are():
    P = Permutation(3, 4, 4)
    inside = SpyClients(ScriptedClients({0: [1, 2, 3, 4], 1: [1, 2, 3, 4]}))
    models = torch.arange(8.0).view(2, 4)
    Channel(inside, Permuting(P)).train(
        [0, 1],
        P.apply(models),
        [0, 1],
        Round(1, LocalTraining()),
        ClientWork(steps=Proximal(1.0)),
        anchors=[1, 1],
    )
    (call,) = inside.calls
    assert torch.equal(torch.stack([*call.models.values()]), models)
    assert torch.equal(torch.stack([*call.anchors.values()]), models[[1, 1]])


def test_parameters_alone_are_permuted_as_they_are_in_the_whole():
    P = Permutation(3, 50, 40)
    v = torch.arange(50.0)
    assert torch.equal(P.apply(v[:40]), P.apply(v)[:40])
    assert torch.equal(P.invert(P.apply(v)[:40]), v[:40])


# Sketches


@given(st.integers(0, 2**63 - 1), st.integers(1, 60), st.integers(1, 25))
def test_a_sketch_adds_every_entry_with_a_sign_to_one_bucket(seed, size, dim):
    """The map as a matrix, from the images of unit vectors; entries of one run of R never meet."""
    matrix = CountSketch(seed, size, dim).apply(torch.eye(size))
    assert matrix.shape == (size, min(dim, size))
    assert torch.equal(matrix.abs().sum(1), torch.ones(size))
    assert set(matrix.unique().tolist()) <= {-1.0, 0.0, 1.0}
    for run in matrix.split(dim):
        assert run.abs().sum(0).max() <= 1


def test_a_sketch_is_linear_row_by_row_and_to_the_last_bit():
    """So neither blocks of clients nor who else is in them can change a signature."""
    sketch = CountSketch(1, 5000, 64)
    rows = torch.randn(7, 5000, generator=torch.Generator().manual_seed(0))
    whole = sketch.apply(rows)
    assert torch.equal(torch.stack([sketch.apply(row) for row in rows]), whole)
    assert torch.equal(torch.cat([sketch.apply(some) for some in rows.split(3)]), whole)
    torch.testing.assert_close(
        sketch.apply(rows[0] - 2 * rows[1]), whole[0] - 2 * whole[1], rtol=0, atol=1e-4
    )


def test_a_sketch_as_long_as_the_update_keeps_inner_products():
    a, b = torch.arange(50.0), torch.arange(50.0).flip(0)
    for dim in (50, 1024):
        sketch = CountSketch(3, 50, dim)
        assert sketch.apply(a).shape == (50,)
        assert sketch.apply(a) @ sketch.apply(b) == a @ b
        assert sketch.apply(a) @ sketch.apply(a) == a @ a


@pytest.mark.parametrize("kind", ["spread out", "a few large entries"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_inner_products_are_unbiased_and_vary_no_more_than_stated(kind, alpha):
    """Over 2,000 seeds, for unit vectors with ⟨x, y⟩ = α: mean α, variance at most (1 + α²)/R.

    The mean may be off by 4 of its standard errors √(variance/2000), the sample's variance by a fifth.
    """
    draws, R = 2000, 32
    x, z = torch.randn(2, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    if kind == "a few large entries":
        x[10:], z[:5], z[15:] = 0, 0, 0
    x /= x.norm()
    z -= (z @ x) * x
    y = alpha * x + math.sqrt(1 - alpha**2) * z / z.norm()
    sketches = [CountSketch(seed, 300, R).apply(torch.stack([x, y])) for seed in range(draws)]
    products = torch.stack([a @ b for a, b in sketches])
    bound = (1 + alpha**2) / R
    assert abs(float(products.mean()) - alpha) < 4 * math.sqrt(bound / draws)
    assert float(products.var()) < 1.2 * bound


def test_cosines_are_as_near_as_stated():
    """At R = 1024: standard deviation (1 − α²)/√R, which is 0.031 at α = 0, 0.0059 at 0.9; none off by 5 of them."""
    x, z = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(5))
    z -= (z @ x) / (x @ x) * x
    for alpha in (0.0, 0.9):
        y = alpha * x / x.norm() + math.sqrt(1 - alpha**2) * z / z.norm()
        found = [CountSketch(seed, 20_000, 1024).apply(torch.stack([x, y])) for seed in range(50)]
        errors = torch.stack([torch.cosine_similarity(a, b, dim=0) - alpha for a, b in found])
        assert float(errors.abs().max()) < 5 * (1 - alpha**2) / math.sqrt(1024)


def test_the_runs_seed_the_length_and_dim_alone_decide_a_sketch():
    v = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(CountSketch(1, 3000, 100).apply(v), CountSketch(1, 3000, 100).apply(v))
    assert not torch.equal(CountSketch(1, 3000, 100).apply(v), CountSketch(2, 3000, 100).apply(v))
    layout = Layout.of(nn.Linear(3000, 1, bias=False))
    again = Signature(kind="projected", dim=100).sketch(1, layout)
    assert torch.equal(again.apply(v), CountSketch(1, 3000, 100).apply(v))
    assert Signature().sketch(1, layout) is None


def three_layers() -> Layout:
    """A body of 6 entries, a BatchNorm of 4 and 5 buffer entries, and a head of 4, tied to a last layer's weight."""
    module = nn.ModuleDict(
        {"body": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2), "head": nn.Linear(2, 2, bias=False)}
    )
    module["last"] = nn.Linear(2, 2, bias=False)
    module["last"].weight = module["head"].weight
    return Layout.of(module)


@pytest.mark.parametrize(
    ("of", "columns"),
    [
        ("head", [10, 11, 12, 13]),
        ("last", [10, 11, 12, 13]),
        (("head.*", "body.bias"), [4, 5, 10, 11, 12, 13]),
        ("bias", [4, 5, 8, 9]),
    ],
)
def test_some_parameters_alone_may_be_compared(of, columns):
    vectors = torch.randn(3, 14, generator=torch.Generator().manual_seed(0))
    full = Signature(of=of).sketch(1, three_layers())
    assert full.dim == len(columns)
    assert torch.equal(full.apply(vectors), vectors[:, columns])
    projected = Signature(kind="projected", dim=3, of=of).sketch(1, three_layers())
    assert torch.equal(
        projected.apply(vectors), CountSketch(1, len(columns), 3).apply(vectors[:, columns])
    )


@pytest.mark.parametrize(
    ("of", "nearest"), [("haed", "head.weight"), ("norm.running_mean", "norm.bias")]
)
def test_what_is_no_shared_parameter_cannot_be_compared(of, nearest):
    text = (
        f"signature.of = '{of}' matches no shared parameter of the model; did you mean '{nearest}'"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        Signature(of=of).sketch(1, three_layers())


def test_updates_are_compared_by_some_parameters_and_long_by_all():
    deltas = torch.randn(3, 19, generator=torch.Generator().manual_seed(0))
    clients = ScriptedClients(dict(enumerate(deltas.tolist())))
    server = Channel(clients, Sketching(Signature(of="head").sketch(1, three_layers())))
    updates = server.train([2, 0], torch.zeros(1, 19), [0, 0], Round(1, LocalTraining()))
    assert torch.equal(updates.signatures, deltas[[2, 0], 10:14])
    assert torch.equal(updates.deltas, deltas[[2, 0]])
    torch.testing.assert_close(updates.norms, deltas[[2, 0]].double().norm(dim=1))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("kind", "sketch", "'full', 'projected' or 'signs'"), ("dim", 0, "at least 1")],
)
def test_a_signature_out_of_range_is_refused(name, value, rule):
    with pytest.raises(
        ConfigError, match=re.escape(f"signature.{name} should be {rule}, got {value!r}")
    ):
        Signature(**{name: value})


@pytest.mark.parametrize("what", ["train", "gradients"])
def test_the_server_projects_what_it_receives_permuted(what):
    """Signatures are S·P·Δθ; updates, norms and evaluations are untouched."""
    deltas = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    clients = ScriptedClients(
        dict(enumerate(deltas.tolist())), right=lambda client, model: client / 4
    )
    P, sketch = Permutation(1, 40, 40), CountSketch(2, 40, 8)
    permuted = Channel(clients, Permuting(P))
    server = Channel(permuted, Sketching(sketch))
    updates = getattr(server, what)([2, 0], torch.zeros(1, 40), [0, 0], Round(1, LocalTraining()))
    assert torch.equal(updates.deltas, P.apply(deltas[[2, 0]]))
    assert torch.equal(updates.signatures, sketch.apply(P.apply(deltas[[2, 0]])))
    torch.testing.assert_close(updates.norms, deltas[[2, 0]].double().norm(dim=1))
    assert server.evaluate([1, 2], torch.zeros(1, 40), [0, 0], "test").scores[:, 0].tolist() == [
        0.25,
        0.5,
    ]


@pytest.mark.parametrize(("size", "dim"), [(92, 46), (7850, 512), (2**20 + 3, 64)])
def test_signs_of_projections_are_bits_that_differ_as_the_angle_says(size: int, dim: int):
    draw = torch.Generator().manual_seed(0)
    first, other = torch.randn(2, size, generator=draw)
    other -= (other @ first) / (first @ first) * first
    turned = 0.6 * first / first.norm() + 0.8 * other / other.norm()
    shares: list[float] = []
    for seed in range(24):
        signs = SignSketch(seed, size, dim).apply(torch.stack([first, turned, 7 * first, -first]))
        assert signs.shape == (4, dim)
        assert set(signs.unique().tolist()) == {-1.0, 1.0}
        assert torch.equal(signs[0], signs[2])  # length does not matter
        assert torch.equal(signs[0], -signs[3])
        shares.append(float((signs[0] != signs[1]).double().mean()))
    error = 0.5 / math.sqrt(24 * dim)
    assert sum(shares) / 24 == pytest.approx(math.acos(0.6) / math.pi, abs=5 * error)


def test_signs_depend_on_seed_length_and_what_is_compared():
    layout = three_layers()
    vectors = torch.randn(3, layout.n_parameters, generator=torch.Generator().manual_seed(1))
    compared = Signature(kind="signs", dim=16)
    here = compared.sketch(3, layout)
    assert torch.equal(here.apply(vectors), compared.sketch_of_parts(3, layout).apply(vectors))
    assert not torch.equal(here.apply(vectors), compared.sketch(4, layout).apply(vectors))
    some = Signature(kind="signs", dim=16, of="head.*").sketch(3, layout)
    assert some.described == {"dim": 16, "compared": "signs", "of": ["head.*"]}
    assert not torch.equal(here.apply(vectors), some.apply(vectors))
    assert some.apply(vectors[:0]).shape == (0, 16)
