"""Gains of a run's clients: how much better their models are than simpler models.

A gain is the difference between a client's score with the run's model and its score with a simpler
model: a single model for all clients, a model that the client trained alone, or the most frequent
label. The module also tests which traits distinguish the clusters, and how much of the differences
between clients the clusters explain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from fedclade.clustering import PERMUTATIONS, Explained, explain_differences
from fedclade.core import rng
from fedclade.data import Attributes, check_attributes
from fedclade.report.formats import NONE, count, number, percent, significant
from fedclade.report.run_view import Outcome
from fedclade.report.score import Score
from fedclade.report.tables import new_table, wrap_heading
from fedclade.runs import (
    ALONE,
    CLUSTER,
    ONE_MODEL,
    OWN,
    TRIVIAL,
    ClientGains,
    Gains,
    Run,
    serves_own,
)
from fedclade.tasks import Interval, mean_interval

_Write = Callable[[float], str]

LABELS: Mapping[str, str] = {
    TRIVIAL: "trivial",
    ALONE: "alone",
    ONE_MODEL: "one model",
    CLUSTER: "cluster model",
    OWN: "own",
}
"""Headings of the compared models in tables."""

EXPLAINED_AS: Mapping[str, str] = {
    TRIVIAL: "the most frequent label, or the mean target, of the client’s training rows",
    ALONE: "a model that the client trains by itself",
    ONE_MODEL: "one model for all clients (FedAvg)",
    CLUSTER: "the model of the client’s cluster",
    OWN: "the client’s own model",
}
"""Explanations of the compared models in captions."""

LEVEL = 0.05
"""Significance level for differences between clusters, for all traits together."""

FEW_CLIENTS = 10
"""Number of clients below which statements about clusters are called weak evidence."""

MOST_OBSERVED = 1000
"""Largest number of clients that are listed if a run has no measured gains."""

CLUSTERS_LISTED = 6
TRAITS_LISTED = 15
"""Largest numbers of clusters and of traits in a table of differences."""

PRIVATE = "measuring this needs the clients’ data, which never leave the clients of a network"
NOT_ASKED = (
    "plain ClientApps evaluate the run’s models only; for one model, run ClusteredStrategy('fedavg') "
    "with the same clients, save it too, and compare both: fedclade report RUN FEDAVG_RUN"
)
NOT_MEASURED = "not measured; simulate the run with references=True to measure this"
"""Reasons why a run has no scores of a compared model."""

MODELS_IN_ORDER = (ONE_MODEL, ALONE, TRIVIAL, CLUSTER)
"""Models that a run is compared with, the most interesting model first."""


@dataclass(frozen=True)
class MeanGain:
    """Mean of the clients' gains compared with one simpler model.

    The mean includes all clients that have scores of both models.
    """

    model: str
    mean: Interval
    """Mean gain over the clients, with a 95 % interval over the clients."""
    clients: int
    """Number of clients with scores of both models."""
    better: int
    """Number of clients whose gain has an interval above 0."""
    worse: int
    """Number of clients whose gain has an interval below 0."""

    @property
    def trend(self) -> str:
        """Direction of the mean gain: ``good`` or ``bad`` if its interval excludes 0, or empty."""
        return self.mean.trend

    @property
    def without_interval(self) -> str:
        """Note that explains why the mean gain has no interval; empty if it has one.

        The note also contains the number of clients.
        """
        if self.mean.low is not None:
            return ""
        if self.clients == 1:
            return "1 client: too few for an interval"
        return f"{self.clients:,} clients: no interval, since all gain the same"


@dataclass(frozen=True)
class Difference:
    """Difference between the clusters in one trait of their clients.

    It has a typical value of the trait for each cluster (a mean, or the most frequent text), and
    the share of the trait's variance between clients that the clusters explain.
    A trait is a number or text that describes a client, such as the share of a label in its data.
    """

    kind: str
    name: str
    by_cluster: Mapping[int, str]
    explained: Explained

    @property
    def text(self) -> str:
        """Name and kind of the trait, such as ``age, input mean``."""
        return f"{self.name}, {self.kind}"


class GainView:
    """Gains of a run's clients, prepared for tables and pages.

    Parameters
    ----------
    gains
        Gains of the clients, as measured at the end of a run.
    score
        Metric of the gains.
    seed
        Seed of the run, from which the random permutations of clusters are drawn.
    """

    def __init__(self, gains: Gains, score: Score, seed: int = 0) -> None:
        self.gains = gains
        self.score = score
        self._seed = seed

    @classmethod
    def of(cls, run: Run) -> GainView | None:
        """Create the view of a run's gains.

        If no gains were measured, the view has only the scores that the clients reported. The
        result is None for a run without scores, and for a run without measured gains that has more
        than ``MOST_OBSERVED`` clients.
        """
        gains = run.gains or observe_gains(run)
        if gains is None:
            return None
        return cls(gains, Score(gains.metric), run.summary["seed"])

    @property
    def clients(self) -> Sequence[ClientGains]:
        """Clients with their scores and gains, sorted by cluster and then by id."""
        return sorted(self.gains.clients, key=lambda client: (client.cluster, client.client))

    @property
    def knows_test_rows(self) -> bool:
        """Whether the number of test rows of any client is known."""
        return any(client.n_test is not None for client in self.gains.clients)

    @cached_property
    def deployed(self) -> str:
        """Kind of model that the run deploys to most clients.

        ``OWN`` is a model of one client, and ``CLUSTER`` is the model of a client's cluster.
        """
        owned = sum(client.deployed == OWN for client in self.gains.clients)
        return OWN if 2 * owned > len(self.gains.clients) else CLUSTER

    def mean_score(self, model: str) -> Interval | None:
        """Return the mean score of a model, with its interval, over clients with a finite score.

        None if no client has a finite score of this model.
        """
        known = [
            client.scores[model].value
            for client in self.gains.clients
            if model in client.scores and math.isfinite(client.scores[model].value)
        ]
        if not known:
            return None
        mean = mean_interval(known)
        if self.score.share and mean.low is not None and mean.high is not None:
            return Interval(mean.value, max(0.0, mean.low), min(1.0, mean.high))
        return mean

    @cached_property
    def mean_gains(self) -> Sequence[MeanGain]:
        """Mean gains compared with each simpler model, in the order of ``MODELS_IN_ORDER``.

        Models with which no client has a finite gain are left out.
        """
        found: list[MeanGain] = []
        for model in MODELS_IN_ORDER:
            gains = [
                client.gains[model]
                for client in self.gains.clients
                if model in client.gains and math.isfinite(client.gains[model].value)
            ]
            if not gains:
                continue
            clear = [gain for gain in gains if gain.excludes_zero]
            better = sum(gain.value > 0 for gain in clear)
            mean = mean_interval([gain.value for gain in gains])
            found.append(MeanGain(model, mean, len(gains), better, len(clear) - better))
        return found

    # Texts

    def write_score(self, interval: Interval | None) -> str:
        """Return a score as text, without its interval; a dash if the score is missing."""
        if interval is None:
            return NONE
        return self.score.digits(interval.value)

    def write_with_interval(self, interval: Interval | None) -> str:
        """Return a score as text with its interval, such as ``78.5 [70.1, 85.0]``."""
        if interval is None:
            return NONE
        return self.score.with_ends(self.score.digits(interval.value), interval)

    def write_gain(self, interval: Interval | None) -> str:
        """Return a gain as text with its sign and interval, such as ``+4.2 [−1.0, 9.4]``."""
        if interval is None or not math.isfinite(interval.value):
            return NONE
        return self.score.with_ends(self.score.signed(interval.value), interval)

    @property
    def unit(self) -> str:
        """Unit of gains in a word or two: points, or the name of the metric."""
        if self.score.share:
            return "points"
        return self.score.label

    @property
    def explained_unit(self) -> str:
        """Sentences for a caption that explain what a gain is, and in which unit."""
        if self.score.sign > 0:
            text = (
                f"A gain is the {self.score.label} of the run’s model minus that of another model "
                "on the same test rows"
            )
        else:
            text = (
                f"A gain is by how much the {self.score.label} of the run’s model is lower than "
                "that of another model on the same test rows"
            )
        if self.score.share:
            text += (
                f", in points: 1 point is 1 % on the scale of the {self.score.label} from 0 to "
                "100 %"
            )
        elif self.score.name in ("mae", "rmse"):
            text += ", in the unit of the target"
        else:
            text += f", in the unit of the {self.score.label}"
        return f"{text}. Above 0 the run is better."

    @property
    def explained_intervals(self) -> str:
        """Sentences for a caption on how intervals were computed and what they cover.

        Empty if there are no intervals.
        """
        methods = {
            "shares": (
                "Brackets: 95 % intervals, by Wilson for scores, and by Agresti and Min for gains "
                "on the same rows"
            ),
            "means": "Brackets: 95 % intervals by Student’s t over the test rows",
            "jackknife": (
                "Brackets: 95 % intervals by the jackknife over ten groups of test rows; none where "
                "the rows are too few for one"
            ),
        }
        method = methods.get(self.gains.intervals)
        if method is None:
            return ""
        return (
            f"{method}. They cover the chance of the test rows, and not that of training: another "
            "seed gives other models."
        )

    def describe_missing(self) -> list[str]:
        """Return sentences on the models without scores, one sentence for each reason."""
        by_reason: dict[str, list[str]] = {}
        for model, reason in self.gains.missing.items():
            by_reason.setdefault(reason, []).append(LABELS.get(model, model))
        return [
            f"Not shown: {_enumerate(names)} ({reason})." for reason, names in by_reason.items()
        ]

    def describe_mean_gain(self, gain: MeanGain) -> str:
        """Describe a mean gain: its interval, and how many clients clearly gain or lose."""
        text = f"{self.write_gain(gain.mean)} {self.unit}"
        if gain.without_interval:
            text += f" ({gain.without_interval})"
        return f"{text}; {gain.better} clearly better, {gain.worse} clearly worse"

    # What distinguishes the clusters

    @property
    def explained(self) -> Sequence[tuple[str, Explained]]:
        """Name and test result of each group of traits.

        The result contains the share of the variance between clients that the clusters explain. A
        group consists of all traits of one kind, such as the shares of all labels. The scores with
        each simpler model, and each attribute, are groups as well.
        """
        return self._difference_tests.explained

    @property
    def differences(self) -> Sequence[Difference]:
        """Traits and attributes of the clients by cluster, sorted by p-value, the smallest first.

        Traits with equal p-values are sorted by the share of their variance that the clusters
        explain.
        """
        return self._difference_tests.differences

    @cached_property
    def _difference_tests(self) -> _Distinction:
        """Tests of how the clusters differ in groups of traits and in single traits.

        All tests use the same random permutations of the clients' clusters.
        """
        groups = self._group_columns()
        columns = self._list_columns()
        values = [*groups.values(), *(column.values for column in columns)]
        draw = rng.generator(self._seed, "permuted clusters")
        results = explain_differences(values, self._clusters, draw)
        explained: list[tuple[str, Explained]] = []
        for name, result in zip(groups, results[: len(groups)], strict=True):
            if result is not None:
                explained.append((name, result))
        differences: list[Difference] = []
        for column, result in zip(columns, results[len(groups) :], strict=True):
            if result is not None:
                differences.append(Difference(column.kind, column.name, column.by_cluster, result))
        return _Distinction(explained, sorted(differences, key=_by_evidence))

    @property
    def clearly_different(self) -> Sequence[Difference]:
        """Traits in which the clusters differ significantly.

        The p-values are corrected for the number of traits: by Holm's method, the probability that
        one or more of these traits are listed by chance is at most 5 %.
        """
        n = len(self.differences)
        found: list[Difference] = []
        for place, difference in enumerate(self.differences):
            if difference.explained.p_value * (n - place) > LEVEL:
                break
            found.append(difference)
        return found

    @property
    def has_too_many_traits(self) -> bool:
        """Whether there are too many traits for a significant result about any of them.

        With this number of traits, even the smallest possible p-value of a permutation test is
        greater than the corrected significance level.
        """
        smallest_p = 1 / (1 + PERMUTATIONS)
        return smallest_p * len(self.differences) > LEVEL

    @property
    def is_weak(self) -> bool:
        """Whether differences between clusters are only weak evidence.

        They are if the run has fewer than ``FEW_CLIENTS`` clients.
        """
        return len(self.gains.clients) < FEW_CLIENTS

    def describe_differences(self) -> str:
        """Return sentences for a caption on what distinguishes the clusters, with the evidence."""
        n = len(self.differences)
        clear = self.clearly_different
        if not n:
            text = "The clients' traits are not known here, so only their scores are compared."
        elif clear:
            names = [f"{each.name} ({each.kind})" for each in clear[:3]]
            more = ""
            if len(clear) > 3:
                more = f" and {len(clear) - 3} more"
            text = f"The clusters clearly differ in {', '.join(names)}{more}."
        elif self.has_too_many_traits:
            text = f"{n:,} traits are too many for a clear statement about all of them together."
        else:
            text = (
                f"In none of {count(n, 'trait')} do the clusters differ clearly more than random "
                "clusters of the same sizes."
            )
        text += (
            " Explained: the share of the variance between clients that is between clusters; by "
            f"chance: its mean for random clusters of the same sizes; p: the share of {PERMUTATIONS} "
            "random clusters that explain as much."
        )
        if n:
            text += " Traits are listed by p and then by what is explained"
            if self.has_too_many_traits:
                text += "."
            else:
                text += "; those named here hold for all traits together (Holm, 5 %)."
        if self.is_weak:
            text += f" With only {count(len(self.gains.clients), 'client')} this is weak evidence."
        return text

    @property
    def _clusters(self) -> list[int]:
        """Cluster of each client, in the order of ``self.gains.clients``."""
        return [client.cluster for client in self.gains.clients]

    def _group_columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the groups of numbers for the tests of differences between clusters.

        Each group (such as all label shares, or one attribute) is tested as a whole, so its columns
        have the same unit.

        Returns
        -------
        dict
            Numbers of n clients by the name of the group, each ``[n]`` or ``[n, columns]``; NaN if
            a number is unknown.
        """
        groups: dict[str, NDArray[np.float64]] = {}
        table = self._traits()
        kinds = dict.fromkeys(trait.kind for trait in self.gains.traits)
        for kind in kinds:
            places = [i for i, trait in enumerate(self.gains.traits) if trait.kind == kind]
            columns = table[:, places]
            if kind == "input mean":  # columns of a table have different units
                columns = _standardize_columns(columns)
            groups[f"{kind}s"] = columns
        for model in (TRIVIAL, ONE_MODEL, ALONE):
            values = [_value_of(client.scores.get(model)) for client in self.gains.clients]
            if not all(map(math.isnan, values)):
                groups[f"{self.score.label}, {LABELS[model]}"] = np.array(values)
        for column in self._attribute_columns():
            groups[f"attribute {column.name}"] = column.values
        return groups

    def _traits(self) -> NDArray[np.float64]:
        """Return the traits of the clients, ``[n, T]`` for n clients and T traits."""
        rows = [list(client.traits) for client in self.gains.clients]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.gains.traits))

    def _list_columns(self) -> list[_Column]:
        """Return one :class:`_Column` for each trait and attribute, with a typical value by cluster."""
        table = self._traits()
        columns: list[_Column] = []
        for place, trait in enumerate(self.gains.traits):
            write = percent if trait.kind == "label share" else significant
            column = self._number_column(trait.kind, trait.name, table[:, place], write)
            columns.append(column)
        return [*columns, *self._attribute_columns()]

    def _attribute_columns(self) -> list[_Column]:
        """Return one :class:`_Column` for each attribute that the user has given to the clients.

        An attribute is treated as a text if at least one client's value is a text.
        """
        names: dict[str, None] = {}
        for client in self.gains.clients:
            names.update(dict.fromkeys(client.attributes))
        columns: list[_Column] = []
        for name in names:
            values = [client.attributes.get(name) for client in self.gains.clients]
            if any(isinstance(value, str) for value in values):
                columns.append(self._text_column(name, [_as_text(value) for value in values]))
            else:
                numbers = np.array([_as_number(value) for value in values])
                columns.append(self._number_column("attribute", name, numbers, significant))
        return columns

    def _number_column(
        self, kind: str, name: str, values: NDArray[np.float64], write: _Write
    ) -> _Column:
        """Return a column of numbers, with the mean of each cluster as its typical value.

        Parameters
        ----------
        kind
            Kind of the trait, such as ``label share``.
        name
            Name of the trait.
        values
            Value of each client; NaN if it is unknown.
        write
            Writes a mean as text.
        """
        by_cluster: dict[int, str] = {}
        labels = np.array(self._clusters)
        for cluster in sorted(set(self._clusters)):
            members = values[labels == cluster]
            known = members[~np.isnan(members)]
            if len(known):
                by_cluster[cluster] = write(float(known.mean()))
            else:
                by_cluster[cluster] = NONE
        return _Column(kind, name, values, by_cluster)

    def _text_column(self, name: str, texts: Sequence[str | None]) -> _Column:
        """Return a column of an attribute with texts, with each cluster's most frequent text.

        Parameters
        ----------
        name
            Name of the attribute.
        texts
            Text of each client; None if it is unknown.
        """
        known = sorted({text for text in texts if text is not None})
        values = np.array([_encode_one_hot(text, known) for text in texts])
        by_cluster: dict[int, str] = {}
        for cluster in sorted(set(self._clusters)):
            members = [
                text for text, own in zip(texts, self._clusters, strict=True) if own == cluster
            ]
            present = [text for text in members if text is not None]
            most = max(known, key=present.count)
            if present:
                by_cluster[cluster] = f"{most} ({present.count(most)} of {len(members)})"
            else:
                by_cluster[cluster] = NONE
        return _Column("attribute", name, values, by_cluster)


def observe_gains(run: Run) -> Gains | None:
    """Return the scores that a run's clients reported, as a Gains object without any gains.

    None for a run in which no client was evaluated, or with more than ``MOST_OBSERVED`` clients.
    """
    outcome = Outcome.of(run)
    if not outcome.rows or len(outcome.rows) > MOST_OBSERVED:
        return None
    reason = NOT_MEASURED
    if "network" in run.config:
        reason = PRIVATE
    elif "client_app" in run.config:
        reason = NOT_ASKED
    has_own = "own_models" in run.summary or ("algorithm" in run.config and serves_own(run))
    deployed = OWN if has_own else CLUSTER
    others = [model for model in LABELS if model != deployed and model != OWN]
    clients: list[ClientGains] = []
    for client, row in sorted(outcome.rows.items()):
        clients.append(
            ClientGains(
                client=client,
                name=row["name"],
                cluster=run.tree.leaf_of.get(client, row["cluster"]),
                n_train=row.get("n_train"),
                n_test=None,
                deployed=deployed,
                scores={deployed: Interval(outcome.score.of(row))},
                gains={},
            )
        )
    return Gains(
        metric=outcome.score.metric,
        round=run.model_round,
        intervals="",
        clients=tuple(clients),
        missing=dict.fromkeys(others, reason),
    )


def with_attributes(run: Run, attributes: Attributes) -> Run:
    """Return a copy of a run in which the clients have the given attributes.

    Parameters
    ----------
    run
        Finished run.
    attributes
        Attributes of clients, such as region or device, by the clients' names.

    Returns
    -------
    Run
        The copy. A run without scores, or with more than ``MOST_OBSERVED`` clients and no measured
        gains, is returned unchanged.

    Raises
    ------
    DataError
        If no client of the run has any of the names.
    """
    gains = run.gains or observe_gains(run)
    if gains is None:
        return run
    check_attributes(attributes, [client.name for client in gains.clients])
    clients = [
        replace(client, attributes=attributes.get(client.name, {})) for client in gains.clients
    ]
    return replace(run, gains=replace(gains, clients=tuple(clients)))


@dataclass(frozen=True, eq=False)
class _Distinction:
    """Results of the tests for differences between clusters, by group of traits and by trait."""

    explained: Sequence[tuple[str, Explained]]
    differences: Sequence[Difference]


@dataclass(frozen=True, eq=False)
class _Column:
    """Values of a trait or attribute of all clients, with a typical value for each cluster.

    ``values`` is ``[n]`` for n clients with numbers. Texts are one-hot encoded: ``[n, categories]``.
    """

    kind: str
    name: str
    values: NDArray[np.float64]
    by_cluster: Mapping[int, str]


def _enumerate(names: Sequence[str]) -> str:
    """Return names as an English list, such as ``trivial, alone and one model``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _by_evidence(difference: Difference) -> tuple[float, float]:
    """Return a sort key: p-value, ascending, and then share of explained variance, descending."""
    return difference.explained.p_value, -difference.explained.share


def _standardize_columns(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale columns to mean 0 and standard deviation 1 over the clients; constant columns become 0.

    Missing values (NaN) are ignored, and are 0 in the result.
    """
    known = ~np.isnan(columns)
    counts = np.maximum(known.sum(0), 1)
    values = np.where(known, columns, 0.0)
    deviations = np.where(known, values - values.sum(0) / counts, 0.0)
    spread = np.sqrt((deviations**2).sum(0) / counts)
    largest = np.abs(values).max(0, initial=0.0)
    # The mean of equal numbers can be rounded, so the computed spread of a constant column can be
    # slightly greater than 0.
    is_constant = spread <= 1e-12 * largest
    return np.where(is_constant, 0.0, deviations / np.where(is_constant, 1.0, spread))


def _value_of(interval: Interval | None) -> float:
    """Return the value of an interval, without its ends; NaN for None."""
    return math.nan if interval is None else interval.value


def _as_text(value: object) -> str | None:
    """Return a client's value of an attribute if the value is a text; None otherwise.

    The value is a number, or is itself None if the client lacks the attribute.
    """
    return value if isinstance(value, str) else None


def _encode_one_hot(text: str | None, categories: Sequence[str]) -> list[float]:
    """Return the one-hot encoding of a text: 1 for its category and 0 for all other categories.

    The encoding of None, an unknown text, is 0 for all categories.
    """
    return [float(text == category) for category in categories]


def _as_number(value: object) -> float:
    """Return a client's value of a numeric attribute; NaN if the client lacks the attribute."""
    return value if isinstance(value, float) else math.nan


def write_explained(explained: Explained) -> list[str]:
    """Return the cells of a test result: explained share, share expected by chance, and p-value."""
    return [
        percent(explained.share, 0),
        percent(explained.by_chance, 0),
        number(explained.p_value, 3),
    ]


# Tables for the terminal.

NARROW = 5
"""Number of characters beyond which headings are broken in the table of clients.

It is small because this table has many columns.
"""

CLIENTS_IN_TERMINAL = 40
"""Largest number of clients that are listed in the terminal; the CSV file lists all clients."""


def gain_tables(run: Run) -> list[Table]:
    """Return tables of a run's gains for the terminal: means, clients, and differences of clusters.

    Empty for a run without scores.
    """
    view = GainView.of(run)
    if view is None:
        return []
    tables: list[Table] = []
    if view.mean_gains:
        tables.append(_mean_table(view))
    tables.append(_client_table(view))
    if run.has_diverged:  # clusters of diverged models carry no information
        return tables
    if view.differences:
        tables.append(_difference_table(view))
    if view.explained:
        tables.append(_explained_table(view))
    return tables


def _mean_table(view: GainView) -> Table:
    """Return the table of mean scores of each compared model, and of the mean gains over it."""
    table = new_table("What do the clients gain?", collapse_padding=True)
    table.add_column("compared with", justify="left")
    for name in (view.score.heading, "gain", "clearly better", "clearly worse", "clients"):
        table.add_column(escape(wrap_heading(name)), justify="right", no_wrap=True)
    for gain in view.mean_gains:
        score = view.write_score(view.mean_score(gain.model))
        cells = [score, view.write_gain(gain.mean), str(gain.better), str(gain.worse)]
        table.add_row(EXPLAINED_AS[gain.model], *map(escape, cells), str(gain.clients))
    own = view.write_score(view.mean_score(view.deployed))
    table.add_row(f"this run: {EXPLAINED_AS[view.deployed]}", own, "", "", "", "")
    remarks = [
        view.explained_unit,
        "Means over the clients, with 95 % intervals over them; clearly: the client’s own interval "
        "is above or below 0.",
        *view.describe_missing(),
    ]
    table.caption = escape("\n".join(remarks))
    return table


def client_columns(view: GainView) -> list[str]:
    """Return the headings of the table with one row of scores and gains per client."""
    models = view.gains.models
    scores = [LABELS[model] for model in models]
    gains = [f"gain over {LABELS[gain.model]}" for gain in view.mean_gains[:2]]
    rows = ["test rows"] if view.knows_test_rows else []
    return ["client", "cluster", *rows, *scores, *gains]


def identify(view: GainView, client: ClientGains) -> list[str]:
    """Return the first cells of a client's row: name, cluster, and number of test rows if known.

    The number is a dash if it is unknown for this client only.
    """
    cells = [client.name, str(client.cluster)]
    if view.knows_test_rows:
        cells.append(NONE if client.n_test is None else f"{client.n_test:,}")
    return cells


def _client_cells(view: GainView, client: ClientGains) -> list[str]:
    """Return the cells of a client's row: name, cluster, test rows, scores and gains.

    Scores have no intervals, as there is no room for them.
    """
    cells = identify(view, client)
    cells += [view.write_score(client.scores.get(model)) for model in view.gains.models]
    cells += [view.write_gain(client.gains.get(gain.model)) for gain in view.mean_gains[:2]]
    return cells


def _client_table(view: GainView) -> Table:
    """Return the table of clients for the terminal, with their scores and gains."""
    title = f"Clients: test {view.score.heading}"
    table = new_table(title, collapse_padding=True)
    for name in client_columns(view):
        heading = escape(wrap_heading(name, width=NARROW))
        side = "left" if name == "client" else "right"
        table.add_column(heading, justify=side, no_wrap=True, overflow="fold")
    clients = view.clients
    for client in clients[:CLIENTS_IN_TERMINAL]:
        table.add_row(*map(escape, _client_cells(view, client)))
    remarks: list[str] = []
    if len(clients) > CLIENTS_IN_TERMINAL:
        more = count(len(clients) - CLIENTS_IN_TERMINAL, "more client")
        remarks.append(f"{more} in the CSV file.")
    if view.explained_intervals:
        remarks.append(view.explained_intervals)
    if not view.mean_gains:
        remarks += view.describe_missing()
    table.caption = escape("\n".join(remarks)) or None
    return table


def _difference_table(view: GainView) -> Table:
    """Return the table of the traits that distinguish the clusters, for the terminal."""
    table = new_table("What distinguishes the clusters", collapse_padding=True)
    clusters = sorted({client.cluster for client in view.gains.clients})[:CLUSTERS_LISTED]
    table.add_column("trait", justify="left")
    names = [*(f"cluster {cluster}" for cluster in clusters), "explained", "by chance", "p"]
    for name in names:
        table.add_column(wrap_heading(name), justify="right")
    for each in view.differences[:TRAITS_LISTED]:
        cells = [each.by_cluster[cluster] for cluster in clusters]
        cells += write_explained(each.explained)
        table.add_row(escape(each.text), *map(escape, cells))
    table.caption = escape(view.describe_differences())
    return table


def _explained_table(view: GainView) -> Table:
    """Return the table of how much of the differences between clients the clusters explain."""
    table = new_table("Differences between clients that the clusters explain")
    table.add_column("difference", justify="left")
    for name in ("explained", "by chance", "p"):
        table.add_column(name, justify="right")
    for name, explained in view.explained:
        table.add_row(escape(name), *write_explained(explained))
    return table
