"""What a run leaves behind, in memory and on disk."""

from fedclade.store.export import export_model
from fedclade.store.run import Run, SimilarityMatrix

__all__ = ["Run", "SimilarityMatrix", "export_model"]
