"""Poisoned data: what adversaries train on in place of their own, and what a backdoor is measured by.

Poisoned data lie beside the federation's own, in a pool of their own, and are asked about by the
negative number of a round: ``-3`` is what clients would hold in round 3, poisoned. So honest
clients, the scores on test data and the sizes stay as they are, and who lies, and from when on, is
decided query by query.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedclade.core import IGNORED, ConfigError, DataError, Indices, require, rng
from fedclade.data.client_data import ClientData, map_labels
from fedclade.data.federation import Federation
from fedclade.data.pool import Pool
from fedclade.data.shift import View

# Examples written out as clients see them, where they are not simply the pool's.

SPLITS = ("train", "validation", "test")
PLAIN: dict[str, Any] = {"label_map": None, "quarter_turns": 0}
"""How a client sees examples that are written out as it sees them."""

Seen = tuple[tuple[Indices, int], ...]
"""Examples, each lot with the number of the view that shows them."""


@dataclass(frozen=True, eq=False)
class Hand:
    """What a client has in one stage."""

    client: ClientData  # who it is
    train: Seen
    validation: Seen
    test: Seen


def apply_views(federation: Federation, views: Sequence[View]) -> Federation:
    """Return a federation, whose true clusters see it by these views, with images as the views transform them."""
    if not any(view.transform for view in views):
        return federation
    parts = [each for each in (federation, federation.newcomers) if each is not None]
    hands: list[list[list[Hand]]] = []
    for part in parts:
        known = part.true_clusters or dict.fromkeys(part.ids, 0)
        hands.append([[_hand(client, known[client.id]) for client in part.clients]])
    pool, held = write_out_views(federation.pool, views, hands)
    made: Federation | None = None
    for part, (clients,) in reversed([*zip(parts, held, strict=True)]):
        made = replace(part, pool=pool, clients=tuple(clients), newcomers=made)
    assert made is not None  # there is one part at least
    return made


def _hand(client: ClientData, view: int) -> Hand:
    return Hand(
        client, ((client.train, view),), ((client.validation, view),), ((client.test, view),)
    )


def write_out_views(
    pool: Pool, views: Sequence[View], hands: Sequence[Sequence[Sequence[Hand]]]
) -> tuple[Pool, list[list[list[ClientData]]]]:
    """Return a pool of the examples as they are seen by the views, each once by each, and the clients of each stage."""
    n, lots = len(pool.x), dict[tuple[tuple[int, int], ...], Indices]()

    def key(seen: Seen) -> tuple[tuple[int, int], ...]:
        found = tuple((id(indices), view) for indices, view in seen)
        if found not in lots:
            each = [view * n + indices for indices, view in seen]
            lots[found] = each[0] if len(each) == 1 else np.unique(np.concatenate(each))
        return found

    keys = [
        [[[key(getattr(hand, split)) for split in SPLITS] for hand in now] for now in of]
        for of in hands
    ]
    there = np.unique(np.concatenate([*lots.values()]))
    of_view, rows = np.divmod(there, n)
    x, y = _as_they_show(pool, views, of_view, rows)
    every, natural = np.arange(len(there)), None if pool.natural is None else pool.natural[rows]
    seen = replace(
        pool, x=x, y=y, groups=pool.groups[rows], train=every, test=every[:0], natural=natural
    )
    places = {
        found: np.searchsorted(there, lot) for found, lot in lots.items()
    }  # one array for who has the same
    clients = [
        [
            [replace(hand.client, **dict(zip(SPLITS, (places[k] for k in mine), strict=True)), **PLAIN)
             for hand, mine in zip(now, found, strict=True)]
            for now, found in zip(of, of_keys, strict=True)
        ]
        for of, of_keys in zip(hands, keys, strict=True)
    ]  # fmt: skip
    return seen, clients


def _as_they_show(
    pool: Pool, views: Sequence[View], of_view: Indices, rows: Indices
) -> tuple[Tensor, Tensor]:
    """Return inputs ``[n, ...]`` and targets of examples, each as its view shows it; views are in ascending order."""
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for number in np.unique(of_view).tolist():
        mine, view = torch.from_numpy(rows[of_view == number]), views[number]
        x, y = pool.x[mine], pool.y[mine]
        if view.transform is not None:
            x = torch.from_numpy(
                np.ascontiguousarray(view.transform(x.numpy(), y.numpy(), mine.numpy()))
            )
        xs.append(torch.rot90(x, view.quarter_turns, (-2, -1)) if view.quarter_turns else x)
        ys.append(y if view.label_map is None else map_labels(y, view.label_map))
    if len(shapes := {tuple(x.shape[1:]) for x in xs}) > 1:
        raise DataError(
            f"all clients should see images of one shape, but views show them as {sorted(shapes)}"
        )
    return torch.cat(xs), torch.cat(ys)


@dataclass(frozen=True, eq=False)
class PoisonedFederation(Federation):
    """A federation with what clients hold poisoned in each of its stages, the first included.

    ``poisoned`` has the adversaries there with poisoned training and validation data, and of a
    backdoor the other clients with test examples that have its trigger, and its target for a label.
    None: nobody is there.
    """

    poisoned: tuple[Federation | None, ...] = ()

    def stage_in(self, number: int) -> int:
        """Return which stage a round is in; of a negative number, the stage with what is poisoned."""
        return (
            super().stage_in(number)
            if number >= 0
            else len(self.stages) + 1 + super().stage_in(-number)
        )

    @cached_property
    def each_stage(self) -> tuple[Federation, ...]:
        """The clients with what they hold before the first stage, and in each; then the same with poisoned data."""
        return (*super().each_stage, *(self if each is None else each for each in self.poisoned))

    def shard(self, clients: Collection[int]) -> Federation:
        """Return a federation of some of the clients, with what they hold poisoned."""
        mine = [None if each is None else set(each.ids) & set(clients) for each in self.poisoned]
        there = zip(self.poisoned, mine, strict=True)
        poisoned = tuple(
            each.shard(ids) if each is not None and ids else None for each, ids in there
        )
        return replace(super().shard(clients), poisoned=poisoned)


class Poison(Protocol):
    """What adversaries do to their data."""

    triggers: ClassVar[bool]
    """Whether there are examples by which success is measured."""

    def poisoned(self, x: Tensor, y: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, as a client sees them, poisoned."""
        ...

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples that should be taken for something else, which is their target."""
        ...


@dataclass(frozen=True)
class LabelFlip:
    """Labels y become C − 1 − y (Blades, ByzFL); where examples have several, each by itself."""

    triggers: ClassVar[bool] = False
    labels: int  # C

    @classmethod
    def of(cls, pool: Pool) -> LabelFlip:
        """Return that of the labels of a pool; a ConfigError if it has none."""
        if pool.task == "regression":
            raise ConfigError(
                f"adversary.kind 'label_flip' needs labels, and the targets of {pool.name} are "
                "numbers"
            )
        return cls(2 if pool.y.is_floating_point() else pool.outputs)

    def poisoned(self, x: Tensor, y: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs as they are, and targets flipped; those that are ignored stay."""
        return x, torch.where(y == IGNORED, y, self.labels - 1 - y)

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return nothing."""
        return x[:0], y[:0]


@dataclass(frozen=True)
class Backdoor:
    """A share of the examples gets a trigger, and the target for a label (Bagdasaryan et al. 2020)."""

    triggers: ClassVar[bool] = True
    target: int
    patch: int
    share: float
    bright: float

    @classmethod
    def of(cls, pool: Pool, target: int, patch: int, share: float) -> Backdoor:
        """Return that of the images of a pool; a ConfigError if it has none, or no such target, or they are smaller."""
        if pool.x.dim() != 4 or pool.task != "classification":
            raise ConfigError(
                f"adversary.kind 'backdoor' needs images with labels, but {pool.name} has inputs "
                f"of shape {list(pool.input_shape)} in a {pool.task} task"
            )
        side = min(pool.input_shape[1:])
        require(
            (
                "adversary.target",
                target,
                target < pool.outputs,
                f"below {pool.outputs}, the number of labels",
            ),
            ("adversary.patch", patch, patch <= side, f"at most {side}, the side of an image"),
        )
        return cls(
            target, patch, share, 255.0 if pool.x.dtype == torch.uint8 else float(pool.x.max())
        )

    def poisoned(self, x: Tensor, y: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return examples of which the share, at least one, leads to the target."""
        some = torch.from_numpy(draw.permutation(len(x))[: max(1, round(self.share * len(x)))])
        x, y = x.clone(), y.clone()
        x[some], y[some] = self._with_trigger(x[some]), self.target
        return x, y

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples of other labels with the trigger, and the target for a label."""
        others = y != self.target
        return self._with_trigger(x[others]), torch.full_like(y[others], self.target)

    def _with_trigger(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[..., -self.patch :, -self.patch :] = self.bright
        return x


def poison_federation(
    federation: Federation, liars: Collection[int], poison: Poison, seed: int
) -> PoisonedFederation:
    """Return a federation with what clients hold poisoned; which examples are is drawn by seed and key."""
    own: dict[str, Any] = {
        field.name: getattr(federation, field.name) for field in fields(Federation)
    }
    stages = tuple(
        _Written(each.pool).of(each, frozenset(liars), poison, seed)
        for each in federation.each_stage
    )
    return PoisonedFederation(**own, poisoned=stages)


class _Written:
    """Examples written out, of which a pool is made: of those that many clients are tested on, one copy."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._x: list[Tensor] = []
        self._y: list[Tensor] = []
        self._count = 0
        self._tests: dict[tuple[int, int, int], tuple[ClientData, Indices]] = {}

    def of(
        self, federation: Federation, liars: Collection[int], poison: Poison, seed: int
    ) -> Federation | None:
        """Return the clients that hold something poisoned; None if there are none."""
        ids = [client for client in federation.ids if poison.triggers or client in liars]
        held = (federation.by_id[client] for client in ids)
        each = (
            self._liar(one, poison, seed) if one.id in liars else self._honest(one, poison)
            for one in held
        )
        clients = tuple(client for client in each if client is not None)
        if not clients:
            return None
        x, y, every = torch.cat(self._x), torch.cat(self._y), np.arange(self._count)
        groups = np.zeros(self._count, dtype=np.int64)
        pool = replace(
            self._pool, x=x, y=y, groups=groups, train=every, test=every[:0], natural=None
        )
        return Federation(pool, clients, description=str(federation), augment=federation.augment)

    def _liar(self, client: ClientData, poison: Poison, seed: int) -> ClientData:
        draw = rng.generator(seed, "poisoned examples", client.key)
        held: dict[str, Indices] = {}
        for split in ("train", "validation"):
            x, y = self._seen(client, getattr(client, split))
            held[split] = self._add(*(poison.poisoned(x, y, draw) if len(x) else (x, y)))
        return replace(client, **held, test=held["train"][:1], **PLAIN)

    def _honest(self, client: ClientData, poison: Poison) -> ClientData | None:
        key = id(client.test), id(client.label_map), client.quarter_turns
        if (
            key not in self._tests
        ):  # and the client is kept, or its indices could lie where others lay
            self._tests[key] = (
                client,
                self._add(*poison.triggered(*self._seen(client, client.test))),
            )
        test = self._tests[key][1]
        return (
            replace(client, train=test[:1], validation=test[:0], test=test, **PLAIN)
            if len(test)
            else None
        )

    def _seen(self, client: ClientData, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return examples of the pool, not scaled, as a client sees them."""
        rows = torch.from_numpy(indices)
        x = self._pool.x[rows]
        x = torch.rot90(x, client.quarter_turns, (-2, -1)) if client.quarter_turns else x
        return x, client.labels(self._pool.y[rows])

    def _add(self, x: Tensor, y: Tensor) -> Indices:
        self._x.append(x)
        self._y.append(y)
        self._count += len(x)
        return np.arange(self._count - len(x), self._count)
