"""Sweeps: searches for the settings of a config with the best score on validation data.

A sweep consists of trials. In a trial, values for some settings are drawn, and a run is made with
these values for each of several seeds. Optuna draws the values.

The command line imports this package, which imports configs and reports.
"""

from fedclade.sweeps.result import SweepResult, TrialRow, short
from fedclade.sweeps.search import sweep
from fedclade.sweeps.space import Parameter, parse_over
from fedclade.sweeps.study import SAMPLERS, Outcome

__all__ = [
    "SAMPLERS",
    "Outcome",
    "Parameter",
    "SweepResult",
    "TrialRow",
    "parse_over",
    "short",
    "sweep",
]
