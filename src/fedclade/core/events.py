"""Events of a run, as written to its log: one class for each kind of event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast


@dataclass(frozen=True)
class Event:
    """Event that happened to a cluster in a round.

    ``node`` is the cluster; node 0 also stands for the whole run. Subclasses are frozen dataclasses
    with a ``kind`` and with fields of numbers, texts, tuples and mappings, which become the columns
    of the event's row in ``events.jsonl``.
    """

    kind: ClassVar[str]

    node: int

    def to_row(self, number: int) -> dict[str, Any]:
        """Return the event as a row of the log, given the number of its round.

        A field whose default is None is left out if its value is None.
        """
        values = {each.name: _in_json(getattr(self, each.name)) for each in fields(self)}
        missing = [
            each.name for each in fields(self) if each.default is None and values[each.name] is None
        ]
        return {
            "round": number,
            "kind": self.kind,
            **{key: values[key] for key in values if key not in missing},
        }


def _in_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _in_json(entry) for key, entry in cast("Mapping[Any, Any]", value).items()
        }
    return (
        [_in_json(each) for each in cast("list[Any]", value)]
        if isinstance(value, tuple | list)
        else value
    )


Clusters = tuple[tuple[int, ...], ...]
"""Members of each of several clusters."""


# Clients that join and leave


@dataclass(frozen=True)
class _OfClients(Event):
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Joined(_OfClients):
    """Clients joined a cluster; at node 0 this also means that they joined the run."""

    kind = "joined"


@dataclass(frozen=True)
class Left(_OfClients):
    """Clients left the run."""

    kind = "left"


@dataclass(frozen=True)
class Disconnected(_OfClients):
    """Clients lost their connection."""

    kind = "disconnected"


@dataclass(frozen=True)
class Reconnected(_OfClients):
    """Clients are connected again."""

    kind = "reconnected"


@dataclass(frozen=True)
class DataChanged(_OfClients):
    """From this round on clients have different data, or their data is transformed differently."""

    kind = "data_changed"


@dataclass(frozen=True)
class Refused(Event):
    """Network nodes that the server refused, each with the reason."""

    kind = "refused"

    nodes: Mapping[int, str]


@dataclass(frozen=True)
class Waiting(Event):
    """Network nodes must wait for a later round.

    The largest allowed number of newcomers has joined recently.
    """

    kind = "waiting"

    nodes: tuple[int, ...]


# Clients that do not reply


@dataclass(frozen=True)
class Retried(Event):
    """A query was repeated to ``clients`` clients, of which ``answered`` replied."""

    kind = "retried"

    query: str
    clients: int
    answered: int


@dataclass(frozen=True)
class LeftOut(Event):
    """Clients that are missing from the replies to a query, each with the reason."""

    kind = "left_out"

    query: str
    clients: Mapping[int, str]


@dataclass(frozen=True)
class Limited(Event):
    """Clients whose updates were shortened, or weigh less than claimed, each with a description."""

    kind = "limited"

    query: str
    clients: Mapping[int, str]


# Secure aggregation


@dataclass(frozen=True)
class _OfSum(Event):
    query: str
    clients: tuple[int, ...]


@dataclass(frozen=True)
class SumRejected(_OfSum):
    """A sum over these clients was not used, since honest clients cannot have produced it."""

    kind = "sum_rejected"

    because: str


@dataclass(frozen=True)
class SumClipped(_OfSum):
    """In a sum over these clients, ``clipped`` updates were shortened to ``norm``."""

    kind = "sum_clipped"

    clipped: int
    norm: float


@dataclass(frozen=True)
class SumUnguarded(_OfSum):
    """A single one of these clients can turn its cluster's mean in any direction.

    There are too few sums to prevent this.
    """

    kind = "sum_unguarded"

    sums: int
    because: str


@dataclass(frozen=True)
class TooFew(Event):
    """Fewer clients of a cluster replied than ``min_clients``, so its model does not change."""

    kind = "too_few"

    clients: int


@dataclass(frozen=True)
class Postponed(Event):
    """Too few clients replied for a clustering, which is postponed to the next occasion."""

    kind = "postponed"

    clients: int
    needed: int


@dataclass(frozen=True)
class Buffered(Event):
    """A buffer with the updates of ``clients`` clients was applied to a cluster.

    ``version`` is the version of the cluster's model afterwards. Staleness counts the versions by
    which a client's model was behind. Seconds are those of the cluster's virtual clock.
    """

    kind = "buffered"

    clients: int
    staleness_mean: float
    staleness_max: int
    virtual_seconds: float
    version: int


@dataclass(frozen=True)
class SetApart(_OfClients):
    """Clients whose reports about their data are far from all others became a cluster.

    ``distance`` is their distance from the other clients, and ``usual`` the distance of those from
    clients in other clusters.
    """

    kind = "set_apart"

    distance: float
    usual: float


# Clusters


@dataclass(frozen=True)
class Empty(Event):
    """A cluster has no members."""

    kind = "empty"


@dataclass(frozen=True)
class Merged(Event):
    """Clusters were merged into this cluster."""

    kind = "merged"

    merged: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Bipartition(Event):
    mean_norm: float | None = None
    max_norm: float | None = None
    alpha_cross_max: float | None = None
    gamma_bound: float | None = None
    p_value: float | None = None
    gain: float | None = None
    clusters: Clusters


@dataclass(frozen=True, kw_only=True)
class ClusterSplit(_Bipartition):
    """A cluster was split.

    A criterion is missing if it was not computed or did not influence the decision.
    """

    kind = "split"

    children: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Rejected(_Bipartition):
    """A proposed split of a cluster was rejected."""

    kind = "rejected"

    because: str


@dataclass(frozen=True)
class Stationary(Event):
    """All clusters are near a stationary point, so the run ends; ``clusters`` is their number."""

    kind = "stationary"

    clusters: int


@dataclass(frozen=True)
class GroupFounded(Event):
    """A group was founded by clients that had pre-trained (FedGroup Algorithm 4).

    ``cm`` is the mean of their ternary similarities, with one number for each base direction
    (g_j.cm, line 6). ``sum_of_squares`` is the sum of the squared distances of the similarities
    from ``cm``: the group's contribution to the sum of squares within clusters.
    """

    kind = "group_founded"

    clients: int
    cm: tuple[float, ...]
    sum_of_squares: float


@dataclass(frozen=True)
class Restart(Event):
    """One of several sets of initial models was chosen, by the mean training loss of each set."""

    kind = "restart"

    chosen: int
    losses: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Clustered(Event):
    """Clients were clustered by agglomeration; the fields are sufficient to draw a dendrogram.

    If only a sample of the clients was clustered, ``clients`` and ``merges`` describe the sample,
    and ``sizes`` count all clients.

    Raises
    ------
    ValueError
        If the merges do not join earlier clusters, numbered as in SciPy, until one is left.
    """

    kind = "clustered"

    metric: str
    linkage: str
    threshold: float | None
    sizes: tuple[int, ...]
    clients: tuple[int, ...]
    merges: tuple[tuple[int, int, float], ...]

    def __post_init__(self) -> None:
        count = len(self.clients)
        if len(self.merges) != count - 1:
            raise ValueError(
                f"there should be {count - 1} merges of {count} clients, got {len(self.merges)}"
            )
        free = set(range(count))
        for place, (one, other, _) in enumerate(self.merges, start=count):
            if one == other or not {one, other} <= free:
                raise ValueError(
                    f"merge {place - count} should join two clusters of before, got {one} and "
                    f"{other}"
                )
            free -= {one, other}
            free.add(place)


@dataclass(frozen=True)
class Check(Event):
    """Result of replicated clustering among a node's clients (node 0: all clients).

    This is the base class of three events. The figures state how certain the result is.
    """

    p_value: float
    gain: float
    gain_before: float
    level: float
    gamma: float | None
    clusters: Clusters


@dataclass(frozen=True)
class Tested(Check):
    """A test of rcfl in its first rounds, or of CFL, found these clusters.

    Other events report what the algorithm did with them.
    """

    kind = "tested"


@dataclass(frozen=True)
class Checked(Check):
    """Replicated clustering confirmed the current clusters."""

    kind = "checked"


@dataclass(frozen=True)
class Regrouped(Check):
    """Replicated clustering found other clusters in a node, and the run continues with them."""

    kind = "regrouped"


# Privacy: releases of information, and information that the log withholds.


@dataclass(frozen=True)
class Released(Event):
    """Number of updates that each private client sent in the round."""

    kind = "released"

    clients: Mapping[int, int]


@dataclass(frozen=True)
class Stepped(Event):
    """Number of noisy steps of each client in the round.

    In a step, each example is sampled with probability ``rate``.
    """

    kind = "stepped"

    rate: float
    clients: Mapping[int, int]


@dataclass(frozen=True)
class PrivateRelease(Event):
    """Release of a noisy sum or of private choices to the server, at most once by each client.

    For a sum, it reports the noise multiplier, for clients that are counted once and whose
    contributions are up to two units apart, and the rate at which each client was sampled. For a
    choice, it reports its ε and the number of options.
    """

    kind = "private_release"

    about: str
    noise_multiplier: float | None = None
    sampling: float | None = None
    epsilon: float | None = None
    options: int | None = None


@dataclass(frozen=True)
class Withheld(Event):
    """Clusters with fewer members than ``least`` were merged into others, so as not to be reported.

    ``clusters`` is their number.
    """

    kind = "withheld"

    clusters: int
    least: int
