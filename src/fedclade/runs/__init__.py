"""Execution of federated runs, in a simulation and over a network.

A run is one execution of an algorithm, from round 1 to its last round. This package contains
:func:`simulate`, the round loop, the history of results, checkpoints, the run folder, the
availability of clients, and the assignment of models to newcomers (clients that join after
training). Reports, the network and the command line import this package.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.runs.assembly import AssembledRun, Connected, Deployment, assemble_run
    from fedclade.runs.backend import Backend, fitted_task
    from fedclade.runs.best_round import chosen_round, column_of, metric_named
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
    from fedclade.runs.divergence import ADVICE, diverged_clients
    from fedclade.runs.early_stopping import EarlyStopping
    from fedclade.runs.example_inputs import PRIVATE_CLIENTS, by_own_examples, check_inputs_apart
    from fedclade.runs.gain_outputs import (
        predict_in_parts,
        predict_trivially,
        without_unfit_baseline,
    )
    from fedclade.runs.gains import explain_missing_cluster_model, store_gains
    from fedclade.runs.history import History, check_validation, counting, version_of, versions
    from fedclade.runs.live_log import LIVE_METRICS, FollowedRun, LiveLog, Progress
    from fedclade.runs.models import (
        SHARE_OF_UPDATES,
        Maker,
        StreamChoice,
        choose_network_stream,
        decide_network_stream,
        decide_stream,
        initial_models,
        model_name,
        module_for,
        target_of,
    )
    from fedclade.runs.newcomers import assign
    from fedclade.runs.onnx_export import export_onnx
    from fedclade.runs.prediction import (
        FILE_TYPES,
        NewScores,
        Predictions,
        check_table_file,
        evaluate,
        predict,
    )
    from fedclade.runs.references import REFERENCES_LOG, has_begun_references, lacks_references
    from fedclade.runs.rounds import run_rounds
    from fedclade.runs.server_end import ServerEnd
    from fedclade.runs.settings import (
        Every,
        RunOptions,
        RunSettings,
        Stream,
        TopSettings,
        settings_from,
    )
    from fedclade.runs.simulation import simulate
    from fedclade.runs.stopping import FINISH, Stopped
    from fedclade.runs.store import Run, export_adapter, export_model, load_export
    from fedclade.runs.store.contents import data_frame, without_nan, without_unset
    from fedclade.runs.store.event_rows import events_of
    from fedclade.runs.store.export import serves_own
    from fedclade.runs.store.gains import (
        ALONE,
        CLUSTER,
        MODELS,
        ONE_MODEL,
        OWN,
        TRIVIAL,
        ClientGains,
        Gains,
    )
    from fedclade.runs.store.manifest import CONFIG, read_run_config
    from fedclade.runs.store.newcomers import Newcomers, read_newcomers, score_columns
    from fedclade.runs.store.run import EVENTS, SCHEMA, Row, check_free, is_finished, is_unfinished
    from fedclade.runs.store.served_models import serves_mixtures
    from fedclade.runs.store.toml_text import to_toml
    from fedclade.runs.store.tree_files import SimilarityMatrix
    from fedclade.runs.target_scale import clip_by_default, target_scale_of, with_targets_for

__all__ = [
    "ADVICE",
    "ALONE",
    "CLUSTER",
    "CONFIG",
    "EVENTS",
    "FILE_TYPES",
    "FINISH",
    "LIVE_METRICS",
    "MODELS",
    "ONE_MODEL",
    "OWN",
    "PRIVATE_CLIENTS",
    "REFERENCES_LOG",
    "SCHEMA",
    "SHARE_OF_UPDATES",
    "TRIVIAL",
    "AssembledRun",
    "Backend",
    "Callback",
    "Callbacks",
    "Checkpointer",
    "Churn",
    "ClientGains",
    "ComingAndGoing",
    "Connected",
    "Deployment",
    "EarlyStopping",
    "EndRecord",
    "Every",
    "FollowedRun",
    "Gains",
    "History",
    "LiveLog",
    "Maker",
    "NewScores",
    "Newcomers",
    "OnRound",
    "Predictions",
    "Progress",
    "RoundRecord",
    "Row",
    "Run",
    "RunOptions",
    "RunSettings",
    "ServerEnd",
    "SimilarityMatrix",
    "SplitRecord",
    "Stopped",
    "Stream",
    "StreamChoice",
    "TopSettings",
    "assemble_run",
    "assign",
    "by_own_examples",
    "check_free",
    "check_inputs_apart",
    "check_table_file",
    "check_validation",
    "choose_network_stream",
    "chosen_round",
    "clip_by_default",
    "column_of",
    "counting",
    "data_frame",
    "decide_network_stream",
    "decide_stream",
    "diverged_clients",
    "evaluate",
    "events_of",
    "explain_missing_cluster_model",
    "export_adapter",
    "export_model",
    "export_onnx",
    "fitted_task",
    "has_begun_references",
    "initial_models",
    "is_finished",
    "is_unfinished",
    "lacks_references",
    "load_export",
    "metric_named",
    "model_name",
    "module_for",
    "predict",
    "predict_in_parts",
    "predict_trivially",
    "read_newcomers",
    "read_run_config",
    "run_rounds",
    "score_columns",
    "serves_mixtures",
    "serves_own",
    "settings_from",
    "simulate",
    "store_gains",
    "target_of",
    "target_scale_of",
    "to_toml",
    "version_of",
    "versions",
    "with_targets_for",
    "without_nan",
    "without_unfit_baseline",
    "without_unset",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
