"""Pretrained word vectors, such as GloVe's, as the frozen first layer of a model of texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import DataError
from fedclade.data.pool import Pool


def with_vectors(pool: Pool, file: Path) -> Pool:
    """Return a pool of texts ``[N, T]`` with each token's vector in its place: float32 ``[N, T, d]``.

    A frozen embedding is the same for all clients and never changes, so it is looked up once here: it takes part in no
    step, no message and no mean. Padding, and words without a vector, are zeros. As in GloVe's files, each line of the
    file has a word and the numbers of its vector, split by spaces.
    """
    embedding = read_vectors(file, pool.vocabulary)
    return replace(pool, x=torch.from_numpy(embedding)[pool.x], vocabulary=())


def read_vectors(file: Path, vocabulary: tuple[str, ...]) -> NDArray[np.float32]:
    """Return the vectors of a vocabulary's words, ``[V, d]``; see :func:`with_vectors`."""
    place = {word: number for number, word in enumerate(vocabulary)}
    found: dict[int, NDArray[np.float32]] = {}
    width: int | None = None
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                word, *numbers = line.rstrip("\n").split(" ")
                if word in place:
                    found[place[word]] = np.asarray(numbers, dtype=np.float32)
                    width = width or len(numbers)
                    if len(numbers) != width or not np.isfinite(found[place[word]]).all():
                        raise DataError(
                            f"{file}, line {number}: {word!r} should have {width} finite numbers, got {len(numbers)}"
                        )
    except FileNotFoundError:
        raise DataError(f"no word vectors: expected {file}, with a word and its numbers in each line") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the word vectors in {file}: {error}") from error
    if width is None:
        raise DataError(f"{file} should have vectors of the {len(vocabulary)} words of the data, got none of them")
    embedding = np.zeros((len(vocabulary), width), dtype=np.float32)
    for row, vector in found.items():
        embedding[row] = vector
    return embedding
