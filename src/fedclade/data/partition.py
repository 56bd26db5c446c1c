"""Partitions: the assignment of training and test examples of a pool to clients."""

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

from fedclade import catalogue
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

# The result of a partition, and helpers of all partitions.

TestRule = Literal["pool", "parts", "matched", "own"]
"""Rule that determines the test examples of a client.

``pool``: the whole test split; ``parts``: an equal part of the test split; ``matched``: test
examples in the proportions of the client's training labels; ``own``: some of the client's own
examples.
"""


@dataclass(frozen=True, eq=False)
class Parts:
    """Result of a partition: the examples of each client, and the rule for its test data.

    Parameters
    ----------
    indices
        Indices into the pool, int64 ``[n]`` for each client with n examples. All indices are in
        ``pool.train``. If ``test`` is ``own``, they may also be in ``pool.test``. No index belongs
        to two clients.
    names
        Names of the clients; None if the partition does not determine names.
    test
        Rule for the test examples of the clients; see :data:`TestRule`.
    own_test_fraction
        Fraction of its examples that a client holds out for testing if ``test`` is ``own``.
    """

    indices: list[Indices]
    names: list[str] | None = None
    test: TestRule = "matched"
    own_test_fraction: float = 0.2


def shuffle_training(pool: Pool, seed: int) -> Indices:
    """Return the indices of the pool's training examples in random order."""
    return rng.generator(seed, "partition").permutation(pool.train)


def list_labels(pool: Pool) -> Indices:
    """Return the distinct labels (groups) of the training examples, in ascending order."""
    check_groups(pool)
    return np.unique(pool.groups[pool.train])


def check_groups(pool: Pool) -> None:
    """Check that a pool has labels or other groups, as a partition by label needs."""
    if pool.task in ("multilabel", "regression", "segmentation") and not pool.groups.any():
        raise ConfigError(
            f"a partition by label needs labels, but {pool.name} has {pool.task} targets and no "
            "groups; use partition 'iid', 'quantity_skew' or 'natural'"
        )


def check_labels_per_client(labels_per_client: int, labels: Indices, pool: Pool) -> None:
    """Check that ``labels_per_client`` is at most the number of labels in the pool."""
    rule = f"from 1 to the number of labels ({len(labels)}) in {pool.name}"
    is_possible = 1 <= labels_per_client <= len(labels)
    require(("labels_per_client", labels_per_client, is_possible, rule))


def merge_splits(pool: Pool) -> Pool:
    """Return the pool with its test examples added to the training examples."""
    return replace(pool, train=np.concatenate([pool.train, pool.test]))


# Partitions by flwr-datasets: pathological, dirichlet, shards.


class _NotDrawnError(DataError):
    """Error of a partitioner of the package flwr-datasets that found no valid partition."""


def pathological(pool: Pool, clients: int, seed: int, *, labels_per_client: int = 2) -> Parts:
    """Give each client examples of ``labels_per_client`` labels only.

    Source: McMahan et al. 2017; Li et al. 2021, arXiv:2102.02079.
    """
    check_labels_per_client(labels_per_client, list_labels(pool), pool)
    options = {
        "num_classes_per_partition": labels_per_client,
        # This mode uses every label if there are enough clients.
        "class_assignment_mode": "first-deterministic",
    }
    return _run_partitioner("PathologicalPartitioner", pool, clients, seed, **options)


def check_dirichlet(alpha: float, min_samples: int) -> None:
    """Check the range of the options of :func:`dirichlet`."""
    require(
        ("alpha", alpha, 0 < alpha < math.inf, "above 0"),
        ("min_samples", min_samples, min_samples >= 0, "at least 0"),
    )


def check_shards(shards_per_client: int) -> None:
    """Check the range of the option of :func:`shards`."""
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
    """Distribute the examples of each label over the clients in proportions from a Dirichlet law.

    Source: Yurochkin et al. 2019.

    Parameters
    ----------
    pool, clients, seed
        As for all partitions.
    alpha
        Concentration of the Dirichlet distribution, above 0. The smaller alpha is, the more the
        clients' labels differ.
    min_samples
        Smallest number of examples of a client. Shares are drawn again until all clients have at
        least this number.
    balanced
        Whether a client that already has more than its equal share of all examples gets no examples
        of further labels, as in the authors' code and in PFLlib.
    tests
        ``matched``: clients are tested on examples of the source's test split. ``own``: the test
        split is distributed as well, as in PFLlib, and each client holds out some of its examples.

    Raises
    ------
    ConfigError
        If an option is out of range, or the pool has no labels.
    DataError
        If the pool has too few examples, or no draw gave every client at least ``min_samples``
        examples.
    """
    check_dirichlet(alpha, min_samples)
    if tests == "own":
        pool = merge_splits(pool)
    check_groups(pool)
    available = len(pool.train)
    needed = clients * min_samples
    if needed > available:
        raise DataError(
            f"{clients} clients with at least min_samples = {min_samples} examples each need "
            f"{needed}, but {pool.name} has {available}; set a smaller "
            "min_samples, or fewer clients"
        )
    options = {"alpha": float(alpha), "min_partition_size": min_samples, "self_balancing": balanced}
    try:
        parts = _run_partitioner("DirichletPartitioner", pool, clients, seed, **options)
    except _NotDrawnError as error:
        raise DataError(
            f"no draw of Dirichlet(alpha = {alpha:g}) gave each of {clients} clients at least "
            f"min_samples = {min_samples} of the {available} examples in {pool.name}; set a "
            "smaller min_samples, fewer clients, or a larger alpha"
        ) from error
    return replace(parts, test=tests)


def shards(pool: Pool, clients: int, seed: int, *, shards_per_client: int = 2) -> Parts:
    """Sort examples by label, cut them into equal shards, and give each client a few shards.

    Source: McMahan et al. 2017.
    """
    check_shards(shards_per_client)
    needed = clients * shards_per_client
    if needed > len(pool.train):
        raise DataError(
            f"{clients} clients with {shards_per_client} shards each need {needed} training "
            f"examples, but {pool.name} has {len(pool.train)}; set fewer clients or a smaller "
            "shards_per_client"
        )
    options = {"num_shards_per_partition": shards_per_client}
    return _run_partitioner("ShardPartitioner", pool, clients, seed, **options)


def _run_partitioner(name: str, pool: Pool, clients: int, seed: int, **options: Any) -> Parts:
    """Partition a pool by its groups with a partitioner class of the package flwr-datasets.

    The progress bars and warnings of the package are suppressed.
    """
    check_groups(pool)
    flower = import_extra("flwr_datasets.partitioner", "flwr-datasets", "data", "this partition")
    datasets = import_extra("datasets", "datasets", "data", "this partition")
    partitioner_seed = int(rng.generator(seed, "flwr-datasets").integers(2**31))
    partitioner = getattr(flower, name)(
        num_partitions=clients, partition_by="group", seed=partitioner_seed, **options
    )
    indices = shuffle_training(pool, seed)
    partitioner.dataset = datasets.Dataset.from_dict(
        {"index": indices, "group": pool.groups[indices]}
    )
    parts: list[Indices] = []
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            for client in range(clients):
                rows = partitioner.load_partition(client).with_format("numpy")
                parts.append(rows["index"][:].astype(np.int64))
        except ValueError as error:
            raise _NotDrawnError(
                f"flwr-datasets found no partition of {pool.name} with these settings: {error}; "
                "set fewer clients, or change the options of the partition"
            ) from error
    return Parts(parts)


# Our own partitions: iid, natural, quantity_skew, power_law, label_groups.


def iid(pool: Pool, clients: int, seed: int, *, tests: Literal["all", "parts"] = "all") -> Parts:
    """Shuffle the training examples, and cut them into parts whose sizes differ by at most one.

    With ``tests = "all"`` each client is tested on the source's whole test split; with ``"parts"``
    the test split is cut into one part per client.
    """
    require(("tests", tests, tests in ("all", "parts"), "'all' or 'parts'"))
    indices = np.array_split(shuffle_training(pool, seed), clients)
    return Parts(indices, test="pool" if tests == "all" else "parts")


def natural(
    pool: Pool,
    clients: int | None,
    seed: int,
    *,
    min_samples: int = 2,
    owners: Literal["largest", "random"] = "largest",
) -> Parts:
    """Make each owner of examples (writer, speaker, user) a client.

    Parameters
    ----------
    pool, seed
        As for all partitions. The pool needs the owner of each example (``pool.natural``).
    clients
        Number of owners to choose; None for all owners with enough examples.
    min_samples
        Smallest number of examples of a client, at least 2.
    owners
        ``largest``: the owners with the most examples, in descending order. ``random``: owners
        drawn at random, as FL+HC takes 367 writers of FEMNIST (Briggs et al. 2020, section II-A).
        With fewer clients and the same seed, the owners are the first of those drawn for more
        clients.

    Raises
    ------
    ConfigError
        If an option is out of range.
    DataError
        If the pool has no owners, or too few owners have enough examples.
    """
    if pool.natural is None:
        raise DataError(
            f"partition 'natural' needs data with the owner of each example, but {pool.name} has "
            "no owners; use another partition"
        )
    # An owner needs two examples: one for training and one for testing.
    require(("min_samples", min_samples, min_samples >= 2, "at least 2"))
    order = shuffle_training(pool, seed)
    names, owner_of, counts = np.unique(
        pool.natural[order], return_inverse=True, return_counts=True
    )
    if owners == "random":
        ranking = rng.generator(seed, "owners").permutation(len(names))
    else:
        ranking = np.argsort(-counts, kind="stable")
    chosen = ranking[counts[ranking] >= min_samples][:clients]
    needed = clients or 1
    if len(chosen) < needed:
        raise DataError(
            f"{needed} clients need as many owners with at least {min_samples} examples each, but "
            f"only {len(chosen)} of the {len(names)} owners in {pool.name} have that many; set "
            "fewer clients or a smaller min_samples"
        )
    rows_by_owner = order[np.argsort(owner_of, kind="stable")]
    owned = np.split(rows_by_owner, np.cumsum(counts)[:-1])
    return Parts([owned[i] for i in chosen], names=names[chosen].tolist(), test="own")


def quantity_skew(
    pool: Pool, clients: int, seed: int, *, exponent: float = 2.5, min_samples: int = 10
) -> Parts:
    """Shuffle the training examples, and cut them into parts with sizes from a power law.

    The density of sizes is proportional to ``size^-exponent``, and every client has at least
    ``min_samples`` examples.
    """
    require(
        ("exponent", exponent, exponent > 1, "above 1"),
        ("min_samples", min_samples, min_samples >= 1, "at least 1"),
    )
    draw = rng.generator(seed, "power_law")
    # By inversion of P(size > s) = s^-(exponent - 1).
    weights = (1 - draw.random(clients)) ** (-1 / (exponent - 1))
    spare = _count_spare(len(pool.train), clients, min_samples, what="examples", pool=pool)
    # Fraction of the spare examples that goes to the clients before each cut.
    fractions = np.cumsum(weights)[:-1] / weights.sum()
    cuts = np.floor(spare * fractions).astype(np.int64) + min_samples * np.arange(1, clients)
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
    """Give each client consecutive labels, with log-normally distributed numbers of examples.

    The C labels are numbered from 0. Client ``i`` has the ``labels_per_client`` labels that begin
    with label ``i mod C``; label 0 follows the last label. Every client first gets ``min_samples``
    examples, the same number (rounded up) of each of its labels. The remaining examples of a label
    are divided among the clients that have this label, in proportion to weights
    from LogNormal(0, ``sigma``). Numbers are rounded down, so a few examples are not used. The
    source's test split is distributed as well, and a client is tested on a tenth of its own
    examples.

    Source: Li et al. 2018, for MNIST.
    """
    everything = merge_splits(pool)
    labels = list_labels(everything)
    require(
        ("sigma", sigma, 0 <= sigma < math.inf, "at least 0"),
        ("min_samples", min_samples, min_samples >= 1, "at least 1"),
    )
    check_labels_per_client(labels_per_client, labels, pool)
    least = math.ceil(min_samples / labels_per_client)
    # Number of the label in each slot of each client, [clients, labels_per_client].
    label_numbers = np.arange(clients)[:, None] + np.arange(labels_per_client)
    label_numbers %= len(labels)
    weights = rng.generator(seed, "log-normal").lognormal(0, sigma, label_numbers.shape)
    indices = shuffle_training(everything, seed)
    chunks: list[list[Indices]] = [[] for _ in range(clients)]
    for number, label in enumerate(labels):
        owners, slots = np.nonzero(label_numbers == number)
        candidates = indices[pool.groups[indices] == label]
        shares = weights[owners, slots]
        spare = _count_spare(
            len(candidates), len(owners), least, what=f"examples of label {label}", pool=pool
        )
        counts = least + np.floor(spare * shares / shares.sum()).astype(np.int64)
        # The last chunk has the examples that are left over by rounding, and no client.
        of_label = np.split(candidates, np.cumsum(counts))
        for client, chunk in zip(owners, of_label, strict=False):
            chunks[client].append(chunk)
    return Parts([np.concatenate(each) for each in chunks], test="own", own_test_fraction=0.1)


def label_groups(pool: Pool, clients: int, seed: int, *, clusters: int = 2) -> Parts:
    """Divide the labels into ``clusters`` groups of consecutive labels, one for each true cluster.

    Client ``i`` gets an equal share of the examples of group ``i mod clusters``.
    """
    labels = list_labels(pool)
    client_rule = f"from 1 to the number of clients ({clients})"
    label_rule = f"at most the number of labels ({len(labels)}) for label_groups"
    require(
        ("clusters", clusters, 1 <= clusters <= clients, client_rule),
        ("clusters", clusters, clusters <= len(labels), label_rule),
    )
    indices = shuffle_training(pool, seed)
    parts: list[Indices] = [indices] * clients
    for cluster, run in enumerate(np.array_split(labels, clusters)):
        members = range(cluster, clients, clusters)
        candidates = indices[np.isin(pool.groups[indices], run)]
        shares = np.array_split(candidates, len(members))
        for client, share in zip(members, shares, strict=True):
            parts[client] = share
    return Parts(parts)


def _count_spare(available: int, clients: int, least: int, *, what: str, pool: Pool) -> int:
    """Return the number of examples that are left after each client got ``least`` examples.

    Raises
    ------
    DataError
        If the available examples are too few; ``what`` names them in the message.
    """
    needed = least * clients
    if available < needed:
        raise DataError(
            f"{clients} clients with at least {least} {what} each need {needed}, but "
            f"{pool.name} has only {available}; set fewer clients or a smaller min_samples"
        )
    return available - needed


@dataclass(frozen=True)
class Partition:
    """Definition of a partition: the function that distributes examples, and facts about it.

    Parameters
    ----------
    split
        Function ``split(pool, clients, seed, **arguments)``, whose keyword-only parameters are
        options of the user.
    description
        Line for ``fedclade ls partitions``.
    whole
        Whether the partition always distributes the source's test split, in addition to the
        training examples. Partitions with an option ``tests`` distribute the test split if the user
        sets ``tests = "own"``.
    even
        Whether all clients get the same number of examples, so that every client must have at least
        ``samples_per_client`` examples.
    by_place
        Whether the position of a client in the list of clients determines its data. Newcomers are
        then drawn from all clients.
    check
        Function that checks the range of some options before data is loaded. The names of its
        parameters are the names of these options. None if no option is checked.
    """

    split: Callable[..., Parts]
    description: str
    whole: bool = False
    even: bool = False
    by_place: bool = False
    check: Callable[..., None] | None = None


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
    """Partition a pool's training examples among clients.

    Parameters
    ----------
    pool
        The examples of all clients.
    name
        Name of a partition, as for :func:`find_partition`.
    clients
        Number of clients; None, for ``natural`` only, for all owners in the data.
    samples_per_client
        Largest number of examples of a client, which are drawn at random from its examples.
    other_samples
        Limits for single clients in place of ``samples_per_client``, by the number of the client.
    seed
        Seed of all draws.
    **arguments
        Options of the partition.

    Raises
    ------
    ConfigError
        If the name or an option is unknown, or a value is out of range.
    DataError
        If the pool has too few examples, or the user's own partition returns an invalid result.
    """
    kind = find_partition(name)
    check_arguments(f"partition {name!r}", kind.split, arguments)
    limits = other_samples or {}
    is_all = clients is None and name == "natural"
    is_count = clients is not None and clients >= 1
    is_limit = samples_per_client is None or samples_per_client >= 1
    require(
        ("clients", clients, is_all or is_count, "at least 1"),
        ("samples_per_client", samples_per_client, is_limit, "at least 1"),
    )
    if clients is not None and name != "natural":
        is_whole = kind.whole or arguments.get("tests") == "own"
        available = len(pool.train)
        if is_whole:
            available += len(pool.test)
        needed = (clients - len(limits)) * (samples_per_client or 1)
        needed += sum(samples or 1 for samples in limits.values())
        if needed > available:
            raise DataError(
                f"{clients} clients with {samples_per_client or 1} training examples each need "
                f"{needed}, but {pool.name} has {available}; set fewer clients or a smaller "
                "samples_per_client"
            )
    if name in PARTITIONS:
        parts = kind.split(pool, clients, seed, **arguments)
    else:
        returned = call_own(f"partition {name!r}", kind.split, pool, clients, seed, **arguments)
        parts = _check_returned(returned, pool, clients, name)
    return _limit_samples(parts, kind, name, samples_per_client, limits=limits, seed=seed)


def _limit_samples(
    parts: Parts,
    kind: Partition,
    name: str,
    samples_per_client: int | None,
    *,
    limits: Mapping[int, int],
    seed: int,
) -> Parts:
    """Limit each client's examples to ``samples_per_client``, or to its entry in ``limits``."""
    kept = list(parts.indices)
    for client, indices in enumerate(parts.indices):
        limit = limits.get(client, samples_per_client)
        if limit is None:
            continue
        if kind.even and len(indices) < limit:
            raise DataError(
                f"samples_per_client={limit} is more than the number of examples that partition "
                f"{name!r} has for client {client}, {len(indices)}; set fewer clients (now "
                f"{len(kept)}) or a smaller samples_per_client"
            )
        draw = rng.generator(seed, "samples_per_client", client)
        kept[client] = draw.permutation(indices)[:limit]
    return replace(parts, indices=kept)


PARTITIONS: Mapping[str, Partition] = MappingProxyType(
    {
        "iid": Partition(iid, catalogue.PARTITIONS["iid"], even=True),
        "pathological": Partition(pathological, catalogue.PARTITIONS["pathological"]),
        "dirichlet": Partition(dirichlet, catalogue.PARTITIONS["dirichlet"], check=check_dirichlet),
        "shards": Partition(shards, catalogue.PARTITIONS["shards"], even=True, check=check_shards),
        "natural": Partition(natural, catalogue.PARTITIONS["natural"], by_place=True),
        "quantity_skew": Partition(quantity_skew, catalogue.PARTITIONS["quantity_skew"]),
        "power_law": Partition(
            power_law, catalogue.PARTITIONS["power_law"], whole=True, by_place=True
        ),
        "label_groups": Partition(
            label_groups, catalogue.PARTITIONS["label_groups"], even=True, by_place=True
        ),
    }
)


def find_partition(name: object) -> Partition:
    """Find the definition of a partition by its name.

    The name is in :data:`PARTITIONS`, is registered by an installed package, or has the form
    ``module:function``. A user's own partition is a function ``split(pool, clients, seed, *,
    ...)``, whose keyword-only parameters are options in ``[data]``. The function returns indices
    from ``pool.train`` for each client, as a list of arrays or as :class:`Parts`. Newcomers are
    drawn from all clients of such a partition.

    Raises
    ------
    ConfigError
        If the name is unknown, cannot be imported, or does not name a partition.
    """
    return function_named(
        "partitions",
        name,
        builtin=PARTITIONS,
        wrapper=partial(Partition, by_place=True),
        returns="the indices of each client's examples",
        takes=("pool", "clients", "seed"),
    )


def _check_returned(returned: Any, pool: Pool, clients: int | None, name: str) -> Parts:
    """Check the result of a user's own partition, and convert it to :class:`Parts`.

    Every client needs examples, and no example may belong to two clients.
    """
    what = f"partition {name!r}"
    if not isinstance(returned, Parts | list | tuple | np.ndarray):
        raise DataError(
            f"{what} should return the indices of each client's examples, got {shown(returned)}"
        )
    if isinstance(returned, Parts):
        parts = returned
    else:
        parts = Parts([*returned])
    checked = [
        as_indices(indices, f"the indices of client {client} by {what}")
        for client, indices in enumerate(parts.indices)
    ]
    if clients is not None and len(checked) != clients:
        raise DataError(
            f"{what} should return the examples of each of {clients} clients, got the examples of "
            f"{len(checked)} clients"
        )
    empty = [client for client, indices in enumerate(checked) if len(indices) == 0]
    if empty:
        raise DataError(
            f"{what} should give every client at least 1 example, got none for client {empty[0]}"
        )
    given = np.concatenate(checked)
    if parts.test == "own":
        allowed = merge_splits(pool).train
    else:
        allowed = pool.train
    unknown = np.setdiff1d(given, allowed)
    if len(unknown):
        raise DataError(
            f"{what} should return indices in pool.train, got {unknown[0]}, which is not in "
            f"pool.train"
        )
    if len(given) > len(np.unique(given)):
        raise DataError(
            f"{what} should assign every example to at most one client, got examples that belong "
            "to several clients"
        )
    return replace(parts, indices=checked)


# Newcomers: clients that are excluded from training, and their data.


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

    If clients have a limit of ``samples_per_client`` examples, newcomers get examples that no
    client has, so that the clients' data is the same with and without newcomers. Otherwise, and for
    partitions that set :attr:`Partition.by_place`, the pool is partitioned among all of them, and
    newcomers are drawn at random. The limit for newcomers is ``newcomer_samples``, by default the
    same as for clients.

    Returns
    -------
    parts
        Examples of the clients, then of the newcomers.
    places
        A number p for each client, then for each newcomer, whose true cluster is p mod
        ``clusters``. Any two clusters have equally many newcomers, or differ by one newcomer.

    Raises
    ------
    DataError
        If the pool has too few examples.
    """
    # Arguments of the caller override samples_per_client and seed, as in a call of partition_pool.
    options: dict[str, Any] = {"samples_per_client": samples_per_client, "seed": seed, **arguments}
    if clients is None or newcomers == 0:
        parts = partition_pool(pool, partition, clients=clients, **options)
        return parts, [*range(len(parts.indices))]
    if clients + newcomers > len(pool.x):
        raise DataError(
            f"{clients} clients and {newcomers} newcomers need at least 1 example each, but "
            f"{pool.name} has {len(pool.x)}; set fewer clients or newcomers"
        )
    limit = samples_per_client if newcomer_samples is None else newcomer_samples
    if samples_per_client is None or find_partition(partition).by_place:
        places = _place_newcomers_last(clients, newcomers, clusters, seed)
        other_samples: dict[int, int] = {}
        if limit is not None:
            other_samples = dict.fromkeys(places[clients:], limit)
        parts = partition_pool(
            pool, partition, clients=clients + newcomers, other_samples=other_samples, **options
        )
        names = None
        if parts.names is not None:
            names = [parts.names[place] for place in places]
        indices = [parts.indices[place] for place in places]
        return replace(parts, indices=indices, names=names), places

    parts = partition_pool(pool, partition, clients=clients, **options)
    # Some partitions distribute the test split as well.
    taken = np.concatenate(parts.indices)
    left = replace(pool, train=np.setdiff1d(pool.train, taken), test=np.setdiff1d(pool.test, taken))
    needed = newcomers * (limit or 1)
    if needed > len(left.train):
        raise DataError(
            f"{newcomers} newcomers with {limit} training examples each need {needed}, but the "
            f"other clients leave {len(left.train)} of {pool.name}; set fewer newcomers, or a "
            "smaller newcomers.samples_per_client or data.samples_per_client"
        )
    options |= {"samples_per_client": limit, "seed": rng.torch_seed(seed, "newcomers")}
    newcomer_parts = partition_pool(left, partition, clients=newcomers, **options)
    indices = [*parts.indices, *newcomer_parts.indices]
    return replace(parts, indices=indices), [*range(clients), *range(newcomers)]


def _place_newcomers_last(clients: int, newcomers: int, clusters: int, seed: int) -> list[int]:
    """Draw the clients that become newcomers, from each true cluster in turn, and list them last.

    The pool is partitioned among ``clients + newcomers`` clients. The result has their positions in
    this partition: first of the clients that are not drawn, and then of the newcomers.
    """
    everyone = range(clients + newcomers)
    draw = rng.generator(seed, "newcomers")
    orders = [draw.permutation(everyone[cluster::clusters]).tolist() for cluster in range(clusters)]
    drawn = [orders[i % clusters][i // clusters] for i in range(newcomers)]
    return sorted(set(everyone) - set(drawn)) + drawn


# Examples that each client sets aside for testing and validation.


def split_train_test(
    pool: Pool, parts: Parts, test_samples: int | None, seed: int
) -> tuple[list[Indices], list[Indices]]:
    """Determine the training and the test examples of each client by the rule of the partition.

    :func:`~fedclade.load_federation` describes the rules.

    Returns
    -------
    tuple
        Indices of the training examples of each client, and indices of the test examples.
    """
    if parts.test == "own" or len(pool.test) == 0:
        return _split_own(pool, parts, test_samples, seed)
    if parts.test == "pool":
        shared = pool.test
        if test_samples is not None:
            shared = rng.generator(seed, "test").permutation(pool.test)[:test_samples]
        return parts.indices, [shared] * len(parts.indices)
    if parts.test == "parts":
        shuffled = rng.generator(seed, "test").permutation(pool.test)
        shares = np.array_split(shuffled, len(parts.indices))
        return parts.indices, [share[:test_samples] for share in shares]
    tests = [
        _draw_matched(pool, train, test_samples, seed=seed, client=client)
        for client, train in enumerate(parts.indices)
    ]
    return parts.indices, tests


def _split_own(
    pool: Pool, parts: Parts, test_samples: int | None, seed: int
) -> tuple[list[Indices], list[Indices]]:
    """Determine training and test examples of clients that are tested on their own examples.

    If every client has examples in the source's test split, these are its test examples. Otherwise
    each client holds out a part of its examples for testing.
    """
    if parts.names is not None and pool.natural is not None:
        owners = pool.natural[pool.test]
        if np.isin(parts.names, owners).all():
            tests = [pool.test[owners == name][:test_samples] for name in parts.names]
            return parts.indices, tests
    trains: list[Indices] = []
    tests: list[Indices] = []
    for client, indices in enumerate(parts.indices):
        train, test = set_aside(
            indices, parts.own_test_fraction, "test", seed=seed, client=client, at_most=test_samples
        )
        trains.append(train)
        tests.append(test)
    return trains, tests


def set_aside(
    indices: Indices,
    fraction: float,
    purpose: str,
    *,
    seed: int,
    client: int,
    at_most: int | None = None,
) -> tuple[Indices, Indices]:
    """Split a client's examples at random into remaining examples and a set-aside fraction.

    At least one example is set aside unless the fraction is 0, and of two or more examples at least
    one remains.

    Parameters
    ----------
    indices
        Indices of the client's examples.
    fraction
        Fraction to set aside, in [0, 1).
    purpose, seed, client
        Keys of the random draw; ``purpose`` is ``test`` or ``validation``.
    at_most
        Largest number of examples to set aside; None for no limit.

    Returns
    -------
    tuple
        Indices of the remaining examples, and indices of the examples that are set aside.
    """
    count = 0
    if fraction:
        count = max(1, min(round(fraction * len(indices)), len(indices) - 1))
    if at_most is not None:
        count = min(count, at_most)
    order = rng.generator(seed, purpose, client).permutation(indices)
    return order[count:], order[:count]


def _draw_matched(
    pool: Pool, train: Indices, test_samples: int | None, *, seed: int, client: int
) -> Indices:
    """Draw test examples without replacement in the proportions of a client's training labels.

    The number of test examples is the largest that the test split allows for these proportions, up
    to ``test_samples``. Labels that the test split lacks are left out.
    """
    labels, counts = np.unique(pool.groups[train], return_counts=True)
    candidates = [pool.test[pool.groups[pool.test] == label] for label in labels]
    available = np.asarray([len(rows) for rows in candidates])
    candidates = [rows for rows in candidates if len(rows)]
    counts = counts[available > 0]
    available = available[available > 0]
    if len(candidates) == 0:
        raise DataError(
            f"client {client} cannot be tested, as none of its labels "
            f"{labels.tolist()} is in the test split of {pool.name}; use another partition, or "
            "more test data"
        )
    size = int((available * counts.sum() // counts).min())
    if test_samples is not None:
        size = min(size, test_samples)
    draw = rng.generator(seed, "test", client)
    drawn: list[Indices] = []
    for rows, count in zip(candidates, divide_proportionally(counts, size), strict=True):
        drawn.append(draw.permutation(rows)[:count])
    return np.concatenate(drawn)


def divide_proportionally(counts: Indices, total: int) -> Indices:
    """Divide a total in proportion to counts, in whole numbers, by the largest-remainder method."""
    shares, remainders = np.divmod(counts * total, counts.sum())
    rounded_up = np.argsort(-remainders, kind="stable")[: total - shares.sum()]
    shares[rounded_up] += 1
    return shares
