"""Measure membership inference: how well a client's deployed model reveals its training examples.

The runs are federations of 20 MNIST clients. In each run a client trains on a random half of its 80
audited images, and in addition on other images until it has the wanted number. Each run is attacked
in turn, with all other runs as its shadow runs. These have the same clients and images as the
attacked run, but train on other random halves of the audited images, with other seeds.

The attacker has the client's model, which all members of the client's cluster and the server have,
too; an audited image; and its label as the client sees it. From φ = log p_y − log(1 − p_y), where
p_y is the probability that the model gives the label (Carlini et al. 2022), it computes a score:

- ``loss``: φ itself;
- ``offline``: φ minus its mean over the shadow runs without the image;
- ``online``: the likelihood ratio of φ with and without the image, by two normal distributions that
  are estimated from the shadow runs (LiRA).

There are few shadow runs. Therefore each image has means of its own, but all images share the
variances. Intervals are bootstrap intervals over attacked runs.

    python studies/audit_membership.py --data-dir DIR --minutes 5     # repeat until all runs exist
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
    """Clients that share a model, and the noise on updates.

    ``shares`` is the number of clients in each cluster, or the name of a method. ``noise`` is the
    noise multiplier z, or None for updates that are neither clipped nor noisy.
    """

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
    """Return clients with their audited images, followed by images on which they always train."""
    clusters = {} if shift == "none" else {"shift": shift, "clusters": 4}
    held = AUDITED + max(0, images - AUDITED // 2)
    settings = {"clients": CLIENTS, "samples_per_client": held, "test_samples": 500, **clusters}
    return load_federation("mnist", seed=0, data_dir=data_dir, **settings)


def coins(run: int) -> NDArray[np.bool_]:
    """Return a mask ``[n, a]`` of the audited images on which each client trains in a run.

    Runs 2k and 2k + 1 have complementary masks, each with half of the images.
    """
    draw = np.random.default_rng([7, run // 2])
    order = np.argsort(draw.random((CLIENTS, AUDITED)), axis=1)
    return (order < AUDITED // 2) == (run % 2 == 0)


def trained_on(federation: Federation, run: int) -> Federation:
    """Return the clients with their training images of a run."""
    clients = [
        replace(
            client, train=np.concatenate([client.train[:AUDITED][held], client.train[AUDITED:]])
        )
        for client, held in zip(federation.clients, coins(run), strict=True)
    ]
    return replace(federation, clients=tuple(clients))


def algorithm_of(setting: Setting, federation: Federation) -> Algorithm:
    """Return the algorithm of a setting."""
    if isinstance(setting.shares, int):
        return Oracle(
            {client: place // setting.shares for place, client in enumerate(federation.ids)}
        )
    truth = federation.true_clusters or {}
    return {"fedavg": FedAvg(), "rcfl": ReplicatedCFL(), "oracle": Oracle(truth)}[setting.shares]


def confidences(federation: Federation, models: Sequence[torch.Tensor]) -> Floats:
    """Return φ of every client's audited images ``[n, a]``, by the client's model."""
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
    """Make a run; return φ of all audited images, accuracy, ε and the number of clusters."""
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
    """Return the scores of each attack in each attacked run: those of members and of other images.

    Parameters
    ----------
    phi
        φ of the audited images, ``[runs, n, a]``.
    inside
        Whether a client trained on an image, ``[runs, n, a]``.
    """
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
    # A run that is stored twice must not be a shadow run of itself.
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
        if len(runs) < 4:  # each image needs shadow runs with and without it
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
    """Return the table of all rows; rates are in percent."""
    columns = (
        "images",
        "setting",
        "clusters",
        "runs",
        "accuracy, %",
        "ε",
        "attack",
        "AUC",
        "members found at FPR 1 %",
        "at FPR 0.1 %",
    )
    return as_table("membership of single examples", columns, list(rows(lines)))


def main() -> None:
    """Make missing runs, and print the table."""
    parser = jsonl.parser(__doc__, "audit_membership.jsonl")
    parser.add_argument(
        "--settings",
        nargs="*",
        default=list(SETTINGS),
        choices=list(SETTINGS),
        help="settings to run (default: all)",
    )
    parser.add_argument(
        "--images",
        nargs="*",
        type=int,
        default=(40, 300),
        help="numbers of training images of a client (default: 40 300)",
    )
    parser.add_argument(
        "--runs", type=int, default=16, help="runs of each setting, an even number (default: 16)"
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="start no run after this time (default: 5)"
    )
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
