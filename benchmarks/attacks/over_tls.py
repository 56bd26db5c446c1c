"""Attack real SuperNodes over TLS: the three worst attacks by a lying server, which must stay unsuccessful.

A SuperLink with TLS and eight SuperNodes are processes on this machine. The ServerApp attacks them; see
``over_tls_app.py``. Seven clients insist on secure aggregation, and know one another's keys. One more client has a key
and colludes with the server. The last SuperNode has a privacy budget (ε = 0.5).

- ``update alone``: the server asks for the update of a client without a sum.
- ``sum of one``: it asks for a sum of the client and the colluder, by terms that count the colluder or do not.
- ``neighbourhoods``: it shows the clients of a sum lists that do not fit together. These three attacks succeed if the
  update is opened.
- ``evaluate``, ``own loss``: losses of models that are made for it give entries of the same client's update. The
  attack succeeds if a loss or an exact score is answered.
- ``refusals``: training of the private client that once ended in a refusal with the norm of its update. The attack
  succeeds if a reply differs from the usual one, in more than the noisy numbers.
- ``booked``: succeeds if one of these requests is missing in the ledger of the private client.

With ``--unprotected`` the clients have neither secure aggregation nor a privacy budget, and expect no colluders. Then
most attacks succeed, which shows that the program can find a hole. With ``--in-process`` the nodes are in this
process.

    python benchmarks/attacks/over_tls.py [--unprotected] [--in-process] [--json FILE]
"""

from __future__ import annotations

# Before torch, whose threads then sleep while they wait.
import fedclade  # noqa: F401  # isort: skip  # pyright: ignore[reportUnusedImport]

import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import over_tls_app as app
import tomli_w
import torch
from common import Row, parser, read_rows, report
from flwr.app import Context, RecordDict

from fedclade.core.arguments import flat
from fedclade.flower import LocalGrid, LocalNode
from fedclade.flower.signing import key_of

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "flower"
sys.path.insert(0, str(EXAMPLE))

from deployment import Deployment  # noqa: E402  # pyright: ignore[reportMissingImports]

NODES = app.HONEST + 1
SOURCES = ("over_tls_app.py", "lying_server.py", "common.py")
"""Modules of the app."""

NodeConfig = Mapping[str, bool | float | int | str]


def run_config(attack: str, out: Path, *, protected: bool) -> dict[str, Any]:
    """Return the run config of an attack, ``sums`` or ``privacy``."""
    config: dict[str, Any] = {
        "rounds": 1,
        "data": {"name": "digits", "clients": NODES, "samples_per_client": 60},
        "model": {"name": "mclr"},
        "algorithm": {"name": "fedavg"},
        "network": {"clients": NODES, "out": str(out)},
    }
    if protected and attack == "privacy":
        config["privacy"] = {"clip_norm": 1.0, "noise_multiplier": 1000.0}
    return config


def node_configs(folder: Path, *, protected: bool) -> list[NodeConfig]:
    """Make the clients' folders, keys and list of keys; return what the node config of each has beyond its folder."""
    lines = [f"{number} {public_key(folder / f'node-{number}')}" for number in range(app.HONEST)]
    app.colluder_of(folder)
    lines.append(f"{app.COLLUDER} {public_key(folder / 'colluder')}")
    peers = folder / "peers"
    peers.write_text("".join(lines), encoding="utf-8")
    of_sums: dict[str, Any] = {"peers-file": str(peers)}
    of_sums |= {"secure-aggregation": True} if protected else {"max-colluders": 0, "min-honest": 2}
    of_privacy: NodeConfig = {"epsilon": app.BUDGET.epsilon} if protected else {}
    return [*(of_sums for _ in range(app.HONEST)), of_privacy]


def public_key(folder: Path) -> str:
    """Make the key of a client in its folder, and return the line of its public half."""
    folder.mkdir(exist_ok=True, mode=0o700)
    context = Context(
        run_id=0, node_id=0, node_config={"folder": str(folder)}, state=RecordDict(), run_config={}
    )
    key_of(context)
    return (folder / "client.key.pub").read_text(encoding="utf-8")


def attack_in_process(folder: Path, *, protected: bool) -> list[Row]:
    """Attack nodes in this process."""
    rows: list[Row] = []
    configs = node_configs(folder, protected=protected)
    for attack, run in (("sums", app.attack_sums), ("privacy", app.attack_privacy)):
        config = flat(run_config(attack, folder / f"{attack}.json", protected=protected))
        nodes: dict[int, LocalNode] = {}
        for number, node_config in enumerate(configs):
            own = {"partition-id": number, "folder": str(folder / f"node-{number}")}
            nodes[100 + number] = LocalNode(app.client, {**node_config, **own})
        context = Context(
            run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config
        )
        rows += run(LocalGrid(nodes, config), context)
    return [*rows, booked(folder, rows[-1].budget)]


def attack_over_tls(folder: Path, *, protected: bool) -> list[Row]:
    """Attack SuperNodes, each a process, over TLS."""
    rows: list[Row] = []
    configs = [as_text(config) for config in node_configs(folder, protected=protected)]
    apps = {
        attack: write_app(folder, attack, protected=protected) for attack in ("sums", "privacy")
    }
    with Deployment(folder, apps["sums"], NODES, node_config=configs) as deployment:
        for attack, place in apps.items():
            deployment.app = place
            deployment.run({})
            rows += read_rows(folder / f"{attack}.json")
    return [*rows, booked(folder, rows[-1].budget)]


def write_app(folder: Path, attack: str, *, protected: bool) -> Path:
    """Write the Flower app of an attack, and return its folder."""
    place = folder / f"app-{attack}"
    place.mkdir()
    for name in SOURCES:
        shutil.copy(HERE / name, place)
    project: dict[str, Any] = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {"name": f"attack-{attack}", "version": "1.0.0", "license": "Apache-2.0"},
    }
    components = {
        "serverapp": f"over_tls_app:server_of_{attack}",
        "clientapp": "over_tls_app:client",
    }
    config = run_config(attack, folder / f"{attack}.json", protected=protected)
    flower = {
        "publisher": "fedclade",
        "fab-include": [*SOURCES],
        "components": components,
        "config": config,
    }
    project["tool"] = {"flwr": {"app": flower}}
    (place / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
    return place


def as_text(config: NodeConfig) -> str:
    """Return a node config as the command line of a SuperNode takes it."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


def booked(folder: Path, used: str) -> Row:
    """Compare the ledger of the private client with the number of requests to it.

    The budget ``used`` of this attack is the budget of the requests.
    """
    asked = len(app.REQUESTS_TO_PRIVATE)
    ledger = folder / f"node-{app.PRIVATE}" / "privacy.json"
    entries = json.loads(ledger.read_text(encoding="utf-8"))["entries"] if ledger.exists() else []
    count = sum(entry["releases"] for entry in entries)
    detail = f"{count} of {asked} requests in the client's ledger"
    return Row("booked", count < asked, detail, budget=used)


def main() -> int:
    """Run the attacks; return 1 if one of them succeeds."""
    options = parser(__doc__)
    options.add_argument(
        "--unprotected", action="store_true", help="take the clients' protection away"
    )
    options.add_argument("--in-process", action="store_true", help="attack nodes in this process")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    attack = attack_in_process if arguments.in_process else attack_over_tls
    with tempfile.TemporaryDirectory() as name:
        rows = attack(Path(name), protected=not arguments.unprotected)
    return report(rows, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
