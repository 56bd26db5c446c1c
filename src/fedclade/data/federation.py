"""The clients' data: one pool of examples, and for every client which of them it holds and how it sees them."""

from __future__ import annotations

import hashlib
import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import ClientRegistry, DataError, DataSpec, Split, Task, checked, require, unknown
from fedclade.data.arrays import as_indices, as_inputs, as_targets

Indices = NDArray[np.int64]

Scaling = Literal["source", "unit", "pixel"]
"""How images are scaled; see :meth:`Pool.scaled`."""

IGNORED = -100
"""Target of a place that does not count, such as padding; what ``torch.nn.functional.cross_entropy`` ignores."""


@dataclass(frozen=True, eq=False)
class Pool:
    """All examples of a data source: decoded once, shared by all clients, never copied for a client.

    Parameters
    ----------
    name
        The source's name, as in ``fedclade ls datasets``.
    x
        Inputs ``[N, ...]``: uint8 images ``[N, C, H, W]``, float32 features ``[N, F]`` or int64 tokens ``[N, T]``; a
        tensor or an array. Other floats and truth values become float32, other whole numbers int64.
    y
        int64 targets, or whole numbers of another type: labels ``[N]`` (``classification``), or the next token at each
        place ``[N, T]``, -100 where there is none (``language``).
    groups
        int64 ``[N]``, what a partition by label goes by: the label; for language data its topic or 0.
    train, test
        Indices of the examples to train on and of the source's own test split. An empty ``test`` means that every
        client holds back a part of its own examples.
    outputs
        Number of outputs that a model must give: labels, or the size of the vocabulary.
    task
        ``classification`` or ``language`` (next-token prediction).
    natural
        ``[N]``, who wrote each example (writer, speaker, user), where the source knows it.
    vocabulary
        The words that the tokens stand for; empty for data that is not text.
    mean, std
        Of the pixels in [0, 1]; uint8 images reach the model as ``(x / 255 - mean) / std``.

    Raises
    ------
    DataError
        If the arrays are not of one length or not of the right kind, an index or a label is out of range, or the task
        is unknown.
    """

    name: str
    x: Tensor
    y: Tensor
    groups: Indices
    train: Indices
    test: Indices
    outputs: int
    task: Task = "classification"
    natural: NDArray[np.str_] | None = None
    vocabulary: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if self.task not in get_args(Task):
            raise DataError(unknown(f"task of pool {self.name!r}:", str(self.task), get_args(Task)))
        _check_name(self.name, "the name of a pool")
        self._take_in()
        if self.task == "classification" and self.y.dim() != 1:
            raise DataError(
                f"targets of pool {self.name!r} should be one label for each example, got shape {list(self.y.shape)}"
            )
        lengths = {"x": len(self.x), "y": len(self.y), "groups": len(self.groups)}
        if self.natural is not None:
            lengths["natural"] = len(self.natural)
        if len(set(lengths.values())) > 1:
            raise DataError(f"the arrays of pool {self.name!r} should have one length, got {lengths}")
        for split, indices in (("train", self.train), ("test", self.test)):
            if len(indices) and not (indices.min() >= 0 and indices.max() < len(self.x)):
                raise DataError(
                    f"the {split} indices of pool {self.name!r} should lie in 0 .. {len(self.x) - 1}, got "
                    f"{indices.min()} .. {indices.max()}"
                )
        if bool((odd := (self.y < 0) & (self.y != IGNORED)).any()):
            raise DataError(
                f"labels of pool {self.name!r} should be 0 or more, or {IGNORED} where there is none, got "
                f"{int(self.y[odd][0])}"
            )
        if len(self.y) and int(self.y.max()) >= self.outputs:
            raise DataError(f"pool {self.name!r} has {self.outputs} outputs, but a label {int(self.y.max())}")

    def _take_in(self) -> None:
        """Make the arrays what they should be, if that loses nothing."""
        of = f"of pool {self.name!r}"
        object.__setattr__(self, "outputs", _whole(self.outputs, f"outputs {of}"))
        for name in ("mean", "std"):
            if not isinstance(value := getattr(self, name), numbers.Real):
                raise DataError(f"{name} {of} should be a number, got {value!r}")
        if not self.std > 0:
            raise DataError(f"std {of} should be greater than 0, got {self.std}")
        object.__setattr__(self, "x", as_inputs(self.x, f"inputs {of}"))
        object.__setattr__(self, "y", as_targets(self.y, f"targets {of}"))
        for name in ("groups", "train", "test"):
            object.__setattr__(self, name, as_indices(getattr(self, name), f"{name} {of}"))

    @cached_property
    def not_finite(self) -> Indices:
        """Which examples have an input that is NaN or infinite."""
        if not self.x.is_floating_point() or bool(self.x.sum(dtype=torch.float64).isfinite()):
            return np.empty(0, dtype=np.int64)
        return (~self.x.flatten(1).isfinite().all(1)).nonzero().flatten().numpy()

    def __repr__(self) -> str:
        return f"Pool({self.name!r}, {self.x.dtype} {list(self.x.shape)}, outputs={self.outputs}, task={self.task!r})"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch dimension."""
        return tuple(self.x.shape[1:])

    @property
    def schema(self) -> DataSpec:
        """What the examples look like, to whom does not have them."""
        scaled = (self.mean, self.std) if self.x.dtype == torch.uint8 else None
        return DataSpec(self.name, self.input_shape, self.outputs, self.task, len(self.vocabulary), scaled)

    def scaled(self, how: Scaling) -> Pool:
        """Return the pool with its images scaled in another way.

        Parameters
        ----------
        how
            ``source``: by the source's mean and standard deviation, as they are. ``unit``: to [0, 1], and no further.
            ``pixel``: every pixel by its own mean and deviation over all images, the test split included, as floats; in
            grey levels (x − μ)/(σ + 0.001), as Li et al. 2018 have MNIST, so that a pixel that is always black is 0.

        Raises
        ------
        ConfigError
            If the inputs are not images of uint8, and it is not ``source``.
        """
        if how == "source":
            return self
        images = self.x.dtype == torch.uint8
        require(("scaling", how, images, f"'source' for {self.name}, whose inputs are not images of whole bytes"))
        if how == "unit":
            return replace(self, mean=0.0, std=1.0)
        x = self.x.to(torch.float32)
        deviation, mean = torch.std_mean(x, dim=0, correction=0)
        return replace(self, x=x.sub_(mean).div_(deviation + 0.001), mean=0.0, std=1.0)

    def inputs(self, indices: Indices, quarter_turns: int = 0) -> Tensor:
        """Return inputs as a model takes them, ``[n, ...]``: normalised floats, or tokens; turned by 90° each."""
        x = self.x[torch.from_numpy(indices)]
        if x.dtype == torch.uint8:
            x = x.to(torch.float32).div_(255).sub_(self.mean).div_(self.std)
        return torch.rot90(x, quarter_turns, (-2, -1)) if quarter_turns else x


def _check_name(name: object, what: str) -> None:
    try:
        str.encode(name)  # pyright: ignore[reportArgumentType]  (it is given by users)
    except (TypeError, UnicodeEncodeError):
        raise DataError(f"{what} should be a string that UTF-8 can write, got {name!r}") from None


def _whole(value: object, what: str) -> int:
    try:
        return index(value)  # pyright: ignore[reportArgumentType]  (it is given by users)
    except TypeError:
        raise DataError(f"{what} should be a whole number, got {value!r}") from None


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds, and how it sees it.

    Parameters
    ----------
    id
        The number by which the server knows the client.
    name
        What people call it; results do not depend on it.
    key
        The client's own number for its random draws. It stays with the client when the server renames it.
    train, validation, test
        Indices into the pool; ``validation`` may be empty.
    label_map
        int64 ``[outputs]``: the client sees label ``label_map[y]`` where the pool has ``y``. None keeps labels as they
        are.
    quarter_turns
        By how many times 90° the client's images are turned.

    Raises
    ------
    DataError
        If the name is no string, a number no whole one, or indices are not.
    """

    id: int
    name: str
    key: int
    train: Indices
    validation: Indices
    test: Indices
    label_map: Tensor | None = None
    quarter_turns: int = 0

    def __post_init__(self) -> None:
        _check_name(self.name, f"the name of client {self.id}")
        for name in ("id", "key", "quarter_turns"):
            object.__setattr__(self, name, _whole(getattr(self, name), f"the {name} of client {self.name!r}"))
        for name in ("train", "validation", "test"):
            object.__setattr__(self, name, as_indices(getattr(self, name), f"{name} of client {self.name!r}"))

    def labels(self, y: Tensor) -> Tensor:
        """Return pool targets as this client sees them; same shape. Those that do not count stay as they are."""
        return y if self.label_map is None else self.label_map[y.clamp(min=0)].where(y != IGNORED, IGNORED)


def _check_held(pool: Pool, indices: Indices, split: Split, client: str) -> None:
    """Check that there are these examples in a pool, and that none of their inputs is NaN or infinite."""
    if indices.min() < 0 or indices.max() >= len(pool.x):
        raise DataError(
            f"the {split} indices of {client} should lie in 0 .. {len(pool.x) - 1}, got {indices.min()} .. "
            f"{indices.max()}"
        )
    if len(pool.not_finite) == 0 or len(odd := np.flatnonzero(np.isin(indices, pool.not_finite))) == 0:
        return
    row = int(indices[odd[0]])
    place: list[int] = (~pool.x[row].isfinite()).nonzero()[0].tolist()
    column = place[0] if len(place) == 1 else place
    more = f" and in {len(odd) - 1} more" if len(odd) > 1 else ""
    raise DataError(
        f"{client} has {float(pool.x[row][tuple(place)])} in column {column} of {split} example {odd[0]} (example "
        f"{row} of pool {pool.name!r}){more}; fill such inputs in, or leave these examples out"
    )


@checked()
@dataclass(frozen=True, eq=False)
class Federation:
    """N clients with their data.

    Parameters
    ----------
    pool
        The examples they share out among them.
    clients
        At least one, with distinct ids; each with training and test examples.
    true_clusters
        Cluster of each client by id, where it is known. For scoring only: no algorithm sees it, but the ``oracle``.
    description
        What it is, for people: data, partition, shift.
    newcomers
        Clients who were held back from training, with ids of their own; None where there are none.

    Raises
    ------
    DataError
        If there are no clients, two share an id, or one has no training or no test examples, examples that the pool has
        not, or inputs that are NaN or infinite.
    """

    pool: Pool
    clients: tuple[ClientData, ...]
    true_clusters: Mapping[int, int] | None = None
    description: str = ""
    newcomers: Federation | None = None

    def __post_init__(self) -> None:
        self._check_clients()
        self._check_examples()

    def _check_examples(self) -> None:
        """Check that every client holds examples that there are, and that these can be trained on."""
        seen: set[int] = set()
        for client in self.clients:
            for split in get_args(Split):
                indices: Indices = getattr(client, split)
                if len(indices) and id(indices) not in seen:  # many clients are tested on the same
                    _check_held(self.pool, indices, split, f"client {client.id} ({client.name!r})")
                seen.add(id(indices))

    def _check_clients(self) -> None:
        if not self.clients:
            raise DataError("a federation should have at least 1 client, got 0")
        ids = [client.id for client in self.clients]
        if len(set(ids)) < len(ids):
            twice = sorted({i for i in ids if ids.count(i) > 1})
            raise DataError(f"client ids should be distinct, got these more than once: {twice}")
        for client in self.clients:
            for split, indices in (("training", client.train), ("test", client.test)):
                if len(indices) == 0:
                    raise DataError(
                        f"client {client.id} ({client.name!r}) has no {split} examples; ask for fewer clients "
                        f"(now {len(ids)}), more examples, or a partition that gives every client some"
                    )
        if self.true_clusters is not None and set(self.true_clusters) != set(ids):
            odd = sorted(set(self.true_clusters) ^ set(ids))
            raise DataError(f"true_clusters should name every client exactly once; these do not match: {odd}")
        for client, cluster in (self.true_clusters or {}).items():
            _whole(cluster, f"the true cluster of client {client}")
        if self.newcomers is not None and (both := sorted(set(ids) & set(self.newcomers.ids))):
            raise DataError(f"newcomers should have ids of their own, got these of other clients: {both}")

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        return f"Federation({str(self)!r})"

    def __str__(self) -> str:
        return self.description or f"{self.pool.name}, {len(self)} clients"

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all clients, in order."""
        return tuple(client.id for client in self.clients)

    @cached_property
    def by_id(self) -> Mapping[int, ClientData]:
        """The clients by their ids."""
        return {client.id: client for client in self.clients}

    @property
    def roster(self) -> ClientRegistry:
        """What a server knows of the clients."""
        names = {client.id: client.name for client in self.clients}
        sizes = {client.id: len(client.train) for client in self.clients}
        return ClientRegistry(self.pool.schema, str(self), names, sizes, self.true_clusters)

    def alone(self, client: int) -> Federation:
        """Return a federation of one client.

        Raises
        ------
        DataError
            If there is no such client.
        """
        if client not in self.by_id:
            raise DataError(f"there is no client {client}; {self} has clients {min(self.ids)} to {max(self.ids)}")
        truth = None if self.true_clusters is None else {client: self.true_clusters[client]}
        return replace(self, clients=(self.by_id[client],), true_clusters=truth, newcomers=None, description=str(self))

    def joined(self, others: Federation) -> Federation:
        """Return these clients and those of another federation over the same pool; no newcomers are left."""
        truth = None
        if self.true_clusters is not None and others.true_clusters is not None:
            truth = {**self.true_clusters, **others.true_clusters}
        return replace(self, clients=(*self.clients, *others.clients), true_clusters=truth, newcomers=None)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that training depends on: the examples, who holds which, and how everybody sees them."""
        found = hashlib.sha256()
        for tensor in (self.pool.x, self.pool.y):
            found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().numpy().data)
        for client in self.clients:
            labels = None if client.label_map is None else client.label_map.tolist()
            found.update(json.dumps([client.id, client.key, client.quarter_turns, labels]).encode())
            for indices in (client.train, client.validation, client.test):
                found.update(f"{len(indices)}:".encode())
                found.update(np.ascontiguousarray(indices, dtype=np.int64).data)
        return found.hexdigest()

    def examples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        """Return one split of one client as it sees it: inputs ``[n, ...]`` and targets ``[n]`` or ``[n, T]``."""
        data = self.by_id[client]
        indices: Indices = getattr(data, split)
        return self.pool.inputs(indices, data.quarter_turns), data.labels(self.pool.y[torch.from_numpy(indices)])
