"""Method ``auto``: serves every client with the model that suits it best.

Read :mod:`~fedclade.algorithms.auto.method` first, which contains the algorithm.
:mod:`~fedclade.algorithms.auto.choice` chooses between candidates by validation losses, and
:mod:`~fedclade.algorithms.auto.budget` counts the training steps that they cost.
"""

from fedclade.algorithms.auto.method import MODEL_KINDS, Auto, AutoState

__all__ = ["MODEL_KINDS", "Auto", "AutoState"]
