"""What clients answer in a round: checked where it arrives, then taken apart and joined as the server needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedclade.errors import UpdateError

LARGEST_NORM = 1e18
"""Of an update: the product of two larger ones overflows float32, and no similarity could be computed."""

CONVERTED_AT_A_TIME = 2**17
"""Entries of updates that are turned to float64 at once: 1 MiB, which stays in a processor's cache."""


@dataclass(frozen=True, eq=False)
class Sums:
    """What a run that streams keeps of updates: Σ |D_i| Δθ_i over each of G groups of clients.

    Parameters
    ----------
    groups
        The sums, ``[G, S]``.
    group
        Which of them each client is part of, int64 ``[n]``.
    """

    groups: Tensor
    group: Tensor

    def of(self, rows: Tensor) -> tuple[Sums, Tensor]:
        """Return the sums of the groups of some clients; and who is in them besides, as rows of these sums."""
        kept, group = torch.unique(self.group[rows], return_inverse=True)
        besides = torch.isin(self.group, kept)
        besides[rows] = False
        return Sums(self.groups[kept], group), besides.nonzero().flatten()


@dataclass(frozen=True, eq=False, kw_only=True)
class Updates:
    """What n clients answered in one round, with D parameters and S = D + buffers entries in a model.

    Parameters
    ----------
    ids
        The clients, ``[n]``.
    sizes
        Their training examples |D_i|, float64 ``[n]``.
    losses
        Mean training loss of each client in the round, ``[n]``.
    norms
        ‖Δθ_i‖ of the parameters, in parameter units, float64 ``[n]``.
    n_parameters
        D.
    deltas
        Weight updates Δθ_i (CFL eq. 1), ``[n, S]``. None in a run that streams, which has ``sums`` in their place.
    sums
        Sums of weight updates, one for each model that was sent out.
    sketches
        What clients are compared by, ``[n, R]``, where it is not the update itself; always there in a stream.
    """

    ids: tuple[int, ...]
    sizes: Tensor
    losses: Tensor
    norms: Tensor
    n_parameters: int
    deltas: Tensor | None = None
    sums: Sums | None = None
    sketches: Tensor | None = None

    @classmethod
    def received(
        cls, ids: Sequence[int], sizes: Sequence[int], deltas: Tensor, n_parameters: int, losses: Tensor, number: int
    ) -> Updates:
        """Check what came from the clients, and only then make updates of it.

        Raises
        ------
        UpdateError
            If there is not one row for each client, or a row is not finite or too large to be compared; names the
            client and the round.
        """
        if deltas.ndim != 2 or len(deltas) != len(ids):
            shape = tuple(deltas.shape)
            raise UpdateError(f"round {number}: expected {len(ids)} updates, got a tensor of shape {shape}")
        norms = row_norms(deltas[:, :n_parameters])
        whole = torch.hypot(norms, row_norms(deltas[:, n_parameters:]))
        for i in (~(whole <= LARGEST_NORM)).nonzero().flatten().tolist():  # NaN is not less than anything
            entries = int((~torch.isfinite(deltas[i])).sum())
            what = f"has {entries} of {deltas.shape[1]} entries that are NaN or infinite"
            what = what if entries else f"has norm {float(whole[i]):.3g}, more than {LARGEST_NORM:.3g}"
            raise UpdateError(
                f"round {number}: the update of client {ids[i]} {what}; its training diverged: lower local.lr, or "
                "look at the client's data"
            )
        return cls(
            ids=tuple(ids),
            sizes=torch.tensor(sizes, dtype=torch.float64),
            losses=losses,
            norms=norms,
            n_parameters=n_parameters,
            deltas=deltas,
        )

    @property
    def each(self) -> Tensor:
        """The update of each client, ``[n, S]``, for what cannot do with less.

        Raises
        ------
        UpdateError
            If the run streams.
        """
        if self.deltas is None:
            raise UpdateError(
                f"the updates of {len(self.ids)} clients are needed one by one, but this run streams and keeps only "
                "their sums; set stream = false"
            )
        return self.deltas

    @property
    def signatures(self) -> Tensor:
        """What clients are compared by, ``[n, R]``: by default the update without its buffers, ``[n, D]``."""
        return self.each[:, : self.n_parameters] if self.sketches is None else self.sketches

    def of(self, members: Sequence[int]) -> Updates:
        """Return the updates of those members that answered, in the order of the members.

        Raises
        ------
        UpdateError
            If the run streams, and the members share a sum with others.
        """
        rows = self._rows(members)
        if torch.equal(rows, torch.arange(len(self.ids))):
            return self
        sums = None
        if self.sums is not None:
            sums, besides = self.sums.of(rows)
            if len(besides):
                raise UpdateError(
                    f"the updates of clients {self._named(rows)} cannot be told from those of clients "
                    f"{self._named(besides)}: this run streams, and keeps only sums over all clients of a model; "
                    "set stream = false"
                )
        return replace(
            self,
            ids=tuple(self._named(rows)),
            sizes=self.sizes[rows],
            losses=self.losses[rows],
            norms=self.norms[rows],
            deltas=None if self.deltas is None else self.deltas[rows],
            sums=sums,
            sketches=None if self.sketches is None else self.sketches[rows],
        )

    def signatures_of(self, members: Sequence[int]) -> Tensor:
        """Return the signatures of those members that answered, ``[m, R]`` in the order of the members."""
        return self.signatures[self._rows(members)]

    def joined(self, other: Updates) -> Updates:
        """Return these updates and those of other clients, made at the same models in the same round."""
        sums = None
        if self.sums is not None and other.sums is not None:
            behind = other.sums.group + len(self.sums.groups)
            sums = Sums(torch.cat([self.sums.groups, other.sums.groups]), torch.cat([self.sums.group, behind]))
        return Updates(
            ids=self.ids + other.ids,
            sizes=torch.cat([self.sizes, other.sizes]),
            losses=torch.cat([self.losses, other.losses]),
            norms=torch.cat([self.norms, other.norms]),
            n_parameters=self.n_parameters,
            deltas=None if sums is not None else torch.cat([self.each, other.each]),
            sums=sums,
            sketches=None if self.sketches is None else torch.cat([self.sketches, other.signatures]),
        )

    @cached_property
    def _row_of(self) -> Mapping[int, int]:
        return {client: row for row, client in enumerate(self.ids)}

    def _rows(self, members: Sequence[int]) -> Tensor:
        return torch.tensor([self._row_of[m] for m in members if m in self._row_of], dtype=torch.int64)

    def _named(self, rows: Tensor) -> list[int]:
        return [self.ids[row] for row in rows.tolist()]


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row of ``[n, m]``, float64 ``[n]``, without a float64 copy of all of them."""
    at_once = max(1, CONVERTED_AT_A_TIME // max(1, rows.shape[1]))
    norms = [torch.linalg.vector_norm(some, dim=1, dtype=torch.float64) for some in rows.split(at_once)]
    return torch.cat(norms).cpu()
