"""Clients of a simulation, as the :class:`Deployment` from which a run is assembled."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from fedclade.algorithms import Algorithm, build_algorithm
from fedclade.channel import Adversary, Faults, check_weights, refusal_to_reveal
from fedclade.core import ClientRegistry, ConfigError, DataSpec, in_section
from fedclade.data import DataSchema, Federation, undo_default_scaling
from fedclade.runs.adversaries import Adversaries
from fedclade.runs.assembly import AssembledRun, Connected, Deployment
from fedclade.runs.backend import Backend, fitted_task
from fedclade.runs.churn import Churn, Timetable, fingerprint
from fedclade.runs.example_inputs import PRIVATE_CLIENTS, check_inputs_apart
from fedclade.runs.history import check_validation
from fedclade.runs.models import model_name
from fedclade.runs.settings import RunSettings
from fedclade.runs.target_scale import clip_by_default, target_scale_of, with_targets_for
from fedclade.tasks import FittedTask
from fedclade.training import Actors


@dataclass(eq=False)
class Simulation(Deployment):
    """Clients of a run that are simulated, in this process or by Ray actors.

    Parameters
    ----------
    federation
        The clients' data. The method :meth:`of` may have removed their default scaling.
    presence
        Rounds in which newcomers join and clients leave, and the clients' availability.
    seed
        Seed of the run.
    engine, actors, tf32, faults, adversary
        See :func:`fedclade.simulate`.
    """

    federation: Federation
    presence: Churn
    seed: int
    engine: str
    actors: Actors | None
    tf32: bool
    faults: Faults | None
    adversary: Adversary | None
    adversaries: Adversaries | None = field(default=None, init=False)
    """The adversaries, drawn by :meth:`prepare`; None if all clients are honest."""

    @classmethod
    def of(
        cls, federation: Federation, settings: RunSettings, presence: Churn | None, **options: Any
    ) -> Simulation:
        """Build the simulation of a federation, without default scalings that do not suit it.

        Scalings of inputs and targets are removed if clients are private, or the loss needs targets
        in their own unit.

        Raises
        ------
        ConfigError
            If the rounds in which clients join or leave do not suit the run.
        """
        presence = presence or Churn()
        newcomers = 0 if federation.newcomers is None else len(federation.newcomers)
        presence.check(newcomers, len(federation), settings.rounds)
        if settings.privacy:
            federation = undo_default_scaling(federation, PRIVATE_CLIENTS)
        federation = with_targets_for(settings.task, federation)
        return cls(federation, presence, settings.seed, **options)

    @cached_property
    def everybody(self) -> Federation:
        """All clients that take part in any round, including newcomers that join later."""
        return self.presence.everybody(self.federation)

    @cached_property
    def timetable(self) -> Timetable | None:
        """Unavailable clients by round; None if all clients are always available."""
        return self.presence.timetable(self.everybody, self.seed)

    @property
    def roster(self) -> ClientRegistry:
        """Names, training set sizes and true clusters of all clients, for the run's history."""
        return self.everybody.roster

    @property
    def spec(self) -> DataSpec:
        """Description of the inputs and outputs of the clients' examples."""
        return self.federation.pool.schema

    @property
    def data_schema(self) -> DataSchema | None:
        """Schema by which the clients' tables or texts are encoded; None for other data."""
        encoding = self.federation.encoding
        return None if encoding is None else encoding.schema

    @property
    def size(self) -> int:
        """Number of clients at the start of the run."""
        return len(self.federation)

    def build_algorithm(self, algorithm: Algorithm | str) -> Algorithm:
        """Return the algorithm object, built from its name if a name is given.

        An algorithm such as the oracle is also given the true clusters of all clients.
        """
        if isinstance(algorithm, str):
            return build_algorithm(algorithm, None, *self.everybody.truth)
        return algorithm

    def prepare(
        self, settings: RunSettings, algorithm: Algorithm, model: Any
    ) -> tuple[RunSettings, FittedTask]:
        """Draw the adversaries, and check the clients' data against the settings.

        The data must suit the settings for privacy, validation and adversaries.

        Returns
        -------
        tuple
            The settings, with gradient clipping if targets are standardized; and the task, fitted
            to the data of all clients.
        """
        self._check_privacy(settings)
        check_weights(settings.aggregate, self.roster.names)
        if target_scale_of(self.federation) is not None:
            settings = replace(settings, local=clip_by_default(settings.local, algorithm))
        if settings.needs_validation:
            check_validation(self.everybody, settings.needs_validation)
        task = fitted_task(settings, self.federation)
        adversary = self.adversary or Adversary()
        adversary.check_stream(settings.stream, central=settings.is_central)
        adversaries = Adversaries.drawn(self.adversary, self.everybody, task, settings.seed)
        # The task is needed to draw the adversaries. It is fitted again afterwards, since their
        # reports can change balanced class weights.
        if adversaries is not None:
            task = fitted_task(settings, self.federation, adversaries)
            self.adversaries = replace(adversaries, task=task)
        return settings, task

    def _check_privacy(self, settings: RunSettings) -> None:
        """Check that private clients disclose no statistics of their data, such as means."""
        columns = self.federation.pool.columns
        if settings.privacy and columns is not None and columns.are_scaled_together:
            raise refusal_to_reveal(
                "sums of their data, by which inputs or targets are scaled (data.standardize or "
                "data.standardize_target = 'federated')"
            )
        encoding = self.federation.encoding
        if settings.privacy and encoding is not None and encoding.fills_by:
            raise ConfigError(
                "clients with differential privacy do not report the values that fill empty cells "
                f"(missing = {encoding.fills_by!r}), since no noise is added to them; declare "
                "these values in a schema (data.schema), or set data.missing = 'drop'"
            )
        check_inputs_apart(settings.privacy, self.federation)

    def describe(
        self, settings: RunSettings, algorithm: Algorithm, task: FittedTask, model: Any
    ) -> dict[str, Any]:
        """Build the config to record for a run whose caller passed no config."""
        newcomers = 0 if self.federation.newcomers is None else len(self.federation.newcomers)
        presence = self.presence
        return settings.as_config(
            algorithm,
            task,
            self.engine,
            data={"name": self.federation.pool.name, "description": str(self.federation)},
            model=model_name(model, settings.seed),
            faults=asdict(self.faults or Faults()),
            newcomers={"clients": newcomers, **in_section(presence, "newcomers")},
            **({} if presence.trace is None else {"presence": in_section(presence, "presence")}),
            **({"adversary": self.adversary.described} if self.adversary else {}),
        )

    def complete_config(self, config: dict[str, Any], settings: RunSettings) -> dict[str, Any]:
        """Return a config, extended by the precision of float32 products on a GPU (``tf32``)."""
        return {**config, "tf32": self.tf32}

    def fingerprint(self) -> str:
        """Return a digest of the clients' data and of their availability trace, if any."""
        return fingerprint(self.everybody, self.timetable)

    def connect(
        self, assembled: AssembledRun, settings: RunSettings, device: str, engine: str | None
    ) -> Connected:
        """Build the clients for round 1, or for the round after the last checkpoint."""
        adversaries = self.adversaries
        backend = Backend.simulated_by(
            self.everybody,
            assembled.model,
            assembled.algorithm,
            settings,
            device=device,
            engine=self.engine,
            taken=engine,
            faults=self.faults,
            actors=self.actors,
            adversaries=adversaries,
            middleware=assembled.middleware,
        )
        clients = self.presence.among(
            backend.clients,
            self.federation,
            settings.seed,
            timetable=self.timetable,
            absence=backend.absence,
            lying=None if adversaries is None else adversaries.lying,
        )
        return Connected(backend, clients, assembled.task, settings)
