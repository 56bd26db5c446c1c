"""Reports of runs and comparisons: terminal tables, Markdown, CSV, JSON, figures and HTML.

Only figures written to files need matplotlib. The subpackage :mod:`fedclade.report.page`, which
writes HTML pages, needs jinja2 and plotly. The package imports :mod:`fedclade.runs`, and is
imported by the command line and the network.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.report import style
    from fedclade.report.citations import cite_name, known_citations
    from fedclade.report.compare_methods import compare
    from fedclade.report.comparison import Comparison
    from fedclade.report.estimates import ComparisonRow, Estimate
    from fedclade.report.figures import (
        dendrogram_figure,
        norms_figure,
        save_figures,
        score_figure,
        similarity_figure,
    )
    from fedclade.report.formats import (
        NONE,
        count,
        duration,
        percent,
        shortened,
        significant,
        traffic,
    )
    from fedclade.report.gains import gain_tables, with_attributes
    from fedclade.report.notebook import html_of
    from fedclade.report.plots import plot_of
    from fedclade.report.progress import RunProgress, progress_bars
    from fedclade.report.run_citations import cite_runs
    from fedclade.report.score import Score, label_of
    from fedclade.report.significance import (
        Difference,
        PairedTest,
        PairedTests,
        corrected_difference,
        holm,
    )
    from fedclade.report.suite import LEVEL, Ranks, SuiteComparison, rank_figure, rank_methods
    from fedclade.report.tables import (
        add_figures,
        check_table,
        cluster_table,
        decision_tables,
        event_table,
        new_scores_table,
        new_table,
        newcomer_table,
        run_table,
        show_run,
        tolerate_missing_figures,
        tree_view,
    )
    from fedclade.report.terminal import Terminal

__all__ = [
    "LEVEL",
    "NONE",
    "Comparison",
    "ComparisonRow",
    "Difference",
    "Estimate",
    "PairedTest",
    "PairedTests",
    "Ranks",
    "RunProgress",
    "Score",
    "SuiteComparison",
    "Terminal",
    "add_figures",
    "check_table",
    "cite_name",
    "cite_runs",
    "cluster_table",
    "compare",
    "corrected_difference",
    "count",
    "decision_tables",
    "dendrogram_figure",
    "duration",
    "event_table",
    "gain_tables",
    "holm",
    "html_of",
    "known_citations",
    "label_of",
    "new_scores_table",
    "new_table",
    "newcomer_table",
    "norms_figure",
    "percent",
    "plot_of",
    "progress_bars",
    "rank_figure",
    "rank_methods",
    "run_table",
    "save_figures",
    "score_figure",
    "shortened",
    "show_run",
    "significant",
    "similarity_figure",
    "style",
    "tolerate_missing_figures",
    "traffic",
    "tree_view",
    "with_attributes",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
