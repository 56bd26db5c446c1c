"""Pools: all examples of a data source, which the clients of a federation share."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, SupportsIndex, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import (
    DENSE,
    IGNORED,
    ConfigError,
    DataError,
    DataSpec,
    Indices,
    Structure,
    TaskKind,
    checked,
    is_choice,
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
    check_one_tensor,
    check_range,
    convert_inputs,
    count_outputs,
    group_by_label,
    is_structured,
    pack_fields,
    require_outputs,
    whole_number,
)

Scaling = Literal["source", "unit", "pixel"]
"""Kind of scaling of images; see :meth:`Pool.scaled`."""


@dataclass(frozen=True)
class Columns:
    """Names of the inputs and labels of a table, and the scaling of its numbers.

    Parameters
    ----------
    inputs
        Names of the encoded inputs. A text column has an input for each category, such as
        ``"ward=surgery"``.
    labels
        Names of the labels.
    mean, std
        Mean and standard deviation of each input before scaling; None if inputs are not scaled, or
        each client scales by its own mean and standard deviation.
    scaled_by_client
        Whether each client's numbers were scaled by its own examples.
    target_mean, target_std
        Mean and standard deviation of each target of a regression, by which a task standardizes
        targets; None if targets are not standardized. The targets of a pool are never scaled.
    by_default
        Whether the scaling is a default rather than the user's choice. A private run undoes a
        default scaling.
    fill
        Number that fills empty cells of each input, before scaling; None for an input whose empty
        cells are not filled. An empty tuple if no input has a filling number.
    """

    inputs: tuple[str, ...]
    labels: tuple[str, ...] = ()
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    scaled_by_client: bool = False
    target_mean: tuple[float, ...] | None = None
    target_std: tuple[float, ...] | None = None
    by_default: bool = False
    fill: tuple[float | None, ...] = ()

    @property
    def are_scaled_together(self) -> bool:
        """Whether inputs or targets are scaled by the examples of all clients together."""
        return self.mean is not None or self.target_mean is not None

    @property
    def described(self) -> dict[str, object]:
        """Names of columns and labels, scaling, and filling numbers, as a mapping for JSON.

        Fields that are not set are left out.
        """
        known = {
            "columns": self.inputs,
            "labels": self.labels,
            "mean": self.mean,
            "std": self.std,
            "target_mean": self.target_mean,
            "target_std": self.target_std,
            "fill": self.fill,
        }
        found: dict[str, object] = {name: list(value) for name, value in known.items() if value}
        if self.scaled_by_client:
            found["scaled_by_client"] = True
        return found


@checked(
    "name",
    "x",
    "y",
    "groups",
    "train",
    "test",
    "outputs",
    "task",
    "natural",
    "mean",
    "std",
    "related",
)
@dataclass(frozen=True, eq=False)
class Pool:
    """All examples of a data source, decoded once and shared by all clients without copies.

    N is the number of examples.

    Parameters
    ----------
    name
        Name of the data source, as in ``fedclade ls datasets``.
    x
        Inputs ``[N, ...]``: uint8 images ``[N, C, H, W]``, float32 features ``[N, F]`` or int64
        tokens ``[N, T]``; a tensor or an array. Other floats and truth values become float32. Other
        integers become int64, and float32 for a model that does not take integers; see
        :meth:`with_inputs_as`. Or a dict or tuple of such arrays, for a model with several inputs:
        they are stored as rows of numbers ``[N, W]``, which ``structure`` describes.
    y
        Targets, of any type that can be converted exactly. int64: labels ``[N]``
        (``classification``), or the next token at each position ``[N, T]``, -100 without a next
        token (``language``). float32: 0 or 1 ``[N]`` (``binary``) or ``[N, L]`` (``multilabel``);
        numbers ``[N]`` or ``[N, ...]`` (``regression``). int64 masks ``[N, H, W]``, -100 for pixels
        that are ignored (``segmentation``). A dict or tuple of arrays for a loss of your own is
        stored as rows of numbers, which ``target_structure`` describes.
    groups
        Group of each example for partitions by label, int64 ``[N]``: the label, or the topic of
        language data, or 0 without labels and topics.
    train, test
        Indices of the training examples and of the source's own test split. If ``test`` is
        empty, every client holds out a part of its own examples.
    outputs
        Number of outputs of a model: the number of labels (``classification``), the size of the
        vocabulary (``language``), 1 (``binary``), L (``multilabel``), or the number of numbers in a
        target (``regression``).
    task
        The task, one of :data:`~fedclade.core.TaskKind`.
    natural
        Owner of each example (writer, speaker, user), ``[N]``; None if unknown.
    vocabulary
        The words of the tokens; empty for data that is not text.
    mean, std
        Mean and standard deviation of the pixels in [0, 1]. uint8 images reach the model as ``(x /
        255 - mean) / std``.
    columns
        Names of the inputs and labels of a table, and the scaling of its numbers.
    raw
        Inputs before default scaling, which a private run uses; None if ``x`` is not scaled by
        default.
    related
        Group of examples that depend on each other, such as the visits of a patient, for each
        example, int64 ``[N]``. Examples of one client in one group are never in different parts of
        its data. None if the examples are independent, or nothing is known about their dependence.
    structure, target_structure
        Tensors of an input and of a target that are a dict or a tuple; None for a single tensor.

    Raises
    ------
    DataError
        If the arrays differ in length or have a wrong type, an index or a label is out of range, or
        the task is unknown.
    """

    name: str
    x: torch.Tensor
    y: torch.Tensor
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
    raw: torch.Tensor | None = field(default=None, repr=False)
    related: Indices | None = field(default=None, repr=False)
    structure: Structure | None = None
    target_structure: Structure | None = None
    digest: str | None = field(default=None, init=False)
    """SHA-256 of ``x`` and ``y`` if stated by the file with the examples, otherwise None.

    It saves reading all examples to compute the hash.
    """
    reopened: tuple[Callable[..., Pool], tuple[str, ...]] | None = field(
        default=None, init=False, repr=False
    )
    """Function and arguments by which another process opens the same file; None without a file."""

    def __post_init__(self) -> None:
        if not is_choice(self.task, TaskKind):
            kinds = get_args(TaskKind)
            raise DataError(unknown(f"task of pool {self.name!r}:", str(self.task), kinds))
        check_name(self.name, "the name of a pool")
        self._convert()
        self._check_shapes()
        for split, indices in (("train", self.train), ("test", self.test)):
            check_range(indices, len(self.x), f"the {split} indices of pool {self.name!r}")
        require_outputs(self.outputs, f"outputs of pool {self.name!r}")
        if self.y.is_floating_point():
            needed = count_outputs(self.y, self.task)
            if needed != self.outputs:
                raise DataError(
                    f"outputs of pool {self.name!r} should be {needed}, the number that its "
                    f"targets need, got {self.outputs}"
                )
        else:
            self._check_labels()

    def _check_shapes(self) -> None:
        """Check that inputs, targets, groups and owners have one entry for each example."""
        if self.structure is not None and self.x.shape[1:] != (self.structure.width,):
            raise DataError(
                f"inputs of pool {self.name!r} should be rows of {self.structure.width} numbers, "
                f"as its structure {self.structure.described} states, got shape "
                f"{list(self.x.shape)}; pass a dict or tuple of arrays, without a structure"
            )
        if self.target_structure is not None and self.task != "regression":
            raise DataError(
                f"targets of pool {self.name!r} that are a dict or tuple are for losses of your "
                f"own and need the task 'regression', got {self.task!r}"
            )
        if self.task == "classification" and self.y.dim() != 1:
            raise DataError(
                f"targets of pool {self.name!r} should be one label for each example, got shape "
                f"{list(self.y.shape)}"
            )
        arrays: dict[str, Any] = {"x": self.x, "y": self.y, "groups": self.groups}
        if self.natural is not None:
            if not isinstance(self.natural, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DataError(
                    f"natural of pool {self.name!r} should be an array of names, got "
                    f"{shown(self.natural)}"
                )
            arrays["natural"] = self.natural
        if self.related is not None:
            arrays["related"] = self.related
        scalars = [name for name, array in arrays.items() if array.ndim == 0]
        if scalars:
            raise DataError(
                f"{scalars[0]} of pool {self.name!r} should have an entry for each example, got "
                "one number"
            )
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"the arrays of pool {self.name!r} should have the same length, got {lengths}"
            )

    def _check_labels(self) -> None:
        """Check that labels and tokens are at least 0 and less than the number of outputs."""
        is_negative = (self.y < 0) & (self.y != IGNORED)
        if bool(is_negative.any()):
            exception = ""
            if self.task in DENSE:
                exception = f", or {IGNORED} where there is no target"
            raise DataError(
                f"labels of pool {self.name!r} should be 0 or more{exception}, got "
                f"{int(self.y[is_negative][0])}"
            )
        self._check_ignored()
        if len(self.y) and int(self.y.max()) >= self.outputs:
            raise DataError(
                f"labels of pool {self.name!r} should be less than its number of outputs, "
                f"{self.outputs}, got {int(self.y.max())}"
            )

    def _check_ignored(self) -> None:
        """Check that every example has a label; only single tokens and pixels may lack a target."""
        is_ignored = self.y == IGNORED
        if self.task in DENSE or not bool(is_ignored.any()):
            return
        raise DataError(
            f"all examples of pool {self.name!r} should have a label, got {int(is_ignored.sum())} "
            f"of {len(self.y)} examples without a label ({IGNORED}, which losses ignore); leave "
            "these examples out"
        )

    def _convert(self) -> None:
        """Convert numbers and arrays to the types of a pool.

        Raises a DataError if a value cannot be converted exactly.
        """
        owner = f"of pool {self.name!r}"
        for name in ("mean", "std"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real):
                raise DataError(f"{name} {owner} should be a number, got {value!r}")
        if not self.std > 0:
            raise DataError(f"std {owner} should be greater than 0, got {self.std}")
        converted: dict[str, Any] = {"outputs": whole_number(self.outputs, f"outputs {owner}")}
        if is_structured(self.x):
            converted["x"], converted["structure"] = pack_fields(self.x, f"inputs {owner}")
        else:
            converted["x"] = as_inputs(self.x, f"inputs {owner}")
        y = self.y
        if is_structured(y):
            y, converted["target_structure"] = pack_fields(y, f"targets {owner}")
        converted["y"] = as_targets(y, f"targets {owner}", self.task)
        numbered = ["groups", "train", "test"]
        if self.related is not None:
            numbered.append("related")
        for name in numbered:
            converted[name] = as_indices(getattr(self, name), f"{name} {owner}")
        for name, value in converted.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of_arrays(
        cls, name: str, arrays: Arrays, groups: Indices, outputs: int, **options: Any
    ) -> Pool:
        """Build a pool from cached arrays by name: ``x``, ``y`` and ``train``.

        The first ``train`` examples are for training, and all other examples are the test split.
        """
        count = int(arrays["train"])
        examples = np.arange(len(arrays["x"]))
        return cls(
            name,
            torch.from_numpy(arrays["x"]),
            torch.from_numpy(arrays["y"]),
            groups=groups,
            train=examples[:count],
            test=examples[count:],
            outputs=outputs,
            **options,
        )

    @classmethod
    def of_examples(
        cls,
        name: str,
        x: torch.Tensor,
        y: Any,
        train: Indices,
        test: Indices,
        *,
        outputs: int | None = None,
        **options: Any,
    ) -> Pool:
        """Build a pool whose groups (for partitions by label) are the labels.

        If ``outputs`` is None, the number of outputs is the number that the targets need.
        """
        task = options.get("task", "classification")
        if is_structured(y):
            y, options["target_structure"] = pack_fields(y, f"targets of pool {name!r}")
        y = as_targets(y, f"targets of pool {name!r}", task)
        if not outputs:
            check_numbering(y, f"labels of pool {name!r}", task)
            outputs = count_outputs(y, task)
        return cls(
            name,
            x,
            y,
            groups=group_by_label(y, task),
            train=train,
            test=test,
            outputs=outputs,
            **options,
        )

    def with_file(self, x: torch.Tensor, y: torch.Tensor, related: Indices | None) -> Pool:
        """Return the pool with all examples of a file in place of its own, without reading them.

        The pool has an example of the file, by which types and shapes were checked. The values were
        checked when the file was written; a check here would read the whole file.
        """
        pool = copy.copy(self)
        groups = np.broadcast_to(np.int64(0), len(x))
        values = {"x": x, "y": y, "related": related, "groups": groups}
        for name, value in values.items():
            object.__setattr__(pool, name, value)
        return pool

    def record_file(self, digest: str, reopen: Callable[..., Pool], *arguments: str) -> None:
        """Record that the examples are mapped from a file whose inputs are known to be finite.

        When the pool is pickled for another process, only the call ``reopen(*arguments)`` is
        pickled, which maps the file there. ``digest`` is the SHA-256 of the examples.
        """
        object.__setattr__(self, "digest", digest)
        object.__setattr__(self, "reopened", (reopen, arguments))
        self.__dict__["not_finite"] = np.empty(0, dtype=np.int64)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.reopened or super().__reduce_ex__(protocol)

    @cached_property
    def not_finite(self) -> Indices:
        """Indices of the examples that have a NaN or infinite input."""
        if not self.x.is_floating_point() or bool(self.x.sum(dtype=torch.float64).isfinite()):
            return np.empty(0, dtype=np.int64)
        return (~self.x.flatten(1).isfinite().all(1)).nonzero().flatten().numpy()

    def __repr__(self) -> str:
        inputs = f"{self.x.dtype} {list(self.x.shape)}"
        return f"Pool({self.name!r}, {inputs}, outputs={self.outputs}, task={self.task!r})"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch dimension."""
        return tuple(self.x.shape[1:])

    @property
    def outputs_each(self) -> int:
        """Number of numbers in a model's output for one example, by which memory is planned."""
        targets = max(1, self.y[:1].numel())
        if self.y.dim() > 2 and self.task not in DENSE:
            return targets  # an image has one output for each number of the target
        return self.outputs * targets

    @property
    def schema(self) -> DataSpec:
        """Specification of inputs, outputs and task, for a server that has no examples."""
        scaling = None
        if self.x.dtype == torch.uint8:
            scaling = (self.mean, self.std)
        words = len(self.vocabulary)
        if self.task == "language" and not words:
            words = self.outputs
        return DataSpec(
            data=self.name,
            input_shape=self.input_shape,
            outputs=self.outputs,
            task=self.task,
            vocabulary_size=words,
            scaled=scaling,
            structure=self.structure,
            target_structure=self.target_structure,
        )

    @checked()
    def scaled(self, how: Scaling) -> Pool:
        """Return a pool of the same examples that scales images in the given way.

        Parameters
        ----------
        how
            ``source``: by the pool's ``mean`` and ``std``; the pool itself is returned. ``unit``:
            pixels are only divided by 255. ``pixel``: a pixel with grey level x (0 to 255) becomes
            the number (x − μ)/(σ + 0.001), as Li et al. 2018 scale MNIST. Here μ and σ are the mean
            and the standard deviation of this pixel over all images, including the test split. A
            pixel that is always black becomes 0.

        Raises
        ------
        ConfigError
            If the scaling is unknown, or if it is ``unit`` or ``pixel`` although the inputs are not
            images of type uint8.
        """
        if not is_choice(how, Scaling):
            raise ConfigError(unknown("value of scaling:", how, get_args(Scaling)))
        if how == "source":
            return self
        images = self.x.dtype == torch.uint8
        require(
            (
                "scaling",
                how,
                images,
                f"'source' for {self.name}, whose inputs are not images of type uint8",
            )
        )
        if how == "unit":
            return replace(self, mean=0.0, std=1.0)
        x = self.x.to(torch.float32)
        deviation, mean = torch.std_mean(x, dim=0, correction=0)
        return replace(self, x=x.sub_(mean).div_(deviation + 0.001), mean=0.0, std=1.0)

    def with_inputs_as(self, kind: InputKind) -> Pool:
        """Return the pool with its inputs converted to numbers (float32) or tokens (int64).

        With ``kind`` ``auto`` the inputs are not changed.

        Raises
        ------
        ConfigError
            If the kind is not one of :data:`~fedclade.data.InputKind`.
        DataError
            If ``kind`` is ``tokens`` and an input is not a whole number of at least 0.
        """
        check_input_kind(kind)
        check_one_tensor(kind, self.structure)
        x = convert_inputs(self.x, kind, f"inputs of pool {self.name!r}")
        if x is self.x:
            return self
        return replace(self, x=x)

    def inputs(self, indices: Indices, quarter_turns: int = 0) -> torch.Tensor:
        """Return the inputs of some examples in the form that models take, ``[n, ...]``.

        Parameters
        ----------
        indices
            Indices of the examples, int64 ``[n]``.
        quarter_turns
            Number of rotations of images by 90°, counter-clockwise; 0 for inputs that are not
            images.

        Returns
        -------
        Tensor
            Images of type uint8 as floats, scaled by the pool's ``mean`` and ``std``. Other inputs
            have the numbers and the type that they have in the pool.

        Raises
        ------
        DataError
            If an index is out of range, ``quarter_turns`` is not a whole number, or inputs that are
            not images should be rotated.
        """
        try:
            x = self.x[torch.from_numpy(indices)]
            if x.dtype == torch.uint8:
                x = x.to(torch.float32).div_(255).sub_(self.mean).div_(self.std)
            if not quarter_turns:
                return x
            if x.ndim > 2:
                return torch.rot90(x, quarter_turns, (-2, -1))
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise DataError(
                f"cannot select inputs of pool {self.name!r}: {error}; indices should be an int64 "
                f"array [n] of numbers below {len(self.x)}, and quarter_turns (rotations by 90°) a "
                "whole number"
            ) from error
        raise DataError(
            f"cannot rotate the inputs of pool {self.name!r} by {quarter_turns} times 90°, since an "
            f"input of shape {list(self.x.shape[1:])} is not an image; set quarter_turns = 0"
        )
