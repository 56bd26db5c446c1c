"""The ternary cosine similarity of FedGroup (Duan et al. 2020, Algorithm 3), and k-means++ on it.

The paper's later version calls it EDC, for a Euclidean distance of decomposed cosine similarities.
"""

from __future__ import annotations

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering.similarity import Labels, numbered
from fedclade.core import ConfigError, array_problem, checked, require, shown

Points = NDArray[np.float64]

DECIMALS = 5
"""Of a cosine: what lies behind is the rounding of float32 updates, and depends on the engine that trained them."""

LARGEST_DECOMPOSED = 500
"""Updates whose Gram matrix is decomposed as a whole; of more, only the directions that are asked for."""


def ternary_similarity(signatures: Tensor, directions: int = 3, others: Tensor | None = None) -> Points:
    """Return how far each update points along the base directions of all, M of eq. 9.

    The base directions v_1, v_2, ... are the first left singular vectors of ΔWᵀ (Algorithm 3, line 7). Their products
    with the updates follow from the Gram matrix ΔW·ΔWᵀ = U·S²·Uᵀ alone, as ΔW·V = U·S: the wide matrix need not be
    decomposed. As printed, eq. 7 divides only the first product by the norm of the update; here all are divided, as
    eq. 8 takes them for cosines.

    Parameters
    ----------
    signatures
        Updates ΔW, ``[n, D]``.
    directions
        Number k of base directions: 3 in the paper, as its name says.
    others
        Updates ``[m, D]`` that are compared with the base directions in the place of ``signatures``.

    Returns
    -------
    numpy.ndarray
        ζ of eq. 8, ``[n, k]`` or ``[m, k]`` in [0, 1]: 0 along a base direction, ½ at right angles to it, 1 against it.
        An update of zeros is at right angles to all, and all are to directions beyond the rank of ΔW.
    """
    gram = (signatures @ signatures.T).to("cpu", torch.float64).numpy()
    squares, left = _largest_eigenpairs((gram + gram.T) / 2, directions)
    rounding = len(gram) * torch.finfo(signatures.dtype).eps * max(squares[0], 0.0)
    lengths = np.sqrt(np.where(squares > rounding, squares, 0.0))
    products, norms = left * lengths, np.sqrt(np.diagonal(gram))[:, None]
    cosines = np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)
    # A singular vector may point either way: let the largest cosine be positive.
    signs = np.where(cosines.max(0) >= -cosines.min(0), 1.0, -1.0)
    if others is not None:  # ΔW'·V = ΔW'·ΔWᵀ·U·S⁻¹
        across = (others @ signatures.T).to("cpu", torch.float64).numpy() @ left
        products = np.divide(across, lengths, out=np.zeros_like(across), where=lengths > 0)
        norms = torch.linalg.vector_norm(others, dim=1, dtype=torch.float64).cpu().numpy()[:, None]
        cosines = np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)
    cosines *= signs
    missing = np.zeros((len(cosines), directions - cosines.shape[1]))
    return (1.0 - np.round(np.hstack([cosines, missing]), DECIMALS)) / 2.0


def _largest_eigenpairs(gram: Points, count: int) -> tuple[Points, Points]:
    """Return the largest eigenvalues of a symmetric matrix, falling, and their vectors ``[n, count]``."""
    if len(gram) <= LARGEST_DECOMPOSED or count >= len(gram) or not gram.any():
        values, vectors = np.linalg.eigh(gram)
    else:
        # Where it starts does not show in what comes out; ones would be at right angles to updates that cancel.
        start = np.random.default_rng(0).standard_normal(len(gram))
        values, vectors = scipy.sparse.linalg.eigsh(gram, count, v0=start)
    falling = np.argsort(values)[::-1][:count]
    return values[falling], vectors[:, falling]


@checked("points")
def k_means(points: Points, n_clusters: int, draw: np.random.Generator) -> Labels:
    """Cluster points by k-means++ (Arthur and Vassilvitskii 2007; FedGroup Algorithm 4, line 3), the best of 50 runs.

    Parameters
    ----------
    points
        ``[n, k]``. Their order changes nothing but the numbers of the clusters.
    n_clusters
        m. Of fewer distinct points each makes a cluster of its own, and the last clusters stay empty.
    draw
        Draws the first centers.

    Returns
    -------
    numpy.ndarray
        The cluster of each point, ``[n]`` in 0 to m − 1, numbered as they first appear.

    Raises
    ------
    ConfigError
        If the points are not finite numbers ``[n, k]`` of at least one point, or there is to be no cluster.
    """
    points = _as_points(points)
    require(("n_clusters", n_clusters, n_clusters >= 1, "at least 1"))
    from sklearn.cluster import KMeans  # slow to import: only where used

    distinct, place, counts = np.unique(points, axis=0, return_inverse=True, return_counts=True)
    n_clusters, seed = min(n_clusters, len(distinct)), int(draw.integers(2**32))
    means = KMeans(n_clusters, n_init=50, random_state=seed)  # pyright: ignore[reportArgumentType]
    return numbered(means.fit_predict(distinct, sample_weight=counts)[place.ravel()])


def _as_points(points: Points) -> Points:
    """Return points as an array ``[n, k]`` of finite numbers; a ConfigError if they are something else."""
    if problem := array_problem(points):
        raise ConfigError(f"points should be an array of numbers [n, k]: {problem}")
    try:
        array = np.asarray(points)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"points should be an array of numbers [n, k], got {shown(points)}: {error}") from None
    if array.dtype.kind not in "fiu" or array.ndim != 2 or 0 in array.shape:
        raise ConfigError(
            f"points should be an array of numbers [n, k], of at least 1 point, got {array.dtype} of shape "
            f"{list(array.shape)}"
        )
    finite = np.isfinite(array).all(axis=1)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise ConfigError(f"points should be finite numbers, got {shown(array[row])} at place {row}")
    return array
