"""What a run leaves behind, in memory and on disk."""

from fedclade.store.run import Run, SimilarityMatrix

__all__ = ["Run", "SimilarityMatrix"]
