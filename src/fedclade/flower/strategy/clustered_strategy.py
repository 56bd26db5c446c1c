"""Strategy of Flower that clusters clients whose ClientApp is plain."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedclade.algorithms import Algorithm
from fedclade.channel import Middleware
from fedclade.core import ConfigError, RunError, require, shown
from fedclade.flower.flwr_internals import aggregate_metricrecords
from fedclade.flower.strategy.app_clients import MessageFormat
from fedclade.flower.strategy.app_deployment import AppDeployment, AppMeter, AppOptions, MakeModels
from fedclade.flower.strategy.app_exchange import AppExchange
from fedclade.flower.strategy.app_nodes import AppNodes
from fedclade.flower.strategy.array_model import BUFFERS
from fedclade.flower.strategy.results import (
    AggregateMetrics,
    EvaluateFn,
    ResultBuilder,
    arrays_by_cluster,
)
from fedclade.flower.strategy.score_keys import ScoreKeys
from fedclade.runs import Callback, Callbacks, EarlyStopping, Run, RunSettings, assemble_run

_log = logging.getLogger("flwr")


class ClusteredStrategy(Strategy):
    """Strategy of Flower that finds clusters of clients, and trains a model for each cluster.

    It takes the place of ``flwr.serverapp.strategy.FedAvg`` in a ServerApp. ClientApps stay as they
    are: they receive arrays and a config, and return arrays and metrics, whatever framework they
    use. Flower's client mods work as with ``FedAvg``.

    Methods that need only training and evaluation run: ``cfl``, ``clove``, ``fedavg``,
    ``feddrift``, ``fedgroup``, ``fesem``, ``fl_hc``, ``ifca``, ``ocfl``, ``oracle``, ``stocfl``
    (without its proximal term), and ``rcfl`` if ClientApps call :func:`fedclade.flower.part_of`.
    Other methods are refused before round 1. A client trains as its ClientApp does. A method that
    asks for another number of epochs, such as for a first clustering, gets one training as well.

    Parameters
    ----------
    algorithm
        An algorithm, or its name.
    fraction_train, fraction_evaluate
        Share of the clients that train in a round, and that are evaluated after it. Training is
        sampled in each cluster, and evaluation has the same clients in all rounds. With
        ``fraction_evaluate=0`` clients are not evaluated.
    min_train_nodes, min_evaluate_nodes
        Smallest numbers of clients that train and that are evaluated, of those that are connected
        before round 1.
    min_available_nodes
        Number of nodes that must be connected before round 1. The run then waits until no node
        joins any more, since the clients that are there from the start are clustered best.
    weighted_by_key
        Name of the metric with the number of examples, by which models and metrics are weighted.
    arrayrecord_key, configrecord_key
        Names of the record of arrays and of the config in messages.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn
        Functions that combine the metrics of the replies in a round, as for Flower's ``FedAvg``. The
        replies that they get have no arrays.
    score_key
        Name of the metric, of those that clients return when they evaluate, that is the score of
        the run. By default the only metric whose name contains, for example, "acc"; or the only
        metric besides the loss; or the loss.
    loss_key
        Name of the clients' loss, by which methods such as ``ifca`` let clients choose a model. By
        default the only metric whose name contains "loss".
    higher_is_better
        Whether a higher score is better. By default yes, unless the name of the score contains, for
        example, "loss" or "error".
    buffers
        Patterns over the names of floating-point arrays that are running statistics. They are
        averaged like parameters, but clients are not compared by them.
    initial_models
        Function that returns the arrays of a further initial model, given its number from 1, for
        methods that start from several models, such as ``ifca``. By default they are the initial
        arrays with the entries of each array in random order, which suits randomly initialized
        models, but not pre-trained ones.
    true_clusters
        True cluster of each node by its id, for scoring and for ``oracle``.
    folder
        Folder of the run. With a folder, an interrupted run can be continued by the same call.
    settings
        Further settings of the run, such as ``RunSettings(seed=1, min_clients=3)``. Settings that
        need clients of fedclade, such as ``privacy``, are refused.
    middleware, callbacks
        See :func:`fedclade.simulate`.
    **options
        Hyper-parameters of an algorithm that is given by its name, such as ``eps1=0.4``.

    Attributes
    ----------
    run
        The finished :class:`~fedclade.Run`: the tree of clusters, tables, events, ``run.save``.
    central_metrics
        Metrics by ``evaluate_fn`` for each cluster, by round and by node of the tree.

    Raises
    ------
    ConfigError
        If an argument is out of range, or a setting needs clients of fedclade.

    Examples
    --------
    >>> strategy = ClusteredStrategy("cfl", eps1=0.4, eps2=1.6, fraction_train=0.5)
    >>> strategy.algorithm
    'cfl'
    """

    def __init__(
        self,
        algorithm: Algorithm | str,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        score_key: str | None = None,
        loss_key: str | None = None,
        higher_is_better: bool | None = None,
        buffers: Sequence[str] = BUFFERS,
        initial_models: MakeModels | None = None,
        true_clusters: Mapping[int, int] | None = None,
        folder: str | Path | None = None,
        settings: RunSettings | None = None,
        middleware: Sequence[Middleware] = (),
        callbacks: Sequence[Callback] = (),
        **options: Any,
    ) -> None:
        require(
            ("fraction_train", fraction_train, 0 < fraction_train <= 1, "in (0, 1]"),
            ("fraction_evaluate", fraction_evaluate, 0 <= fraction_evaluate <= 1, "in [0, 1]"),
            ("min_train_nodes", min_train_nodes, min_train_nodes >= 0, "at least 0"),
            ("min_evaluate_nodes", min_evaluate_nodes, min_evaluate_nodes >= 0, "at least 0"),
            ("min_available_nodes", min_available_nodes, min_available_nodes >= 1, "at least 1"),
        )
        if isinstance(algorithm, type):
            raise ConfigError(
                "algorithm should be an algorithm or its name, got the class "
                f"{algorithm.__name__}; pass {algorithm.__name__}()"
            )
        if options and not isinstance(algorithm, str):
            raise ConfigError(
                f"the options {shown(sorted(options))} belong to an algorithm that is given by its "
                f"name, but the algorithm is {algorithm!r}; set them there"
            )
        self.algorithm = algorithm
        self.options = options
        self.fraction_train = fraction_train
        self.fraction_evaluate = fraction_evaluate
        self.min_train_nodes = min_train_nodes
        self.min_evaluate_nodes = min_evaluate_nodes
        self.min_available_nodes = min_available_nodes
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.folder = None if folder is None else Path(folder)
        self.settings = _check_settings(settings or RunSettings(), callbacks)
        self._aggregate_train = train_metrics_aggr_fn or aggregate_metricrecords
        self._aggregate_evaluate = evaluate_metrics_aggr_fn or aggregate_metricrecords
        self._find_keys = partial(
            ScoreKeys.find,
            weight=weighted_by_key,
            score=score_key,
            loss=loss_key,
            higher_is_better=higher_is_better,
        )
        self._buffers = tuple(buffers)
        self._initial_models = initial_models
        self._true_clusters = true_clusters
        self._middleware = middleware
        self._callbacks = callbacks
        self._run: Run | None = None
        self._deployment: AppDeployment | None = None
        self.central_metrics: dict[int, dict[int, MetricRecord]] = {}

    @property
    def run(self) -> Run:
        """The finished run.

        Raises
        ------
        RunError
            If no run has finished.
        """
        if self._run is None:
            raise RunError("the strategy has no finished run yet; call strategy.start first")
        return self._run

    def arrays_by_cluster(self) -> dict[int, ArrayRecord]:
        """Return the arrays of each cluster's model, by the cluster's node in the run's tree."""
        return arrays_by_cluster(self.run.tree, self._started.model)

    def arrays_for(self, node_id: int) -> ArrayRecord:
        """Return the arrays of the model of a Flower node's cluster.

        Parameters
        ----------
        node_id
            Id of the node in the grid.

        Raises
        ------
        ConfigError
            If the node did not take part.
        """
        nodes = self._started.nodes
        client_of = {nodes.node(client): client for client in nodes.ids}
        if node_id not in client_of:
            raise ConfigError(
                f"node {node_id} did not take part in the run; choose one of "
                f"{shown(sorted(client_of))}"
            )
        node = self.run.tree.node_for(client_of[node_id])
        return self._started.model.record(node.model)

    def summary(self) -> None:
        """Log the algorithm and the sampling of clients."""
        _log.info("\t├──> Algorithm: %s", self._describe())
        _log.info(
            "\t├──> Sampling: fraction of each cluster: train (%.2f) | evaluate (%.2f)",
            self.fraction_train,
            self.fraction_evaluate,
        )
        _log.info("\t│\t└──Minimum available nodes: %d", self.min_available_nodes)
        _log.info("\t└──> Weighted by: '%s'", self.weighted_by_key)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the algorithm on the nodes of a grid.

        Parameters
        ----------
        grid
            Grid of the ServerApp.
        initial_arrays
            Arrays of the initial model.
        num_rounds
            Number of rounds.
        timeout
            Seconds to wait for the replies to one query; later replies are discarded.
        train_config, evaluate_config
            Values that the config of each message contains, with the number of the round as
            ``server-round``. Client mods read their settings from it, for example
            ``clipping_norm``.
        evaluate_fn
            Function that evaluates a model at the server, given the number of the round and the
            arrays. It is called before round 1 for the initial model, and after each round for the
            model of every cluster.

        Returns
        -------
        Result
            Metrics of the rounds in Flower's form: means over clients, weighted by
            ``weighted_by_key``, and for ``evaluate_fn`` means over clusters, weighted by their
            numbers of clients (``central_metrics`` has each cluster). ``arrays`` is the model of
            the largest cluster; see :meth:`arrays_by_cluster`. If a run is continued, the metrics
            are those of the rounds of this call, and :attr:`run` has all rounds.

        Raises
        ------
        ConfigError
            If the algorithm needs more than a plain ClientApp does, or a ClientApp of ``rcfl``
            trains on all of its data.
        ModelError
            If the initial arrays are no model.
        UpdateError
            If no client replies in a round.
        RunError, CheckpointError
            If the folder contains another run or damaged files, or cannot be written.
        """
        begun = time.monotonic()
        _log.info("Starting %s:", type(self).__name__)
        self.summary()
        deployment = self._deploy(grid, timeout, train_config, evaluate_config)
        # If this run fails, results of an earlier run must not be taken for its results.
        self._run = None
        self._deployment = deployment
        builder = ResultBuilder(
            deployment=deployment,
            rounds=num_rounds,
            aggregate_train=self._aggregate_train,
            aggregate_evaluate=self._aggregate_evaluate,
            weight=self.weighted_by_key,
            evaluate_fn=evaluate_fn,
        )
        self.central_metrics = builder.central
        assembled = assemble_run(
            deployment,
            self.algorithm,
            initial_arrays,
            self._settings_for(num_rounds, deployment.nodes.first or 1),
            callbacks=Callbacks([builder, *self._callbacks]),
            middleware=self._middleware,
            folder=self.folder,
        )
        run = assembled.checkpointer.finished()
        if run is None:
            builder.start(initial_arrays)
            run = assembled.run()
            if self.folder is not None:
                deployment.nodes.save(self.folder)  # with the numbers of examples of the last round
        self._run = run
        result = builder.finish(run.tree)
        _log.info("%s finished in %.2fs", type(self).__name__, time.monotonic() - begun)
        return result

    @property
    def _started(self) -> AppDeployment:
        """The deployment of the last start."""
        if self._deployment is None:
            raise RunError("the strategy has no finished run yet; call strategy.start first")
        return self._deployment

    def _settings_for(self, rounds: int, clients: int) -> RunSettings:
        """Return the settings of a run, given the number of clients before round 1."""
        fraction = min(1.0, max(self.fraction_train, self.min_train_nodes / clients))
        evaluated = max(self.min_evaluate_nodes, round(self.fraction_evaluate * clients))
        return replace(
            self.settings,
            rounds=rounds,
            client_fraction=fraction,
            evaluate_clients=None if evaluated >= clients else evaluated,
        )

    def _describe(self) -> str:
        """Return the algorithm with its options, as text."""
        if not isinstance(self.algorithm, str):
            return repr(self.algorithm)
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.algorithm}({options})"

    def _deploy(
        self,
        grid: Grid,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
    ) -> AppDeployment:
        """Connect the nodes, once enough are there."""
        meter = AppMeter()
        exchange = AppExchange(grid, meter, timeout)
        nodes = AppNodes(grid, self._true_clusters, exchange.sleep)
        if self.folder is not None:
            nodes.load(self.folder)
        before = nodes.ids
        nodes.wait(max(self.min_available_nodes, self.min_train_nodes), settled=True)
        if before and not set(before).intersection(nodes.connected):
            _log.warning(
                "none of the %d clients of the run in %s is connected, so all nodes join as new "
                "clients: start SuperNodes with keys, by which Flower recognizes them; Flower's "
                "simulation gives every node a new id at each start",
                len(before),
                self.folder,
            )
        messages = MessageFormat(
            arrays=self.arrayrecord_key,
            config=self.configrecord_key,
            weight=self.weighted_by_key,
            train_config=ConfigRecord() if train_config is None else train_config,
            evaluate_config=ConfigRecord() if evaluate_config is None else evaluate_config,
        )
        chosen = AppOptions(
            options=self.options,
            buffers=self._buffers,
            initial_models=self._initial_models,
            find_keys=self._find_keys,
            evaluates=self.fraction_evaluate > 0,
        )
        return AppDeployment(
            exchange=exchange,
            meter=meter,
            nodes=nodes,
            messages=messages,
            chosen=chosen,
            folder=self.folder,
        )

    # Flower's own loop calls the following methods, and so do strategies that wrap another one.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> NoReturn:
        """Refuse: see :meth:`start`."""
        _refuse_single_steps()

    def aggregate_train(self, server_round: int, replies: Any) -> NoReturn:
        """Refuse: see :meth:`start`."""
        _refuse_single_steps()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> NoReturn:
        """Refuse: see :meth:`start`."""
        _refuse_single_steps()

    def aggregate_evaluate(self, server_round: int, replies: Any) -> NoReturn:
        """Refuse: see :meth:`start`."""
        _refuse_single_steps()


OWN_ARGUMENTS = ("rounds", "client_fraction", "evaluate_clients")
"""Fields of the settings that are arguments of the strategy or of its start."""

NEED_FEDCLADE = (
    "local",
    "task",
    "privacy",
    "permute",
    "keep_best",
    "evaluate_validation",
    "early_stopping",
    "freeze",
    "personal",
    "common",
    "adapter",
)
"""Fields of the settings that need clients of fedclade."""


def _check_settings(settings: RunSettings, callbacks: Sequence[Callback]) -> RunSettings:
    """Check that settings do not need clients of fedclade, and are no arguments of the strategy.

    Raises
    ------
    ConfigError
        If a setting differs from its default that a plain ClientApp does not support.
    """
    default = RunSettings()
    changed = [
        name
        for name in (*OWN_ARGUMENTS, *NEED_FEDCLADE)
        if getattr(settings, name) != getattr(default, name)
    ]
    problems = [
        f"settings.{name} is set by num_rounds, fraction_train or fraction_evaluate; leave it out"
        for name in changed
        if name in OWN_ARGUMENTS
    ]
    problems += [
        f"settings.{name} needs clients that run fedclade.flower.client_app, since a plain "
        "ClientApp trains by its own code; leave it out"
        for name in changed
        if name in NEED_FEDCLADE
    ]
    if any(isinstance(callback, EarlyStopping) for callback in callbacks):
        problems.append(
            "EarlyStopping needs scores on validation data, which a plain ClientApp does not "
            "return; leave it out"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def _refuse_single_steps() -> NoReturn:
    """Refuse a call of a method by which Flower's own strategies take the steps of a round.

    Raises
    ------
    ConfigError
        Always.
    """
    raise ConfigError(
        "ClusteredStrategy runs whole rounds by start() and cannot be wrapped by another strategy, "
        "such as for differential privacy or secure aggregation; for Flower's client mods, pass "
        "their settings in train_config, and for the privacy of fedclade let clients run "
        "fedclade.flower.client_app"
    )
