"""Similarities, distances and angles of clients' updates, and k-means clustering of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from fedclade.core import ConfigError, array_problem, checked, require, shown, unknown

if TYPE_CHECKING:
    from torch import Tensor

Similarity = NDArray[np.float64]

Labels = NDArray[np.int64]
"""The cluster of each of n clients, ``[n]``."""

Distances = NDArray[np.float64]
"""Distances of all pairs of m rows, ``[m(m-1)/2]``, in SciPy's condensed order.

These are the distances of row 0 to rows 1, 2, ..., then of row 1 to rows 2, 3, ..., and so on.
"""

METRICS = ("l1", "l2", "cosine")
"""Names of the distances of updates that :func:`compute_distances` computes."""

COLUMNS = 256
"""Number of columns whose distances are added up at a time: they fit into a cache."""

ROUNDING = 1e-6
"""Cosine distance below which two float32 rows are equal up to rounding."""


def number_clusters(labels: Labels) -> Labels:
    """Renumber the clusters of n clients from 0, in the order in which clusters first appear."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return first.argsort().argsort()[inverse]


def are_signs(signatures: Tensor) -> bool:
    """Return whether all entries of signatures are 1 or −1.

    The sketch :class:`~fedclade.channel.SignSketch` makes such signatures.
    """
    # Look at the first column only, where possible: whole updates may have millions of entries.
    if signatures.numel() == 0 or not bool((signatures[..., :1].abs() == 1).all()):
        return False
    return bool((signatures.abs() == 1).all())


def convert_sign_cosines(agreements: Similarity) -> Similarity:
    """Convert cosines of signs into estimates of the cosines of the updates, in place.

    If two updates have the angle φ, a share φ/π of their signs differ. The cosine of their signs is
    then a = 1 − 2φ/π, so cos φ = sin(πa/2).
    """
    agreements *= np.pi / 2
    return np.sin(agreements, out=agreements)


def cosine_similarity(signatures: Tensor, *, signs: bool | None = None) -> Similarity:
    """Compute the cosine similarity of all pairs of clients from their signatures.

    This is α of CFL's eq. 51, or of eq. 50 if the rows are gradients. The inner products are one
    matrix product. The norms are the square roots of its diagonal, so that norms have the same
    rounding as the inner products.

    Parameters
    ----------
    signatures
        Signatures (updates, or sketches of updates) of n clients, ``[n, R]``. A row of zeros has no
        direction; its similarity to all other rows is 0.
    signs
        Whether the rows are signs of updates, or means of such rows; the cosines of the updates are
        then estimated (:func:`convert_sign_cosines`). By default :func:`are_signs` decides.

    Returns
    -------
    numpy.ndarray
        Similarities, ``[n, n]``, float64 in [-1, 1], symmetric, with ones on the diagonal.
    """
    alpha = (signatures @ signatures.T).to("cpu", torch.float64).numpy()
    if signs is None:
        signs = are_signs(signatures)
    if signs:
        alpha /= signatures.shape[1]
        alpha = convert_sign_cosines(alpha)
    norms = np.sqrt(np.diagonal(alpha))
    norms[norms == 0] = 1.0
    # All operations are in place: a copy takes 0.8 GB for 10,000 clients.
    alpha /= norms[:, None]
    alpha /= norms
    alpha += alpha.T
    alpha /= 2
    np.clip(alpha, -1.0, 1.0, out=alpha)
    np.fill_diagonal(alpha, 1.0)
    return alpha


def compute_cosines(some: Tensor, others: Tensor) -> Similarity:
    """Compute the cosine similarity of each row of one matrix to each row of another.

    Parameters
    ----------
    some, others
        The matrices, ``[n, D]`` and ``[m, D]``. A row of zeros has similarity 0 to all rows. If
        both matrices contain signs, the cosines of the updates are estimated as in
        :func:`cosine_similarity`.

    Returns
    -------
    numpy.ndarray
        Similarities, ``[n, m]``, float64 in [-1, 1].
    """
    products = some @ others.to(some).T
    if are_signs(some) and are_signs(others):
        agreements = products.to("cpu", torch.float64).numpy() / some.shape[1]
        return convert_sign_cosines(agreements)
    some_norms = torch.linalg.vector_norm(some, dim=1, dtype=torch.float64)
    other_norms = torch.linalg.vector_norm(others, dim=1, dtype=torch.float64)
    norms = torch.outer(some_norms.clamp(min=1e-150), other_norms.clamp(min=1e-150))
    cosines = products.double() / norms
    return cosines.clamp(-1.0, 1.0).cpu().numpy()


def compute_distances(signatures: Tensor, metric: str) -> Distances:
    """Compute the distances of all pairs of clients from their signatures.

    The distance of equal signatures is exactly 0.

    Parameters
    ----------
    signatures
        Signatures (updates, or sketches of updates) of m clients, ``[m, R]``.
    metric
        ``l1`` is Σ|a − b| and ``l2`` is √Σ(a − b)², both in parameter units; ``cosine`` is 1 − α,
        in [0, 2].

    Returns
    -------
    numpy.ndarray
        Distances in SciPy's condensed form, ``[m(m-1)/2]``, float64.

    Raises
    ------
    ConfigError
        If the metric is unknown.
    """
    if metric not in METRICS:
        raise ConfigError(unknown("metric", metric, METRICS))
    if metric == "cosine":
        alpha = cosine_similarity(signatures)
        distances = scipy.spatial.distance.squareform(alpha, checks=False)
        np.subtract(1.0, distances, out=distances)
        distances[distances < ROUNDING] = 0.0
        return distances
    p = 1 if metric == "l1" else 2
    m = len(signatures)
    total = torch.zeros(m * (m - 1) // 2, dtype=torch.float64, device=signatures.device)
    for columns in signatures.split(COLUMNS, dim=1):
        total += torch.pdist(columns.contiguous(), p) ** p
    return total.pow_(1 / p).cpu().numpy()


# The ternary cosine similarity of FedGroup (Duan et al. 2020, Algorithm 3), and k-means++ on it.
#
# The paper's later version calls it EDC, for a Euclidean distance of decomposed cosine
# similarities.

Points = NDArray[np.float64]

DECIMALS = 5
"""Number of decimals of a cosine.

Further decimals depend on the rounding of float32 updates, and so on the engine that trained them.
"""

LARGEST_DECOMPOSED = 500
"""Largest number of updates for which the whole Gram matrix is decomposed.

For more updates, only the requested directions are computed.
"""


def ternary_similarity(
    signatures: Tensor, directions: int = 3, others: Tensor | None = None
) -> Points:
    """Compute the ternary cosine similarity of FedGroup (M of eq. 9).

    It describes each update by its distances from a few base directions of all updates.

    The base directions v_1, v_2, ... are the first left singular vectors of ΔWᵀ (Algorithm 3,
    line 7). They are the columns of V in the singular value decomposition ΔW = U·S·Vᵀ. Their
    products with the updates, ΔW·V = U·S, follow from the eigenvectors and eigenvalues of the small
    Gram matrix ΔW·ΔWᵀ = U·S²·Uᵀ, so the wide matrix ΔW need not be decomposed. As printed, eq. 7
    divides only the first product by the norm of the update. Here all products are divided, because
    eq. 8 uses all of them as cosines.

    Parameters
    ----------
    signatures
        Updates ΔW, ``[n, D]``.
    directions
        Number k of base directions: 3 in the paper, which gives the method its name.
    others
        Updates ``[m, D]`` that are compared with the base directions instead of ``signatures``.

    Returns
    -------
    numpy.ndarray
        ζ of eq. 8, ``[n, k]`` or ``[m, k]`` in [0, 1]: 0 for an update along a base direction, ½
        for an update at right angles to it, 1 for an update against it. For an update of zeros all
        entries are ½. If k is larger than the rank of ΔW, the entries of the surplus directions are
        ½ for all updates.
    """
    gram = (signatures @ signatures.T).to("cpu", torch.float64).numpy()
    squares, left = _find_largest_eigenpairs((gram + gram.T) / 2, directions)
    # Eigenvalues below the rounding error belong to directions beyond the rank.
    rounding = len(gram) * torch.finfo(signatures.dtype).eps * max(squares[0], 0.0)
    lengths = np.sqrt(np.where(squares > rounding, squares, 0.0))
    norms = np.sqrt(np.diagonal(gram))[:, None]
    cosines = _divide_or_zero(left * lengths, norms)
    # The sign of a singular vector is arbitrary: choose it so that the largest cosine is positive.
    signs = np.where(cosines.max(0) >= -cosines.min(0), 1.0, -1.0)
    if others is not None:  # ΔW'·V = ΔW'·ΔWᵀ·U·S⁻¹
        across = (others @ signatures.T).to("cpu", torch.float64).numpy() @ left
        other_norms = torch.linalg.vector_norm(others, dim=1, dtype=torch.float64)
        products = _divide_or_zero(across, lengths)
        cosines = _divide_or_zero(products, other_norms.cpu().numpy()[:, None])
    cosines *= signs
    missing = np.zeros((len(cosines), directions - cosines.shape[1]))
    return (1.0 - np.round(np.hstack([cosines, missing]), DECIMALS)) / 2.0


def _divide_or_zero(numerators: Points, denominators: Points) -> Points:
    """Divide arrays entry by entry; the result is 0 where the denominator is 0."""
    zeros = np.zeros_like(numerators)
    return np.divide(numerators, denominators, out=zeros, where=denominators > 0)


def _find_largest_eigenpairs(gram: Points, count: int) -> tuple[Points, Points]:
    """Return the largest eigenvalues of a symmetric matrix, and their eigenvectors.

    Returns
    -------
    tuple of numpy.ndarray
        Eigenvalues in descending order, ``[count]``, and eigenvectors, ``[n, count]``.
    """
    if len(gram) <= LARGEST_DECOMPOSED or count >= len(gram) or not gram.any():
        values, vectors = np.linalg.eigh(gram)
    else:
        # The start is fixed, so that results are reproducible. A vector of ones would not do: it is
        # at right angles to all eigenvectors if the updates sum to zero.
        start = np.random.default_rng(0).standard_normal(len(gram))
        values, vectors = scipy.sparse.linalg.eigsh(gram, count, v0=start)
    falling = np.argsort(values)[::-1][:count]
    return values[falling], vectors[:, falling]


@checked("points")
def k_means(points: Points, n_clusters: int, draw: np.random.Generator) -> Labels:
    """Cluster points by the best of 50 runs of k-means++.

    The source is Arthur and Vassilvitskii (2007); FedGroup uses it in Algorithm 4, line 3.

    Parameters
    ----------
    points
        Points, ``[n, k]``. Their order affects only the numbers of the clusters.
    n_clusters
        Number m of clusters. If there are fewer distinct points, each distinct point is a cluster,
        and the last clusters are empty.
    draw
        Generator of the first centres.

    Returns
    -------
    numpy.ndarray
        Cluster of each point, ``[n]``, from 0 to m − 1, numbered in order of first appearance.

    Raises
    ------
    ConfigError
        If ``points`` is not an array of finite numbers ``[n, k]`` with at least one point, or
        ``n_clusters`` is less than 1.
    """
    points = _check_points(points)
    require(("n_clusters", n_clusters, n_clusters >= 1, "at least 1"))
    from sklearn.cluster import KMeans  # slow to import: only where used

    distinct, inverse, counts = np.unique(points, axis=0, return_inverse=True, return_counts=True)
    n_clusters = min(n_clusters, len(distinct))
    seed = int(draw.integers(2**32))
    means = KMeans(n_clusters, n_init=50, random_state=seed)  # pyright: ignore[reportArgumentType]
    clusters = means.fit_predict(distinct, sample_weight=counts)
    return number_clusters(clusters[inverse.ravel()])


def _check_points(points: Points) -> Points:
    """Return points as an array of finite numbers ``[n, k]``, or raise a ConfigError."""
    if problem := array_problem(points):
        raise ConfigError(f"points should be an array of numbers [n, k]: {problem}")
    try:
        array = np.asarray(points)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"points should be an array of numbers [n, k], got {shown(points)}: {error}"
        ) from None
    if array.dtype.kind not in "fiu" or array.ndim != 2 or 0 in array.shape:
        raise ConfigError(
            f"points should be an array of numbers [n, k] with at least 1 point, got {array.dtype} "
            f"of shape {list(array.shape)}"
        )
    finite = np.isfinite(array).all(axis=1)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise ConfigError(f"points should be finite numbers, got {shown(array[row])} in row {row}")
    return array


# Principal angles between the subspaces of clients' data.

Angles = NDArray[np.float64]


def compute_angles(
    vectors: Tensor, angle: Literal["smallest", "same_place"] = "smallest"
) -> Angles:
    """Compute the angle between the data subspaces of each two clients (PACFL).

    A client's data are described by L matrices of p unit vectors, such as the principal directions
    of the examples of each label. The angle between two clients is the mean over the matrices.

    Parameters
    ----------
    vectors
        Unit vectors of n clients, ``[n, L, d, p]``. A vector of zeros is missing. It does not count
        if both clients lack this vector; if only one client lacks it, the angle is 90°.
    angle
        ``smallest`` is the smallest principal angle between two subspaces; ``same_place`` is the
        mean of the angles between vectors with the same number.

    Returns
    -------
    numpy.ndarray
        Angles in degrees, ``[n, n]``.
    """
    vectors = vectors.cpu().double()
    present = vectors.any(dim=2)  # [n, L, p]
    has_matrix = present[..., 0]
    degrees = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for i, client_vectors in enumerate(vectors):
        products = client_vectors.mT @ vectors
        if angle == "smallest":
            # Its cosine is the largest singular value of UᵀV.
            by_matrix = _compute_degrees(torch.linalg.matrix_norm(products, 2))
        else:
            counted_vectors = present[i] | present
            diagonal = products.diagonal(dim1=-2, dim2=-1)
            by_vector = _compute_degrees(diagonal) * counted_vectors
            by_matrix = by_vector.sum(dim=2) / counted_vectors.sum(dim=2).clamp(min=1)
        counted = has_matrix[i] | has_matrix
        degrees[i] = (by_matrix * counted).sum(dim=1) / counted.sum(dim=1)
    return degrees.fill_diagonal_(0.0).numpy()


def compute_nearest_angles(vectors: Tensor) -> Angles:
    """Compute the smallest angle between any vector of one client and any vector of another.

    This is the distance in the official code of PACFL (``calculating_adjacency``), except that the
    signs of the vectors are ignored here.

    Parameters
    ----------
    vectors
        Unit vectors of n clients, ``[n, L, d, p]``: p vectors of d entries in each of L matrices. A
        vector of zeros is missing.

    Returns
    -------
    numpy.ndarray
        Angles in degrees, ``[n, n]``.
    """
    all_vectors = vectors.cpu().double().transpose(1, 2).flatten(2)  # [n, d, L p]
    degrees = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for i, client_vectors in enumerate(all_vectors):
        # A missing vector has cosine 0, which is the largest only if there is nothing else.
        cosines = client_vectors.mT @ all_vectors
        degrees[i] = _compute_degrees(cosines.abs().amax(dim=(1, 2)))
    return degrees.fill_diagonal_(0.0).numpy()


def _compute_degrees(cosines: Tensor) -> Tensor:
    """Convert cosines of angles between lines to degrees, from 0° to 90°; signs are ignored."""
    return torch.rad2deg(cosines.abs().clamp(max=1.0).arccos())
