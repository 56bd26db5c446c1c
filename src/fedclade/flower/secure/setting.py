"""What the server's side of secure aggregation goes by in a run, and which queries it can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from flwr.app import Array, RecordDict

from fedclade.channel import Limiting, Sketch
from fedclade.core import Aggregation, ConfigError, UpdateQuery
from fedclade.flower.secure.norms import NormsByRound
from fedclade.flower.secure.terms import SecureRules
from fedclade.flower.wire import Content

T = TypeVar("T")


class Asks(Protocol):
    """What puts questions to clients: :class:`~fedclade.flower.GridClients`."""

    def content(self, kind: str, values: Mapping[str, Any], vectors: Mapping[str, Array] | None = None) -> RecordDict:
        """Return the content of a question."""
        ...

    def request(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        group: str,
        read: Callable[[int, Content], T],
        left_out: dict[int, str],
        largest: int = 0,
    ) -> Iterator[tuple[int, T]]:
        """Send questions; yield what is read of the answers."""
        ...


@dataclass(frozen=True, eq=False)
class Members:
    """What is known of clients: the examples that each registered with, and its public key."""

    sizes: Mapping[int, int]
    keys: Mapping[int, str]


@dataclass
class SecureAggregation:
    """Gets sums of updates, and signatures, in place of updates.

    Parameters
    ----------
    rules
        The run's.
    compared
        What an update is compared by; that leaves its client unmasked.
    limiting
        How much an update may weigh.
    norms
        How long an update may be.
    rule
        How one update is made of several sums of a cluster.
    withholds_losses
        Whether clients withhold their losses, as those with a privacy budget do.
    """

    rules: SecureRules
    compared: Sketch
    limiting: Limiting
    norms: NormsByRound
    rule: Aggregation = field(default_factory=Aggregation)
    withholds_losses: bool = False
    is_unguarded_noted: bool = False
    barred: dict[int, str] = field(default_factory=dict[int, str])
    """Clients whose shares were wrong, and why they take no further part: with them no sum would be had."""


def check(query: UpdateQuery) -> None:
    """Check that a query is one whose updates can be added up; a ConfigError otherwise."""
    what = "gradients" if query.kind != "train" else "the models of a mixture" if query.mixture is not None else ""
    if what or query.own:
        raise ConfigError(
            f"network.secure_aggregation = true adds up updates of one model for each cluster, and is asked for "
            f"{what or 'models of clients'}; take another algorithm, or leave it out"
        )
    anchors = query.assignment if query.anchors is None else query.anchors
    if query.round.uses_anchors and len(set(zip(query.assignment, anchors, strict=True))) > len(set(query.assignment)):
        raise ConfigError(
            "network.secure_aggregation = true adds up updates of clients that train alike, and some that train the "
            "same model are drawn to different ones; take another algorithm, or leave it out"
        )
