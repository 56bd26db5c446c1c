"""Federations of clients with data of their own."""

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

# Torch data sets as a pool, or as the data of one client.


@checked("dataset", "test")
def pool_from_torch(
    dataset: Dataset[Any],
    test: Dataset[Any] | None = None,
    name: str = "custom",
    task: TaskKind = "classification",
    inputs_are: InputKind = "auto",
) -> Pool:
    """Read a map-style torch data set of pairs ``(x, y)`` into a pool.

    Every example is read once. A random transform is therefore applied only once; a warning reports
    this.

    Parameters
    ----------
    dataset
        Examples to train on. All ``x`` are tensors or arrays of one shape. Bytes become uint8
        images (scaled to [0, 1] as input of the model), other whole numbers int64 tokens, the rest
        float32. Labels may be whole numbers of any type; for the targets of other tasks see
        :class:`Pool`.
    test
        Examples to test on. None: every client holds back a part of its own examples.
    name
        Name of the data.
    task
        The task.
    inputs_are
        ``numbers``, ``tokens`` or ``auto``; see :class:`OwnSettings`.

    Raises
    ------
    ConfigError
        If ``inputs_are`` is unknown.
    DataError
        If there are no examples, they are not pairs, inputs differ in shape or kind, or a target
        does not fit the task, such as a label that is not a whole number ≥ 0.
    """
    given = {f"data set {name!r}": dataset}
    if test is not None:
        given[f"test data of {name!r}"] = test
    read = read_parts(given, task)
    train = read.parts[0]
    tested = train[:0] if test is None else read.parts[1]
    check_input_kind(inputs_are)
    x = convert_inputs(_require_numbers(read), inputs_are, f"inputs of {name!r}")
    return Pool.of_examples(name, x, read.y, train=train, test=tested, task=task)


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
    """Read the data sets of one client into a federation of this client, for a Flower client app.

    The name of its data, as a Flower server sees it, is ``custom``.

    Parameters
    ----------
    train, test, validation
        Map-style torch data sets of pairs ``(x, y)``, as :func:`pool_from_torch` takes them.
    labels
        Number of labels among all clients: a client that lacks the last of them needs the same
        model as the others. For language data the size of the vocabulary; left out for other tasks.
    task
        The task.
    name
        Name of the client, for people.
    key
        The client's own number for its random draws, such as the order of its batches; at least 0.
    mean, std
        Mean and standard deviation of the pixels in [0, 1], if ``x`` are bytes: the same for all
        clients.
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
    if validation is not None:
        given[f"validation data of {name!r}"] = validation
    read = read_parts(given, task)
    trained = read.parts[0]
    tested = read.parts[1]
    validated = trained[:0] if validation is None else read.parts[2]
    needed = count_outputs(read.y, task)
    if labels is not None and needed > labels:
        raise DataError(
            f"client {name!r} has examples of label {needed - 1}, so labels should be above that, "
            f"got {labels}"
        )
    if key < 0:
        raise DataError(f"the key of client {name!r} should be at least 0, got {key}")
    check_input_kind(inputs_are)
    x = convert_inputs(_require_numbers(read), inputs_are, f"inputs of client {name!r}")
    pool = Pool.of_examples(
        "custom", x, read.y, trained, tested, outputs=labels, task=task, mean=mean, std=std
    )
    client = ClientData(0, name, key, train=trained, validation=validated, test=tested)
    return Federation(pool, (client,), description="clients with data of their own")


def _require_numbers(read: Examples) -> torch.Tensor:
    """Return inputs that are numbers; a ConfigError if they are texts."""
    if isinstance(read.x, torch.Tensor):
        return read.x
    raise ConfigError(
        "inputs should be numbers, got texts; fedclade.federation makes a vocabulary of all "
        "clients' texts"
    )


class OwnOptions(TypedDict, total=False):
    """Fields of :class:`OwnSettings` as keyword arguments."""

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
    """Preparation of the examples of clients with data of their own.

    Parameters
    ----------
    test_fraction, validation_fraction
        Fractions of its training examples that a client sets aside for testing and validation, if
        it has no test or validation data.
    samples_per_client
        Largest number of training examples of each client, including examples that it sets aside.
    standardize
        Scaling of each column of inputs ``[N, F]`` by mean and standard deviation of training
        examples. ``client``: each client by its own examples. ``federated``: all clients by the
        examples of the whole federation, from sums that clients could send. Columns in which all
        values are 0 or 1 are not scaled.
    augment
        Function of a batch of inputs, or its ``module:function``; see :class:`Federation`.
    max_words, vocabulary_size
        Length in words to which texts are cut or filled up, and number of words of the vocabulary:
        the most frequent words in the training texts. Texts become int64 tokens.
    inputs_are
        ``tokens``, such as words, which become int64. ``numbers``, which become float32. ``auto``:
        bytes are pixels, and other whole numbers are tokens if the model takes whole numbers (its
        first layer is an embedding).
    newcomers, newcomer_samples
        Number of clients, drawn at random, that are held back from training, and the largest number
        of examples of each.
    seed
        Seed of all these draws.

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
        samples = self.samples_per_client
        newcomer_samples = self.newcomer_samples
        is_test_fraction = 0 < self.test_fraction < 1
        is_validation_fraction = 0 <= self.validation_fraction < 1
        has_words = self.vocabulary_size > len(SPECIALS)
        are_few = newcomer_samples is None or newcomer_samples >= 2
        check_input_kind(self.inputs_are)
        if self.standardize not in get_args(Standardize):
            raise ConfigError(unknown("standardize", self.standardize, get_args(Standardize)))
        require(
            (
                "test_fraction",
                self.test_fraction,
                is_test_fraction,
                "greater than 0 and less than 1",
            ),
            ("validation_fraction", self.validation_fraction, is_validation_fraction, "in [0, 1)"),
            ("samples_per_client", samples, samples is None or samples >= 2, "at least 2"),
            ("max_words", self.max_words, self.max_words >= 1, "at least 1"),
            ("vocabulary_size", self.vocabulary_size, has_words, f"above {len(SPECIALS)}"),
            ("newcomers.clients", self.newcomers, self.newcomers >= 0, "at least 0"),
            ("newcomers.samples_per_client", newcomer_samples, are_few, "at least 2"),
            ("seed", self.seed, self.seed >= 0, "at least 0"),
        )
        resolve_augment(self.augment)


@dataclass(frozen=True, eq=False)
class ClientRows:
    """Examples of one client, as rows of the data of all clients.

    If ``validation`` or ``test`` is None, the client sets aside some of its training examples.
    """

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
    """Build a federation of clients with data of their own.

    Parameters
    ----------
    clients
        Data of each client by its name: ``(train, test)`` or ``(train, validation, test)``, or
        ``train`` alone. Each is a map-style torch data set of pairs ``(x, y)``, or a pair ``(x,
        y)`` of arrays or tensors; ``x`` may be a list of texts. Without test data, or if it is
        None, a client holds back some of its training examples.
    task
        The task. If left out: ``classification`` if targets are whole numbers, which are the
        labels, and ``regression`` for other numbers. ``binary`` and ``multilabel`` have to be
        specified.
    name
        Name of the data, for people.
    labels
        Number of labels, or of words in language data, if the examples may lack some.
    true_clusters
        True cluster of each client by its name, if known; for scoring only.
    schema
        For texts: a :class:`DataSchema` with the words of the vocabulary, or the path of a JSON
        file with one. By default, the words of the training texts are used, and over a network all
        clients agree on one vocabulary.
    **options
        Fields of :class:`~fedclade.data.OwnSettings`, such as ``standardize="federated"``.

    Raises
    ------
    ConfigError
        If a setting is out of range, or the task is neither given nor clear from the targets.
    DataError
        If a client's data cannot be read, differs in shape or type from the other clients' data, or
        is too little.

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
            "clients should be a mapping of names to data, of at least 1, got " + shown(clients)
        )
    given: dict[str, Any] = {}
    for client, data in clients.items():
        for split, part in _separate_splits(client, data).items():
            if part is not None:
                given[_name_part(client, split)] = part
    read = read_parts(given, task)
    rows = dict(zip(given, read.parts, strict=True))
    all_rows = [
        ClientRows(
            client,
            train=rows[_name_part(client, "training")],
            validation=rows.get(_name_part(client, "validation")),
            test=rows.get(_name_part(client, "test")),
        )
        for client in clients
    ]

    if isinstance(read.x, Tensor):
        if declared is not None:
            raise ConfigError(
                "a schema of federation() is for texts, got inputs that are numbers; leave it out"
            )
        return build_federation(
            all_rows,
            read.x,
            read.y,
            settings=settings,
            true_clusters=true_clusters,
            name=name,
            task=read.task,
            outputs=labels,
        )
    source = TextSource(
        all_rows,
        read.x,
        read.y,
        settings=settings,
        true_clusters=true_clusters,
        name=name,
        task=read.task,
        labels=labels,
        schema=declared,
    )
    return source.federation()


def _name_part(client: str, split: str) -> str:
    """Return the name of a client's data in messages."""
    return f"{split} data of {client!r}"


@dataclass(frozen=True, eq=False)
class TextSource(DataSource):
    """Texts that are in no table, and the settings to build a federation from them."""

    clients: Sequence[ClientRows]
    texts: list[str]
    y: Tensor
    settings: OwnSettings
    true_clusters: Mapping[str, int] | None
    name: str
    task: TaskKind
    labels: int | None
    schema: DataSchema | None = None

    def federation(self) -> Federation:
        """Build the federation, encoded by the declared words or those of the training texts."""
        if self.schema is None:
            return self._encode(DataSchema())
        return self.encode(self.schema)

    def propose(self) -> Proposal:
        """Return the vocabulary of this client's training texts, or the declared one."""
        if self.schema is not None:
            return Proposal(self._complete(self.schema), is_fixed=True)
        words, counts = count_words(self.clients, self.texts, self.settings)
        schema = self._complete(DataSchema(words=words))
        return Proposal(schema, word_counts=counts, vocabulary_size=self.settings.vocabulary_size)

    def encode(self, schema: DataSchema) -> Federation:
        """Build the federation, encoded by the words of a schema."""
        if not schema.words or schema.inputs:
            raise SchemaError("the schema is of a table, and the data is texts outside of a table")
        if schema.task not in (None, self.task):
            raise SchemaError(f"the task is {self.task}, and that of the schema is {schema.task}")
        return self._encode(schema)

    def _complete(self, schema: DataSchema) -> DataSchema:
        """Return a schema with task and labels, which a declared schema may leave out."""
        labels = schema.labels
        if labels is None and self.task == "classification":
            labels = self.labels or int(self.y.max()) + 1
        return replace(schema, task=self.task, labels=labels)

    def _encode(self, schema: DataSchema) -> Federation:
        """Build the federation by a schema, or by the training texts if it has no words."""
        schema = self._complete(schema)
        federation = build_federation(
            self.clients,
            self.texts,
            self.y,
            settings=self.settings,
            true_clusters=self.true_clusters,
            name=self.name,
            task=self.task,
            outputs=schema.labels if isinstance(schema.labels, int) else self.labels,
            words=schema.words,
        )
        encoding = Encoding(
            replace(schema, words=federation.pool.vocabulary),
            is_declared=self.schema is not None,
            source=self if len(self.clients) == 1 else None,
        )
        return replace(federation, encoding=encoding)


def build_federation(
    all_rows: Sequence[ClientRows],
    x: Tensor | list[str],
    y: Tensor,
    *,
    settings: OwnSettings,
    true_clusters: Mapping[str, int] | None,
    name: str,
    columns: Columns | None = None,
    words: tuple[str, ...] = (),
    first_key: int = 0,
    **pool_options: Any,
) -> Federation:
    """Build a federation of clients with data of their own.

    Clients set aside examples for the splits that they bring no data for, and newcomers are held
    back.

    Parameters
    ----------
    all_rows
        Rows of each client.
    x, y
        Inputs ``[N, ...]``, or N texts, and targets of all clients.
    settings
        Settings of users' own data.
    true_clusters
        True cluster of each client by its name, if known.
    name
        Name of the data.
    columns
        Names of the columns of a table, if any.
    words
        Vocabulary of texts; empty: the words of the training texts.
    first_key
        Key of the first client for its random draws; the others follow.
    **pool_options
        Further fields of the pool.

    Raises
    ------
    ConfigError
        If there are as many newcomers as clients.
    DataError
        If a client has too few examples.
    """
    count = len(all_rows)
    trained = count - settings.newcomers
    rule = f"below the number of clients ({count})"
    require(("newcomers.clients", settings.newcomers, trained >= 1, rule))
    order = rng.generator(settings.seed, "newcomers").permutation(count)
    newcomers = sorted(order[trained:].tolist())
    late = set(newcomers)
    places = [place for place in range(count) if place not in late] + newcomers
    members: list[ClientData] = []
    for number, place in enumerate(places):
        limit = settings.samples_per_client
        if number >= trained and settings.newcomer_samples is not None:
            limit = settings.newcomer_samples
        client = _prepare_client(number, first_key + place, all_rows[place], settings, limit=limit)
        members.append(client)
    train = np.concatenate([client.train for client in members[:trained]])
    test = np.concatenate([client.test for client in members[:trained]])
    vocabulary: tuple[str, ...] = ()
    if isinstance(x, Tensor):
        x = convert_inputs(x, settings.inputs_are, "inputs")
    else:
        x, vocabulary = _tokenize(x, train, settings, words)
    if settings.standardize != "none":
        x, columns = standardize_inputs(
            x, columns, members[:trained], members[trained:], how=settings.standardize
        )
    pool = Pool.of_examples(
        name, x, y, train=train, test=test, vocabulary=vocabulary, columns=columns, **pool_options
    )
    if true_clusters is not None:
        _check_true_clusters(members, true_clusters)

    def build(some: Sequence[ClientData], late: Federation | None = None) -> Federation:
        """Build the federation of some of the clients."""
        known = None
        if true_clusters is not None:
            known = {client.id: true_clusters[client.name] for client in some}
        plural = "s" if len(some) > 1 else ""
        description = f"{pool.name}, {len(some)} client{plural}"
        augment = resolve_augment(settings.augment)
        return Federation(
            pool, tuple(some), known, description=description, newcomers=late, augment=augment
        )

    late = build(members[trained:]) if newcomers else None
    return build(members[:trained], late)


def _tokenize(
    texts: Sequence[str], train: Indices, settings: OwnSettings, vocabulary: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...]]:
    """Return texts as tokens ``[N, max_words]``, and their vocabulary.

    If the vocabulary is empty, that of the training texts is used.
    """
    words = [split_words(text) for text in texts]
    if not vocabulary:
        training_words = [words[row] for row in train]
        vocabulary = build_vocabulary(training_words, settings.vocabulary_size)
    tokens = pad(encode(words, vocabulary), settings.max_words)
    return torch.from_numpy(tokens), vocabulary


def count_words(
    all_rows: Sequence[ClientRows], texts: Sequence[str], settings: OwnSettings, first_key: int = 0
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the vocabulary of the clients' training texts, and the count of each word.

    The special tokens at the beginning of the vocabulary have no count.
    """
    counts: Counter[str] = Counter()
    limit = settings.samples_per_client
    for place, rows in enumerate(all_rows):
        client = _prepare_client(place, first_key + place, rows, settings, limit=limit)
        for row in client.train.tolist():
            counts.update(split_words(texts[int(row)]))
    frequent = sort_by_frequency(counts)[: settings.vocabulary_size - len(SPECIALS)]
    words = tuple(word for word, _ in frequent)
    return (*SPECIALS, *words), tuple(count for _, count in frequent)


def _prepare_client(
    number: int, key: int, rows: ClientRows, settings: OwnSettings, *, limit: int | None
) -> ClientData:
    """Limit a client's examples, and set aside the splits that it does not bring."""
    seed = settings.seed
    train = rows.train
    if limit is not None:
        train = rng.generator(seed, "samples_per_client", key).permutation(train)[:limit]
    needed = 2 if rows.test is None else 1
    if len(train) < needed:
        plural = "s" if len(train) > 1 else ""
        hint = ""
        if rows.test is None:
            hint = ", one to be tested on; leave it out, or give it test data"
        raise DataError(
            f"client {rows.name!r} has {len(train)} example{plural}, but needs {needed}: "
            f"one to train on{hint}"
        )
    test = rows.test
    if test is None:
        train, test = set_aside(train, settings.test_fraction, "test", seed=seed, client=key)
    validation = rows.validation
    if validation is None:
        validation = train[:0]
        fraction = settings.validation_fraction
        if fraction:
            train, validation = set_aside(train, fraction, "validation", seed=seed, client=key)
    return ClientData(number, rows.name, key, train=train, validation=validation, test=test)


def _check_true_clusters(members: Sequence[ClientData], true_clusters: Mapping[str, int]) -> None:
    """Check that the true clusters name every client exactly once."""
    names = {client.name for client in members}
    odd = sorted(names ^ set(true_clusters))
    if odd:
        raise DataError(
            f"true_clusters should name every client exactly once; these do not match: {shown(odd)}"
        )


def _separate_splits(client: str, given: Any) -> Mapping[str, Any]:
    """Return a client's data by split; None for a split that it does not bring."""
    train = validation = test = None
    data = given if isinstance(given, tuple) else (given,)
    if all(part is None or is_dataset(part) or is_pair(part) for part in data):
        if len(data) == 1:
            (train,) = data
        elif len(data) == 2:
            train, test = data
        elif len(data) == 3:
            train, validation, test = data
    elif is_pair(data):
        train = data
    if train is None:
        raise DataError(
            f"the data of client {client!r} should be (train, test), each a torch data set or a "
            f"pair (x, y) of arrays, got {_show_kinds(given)}"
        )
    return {"training": train, "validation": validation, "test": test}


def _show_kinds(data: Any) -> str:
    """Return the types of a client's data, for a message."""
    if isinstance(data, tuple):
        return f"({', '.join(_show_kinds(part) for part in data)})"
    return type(data).__name__
