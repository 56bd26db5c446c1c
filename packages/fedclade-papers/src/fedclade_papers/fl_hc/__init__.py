"""Experiments of the paper on FL+HC, and the functions that measure and draw each experiment.

The paper is Briggs, Fan and Andras 2020, "Federated learning with hierarchical clustering of local
updates".
"""

from pathlib import Path

from fedclade_papers.experiment import experiments_of, read_tables
from fedclade_papers.fl_hc.figures import draw_cells, draw_curves, draw_heights
from fedclade_papers.fl_hc.tables import (
    measure_curves,
    measure_fractions,
    measure_iid,
    measure_linkages,
)

EXPERIMENTS = experiments_of(
    read_tables(Path(__file__).with_name("experiments.toml")),
    {
        "flhc-iid": (measure_iid, draw_heights),
        **{f"flhc-table{number}": (measure_fractions, draw_cells) for number in (1, 2, 3)},
        "flhc-cohort": (measure_fractions, draw_cells),
        **{f"flhc-table{number}": (measure_linkages, draw_cells) for number in (4, 5, 6)},
        "flhc-fig1-6": (measure_curves, draw_curves),
    },
)

__all__ = ["EXPERIMENTS"]
