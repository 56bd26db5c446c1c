"""Configs in TOML files: functions that read, override and check configs, and run them in batches.

A config describes one run. A scenario is a config with several algorithms to compare. A batch is a
series of runs of several configs, each with several seeds. The package is used by the command line
and by runs over a network, and imports the packages whose settings it checks.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.config.batch import Batch
    from fedclade.config.build import Building, build_schema
    from fedclade.config.check import WRITTEN_ONLY, check_config, read_config
    from fedclade.config.data import is_own_data, with_files_found
    from fedclade.config.labels import check_labels, run_name
    from fedclade.config.scenario import (
        Printed,
        Scenario,
        Source,
        Tuning,
        is_scenario,
        known_scales,
        read_scenario,
        read_scenarios,
    )
    from fedclade.config.settings import SECTIONS, Config, TopLevel
    from fedclade.config.shipped import config_folder
    from fedclade.config.starter import TableFiles, write_starter
    from fedclade.config.toml_files import (
        apply_overrides,
        as_override,
        find_config,
        find_configs,
        read_toml,
    )

__all__ = [
    "SECTIONS",
    "WRITTEN_ONLY",
    "Batch",
    "Building",
    "Config",
    "Printed",
    "Scenario",
    "Source",
    "TableFiles",
    "TopLevel",
    "Tuning",
    "apply_overrides",
    "as_override",
    "build_schema",
    "check_config",
    "check_labels",
    "config_folder",
    "find_config",
    "find_configs",
    "is_own_data",
    "is_scenario",
    "known_scales",
    "read_config",
    "read_scenario",
    "read_scenarios",
    "read_toml",
    "run_name",
    "with_files_found",
    "write_starter",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
