"""Image sources: digits, mnist, cifar10 and femnist as uint8 ``[N, C, H, W]``."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import DataError, Indices, import_extra, require, rng
from fedclade.data.arrays import Arrays, load_cached, stamp_files
from fedclade.data.pool import Pool
from fedclade.data.tables import LeafFiles, find_leaf, open_tables, read_leaf, to_labels

# Synthetic(α, β): clients with different models and inputs, as set by two parameters (Li et al.
# 2018, arXiv:1812.06127, 5.1).

FEATURES = 60
LABELS = 10


def load_synthetic(
    _data_dir: Path | None,
    seed: int,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 100,
    max_samples: int | None = None,
) -> Pool:
    """Return Synthetic(α, β): each client is a natural owner; there is no test split.

    Client ``k`` has ``50 + ⌊LogNormal(4, 2)⌋`` examples ``y = argmax(softmax(W_k x + b_k))`` with

    - ``W_k [10, 60], b_k [10] ~ N(u_k, 1)``, ``u_k ~ N(0, α)``, meant to say how far the clients'
      models differ;
    - ``x ~ N(v_k, Σ)``, ``Σ`` diagonal with ``Σ_jj = j^-1.2``, ``v_k [60] ~ N(B_k, 1)``, ``B_k ~
      N(0, β)``: β says how far their inputs differ.

    As the generator is defined, α changes no label: ``u_k`` adds the same number to all ten scores
    of an example. The clients' models differ all the same, since each draws its own ``W_k`` and
    ``b_k``.

    α and β are variances here, read as in the paper's ``N(v_k, Σ)``. The authors' script takes them
    as standard deviations: the same for Synthetic(0, 0) and Synthetic(1, 1); for their
    Synthetic(0.5, 0.5) give 0.25 twice.

    Parameters
    ----------
    seed
        Of all draws; client ``k`` is the same whatever the number of clients.
    alpha, beta
        Variances, at least 0.
    clients
        How many natural owners to make.
    max_samples
        Cut off the log-normal's long tail, which reaches into the hundreds of thousands; None, as
        in the generator, does not.
    """
    require(
        ("alpha", alpha, 0 <= alpha < math.inf, "at least 0"),
        ("beta", beta, 0 <= beta < math.inf, "at least 0"),
        ("clients", clients, clients >= 1, "at least 1"),
        ("max_samples", max_samples, max_samples is None or max_samples >= 2, "at least 2"),
    )
    draws = [
        _draw_client(rng.generator(seed, "synthetic", k), alpha, beta, max_samples)
        for k in range(clients)
    ]
    y = np.concatenate([labels for _, labels in draws])
    width = len(str(clients - 1))
    return Pool(
        name="synthetic",
        x=torch.from_numpy(np.concatenate([x for x, _ in draws])),
        y=torch.from_numpy(y),
        groups=y,
        train=np.arange(len(y)),
        test=np.arange(0),
        outputs=LABELS,
        natural=np.repeat(
            [f"client-{k:0{width}d}" for k in range(clients)], [len(labels) for _, labels in draws]
        ),
    )


def _draw_client(
    draw: np.random.Generator, alpha: float, beta: float, max_samples: int | None
) -> tuple[NDArray[np.float32], Indices]:
    """Draw the inputs and labels of one client."""
    samples = 50 + int(draw.lognormal(4, 2))
    if max_samples is not None:
        samples = min(samples, max_samples)
    # The order of the draws determines the data.
    u = draw.normal(0, math.sqrt(alpha))
    B = draw.normal(0, math.sqrt(beta))
    W = draw.normal(u, 1, (LABELS, FEATURES))
    b = draw.normal(u, 1, LABELS)
    v = draw.normal(B, 1, FEATURES)
    deviations = np.arange(1, FEATURES + 1) ** (-1.2 / 2)
    x = draw.normal(v, deviations, (samples, FEATURES))
    # Softmax is monotonic, so the argmax needs no softmax.
    return x.astype(np.float32), np.argmax(x @ W.T + b, axis=1)


FEMNIST_LABELS = 62  # ten digits, 26 capital and 26 small letters
SMALL_A = 36


def load_digits(_data_dir: Path | None, _seed: int) -> Pool:
    """Return the 1,797 handwritten digits of scikit-learn: 8×8, grey, a fifth as test split.

    They are cached, since importing scikit-learn takes two seconds of every process.
    """
    arrays = load_cached("digits", {"scikit-learn": version("scikit-learn")}, _build_digits)
    y = arrays["y"]
    return Pool(
        "digits",
        x=torch.from_numpy(arrays["x"]),
        y=torch.from_numpy(y),
        groups=y,
        train=arrays["train"],
        test=arrays["test"],
        outputs=10,
        mean=0.3053,
        std=0.3759,
    )


def _build_digits() -> Arrays:
    from sklearn.datasets import load_digits as bundled
    from sklearn.model_selection import train_test_split

    data: Any = bundled()
    # scikit-learn's grey levels are from 0 to 16
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)
    y = data.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(y)), test_size=0.2, stratify=y, random_state=0)
    return {"x": pixels[:, None], "y": y, "train": np.sort(train), "test": np.sort(test)}


def load_mnist(data_dir: Path | None, _seed: int) -> Pool:
    """Return MNIST: 60,000 + 10,000 digits, 28×28, grey."""
    arrays = _load_images("mnist", data_dir, (1, 28, 28), ("image", "label"), outputs=10)
    return Pool.of_arrays("mnist", arrays, arrays["y"], 10, mean=0.1307, std=0.3081)


def load_cifar10(data_dir: Path | None, _seed: int) -> Pool:
    """Return CIFAR-10: 50,000 + 10,000 photographs, 32×32, three colours."""
    arrays = _load_images("cifar10", data_dir, (3, 32, 32), ("img", "label"), outputs=10)
    return Pool.of_arrays("cifar10", arrays, arrays["y"], 10, mean=0.4734, std=0.2516)


def load_femnist(
    data_dir: Path | None, _seed: int, *, characters: Literal["all", "lowercase"] = "all"
) -> Pool:
    """Return FEMNIST by writer: characters, 28×28, grey, from the Hub's files or LEAF's JSON.

    ``characters = "lowercase"`` keeps the 26 small letters alone, as FedProx and FedGroup do.

    Source: Caldas et al. 2018.
    """
    leaf = find_leaf(data_dir, "femnist")
    if leaf:
        arrays = load_cached(
            "femnist", {"leaf": stamp_files(leaf.files)}, lambda: _read_femnist_leaf(leaf)
        )
    else:
        arrays = _load_images(
            "femnist",
            data_dir,
            (1, 28, 28),
            ("image", "character", "writer_id"),
            outputs=FEMNIST_LABELS,
        )
    natural = arrays["natural"]
    pool = Pool.of_arrays(
        "femnist", arrays, arrays["y"], FEMNIST_LABELS, natural=natural, mean=0.9637, std=0.1592
    )
    require(("characters", characters, characters in ("all", "lowercase"), "'all' or 'lowercase'"))
    return pool if characters == "all" else _choose_small_letters(pool)


def _choose_small_letters(pool: Pool) -> Pool:
    """Return the small letters of FEMNIST, with labels 0 to 25."""
    is_small = pool.groups >= SMALL_A
    y = (pool.groups - SMALL_A).clip(min=0)
    return replace(
        pool,
        y=torch.from_numpy(y),
        groups=y,
        train=pool.train[is_small[pool.train]],
        test=pool.test[is_small[pool.test]],
        outputs=FEMNIST_LABELS - SMALL_A,
    )


def _load_images(
    name: str,
    data_dir: Path | None,
    shape: tuple[int, int, int],
    columns: tuple[str, ...],
    outputs: int,
) -> Arrays:
    """Return the arrays ``x`` and ``y``, the number of training examples, and the owners.

    A source with owners may come without a test split: its clients hold back examples of their own.
    """
    tables = open_tables(name, data_dir)
    image, label, *owner = columns

    def build() -> Arrays:
        splits = ["train"]
        if not owner or tables.has("test"):
            splits.append("test")
        read = [(tables.where(split), tables.read(split, columns)) for split in splits]
        arrays: dict[str, NDArray[Any]] = {
            "x": np.concatenate(
                [_decode_images(part[image], shape, where, image) for where, part in read]
            ),
            "y": np.concatenate(
                [to_labels(part[label], outputs, where, label) for where, part in read]
            ),
            "train": np.asarray(len(read[0][1][label])),
        }
        if owner:
            arrays["natural"] = np.asarray(
                [str(who) for _, part in read for who in part[owner[0]]], dtype=np.str_
            )
        return arrays

    return load_cached(name, {"tables": tables.key, "columns": list(columns)}, build)


def _decode_images(
    cells: Sequence[Any], shape: tuple[int, int, int], where: str, column: str
) -> NDArray[np.uint8]:
    """Decode PNGs or JPEGs to ``[n, C, H, W]``, in one thread: a pool takes four times as long."""
    pillow = import_extra("PIL.Image", "pillow", "data", "decoding images")
    channels, *size = shape
    mode = "L" if channels == 1 else "RGB"
    images = np.empty((len(cells), *shape), dtype=np.uint8)
    for row, cell in enumerate(cells):
        try:
            with pillow.open(io.BytesIO(cell["bytes"])) as picture:
                pixels = np.asarray(picture.convert(mode))
        except (
            OSError,
            SyntaxError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:  # Pillow has no class for its own errors
            raise DataError(
                f"{where}: cannot decode column {column!r} in row {row}: {error}"
            ) from error
        if pixels.shape[:2] != tuple(size):
            raise DataError(
                f"{where}: images in column {column!r} should be {size[0]}×{size[1]} pixels, "
                f"got {pixels.shape[0]}×{pixels.shape[1]} in row {row}"
            )
        images[row] = pixels if channels == 1 else pixels.transpose(2, 0, 1)
    return images


def _read_femnist_leaf(leaf: LeafFiles) -> Arrays:
    train = read_leaf(leaf.train)
    test = read_leaf(leaf.test)
    where = f"the LEAF files in {leaf.train[0].parent}"
    x = [*train.x, *test.x]
    try:
        brightness = np.asarray(x, dtype=np.float32).reshape(len(x), 1, 28, 28)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: x should hold 784 numbers from 0 to 1 for each image: {error}"
        ) from error
    return {
        "x": np.round(brightness * 255).astype(np.uint8),
        "y": to_labels([*train.y, *test.y], FEMNIST_LABELS, where, "y"),
        "train": np.asarray(len(train.y)),
        "natural": np.asarray([*train.users, *test.users], dtype=np.str_),
    }
