"""FLUX (Fenoglio et al. 2025), in the order of its authors' server, in NumPy's float64 and plain loops.

Only the local training and its random draws are the library's. The model is a perceptron of one hidden layer. PCA, the
scaling of blocks and DBSCAN are scikit-learn's, as there; Kneedle is written out as its authors' code has it. The
choices are those of ``algorithms/flux.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.cluster import DBSCAN, KMeans
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import MinMaxScaler
from torch import nn

from fedclade import LocalTraining
from fedclade.core import rng
from fedclade.data.federation import Federation
from tests.reference.cfl import Vector, sgd


@dataclass
class AfterRound:
    """The clusters, and the model of each."""

    clusters: list[list[int]]
    models: list[Vector]


def flux(
    w: Vector,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    labels: int,
    th_round: float,
    latest: int,
    seed: int,
    rounds: int,
    known: int | None = None,
    directions: int | None = None,
) -> list[AfterRound]:
    ids = sorted(federation.ids)
    data = {i: [each.numpy() for each in federation.examples(i, "train")] for i in ids}
    n = {i: len(data[i][1]) for i in ids}
    cluster_of, accuracy_trend, status = dict.fromkeys(ids, 0), list[float](), 0
    models, history = [w], list[AfterRound]()
    for server_round in range(1, rounds + 1):
        if status == 1:  # with the current global model, before it is trained
            descriptors = described(
                models[0], data, labels, seed if directions is None else directions
            )
            cluster_of = dict(zip(ids, clustered(descriptors, labels, known), strict=True))
            models = [models[0]] * (max(cluster_of.values()) + 1)
            status = 2
        new = list[Vector]()
        for cl, model in enumerate(models):
            mine = [i for i in ids if cluster_of[i] == cl]
            trained = {
                i: sgd(model, federation.by_id[i], federation, module, spec, seed, server_round)
                for i in mine
            }
            new.append(sum(n[i] * trained[i] for i in mine) / sum(n[i] for i in mine))
        models = new
        if status == 0:
            right = sum(
                int((outputs(models[0], x)[1].argmax(1) == y).sum()) for x, y in data.values()
            )
            accuracy_trend.append(right / sum(n.values()))
            if (
                server_round >= 3 and any(np.diff(accuracy_trend) < th_round)
            ) or server_round >= latest:
                status = 1
        clusters = [[i for i in ids if cluster_of[i] == cl] for cl in range(len(models))]
        history.append(AfterRound(clusters, models))
    return history


def outputs(
    w: Vector, x: Vector, features: int = 6, hidden: int = 8, labels: int = 4
) -> tuple[Vector, Vector]:
    """Return the latent and the logits of the perceptron with these parameters."""
    sizes = [hidden * features, hidden, labels * hidden, labels]
    A, a, B, b = np.split(w, np.cumsum(sizes)[:-1])
    latent = np.maximum(x @ A.reshape(hidden, features).T + a, 0)
    return latent, latent @ B.reshape(labels, hidden).T + b


def described(w: Vector, data: dict[int, list[Vector]], labels: int, seed: int) -> Vector:
    latent = {i: outputs(w, x)[0] for i, (x, _) in data.items()}
    max_latent_space = 1.02 * max(each.max() for each in latent.values())
    width = latent[next(iter(data))].shape[1]
    random_points = max_latent_space * rng.generator(seed, "descriptor points", width).random(
        (200, width)
    )
    pca = PCA(n_components=labels, svd_solver="full").fit(random_points)
    rows = []
    for i, (_, y) in data.items():
        all_of_it = pca.transform(latent[i])
        means, stds = [], []
        for label in range(labels):
            subset = latent[i][y == label]
            if len(subset) > 1:
                means.append(pca.transform(subset).mean(0))
                stds.append(pca.transform(subset).std(0))
            else:
                means.append(np.full(labels, -1.0))
                stds.append(np.full(labels, -1.0))
        rows.append(np.concatenate([all_of_it.mean(0), all_of_it.std(0), *means, *stds]))
    return np.array(rows)


def scaled(descriptors: Vector, dim: int) -> Vector:
    blocks = [descriptors[:, start : start + dim] for start in range(0, descriptors.shape[1], dim)]
    return np.hstack(
        [
            MinMaxScaler().fit_transform(block.reshape(-1, 1)).reshape(block.shape)
            for block in blocks
        ]
    )


def clustered(descriptors: Vector, dim: int, known: int | None) -> list[int]:
    points = scaled(descriptors, dim)
    if known is not None:
        return KMeans(known, n_init=50, random_state=0).fit_predict(points).tolist()
    distances, _ = NearestNeighbors(n_neighbors=2).fit(points).kneighbors(points)
    nearest = np.sort(distances[:, 1])
    elbow = kneedle(nearest)
    # a pair's own distance: rounding must not part the two
    eps = nearest[-1] if elbow is None else nearest[elbow]
    found = DBSCAN(eps=eps * (1 + 1e-6), min_samples=2).fit_predict(points)
    following = len(set(found) - {-1})
    for i, label in enumerate(found):
        if label == -1:
            found[i], following = following, following + 1
    return found.tolist()


def kneedle(y: Vector) -> int | None:
    """KneeLocator(range(n), y, curve="convex", direction="increasing").elbow of kneed 0.8.5, the authors' version.

    What rounding decides is no knee.
    """
    count = len(y)
    x_normalized = np.arange(count) / (count - 1)
    y_normalized = (y - y.min()) / (y.max() - y.min())
    y_difference = np.flip(1 - y_normalized) - x_normalized
    maxima = [
        i for i in range(count) if y_difference[i] >= max(y_difference[max(0, i - 1) : i + 2])
    ]
    minima = [
        i for i in range(count) if y_difference[i] <= min(y_difference[max(0, i - 1) : i + 2])
    ]
    Tmx = {i: y_difference[i] - 1 / (count - 1) for i in maxima}
    threshold, threshold_index = 0.0, 0
    for i in range(maxima[0], count - 1):
        if i in maxima:
            threshold, threshold_index = Tmx[i], i
        if i in minima:
            threshold = 0.0
        if y_difference[i + 1] < threshold - 1e-9:
            return count - 1 - threshold_index
    return None
