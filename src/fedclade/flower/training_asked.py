"""What a question for training asks of a client, checked by its policy before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fedclade.core import Mixture, Round, UpdateError
from fedclade.flower.models_sent import read_mixture, read_rule, read_spec
from fedclade.flower.policy import Policy
from fedclade.flower.replies import largest_of_class
from fedclade.flower.wire import Content

# entries that a signature may be asked to have: memory is allocated for them
LARGEST_SKETCH = 2**20


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
        cls,
        content: Content,
        policy: Policy,
        examples: int,
        labels: int | None,
        *,
        is_closed: bool = False,
    ) -> Self:
        """Return what a client with so many examples is asked for; a PolicyError or UpdateError if it cannot be.

        ``is_closed`` says that no update leaves the client but masked or noisy ones. ``examples``
        is then the size class that it has reported. What is refused must be the same for all
        numbers of examples in that class, or a server could find the number by bisection: so it is
        refused if the smallest or the largest of them forbids it.
        """
        kind = content.get("what", str)
        dim = content.get("dim", int)
        replicates = content.get("replicates", int)
        part_size = content.get("part_size", int)
        fits = 1 <= replicates <= examples and 0 <= replicates * part_size <= examples
        # the limits would be those of a part, and the training that of all examples
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
        # An open client may be asked later to share what it keeps, after steps that change nothing.
        leaves = shares or not own or not is_closed
        for number in trained_on:
            policy.check_training(spec, replicates, number, personal_epochs, times, leaves=leaves)
        if leaves and kind == "train":
            part_spec = spec.on_part(replicates, part_size) if replicates > 1 else spec
            sizes = {number // replicates for number in trained_on}
            # unequal parts differ by one
            sizes |= {-(-number // replicates) for number in trained_on}
            largest = max(sizes)
            for size in sorted(sizes):
                last_batch = part_spec.batch_sizes(size)[-1]
                if len(trained_on) > 1 and part_spec.batch_size < largest:
                    # of some number of examples in the size class
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
