"""Measure what a sketch of an update reveals (``[signature] kind = "projected"``).

A sketch is a random projection of the update. The attacker knows the model and the seed of the
sketch, which determines its signs and buckets; both are public in a run. Three things are
reconstructed, from sketches of several lengths and, for comparison, from the whole update:

- *The update*: the shortest vector with this sketch; and the vector that fits best among
  combinations of principal components of other updates. The attacker makes these with clients of
  its own, with images that no client has.
- *The shares of labels* of clients with 40 images in skewed shares, by a ridge regression that is
  trained on the attacker's own clients.
- *The image* of a client that has one image: the image and the label whose gradient has this sketch
  (gradient matching of Zhu, Liu, Han 2019, applied to sketches). The image is a combination of
  principal components of other images.

    python studies/audit_sketches.py --data-dir DIR --pictures sketches.png
    python studies/audit_sketches.py --table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import jsonl
import numpy as np
import torch
from audit_permutation import LABELS, shares_of
from rcfl import LOCAL, as_table
from rich.console import Console
from sklearn.linear_model import RidgeCV
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fedclade import FedAvg, LocalTraining, load_federation
from fedclade.channel import Signature
from fedclade.core import Layout
from fedclade.core.queries import Round
from fedclade.data import Federation
from fedclade.models import build_model
from fedclade.runs.backend import Backend

Sketcher = Callable[[Tensor], Tensor]

DIMS = (256, 1024, 4096, 0)
"""Lengths of sketches; 0 stands for the whole update."""

MODELS = ("mclr", "mlp")
PARTS = ("labels", "image")
OWN_CLIENTS, IMAGES, COMPONENTS = 200, 40, 100
ALONE, STEPS, FIRST_STEPS = 6, 250, 20
"""Number of clients with one image; steps of the search for the image; and number of steps after
which the search continues only with the label that fits best."""

FACES = 300
"""Number of principal components of images."""


def clients_of(
    seed: int, images: int, clients: int, data_dir: Path | None, *, own: bool = False
) -> Federation:
    """Return clients with training images of MNIST, or the attacker's own with test images."""
    skewed = {"partition": "dirichlet"} if images > 1 else {}
    dealt = {
        "clients": clients,
        "samples_per_client": images,
        "test_samples": 10,
        "seed": seed,
        **skewed,
    }
    pool = load_federation("mnist", clients=1, samples_per_client=1, data_dir=data_dir).pool
    if own:
        pool = replace(pool, train=pool.test, test=pool.train[:1000])
    return load_federation(pool, **dealt)


def module_of(model: str, seed: int, federation: Federation) -> nn.Module:
    """Return the initial model, which is public."""
    return build_model(model, input_shape=federation.pool.input_shape, outputs=LABELS, seed=seed)


def sketch_of(dim: int, seed: int, module: nn.Module) -> Sketcher:
    """Return the function that computes fedclade's sketch; if ``dim`` is 0, the identity."""
    sketch = Signature(kind="projected", dim=dim).sketch(seed, Layout.of(module)) if dim else None
    return (lambda vectors: vectors) if sketch is None else sketch.apply


def first_updates(
    federation: Federation, module: nn.Module, seed: int, local: LocalTraining
) -> Tensor:
    """Return the updates of the first round, ``[n, D]``."""
    world = Backend.simulated_by(federation, module, FedAvg(), seed=seed, engine="loop")
    ids = world.clients.ids
    updates = world.clients.train(ids, world.initial[None], [0] * len(ids), Round(1, local, seed))
    return updates.required_deltas.double()


def shortest(sketch: Sketcher, seen: Tensor, size: int) -> Tensor:
    """Return the shortest vector ``[n, D]`` with a sketch ``[n, R]``: Sᵀ(SSᵀ)⁻¹y, and SSᵀ is diagonal."""

    def transposed(vector: Tensor) -> Tensor:
        zero = torch.zeros(size, dtype=seen.dtype, requires_grad=True)
        return torch.autograd.grad((sketch(zero) * vector).sum(), zero)[0]

    in_buckets = sketch(transposed(torch.ones_like(seen[0])))  # number of entries in each bucket
    return torch.stack([transposed(vector / in_buckets.clamp(min=1)) for vector in seen])


def among(sketch: Sketcher, seen: Tensor, own: Tensor) -> Tensor:
    """Return combinations of principal components of ``own`` that fit the sketches ``seen``.

    Parameters
    ----------
    sketch
        The function that computes sketches.
    seen
        Sketches, ``[n, R]``.
    own
        Updates of the attacker's own clients, ``[m, D]``.

    Returns
    -------
    Tensor
        Vectors ``[n, D]``.
    """
    middle = own.mean(0)
    directions = torch.linalg.svd(own - middle, full_matrices=False).Vh[:COMPONENTS]
    columns, wanted = sketch(directions), seen - sketch(middle)
    weight = 1e-3 * columns.square().sum(1).mean()
    gram = columns @ columns.T + weight * torch.eye(len(columns), dtype=columns.dtype)
    return middle + torch.linalg.solve(gram, columns @ wanted.T).T @ directions


@cache
def of_labels(
    model: str, seed: int, data_dir: Path | None
) -> tuple[nn.Module, list[Tensor], list[Any]]:
    """Return the model; and for the clients and the attacker's own, updates and label shares."""
    sides = [
        clients_of(seed, IMAGES, 20, data_dir),
        clients_of(1000 + seed, IMAGES, OWN_CLIENTS, data_dir, own=True),
    ]
    module = module_of(model, seed, sides[0])
    updates = [first_updates(side, module, seed, LOCAL) for side in sides]
    return module, updates, [shares_of(side) for side in sides]


def labels(model: str, dim: int, seed: int, *, data_dir: Path | None) -> dict[str, Any]:
    """Reconstruct the updates and the label shares of clients with 40 images; return the errors."""
    module, (updates, own), (right, known) = of_labels(model, seed, data_dir)
    sketch = sketch_of(dim, seed, module)
    seen = sketch(updates)

    def cosine(found: Tensor) -> float:
        return float(functional.cosine_similarity(found, updates, dim=1).mean())

    own_sketches = sketch(own)
    scale = float(own_sketches.std())
    fitted = RidgeCV(np.logspace(-3, 6, 19)).fit((own_sketches / scale).numpy(), known)
    told = np.clip(fitted.predict((seen / scale).numpy()), 1e-9, None)
    told /= told.sum(1, keepdims=True)
    guess = known.mean(0, keepdims=True)
    return {
        "cosine": 1.0 if dim == 0 else cosine(shortest(sketch, seen, updates.shape[1])),
        "cosine_by_components": cosine(among(sketch, seen, own)),
        "cosine_by_mean": cosine(own.mean(0).expand_as(updates)),
        "misplaced": float(np.abs(told - right).sum(1).mean() / 2),
        "misplaced_by_guess": float(np.abs(guess - right).sum(1).mean() / 2),
        "commonest": float((told.argmax(1) == right.argmax(1)).mean()),
    }


def search(
    module: nn.Module, sketch: Sketcher, seen: Tensor, lr: float, base: Tensor, middle: Tensor
) -> tuple[Tensor, Tensor]:
    """Search for images and labels whose training steps have given sketches.

    Parameters
    ----------
    module
        The initial model.
    sketch
        The function that computes sketches.
    seen
        Sketches, ``[n, R]``.
    lr
        Step size of the clients.
    base, middle
        Scaled principal components ``[FACES, 784]`` and mean ``[784]`` of other images.

    Returns
    -------
    tuple of Tensor
        Images ``[n, 784]`` and labels ``[n]``.
    """
    params = {name: p.detach() for name, p in module.named_parameters()}

    def step(image: Tensor, label: Tensor) -> Tensor:
        def loss(params: Mapping[str, Tensor]) -> Tensor:
            return functional.cross_entropy(
                functional_call(module, dict(params), image[None]), label[None]
            )

        return torch.cat([-lr * slope.flatten() for slope in grad(loss)(params).values()])

    def apart(z: Tensor, labels: Tensor, seen: Tensor) -> Tensor:
        differences = sketch(vmap(step)(middle + z @ base, labels)) - seen
        return differences.square().sum(1) / seen.square().sum(1) + 1e-5 * z.square().mean(1)

    def moved(z: Tensor, labels: Tensor, seen: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        z = z.clone().requires_grad_()
        optimizer = torch.optim.Adam([z], lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=0.002)
        far = torch.zeros(0)
        for _ in range(steps):
            optimizer.zero_grad()
            far = apart(z, labels, seen)
            far.sum().backward()
            optimizer.step()
            schedule.step()
        return z.detach(), far.detach()

    every = torch.arange(LABELS).repeat(len(seen))
    z, far = moved(
        torch.zeros(len(every), len(base)), every, seen.repeat_interleave(LABELS, 0), FIRST_STEPS
    )
    best = far.view(len(seen), LABELS).argmin(1)
    z, _ = moved(z.view(len(seen), LABELS, -1)[torch.arange(len(seen)), best], best, seen, STEPS)
    return middle + z @ base, best


def images_of(federation: Federation) -> tuple[Tensor, Tensor]:
    """Return all training images in the form of model inputs, ``[n, 784]``, and their labels."""
    held = np.concatenate([client.train for client in federation.clients])
    return federation.pool.inputs(held).flatten(1), federation.pool.y[torch.from_numpy(held)]


def decoded(
    model: str, dim: int, seed: int, data_dir: Path | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attack clients with one image each.

    Returns
    -------
    tuple of Tensor
        The true images, the reconstructed images, the true labels, and the reconstructed labels.
    """
    federation = clients_of(seed, 1, ALONE, data_dir)
    module, local = (
        module_of(model, seed, federation),
        LocalTraining(epochs=1, batch_size=1, lr=0.1),
    )
    (images, right), (others, _) = (
        images_of(federation),
        images_of(clients_of(1000 + seed, 50, 100, data_dir, own=True)),
    )
    sketch = sketch_of(dim, seed, module)
    middle = others.mean(0)
    factors = torch.linalg.svd(others - middle, full_matrices=False)
    base = (factors.S[:FACES, None] / len(others) ** 0.5) * factors.Vh[:FACES]
    seen = sketch(first_updates(federation, module, seed, local).float())
    found, told = search(module, sketch, seen, 0.1, base, middle)
    return images, found, right, told


def image(model: str, dim: int, seed: int, *, data_dir: Path | None) -> dict[str, Any]:
    """Reconstruct the images of clients with one image each; return the success.

    "explained" is the share of the image's variance that is reconstructed, and "label" the share of
    correct labels.
    """
    images, found, right, told = decoded(model, dim, seed, data_dir)
    explained = 1 - (images - found).square().sum(1) / (
        images - images.mean(1, keepdim=True)
    ).square().sum(1)
    return {"explained": float(explained.mean()), "label": float((right == told).double().mean())}


def work(part: str, model: str, dim: int, seed: int, *, data_dir: Path | None) -> dict[str, Any]:
    return {"labels": labels, "image": image}[part](model, dim, seed, data_dir=data_dir)


def picture(path: Path, seed: int, data_dir: Path | None) -> None:
    """Save a picture of true images and their reconstructions from each sketch, for each model."""
    from PIL import Image

    strips = []
    for model in MODELS:
        for dim in DIMS:
            images, found, _, _ = decoded(model, dim, seed, data_dir)
            strips += [images] * (dim == DIMS[0]) + [found]
    grid = torch.cat([torch.cat([each.view(28, 28) for each in strip], 1) for strip in strips])
    grey = ((grid * 0.3081 + 0.1307).clamp(0, 1) * 255).byte().numpy()
    Image.fromarray(grey).resize((3 * grey.shape[1], 3 * grey.shape[0]), 0).save(path)


def rows(lines: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield a row for each model and length of the sketch, with means over seeds."""
    keys = (
        "cosine",
        "cosine_by_components",
        "cosine_by_mean",
        "misplaced",
        "misplaced_by_guess",
        "commonest",
    )
    for model in MODELS:
        for dim in DIMS:
            runs = [line for line in lines if (line["model"], line["dim"]) == (model, dim)]
            cells = [
                [line[key] for line in runs if key in line] for key in (*keys, "explained", "label")
            ]
            if runs:
                yield [
                    model,
                    str(dim or "all"),
                    *(f"{mean(each):.2f}" if each else "" for each in cells),
                ]


def main() -> None:
    """Make missing runs, and print the table."""
    parser = jsonl.parser(__doc__, "audit_sketches.jsonl")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--parts",
        nargs="*",
        default=list(PARTS),
        choices=list(PARTS),
        help="parts of the study to run (default: all)",
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="start no run after this time (default: 5)"
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        help="file for a picture of the images of seed 0 and their reconstructions",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.table:
        cases = (
            (part, s, m, d)
            for s in range(given.seeds)
            for part in given.parts
            for m in MODELS
            for d in DIMS
        )
        jobs = (
            {"part": part, "model": model, "dim": dim, "seed": seed}
            for part, seed, model, dim in cases
        )
        jsonl.run_missing(given.out, jobs, partial(work, data_dir=given.data_dir), given.minutes)
    if given.pictures:
        picture(given.pictures, 0, given.data_dir)
    columns = (
        "model",
        "R",
        "cosine",
        "by components",
        "by mean",
        "wrong labels",
        "by a guess",
        "most frequent label",
    )
    table = as_table(
        "sketches", (*columns, "image variance", "image label"), list(rows(jsonl.read(given.out)))
    )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
