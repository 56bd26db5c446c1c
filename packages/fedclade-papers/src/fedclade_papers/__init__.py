"""Experiments that repeat tables and figures of three papers on clustered federated learning.

There is a folder for each paper. Its file ``experiments.toml`` contains the settings, claims and
numbers of the paper, and its modules measure the experiments and draw their figures. fedclade's
command line imports this package for the command ``fedclade reproduce``. The package uses only the
public names of fedclade, and no other package depends on it.
"""

from fedclade_papers import cfl, fedgroup, fl_hc
from fedclade_papers.cache import ResultCache, Settings, is_at_hand
from fedclade_papers.experiment import Experiment, Scale
from fedclade_papers.markdown import (
    change_table,
    circumstances,
    claim_table,
    row_table,
    summary_lines,
    to_csv,
    to_markdown,
)
from fedclade_papers.outcome import Claim, Outcome, Row
from fedclade_papers.result import Result, measure, missing_data

EXPERIMENTS = {
    each.name: each for each in (*cfl.EXPERIMENTS, *fl_hc.EXPERIMENTS, *fedgroup.EXPERIMENTS)
}

__all__ = [
    "EXPERIMENTS",
    "Claim",
    "Experiment",
    "Outcome",
    "Result",
    "ResultCache",
    "Row",
    "Scale",
    "Settings",
    "change_table",
    "circumstances",
    "claim_table",
    "is_at_hand",
    "measure",
    "missing_data",
    "row_table",
    "summary_lines",
    "to_csv",
    "to_markdown",
]
