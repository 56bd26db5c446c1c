"""Data of simulated clients, on the device on which they train and evaluate."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedclade.core import Indices, ModelError, Positions, Round, Split
from fedclade.data import Augment, ClientTable, Federation, SplitRows, map_labels

# The distinct inputs of a split on the device, and the inputs of each client.

FETCHED_AT_A_TIME = 1024
"""Number of inputs that are fetched from the pool at once when a split is gathered."""


class SplitInputs:
    """Distinct inputs of a split, and the inputs that each client has.

    An input is an example of the pool, rotated by quarter turns. Inputs are numbered by places, in
    the order in which they occur among the clients: an input of several clients has one place, and
    the inputs that only one client has are adjacent. Clients with the same indices and turns share
    a set of places.

    Parameters
    ----------
    federation
        The clients.
    split
        The split.
    device
        Device for the inputs.

    Attributes
    ----------
    set_of
        Number of the set of each client, int64 ``[n]`` in the order of the federation.
    sizes
        Number of places of each set.
    starts
        Start of each set in the concatenation of all sets, see :meth:`at`.
    keeps
        Whether all inputs stay on the device once they have been used.
    bytes_each
        Bytes of one input.
    """

    def __init__(self, federation: Federation, split: Split, device: torch.device) -> None:
        self._pool = federation.pool
        self._device = device
        examples = len(self._pool.x)
        self.set_of, self.sizes, held = _sets(federation, split, examples)
        self.starts = self.sizes.cumsum() - self.sizes
        at = np.arange(len(held))
        first = np.full(4 * examples, len(held))
        np.minimum.at(first, held, at)
        first = first[held]
        is_first = first == at
        self._places = (is_first.cumsum() - 1)[first]
        self._turns, self._indices = np.divmod(held[is_first], max(1, examples))
        self._kept: Tensor | None = None
        self._version: int | None = None
        self._like = self._pool.inputs(self._indices[:1])
        self.bytes_each = self._like[:1].nbytes
        self.keeps = False

    def __len__(self) -> int:
        return len(self._indices)

    def places_of(self, number: int) -> Indices:
        """Return the places of a set, given its number."""
        start = self.starts[number]
        return self._places[start : start + self.sizes[number]]

    def at(self, numbers: Indices) -> Indices:
        """Return the places at some indices in the concatenation of all sets."""
        return self._places[numbers]

    def inputs(self, places: Indices) -> Tensor:
        """Return the inputs at some places, ``[n, ...]``, as a model takes them.

        The result is a view if the places are adjacent and the inputs are kept.
        """
        if not self.keeps:
            return self._fetched(places)
        if self._kept is None:
            self._kept = self._gathered()
        self._check_unchanged(self._kept)
        if bool((np.diff(places) == 1).all()):
            return self._kept[places[0] : places[0] + len(places)]
        return self._kept.index_select(0, torch.from_numpy(places).to(self._device))

    def _check_unchanged(self, kept: Tensor) -> None:
        """Check that no forward pass has written into the inputs since the first check.

        Raises
        ------
        ModelError
            If one has. The trial before the first round did not detect such writes, so the model
            does not get copies of its inputs.
        """
        if self._version is None:
            self._version = kept._version
        if kept._version != self._version:
            raise ModelError(
                "the model's forward has written into the clients' data, and does so for some "
                "inputs alone, since it did not in a trial on two examples; begin it with x = "
                "x.clone()"
            )

    def targets(self, places: Indices) -> Tensor:
        """Return the pool's targets at some places, ``[n]`` or ``[n, T]``, on the CPU."""
        return self._pool.y[torch.from_numpy(self._rows(places)[0])]

    def _rows(self, places: Indices) -> tuple[Indices, Indices]:
        """Return the pool's rows of the examples at some places, and their quarter turns."""
        return self._indices[places], self._turns[places]

    @torch.inference_mode(False)  # clients may train on inputs that an evaluation has gathered
    def _gathered(self) -> Tensor:
        whole = self._empty(len(self))
        for start in range(0, len(self), FETCHED_AT_A_TIME):
            places = np.arange(start, min(start + FETCHED_AT_A_TIME, len(self)))
            whole[start : start + len(places)] = self._fetched(places)
        return whole

    def _fetched(self, places: Indices) -> Tensor:
        indices, turns = self._rows(places)
        kinds = np.unique(turns).tolist()
        if len(kinds) == 1:
            return self._pool.inputs(indices, kinds[0]).to(self._device)
        fetched = self._empty(len(places))
        for kind in kinds:
            fetched[torch.from_numpy(turns == kind)] = self._pool.inputs(
                indices[turns == kind], kind
            ).to(self._device)
        return fetched

    def _empty(self, inputs: int) -> Tensor:
        return torch.empty(
            inputs, *self._like.shape[1:], dtype=self._like.dtype, device=self._device
        )


class WholePool:
    """Inputs of a pool in which the examples of each client are adjacent, for all splits together.

    They are the pool's own tensor if the model takes it unchanged: then nothing is copied, and if
    the pool is a file, only the parts in use are in memory. Otherwise they are stored on the device
    if all of them fit into ``budget`` bytes.
    """

    def __init__(
        self, federation: Federation, table: ClientTable, device: torch.device, budget: int
    ) -> None:
        self.pool, self.device = (pool := federation.pool), device
        self.label_maps = federation.label_maps
        self.view = table.view
        self.turns = table.quarter_turns
        self.begins = np.minimum(
            table.train.starts, np.minimum(table.validation.starts, table.test.starts)
        )
        self.everyone = np.arange(len(table))
        self.like = pool.inputs(np.arange(1))
        as_it_is = device.type == "cpu" and pool.x.dtype != torch.uint8 and self.turns is None
        self.kept: Tensor | None = pool.x if as_it_is else None
        wanted = 0 if as_it_is else len(pool.x) * self.like.nbytes
        self.keeps = wanted <= budget
        self.bytes_kept = wanted if self.keeps else 0


class SideBySide(SplitInputs):
    """Inputs of a split in a :class:`WholePool`: places are rows of the pool, each client is a set.

    It needs no array over all examples, and no array of its own over all clients.
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
        """Return the places of a set, given its number."""
        return np.arange(self.starts[number], self.starts[number] + self.sizes[number])

    def run(self, place: int) -> Tensor:
        """Return the inputs of the client at a place in the federation, ``[n, ...]``.

        The result is a view if the inputs are kept.
        """
        if not self.keeps:
            return self._fetched(self.places_of(place))
        start = int(self.starts[place])
        count = int(self.sizes[place])
        self._kept = self._gathered() if self._kept is None else self._kept
        self._check_unchanged(self._kept)
        return self._kept[start : start + count]

    def targets_of(self, place: int) -> Tensor:
        """Return the targets ``[n, ...]`` of a client by its position, mapped by its label map.

        They are on the CPU.
        """
        start = int(self.starts[place])
        count = int(self.sizes[place])
        seen = self._pool.y[start : start + count]
        view = -1 if self._whole.view is None else int(self._whole.view[place])
        return seen if view < 0 else map_labels(seen, self._whole.label_maps[view])

    def at(self, numbers: Indices) -> Indices:
        """Return the places at some indices; here, an index is its own place."""
        return numbers

    def _rows(self, places: Indices) -> tuple[Indices, Indices]:
        if self._whole.turns is None:
            return places, np.zeros_like(places)
        clients = np.searchsorted(self._whole.begins, places, side="right") - 1
        return places, self._whole.turns[clients] % 4

    def _gathered(self) -> Tensor:
        if self._whole.kept is None:
            self._whole.kept = super()._gathered()
        return self._whole.kept


def _sets(federation: Federation, split: Split, examples: int) -> tuple[Indices, Indices, Indices]:
    """Return the set of each client, the size of each set, and all sets, concatenated.

    An entry of a set is ``turns * examples + index``.
    """
    # A table creates a client's index arrays on request, so they are not compared by identity.
    if isinstance(table := federation.clients, ClientTable):
        rows = table.split(split)
        everyone = np.arange(len(table))
        turns = 0 if table.quarter_turns is None else (table.quarter_turns % 4).repeat(rows.counts)
        return everyone, rows.counts, turns * examples + rows.rows(everyone)
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
    """Forward pre-hook that changes a module's inputs in training mode."""

    def __init__(self, augment: Augment) -> None:
        self._augment = augment

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Return the augmented inputs; None in evaluation mode, which leaves the inputs unchanged.

        Raises
        ------
        ValueError
            If the function does not return one tensor with as many inputs.
        """
        if not module.training:
            return None
        x = self._augment(inputs[0])
        if not isinstance(x, Tensor) or x.shape[:1] != inputs[0].shape[:1]:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"augment should return as many inputs as it is given, {len(inputs[0])}, got {got}"
            )
        return (x, *inputs[1:])


def augmented(module: nn.Module, augment: Augment | None) -> nn.Module:
    """Return a copy of a module whose training batches are augmented.

    Without a function the module itself is returned.
    """
    if augment is None:
        return module
    changed = copy.deepcopy(module)
    changed.register_forward_pre_hook(Augmentation(augment))
    return changed


def is_augmented(module: nn.Module) -> bool:
    """Return whether a module's training batches are augmented."""
    return bool(_hooks(module))


def remove_augmentation(module: nn.Module) -> None:
    """Remove the augmentation of training batches from a module."""
    for number in _hooks(module):
        del module._forward_pre_hooks[number]  # pyright: ignore[reportPrivateUsage]


def _hooks(module: nn.Module) -> list[int]:
    hooks = module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]  (no other way)
    return [number for number, hook in hooks.items() if isinstance(hook, Augmentation)]


SPLITS: tuple[Split, ...] = ("train", "test", "validation")
"""All splits, in the order in which they get memory."""


class ClientsData:
    """Data of all clients, gathered from the pool once and stored on the device if it fits.

    Training data come first, then test and validation data. Data that do not fit are fetched again
    whenever they are needed.

    Parameters
    ----------
    federation
        The clients.
    device
        Device for the data.
    budget
        Bytes that the data may take.
    alone
        Whether examples are assigned to parts of the data independently of each other, as
        example-level privacy requires. Otherwise equal examples are kept together in parts, so that
        the part of an example depends on other examples.
    """

    def __init__(
        self, federation: Federation, device: torch.device, budget: int, alone: bool = False
    ) -> None:
        self._federation = federation
        self._alone = alone
        self._device = self.device = device
        self._targets: dict[int, Tensor] = {}
        self._copies: dict[int, Indices] = {}
        self.positions = federation.positions
        table = federation.clients
        one = federation.pool.y[:1]
        self.bytes_kept = wanted = 0
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
                self.bytes_kept = wanted if held.keeps else self.bytes_kept
        self.bytes_each = self.splits["train"].bytes_each + one.nbytes

    def places(self, ids: Sequence[int]) -> Indices:
        """Return the positions of some clients in the order of the federation, int64 ``[n]``."""
        if isinstance(positions := self.positions, Positions):
            return positions.of(ids)
        return np.array([positions[client] for client in ids], dtype=np.int64)

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's training inputs and targets ``[n, ...]``, with its label map applied.

        The targets, and where possible the inputs, of all clients are views of one tensor in the
        order of the federation, so that an engine can draw the batches of several clients at once.
        """
        held = self.splits["train"]
        if not held.keeps:
            inputs, targets = self._federation.examples(client, "train")
            return inputs.to(self._device), targets.to(self._device)
        place = self.positions[client]
        # With many clients, only the targets of the clients that train are fetched.
        if isinstance(held, SideBySide):
            return held.run(place), held.targets_of(place).to(self._device)
        places = held.places_of(held.set_of[place])
        if not self._targets:
            self._gather_targets()
        return held.inputs(places), self._targets[client]

    def examples(self, client: int, this_round: Round) -> tuple[Tensor, Tensor]:
        """Return a client's inputs and targets in a round: all training examples, or a part."""
        inputs, targets = self.of(client)
        if this_round.part is None:
            return inputs, targets
        copies = self._copies_of(client) if this_round.part_size and not self._alone else None
        key = self._federation.keys[client]
        part = torch.from_numpy(this_round.examples(len(targets), key, copies)).to(targets.device)
        return inputs[part], targets[part]

    def _copies_of(self, client: int) -> Indices:
        """Return a number for each training example of a client, ``[n]``; copies have the same."""
        if client not in self._copies:
            numbers: dict[bytes, int] = {}
            pairs = zip(*(each.cpu().numpy() for each in self.of(client)), strict=True)
            found = [numbers.setdefault(x.tobytes() + y.tobytes(), len(numbers)) for x, y in pairs]
            self._copies[client] = np.array(found, dtype=np.int64)
        return self._copies[client]

    def _gather_targets(self) -> None:
        clients = self._federation.clients
        y = self._federation.pool.y
        whole = torch.cat(
            [client.labels(y[torch.from_numpy(client.train)]) for client in clients]
        ).to(self._device)
        parts = whole.split([len(client.train) for client in clients])
        self._targets = dict(zip(self._federation.ids, parts, strict=True))
