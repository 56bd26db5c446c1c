"""Work of clients: a declaration of what each client does for one training query.

A :class:`ClientWork` has five parts: the model from which a client starts, the examples on which
it trains, the steps that it takes, what it stores, and what it replies. Each part is a frozen
dataclass with the information that a client needs. A federated method declares the work of its
clients where it sends the query. For example, the training of Ditto's personal models is::

    ClientWork(start=FromStored(), steps=Proximal(mu=0.1), store=LocalModel(), reply=NoReply())

An "anchor" is a second vector that a client may be sent in addition to its model, such as the model
to which a proximal term pulls. A "split" is one of several disjoint parts of a client's training
examples; a client can train on its splits separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import rng
from fedclade.core.errors import DataError
from fedclade.core.local import LocalTraining
from fedclade.core.mixtures import Mixture
from fedclade.core.private_questions import Question

Indices = NDArray[np.int64]

"""Array of indices of n examples, ``[n]``."""


# The model from which a client starts.


class Start:
    """Base class for the declaration of the model from which a client starts its training."""


@dataclass(frozen=True)
class FromServer(Start):
    """Declaration that a client starts from the model that the server sends.

    If the model has personal parameters, they are the client's own parameters from before the
    round.
    """


@dataclass(frozen=True)
class FromStored(Start):
    """Declaration that a client starts from the model that it stores itself.

    This applies to clients whose row in the query is :data:`OWN`. Other clients, such as clients
    that have no stored model yet, start from the model of their row.

    Parameters
    ----------
    latest
        Whether the client uses the tensors that earlier training in the same round has stored. If
        not, the client uses the tensors stored before the round, so that a repeated query starts
        from the same model.
    """

    latest: bool = False


# The examples on which a client trains.


class Examples:
    """Base class for the declaration of the training examples on which a client trains."""

    def of_client(
        self, count: int, key: int, seed: int, number: int, related: Related | None = None
    ) -> Indices:
        """Return the ascending indices of the training examples on which a client trains.

        Parameters
        ----------
        count
            Number of the client's training examples.
        key
            Key of the client, which seeds its random draws.
        seed, number
            Seed of the run, and number of the round.
        related
            Which of the examples depend on each other; None: no example depends on another one.
        """
        return np.arange(count)


@dataclass(frozen=True)
class AllData(Examples):
    """Declaration that a client trains on all of its training examples."""


@dataclass(frozen=True)
class SplitPart(Examples):
    """Declaration that a client trains on one of several disjoint parts of its training examples.

    By default, the sizes of the parts differ by at most one, and the parts are drawn again in every
    round. Parts with a fixed ``size`` are the same in all rounds.

    Parameters
    ----------
    place, count
        Number of the part, from 0, and number of all parts.
    size
        Number of examples in each part; the remaining examples then belong to no part. 0: the parts
        contain all examples.
    compared
        Whether the update is compared with the updates from the other parts.
    longest
        Factor by which a client multiplies the parameters of its update if this reduces the loss on
        (at most 256 of) the examples that it trained on. Otherwise, and if the factor is 1, the
        client sends the update unchanged.
    parts_from
        Seed and round number that determine how the parts are drawn; None: the seed and number of
        the query's round. A client in a network sets them to use the same parts again.
    drawn_from
        Number of training examples from which a client draws the parts: the same examples in all
        rounds. None: all examples. A client in a network may report a rounded number of examples,
        its size class. It then sets ``drawn_from`` to this number, so that neither refused queries
        nor updates reveal more about its true number of examples.
    """

    place: int
    count: int
    size: int = 0
    compared: bool = True
    longest: float = 1.0
    parts_from: tuple[int, int] | None = None
    drawn_from: int | None = None

    def of_client(
        self, count: int, key: int, seed: int, number: int, related: Related | None = None
    ) -> Indices:
        """Return the ascending indices of the examples in the part.

        See :meth:`Examples.of_client` for the parameters. Examples that depend on each other are
        never in different parts: this would make the parts similar to each other, whatever the
        distribution of the client's data. Parts then contain whole groups of examples, as many in
        each part. The size of a part does not depend on the groups: if the groups of a part have
        too many examples, the last ones are left out; if they have too few, examples are repeated,
        each as often as the others or once more.

        Raises
        ------
        DataError
            If the examples form fewer groups than there are parts.
        """
        if self.drawn_from is not None and self.drawn_from < count:
            chosen = draw_examples(count, self.drawn_from, key)
            related = None if related is None else related.select(chosen)
            unlimited = replace(self, drawn_from=None)
            return chosen[unlimited.of_client(len(chosen), key, seed, number, related)]
        if self.parts_from is not None:
            seed, number = self.parts_from
        if self.size == 0:
            draw = rng.generator(seed, "parts", number, key)
            length = len(range(self.place, count, self.count))
        else:
            draw = rng.generator(seed, "equal parts", key)
            length = self.size
        order = draw.permutation(count)
        if related is not None:
            return np.sort(np.resize(self._select_groups(order, related, draw), length))
        if self.size == 0:
            return np.sort(order[self.place :: self.count])
        return np.sort(order[self.place * self.size : (self.place + 1) * self.size])

    def _select_groups(
        self, order: Indices, related: Related, draw: np.random.Generator
    ) -> Indices:
        """Return the indices of all examples in the groups of the part, one group after the other.

        Parameters
        ----------
        order
            Indices of the client's examples in a random order, ``[n]``.
        related
            The groups of examples.
        draw
            Generator that draws the order in which groups are dealt to the parts.
        """
        names, numbers = np.unique(related.groups[order], return_inverse=True)
        if len(names) < self.count:
            raise DataError(
                f"the training examples of a client form {len(names)} groups, fewer than the "
                f"{self.count} parts that the method needs; give the client more groups, or leave "
                "it out"
            )
        turns = draw.permutation(len(names))[numbers]
        # The groups that remain after equal numbers of groups belong to no part, except if the
        # parts contain all examples.
        used = len(names) if self.size == 0 else len(names) // self.count * self.count
        is_chosen = (turns % self.count == self.place) & (turns < used)
        if related.are_copies:
            # All examples of a group are equal, and the first of them in the order is used.
            is_first = np.zeros(len(order), dtype=np.bool_)
            is_first[np.unique(numbers, return_index=True)[1]] = True
            is_chosen &= is_first
        chosen = np.flatnonzero(is_chosen)
        return order[chosen[np.argsort(turns[chosen], kind="stable")]]


def draw_examples(count: int, drawn_from: int, key: int) -> Indices:
    """Return the ascending indices of the examples that a client uses for parts of its data.

    See :attr:`SplitPart.drawn_from`. The run's seed has no influence on the choice: by changing it,
    a server could otherwise obtain parts of all examples.
    """
    order = rng.generator(0, "examples for parts", key).permutation(count)
    return np.sort(order[:drawn_from])


@dataclass(frozen=True, eq=False)
class Related:
    """Groups of a client's training examples that depend on each other.

    Parameters
    ----------
    groups
        Number of the group of each example, ``[n]``. Examples of different groups are independent.
    are_copies
        Whether all examples of a group are copies of one example, which counts once in the parts
        of the client's data.
    """

    groups: Indices
    are_copies: bool = False

    def select(self, chosen: Indices) -> Related:
        """Return the groups of some of the examples, given the indices of these examples."""
        return replace(self, groups=self.groups[chosen])


LEAST_DIVIDED = 8
"""Smallest number of groups of dependent examples with which a client's data is divided into parts.

It is the largest number of parts, so that each part has at least one group.
"""

MANY_SINGLE = 2 / 3
"""Smallest share of a client's different examples that occur once, if equal examples are copies."""

FEW_TWICE = 0.2
"""Largest share of the repeated examples that occur exactly twice, if examples were oversampled."""

ALIKE = 3
"""Largest ratio of the largest to the median number of copies, if examples were oversampled."""

RARE = 0.15
"""Share of a part that copies of an example may fill if their number need not be unusual."""

FEW_DIFFER = 0.1
"""Largest share of the repeated inputs that have different targets, if equal examples are copies."""

UNIFORM = 0.3
"""Largest ratio of variance to mean of the multiplicities, if all examples were copied."""

LEAST_DIFFERENT = 10
"""Smallest number of different examples in a part whose copies are left out."""


def are_copies(examples: Indices, inputs: Indices, parts: int) -> bool:
    """Return whether equal examples of a client are copies of each other.

    Copies depend on each other, for example if rows were oversampled. Equal examples may also be
    independent: a distribution with few values, such as the answers to three yes-or-no questions,
    gives them often, and so does a distribution with some frequent values. Copies have the same
    target, while a frequent input usually occurs with different targets. If equal inputs have equal
    targets, the numbers of occurrences of the different examples (their multiplicities) distinguish
    three cases of copies:

    - *Oversampled examples.* Most different examples occur once, and few occur exactly twice: the
      others occur about equally often. Independent draws give multiplicities in between as well.
    - *Rare copies.* Most different examples occur once, and no example fills much of a part. If
      these examples are values that recur by chance, leaving out their repetitions hardly changes
      the distribution of the examples in the parts.
    - *All examples copied.* The multiplicities of all examples differ by less than those of
      independent draws, which have about a Poisson distribution or vary more.

    In all other cases equal examples are taken for independent examples.

    Parameters
    ----------
    examples
        An integer for each example, ``[n]``; equal examples, with equal inputs and targets, have
        equal integers.
    inputs
        An integer for each example, ``[n]``; examples with equal inputs have equal integers.
    parts
        Number of parts into which the examples are divided.
    """
    occurrences = np.unique(examples, return_counts=True)[1]
    different = len(occurrences)
    repeated = occurrences[occurrences > 1]
    if len(repeated) == 0 or different < LEAST_DIFFERENT * parts:
        return False
    if have_different_targets(examples, inputs):
        return False
    if different - len(repeated) < MANY_SINGLE * different:
        return bool(occurrences.var() <= UNIFORM * occurrences.mean())
    if parts * repeated.max() <= RARE * len(examples):
        return True
    # A single repeated example may as well be a frequent value, such as a row of zeros.
    have_gap = len(repeated) > 1 and (repeated == 2).sum() <= FEW_TWICE * len(repeated)
    return bool(have_gap and repeated.max() <= ALIKE * np.median(repeated))


def have_different_targets(examples: Indices, inputs: Indices) -> bool:
    """Return whether many of the inputs that a client has repeatedly occur with different targets.

    Such inputs are independent draws of frequent values, and no copies. See :func:`are_copies` for
    the parameters.
    """
    rows_of_input = np.bincount(inputs)
    first = np.unique(examples, return_index=True)[1]
    targets_of_input = np.bincount(inputs[first], minlength=len(rows_of_input))
    is_repeated = rows_of_input > 1
    if not is_repeated.any():
        return False
    return bool((targets_of_input[is_repeated] > 1).mean() > FEW_DIFFER)


@dataclass(frozen=True)
class Splits(Examples):
    """Declaration that a client trains separately on several disjoint parts of its examples.

    Each training starts from the same model. A client replies with the mean of the updates from all
    parts, and, if ``compared`` is set, with a signature of each update
    (:class:`~fedclade.channel.Replicating`).

    Parameters
    ----------
    count
        Number of parts.
    size, parts_from, drawn_from
        See :class:`SplitPart`.
    compared
        Whether clients also send the signature of the update from each part.
    """

    count: int
    size: int = 0
    compared: bool = True
    parts_from: tuple[int, int] | None = None
    drawn_from: int | None = None

    def split(self, place: int, local: LocalTraining) -> tuple[SplitPart, LocalTraining]:
        """Return one part of the examples, and the settings of local training on this part.

        Parameters
        ----------
        place
            Number of the part, from 0.
        local
            Settings of local training on all data, which :meth:`LocalTraining.on_part` adapts.

        Returns
        -------
        tuple
            The part, and the adapted settings.
        """
        on_part = local.on_part(self.count, self.size)
        # A part takes shorter steps, so its update may be scaled up to the length of an update
        # that is made with the step size for all data.
        longest = (local.lr or 0.0) / (on_part.lr or 1.0)
        part = SplitPart(
            place=place,
            count=self.count,
            size=self.size,
            compared=self.compared,
            longest=longest,
            parts_from=self.parts_from,
            drawn_from=self.drawn_from,
        )
        return part, on_part


@dataclass(frozen=True, eq=False)
class OfRounds(Examples):
    """Declaration that a client trains on the combined examples that it had in several rounds.

    It is for runs in which the clients' data changes, and available in simulations only, since a
    client in a network stores only its current data.

    Parameters
    ----------
    rounds
        Numbers of the rounds for each client, by client id.
    """

    rounds: Mapping[int, tuple[int, ...]]


# The steps that a client takes.


@dataclass(frozen=True, eq=False)
class Made:
    """Result of the training steps of k clients, before tensors are stored or sent to the server.

    Parameters
    ----------
    moved
        Trained models minus initial models, including personal parameters, ``[k, F]``: one row per
        client, one column for each of the F entries of a whole model.
    losses
        Mean training loss of each client, float64 ``[k]``.
    columns
        Further numbers that clients send, ``[k, ...]`` by name. The server gets them by
        :meth:`Updates.column <fedclade.core.Updates.column>`. They are not available if the run
        streams, if clients train on several parts of their data, or if clients have differential
        privacy.
    stored
        Further tensors that clients store if the work's store is :class:`Lasting`, ``[k, ...]`` by
        name; see :meth:`Trainer.stored`.
    """

    moved: torch.Tensor
    losses: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict[str, Any])
    stored: Mapping[str, torch.Tensor] = field(default_factory=dict[str, Any])


class Trainer(Protocol):
    """Interface by which :meth:`Steps.run` trains a block of k clients.

    The clients of a block are trained at the same time. Whole models, with shared and personal
    parameters, are vectors of F entries.
    """

    @property
    def models(self) -> torch.Tensor:
        """Whole models from which the k clients start, with personal parameters, ``[k, F]``."""
        ...

    @property
    def local(self) -> LocalTraining:
        """Settings of local training, after the changes that the steps make to them."""
        ...

    @property
    def ids(self) -> Sequence[int]:
        """Ids of the k clients of the block."""
        ...

    @property
    def anchors(self) -> torch.Tensor:
        """Anchors of the k clients, ``[k, F]``.

        Without anchors in the query, these are the models from which the clients start.
        """
        ...

    @property
    def personal_names(self) -> frozenset[str]:
        """Names of the personal parameters, which are not shared with the server."""
        ...

    @property
    def shared_names(self) -> frozenset[str]:
        """Names of the parameters that clients share with the server."""
        ...

    @property
    def last_layer_names(self) -> frozenset[str]:
        """Names of the parameters of the last layer that is trained."""
        ...

    def train(
        self,
        local: LocalTraining | None = None,
        *,
        models: torch.Tensor | None = None,
        draws: str = "",
        fixed: frozenset[str] = frozenset(),
        stretches: bool = True,
    ) -> Made:
        """Train all clients of the block once, and return their updates and mean losses.

        Parameters
        ----------
        local
            Settings of local training; None: :attr:`local`.
        models
            Models ``[k, F]`` from which the clients start; None: :attr:`models`.
        draws
            Name that is part of the key of random draws, so that several trainings for the same
            query have different draws.
        fixed
            Names of parameters that are not trained.
        stretches
            Whether updates from a part of the data may be scaled up, see :attr:`SplitPart.longest`.
        """
        ...

    def stored(self, name: str) -> Sequence[torch.Tensor | None]:
        """Return the tensors that the k clients stored under a name before the round.

        The tensors were stored by :attr:`Made.stored` in earlier rounds. An entry is None if the
        client has not stored a tensor under this name yet.
        """
        ...

    def keep_part(self, part: Literal["personal", "shared"], vectors: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``vectors [k, F]`` with zeros in all entries outside a model part.

        ``part`` selects the personal or the shared parameters and buffers.
        """
        ...

    def keep_last_layer(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``vectors [k, F]`` with zeros outside the parameters of the last layer."""
        ...


class Steps:
    """Base class for the declaration of the training steps that clients take.

    A federated method defines its own steps by a subclass, a frozen dataclass with a method
    :meth:`run`. A method's own steps are available in simulations only: a client in a network knows
    only the steps that are defined in this module.

    Attributes
    ----------
    allows_noise
        Whether the steps can be taken by DP-SGD, so that everything that leaves a client is
        computed from noisy gradients. False by default. The attribute is not inherited: each class
        whose steps can be taken by DP-SGD has to set it. Such a class, if it defines :meth:`run`,
        must also define :meth:`count_steps`, from which the spent privacy budget is computed.
    """

    allows_noise: ClassVar[bool] = False

    @property
    def needs_anchor(self) -> bool:
        """Whether each client needs an anchor, a second vector ``[S]`` in addition to its model."""
        return False

    @property
    def vectors(self) -> int:
        """Number of vectors of the model's size that a client needs in addition to its model."""
        return 0

    def settings(self, local: LocalTraining) -> LocalTraining:
        """Return the settings of local training with the changes that these steps require.

        By default, the settings do not change.
        """
        return local

    def count_steps(self, local: LocalTraining, examples: int) -> int:
        """Return the number of steps that a client with ``examples`` training examples takes."""
        return local.steps_with(examples)

    def run(self, trainer: Trainer) -> Made:
        """Train a block of clients and return the results.

        By default, clients take the steps of the optimizer of local training.
        """
        return trainer.train()


@dataclass(frozen=True)
class Sgd(Steps):
    """Declaration that clients take the steps of the optimizer in the settings of local training.

    The optimizer is SGD by default.
    """

    allows_noise = True


@dataclass(frozen=True)
class Proximal(Steps):
    """Declaration that clients add a proximal term μ/2·‖θ − θ_anchor‖² to their loss.

    Clients take the optimizer's steps on this loss. The term replaces the proximal term of
    :attr:`LocalTraining.mu`, whose anchor is the model from which a client starts (FedProx). In
    Ditto, the anchor of a personal model is the global model (Li et al. 2021, eq. 1).

    Parameters
    ----------
    mu
        Weight μ of the term, at least 0. With 0, the steps are those of :class:`Sgd`, and clients
        need no anchor.
    """

    allows_noise = True

    mu: float

    @property
    def needs_anchor(self) -> bool:
        """Whether clients need an anchor, which is the case if μ is greater than 0."""
        return self.mu > 0

    def settings(self, local: LocalTraining) -> LocalTraining:
        """Return the settings of local training with the μ of this proximal term."""
        return replace(local, mu=self.mu)


@dataclass(frozen=True)
class HeadThenBody(Steps):
    """Declaration that clients train the personal and then the shared parameters (FedRep).

    While one part is trained, the other part does not change. In FedRep (Collins et al. 2021),
    these are the client's two loops in Algorithm 1: the personal parameters are the head of the
    model, and the shared parameters are its body.

    Parameters
    ----------
    epochs
        Number of epochs in which the personal parameters are trained. The shared parameters are
        trained for the epochs or steps in the settings of local training.
    """

    allows_noise = True

    epochs: int

    def count_steps(self, local: LocalTraining, examples: int) -> int:
        """Return the total number of steps on the personal and on the shared parameters."""
        of_head = local.in_epochs(self.epochs).steps_with(examples)
        return of_head + local.steps_with(examples)

    def run(self, trainer: Trainer) -> Made:
        """Train the personal parameters, and then the shared parameters, of a block of clients."""
        first = trainer.train(
            trainer.local.in_epochs(self.epochs),
            draws="personal",
            fixed=trainer.shared_names,
            stretches=False,
        )
        # The first training has also changed buffers of the shared part, such as statistics of
        # BatchNorm. These changes are discarded: the second training starts from the old buffers.
        head = trainer.keep_part("personal", first.moved)
        second = trainer.train(models=trainer.models + head, fixed=trainer.personal_names)
        body = trainer.keep_part("shared", second.moved)
        return Made(head + body, second.losses)


@dataclass(frozen=True)
class LastLayer(Steps):
    """Declaration that clients train only the last layer of the model.

    This is the layer of the model's last trained parameters. All other layers stay as received.
    """

    allows_noise = True

    def count_steps(self, local: LocalTraining, examples: int) -> int:
        """Return the number of steps, which is as for training all layers."""
        return local.steps_with(examples)

    def run(self, trainer: Trainer) -> Made:
        """Train the last layer of the models of a block of clients."""
        others = (trainer.personal_names | trainer.shared_names) - trainer.last_layer_names
        made = trainer.train(fixed=others)
        # Training has also changed buffers of other layers, such as statistics of BatchNorm.
        return replace(made, moved=trainer.keep_last_layer(made.moved))


@dataclass(frozen=True, eq=False)
class Em(Steps):
    """Declaration that clients train the components of a mixture of models (FedEM, FedRC).

    These are the clients' E-step and M-step in FedEM's Algorithm 1 (Marfoq et al. 2021). The models
    that the server sends are the components of the mixture. Each client trains every component on
    all its examples; an example is weighted by the component's responsibility for the example. A
    client's update contains the updates of all components, see :func:`~fedclade.core.packed`. A
    client does not send its weights π of the components.

    Parameters
    ----------
    mixture
        Settings of the mixture.
    """

    mixture: Mixture


@dataclass(frozen=True)
class FullGradient(Steps):
    """Declaration that clients compute the negative full-batch gradient −∇r_i (CFL eq. 50).

    Client i computes the gradient of its mean training loss r_i at its model, without training.
    """


# What a client stores.


class Store:
    """Base class for the declaration of the tensors that a client stores after its training."""


@dataclass(frozen=True)
class Lasting(Store):
    """Declaration that a client stores its personal state for later rounds.

    This state consists of the personal parameters of the model, the state of the optimizer if
    ``local.keep_state`` is set, the state of a local rule, and the client's weights of a mixture.
    """


@dataclass(frozen=True)
class Nothing(Store):
    """Declaration that a client stores nothing, so that later rounds do not depend on the query."""


@dataclass(frozen=True)
class LocalModel(Store):
    """Declaration that a client stores the whole trained model, such as its personal model.

    Parameters
    ----------
    state
        Whether the client also stores the state of the optimizer if ``local.keep_state`` is set.
    """

    state: bool = True


# What a client replies.


class Reply:
    """Base class for the declaration of a client's reply to a training query."""


@dataclass(frozen=True)
class Delta(Reply):
    """Declaration that a client replies with its update, the trained minus the initial model."""


@dataclass(frozen=True)
class DistanceToAnchor(Reply):
    """Declaration that a client replies with its trained model minus its anchor.

    The server knows the anchor, and so can compute the trained model, even if the client started
    from a model that only the client knows.
    """


@dataclass(frozen=True)
class NoReply(Reply):
    """Declaration that a client replies with its training loss alone, without an update.

    The column :attr:`Updates.deltas` then has no entries: its shape is ``[n, 0]``.
    """


@dataclass(frozen=True, eq=False)
class Answer(Reply):
    """Declaration that a client replies to a question about its update in place of the update.

    :attr:`Updates.sums` then has the sum of all replies, or :attr:`Updates.components` has the
    choice of each client.

    Parameters
    ----------
    question
        The question, which defines the reply as a function of the update.
    """

    question: Question


@dataclass(frozen=True, eq=False)
class ClientWork:
    """Declaration of the work that each client does for one training query.

    Parameters
    ----------
    start
        Model from which a client starts: :class:`FromServer` or :class:`FromStored`.
    data
        Examples on which a client trains: :class:`AllData`, :class:`Splits`, :class:`OfRounds`, or
        :class:`SplitPart`, which is one part of :class:`Splits`.
    steps
        Steps that a client takes: :class:`Sgd`, :class:`Proximal`, :class:`HeadThenBody`,
        :class:`Em`, :class:`FullGradient`, a :class:`LocalRule`, or a method's own subclass of
        :class:`Steps`.
    store
        Tensors that a client stores: :class:`Lasting`, :class:`Nothing` or :class:`LocalModel`.
    reply
        Reply of a client: :class:`Delta`, :class:`DistanceToAnchor`, :class:`NoReply` or
        :class:`Answer`.
    """

    start: Start = field(default_factory=FromServer)
    data: Examples = field(default_factory=AllData)
    steps: Steps = field(default_factory=Sgd)
    store: Store = field(default_factory=Lasting)
    reply: Reply = field(default_factory=Delta)

    @property
    def sends_update(self) -> bool:
        """Whether clients send a model update or a gradient, rather than the loss alone."""
        return self.is_gradient or not isinstance(self.reply, NoReply)

    @property
    def is_gradient(self) -> bool:
        """Whether clients compute and send a full-batch gradient in place of training."""
        return isinstance(self.steps, FullGradient)

    @property
    def mixture(self) -> Mixture | None:
        """Mixture that clients train; None if the models are not components of a mixture."""
        return self.steps.mixture if isinstance(self.steps, Em) else None

    @property
    def question(self) -> Question | None:
        """Question that clients answer about their updates; None if they send the updates."""
        return self.reply.question if isinstance(self.reply, Answer) else None

    @property
    def splits(self) -> Splits | None:
        """Parts of its data on which a client trains separately; None if there are no parts."""
        return self.data if isinstance(self.data, Splits) else None

    @property
    def split_count(self) -> int:
        """Number of parts of its data on which a client trains separately; 1 if not divided."""
        return 1 if self.splits is None else self.splits.count

    @property
    def compared_splits(self) -> Splits | None:
        """Parts of a client's data whose updates are compared by signatures.

        None if the data is not divided, or if the updates of the parts are not compared.
        """
        splits = self.splits
        return splits if splits is not None and splits.compared else None

    @property
    def needs_anchor(self) -> bool:
        """Whether each client needs an anchor, a second vector for its steps or for its reply."""
        return self.steps.needs_anchor or isinstance(self.reply, DistanceToAnchor)


@dataclass(frozen=True, eq=False)
class Models:
    """Models of a training query: the distinct model vectors, and the row of each client.

    Parameters
    ----------
    vectors
        The K distinct vectors, ``[K, S]``: each row is a model or an anchor.
    start
        For each of the n clients, the row of the model from which it starts; :data:`OWN` for a
        client that starts from the model that it stores itself.
    anchor
        For each of the n clients, the row of its anchor; None if clients need no anchor.
    sent_before
        Whether clients have received the vectors earlier in the round. A simulation then does not
        count the transfer again. If, in addition, each client has a separate row,
        :class:`~fedclade.channel.Limiting` assumes that the rows are models that the clients
        trained earlier in the round.
    """

    vectors: torch.Tensor
    start: Sequence[int]
    anchor: Sequence[int] | None = None
    sent_before: bool = False

    def select(self, places: Sequence[int]) -> Models:
        """Return the models for some of the clients, given the positions of these clients."""
        anchor = None if self.anchor is None else [self.anchor[place] for place in places]
        return replace(self, start=[self.start[place] for place in places], anchor=anchor)


def count_steps(
    work: ClientWork, local: LocalTraining, sizes: Mapping[int, int], ids: Sequence[int]
) -> int:
    """Return the number of training steps that clients take for one query.

    A client that trains on several parts of its data takes the steps of all parts. The computation
    of a gradient counts as no step.

    Parameters
    ----------
    work
        Work of each client.
    local
        Settings of local training.
    sizes
        Number of training examples of each client, by client id.
    ids
        Ids of the queried clients.
    """
    if work.is_gradient:
        return 0
    local = work.steps.settings(local)
    splits = work.splits
    if splits is None:
        return sum(work.steps.count_steps(local, sizes[client]) for client in ids)
    on_part = local.on_part(splits.count, splits.size)
    total = 0
    for client in ids:
        size = splits.size or max(1, sizes[client] // splits.count)
        total += splits.count * work.steps.count_steps(on_part, size)
    return total
