"""Measure how many newcomers without labels are assigned to their true cluster.

Each method runs on MNIST with clients that differ in their images (rotations, FLUX's patterns), in
the labels that they have, or in the meaning of labels, which images do not show. Newcomers, which
do not take part in the run, have 300 or 40 images. They are assigned in three ways:

- *labels*: by updates or losses, as ``fedclade assign`` does, which needs labels;
- *descriptors*: to the leaf whose members' mean descriptor is nearest; a descriptor describes
  images by the root's model;
- *entropy*: to the leaf whose model predicts with the lowest entropy.

The result is the share of newcomers that are assigned to a leaf of their true cluster. Only
newcomers whose true cluster has a leaf are counted.

    python benchmarks/label_free.py --data-dir DIR --methods rcfl flux --seeds 1
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedclade import Federation, Run
from fedclade.config import check_config
from fedclade.runs.newcomers import Arrival

RESULTS = Path(__file__).with_suffix(".json")
SAMPLES = (300, 40)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "rotation": {"shift": "rotation", "clusters": 4},
    "P(X) 5": {"shift": "anda", "kind": "P(X)", "level": 5, "scaling": "unit"},
    "label groups": {"partition": "label_groups", "clusters": 2},
    "label swap": {"shift": "label_swap", "clusters": 4},
}
STEP_SIZES = {"P(X) 5": 0.03}
"""Step sizes of some kinds. The others have 0.1, with which no model learns coloured images."""

METHODS: Mapping[str, Mapping[str, Any]] = {
    "rcfl": {},
    "cfl": {"eps1": 0.3, "eps2": 1.2},
    "fl_hc": {"rounds_before": 5, "metric": "l2", "linkage": "ward"},
    "ifca": {"restarts": 4},
    "flux": {},
}


def configured(kind: str, method: str, seed: int, samples: int) -> dict[str, Any]:
    """Return a config with the settings of the suite, and 300 images for each client."""
    options = dict(METHODS[method])
    if method in ("ifca",):
        options["clusters"] = KINDS[kind].get("clusters", 6)
    return {
        **{"seed": seed, "rounds": 20, "evaluate_every": 20},
        "data": {"name": "mnist", "clients": 20, "samples_per_client": 300, **KINDS[kind]},
        "model": {"name": "mlp"},
        "local": {"epochs": 3, "batch_size": 20, "lr": STEP_SIZES.get(kind, 0.1)},
        "algorithm": {"name": method, **options},
        "newcomers": {"clients": 20, "samples_per_client": samples},
    }


def by_labels(run: Run, _: Federation, newcomers: Federation) -> dict[int, int]:
    """Assign each newcomer to a leaf by its updates or training losses."""
    return {each.client: each.node for each in Arrival.of(run, newcomers).assignments()}


def by_descriptors(run: Run, members: Federation, newcomers: Federation) -> dict[int, int]:
    """Assign each newcomer to the leaf whose members' mean descriptor is nearest."""
    found = Arrival.of(run, newcomers).without_labels(Arrival.of(run, members))
    return {each.client: each.node for each in found}


def by_entropy(run: Run, _: Federation, newcomers: Federation) -> dict[int, int]:
    """Assign each newcomer to the leaf whose predictions have the lowest mean entropy."""
    arrival = Arrival.of(run, newcomers)
    leaves = [leaf for leaf in arrival.tree.leaves if leaf.members]
    module, layout = arrival.backend.workers.module, arrival.backend.workers.layout  # pyright: ignore[reportAttributeAccessIssue]
    entropies: dict[int, dict[int, float]] = {client: {} for client in newcomers.ids}
    for leaf in leaves:
        layout.load(leaf.params, module.eval())
        for client in newcomers.ids:
            with torch.inference_mode():
                outputs = module(newcomers.examples(client, "train")[0])
            entropies[client][leaf.id] = float(
                torch.distributions.Categorical(logits=outputs).entropy().mean()
            )
    return {client: min(mine, key=mine.__getitem__) for client, mine in entropies.items()}


WAYS = {"labels": by_labels, "descriptors": by_descriptors, "entropy": by_entropy}


def share_right(
    run: Run, members: Federation, newcomers: Federation, found: Mapping[int, int]
) -> float | None:
    """Return the share of newcomers that are assigned to a leaf of their true cluster.

    A leaf belongs to the true cluster of most of its members. Newcomers whose true cluster has no
    leaf are not counted; the result is None if there are no others.
    """
    truth, theirs = members.true_clusters or {}, newcomers.true_clusters or {}
    majority = {
        leaf.id: Counter(truth[c] for c in leaf.members) for leaf in run.tree.leaves if leaf.members
    }
    of_leaf = {leaf: counts.most_common(1)[0][0] for leaf, counts in majority.items()}
    known = [client for client in found if theirs[client] in of_leaf.values()]
    return sum(of_leaf[found[c]] == theirs[c] for c in known) / len(known) if known else None


def measured(kind: str, method: str, seed: int, data_dir: Path | None) -> dict[str, Any]:
    """Run a method; return the shares for each number of images and each way of assignment."""
    run: Run | None = None
    shares: dict[str, dict[str, float | None]] = {}
    for samples in SAMPLES:
        config = check_config(configured(kind, method, seed, samples))
        members = config.federation(data_dir)
        run = run or config.run(members, progress=False)
        newcomers = members.newcomers
        assert newcomers is not None
        ways = {
            name: share_right(run, members, newcomers, way(run, members, newcomers))
            for name, way in WAYS.items()
        }
        shares[str(samples)] = {
            name: None if share is None else round(share, 3) for name, share in ways.items()
        }
    assert run is not None
    found = run.summary["clusters"]
    ari = None if found["ari"] is None else round(found["ari"], 3)
    line = {"kind": kind, "method": method, "seed": seed, "clusters": found["found"], "ari": ari}
    return {**line, "right": shares}


def written(lines: Sequence[Mapping[str, Any]]) -> None:
    """Add lines to the file of results, in order; they replace earlier lines of the same runs."""
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    of_run = {(each["kind"], each["method"], each["seed"]): each for each in [*before, *lines]}
    order = [(kind, method) for kind in KINDS for method in METHODS]
    rows = sorted(
        of_run.values(),
        key=lambda each: (order.index((each["kind"], each["method"])), each["seed"]),
    )
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=[*METHODS],
        default=[*METHODS],
        help="methods to run (default: all)",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=[*KINDS],
        default=[*KINDS],
        help="differences between clients (default: all)",
    )
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        for kind in arguments.kinds:
            for method in arguments.methods:
                line = measured(kind, method, seed, arguments.data_dir)
                print(json.dumps(line), flush=True)
                written([line])


if __name__ == "__main__":
    main()
