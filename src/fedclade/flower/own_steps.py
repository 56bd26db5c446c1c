"""Training code that is not part of fedclade, in messages: own local rules, steps and trainers.

A message names such code as a run's config would: by an entry point of the group
``fedclade.trainers``, or as ``module:name``. It contains the values of the fields of a class of
steps, and never code. A client looks up a name only if its policy has the name in ``trainers``.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from flwr.app import Array
from torch import Tensor

from fedclade.core import (
    RULES,
    ConfigError,
    LocalRule,
    Steps,
    TrainQuery,
    UpdateError,
    check_arguments,
    installed,
    local_rule,
    name_of,
    named,
    unknown,
)
from fedclade.flower import wire
from fedclade.flower.wire import Content, shown

FIELD = "rule."
"""Prefix of the names of vectors in a message that are tensor fields of a class of steps."""

TENSOR_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
"""Types of tensors that the fields of a class of steps can have, by name."""

PLAIN_FIELDS = (bool, int, float, str, type(None))
"""Types of the other fields of a class of steps."""


def is_built_in(rule: LocalRule) -> bool:
    """Return whether a local rule is one of fedclade's own rules."""
    return RULES.get(rule.name) is type(rule)


def code_of(query: TrainQuery) -> Steps | None:
    """Return the steps of a training query that messages describe by a name and fields.

    They are all local rules, and all classes of steps outside of fedclade. The result is None for
    steps such as SGD, which messages describe by values of their own.
    """
    steps = query.work.steps
    is_foreign = not type(steps).__module__.startswith("fedclade.core.")
    return steps if isinstance(steps, LocalRule) or is_foreign else None


def check_code_travels(query: TrainQuery) -> None:
    """Check that messages can describe the own steps and the own trainer of a training query.

    Raises
    ------
    ConfigError
        If a class or function cannot be found by a name, or if a field of the class has a type that
        messages cannot contain.
    """
    trainer = query.local.trainer
    if trainer is not None and not isinstance(trainer, str):
        raise _not_named(f"trainer {trainer.__name__}")
    steps = code_of(query)
    if steps is None or (isinstance(steps, LocalRule) and is_built_in(steps)):
        return
    kind = type(steps)
    if not _is_name(_name_of(kind)):
        raise _not_named(f"the class {kind.__name__}")
    if not is_dataclass(steps):
        raise ConfigError(
            f"the class {kind.__name__} cannot be sent to clients in a network; make it a frozen "
            "dataclass"
        )
    for field in fields(steps):
        value = getattr(steps, field.name)
        is_sent = (
            _type_name(value) in TENSOR_TYPES
            if isinstance(value, Tensor)
            else type(value) in PLAIN_FIELDS
        )
        if not is_sent:
            raise ConfigError(
                f"field {field.name!r} of {kind.__name__} cannot be sent to clients in a network: "
                "it should be a number, a text, None, or a tensor of the type "
                f"{', '.join(TENSOR_TYPES)}, got {shown(value)}"
            )


def code_values(query: TrainQuery) -> dict[str, str]:
    """Return the plain values of a message that describe the own steps of a training query."""
    steps = code_of(query)
    if steps is None:
        return {}
    if isinstance(steps, LocalRule) and is_built_in(steps):
        return {"rule": json.dumps(steps.described())}
    described: dict[str, Any] = {"name": _name_of(type(steps))}
    for field in _fields_of(steps):
        value = getattr(steps, field)
        if isinstance(value, Tensor):
            value = {"shape": list(value.shape), "type": _type_name(value)}
        described[field] = value
    return {"rule": json.dumps(described)}


def code_vectors(query: TrainQuery) -> dict[str, Array]:
    """Return the tensor fields of the own steps of a training query, as vectors for a message."""
    steps = code_of(query)
    if steps is None:
        return {}
    values = {field: getattr(steps, field) for field in _fields_of(steps)}
    return {
        FIELD + field: wire.raw_vector(value.flatten())
        for field, value in values.items()
        if isinstance(value, Tensor)
    }


def names_in(content: Content) -> list[str]:
    """Return the names of own training code in a message, for the client's policy."""
    names: list[str] = []
    if "rule" in content.values:
        name = content.json("rule").get("name")
        if isinstance(name, str) and name not in RULES:
            names.append(name)
    trainer = content.json("spec").get("trainer")
    if trainer is not None:
        names.append(str(trainer))
    return names


def read_steps(content: Content) -> Steps | None:
    """Read the steps that a training query requests by a name and fields; None if it has none.

    The client's policy must have been checked before, since the function imports the named code
    (:func:`names_in`, :meth:`Policy.check_trainer <fedclade.flower.policy.Policy.check_trainer>`).

    Raises
    ------
    UpdateError
        If this client does not have the steps, or if a field has a wrong value.
    """
    if "rule" not in content.values:
        return None
    described = content.json("rule")
    name = described.get("name")
    try:
        if not isinstance(name, str) or name in RULES:
            return local_rule(described)
        return _build(
            name, {key: value for key, value in described.items() if key != "name"}, content
        )
    except (ConfigError, OverflowError) as error:
        raise UpdateError(
            f"the query requests a local rule that this client does not know: {error}"
        ) from error


def _build(name: str, values: Mapping[str, Any], content: Content) -> Steps:
    """Return the steps of a given name, with the fields that a message contains."""
    kind = named("trainers", name, {}, "trainer")
    if not (inspect.isclass(kind) and issubclass(kind, Steps) and is_dataclass(kind)):
        raise ConfigError(
            f"{shown(name)} should be a dataclass of fedclade.Steps, got {shown(kind)}"
        )
    known = {field.name for field in fields(kind)}
    if strange := sorted(values.keys() - known):
        raise ConfigError(unknown(f"field of {kind.__name__}:", strange[0], known))
    tensors = {
        field: _read_tensor(field, value, content)
        for field, value in values.items()
        if isinstance(value, dict)
    }
    plain = {field: value for field, value in values.items() if field not in tensors}
    arguments = check_arguments(name, kind, plain, positional=True)
    try:
        return kind(**arguments, **tensors)
    except TypeError as error:  # a field is missing
        raise ConfigError(
            f"the fields of {kind.__name__} do not fit the message: {error}"
        ) from error


def _read_tensor(field: str, described: Mapping[str, Any], content: Content) -> Tensor:
    """Return a tensor field of a class of steps from its description and its vector."""
    shape = described.get("shape")
    dtype = TENSOR_TYPES.get(str(described.get("type")))
    sizes: list[Any] = shape if isinstance(shape, list) else [-1]
    if dtype is None or any(type(size) is not int or size < 0 for size in sizes):
        raise UpdateError(f"the tensor {field!r} of a query is malformed: {shown(dict(described))}")
    data = content.vector(FIELD + field)
    if math.prod(sizes) * dtype.itemsize != len(data):
        raise UpdateError(
            f"the tensor {field!r} of a query has {len(data)} bytes, expected shape {sizes} of "
            f"{dtype}"
        )
    return wire.read_vector(data, tuple(sizes), dtype, f"tensor {field!r}").clone()


def _fields_of(steps: Steps) -> list[str]:
    """Return the names of the fields of a dataclass of steps."""
    return [field.name for field in fields(steps)]  # pyright: ignore[reportArgumentType]  (checked)


def _name_of(kind: type[Steps]) -> str:
    """Return the name by which clients find a class of steps."""
    return name_of("trainers", kind, {})


def _is_name(name: str) -> bool:
    """Return whether a name is an entry point or of the form ``module:name``."""
    return ":" in name or name in installed("trainers")


def _type_name(tensor: Tensor) -> str:
    """Return the name of a tensor's data type, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def _not_named(what: str) -> ConfigError:
    """Return the error for own code that clients in a network cannot find by a name."""
    return ConfigError(
        f"{what} cannot be requested over a network, since clients find it by a name that can be "
        "imported; define it at the top level of a module that clients have, too"
    )
