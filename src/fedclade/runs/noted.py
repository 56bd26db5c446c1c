"""Objects that a finished run's config describes: its algorithm, task, local training and model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn

from fedclade.algorithms import Algorithm, build_algorithm
from fedclade.core import ConfigError, DataSpec, LocalTraining, RunError, reading_folder
from fedclade.models import PARTS, Parts
from fedclade.runs.models import Maker, make_module, module_for
from fedclade.runs.store import Run
from fedclade.tasks import Task, build_task

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class NotedRun:
    """Builder of the objects that a run's config describes, for a function that uses the run again.

    Code that the config names by ``module:name`` is imported only if the run is trusted.

    Parameters
    ----------
    run
        The run.
    needed_by
        Name of the function that needs the objects, for errors, such as ``fedclade.assign``.
    """

    run: Run
    needed_by: str

    def algorithm(self, given: Algorithm | None = None) -> Algorithm:
        """Return the run's algorithm, or the given one. The oracle gets no true clusters."""
        if given is not None:
            return given
        named = dict(self.run.config["algorithm"])
        name = named.pop("name")
        return self._build("algorithm", partial(build_algorithm, name, named, {}))

    def task(self, given: Task | str | None = None) -> Task:
        """Return the run's task, with the class weights of the run, or the given task."""
        if given:
            task = build_task(given)
        else:
            task = self._build("task", build_task, **self.run.config.get("task", {}))
        return task.as_noted(self.run.summary)

    def local(self, given: LocalTraining | None = None) -> LocalTraining:
        """Return the run's local training, or the given one."""
        return given or self._build("local", LocalTraining, **self.run.config["local"])

    @property
    def parts(self) -> Parts:
        """Frozen, personal and common parts of the run's model, and its adapters."""
        return Parts.of(self.run.config["model"])

    def build_model(self, spec: DataSpec, seed: int) -> nn.Module:
        """Build the model that the run's config names, for data of a given shape."""
        section = self.run.config["model"]
        arguments = {k: value for k, value in section.items() if k not in ("name", *PARTS)}
        build = partial(module_for, section["name"], spec, seed, arguments)
        return self._build("model", build)

    def module(self, given: nn.Module | str | Maker | None = None) -> nn.Module:
        """Return a module with the structure of the run's models, with its adapters.

        Raises
        ------
        ConfigError
            If the run's config does not suffice to build the model, and no model is given.
        RunError
            If the folder of the run was written by a version that did not record the outputs.
        """
        seed = self.run.summary["seed"]
        spec = self._spec(needs_outputs=not isinstance(given, nn.Module))
        if given is None:
            given = partial(self.build_model, spec)
        return make_module(given, spec, seed, self.parts)

    def _spec(self, *, needs_outputs: bool) -> DataSpec:
        """Return the description of the clients' examples, from the summary of the run."""
        summary = self.run.summary
        inputs = summary.get("inputs", {})
        outputs = inputs.get("outputs") or len(inputs.get("labels", ()))
        if needs_outputs and not outputs:
            raise RunError(
                "this run folder was written by a version that did not record the number of the "
                f"model's outputs; pass the model as a module to {self.needed_by}, as model="
            )
        scaled = inputs.get("scaled")
        return DataSpec(
            data=summary["data"],
            input_shape=tuple(inputs["shape"]),
            outputs=max(1, outputs),
            task=summary.get("task", "classification"),
            vocabulary_size=inputs.get("vocabulary_size", 0),
            scaled=None if scaled is None else tuple(scaled),
        )

    def _build(self, what: str, build: Callable[..., T], **options: Any) -> T:
        """Build an object that the run's config describes.

        If this fails, a ConfigError advises to pass the object.

        Parameters
        ----------
        what
            Name of the parameter for the object, such as ``model``.
        build, options
            Function that builds the object, and its keyword arguments.
        """
        try:
            with reading_folder(trust=self.run.is_trusted):
                return build(**options)
        except ConfigError as error:
            raise type(error)(
                f"{self.needed_by} needs the argument {what}=..., since the run's config does not "
                f"suffice to build it: {error}"
            ) from error
