"""Differential privacy of single training examples by DP-SGD (Abadi et al. 2016, Algorithm 1).

Each step of local training takes a Poisson sample of a client's examples, clips the gradient of
each example, and adds noise to the sum. Momentum and Adam, proximal terms, decay, later steps, the
updates of a round and their means are computed from such noisy sums alone. So the guarantee covers
all results of training that a client sends, towards the server and all other parties.

Two data sets of a client are neighbours if they differ in one example that counts in one data set
and adds nothing to any sum in the other. This is the relation "add or remove one example", except
that the number of examples |D_i|, which is reported anyway, stays the same. The step ledger records
all steps of a client. Parts of the data on which a round trains separately are disjoint, so
together they cost as much as a single part. Amplification by the sampling of clients is not
claimed.

Not covered are quantities without noise: |D_i|, scores on validation and test data, and whether a
client replies. Training losses, subspaces, sums of the data and similar statistics are withheld or
refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedclade.channel.accounting import (
    SENSITIVITY,
    Budget,
    Ledger,
    check_budget,
    read_entries,
    write_entries,
)
from fedclade.channel.central import CentralPrivacy
from fedclade.channel.privacy import (
    DifferentialPrivacy,
    Privatizing,
    Withholding,
    keyed_noise,
    refusal_to_reveal,
)
from fedclade.core import (
    AllData,
    ConfigError,
    Em,
    EvaluationQuery,
    Examples,
    FullGradient,
    LocalRule,
    OfRounds,
    Round,
    SplitPart,
    Splits,
    Steps,
    TrainQuery,
    about,
    alone,
    check_settings,
    checked,
    document_settings,
    import_extra,
    in_range,
    require,
    setting,
)

# Privacy accounting of the noisy steps of one client: the joint ε at δ for one of its examples, and
# the file that counts the steps.

GRID = 1e-3
"""Grid to which privacy losses are rounded up, so that ε is too large by about 0.1 %."""

StepCounts = Mapping[tuple[float, float], int]
"""Number of steps by sampling rate q and noise multiplier σ."""


def epsilon_of_steps(
    steps: StepCounts, delta: float, releases: Mapping[float, int] | None = None
) -> float:
    """Return the joint privacy loss ε, at δ, of a client's DP-SGD steps for one training example.

    A step adds up the clipped gradients of a Poisson sample of examples, and adds Gaussian noise
    of standard deviation σ·C. Each example is in the sample with probability q, and contributes at
    most the clip norm C to the sum. ``dp-accounting`` composes the privacy loss distributions of
    the steps, for an example that counts in one of two data sets and adds nothing in the other.

    Parameters
    ----------
    steps
        Number of steps by sampling rate q and noise multiplier σ. Without steps ε is 0; with a σ of
        0 it is infinite.
    delta
        δ, in (0, 1).
    releases
        Number of whole updates that the client also sent, by noise multiplier; see
        :func:`~fedclade.channel.accounting.epsilon_of`. Replacing one example can move a whole
        update by two clip norms, as replacing all data can.

    Returns
    -------
    float
        ε, rounded up.

    Raises
    ------
    ConfigError
        If δ is out of range.
    MissingExtraError
        If ``dp-accounting`` is not installed.
    """
    require(("delta", delta, 0 < delta < 1, "greater than 0 and less than 1"))
    import_extra("dp_accounting", "dp-accounting", "privacy", "stating ε")
    counted = tuple(sorted((rate, sigma, n) for (rate, sigma), n in steps.items() if n))
    whole = tuple(sorted((z, n) for z, n in (releases or {}).items() if n))
    if any(sigma == 0 for _, sigma, _ in counted) or any(z == 0 for z, _ in whole):
        return math.inf
    return _epsilon(counted, whole, delta) if counted or whole else 0.0


@lru_cache(maxsize=1024)
def _epsilon(
    steps: tuple[tuple[float, float, int], ...],
    releases: tuple[tuple[float, int], ...],
    delta: float,
) -> float:
    """Compute ε from hashable arguments, so that results are cached.

    Parameters
    ----------
    steps
        Sampling rate, noise multiplier and number of steps, in tuples.
    releases
        Noise multiplier and number of whole updates, in tuples.
    delta
        δ, in (0, 1).
    """
    accounting = import_extra("dp_accounting", "dp-accounting", "privacy", "stating ε")
    least = min([*(sigma for _, sigma, _ in steps), *(z / SENSITIVITY for z, _ in releases)])
    # With little noise, privacy losses are as large as 1/σ². A coarser grid keeps the number of its
    # points the same.
    grid = GRID * max(1.0, (0.5 / least) ** 2)
    accountant = accounting.pld.PLDAccountant(value_discretization_interval=grid)
    for rate, sigma, count in steps:
        event = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(sigma))
        accountant.compose(event, count)
    for z, count in releases:
        accountant.compose(accounting.GaussianDpEvent(z / SENSITIVITY), count)
    return float(accountant.get_epsilon(delta))


@dataclass(frozen=True)
class StepEntry:
    """Entry of a step ledger: the DP-SGD steps of one round of a run.

    All steps of an entry have the same sampling rate and noise multiplier.
    """

    run: str
    round: int
    noise_multiplier: float
    rate: float
    steps: int

    def __post_init__(self) -> None:
        z = self.noise_multiplier
        n = self.steps
        right = z >= 0 and math.isfinite(z) and 0 < self.rate <= 1
        if not (right and isinstance(n, int) and n > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                "an entry of a ledger of DP-SGD steps should have at least 1 step, a rate greater "
                "than 0 and at most 1, and a finite noise multiplier of at least 0, "
                f"got {n!r} steps of rate {self.rate!r} with noise multiplier {z!r}"
            )


@dataclass(frozen=True)
class StepLedger:
    """Ledger (JSON file) of the DP-SGD steps that one client has taken, over all its runs.

    The step ledger behaves as the ledger of updates
    (:class:`~fedclade.channel.accounting.Ledger`): steps are booked before the client takes them.

    Parameters
    ----------
    path
        The JSON file.
    budget
        Largest ε at δ that the client may spend; None for no limit.
    beside
        Ledger of the client's whole updates under client-level privacy. A whole update costs each
        example as much as it costs the client, so these updates add to the ε of the steps.
    """

    path: Path
    budget: Budget | None = None
    beside: Ledger | None = None

    def entries(self) -> tuple[StepEntry, ...]:
        """Return the steps in the ledger file; raise a PrivacyError if the file is damaged."""
        return read_entries(self.path, StepEntry)

    def spent(self, delta: float) -> float:
        """Return the joint ε, at δ, of all steps in the ledger.

        The method raises the errors of :func:`epsilon_of_steps` and :meth:`entries`.
        """
        return self._epsilon(self.entries(), delta)

    def book(
        self, noise_multiplier: float, rates: Mapping[float, int], run: str, number: int
    ) -> None:
        """Book DP-SGD steps in the ledger before the client takes them.

        If this method raises an error, nothing may leave the client.

        Parameters
        ----------
        noise_multiplier
            Noise multiplier σ of the steps.
        rates
            Number of steps by sampling rate.
        run, number
            Name of the run, and number of its round.

        Raises
        ------
        PrivacyError
            If the file is damaged, or the steps would exceed the budget.
        OSError
            If the file cannot be written.
        """
        with alone(self.path):
            entries = {(e.run, e.round, e.noise_multiplier, e.rate): e for e in self.entries()}
            for rate, steps in rates.items():
                key = run, number, noise_multiplier, rate
                before = entries[key].steps if key in entries else 0
                entries[key] = StepEntry(*key, steps=before + steps)
            check_budget(self.budget, lambda delta: self._epsilon(entries.values(), delta))
            write_entries(self.path, entries.values())

    def _epsilon(self, entries: Iterable[StepEntry], delta: float) -> float:
        """Return the joint ε, at δ, of ledger entries and of the updates in the other ledger."""
        counted = Counter[tuple[float, float]]()
        for entry in entries:
            counted[entry.rate, entry.noise_multiplier] += entry.steps
        return epsilon_of_steps(counted, delta, self.beside.counted() if self.beside else None)


Rates = Mapping[float, int]
"""Number of one client's noisy steps by sampling rate.

The sampling rate is the probability with which a step samples an example.
"""


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class ExamplePrivacy:
    """Settings of DP-SGD on clients: the clip norm, the noise, and the δ at which ε is computed.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    level: ClassVar[str] = "example"

    clip_norm: float = field(
        metadata=about(
            doc="""Largest L2 norm C of the gradient of one example, over all parameters that are
        trained together, in units of the gradient. A longer gradient is scaled down to it.""",
            allowed=in_range("(0, inf)", "greater than 0 and finite"),
        )
    )
    noise_multiplier: float = setting(
        0.0,
        in_range("[0, inf)", "at least 0 and finite"),
        doc="""σ: the sum of a step's gradients gets noise of standard deviation σ·C on every entry,
        and is then divided by the expected size of the sample. With 0, gradients are only clipped,
        and ε is infinite.""",
    )
    delta: float = setting(
        1e-5,
        in_range("(0, 1)", "greater than 0 and less than 1"),
        doc="δ, well below one over the number of a client's examples.",
    )

    def __post_init__(self) -> None:
        check_settings(self, "privacy")

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> ExamplePrivacy | None:
        """Return the settings of DP-SGD in the ``[privacy]`` section of a config.

        The result is None if the section's ``level`` is not ``example``.

        Raises
        ------
        ConfigError
            If the level is ``example`` but ``clip_norm`` is missing, or if a value is out of range.
        """
        if section.get("level") != cls.level:
            return None
        clip = section.get("clip_norm")
        require(
            ("privacy.clip_norm", clip, clip is not None, "a number if privacy.level = 'example'")
        )
        return cls(
            **{field.name: section[field.name] for field in fields(cls) if field.name in section}
        )

    @property
    def section(self) -> dict[str, Any]:
        """``[privacy]`` section of a config with these settings of DP-SGD."""
        return {"level": self.level, **asdict(self)}

    def epsilon(self, rates: Rates) -> float:
        """Return the joint ε of one client's DP-SGD steps.

        The method raises the errors of
        :func:`~fedclade.channel.example_privacy.epsilon_of_steps`.

        Parameters
        ----------
        rates
            Number of the client's steps by sampling rate.
        """
        return epsilon_of_steps(
            {(rate, self.noise_multiplier): steps for rate, steps in rates.items()}, self.delta
        )

    def spent(self, of_clients: Mapping[Any, Rates], releases: int) -> dict[str, Any]:
        """Return the privacy entries of a run's summary, by name.

        The entries ``epsilon`` and ``steps`` are about the client with the largest ε. An ε of None
        means that there is no bound.

        Parameters
        ----------
        of_clients
            Number of steps by sampling rate, for each client.
        releases
            Largest number of updates that one client sent.
        """
        each = [
            (self.epsilon(rates), sum(rates.values())) for rates in _select_costliest(of_clients)
        ]
        epsilon, steps = max(each, default=(0.0, 0))
        told = {"epsilon": epsilon if math.isfinite(epsilon) else None, **self.section}
        return {**told, "steps": steps, "releases": releases}


Mechanism = DifferentialPrivacy | ExamplePrivacy | CentralPrivacy
"""Any privacy mechanism: client level, example level, or client level with noise on sums only."""


def mechanism_of(section: Mapping[str, Any]) -> Mechanism | None:
    """Return the privacy mechanism that the ``[privacy]`` section of a config selects.

    The result is None if the section sets neither noise nor clipping.
    """
    return (
        CentralPrivacy.of(section) or ExamplePrivacy.of(section) or DifferentialPrivacy.of(section)
    )


def check_local(privacy: Mechanism | None) -> DifferentialPrivacy | ExamplePrivacy | None:
    """Check that a run over a network can have a privacy mechanism, and return the mechanism.

    Raises
    ------
    ConfigError
        If the mechanism is central privacy: only a simulation can add noise to sums.
    """
    if isinstance(privacy, CentralPrivacy):
        raise ConfigError(
            'privacy.model = "central" works only in a simulation, because no party of a network '
            "adds noise to sums of updates: the server would receive single updates, or exact sums "
            'with network.secure_aggregation = true; set privacy.model = "local"'
        )
    return privacy


def noisy_steps(query: TrainQuery, examples: int) -> Counter[float]:
    """Return the number of DP-SGD steps, by sampling rate, that a query costs a client.

    If clients train on several parts of their data, the result is a bound for one part: the
    sampling rate of the smallest part and the number of steps of the largest part. Parts are
    disjoint, so each example is used only in the steps of one part, and the bound for one part
    holds for the whole query.

    Parameters
    ----------
    query
        The query.
    examples
        Number of the client's training examples.
    """
    data = query.work.data
    local = query.local
    smallest = largest = examples
    if isinstance(data, Splits | SplitPart):
        if data.drawn_from is not None:
            examples = min(examples, data.drawn_from)
        smallest = data.size or max(1, examples // data.count)
        largest = data.size or max(1, -(-examples // data.count))
    if isinstance(data, Splits):
        _, local = data.split(0, local)
    steps = query.work.steps.count_steps(local, largest)
    return Counter({sampling_rate(local.batch_size, smallest): steps})


def sampling_rate(batch_size: int, examples: int) -> float:
    """Return the probability with which each example is in the Poisson sample of a DP-SGD step.

    The expected size of the sample is then ``batch_size``, or all examples if there are fewer.
    """
    return min(1.0, batch_size / max(1, examples))


@dataclass(frozen=True)
class PrivateExamples(Withholding):
    """Middleware of DP-SGD clients that refuses queries for quantities without noise.

    The noise itself is added in the steps of training.

    Parameters
    ----------
    sizes
        Number of training examples of each client, by client id.
    book
        Function of a round and the number of a client's steps by sampling rate. It is called before
        the client trains, once for all parts of its data. If it raises an error, the client does
        not train. None to record nothing.
    """

    sizes: Mapping[int, int]
    book: Callable[[Round, Rates], None] | None = None

    def before(self, query: Any) -> Any:
        """Record the DP-SGD steps that a query requests, and return the query unchanged.

        Raises
        ------
        ConfigError
            If the updates would not result from DP-SGD steps alone; if the query requests scores of
            a mixture of models, whose weights clients compute from training losses; or if the base
            class refuses the query.
        """
        query = super().before(query)
        if isinstance(query, EvaluationQuery) and query.mixture is not None:
            raise refusal_to_reveal(
                "training losses, from which they would compute the weights of a mixture of models"
            )
        if isinstance(query, TrainQuery):
            _check_steps(query.work.steps)
            if query.round.local.trainer is not None:
                raise refusal_to_reveal(
                    "updates by a training function of the user (local.trainer), to whose steps no "
                    "noise is added"
                )
            _check_examples(query.work.data)
            self._book_steps(query)
        return query

    def after(self, query: Any, reply: Any) -> Any:
        """Replace the training losses of updates by NaN; replies to other queries are unchanged."""
        if not isinstance(query, TrainQuery):
            return reply
        return reply.with_columns(losses=torch.full_like(reply.losses, math.nan))

    def _book_steps(self, query: TrainQuery) -> None:
        """Record the steps that a query requests of each client.

        If clients train on parts of their data, only the query about the first part is recorded,
        for all parts together.
        """
        data = query.work.data
        is_booked = isinstance(data, SplitPart) and data.place > 0
        if self.book is None or is_booked:
            return
        for client in query.ids:
            self.book(query.round, noisy_steps(query, self.sizes[client]))


def _check_steps(steps: Steps) -> None:
    """Raise a ConfigError if the class of training steps is not declared as steps of DP-SGD."""
    kind = type(steps)
    # The declaration is not inherited: a subclass may take other steps, or more steps, whose number
    # has to be counted.
    allows_noise = vars(kind).get("allows_noise", False)
    # A method count_steps of a base class of the class that defines the steps cannot count them.
    if allows_noise and issubclass(_find_definer(kind, "count_steps"), _find_definer(kind, "run")):
        return
    if isinstance(steps, FullGradient):
        raise refusal_to_reveal(
            "gradients over all their examples, which they compute without DP-SGD steps"
        )
    if isinstance(steps, Em):
        raise refusal_to_reveal("the models of a mixture, which they train without DP-SGD steps")
    if isinstance(steps, LocalRule):
        raise ConfigError(
            f"the local rule {steps.name} does not train with DP-SGD steps, the only steps whose "
            "privacy cost is known; choose an algorithm without a local rule, or set "
            "privacy.level = 'client'"
        )
    raise ConfigError(
        f"the class {type(steps).__name__} does not declare that it trains with DP-SGD steps, the "
        "only steps whose privacy cost is known; if it does, set allows_noise = True and define "
        "count_steps in this class; otherwise set privacy.level = 'client'"
    )


def _find_definer(kind: type[Steps], method: str) -> type[Any]:
    """Return the class that defines a method of ``kind``: this class itself or a base class."""
    return next(each for each in kind.__mro__ if method in vars(each))


def _check_examples(data: Examples) -> None:
    """Raise a ConfigError if the sampling rate of steps on a query's examples is unknown."""
    if isinstance(data, OfRounds):
        raise refusal_to_reveal(
            "updates trained on the combined examples that they had in several rounds"
        )
    if not isinstance(data, AllData | Splits | SplitPart):
        raise refusal_to_reveal(f"updates trained on examples that {type(data).__name__} selects")


def privatizing(
    privacy: Mechanism | None, sizes: Mapping[int, int], keys: Mapping[int, int]
) -> Withholding | None:
    """Return the privacy middleware of simulated clients, or None without privacy.

    With central privacy, clients add no noise, since an aggregator adds it
    (:class:`~fedclade.channel.noisy_sums.NoisySums`). The clients' middleware then allows only queries
    for updates and scores, and refuses all other queries.

    Parameters
    ----------
    privacy
        The privacy mechanism; None for no privacy.
    sizes, keys
        Number of training examples and key of each client, by client id. The noise depends on the
        key.
    """
    if isinstance(privacy, DifferentialPrivacy):
        return Privatizing(privacy, keyed_noise(keys))
    if isinstance(privacy, ExamplePrivacy):
        return PrivateExamples(sizes)
    return Withholding() if privacy else None


def booked_steps(
    privacy: ExamplePrivacy, ledger: StepLedger, run: str, sizes: Mapping[int, int]
) -> PrivateExamples:
    """Return the DP-SGD middleware of a real (not simulated) client.

    Steps are booked in the client's ledger before the client takes them. Beyond the ledger's budget
    the client takes no steps.

    Parameters
    ----------
    privacy
        Clip norm and noise.
    ledger
        Ledger of the client's steps.
    run
        Name of the run, which the ledger records with the steps.
    sizes
        Number of training examples of the client, by its id.
    """
    return PrivateExamples(
        sizes, lambda r, rates: ledger.book(privacy.noise_multiplier, rates, run, r.number)
    )


def _select_costliest(of_clients: Mapping[Any, Rates]) -> list[Rates]:
    """Reduce the steps of all clients to a few cases, whose largest ε bounds the ε of each client.

    The reduction saves computations of ε. The step counts of each client are sorted by sampling
    rate. Clients with equal lists of step counts are replaced by one case with the same counts, and
    with the largest of the clients' rates at each position of the list. The ε of the case is at
    least the ε of each of these clients; usually it is the ε of the client with the fewest
    examples.
    """
    found: dict[tuple[int, ...], list[float]] = {}
    for rates in of_clients.values():
        ordered = sorted(rates.items(), reverse=True)
        key = tuple(steps for _, steps in ordered)
        before = found.get(key, [0.0] * len(key))
        found[key] = [max(mine, rate) for mine, (rate, _) in zip(before, ordered, strict=True)]
    summed: list[Rates] = []
    for steps, rates in found.items():
        counted = Counter[float]()
        for rate, number in zip(rates, steps, strict=True):
            counted[rate] += number
        summed.append(counted)
    return summed
