"""Aggregator's part of central differential privacy: noise on the sums of clients' vectors.

The module :mod:`fedclade.channel.central` has the settings and the clients' part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from fedclade.channel.central import CentralPrivacy
from fedclade.channel.middleware import Middleware
from fedclade.core import (
    SENSITIVITY,
    ConfigError,
    Event,
    ParameterTree,
    PrivateRelease,
    Round,
    Sums,
    TrainQuery,
    Updates,
    rng,
)


class NoisySums(Middleware):
    """Middleware of the aggregator, which sends the server only noisy sums and clients' choices.

    If each client is sampled independently, sums of updates are divided by the expected number of
    clients, not by the actual number.

    Parameters
    ----------
    privacy
        Settings of the noise; None for exact sums.
    sampling
        Share of the clients that is sampled. If None, the privacy accounting assumes that all
        clients contribute to every sum.

    Attributes
    ----------
    expected
        Expected number of sampled clients in each client's cluster, by client. The run sets this
        attribute before a step for which clients are sampled, and to None after the step.
    """

    queries: ClassVar = (TrainQuery,)

    def __init__(self, privacy: CentralPrivacy | None = None, sampling: float | None = 1.0) -> None:
        self._privacy = privacy
        self._sampling = sampling
        self.expected: Mapping[int, float] | None = None
        self._events: list[PrivateRelease] = []

    def told(self) -> tuple[PrivateRelease, ...]:
        """Return the events of all private releases since the last call, and clear the list."""
        events = tuple(self._events)
        self._events = []
        return events

    def moved_by_noise(
        self,
        tree: ParameterTree,
        expected: Mapping[int, float],
        released: Sequence[Event],
        this_round: Round,
    ) -> tuple[ParameterTree, list[PrivateRelease]]:
        """Add noise to the models of clusters of which no client was sampled in the round.

        An unchanged model would reveal that none of the cluster's clients was sampled in a round of
        training. The noise is the same as in a noisy sum of no updates.

        Parameters
        ----------
        tree
            The tree after the round.
        expected
            Expected number of sampled clients in each cluster without a sampled client, by the
            cluster's node in the tree.
        released
            Releases of the round. If the round released no sum, the noise counts as a release.
        this_round
            The round, whose seed and number determine the noise.

        Returns
        -------
        tuple
            The tree with the changed models, and a list with the release of the noise, which is
            empty if the noise does not count as a release.
        """
        if (privacy := self._privacy) is None:
            return tree, []
        for node, number in expected.items():
            draw = rng.generator(
                this_round.seed, "dp noise on sums of nobody", this_round.number, node
            )
            params = tree.nodes[node].params
            noise = torch.from_numpy(draw.standard_normal(len(params))).to(params)
            tree = tree.moved(node, noise * (privacy.multiplier(None) * privacy.clip_norm / number))
        if released or not expected:
            return tree, []
        return tree, [
            PrivateRelease(
                0, "updates", noise_multiplier=privacy.multiplier(None), sampling=self._sampling
            )
        ]

    def after(self, query: TrainQuery, reply: Updates) -> Updates:
        """Add noise to the sums in a reply.

        If the query asks each client to choose a cluster, the reply has the clients' choices. They
        pass unchanged: each client has already randomized its own choice.

        Raises
        ------
        ConfigError
            If single updates arrive, as in a run that does not stream.
        """
        question = query.work.question
        updates = _sum_replies(reply) if question is not None and question.sums else reply
        if (privacy := self._privacy) is None or not query.work.sends_update:
            return updates
        if question is not None and not question.sums:
            self._events.append(
                PrivateRelease(
                    0, question.about, epsilon=privacy.signature_epsilon, options=question.options
                )
            )
            return updates
        if updates.deltas is not None:
            raise ConfigError(
                'single updates reached the server, but privacy.model = "central" allows only sums '
                "of updates; set stream = true"
            )
        multiplier = privacy.multiplier(question)
        about = "updates" if question is None else question.about
        # A question goes to all clients. So does a training query without expected numbers of
        # clients. Neither is amplified by sampling.
        sampling = self._sampling if question is None and self.expected is not None else None
        self._events.append(
            PrivateRelease(0, about, noise_multiplier=multiplier, sampling=sampling)
        )
        reach = privacy.clip_norm if question is None else SENSITIVITY / 2
        sums = self._add_noise(updates, query, about, multiplier * reach)
        unknown = torch.full_like(updates.norms, math.nan)
        return updates.with_columns(norms=unknown).with_common(sums=sums)

    def _add_noise(self, updates: Updates, query: TrainQuery, about: str, deviation: float) -> Sums:
        """Return the sums with Gaussian noise on every number.

        Parameters
        ----------
        updates
            Updates with exact sums, one for each group of clients.
        query
            The query, whose round determines the random draws.
        about
            Topic of the sums, such as ``updates``. It is part of the key of the random draws.
        deviation
            Standard deviation of the noise.
        """
        assert updates.sums is not None
        this_round = query.round
        groups = updates.sums.groups
        group = updates.sums.group
        key = this_round.number, this_round.query
        draw = rng.generator(
            this_round.seed, f"dp noise on sums of {about} in {this_round.purpose}", *key
        )
        sums = groups.double()
        sums = sums + deviation * torch.from_numpy(draw.standard_normal(sums.shape)).to(sums)
        if query.work.question is not None:
            return Sums(sums, group, deviation)
        if self.expected is not None:
            for row in range(len(sums)):
                places = (group == row).nonzero().flatten().tolist()
                if places:
                    client = updates.ids[places[0]]
                    sums[row] *= len(places) / self.expected[client]
        return Sums(sums.to(groups.dtype), group, deviation)


def _sum_replies(updates: Updates) -> Updates:
    """Replace the replies of clients, or the sums of groups, by one sum over all clients."""
    none = torch.zeros(len(updates.ids), dtype=torch.int64)
    if updates.sums is not None:
        total = updates.sums.groups.double().sum(0, keepdim=True)
    else:
        total = updates.required_deltas.double().sum(0, keepdim=True)
    without = updates.with_columns(deltas=None, sketches=None)
    return without.with_common(sums=Sums(total, none))


# The client's side: clips updates for sums, and replies to questions about them.
