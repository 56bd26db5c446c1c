"""Experiments of the paper on FedGroup, and the functions that measure and draw each experiment.

The paper is Duan et al. 2020, "FedGroup: efficient clustered federated learning"
(arXiv:2010.06870).
"""

from fedclade_papers.experiment import experiments_of
from fedclade_papers.fedgroup.classes import measure_classes
from fedclade_papers.fedgroup.distances import measure_distances
from fedclade_papers.fedgroup.figures import (
    draw_best,
    draw_classes,
    draw_distances,
    draw_rounds,
    draw_statistics,
)
from fedclade_papers.fedgroup.methods import measure_best, measure_joining, measure_rounds
from fedclade_papers.fedgroup.tasks import TABLES, measure_statistics

EXPERIMENTS = experiments_of(
    TABLES,
    {
        "fedgroup-table1": (measure_classes, draw_classes),
        "fedgroup-fig1": (measure_classes, draw_classes),
        "fedgroup-table2": (measure_statistics, draw_statistics),
        "fedgroup-table3": (measure_best, draw_best),
        "fedgroup-eq10": (measure_joining, draw_best),
        "fedgroup-fig3-4": (measure_rounds, draw_rounds),
        "fedgroup-fig5-edc": (measure_distances, draw_distances),
    },
)

__all__ = ["EXPERIMENTS"]
