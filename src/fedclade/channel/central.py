"""Central differential privacy: the server sees only noisy sums over the clients of a model.

A client clips its update to length C and adds it to a sum, in which all clients have equal weight.
An aggregator that does not show single updates (secure aggregation or a trusted party; here, the
simulation) adds Gaussian noise of standard deviation z·C to every number of the sum before the
server receives it. With any other data of one client, its clipped update would differ by at most
2C, and so would the sum. In any round a client is in only one sum, whose members follow from
earlier releases. So the release of the sums of all clusters is one Gaussian mechanism of multiplier
z/2.

Clients are compared by questions (:mod:`fedclade.core.private_questions`). Sums of vectors that are
at most √2 apart get noise of standard deviation z'/√2, which again is a Gaussian mechanism of
multiplier z'/2. Choices among k options reach the server by randomized response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import scipy
import torch
from torch import Tensor

from fedclade.channel.accounting import Release, composed_epsilon, share_at_random
from fedclade.channel.middleware import Middleware
from fedclade.channel.privacy import DifferentialPrivacy, Noise
from fedclade.core import (
    SENSITIVITY,
    Ask,
    Choice,
    ConfigError,
    Event,
    ParameterTree,
    PrivateRelease,
    Question,
    Round,
    Sums,
    UpdateQuery,
    Updates,
    checked,
    require,
    rng,
)


@checked()
@dataclass(frozen=True, kw_only=True)
class CentralPrivacy:
    """Settings of central privacy: clipping, noise on sums, and randomized response.

    Parameters
    ----------
    clip_norm
        Largest L2 norm C of an update, as in :class:`DifferentialPrivacy`.
    noise_multiplier
        z: the noise on every number of a sum of updates has standard deviation z·C; 0 for none.
    signature_noise
        z' of the sums by which clients are compared; ``noise_multiplier`` if left out.
    signature_epsilon
        ε of each choice that a client reports; if left out, clients report the true choice.
    delta
        δ, well below one over the number of clients.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    clip_norm: float
    noise_multiplier: float = 0.0
    signature_noise: float | None = None
    signature_epsilon: float | None = None
    delta: float = 1e-5

    def __post_init__(self) -> None:
        signature = self.signature_noise
        epsilon = self.signature_epsilon
        DifferentialPrivacy(
            clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier, delta=self.delta
        )
        holds = epsilon is None or 0 < epsilon < LARGEST_EPSILON
        require(
            (
                *("privacy.signature_noise", signature),
                signature is None or 0 <= signature < math.inf,
                "at least 0 and finite, or left out for noise_multiplier",
            ),
            (
                "privacy.signature_epsilon",
                epsilon,
                holds,
                f"greater than 0 and less than {LARGEST_EPSILON}",
            ),
        )

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> CentralPrivacy | None:
        """Return the settings in the ``[privacy]`` section of a config, or None for another model.

        Raises
        ------
        ConfigError
            If a value is out of range, the model is unknown, or a setting belongs to another model.
        """
        model = section.get("model", "local")
        require(("privacy.model", model, model in ("local", "central"), "'local' or 'central'"))
        given = {
            name: section[name]
            for name in (each.name for each in fields(cls))
            if section.get(name) is not None
        }
        if model == "local":
            for_sums = [name for name in ("signature_noise", "signature_epsilon") if name in given]
            rule = 'left out without model = "central"'
            require(*((f"privacy.{name}", given[name], False, rule) for name in for_sums))
            return None
        clip = section.get("clip_norm")
        permute = section.get("permute", False)
        level = section.get("level", "client")
        where = 'where privacy.model = "central"'
        require(
            ("privacy.clip_norm", clip, clip is not None, f"set {where}"),
            ("privacy.permute", permute, not permute, f"false {where}"),
            ("privacy.level", level, level == "client", f"client {where}"),
        )
        return cls(**given)

    @property
    def section(self) -> dict[str, Any]:
        """``[privacy]`` section of a config with these settings."""
        return {"model": "central", **asdict(self)}

    def multiplier(self, question: Question | None) -> float:
        """Return the noise multiplier: z for sums of updates, z' for replies to a question."""
        own = self.noise_multiplier if self.signature_noise is None else self.signature_noise
        return self.noise_multiplier if question is None else own

    def spent(self, releases: list[Release]) -> dict[str, Any]:
        """Return the privacy entries of a run's summary.

        ``epsilon`` holds towards the server, which knows the clients that are sampled.
        ``epsilon_public`` holds towards recipients of the models, who do not know them as long as
        the server does not reveal them. None means that there is no bound.
        """
        server = composed_epsilon(releases, self.delta, sampled=False)
        public = composed_epsilon(releases, self.delta, sampled=True)
        return {
            "epsilon": server if math.isfinite(server) else None,
            "epsilon_public": public if math.isfinite(public) else None,
            **{
                "model": "central",
                "level": "client",
                "towards": "the server, which gets sums and choices alone",
            },
            **asdict(self),
            "releases": len(releases),
        }


LARGEST_EPSILON = 100
"""Bound on ε of a choice: with a larger ε randomized response would report the truth."""


class NoisySums(Middleware):
    """Middleware of the aggregator that adds noise to sums, and passes only sums and choices.

    If clients are sampled, sums of updates are divided by the expected number of clients, not by
    the actual number.

    Parameters
    ----------
    privacy
        The settings; None for exact sums.
    sampling
        Share of the clients that is sampled. If None, releases count as if all clients were in
        them.
    """

    def __init__(self, privacy: CentralPrivacy | None = None, sampling: float | None = 1.0) -> None:
        self._privacy = privacy
        self._sampling = sampling
        self._events: list[PrivateRelease] = []

    def told(self) -> tuple[PrivateRelease, ...]:
        """Return the releases since the last call, and forget them."""
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
        """Move the models of clusters without a sampled client by the noise of their sums.

        An unchanged model would reveal that none of the cluster's clients was sampled in a round of
        training.

        Parameters
        ----------
        tree
            The tree after the round.
        expected
            Expected number of sampled clients of each such cluster, by node.
        released
            Releases of the round. If it released no sum, the noise counts as a release.
        this_round
            The round, whose seed and number determine the noise.

        Returns
        -------
        tuple
            The tree, and the release of the noise if there is one.
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

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return sums with noise, or choices.

        Raises
        ------
        ConfigError
            If single updates arrive, as in a run that does not stream.
        """
        question = query.question
        updates = ask(query)
        if question is not None and question.sums:
            updates = _summed(updates)
        if (privacy := self._privacy) is None or (
            query.kind == "train" and not query.round.sends_updates
        ):
            return updates
        if query.is_secret:
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
                'privacy.model = "central" gives the server sums alone; set stream = true'
            )
        multiplier = privacy.multiplier(question)
        about = "updates" if question is None else question.about
        # A question goes to all clients. So does a training query without expected numbers of
        # clients. Neither is amplified by sampling.
        sampling = self._sampling if question is None and query.round.expected is not None else None
        self._events.append(
            PrivateRelease(0, about, noise_multiplier=multiplier, sampling=sampling)
        )
        norms = torch.full_like(updates.norms, math.nan)
        return replace(updates, sums=self._noised(updates, query, multiplier), norms=norms)

    def _noised(self, updates: Updates, query: UpdateQuery, multiplier: float) -> Sums:
        assert self._privacy is not None
        assert updates.sums is not None
        question = query.question
        this_round = query.round
        reach = self._privacy.clip_norm if question is None else SENSITIVITY / 2
        about = "updates" if question is None else question.about
        deviation = multiplier * reach
        sums = updates.sums.groups.double()
        key = this_round.number, this_round.query
        draw = rng.generator(
            this_round.seed, f"dp noise on sums of {about} in {this_round.purpose}", *key
        )
        sums = sums + deviation * torch.from_numpy(draw.standard_normal(sums.shape)).to(sums)
        if question is None and this_round.expected is not None:
            for row in range(len(sums)):
                ids = [
                    updates.ids[place]
                    for place in (updates.sums.group == row).nonzero().flatten().tolist()
                ]
                if ids:
                    sums[row] *= len(ids) / this_round.expected[ids[0]]
        exact = updates.sums.groups.dtype if question is None else torch.float64
        return Sums(sums.to(exact), updates.sums.group, deviation)


def _summed(updates: Updates) -> Updates:
    """Return the sum over all clients in place of their replies or of their groups' sums."""
    none = torch.zeros(len(updates.ids), dtype=torch.int64)
    if updates.sums is not None:
        total = updates.sums.groups.double().sum(0, keepdim=True)
    else:
        total = updates.required_deltas.double().sum(0, keepdim=True)
    return replace(updates, deltas=None, sketches=None, sums=Sums(total, none))


# The client's side: clips updates for sums, and replies to questions about them.


@dataclass
class Answering(Middleware):
    """Middleware that clips updates for a sum, and replies to questions about updates.

    This middleware acts at the client, and gives all clients equal weight. Without privacy, updates
    pass unchanged, and replies to questions are exact. A client trains once for all questions of a
    round.

    Parameters
    ----------
    privacy
        The settings; None for no privacy.
    noise
        Source of the randomness of choices; None: choices are true.
    """

    privacy: CentralPrivacy | None = None
    noise: Noise | None = None
    _kept: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _of: tuple[Any, ...] = ()
    _told: dict[int, int] = field(default_factory=dict[int, int])
    _choice: Choice | None = None

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return clipped updates, or replies to the query's question."""
        if query.question is not None:
            return self._answered(query, query.question, ask)
        updates = ask(query)
        if self.privacy is None:
            return updates
        withheld = torch.full_like(updates.losses, math.nan)
        if query.kind == "train" and not query.round.sends_updates:
            return replace(updates, losses=withheld)
        clipping = DifferentialPrivacy(clip_norm=self.privacy.clip_norm)
        deltas = torch.empty_like(updates.required_deltas)
        for row, update in zip(deltas, updates.required_deltas, strict=True):
            row.copy_(clipping.released(update, torch.zeros(1)))
        return replace(
            updates, deltas=deltas, sizes=torch.ones_like(updates.sizes), losses=withheld
        )

    def _answered(self, query: UpdateQuery, question: Question, ask: Ask) -> Updates:
        of = (
            query.round.seed,
            query.round.number,
            query.round.purpose,
            question.seed,
            question.dim,
        )
        if of != self._of:
            self._kept = {}
            self._of = of
            self._choice = None
        missing = [client for client in query.ids if client not in self._kept]
        left_out: Mapping[int, str] = {}
        if missing:
            made = ask(replace(query.select(missing), question=None, sink=None))
            signatures = question.signatures(made.required_deltas[:, : made.n_parameters])
            self._kept |= dict(zip(made.ids, signatures, strict=True))
            left_out = made.left_out
        ids = tuple(client for client in query.ids if client in self._kept)
        R = question.dim
        u = (
            torch.stack([self._kept[c] for c in ids])
            if ids
            else torch.zeros(0, R, dtype=torch.float64)
        )
        answers = question.answered(u)
        ones = torch.ones(len(ids), dtype=torch.float64)
        choices = None
        if not question.sums:
            choices = self._reported(question, answers.cpu(), ids, query.round)
            answers = u[:, :0]
        return Updates(
            ids=ids,
            sizes=ones,
            losses=torch.full((len(ids),), math.nan if self.privacy else 0.0),
            norms=torch.zeros(len(ids), dtype=torch.float64),
            n_parameters=answers.shape[1],
            deltas=answers,
            components=choices,
            left_out=left_out,
        )

    def _reported(
        self, question: Question, choices: Tensor, ids: tuple[int, ...], this_round: Round
    ) -> Tensor:
        """Return choices by randomized response.

        If the same question is repeated, clients repeat their reply, so that it remains one
        release.
        """
        assert isinstance(question, Choice)
        if self._choice is None or not question.is_same(self._choice):
            self._choice = question
            self._told = {}
        new = [place for place, client in enumerate(ids) if client not in self._told]
        if new:
            some = tuple(ids[place] for place in new)
            self._told |= dict(
                zip(
                    some,
                    self._responded(choices[new], some, question.options, this_round).tolist(),
                    strict=True,
                )
            )
        return torch.tensor([self._told[client] for client in ids], dtype=torch.int64)

    def _responded(
        self, choices: Tensor, ids: tuple[int, ...], options: int, this_round: Round
    ) -> Tensor:
        """Return choices by randomized response: a random share is drawn from all options."""
        epsilon = None if self.privacy is None else self.privacy.signature_epsilon
        if epsilon is None or self.noise is None:
            return choices
        share = share_at_random(epsilon, options)
        told = choices.clone()
        for place, client in enumerate(ids):
            noise = self.noise(2, client, this_round, "choices")
            whether, which = scipy.special.ndtr(noise.numpy())
            if whether < share:
                told[place] = min(int(which * options), options - 1)
        return told
