"""Server optimizers: the step by which a cluster's model moves, given its clients' mean update.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan 2021, *Adaptive Federated
Optimization*, Algorithm 2: the mean update Δ_t of a round takes the place of a negative gradient.
The paper has one model; here each cluster has an optimizer of its own.

A method moves a model by ``ParameterTree.moved`` or ``ParameterTree.trained``. During a method's
round these methods ask :func:`server_step` for the step. The optimizers of a round are in a context
variable, not in the tree: methods build new trees in a round, which would lose them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from fedclade.core.arguments import checked
from fedclade.core.settings import (
    check_settings,
    document_settings,
    greater_than,
    in_range,
    one_of,
    setting,
)

ServerOptimizerName = Literal["none", "fedavgm", "fedadagrad", "fedadam", "fedyogi"]

ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")
"""Optimizers that divide the step by the root of the second moment v."""


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """Settings of the optimizer of each cluster's model (section ``[server]`` of a config).

    Raises
    ------
    ConfigError
        If a value is out of range; the message has a line for each such value.
    """

    optimizer: ServerOptimizerName = setting(
        "none",
        one_of(*get_args(ServerOptimizerName)),
        doc="""Optimizer by which a cluster's model moves: ``none``, by the mean update of its
        clients; ``fedavgm``, with momentum (Hsu et al. 2019); ``fedadagrad``, ``fedadam`` or
        ``fedyogi``, with adaptive steps (Reddi et al. 2021, Algorithm 2).""",
    )
    lr: float | None = setting(
        None,
        greater_than(0),
        doc="""Step size η of the server. By default 1 with ``fedavgm`` and 0.1 with the adaptive
        optimizers; the paper tunes it for each task.""",
    )
    beta1: float = setting(
        0.9, in_range("[0, 1)"), doc="Decay β₁ of the momentum m, for all optimizers, in [0, 1)."
    )
    beta2: float = setting(
        0.99,
        in_range("[0, 1)"),
        doc="Decay β₂ of the second moment v of ``fedadam`` and ``fedyogi``, in [0, 1).",
    )
    tau: float = setting(
        1e-3,
        greater_than(0),
        doc="""Adaptivity τ, greater than 0: larger values make adaptive steps more equal. v starts
        at τ².""",
    )

    def __post_init__(self) -> None:
        used = self.optimizer != "none" or self.lr is None
        check_settings(
            self, "server", ("server.lr", self.lr, used, "left out with server.optimizer = 'none'")
        )

    @property
    def step_size(self) -> float:
        """Step size η of the server, with the optimizer's default if it is unset."""
        if self.lr is not None:
            return self.lr
        return 0.1 if self.optimizer in ADAPTIVE else 1.0

    def apply(
        self, moments: ServerMoments | None, delta: torch.Tensor
    ) -> tuple[torch.Tensor, ServerMoments]:
        """Return the step of a model, and the new moments (Algorithm 2, lines 10 to 14).

        Parameters
        ----------
        moments
            Moments after the last step; None before the first.
        delta
            Mean update Δ_t of the clients, ``[D]``.
        """
        if self.optimizer == "fedavgm":
            m = delta.clone() if moments is None else self.beta1 * moments.m + delta
            return self.step_size * m, ServerMoments(m, torch.zeros_like(delta[:0]))
        if moments is None:
            moments = ServerMoments(torch.zeros_like(delta), torch.full_like(delta, self.tau**2))
        m = self.beta1 * moments.m + (1 - self.beta1) * delta
        square = delta.square()
        if self.optimizer == "fedadagrad":
            v = moments.v + square
        elif self.optimizer == "fedyogi":
            v = moments.v - (1 - self.beta2) * square * (moments.v - square).sign()
        else:
            v = self.beta2 * moments.v + (1 - self.beta2) * square
        return self.step_size * m / (v.sqrt() + self.tau), ServerMoments(m, v)


@dataclass(frozen=True, eq=False)
class ServerMoments:
    """Moments of one cluster's optimizer.

    Parameters
    ----------
    m
        Momentum m_t, ``[D]``.
    v
        Second moment v_t, ``[D]``; empty with ``fedavgm``.
    """

    m: torch.Tensor
    v: torch.Tensor


class ServerSteps:
    """Optimizers of all clusters in one round.

    A cluster without an optimizer of its own, such as the child of a split, starts from a copy of
    the moments of its nearest ancestor that has some. A cluster that takes over the members of
    another cluster keeps its own moments.

    Parameters
    ----------
    how
        Settings of the optimizer.
    moments
        Moments of the clusters before the round, by node of the tree.
    n_parameters
        Number D of leading entries of a model that are parameters. The entries behind them are
        buffers, such as the statistics of BatchNorm, which move by the mean update.
    """

    def __init__(
        self, how: ServerOptimizer, moments: Mapping[int, ServerMoments], n_parameters: int
    ) -> None:
        self._how = how
        self._n_parameters = n_parameters
        self.moments = dict(moments)
        """Moments of the clusters after the steps so far, by node of the tree."""

    @contextmanager
    def active(self) -> Generator[None]:
        """Let these optimizers make all moves of models in the ``with`` block."""
        if self._how.optimizer == "none":
            yield
            return
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def step(self, path: Sequence[int], delta: torch.Tensor) -> torch.Tensor:
        """Return the step of a node's model for a mean update ``delta [S]``.

        ``path`` has the ids of the nodes from the root to the node.
        """
        known = [node for node in path if node in self.moments]
        before = self.moments[known[-1]] if known else None
        parameters, moments = self._how.apply(before, delta[: self._n_parameters])
        self.moments[path[-1]] = moments
        return torch.cat([parameters, delta[self._n_parameters :]])


_active: ContextVar[ServerSteps | None] = ContextVar("server steps", default=None)


def server_step(path: Sequence[int], delta: torch.Tensor) -> torch.Tensor:
    """Return the step by which a model moves: by the active optimizer, or else ``delta`` itself.

    Parameters
    ----------
    path
        Ids of the nodes of the tree from the root to the node whose model moves.
    delta
        Mean update of the cluster's clients, ``[S]``.
    """
    steps = _active.get()
    return delta if steps is None else steps.step(path, delta)


def moments_as_tensors(moments: Mapping[int, ServerMoments]) -> dict[str, torch.Tensor]:
    """Return the moments of all clusters as tensors by name, for a checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for node, each in moments.items():
        tensors[f"{node}/m"] = each.m
        tensors[f"{node}/v"] = each.v
    return tensors


def moments_from_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[int, ServerMoments]:
    """Return the moments that :func:`moments_as_tensors` converted."""
    nodes = sorted({int(name.partition("/")[0]) for name in tensors})
    return {node: ServerMoments(tensors[f"{node}/m"], tensors[f"{node}/v"]) for node in nodes}
