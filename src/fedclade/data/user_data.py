"""A federation of clients that come with data of their own, rather than with parts of one data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedclade.core import (
    ConfigError,
    DataError,
    Indices,
    TaskKind,
    checked,
    require,
    rng,
    shown,
    unknown,
)
from fedclade.data.agreement import DataSource, Encoding, Proposal, sort_by_frequency
from fedclade.data.arrays import InputKind, check_input_kind, convert_inputs, count_outputs
from fedclade.data.client_data import Augment, resolve_augment
from fedclade.data.federation import ClientData, Federation
from fedclade.data.partition import set_aside
from fedclade.data.pool import Columns, Pool
from fedclade.data.reading import Examples, is_dataset, is_pair, read_parts
from fedclade.data.schema import DataSchema, SchemaError, read_declared
from fedclade.data.standardize import Standardize, standardize_inputs
from fedclade.data.texts import SPECIALS, build_vocabulary, encode, pad, split_words

# Any torch data set as a pool, or as all that one client has.


@checked("dataset", "test")
def pool_from_torch(
    dataset: Dataset[Any],
    test: Dataset[Any] | None = None,
    name: str = "custom",
    task: TaskKind = "classification",
    inputs_are: InputKind = "auto",
) -> Pool:
    """Read a map-style torch data set of pairs ``(x, y)`` into a pool.

    Every example is read once. A random transform is frozen by that, which is warned of.

    Parameters
    ----------
    dataset
        Examples to train on. All ``x`` are tensors or arrays of one shape: bytes become uint8
        images (scaled to [0, 1] on the way to the model), other whole numbers int64 tokens, the
        rest float32. Labels may be whole numbers of any type; for the targets of other tasks see
        :class:`Pool`.
    test
        Examples to test on; None lets every client hold back a part of its own examples.
    name
        What to call it.
    task
        What the targets are.
    inputs_are
        ``numbers``, ``tokens`` or ``auto``; see :class:`OwnSettings`.

    Raises
    ------
    ConfigError
        If ``inputs_are`` is unknown.
    DataError
        If there are no examples, they are not pairs, inputs differ in shape or kind, or a target is
        not as the task has it, such as a label that is no whole number ≥ 0.
    """
    given = {f"data set {name!r}": dataset} | (
        {} if test is None else {f"test data of {name!r}": test}
    )
    read = read_parts(given, task)
    train, *tested = read.parts
    check_input_kind(inputs_are)
    x = convert_inputs(_numbers(read), inputs_are, f"inputs of {name!r}")
    return Pool.of_examples(name, x, read.y, train, tested[0] if tested else train[:0], task=task)


@checked("train", "test", "validation")
def one_client(
    train: Dataset[Any],
    test: Dataset[Any],
    *,
    labels: int | None = None,
    task: TaskKind = "classification",
    validation: Dataset[Any] | None = None,
    name: str = "client",
    key: int = 0,
    mean: float = 0.0,
    std: float = 1.0,
    inputs_are: InputKind = "auto",
) -> Federation:
    """Read the data sets of one client into a federation of this client alone, as an app for Flower takes it.

    To a Flower server the name of its data is ``custom``.

    Parameters
    ----------
    train, test, validation
        Map-style torch data sets of pairs ``(x, y)``, as :func:`pool_from_torch` takes them.
    labels
        Number of labels among all clients: a client that lacks the last of them needs the same
        model as the others. For language data the size of the vocabulary; left out for other tasks.
    task
        What the targets are.
    name
        For people.
    key
        The client's own number for its random draws, such as the order of its batches; at least 0.
    mean, std
        Of the pixels in [0, 1], where ``x`` are bytes: the same for all clients.
    inputs_are
        ``numbers``, ``tokens`` or ``auto``; see :class:`OwnSettings`.

    Raises
    ------
    ConfigError
        If ``labels`` is missing, or there are none; or if ``inputs_are`` is unknown.
    DataError
        If a data set cannot be read, or does not look like ``train``, a label is not below
        ``labels``, or the key is negative.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> mine = TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)
    >>> len(one_client(mine, mine, labels=10, name="hospital-1"))
    1
    """
    labelled = task in ("classification", "language")
    rule = "the number of labels among all clients" if labelled else f"left out for a {task} task"
    require(("labels", labels, (labels is not None) == labelled, rule))
    given = {f"training data of {name!r}": train, f"test data of {name!r}": test}
    given |= {} if validation is None else {f"validation data of {name!r}": validation}
    read = read_parts(given, task)
    trained, tested, *validated = read.parts
    if labels is not None and (needed := count_outputs(read.y, task)) > labels:
        raise DataError(
            f"client {name!r} has examples of label {needed - 1}, so labels should be above that, "
            f"got {labels}"
        )
    if key < 0:
        raise DataError(f"the key of client {name!r} should be at least 0, got {key}")
    more = {"task": task, "mean": mean, "std": std}
    check_input_kind(inputs_are)
    x = convert_inputs(_numbers(read), inputs_are, f"inputs of client {name!r}")
    pool = Pool.of_examples("custom", x, read.y, trained, tested, outputs=labels, **more)
    client = ClientData(0, name, key, trained, validated[0] if validated else trained[:0], tested)
    return Federation(pool, (client,), description="clients with data of their own")


def _numbers(read: Examples) -> torch.Tensor:
    if isinstance(read.x, torch.Tensor):
        return read.x
    raise ConfigError(
        "inputs should be numbers, got texts; fedclade.federation makes a vocabulary of all "
        "clients' texts"
    )


class OwnOptions(TypedDict, total=False):
    """The fields of :class:`OwnSettings`, as arguments."""

    test_fraction: float
    validation_fraction: float
    samples_per_client: int | None
    standardize: Standardize
    augment: Augment | str | None
    max_words: int
    vocabulary_size: int
    inputs_are: InputKind
    newcomers: int
    newcomer_samples: int | None
    seed: int


@dataclass(frozen=True, kw_only=True)
class OwnSettings:
    """What is done with the examples that clients have of their own.

    Parameters
    ----------
    test_fraction, validation_fraction
        Part of its training examples that a client sets aside, where it brings no test or
        validation data.
    samples_per_client
        Keep at most so many of the training examples of each client (what it sets aside included).
    standardize
        Scale each column of inputs ``[N, F]`` by mean and deviation of the training examples: each
        ``client`` by its own, or all alike by those of the whole federation (``federated``), from
        sums that clients could send. Columns that are 0 or 1 everywhere stay.
    augment
        A function of a batch of inputs, or its ``module:function``; see :class:`Federation`.
    max_words, vocabulary_size
        Texts are cut or filled up to so many words, of the most frequent ones in the training
        texts; as int64 tokens.
    inputs_are
        ``tokens``, such as of text, which become int64; ``numbers``, which become float32;
        ``auto``: bytes are pixels, and other whole numbers are tokens if the model takes whole
        numbers (its first layer is an embedding).
    newcomers, newcomer_samples
        So many of the clients, drawn at random, are held back from training, and keep at most so
        many examples.
    seed
        Of what is set aside, kept and held back.

    Raises
    ------
    ConfigError
        If a number is out of range, or ``augment`` is no function of the inputs.
    """

    test_fraction: float = 0.2
    validation_fraction: float = 0.0
    samples_per_client: int | None = None
    standardize: Standardize = "none"
    augment: Augment | str | None = None
    max_words: int = 50
    vocabulary_size: int = 10_000
    inputs_are: InputKind = "auto"
    newcomers: int = 0
    newcomer_samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        samples, few = self.samples_per_client, self.newcomer_samples
        check_input_kind(self.inputs_are)
        if self.standardize not in get_args(Standardize):
            raise ConfigError(unknown("standardize", self.standardize, get_args(Standardize)))
        require(
            (
                "test_fraction",
                self.test_fraction,
                0 < self.test_fraction < 1,
                "greater than 0 and less than 1",
            ),
            (
                "validation_fraction",
                self.validation_fraction,
                0 <= self.validation_fraction < 1,
                "in [0, 1)",
            ),
            ("samples_per_client", samples, samples is None or samples >= 2, "at least 2"),
            ("max_words", self.max_words, self.max_words >= 1, "at least 1"),
            (
                "vocabulary_size",
                self.vocabulary_size,
                self.vocabulary_size > len(SPECIALS),
                f"above {len(SPECIALS)}",
            ),
            ("newcomers.clients", self.newcomers, self.newcomers >= 0, "at least 0"),
            ("newcomers.samples_per_client", few, few is None or few >= 2, "at least 2"),
            ("seed", self.seed, self.seed >= 0, "at least 0"),
        )
        resolve_augment(self.augment)


@dataclass(frozen=True, eq=False)
class ClientRows:
    """Which examples a client brings; what is None, it sets aside from its training examples."""

    name: str
    train: Indices
    validation: Indices | None = None
    test: Indices | None = None


@checked("clients")
def federation(
    clients: Mapping[str, Any],
    task: TaskKind | None = None,
    *,
    name: str = "custom",
    labels: int | None = None,
    true_clusters: Mapping[str, int] | None = None,
    schema: DataSchema | str | Path | None = None,
    **options: Unpack[OwnOptions],
) -> Federation:
    """Make a federation of clients that each have data of their own.

    Parameters
    ----------
    clients
        By name: ``(train, test)`` or ``(train, validation, test)``, or ``train`` alone. Each is a
        map-style torch data set of pairs ``(x, y)``, or a pair ``(x, y)`` of arrays or tensors,
        ``x`` perhaps a list of texts. Where there is no test data, or it is None, a client holds
        back some of its training examples.
    task
        What the targets are. If left out: whole numbers are labels (``classification``), other
        numbers those of a ``regression``; ``binary`` and ``multilabel`` have to be said.
    name
        Of the data, for people.
    labels
        Number of labels, or of words in language data, where the examples need not have them all.
    true_clusters
        By name, where they are known; for scoring only.
    schema
        For texts: a :class:`DataSchema` with the words of the vocabulary, or the path of a JSON
        file with one. By default, the words of the training texts. Over a network all clients then
        agree on one vocabulary.
    **options
        Fields of :class:`~fedclade.data.OwnSettings`, such as ``standardize="federated"``.

    Raises
    ------
    ConfigError
        If a setting is out of range, or the task is neither given nor clear from the targets.
    DataError
        If a client's data cannot be read, does not look like that of the others, or is too little.

    Examples
    --------
    >>> import torch
    >>> def hospital(shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    ...     x = torch.arange(20.0)[:, None]
    ...     return x, (x[:, 0] > 10 + shift).long()
    >>> federation({"north": hospital(0), "south": hospital(5)})
    Federation('custom, 2 clients')
    """
    settings = OwnSettings(**options)
    declared = read_declared(schema)
    if not isinstance(clients, Mapping) or not clients:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DataError(
            f"clients should be a mapping of names to data, of at least 1, got {shown(clients)}"
        )
    parts = {client: _splits(client, data) for client, data in clients.items()}
    given = {
        f"{split} data of {client!r}": data
        for client, splits in parts.items()
        for split, data in splits.items()
        if data is not None
    }
    read = read_parts(given, task)
    rows = dict(zip(given, read.parts, strict=True))
    held = [
        ClientRows(
            client,
            *(
                rows.get(f"{split} data of {client!r}")
                for split in ("training", "validation", "test")
            ),
        )  # pyright: ignore[reportArgumentType]
        for client in parts
    ]

    if isinstance(read.x, Tensor):
        if declared is not None:
            raise ConfigError(
                "a schema of federation() is for texts, got inputs that are numbers; leave it out"
            )
        return build_federation(
            held, read.x, read.y, settings, true_clusters, name=name, task=read.task, outputs=labels
        )
    source = TextSource(
        held, read.x, read.y, settings, true_clusters, name, read.task, labels, declared
    )
    return source.federation()


@dataclass(frozen=True, eq=False)
class TextSource(DataSource):
    """Texts of clients that are in no table, and all that says how a federation is made of them."""

    held: Sequence[ClientRows]
    texts: list[str]
    y: Tensor
    settings: OwnSettings
    true_clusters: Mapping[str, int] | None
    name: str
    task: TaskKind
    labels: int | None
    schema: DataSchema | None = None

    def federation(self) -> Federation:
        """Return the federation, encoded by the declared words, or else by those of the training texts."""
        if self.schema is None:
            return self._encode(DataSchema())
        return self.encode(self.schema)

    def propose(self) -> Proposal:
        """Return the vocabulary of this client's training texts, or the declared one."""
        if self.schema is not None:
            return Proposal(self._completed(self.schema), is_fixed=True)
        words, counts = count_words(self.held, self.texts, self.settings)
        schema = self._completed(DataSchema(words=words))
        return Proposal(schema, word_counts=counts, vocabulary_size=self.settings.vocabulary_size)

    def encode(self, schema: DataSchema) -> Federation:
        """Return the federation, encoded by the words of a schema."""
        if not schema.words or schema.inputs:
            raise SchemaError("the schema is of a table, and the data is texts outside of a table")
        if schema.task not in (None, self.task):
            raise SchemaError(f"the task is {self.task}, and that of the schema is {schema.task}")
        return self._encode(schema)

    def _completed(self, schema: DataSchema) -> DataSchema:
        """Return a schema with task and labels, which a declared one may leave out."""
        labels = schema.labels
        if labels is None and self.task == "classification":
            labels = self.labels or int(self.y.max()) + 1
        return replace(schema, task=self.task, labels=labels)

    def _encode(self, schema: DataSchema) -> Federation:
        """Return the federation, encoded by a schema; without words by those of the training texts."""
        schema = self._completed(schema)
        made = build_federation(
            self.held,
            self.texts,
            self.y,
            self.settings,
            self.true_clusters,
            name=self.name,
            task=self.task,
            outputs=schema.labels if isinstance(schema.labels, int) else self.labels,
            words=schema.words,
        )
        encoding = Encoding(
            replace(schema, words=made.pool.vocabulary),
            is_declared=self.schema is not None,
            source=self if len(self.held) == 1 else None,
        )
        return replace(made, encoding=encoding)


def build_federation(
    held: Sequence[ClientRows],
    x: Tensor | list[str],
    y: Tensor,
    settings: OwnSettings,
    true_clusters: Mapping[str, int] | None,
    *,
    name: str,
    columns: Columns | None = None,
    words: tuple[str, ...] = (),
    first_key: int = 0,
    **more: Any,
) -> Federation:
    """Set aside what clients bring no data for, hold newcomers back, and make the pool and the federation.

    Texts are encoded by the vocabulary ``words``, or if that is empty by the words of the training
    texts. Clients draw by keys from ``first_key`` on.
    """
    n = len(held) - settings.newcomers
    rule = f"below the number of clients ({len(held)})"
    require(("newcomers.clients", settings.newcomers, n >= 1, rule))
    late = set(rng.generator(settings.seed, "newcomers").permutation(len(held))[n:].tolist())
    places = [*(k for k in range(len(held)) if k not in late), *sorted(late)]
    members = [
        _client(i, first_key + k, held[k], settings, newcomer=i >= n) for i, k in enumerate(places)
    ]
    train = np.concatenate([client.train for client in members[:n]])
    test = np.concatenate([client.test for client in members[:n]])
    vocabulary: tuple[str, ...] = ()
    if isinstance(x, Tensor):
        x = convert_inputs(x, settings.inputs_are, "inputs")
    else:
        x, vocabulary = _tokens(x, train, settings, words)
    if settings.standardize != "none":
        x, columns = standardize_inputs(x, columns, members[:n], members[n:], settings.standardize)
    pool = Pool.of_examples(name, x, y, train, test, vocabulary=vocabulary, columns=columns, **more)
    truth = None if true_clusters is None else _truth(members, true_clusters)

    def of(some: Sequence[ClientData], newcomers: Federation | None = None) -> Federation:
        known = None if truth is None else {client.id: truth[client.name] for client in some}
        text = f"{pool.name}, {len(some)} client{'s' if len(some) > 1 else ''}"
        return Federation(
            pool, tuple(some), known, text, newcomers, resolve_augment(settings.augment)
        )

    return of(members[:n], of(members[n:]) if late else None)


def _tokens(
    texts: Sequence[str], train: Indices, settings: OwnSettings, vocabulary: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...]]:
    """Return texts as tokens ``[N, max_words]``, and their vocabulary, by default that of the training texts."""
    words = [split_words(text) for text in texts]
    vocabulary = vocabulary or build_vocabulary(
        [words[row] for row in train], settings.vocabulary_size
    )
    return torch.from_numpy(pad(encode(words, vocabulary), settings.max_words)), vocabulary


def count_words(
    held: Sequence[ClientRows], texts: Sequence[str], settings: OwnSettings, first_key: int = 0
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the vocabulary of the clients' training texts, and how often each word but the specials is in them."""
    counts: Counter[str] = Counter()
    for place, each in enumerate(held):
        client = _client(place, first_key + place, each, settings, newcomer=False)
        for row in client.train.tolist():
            counts.update(split_words(texts[int(row)]))
    frequent = sort_by_frequency(counts)[: settings.vocabulary_size - len(SPECIALS)]
    words = tuple(word for word, _ in frequent)
    return (*SPECIALS, *words), tuple(count for _, count in frequent)


def _client(number: int, key: int, held: ClientRows, settings: OwnSettings, newcomer: bool) -> ClientData:
    seed, train, test, validation = settings.seed, held.train, held.test, held.validation
    limit = settings.samples_per_client
    if newcomer and settings.newcomer_samples is not None:
        limit = settings.newcomer_samples
    if limit is not None:
        train = rng.generator(seed, "samples_per_client", key).permutation(train)[:limit]
    if (few := len(train)) < (needed := 1 + (test is None)):
        raise DataError(
            f"client {held.name!r} has {few} example{'s' if few > 1 else ''}, but needs {needed}: "
            "one to train on"
            + (", one to be tested on; leave it out, or give it test data" if needed > 1 else "")
        )
    if test is None:
        train, test = set_aside(train, settings.test_fraction, "test", seed=seed, client=key)
    if validation is None:
        validation = train[:0]
        if settings.validation_fraction:
            train, validation = set_aside(
                train, settings.validation_fraction, "validation", seed=seed, client=key
            )
    return ClientData(number, held.name, key, train, validation, test)


def _truth(members: Sequence[ClientData], true_clusters: Mapping[str, int]) -> Mapping[str, int]:
    names = {client.name for client in members}
    if odd := sorted(names ^ set(true_clusters)):
        raise DataError(
            f"true_clusters should name every client exactly once; these do not match: {shown(odd)}"
        )
    return true_clusters


def _splits(client: str, data: Any) -> Mapping[str, Any]:
    """Return what a client brings, by split; None is what it does not bring."""
    whole = data if isinstance(data, tuple) else (data,)
    if 1 <= len(whole) <= 3 and all(
        part is None or is_dataset(part) or is_pair(part) for part in whole
    ):
        train, *between, test = whole if len(whole) > 1 else (*whole, None)
    elif is_pair(data):
        train, between, test = data, [], None
    else:
        train, between, test = None, [], None
    if train is None:
        raise DataError(
            f"the data of client {client!r} should be (train, test), each a torch data set or a "
            f"pair (x, y) of arrays, got {_kinds(data)}"
        )
    return {"training": train, "validation": between[0] if between else None, "test": test}


def _kinds(data: Any) -> str:
    if isinstance(data, tuple):
        return f"({', '.join(_kinds(part) for part in data)})"
    return type(data).__name__
