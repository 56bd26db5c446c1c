"""Trackers: callbacks that log a run with TensorBoard, MLflow or Weights & Biases.

:class:`PrometheusExporter` serves the metrics of a run to Prometheus instead.

The packages of these services are imported only when a tracker is created. The command line, the
network and reports may import this package; it imports runs and core.
"""

from fedclade.trackers.mlflow import MLflowTracker, TensorBoardTracker, WandbTracker
from fedclade.trackers.named import TRACKERS, build_callback
from fedclade.trackers.prometheus import PrometheusExporter
from fedclade.trackers.tracker import TAGS, Tracker, numbers_of, scores

__all__ = [
    "TAGS",
    "TRACKERS",
    "MLflowTracker",
    "PrometheusExporter",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "build_callback",
    "numbers_of",
    "scores",
]
