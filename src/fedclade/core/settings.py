"""Settings classes: dataclasses whose fields declare documentation and allowed values.

A settings class is a dataclass with fields made by :func:`setting`. Everything else is derived from
these fields: the check of allowed values and the error message (:func:`check_settings`), the entry
in the class docstring (:func:`document_settings`), the key in a config with its type, default and
documentation (:func:`settings_of`), and the entry in the config of a run (:func:`as_section`).

>>> @document_settings
... @dataclass(frozen=True, kw_only=True)
... class Dropout:
...     \"\"\"Clients that do not reply.\"\"\"
...
...     share: float = setting(0.1, in_range("[0, 1]"), doc="Share of replies that are lost.")
...
...     def __post_init__(self) -> None:
...         check_settings(self, "dropout")
>>> Dropout(share=2.0)
Traceback (most recent call last):
    ...
fedclade.core.errors.ConfigError: dropout.share should be in [0, 1], got 2.0
"""

from __future__ import annotations

import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, cast, get_type_hints, overload

from fedclade.core.errors import require

T = TypeVar("T")

Check = tuple[str, Any, bool, str]
"""Name of a setting, its value, whether the value satisfies a rule, and the rule in words.

See :func:`require`.
"""


@dataclass(frozen=True)
class Range:
    """Range of allowed values of a setting.

    Parameters
    ----------
    text
        The range in words, as the end of a message that begins with "NAME should be".
    holds
        Function that returns whether a value is in the range. It is not called with None, which
        means that the setting is unset.
    """

    text: str
    holds: Callable[[Any], bool]

    def or_auto(self) -> Range:
        """Return the range extended by the string ``"auto"``; other strings are not allowed."""
        return Range(
            f"{self.text}, or 'auto'",
            lambda value: value == "auto" if isinstance(value, str) else self.holds(value),
        )


def at_least(least: float, text: str = "") -> Range:
    """Return the range of values that are at least ``least``.

    ``text`` is the range in words; by default the words are derived from ``least``.
    """
    return Range(text or f"at least {least:g}", lambda value: value >= least)


def greater_than(bound: float, text: str = "") -> Range:
    """Return the range of values that are greater than ``bound``.

    ``text`` is the range in words; by default the words are derived from ``bound``.
    """
    return Range(text or f"greater than {bound:g}", lambda value: value > bound)


def one_of(*choices: object, text: str = "") -> Range:
    """Return the range that consists of the given choices.

    ``text`` is the range in words, by default the list of the choices in quotes.
    """
    return Range(text or " or ".join(map(repr, choices)), lambda value: value in choices)


_INTERVAL = re.compile(r"([\[(])(\S+), (\S+)([\])])")


def in_range(interval: str, text: str = "") -> Range:
    """Return the range of the values in an interval, such as ``"[0, 1)"`` or ``"(0, inf)"``.

    >>> in_range("[0, 1)").holds(1.0), in_range("(0, inf)").holds(1.0)
    (False, True)
    """
    matched = _INTERVAL.fullmatch(interval)
    if matched is None:
        raise ValueError(f"interval should have a form such as '[0, 1)', got {interval!r}")
    low = float(matched[2])
    high = float(matched[3])
    is_low_included = matched[1] == "["
    is_high_included = matched[4] == "]"

    def holds(value: float) -> bool:
        is_above = value >= low if is_low_included else value > low
        is_below = value <= high if is_high_included else value < high
        return is_above and is_below

    return Range(text or f"in {interval}", holds)


@dataclass(frozen=True)
class About:
    """Documentation, allowed values and other declarations about one field of a settings class.

    Parameters
    ----------
    doc
        Documentation of the setting, in one paragraph.
    allowed
        Allowed values; None if every value of the field's type is allowed.
    key
        Full key of the setting in a config, such as ``privacy.min_cluster_size``. By default, it is
        the name of the field in the section of its class.
    later
        Whether the setting was added in a later version than its class. The config of a run then
        records the setting only if it differs from its default, so that this config is equal to the
        config that an earlier version records for the same run.
    """

    doc: str
    allowed: Range | None = None
    key: str = ""
    later: bool = False


_ABOUT = "fedclade"
"""Key in a field's metadata under which its :class:`About` object is stored."""


def about(
    doc: str, allowed: Range | None = None, *, key: str = "", later: bool = False
) -> dict[str, About]:
    """Return the metadata for a dataclass field that is a setting; see :class:`About`.

    The function is for fields without a default, for which :func:`setting` cannot be used:
    ``clip_norm: float = field(metadata=about("..."))``.
    """
    text = " ".join(doc.split())
    return {_ABOUT: About(text, allowed, key, later)}


@overload
def setting(
    default: T, allowed: Range | None = None, *, doc: str, key: str = "", later: bool = False
) -> T: ...


@overload
def setting(
    *,
    factory: Callable[[], T],
    allowed: Range | None = None,
    doc: str,
    key: str = "",
    later: bool = False,
) -> T: ...


def setting(
    default: Any = MISSING,
    allowed: Range | None = None,
    *,
    doc: str,
    factory: Any = MISSING,
    key: str = "",
    later: bool = False,
) -> Any:
    """Return a dataclass field that declares a setting, for use in a settings class.

    Parameters
    ----------
    default
        Default of the setting.
    factory
        Function that returns the default; it replaces ``default`` for mutable values.
    allowed, doc, key, later
        See :class:`About`.
    """
    metadata = about(doc, allowed, key=key, later=later)
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def settings_of(kind: type[Any]) -> dict[str, tuple[Field[Any], About]]:
    """Return the settings of a class by name, each as a tuple of its field and its declarations.

    The result is empty if the class is not a settings class.
    """
    if not is_dataclass(kind):
        return {}
    return {
        each.name: (each, each.metadata[_ABOUT]) for each in fields(kind) if _ABOUT in each.metadata
    }


def setting_defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the defaults of a class's settings by name, without settings that have no default."""
    found = {name: default_of(each) for name, (each, _) in settings_of(kind).items()}
    return {name: default for name, default in found.items() if default is not MISSING}


def check_settings(settings: Any, section: str, *checks: Check) -> None:
    """Check that all settings of an object have allowed values.

    Parameters
    ----------
    settings
        An object of a settings class.
    section
        Name of the config section that the class describes, such as ``local``; empty for top-level
        settings.
    checks
        Further checks of settings that depend on each other, as for :func:`require`.

    Raises
    ------
    ConfigError
        If some settings are out of range; the message has a line for each setting.
    """
    require(*_range_checks(settings, section), *checks)


def _range_checks(settings: Any, section: str) -> Iterator[Check]:
    for name, (_, statements) in settings_of(type(settings)).items():
        value = getattr(settings, name)
        allowed = statements.allowed
        if allowed is None or value is None:
            continue
        key = statements.key or (f"{section}.{name}" if section else name)
        yield key, value, allowed.holds(value), allowed.text


def as_section(settings: Any, kind: type[Any] | None = None) -> dict[str, Any]:
    """Return the settings of an object as a section of a run's config.

    A setting that was added in a later version is left out if it has its default value, see
    :class:`About`.

    Parameters
    ----------
    settings
        An object of a settings class.
    kind
        A base class of the object's class, whose fields alone are returned; None: all fields.
    """
    section: dict[str, Any] = {}
    for each in fields(kind or settings):
        statements = each.metadata.get(_ABOUT)
        is_later = isinstance(statements, About) and statements.later
        value = getattr(settings, each.name)
        if not is_later or value != default_of(each):
            section[each.name] = _as_plain_value(value)
    return section


def _as_plain_value(value: Any) -> Any:
    """Return a copy of a setting's value; a dataclass object is converted to a dictionary."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if inspect.isroutine(value):  # a user's function, by the name under which it can be imported
        return f"{value.__module__}:{value.__qualname__}"
    return copy.deepcopy(value)


def in_section(settings: Any, section: str) -> dict[str, Any]:
    """Return the values of those settings of an object that belong to a section, by field name.

    A setting belongs to the config section that its key (:attr:`About.key`) names. Settings without
    an explicit key are left out.
    """
    return {
        name: getattr(settings, name)
        for name, (_, statements) in settings_of(type(settings)).items()
        if statements.key.startswith(f"{section}.")
    }


def default_of(each: Field[Any]) -> Any:
    """Return the default of a dataclass field, or ``dataclasses.MISSING`` if it has no default."""
    return each.default if each.default_factory is MISSING else each.default_factory()


# Functions for classes that describe a section of a config and take settings from other classes.


def values_of(settings: Any, kind: type[Any]) -> dict[str, Any]:
    """Return the values of the fields that an object shares with another dataclass, by name.

    The result can be passed to the other dataclass ``kind`` as keyword arguments.
    """
    names = {each.name for each in fields(kind)}
    return {
        each.name: getattr(settings, each.name) for each in fields(settings) if each.name in names
    }


def with_settings_of(kind: type[Any], section: str = "") -> Callable[[type[T]], type[T]]:
    """Return a decorator that adds the settings of another class to a settings class.

    A setting that the decorated class already has is not replaced. An added setting without a
    default gets the default None, so that a config may leave it out.

    Parameters
    ----------
    kind
        The settings class whose settings are added.
    section
        Name of a config section: only settings with a ``key`` in this section are added. Empty: all
        settings are added.
    """

    def decorated(taker: type[T]) -> type[T]:
        own = {each.name for each in fields(cast("Any", taker))}
        hints = get_type_hints(kind)
        names = ("__module__", "__qualname__", "__doc__")
        namespace: dict[str, Any] = {name: getattr(taker, name) for name in names}
        annotations: dict[str, Any] = {}
        for name, (each, statements) in settings_of(kind).items():
            if name in own or (section and not statements.key.startswith(f"{section}.")):
                continue
            namespace[name] = _make_optional(each)
            is_required = default_of(each) is MISSING
            annotations[name] = hints[name] | None if is_required else hints[name]
        extended = type(taker.__name__, (taker,), {**namespace, "__annotations__": annotations})
        return cast("type[T]", dataclass(frozen=True, kw_only=True)(extended))

    return decorated


def _make_optional(each: Field[Any]) -> Any:
    """Return a copy of a dataclass field that has the default None if it had no default."""
    if each.default_factory is not MISSING:
        return field(default_factory=each.default_factory, metadata=each.metadata)
    default = None if each.default is MISSING else each.default
    return field(default=default, metadata=each.metadata)


# Docstrings.

WIDTH = 100
"""Largest number of characters in a line of a docstring."""

_HEADING = re.compile(r"^[A-Z][A-Za-z ]+\n-{3,}$", re.MULTILINE)


def document_settings(kind: type[T]) -> type[T]:
    """Add a section ``Parameters`` with all settings of a class to the class docstring.

    The function is a class decorator.
    """
    doc = inspect.cleandoc(kind.__doc__ or "")
    heading = _HEADING.search(doc)
    end = heading.start() if heading else len(doc)
    parts = (doc[:end].strip(), parameters_section(kind), doc[end:].strip())
    kind.__doc__ = "\n\n".join(part for part in parts if part) + "\n"
    return kind


def parameters_section(kind: type[Any]) -> str:
    """Return the docstring section ``Parameters`` with the documentation of a class's settings.

    The result is empty for a class without settings.
    """
    entries: list[str] = []
    for name, (_, statements) in settings_of(kind).items():
        text = textwrap.fill(
            statements.doc, WIDTH - 8, break_long_words=False, break_on_hyphens=False
        )
        entries.append(f"{name}\n{textwrap.indent(text, '    ')}")
    return "\n".join(["Parameters", "----------", *entries]) if entries else ""
