"""Partitions: which training examples each client gets."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from fedclade.core import (
    ConfigError,
    DataError,
    Indices,
    call_own,
    check_arguments,
    function_named,
    import_extra,
    require,
    rng,
    shown,
)
from fedclade.data.arrays import as_indices
from fedclade.data.pool import Pool

# The result of a partition, and what all partitions use.

TestRule = Literal["pool", "parts", "matched", "own"]
"""What to test clients on.

The whole test split; an equal part of it; its examples in proportion to the client's labels; or
examples of their own.
"""


@dataclass(frozen=True, eq=False)
class Parts:
    """What each client gets: indices into the pool, all in ``pool.train``, or in ``pool.test`` for tests of its own."""

    indices: list[Indices]  # of each client; no index is given out twice
    names: list[str] | None = None  # of the clients, where the partition knows them
    test: TestRule = (
        "matched"  # so that a client's test data has the distribution of its training data
    )
    own_test_fraction: float = (
        0.2  # of its own examples, that a client holds back where it is tested on these
    )


def shuffle_training(pool: Pool, seed: int) -> Indices:
    """Return the training examples in random order."""
    return rng.generator(seed, "partition").permutation(pool.train)


def labels_of(pool: Pool) -> Indices:
    """Return the groups that occur in the training data, in order; a partition by label goes by these."""
    check_groups(pool)
    return np.unique(pool.groups[pool.train])


def check_groups(pool: Pool) -> None:
    """Check that a partition can go by labels."""
    if pool.task in ("multilabel", "regression") and not pool.groups.any():
        raise ConfigError(
            f"a partition by label needs labels, but {pool.name} has {pool.task} targets and no "
            "groups; take 'iid', 'quantity_skew' or 'natural'"
        )


def require_labels(labels_per_client: int, labels: Indices, pool: Pool) -> None:
    """Check that there are so many labels for a client."""
    rule = f"from 1 to the number of labels ({len(labels)}) in {pool.name}"
    require(("labels_per_client", labels_per_client, 1 <= labels_per_client <= len(labels), rule))


# The partitions that flwr-datasets has: pathological, dirichlet, shards.


class _NotDrawnError(DataError):
    """The partitioner of flwr-datasets gave up."""


def pathological(pool: Pool, clients: int, seed: int, *, labels_per_client: int = 2) -> Parts:
    """Give each client examples of a few labels only (McMahan et al. 2017; Li et al. 2021, arXiv:2102.02079)."""
    require_labels(labels_per_client, labels_of(pool), pool)
    mode = "first-deterministic"  # so that every label is used once there are enough clients
    options = {"num_classes_per_partition": labels_per_client, "class_assignment_mode": mode}
    return _partition("PathologicalPartitioner", pool, clients, seed, **options)


def check_dirichlet(alpha: float, min_samples: int) -> None:
    """Check the range of :func:`dirichlet`'s numbers."""
    require(
        ("alpha", alpha, 0 < alpha < math.inf, "above 0"),
        ("min_samples", min_samples, min_samples >= 0, "at least 0"),
    )


def check_shards(shards_per_client: int) -> None:
    """Check that clients get a shard."""
    require(("shards_per_client", shards_per_client, shards_per_client >= 1, "at least 1"))


def dirichlet(
    pool: Pool,
    clients: int,
    seed: int,
    *,
    alpha: float = 0.5,
    min_samples: int = 10,
    balanced: bool = False,
    tests: Literal["matched", "own"] = "matched",
) -> Parts:
    """Draw for each label how it is spread over the clients: Dirichlet(alpha) (Yurochkin et al. 2019).

    With ``balanced``, as in the authors' code and in PFLlib's, a client that has more than its even
    share gets no further labels. Clients are tested on ``matched`` examples of the source's test
    split; or that is shared out as well, as in PFLlib, and each client holds back some of its
    ``own`` examples.
    """
    check_dirichlet(alpha, min_samples)
    options = {"alpha": float(alpha), "min_partition_size": min_samples, "self_balancing": balanced}
    if tests == "own":
        pool = replace(pool, train=np.concatenate([pool.train, pool.test]))
    check_groups(pool)
    there = len(pool.train)
    if clients * min_samples > there:
        raise DataError(
            f"{clients} clients with at least min_samples = {min_samples} examples each need "
            f"{clients * min_samples}, but {pool.name} has {there}; set a smaller min_samples, or "
            "fewer clients"
        )
    try:
        parts = _partition("DirichletPartitioner", pool, clients, seed, **options)
    except _NotDrawnError as error:
        raise DataError(
            f"no draw of Dirichlet(alpha = {alpha:g}) gave each of {clients} clients at least "
            f"min_samples = {min_samples} of the {there} examples in {pool.name}; set a smaller "
            "min_samples, fewer clients, or a larger alpha"
        ) from error
    return replace(parts, test=tests)


def shards(pool: Pool, clients: int, seed: int, *, shards_per_client: int = 2) -> Parts:
    """Sort by label, cut into equal shards, and deal each client a few of them (McMahan et al. 2017)."""
    check_shards(shards_per_client)
    shards = clients * shards_per_client
    if shards > len(pool.train):
        raise DataError(
            f"{clients} clients with {shards_per_client} shards each need {shards} training "
            f"examples, but {pool.name} has {len(pool.train)}"
        )
    return _partition(
        "ShardPartitioner", pool, clients, seed, num_shards_per_partition=shards_per_client
    )


def _partition(name: str, pool: Pool, clients: int, seed: int, **options: Any) -> Parts:
    """Partition a pool by its groups with one of flwr-datasets' classes, quietly."""
    check_groups(pool)
    flower = import_extra("flwr_datasets.partitioner", "flwr-datasets", "data", "this partition")
    datasets = import_extra("datasets", "datasets", "data", "this partition")
    drawn = int(rng.generator(seed, "flwr-datasets").integers(2**31))
    partitioner = getattr(flower, name)(
        num_partitions=clients, partition_by="group", seed=drawn, **options
    )
    indices = shuffle_training(pool, seed)
    partitioner.dataset = datasets.Dataset.from_dict(
        {"index": indices, "group": pool.groups[indices]}
    )
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
    ):  # progress bars go to stderr
        warnings.simplefilter("ignore")
        try:
            parts = [
                partitioner.load_partition(client).with_format("numpy")["index"][:]
                for client in range(clients)
            ]
        except ValueError as error:
            raise _NotDrawnError(
                f"flwr-datasets cannot partition {pool.name} like that: {error}"
            ) from error
    return Parts([part.astype(np.int64) for part in parts])


# The partitions of our own: iid, natural, quantity_skew, power_law, label_groups.


def iid(pool: Pool, clients: int, seed: int, *, tests: Literal["all", "parts"] = "all") -> Parts:
    """Shuffle, and cut into parts that differ in size by one at most.

    Clients are tested on ``all`` of the source's test split, or it is cut into ``parts`` as well.
    """
    require(("tests", tests, tests in ("all", "parts"), "'all' or 'parts'"))
    return Parts(
        np.array_split(shuffle_training(pool, seed), clients),
        test="pool" if tests == "all" else "parts",
    )


def natural(
    pool: Pool,
    clients: int | None,
    seed: int,
    *,
    min_samples: int = 2,
    owners: Literal["largest", "random"] = "largest",
) -> Parts:
    """Make each owner (writer, speaker, user) a client, of those with at least ``min_samples`` examples.

    They are the ``largest``, those with the most examples, most first; or ``random`` ones, as FL+HC
    takes 367 writers of FEMNIST (Briggs et al. 2020, section II-A). Fewer clients of a seed are
    then the first of more.
    """
    if pool.natural is None:
        raise DataError(
            f"partition 'natural' needs data that says who owns each example; {pool.name} does not"
        )
    # An owner needs two examples: one to train on, one to be tested on.
    require(("min_samples", min_samples, min_samples >= 2, "at least 2"))
    order = shuffle_training(pool, seed)
    names, owner, counts = np.unique(pool.natural[order], return_inverse=True, return_counts=True)
    if owners == "random":
        in_order = rng.generator(seed, "owners").permutation(len(names))
    else:
        in_order = np.argsort(-counts, kind="stable")
    chosen = in_order[counts[in_order] >= min_samples][:clients]
    if len(chosen) < (clients or 1):
        raise DataError(
            f"{clients or 1} clients need as many owners with at least {min_samples} examples, but "
            f"of the {len(names)} owners in {pool.name} only {len(chosen)} have that many"
        )
    of_owner = np.split(order[np.argsort(owner, kind="stable")], np.cumsum(counts)[:-1])
    return Parts([of_owner[i] for i in chosen], names=names[chosen].tolist(), test="own")


def quantity_skew(
    pool: Pool, clients: int, seed: int, *, exponent: float = 2.5, min_samples: int = 10
) -> Parts:
    """Shuffle, and cut into parts whose sizes are drawn from a power law, density ``size^-exponent``."""
    require(
        ("exponent", exponent, exponent > 1, "above 1"),
        ("min_samples", min_samples, min_samples >= 1, "at least 1"),
    )
    draw = rng.generator(seed, "power_law")
    weights = (1 - draw.random(clients)) ** (
        -1 / (exponent - 1)
    )  # by inversion of P(size > s) = s^-(exponent - 1)
    spare = _spare(len(pool.train), clients, min_samples, "examples", pool)
    before = (
        np.cumsum(weights)[:-1] / weights.sum()
    )  # what share of the spare goes to the clients before each cut
    cuts = np.floor(spare * before).astype(np.int64) + min_samples * np.arange(1, clients)
    return Parts(np.split(shuffle_training(pool, seed), cuts), test="pool")


def power_law(
    pool: Pool,
    clients: int,
    seed: int,
    *,
    labels_per_client: int = 2,
    sigma: float = 2.0,
    min_samples: int = 10,
) -> Parts:
    """Give client ``i`` label ``i mod C`` and the next ones, in log-normal sizes (Li et al. 2018, for MNIST).

    Every client begins with ``min_samples`` examples, as many of each of its labels. What a label
    has left is shared among its clients in proportion to weights from LogNormal(0, ``sigma``),
    rounded down, so that a few examples are left over. The source's test split is shared out too: a
    client is tested on a tenth of its own examples.
    """
    everything = replace(pool, train=np.concatenate([pool.train, pool.test]))
    labels = labels_of(everything)
    require(
        ("sigma", sigma, 0 <= sigma < math.inf, "at least 0"),
        ("min_samples", min_samples, min_samples >= 1, "at least 1"),
    )
    require_labels(labels_per_client, labels, pool)
    first = -(-min_samples // labels_per_client)
    held = (np.arange(clients)[:, None] + np.arange(labels_per_client)) % len(
        labels
    )  # [clients, labels_per_client]
    weights = rng.generator(seed, "log-normal").lognormal(0, sigma, held.shape)
    indices = shuffle_training(everything, seed)
    of_client: list[list[Indices]] = [[] for _ in held]
    for place, label in enumerate(labels):
        holders, slots = np.nonzero(held == place)
        mine, shares = indices[pool.groups[indices] == label], weights[holders, slots]
        spare = _spare(len(mine), len(holders), first, f"examples of label {label}", pool)
        counts = first + np.floor(spare * shares / shares.sum()).astype(np.int64)
        for client, part in zip(
            holders, np.split(mine, np.cumsum(counts)), strict=False
        ):  # the last part is left over
            of_client[client].append(part)
    return Parts([np.concatenate(parts) for parts in of_client], test="own", own_test_fraction=0.1)


def label_groups(pool: Pool, clients: int, seed: int, *, clusters: int = 2) -> Parts:
    """Cut the labels into ``clusters`` runs; client ``i`` gets an equal share of what run ``i mod clusters`` has."""
    labels = labels_of(pool)
    enough = (
        clusters <= len(labels),
        f"at most the number of labels ({len(labels)}) for label_groups",
    )
    require(
        (
            "clusters",
            clusters,
            1 <= clusters <= clients,
            f"from 1 to the number of clients ({clients})",
        ),
        ("clusters", clusters, *enough),
    )
    indices = shuffle_training(pool, seed)
    parts: list[Indices] = [indices] * clients
    for cluster, run in enumerate(np.array_split(labels, clusters)):
        members = range(cluster, clients, clusters)
        shares = np.array_split(indices[np.isin(pool.groups[indices], run)], len(members))
        for client, share in zip(members, shares, strict=True):
            parts[client] = share
    return Parts(parts)


def _spare(there: int, clients: int, least: int, what: str, pool: Pool) -> int:
    """Return how many examples are left after each client got its least."""
    if there < least * clients:
        raise DataError(
            f"{clients} clients with at least {least} {what} each need {least * clients}, but "
            f"there are {there} in {pool.name} to share; ask for fewer clients or a smaller "
            "min_samples"
        )
    return there - least * clients


@dataclass(frozen=True)
class Partition:
    """One way to partition: ``split(pool, clients, seed, **arguments)``, whose keyword-only parameters are options."""

    split: Callable[..., Parts]
    description: str  # for ``fedclade ls partitions``
    whole: bool = (
        False  # whether the source's test split is shared out as well, or it is where tests = "own"
    )
    even: bool = False  # whether all clients get equally many examples, so that each must have samples_per_client
    by_place: bool = (
        False  # whether clients differ by their place, so that newcomers are drawn from among all
    )
    check: Callable[..., None] | None = (
        None  # of the range of some arguments, by name, before there is any data
    )


def partition_pool(
    pool: Pool,
    name: str,
    *,
    clients: int | None,
    samples_per_client: int | None = None,
    other_samples: Mapping[int, int] | None = None,
    seed: int = 0,
    **arguments: Any,
) -> Parts:
    """Partition a pool's training examples among clients, by a name that :func:`find_partition` knows.

    Of each client at most ``samples_per_client`` examples are kept, drawn at random;
    ``other_samples`` has other limits for some of the clients, by their number. ``clients`` is None
    for all that the data knows (``natural`` only).
    """
    kind = find_partition(name)
    check_arguments(f"partition {name!r}", kind.split, arguments)
    everyone, other = clients is None and name == "natural", other_samples or {}
    require(
        ("clients", clients, everyone or (clients is not None and clients >= 1), "at least 1"),
        (
            "samples_per_client",
            samples_per_client,
            samples_per_client is None or samples_per_client >= 1,
            "at least 1",
        ),
    )
    if clients is not None and name != "natural":
        needed = (clients - len(other)) * (samples_per_client or 1) + sum(
            samples or 1 for samples in other.values()
        )
        whole = kind.whole or arguments.get("tests") == "own"
        there = len(pool.train) + (len(pool.test) if whole else 0)
        if needed > there:
            raise DataError(
                f"{clients} clients with {samples_per_client or 1} training examples each need "
                f"{needed}, but {pool.name} has {there}; ask for fewer clients or a smaller "
                "samples_per_client"
            )
    given = pool, clients, seed
    if name in PARTITIONS:
        parts = kind.split(*given, **arguments)
    else:
        parts = _checked(
            call_own(f"partition {name!r}", kind.split, *given, **arguments), pool, clients, name
        )
    limits = [other.get(client, samples_per_client) for client in range(len(parts.indices))]
    kept = list(parts.indices)
    for client, (indices, limit) in enumerate(zip(parts.indices, limits, strict=True)):
        if limit is None:
            continue
        if kind.even and len(indices) < limit:
            raise DataError(
                f"samples_per_client={limit} is more than partition {name!r} has for client "
                f"{client}: {len(indices)}; ask for fewer clients (now {len(limits)}) or a smaller "
                "samples_per_client"
            )
        kept[client] = rng.generator(seed, "samples_per_client", client).permutation(indices)[
            :limit
        ]
    return replace(parts, indices=kept)


PARTITIONS: Mapping[str, Partition] = MappingProxyType(
    {
        "iid": Partition(iid, "shuffled, then cut into equal parts", even=True),
        "pathological": Partition(
            pathological, "each client has examples of labels_per_client=2 labels only"
        ),
        "dirichlet": Partition(
            dirichlet,
            "each label is spread over the clients by Dirichlet(alpha=0.5)",
            check=check_dirichlet,
        ),
        "shards": Partition(
            shards,
            "sorted by label and cut into shards; shards_per_client=2 each",
            even=True,
            check=check_shards,
        ),
        "natural": Partition(
            natural,
            'by owner: writer, speaker, user; owners="largest" or "random" ones',
            by_place=True,
        ),
        "quantity_skew": Partition(quantity_skew, "iid, but for sizes from a power law"),
        "power_law": Partition(
            power_law,
            "overlapping runs of labels_per_client=2 labels in log-normal sizes (FedProx)",
            whole=True,
            by_place=True,
        ),
        "label_groups": Partition(
            label_groups,
            "runs of labels, one for each of the true clusters",
            even=True,
            by_place=True,
        ),
    }
)


def find_partition(name: object) -> Partition:
    """Return a partition by its name: one of :data:`PARTITIONS`, a package's, or ``module:function``.

    A user's own is a function ``split(pool, clients, seed, *, ...)``; what it takes by name is an
    option in ``[data]``. It returns, for each client, indices into the pool, all of them in
    ``pool.train``: a list of arrays, or :class:`Parts`. Newcomers are drawn from among all of its
    clients.

    Raises
    ------
    ConfigError
        If the name is unknown, cannot be imported, or stands for something else.
    """
    given = "the indices of each client's examples", ("pool", "clients", "seed")
    return function_named("partitions", name, PARTITIONS, partial(Partition, by_place=True), *given)


def _checked(parts: Any, pool: Pool, clients: int | None, name: str) -> Parts:
    """Check what a user's own partition returned: it gives every client examples, and no example twice."""
    what = f"partition {name!r}"
    if not isinstance(parts, Parts | list | tuple | np.ndarray):
        raise DataError(
            f"{what} should return the indices of each client's examples, got {shown(parts)}"
        )
    parts = parts if isinstance(parts, Parts) else Parts([*parts])
    held = [
        as_indices(indices, f"the indices of client {i} by {what}")
        for i, indices in enumerate(parts.indices)
    ]
    if clients is not None and len(held) != clients:
        raise DataError(
            f"{what} should give each of {clients} clients its examples, got those of {len(held)}"
        )
    if empty := [i for i, indices in enumerate(held) if len(indices) == 0]:
        raise DataError(
            f"{what} should give every client examples, and gives client {empty[0]} none"
        )
    given = np.concatenate(held)
    own = np.concatenate([pool.train, pool.test]) if parts.test == "own" else pool.train
    if len(odd := np.setdiff1d(given, own)):
        raise DataError(
            f"{what} should give indices in pool.train, got {odd[0]}, which is not among them"
        )
    if len(given) > len(np.unique(given)):
        raise DataError(
            f"{what} should give every example to one client alone, and gives some to several"
        )
    return replace(parts, indices=held)


# Newcomers: clients that are held back from training, and the data that they get.


def share_examples(
    pool: Pool,
    partition: str,
    clients: int | None,
    newcomers: int,
    *,
    samples_per_client: int | None,
    newcomer_samples: int | None,
    clusters: int,
    seed: int,
    arguments: Mapping[str, Any],
) -> tuple[Parts, list[int]]:
    """Partition a pool among clients and newcomers.

    If clients keep ``samples_per_client`` examples each, newcomers get theirs from what is left,
    and the clients have the same data with newcomers as without. Otherwise the pool is partitioned
    among all, and newcomers are drawn from them. They keep ``newcomer_samples`` examples, by
    default as many as the clients.

    Returns
    -------
    parts
        Of the clients, then of the newcomers.
    places
        For each of them a number that modulo ``clusters`` is its true cluster; the numbers of
        newcomers in two clusters differ by one at most.
    """
    kept: dict[str, Any] = {"samples_per_client": samples_per_client, "seed": seed, **arguments}
    if clients is None or newcomers == 0:
        parts = partition_pool(pool, partition, clients=clients, **kept)
        return parts, [*range(len(parts.indices))]
    if clients + newcomers > len(pool.x):
        raise DataError(
            f"{clients} clients and {newcomers} newcomers need an example each, but {pool.name} "
            f"has {len(pool.x)}; ask for fewer"
        )
    few = samples_per_client if newcomer_samples is None else newcomer_samples
    if samples_per_client is None or find_partition(partition).by_place:
        places = _newcomers_last(clients, newcomers, clusters, seed)
        other = {} if few is None else dict.fromkeys(places[clients:], few)
        parts = partition_pool(
            pool, partition, clients=clients + newcomers, other_samples=other, **kept
        )
        names = None if parts.names is None else [parts.names[place] for place in places]
        return replace(
            parts, indices=[parts.indices[place] for place in places], names=names
        ), places
    parts = partition_pool(pool, partition, clients=clients, **kept)
    taken = np.concatenate(parts.indices)  # of the test split as well, where that is shared out
    left = replace(pool, train=np.setdiff1d(pool.train, taken), test=np.setdiff1d(pool.test, taken))
    if newcomers * (few or 1) > len(left.train):
        raise DataError(
            f"{newcomers} newcomers with {few} training examples each need "
            f"{newcomers * (few or 1)}, but the other clients leave {len(left.train)} of "
            f"{pool.name}; ask for fewer newcomers, or for a smaller newcomers.samples_per_client "
            "or data.samples_per_client"
        )
    kept |= {"samples_per_client": few, "seed": rng.torch_seed(seed, "newcomers")}
    late = partition_pool(left, partition, clients=newcomers, **kept)
    return replace(parts, indices=[*parts.indices, *late.indices]), [
        *range(clients),
        *range(newcomers),
    ]


def _newcomers_last(clients: int, newcomers: int, clusters: int, seed: int) -> list[int]:
    """Draw the newcomers from all clients, from each true cluster in turn; return all, the newcomers last."""
    everyone = range(clients + newcomers)
    draw = rng.generator(seed, "newcomers")
    of_cluster = [
        draw.permutation(everyone[cluster::clusters]).tolist() for cluster in range(clusters)
    ]
    late = [of_cluster[i % clusters][i // clusters] for i in range(newcomers)]
    return sorted(set(everyone) - set(late)) + late


# What each client keeps for testing and validation.


def split_train_test(
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
        lots = np.array_split(
            rng.generator(seed, "test").permutation(pool.test), len(parts.indices)
        )
        return parts.indices, [lot[:test_samples] for lot in lots]
    tests = [
        _matched(pool, train, test_samples, seed, client)
        for client, train in enumerate(parts.indices)
    ]
    return parts.indices, tests


def _own_tests(
    pool: Pool, parts: Parts, test_samples: int | None, seed: int
) -> tuple[list[Indices], list[Indices]]:
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
    indices: Indices,
    fraction: float,
    purpose: str,
    seed: int,
    client: int,
    at_most: int | None = None,
) -> tuple[Indices, Indices]:
    """Return what stays and what is set aside: the fraction, drawn at random, at least one example unless it is 0.

    Of two examples and more, one stays at least.
    """
    aside = max(1, min(round(fraction * len(indices)), len(indices) - 1)) if fraction else 0
    aside = aside if at_most is None else min(aside, at_most)
    order = rng.generator(seed, purpose, client).permutation(indices)
    return order[aside:], order[:aside]


def _matched(
    pool: Pool, train: Indices, test_samples: int | None, seed: int, client: int
) -> Indices:
    """Draw test examples, each at most once, whose labels are in the proportions of the client's training labels.

    As many as the test split allows: the scarcest label sets the number. Labels that the split
    lacks are left out.
    """
    groups, counts = np.unique(pool.groups[train], return_counts=True)
    there = np.asarray([(pool.groups[pool.test] == group).sum() for group in groups])
    groups, counts, there = groups[there > 0], counts[there > 0], there[there > 0]
    if len(groups) == 0:
        raise DataError(
            f"client {client} cannot be tested: none of its labels "
            f"{np.unique(pool.groups[train]).tolist()} is in the test split of {pool.name}"
        )
    size = int((there * counts.sum() // counts).min())
    wanted = _proportional(counts, size if test_samples is None else min(size, test_samples))
    draw = rng.generator(seed, "test", client)
    candidates = [pool.test[pool.groups[pool.test] == group] for group in groups]
    return np.concatenate(
        [draw.permutation(of_group)[:k] for of_group, k in zip(candidates, wanted, strict=True)]
    )


def _proportional(counts: Indices, total: int) -> Indices:
    """Divide a total in proportion to counts, in whole numbers: the largest remainders are rounded up."""
    shares, remainders = np.divmod(counts * total, counts.sum())
    up = np.argsort(-remainders, kind="stable")[: total - shares.sum()]
    shares[up] += 1
    return shares
