"""Who can tell from the model that a client is served with whether an example was trained on.

Federations of 20 MNIST clients, run again and again; in each run a client trains on a random half of its 80 audited
images, and on as many others as it takes. Every run is attacked in turn, the others are its shadows: so a shadow knows
all but the coins. The attacker has the model, as every member of the cluster and the server have, an image and its
label as the client sees it, and scores φ = log p_y − log(1 − p_y) (Carlini et al. 2022):

- ``loss``: φ itself;
- ``offline``: φ beside its mean over the shadows without the image;
- ``online``: the likelihood ratio of φ with and without the image, two Gaussians by the shadows (LiRA).

Of Gaussians the mean is the image's own and the variance one for all, as there are few shadows. Intervals are over
attacked runs, drawn with replacement.

    python studies/audit_membership.py --data-dir DIR --minutes 5     # and again, until all is run
    python studies/audit_membership.py --table
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jsonl
import numpy as np
import torch
from audit_scores import Floats, auc, interval, tpr_at
from numpy.typing import NDArray
from rcfl import LOCAL, as_table
from rich.console import Console
from rich.table import Table

from fedclade import DifferentialPrivacy, FedAvg, Oracle, ReplicatedCFL, load_federation, simulate
from fedclade.algorithms import Algorithm
from fedclade.data import Federation
from fedclade.models import build_model

Groups = list[tuple[Floats, Floats]]

CLIENTS, AUDITED, ROUNDS = 20, 80, 30
CLIP = 2.0


@dataclass(frozen=True)
class Setting:
    """Who shares a model, and the noise: clients of a cluster, or a method's name; z, or None for no clipping."""

    shares: int | str
    shift: str = "none"
    noise: float | None = None


SETTINGS: Mapping[str, Setting] = {
    **{f"{n} share a model": Setting(n) for n in (1, 2, 5, 10, 20)},
    **{
        f"{name}, 4 label swaps": Setting(name, "label_swap")
        for name in ("fedavg", "rcfl", "oracle")
    },
    **{
        f"{n} share, z = {z:g}": Setting(n, noise=z)
        for n in (5, 20)
        for z in (0.0, 0.01, 0.03, 0.1)
    },
}


@cache
def federation_of(shift: str, images: int, data_dir: Path | None) -> Federation:
    """Return clients with all images that they may train on: those audited, and those in every run."""
    clusters = {} if shift == "none" else {"shift": shift, "clusters": 4}
    held = AUDITED + max(0, images - AUDITED // 2)
    settings = {"clients": CLIENTS, "samples_per_client": held, "test_samples": 500, **clusters}
    return load_federation("mnist", seed=0, data_dir=data_dir, **settings)


def coins(run: int) -> NDArray[np.bool_]:
    """Return which audited images each client has in a run ``[n, a]``: half of them, and in the next the other half."""
    draw = np.random.default_rng([7, run // 2])
    order = np.argsort(draw.random((CLIENTS, AUDITED)), axis=1)
    return (order < AUDITED // 2) == (run % 2 == 0)


def trained_on(federation: Federation, run: int) -> Federation:
    """Return the clients with what they train on in a run."""
    clients = [
        replace(
            client, train=np.concatenate([client.train[:AUDITED][held], client.train[AUDITED:]])
        )
        for client, held in zip(federation.clients, coins(run), strict=True)
    ]
    return replace(federation, clients=tuple(clients))


def algorithm_of(setting: Setting, federation: Federation) -> Algorithm:
    """Return what trains."""
    if isinstance(setting.shares, int):
        return Oracle(
            {client: place // setting.shares for place, client in enumerate(federation.ids)}
        )
    truth = federation.true_clusters or {}
    return {"fedavg": FedAvg(), "rcfl": ReplicatedCFL(), "oracle": Oracle(truth)}[setting.shares]


def confidences(federation: Federation, models: Sequence[torch.Tensor]) -> Floats:
    """Return φ of every client's audited images ``[n, a]`` under the model that it is served with."""
    module = build_model(
        "mlp", input_shape=federation.pool.input_shape, outputs=federation.pool.outputs, seed=0
    )
    found: list[Floats] = []
    for client, model in zip(federation.clients, models, strict=True):
        torch.nn.utils.vector_to_parameters(model.float(), module.parameters())
        images = client.train[:AUDITED]
        labels = client.labels(federation.pool.y[torch.from_numpy(images)])
        with torch.no_grad():
            logits = module(federation.pool.inputs(images)).double()
        right = logits.gather(1, labels[:, None])
        others = logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
        found.append((right[:, 0] - others).numpy())
    return np.stack(found)


def work(setting: str, images: int, run: int, *, data_dir: Path | None) -> dict[str, Any]:
    """Train once, and return φ of all audited images, and the clients' accuracy."""
    chosen = SETTINGS[setting]
    everything = federation_of(chosen.shift, images, data_dir)
    federation = trained_on(everything, run)
    privacy = (
        None
        if chosen.noise is None
        else DifferentialPrivacy(clip_norm=CLIP, noise_multiplier=chosen.noise)
    )
    done = simulate(
        algorithm_of(chosen, federation),
        "mlp",
        federation,
        local=LOCAL,
        rounds=ROUNDS,
        seed=run,
        evaluate_every=ROUNDS,
        engine="stacked",
        privacy=privacy,
    )
    scores = confidences(everything, [done.tree.model_for(client) for client in federation.ids])
    spent = done.summary.get("privacy", {}).get("epsilon")
    clusters = done.summary["clusters"]["found"]
    return {
        **{"accuracy": done.summary["accuracy"]["mean"], "epsilon": spent, "clusters": clusters},
        "phi": scores.round(3).tolist(),
    }


def attacked(phi: Floats, inside: NDArray[np.bool_]) -> Mapping[str, Groups]:
    """Return each attack's scores of members and others, for each attacked run; φ and coins are ``[runs, n, a]``."""
    found: dict[str, Groups] = defaultdict(list)
    for target in range(len(phi)):
        others = np.arange(len(phi)) != target
        shadow, held = phi[others], inside[others]
        means = {
            side: np.nanmean(np.where(held == side, shadow, np.nan), axis=0)
            for side in (True, False)
        }
        variance = {
            side: np.mean(np.square(shadow - means[side])[held == side]) for side in (True, False)
        }
        likelihood = {
            s: -np.square(phi[target] - means[s]) / variance[s] - np.log(variance[s])
            for s in (True, False)
        }
        scores = {
            "loss": phi[target],
            "offline": phi[target] - means[False],
            "online": likelihood[True] - likelihood[False],
        }
        for name, each in scores.items():
            found[name].append((each[inside[target]], each[~inside[target]]))
    return found


def rows(lines: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield a row for each setting and attack."""
    by_case: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    # a run is no shadow of itself
    once = {(line["setting"], line["images"], line["run"]): line for line in lines}
    for line in once.values():
        by_case[line["setting"], line["images"]].append(line)
    for setting, images in sorted(
        by_case, key=lambda case: (case[1], list(SETTINGS).index(case[0]))
    ):
        runs = by_case[setting, images]
        phi, inside = (
            np.array([line["phi"] for line in runs]),
            np.stack([coins(line["run"]) for line in runs]),
        )
        if len(runs) < 4:  # an image needs shadows with and without it
            continue
        accuracy, epsilon = np.mean([line["accuracy"] for line in runs]), runs[0]["epsilon"]
        for attack, groups in attacked(phi, inside).items():
            cells = [
                interval(groups, score)
                for score in (auc, partial(tpr_at, fpr=0.01), partial(tpr_at, fpr=0.001))
            ]
            yield [
                *(
                    str(images),
                    setting,
                    f"{np.mean([line['clusters'] for line in runs]):.1f}",
                    str(len(runs)),
                ),
                *(f"{100 * accuracy:.1f}", "" if epsilon is None else f"{epsilon:,.0f}", attack),
                *(f"{value:.3f} ({low:.3f} to {high:.3f})" for value, low, high in cells[:1]),
                *(
                    f"{100 * value:.2f} ({100 * low:.2f} to {100 * high:.2f})"
                    for value, low, high in cells[1:]
                ),
            ]


def table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return all rows; rates in percent."""
    columns = (
        "images",
        "setting",
        "clusters",
        "runs",
        "accuracy, %",
        "ε",
        "attack",
        "AUC",
        "TPR at 1 %",
        "at 0.1 %",
    )
    return as_table("membership of single examples", columns, list(rows(lines)))


def main() -> None:
    """Run what is missing, and print the table."""
    parser = jsonl.parser(__doc__, "audit_membership.jsonl")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument(
        "--images", nargs="*", type=int, default=(40, 300), help="that a client trains on"
    )
    parser.add_argument("--runs", type=int, default=16, help="an even number")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no run after so many")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.table:
        cases = itertools.product(given.images, range(given.runs), given.settings)
        jobs = (
            {"setting": setting, "images": images, "run": run} for images, run, setting in cases
        )
        jsonl.run_missing(given.out, jobs, partial(work, data_dir=given.data_dir), given.minutes)
    Console(width=170).print(table(jsonl.read(given.out)))


if __name__ == "__main__":
    main()
