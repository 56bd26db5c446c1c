"""Poisoned data: the training data of adversaries, and the test data of a backdoor.

Poisoned data is in a pool of its own and is requested by the negative number of a round: ``-3``
stands for the poisoned data of round 3. Therefore honest clients, scores on test data and sizes
stay as they are, and each query decides which clients are adversaries, and from which round on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedclade.core import IGNORED, ConfigError, DataError, Indices, require, rng
from fedclade.data.client_data import ClientData, map_labels
from fedclade.data.federation import Federation
from fedclade.data.pool import Pool
from fedclade.data.shift import View

# Examples written out as clients see them, for views that change more than labels and rotation.

SPLITS = ("train", "validation", "test")

AS_WRITTEN: dict[str, Any] = {"label_map": None, "quarter_turns": 0}
"""Fields of a client whose examples are written out as it sees them."""

Lots = tuple[tuple[Indices, int], ...]
"""Lots of examples, each with the number of the view by which the client sees it."""

LotsKey = tuple[tuple[int, int], ...]
"""Identities of the arrays of some lots, and the numbers of their views."""


@dataclass(frozen=True, eq=False)
class ViewedData:
    """Data of one client in one stage, with the views by which it sees the examples."""

    client: ClientData
    train: Lots
    validation: Lots
    test: Lots


def apply_views(federation: Federation, views: Sequence[View]) -> Federation:
    """Return a federation with its images transformed by the views of its true clusters."""
    if not any(view.transform for view in views):
        return federation
    parts = [federation]
    if federation.newcomers is not None:
        parts.append(federation.newcomers)
    viewed: list[list[list[ViewedData]]] = []
    for part in parts:
        cluster_of = part.true_clusters or dict.fromkeys(part.ids, 0)
        clients = [_view_client(client, cluster_of[client.id]) for client in part.clients]
        viewed.append([clients])
    pool, written = write_out_views(federation.pool, views, viewed)
    newcomers = None
    if federation.newcomers is not None:
        clients = tuple(written[1][0])
        newcomers = replace(federation.newcomers, pool=pool, clients=clients, newcomers=None)
    return replace(federation, pool=pool, clients=tuple(written[0][0]), newcomers=newcomers)


def _view_client(client: ClientData, view: int) -> ViewedData:
    """Return a client that sees all of its examples by one view."""
    return ViewedData(
        client,
        train=((client.train, view),),
        validation=((client.validation, view),),
        test=((client.test, view),),
    )


def write_out_views(
    pool: Pool, views: Sequence[View], viewed: Sequence[Sequence[Sequence[ViewedData]]]
) -> tuple[Pool, list[list[list[ClientData]]]]:
    """Write out examples as clients see them.

    Parameters
    ----------
    pool
        The examples.
    views
        The views.
    viewed
        Data of the clients ``[federation][stage][client]``.

    Returns
    -------
    pool
        A pool with each used example once for each view.
    clients
        The clients with their examples in this pool, ``[federation][stage][client]``.

    Raises
    ------
    DataError
        If the views differ in the shape of the images.
    """
    n = len(pool.x)
    # Many clients may have one array of test examples, which is numbered only once, and which they
    # share afterwards, too.
    numbers: dict[LotsKey, Indices] = {}
    for stages in viewed:
        for data in chain.from_iterable(stages):
            for split in SPLITS:
                lots: Lots = getattr(data, split)
                key = _identify(lots)
                if key not in numbers:
                    numbers[key] = _number_examples(lots, n)
    used = np.unique(np.concatenate([*numbers.values()]))
    view_of, rows = np.divmod(used, n)
    x, y = _show_examples(pool, views, view_of, rows)
    every = np.arange(len(used))
    written_pool = replace(
        pool,
        x=x,
        y=y,
        groups=pool.groups[rows],
        train=every,
        test=every[:0],
        natural=None if pool.natural is None else pool.natural[rows],
    )
    places = {key: np.searchsorted(used, each) for key, each in numbers.items()}

    def write_out(data: ViewedData) -> ClientData:
        """Return the client with its examples in the new pool."""
        splits = {split: places[_identify(getattr(data, split))] for split in SPLITS}
        return replace(data.client, **splits, **AS_WRITTEN)

    def write_stage(stage: Sequence[ViewedData]) -> list[ClientData]:
        return [write_out(data) for data in stage]

    clients = [list(map(write_stage, stages)) for stages in viewed]
    return written_pool, clients


def _identify(lots: Lots) -> LotsKey:
    """Return a key that is the same for lots with the same arrays and views."""
    return tuple((id(indices), view) for indices, view in lots)


def _number_examples(lots: Lots, n: int) -> Indices:
    """Return distinct numbers of examples for each view, given a pool of n examples."""
    numbered = [view * n + indices for indices, view in lots]
    # The order of a single lot is kept.
    if len(numbered) == 1:
        return numbered[0]
    return np.unique(np.concatenate(numbered))


def _show_examples(
    pool: Pool, views: Sequence[View], view_of: Indices, rows: Indices
) -> tuple[Tensor, Tensor]:
    """Return inputs ``[n, ...]`` and targets of examples by their views, in ascending order."""
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for number in np.unique(view_of).tolist():
        view = views[number]
        shown_rows = torch.from_numpy(rows[view_of == number])
        x = pool.x[shown_rows]
        y = pool.y[shown_rows]
        if view.transform is not None:
            images = view.transform(x.numpy(), y.numpy(), shown_rows.numpy())
            x = torch.from_numpy(np.ascontiguousarray(images))
        if view.quarter_turns:
            x = torch.rot90(x, view.quarter_turns, (-2, -1))
        if view.label_map is not None:
            y = map_labels(y, view.label_map)
        xs.append(x)
        ys.append(y)
    shapes = {tuple(x.shape[1:]) for x in xs}
    if len(shapes) > 1:
        raise DataError(
            f"all clients should see images of one shape, but views show them as {sorted(shapes)}"
        )
    return torch.cat(xs), torch.cat(ys)


@dataclass(frozen=True, eq=False)
class PoisonedFederation(Federation):
    """Federation with additional, poisoned data for each of its stages, including the first.

    Parameters
    ----------
    poisoned
        For each stage: the adversaries with poisoned training and validation data, and for a
        backdoor the other clients with test examples that have its trigger and its target label.
        None: no client has such data.
    """

    poisoned: tuple[Federation | None, ...] = ()

    def stage_in(self, number: int) -> int:
        """Return the stage of a round; for a negative number, the stage with its poisoned data."""
        if number >= 0:
            return super().stage_in(number)
        return len(self.stages) + 1 + super().stage_in(-number)

    @cached_property
    def each_stage(self) -> tuple[Federation, ...]:
        """The clients with their data in each stage; then the same with poisoned data."""
        poisoned = [self if each is None else each for each in self.poisoned]
        return (*super().each_stage, *poisoned)

    def shard(self, clients: Collection[int]) -> Federation:
        """Return a federation of some of the clients, with their poisoned data."""
        shards: list[Federation | None] = []
        for federation in self.poisoned:
            shard = None
            if federation is not None:
                ids = set(federation.ids) & set(clients)
                if ids:
                    shard = federation.shard(ids)
            shards.append(shard)
        return replace(super().shard(clients), poisoned=tuple(shards))


class Poison(Protocol):
    """Modification of the data of adversaries."""

    triggers: ClassVar[bool]
    """Whether success is measured on examples with a trigger."""

    def poisoned(self, x: Tensor, y: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return poisoned inputs and targets, given those that a client sees."""
        ...

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples with the trigger, and the target label for each."""
        ...


@dataclass(frozen=True)
class LabelFlip:
    """Label flip: labels y become C − 1 − y, several labels of an example each by itself.

    Source: Blades, ByzFL.

    Parameters
    ----------
    labels
        C, the number of labels.
    """

    triggers: ClassVar[bool] = False
    labels: int

    @classmethod
    def of(cls, pool: Pool) -> LabelFlip:
        """Return the label flip for a pool; a ConfigError if the pool has no labels."""
        if pool.task == "regression":
            raise ConfigError(
                f"adversary.kind 'label_flip' needs labels, and the targets of {pool.name} are "
                "numbers"
            )
        return cls(2 if pool.y.is_floating_point() else pool.outputs)

    def poisoned(self, x: Tensor, y: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return the same inputs and flipped targets; ignored targets do not change."""
        return x, torch.where(y == IGNORED, y, self.labels - 1 - y)

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return no examples."""
        return x[:0], y[:0]


@dataclass(frozen=True)
class Backdoor:
    """Backdoor: some examples get a trigger, and the target label (Bagdasaryan et al. 2020).

    Parameters
    ----------
    target
        The target label.
    patch
        Side of the trigger in pixels, a bright square in the lower right corner.
    share
        Fraction of an adversary's examples that get the trigger.
    bright
        Value of a bright pixel.
    """

    triggers: ClassVar[bool] = True
    target: int
    patch: int
    share: float
    bright: float

    @classmethod
    def of(cls, pool: Pool, target: int, patch: int, share: float) -> Backdoor:
        """Return the backdoor for a pool of images.

        Raises
        ------
        ConfigError
            If the pool has no images with labels, the target is no label, or the patch is larger
            than an image.
        """
        if pool.x.dim() != 4 or pool.task != "classification":
            raise ConfigError(
                f"adversary.kind 'backdoor' needs images with labels, but {pool.name} has inputs "
                f"of shape {list(pool.input_shape)} in a {pool.task} task"
            )
        side = min(pool.input_shape[1:])
        label_rule = f"below {pool.outputs}, the number of labels"
        side_rule = f"at most {side}, the side of an image"
        require(
            ("adversary.target", target, target < pool.outputs, label_rule),
            ("adversary.patch", patch, patch <= side, side_rule),
        )
        bright = 255.0 if pool.x.dtype == torch.uint8 else float(pool.x.max())
        return cls(target, patch, share, bright)

    def poisoned(self, x: Tensor, y: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return examples of which a share, at least one, has the trigger and the target label."""
        count = max(1, round(self.share * len(x)))
        chosen = torch.from_numpy(draw.permutation(len(x))[:count])
        x = x.clone()
        y = y.clone()
        x[chosen] = self._add_trigger(x[chosen])
        y[chosen] = self.target
        return x, y

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples of other labels with the trigger, and the target label for each."""
        others = y != self.target
        return self._add_trigger(x[others]), torch.full_like(y[others], self.target)

    def _add_trigger(self, x: Tensor) -> Tensor:
        """Return images with the trigger."""
        x = x.clone()
        x[..., -self.patch :, -self.patch :] = self.bright
        return x


def poison_federation(
    federation: Federation, adversaries: Collection[int], poison: Poison, seed: int
) -> PoisonedFederation:
    """Add poisoned data to a federation.

    Parameters
    ----------
    federation
        The clients and their data.
    adversaries
        Ids of the adversaries.
    poison
        The modification of their data.
    seed
        Seed of the draws of the examples to poison, together with the client's key.
    """
    values: dict[str, Any] = {
        field.name: getattr(federation, field.name) for field in fields(Federation)
    }
    ids = frozenset(adversaries)
    stages = [
        _PoisonedExamples(stage.pool).build(stage, ids, poison, seed)
        for stage in federation.each_stage
    ]
    return PoisonedFederation(**values, poisoned=tuple(stages))


class _PoisonedExamples:
    """Poisoned examples of one stage. Test examples that many clients share are written once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._x: list[Tensor] = []
        self._y: list[Tensor] = []
        self._count = 0
        self._tests: dict[tuple[int, int, int], tuple[ClientData, Indices]] = {}

    def build(
        self, federation: Federation, adversaries: Collection[int], poison: Poison, seed: int
    ) -> Federation | None:
        """Return the clients that have poisoned data; None if there are none."""
        clients: list[ClientData] = []
        for client_id in federation.ids:
            if client_id in adversaries:
                client = self._poison_client(federation.by_id[client_id], poison, seed)
            elif poison.triggers:
                client = self._trigger_tests(federation.by_id[client_id], poison)
            else:
                continue
            if client is not None:
                clients.append(client)
        if not clients:
            return None
        every = np.arange(self._count)
        pool = replace(
            self._pool,
            x=torch.cat(self._x),
            y=torch.cat(self._y),
            groups=np.zeros(self._count, dtype=np.int64),
            train=every,
            test=every[:0],
            natural=None,
        )
        return Federation(
            pool, tuple(clients), description=str(federation), augment=federation.augment
        )

    def _poison_client(self, client: ClientData, poison: Poison, seed: int) -> ClientData:
        """Return an adversary with poisoned training and validation data."""
        draw = rng.generator(seed, "poisoned examples", client.key)
        splits: dict[str, Indices] = {}
        for split in ("train", "validation"):
            x, y = self._show_examples(client, getattr(client, split))
            if len(x):
                x, y = poison.poisoned(x, y, draw)
            splits[split] = self._add(x, y)
        # A client needs a test example, which is never used.
        return replace(client, **splits, test=splits["train"][:1], **AS_WRITTEN)

    def _trigger_tests(self, client: ClientData, poison: Poison) -> ClientData | None:
        """Return an honest client with triggered test examples; None if it has none."""
        key = id(client.test), id(client.label_map), client.quarter_turns
        if key not in self._tests:
            x, y = self._show_examples(client, client.test)
            # The client is stored, too: else another array could get the same id.
            self._tests[key] = client, self._add(*poison.triggered(x, y))
        _, test = self._tests[key]
        if len(test) == 0:
            return None
        return replace(client, train=test[:1], validation=test[:0], test=test, **AS_WRITTEN)

    def _show_examples(self, client: ClientData, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return examples of the pool as a client sees them, not scaled."""
        rows = torch.from_numpy(indices)
        x = self._pool.x[rows]
        if client.quarter_turns:
            x = torch.rot90(x, client.quarter_turns, (-2, -1))
        return x, client.labels(self._pool.y[rows])

    def _add(self, x: Tensor, y: Tensor) -> Indices:
        """Add examples; return their indices."""
        self._x.append(x)
        self._y.append(y)
        self._count += len(x)
        return np.arange(self._count - len(x), self._count)
