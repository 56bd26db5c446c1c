"""What trains and evaluates one client, on inputs and with a loss that may depend on all clients' examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedclade.core import StatisticsQuery
from fedclade.data import Federation, rescaled
from fedclade.flower.statistics import as_values, read_statistics
from fedclade.tasks import FittedTask, Task
from fedclade.training import SimulatedClients


class Trainer:
    """One client's own :class:`~fedclade.training.SimulatedClients`, made anew when the sums of all clients change.

    Columns that have means were scaled by those of the clients whose data is here, so they need the sums: others are
    elsewhere. So do balanced weights of labels.
    """

    def __init__(self, federation: Federation, task: Task, make: Callable[[Federation, FittedTask], SimulatedClients]):
        self._federation, self._asked, self._make = federation, task, make
        schema, columns = federation.pool.schema, federation.pool.columns
        self.task = task.of(schema)
        self.workers = make(federation, self.task)
        labels = (schema.labels or 0) if self.task.balanced else 0
        self.needs = StatisticsQuery(federation.ids, columns is not None and columns.mean is not None, labels)
        self._taken: Mapping[str, Any] = {}

    @property
    def needs_all(self) -> bool:
        """Whether it needs to know what all clients' examples come to."""
        return self.needs.inputs or self.needs.labels > 0

    def take(self, values: Mapping[str, Any]) -> None:
        """Take what all clients' examples come to, from a query; an UpdateError if that is not there."""
        columns = self._federation.pool.x.shape[1] if self.needs.inputs else 0
        found = read_statistics(values, columns, self.needs.labels)
        if as_values(found) == self._taken:
            return
        federation = rescaled(self._federation, found) if columns else self._federation
        self.task = self._asked.of(federation.pool.schema, found.labels if self.needs.labels else None)
        self.workers, self._taken = self._make(federation, self.task), as_values(found)
