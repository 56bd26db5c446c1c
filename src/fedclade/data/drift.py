"""Drift: changes of clients' examples and true clusters during a run.

The rounds of a run are divided into *stages*, in each of which the data does not change. A
*pattern* states the true cluster (or concept) of each client in each stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from fedclade.core import (
    ConfigError,
    Indices,
    Split,
    check_arguments,
    checked,
    require,
    rng,
    shown,
    unknown,
)
from fedclade.data.client_data import ClientData, Stage
from fedclade.data.federation import Federation
from fedclade.data.poisoned import Lots, ViewedData, write_out_views
from fedclade.data.pool import Pool
from fedclade.data.shift import View

# Patterns of drift: the concept of each of ten clients in eleven time steps (Jothimurugesan et al.
# 2023).

Concepts = tuple[tuple[int, ...], ...]
"""Number of the concept of each client in each time step, ``[steps][clients]``."""

_TEXT = """
A:
    0000000000 0100000000 0100000100 0111010100 0111010110 1011011010
    1001001010 1000101011 1000101001 1000101001 1000101001
B:
    0000000000 1110000000 1112220000 2212222100 2221222130 2321233130
    3321133210 3033133213 0033313223 0003311322 0003311322
C:
    0000000000 1112220000 1112220030 2211222130 2221232130 2321133130
    3323133210 3033313213 0033313223 0003311322 0003311322
D:
    1112220033 1112220033 2211222032 2221232002 2321133002 3323133202
    3033313201 0033313221 0003311321 0003311321 0003311321
E:
    0000000000 1113330000 1113330020 3311333120 3331323120 3231122120
    2232122310 2022212312 0022212332 0002211233 0002211233
F:
    0000000000 0000000000 1112220000 1112220030 2211222130 2221232130
    2321133133 3323133213 3033313213 0033312223 0033312223
W:
    0000000000 0000000000 0100000100 0100000100 0111010100 0111010110
    1111011110 1111011110 1111111111 1111111111 1111111111
X:
    0000000000 0100000000 0100000000 0100000100 0111010100 0111010110
    1111011110 1111011110 1111111111 1111111111 1111111111
Y:
    0000000000 0000000000 0000000000 0100000100 0111010100 0111010110
    1111011110 1111011110 1111111111 1111111111 1111111111
Z:
    0000000000 0000000000 0000000000 0200000200 0222020200 0222020220
    2222022220 2222022220 2222222222 2222222222 2222222222
R0:
    0000000000 0000000000 0111320212 0111320212 2103222120 2103222120
    2210113323 2210113323 1030032310 1030032310 1030032310
R1:
    0000000000 0000000000 2123110113 2123110113 2001033203 2001033203
    1221012200 1221012200 1321231201 1321231201 1321231201
R2:
    0000000000 0000000000 2223031121 2223031121 0221320013 0221320013
    0002100230 0002100230 0301021332 0301021332 0301021332
R3:
    0000000000 0000000000 0112021120 0112021120 2031233031 2031233031
    3300012012 3300012012 3021222010 3021222010 3021222010
R4:
    0000000000 0000000000 3000330333 3000330333 2312002002 2312002002
    3030232002 3030232002 0303033211 0303033211 0303033211
R5:
    0000000000 0000000000 2302131313 2302131313 1121020233 1121020233
    1010032330 1010032330 0230032102 0230032102 0230032102
R6:
    0000000000 0000000000 2010011301 2010011301 1200131130 1200131130
    2300132122 2300132122 2012231232 2012231232 2012231232
R7:
    0000000000 0000000000 1222311322 1222311322 2311102013 2311102013
    3002311302 3002311302 2101210012 2101210012 2101210012
R8:
    0000000000 0000000000 1211320202 1211320202 2210120303 2210120303
    1102031331 1102031331 3310012231 3310012231 3310012231
R9:
    0000000000 0000000000 2332331332 2332331332 2303000210 2303000210
    0112303201 0112303201 1112333223 1112333223 1112333223
"""
"""Patterns of the authors' experiments: a row for each time step, a digit for each client."""


def _parse_patterns(text: str) -> dict[str, Concepts]:
    """Parse patterns from a text in which each name is followed by its rows of digits."""
    patterns: dict[str, Concepts] = {}
    name = ""
    for word in text.split():
        if word.endswith(":"):
            name = word.removesuffix(":")
            patterns[name] = ()
        else:
            row = tuple(int(digit) for digit in word)
            patterns[name] = (*patterns[name], row)
    return patterns


PATTERNS: Mapping[str, Concepts] = MappingProxyType(_parse_patterns(_TEXT))
"""Patterns by name.

A and W to Y have two concepts. Z has the first and the third of three concepts. B to F have four
concepts. R0 to R9 have four concepts that are assigned at random.
"""


def read_concepts(pattern: str | Concepts, steps: int, clients: int) -> list[list[int]]:
    """Read a pattern of drift: the concept of each client in each time step, ``[rows][clients]``.

    Parameters
    ----------
    pattern
        Name of a pattern, or its rows. The columns of a pattern are repeated if there are more
        clients than columns.
    steps
        Number of time steps. If the pattern has a further row, it determines the test data of the
        last step.
    clients
        Number of clients.

    Raises
    ------
    ConfigError
        If the name is unknown, rows differ in length, a concept is negative, or there are fewer
        rows than steps.
    """
    if isinstance(pattern, str) and pattern not in PATTERNS:
        raise ConfigError(unknown("pattern of drift:", pattern, PATTERNS))
    if isinstance(pattern, str):
        rows = PATTERNS[pattern]
    else:
        rows = pattern
    has_one_length = len({len(row) for row in rows}) == 1 and len(rows[0]) > 0
    if not has_one_length or min(min(row) for row in rows) < 0:
        raise ConfigError(
            f"a pattern of drift should have rows of equal length, with a concept number of at "
            f"least 0 for each client, got {shown(rows)}"
        )
    if len(rows) < steps:
        raise ConfigError(
            f"the pattern of drift should have at least {steps} rows, one for each time step, got "
            f"{len(rows)}"
        )

    def repeat(row: Sequence[int]) -> list[int]:
        """Repeat the entries of a row of the pattern until there is an entry for each client."""
        return [row[client % len(row)] for client in range(clients)]

    return [repeat(row) for row in rows]


@checked()
@dataclass(frozen=True, kw_only=True)
class Drift:
    """Settings of a change of the clients' data during a run, in stages.

    Parameters
    ----------
    rounds
        First round of each stage after the first, from 2 on, ascending.
    kind
        ``replace``: training and validation data of a stage replace the data of the stages before.
        ``accumulate``: clients also retain the data of earlier stages, as they saw the data in
        those stages. In both cases clients are tested only on the data of the current stage.
    examples
        ``new``: a client's training examples are divided into parts, one for each stage, whose
        sizes differ by at most one. ``same``: a client has the same examples in all stages, and
        sees them by the view of its true cluster.
    share
        Fraction of the clients that move to another true cluster at the beginning of each stage, in
        [0, 1]; by default 0.5. The clients that move are drawn again for each stage; at least one
        client moves unless the fraction is 0. With the value ``anew`` in place of a fraction, every
        client draws its true cluster from all clusters in each stage, so that it may also stay in
        its cluster. Newcomers move in the same way.
    pattern
        True cluster of each client in each stage, as an alternative to ``share``: the name of a
        pattern of FedDrift (``A`` to ``F``, ``W`` to ``Z``, ``R0`` to ``R9``), or a list with a row
        for each stage. If there are more clients than entries in a row, the entries are repeated.
    test
        Views by which clients see their test examples. ``now``: the views of the current stage.
        ``next``: the views of the next stage, as in FedDrift. In the last stage, these are the
        views of a further row of the pattern, or of the last stage if there is no further row.
        ``seen``: a client has the view of one stage, drawn at random, for its test examples in all
        stages.

    Raises
    ------
    ConfigError
        If a value is out of range, or there is both a share and a pattern.
    """

    rounds: tuple[int, ...] = ()
    kind: Literal["replace", "accumulate"] = "replace"
    examples: Literal["new", "same"] = "new"
    share: float | Literal["anew"] | None = None
    pattern: str | tuple[tuple[int, ...], ...] = ""
    test: Literal["now", "next", "seen"] = "now"

    def __post_init__(self) -> None:
        rounds = list(self.rounds)
        is_ascending = bool(rounds) and rounds[0] >= 2 and rounds == sorted(set(rounds))
        share = self.share
        is_share = share in (None, "anew") or _is_fraction(share)
        has_both = share is not None and bool(self.pattern)
        is_kind = self.kind in ("replace", "accumulate")
        is_examples = self.examples in ("new", "same")
        is_test = self.test in ("now", "next", "seen")
        require(
            (
                "drift.rounds",
                rounds,
                is_ascending,
                "one or more rounds of at least 2, in ascending order",
            ),
            ("drift.kind", self.kind, is_kind, "'replace' or 'accumulate'"),
            ("drift.examples", self.examples, is_examples, "'new' or 'same'"),
            ("drift.share", share, is_share, "in [0, 1], or 'anew'"),
            (
                "drift.share",
                share,
                not has_both,
                "left out with a pattern, which determines the moves",
            ),
            ("drift.test", self.test, is_test, "'now', 'next' or 'seen'"),
        )
        if self.pattern:
            read_concepts(self.pattern, len(self.rounds) + 1, 1)

    def draw_clusters(
        self, first: Sequence[int], clusters: int, seed: int, purpose: str
    ) -> list[list[int]]:
        """Draw the true cluster of each client in each stage, ``[stages][clients]``.

        If the pattern has more rows than there are stages, one more row is returned. Its clusters
        determine the test data of the last stage if the setting ``test`` is ``next``.

        Parameters
        ----------
        first
            True cluster of each client in the first stage.
        clusters
            Number of true clusters.
        seed
            Seed of all draws.
        purpose
            ``clients`` or ``newcomers``: a key of the random draws, so that the draws for clients
            and for newcomers differ.
        """
        stages = len(self.rounds) + 1
        if self.pattern:
            rows = read_concepts(self.pattern, stages, len(first))[: stages + 1]
            largest = max(max(row) for row in rows)
            rule = f"of {clusters} concepts, which is the number of clusters"
            require(("drift.pattern", self.pattern, largest < clusters, rule))
            return rows
        rows = [list(first)]
        share = DEFAULT_SHARE if self.share is None else self.share
        for stage in range(1, stages):
            draw = rng.generator(seed, f"drift {purpose}", stage)
            if isinstance(share, str):
                rows.append(draw.integers(clusters, size=len(first)).tolist())
                continue
            order = draw.permutation(len(first))
            moving = 0
            if share and clusters > 1:
                moving = max(1, round(share * len(first)))
            row = list(rows[-1])
            for client in np.sort(order[:moving]).tolist():
                # A shift from 1 to clusters − 1, so that the cluster changes.
                shift = 1 + int(draw.integers(clusters - 1))
                row[client] = (row[client] + shift) % clusters
            rows.append(row)
        return rows


DEFAULT_SHARE = 0.5


def _is_fraction(value: object) -> bool:
    """Return whether a value is a number in [0, 1]."""
    return isinstance(value, int | float) and 0 <= value <= 1


def read_drift(drift: Drift | Mapping[str, Any] | None) -> Drift | None:
    """Return the settings of a drift, given as a :class:`Drift` or as a mapping of its fields.

    Returns None if ``drift`` is None.

    Raises
    ------
    ConfigError
        If a field is unknown, or a value is out of range.
    """
    if drift is None or isinstance(drift, Drift):
        return drift
    return Drift(**check_arguments("[data.drift]", Drift, drift))


Clients = tuple[ClientData, ...]


def apply_drift(
    federation: Federation, views: Sequence[View], drift: Drift, seed: int
) -> Federation:
    """Add the stages of a drift to a federation and to its newcomers.

    Parameters
    ----------
    federation
        The clients with all of their data.
    views
        View of each true cluster.
    drift
        Settings of the drift.
    seed
        Seed of all draws.

    Raises
    ------
    ConfigError
        If a client has too few examples, a pattern has more concepts than there are clusters, or a
        view restricts the labels that clients have.
    """
    parts = [federation]
    if federation.newcomers is not None:
        parts.append(federation.newcomers)
    truths: list[list[list[int]]] = []
    for part, purpose in zip(parts, ("clients", "newcomers"), strict=False):
        cluster_of = part.true_clusters or dict.fromkeys(part.ids, 0)
        first = [cluster_of[client] for client in part.ids]
        truths.append(drift.draw_clusters(first, len(views), seed, purpose))
    viewed = [
        _view_stages(part, rows, drift, seed) for part, rows in zip(parts, truths, strict=True)
    ]
    rule = "a shift that leaves all labels to all clients if the data drifts"
    require(("shift", "anda", not any(view.classes for view in views), rule))
    has_transform = any(view.transform for view in views)
    if drift.kind == "accumulate" or drift.test != "now" or has_transform:
        # Clients see their examples by several views, or by more than labels and rotation.
        pool, stages = write_out_views(federation.pool, views, viewed)
    else:
        pool = federation.pool
        stages = [_apply_single_views(part, views) for part in viewed]
    newcomers = None
    if federation.newcomers is not None:
        newcomers = _add_stages(federation.newcomers, stages[1], truths[1], drift, pool=pool)
    return _add_stages(federation, stages[0], truths[0], drift, pool=pool, newcomers=newcomers)


def _add_stages(
    federation: Federation,
    clients: Sequence[Sequence[ClientData]],
    clusters: Sequence[Sequence[int]],
    drift: Drift,
    *,
    pool: Pool,
    newcomers: Federation | None = None,
) -> Federation:
    """Return a federation with stages, given its clients and their true clusters in each stage.

    ``clients`` and ``clusters`` have the shape ``[stages][clients]``.
    """
    truths: list[dict[int, int] | None] = []
    for row in clusters:
        if federation.true_clusters is None:
            truths.append(None)
        else:
            truths.append(dict(zip(federation.ids, row, strict=True)))
    shared = list(accumulate(map(tuple, clients), _share_unchanged))
    later = zip(drift.rounds, shared[1:], truths[1 : len(shared)], strict=True)
    return replace(
        federation,
        pool=pool,
        newcomers=newcomers,
        clients=shared[0],
        true_clusters=truths[0],
        stages=tuple(Stage(number, members, truth) for number, members, truth in later),
        description=f"{federation.description}, {len(shared)} stages",
    )


def _view_stages(
    federation: Federation, clusters: Sequence[Sequence[int]], drift: Drift, seed: int
) -> list[list[ViewedData]]:
    """Assign examples and views to each client in each stage, ``[stages][clients]``.

    ``clusters [stages][clients]`` has the true cluster, and thus the view, of each client.
    """
    stages = len(drift.rounds) + 1
    viewed: list[list[ViewedData]] = [[] for _ in range(stages)]
    for place, client in enumerate(federation.clients):
        views = [row[place] for row in clusters]
        train = _distribute_training(client, drift, stages, seed)
        seen = int(rng.generator(seed, "seen", client.key).integers(stages))
        for stage in range(stages):
            first = 0 if drift.kind == "accumulate" else stage
            lots = range(first, stage + 1)
            train_lots: Lots = tuple((train[lot], views[lot]) for lot in lots)
            validation_lots: Lots = tuple((client.validation, views[lot]) for lot in lots)
            tested = {"now": stage, "next": min(stage + 1, len(views) - 1), "seen": seen}
            test_view = views[tested[drift.test]]
            data = ViewedData(client, train_lots, validation_lots, ((client.test, test_view),))
            viewed[stage].append(data)
    return viewed


def _distribute_training(
    client: ClientData, drift: Drift, stages: int, seed: int
) -> Sequence[Indices]:
    """Divide a client's training examples among the stages, or repeat them in each stage.

    The setting ``examples`` of the drift selects between the two.
    """
    if drift.examples == "same":
        return [client.train] * stages
    rule = (
        f"at least {stages} for client {client.id}, one for each stage; provide more examples, or "
        "set drift.examples = 'same'"
    )
    require(("training examples", len(client.train), len(client.train) >= stages, rule))
    order = rng.generator(seed, "stages", client.key).permutation(client.train)
    return np.array_split(order, stages)


def _apply_single_views(
    stages: Sequence[Sequence[ViewedData]], views: Sequence[View]
) -> list[list[ClientData]]:
    """Return the clients of each stage, given that a client has a single view in each stage.

    The label map and the rotation of the view become fields of the client, so that no examples are
    copied.
    """

    def apply_view(data: ViewedData) -> ClientData:
        ((train, number),) = data.train
        view = views[number]
        return replace(
            data.client, train=train, label_map=view.label_map, quarter_turns=view.quarter_turns
        )

    return [list(map(apply_view, stage)) for stage in stages]


def _share_unchanged(before: Clients, now: Clients) -> Clients:
    """Return the clients of a stage, with unchanged clients replaced by the earlier objects.

    Sharing these objects saves memory.
    """
    clients: list[ClientData] = []
    for old, new in zip(before, now, strict=True):
        clients.append(old if _has_same_data(old, new) else new)
    return tuple(clients)


def _has_same_data(old: ClientData, new: ClientData) -> bool:
    """Return whether a client has the same examples in two stages, and the same view of them."""
    if old.label_map is not new.label_map or old.quarter_turns != new.quarter_turns:
        return False
    return all(
        np.array_equal(getattr(old, split), getattr(new, split)) for split in get_args(Split)
    )
