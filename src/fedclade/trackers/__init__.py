"""Trackers: callbacks that write a run to where others are followed: TensorBoard, MLflow, Weights & Biases.

None of these packages is imported before a tracker of it is made. The command line, the network and reports may import
this room; it imports runs and core.
"""

from fedclade.trackers.mlflow import MLflowTracker, TensorBoardTracker, WandbTracker
from fedclade.trackers.named import TRACKERS, build_callback
from fedclade.trackers.tracker import TAGS, Tracker, numbers_of, scores

__all__ = [
    "TAGS",
    "TRACKERS",
    "MLflowTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "build_callback",
    "numbers_of",
    "scores",
]
