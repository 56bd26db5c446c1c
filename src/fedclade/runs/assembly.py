"""Assembly of a run from its parts, by the same steps for a simulation and for a network.

:func:`fedclade.simulate` and :func:`fedclade.flower.federate` describe their clients by a
:class:`Deployment`. :func:`assemble_run` checks that the algorithm, the model, the settings and the
clients fit together, and :meth:`AssembledRun.run` executes the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.algorithms import Algorithm, RunFacts
from fedclade.channel import Middleware, describe_middleware
from fedclade.core import ClientRegistry, DataSpec
from fedclade.data import DataSchema
from fedclade.runs.backend import Backend
from fedclade.runs.best_round import metric_named
from fedclade.runs.callbacks import Callbacks, progress_shown
from fedclade.runs.checkpointer import Checkpointer
from fedclade.runs.churn import ComingAndGoing
from fedclade.runs.history import History
from fedclade.runs.models import target_of
from fedclade.runs.rounds import run_rounds
from fedclade.runs.settings import RunSettings
from fedclade.runs.store import Run
from fedclade.tasks import FittedTask
from fedclade.training import float32_products


@dataclass(frozen=True)
class Connected:
    """Clients that are ready for the first round of a run, with their task and settings.

    Parameters
    ----------
    backend
        All clients with their middleware, the initial models and the execution settings.
    clients
        The clients that an algorithm can query, which may join, leave or be unavailable.
    task
        Loss and metrics of the run.
    settings
        Settings of the run, including values that depend on the clients' data.
    """

    backend: Backend
    clients: ComingAndGoing
    task: FittedTask
    settings: RunSettings


class Deployment(ABC):
    """Clients of a run and the way to reach them: by simulation or over a network.

    A subclass implements all steps that differ between a simulation and a network.
    :func:`assemble_run` and :meth:`AssembledRun.run` call the methods in the order of their
    definition.
    """

    @property
    @abstractmethod
    def roster(self) -> ClientRegistry:
        """Names, training set sizes and true clusters of all clients, for the run's history."""

    @property
    @abstractmethod
    def spec(self) -> DataSpec:
        """Description of the inputs and outputs of the clients' examples."""

    @property
    def data_schema(self) -> DataSchema | None:
        """Schema by which the clients' tables or texts are encoded; None for other data."""
        return None

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings about the clients, for the results of the run."""
        return ()

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of clients at the start of the run."""

    @abstractmethod
    def build_algorithm(self, algorithm: Any) -> Algorithm:
        """Return the algorithm object, built from its name if a name is given."""

    @abstractmethod
    def prepare(
        self, settings: RunSettings, algorithm: Algorithm, model: Any
    ) -> tuple[RunSettings, FittedTask]:
        """Fit the settings and the task to the clients' data, and check that they suit it.

        Returns
        -------
        tuple
            The settings to use, which may be adapted to the data; and the task, fitted to the data.

        Raises
        ------
        ConfigError
            If the settings, the algorithm or the model do not suit the clients.
        """

    @abstractmethod
    def describe(
        self, settings: RunSettings, algorithm: Algorithm, task: FittedTask, model: Any
    ) -> dict[str, Any]:
        """Build the config to record for a run whose caller passed no config."""

    @abstractmethod
    def complete_config(self, config: dict[str, Any], settings: RunSettings) -> dict[str, Any]:
        """Return a config, extended by the entries that every run of this deployment records."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of the clients' data.

        A run can be continued from a folder only if the folder records the same digest.
        """

    def wait(self, *, finish: bool) -> None:  # noqa: B027 -- simulated clients are there
        """Wait until enough clients are connected; return at once for simulated clients.

        Parameters
        ----------
        finish
            Whether the run is only to be finished at its last checkpoint, without another round. No
            client then needs to be connected.
        """

    @abstractmethod
    def connect(
        self, assembled: AssembledRun, settings: RunSettings, device: str, engine: str | None
    ) -> Connected:
        """Connect the clients for round 1, or for the round after the last checkpoint.

        Parameters
        ----------
        assembled
            The run to which the clients belong.
        settings, device
            Settings and device of the run; those of the checkpoint if a run is continued.
        engine
            Training engine that is recorded in the checkpoint if a run is continued; None in a new
            run.
        """

    def execution(self) -> AbstractContextManager[object]:
        """Return a context manager that is active during all rounds; the default does nothing."""
        return nullcontext()

    def complete_run(self, assembled: AssembledRun, connected: Connected, run: Run) -> Run:
        """Complete the results of a finished run while its clients are still connected.

        By default, the run is returned unchanged.
        """
        return run


@dataclass(frozen=True)
class AssembledRun:
    """A run before its first round, whose parts have been checked against each other.

    Parameters
    ----------
    deployment
        The clients and the way to reach them.
    algorithm, model, settings, task
        The algorithm, the model, the settings and the task of the run.
    target
        Name of a metric, and the score to reach by it; None without a target.
    middleware
        The user's own middleware, at the server's end.
    callbacks
        Callbacks of the run.
    checkpointer
        Writer and reader of the run's folder.
    finish
        Whether to finish the run in the folder without another round.
    """

    deployment: Deployment
    algorithm: Algorithm
    model: Any
    settings: RunSettings
    task: FittedTask
    target: tuple[str, float] | None
    middleware: Sequence[Middleware]
    callbacks: Callbacks
    checkpointer: Checkpointer
    finish: bool

    def run(self, device: str = "cpu", *, tf32: bool = False, progress: bool | None = False) -> Run:
        """Execute all rounds, from round 1 or from the last checkpoint, and return the results.

        Parameters
        ----------
        device
            Device of a simulation.
        tf32
            Whether a GPU may round the factors of float32 products to 10 bits (TensorFloat-32).
        progress
            Whether to show a progress bar; see :func:`fedclade.simulate`.
        """
        self.deployment.wait(finish=self.finish)
        settings, device, engine = self.checkpointer.resumed(self.settings, device)
        connected = self.deployment.connect(self, settings, device, engine)
        backend = connected.backend
        settings = connected.settings
        history = History(
            self.deployment.roster,
            connected.task,
            self.target,
            adversaries=backend.adversaries,
            least=settings.min_cluster_size,
            chosen_by=settings.chosen_by,
            schema=self.deployment.data_schema,
            warnings=tuple(self.deployment.warnings),
        )
        name = self.checkpointer.config["algorithm"]["name"]
        bar = progress_shown(progress, name, settings.rounds, self.callbacks)
        execution = self.deployment.execution()
        products = float32_products(tf32)
        with execution, products, closing(backend), bar as callbacks:
            with self.checkpointer:
                run = run_rounds(
                    self.algorithm,
                    backend,
                    connected.clients,
                    self.checkpointer,
                    history,
                    settings=settings,
                    callbacks=callbacks,
                )
            return self.deployment.complete_run(self, connected, run)


def assemble_run(
    deployment: Deployment,
    algorithm: Any,
    model: Any,
    settings: RunSettings,
    *,
    callbacks: Callbacks,
    middleware: Sequence[Middleware] = (),
    config: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    finish: bool = False,
) -> AssembledRun:
    """Assemble a run from its parts, after checking that they fit together.

    Parameters
    ----------
    deployment
        The clients and the way to reach them.
    algorithm, model
        Algorithm and model in a form that the deployment accepts.
    settings
        Settings of the run.
    callbacks, middleware, config, folder, finish
        See :func:`fedclade.simulate`.

    Raises
    ------
    ConfigError
        If a name is unknown, or the algorithm, model, settings and clients do not fit together.
    RunError, CheckpointError
        If the folder contains another run or damaged files, or cannot be written.
    """
    algorithm = deployment.build_algorithm(algorithm)
    algorithm.check(RunFacts(clients=deployment.size, data=deployment.spec))
    settings = settings.completed(algorithm)
    settings.check_algorithm(algorithm, deployment.size)
    settings.check_enough(deployment.size)
    settings, task = deployment.prepare(settings, algorithm, model)
    metric_named(task.metrics, settings.chosen_by, "stop.metric")
    target = target_of(settings, task)
    if config:
        noted = dict(config)
    else:
        noted = deployment.describe(settings, algorithm, task, model)
        if own := describe_middleware(middleware):
            noted["middleware"] = own
    noted = {**deployment.complete_config(noted, settings), **settings.stopping_noted}
    checkpointer = Checkpointer(
        folder, noted, settings.checkpoint_every, deployment.fingerprint, finish=finish
    )
    return AssembledRun(
        deployment,
        algorithm,
        model,
        settings=settings,
        task=task,
        target=target,
        middleware=middleware,
        callbacks=callbacks,
        checkpointer=checkpointer,
        finish=finish,
    )
