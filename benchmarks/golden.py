"""A net under changes that should change no result: digests of some forty short runs.

Every algorithm, engine, shift and partition; signatures, streaming, privacy, faults, joins, resuming, newcomers, and
the network. A digest is over all that a run says (tables but for seconds, events, the tree with its models), so equal
digests mean equal to the last bit. Rounding depends on the machine and on torch: compare on one machine.

    OMP_NUM_THREADS=1 python benchmarks/golden.py write golden.json
    OMP_NUM_THREADS=1 python benchmarks/golden.py check golden.json [--only cfl]
"""

from __future__ import annotations

import fedclade  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import hashlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from fedclade import Run
from fedclade.config import check_config
from fedclade.flower import LocalGrid, LocalNode, client_app_from_config, server_app_from_config

Settings = dict[str, Any]

BASE: Settings = {
    **{"rounds": 6, "seed": 1, "engine": "loop", "data.name": "digits", "data.clients": 8},
    **{"data.samples_per_client": 40, "data.shift": "label_swap", "data.clusters": 2},
    **{"model.name": "mclr", "local.batch_size": 10, "local.lr": 0.1},
}
"""Eight clients in two clusters, on the bundled digits."""

CFL: Settings = {"algorithm.name": "cfl", "algorithm.eps1": 0.4, "algorithm.eps2": 0.1}
RCFL: Settings = {"algorithm.name": "rcfl", "data.clients": 12, "rounds": 9}
MLP: Settings = {"model.name": "mlp", "model.hidden": 16}
GROUPS: Settings = {"algorithm.name": "fedgroup", "algorithm.groups": 2, "algorithm.pretrain_scale": 2}
SKETCHED: Settings = {"signature.kind": "projected", "signature.dim": 64}

CASES: Mapping[str, Settings] = {
    # every algorithm
    **{f"algorithm {name}": {"algorithm.name": name} for name in ("fedavg", "local", "oracle", "finetune", "pacfl")},
    "algorithm fedprox": {"algorithm.name": "fedavg", "local.mu": 0.1},
    "algorithm cfl": CFL,
    "algorithm cfl at dates": {**CFL, "algorithm.split_rounds": [2, 4], "algorithm.gamma_max": 0.9},
    "algorithm cfl by gradients": {**CFL, "algorithm.similarity": "gradients"},
    "algorithm cfl with a fall-back": {**CFL, "algorithm.fallback": True, "data.validation_fraction": 0.2},
    "algorithm rcfl": RCFL,
    "algorithm fl_hc": {"algorithm.name": "fl_hc", "algorithm.rounds_before": 2},
    "algorithm fl_hc cosine": {
        **{"algorithm.name": "fl_hc", "algorithm.rounds_before": 2, "algorithm.metric": "cosine"},
        **{"algorithm.linkage": "average", "algorithm.n_clusters": 2, "client_fraction": 0.5},
    },
    "algorithm fedgroup": GROUPS,
    "algorithm fedgrouprox": {**GROUPS, "algorithm.mu": 0.1, "algorithm.cold_start": "sampled", "client_fraction": 0.5},
    "algorithm ifca": {"algorithm.name": "ifca", "algorithm.clusters": 2, "algorithm.restarts": 2},
    "algorithm fesem": {"algorithm.name": "fesem", "algorithm.clusters": 2},
    "algorithm ditto": {"algorithm.name": "ditto"},
    **{f"algorithm {name}": {"algorithm.name": name, **MLP} for name in ("fedper", "fedrep", "lg_fedavg")},
    "personal heads of cfl": {**CFL, **MLP, "model.personal": "head"},
    # every engine
    **{f"engine {name}": {**CFL, **MLP, "engine": name} for name in ("loop", "vmap", "stacked", "workers")},
    "engine stacked with momentum": {**MLP, "engine": "stacked", "local.momentum": 0.9, "local.clip_norm": 1.0},
    # every kind of data
    **{f"shift {name}": {**CFL, "data.shift": name} for name in ("label_permutation", "rotation")},
    **{
        f"partition {name}": {"data.partition": name}
        for name in ("dirichlet", "shards", "pathological", "quantity_skew")
    },
    # what updates are compared by, and kept of them
    "signature": {**CFL, **SKETCHED},
    "signature streamed": {**CFL, **SKETCHED, "stream": True},
    "signature of rcfl": {**RCFL, **SKETCHED},
    # privacy
    "privacy permuted": {**CFL, "privacy.permute": True},
    "privacy differential": {"algorithm.name": "fedavg", "privacy.clip_norm": 1.0, "privacy.noise_multiplier": 0.5},
    # who takes part
    "faults": {**CFL, "faults.dropout": 0.2, "faults.slow": 0.1, "faults.corrupt": 0.1},
    "adversaries": {**CFL, "adversary.kind": "minmax", "adversary.share": 0.2},
    "adversaries that poison": {**CFL, "adversary.kind": "label_flip", "adversary.share": 0.2},
    "sampled": {**CFL, "client_fraction": 0.5, "evaluate_every": 2},
    "newcomers": {**CFL, "newcomers.clients": 2, "newcomers.join_round": 3},
    "newcomers that leave": {"newcomers.clients": 2, "newcomers.join_round": 2, "newcomers.leave_round": 5},
}

NETWORK: Mapping[str, Settings] = {
    "network fedavg": {"algorithm.name": "fedavg"},
    "network cfl": CFL,
    "network rcfl": RCFL,
    "network ifca": {"algorithm.name": "ifca", "algorithm.clusters": 2},
    "network ditto": {"algorithm.name": "ditto"},
    "network fedrep": {"algorithm.name": "fedrep", **MLP},
    "network int8": {**CFL, "network.encoding": "int8"},
    "network streamed": {**CFL, **SKETCHED, "stream": True},
}


def simulated(settings: Settings, folder: Path, rounds: int | None = None) -> Run:
    """Run a config, or its first rounds."""
    raw: Settings = {}
    for key, value in (BASE | settings).items():
        section, _, name = key.rpartition(".")
        (raw.setdefault(section, {}) if section else raw)[name] = value
    config = check_config(raw)
    if rounds is not None:
        config = replace(config, top=replace(config.top, rounds=rounds))
    return config.run(config.federation(), folder=folder / "run")


def resumed(settings: Settings, folder: Path) -> Run:
    """Run half of the rounds, and then the rest."""
    simulated(settings, folder, BASE["rounds"] // 2)
    return simulated(settings, folder)


def networked(settings: Settings, folder: Path) -> Run:
    """Run an app over a network in one process."""
    settings = {key: value for key, value in (BASE | settings).items() if key != "engine"}
    settings |= {"network.clients": settings["data.clients"], "network.out": str(folder / "run")}
    app = client_app_from_config()
    nodes = {100 + number: LocalNode(app, {"partition-id": number}) for number in range(settings["data.clients"])}
    with redirect_stdout(StringIO()):
        server_app_from_config()(LocalGrid(nodes, settings), Context(1, 0, {}, RecordDict(), settings))
    return Run.load(folder / "run")


def is_told(column: str) -> bool:
    """Whether a column is part of a digest: times are not, nor the numbers of clients with a score."""
    return "seconds" not in column and not column.endswith(("_clients", "_without_score"))


def digest_of(run: Run) -> str:
    """Return a digest of all that does not depend on the clock."""
    found = hashlib.sha256()

    def rows(name: str, of: list[dict[str, Any]]) -> None:
        kept = [{key: value for key, value in row.items() if is_told(key)} for row in of]
        found.update(json.dumps([name, kept], sort_keys=True, default=str).encode())

    rows("metrics", run.metric_rows)
    rows("clusters", run.cluster_rows)
    rows("clients", run.client_rows)
    rows("events", run.events)
    for node in run.tree.nodes:
        told = [node.id, node.parent, node.members, node.born, node.split_in, dict(node.criteria)]
        found.update(json.dumps(told).encode())
        for vector in (node.params, node.cached, node.trained_from):
            if vector is not None:
                found.update(vector.cpu().contiguous().numpy().tobytes())
    for matrix in run.similarities:
        found.update(matrix.alpha.tobytes())
    for client, kept in sorted(run.kept.items()):
        for name, vector in sorted(kept.items()):
            found.update(f"{client}/{name}".encode() + vector.cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> int:
    """Write digests, or compare with those that were written; return 1 if one differs."""
    arguments = parse()
    logging.getLogger("fedclade").setLevel(logging.ERROR)
    ways: dict[str, Callable[[Path], Run]] = {name: partial(simulated, each) for name, each in CASES.items()}
    ways["resumed"] = partial(resumed, CFL)
    ways |= {name: partial(networked, each) for name, each in NETWORK.items()}
    known: dict[str, str] = {} if arguments.do == "write" else json.loads(arguments.file.read_text())
    digests: dict[str, str] = {}
    for name, way in ways.items():
        if arguments.only in name:
            with tempfile.TemporaryDirectory() as folder:
                digests[name] = digest_of(way(Path(folder)))
            verdict = "" if arguments.do == "write" else "  same" if known.get(name) == digests[name] else "  DIFFERS"
            print(f"{name:36}{digests[name]}{verdict}", flush=True)
    if arguments.do == "write":
        arguments.file.write_text(json.dumps(digests, indent=1) + "\n")
        return 0
    changed = [name for name, digest in digests.items() if known.get(name) != digest]
    print(f"{len(digests) - len(changed)} of {len(digests)} the same, fedclade {fedclade.__version__}")
    return int(bool(changed))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="cases with this in their name")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
