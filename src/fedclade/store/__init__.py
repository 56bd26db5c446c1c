"""What a run leaves behind, in memory and on disk."""

from fedclade.store.checkpoint import Checkpoint
from fedclade.store.folder import RunFolder
from fedclade.store.run import Run, SimilarityMatrix

__all__ = ["Checkpoint", "Run", "RunFolder", "SimilarityMatrix"]
