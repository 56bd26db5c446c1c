"""CFL: Sattler, Müller, Samek 2019."""

from __future__ import annotations

from fedclade.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()
