"""The tables and figures of the papers, measured again: the papers' own numbers beside ours.

The command line imports it. It uses the library as its users do, and no other room depends on it.
"""

from fedclade.papers import cfl, fedgroup, fl_hc
from fedclade.papers.experiment import Bench, Experiment, Scale, Settings
from fedclade.papers.outcome import Claim, Outcome, Row

EXPERIMENTS = {each.name: each for each in (*cfl.EXPERIMENTS, *fl_hc.EXPERIMENTS, *fedgroup.EXPERIMENTS)}

__all__ = ["EXPERIMENTS", "Bench", "Claim", "Experiment", "Outcome", "Row", "Scale", "Settings"]
