"""Trackers: callbacks that log a run with TensorBoard, MLflow or Weights & Biases.

:class:`PrometheusExporter` serves the metrics of a run to Prometheus instead.

The packages of these services are imported only when a tracker is created. The command line, the
network and reports may import this package; it imports runs and core.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
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

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
