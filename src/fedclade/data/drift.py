"""Drift: clients that get other examples, or move to another true cluster, during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from fedclade.core import ConfigError, Split, check_arguments, checked, require, rng, unknown
from fedclade.data.client_data import ClientData, Stage
from fedclade.data.federation import Federation
from fedclade.data.poisoned import Hand, write_out_views
from fedclade.data.shift import View

# Patterns of drift: the concept of each of ten clients in eleven time steps (Jothimurugesan et al.
# 2023).

Concepts = tuple[tuple[int, ...], ...]
"""A row for each time step, with the concept of each client."""

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
"""A row of ten digits for each time step; the facts are the change points that the authors' code was run with."""

PATTERNS: Mapping[str, Concepts] = MappingProxyType(
    {
        name.split()[-1]: tuple(tuple(map(int, row)) for row in rows.split() if row.isdigit())
        for name, rows in zip(_TEXT.split(":")[:-1], _TEXT.split(":")[1:], strict=True)
    }
)
"""A and W to Y have two concepts, Z the first and the third of three; B to F have four, R0 to R9 four at random."""


def read_concepts(pattern: str | Concepts, steps: int, clients: int) -> Sequence[Sequence[int]]:
    """Return the concept of each client in so many time steps, ``[steps][clients]``; one more of the tests, if known.

    A pattern of ten clients is repeated for more. Raises a ConfigError if a name is unknown, a row
    has another number of clients than the pattern's first, a concept is negative, or there are
    fewer rows than steps.
    """
    if isinstance(pattern, str) and pattern not in PATTERNS:
        raise ConfigError(unknown("pattern of drift:", pattern, PATTERNS))
    rows = PATTERNS[pattern] if isinstance(pattern, str) else pattern
    if len({len(row) for row in rows}) != 1 or not rows[0] or min(min(row) for row in rows) < 0:
        raise ConfigError(
            "a pattern of drift should have rows of one length, with a concept from 0 on for each "
            "client"
        )
    if len(rows) < steps:
        raise ConfigError(
            f"the pattern of drift has {len(rows)} rows, and {steps} are needed, one for each time "
            "step"
        )
    return [[row[client % len(row)] for client in range(clients)] for row in rows]


@checked()
@dataclass(frozen=True, kw_only=True)
class Drift:
    """How the data of a federation's clients changes during a run, in stages.

    Parameters
    ----------
    rounds
        The first round of each stage but the first, from 2 on, ascending.
    kind
        Whether a stage's training and validation data ``replace`` those of the stages before, or
        clients ``accumulate`` them, with the labels and the views of then. They are tested on the
        present stage's data alone.
    examples
        ``new``: every stage has a part of its own, all of equal size, of what a client trains on;
        ``same``: it keeps its examples, and only sees them as its true cluster does.
    share
        Of the clients, how many move to another true cluster at each stage, drawn anew: in [0, 1],
        and at least one client unless it is 0; half of them, if left out. With ``anew`` every
        client draws its cluster from all, which may be the one that it had. Newcomers move
        likewise.
    pattern
        In its place, the true cluster of each client in each stage: a name of FedDrift's, ``A`` to
        ``F``, ``W`` to ``Z``, ``R0`` to ``R9``, or a list with a row for each stage. Rows of fewer
        clients are repeated.
    test
        Whether a stage is tested on data as clients see it ``now``; in the ``next`` stage, as
        FedDrift is, and in the last by the pattern's next row, if there is one; or all stages as in
        one of those that are ``seen``, drawn for each client.

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
        ascending = (
            bool(self.rounds)
            and self.rounds[0] >= 2
            and list(self.rounds) == sorted(set(self.rounds))
        )
        share, both = self.share, self.share is not None and bool(self.pattern)
        require(
            (
                "drift.rounds",
                list(self.rounds),
                ascending,
                "one round or more from 2 on, in ascending order",
            ),
            (
                "drift.kind",
                self.kind,
                self.kind in ("replace", "accumulate"),
                "'replace' or 'accumulate'",
            ),
            ("drift.examples", self.examples, self.examples in ("new", "same"), "'new' or 'same'"),
            (
                "drift.share",
                share,
                share in (None, "anew") or _is_share(share),
                "in [0, 1], or 'anew'",
            ),
            ("drift.share", share, not both, "left out with a pattern, which says who moves"),
            (
                "drift.test",
                self.test,
                self.test in ("now", "next", "seen"),
                "'now', 'next' or 'seen'",
            ),
        )
        if self.pattern:
            read_concepts(self.pattern, len(self.rounds) + 1, 1)

    def clusters(
        self, first: Sequence[int], clusters: int, seed: int, purpose: str
    ) -> list[list[int]]:
        """Return the true cluster of each client in each stage, and where a pattern knows it in one more."""
        if self.pattern:
            rows = [
                list(row) for row in read_concepts(self.pattern, len(self.rounds) + 1, len(first))
            ]
            most = max(max(row) for row in rows[: len(self.rounds) + 2])
            require(
                (
                    "drift.pattern",
                    self.pattern,
                    most < clusters,
                    f"of {clusters} concepts, as clusters says",
                )
            )
            return rows[: len(self.rounds) + 2]
        rows, share = [list(first)], DEFAULT_SHARE if self.share is None else self.share
        for stage in range(1, len(self.rounds) + 1):
            draw = rng.generator(seed, f"drift {purpose}", stage)
            if isinstance(share, str):
                rows.append(draw.integers(clusters, size=len(first)).tolist())
                continue
            movers = draw.permutation(len(first))[
                : max(1, round(share * len(first))) if share and clusters > 1 else 0
            ]
            rows.append(list(rows[-1]))
            for client in np.sort(movers).tolist():
                rows[-1][client] = (
                    rows[-1][client] + 1 + int(draw.integers(clusters - 1))
                ) % clusters
        return rows


DEFAULT_SHARE = 0.5


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def read_drift(drift: Drift | Mapping[str, Any] | None) -> Drift | None:
    """Return a drift, or that of some fields, such as those of a config; a ConfigError if these are not right."""
    if drift is None or isinstance(drift, Drift):
        return drift
    return Drift(**check_arguments("[data.drift]", Drift, drift))


Clients = tuple[ClientData, ...]


def apply_drift(
    federation: Federation, views: Sequence[View], drift: Drift, seed: int
) -> Federation:
    """Return a federation, whose true clusters see it by these views, with stages; its newcomers have the same."""
    parts = [each for each in (federation, federation.newcomers) if each is not None]
    truths: list[list[list[int]]] = []
    for part, purpose in zip(parts, ("clients", "newcomers"), strict=False):
        known = part.true_clusters or dict.fromkeys(part.ids, 0)
        truths.append(
            drift.clusters([known[client] for client in part.ids], len(views), seed, purpose)
        )
    hands = [_hands(part, rows, drift, seed) for part, rows in zip(parts, truths, strict=True)]
    rule = "one that leaves all labels to all clients, where their data drifts"
    require(("shift", "anda", not any(view.classes for view in views), rule))
    if drift.kind == "accumulate" or drift.test != "now" or any(view.transform for view in views):
        pool, held = write_out_views(federation.pool, views, hands)
    else:
        pool, held = (
            federation.pool,
            [[[_seen(hand, views) for hand in now] for now in of] for of in hands],
        )
    made: Federation | None = None
    for part, of, rows in reversed([*zip(parts, held, truths, strict=True)]):
        known = [
            None if part.true_clusters is None else dict(zip(part.ids, row, strict=True))
            for row in rows
        ]
        each = [*zip(accumulate(map(tuple, of), _unchanged), known, strict=False)]
        later = zip(drift.rounds, each[1:], strict=True)
        made = replace(
            part,
            pool=pool,
            clients=each[0][0],
            true_clusters=each[0][1],
            stages=tuple(Stage(number, *stage) for number, stage in later),
            newcomers=made,
            description=f"{part.description}, {len(each)} stages",
        )
    assert made is not None  # there is one part at least
    return made


def _hands(
    part: Federation, rows: Sequence[Sequence[int]], drift: Drift, seed: int
) -> list[list[Hand]]:
    """Return what each client has in each stage, given its true clusters ``[stages][clients]``."""
    stages = len(drift.rounds) + 1
    hands: list[list[Hand]] = [[] for _ in range(stages)]
    for place, client in enumerate(part.clients):
        held, views = [client.train] * stages, [row[place] for row in rows]
        seen = int(rng.generator(seed, "seen", client.key).integers(stages))
        if drift.examples == "new":
            rule = f"at least {stages}, one for each stage, of client {client.id}; or take drift.examples = 'same'"
            require(("training examples", len(client.train), len(client.train) >= stages, rule))
            order = rng.generator(seed, "stages", client.key).permutation(client.train)
            held = np.array_split(order, stages)
        for k in range(stages):
            lots = range(0 if drift.kind == "accumulate" else k, k + 1)
            train, validation = (
                tuple((of[j], views[j]) for j in lots)
                for of in (held, [client.validation] * stages)
            )
            shown = {"now": k, "next": min(k + 1, len(views) - 1), "seen": seen}[drift.test]
            hands[k].append(Hand(client, train, validation, ((client.test, views[shown]),)))
    return hands


def _seen(hand: Hand, views: Sequence[View]) -> ClientData:
    """Return a client that has one lot of examples, seen by one view."""
    (train, number), *_ = hand.train
    view = views[number]
    return replace(
        hand.client, train=train, label_map=view.label_map, quarter_turns=view.quarter_turns
    )


def _unchanged(before: Clients, now: Clients) -> Clients:
    """Return clients, where nothing changes for one as the object that it was before."""

    def same(one: ClientData, other: ClientData) -> bool:
        seen_alike = one.label_map is other.label_map and one.quarter_turns == other.quarter_turns
        return seen_alike and all(
            np.array_equal(getattr(one, s), getattr(other, s)) for s in get_args(Split)
        )

    return tuple(one if same(one, other) else other for one, other in zip(before, now, strict=True))
