"""Events of a run, as written to its log ``events.jsonl``: one class for each kind of event.

An event belongs to a cluster, identified by its node in the parameter tree, and to a round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast


@dataclass(frozen=True)
class Event:
    """Base class of events: something that happened to a cluster in a round.

    ``node`` is the id of the cluster in the parameter tree; node 0 also stands for the whole run. A
    subclass is a frozen dataclass with a ``kind`` and with fields of numbers, texts, tuples and
    mappings, which become the columns of the event's row in ``events.jsonl``.
    """

    kind: ClassVar[str]

    node: int

    def to_row(self, number: int) -> dict[str, Any]:
        """Return the event as a row of the log, a dictionary that can be written as JSON.

        A field with the default None is left out if it is None in this event. ``number`` is the
        number of the event's round.
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
"""Client ids of the members of each of several clusters."""


# Clients that join and leave


@dataclass(frozen=True)
class _OfClients(Event):
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Joined(_OfClients):
    """Event: clients joined a cluster. At node 0, the clients joined the run."""

    kind = "joined"


@dataclass(frozen=True)
class Left(_OfClients):
    """Event: clients left the run."""

    kind = "left"


@dataclass(frozen=True)
class Disconnected(_OfClients):
    """Event: clients lost their connection to the server."""

    kind = "disconnected"


@dataclass(frozen=True)
class Reconnected(_OfClients):
    """Event: clients that had been disconnected are connected to the server again."""

    kind = "reconnected"


@dataclass(frozen=True)
class DataChanged(_OfClients):
    """Event: the data of some clients changed, from this round on.

    The clients have different examples, or their examples are transformed differently.
    """

    kind = "data_changed"


@dataclass(frozen=True)
class Diverged(_OfClients):
    """Event: the training of some clients diverged, reported once for each client.

    A client's loss grew by a factor of 1000, or is no longer a number.
    """

    kind = "diverged"


@dataclass(frozen=True)
class Refused(Event):
    """Event: the server refused network nodes that wanted to join, each for the given reason."""

    kind = "refused"

    nodes: Mapping[int, str]


@dataclass(frozen=True)
class Waiting(Event):
    """Event: network nodes that want to join the run must wait for a later round.

    The reason is that the setting ``network.newcomers`` limits the number of new clients at one
    time.
    """

    kind = "waiting"

    nodes: tuple[int, ...]


# Clients that do not reply


@dataclass(frozen=True)
class Retried(Event):
    """Event: a query was sent again to clients that had not replied.

    ``query`` is the name of the query, ``clients`` the number of clients that were queried again,
    and ``answered`` the number of these clients that replied.
    """

    kind = "retried"

    query: str
    clients: int
    answered: int


@dataclass(frozen=True)
class LeftOut(Event):
    """Event: clients are missing from the replies to a query, each for the given reason."""

    kind = "left_out"

    query: str
    clients: Mapping[int, str]


def generalize_reason(reason: str) -> str:
    """Replace the numbers in a reason by ``#``, so that similar reasons are counted together.

    A number that is followed by ``times`` remains, since it is the value of a setting.
    """
    general = re.sub(r"(?<![\d.])\d[\d.e+]*(?![\d.e+]| times)", "#", reason)
    return re.sub(r"^(norm|norm of its buffers) #, (.*?)(, #)?$", r"\1 \2", general)


@dataclass(frozen=True)
class Limited(Event):
    """Event: the server limited the updates of some clients.

    An update was scaled down, or has a smaller weight than the client claims. ``clients`` has a
    description for each client.
    """

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
    """Event: the server did not use a securely aggregated sum of the updates of some clients.

    Honest clients cannot have produced the sum, for the reason given in ``because``.
    """

    kind = "sum_rejected"

    because: str


@dataclass(frozen=True)
class SumClipped(_OfSum):
    """Event: in a securely aggregated sum, some clients clipped their updates to a norm.

    ``clients`` are the clients in the sum, ``clipped`` is the number of updates that were scaled
    down, and ``norm`` is the norm that they were scaled down to.
    """

    kind = "sum_clipped"

    clipped: int
    norm: float


@dataclass(frozen=True)
class SumUnguarded(_OfSum):
    """Event: secure aggregation does not protect a cluster's mean against a malicious client.

    The server has too few sums (``sums``) of the cluster's updates to detect an outlier, so a
    single malicious client could change the mean in any direction.
    """

    kind = "sum_unguarded"

    sums: int
    because: str


@dataclass(frozen=True)
class TooFew(Event):
    """Event: a cluster's model does not change in a round, since too few of its clients replied.

    ``clients`` is the number of replies. The run's setting ``min_clients`` is the least number of
    replies with which the model changes.
    """

    kind = "too_few"

    clients: int


@dataclass(frozen=True)
class Postponed(Event):
    """Event: a clustering was postponed, since too few clients replied.

    ``clients`` is the number of replies, and ``needed`` is the least number for a clustering.
    """

    kind = "postponed"

    clients: int
    needed: int


@dataclass(frozen=True)
class Buffered(Event):
    """Event: a buffer of updates was applied to a cluster's model (asynchronous training, FedBuff).

    ``clients`` is the number of clients whose updates were in the buffer, and ``version`` is the
    version of the cluster's model afterwards. The staleness of an update is the number of versions
    that the cluster's model advanced while the client trained. ``virtual_seconds`` is the time on
    the cluster's simulated clock.
    """

    kind = "buffered"

    clients: int
    staleness_mean: float
    staleness_max: int
    virtual_seconds: float
    version: int


@dataclass(frozen=True)
class Served(Event):
    """Event: a model was chosen for each client, by losses on validation data (method ``auto``).

    ``clients`` has the clients that are served with each kind of model, such as ``cluster``, by the
    name of the kind. ``common`` is the kind that suits all clients best together, and ``gains`` has
    for each client the share by which its model is expected to lower its validation loss against
    that kind.
    """

    kind = "served"

    common: str
    clients: Mapping[str, tuple[int, ...]]
    gains: Mapping[int, float]


@dataclass(frozen=True)
class SetApart(_OfClients):
    """Event: clients whose reports about their data are outliers became a cluster of their own.

    ``distance`` is the distance of this cluster from the cluster of all other clients, by the
    linkage of the clustering. ``usual``, for comparison, is a typical distance among the other
    clients.
    """

    kind = "set_apart"

    distance: float
    usual: float


# Clusters


@dataclass(frozen=True)
class Empty(Event):
    """Event: a cluster has no members."""

    kind = "empty"


@dataclass(frozen=True)
class Merged(Event):
    """Event: other clusters, with the ids in ``merged``, were merged into this cluster."""

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
    """Event: a cluster was split into the clusters ``children``.

    A criterion of the decision, such as ``max_norm``, is None if it was not computed or did not
    influence the decision.
    """

    kind = "split"

    children: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Rejected(_Bipartition):
    """Event: a proposed split of a cluster was rejected, for the reason given in ``because``."""

    kind = "rejected"

    because: str


@dataclass(frozen=True)
class Stationary(Event):
    """Event: the run ended because the models of all clusters are near a stationary point.

    ``clusters`` is the number of clusters.
    """

    kind = "stationary"

    clusters: int


@dataclass(frozen=True)
class GroupFounded(Event):
    """Event: pre-trained clients founded a group, as a cluster is called in FedGroup (Algorithm 4).

    ``clients`` is the number of founding clients. A client's ternary similarity has a number for
    each of a few base directions, from 0 if the client's update points in this direction to 1 if it
    points in the opposite direction. ``cm`` is the mean of the clients' ternary similarities
    (g_j.cm, line 6). ``sum_of_squares`` is the sum of the squared distances of these
    similarities from ``cm``: the group's contribution to the sum of squares within clusters.
    """

    kind = "group_founded"

    clients: int
    cm: tuple[float, ...]
    sum_of_squares: float


@dataclass(frozen=True)
class Restart(Event):
    """Event: one of several sets of random initial models was chosen (IFCA with restarts).

    ``losses`` has the mean training loss of each set, and ``chosen`` is the index of the chosen
    set.
    """

    kind = "restart"

    chosen: int
    losses: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Clustered(Event):
    """Event: clients were clustered by agglomerative clustering.

    The fields contain what is needed to draw the dendrogram. A merge is a tuple of two cluster
    numbers, as in SciPy's linkage matrix, and the distance between the clusters. If only a sample
    of the clients was clustered, ``clients`` and ``merges`` describe the sample, and ``sizes``
    counts all clients.

    Raises
    ------
    ValueError
        If a merge does not join two different clusters that exist at that point, or if the merges
        do not end with a single cluster.
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
                f"merges should have {count - 1} entries for {count} clients, got "
                f"{len(self.merges)}"
            )
        free = set(range(count))
        for place, (one, other, _) in enumerate(self.merges, start=count):
            if one == other or not {one, other} <= free:
                raise ValueError(
                    f"merge {place - count} should join two different clusters that exist before "
                    f"the merge, got the clusters {one} and {other}"
                )
            free -= {one, other}
            free.add(place)


@dataclass(frozen=True)
class Check(Event):
    """Base class of events with the result of a clustering test among a node's clients.

    The test is replicated clustering: clients train on separate splits of their data, and clusters
    are accepted if they agree between the splits. Node 0 stands for all clients. The fields state
    how certain the result is:

    - If a test is repeated in a run, the tests use e-values: ``e_value`` is the e-value of this
      test (None if no decision depended on it), and ``p_value`` is the inverse of the running sum
      of all e-values. ``tests`` is the number of tests of this kind so far, and ``level_left`` is
      the part of the significance level that remains for later tests. For a test that a run makes
      only once, these three fields are None.
    - ``smallest_group`` is the size of the smallest group of clients that the test could have
      found if the group were perfectly separate from all other clients; 0 if the test could have
      found no group. It is None if nothing was tested.

    Two fields state how far the clusters can be believed as groups
    (:mod:`fedclade.clustering.stability`). Both are None if there is one cluster, or if nothing was
    tested:

    - ``stability`` in [0, 1] is near 1 if other examples of the same clients would give the same
      clusters.
    - ``stable_groups`` are the groups of clients that are reproducible and separate. Each is the
      union of one or more clusters. It is empty if no groups are stable: clients differ gradually,
      or too little.
    """

    p_value: float
    gain: float
    gain_before: float
    level: float
    gamma: float | None
    clusters: Clusters
    e_value: float | None = None
    tests: int | None = None
    level_left: float | None = None
    smallest_group: int | None = None
    stability: float | None = None
    stable_groups: Clusters | None = None


@dataclass(frozen=True)
class Tested(Check):
    """Event: a test for clusters, in the first rounds of rcfl or in CFL, gave this result.

    Other events report what the algorithm did with the clusters that the test found.
    """

    kind = "tested"


@dataclass(frozen=True)
class Checked(Check):
    """Event: a repeated test by replicated clustering confirmed the current clusters."""

    kind = "checked"


@dataclass(frozen=True)
class Regrouped(Check):
    """Event: a repeated test found different clusters among a node's clients.

    The run continues with the new clusters.
    """

    kind = "regrouped"


# Privacy: releases of information, and information that the log withholds.


@dataclass(frozen=True)
class Released(Event):
    """Event: clients with differential privacy sent noisy updates in the round.

    ``clients`` has the number of updates of each client, by client id.
    """

    kind = "released"

    clients: Mapping[int, int]


@dataclass(frozen=True)
class Stepped(Event):
    """Event: clients took noisy gradient steps (DP-SGD) in the round.

    ``clients`` has the number of steps of each client, by client id. In each step, each example is
    sampled with probability ``rate``.
    """

    kind = "stepped"

    rate: float
    clients: Mapping[int, int]


@dataclass(frozen=True)
class PrivateRelease(Event):
    """Event: a noisy sum, or the private choices of clients, were released to the server.

    Each client contributes at most once. ``about`` is the topic of the release. The other fields
    depend on what was released:

    - For a sum, ``noise_multiplier`` is σ / (d / 2), where σ is the standard deviation of the
      noise, and d is the largest distance between two possible contributions of a client.
      ``sampling`` is the probability with which each client was sampled.
    - For choices, ``epsilon`` is the privacy parameter ε of each client's choice, and ``options``
      is the number of options.
    """

    kind = "private_release"

    about: str
    noise_multiplier: float | None = None
    sampling: float | None = None
    epsilon: float | None = None
    options: int | None = None


@dataclass(frozen=True)
class Withheld(Event):
    """Event: the log does not report small clusters, to protect the privacy of their members.

    ``clusters`` is the number of clusters with fewer than ``least`` members. Each was merged with
    another cluster in the log.
    """

    kind = "withheld"

    clusters: int
    least: int
