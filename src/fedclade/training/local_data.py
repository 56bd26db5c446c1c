"""Access of data queries to the data and the stored tensors of simulated clients.

A data query runs a method's own computation on each client's local data; the classes of this module
give it one client's examples, models and stored tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedclade.core import ConfigError, DataQuery, DataSpec, LocalClients, LocalData, LocalStore
from fedclade.tasks import FittedTask
from fedclade.training.stages import Held
from fedclade.training.store import RESERVED_NAMES, ClientStore, WholeModels


class SimulatedData(LocalClients):
    """Data and stored tensors of all simulated clients, in one stage of the data.

    Parameters
    ----------
    held
        The clients' data in this stage.
    whole
        Assembles a client's whole model from its shared and its personal parameters.
    module
        The model's structure; its parameters are overwritten.
    store
        State that clients store between rounds.
    """

    def __init__(
        self, held: Held, whole: WholeModels, module: nn.Module, store: ClientStore
    ) -> None:
        self.federation = held.federation
        self.spec: DataSpec = held.federation.pool.schema
        self._held = held
        self._whole = whole
        self._module = module
        self._store = store

    def data(self, client: int) -> LocalData:
        """Return access to the local data and models of a client."""
        return _OneClient(client, self.spec, self._held, whole=self._whole, module=self._module)

    def store(self, client: int, query: DataQuery[Any]) -> LocalStore:
        """Return access to the tensors that a client stores between rounds for a query's class."""
        return _OneStore(client, query, self._store)


class _OneClient(LocalData):
    """Local data and models of one simulated client, as a data query accesses them."""

    def __init__(
        self, client: int, spec: DataSpec, held: Held, *, whole: WholeModels, module: nn.Module
    ) -> None:
        self._id = client
        self._spec = spec
        self._held = held
        self._whole = whole
        self._module = module
        self._client = held.federation.by_id[client]
        self._pool = held.federation.pool
        self._rows = torch.from_numpy(self._client.train)

    @property
    def spec(self) -> DataSpec:
        return self._spec

    @property
    def targets(self) -> Tensor:
        return self._client.labels(self._pool.y[self._rows])

    @property
    def inputs(self) -> Tensor:
        inputs, _ = self._held.data.of(self._id)
        return inputs

    @property
    def stored_inputs(self) -> Tensor:
        x = self._pool.x[self._rows]
        turns = self._client.quarter_turns
        if not turns:
            return x
        return torch.rot90(x, turns, (-2, -1))

    @property
    def test_examples(self) -> tuple[Tensor, Tensor]:
        inputs, targets = self._held.federation.examples(self._id, "test")
        return inputs.to(self._held.data.device), targets

    @property
    def task(self) -> FittedTask:
        return self._held.evaluator.task

    def load_model(self, vector: Tensor) -> nn.Module:
        module = self._module.eval()
        self._whole.load(self._id, vector.to(self._held.data.device), module)
        return module

    def load_own_model(self) -> nn.Module | None:
        module = self._module.eval()
        if not self._whole.load_own(self._id, module):
            return None
        return module


class _OneStore(LocalStore):
    """Tensors that one simulated client stores for a class of data queries."""

    def __init__(self, client: int, query: DataQuery[Any], store: ClientStore) -> None:
        self._client = client
        self._query = query
        self._store = store

    def get(self, name: str) -> Tensor | None:
        self._check(name)
        return self._store.before(self._query.round_number, self._client).get(name)

    def keep(self, name: str, tensor: Tensor) -> None:
        self._check(name)
        self._store.keep(self._query.round_number, self._client, {name: tensor})

    def _check(self, name: str) -> None:
        """Check that the class of the query may store a tensor under a name.

        Raises
        ------
        ConfigError
            If the class does not declare the name, or the name is reserved.
        """
        kind = type(self._query)
        stored = ", ".join(map(repr, kind.stores)) or "nothing"
        if name not in kind.stores:
            raise ConfigError(
                f"the query class {kind.__name__} declares that it stores {stored}, so it cannot "
                f"read or write {name!r}; add this name to the class attribute 'stores'"
            )
        if name in RESERVED_NAMES or "/" in name:
            raise ConfigError(
                f"the query class {kind.__name__} cannot store a tensor named {name!r}: names that "
                "training uses and names with '/' are reserved; choose another name in the class "
                "attribute 'stores'"
            )
