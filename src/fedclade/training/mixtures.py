"""Clients that train and evaluate a mixture of models (FedEM): responsibilities and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedclade.core import (
    LARGEST_NORM,
    ConfigError,
    Evaluation,
    EvaluationQuery,
    Layout,
    Mixture,
    Round,
    UpdateQuery,
    packed,
    row_norms,
)
from fedclade.training.evaluation import Evaluator
from fedclade.training.stages import Trained
from fedclade.training.store import MIXTURE, OPTIMIZER, SERVED_MIXTURE, ClientStore


class Train(Protocol):
    """Trains a block of clients, each on its data and from the model of its row."""

    def __call__(
        self,
        block: Sequence[tuple[Trained, int, int | None]],
        models: Tensor,
        this_round: Round,
        optimizer: str | None,
        *,
        weights: Mapping[int, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the updates ``[k, S]`` and the mean losses ``[k]``.

        Parameters
        ----------
        block
            The clients, with the row of the model, and of the anchor, of each.
        models
            The models, ``[K, S]``.
        this_round
            The round.
        optimizer
            Name under which states of the optimizers are stored; None if they are not stored.
        weights
            Weights of each client's examples, ``[n_i]``, by client id; empty if all examples weigh
            1.
        """
        ...


@dataclass(frozen=True, eq=False)
class Mixtures:
    """Clients' part of FedEM (Marfoq et al. 2021, Algorithm 1).

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
        query: UpdateQuery,
        clients: Sequence[Trained],
        blocks: Sequence[Sequence[int]],
        evaluator: Evaluator,
        train: Train,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Let clients take an E-step and an M-step, block by block, and store their weights.

        Parameters
        ----------
        query
            The training query, with the K models of the mixture.
        clients
            The clients of the query, with their training examples.
        blocks
            Places in the query of the clients that train at the same time.
        evaluator
            Evaluates the models on training data.
        train
            Trains a block of clients.

        Returns
        -------
        tuple
            What each client sends, ``[n, E]`` (:func:`~fedclade.core.packed`); its loss Σ_m mean_j
            q_j(m) ℓ_jm, ``[n]``; and the component with its largest weight, ``[n]``.
        """
        mixture = query.mixture
        models = query.models
        this_round = query.round
        assert mixture is not None
        self._check(mixture)
        keeps = this_round.spec.keep_state and this_round.lasts
        sent = list[Tensor]()
        losses = torch.zeros(len(query.ids), dtype=torch.float64)
        components = torch.zeros(len(query.ids), dtype=torch.int64)
        for places in blocks:
            ids = [query.ids[place] for place in places]
            before = [self.store.before(this_round.number, client).get(MIXTURE) for client in ids]
            leaning, tables = self._expected(evaluator, ids, models, mixture, before)
            deltas = list[Tensor]()
            for component in range(len(models)):
                mine = {
                    client: q[:, component].to(models)
                    for client, q in zip(ids, leaning, strict=True)
                }
                mine = mine if len(models) > 1 else {}  # with one model, all weights are 1
                block = [(clients[place], component, None) for place in places]
                name = f"{OPTIMIZER} of component {component}" if keeps else None
                moved, of_component = train(block, models, this_round, name, weights=mine)
                deltas.append(moved.clone())
                losses[places] += of_component
            together = packed(torch.stack(deltas, 1), self.layout.n_parameters, tables)
            pi = torch.stack([each.mean(0) for each in leaning]).cpu()  # M-step
            losses[places] += torch.where(pi.isfinite().all(1), 0.0, torch.nan)
            components[places] = pi.argmax(1)
            fine = (row_norms(together) <= LARGEST_NORM) & losses[places].isfinite()
            for client, mine, is_fine in zip(ids, pi, fine.tolist(), strict=True):
                if is_fine and this_round.lasts:
                    self.store.keep(this_round.number, client, {MIXTURE: mine})
            sent.append(together)
        back = torch.tensor([place for places in blocks for place in places]).argsort()
        return torch.cat(sent)[back.to(models.device)], losses, components

    def evaluated(self, query: EvaluationQuery, evaluator: Evaluator) -> Evaluation:
        """Let clients evaluate the mixture by their weights.

        A client that has not trained computes its weights by an E-step with equal weights as the
        prior.
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
            leaning, _ = self._expected(evaluator, new, query.models, mixture, [None] * len(new))
            found = {client: each.mean(0).cpu() for client, each in zip(new, leaning, strict=True)}
            kept |= found
            for client, weights in found.items():  # an export of the client's model needs them
                self.store.add(client, {SERVED_MIXTURE: weights})
        weights = torch.stack([kept[client].cpu() for client in ids])
        return evaluator.evaluate_mixture(ids, query.models, weights, query.split)

    def _expected(
        self,
        evaluator: Evaluator,
        ids: Sequence[int],
        models: Tensor,
        mixture: Mixture,
        before: Sequence[Tensor | None],
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the responsibilities for each client's training examples, and its table (E-step).

        Responsibilities are ``[n_i, K]``. The tables are None if the mixture is not by label.
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
                pi = alike if before[place] is None else before[place]
                assert pi is not None
                targets = targets.to(mine.device)
                leaning[place] = mixture.responsibilities(pi.to(mine), mine.t(), targets)
                if mixture.by_label:
                    tables[place] = mixture.tables(leaning[place], targets, self.labels or 1)
        return leaning, torch.stack(tables) if mixture.by_label else None

    def _check(self, mixture: Mixture) -> None:
        if self.layout.personal:
            raise ConfigError(
                "the models of a mixture have no personal part, since each client has all of "
                "them; leave out model.personal"
            )
        if (mixture.by_label or mixture.rates is not None) and self.labels is None:
            raise ConfigError(
                "labels cannot be counted in a task whose examples do not have one label each; "
                "take fedem in place of fedrc"
            )
