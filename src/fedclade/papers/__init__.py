"""The tables and figures of the papers, measured again: the papers' own numbers beside ours."""

from fedclade.papers import cfl, fedgroup, fl_hc
from fedclade.papers.experiment import Bench, Experiment, Scale, Settings
from fedclade.papers.outcome import Claim, Outcome, Row

EXPERIMENTS = {each.name: each for each in (*cfl.EXPERIMENTS, *fl_hc.EXPERIMENTS, *fedgroup.EXPERIMENTS)}

__all__ = ["EXPERIMENTS", "Bench", "Claim", "Experiment", "Outcome", "Row", "Scale", "Settings"]
