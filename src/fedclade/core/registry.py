"""Who takes part, as a server knows it: names and sizes of clients, and what their examples look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Task = Literal["classification", "language"]


@dataclass(frozen=True)
class DataSpec:
    """What the examples of all clients look like: all that a server must know of data that it never sees.

    Parameters
    ----------
    data
        The name of the data.
    input_shape
        Of one input.
    outputs
        Number of outputs that a model must give: labels, or the size of the vocabulary.
    task
        ``classification`` or ``language`` (next-token prediction).
    vocabulary_size
        Number of words; 0 for data that is not text.
    scaled
        Mean and standard deviation by which pixels in [0, 1] are scaled; None where inputs reach a model as they are.
    """

    data: str
    input_shape: tuple[int, ...]
    outputs: int
    task: Task = "classification"
    vocabulary_size: int = 0
    scaled: tuple[float, float] | None = None


@dataclass(eq=False)
class ClientRegistry:
    """The clients of a run. In a network it grows when somebody joins.

    Parameters
    ----------
    schema
        What their examples look like.
    description
        What they are, for people: data, partition, shift.
    names
        What people call each client.
    sizes
        Training examples |D_i| of each client.
    true_clusters
        Cluster of each client, where it is known. For scoring only.
    """

    schema: DataSpec
    description: str
    names: dict[int, str] = field(default_factory=dict[int, str])
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    true_clusters: Mapping[int, int] | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def ids(self) -> tuple[int, ...]:
        """All clients, in a fixed order."""
        return tuple(self.names)
