"""Data of simulated clients, on the device on which the clients train and evaluate.

A data split is training, validation or test data. The data of all clients are examples of one pool;
an example that several clients have is stored once. The module also has the augmentation of
training batches.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedclade.core import (
    AllData,
    DataError,
    Indices,
    ModelError,
    Positions,
    Related,
    Split,
    SplitPart,
    Structure,
    TrainQuery,
    are_copies,
    have_different_targets,
)
from fedclade.data import Augment, ClientTable, Federation, SplitRows, map_labels
from fedclade.training.dependence import have_similar_neighbours

_log = logging.getLogger(__name__)

MANY_COPIES = 0.05
"""A client is warned only if at least this share of its examples equal earlier examples."""

LEAST_SINGLE = 0.25
"""A client is warned only if at least this share of its examples occur once.

If fewer examples occur once, the distribution has few values, and equal examples are natural.
"""

LOOKED_AT = 20
"""Number of clients whose adjacent examples are compared, for a warning of dependent examples."""

# The distinct inputs of a split on the device, and the inputs of each client.

FETCHED_AT_A_TIME = 1024
"""Number of inputs that are copied from the pool at once when a data split is gathered."""


class SplitInputs:
    """Distinct inputs of a data split, and the inputs that each client has.

    An input is an example of the pool, rotated by quarter turns. The distinct inputs are numbered
    in the order in which they first occur among the clients, and the number of an input is its
    place. An input that several clients have therefore has only one place, and inputs that only one
    client has are adjacent. A set contains the places of all inputs of a client; clients with the
    same examples and the same rotation have the same set.

    Parameters
    ----------
    federation
        The clients.
    split
        The data split: ``train``, ``validation`` or ``test``.
    device
        Device for the inputs.

    Attributes
    ----------
    set_of
        For each of n clients, the number of its set, int64 ``[n]`` in the order of the federation.
    sizes
        Number of places of each set.
    starts
        Start of each set in the concatenation of all sets, see :meth:`at`.
    keeps
        Whether all inputs are stored on the device once they have been used.
    bytes_each
        Bytes of one input.
    """

    def __init__(self, federation: Federation, split: Split, device: torch.device) -> None:
        self._pool = federation.pool
        self._device = device
        examples = len(self._pool.x)
        self.set_of, self.sizes, held = _number_sets(federation, split, examples)
        self.starts = self.sizes.cumsum() - self.sizes
        at = np.arange(len(held))
        first = np.full(4 * examples, len(held))
        np.minimum.at(first, held, at)
        first = first[held]
        is_first = first == at
        self._places = (is_first.cumsum() - 1)[first]
        self._turns, self._indices = np.divmod(held[is_first], max(1, examples))
        self._kept: Tensor | None = None
        self._is_view: dict[int, bool] = {}
        self._version: int | None = None
        self._like = self._pool.inputs(self._indices[:1])
        self.bytes_each = self._like[:1].nbytes
        self.keeps = False

    def __len__(self) -> int:
        return len(self._indices)

    def places_of(self, number: int) -> Indices:
        """Return the places of the inputs in a set, given the set's number."""
        start = self.starts[number]
        return self._places[start : start + self.sizes[number]]

    def at(self, numbers: Indices) -> Indices:
        """Return the places at some indices in the concatenation of all sets of places."""
        return self._places[numbers]

    def inputs(self, places: Indices) -> Tensor:
        """Return the inputs at some places, ``[n, ...]``, in the form in which a model takes them.

        The result is a view if the places are adjacent and the inputs are stored on the device.
        """
        if not self.keeps:
            return self._fetch_inputs(places)
        if self._kept is None:
            self._kept = self._gather_inputs()
        self._check_unchanged(self._kept)
        if _are_adjacent(places):
            return self._kept[places[0] : places[0] + len(places)]
        return self._kept.index_select(0, torch.from_numpy(places).to(self._device))

    def inputs_of(self, number: int) -> Tensor:
        """Return the inputs of a set, ``[n, ...]``, given the set's number.

        The result is a view if the set's places are adjacent and the inputs are stored on the
        device.
        """
        places = self.places_of(number)
        # Cached, since a check whether places are adjacent takes longer than a view.
        if number not in self._is_view:
            self._is_view[number] = len(places) > 0 and _are_adjacent(places)
        if not self.keeps or self._kept is None or not self._is_view[number]:
            return self.inputs(places)
        self._check_unchanged(self._kept)
        return self._kept[places[0] : places[0] + len(places)]

    def _check_unchanged(self, kept: Tensor) -> None:
        """Check that no forward pass has changed the stored inputs in place since the first check.

        Raises
        ------
        ModelError
            If a forward pass has changed the inputs, although the model did not do so in the trial
            before the first round. (A model that does so in the trial gets copies of its inputs.)
        """
        if self._version is None:
            self._version = kept._version
        if kept._version != self._version:
            raise ModelError(
                "the model's forward method has overwritten the clients' data, which it did not do "
                "in a trial on two examples; begin the forward method with x = x.clone()"
            )

    def targets(self, places: Indices) -> Tensor:
        """Return the targets of the examples at some places, on the CPU.

        The targets are those of the pool, without label maps: ``[n]``, or ``[n, T]`` for T targets
        per example.
        """
        return self._pool.y[torch.from_numpy(self._rows(places)[0])]

    def _rows(self, places: Indices) -> tuple[Indices, Indices]:
        """Return, for some places, the rows of the examples in the pool and their quarter turns."""
        return self._indices[places], self._turns[places]

    # Clients may later train on inputs that an evaluation gathers in inference mode.
    @torch.inference_mode(False)
    def _gather_inputs(self) -> Tensor:
        """Copy all inputs of the data split from the pool to the device."""
        whole = self._allocate_inputs(len(self))
        for start in range(0, len(self), FETCHED_AT_A_TIME):
            places = np.arange(start, min(start + FETCHED_AT_A_TIME, len(self)))
            whole[start : start + len(places)] = self._fetch_inputs(places)
        return whole

    def _fetch_inputs(self, places: Indices) -> Tensor:
        """Copy the inputs at some places from the pool to the device, with their rotations."""
        indices, turns = self._rows(places)
        kinds = np.unique(turns).tolist()
        if len(kinds) == 1:
            return self._pool.inputs(indices, kinds[0]).to(self._device)
        fetched = self._allocate_inputs(len(places))
        for kind in kinds:
            fetched[torch.from_numpy(turns == kind)] = self._pool.inputs(
                indices[turns == kind], kind
            ).to(self._device)
        return fetched

    def _allocate_inputs(self, inputs: int) -> Tensor:
        """Return memory on the device for a number of inputs."""
        return torch.empty(
            inputs, *self._like.shape[1:], dtype=self._like.dtype, device=self._device
        )


def _are_adjacent(places: Indices) -> bool:
    """Return whether places are consecutive numbers in ascending order."""
    return bool((np.diff(places) == 1).all())


class WholePool:
    """Inputs of all data splits, taken from a pool in which each client's examples are adjacent.

    If the model runs on the CPU and takes the pool's inputs without a cast or a rotation, the
    pool's own tensor is used without a copy. If this tensor is a memory-mapped file, only the parts
    of it that are used are loaded into memory. Otherwise the inputs are copied to the device if all
    of them fit into ``budget`` bytes.
    """

    def __init__(
        self, federation: Federation, table: ClientTable, device: torch.device, budget: int
    ) -> None:
        pool = federation.pool
        self.pool = pool
        self.device = device
        self.label_maps = federation.label_maps
        self.view = table.view
        self.turns = table.quarter_turns
        self.begins = np.minimum(
            table.train.starts, np.minimum(table.validation.starts, table.test.starts)
        )
        self.everyone = np.arange(len(table))
        self.like = pool.inputs(np.arange(1))
        self.kept: Tensor | None = None
        wanted = len(pool.x) * self.like.nbytes
        if device.type == "cpu" and pool.x.dtype != torch.uint8 and self.turns is None:
            # The model can use the pool's tensor without a cast, a rotation or another device.
            self.kept = pool.x
            wanted = 0
        self.keeps = wanted <= budget
        self.bytes_kept = wanted if self.keeps else 0


class SideBySide(SplitInputs):
    """Inputs of a data split of a :class:`WholePool`, in which each client's examples are adjacent.

    The place of an input is its row in the pool, and each client has its own set of places, a range
    of rows. This class therefore stores only the start and the length of each range, instead of an
    array over all examples, which would be too large for a federation of a million clients.
    """

    def __init__(self, whole: WholePool, rows: SplitRows) -> None:
        self._whole = whole
        self._pool = whole.pool
        self._device = whole.device
        self._like = whole.like
        self.set_of = whole.everyone
        self.sizes = rows.counts
        self.starts = rows.starts
        self.bytes_each = self._like.nbytes
        self.keeps = whole.keeps
        self._kept = whole.kept
        self._version = None

    def __len__(self) -> int:
        return len(self._pool.x)

    def places_of(self, number: int) -> Indices:
        """Return the places of a client's inputs, given the client's position in the federation."""
        return np.arange(self.starts[number], self.starts[number] + self.sizes[number])

    def run(self, place: int) -> Tensor:
        """Return the inputs of a client, ``[n, ...]``, given its position in the federation.

        The result is a view if the inputs are stored.
        """
        if not self.keeps:
            return self._fetch_inputs(self.places_of(place))
        start = int(self.starts[place])
        count = int(self.sizes[place])
        if self._kept is None:
            self._kept = self._gather_inputs()
        self._check_unchanged(self._kept)
        return self._kept[start : start + count]

    def targets_of(self, place: int) -> Tensor:
        """Return the targets of a client, ``[n, ...]`` on the CPU, mapped by its label map.

        ``place`` is the client's position in the federation.
        """
        start = int(self.starts[place])
        count = int(self.sizes[place])
        seen = self._pool.y[start : start + count]
        if self._whole.view is None or self._whole.view[place] < 0:  # the client has no label map
            return seen
        label_map = self._whole.label_maps[int(self._whole.view[place])]
        return map_labels(seen, label_map)

    def at(self, numbers: Indices) -> Indices:
        """Return the indices themselves, since they are the places of inputs in this class."""
        return numbers

    def _rows(self, places: Indices) -> tuple[Indices, Indices]:
        if self._whole.turns is None:
            return places, np.zeros_like(places)
        clients = np.searchsorted(self._whole.begins, places, side="right") - 1
        return places, self._whole.turns[clients] % 4

    def _gather_inputs(self) -> Tensor:
        if self._whole.kept is None:
            self._whole.kept = super()._gather_inputs()
        return self._whole.kept


def _number_sets(
    federation: Federation, split: Split, examples: int
) -> tuple[Indices, Indices, Indices]:
    """Return the sets of inputs of a data split.

    Returns
    -------
    tuple
        For each client, the number of its set; the size of each set; and all sets, concatenated. An
        entry of a set is ``turns * examples + index``: it stands for the example ``index`` of the
        pool, which has ``examples`` examples, rotated by ``turns`` quarter turns.
    """
    # A table creates a client's index arrays on request, so their identity has no meaning.
    if isinstance(table := federation.clients, ClientTable):
        rows = table.split(split)
        everyone = np.arange(len(table))
        entries = rows.rows(everyone)
        if table.quarter_turns is not None:
            entries = (table.quarter_turns % 4).repeat(rows.counts) * examples + entries
        return everyone, rows.counts, entries
    numbers: dict[tuple[int, int], int] = {}
    sets: list[Indices] = []
    set_of: list[int] = []
    for client in federation.clients:
        indices: Indices = getattr(client, split)
        turns = client.quarter_turns % 4
        set_of.append(numbers.setdefault((id(indices), turns), len(sets)))
        if set_of[-1] == len(sets):
            sets.append(turns * examples + indices)
    return np.array(set_of), np.array([len(members) for members in sets]), np.concatenate(sets)


# Augmentation of training batches: a hook on the module, so that it works with every engine.


class Augmentation:
    """Forward pre-hook that augments a module's inputs at random in training mode.

    Parameters
    ----------
    augment
        Function that returns changed inputs of a batch.
    structure
        Structure of inputs of several tensors, which the function gets and returns as a dict or
        tuple; None for inputs of one tensor.
    """

    def __init__(self, augment: Augment, structure: Structure | None = None) -> None:
        self._augment = augment
        self._structure = structure

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Return the augmented inputs; None in evaluation mode, in which inputs stay unchanged.

        Raises
        ------
        ValueError
            If the augmentation does not return a tensor of as many inputs as it receives.
        """
        if not module.training:
            return None
        if self._structure is not None:
            return (self._augment_structured(self._structure, inputs[0]), *inputs[1:])
        x = self._augment(inputs[0])
        if not isinstance(x, Tensor) or x.shape[:1] != inputs[0].shape[:1]:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = type(x).__name__
            if isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                got = list(x.shape)
            raise ValueError(
                "the augment function should return a tensor of as many inputs as it receives, "
                f"{len(inputs[0])}, got {got}"
            )
        return (x, *inputs[1:])

    def _augment_structured(self, structure: Structure, rows: Tensor) -> Tensor:
        """Return augmented rows of numbers, which store several tensors.

        Raises
        ------
        ValueError
            If the augmentation does not return tensors of the same structure.
        """
        tensors: Any = self._augment(structure.unpack(rows))  # pyright: ignore[reportArgumentType]
        try:
            found = Structure.of(tensors, "augmented inputs")
        except (DataError, AttributeError, TypeError) as error:
            raise ValueError(f"the augment function returned no inputs: {error}") from error
        if found != structure:
            raise ValueError(
                "the augment function should return inputs of the structure that it receives, "
                f"{structure.described}, got {found.described}"
            )
        return structure.pack(tensors)


def augmented(
    module: nn.Module, augment: Augment | None, structure: Structure | None = None
) -> nn.Module:
    """Return a copy of a module that augments its inputs in training mode.

    If ``augment`` is None, the module itself is returned. ``structure`` is the structure of inputs
    of several tensors.
    """
    if augment is None:
        return module
    changed = copy.deepcopy(module)
    # Rows are augmented before another hook divides them into tensors.
    changed.register_forward_pre_hook(
        Augmentation(augment, structure), prepend=structure is not None
    )
    return changed


def is_augmented(module: nn.Module) -> bool:
    """Return whether a module augments its inputs in training mode."""
    return bool(_find_augmentations(module))


def remove_augmentation(module: nn.Module) -> None:
    """Remove the augmentation of inputs from a module, in place."""
    for number in _find_augmentations(module):
        del module._forward_pre_hooks[number]  # pyright: ignore[reportPrivateUsage]


def _find_augmentations(module: nn.Module) -> list[int]:
    """Return the numbers of a module's forward pre-hooks that augment inputs."""
    hooks = module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]  (no other way)
    return [number for number, hook in hooks.items() if isinstance(hook, Augmentation)]


SPLITS: tuple[Split, ...] = ("train", "test", "validation")
"""All splits, in the order in which they get memory."""


class ClientsData:
    """Data of all clients, gathered from the pool once and stored on the device if it fits.

    Memory is given to training data first, then to test data, then to validation data. Data that do
    not fit are copied from the pool again whenever they are needed.

    Parameters
    ----------
    federation
        The clients.
    device
        Device for the data.
    budget
        Bytes that the data may take.
    alone
        Whether examples are assigned to parts of a client's data independently of each other, as
        privacy requires. Otherwise examples that depend on each other are assigned to the same
        part, so that the part of an example depends on other examples.
    """

    def __init__(
        self, federation: Federation, device: torch.device, budget: int, alone: bool = False
    ) -> None:
        self._federation = federation
        self._alone = alone
        self._device = self.device = device
        self._targets: dict[int, Tensor] = {}
        self._equal: dict[int, tuple[Indices, Indices]] = {}
        self._warned_of_copies = False
        self._looked_at: set[int] = set()
        self._warned_of_neighbours = False
        self._warned_of_groups = False
        self.positions = federation.positions
        table = federation.clients
        one = federation.pool.y[:1]
        self.bytes_kept = 0
        wanted = 0
        self.splits: Mapping[Split, SplitInputs]
        if isinstance(table, ClientTable) and table.lies_in_order:
            whole = WholePool(federation, table, device, budget)
            self.splits = {split: SideBySide(whole, table.split(split)) for split in SPLITS}
            self.bytes_kept = whole.bytes_kept
        else:
            self.splits = {split: SplitInputs(federation, split, device) for split in SPLITS}
            for split, held in self.splits.items():
                # Targets are stored for training examples only, mapped by each client's label map.
                targets = int(held.sizes[held.set_of].sum()) if split == "train" else 0
                wanted += len(held) * held.bytes_each + targets * one.nbytes
                held.keeps = wanted <= budget
                if held.keeps:
                    self.bytes_kept = wanted
        self.bytes_each = self.splits["train"].bytes_each + one.nbytes

    def places(self, ids: Sequence[int]) -> Indices:
        """Return the positions of clients in the order of the federation, int64 ``[n]``."""
        if isinstance(positions := self.positions, Positions):
            return positions.of(ids)
        return np.array([positions[client] for client in ids], dtype=np.int64)

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's training inputs and targets, ``[n, ...]`` each.

        The client's rotation of inputs and its label map have been applied. The targets, and if
        possible the inputs, of all clients are views of one tensor in the order of the federation,
        so that an engine can fetch batches of several clients by one operation.
        """
        held = self.splits["train"]
        if not held.keeps:
            inputs, targets = self._federation.examples(client, "train")
            return inputs.to(self._device), targets.to(self._device)
        place = self.positions[client]
        # There may be millions of clients, so only targets of clients that train are copied.
        if isinstance(held, SideBySide):
            return held.run(place), held.targets_of(place).to(self._device)
        if not self._targets:
            self._gather_targets()
        return held.inputs_of(int(held.set_of[place])), self._targets[client]

    def examples(self, client: int, query: TrainQuery) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets on which a client trains for a query.

        The query specifies all training examples of the client, or a part of them.
        """
        inputs, targets = self.of(client)
        data = query.work.data
        if isinstance(data, AllData):
            return inputs, targets
        related = None
        if isinstance(data, SplitPart):
            related = self._related_of(client, data)
        key = self._federation.keys[client]
        part = torch.from_numpy(query.examples(len(targets), key, related)).to(targets.device)
        return inputs[part], targets[part]

    def _related_of(self, client: int, part: SplitPart) -> Related | None:
        """Return which training examples of a client depend on each other, for a part of its data.

        These are the groups that the user specifies. Without groups, equal examples depend on each
        other if they are copies; None if no example is a copy.
        """
        groups = self._federation.find_related(client)
        if self._alone:
            self._warn_of_groups(groups)
            return None
        if groups is not None:
            return Related(groups)
        equal, equal_inputs = self._equal_of(client)
        self._warn_of_neighbours(client, equal)
        if are_copies(equal, equal_inputs, part.count):
            return Related(equal, are_copies=True)
        if not have_different_targets(equal, equal_inputs):
            self._warn_of_equal(client, equal)
        return None

    def _warn_of_groups(self, groups: Indices | None) -> None:
        """Warn once if groups are given, but examples are assigned to parts independently."""
        if groups is None or self._warned_of_groups:
            return
        self._warned_of_groups = True
        _log.warning(
            "parts of clients' data do not respect data.groups, since differential privacy of "
            "examples requires that each example is assigned to a part by itself; clients of one "
            "distribution may be separated"
        )

    def _equal_of(self, client: int) -> tuple[Indices, Indices]:
        """Return two numbers for each training example of a client, int64 ``[n]`` each.

        Examples with equal inputs and targets have the same first number. Examples with equal
        inputs have the same second number.
        """
        if client not in self._equal:
            inputs, targets = (each.cpu().numpy() for each in self.of(client))
            of_inputs = _number_equal(x.tobytes() for x in inputs)
            pairs = zip(of_inputs.tolist(), targets, strict=True)
            of_examples = _number_equal((number, y.tobytes()) for number, y in pairs)
            self._equal[client] = of_examples, of_inputs
        return self._equal[client]

    def _warn_of_equal(self, client: int, equal: Indices) -> None:
        """Warn once if a client may have oversampled examples that are not recognized as copies.

        Examples that occur often are typical if few examples occur once. Otherwise the client's
        distribution has many values, so an example may occur often because it was copied.
        """
        if self._warned_of_copies:
            return
        occurrences = np.bincount(equal)
        repeated = len(equal) - len(occurrences)
        has_many_values = (occurrences == 1).sum() >= LEAST_SINGLE * len(equal)
        if repeated < MANY_COPIES * len(equal) or not has_many_values:
            return
        self._warned_of_copies = True
        _log.warning(
            "%d of the %d training examples of client %d are equal to other examples, and are taken "
            "for independent examples; if the data was oversampled, they make the client look like "
            "a cluster by itself: remove the copies from the data, or name a column that is equal "
            "in all copies of a row, such as its number before oversampling, as data.groups",
            repeated,
            len(equal),
            client,
        )

    def _warn_of_neighbours(self, client: int, equal: Indices) -> None:
        """Warn once if the examples of a client that are adjacent in its data are similar.

        Of equal examples only the first is compared, since the other warning is for them.
        Only the first :data:`LOOKED_AT` clients are examined. The next clients of a run seldom
        differ from them, and a warning appears once in a run.
        """
        if self._warned_of_neighbours or len(self._looked_at) >= LOOKED_AT:
            return
        if client in self._looked_at:
            return
        self._looked_at.add(client)
        inputs, targets = self.of(client)
        different = np.unique(equal, return_index=True)[1]
        rows = self._federation.by_id[client].train[different]
        in_order = torch.from_numpy(different[np.argsort(rows, kind="stable")]).to(inputs.device)
        labels = None if targets.is_floating_point() or targets.dim() > 1 else targets[in_order]
        if not have_similar_neighbours(inputs[in_order], labels):
            return
        self._warned_of_neighbours = True
        _log.warning(
            "adjacent training examples of client %d are more similar than other examples; if they "
            "depend on each other, such as a patient's visits or a time series, clients of one "
            "distribution may be separated: name the column that states which rows belong together "
            "as data.groups",
            client,
        )

    def _gather_targets(self) -> None:
        """Store the training targets of all clients on the device, with label maps applied."""
        clients = self._federation.clients
        y = self._federation.pool.y
        whole = torch.cat(
            [client.labels(y[torch.from_numpy(client.train)]) for client in clients]
        ).to(self._device)
        parts = whole.split([len(client.train) for client in clients])
        self._targets = dict(zip(self._federation.ids, parts, strict=True))


def _number_equal(values: Iterable[Hashable]) -> Indices:
    """Return a number for each of n values, int64 ``[n]``; equal values have the same number."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
