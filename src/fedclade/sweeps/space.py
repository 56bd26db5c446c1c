"""Search space of a sweep: the settings of a config that are varied, each with its values."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedclade.config import as_override
from fedclade.core import ConfigError, checked, shown

COUNTS = ("local.epochs",)
"""Settings that accept fractions, but whose ranges with whole ends mean whole numbers."""

EXAMPLES = "local.lr=0.01..0.3(log), local.epochs=1..5 or model.name=mlp,cnn"

_RANGE = re.compile(r"(?P<low>.*?)\.\.(?P<high>[^()]*)(?P<log>\(log\))?")

_SET_BY_THE_SWEEP = {
    "seed": "use --seeds to set the number of runs of each trial",
    "evaluate_validation": "a sweep always sets it to true",
}


@dataclass(frozen=True)
class Parameter:
    """Setting of a config that a sweep varies, in a range of numbers or among given values.

    Parameters
    ----------
    key
        Key of the setting, as in the option ``--set``, such as ``local.lr``.
    low, high
        Ends of the range, which are included. If both are whole numbers, only whole numbers are
        drawn.
    log
        Whether values are drawn on a logarithmic scale.
    values
        The listed values, if the setting is not varied in a range: a mapping from the text of each
        value, which Optuna draws, to the value itself. None for a range.
    """

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    values: Mapping[str, Any] | None = None

    @property
    def whole(self) -> bool:
        """Whether the setting is varied in a range of whole numbers."""
        return self.values is None and isinstance(self.low, int)

    @property
    def grid(self) -> Sequence[Any]:
        """All values of the setting for a grid search, as Optuna's study stores them.

        Raises
        ------
        ConfigError
            If the setting is varied in a range of floats, which has no finite number of values.
        """
        if self.values is not None:
            return [*self.values]
        if self.whole:
            return range(int(self.low), int(self.high) + 1)
        low = f"{self.low:g}"
        high = f"{self.high:g}"
        raise ConfigError(
            f"--over {self.key}={low}..{high}: a grid needs single values; list them, such as "
            f"{self.key}={low},{high}"
        )

    def override(self, drawn: Any) -> str:
        """Return a drawn value in the form of the option ``--set``, such as ``local.lr=0.1``."""
        value = drawn if self.values is None else self.values[drawn]
        return as_override(self.key, value)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the parameter as a dictionary, for the sweep's journal."""
        if self.values is not None:
            return {"key": self.key, "values": [*self.values]}
        return {"key": self.key, "low": self.low, "high": self.high, "log": self.log}


@checked()
def parse_over(over: Sequence[str] | Mapping[str, Any]) -> list[Parameter]:
    """Parse the arguments of the option ``--over``, which name the settings that a sweep varies.

    ``key=low..high`` is a range of floats, or of whole numbers if both ends are whole numbers. With
    ``(log)`` at its end, values are drawn on a logarithmic scale. ``key=a,b,c`` is a choice among
    values, which are written in TOML; a value that is not valid TOML is taken as a string.

    Parameters
    ----------
    over
        Arguments in this form; or a mapping from each key to the text after the equals sign, or to
        a list of values.

    Returns
    -------
    list of Parameter
        A parameter for each argument, in the given order.

    Raises
    ------
    ConfigError
        If there is no argument, or if arguments are invalid; the message has a line for each
        problem.
    """
    is_mapping = isinstance(over, Mapping)
    pairs = list(over.items()) if is_mapping else [_split_pair(text) for text in over]
    parameters: list[Parameter] = []
    problems: list[str] = []
    for key, text in pairs:
        try:
            parameters.append(_parse_parameter(key.strip(), text))
        except ConfigError as error:
            problems.append(str(error))
    keys = [key.strip() for key, _ in pairs]
    repeated = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    problems += [f"--over {key} is given more than once; give each key once" for key in repeated]
    if not pairs:
        problems.append(
            f"a sweep needs at least one setting to vary; give --over, such as {EXAMPLES}"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return parameters


Check = Callable[[list[str]], object]
"""Function that raises a ConfigError if a config does not accept the given overrides."""


def fitted(parameters: Sequence[Parameter], check: Check) -> list[Parameter]:
    """Convert ranges of whole numbers into ranges of floats where the config accepts floats.

    A range such as ``local.lr=1..2`` is meant as a range of floats although its ends are whole
    numbers.

    Parameters
    ----------
    parameters
        The varied settings.
    check
        Function that raises a ConfigError if the config does not accept an override.
    """
    result: list[Parameter] = []
    for parameter in parameters:
        if parameter.whole and _accepts_floats(parameter, check):
            low = float(parameter.low)
            high = float(parameter.high)
            result.append(replace(parameter, low=low, high=high))
        else:
            result.append(parameter)
    return result


def _accepts_floats(parameter: Parameter, check: Check) -> bool:
    """Return whether a range with whole ends means floats, since the config accepts floats."""
    if parameter.key in COUNTS:
        return False
    try:
        check([parameter.override(parameter.low + 0.5)])
    except ConfigError:
        return False
    return True


def check_values(parameters: Sequence[Parameter], check: Check) -> None:
    """Check that a config accepts both ends of each range, and each listed value.

    Raises
    ------
    ConfigError
        If the config does not accept an end or a value; the message has a line for each problem.
    """
    problems: dict[str, str] = {}
    for parameter in parameters:
        ends = [parameter.low, parameter.high] if parameter.values is None else [*parameter.values]
        for end in ends:
            override = parameter.override(end)
            try:
                check([override])
            except ConfigError as error:
                # A problem of the config itself is the same for all overrides: report it once.
                for line in str(error).splitlines():
                    problems.setdefault(line, f"--over {override}: {line}")
    if problems:
        raise ConfigError("\n".join(problems.values()))


def _split_pair(text: str) -> tuple[str, str]:
    """Split an argument ``key=values`` of the option ``--over`` into the key and the values."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise ConfigError(
            f"--over takes key=low..high or key=a,b,c, such as {EXAMPLES}; got {shown(text)}"
        )
    return key, value.strip()


def _parse_parameter(key: str, text: Any) -> Parameter:
    """Parse the range or the values of a varied setting, given as a text or a list of values."""
    what = f"--over {key}={text}"
    if key in _SET_BY_THE_SWEEP:
        raise ConfigError(f"{what}: {key} cannot be varied; {_SET_BY_THE_SWEEP[key]}")
    if not isinstance(text, str):
        return _make_choice(key, list(text), what)
    if ".." not in text or "," in text:
        return _make_choice(key, _parse_values(text), what)
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{what}: a range should be low..high or low..high(log), such as 0.01..0.3(log)"
        )
    low = _parse_number(match["low"], "low", what)
    high = _parse_number(match["high"], "high", what)
    if isinstance(low, float) or isinstance(high, float):
        low = float(low)
        high = float(high)
    if low >= high:
        raise ConfigError(f"{what}: low should be less than high, got {low} and {high}")
    if match["log"] and low <= 0:
        raise ConfigError(
            f"{what}: a logarithmic range should begin above 0, got {low}; leave out (log)"
        )
    return Parameter(key, low, high, bool(match["log"]))


def _parse_number(text: str, name: str, what: str) -> int | float:
    """Parse one end of a range as a number.

    Parameters
    ----------
    text
        Text of the end.
    name
        Name of the end in error messages: ``low`` or ``high``.
    what
        The whole argument, such as ``--over local.lr=0.01..0.3``, with which error messages begin.
    """
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


def _make_choice(key: str, values: Sequence[Any], what: str) -> Parameter:
    """Create a setting that is varied among listed values.

    Parameters
    ----------
    key
        Key of the setting.
    values
        The listed values, of which at least two must differ.
    what
        The whole argument, such as ``--over model.name=mlp,cnn``, with which error messages begin.
    """
    by_text: dict[str, Any] = {}
    for value in values:
        text = value if isinstance(value, str) else as_override("", value).removeprefix("=")
        by_text[text] = value
    if len(by_text) < 2:
        raise ConfigError(
            f"{what}: give at least 2 different values, key=a,b,c, or a range, key=low..high"
        )
    return Parameter(key, values=by_text)


def _parse_values(text: str) -> list[Any]:
    """Parse values that are separated by commas.

    If the text is valid TOML inside brackets, it is parsed as one TOML list. Otherwise each value
    is parsed separately, and a value that is not valid TOML is taken as a string.
    """
    try:
        return tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        return [_parse_value(part.strip()) for part in text.split(",")]


def _parse_value(text: str) -> Any:
    """Parse a value in TOML; return the text itself if it is not valid TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def values_of(parameters: Sequence[Parameter], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values that Optuna has drawn for a trial to values of the config, by key."""
    values: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.key in drawn:
            value = drawn[parameter.key]
            if parameter.values is not None:
                value = parameter.values[value]
            values[parameter.key] = value
    return values


def overrides_of(parameters: Sequence[Parameter], drawn: Mapping[str, Any]) -> list[str]:
    """Return the texts that set a trial's drawn values, in the form of the option ``--set``."""
    return [parameter.override(drawn[parameter.key]) for parameter in parameters]
