"""Poisoned data: the training data of adversaries, and the test data of a backdoor.

Poisoned data is in a separate pool, and a query requests it by a negative round number: ``-3``
stands for the poisoned data of round 3. Clients use their true data in all other queries. Poisoning
therefore changes neither the data of honest clients, nor scores on test data, nor the numbers of
examples. To train on poisoned data, a query with the negative number is sent to the adversaries of
the round, which may differ from round to round. To measure a backdoor, such a query is sent to
honest clients, whose poisoned test data has the trigger.

The module also stores examples as clients see them, after the views of a shift or a drift.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch

from fedclade.core import IGNORED, ConfigError, DataError, Indices, require, rng
from fedclade.data.client_data import ClientData, map_labels
from fedclade.data.federation import Federation
from fedclade.data.pool import Pool
from fedclade.data.shift import View

if TYPE_CHECKING:
    from torch import Tensor

# Examples written out as clients see them, for views that do more than map labels and rotate.

SPLITS = ("train", "validation", "test")

AS_WRITTEN: dict[str, Any] = {"label_map": None, "quarter_turns": 0}
"""Fields of a client whose examples are stored with labels mapped and images rotated already."""

Lots = tuple[tuple[Indices, int], ...]
"""Groups of examples of a client, each with the number of the view that applies to the group."""

LotsKey = tuple[tuple[int, int], ...]
"""Key of :data:`Lots`: the identity of each array of indices, and the number of its view."""


@dataclass(frozen=True, eq=False)
class ViewedData:
    """Data of one client in one stage, and the views by which the client sees the examples.

    Parameters
    ----------
    client
        The client.
    train, validation, test
        Groups of examples, each of which the client sees by one view. A group is a pair: indices of
        examples in the pool, and the number of the view.
    """

    client: ClientData
    train: Lots
    validation: Lots
    test: Lots


def apply_views(federation: Federation, views: Sequence[View]) -> Federation:
    """Return a federation with images transformed by the views of the true clusters.

    The federation is returned unchanged if the views only map labels and rotate images, since
    label maps and rotations are stored as fields of the clients.
    """
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
    """Return the data of a client that sees all of its examples by the same view."""
    return ViewedData(
        client,
        train=((client.train, view),),
        validation=((client.validation, view),),
        test=((client.test, view),),
    )


def write_out_views(
    pool: Pool, views: Sequence[View], viewed: Sequence[Sequence[Sequence[ViewedData]]]
) -> tuple[Pool, list[list[list[ClientData]]]]:
    """Store examples as clients see them, in a new pool.

    Parameters
    ----------
    pool
        The original examples.
    views
        The views, to which the view numbers in ``viewed`` refer.
    viewed
        Data of the clients, ``[federation][stage][client]``. The first federation has the clients
        that train, and the second federation, if any, has the newcomers.

    Returns
    -------
    pool
        A pool with each used example once for each view that applies to it.
    clients
        The clients with their examples in the new pool, ``[federation][stage][client]``.

    Raises
    ------
    DataError
        If the views differ in the shape of the images.
    """
    n = len(pool.x)
    # Many clients may share one array of test examples. It is numbered only once, and the clients
    # also share the result.
    numbers: dict[LotsKey, Indices] = {}
    for stages in viewed:
        for data in chain.from_iterable(stages):
            for split in SPLITS:
                lots: Lots = getattr(data, split)
                key = _make_key(lots)
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
        related=None if pool.related is None else pool.related[rows],
    )
    places = {key: np.searchsorted(used, each) for key, each in numbers.items()}

    def write_out(data: ViewedData) -> ClientData:
        """Return a client with its examples in the new pool."""
        splits = {split: places[_make_key(getattr(data, split))] for split in SPLITS}
        return replace(data.client, **splits, **AS_WRITTEN)

    def write_stage(stage: Sequence[ViewedData]) -> list[ClientData]:
        return [write_out(data) for data in stage]

    clients = [list(map(write_stage, stages)) for stages in viewed]
    return written_pool, clients


def _make_key(lots: Lots) -> LotsKey:
    """Return a dictionary key for groups of examples, by which shared groups are stored once.

    Two keys are equal if the groups consist of the same array objects and view numbers.
    """
    return tuple((id(indices), view) for indices, view in lots)


def _number_examples(lots: Lots, n: int) -> Indices:
    """Return a number for each example in the groups, which also states the view of the example.

    The number is ``view · n + index`` for a pool of n examples. A pair of example and view that
    occurs in several groups is returned only once.
    """
    numbered = [view * n + indices for indices, view in lots]
    # The order of a single group of examples does not change.
    if len(numbered) == 1:
        return numbered[0]
    return np.unique(np.concatenate(numbered))


def _show_examples(
    pool: Pool, views: Sequence[View], view_of: Indices, rows: Indices
) -> tuple[Tensor, Tensor]:
    """Return the inputs ``[n, ...]`` and targets of n examples as views show them.

    ``rows`` has the row of each example in the pool, and ``view_of`` the number of its view.
    The results are sorted by view.
    """
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
            "the transforms of all views of a shift should return images of the same shape, got "
            f"the shapes {sorted(shapes)}; correct the shift"
        )
    return torch.cat(xs), torch.cat(ys)


@dataclass(frozen=True, eq=False)
class PoisonedFederation(Federation):
    """Federation with additional poisoned data in each stage.

    Parameters
    ----------
    poisoned
        Federations of poisoned data: one for the rounds before the first stage, and one for each
        stage. Each federation has the adversaries with poisoned training and validation data. For a
        backdoor, it also has the other clients with test examples that have the trigger and the
        target label. None in place of a federation if no client has poisoned data.
    """

    poisoned: tuple[Federation | None, ...] = ()

    def stage_in(self, number: int) -> int:
        """Return the index into :attr:`each_stage` of the data of a round.

        A negative number ``-r`` stands for the poisoned data of round r.
        """
        if number >= 0:
            return super().stage_in(number)
        return len(self.stages) + 1 + super().stage_in(-number)

    @cached_property
    def each_stage(self) -> tuple[Federation, ...]:
        """Federations of the unchanged data of each stage, then of the poisoned data of each stage.

        The rounds before the first stage also count as a stage.
        """
        poisoned = [self if each is None else each for each in self.poisoned]
        return (*super().each_stage, *poisoned)

    def shard(self, clients: Collection[int]) -> Federation:
        """Return a federation of the clients with the given ids, including their poisoned data."""
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
    """Interface of a modification of adversaries' training data, such as a label flip."""

    triggers: ClassVar[bool]
    """Whether the success of the attack is measured on test examples with a trigger."""

    def poisoned(self, x: Tensor, y: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return poisoned inputs and targets, given inputs ``x`` and targets ``y`` of a client.

        ``draw`` is the generator of random choices, such as of the examples to poison.
        """
        ...

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return test inputs with the trigger, and the attack's target label as their targets."""
        ...


@dataclass(frozen=True)
class LabelFlip:
    """Label-flip attack: each label y of C labels becomes C − 1 − y.

    If an example has several labels (0 or 1), each of these labels is flipped.

    Source: the packages Blades and ByzFL.

    Parameters
    ----------
    labels
        C, the number of labels.
    """

    triggers: ClassVar[bool] = False
    labels: int

    @classmethod
    def of(cls, pool: Pool) -> LabelFlip:
        """Create the label flip for a pool.

        Raises
        ------
        ConfigError
            If the targets of the pool are not labels.
        """
        if pool.task == "regression":
            raise ConfigError(
                f"adversary.kind 'label_flip' needs labels, but the targets of {pool.name} are "
                "numbers; choose another adversary.kind"
            )
        return cls(2 if pool.y.is_floating_point() else pool.outputs)

    def poisoned(self, x: Tensor, y: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return unchanged inputs and flipped targets; ignored targets do not change."""
        return x, torch.where(y == IGNORED, y, self.labels - 1 - y)

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return no examples, since a label flip has no trigger."""
        return x[:0], y[:0]


@dataclass(frozen=True)
class Backdoor:
    """Backdoor attack: some images get a trigger and the target label (Bagdasaryan et al. 2020).

    Parameters
    ----------
    target
        Label that the model should predict for images with the trigger.
    patch
        Side length in pixels of the trigger, a bright square in the lower right corner.
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
        """Create the backdoor for a pool of images.

        Raises
        ------
        ConfigError
            If the pool does not consist of images with labels, the target is not a label, or the
            patch is larger than an image.
        """
        if pool.x.dim() != 4 or pool.task != "classification":
            raise ConfigError(
                f"adversary.kind 'backdoor' needs images with labels, but {pool.name} has inputs "
                f"of shape {list(pool.input_shape)} in a {pool.task} task; choose another "
                "adversary.kind"
            )
        side = min(pool.input_shape[1:])
        label_rule = f"below {pool.outputs}, the number of labels"
        side_rule = f"at most {side}, the side of an image"
        require(
            ("adversary.target", target, target < pool.outputs, label_rule),
            ("adversary.patch", patch, patch <= side, side_rule),
        )
        if pool.x.dtype == torch.uint8:
            bright = 255.0
        else:
            bright = float(pool.x.max())
        return cls(target, patch, share, bright)

    def poisoned(self, x: Tensor, y: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return examples of which a fraction ``share`` has the trigger and the target label.

        At least one example is modified.
        """
        count = max(1, round(self.share * len(x)))
        chosen = torch.from_numpy(draw.permutation(len(x))[:count])
        x = x.clone()
        y = y.clone()
        x[chosen] = self._add_trigger(x[chosen])
        y[chosen] = self.target
        return x, y

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return images of other labels with the trigger, and the target label for each image."""
        others = y != self.target
        return self._add_trigger(x[others]), torch.full_like(y[others], self.target)

    def _add_trigger(self, x: Tensor) -> Tensor:
        """Return a copy of images with the trigger in the lower right corner."""
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
        The modification of the adversaries' data.
    seed
        Seed of the random choice of examples to poison, together with the key of each client.
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
    """Builder of the federation of poisoned data of one stage.

    It collects the poisoned examples of all clients, from which it makes a pool. Test examples that
    many clients share are stored once.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._x: list[Tensor] = []
        self._y: list[Tensor] = []
        self._count = 0
        self._tests: dict[tuple[int, int, int], tuple[ClientData, Indices]] = {}

    def build(
        self, federation: Federation, adversaries: Collection[int], poison: Poison, seed: int
    ) -> Federation | None:
        """Build the federation of clients with poisoned data; None if no client has such data."""
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
            related=None,
        )
        return Federation(
            pool, tuple(clients), description=str(federation), augment=federation.augment
        )

    def _poison_client(self, client: ClientData, poison: Poison, seed: int) -> ClientData:
        """Return an adversary whose training and validation data is poisoned."""
        draw = rng.generator(seed, "poisoned examples", client.key)
        splits: dict[str, Indices] = {}
        for split in ("train", "validation"):
            x, y = self._show_examples(client, getattr(client, split))
            if len(x):
                x, y = poison.poisoned(x, y, draw)
            splits[split] = self._add_examples(x, y)
        # Every client must have a test example; this test example is never used.
        return replace(client, **splits, test=splits["train"][:1], **AS_WRITTEN)

    def _trigger_tests(self, client: ClientData, poison: Poison) -> ClientData | None:
        """Return an honest client whose test examples have the trigger.

        Returns None if all test examples of the client have the target label already.
        """
        key = id(client.test), id(client.label_map), client.quarter_turns
        if key not in self._tests:
            x, y = self._show_examples(client, client.test)
            # Storing the client keeps its test array alive, so that no other array can get its id.
            self._tests[key] = client, self._add_examples(*poison.triggered(x, y))
        _, test = self._tests[key]
        if len(test) == 0:
            return None
        return replace(client, train=test[:1], validation=test[:0], test=test, **AS_WRITTEN)

    def _show_examples(self, client: ClientData, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets as a client sees them, after its rotation and label map.

        Images are returned as stored, without normalization.
        """
        rows = torch.from_numpy(indices)
        x = self._pool.x[rows]
        if client.quarter_turns:
            x = torch.rot90(x, client.quarter_turns, (-2, -1))
        return x, client.labels(self._pool.y[rows])

    def _add_examples(self, x: Tensor, y: Tensor) -> Indices:
        """Add examples to the pool of poisoned data, and return their indices in this pool."""
        self._x.append(x)
        self._y.append(y)
        self._count += len(x)
        return np.arange(self._count - len(x), self._count)
