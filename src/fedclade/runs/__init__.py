"""Runs: ``simulate()``, round loop, history, checkpoints, run folder, availability, newcomers.

Reports, the network and the command line import this package. It imports all packages that a run
needs: data, models, training, algorithms, channel.
"""

from fedclade.runs.backend import Backend, fitted_task
from fedclade.runs.callbacks import (
    Callback,
    Callbacks,
    EndRecord,
    OnRound,
    RoundRecord,
    SplitRecord,
)
from fedclade.runs.checkpointer import Checkpointer
from fedclade.runs.churn import Churn, ComingAndGoing
from fedclade.runs.early_stopping import EarlyStopping
from fedclade.runs.example_inputs import by_own_examples, check_inputs_apart
from fedclade.runs.history import (
    History,
    check_validation,
    chosen_round,
    column_of,
    counting,
    metric_named,
    version_of,
    versions,
)
from fedclade.runs.models import (
    Maker,
    decide_stream,
    initial_models,
    model_name,
    module_for,
    target_of,
)
from fedclade.runs.newcomers import assign
from fedclade.runs.rounds import run_rounds
from fedclade.runs.settings import Every, RunOptions, RunSettings, Stream, settings_from
from fedclade.runs.simulation import simulate
from fedclade.runs.stopping import FINISH, Stopped
from fedclade.runs.store import Run, export_adapter, export_model, load_export
from fedclade.runs.store.contents import data_frame, events_of, without_unset
from fedclade.runs.store.manifest import CONFIG, read_run_config
from fedclade.runs.store.newcomers import Newcomers, read_newcomers, score_columns
from fedclade.runs.store.run import Row, check_free, is_finished, is_unfinished
from fedclade.runs.store.toml_text import to_toml
from fedclade.runs.store.tree_files import SimilarityMatrix

__all__ = [
    "CONFIG",
    "FINISH",
    "Backend",
    "Callback",
    "Callbacks",
    "Checkpointer",
    "Churn",
    "ComingAndGoing",
    "EarlyStopping",
    "EndRecord",
    "Every",
    "History",
    "Maker",
    "Newcomers",
    "OnRound",
    "RoundRecord",
    "Row",
    "Run",
    "RunOptions",
    "RunSettings",
    "SimilarityMatrix",
    "SplitRecord",
    "Stopped",
    "Stream",
    "assign",
    "by_own_examples",
    "check_free",
    "check_inputs_apart",
    "check_validation",
    "chosen_round",
    "column_of",
    "counting",
    "data_frame",
    "decide_stream",
    "events_of",
    "export_adapter",
    "export_model",
    "fitted_task",
    "initial_models",
    "is_finished",
    "is_unfinished",
    "load_export",
    "metric_named",
    "model_name",
    "module_for",
    "read_newcomers",
    "read_run_config",
    "run_rounds",
    "score_columns",
    "settings_from",
    "simulate",
    "target_of",
    "to_toml",
    "version_of",
    "versions",
    "without_unset",
]
