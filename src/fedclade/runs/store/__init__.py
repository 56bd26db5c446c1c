"""Results of a run, in memory and on disk.

A run folder contains a run's config, its checkpoints while the run is in progress, and its results:
tables, events, the parameter tree with the clusters' models, and a summary.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.runs.store.checkpoint import Checkpoint
    from fedclade.runs.store.export import export_adapter, export_model
    from fedclade.runs.store.folder import RunFolder
    from fedclade.runs.store.kept_round import KeptRound
    from fedclade.runs.store.load_export import load_export
    from fedclade.runs.store.run import Run
    from fedclade.runs.store.tree_files import SimilarityMatrix

__all__ = [
    "Checkpoint",
    "KeptRound",
    "Run",
    "RunFolder",
    "SimilarityMatrix",
    "export_adapter",
    "export_model",
    "load_export",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
