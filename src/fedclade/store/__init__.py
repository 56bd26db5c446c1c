"""What a run leaves behind, in memory and on disk."""

from fedclade.store.checkpoint import Checkpoint
from fedclade.store.export import export_model
from fedclade.store.folder import RunFolder
from fedclade.store.run import Run
from fedclade.store.similarities import SimilarityMatrix

__all__ = ["Checkpoint", "Run", "RunFolder", "SimilarityMatrix", "export_model"]
