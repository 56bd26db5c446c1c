"""What each client keeps for testing and validation."""

from __future__ import annotations

import numpy as np

from fedclade.core import DataError, Indices, rng
from fedclade.data.parts import Parts
from fedclade.data.pool import Pool


def train_and_test(
    pool: Pool, parts: Parts, test_samples: int | None, seed: int
) -> tuple[list[Indices], list[Indices]]:
    """Return what each client trains on and what it is tested on; see ``load_federation`` for the rules."""
    if parts.test == "own" or len(pool.test) == 0:
        return _own_tests(pool, parts, test_samples, seed)
    if parts.test == "pool":
        shared = pool.test
        if test_samples is not None:
            shared = rng.generator(seed, "test").permutation(pool.test)[:test_samples]
        return parts.indices, [shared] * len(parts.indices)
    if parts.test == "parts":
        lots = np.array_split(rng.generator(seed, "test").permutation(pool.test), len(parts.indices))
        return parts.indices, [lot[:test_samples] for lot in lots]
    tests = [_matched(pool, train, test_samples, seed, client) for client, train in enumerate(parts.indices)]
    return parts.indices, tests


def _own_tests(pool: Pool, parts: Parts, test_samples: int | None, seed: int) -> tuple[list[Indices], list[Indices]]:
    """Test clients on examples of their own: in the source's test split if all have some there, else held back."""
    if parts.names is not None and pool.natural is not None:
        owners = pool.natural[pool.test]
        if np.isin(parts.names, owners).all():
            return parts.indices, [pool.test[owners == name][:test_samples] for name in parts.names]
    pairs = [
        set_aside(indices, parts.own_test_fraction, "test", seed, client, at_most=test_samples)
        for client, indices in enumerate(parts.indices)
    ]
    return [train for train, _ in pairs], [test for _, test in pairs]


def set_aside(
    indices: Indices, fraction: float, purpose: str, seed: int, client: int, at_most: int | None = None
) -> tuple[Indices, Indices]:
    """Return what stays and what is set aside: the fraction, drawn at random, at least one example unless it is 0.

    Of two examples and more, one stays at least.
    """
    aside = max(1, min(round(fraction * len(indices)), len(indices) - 1)) if fraction else 0
    aside = aside if at_most is None else min(aside, at_most)
    order = rng.generator(seed, purpose, client).permutation(indices)
    return order[aside:], order[:aside]


def _matched(pool: Pool, train: Indices, test_samples: int | None, seed: int, client: int) -> Indices:
    """Draw test examples, each at most once, whose labels are in the proportions of the client's training labels.

    As many as the test split allows: the scarcest label sets the number. Labels that the split lacks are left out.
    """
    groups, counts = np.unique(pool.groups[train], return_counts=True)
    there = np.asarray([(pool.groups[pool.test] == group).sum() for group in groups])
    groups, counts, there = groups[there > 0], counts[there > 0], there[there > 0]
    if len(groups) == 0:
        raise DataError(
            f"client {client} cannot be tested: none of its labels {np.unique(pool.groups[train]).tolist()} is in the "
            f"test split of {pool.name}"
        )
    size = int((there * counts.sum() // counts).min())
    wanted = _proportional(counts, size if test_samples is None else min(size, test_samples))
    draw = rng.generator(seed, "test", client)
    candidates = [pool.test[pool.groups[pool.test] == group] for group in groups]
    return np.concatenate([draw.permutation(of_group)[:k] for of_group, k in zip(candidates, wanted, strict=True)])


def _proportional(counts: Indices, total: int) -> Indices:
    """Divide a total in proportion to counts, in whole numbers: the largest remainders are rounded up."""
    shares, remainders = np.divmod(counts * total, counts.sum())
    up = np.argsort(-remainders, kind="stable")[: total - shares.sum()]
    shares[up] += 1
    return shares
