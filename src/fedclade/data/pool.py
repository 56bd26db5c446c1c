"""All examples of a data source, in one pool that clients share."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, SupportsIndex, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import (
    IGNORED,
    ConfigError,
    DataError,
    DataSpec,
    Indices,
    TaskKind,
    checked,
    require,
    shown,
    unknown,
)
from fedclade.data.arrays import (
    Arrays,
    InputKind,
    as_indices,
    as_inputs,
    as_targets,
    check_input_kind,
    check_name,
    check_numbering,
    check_range,
    convert_inputs,
    count_outputs,
    group_by_label,
    require_outputs,
    whole_number,
)

Scaling = Literal["source", "unit", "pixel"]
"""How images are scaled; see :meth:`Pool.scaled`."""


@dataclass(frozen=True)
class Columns:
    """What the inputs and labels of a table are called, and how its numbers were scaled, for who uses a model of it."""

    inputs: tuple[
        str, ...
    ]  # a text column has one entry for each of its categories, as "ward=surgery"
    labels: tuple[str, ...] = ()
    mean: tuple[float, ...] | None = (
        None  # of each input, before it was scaled; None if each client has its own
    )
    std: tuple[float, ...] | None = None
    scaled_by_client: bool = False  # whether each client's numbers were scaled by its own examples

    @property
    def are_scaled_together(self) -> bool:
        """Whether numbers were scaled by the examples of all clients, and not by each client's own."""
        return self.mean is not None

    @property
    def described(self) -> dict[str, object]:
        """What is known, as JSON has it."""
        known = {"columns": self.inputs, "labels": self.labels, "mean": self.mean, "std": self.std}
        return {name: list(value) for name, value in known.items() if value}


@checked("name", "x", "y", "groups", "train", "test", "outputs", "task", "natural", "mean", "std")
@dataclass(frozen=True, eq=False)
class Pool:
    """All examples of a data source: decoded once, shared by all clients, never copied for a client.

    Parameters
    ----------
    name
        The source's name, as in ``fedclade ls datasets``.
    x
        Inputs ``[N, ...]``: uint8 images ``[N, C, H, W]``, float32 features ``[N, F]`` or int64
        tokens ``[N, T]``; a tensor or an array. Other floats and truth values become float32, other
        whole numbers int64, which are cast for a model that does not take whole numbers; see
        :meth:`with_inputs_as`.
    y
        Targets, of any type that can be converted without a loss. int64: labels ``[N]``
        (``classification``), or the next token at each place ``[N, T]``, -100 where there is none
        (``language``). float32: 0 or 1 ``[N]`` (``binary``) or ``[N, L]`` (``multilabel``); numbers
        ``[N]`` or ``[N, k]`` (``regression``).
    groups
        int64 ``[N]``, what a partition by label goes by: the label; for language data its topic; 0
        where there is none.
    train, test
        Indices of the examples to train on and of the source's own test split. An empty ``test``
        means that every client holds back a part of its own examples.
    outputs
        Number of outputs that a model must give: labels, the size of the vocabulary, 1, L, or k.
    task
        What the targets are: one of :data:`~fedclade.core.TaskKind`.
    natural
        ``[N]``, the owner of each example (writer, speaker, user), where the source knows it.
    vocabulary
        The words that the tokens stand for; empty for data that is not text.
    mean, std
        Of the pixels in [0, 1]; uint8 images reach the model as ``(x / 255 - mean) / std``.
    columns
        For people: what the inputs and the labels of a table are called, and how the inputs were
        scaled.

    Raises
    ------
    DataError
        If the arrays are not of one length or not of the right kind, an index or a label is out of
        range, or the task is unknown.
    """

    name: str
    x: Tensor
    y: Tensor
    groups: Indices
    train: Indices
    test: Indices
    outputs: int
    task: TaskKind = "classification"
    natural: NDArray[np.str_] | None = None
    vocabulary: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0
    columns: Columns | None = None
    digest: str | None = field(default=None, init=False)
    """SHA-256 of ``x`` and ``y`` where a file says it, so that they need not be read; a changed pool has none."""
    reopened: tuple[Callable[..., Pool], tuple[str, ...]] | None = field(
        default=None, init=False, repr=False
    )
    """The call by which another process maps the same file."""

    def __post_init__(self) -> None:
        if self.task not in get_args(TaskKind):
            raise DataError(
                unknown(f"task of pool {self.name!r}:", str(self.task), get_args(TaskKind))
            )
        check_name(self.name, "the name of a pool")
        self._convert()
        if self.task == "classification" and self.y.dim() != 1:
            raise DataError(
                f"targets of pool {self.name!r} should be one label for each example, got shape "
                f"{list(self.y.shape)}"
            )
        arrays = {"x": self.x, "y": self.y, "groups": self.groups, "natural": self.natural}
        if self.natural is not None and not isinstance(self.natural, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"natural of pool {self.name!r} should be an array of names, got "
                f"{shown(self.natural)}"
            )
        if scalars := [
            name for name, array in arrays.items() if array is not None and array.ndim == 0
        ]:
            raise DataError(
                f"{scalars[0]} of pool {self.name!r} should have an entry for each example, got "
                "one number"
            )
        lengths = {name: len(array) for name, array in arrays.items() if array is not None}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"the arrays of pool {self.name!r} should have one length, got {lengths}"
            )
        for split, indices in (("train", self.train), ("test", self.test)):
            check_range(indices, len(self.x), f"the {split} indices of pool {self.name!r}")
        require_outputs(self.outputs, f"outputs of pool {self.name!r}")
        if self.y.is_floating_point():
            if (needed := count_outputs(self.y, self.task)) != self.outputs:
                raise DataError(
                    f"outputs of pool {self.name!r} should be {needed}, as its targets, got "
                    f"{self.outputs}"
                )
            return
        if bool((odd := (self.y < 0) & (self.y != IGNORED)).any()):
            there_may_be_none = (
                f", or {IGNORED} where there is none" if self.task == "language" else ""
            )
            raise DataError(
                f"labels of pool {self.name!r} should be 0 or more{there_may_be_none}, got "
                f"{int(self.y[odd][0])}"
            )
        self._check_ignored()
        if len(self.y) and int(self.y.max()) >= self.outputs:
            raise DataError(
                f"pool {self.name!r} has {self.outputs} outputs, but a label {int(self.y.max())}"
            )

    def _check_ignored(self) -> None:
        """Check that only tokens are left without a target, since an example without one has no use."""
        without = self.y == IGNORED
        if self.task == "language" or not bool(without.any()):
            return
        raise DataError(
            f"pool {self.name!r} has {int(without.sum())} of {len(self.y)} examples without a "
            f"label ({IGNORED}, which losses ignore), and nothing can be learnt or scored on them; "
            "leave these examples out"
        )

    def _convert(self) -> None:
        """Convert numbers and arrays to the types that a pool keeps, if that loses nothing."""
        of = f"of pool {self.name!r}"
        for name in ("mean", "std"):
            if not isinstance(value := getattr(self, name), numbers.Real):
                raise DataError(f"{name} {of} should be a number, got {value!r}")
        if not self.std > 0:
            raise DataError(f"std {of} should be greater than 0, got {self.std}")
        converted = {
            "outputs": whole_number(self.outputs, f"outputs {of}"),
            "x": as_inputs(self.x, f"inputs {of}"),
            "y": as_targets(self.y, f"targets {of}", self.task),
            **{
                name: as_indices(getattr(self, name), f"{name} {of}")
                for name in ("groups", "train", "test")
            },
        }
        for name, value in converted.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of_arrays(
        cls, name: str, arrays: Arrays, groups: Indices, outputs: int, **more: Any
    ) -> Pool:
        """Return a pool of the arrays ``x`` and ``y``, whose first ``train`` examples are for training."""
        train, examples = int(arrays["train"]), np.arange(len(arrays["x"]))
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
        return cls(name, x, y, groups, examples[:train], examples[train:], outputs, **more)

    @classmethod
    def of_examples(
        cls,
        name: str,
        x: Tensor,
        y: Any,
        train: Indices,
        test: Indices,
        *,
        outputs: int | None = None,
        **more: Any,
    ) -> Pool:
        """Return a pool whose groups are the labels, with as many outputs as its targets need, if not given."""
        task = more.get("task", "classification")
        y = as_targets(y, f"targets of pool {name!r}", task)
        if not outputs:
            check_numbering(y, f"labels of pool {name!r}", task)
        return cls(
            name,
            x,
            y,
            group_by_label(y, task),
            train,
            test,
            outputs or count_outputs(y, task),
            **more,
        )

    def known(self, digest: str, reopen: Callable[..., Pool], *arguments: str) -> None:
        """Note what the writer of a file found out: its digest, and that all inputs are finite.

        To another process the pool travels as the call that maps the file there.
        """
        object.__setattr__(self, "digest", digest)
        object.__setattr__(self, "reopened", (reopen, arguments))
        self.__dict__["not_finite"] = np.empty(0, dtype=np.int64)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.reopened or super().__reduce_ex__(protocol)

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
        """What the examples look like, for a server that does not have them."""
        scaled = (self.mean, self.std) if self.x.dtype == torch.uint8 else None
        words = len(self.vocabulary) or (self.outputs if self.task == "language" else 0)
        return DataSpec(self.name, self.input_shape, self.outputs, self.task, words, scaled)

    @checked()
    def scaled(self, how: Scaling) -> Pool:
        """Return the pool with its images scaled in another way.

        Parameters
        ----------
        how
            ``source``: by the source's mean and standard deviation, as they are. ``unit``: to [0,
            1], and no further. ``pixel``: every pixel by its own mean and deviation over all
            images, the test split included, as floats; in grey levels (x − μ)/(σ + 0.001), as Li et
            al. 2018 have MNIST, so that a pixel that is always black is 0. All but ``source`` need
            images of uint8; other inputs raise a ConfigError.
        """
        if how not in get_args(Scaling):
            raise ConfigError(unknown("scaling:", how, get_args(Scaling)))
        if how == "source":
            return self
        images = self.x.dtype == torch.uint8
        require(
            (
                "scaling",
                how,
                images,
                f"'source' for {self.name}, whose inputs are not images of whole bytes",
            )
        )
        if how == "unit":
            return replace(self, mean=0.0, std=1.0)
        x = self.x.to(torch.float32)
        deviation, mean = torch.std_mean(x, dim=0, correction=0)
        return replace(self, x=x.sub_(mean).div_(deviation + 0.001), mean=0.0, std=1.0)

    def with_inputs_as(self, kind: InputKind) -> Pool:
        """Return the pool with its inputs as numbers or as tokens; see :data:`~fedclade.data.InputKind`.

        Raises
        ------
        ConfigError
            If the kind is unknown.
        DataError
            If tokens are no whole numbers of at least 0.
        """
        check_input_kind(kind)
        x = convert_inputs(self.x, kind, f"inputs of pool {self.name!r}")
        return self if x is self.x else replace(self, x=x)

    def inputs(self, indices: Indices, quarter_turns: int = 0) -> Tensor:
        """Return inputs as a model takes them, ``[n, ...]``: normalised floats, or tokens; turned by 90° each."""
        try:
            x = self.x[torch.from_numpy(indices)]
            if x.dtype == torch.uint8:
                x = x.to(torch.float32).div_(255).sub_(self.mean).div_(self.std)
            return torch.rot90(x, quarter_turns, (-2, -1)) if quarter_turns else x
        except (TypeError, IndexError, RuntimeError) as error:
            raise DataError(
                f"inputs of pool {self.name!r} are asked for by indices below {len(self.x)}, int64 "
                f"[n], and whole quarter turns: {error}"
            ) from error
