"""Configs in TOML: reading, overriding and checking them, and scenarios and batches of runs.

The command line and the network import this package; it imports the packages whose settings it
checks.
"""

from fedclade.config.batch import Batch, check_labels, run_name
from fedclade.config.build import Building, build_schema
from fedclade.config.check import WRITTEN_ONLY, check_config, read_config
from fedclade.config.scenario import (
    Printed,
    Scenario,
    is_scenario,
    known_scales,
    read_scenario,
    read_scenarios,
)
from fedclade.config.settings import SECTIONS, Config, TopLevel
from fedclade.config.toml_files import (
    apply_overrides,
    as_override,
    config_folder,
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
    "TopLevel",
    "apply_overrides",
    "as_override",
    "build_schema",
    "check_config",
    "check_labels",
    "config_folder",
    "find_config",
    "find_configs",
    "is_scenario",
    "known_scales",
    "read_config",
    "read_scenario",
    "read_scenarios",
    "read_toml",
    "run_name",
]
