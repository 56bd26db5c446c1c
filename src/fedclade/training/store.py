"""What clients keep from round to round: named tensors of each client's own, which no server sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedclade.core import LARGEST_NORM, row_norms
from fedclade.training.jobs import Workload

PERSONAL = "personal"
OWN_MODEL = "model"
"""Names of what is kept: personal parameters ``[P]``, and a whole model ``[F]``."""

MIXTURE = "mixture"
"""The name of the weights π of a mixture's models, float64 ``[K]``."""

SERVED_MIXTURE = "served mixture"
"""The name of the weights ``[K]`` that a client which has not trained was served with last."""

OPTIMIZER = "optimizer"
OWN_OPTIMIZER = "optimizer of model"
"""How the names of an optimizer's state begin, before ``/<parameter>.<what it is>``; a model of its own has another."""

RULE, SERVED = "rule", "served"
"""How the names of a local rule's state begin; and the name, in that, of the client's own model that comes of it."""


@dataclass(frozen=True)
class Generation:
    """What a client kept after a round."""

    number: int  #: of the round; 0 before the first
    tensors: Mapping[str, Tensor]


class ClientStore:
    """Named tensors of each client, as they are after its last round, and as they were before.

    A server may ask for a round again, since an answer was lost or it was started anew; so a round always starts from
    what was kept before it.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Generation, ...]] = {}  # at most two, the newest last

    def __bool__(self) -> bool:
        """Whether any client keeps anything."""
        return bool(self._kept)

    def before(self, number: int, client: int) -> Mapping[str, Tensor]:
        """Return what a client kept before a round, or the oldest that is known; nothing before the first round."""
        return self._before(number, client).tensors

    def latest(self, client: int) -> Mapping[str, Tensor]:
        """Return what a client keeps now."""
        return self._kept[client][-1].tensors if client in self._kept else {}

    def keep(self, number: int, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors of a client after a round; others of other names stay as they are."""
        before, kept = self._before(number, client), self._kept.get(client, ())
        of_round = kept[-1].tensors if kept and kept[-1].number == number else before.tensors
        new = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._kept[client] = (before, Generation(number, {**of_round, **new}))

    def add(self, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors of a client beside what it kept last, whatever the round; no training begins with them."""
        kept = self._kept.get(client, (Generation(0, {}),))
        new = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._kept[client] = (*kept[:-1], Generation(kept[-1].number, {**kept[-1].tensors, **new}))

    def with_states(self, work: Workload, number: int, name: str) -> Workload:
        """Return the workload of a round with what the clients' optimizers or rules kept before it under a name."""
        jobs = [
            replace(
                job, state={key.removeprefix(f"{name}/"): t for key, t in kept.items() if key.startswith(f"{name}/")}
            )
            for job in work.jobs
            for kept in [self.before(number, job.client)]
        ]
        return replace(work, jobs=jobs)

    def keep_states(self, work: Workload, number: int, name: str, deltas: Tensor, losses: Tensor) -> None:
        """Keep what the clients' optimizers or rules had after a round, but for those that diverged."""
        fine = (row_norms(deltas) <= LARGEST_NORM).cpu() & losses.isfinite()
        for job, is_fine in zip(work.jobs, fine.tolist(), strict=True):
            if is_fine:
                state = {_stored(name, key): tensor for key, tensor in work.states[job.client].items()}
                self.keep(number, job.client, state)

    def _before(self, number: int, client: int) -> Generation:
        kept = self._kept.get(client, ())
        if number <= 1 or not kept:
            return Generation(0, {})
        known = [each for each in kept if each.number < number]
        return known[-1] if known else Generation(number - 1, kept[0].tensors)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def tensors(self, clients: Iterable[int] | None = None, *, before: bool = False) -> dict[str, Tensor]:
        """Return what some clients keep, or all, by client, round and name.

        ``before`` adds what was kept before the last round.
        """
        return {
            f"{client}/{each.number}/{name}": tensor
            for client in (self._kept if clients is None else clients)
            for kept in [self._kept.get(client, ())]
            for each in (kept if before else kept[-1:])
            for name, tensor in each.tensors.items()
        }

    def load(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Keep what :meth:`tensors` returned in place of all else; a ValueError if it is something else."""
        self.clear()
        self.take(tensors, device)

    def take(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Keep what :meth:`tensors` returned of some clients in place of what these kept; raises as :meth:`load`."""
        found: dict[int, dict[int, dict[str, Tensor]]] = {}
        for key, tensor in tensors.items():
            client, number, name = key.split("/", 2)
            found.setdefault(int(client), {}).setdefault(int(number), {})[name] = tensor.to(device)
        self._kept |= {
            client: (Generation(0, {}), *(Generation(number, rounds[number]) for number in sorted(rounds)))[-2:]
            for client, rounds in found.items()
        }


def _stored(name: str, key: str) -> str:
    """Return the name under which a tensor of a state is kept."""
    return OWN_MODEL if key == SERVED else f"{name}/{key}"
