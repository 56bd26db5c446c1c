"""Sweeps and advice: series of runs that search for settings, or for a method.

A sweep searches for the settings of a config with the best score on validation data. It consists
of trials. In a trial, values for some settings are drawn, and a run is made with
these values for each of several seeds. Optuna draws the values. Advice is the
method that suits the clients' data best, with its expected gain: see :func:`fedclade.advise`.

The command line imports this package, which imports configs and reports.
"""

from fedclade.sweeps.advice import Advice, Gain
from fedclade.sweeps.advisor import advise
from fedclade.sweeps.result import SweepResult, TrialRow, short
from fedclade.sweeps.search import sweep
from fedclade.sweeps.space import Parameter, parse_over
from fedclade.sweeps.study import SAMPLERS, Outcome

__all__ = [
    "SAMPLERS",
    "Advice",
    "Gain",
    "Outcome",
    "Parameter",
    "SweepResult",
    "TrialRow",
    "advise",
    "parse_over",
    "short",
    "sweep",
]
