"""Models of different specificity together: a mixture of the models on a client's path (CFL, section V-C).

The paper names such ensembles as future work and leaves open how to build them. Here the probabilities that the models
on the path give are averaged, with equal weights or with weights that suit the client's validation data.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade.core import ConfigError, Evaluation, Layout, ParameterTree, Split, checked
from fedclade.training import SimulatedClients

GAP = 1e-4
"""How far the mean log-likelihood of the weights may be below the best one, in nats."""

MOST_STEPS = 10_000

SMALLEST = 1e-30
"""A likelihood is taken to be at least this: a model that excludes what was seen, or has diverged, is no more wrong."""


@checked()
class PathEnsemble(nn.Module):
    """The mixture Σ_l w_l p_l(y | x) of several models of one structure, as a module for plain PyTorch.

    It returns logarithms of probabilities ``[..., outputs]``, which serve wherever logits do: their softmax is the
    mixture, and ``cross_entropy`` its loss. It starts in evaluation mode.

    Parameters
    ----------
    module
        The structure; it is copied for each model.
    models
        L vectors ``[S]``, such as those of the nodes on a client's path, from the root to the leaf.
    weights
        ``[L]``, at least 0 and of sum 1; equal if left out.

    Raises
    ------
    ConfigError
        If there are no models, or weights that are no weights for them.
    ModelError
        If a vector has another length than the module's.
    """

    weights: Tensor

    def __init__(self, module: nn.Module, models: Sequence[Tensor] | Tensor, weights: Tensor | None = None) -> None:
        super().__init__()
        if not len(models):
            raise ConfigError("an ensemble should have at least 1 model, got 0")
        weights = torch.full((len(models),), 1 / len(models)) if weights is None else weights
        if weights.shape != (len(models),) or not (weights >= 0).all() or abs(float(weights.sum()) - 1) > 1e-4:
            raise ConfigError(
                f"an ensemble of {len(models)} models should have as many weights, at least 0 and of sum 1, got "
                f"{weights.tolist()}"
            )
        layout = Layout.of(module)
        self.levels = nn.ModuleList(copy.deepcopy(module) for _ in models)
        for level, vector in zip(self.levels, models, strict=True):
            layout.load(vector, level)
        self.register_buffer("weights", weights.to(models[0]))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithm of each output's probability, ``[..., outputs]``."""
        each = torch.stack([functional.log_softmax(level(x), -1) for level in self.levels], -1)
        return torch.logsumexp(each + self.weights.log(), -1)


def mixture_weights(likelihoods: Tensor) -> Tensor:
    """Return the weights of a mixture that make what was seen most likely.

    The log-likelihood Σ_i log Σ_l w_l p_l(y_i | x_i) is concave in w. Each step of expectation-maximisation (Dempster,
    Laird and Rubin 1977), w_l ← w_l · g_l with g_l = mean_i p_l(y_i | x_i) / Σ_k w_k p_k(y_i | x_i), keeps w on the
    simplex and never lowers it. Since Σ_l w_l g_l = 1, no weights have a mean log-likelihood more than max_l g_l − 1
    above that of w; steps end when this is below ``GAP``.

    Parameters
    ----------
    likelihoods
        p_l(y_i | x_i) of L models for n targets, ``[L, n]``.

    Returns
    -------
    Tensor
        w, float64 ``[L]``.
    """
    seen = likelihoods.double().nan_to_num(0).clamp(min=SMALLEST)
    weights = torch.full((len(seen),), 1 / len(seen), dtype=torch.float64, device=seen.device)
    for _ in range(MOST_STEPS):
        gains = (seen / (weights @ seen)).mean(1)
        if float(gains.max()) - 1 < GAP:
            break
        weights = weights * gains
    return weights / weights.sum()


@checked()
def path_weights(tree: ParameterTree, clients: SimulatedClients, split: Split = "validation") -> dict[int, Tensor]:
    """Return for each client that is in the tree the weights ``[L]`` of the models on its path that suit its data best.

    Raises
    ------
    DataError
        If a client has no examples in the split.
    """
    paths = {client: tree.path(client) for client in clients.ids if client in tree.leaf_of}
    asked = [client for client, path in paths.items() for _ in path]
    models, rows = tree.models([node.id for path in paths.values() for node in path])
    likelihoods = clients.likelihoods(asked, models, rows, split)
    of_each: dict[int, list[Tensor]] = {}
    for client, found in zip(asked, likelihoods, strict=True):
        of_each.setdefault(client, []).append(found)
    return {client: mixture_weights(torch.stack(found)) for client, found in of_each.items()}


@checked()
def evaluate_paths(
    tree: ParameterTree, clients: SimulatedClients, weights: Mapping[int, Tensor] | None = None, split: Split = "test"
) -> Evaluation:
    """Let each client evaluate the ensemble along its path on a split of its own data.

    Clients with the same path and the same weights share an ensemble, and the passes of what they both hold.

    Parameters
    ----------
    tree
        The models.
    clients
        The clients; those that are in the tree are asked.
    weights
        Of each client, ``[L]``, as :func:`path_weights` gives them; equal ones if left out.
    split
        Which of their data.

    Raises
    ------
    DataError
        If a client has no examples in the split.
    """
    sharing: dict[tuple[int, tuple[float, ...] | None], list[int]] = {}
    ids = [client for client in clients.ids if client in tree.leaf_of]
    for client in ids:
        own = None if weights is None else tuple(weights[client].tolist())
        sharing.setdefault((tree.leaf_of[client], own), []).append(client)
    found: list[Evaluation] = []
    for (leaf, own), members in sharing.items():
        path = [node.params for node in tree.above(leaf)]
        ensemble = PathEnsemble(clients.module, path, None if own is None else torch.tensor(own))
        found.append(clients.evaluate_module(ensemble, members, split))
    place = {client: place for place, client in enumerate(client for each in found for client in each.ids)}
    order = [place[client] for client in ids]
    return Evaluation(
        tuple(ids),
        torch.cat([each.accuracies for each in found])[order],
        torch.cat([each.losses for each in found])[order],
        torch.cat([each.examples for each in found])[order],
    )
