"""Central differential privacy: the server receives only noisy sums over the clients of a model.

A client clips its update to length C and adds it to a sum, in which all clients have equal weight.
An aggregator that does not reveal single updates (secure aggregation or a trusted party; here, the
simulation) adds Gaussian noise of standard deviation z·C to every number of the sum before the
server receives the sum. With any other data of one client, its clipped update would differ by at
most 2C, and so would the sum. In each round a client contributes to only one sum, and earlier
releases alone determine to which one. So the release of the sums of all clusters is one Gaussian
mechanism with noise multiplier z/2.

Clients are compared by private questions (:mod:`fedclade.core.private_questions`): queries for a
sum of vectors that depend on updates, or for each client's choice among k options. Any two vectors
that one client could send differ by at most √2, and the sums get noise of standard deviation z'/√2,
which again is a Gaussian mechanism with multiplier z'/2. Choices reach the server by randomized
response: with some probability a client reports a random option instead of its choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from fedclade.channel.accounting import Release, composed_epsilon, share_at_random
from fedclade.channel.middleware import Middleware
from fedclade.channel.privacy import DifferentialPrivacy, Noise, withhold_losses
from fedclade.core import (
    Ask,
    Choice,
    Delta,
    Query,
    Question,
    Round,
    TrainQuery,
    Updates,
    about,
    check_settings,
    checked,
    document_settings,
    in_range,
    require,
    setting,
)

LARGEST_EPSILON = 100
"""Bound on ε of a choice: with a larger ε randomized response would report the truth."""


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class CentralPrivacy:
    """Settings of central differential privacy: clipping, noise on sums, and randomized response.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    clip_norm: float = field(
        metadata=about(
            doc="Largest L2 norm C of an update, as in :class:`DifferentialPrivacy`.",
            allowed=in_range("(0, inf)", "greater than 0 and finite"),
        )
    )
    noise_multiplier: float = setting(
        0.0,
        in_range("[0, inf)", "at least 0 and finite"),
        doc="""z: the noise on every number of a sum of updates has standard deviation z·C; 0 for
        none.""",
    )
    signature_noise: float | None = setting(
        None,
        in_range("[0, inf)", "at least 0 and finite, or left out for noise_multiplier"),
        doc="z' of the sums by which clients are compared; ``noise_multiplier`` if left out.",
        later=True,
    )
    signature_epsilon: float | None = setting(
        None,
        in_range(f"(0, {LARGEST_EPSILON})", f"greater than 0 and less than {LARGEST_EPSILON}"),
        doc="ε of each choice that a client reports; if left out, clients report the true choice.",
        later=True,
    )
    delta: float = setting(
        1e-5,
        in_range("(0, 1)", "greater than 0 and less than 1"),
        doc="δ, well below one over the number of clients.",
    )

    def __post_init__(self) -> None:
        check_settings(self, "privacy")

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> CentralPrivacy | None:
        """Return the settings in the ``[privacy]`` section of a config, or None for local privacy.

        Raises
        ------
        ConfigError
            If a value is out of range, ``model`` is neither ``local`` nor ``central``, or a setting
            belongs to the other model of privacy.
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
            rule = 'left out unless privacy.model = "central"'
            require(*((f"privacy.{name}", given[name], False, rule) for name in for_sums))
            return None
        clip = section.get("clip_norm")
        permute = section.get("permute", False)
        level = section.get("level", "client")
        where = 'if privacy.model = "central"'
        require(
            ("privacy.clip_norm", clip, clip is not None, f"set {where}"),
            ("privacy.permute", permute, not permute, f"false {where}"),
            ("privacy.level", level, level == "client", f"client {where}"),
        )
        return cls(**given)

    @property
    def section(self) -> dict[str, Any]:
        """``[privacy]`` section of a config with these settings of central privacy."""
        return {"model": "central", **asdict(self)}

    def multiplier(self, question: Question | None) -> float:
        """Return the noise multiplier of a sum of updates, or of a sum of replies to a question.

        The multiplier is ``noise_multiplier`` for updates, and ``signature_noise`` for replies to a
        question. If ``signature_noise`` is not set, it is ``noise_multiplier`` for both.

        Parameters
        ----------
        question
            The question to which clients reply; None if they send updates.
        """
        own = self.noise_multiplier if self.signature_noise is None else self.signature_noise
        return self.noise_multiplier if question is None else own

    def spent(self, releases: list[Release]) -> dict[str, Any]:
        """Return the privacy entries of a run's summary, by name.

        ``epsilon`` bounds what the server learns; the server knows the sampled clients.
        ``epsilon_public`` bounds what recipients of the models learn, as long as the server does
        not reveal the sampled clients to them. A value of None means that there is no bound.

        Parameters
        ----------
        releases
            All releases of noisy sums and choices in the run.
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


@dataclass
class Answering(Middleware):
    """Middleware of clients that clips updates for a sum, and replies to questions about updates.

    A question is a query for a vector that depends on the client's update and is added to a sum, or
    for a choice among options. With privacy, all clients get equal weight. Without privacy, updates
    pass unchanged, and replies to questions are exact. A client trains once for all questions of a
    round.

    Parameters
    ----------
    privacy
        Settings of central privacy; None for no privacy.
    noise
        Source of the randomness of choices (randomized response); None: clients report their true
        choices.
    """

    privacy: CentralPrivacy | None = None
    noise: Noise | None = None
    _kept: dict[int, torch.Tensor] = field(default_factory=dict[int, Any])
    _of: tuple[Any, ...] = ()
    _told: dict[int, int] = field(default_factory=dict[int, int])
    _choice: Choice | None = None

    def handles(self, query: Query[Any]) -> bool:
        """Return whether the middleware clips updates, or replies to the question of a query."""
        if not isinstance(query, TrainQuery):
            return False
        return self.privacy is not None or query.work.question is not None

    def around(self, query: TrainQuery, ask: Ask) -> Updates:
        """Return clipped updates or, if the query has a question, the replies to the question."""
        # No sink may receive updates early: these updates would not be clipped.
        if query.work.question is not None:
            return self._reply_to_question(query, query.work.question, ask)
        return self._clip_updates(query, ask(query, None))

    def _clip_updates(self, query: TrainQuery, updates: Updates) -> Updates:
        """Return updates clipped to the clip norm, with equal weights and without losses."""
        assert self.privacy is not None  # or the query has a question
        updates = withhold_losses(updates)
        if not query.work.sends_update:
            return updates
        clipping = DifferentialPrivacy(clip_norm=self.privacy.clip_norm)
        deltas = torch.empty_like(updates.required_deltas)
        for row, update in zip(deltas, updates.required_deltas, strict=True):
            row.copy_(clipping.released(update, torch.zeros(1)))
        return updates.with_columns(deltas=deltas, sizes=torch.ones_like(updates.sizes))

    def _reply_to_question(self, query: TrainQuery, question: Question, ask: Ask) -> Updates:
        """Return the clients' replies to a question about their updates.

        The signatures of the updates are stored, so that each client trains once for all questions
        of a round that have the same seed and size.
        """
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
            work = replace(query.work, reply=Delta())
            made = ask(replace(query.select(missing), work=work), None)
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
            choices = self._report_choices(question, answers.cpu(), ids, query.round)
            answers = u[:, :0]
        return Updates.of(
            ids=ids,
            sizes=ones,
            losses=torch.full((len(ids),), math.nan if self.privacy else 0.0),
            norms=torch.zeros(len(ids), dtype=torch.float64),
            n_parameters=answers.shape[1],
            deltas=answers,
            components=choices,
            left_out=left_out,
        )

    def _report_choices(
        self, question: Question, choices: torch.Tensor, ids: tuple[int, ...], this_round: Round
    ) -> torch.Tensor:
        """Return the choices that clients report, made random by randomized response.

        If the same question is repeated, clients repeat their first reply, so that the privacy cost
        remains that of one release.

        Parameters
        ----------
        question
            The question, which has options to choose from.
        choices
            True choice of each client, ``[n]``.
        ids
            Ids of the n clients.
        this_round
            Round, which determines the random draws.
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
        self, choices: torch.Tensor, ids: tuple[int, ...], options: int, this_round: Round
    ) -> torch.Tensor:
        """Apply randomized response: replace a random share of the choices by random options.

        Parameters
        ----------
        choices
            True choice of each client, ``[n]``.
        ids
            Ids of the n clients.
        options
            Number of options.
        this_round
            Round, which determines the random draws.
        """
        epsilon = None if self.privacy is None else self.privacy.signature_epsilon
        if epsilon is None or self.noise is None:
            return choices
        from scipy.special import ndtr

        share = share_at_random(epsilon, options)
        told = choices.clone()
        for place, client in enumerate(ids):
            noise = self.noise(2, client, this_round, "choices")
            whether, which = ndtr(noise.numpy())
            if whether < share:
                told[place] = min(int(which * options), options - 1)
        return told
