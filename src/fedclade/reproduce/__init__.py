"""The tables and figures of the papers, measured again: the papers' own numbers beside ours."""

from fedclade.reproduce import cfl, fedgroup, fl_hc
from fedclade.reproduce.experiment import Bench, Experiment, Scale, Settings
from fedclade.reproduce.outcome import Claim, Outcome, Row

EXPERIMENTS = {each.name: each for each in (*cfl.EXPERIMENTS, *fl_hc.EXPERIMENTS, *fedgroup.EXPERIMENTS)}

__all__ = ["EXPERIMENTS", "Bench", "Claim", "Experiment", "Outcome", "Row", "Scale", "Settings"]
