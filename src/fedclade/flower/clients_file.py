"""The file of a run folder that says which client is behind which node."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path

from fedclade.core import RunError, Statistics, UpdateError, appear
from fedclade.data import DataSchema
from fedclade.flower.registration import RegisteredClient, Registration, read_client, read_schema
from fedclade.flower.statistics import as_values, read_statistics

CLIENTS = "clients.json"

SCHEMA = "schema.json"
"""The agreed schema, in the form that ``[data] schema`` may name."""

_COMMON = ("description", "layout", "secret", "task", "scaled", "encoding")


@dataclass(frozen=True)
class SavedClients:
    """The clients of a run by number, those that were connected, and what all have in common."""

    clients: Mapping[int, RegisteredClient]
    connected: Set[int]
    common: Registration
    run: str = ""  # its name to clients, which keep what they have for one run
    statistics: Statistics | None = None  # what all clients' examples come to, where they need to know
    agreed: DataSchema | None = None  # by which all clients encode their data

    def save(self, folder: Path) -> None:
        """Write them, if anything has changed; a RunError if that fails."""
        kept = {
            "clients": {str(client): asdict(one) for client, one in self.clients.items()},
            "connected": sorted(self.connected),
            "run": self.run,
            "schema": asdict(self.common.schema),
            **{name: getattr(self.common, name) for name in _COMMON},
            **({} if self.statistics is None else {"statistics": as_values(self.statistics)}),
            **({} if self.agreed is None else {"agreed": self.agreed.digest}),
        }
        text, path = json.dumps(kept, indent=2), folder / CLIENTS
        try:
            if self.agreed is not None and not (folder / SCHEMA).exists():
                appear(folder / SCHEMA, self.agreed.save)
            if not path.exists() or path.read_text() != text:
                appear(path, lambda beside: beside.write_text(text))
        except OSError as error:
            raise RunError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> SavedClients | None:
        """Read them; None if there is no file, and a RunError if it is damaged."""
        path = folder / CLIENTS
        try:
            kept = json.loads(path.read_text())
            clients = {int(client): read_client(one) for client, one in kept["clients"].items()}
            common = Registration(
                number=None,
                client=next(iter(clients.values())),
                schema=read_schema(kept["schema"]),
                **{name: str(kept[name]) for name in ("description", "layout", "secret")},
                task=str(kept.get("task", "")),
                scaled=bool(kept.get("scaled", False)),
                encoding=str(kept.get("encoding", "")),
            )
            agreed = DataSchema.load(folder / SCHEMA) if (folder / SCHEMA).exists() else None
            if kept.get("agreed", "") != ("" if agreed is None else agreed.digest):
                raise ValueError(f"{SCHEMA} is not the schema that the clients agreed on")
            connected, found = set[int](kept["connected"]) & set(clients), kept.get("statistics")
            lengths = [len((found or {}).get(name, [])) for name in ("means", "labels")]
            statistics = None if found is None else read_statistics(found, *lengths)
            return cls(clients, connected, common, str(kept.get("run", "")), statistics, agreed)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration, UpdateError) as error:
            why = f"{type(error).__name__}: {error}"
            raise RunError(f"{path} is damaged ({why}); restore it, or name another run folder") from error
