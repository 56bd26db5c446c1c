"""Sweeps: search for the settings of a config that do best on validation data.

The command line imports it; it imports configs, whose runs a sweep makes, and reports, which it ends in.
"""

from fedclade.sweeps.result import SweepResult, TrialRow, short
from fedclade.sweeps.search import sweep
from fedclade.sweeps.space import Parameter, parse_over
from fedclade.sweeps.study import SAMPLERS, Outcome

__all__ = ["SAMPLERS", "Outcome", "Parameter", "SweepResult", "TrialRow", "parse_over", "short", "sweep"]
