"""Algorithm 4 of the CFL paper, line by line, in NumPy's float64 and plain loops; SGD_n is that of ``reference/cfl``.

At a node it trains as in the round of the cached updates, whose step size and draws are the library's choice.
"""

from __future__ import annotations

from torch import nn

from fedclade import LocalTraining
from fedclade.core.tree import ParameterTree
from fedclade.data.federation import ClientData, Federation
from tests.reference.cfl import Vector, sgd


def alpha(one: Vector, other: Vector) -> float:
    """Eq. 51."""
    return float(one @ other / ((one @ one) ** 0.5 * (other @ other) ** 0.5))


def assign_new_client(
    D_new: ClientData,
    T: ParameterTree,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    seed: int,
) -> list[tuple[float, float, int]]:
    """Return α_0, α_1 and the node taken at every choice."""
    taken = []
    v = T.nodes[0]  # line 2
    while len(T.children(v.id)) > 0:  # line 3
        v_0, v_1 = T.children(v.id)  # line 4
        theta = v.params.double().numpy()
        delta_new = sgd(theta, D_new, federation, module, spec, seed, v.split_in) - theta  # line 5
        alpha_0 = max(alpha(delta_new, delta) for delta in v_0.cached.double().numpy())  # line 6
        alpha_1 = max(alpha(delta_new, delta) for delta in v_1.cached.double().numpy())  # line 7
        v = v_0 if alpha_0 > alpha_1 else v_1  # lines 8 to 12
        taken.append((alpha_0, alpha_1, v.id))
    return taken
