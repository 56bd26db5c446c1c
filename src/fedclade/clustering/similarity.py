"""How alike clients' updates are, how far apart, and what that says about the clusters behind them."""

from __future__ import annotations

from typing import Literal

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import ConfigError, array_problem, checked, require, shown, unknown

Similarity = NDArray[np.float64]

Labels = NDArray[np.int64]
"""The cluster of each of n clients, ``[n]``."""

Distances = NDArray[np.float64]
"""Of every two of m rows, ``[m(m-1)/2]``: 0 to 1, 0 to 2, ..., 1 to 2, ..., as SciPy's linkage takes them."""

METRICS = ("l1", "l2", "cosine")
"""Distances of updates that :func:`compute_distances` computes."""

COLUMNS = 256
"""Distances are summed up over so many columns at a time: as few fit into a processor's cache for all rows."""

ROUNDING = 1e-6
"""Of cosines in float32: a distance below it is none."""


def number_clusters(labels: Labels) -> Labels:
    """Give the clusters of ``[n]`` their numbers in the order in which they first appear."""
    _, first, place = np.unique(labels, return_index=True, return_inverse=True)
    return first.argsort().argsort()[place]


def are_signs(signatures: Tensor) -> bool:
    """Return whether signatures are signs, 1 or −1 each (:class:`~fedclade.channel.SignSketch`), and not numbers."""
    if signatures.numel() == 0 or not bool((signatures[..., :1].abs() == 1).all()):
        return False  # without a look at all entries of whole updates, which may be millions
    return bool((signatures.abs() == 1).all())


def convert_sign_cosines(agreements: Similarity) -> Similarity:
    """Return the cosines of updates, given those of their signs, in place.

    Of two updates at an angle φ a share φ/π of the signs differ, so that the cosine a of their signs is 1 − 2φ/π, and
    cos φ = sin(πa/2).
    """
    agreements *= np.pi / 2
    return np.sin(agreements, out=agreements)


def cosine_similarity(signatures: Tensor, *, signs: bool | None = None) -> Similarity:
    """Return the cosine similarity of every two rows, α of CFL's eq. 51 (or eq. 50, given gradients).

    Rows of signs, or with ``signs`` means of such rows, stand for the updates that they are of, whose cosine is
    estimated: see :func:`convert_sign_cosines`.

    One matrix product. The norms are the square roots of its diagonal, so that they carry the same rounding as the
    products that they divide. From signatures ``[n, R]`` to ``[n, n]`` float64 in [-1, 1], symmetric, ones on the
    diagonal. A row of zeros points nowhere: it is 0 to all others.
    """
    alpha = (signatures @ signatures.T).to("cpu", torch.float64).numpy()
    if are_signs(signatures) if signs is None else signs:
        alpha /= signatures.shape[1]
        alpha = convert_sign_cosines(alpha)
    norms = np.sqrt(np.diagonal(alpha))
    norms[norms == 0] = 1.0
    # In place, as of 10,000 clients every copy takes 0.8 GB.
    alpha /= norms[:, None]
    alpha /= norms
    alpha += alpha.T
    alpha /= 2
    np.clip(alpha, -1.0, 1.0, out=alpha)
    np.fill_diagonal(alpha, 1.0)
    return alpha


def compute_cosines(some: Tensor, others: Tensor) -> Similarity:
    """Return the cosine similarity of each row of ``[n, D]`` to each of ``[m, D]``: ``[n, m]`` float64 in [-1, 1].

    A row of zeros is 0 to all. Signs are treated as in :func:`cosine_similarity`.
    """
    if are_signs(some) and are_signs(others):
        agreements = (some @ others.to(some).T).to("cpu", torch.float64).numpy() / some.shape[1]
        return convert_sign_cosines(agreements)
    norms = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in (some, others)]
    products = (some @ others.to(some).T).double() / torch.outer(*(norm.clamp(min=1e-150) for norm in norms))
    return products.clamp(-1.0, 1.0).cpu().numpy()


def compute_distances(signatures: Tensor, metric: str) -> Distances:
    """Return the distance of every two rows of ``[m, R]``, condensed; equal rows have distance 0, exactly.

    ``l1`` is Σ|a − b|, ``l2`` √Σ(a − b)², both in parameter units, ``cosine`` 1 − α, in [0, 2]; raises ConfigError for
    another metric.
    """
    if metric not in METRICS:
        raise ConfigError(unknown("metric", metric, METRICS))
    if metric == "cosine":
        apart = scipy.spatial.distance.squareform(cosine_similarity(signatures), checks=False)
        np.subtract(1.0, apart, out=apart)
        apart[apart < ROUNDING] = 0.0
        return apart
    p = 1 if metric == "l1" else 2
    total = torch.zeros(len(signatures) * (len(signatures) - 1) // 2, dtype=torch.float64, device=signatures.device)
    for block in signatures.split(COLUMNS, dim=1):
        total += torch.pdist(block.contiguous(), p) ** p
    return total.pow_(1 / p).cpu().numpy()


# The ternary cosine similarity of FedGroup (Duan et al. 2020, Algorithm 3), and k-means++ on it.
#
# The paper's later version calls it EDC, for a Euclidean distance of decomposed cosine
# similarities.

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
    return number_clusters(means.fit_predict(distinct, sample_weight=counts)[place.ravel()])


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


# Principal angles between the subspaces in which clients' data lies.

Angles = NDArray[np.float64]


def compute_angles(vectors: Tensor, angle: Literal["smallest", "same_place"] = "smallest") -> Angles:
    """Return the angle between every two clients in degrees, ``[n, n]``, from their vectors ``[n, L, d, p]``.

    Vectors that both of them lack, which are zeros, do not count; those that one of them lacks are at 90°.
    """
    vectors = vectors.cpu().double()
    places = vectors.any(dim=2)  # [n, L, p]
    held = places[..., 0]
    degrees = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for i, mine in enumerate(vectors):
        products = mine.mT @ vectors
        if angle == "smallest":  # its cosine is the largest singular value of UᵀV
            each = _degrees(torch.linalg.matrix_norm(products, 2))
        else:
            there = places[i] | places
            of_places = _degrees(products.diagonal(dim1=-2, dim2=-1)) * there
            each = of_places.sum(dim=2) / there.sum(dim=2).clamp(min=1)
        counted = held[i] | held
        degrees[i] = (each * counted).sum(dim=1) / counted.sum(dim=1)
    return degrees.fill_diagonal_(0.0).numpy()


def compute_nearest_angles(vectors: Tensor) -> Angles:
    """Return the smallest angle between any vector of one client and any of another, in degrees, ``[n, n]``.

    This is the distance of the official code of PACFL (``calculating_adjacency``), without the signs of the vectors.

    Parameters
    ----------
    vectors
        ``[n, L, d, p]``: p unit vectors of each of L matrices of each client. A vector of zeros is missing.
    """
    side_by_side = vectors.cpu().double().transpose(1, 2).flatten(2)  # [n, d, L p]
    degrees = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for i, client_vectors in enumerate(side_by_side):
        cosines = client_vectors.mT @ side_by_side  # a missing vector has cosine 0, which never is the largest alone
        degrees[i] = _degrees(cosines.abs().amax(dim=(1, 2)))
    return degrees.fill_diagonal_(0.0).numpy()


def _degrees(cosines: Tensor) -> Tensor:
    return torch.rad2deg(cosines.abs().clamp(max=1.0).arccos())
