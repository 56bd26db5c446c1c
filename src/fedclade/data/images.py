"""Loaders of image data sets (digits, mnist, cifar10, femnist) and of Synthetic(α, β).

Images are uint8 tensors ``[N, C, H, W]``: examples, channels, height, width.
"""

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
    """Generate Synthetic(α, β), in which each client has a linear model and inputs of its own.

    Each client is a natural owner of examples. There is no test split.

    Client ``k`` has ``50 + ⌊LogNormal(4, 2)⌋`` examples ``y = argmax(softmax(W_k x + b_k))`` with

    - ``W_k [10, 60], b_k [10] ~ N(u_k, 1)``, ``u_k ~ N(0, α)``, where α is meant to
      determine how far the clients' models differ;
    - ``x ~ N(v_k, Σ)``, ``Σ`` diagonal with ``Σ_jj = j^-1.2``, ``v_k [60] ~ N(B_k, 1)``, ``B_k ~
      N(0, β)``, where β determines how far the clients' inputs differ.

    As the generator is defined, α changes no label: ``u_k`` adds the same number to all ten scores
    of an example. The clients' models differ nevertheless, since each client draws its own ``W_k``
    and ``b_k``.

    α and β are variances here, as the notation ``N(v_k, Σ)`` of the paper suggests. The authors'
    script uses α and β as standard deviations, which makes no difference for Synthetic(0, 0) and
    Synthetic(1, 1). For Synthetic(0.5, 0.5) of the script, set both to 0.25.

    Parameters
    ----------
    seed
        Seed of all draws. Client ``k`` does not depend on the number of clients.
    alpha, beta
        Variances α and β, at least 0.
    clients
        Number of natural owners to generate.
    max_samples
        Largest number of examples of a client, since the log-normal distribution can yield hundreds
        of thousands; None for no limit, as in the authors' generator.
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
    """Draw the inputs and labels of one client of Synthetic(α, β); see :func:`load_synthetic`."""
    samples = 50 + int(draw.lognormal(4, 2))
    if max_samples is not None:
        samples = min(samples, max_samples)
    # The order of the draws determines the data, so it must not change.
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
    """Load the 1,797 handwritten digits of scikit-learn: 8×8 grey images, a fifth as test split.

    The images are cached, since importing scikit-learn takes two seconds in every process.
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
    """Load MNIST: 28×28 grey images of digits, 60,000 for training and 10,000 for testing."""
    arrays = _load_images("mnist", data_dir, (1, 28, 28), ("image", "label"), outputs=10)
    return Pool.of_arrays("mnist", arrays, arrays["y"], 10, mean=0.1307, std=0.3081)


def load_cifar10(data_dir: Path | None, _seed: int) -> Pool:
    """Load CIFAR-10: 32×32 colour photographs, 50,000 for training and 10,000 for testing."""
    arrays = _load_images("cifar10", data_dir, (3, 32, 32), ("img", "label"), outputs=10)
    return Pool.of_arrays("cifar10", arrays, arrays["y"], 10, mean=0.4734, std=0.2516)


def load_femnist(
    data_dir: Path | None, _seed: int, *, characters: Literal["all", "lowercase"] = "all"
) -> Pool:
    """Load FEMNIST: handwritten characters as 28×28 grey images, with the writer of each.

    The images come from parquet files of the Hugging Face Hub, or from LEAF's JSON files.
    ``characters = "lowercase"`` selects the 26 small letters, as FedProx and FedGroup do.

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
    if characters == "all":
        return pool
    return _choose_small_letters(pool)


def _choose_small_letters(pool: Pool) -> Pool:
    """Restrict FEMNIST to the 26 small letters, with labels 0 to 25."""
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
    """Load the images and labels of a data set from its tables, or from the cache.

    Parameters
    ----------
    name
        Name of the data set.
    data_dir
        Folder with the data; None for the Hugging Face Hub.
    shape
        Channels, height and width of an image.
    columns
        Names of the columns with image, label and, if known, owner.
    outputs
        Number of labels.

    Returns
    -------
    Arrays
        ``x`` and ``y``, the number ``train`` of training examples, and the owners ``natural`` if
        known. A data set with owners may have no test split: clients then hold out examples.
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
    """Decode the PNG or JPEG images of a table column to uint8 ``[n, C, H, W]``.

    Images are decoded in one thread, since a thread pool takes four times as long.
    """
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
                f"{where}: cannot decode column {column!r} in row {row}, which should be an image "
                f"file: {error}; replace the image, or leave the row out"
            ) from error
        if pixels.shape[:2] != tuple(size):
            raise DataError(
                f"{where}: images in column {column!r} should be {size[0]}×{size[1]} pixels, "
                f"got {pixels.shape[0]}×{pixels.shape[1]} in row {row}"
            )
        if channels == 1:
            images[row] = pixels
        else:
            images[row] = pixels.transpose(2, 0, 1)
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
            f"{where}: x should have 784 numbers from 0 to 1 for each image: {error}"
        ) from error
    return {
        "x": np.round(brightness * 255).astype(np.uint8),
        "y": to_labels([*train.y, *test.y], FEMNIST_LABELS, where, "y"),
        "train": np.asarray(len(train.y)),
        "natural": np.asarray([*train.users, *test.users], dtype=np.str_),
    }
