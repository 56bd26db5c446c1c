"""Measurement of what each client gains from a run, by comparison with simpler models.

A gain is the difference between the scores of the run's deployed model and of a simpler model on
the same test rows of a client. The simpler models are a trivial predictor, a model that the client
trains alone, and one model that all clients train together.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedclade.core import RunError, rng
from fedclade.data import Federation, describe_clients
from fedclade.runs.gain_outputs import predict_in_parts, predict_trivially, without_unfit_baseline
from fedclade.runs.store.gains import (
    ALONE,
    CLUSTER,
    ONE_MODEL,
    OWN,
    TRIVIAL,
    ClientGains,
    Gains,
    write_gains,
)
from fedclade.runs.store.run import Run
from fedclade.runs.store.served_models import served_node, serves_mixtures
from fedclade.tasks import FittedTask, Interval, mix_outputs
from fedclade.training import OWN_MODEL, PERSONAL, ClientRows, with_input_hooks

NO_REFERENCES = (
    "not trained; to train: fedclade report RUN --references, or simulate(..., references=True)"
)
"""Reason for which a reference that needs training is missing by default."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ReferenceRuns:
    """Runs of the reference models that need training.

    ``runs`` contains the finished runs by the name of the reference model. ``missing`` contains the
    reason why a run does not exist, by the same names.
    """

    runs: Mapping[str, Run]
    missing: Mapping[str, str]


def measure_gains(
    run: Run,
    federation: Federation,
    module: nn.Module,
    task: FittedTask,
    references: ReferenceRuns,
    device: str = "cpu",
) -> Gains:
    """Compare the run's models with simpler models on each client's test rows.

    Parameters
    ----------
    run
        A finished run of a simulation.
    federation
        All clients of the run, with their data.
    module
        Module with the architecture of the run's model; it is copied.
    task
        The task of the run; models are compared by its first metric.
    references
        Runs of the reference models: a model that each client trains alone, and one model for all.
    device
        Device of the forward passes.

    Raises
    ------
    RunError
        If the data differs from the data of the run.
    """
    check_data(run, federation)
    federation = federation.in_round(run.model_round)
    clients = [client for client in federation.ids if client in run.tree.leaf_of]
    traits, values = describe_clients(federation, clients)
    predictor = _Predictor(run, federation, module, device, task)
    judge = _Judge(run, federation, predictor, task, references)
    judged = [judge.judge(client, values[place]) for place, client in enumerate(clients)]
    return Gains(
        metric=task.metrics[0],
        round=run.model_round,
        intervals=judge.kind,
        clients=tuple(judged),
        missing=dict(references.missing) | judge.missing,
        traits=traits,
    )


def check_data(run: Run, federation: Federation) -> None:
    """Check that a federation has the data with which a run's clients were evaluated.

    The names of the clients and their numbers of training rows are compared.

    Raises
    ------
    RunError
        If a client is missing, or has another name or number of training rows.
    """
    federation = federation.in_round(run.model_round)
    for row in run.client_rows:
        if row["round"] != run.model_round or "n_train" not in row:
            continue
        client = row["client"]
        data = federation.by_id[client] if client in federation.positions else None
        if data is None or data.name != row["name"] or len(data.train) != row["n_train"]:
            given = f"{data.name!r} with {len(data.train)} rows" if data is not None else "missing"
            raise RunError(
                f"the given data is not the data of the run: in the run, client {client} was "
                f"{row['name']!r} with {row['n_train']} training rows, in the given data it is "
                f"{given}; pass the data of the run"
            )


class _Predictor:
    """Predictor that computes the outputs of any model vector of a run.

    It loads one model at a time into a copy of the run's module.
    """

    def __init__(
        self, run: Run, federation: Federation, module: nn.Module, device: str, task: FittedTask
    ) -> None:
        assert run.layout is not None  # every simulation stores its layout
        self._layout = run.layout.full
        self._device = torch.device(device)
        module = copy.deepcopy(module).to(self._device)
        self._module = with_input_hooks(module, self._layout, federation, self._device, task).eval()

    @torch.inference_mode()
    def predict(self, model: Tensor, inputs: Tensor) -> Tensor:
        """Return the outputs of a model for n inputs, as a tensor ``[n, ...]`` on the CPU.

        ``model`` is the vector ``[F]`` of a whole model, with shared and personal parameters.
        """
        # Loaded for each prediction, since a forward pass may have changed the module's buffers.
        self._layout.load(model.to(self._device), self._module)
        return predict_in_parts(self._module, inputs, self._device)


@dataclass(eq=False)
class _Judge:
    """Evaluator that scores the run's models and those of its references on clients' test rows.

    References are one model for all clients, and a model of each client alone.
    """

    run: Run
    federation: Federation
    predictor: _Predictor
    task: FittedTask
    references: ReferenceRuns
    kind: str = ""

    @cached_property
    def missing(self) -> dict[str, str]:
        """Models that cannot be scored for any client, with the reason.

        The only possible key is the name of the cluster's model. Empty if this model can be scored.
        """
        reason = explain_missing_cluster_model(self.run)
        return {CLUSTER: reason} if reason else {}

    def judge(self, client: int, traits: np.ndarray) -> ClientGains:
        """Score all models of a client on its test rows, and compare them with the deployed model.

        Parameters
        ----------
        client
            Id of the client.
        traits
            Values that describe the client's training data; they are stored with the scores.
        """
        data = self.federation.by_id[client]
        inputs, targets = self.federation.examples(client, "test")
        outputs = self._predict_by_model(client, inputs, targets)
        draw = rng.generator(self.run.summary["seed"], "groups of test rows", data.key)
        rows = ClientRows(self.task, targets, outputs, draw)
        self.kind = self.kind or rows.kind
        deployed = OWN if OWN in outputs else CLUSTER
        gains: dict[str, Interval] = {}
        for name in outputs:
            if name != deployed:
                gains[name] = rows.gain(deployed, name)
        attributes = (self.federation.attributes or {}).get(data.name, {})
        return ClientGains(
            client=client,
            name=data.name,
            cluster=self.run.tree.leaf_of[client],
            n_train=len(data.train),
            n_test=len(targets),
            deployed=deployed,
            scores={name: rows.score(name) for name in outputs},
            gains=gains,
            traits=traits.tolist(),
            attributes=attributes,
        )

    def _predict_by_model(self, client: int, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the outputs of the deployed and the simpler models for a client's test inputs.

        Models that do not exist for this client are left out.

        Parameters
        ----------
        client
            Id of the client.
        inputs, targets
            Inputs and targets of the client's n test rows, ``[n, ...]``.

        Returns
        -------
        dict
            Outputs ``[n, ...]`` by the model's name.
        """
        outputs = {TRIVIAL: self._predict_trivially(client, targets)}
        for name in (ALONE, ONE_MODEL):
            reference = self.references.runs.get(name)
            model = None if reference is None else find_model(reference, client)
            if model is not None:
                outputs[name] = self.predictor.predict(model, inputs)
        if CLUSTER not in self.missing:
            model = served_node(self.run, client).model
            outputs[CLUSTER] = self.predictor.predict(model, inputs)
        kept = self.run.kept.get(client, {})
        if "mixture" in kept:
            outputs[OWN] = self._predict_by_mixture(kept["mixture"], inputs)
        elif OWN_MODEL in kept or self.run.parted or CLUSTER in self.missing:
            model = find_model(self.run, client)
            if model is not None:
                outputs[OWN] = self.predictor.predict(model, inputs)
        return without_unfit_baseline(self.task, outputs)

    def _predict_by_mixture(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Return the outputs of a client's mixture of the leaves' models.

        ``weights`` has the client's weight of each model, ``[K]``.
        """
        models = [leaf.model for leaf in self.run.tree.leaves]
        outputs = torch.stack([self.predictor.predict(model, inputs) for model in models])
        return mix_outputs(self.task.kind, outputs, weights.cpu().expand(len(inputs), -1))

    def _predict_trivially(self, client: int, targets: Tensor) -> Tensor:
        """Return outputs that ignore the inputs, computed from the client's training targets."""
        _, seen = self.federation.examples(client, "train")
        return predict_trivially(
            self.task.kind,
            seen,
            targets,
            self.federation.pool.outputs,
            scale=self.task.target_scale,
        )


def store_gains(run: Run, gains: Gains, folder: Path | None) -> Run:
    """Write a run's gains to its folder, if it has one, and return the run with the gains.

    The results of the run are complete without gains, so if the folder cannot be written, only a
    warning is logged.
    """
    if folder is not None:
        try:
            write_gains(gains, folder)
        except RunError as error:
            _log.warning("%s; reports of this run folder will not contain gains", error)
    return replace(run, gains=gains)


def explain_missing_cluster_model(run: Run) -> str:
    """Return the reason why no model of a single cluster can make predictions for a client.

    This is so if clients combine the models of several clusters, add personal parameters to a
    cluster's model, or share no model. The text is empty if a cluster's model is a complete model.
    """
    if serves_mixtures(run):
        return "clients are evaluated with mixtures of all clusters’ models"
    if run.parted:
        return "the clusters share only a part of the model"
    if run.config.get("algorithm", {}).get("name") == "local":
        return "clients share no model"
    return ""


def find_model(run: Run, client: int) -> Tensor | None:
    """Return the whole model ``[F]`` with which a client of a run was evaluated.

    The vector of F entries is the client's own model, or the model of its node combined with the
    client's personal parameters. The result is None if the client is in no cluster, or its personal
    parameters are not stored.
    """
    kept = run.kept.get(client, {})
    if OWN_MODEL in kept:
        return kept[OWN_MODEL]
    if client not in run.tree.leaf_of:
        return None
    shared = served_node(run, client).model
    if not run.parted:
        return shared
    if PERSONAL not in kept:
        return None
    assert run.layout is not None  # a run with personal parts has one
    return run.layout.joined(shared, kept[PERSONAL].to(shared))
