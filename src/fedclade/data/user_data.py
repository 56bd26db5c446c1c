"""Federations built from users' own data: arrays, torch data sets, and texts.

The module also has the settings and functions by which clients hold out test data, which tables use
as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

import numpy as np
import torch

from fedclade.core import (
    DENSE,
    ConfigError,
    DataError,
    Indices,
    Structure,
    TaskKind,
    checked,
    is_choice,
    require,
    rng,
    shown,
    unknown,
)
from fedclade.data.agreement import DataSource, Encoding, Proposal, sort_by_frequency
from fedclade.data.arrays import (
    InputKind,
    check_input_kind,
    check_one_tensor,
    convert_inputs,
    count_outputs,
)
from fedclade.data.client_data import Augment, resolve_augment
from fedclade.data.federation import ClientData, Federation
from fedclade.data.hold_out import HoldOut, HoldOutRule, Stratify, number_values
from fedclade.data.pool import Columns, Pool
from fedclade.data.reading import Examples, NamedColumns, Names, is_dataset, is_pair, read_parts
from fedclade.data.schema import DataSchema, SchemaError, read_declared
from fedclade.data.standardize import ScalingChoice, Standardize, StandardizeTarget, TableData
from fedclade.data.texts import SPECIALS, build_vocabulary, encode, pad, split_words

# Torch data sets as a pool, or as the data of one client.


@checked("dataset", "test")
def pool_from_torch(
    dataset: torch.utils.data.Dataset[Any],
    test: torch.utils.data.Dataset[Any] | None = None,
    name: str = "custom",
    task: TaskKind = "classification",
    inputs_are: InputKind = "auto",
    inputs: Names | None = None,
    target: Names | None = None,
    ignored: int | None = None,
) -> Pool:
    """Read a map-style torch data set of pairs ``(x, y)``, or of dicts of columns, as a pool.

    Every example is read only once. A random transform is therefore applied only once, which is
    reported by a warning.

    Parameters
    ----------
    dataset
        Training examples. All ``x`` are tensors or arrays of the same shape. uint8 values are
        images (scaled to [0, 1] as input of the model), other integers become int64 tokens, and all
        other values float32. Labels may be whole numbers of any type; for the targets of other
        tasks see :class:`Pool`.
    test
        Test examples. If None, every client holds out a part of its own examples.
    name
        Name of the data.
    task
        The task.
    inputs_are
        ``numbers``, ``tokens`` or ``auto``; see :class:`OwnSettings`.
    inputs, target, ignored
        Columns of rows that are dicts, and the label of pixels to ignore; see :func:`federation`.

    Raises
    ------
    ConfigError
        If ``inputs_are`` is unknown.
    DataError
        If there are no examples, an example is not a pair, inputs differ in shape or type, or a
        target does not fit the task, such as a label that is not a whole number ≥ 0.
    """
    given = {f"data set {name!r}": dataset}
    if test is not None:
        given[f"test data of {name!r}"] = test
    read = read_parts(given, task, NamedColumns(inputs=inputs, target=target, ignored=ignored))
    train = read.parts[0]
    if test is None:
        tested = train[:0]
    else:
        tested = read.parts[1]
    x = _convert_inputs(read, inputs_are, f"inputs of {name!r}")
    return Pool.of_examples(
        name,
        x,
        read.y,
        train=train,
        test=tested,
        task=task,
        structure=read.structure,
        target_structure=read.target_structure,
    )


@checked("train", "test", "validation", "groups")
def one_client(
    train: torch.utils.data.Dataset[Any],
    test: torch.utils.data.Dataset[Any],
    *,
    labels: int | None = None,
    task: TaskKind = "classification",
    validation: torch.utils.data.Dataset[Any] | None = None,
    name: str = "client",
    key: int = 0,
    mean: float = 0.0,
    std: float = 1.0,
    inputs_are: InputKind = "auto",
    groups: Any = None,
    inputs: Names | None = None,
    target: Names | None = None,
    ignored: int | None = None,
) -> Federation:
    """Build a federation of a single client from its data sets, for a Flower client app.

    The name of the data set, which the client reports to the Flower server, is ``custom``.

    Parameters
    ----------
    train, test, validation
        Map-style torch data sets of pairs ``(x, y)``, as :func:`pool_from_torch` takes them.
    labels
        Number of labels among all clients, since all clients need the same model even if a client
        lacks some labels. For language data the size of the vocabulary; None for other tasks.
    task
        The task.
    name
        Name of the client in reports.
    key
        Number that seeds the client's random draws, such as the order of batches; at least 0.
    mean, std
        Mean and standard deviation of the pixels in [0, 1], if ``x`` are uint8 images; equal for
        all clients.
    inputs_are
        ``numbers``, ``tokens`` or ``auto``; see :class:`OwnSettings`.
    groups
        Group of each training example, ``[n]``: whole numbers or texts, such as the names of
        patients. The examples of a group depend on each other, see :class:`OwnSettings`.
    inputs, target, ignored
        Columns of rows that are dicts, and the label of pixels to ignore; see :func:`federation`.

    Raises
    ------
    ConfigError
        If ``labels`` is missing, or given for a task without labels, or ``inputs_are`` is unknown.
    DataError
        If a data set cannot be read, or differs from ``train`` in the type or shape of examples, a
        label is not below ``labels``, the groups have another length, or the key is negative.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> mine = TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)
    >>> len(one_client(mine, mine, labels=10, name="hospital-1"))
    1
    """
    labelled = task == "classification" or task in DENSE
    if labelled:
        rule = "the number of labels among all clients"
    else:
        rule = f"left out for a {task} task"
    require(("labels", labels, (labels is not None) == labelled, rule))
    given = {f"training data of {name!r}": train, f"test data of {name!r}": test}
    if validation is not None:
        given[f"validation data of {name!r}"] = validation
    read = read_parts(given, task, NamedColumns(inputs=inputs, target=target, ignored=ignored))
    trained = read.parts[0]
    tested = read.parts[1]
    if validation is None:
        validated = trained[:0]
    else:
        validated = read.parts[2]
    needed = count_outputs(read.y, task)
    if labels is not None and needed > labels:
        raise DataError(
            f"labels should be at least {needed}, as client {name!r} has the label {needed - 1}, "
            f"got {labels}"
        )
    if key < 0:
        raise DataError(f"the key of client {name!r} should be at least 0, got {key}")
    x = _convert_inputs(read, inputs_are, f"inputs of client {name!r}")
    related = None
    if groups is not None:
        related = _number_groups({name: groups}, [ClientRows(name, trained)], len(read.y))
    pool = Pool.of_examples(
        "custom",
        x,
        read.y,
        trained,
        tested,
        outputs=labels,
        task=task,
        mean=mean,
        std=std,
        related=related,
        structure=read.structure,
        target_structure=read.target_structure,
    )
    client = ClientData(0, name, key, train=trained, validation=validated, test=tested)
    return Federation(pool, (client,), description="clients with data of their own")


def _convert_inputs(read: Examples, kind: InputKind, what: str) -> torch.Tensor:
    """Return the inputs of examples as numbers or tokens; see :func:`convert_inputs`."""
    check_input_kind(kind)
    x = _require_numbers(read)
    check_one_tensor(kind, read.structure)
    return convert_inputs(x, kind, what)


def _require_numbers(read: Examples) -> torch.Tensor:
    """Return the inputs of examples; raise a ConfigError if the inputs are texts."""
    if isinstance(read.x, torch.Tensor):
        return read.x
    raise ConfigError(
        "inputs should be numbers, got texts; use fedclade.federation, which builds a vocabulary "
        "from the texts of all clients"
    )


class ArrayOptions(TypedDict, total=False):
    """Fields of :class:`OwnSettings` for data other than tables, as keyword arguments."""

    test_fraction: float
    validation_fraction: float
    test: HoldOutRule
    order: str | None
    stratify: Stratify
    samples_per_client: int | None
    standardize: Standardize
    standardize_target: StandardizeTarget
    augment: Augment | str | None
    max_words: int
    vocabulary_size: int
    inputs_are: InputKind
    newcomers: int
    newcomer_samples: int | None
    seed: int


class OwnOptions(ArrayOptions, total=False):
    """Fields of :class:`OwnSettings`, as keyword arguments of functions that build federations."""

    groups: str | None


@dataclass(frozen=True, kw_only=True)
class OwnSettings:
    """Settings of the preparation of users' own data: hold-out, scaling, texts and newcomers.

    Parameters
    ----------
    test_fraction, validation_fraction
        Fractions of a client's training examples that are set aside for testing and validation, if
        the client has no test or validation data.
    test
        Examples that a client sets aside for testing and validation: ``random`` examples, or the
        ``last`` examples in an order. With ``last``, validation data comes after training data, and
        test data after both.
    order
        Column of a table by which its rows are ordered for ``last``, such as a time; None for the
        order of the rows. The column is an input only if ``inputs`` lists it.
    groups
        Column of a table with the group of each row, such as a patient. The rows of a group depend
        on each other: a client's rows of one group are training, validation or test data together,
        and are in the same part of the data if a method divides a client's data into parts. The
        column is an input only if ``inputs`` lists it.
    stratify
        Strata of a random hold-out. ``labels``: the same share of a client's examples of each label
        is set aside. ``none``: no strata. ``auto``: ``labels`` for tables without
        ``groups`` whose target is a label, ``none`` for other data.
    samples_per_client
        Largest number of training examples of each client, including examples that are set aside.
    standardize
        Scaling of each column of inputs ``[N, F]`` by mean and standard deviation of training
        examples. ``client``: each client scales by its own examples. ``federated``: all clients
        scale by the examples of the whole federation, of which each client needs to send only sums.
        Columns in which all values are 0 or 1 are not scaled. ``none``: no scaling. ``auto``:
        ``federated`` for tables, ``none`` for other data.
    standardize_target
        Scaling of the targets of a regression in training, ``none`` or ``federated``, as for
        inputs. Metrics are in the user's unit nevertheless. ``auto``: ``federated`` for tables,
        ``none`` for other data. Losses that do not measure a difference, such as ``poisson_nll`` or
        a user's own loss, get unscaled targets.
    augment
        Function that changes the inputs of training batches, or its ``module:function``; see
        :class:`Federation`.
    max_words, vocabulary_size
        Number of words to which texts are cut or padded, and largest size of the vocabulary, which
        has the most frequent words in the training texts. Texts become int64 tokens.
    inputs_are
        Kind of inputs. ``tokens``, such as words, become int64. ``numbers`` become float32.
        ``auto``: uint8 values are pixels, and other integers are tokens if the model takes integers
        (its first layer is an embedding).
    newcomers, newcomer_samples
        Number of clients, drawn at random, that are excluded from training, and the largest number
        of examples of each of these clients.
    seed
        Seed of the draws: of held-out examples, of newcomers, and of the examples that remain if
        the number of examples is limited.

    Raises
    ------
    ConfigError
        If a number is out of range, or ``augment`` is not a function of the inputs.
    """

    test_fraction: float = 0.2
    validation_fraction: float = 0.0
    test: HoldOutRule = "random"
    order: str | None = None
    groups: str | None = None
    stratify: Stratify = "auto"
    samples_per_client: int | None = None
    standardize: Standardize = "auto"
    standardize_target: StandardizeTarget = "auto"
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
        if not is_choice(self.test, HoldOutRule):
            raise ConfigError(unknown("value of test:", self.test, get_args(HoldOutRule)))
        if not is_choice(self.stratify, Stratify):
            raise ConfigError(unknown("value of stratify:", self.stratify, get_args(Stratify)))
        is_stratified = self.stratify == "labels"
        is_random = self.test == "random" and self.groups is None
        rule = "'none' with groups or test = 'last', which determine the held-out rows"
        require(
            ("stratify", self.stratify, is_random or not is_stratified, rule),
            (
                "order",
                self.order,
                self.order is None or self.test == "last",
                "left out unless test = 'last'",
            ),
        )
        if not is_choice(self.standardize, Standardize):
            raise ConfigError(
                unknown("value of standardize:", self.standardize, get_args(Standardize))
            )
        if not is_choice(self.standardize_target, StandardizeTarget):
            known = get_args(StandardizeTarget)
            raise ConfigError(
                unknown("value of standardize_target:", self.standardize_target, known)
            )
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
    """Examples of one client, as row numbers in the data of all clients.

    Parameters
    ----------
    name
        Name of the client.
    train
        Rows of the training examples.
    validation, test
        Rows of the validation and test examples; None if the client has no such data and sets aside
        some of its training examples.
    """

    name: str
    train: Indices
    validation: Indices | None = None
    test: Indices | None = None


@checked("clients", "groups")
def federation(
    clients: Mapping[str, Any],
    task: TaskKind | None = None,
    *,
    name: str = "custom",
    labels: int | None = None,
    true_clusters: Mapping[str, int] | None = None,
    schema: DataSchema | str | Path | None = None,
    groups: Mapping[str, Any] | None = None,
    inputs: Names | None = None,
    target: Names | None = None,
    ignored: int | None = None,
    **options: Unpack[ArrayOptions],
) -> Federation:
    """Build a federation from the arrays, tensors or torch data sets of each client.

    Parameters
    ----------
    clients
        Data of each client by its name: ``(train, test)`` or ``(train, validation, test)``, or only
        ``train``. Each of these is a map-style torch data set of pairs ``(x, y)`` or of dicts (as a
        data set of Hugging Face is), a list of such dicts, a pair ``(x, y)`` of arrays or tensors,
        or a dict of columns ``[n, ...]``. ``x`` may be a list of texts, or a dict or tuple of arrays
        for a model with several inputs. If test data is missing or None, a client holds out some of
        its training examples.
    task
        The task. If left out: ``classification`` if targets are whole numbers, which are the
        labels, and ``regression`` for other numbers. ``binary`` and ``multilabel`` have to be
        specified.
    name
        Name of the data in descriptions and reports.
    labels
        Number of labels, or of words in language data, if the examples may lack some labels.
    true_clusters
        True cluster of each client by its name, if known; for scoring only.
    schema
        For texts: a :class:`DataSchema` with the words of the vocabulary, or the path of a JSON
        file with such a schema. By default, the words of the training texts are used, and over a
        network all clients agree on one vocabulary.
    groups
        Group of each training example of each client, ``[n]`` by the name of the client: whole
        numbers or texts, such as the names of patients. The examples of a group depend on each
        other, see :class:`~fedclade.data.OwnSettings`. None: no examples depend on each other.
    inputs
        Columns from which a model predicts, if rows are dicts: a column; a list of columns; or a
        mapping of the names of the model's inputs to columns, such as ``{"input_ids": "ids"}``.
        None: all columns of numbers except for the target. Several columns, or a mapping, reach the
        model as a dict.
    target
        Column to predict, if rows are dicts; several columns are for a loss of your own, which gets
        them as a dict. None: the column ``labels``, ``label``, ``target``, ``targets`` or ``y``.
    ignored
        Label of pixels in masks that losses and metrics ignore, such as 255; None if there is none.
    **options
        Fields of :class:`~fedclade.data.OwnSettings`, such as ``standardize="federated"``.

    Raises
    ------
    ConfigError
        If a setting is out of range, or the task is neither given nor clear from the targets.
    DataError
        If a client's data cannot be read, differs in shape or type from the other clients' data, or
        has too few examples, or if the groups of a client are missing or of another length.

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
    rule = "a mapping of the name of each client to the groups of its examples"
    require(("groups", groups, groups is None or isinstance(groups, Mapping), rule))  # pyright: ignore[reportUnnecessaryIsInstance]
    declared = read_declared(schema)
    if not isinstance(clients, Mapping) or not clients:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DataError(
            "clients should be a mapping of the name of at least 1 client to its data, got "
            + shown(clients)
        )
    if type(clients).__name__ == "DatasetDict":
        raise DataError(
            "clients should be a mapping of the name of each client to its data, got a DatasetDict, "
            f"whose entries {', '.join(map(str, clients))} are splits; pass {{name: (data['train'], "
            "data['test'])}, or distribute one split by load_federation(data['train'], ...)"
        )
    given: dict[str, Any] = {}
    for client, data in clients.items():
        for split, part in _separate_splits(client, data).items():
            if part is not None:
                given[_name_part(client, split)] = part
    read = read_parts(given, task, NamedColumns(inputs=inputs, target=target, ignored=ignored))
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
    group_numbers = None
    if groups is not None:
        group_numbers = _number_groups(groups, all_rows, len(read.y))

    if isinstance(read.x, torch.Tensor):
        if declared is not None:
            raise ConfigError(
                "the schema of federation() can be set only if inputs are texts, but the inputs "
                "are numbers; leave out the schema"
            )
        return build_federation(
            all_rows,
            read.x,
            read.y,
            settings=settings,
            true_clusters=true_clusters,
            name=name,
            groups=group_numbers,
            task=read.task,
            outputs=labels,
            structure=read.structure,
            target_structure=read.target_structure,
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
        groups=group_numbers,
    )
    return source.federation()


def _number_groups(
    groups: Mapping[str, Any], all_rows: Sequence[ClientRows], examples: int
) -> Indices:
    """Return the number of the group of each example of all clients, int64 ``[N]``.

    Groups of different clients have different numbers. Only training examples need a group.

    Raises
    ------
    DataError
        If the groups of a client are missing, or are not one value for each training example.
    """
    names = [rows.name for rows in all_rows]
    odd = sorted(set(names) ^ set(groups), key=str)
    if odd:
        raise DataError(
            "groups should name every client of the federation and no other client; missing or "
            f"unknown are: {shown(odd)}"
        )
    numbers = np.zeros(examples, dtype=np.int64)
    first = 0
    for rows in all_rows:
        given = np.asarray(groups[rows.name])
        if given.shape != rows.train.shape or given.dtype.kind not in "iuUSO":
            raise DataError(
                f"the groups of client {rows.name!r} should be {len(rows.train)} whole numbers or "
                f"texts, one for each training example, got an array of shape {list(given.shape)} "
                f"and type {given.dtype}"
            )
        own = number_values(given.astype(str))
        numbers[rows.train] = first + own
        first += len(own)
    return numbers


def _name_part(client: str, split: str) -> str:
    """Return the name of a client's data in one split, for messages."""
    return f"{split} data of {client!r}"


@dataclass(frozen=True, eq=False)
class TextSource(DataSource):
    """Texts of clients, given as lists and not as a column of tables, and their settings.

    A federation can be built from the source again for another vocabulary.
    """

    clients: Sequence[ClientRows]
    texts: list[str]
    y: torch.Tensor
    settings: OwnSettings
    true_clusters: Mapping[str, int] | None
    name: str
    task: TaskKind
    labels: int | None
    schema: DataSchema | None = None
    groups: Indices | None = None

    def federation(self) -> Federation:
        """Build the federation, encoded by the declared words or those of the training texts."""
        if self.schema is None:
            return self._build_encoded(DataSchema())
        return self.encode(self.schema)

    def propose(self) -> Proposal:
        """Return the client's proposal: the declared schema, or the words of its training texts."""
        if self.schema is not None:
            return Proposal(self._complete_schema(self.schema), is_fixed=True)
        labels = self.y if self.task in LABELLED else None
        hold_out = hold_out_of_arrays(self.settings, labels, self.groups)
        words, counts = count_words(self.clients, self.texts, self.settings, hold_out=hold_out)
        schema = self._complete_schema(DataSchema(words=words))
        return Proposal(schema, word_counts=counts, vocabulary_size=self.settings.vocabulary_size)

    def encode(self, schema: DataSchema) -> Federation:
        """Build the federation, encoded by the words of a schema.

        Raises
        ------
        SchemaError
            If the schema is for a table, or has another task.
        """
        if not schema.words or schema.inputs:
            raise SchemaError(
                "the schema is for a table, but the data is texts outside of a table; use a schema "
                "with words and without inputs"
            )
        if schema.task not in (None, self.task):
            raise SchemaError(
                f"the task is {self.task}, but the task of the schema is {schema.task}; set both "
                "to the same task"
            )
        return self._build_encoded(schema)

    def _complete_schema(self, schema: DataSchema) -> DataSchema:
        """Return a schema with the task and labels, which a declared schema may leave out."""
        labels = schema.labels
        if labels is None and self.task == "classification":
            labels = self.labels or int(self.y.max()) + 1
        return replace(schema, task=self.task, labels=labels)

    def _build_encoded(self, schema: DataSchema) -> Federation:
        """Build the federation, encoded by the words of a schema.

        If the schema has no words, the words of the training texts are used.
        """
        schema = self._complete_schema(schema)
        federation = build_federation(
            self.clients,
            self.texts,
            self.y,
            settings=self.settings,
            true_clusters=self.true_clusters,
            name=self.name,
            groups=self.groups,
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
    x: torch.Tensor | list[str],
    y: torch.Tensor,
    *,
    settings: OwnSettings,
    true_clusters: Mapping[str, int] | None,
    name: str,
    columns: Columns | None = None,
    words: tuple[str, ...] = (),
    first_key: int = 0,
    is_table: bool = False,
    hold_out: HoldOut | None = None,
    groups: Indices | None = None,
    **pool_options: Any,
) -> Federation:
    """Build a federation from the inputs and targets of all clients and the rows of each client.

    Clients without test or validation data set aside some of their training examples, inputs are
    scaled or texts encoded, and newcomers are excluded from training.

    Parameters
    ----------
    all_rows
        Rows of each client in ``x`` and ``y``.
    x, y
        Inputs ``[N, ...]``, or N texts, and targets of all clients.
    settings
        Settings of users' own data.
    true_clusters
        True cluster of each client by its name, if known.
    name
        Name of the data.
    columns
        Names of the columns of a table; None for other data.
    words
        Vocabulary of texts; if empty, the words of the training texts are used.
    first_key
        Key of the first client, which seeds its random draws; the next clients have the next keys.
    is_table
        Whether the data is a table, whose numbers are scaled by default.
    hold_out
        Rule by which clients set examples aside. If None, :func:`hold_out_of_arrays` returns the
        rule.
    groups
        Number of the group of each example, ``[N]``, if ``hold_out`` is None.
    **pool_options
        Further fields of the pool.

    Raises
    ------
    ConfigError
        If there are as many newcomers as clients.
    DataError
        If a client has too few examples.
    """
    if hold_out is None:
        labels = y if pool_options.get("task") in LABELLED else None
        hold_out = hold_out_of_arrays(settings, labels, groups)
    members, trained = prepare_clients(all_rows, settings, first_key, hold_out=hold_out)
    train = np.concatenate([client.train for client in members[:trained]])
    test = np.concatenate([client.test for client in members[:trained]])
    vocabulary: tuple[str, ...] = ()
    if isinstance(x, torch.Tensor):
        structure = pool_options.get("structure")
        check_one_tensor(settings.inputs_are, structure)
        _check_scalable(settings.standardize, structure)
        x = convert_inputs(x, settings.inputs_are, "inputs")
    else:
        x, vocabulary = _tokenize(x, train, settings, words)
    table = TableData(x, y, columns)
    how = settings.standardize_target
    is_regression = pool_options.get("task") == "regression"
    is_possible = is_regression or how != "federated"
    rule = "'auto' or 'none' for a task other than regression"
    require(("standardize_target", how, is_possible, rule))
    choice = ScalingChoice(settings.standardize, how if is_regression else "none", is_table)
    table = choice.scale(table, members[:trained], members[trained:])
    pool = Pool.of_examples(
        name,
        table.x,
        y,
        train=train,
        test=test,
        vocabulary=vocabulary,
        columns=table.columns,
        raw=table.raw,
        related=hold_out.groups,
        **pool_options,
    )
    if true_clusters is not None:
        _check_true_clusters(members, true_clusters)

    def build(some: Sequence[ClientData], late: Federation | None = None) -> Federation:
        """Build the federation of the clients ``some``, with newcomers ``late``."""
        known = None
        if true_clusters is not None:
            known = {client.id: true_clusters[client.name] for client in some}
        plural = "s" if len(some) > 1 else ""
        description = f"{pool.name}, {len(some)} client{plural}"
        augment = resolve_augment(settings.augment)
        return Federation(
            pool, tuple(some), known, description=description, newcomers=late, augment=augment
        )

    if settings.newcomers:
        late = build(members[trained:])
    else:
        late = None
    return build(members[:trained], late)


def _check_scalable(how: Standardize, structure: Structure | None) -> None:
    """Check that inputs with tokens or truth values are not scaled, which would change them."""
    if structure is None or not structure.has_whole_numbers:
        return
    rule = (
        "'none' for a dict or tuple with whole numbers or truth values; scale the floats yourself"
    )
    require(("standardize", how, how in ("auto", "none"), rule))


def prepare_clients(
    all_rows: Sequence[ClientRows], settings: OwnSettings, first_key: int = 0, *, hold_out: HoldOut
) -> tuple[list[ClientData], int]:
    """Set aside test and validation examples of each client, and choose the newcomers.

    Parameters
    ----------
    all_rows
        Rows of each client.
    settings
        Settings of users' own data.
    first_key
        Key of the first client, which seeds its random draws; the next clients have the next keys.
    hold_out
        Rule by which clients set examples aside.

    Returns
    -------
    tuple
        The clients with newcomers at the end, and the number of clients that are no newcomers.

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
        client = _prepare_client(
            number,
            first_key + place,
            all_rows[place],
            settings=settings,
            limit=limit,
            hold_out=hold_out,
        )
        members.append(client)
    return members, trained


def _tokenize(
    texts: Sequence[str], train: Indices, settings: OwnSettings, vocabulary: tuple[str, ...]
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Encode N texts as tokens ``[N, max_words]``.

    If the given vocabulary is empty, a vocabulary of the training texts (rows ``train``) is built.
    Returns the tokens and the vocabulary.
    """
    words = [split_words(text) for text in texts]
    if not vocabulary:
        training_words = [words[row] for row in train]
        vocabulary = build_vocabulary(training_words, settings.vocabulary_size)
    tokens = pad(encode(words, vocabulary), settings.max_words)
    return torch.from_numpy(tokens), vocabulary


LABELLED: tuple[TaskKind, ...] = ("classification", "binary")
"""Tasks whose targets are labels, which can be the strata of a hold-out."""


def hold_out_of_arrays(
    settings: OwnSettings, labels: torch.Tensor | None, groups: Indices | None = None
) -> HoldOut:
    """Return the rule by which clients with arrays or texts (not tables) set examples aside.

    Parameters
    ----------
    settings
        Settings of users' own data.
    labels
        Label of each example, ``[N]``; None if the targets are not labels.
    groups
        Number of the group of each example, ``[N]``; None without groups.

    Raises
    ------
    ConfigError
        If the settings name columns of a table, or request strata although targets are not labels.
    """
    for key in ("order", "groups"):
        column = getattr(settings, key)
        rule = "left out for data other than tables, since it names a column"
        require((key, column, column is None, rule))
    is_divided = groups is None or settings.stratify != "labels"
    rule = "'none' or 'auto' with groups, which determine the held-out examples"
    require(("stratify", settings.stratify, is_divided, rule))
    return HoldOut(settings.test, groups=groups, labels=strata_of(settings, labels))


def strata_of(settings: OwnSettings, labels: Any, *, by_default: bool = False) -> Indices | None:
    """Return the stratum of each example, or None if the settings request no strata.

    Parameters
    ----------
    settings
        Settings of users' own data.
    labels
        Label of each example; None if the targets are not labels.
    by_default
        Whether ``stratify = "auto"`` requests strata.
    """
    is_asked = settings.stratify == "labels"
    rule = "'none' for targets that are not labels"
    require(("stratify", settings.stratify, labels is not None or not is_asked, rule))
    is_random = settings.test == "random" and settings.groups is None
    if is_asked or (settings.stratify == "auto" and by_default and is_random):
        if labels is None:
            return None
        return number_values(np.asarray(labels))
    return None


def count_words(
    all_rows: Sequence[ClientRows],
    texts: Sequence[str],
    settings: OwnSettings,
    first_key: int = 0,
    *,
    hold_out: HoldOut,
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Count the words of the clients' training texts.

    Returns
    -------
    tuple
        The vocabulary of special tokens and most frequent words, and the count of each of these
        words (not of the special tokens).
    """
    counts: Counter[str] = Counter()
    limit = settings.samples_per_client
    for place, rows in enumerate(all_rows):
        client = _prepare_client(
            place, first_key + place, rows, settings=settings, limit=limit, hold_out=hold_out
        )
        for row in client.train.tolist():
            counts.update(split_words(texts[int(row)]))
    frequent = sort_by_frequency(counts)[: settings.vocabulary_size - len(SPECIALS)]
    words = tuple(word for word, _ in frequent)
    return (*SPECIALS, *words), tuple(count for _, count in frequent)


def _prepare_client(
    number: int,
    key: int,
    rows: ClientRows,
    *,
    settings: OwnSettings,
    limit: int | None,
    hold_out: HoldOut,
) -> ClientData:
    """Limit a client's examples, and set aside test and validation data that the client lacks.

    ``number`` becomes the id of the client, and ``key`` seeds its draws.
    """
    seed = settings.seed
    train = rows.train
    if limit is not None:
        train = rng.generator(seed, "samples_per_client", key).permutation(train)[:limit]
    lacking = [
        name
        for name, given, fraction in (
            ("testing", rows.test, settings.test_fraction),
            ("validation", rows.validation, settings.validation_fraction),
        )
        if given is None and (fraction or name == "testing")
    ]
    needed = 1 + len(lacking)
    if len(train) < needed:
        plural = "" if len(train) == 1 else "s"
        purposes = ["one for training", *(f"one for {name}" for name in lacking)]
        listed = purposes[0]
        if lacking:
            own = "test data" if lacking == ["testing"] else "data for them"
            listed = (
                f"{', '.join(purposes[:-1])} and {purposes[-1]}; leave the client out "
                f"(fewest_rows = {needed} for tables), or give it {own}"
            )
        raise DataError(
            f"client {rows.name!r} has {len(train)} example{plural}, but needs {needed}: {listed}"
        )
    hold = partial(hold_out.set_aside, seed=seed, client=key, name=rows.name)
    test = rows.test
    if test is None:
        train, test = hold(train, settings.test_fraction, "test")
    validation = rows.validation
    if validation is None:
        validation = train[:0]
        fraction = settings.validation_fraction
        if fraction:
            train, validation = hold(train, fraction, "validation")
    return ClientData(number, rows.name, key, train=train, validation=validation, test=test)


def _check_true_clusters(members: Sequence[ClientData], true_clusters: Mapping[str, int]) -> None:
    """Check that the true clusters name every client exactly once."""
    names = {client.name for client in members}
    odd = sorted(names ^ set(true_clusters))
    if odd:
        raise DataError(
            "true_clusters should name every client of the federation and no other client; missing "
            f"or unknown are: {shown(odd)}"
        )


def _separate_splits(client: str, given: Any) -> Mapping[str, Any]:
    """Separate a client's data into training, validation and test data, by name.

    The value is None for data that the client lacks. ``client`` is the name of the client.

    Raises
    ------
    DataError
        If the data has another form, or no training data.
    """
    train = validation = test = None
    data = given if isinstance(given, tuple) else (given,)
    if all(_is_part(part) for part in data) and not _is_pair_of_dicts(data):
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
            f"the data of client {client!r} should be train, (train, test) or (train, validation, "
            "test), each of which is a torch data set, a pair (x, y) of arrays or a dict of columns, "
            f"got {_show_kinds(given)}"
        )
    return {"training": train, "validation": validation, "test": test}


def _is_part(part: Any) -> bool:
    """Return whether an object can be the data of one split, or stands for missing data."""
    are_rows = isinstance(part, list) and len(part) > 0 and isinstance(part[0], Mapping)
    return (
        part is None or are_rows or is_dataset(part) or is_pair(part) or isinstance(part, Mapping)
    )


def _is_pair_of_dicts(data: tuple[Any, ...]) -> bool:
    """Return whether data is one pair of inputs and targets rather than training and test data.

    Two dicts are inputs and targets if they have no column in common.
    """
    return (
        len(data) == 2
        and all(isinstance(part, Mapping) for part in data)
        and not set(data[0]) & set(data[1])
    )


def _show_kinds(data: Any) -> str:
    """Describe the types of a client's data, for an error message."""
    if isinstance(data, tuple):
        return f"({', '.join(_show_kinds(part) for part in data)})"
    return type(data).__name__
