"""From a source's name to a federation: pool, partition, shift, and each client's validation and test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch.utils.data import Dataset

from fedclade.core import ConfigError, checked, defaults, known_arguments, require, rng, unknown
from fedclade.data.client_data import Augment, resolve_augment
from fedclade.data.drift import Drift, apply_drift, read_drift
from fedclade.data.federation import ClientData, Federation
from fedclade.data.partition import (
    Parts,
    find_partition,
    set_aside,
    share_examples,
    split_train_test,
)
from fedclade.data.poisoned import apply_views
from fedclade.data.pool import Pool, Scaling
from fedclade.data.shift import find_shift, shift_views
from fedclade.data.sources import SOURCES, load_pool
from fedclade.data.user_data import pool_from_torch
from fedclade.data.view import View

DEFAULT_CLUSTERS = 4


@checked("source")
def load_federation(
    source: str | Pool | Dataset[Any] = "digits",
    *,
    clients: int | None = 20,
    samples_per_client: int | None = None,
    partition: str = "iid",
    shift: str = "none",
    clusters: int | None = None,
    validation_fraction: float = 0.0,
    test_samples: int | None = None,
    test_fraction: float | None = None,
    scaling: Scaling = "source",
    augment: Augment | str | None = None,
    drift: Drift | Mapping[str, Any] | None = None,
    views: Literal["parts", "each"] = "parts",
    newcomers: int = 0,
    newcomer_samples: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
    source_arguments: Mapping[str, Any] | None = None,
    partition_arguments: Mapping[str, Any] | None = None,
    shift_arguments: Mapping[str, Any] | None = None,
) -> Federation:
    """Build a federation: load the data, partition it, and make clients of different clusters see it differently.

    A client's test data follows the distribution of its training data, and its shift. With an iid
    partition every client is tested on the source's whole test split (Sattler et al. 2019, eq. 53).
    If clients differ in their labels, each is tested on test examples in the proportions of its own
    labels. With partition ``natural``, or if the source has no test split, a client is tested on
    examples of its own: those in the source's test split if every client has some there, else some
    that it holds back, as with partition ``power_law``.

    Parameters
    ----------
    source
        One of :data:`~fedclade.data.SOURCES`, a :class:`~fedclade.data.Pool`, or a map-style torch
        data set of ``(x, label)`` pairs.
    clients
        How many. None, with partition ``natural`` only: all that the data knows.
    samples_per_client
        Keep at most so many examples of each client (what it holds back included); None keeps all.
    partition
        One of :data:`~fedclade.data.PARTITIONS`, a package's, or ``module:function``.
    shift
        One of :data:`~fedclade.data.SHIFTS`, a package's, or ``module:function``.
    clusters
        Number of true clusters, for a shift or for partition ``label_groups``; by default 4, or
        fewer if there are not that many clients or, for ``label_groups``, labels. Otherwise 1 or
        None.
    validation_fraction
        Part of each client's training examples that it sets aside as validation data, and then does
        not train on, in [0, 1); if above 0, then at least one example, but not all of several.
    test_samples
        Test each client on at most so many examples; None on as many as there are.
    test_fraction
        Part of its own examples that a client holds back for testing, in (0, 1), where it is tested
        on these; None: a tenth with partition ``power_law``, as in Li et al. 2018, otherwise a
        fifth.
    scaling
        Of images: by mean and standard deviation of the ``source``; to the ``unit`` interval and no
        further, as FL+HC has MNIST, by its threshold; or by mean and deviation of each ``pixel``
        over all images of the source, as Li et al. 2018 and FedGroup have it.
    augment
        A function that the inputs of every training batch go through, or its ``module:function``;
        see :class:`Federation`.
    drift
        How clients' data changes during a run, a :class:`~fedclade.data.Drift` or its fields; it
        does not, if left out.
    views
        Whether the true clusters of a shift share the source's training examples between them, in
        ``parts``, or ``each`` has all of them, as in IFCA's rotated MNIST (Ghosh et al. 2020), for
        equally many clients.
    newcomers
        Number of further clients, held back from training: ``Federation.newcomers``, spread evenly
        over the true clusters. With ``samples_per_client`` they get what the others leave, whose
        data is the same as without them; otherwise they are drawn from all.
    newcomer_samples
        Keep at most so many examples of each newcomer; by default as many as of the others.
    seed
        Same seed, same federation.
    data_dir
        Folder with the data; see :func:`~fedclade.data.load_pool`.
    source_arguments, partition_arguments, shift_arguments
        Options of the source, of the partition and of the shift.

    Raises
    ------
    ConfigError
        If a name or an argument is unknown or a value is out of range.
    DataError
        If the data is missing, unreadable, or cannot be partitioned like that.
    MissingExtraError
        If an optional package is needed and not installed.
    """
    arguments, augmented = dict(partition_arguments or {}), resolve_augment(augment)
    check_newcomers(newcomers, newcomer_samples, clients)
    check_data_settings(
        clients=clients,
        samples_per_client=samples_per_client,
        partition=partition,
        shift=shift,
        clusters=clusters,
        validation_fraction=validation_fraction,
        test_samples=test_samples,
        test_fraction=test_fraction,
        scaling=scaling,
        drift=drift,
        views=views,
    )
    doubled = partition == "label_groups" and "clusters" in arguments
    named, given = isinstance(source, str), dict(source_arguments or {})
    require(
        ("seed", seed, seed >= 0, "at least 0"),
        (
            "partition_arguments",
            arguments,
            not doubled,
            "without 'clusters', which is a setting of its own",
        ),
        (
            "source_arguments",
            given,
            named or not given,
            "empty unless the source is given by its name",
        ),
    )
    if isinstance(source, str):
        if (
            source in SOURCES
            and "clients" in known_arguments(SOURCES[source].load)
            and clients is not None
        ):
            given = {
                "clients": clients + newcomers,
                **given,
            }  # a source that is made for so many clients
        source = load_pool(source, data_dir=data_dir, seed=seed, **given)
    pool = (source if isinstance(source, Pool) else pool_from_torch(source)).scaled(scaling)
    if partition == "label_groups":
        labels = len(np.unique(pool.groups[pool.train]))
        clusters = arguments["clusters"] = clusters or min(DEFAULT_CLUSTERS, clients or 1, labels)
    elif shift != "none" and clients is not None and not find_shift(shift).of_clients:
        clusters = clusters or min(DEFAULT_CLUSTERS, clients)
    limits = {"samples_per_client": samples_per_client, "newcomer_samples": newcomer_samples}
    share = partial(
        share_examples, pool, partition, clusters=clusters or 1, arguments=arguments, **limits
    )
    if views == "each":
        parts, places = _each_view(share, clients, newcomers, shift, clusters or 1, seed)
    else:
        parts, places = share(clients, newcomers, seed=seed)
    if test_fraction is not None:
        parts = replace(parts, own_test_fraction=test_fraction)
    n = len(places) - newcomers
    if shift != "none" and not find_shift(shift).of_clients:
        clusters = clusters or min(DEFAULT_CLUSTERS, n)
    seen_by, drawn = shift_views(
        pool, shift, clients=n, clusters=clusters or 1, seed=seed, **(shift_arguments or {})
    )
    kind = find_shift(shift)
    if kind.of_clients:
        clusters = len(seen_by)
        cluster_of = [*drawn, *(newcomer % clusters for newcomer in range(newcomers))]
    else:
        cluster_of = [place % len(seen_by) for place in places]
    of_each = [seen_by[cluster] for cluster in cluster_of]
    members = _client_data(pool, parts, of_each, validation_fraction, test_samples, seed)
    usual = {"clusters": clusters, **defaults(find_partition(partition).split)}
    unusual = {key: value for key, value in arguments.items() if value != usual.get(key)}
    partitioned = f", partition {partition}{_told(unusual)}"
    all_of_shift = {**defaults(kind.views), **(shift_arguments or {})}
    shifted = f", shift {shift}{_told(all_of_shift)}" if shift != "none" else ""
    is_drawn = kind.of_clients  # so that how many there are is for the seed to say
    grouped = (
        f", {clusters} cluster{'s' if clusters > 1 else ''}" if clusters and not is_drawn else ""
    )

    def federation(
        members: tuple[ClientData, ...], newcomers: Federation | None = None
    ) -> Federation:
        truth = {client.id: cluster_of[client.id] for client in members} if clusters else None
        description = f"{pool.name}, {len(members)} clients{partitioned}{shifted}{grouped}"
        return Federation(pool, members, truth, description, newcomers, augmented)

    whole = federation(members[:n], federation(members[n:]) if newcomers else None)
    moving = read_drift(drift)
    return (
        apply_views(whole, seen_by) if moving is None else apply_drift(whole, seen_by, moving, seed)
    )


def _told(arguments: Mapping[str, Any]) -> str:
    return (
        f" ({', '.join(f'{name} {value}' for name, value in arguments.items())})"
        if arguments
        else ""
    )


def _each_view(
    share: Callable[..., tuple[Parts, list[int]]],
    clients: int | None,
    newcomers: int,
    shift: str,
    clusters: int,
    seed: int,
) -> tuple[Parts, list[int]]:
    """Share the source out once for each true cluster; client i is the next one of cluster i mod ``clusters``."""
    shifted = shift != "none" and not find_shift(shift).of_clients
    whole = clients is not None and clients % clusters == 0
    require(
        (
            "views",
            "each",
            shifted,
            "'parts' without a shift, or with one that draws a view for each client",
        ),
        (
            "clients",
            clients,
            whole,
            f"a multiple of the number of clusters ({clusters}) where each has all examples",
        ),
        ("newcomers.clients", newcomers, newcomers == 0, "0 where each cluster has all examples"),
    )
    count = (clients or 0) // clusters
    each = [
        share(count, 0, seed=rng.torch_seed(seed, "view", k) % 2**31)[0] for k in range(clusters)
    ]
    indices = [
        each[client % clusters].indices[client // clusters] for client in range(count * clusters)
    ]
    return replace(each[0], indices=indices, names=None), [*range(len(indices))]


def _client_data(
    pool: Pool,
    parts: Parts,
    views: Sequence[View],
    validation_fraction: float,
    test_samples: int | None,
    seed: int,
) -> tuple[ClientData, ...]:
    """Return every client with its training, validation and test data, and its view of them."""
    names = parts.names or [f"client-{i}" for i in range(len(parts.indices))]
    trains, tests = split_train_test(pool, parts, test_samples, seed)
    members: list[ClientData] = []
    for i, view in enumerate(views):
        train, validation = set_aside(
            trains[i], validation_fraction, "validation", seed=seed, client=i
        )
        draw = rng.generator(seed, "classes", i)
        train, validation, test = (
            view.chosen(indices, pool, draw) for indices in (train, validation, tests[i])
        )
        members.append(
            ClientData(i, names[i], i, train, validation, test, view.label_map, view.quarter_turns)
        )
    return tuple(members)


def check_data_settings(
    *,
    clients: int | None = 20,
    samples_per_client: int | None = None,
    partition: str = "iid",
    shift: str = "none",
    clusters: int | None = None,
    validation_fraction: float = 0.0,
    test_samples: int | None = None,
    test_fraction: float | None = None,
    scaling: Scaling = "source",
    drift: Drift | Mapping[str, Any] | None = None,
    views: str = "parts",
) -> None:
    """Check the settings of :func:`load_federation` that can be checked without the data."""
    find_partition(partition)
    find_shift(shift)
    read_drift(drift)
    if scaling not in get_args(Scaling):
        raise ConfigError(unknown("scaling", scaling, get_args(Scaling)))
    everyone = clients is None and partition == "natural"
    is_fraction = test_fraction is None or 0 < test_fraction < 1
    grouped, shifted = partition == "label_groups", shift != "none"
    without_clusters = "1 or left out when there is neither a shift nor partition 'label_groups'"
    no_shift = "'none' with partition 'label_groups', which makes clusters itself"
    require(
        ("clients", clients, everyone or (clients is not None and clients >= 1), "at least 1"),
        (
            "samples_per_client",
            samples_per_client,
            samples_per_client is None or samples_per_client >= 1,
            "at least 1",
        ),
        ("clusters", clusters, clusters is None or clusters >= 1, "at least 1"),
        ("clusters", clusters, clusters in (None, 1) or grouped or shifted, without_clusters),
        ("shift", shift, not (grouped and shifted), no_shift),
        ("validation_fraction", validation_fraction, 0 <= validation_fraction < 1, "in [0, 1)"),
        ("test_samples", test_samples, test_samples is None or test_samples >= 1, "at least 1"),
        ("test_fraction", test_fraction, is_fraction, "greater than 0 and less than 1"),
        ("views", views, views in ("parts", "each"), "'parts' or 'each'"),
    )


def check_newcomers(newcomers: int, newcomer_samples: int | None, clients: int | None) -> None:
    """Check the settings of newcomers; see :func:`load_federation`."""
    counted, some = (
        newcomers == 0 or clients is not None,
        newcomer_samples is None or newcomer_samples >= 1,
    )
    require(
        ("newcomers.clients", newcomers, newcomers >= 0, "at least 0"),
        (
            "newcomers.clients",
            newcomers,
            counted,
            "0 unless data.clients says how many others there are",
        ),
        ("newcomers.samples_per_client", newcomer_samples, some, "at least 1"),
    )
