"""The query by which clients describe their data by what a model makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedclade.core.errors import ConfigError
from fedclade.core.queries import Handlers, Query
from fedclade.core.registry import DataSpec

COMPONENTS = 10
"""Components of a descriptor where examples have no labels, by whose number it goes by default."""


@dataclass(frozen=True, eq=False)
class DescriptorQuery(Query[Tensor]):
    """Describe training data by a model's latent; the reply is float32 ``[n, 2 + B, C]`` (FLUX).

    The latent of an example is the input of the first dense layer behind the last convolution, flattened; of a model
    without convolutions, the input of its last dense layer. C components are taken of it, along directions that depend
    on the seed and the width of the latent alone. The rows of a client's block are: the largest entry of its latents,
    C times; what the components are of a point amid the cube that the directions were found in, of side 1; mean and
    standard deviation of its components, B = 2; and with ``per_label`` the means, and then the deviations, of each of L
    labels by itself, as the client sees them, B = 2 + 2L. Those of a label with fewer than two examples are −1. Of a
    client that does not reply all is 0.
    """

    mechanism = "none"
    discloses = "descriptors"

    model: Tensor  # [S]
    seed: int
    components: int = 0  # C; 0: as many as there are labels, the last of them 0 where the latent has fewer entries
    per_label: bool = True

    def shape(self, spec: DataSpec) -> tuple[int, int]:
        """Return 2 + B and C for some data; a ConfigError if it should be by labels, and examples have none."""
        if self.per_label and spec.labels is None:
            raise ConfigError(
                f"each label's data cannot be described by itself in a {spec.task} task, whose examples do not have "
                "one label each; set algorithm.per_label = false"
            )
        groups = 1 + (spec.labels or 0) if self.per_label else 1
        return 2 + 2 * groups, self.components or spec.labels or COMPONENTS

    def handled(self, handlers: Handlers) -> Tensor:
        """Return the descriptors."""
        return handlers.descriptors(self)
