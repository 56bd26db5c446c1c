"""What a server knows of the clients of a run: names, sizes, and what their examples look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedclade.core.array_mapping import ArrayMapping

TaskKind = Literal["classification", "binary", "multilabel", "regression", "language"]
"""What the targets of examples are: a label, yes or no, several of these, numbers, or the next token at each place."""

IGNORED = -100
"""Target of a place that does not count, such as padding; what ``torch.nn.functional.cross_entropy`` ignores."""


@dataclass(frozen=True)
class DataSpec:
    """What the examples of all clients look like: all that a server must know of data that it never sees."""

    data: str  # its name
    input_shape: tuple[int, ...]  # of one input
    outputs: int  # numbers that a model must give: of labels, of a target, or the size of the vocabulary
    task: TaskKind = "classification"
    vocabulary_size: int = 0  # 0 for data that is not text
    scaled: tuple[float, float] | None = None  # mean and deviation that scale pixels in [0, 1]; None: inputs are as is

    @property
    def labels(self) -> int | None:
        """How many labels there are, of which each example has one; None where examples have none or several."""
        return {"classification": self.outputs, "binary": 2}.get(self.task)


@dataclass(eq=False)
class ClientRegistry:
    """The clients of a run. In a network it grows when clients join."""

    schema: DataSpec
    description: str  # for people: data, partition, shift
    names: Mapping[int, str] = field(default_factory=dict[int, str])
    sizes: Mapping[int, int] = field(default_factory=dict[int, int])  # training examples |D_i|
    true_clusters: Mapping[int, int] | None = None  # where they are known; for scoring only
    columns: Mapping[str, object] = field(default_factory=dict[str, object])  # of a table, for people
    stages: Sequence[tuple[int, ClientRegistry]] = ()  # what is so from a round on, where clients' data changes

    def __len__(self) -> int:
        return len(self.names)

    @property
    def ids(self) -> Sequence[int]:
        """All clients, in a fixed order."""
        return self.names.positions.sequence if isinstance(self.names, ArrayMapping) else tuple(self.names)

    def in_round(self, number: int) -> ClientRegistry:
        """Return what is known of the clients in a round, from 1."""
        begun = [registry for first, registry in self.stages if first <= number]
        return begun[-1] if begun else self
