"""Sweeps and advice: series of runs that search for settings, or for a method.

A sweep searches for the settings of a config with the best score on validation data. It consists
of trials. In a trial, values for some settings are drawn, and a run is made with
these values for each of several seeds. Optuna draws the values. Advice is the
method that suits the clients' data best, with its expected gain: see :func:`fedclade.advise`. A
tuned comparison runs methods on several data sets, and tunes each of them with the same budget.

The command line imports this package, which imports configs and reports.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.sweeps.advice import Advice, Gain
    from fedclade.sweeps.advisor import advise
    from fedclade.sweeps.result import SweepResult, TrialRow, short
    from fedclade.sweeps.search import sweep
    from fedclade.sweeps.space import Parameter, parse_over
    from fedclade.sweeps.study import SAMPLERS, Outcome
    from fedclade.sweeps.tuned import (
        TunedComparison,
        TunedRun,
        read_folder,
        read_table,
        select_methods,
        write_table,
    )
    from fedclade.sweeps.tuned_results import SetResults, TunedResults, holm

__all__ = [
    "SAMPLERS",
    "Advice",
    "Gain",
    "Outcome",
    "Parameter",
    "SetResults",
    "SweepResult",
    "TrialRow",
    "TunedComparison",
    "TunedResults",
    "TunedRun",
    "advise",
    "holm",
    "parse_over",
    "read_folder",
    "read_table",
    "select_methods",
    "short",
    "sweep",
    "write_table",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
