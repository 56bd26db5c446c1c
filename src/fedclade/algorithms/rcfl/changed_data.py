"""Detection of clients whose data changed, by updates from the same splits at the same model.

A client with unchanged data makes the same updates again, except for rounding, which differs
between devices, numbers of threads and engines. Training amplifies rounding, so the cosine of an
old and a new update may be off from 1 by hundredths. After a change of the data it is off by much
more: an update from other examples of the same distribution is as far from the old update as the
updates of two splits of one client are from each other. So a client counts as changed if its
updates have moved by more than a share of the distance between two splits.

The server stores a *sketch* of each split's update: a random projection of the update's signature
to a few hundred numbers, which preserves distances to within a few percent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

CHANGED = 0.25
"""Change of a client's updates that counts, as a share of the distance of two splits' updates."""

ROUNDING = 1e-3
"""Smallest distance (1 − cosine) between an old and a new update that counts as a change.

It matters if all splits of a client make the same update, so that their distances are 0.
"""

SKETCHED = 512
"""Number of entries of a sketch."""


@dataclass(frozen=True, eq=False)
class SplitSketches:
    """Sketches (random projections) of the updates from all splits of clients' data, at one model.

    Parameters
    ----------
    ids
        Ids of n clients.
    sketches
        Sketches of F entries for each of r splits of each client, scaled to length 1, ``[n, r,
        F]``.
    """

    ids: tuple[int, ...]
    sketches: torch.Tensor

    @classmethod
    def of(cls, ids: Sequence[int], signatures: torch.Tensor) -> SplitSketches:
        """Compute the sketches from the signatures of the splits' updates.

        Parameters
        ----------
        ids
            Ids of n clients.
        signatures
            Signatures (vectors by which updates are compared) of r splits of each client, with R
            entries each, ``[n, r, R]``.
        """
        n, splits, length = signatures.shape
        # On a GPU the order of sums, and so their rounding, may differ from call to call.
        rows = signatures.flatten(0, 1).float().cpu()
        if length > SKETCHED:
            # All rounds of all runs use the same projection, so that sketches are comparable.
            draw = torch.Generator().manual_seed(0)
            places = torch.randint(SKETCHED, (length,), generator=draw)
            signs = 2 * torch.randint(2, (length,), generator=draw).to(rows) - 1
            rows = torch.zeros(len(rows), SKETCHED).index_add_(1, places, rows * signs)
        return cls(tuple(ids), torch.nn.functional.normalize(rows, dim=1).unflatten(0, (n, splits)))

    def find_changed(self, now: SplitSketches) -> tuple[int, ...]:
        """Find the clients in the later sketches ``now`` that are new, or whose data changed.

        The sketches of this object are the earlier ones, from the same splits at the same model.
        """
        usual = now._measure_usual_distance()
        known = dict(zip(self.ids, self.sketches, strict=True))
        changed: list[int] = []
        for client, sketches in zip(now.ids, now.sketches, strict=True):
            before = known.get(client)
            if before is None or before.shape != sketches.shape:
                changed.append(client)
                continue
            moved = 1 - float((before * sketches).sum(1).mean())
            if moved > max(CHANGED * usual, ROUNDING):
                changed.append(client)
        return tuple(changed)

    def _measure_usual_distance(self) -> float:
        """Return the mean distance (1 − cosine) between the sketches of one client's splits.

        The mean is over all pairs of splits of each client. The result is 1 if there are no
        clients.
        """
        n, splits, _ = self.sketches.shape
        if n == 0:
            return 1.0
        cosines = self.sketches @ self.sketches.mT  # [n, r, r]
        of_pairs = cosines.sum() - splits * n  # without the cosine 1 of each split with itself
        return 1 - float(of_pairs) / (n * splits * (splits - 1))

    def update(self, now: SplitSketches) -> SplitSketches:
        """Return these sketches, replaced and extended by the newer sketches ``now``.

        The result has the clients of both objects. A client in both has its sketches from ``now``.
        """
        newer = set(now.ids)
        older = [row for row, client in enumerate(self.ids) if client not in newer]
        ids = [*(self.ids[row] for row in older), *now.ids]
        sketches = torch.cat([self.sketches[older], now.sketches]) if older else now.sketches
        order = sorted(range(len(ids)), key=ids.__getitem__)
        return SplitSketches(tuple(ids[place] for place in order), sketches[order])

    def select(self, clients: Collection[int]) -> SplitSketches:
        """Return the sketches of the given clients only."""
        rows = [row for row, client in enumerate(self.ids) if client in clients]
        return SplitSketches(tuple(self.ids[row] for row in rows), self.sketches[rows])
