"""What a run and a comparison look like: tables for the terminal, Markdown, CSV and JSON, and figures.

Nothing here needs matplotlib until a figure is drawn.
"""

from fedclade.report.comparison import Comparison
from fedclade.report.dendrogram import dendrogram_figure
from fedclade.report.estimates import ComparisonRow, Estimate
from fedclade.report.figures import accuracy_figure, norms_figure, save_figures
from fedclade.report.heat_maps import similarity_figure
from fedclade.report.show import add_figures, show_run, without_figures_if_need_be
from fedclade.report.suite import SuiteComparison
from fedclade.report.tables import (
    check_table,
    cluster_table,
    decision_tables,
    event_table,
    has_splits,
    run_table,
    tree_view,
)

__all__ = [
    "Comparison",
    "ComparisonRow",
    "Estimate",
    "SuiteComparison",
    "accuracy_figure",
    "add_figures",
    "check_table",
    "cluster_table",
    "decision_tables",
    "dendrogram_figure",
    "event_table",
    "has_splits",
    "norms_figure",
    "run_table",
    "save_figures",
    "show_run",
    "similarity_figure",
    "tree_view",
    "without_figures_if_need_be",
]
