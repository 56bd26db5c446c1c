"""Registry of the clients of a run: their names, numbers of examples, and properties of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedclade.core.client_ids import ArrayMapping
from fedclade.core.structure import Structure

TaskKind = Literal[
    "classification", "binary", "multilabel", "regression", "language", "segmentation"
]
"""Kinds of tasks, which determine the target of an example.

The target is a label (classification), yes or no (binary), several labels (multilabel), numbers
(regression), the next token at each position of a text (language), or a label of each pixel of an
image (segmentation).
"""

DENSE: tuple[TaskKind, ...] = ("language", "segmentation")
"""Kinds of tasks with a label at each position of an example, some of which may be ignored."""

IGNORED = -100
"""Value of targets that are ignored in losses and metrics, such as targets of padding.

``torch.nn.functional.cross_entropy`` ignores it by default.
"""


@dataclass(frozen=True)
class DataSpec:
    """Properties of training and test examples, which are the same for all clients.

    A server, which has no access to the clients' data, needs no other information about the data.
    """

    data: str  # name of the data
    input_shape: tuple[int, ...]  # shape of one input
    # outputs of a model: number of labels, of numbers in a target, or of words in the vocabulary
    outputs: int
    task: TaskKind = "classification"
    vocabulary_size: int = 0  # 0 for data that is not text
    # mean and standard deviation that scale pixels in [0, 1]; None: inputs are not scaled
    scaled: tuple[float, float] | None = None
    # tensors of an input that is a dict or tuple; None: an input is one tensor
    structure: Structure | None = None
    # tensors of a target that is a dict or tuple; None: a target is one tensor
    target_structure: Structure | None = None

    @property
    def labels(self) -> int | None:
        """Number of different labels; None if the task is not one label per example."""
        return {"classification": self.outputs, "binary": 2}.get(self.task)


@dataclass(eq=False)
class ClientRegistry:
    """Registry of the clients of a run and their properties.

    In a run over a network, the registry grows when clients join.
    """

    schema: DataSpec
    description: str  # for people: data, partition, shift
    names: Mapping[int, str] = field(default_factory=dict[int, str])
    sizes: Mapping[int, int] = field(default_factory=dict[int, int])  # training examples |D_i|
    true_clusters: Mapping[int, int] | None = None  # None if unknown; used for scoring only
    # columns of a table, for people
    columns: Mapping[str, object] = field(default_factory=dict[str, object])
    # registries with the round from which each applies, if clients' data changes
    stages: Sequence[tuple[int, ClientRegistry]] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in a fixed order."""
        return (
            self.names.positions.sequence
            if isinstance(self.names, ArrayMapping)
            else tuple(self.names)
        )

    def in_round(self, number: int) -> ClientRegistry:
        """Return the registry that applies in a round; rounds are numbered from 1.

        If the clients' data changes during a run, :attr:`stages` has a registry for each change.
        """
        begun = [registry for first, registry in self.stages if first <= number]
        return begun[-1] if begun else self
