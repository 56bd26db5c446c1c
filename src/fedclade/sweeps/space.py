"""What a sweep varies: keys of a config, each with a range or a list of values."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedclade.config import as_override
from fedclade.core import ConfigError, checked, shown

EXAMPLES = "local.lr=0.01..0.3(log), local.epochs=1..5 or model.name=mlp,cnn"

_RANGE = re.compile(r"(?P<low>.*?)\.\.(?P<high>[^()]*)(?P<log>\(log\))?")

_SET_BY_THE_SWEEP = {"seed": "--seeds says how many runs each trial has", "evaluate_validation": "a sweep sets it"}


@dataclass(frozen=True)
class Parameter:
    """A key of a config that is varied: between two numbers, or among values.

    Parameters
    ----------
    key
        As ``--set`` has it, such as ``local.lr``.
    low, high
        The ends of the range, both of which may be drawn; whole numbers make a range of whole numbers.
    log
        Whether a range is drawn from on a logarithmic scale.
    values
        In place of a range: what to choose among, by its text.
    """

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    values: Mapping[str, Any] | None = None

    @property
    def whole(self) -> bool:
        """Whether it is a range of whole numbers."""
        return self.values is None and isinstance(self.low, int)

    @property
    def grid(self) -> Sequence[Any]:
        """All that a trial can have of it, as a study has it; a ConfigError if it is a range of floats."""
        if self.values is not None:
            return [*self.values]
        if self.whole:
            return range(int(self.low), int(self.high) + 1)
        low, high = f"{self.low:g}", f"{self.high:g}"
        raise ConfigError(
            f"--over {self.key}={low}..{high}: a grid needs single values; list them, such as {self.key}={low},{high}"
        )

    def override(self, drawn: Any) -> str:
        """Return what a study drew as ``--set`` takes it."""
        return as_override(self.key, drawn if self.values is None else self.values[drawn])

    def as_dict(self) -> dict[str, Any]:
        """Return it as a sweep's folder notes it."""
        if self.values is not None:
            return {"key": self.key, "values": [*self.values]}
        return {"key": self.key, "low": self.low, "high": self.high, "log": self.log}


@checked()
def parse_over(over: Sequence[str] | Mapping[str, Any]) -> list[Parameter]:
    """Return what a sweep varies, by what follows ``--over``.

    ``key=low..high`` is a range of floats, or of whole numbers if both ends are, ``key=low..high(log)`` one that is
    drawn from on a logarithmic scale, and ``key=a,b,c`` a choice among values of TOML, or else texts. A mapping has the
    keys with the same texts, or with lists of values.

    Raises
    ------
    ConfigError
        With all that is wrong, a line for each.
    """
    pairs = [_pair(text) for text in over] if not isinstance(over, Mapping) else [*over.items()]
    found: list[Parameter] = []
    problems: list[str] = []
    for key, text in pairs:
        try:
            found.append(_parameter(key.strip(), text))
        except ConfigError as error:
            problems.append(str(error))
    keys = [key.strip() for key, _ in pairs]
    problems += [f"--over {key}: give each key once" for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if not pairs:
        problems.append(f"a sweep needs something to vary; give --over, such as {EXAMPLES}")
    if problems:
        raise ConfigError("\n".join(problems))
    return found


Check = Callable[[list[str]], object]
"""Raises a ConfigError if a config cannot have some overrides."""


def fitted(parameters: Sequence[Parameter], check: Check) -> list[Parameter]:
    """Return parameters with ranges of floats where a config takes floats, though both ends are whole."""

    def takes_floats(parameter: Parameter) -> bool:
        try:
            check([parameter.override(parameter.low + 0.5)])
        except ConfigError:
            return False
        return True

    return [
        replace(each, low=float(each.low), high=float(each.high)) if each.whole and takes_floats(each) else each
        for each in parameters
    ]


def check_values(parameters: Sequence[Parameter], check: Check) -> None:
    """Check that a config can have both ends of each range, and each value; ``check`` takes overrides.

    Raises
    ------
    ConfigError
        With all that is wrong, a line for each.
    """
    problems: dict[str, str] = {}
    for parameter in parameters:
        ends = [parameter.low, parameter.high] if parameter.values is None else [*parameter.values]
        for end in ends:
            override = parameter.override(end)
            try:
                check([override])
            except ConfigError as error:
                for line in str(error).splitlines():
                    problems.setdefault(line, f"--over {override}: {line}")
    if problems:
        raise ConfigError("\n".join(problems.values()))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise ConfigError(f"--over takes key=low..high or key=a,b,c, such as {EXAMPLES}; got {shown(text)}")
    return key, value.strip()


def _parameter(key: str, text: Any) -> Parameter:
    what = f"--over {key}={text}"
    if key in _SET_BY_THE_SWEEP:
        raise ConfigError(f"{what}: {key} cannot be varied; {_SET_BY_THE_SWEEP[key]}")
    if not isinstance(text, str):
        return _choice(key, list(text), what)
    if ".." not in text or "," in text:
        return _choice(key, _values(text), what)
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{what}: a range is low..high or low..high(log), such as 0.01..0.3(log)")
    low, high = (_number(match[name], name, what) for name in ("low", "high"))
    if isinstance(low, float) or isinstance(high, float):
        low, high = float(low), float(high)
    if low >= high:
        raise ConfigError(f"{what}: low should be less than high, got {low} and {high}")
    if match["log"] and low <= 0:
        raise ConfigError(f"{what}: a logarithmic range should begin above 0, got {low}; leave out (log)")
    return Parameter(key, low, high, bool(match["log"]))


def _number(text: str, name: str, what: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{what}: {name} should be a number, got {shown(text.strip())}")
    return number


def _choice(key: str, values: Sequence[Any], what: str) -> Parameter:
    by_text = {value if isinstance(value, str) else as_override("", value)[1:]: value for value in values}
    if len(by_text) < 2:
        raise ConfigError(f"{what}: give at least 2 different values, key=a,b,c, or a range, key=low..high")
    return Parameter(key, values=by_text)


def _values(text: str) -> list[Any]:
    """Return values between commas: of TOML all together, or else each of TOML or a text."""
    try:
        return tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        return [_value(each.strip()) for each in text.split(",")]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def values_of(parameters: Sequence[Parameter], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a study drew as the config has it, by key."""
    known = [each for each in parameters if each.key in drawn]
    return {each.key: drawn[each.key] if each.values is None else each.values[drawn[each.key]] for each in known}


def overrides_of(parameters: Sequence[Parameter], drawn: Mapping[str, Any]) -> list[str]:
    """Return what a study drew as ``--set`` takes it."""
    return [parameter.override(drawn[parameter.key]) for parameter in parameters]
