"""Experiments of the CFL papers, and the functions that measure and draw each experiment.

The papers are Sattler, Müller and Samek 2019, "Clustered Federated Learning", and the workshop
paper of the same year.
"""

from pathlib import Path

from fedclade_papers.cfl import figures, gaps, norms, splits, theory, toys
from fedclade_papers.experiment import experiments_of, read_tables

EXPERIMENTS = experiments_of(
    read_tables(Path(__file__).with_name("experiments.toml")),
    {
        "cfl-fig1-xor": (toys.measure_xor, figures.draw_xor),
        "cfl-fig2-paths": (toys.measure_paths, figures.draw_paths),
        "cfl-fig3-theory": (theory.measure, figures.draw_theory),
        "cfl-fig5-data": (gaps.measure_data, figures.draw_data),
        "cfl-fig6-rounds": (gaps.measure_rounds, figures.draw_rounds),
        "cfl-fig7-norms": (norms.measure, figures.draw_norms),
        "cfl-fig7-steps": (norms.measure_steps, figures.draw_steps),
        "cfl-fig8-cifar": (splits.measure_cifar, figures.draw_cifar),
        "cfl-fig9-agnews": (splits.measure_agnews, figures.draw_agnews),
    },
)

__all__ = ["EXPERIMENTS"]
