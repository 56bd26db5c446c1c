"""FedGroup: Duan et al. 2020."""

from __future__ import annotations

from fedclade.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()
