"""Strategy of Flower that clusters clients whose ClientApp is plain.

:class:`ClusteredStrategy` takes the place of Flower's ``FedAvg`` in a ServerApp.
"""

from fedclade.flower.strategy.clustered_strategy import ClusteredStrategy
from fedclade.flower.strategy.parts import part_of

__all__ = ["ClusteredStrategy", "part_of"]
