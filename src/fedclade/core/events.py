"""What can happen in a round, as the log of a run keeps it: one class for each kind of event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast


@dataclass(frozen=True)
class Event:
    """Something worth reporting that happened to a cluster, ``node``, in a round; node 0 stands for the whole run.

    Subclasses are frozen dataclasses with a ``kind`` and with fields of numbers, texts, tuples and
    mappings, which become the columns of the event's row in ``events.jsonl``.
    """

    kind: ClassVar[str]

    node: int

    def to_row(self, number: int) -> dict[str, Any]:
        """Return the event of a round as a row. A field whose default is None is left out while it is None."""
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
"""Members of some clusters."""


# Clients that come and go


@dataclass(frozen=True)
class _OfClients(Event):
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Joined(_OfClients):
    """Clients joined a cluster; at node 0 besides: they joined the run."""

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
    """Clients hold other data from this round on, or see it differently."""

    kind = "data_changed"


@dataclass(frozen=True)
class Refused(Event):
    """Nodes of the network were not let in: why, by node."""

    kind = "refused"

    nodes: Mapping[int, str]


@dataclass(frozen=True)
class Waiting(Event):
    """Nodes of the network wait for a later round, since as many newcomers as are allowed have joined lately."""

    kind = "waiting"

    nodes: tuple[int, ...]


# Clients that do not answer


@dataclass(frozen=True)
class Retried(Event):
    """A query was put once more to so many clients, of which so many answered."""

    kind = "retried"

    query: str
    clients: int
    answered: int


@dataclass(frozen=True)
class LeftOut(Event):
    """Clients are not among the answers to a query: why, by client."""

    kind = "left_out"

    query: str
    clients: Mapping[int, str]


@dataclass(frozen=True)
class Limited(Event):
    """Updates of clients were shortened, or weigh less than they say: how, by client."""

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
    """A sum over these clients cannot come from clients that keep to the protocol, so it is not used."""

    kind = "sum_rejected"

    because: str


@dataclass(frozen=True)
class SumClipped(_OfSum):
    """So many of the updates in a sum over these clients were longer than ``norm``, and were shortened to it."""

    kind = "sum_clipped"

    clipped: int
    norm: float


@dataclass(frozen=True)
class SumUnguarded(_OfSum):
    """One of these clients alone can turn the mean of its cluster to any direction: there are too few sums."""

    kind = "sum_unguarded"

    sums: int
    because: str


@dataclass(frozen=True)
class TooFew(Event):
    """Fewer clients of a cluster answered than ``min_clients``, so it keeps its model."""

    kind = "too_few"

    clients: int


@dataclass(frozen=True)
class Postponed(Event):
    """Too few clients answered to be clustered, so it is left to the next time."""

    kind = "postponed"

    clients: int
    needed: int


@dataclass(frozen=True)
class Buffered(Event):
    """A buffer of so many clients' updates was applied to a cluster, whose model has this version since.

    Staleness counts the versions that a client's model was behind; seconds are those of the
    cluster's virtual clock.
    """

    kind = "buffered"

    clients: int
    staleness_mean: float
    staleness_max: int
    virtual_seconds: float
    version: int


@dataclass(frozen=True)
class SetApart(_OfClients):
    """Clients that are far from all others, by what they report of their data, became a cluster of their own.

    ``distance`` is theirs from the others, and ``usual`` the distance that these have from those in
    other clusters.
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
    """Clusters were merged into this one."""

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
    """A cluster was split; criteria are missing where they were not computed, or did not decide."""

    kind = "split"

    children: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Rejected(_Bipartition):
    """A cluster was to be split, and was not."""

    kind = "rejected"

    because: str


@dataclass(frozen=True)
class Stationary(Event):
    """All clusters, so many, are near a stationary point, and the run ends."""

    kind = "stationary"

    clusters: int


@dataclass(frozen=True)
class GroupFounded(Event):
    """A group was founded by clients that pre-trained (FedGroup Algorithm 4).

    ``cm`` is the mean of their ternary similarities, one number for each base direction (g_j.cm,
    line 6), and ``sum_of_squares`` adds up the squared distances of these from it: what the group
    adds to the sum of squares within clusters.
    """

    kind = "group_founded"

    clients: int
    cm: tuple[float, ...]
    sum_of_squares: float


@dataclass(frozen=True)
class Restart(Event):
    """One set of initial models was chosen by the mean training loss of each."""

    kind = "restart"

    chosen: int
    losses: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Clustered(Event):
    """Clients were clustered by agglomeration; all that a dendrogram needs.

    Where only a sample was, ``clients`` and ``merges`` are those of the sample, and ``sizes`` count
    all clients.

    Raises
    ------
    ValueError
        If a merge does not join two earlier clusters, numbered as in SciPy, until there is one.
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
    """What replicated clustering found of a node's clients (0: all), and how sure it is: the base of three events."""

    p_value: float
    gain: float
    gain_before: float
    level: float
    gamma: float | None
    clusters: Clusters


@dataclass(frozen=True)
class Tested(Check):
    """A test found these clusters: of rcfl in its first rounds, or of CFL. What is made of them, other events say."""

    kind = "tested"


@dataclass(frozen=True)
class Checked(Check):
    """Replicated clustering found the clusters that there are."""

    kind = "checked"


@dataclass(frozen=True)
class Regrouped(Check):
    """Replicated clustering found other clusters in a node, and the run goes on with them."""

    kind = "regrouped"


# What a run's log says of privacy: what was released, and of what nothing is said.


@dataclass(frozen=True)
class Released(Event):
    """How many updates private clients sent in the round, by client."""

    kind = "released"

    clients: Mapping[int, int]


@dataclass(frozen=True)
class Stepped(Event):
    """How many noisy steps clients took in the round that sample each example at this rate, by client."""

    kind = "stepped"

    rate: float
    clients: Mapping[int, int]


@dataclass(frozen=True)
class PrivateRelease(Event):
    """What the server was given by noise on sums, or by choices: at most once by each client.

    Of a sum: the noise multiplier, for clients that count once and lie up to two units apart, and
    the rate at which each client was sampled. Of a choice: its ε, and among how many it was.
    """

    kind = "private_release"

    about: str
    noise_multiplier: float | None = None
    sampling: float | None = None
    epsilon: float | None = None
    options: int | None = None


@dataclass(frozen=True)
class Withheld(Event):
    """So many clusters had fewer members than ``least``, and were merged into others: nothing is said of them."""

    kind = "withheld"

    clusters: int
    least: int
