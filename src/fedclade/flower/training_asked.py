"""Request for training, which a client checks against its policy before it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from fedclade.core import (
    OWN,
    AllData,
    ClientWork,
    Em,
    FullGradient,
    HeadThenBody,
    LastLayer,
    LocalRule,
    LocalTraining,
    Nothing,
    Proximal,
    Round,
    Sgd,
    Splits,
    Steps,
    UpdateError,
)
from fedclade.flower.models_sent import read_mixture, read_spec
from fedclade.flower.own_steps import names_in, read_steps
from fedclade.flower.policy import Policy
from fedclade.flower.replies import largest_of_class
from fedclade.flower.wire import Content
from fedclade.flower.work_sent import reply_of, start_and_store

# Largest number of entries of a signature that a query may request, since the client allocates
# memory for them.
LARGEST_SKETCH = 2**20


class TrainingFailedError(UpdateError):
    """Error for training whose update is unusable, for example because entries are not finite."""


@dataclass(frozen=True)
class TrainingAsked:
    """Request for one round of training, or for a gradient, as a client has read it.

    Parameters
    ----------
    round
        Number of the round, local training, and seeds of random draws.
    work
        Work of the client: from which model it starts, on which data and by which steps it trains,
        what it stores and what it replies.
    sent
        Names of the vectors in the message that are models.
    goes_on
        Whether the client continues from the model that it stores, so that the server sends none.
    """

    round: Round
    work: ClientWork
    sent: list[str]
    goes_on: bool

    @property
    def start_row(self) -> int:
        """Row, among the sent models, of the model from which the client starts.

        It is ``OWN`` if the client starts from a model that it stores itself, otherwise 0.
        """
        return OWN if self.goes_on else 0

    @property
    def anchors(self) -> list[int] | None:
        """List with the row of the client's anchor among the sent models; None without an anchor.

        The anchor is the model towards which a proximal term pulls. It is the last of the sent
        models.
        """
        return [len(self.sent) - 1] if self.sent and self.work.needs_anchor else None

    @classmethod
    def read(
        cls, content: Content, policy: Policy, examples: int, labels: int | None, *, is_closed: bool
    ) -> Self:
        """Read a request for training from a message, and check it against the client's policy.

        A closed client, with a privacy budget or secure aggregation, reports only the size class of
        its number of examples. Whether it refuses a request must be the same for all numbers in the
        class, or a server could find the number by bisection. So a request is refused if the policy
        forbids it for the smallest or for the largest number of the class.

        Parameters
        ----------
        content
            Content of the message.
        policy
            Policy of the client.
        examples
            Number of training examples of the client; the size class if the client is closed.
        labels
            Number of labels of the task; None if examples do not have one label each.
        is_closed
            Whether the client sends updates only masked or with noise.

        Raises
        ------
        PolicyError, UpdateError
            If the policy forbids the request, or the request is contradictory or malformed.
        """
        kind = content.get("what", str)
        # A client checks the names before it imports the code that they name.
        for name in names_in(content):
            policy.check_trainer(name)
        splits = _read_splits(content, examples)
        local = read_spec(content)
        own_steps = read_steps(content) if kind == "train" else None
        rule = own_steps if isinstance(own_steps, LocalRule) else None
        own = content.get("own", bool)
        personal_epochs = max(0, content.get("personal_epochs", int))
        if own and kind != "train":
            raise UpdateError(
                "the query requests the gradient at a model that the client stores; gradients are "
                "possible only at a model that the server sends"
            )
        shares = own and content.get("shares", bool)
        names, mixture = read_mixture(content, labels)
        if mixture is not None and (
            splits.count > 1 or own or own_steps is not None or kind != "train"
        ):
            raise UpdateError(
                "the query about a mixture of models also requests splits of the data, a stored "
                "model, a local rule or a gradient; with a mixture, a client can only train each "
                "model that the server sends, and reply with one update of each"
            )
        policy.check_models(len(names))
        times = (1 if rule is None else rule.gradients) * max(1, len(names))
        if own_steps is not None and rule is None:
            largest = largest_of_class(examples) if is_closed else examples
            policy.check_steps(own_steps.count_steps(local, largest))
        trained_on = [splits.count * splits.size or examples]
        if is_closed and splits.count == 1:
            trained_on.append(largest_of_class(examples))
        # A later query may request the model that this client stores, unless the client is closed.
        # So training of a stored model must satisfy the limits for an update that is sent.
        leaves = shares or not own or not is_closed
        for number in trained_on:
            policy.check_training(
                local, splits.count, number, personal_epochs, times, leaves=leaves
            )
        this_round = Round(
            number=content.get("round", int),
            local=local,
            seed=content.get("seed", int),
            purpose=content.get("purpose", str),
            query=content.get("query", int),
        )
        if leaves and kind == "train":
            _check_retention(policy, this_round, splits, trained_on, rule=rule)
        has_anchor = "anchor" in content.vectors
        if kind != "train":
            steps = FullGradient()
        elif mixture is not None:
            steps = Em(mixture)
        else:
            last_layer = "last_layer" in content.values and content.get("last_layer", bool)
            steps = _steps_of(
                local, own_steps, personal_epochs, has_anchor=has_anchor, last_layer=last_layer
            )
        in_splits = kind == "train" and splits.count > 1
        start, store = start_and_store(own=own, purpose=this_round.purpose, in_splits=in_splits)
        work = ClientWork(
            start=start,
            data=splits if in_splits else AllData(),
            steps=steps,
            store=store if kind == "train" else Nothing(),
            reply=reply_of(own=own, shares=shares),
        )
        goes_on = own and kind == "train" and "model" not in content.vectors
        sent = names or [*([] if goes_on else ["model"]), *(["anchor"] if has_anchor else [])]
        return cls(this_round, work, sent, goes_on)


def _read_splits(content: Content, examples: int) -> Splits:
    """Return into how many parts, and of which size, a message requests to divide the data.

    The client trains separately on each of these disjoint parts of its training examples. For
    training on all examples, the result is a single part.

    Raises
    ------
    UpdateError
        If the client's ``examples`` training examples cannot be divided in this way.
    """
    dim = content.get("dim", int)
    count = content.get("replicates", int)
    size = content.get("part_size", int)
    fits = 1 <= count <= examples and 0 <= count * size <= examples
    # With a single split of a smaller size, the limits would be checked for the size of the split,
    # but training would use all examples.
    if count == 1 and size:
        fits = False
    if not (fits and 0 <= dim <= LARGEST_SKETCH):
        parts = f"{count} parts" + (f" of size {size}" if size else "")
        raise UpdateError(
            f"the query requests {parts} of {examples} training examples, compared by {dim} "
            f"numbers each; expected 1 to {examples} parts with at most {examples} examples "
            f"together, no size for a single part, and 0 to {LARGEST_SKETCH} numbers"
        )
    return Splits(count, size, content.get("compares_parts", bool))


def _check_retention(
    policy: Policy,
    this_round: Round,
    splits: Splits,
    trained_on: Sequence[int],
    *,
    rule: LocalRule | None,
) -> None:
    """Check that no update depends only on the last mini-batches of local training.

    Parameters
    ----------
    policy
        Policy of the client.
    this_round
        Round with the settings of local training.
    splits
        Number and size of the disjoint parts of the data on which the client trains separately.
    trained_on
        Number of training examples in all parts together, in a list. For a client that reports only
        the size class of its number of examples, the list has two numbers, for the smallest and for
        the largest number of the class. The training must then be allowed for both.
    rule
        Local rule; None for ordinary training.
    """
    local = this_round.local
    if splits.count > 1:
        local = local.on_part(splits.count, splits.size)
    sizes = {number // splits.count for number in trained_on}
    # Splits of unequal size differ by one example.
    sizes |= {-(-number // splits.count) for number in trained_on}
    largest = max(sizes)
    for size in sorted(sizes):
        last_batch = local.batch_sizes(size)[-1]
        if len(trained_on) > 1 and local.batch_size < largest:
            # For some number of examples in the size class, the last mini-batch has this size.
            last_batch = local.smallest_batch or 1
        policy.check_retention(local, this_round.number, size, last_batch, rule=rule)


def _steps_of(
    local: LocalTraining,
    own_steps: Steps | None,
    personal_epochs: int,
    *,
    has_anchor: bool,
    last_layer: bool,
) -> Steps:
    """Return the kind of local steps, such as SGD, that a query requests to train a single model.

    Parameters
    ----------
    local
        Settings of local training.
    own_steps
        Local rule or steps that are not part of fedclade; None for ordinary training.
    personal_epochs
        Epochs in which only the personal parameters are trained first; 0 for none.
    has_anchor
        Whether the query contains an anchor, the model towards which a proximal term pulls.
    last_layer
        Whether only the last layer of the model is trained.

    Raises
    ------
    UpdateError
        If the query requests several kinds of steps at once.
    """
    if last_layer:
        if personal_epochs or own_steps is not None or has_anchor:
            raise UpdateError(
                "the query requests training of only the last layer together with epochs of the "
                "personal parameters, a local rule or an anchor; only one of them is possible"
            )
        return LastLayer()
    if personal_epochs and (own_steps is not None or (has_anchor and local.mu)):
        raise UpdateError(
            "the query requests epochs of only the personal parameters together with a local rule "
            "or a proximal term; only one of them is possible"
        )
    if own_steps is not None:
        return own_steps
    if personal_epochs:
        return HeadThenBody(personal_epochs)
    return Proximal(local.mu) if has_anchor else Sgd()
