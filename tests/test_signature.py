from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedclade.signature import Permutation


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


@given(st.integers(0, 2**63 - 1), st.integers(1, 40), st.integers(0, 10))
def test_parameters_without_their_buffers_are_shuffled_alike(seed, parameters, buffers):
    P = Permutation(seed, parameters + buffers, parameters)
    v = torch.arange(parameters + buffers)
    assert torch.equal(P.apply(v[:parameters]), P.apply(v)[:parameters])
    assert torch.equal(P.invert(P.apply(v[:parameters])), v[:parameters])
