"""Building of a federation from a data source by a partition, a shift and a drift.

The *pool* has all examples of the source, the *partition* assigns them to clients, and the *shift*
gives each true cluster another view of its examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from fedclade.core import (
    ConfigError,
    checked,
    defaults,
    is_choice,
    known_arguments,
    require,
    rng,
    unknown,
)
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
from fedclade.data.view import View

DEFAULT_CLUSTERS = 4


@checked("source")
def load_federation(
    source: str | Pool | torch.utils.data.Dataset[Any] = "digits",
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
    """Build a federation: load the data, partition it, and apply a shift to each true cluster.

    A client's test data has the distribution of its training data, and the same shift. With an iid
    partition every client is tested on the source's whole test split (Sattler et al. 2019, eq. 53).
    If clients differ in their labels, each client is tested on test examples in the proportions of
    its own labels. With the partitions ``natural`` and ``power_law``, or if the source has no test
    split, each client is tested on its own examples. With ``natural`` these are the client's
    examples in the source's test split, if every client has examples there. In all other cases, a
    client holds out some of its examples for testing.

    Parameters
    ----------
    source
        Name in :data:`~fedclade.data.SOURCES`, a :class:`~fedclade.data.Pool`, or a map-style torch
        data set of ``(x, label)`` pairs.
    clients
        Number of clients. None, with partition ``natural`` only: all owners in the data.
    samples_per_client
        Largest number of examples of each client, including held-out examples. None: no limit.
    partition
        Name in :data:`~fedclade.data.PARTITIONS`, the name of an installed package's partition, or
        ``module:function``.
    shift
        Name in :data:`~fedclade.data.SHIFTS`, the name of an installed package's shift, or
        ``module:function``.
    clusters
        Number of true clusters, with a shift or with partition ``label_groups``. By default the
        smallest of 4, the number of clients and (for ``label_groups``) the number of labels. The
        value must be 1 or None if there is neither a shift nor this partition, or if the shift
        draws a view for each client.
    validation_fraction
        Fraction, in [0, 1), of each client's training examples that it sets aside as validation
        data and does not train on. If above 0, at least one example is set aside, and at least one
        of several examples remains.
    test_samples
        Largest number of test examples of each client; None: no limit.
    test_fraction
        Fraction, in (0, 1), of its own examples that a client holds out for testing, if it is
        tested on its own examples. None: a tenth with partition ``power_law``, as in Li et al.
        2018, otherwise a fifth.
    scaling
        Scaling of images. ``source``: by the source's mean and standard deviation. ``unit``: only
        to the interval [0, 1], which fits the threshold that FL+HC uses for MNIST. ``pixel``: by
        mean and standard deviation of each pixel over all images of the source, as in Li et al.
        2018 and FedGroup.
    augment
        Function of the inputs of every training batch, or its ``module:function``; see
        :class:`Federation`.
    drift
        Change of the clients' data during a run, a :class:`~fedclade.data.Drift` or its fields; no
        change by default.
    views
        ``parts``: the true clusters of a shift divide the source's training examples among them.
        ``each``: every true cluster has all training examples, as in IFCA's rotated MNIST (Ghosh et
        al. 2020), and all have the same number of clients.
    newcomers
        Number of further clients, which are excluded from training (``Federation.newcomers``) and
        spread evenly over the true clusters. With ``samples_per_client`` newcomers get examples
        that no other client has, and the other clients' data is the same as without newcomers.
        Otherwise, and with the partitions ``natural``, ``power_law`` and ``label_groups`` and the
        user's own partitions, the data is divided among all clients, and newcomers are drawn from
        these clients.
    newcomer_samples
        Largest number of examples of each newcomer; by default the limit of the other clients.
    seed
        Seed of all draws. The same seed gives the same federation.
    data_dir
        Folder with the data; see :func:`~fedclade.data.load_pool`.
    source_arguments, partition_arguments, shift_arguments
        Options of the source, of the partition and of the shift.

    Raises
    ------
    ConfigError
        If a name or an argument is unknown or a value is out of range.
    DataError
        If the data is missing, unreadable, or cannot be partitioned as specified.
    MissingExtraError
        If an optional package is needed and not installed.
    """
    augment_function = resolve_augment(augment)
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
    options = dict(partition_arguments or {})
    _check_options(source, dict(source_arguments or {}), partition, options, seed=seed)
    pool = _load_examples(
        source, source_arguments or {}, clients, newcomers, data_dir=data_dir, seed=seed
    ).scaled(scaling)

    shift_kind = find_shift(shift)
    is_shared_shift = shift != "none" and not shift_kind.of_clients
    if partition == "label_groups":
        labels = len(np.unique(pool.groups[pool.train]))
        clusters = clusters or min(DEFAULT_CLUSTERS, clients or 1, labels)
        options["clusters"] = clusters
    elif is_shared_shift and clients is not None:
        clusters = clusters or min(DEFAULT_CLUSTERS, clients)

    def share(number: int | None, late: int, share_seed: int) -> tuple[Parts, list[int]]:
        """Partition the pool among ``number`` clients and ``late`` newcomers.

        See :func:`share_examples` for the result; ``share_seed`` is the seed of all draws.
        """
        return share_examples(
            pool,
            partition,
            number,
            late,
            samples_per_client=samples_per_client,
            newcomer_samples=newcomer_samples,
            clusters=clusters or 1,
            seed=share_seed,
            arguments=options,
        )

    if views == "each":
        parts, places = _share_by_view(
            share, clients, newcomers, is_shared_shift, clusters=clusters or 1, seed=seed
        )
    else:
        parts, places = share(clients, newcomers, seed)
    if test_fraction is not None:
        parts = replace(parts, own_test_fraction=test_fraction)

    trained = len(places) - newcomers
    if is_shared_shift:
        # With partition "natural", the number of clients is known only now.
        clusters = clusters or min(DEFAULT_CLUSTERS, trained)
    shift_options = dict(shift_arguments or {})
    cluster_views, drawn = shift_views(
        pool, shift, clients=trained, clusters=clusters or 1, seed=seed, **shift_options
    )
    if shift_kind.of_clients:
        clusters = len(cluster_views)
        cluster_of = [*drawn, *(newcomer % clusters for newcomer in range(newcomers))]
    else:
        cluster_of = [place % len(cluster_views) for place in places]
    client_views = [cluster_views[cluster] for cluster in cluster_of]
    members = _build_clients(
        pool,
        parts,
        client_views,
        validation_fraction=validation_fraction,
        test_samples=test_samples,
        seed=seed,
    )

    details = _describe_partition(partition, options, clusters)
    details += _describe_shift(shift, shift_options)
    # If a shift draws a view for each client, the number of clusters is a result of the seed.
    if clusters and not shift_kind.of_clients:
        details += f", {clusters} cluster{'s' if clusters > 1 else ''}"

    def build(some: tuple[ClientData, ...], late: Federation | None = None) -> Federation:
        """Build the federation of the clients ``some``, with newcomers ``late``."""
        truth = None
        if clusters:
            truth = {client.id: cluster_of[client.id] for client in some}
        description = f"{pool.name}, {len(some)} clients{details}"
        return Federation(
            pool, some, truth, description=description, newcomers=late, augment=augment_function
        )

    if newcomers:
        late = build(members[trained:])
    else:
        late = None
    whole = build(members[:trained], late)
    return _apply_shift_and_drift(whole, cluster_views, read_drift(drift), seed)


def _apply_shift_and_drift(
    federation: Federation, views: Sequence[View], drift: Drift | None, seed: int
) -> Federation:
    """Apply the views of the true clusters to a federation, and the stages of a drift, if any."""
    if drift is None:
        return apply_views(federation, views)
    return apply_drift(federation, views, drift, seed)


def _check_options(
    source: str | Pool | torch.utils.data.Dataset[Any],
    source_options: Mapping[str, Any],
    partition: str,
    partition_options: Mapping[str, Any],
    *,
    seed: int,
) -> None:
    """Check the seed and the options of the source and of the partition.

    Options of the source are allowed only for a source that is given by name. The number of
    clusters, which is a separate setting, must not also be an option of the partition.
    """
    has_clusters_twice = partition == "label_groups" and "clusters" in partition_options
    takes_options = isinstance(source, str) or not source_options
    partition_rule = "without 'clusters', which is a separate setting"
    source_rule = "empty unless the source is a name"
    require(
        ("seed", seed, seed >= 0, "at least 0"),
        ("partition_arguments", partition_options, not has_clusters_twice, partition_rule),
        ("source_arguments", source_options, takes_options, source_rule),
    )


def _load_examples(
    source: str | Pool | torch.utils.data.Dataset[Any],
    options: Mapping[str, Any],
    clients: int | None,
    newcomers: int,
    *,
    data_dir: str | Path | None,
    seed: int,
) -> Pool:
    """Load the pool of a source, which is given by name, as a pool or as a torch data set."""
    if isinstance(source, Pool):
        return source
    if not isinstance(source, str):
        from fedclade.data.user_data import pool_from_torch  # for a user's own data only

        return pool_from_torch(source)
    is_made_for_clients = source in SOURCES and "clients" in known_arguments(SOURCES[source].load)
    if is_made_for_clients and clients is not None:
        options = {"clients": clients + newcomers, **options}
    return load_pool(source, data_dir=data_dir, seed=seed, **options)


def _describe_partition(partition: str, options: Mapping[str, Any], clusters: int | None) -> str:
    """Describe the partition, with the options that differ from their defaults, for reports."""
    usual = {"clusters": clusters, **defaults(find_partition(partition).split)}
    changed = {name: value for name, value in options.items() if value != usual.get(name)}
    return f", partition {partition}{_show_options(changed)}"


def _describe_shift(shift: str, options: Mapping[str, Any]) -> str:
    """Describe the shift and all of its options for reports; empty without a shift."""
    if shift == "none":
        return ""
    all_options = {**defaults(find_shift(shift).views), **options}
    return f", shift {shift}{_show_options(all_options)}"


def _show_options(options: Mapping[str, Any]) -> str:
    """Format options in parentheses for a description; empty without options."""
    if not options:
        return ""
    return f" ({', '.join(f'{name} {value}' for name, value in options.items())})"


def _share_by_view(
    share: Callable[[int, int, int], tuple[Parts, list[int]]],
    clients: int | None,
    newcomers: int,
    is_shared_shift: bool,
    *,
    clusters: int,
    seed: int,
) -> tuple[Parts, list[int]]:
    """Partition all training examples among the clients of each true cluster (``views = "each"``).

    Returns
    -------
    tuple
        Examples of each client, and the number i of each client. Client i belongs to cluster i mod
        ``clusters``.
    """
    is_multiple = clients is not None and clients % clusters == 0
    view_rule = "'parts' without a shift, or with a shift that draws a view for each client"
    client_rule = f"a multiple of the number of clusters ({clusters}) if views = 'each'"
    require(
        ("views", "each", is_shared_shift, view_rule),
        ("clients", clients, is_multiple, client_rule),
        ("newcomers.clients", newcomers, newcomers == 0, "0 if views = 'each'"),
    )
    per_cluster = (clients or 0) // clusters
    shares: list[Parts] = []
    for cluster in range(clusters):
        # Partitions take seeds below 2^31.
        cluster_seed = rng.torch_seed(seed, "view", cluster) % 2**31
        parts, _ = share(per_cluster, 0, cluster_seed)
        shares.append(parts)
    indices = [
        shares[client % clusters].indices[client // clusters]
        for client in range(per_cluster * clusters)
    ]
    return replace(shares[0], indices=indices, names=None), [*range(len(indices))]


def _build_clients(
    pool: Pool,
    parts: Parts,
    views: Sequence[View],
    *,
    validation_fraction: float,
    test_samples: int | None,
    seed: int,
) -> tuple[ClientData, ...]:
    """Build the clients from their examples in the pool and their views.

    The examples of each client are split into training, validation and test data.
    """
    names = parts.names or [f"client-{client}" for client in range(len(parts.indices))]
    trains, tests = split_train_test(pool, parts, test_samples, seed)
    members: list[ClientData] = []
    for client, view in enumerate(views):
        train, validation = set_aside(
            trains[client], validation_fraction, "validation", seed=seed, client=client
        )
        draw = rng.generator(seed, "classes", client)
        # The order of the draws matters: training, validation, then test examples.
        train = view.choose(train, pool, draw)
        validation = view.choose(validation, pool, draw)
        test = view.choose(tests[client], pool, draw)
        members.append(
            ClientData(
                client,
                names[client],
                client,
                train=train,
                validation=validation,
                test=test,
                label_map=view.label_map,
                quarter_turns=view.quarter_turns,
            )
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
    if not is_choice(scaling, Scaling):
        raise ConfigError(unknown("value of scaling:", scaling, get_args(Scaling)))
    is_all = clients is None and partition == "natural"
    is_count = clients is not None and clients >= 1
    is_limit = samples_per_client is None or samples_per_client >= 1
    is_test_limit = test_samples is None or test_samples >= 1
    is_test_fraction = test_fraction is None or 0 < test_fraction < 1
    is_grouped = partition == "label_groups"
    is_shifted = shift != "none"
    may_have_clusters = clusters in (None, 1) or is_grouped or is_shifted
    cluster_rule = "1 or left out without a shift and without partition 'label_groups'"
    shift_rule = "'none' with partition 'label_groups', which makes clusters itself"
    require(
        ("clients", clients, is_all or is_count, "at least 1"),
        ("samples_per_client", samples_per_client, is_limit, "at least 1"),
        ("clusters", clusters, clusters is None or clusters >= 1, "at least 1"),
        ("clusters", clusters, may_have_clusters, cluster_rule),
        ("shift", shift, not (is_grouped and is_shifted), shift_rule),
        ("validation_fraction", validation_fraction, 0 <= validation_fraction < 1, "in [0, 1)"),
        ("test_samples", test_samples, is_test_limit, "at least 1"),
        ("test_fraction", test_fraction, is_test_fraction, "greater than 0 and less than 1"),
        ("views", views, views in ("parts", "each"), "'parts' or 'each'"),
    )


def check_newcomers(newcomers: int, newcomer_samples: int | None, clients: int | None) -> None:
    """Check the ranges of the settings of newcomers (clients that are excluded from training)."""
    is_possible = newcomers == 0 or clients is not None
    is_limit = newcomer_samples is None or newcomer_samples >= 1
    rule = "0 if data.clients is left out"
    require(
        ("newcomers.clients", newcomers, newcomers >= 0, "at least 0"),
        ("newcomers.clients", newcomers, is_possible, rule),
        ("newcomers.samples_per_client", newcomer_samples, is_limit, "at least 1"),
    )
