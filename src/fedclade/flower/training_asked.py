"""Request for training, checked by the client's policy before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fedclade.core import Mixture, Round, UpdateError
from fedclade.flower.models_sent import read_mixture, read_rule, read_spec
from fedclade.flower.policy import Policy
from fedclade.flower.replies import largest_of_class
from fedclade.flower.wire import Content

# Largest number of entries of a signature that may be requested: memory is allocated for them.
LARGEST_SKETCH = 2**20


class TrainingFailedError(UpdateError):
    """Training that ended in an unusable update, such as one with entries that are not finite."""


@dataclass(frozen=True)
class TrainingAsked:
    """Request for one round of training, or for a gradient.

    Parameters
    ----------
    kind
        ``train`` or ``gradients``.
    round
        Settings of the round.
    own, shares
        Whether the client stores the trained model, and whether it also sends it.
    sent
        Names of the vectors that are models.
    mixture
        Mixture that the models form; None without a mixture.
    goes_on
        Whether the client continues from its own model, so that the server sends none.
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
        cls,
        content: Content,
        policy: Policy,
        examples: int,
        labels: int | None,
        *,
        is_closed: bool = False,
    ) -> Self:
        """Return the request for training in a message.

        If the client ``is_closed``, a refusal must be the same for all numbers of examples in a
        size class, or a server could find the number by bisection. So a request is refused if the
        policy forbids it for the smallest or the largest number of the class.

        Parameters
        ----------
        content
            Content of the message.
        policy
            Policy of the client.
        examples
            Number of training examples of the client; if it is closed, its reported size class.
        labels
            Number of labels; None if examples do not have one label each.
        is_closed
            Whether only masked or noisy updates leave the client.

        Raises
        ------
        PolicyError, UpdateError
            If the policy forbids the request, or the request is not possible.
        """
        kind = content.get("what", str)
        dim = content.get("dim", int)
        replicates = content.get("replicates", int)
        part_size = content.get("part_size", int)
        fits = 1 <= replicates <= examples and 0 <= replicates * part_size <= examples
        # The limits would be checked for one part, but training would use all examples.
        if replicates == 1 and part_size:
            fits = False
        if not (fits and 0 <= dim <= LARGEST_SKETCH):
            parts = f"{replicates} parts" + (f" of {part_size}" if part_size else "")
            raise UpdateError(
                f"asked for {parts} of {examples} training examples, compared by {dim} numbers each"
            )
        spec = read_spec(content)
        rule = read_rule(content) if kind == "train" else None
        own = content.get("own", bool)
        personal_epochs = max(0, content.get("personal_epochs", int))
        if own and kind != "train":
            raise UpdateError("asked for the gradient of a model that the client keeps")
        shares = own and content.get("shares", bool)
        names, mixture = read_mixture(content, labels)
        if mixture is not None and (replicates > 1 or own or rule is not None or kind != "train"):
            raise UpdateError(
                "asked for something else of a mixture than one update of each of its models"
            )
        policy.check_models(len(names))
        times = (1 if rule is None else rule.gradients) * max(1, len(names))
        trained_on = [replicates * part_size or examples]
        if is_closed and replicates == 1:
            trained_on.append(largest_of_class(examples))
        # An open client may be requested later to share the model that it stores, after steps that
        # change nothing. So its update counts as one that leaves.
        leaves = shares or not own or not is_closed
        for number in trained_on:
            policy.check_training(spec, replicates, number, personal_epochs, times, leaves=leaves)
        if leaves and kind == "train":
            part_spec = spec.on_part(replicates, part_size) if replicates > 1 else spec
            sizes = {number // replicates for number in trained_on}
            # The sizes of unequal parts differ by one.
            sizes |= {-(-number // replicates) for number in trained_on}
            largest = max(sizes)
            for size in sorted(sizes):
                last_batch = part_spec.batch_sizes(size)[-1]
                if len(trained_on) > 1 and part_spec.batch_size < largest:
                    # Some number of examples in the size class has this last batch.
                    last_batch = part_spec.smallest_batch or 1
                policy.check_retention(
                    part_spec, content.get("round", int), size, last_batch, rule=rule
                )
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
        sent = names or [
            *([] if goes_on else ["model"]),
            *(["anchor"] if "anchor" in content.vectors else []),
        ]
        return cls(kind, this_round, own, shares, sent, mixture, goes_on)
