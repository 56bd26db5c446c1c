"""What was run: the config with every default, and the command that repeats it."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from fedclade.config import WRITTEN_ONLY, check_config
from fedclade.core import ConfigError, UntrustedNameError, flat, reading_folder
from fedclade.report.formats import NONE
from fedclade.report.page.section import Section, Table
from fedclade.report.run_view import RunView
from fedclade.runs import CONFIG, Run, to_toml

LONGEST_LIST = 80
"""Letters of a list in one line."""


def setting_section(view: RunView) -> Section:
    """Return the resolved config, the versions, and the command that repeats the run."""
    run = view.run
    versions = run.config.get("versions", {})
    tables = [Table("Versions", ["package", "version"], [[name, str(of)] for name, of in versions.items()])]
    texts = {"Config, with every default filled in": _SPREAD_LIST.sub(_in_one_line, _as_toml(run))}
    if (command := repeat_command(view)) is not None:
        texts = {"The command that repeats the run": command, **texts}
        caption = "Everything that the run was made from. The same seed gives the same run."
    else:
        caption = "Everything that the run was made from; it is repeated by the same call, as it came from no config."
    return Section("config", "Config", caption, tables=tables if versions else [], texts=texts)


def repeat_command(view: RunView) -> str | None:
    """Return the command that repeats a run; None for one that was not made from a config."""
    if not _is_config(_as_toml(view.run)):
        return None
    config = CONFIG if view.folder is None else str(view.folder / CONFIG)
    return f"fedclade run {shlex.quote(config)}"


_SPREAD_LIST = re.compile(r"\[\n((?: {4}[^\n]*[^\n\[{],\n)+)\]")
"""A list as it is written with an entry a line, none of which has lines of its own."""


def _in_one_line(found: re.Match[str]) -> str:
    """Return a list in one line, if it is short."""
    entries = [line.strip().removesuffix(",") for line in found[1].splitlines()]
    line = f"[{', '.join(entries)}]"
    return line if len(line) <= LONGEST_LIST else found[0]


def _as_toml(run: Run) -> str:
    """Return a run's config without what only a run folder has."""
    config = {key: value for key, value in run.config.items() if key not in WRITTEN_ONLY}
    return to_toml(config).strip()


@lru_cache
def _is_config(toml: str) -> bool:
    """Return whether a run can be made from a config; cached, as the page of a run in progress is built often."""
    try:
        with reading_folder(trust=False):  # to show a page must run no code of whoever wrote the folder
            check_config(tomllib.loads(toml))
    except UntrustedNameError:
        return True
    except ConfigError:
        return False
    return True


def as_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a config as text, by dotted names.

    >>> as_texts({"seed": 1, "model": {"freeze": ["conv1.*", "conv2.*"], "adapter": {"rank": 8}}})
    {'seed': '1', 'model.freeze': 'conv1.*, conv2.*', 'model.adapter.rank': '8'}
    """
    settings = flat({key: value for key, value in config.items() if key not in WRITTEN_ONLY})
    return {
        key: (", ".join(map(str, cast("list[Any]", value))) or NONE) if isinstance(value, list) else str(value)
        for key, value in settings.items()
    }
