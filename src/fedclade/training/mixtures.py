"""Local training and evaluation of a mixture of models, as in FedEM.

Every client trains all models of the mixture. The responsibilities of an example are the
probabilities with which each model explains it; a client's weights are the means of the
responsibilities over its examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedclade.core import (
    LARGEST_NORM,
    ConfigError,
    Evaluation,
    EvaluationQuery,
    Lasting,
    Layout,
    Mixture,
    TrainQuery,
    packed,
    row_norms,
)
from fedclade.training.blocks import Block, BlockTraining, Settings
from fedclade.training.evaluation import Evaluator
from fedclade.training.stages import Trained
from fedclade.training.store import MIXTURE, OPTIMIZER, SERVED_MIXTURE, ClientStore


@dataclass(frozen=True, eq=False)
class Mixtures:
    """Steps of FedEM that clients compute (Marfoq et al. 2021, Algorithm 1).

    Each client stores its weights π ``[K]`` of the K models between rounds.

    Parameters
    ----------
    store
        State that clients store between rounds.
    layout
        Layout of the models.
    labels
        Number of labels; None if examples do not have one label each.
    """

    store: ClientStore
    layout: Layout
    labels: int | None

    def trained(
        self,
        query: TrainQuery,
        clients: Sequence[Trained],
        blocks: Sequence[Sequence[int]],
        evaluator: Evaluator,
        training: BlockTraining,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Let clients take an E-step and an M-step, one block of clients after another.

        In the E-step, each client computes the responsibilities of the K models for its examples.
        In the M-step, it trains every model on its examples, weighted by responsibility, and stores
        the means of the responsibilities as its new weights π.

        Parameters
        ----------
        query
            The training query, with the K models of the mixture.
        clients
            The clients of the query, with their training examples.
        blocks
            For each block of clients that train at the same time, their places in the query.
        evaluator
            Evaluates the models on training data.
        training
            Trains a block of clients.

        Returns
        -------
        tuple
            For each of n clients: the vector that it sends, with the updates of all models,
            ``[n, E]`` (see :func:`~fedclade.core.packed`); its training loss ``[n]``, Σ_m mean_j
            q_j(m) ℓ_jm, where q_j(m) is the responsibility, and ℓ_jm the loss, of model m for
            example j; and the number of the model with the client's largest weight, ``[n]``.
        """
        mixture = query.work.mixture
        models = query.models.vectors
        number = query.round.number
        assert mixture is not None
        self._check(mixture)
        lasts = isinstance(query.work.store, Lasting)
        keeps_optimizer = query.local.keep_state and lasts
        sent = list[Tensor]()
        losses = torch.zeros(len(query.ids), dtype=torch.float64)
        components = torch.zeros(len(query.ids), dtype=torch.int64)
        for places in blocks:
            ids = [query.ids[place] for place in places]
            before = [self.store.before(number, client).get(MIXTURE) for client in ids]
            leaning, tables = self._expect(evaluator, ids, models, mixture=mixture, before=before)
            deltas = list[Tensor]()
            for component in range(len(models)):
                weights: dict[int, Tensor] = {}
                if len(models) > 1:  # with one model, all weights are 1
                    for client, responsibilities in zip(ids, leaning, strict=True):
                        weights[client] = responsibilities[:, component].to(models)
                block = Block(
                    clients=[clients[place] for place in places],
                    models=models,
                    rows=[component] * len(places),
                    anchors=[None] * len(places),
                )
                state: str | None = None
                if keeps_optimizer:
                    state = f"{OPTIMIZER} of component {component}"
                settings = Settings(query.round, query.local, state=state)
                moved, of_component = training.train(block, settings, weights=weights)
                deltas.append(moved.clone())
                losses[places] += of_component
            together = packed(torch.stack(deltas, 1), self.layout.n_parameters, tables)
            pi = torch.stack([each.mean(0) for each in leaning]).cpu()  # M-step
            losses[places] += torch.where(pi.isfinite().all(1), 0.0, torch.nan)
            components[places] = pi.argmax(1)
            fine = (row_norms(together) <= LARGEST_NORM) & losses[places].isfinite()
            for client, mine, is_fine in zip(ids, pi, fine.tolist(), strict=True):
                if is_fine and lasts:
                    self.store.keep(number, client, {MIXTURE: mine})
            sent.append(together)
        back = torch.tensor([place for places in blocks for place in places]).argsort()
        return torch.cat(sent)[back.to(models.device)], losses, components

    def evaluated(self, query: EvaluationQuery, evaluator: Evaluator) -> Evaluation:
        """Evaluate, for each client of a query, the mixture of models by the client's weights.

        A client that has not trained computes its weights by an E-step in which all models have the
        same prior probability.
        """
        mixture = query.mixture
        ids = query.ids
        assert mixture is not None
        self._check(mixture)
        kept = {
            client: pi
            for client in ids
            if (pi := self.store.latest(client).get(MIXTURE)) is not None
        }
        if new := [client for client in ids if client not in kept]:
            leaning, _ = self._expect(
                evaluator, new, query.models, mixture=mixture, before=[None] * len(new)
            )
            found = {client: each.mean(0).cpu() for client, each in zip(new, leaning, strict=True)}
            kept |= found
            for client, weights in found.items():  # an export of the client's model needs them
                self.store.add(client, {SERVED_MIXTURE: weights})
        weights = torch.stack([kept[client].cpu() for client in ids])
        return evaluator.evaluate_mixture(ids, query.models, weights, query.split)

    def _expect(
        self,
        evaluator: Evaluator,
        ids: Sequence[int],
        models: Tensor,
        *,
        mixture: Mixture,
        before: Sequence[Tensor | None],
    ) -> tuple[list[Tensor], Tensor | None]:
        """Compute the responsibilities of K models for clients' training examples (FedEM's E-step).

        Returns
        -------
        tuple
            Responsibilities of each client, ``[n_i, K]`` for n_i examples; and the clients' mean
            responsibilities by label, ``[n, K, C]`` for n clients and C labels, or None if the
            mixture is not by label.
        """
        alike = torch.full((len(models),), 1 / len(models), dtype=torch.float64)
        leaning: list[Tensor] = [alike] * len(ids)
        tables: list[Tensor] = [alike] * len(ids)
        for places, outputs, seen, counts in evaluator.outputs(ids, models, "train"):
            losses = evaluator.losses(outputs, seen)
            each = zip(
                places, losses.split(counts.tolist(), 1), seen.split(counts.tolist()), strict=True
            )
            for place, mine, targets in each:
                pi = before[place]
                if pi is None:
                    pi = alike
                targets = targets.to(mine.device)
                leaning[place] = mixture.responsibilities(pi.to(mine), mine.t(), targets)
                if mixture.by_label:
                    tables[place] = mixture.tables(leaning[place], targets, self.labels or 1)
        if not mixture.by_label:
            return leaning, None
        return leaning, torch.stack(tables)

    def _check(self, mixture: Mixture) -> None:
        """Check that the model and the task fit a mixture.

        Raises
        ------
        ConfigError
            If the model has personal parameters; or if the mixture counts responsibilities by
            label (as in FedRC), and the task's examples do not have one label each.
        """
        if self.layout.personal:
            raise ConfigError(
                "model.personal cannot be used with a mixture of models, since every client trains "
                "all models of the mixture; remove model.personal from the configuration"
            )
        if (mixture.by_label or mixture.rates is not None) and self.labels is None:
            raise ConfigError(
                "a mixture that counts responsibilities by label, as in algorithm fedrc, needs a "
                "task in which every example has exactly one label; use algorithm fedem"
            )
