"""Settings of the ``[network]`` section, and types of the arguments of ``federate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from fedclade.algorithms import Algorithm
from fedclade.channel import DENSE_ENCODINGS
from fedclade.core import (
    ConfigError,
    DataSpec,
    as_section,
    at_least,
    check_settings,
    checked,
    document_settings,
    greater_than,
    in_range,
    memory_bytes,
    one_of,
    setting,
)
from fedclade.flower.registration import Identity
from fedclade.flower.secure.terms import SecureRules

LogFormat = Literal["text", "json"]

STREAM_BUFFER = 2**24
"""Default of ``stream_buffer`` in bytes: 16 MiB."""

MakeAlgorithm = Callable[[Mapping[int, int] | None], Algorithm]
"""Function that makes an algorithm from the clients' true clusters.

The argument is None if clients do not report true clusters. Only the oracle algorithm needs them.
"""


@dataclass(frozen=True)
class ModelFor:
    """Model whose structure depends on the shape of the clients' examples.

    Parameters
    ----------
    make
        Function that makes the model from the data's specification and a seed.
    name
        Name of the model in the run's config.
    """

    make: Callable[[DataSpec, int], nn.Module]
    name: str


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class Network:
    """Settings of the ``[network]`` section: waiting times, admission and limits of clients, log.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each such value.
    """

    clients: int = setting(
        2, at_least(1), doc="Number of clients that must be connected before the first round."
    )
    wait: float = setting(
        300.0,
        greater_than(0),
        doc="""Seconds to wait for ``clients`` clients before the first round, and later in the run
        for any client if all clients are disconnected.""",
    )
    deadline: float = setting(
        600.0,
        greater_than(0),
        doc="Seconds within which a client has to reply; later replies are discarded.",
    )
    identity: Identity = setting(
        "node",
        one_of("node", "number"),
        doc="""Identity of a client that reconnects: the ``node`` id, which is stable if SuperNodes
        have keys, or the ``number`` (partition-id) that the client reports.""",
    )
    keys: str | None = setting(
        None,
        doc="""Path of a file with the number and public key of each client; no other client is
        admitted. If unset, a key belongs to the client that first joins with it.""",
    )
    newcomers: float = setting(
        0.25,
        at_least(0),
        doc="""Without ``keys``: largest number of newcomers at one time, as a share of the other
        connected clients, but at least two newcomers. A client is a newcomer for its first ten
        rounds, unless it was connected when the first round began. Further newcomers wait. Infinity
        means no limit, and 0 admits no newcomers.""",
        later=True,
    )
    largest_weight: float = setting(
        2.0,
        at_least(1),
        doc="""Value of ``largest_weight`` of :class:`~fedclade.Aggregation` over a network, unless
        it is set there.""",
    )
    largest_norm: float = setting(
        20.0,
        at_least(1),
        doc="""Value of ``largest_norm`` of :class:`~fedclade.Aggregation` over a network, unless it
        is set there.""",
    )
    metrics: int | None = setting(
        None,
        in_range("[1, 65535]"),
        doc="""Port on which the server offers metrics to Prometheus; needs the extra
        ``monitoring``. If unset, it offers none.""",
        later=True,
    )
    metrics_address: str = setting(
        "127.0.0.1",
        doc="""Address on which ``metrics`` are offered. The metrics are not encrypted, and need no
        password, so by default only programs on the server can read them.""",
        later=True,
    )
    log: LogFormat = setting(
        "text",
        one_of("text", "json"),
        doc="""Format of the server's log: ``text``, or ``json`` for one JSON object in each
        line.""",
        later=True,
    )
    secure_aggregation: bool = setting(
        False,
        doc="""Whether the server receives only sums of updates, one for each cluster
        (:mod:`fedclade.flower.secure`).""",
    )
    secure_fewest: int = setting(
        4, doc="Smallest number of clients in a sum; smaller clusters keep their model."
    )
    secure_colluders: int = setting(
        1,
        doc="""Number c of clients of a sum that may collude with the server, which then still
        learns only the sum of the other clients. More than (n + c) / 2 of the n clients must stay
        connected, or the sum is lost.""",
    )
    secure_neighbours: int = setting(
        0,
        doc="""Number of other clients to which each client deals shares of its secrets, in sums of
        more than 64 clients; 0 for all.""",
    )
    secure_norm: float | None = setting(
        None,
        doc="""Largest norm of an update that a client may add to a sum, in parameter units; longer
        updates are scaled down. Required with ``secure_aggregation``. In later rounds the limit is
        twice the root mean square of the norms of earlier sums, and never above this value.""",
    )
    secure_parts: int = setting(
        1,
        doc="""Number of disjoint sums into which the clients of a cluster are dealt, if the cluster
        has enough clients: 1, or at least 3. A malicious client can turn the mean of its sum to any
        direction; three or more sums are combined by a robust mean, ``aggregate.rule``, or by their
        median.""",
    )

    download: Literal["float32", "float16", "int8"] = setting(
        "float32",
        one_of(*DENSE_ENCODINGS),
        doc="""Encoding of the models that clients receive to train: ``float32``, ``float16`` or
        ``int8``. Updates are relative to the decoded model. Mixtures of models, and models that are
        evaluated, are sent as float32. Not possible with ``secure_aggregation``.""",
        later=True,
    )

    stream_buffer: int | str = setting(
        "16MiB",
        doc="""Largest size of the updates that a server which streams (``stream``) collects before
        it adds them up, in bytes or as text such as ``"16MiB"``. A single update may be larger.""",
        later=True,
    )

    def __post_init__(self) -> None:
        memory_bytes(self.stream_buffer, "network.stream_buffer")
        if self.secure_aggregation and self.download != "float32":
            raise ConfigError(
                f"network.download = {self.download!r} is not possible with "
                "network.secure_aggregation = true, whose clients compare the exact models that "
                "they receive; leave network.download out"
            )
        clients = self.clients if self.secure_aggregation else None
        check_settings(self, "network", *self.rules.checks(clients))

    @property
    def rules(self) -> SecureRules:
        """Rules of secure aggregation, from the ``secure_...`` settings."""
        return SecureRules(
            fewest=self.secure_fewest,
            colluders=self.secure_colluders,
            neighbours=self.secure_neighbours,
            norm=self.secure_norm,
            parts=self.secure_parts,
        )

    @property
    def described(self) -> dict[str, Any]:
        """Settings as saved in a run's config.

        The ``secure_...`` settings are left out if secure aggregation is off.
        """
        section = as_section(self)
        return {
            name: value
            for name, value in section.items()
            if self.secure_aggregation or not name.startswith("secure_")
        }
