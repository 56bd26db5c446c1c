"""What a question for training asks of a client, checked by its policy before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from flwr.app import MessageType, RecordDict
from torch import Tensor

from fedclade.core import DescriptorQuery, Mixture, Round, ShiftQuery, UpdateError
from fedclade.flower import wire
from fedclade.flower.models_sent import read_mixture, read_rule, read_spec
from fedclade.flower.node_registry import NodeRegistry
from fedclade.flower.policy import Policy, check_allowed
from fedclade.flower.replies import largest_of_class
from fedclade.flower.wire import Content, shown

# Whether the labels of clients have shifted, in messages: a number in the query, and a yes or no in
# the answer.

ShiftRequest = Callable[
    [Mapping[int, RecordDict], str, str, Callable[[int, Content], bool], dict[int, str]], Iterator[tuple[int, bool]]
]


def describe_shift_query(query: ShiftQuery) -> dict[str, Any]:
    """Return the query as plain values of a message."""
    return {"round": query.round, "share": query.share, "by_label": query.by_label}


def read_shift_query(client: int, content: Content) -> ShiftQuery:
    """Return the query that a message to a client puts; an UpdateError if it cannot be."""
    number, share = content.get("round", int), content.get("share", float)
    if number < 1 or not 0 <= share <= 2:
        raise UpdateError(f"asked for shifts by {shown(share)} of the examples in round {shown(number)}")
    return ShiftQuery([client], number, share, content.get("by_label", bool))


def ask_for_shifts(query: ShiftQuery, content: RecordDict, ask: ShiftRequest, connected: int) -> Tensor:
    """Ask clients, and return who has shifted, bool ``[n]``: who does not answer has not.

    An UpdateError is raised if no client allows the question, of most that are connected.
    """
    left_out: dict[int, str] = {}

    def read(client: int, content: Content) -> bool:
        content.has_only(())
        if (number := content.get("round", int)) != query.round:
            raise UpdateError(f"answer of round {shown(number)}, expected {query.round}")
        return content.get("shifted", bool)

    answers = dict(ask(dict.fromkeys(query.ids, content), MessageType.QUERY, "shifts", read, left_out))
    check_allowed("shifts", query.ids, left_out, connected)
    return torch.tensor([answers.get(client, False) for client in query.ids], dtype=torch.bool)


# What a model makes of clients' data, in messages: a model and how to describe in the query,
# numbers in the answer.

DescriptorRequest = Callable[
    [Mapping[int, RecordDict], str, str, Callable[[int, Content], Tensor], dict[int, str], int],
    Iterator[tuple[int, Tensor]],
]


def describe_descriptor_query(query: DescriptorQuery) -> dict[str, Any]:
    """Return how to describe as plain values of a message."""
    return {"seed": query.seed, "components": query.components, "per_label": query.per_label}


def read_descriptor_query(client: int, model: Tensor, content: Content) -> DescriptorQuery:
    """Return the query that a message to a client puts; an UpdateError if it cannot be."""
    seed, components = content.get("seed", int), content.get("components", int)
    if seed < 0 or components < 0:
        raise UpdateError(f"asked for {shown(components)} components of a descriptor by seed {shown(seed)}")
    return DescriptorQuery([client], model, seed, components, content.get("per_label", bool))


def ask_for_descriptors(
    query: DescriptorQuery, content: RecordDict, ask: DescriptorRequest, registry: NodeRegistry
) -> Tensor:
    """Ask clients, and return their descriptors ``[n, 2 + B, C]``: of one that does not answer, zeros.

    An UpdateError is raised if no client allows the question, of most that are connected.
    """
    shape, left_out = (
        query.shape(registry.clients.schema),
        dict[int, str](),
    )  # who is left out is queried again, and reported then

    def read(_: int, content: Content) -> Tensor:
        content.has_only(("descriptor",))
        found = wire.read_vector(content.vector("descriptor"), shape, torch.float32, "descriptor")
        if not bool(found.isfinite().all()):
            raise UpdateError("a descriptor that is not finite")
        return found

    largest = 4 * shape[0] * shape[1]
    answers = dict(ask(dict.fromkeys(query.ids, content), MessageType.QUERY, "descriptors", read, left_out, largest))
    check_allowed("descriptors", query.ids, left_out, len(registry.connected))
    return torch.stack([answers.get(client, torch.zeros(shape)) for client in query.ids])


LARGEST_SKETCH = 2**20  # entries that a signature may be asked to have: memory is allocated for them


class TrainingFailedError(UpdateError):
    """A client's training ended in an update that cannot be used, such as one with entries that are not finite."""


@dataclass(frozen=True)
class TrainingAsked:
    """One round of training, or a gradient: of which models, and for whom.

    Parameters
    ----------
    kind
        ``train`` or ``gradients``.
    own, shares
        Whether the client keeps the model, and whether it also sends it.
    sent
        The names of the vectors that are models.
    mixture
        What they are together, if they are one mixture.
    goes_on
        Whether the client goes on with its own model, so that none is sent to start from.
    """

    kind: str
    round: Round
    own: bool
    shares: bool
    sent: list[str]
    mixture: Mixture | None
    goes_on: bool

    @classmethod
    def read(
        cls, content: Content, policy: Policy, examples: int, labels: int | None, *, is_closed: bool = False
    ) -> Self:
        """Return what a client with so many examples is asked for; a PolicyError or UpdateError if it cannot be.

        ``is_closed`` says that no update leaves the client but masked or noisy ones. ``examples`` is then the size
        class that it has reported. What is refused must be the same for all numbers of examples in that class, or a
        server could find the number by bisection: so it is refused if the smallest or the largest of them forbids it.
        """
        kind, dim = content.get("what", str), content.get("dim", int)
        replicates, part_size = content.get("replicates", int), content.get("part_size", int)
        fits = 1 <= replicates <= examples and 0 <= replicates * part_size <= examples
        if replicates == 1 and part_size:  # the limits would be those of a part, and the training that of all examples
            fits = False
        if not (fits and 0 <= dim <= LARGEST_SKETCH):
            parts = f"{replicates} parts" + (f" of {part_size}" if part_size else "")
            raise UpdateError(f"asked for {parts} of {examples} training examples, compared by {dim} numbers each")
        spec, rule = read_spec(content), read_rule(content) if kind == "train" else None
        own, personal_epochs = content.get("own", bool), max(0, content.get("personal_epochs", int))
        if own and kind != "train":
            raise UpdateError("asked for the gradient of a model that the client keeps")
        shares = own and content.get("shares", bool)
        names, mixture = read_mixture(content, labels)
        if mixture is not None and (replicates > 1 or own or rule is not None or kind != "train"):
            raise UpdateError("asked for something else of a mixture than one update of each of its models")
        policy.check_models(len(names))
        times = (1 if rule is None else rule.gradients) * max(1, len(names))
        trained_on = [replicates * part_size or examples]
        if is_closed and replicates == 1:
            trained_on.append(largest_of_class(examples))
        # An open client may be asked later to share what it keeps, after steps that change nothing.
        leaves = shares or not own or not is_closed
        for number in trained_on:
            policy.check_training(spec, replicates, number, personal_epochs, times, leaves=leaves)
        if leaves and kind == "train":
            part_spec = spec.on_part(replicates, part_size) if replicates > 1 else spec
            sizes = {number // replicates for number in trained_on}
            sizes |= {-(-number // replicates) for number in trained_on}  # unequal parts differ by one
            largest = max(sizes)
            for size in sorted(sizes):
                last_batch = part_spec.batch_sizes(size)[-1]
                if len(trained_on) > 1 and part_spec.batch_size < largest:
                    last_batch = part_spec.smallest_batch or 1  # of some number of examples in the size class
                policy.check_retention(part_spec, content.get("round", int), size, last_batch, rule=rule)
        this_round = Round(
            number=content.get("round", int),
            spec=spec,
            seed=content.get("seed", int),
            purpose=content.get("purpose", str),
            query=content.get("query", int),
            replicates=replicates,
            part_size=part_size,
            compares_parts=content.get("compares_parts", bool),
            personal_epochs=personal_epochs,
            rule=rule,
            communicates="nothing" if own and not shares else "all",
        )
        goes_on = own and kind == "train" and "model" not in content.vectors
        sent = names or [*([] if goes_on else ["model"]), *(["anchor"] if "anchor" in content.vectors else [])]
        return cls(kind, this_round, own, shares, sent, mixture, goes_on)
