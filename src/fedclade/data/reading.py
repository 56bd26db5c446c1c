"""Reading of users' examples from data sets, from pairs ``(x, y)`` of arrays, and from columns.

A *part* is one data set or pair, such as the training data of one client. Its rows are pairs ``(x,
y)``, or dicts of named columns, as in the data sets of Hugging Face. The parameter ``what`` of the
functions is the name of a part in error messages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import (
    IGNORED,
    ConfigError,
    DataError,
    Indices,
    Structure,
    TaskKind,
    Tensors,
    shown,
)
from fedclade.data.arrays import (
    as_array,
    as_field,
    as_fields,
    as_inputs,
    as_targets,
    check_kind,
    is_structured,
    pack_fields,
)

READ_TWICE = 8
"""Number of examples of a data set that are read twice, to detect random transforms.

A transform that flips half of the images at random remains undetected in one of 256 cases.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Examples:
    """Concatenated examples of several parts, such as the data sets of several clients.

    Parameters
    ----------
    x, y
        Inputs ``[N, ...]`` or N texts, and targets ``[N, ...]``.
    task
        The given or detected task.
    parts
        Row numbers of the examples of each part.
    structure, target_structure
        Tensors of inputs and targets that are dicts or tuples, which ``x`` and ``y`` store as rows
        of numbers; None for single tensors.
    """

    x: torch.Tensor | list[str]
    y: torch.Tensor
    task: TaskKind
    parts: list[Indices]
    structure: Structure | None = None
    target_structure: Structure | None = None


Names = str | tuple[str, ...] | Mapping[str, str]
"""One column, or several columns: by their names, or by the names that a model gives to them."""

TARGET_NAMES = ("labels", "label", "target", "targets", "y")
"""Names of the target column of data with named columns, unless the user names another column."""


@dataclass(frozen=True, kw_only=True)
class NamedColumns:
    """Columns of rows that are dicts: the inputs and the target.

    Parameters
    ----------
    inputs
        A column, which is the only input; a list of columns; or a mapping of the names of a model's
        inputs to columns. None: all columns except for the target and texts.
    target
        A column; or a list or mapping of columns, for a loss of your own. None: the first of
        :data:`TARGET_NAMES` that is a column.
    ignored
        Label that marks pixels without a label in masks, such as 255; None if there is none.
    """

    inputs: Names | None = None
    target: Names | None = None
    ignored: int | None = None

    @property
    def is_given(self) -> bool:
        """Whether a column is chosen."""
        return self.inputs is not None or self.target is not None

    def split(self, row: Mapping[str, Any], where: str) -> tuple[Any, Any]:
        """Return the input and the target of a row, or of columns of many rows.

        Parameters
        ----------
        row
            Values by column.
        where
            Name of the row in error messages.

        Returns
        -------
        tuple
            The input and the target; several columns are a dict.

        Raises
        ------
        DataError
            If a column is missing, or no column is an input or the target.
        """
        target = self.target
        if target is None:
            target = next((name for name in TARGET_NAMES if name in row), None)
        if target is None:
            raise DataError(
                f"{where} has the columns {', '.join(map(str, row))}, none of which is named "
                f"{', '.join(TARGET_NAMES)}; name the column to predict by target=..."
            )
        inputs = self.inputs
        if inputs is None:
            inputs = self._other_columns(row, target, where)
        return _take(row, inputs, where, "inputs"), _take(row, target, where, "target")

    def _other_columns(self, row: Mapping[str, Any], target: Names, where: str) -> Names:
        """Return the columns that are inputs by default: those of numbers, or else one of texts."""
        taken = [target] if isinstance(target, str) else list(_columns_of(target).values())
        others = [name for name in row if name not in taken]
        numbers = [name for name in others if not _is_text(row[name])]
        if numbers:
            return tuple(numbers)
        if len(others) == 1:
            return others[0]
        raise DataError(
            f"{where} has the columns {', '.join(map(str, row))}, and none of the columns besides "
            "the target has numbers; name the inputs by inputs=..."
        )


def _is_text(values: Any) -> bool:
    """Return whether a value is a text, or a list or array of texts."""
    if values is None or isinstance(values, str | bytes):
        return True
    if getattr(getattr(values, "dtype", None), "kind", "") in ("U", "S", "T"):
        return True
    is_list = isinstance(values, list) or getattr(getattr(values, "dtype", None), "kind", "") == "O"
    return is_list and len(values) > 0 and (values[0] is None or isinstance(values[0], str | bytes))


def _columns_of(names: Names) -> Mapping[str, str]:
    """Return columns by the names that a model gives to them."""
    if isinstance(names, str):
        return {names: names}
    if isinstance(names, Mapping):
        return names
    return {name: name for name in names}


def _take(row: Mapping[str, Any], names: Names, where: str, argument: str) -> Any:
    """Return one column of a row, or a dict of several columns."""
    chosen = _columns_of(names)
    missing = [column for column in chosen.values() if column not in row]
    if missing:
        raise DataError(
            f"{where} has no column {missing[0]!r}, only {', '.join(map(str, row))}; name one of "
            f"these columns by {argument}=..."
        )
    if isinstance(names, str):
        return row[names]
    return {name: row[column] for name, column in chosen.items()}


Inputs = Union["torch.Tensor", list[str], Tensors]
"""Inputs of a part: a tensor ``[n, ...]``, n texts, or several tensors."""

Targets = Union["torch.Tensor", list[Any], Tensors]
"""Targets of a part before the task is known: a tensor, a list of values, or several tensors."""


def read_parts(
    given: Mapping[str, Any], task: TaskKind | None, columns: NamedColumns | None = None
) -> Examples:
    """Read several data sets or pairs of arrays, and concatenate their examples.

    Parameters
    ----------
    given
        Data sets, pairs ``(x, y)`` of arrays, or dicts of columns, by the names that error messages
        use for them. The inputs of all examples must have the same type and shape.
    task
        The task. If None, the targets determine it: whole numbers are labels, other numbers are
        targets of a regression.
    columns
        Inputs and target of rows that are dicts, and the label of ignored pixels; None for the
        defaults.

    Raises
    ------
    DataError
        If there are no examples, an example is not a pair, inputs differ in shape or type, or
        targets do not fit the task.
    ConfigError
        If the targets allow more than one task, or columns are named although rows are pairs.
    """
    choice = columns or NamedColumns()
    inputs: dict[str, Inputs] = {}
    raw_targets: dict[str, Targets] = {}
    for what, part in given.items():
        if isinstance(part, Mapping):
            part = choice.split(part, what)
        elif choice.is_given and is_pair(part):
            raise ConfigError(
                f"inputs= and target= name columns, but {what} is a pair (x, y), which has none; "
                "leave out inputs= and target="
            )
        if is_pair(part):
            inputs[what], raw_targets[what] = _read_arrays(part, what)
        else:
            inputs[what], raw_targets[what] = _read_rows(part, what, choice)
    task = task or _detect_task(raw_targets)
    ignored = choice.ignored
    if ignored is not None:
        raw_targets = {what: _mark_ignored(y, ignored, task) for what, y in raw_targets.items()}
    packed_inputs = {what: _pack(x, f"inputs of {what}") for what, x in inputs.items()}
    packed_targets = {what: _pack_targets(y, what, task) for what, y in raw_targets.items()}
    first = next(iter(given))
    for what in given:
        _check_same_kind(packed_inputs, what, first)
        _check_same_targets(packed_targets, what, first)
    structure = packed_inputs[first][1]
    target_structure = packed_targets[first][1]
    parts = number_rows([len(y) for y, _ in packed_targets.values()])
    y = torch.cat([y for y, _ in packed_targets.values()])
    # Either all parts have tensors or all parts have texts, as was checked above.
    tensors = [x for x, _ in packed_inputs.values() if isinstance(x, torch.Tensor)]
    if tensors:
        return Examples(torch.cat(tensors), y, task, parts, structure, target_structure)
    texts = [text for x, _ in packed_inputs.values() if isinstance(x, list) for text in x]
    return Examples(texts, y, task, parts, target_structure=target_structure)


def _pack(x: Inputs, what: str) -> tuple[torch.Tensor | list[str], Structure | None]:
    """Return inputs as one tensor or as texts, and the structure of inputs of several tensors."""
    if isinstance(x, torch.Tensor | list):
        return x, None
    return pack_fields(x, what)


def _pack_targets(y: Targets, what: str, task: TaskKind) -> tuple[torch.Tensor, Structure | None]:
    """Return targets in the type of the task, and the structure of targets of several tensors."""
    if isinstance(y, torch.Tensor | list):
        return _convert_targets(y, what, task), None
    if task != "regression":
        raise ConfigError(
            f"targets of {what} are several columns, which are for losses of your own and need "
            f"task='regression', got task={task!r}"
        )
    packed, structure = pack_fields(y, f"targets of {what}")
    return as_targets(packed, f"targets of {what}", task), structure


def _check_same_kind(
    inputs: Mapping[str, tuple[torch.Tensor | list[str], Structure | None]], what: str, first: str
) -> None:
    """Check that the inputs of a part have the type, shape and structure of the first part's."""
    described = describe_inputs(*inputs[what])
    expected = describe_inputs(*inputs[first])
    if described != expected:
        raise DataError(
            f"inputs of {what} should have the type and shape of inputs of {first} ({expected}), "
            f"got {described}"
        )


def _check_same_targets(
    targets: Mapping[str, tuple[torch.Tensor, Structure | None]], what: str, first: str
) -> None:
    """Check that the targets of a part have the shape and structure of the first part's."""
    shape = list(targets[what][0].shape[1:])
    first_shape = list(targets[first][0].shape[1:])
    if shape != first_shape or targets[what][1] != targets[first][1]:
        raise DataError(
            f"targets of {what} should have the shape of the targets of {first}, {first_shape} "
            f"for each example, got {shape}"
        )


def _mark_ignored(y: Targets, ignored: int, task: TaskKind) -> Targets:
    """Replace the label of pixels that are ignored by the label that losses ignore.

    Raises
    ------
    ConfigError
        If the targets are no masks.
    """
    if task != "segmentation":
        raise ConfigError(
            f"ignored = {ignored} marks pixels of masks and needs task='segmentation', got "
            f"task={task!r}"
        )
    if isinstance(y, list):
        y = torch.stack([torch.as_tensor(mask) for mask in y])
    if not isinstance(y, torch.Tensor):
        return y
    masks = y.to(torch.int64)
    return masks.where(masks != ignored, IGNORED)


def number_rows(sizes: Sequence[int]) -> list[Indices]:
    """Return the row numbers of each part after concatenation, given the sizes of the parts."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def is_pair(part: Any) -> bool:
    """Return whether an object is a pair ``(x, y)`` rather than a data set."""
    return isinstance(part, tuple) and len(part) == 2


def is_dataset(part: Any) -> bool:
    """Return whether an object is a map-style data set, and not an array, list or mapping."""
    if isinstance(part, torch.utils.data.Dataset):
        return True
    if isinstance(part, list | tuple | str | Mapping | torch.Tensor) or hasattr(part, "__array__"):
        return False
    return hasattr(part, "__len__") and hasattr(part, "__getitem__")


def describe_inputs(x: torch.Tensor | list[str], structure: Structure | None = None) -> str:
    """Describe the type and shape of the first input of a part, or "texts", for messages."""
    if isinstance(x, list):
        return "texts"
    if structure is not None:
        return structure.described
    return _describe_input(x[0])


def _describe_input(x: torch.Tensor) -> str:
    """Describe the type and shape of one input for messages, such as ``float32 [3, 32]``."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _read_arrays(pair: tuple[Any, Any], what: str) -> tuple[Inputs, Targets]:
    """Read a pair of inputs and targets given as arrays; inputs may be a list of texts.

    Inputs and targets may be dicts or tuples of arrays.

    Returns
    -------
    tuple
        Inputs and targets. The targets keep their type until the task is known.
    """
    x, y = pair
    inputs = _read_inputs(x, f"inputs of {what}")
    if is_structured(y):
        targets = as_fields(y, f"targets of {what}")
        _check_lengths(_length_of(inputs), _length_of(targets), what)
        return inputs, targets
    check_kind(y, f"targets of {what}")
    try:
        if isinstance(y, torch.Tensor):
            array = y
        else:
            array = np.asarray(y)
        targets = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"targets of {what} should be numbers, got {type(y).__name__}: {error}"
        ) from error
    if isinstance(inputs, torch.Tensor):
        shape = list(inputs.shape)
    else:
        shape = [_length_of(inputs)]
    if shape[:1] != list(targets.shape[:1]) or not shape:
        raise DataError(
            f"{what} should be arrays x and y of the same length, got shapes {shape} and "
            f"{list(targets.shape)}"
        )
    if len(targets) == 0:
        raise DataError(f"{what} should have at least 1 example, got none")
    return inputs, targets


def _length_of(examples: Inputs) -> int:
    """Return the number of examples of a part."""
    if isinstance(examples, Mapping):
        return len(next(iter(examples.values())))
    if isinstance(examples, tuple):
        return len(examples[0])
    return len(examples)


def _check_lengths(inputs: int, targets: int, what: str) -> None:
    """Check that a part has as many inputs as targets, and at least one."""
    if inputs != targets:
        raise DataError(
            f"{what} should have as many inputs as targets, got {inputs} inputs and {targets} "
            "targets"
        )
    if targets == 0:
        raise DataError(f"{what} should have at least 1 example, got none")


def _read_inputs(x: Any, what: str) -> Inputs:
    """Convert inputs to a tensor, to several tensors, or to a list of texts."""
    if is_structured(x):
        return as_fields(x, what)
    check_kind(x, what)
    values = x
    # Kind codes of NumPy types: object (O), text of fixed length (U) and of any length (T).
    may_be_text = getattr(getattr(x, "dtype", None), "kind", None) in ("O", "U", "T")
    if may_be_text and hasattr(x, "tolist"):
        values = x.tolist()
    if isinstance(values, list) and values and all(isinstance(text, str) for text in values):
        return list(values)
    return as_inputs(x, what)


def _read_rows(dataset: Any, what: str, choice: NamedColumns) -> tuple[Inputs, Targets]:
    """Read all examples of a map-style data set, one after another.

    Returns
    -------
    tuple
        The stacked inputs (or a list of texts), and the targets.
    """
    # A 0-dimensional array and a class object have the methods of a data set, but no length.
    has_no_length = getattr(dataset, "ndim", None) == 0 or issubclass(type(dataset), type)
    if has_no_length or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{what} should be a map-style torch data set (with len() and indexing), got "
            f"{shown(dataset)}"
        )
    if len(dataset) == 0:
        raise DataError(f"{what} should have at least 1 example, got none")
    inputs: list[Any] = []
    targets: list[Any] = []
    for row in range(len(dataset)):
        x, target = _read_row(dataset, row, what, choice)
        if not is_structured(target):
            check_kind(target, f"the target of example {row} of {what}")
        targets.append(target)
        is_text = isinstance(x, str) and (not inputs or isinstance(inputs[0], str))
        if not is_text:
            x = _read_input(x, row, what)
        inputs.append(x)
        if not isinstance(inputs[0], str):
            _check_alike(inputs[0], inputs[row], row, what)
    stacked_targets: Targets = targets
    if isinstance(targets[0], Mapping):
        stacked_targets = {
            name: _stack_targets([target[name] for target in targets], f"{name!r} of {what}")
            for name in targets[0]
        }
    if isinstance(inputs[0], str):
        return inputs, stacked_targets
    _warn_of_randomness(dataset, inputs, what, choice)
    return _stack_inputs(inputs), stacked_targets


def _read_row(dataset: Any, row: int, what: str, choice: NamedColumns) -> tuple[Any, Any]:
    """Return the input and the target of an example, which is a pair or a dict of columns.

    Raises
    ------
    DataError
        If the example is neither, or a column is missing.
    """
    try:
        example = dataset[row]
        if isinstance(example, Mapping):
            return choice.split(example, f"example {row} of {what}")
        x, target = example
    except (TypeError, ValueError, LookupError) as error:
        raise DataError(
            f"{what} should consist of pairs (x, label), but example {row} is not a pair: {error}"
        ) from error
    if choice.is_given:
        raise ConfigError(
            f"inputs= and target= name columns, but example {row} of {what} is a pair (x, y), "
            "which has none; leave out inputs= and target="
        )
    return x, target


def _stack_inputs(inputs: Sequence[Any]) -> Inputs:
    """Stack the inputs of all examples of a part; several tensors are stacked one by one."""
    first = inputs[0]
    if isinstance(first, torch.Tensor):
        return torch.stack([*inputs])
    if isinstance(first, Mapping):
        return {name: torch.stack([x[name] for x in inputs]) for name in first}
    return tuple(torch.stack([x[place] for x in inputs]) for place in range(len(first)))


def _check_alike(first: Any, x: Any, row: int, what: str) -> None:
    """Check that the input of example ``row`` has the type and shape of the first input."""
    if isinstance(first, torch.Tensor) and isinstance(x, torch.Tensor):
        is_alike = x.shape == first.shape and x.dtype == first.dtype
    else:
        is_alike = _describe_row(first) == _describe_row(x)
    if is_alike:
        return
    advice = ""
    if not isinstance(first, torch.Tensor):
        advice = (
            "; pad texts to one length, as tokenizer(..., padding='max_length', truncation=True) "
            "does"
        )
    raise DataError(
        f"all inputs of {what} should have the same type and shape, got {_describe_row(first)} in "
        f"example 0 and {_describe_row(x)} in example {row}{advice}"
    )


def _describe_row(x: Any) -> str:
    """Describe the type and shape of the input of one example, for messages."""
    if isinstance(x, torch.Tensor):
        return _describe_input(x)
    if isinstance(x, Mapping):
        listed = ", ".join(f"{name}: {_describe_input(each)}" for name, each in x.items())
        return f"{{{listed}}}"
    return f"({', '.join(_describe_input(each) for each in x)})"


def _is_same(x: Any, again: Any) -> bool:
    """Return whether two readings of an input have the same shapes and values."""
    if isinstance(x, torch.Tensor):
        return x.shape == again.shape and torch.equal(again.nan_to_num(), x.nan_to_num())
    if isinstance(x, Mapping):
        return all(_is_same(x[name], again[name]) for name in x)
    return all(_is_same(one, other) for one, other in zip(x, again, strict=True))


def _warn_of_randomness(
    dataset: Any, inputs: Sequence[Any], what: str, choice: NamedColumns
) -> None:
    """Warn if some inputs of a data set change when they are read a second time.

    They change if the data set applies a random transform. Examples are read only once, before
    training, so the transform would not vary between epochs. ``inputs`` are all inputs as read
    first.
    """
    rows = np.unique(np.linspace(0, len(inputs) - 1, READ_TWICE).astype(int))
    for row in rows.tolist():
        again = _read_input(_read_row(dataset, row, what, choice)[0], row, what)
        if _is_same(inputs[row], again):
            continue
        _log.warning(
            "example %d of %s changes each time that it is read, as with a random transform; "
            "examples are read only once, so every epoch trains on the same random values: remove "
            "the random part from the data set, and pass it as the federation's 'augment'",
            row,
            what,
        )
        return


def _read_input(x: Any, row: int, what: str) -> Any:
    """Convert the input of one example to a tensor, or to several tensors."""
    if isinstance(x, Mapping):
        return {
            name: as_field(_read_one(each, row, f"{name!r} of {what}"), what)
            for name, each in x.items()
        }
    if is_structured(x):
        return tuple(as_field(_read_one(each, row, what), what) for each in x)
    return as_inputs(_read_one(x, row, what), f"inputs of {what}")


def _read_one(x: Any, row: int, what: str) -> torch.Tensor:
    """Convert one array of an example to a tensor of the same type."""
    check_kind(x, f"the inputs of example {row} of {what}")
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"inputs of {what} should be tensors or arrays, got {type(x).__name__} in example "
            f"{row}; for images give the data set a transform such as torchvision's ToTensor()"
        ) from error


def _detect_task(targets: Mapping[str, Targets]) -> TaskKind:
    """Detect the task from the types of all targets.

    Floats are targets of a regression, and single whole numbers are labels.

    Raises
    ------
    ConfigError
        If an example has several whole numbers as targets, which several tasks allow.
    """
    examples: dict[str, list[NDArray[Any]]] = {}
    for what, y in targets.items():
        if not isinstance(y, torch.Tensor | list):
            return "regression"  # several numbers, for a loss of the user's own
        # The entries of a tensor have one type; those of a list may differ.
        if isinstance(y, torch.Tensor):
            entries = y[:1]
        else:
            entries = y
        examples[what] = [as_array(each, f"targets of {what}") for each in entries]
    for arrays in examples.values():
        if any(each.dtype.kind == "f" for each in arrays):
            return "regression"
    for what, (first, *_) in examples.items():
        if first.size > 1:
            raise ConfigError(
                f"targets of {what} are several whole numbers for each example, which several "
                "tasks allow; set task='multilabel', task='language' or task='regression'"
            )
    return "classification"


def _convert_targets(y: torch.Tensor | list[Any], what: str, task: TaskKind) -> torch.Tensor:
    """Convert the targets of a part to the tensor type of the task, and check them."""
    if task != "classification":
        if not isinstance(y, torch.Tensor):
            y = _stack_targets(y, what)
        return as_targets(y, f"targets of {what}", task)
    if isinstance(y, list):
        labels = [_read_label(label, row, what) for row, label in enumerate(y)]
        return torch.tensor(labels, dtype=torch.int64)
    labels = as_targets(y, f"labels of {what}")
    is_negative = labels < 0
    if bool(is_negative.any()):
        row = int(is_negative.nonzero()[0, 0])
        raise DataError(
            f"labels of {what} should be whole numbers from 0 on, got "
            f"{int(labels[is_negative][0])} in example {row} (negative labels in all: "
            f"{int(is_negative.sum())}); {_WITHOUT_LABEL}"
        )
    return labels


def _stack_targets(targets: Sequence[Any], what: str) -> torch.Tensor:
    """Stack the targets of all examples of a part to one tensor."""
    tensors: list[torch.Tensor] = []
    for row, target in enumerate(targets):
        try:
            tensor = torch.as_tensor(target)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"targets of {what} should be numbers, got {shown(target)} in example {row}"
            ) from error
        # float64 for all, as Python numbers and tensors may differ in precision.
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float64)
        tensors.append(tensor)
        if tensor.shape != tensors[0].shape:
            raise DataError(
                f"targets of {what} should have the same shape, got {list(tensors[0].shape)} in "
                f"example 0 and {list(tensor.shape)} in example {row}"
            )
    return torch.stack(tensors)


_WITHOUT_LABEL = "if a negative number means that the label is missing, leave these examples out"


def _read_label(label: Any, row: int, what: str) -> int:
    """Convert the label of one example to an ``int``; raise a DataError if it is not a label."""
    array = as_array(label, f"the label of example {row} of {what}")
    is_float = array.dtype.kind == "f"
    is_whole = array.size == 1 and (
        array.dtype.kind in "iub" or (is_float and array.item() % 1 == 0)
    )
    if is_whole and array.item() >= 0:
        return int(array.item())
    hint = ""
    if is_whole:
        hint = f"; {_WITHOUT_LABEL}"
    elif is_float:
        hint = "; other numbers are targets of a regression"
    raise DataError(
        f"labels of {what} should be whole numbers from 0 on, got {shown(label)} in example "
        f"{row}{hint}"
    )
