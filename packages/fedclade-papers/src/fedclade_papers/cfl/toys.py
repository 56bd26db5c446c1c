"""Figures 1 and 2 of the CFL paper: toy problems with points in the plane.

Figure 1 shows problems for which no single model is good for all clients, figure 2 the path of a
model during training. The paper shows pictures without numbers; the functions here measure the same
cases. Every client has equally many training points and test points.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedclade import CFL, FedAvg, Federation, ParameterTree, Pool, Run, build_model
from fedclade.core import rng
from fedclade.data import ClientData
from fedclade_papers.cache import ResultCache, Settings
from fedclade_papers.experiment import Paper
from fedclade_papers.outcome import Outcome, Row

Points = NDArray[np.float32]
"""Array of n points in the plane, ``[n, 2]``."""

SPREAD = 0.35
"""Standard deviation of a blob of points, whose centre has distance 1 from both axes."""

TRUE_WEIGHTS = ((3.0, 0.5), (-0.5, 2.0))
"""True weights of the two clients whose risks have different minima."""


def federated_xor(clients: int, points: int, seed: int) -> Federation:
    """Build clients of two clusters, each of which has two of the four blobs of the XOR problem.

    A linear model separates the labels within each cluster, but not the labels of both clusters
    together. ``points`` is the number of training points of a client.
    """

    def draw(cluster: int, generator: np.random.Generator) -> tuple[Points, NDArray[np.int64]]:
        side = generator.integers(2, size=2 * points)  # side of the vertical axis
        height = 1 if cluster == 0 else -1
        centres = np.stack([2 * side - 1, np.full(2 * points, height)], axis=1)
        return _draw_blobs(centres, generator), np.where(height > 0, side, 1 - side)

    return _build_federation("xor", clients, points, seed=seed, draw=draw)


def opposed(clients: int, points: int, seed: int) -> Federation:
    """Build clients of two clusters that have the same two blobs of points and opposite labels."""

    def draw(cluster: int, generator: np.random.Generator) -> tuple[Points, NDArray[np.int64]]:
        side = generator.integers(2, size=2 * points)
        x = _draw_blobs(np.stack([2 * side - 1, 2 * side - 1], axis=1), generator)
        if cluster == 0:
            return x, side
        return x, 1 - side

    return _build_federation("opposed", clients, points, seed=seed, draw=draw)


def two_risks(points: int, seed: int, *, congruent: bool) -> Federation:
    """Build two clients whose risks in logistic regression have a common minimum, or do not.

    If ``congruent`` is true, the points of each client lie on a different axis, so that each
    client's risk depends on one weight only, and one model is good for both clients. Otherwise the
    points are spread over the plane, and the clients' labels come from different true weights.
    """

    def draw(client: int, generator: np.random.Generator) -> tuple[Points, NDArray[np.int64]]:
        x = generator.normal(size=(2 * points, 2)).astype(np.float32)
        if congruent:
            x[:, 1 - client] = 0
            weights = np.array(TRUE_WEIGHTS[0])
        else:
            weights = np.array(TRUE_WEIGHTS[client])
        chances = 1 / (1 + np.exp(-x @ weights))
        return x, (generator.random(2 * points) < chances).astype(np.int64)

    return _build_federation("two risks", 2, points, seed=seed, draw=draw)


class TwoWeights(nn.Module):
    """Logistic regression with two weights and no bias, so that its path can be drawn."""

    def __init__(self, start: tuple[float, float]) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of both labels, ``[n, 2]``, for n points ``[n, 2]``."""
        score = x @ self.weights
        return torch.stack([torch.zeros_like(score), score], dim=1)


def risk(federation: Federation, client: int, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a client's empirical risk in nats at given weights of :class:`TwoWeights`.

    ``weights`` has the shape ``[..., 2]``, and the result ``[...]``.
    """
    x, y = (tensor.numpy().astype(np.float64) for tensor in federation.examples(client, "train"))
    return np.logaddexp(0, -(2 * y - 1) * (weights @ x.T)).mean(-1)


def _draw_blobs(centres: NDArray[np.int64], generator: np.random.Generator) -> Points:
    return (centres + SPREAD * generator.normal(size=centres.shape)).astype(np.float32)


def _build_federation(
    name: str,
    clients: int,
    points: int,
    *,
    seed: int,
    draw: Callable[[int, np.random.Generator], tuple[Points, NDArray[np.int64]]],
) -> Federation:
    drawn = [draw(client % 2, rng.generator(seed, name, client)) for client in range(clients)]
    places = np.arange(clients * 2 * points).reshape(clients, 2, points)
    members = [
        ClientData(
            id=i,
            name=f"client-{i}",
            key=i,
            train=places[i, 0],
            validation=places[i, 1][:0],
            test=places[i, 1],
        )
        for i in range(clients)
    ]
    x = np.concatenate([x for x, _ in drawn])
    y = np.concatenate([y for _, y in drawn])
    train = places[:, 0].ravel()
    test = places[:, 1].ravel()
    pool = Pool(
        name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        groups=y,
        train=train,
        test=test,
        outputs=2,
    )
    return Federation(pool, tuple(members), {i: i % 2 for i in range(clients)}, name)


CELLS = 17
"""Number of grid points on each side of the plane."""


def plane(low: float, high: float) -> NDArray[np.float64]:
    """Return a square grid of points with coordinates from ``low`` to ``high``.

    The shape is ``[CELLS, CELLS, 2]``.
    """
    return np.stack(np.meshgrid(*[np.linspace(low, high, CELLS)] * 2), axis=-1)


SIDE = 2.2
"""Half the side length of the square that is drawn, whose centre is the origin."""

SHOWN = 40
"""Number of points of each cluster that the figure shows."""

CASES = {
    "xor": ("federated XOR, linear model", federated_xor, "mclr"),
    "xor, complex": ("federated XOR, one hidden layer", federated_xor, "mlp"),
    "opposed": ("diverging conditionals, one hidden layer", opposed, "mlp"),
}
"""Title, function that builds the clients, and model of each case.

The second case is not in the paper. It shows that the linear model causes the low accuracy of the
first case.
"""

METHODS = {"fl": "one model for all", "cfl": "CFL"}


def measure_xor(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figure 1: accuracy of FedAvg and CFL on the toy problems."""
    found = {
        case: cache.by_seed(case, settings["seeds"], partial(_train, cache, settings, case))
        for case in CASES
    }
    rows = list[Row]()
    for case, (what, _, _) in CASES.items():
        for method, label in METHODS.items():
            accuracies = [100 * result[method] for result in found[case]]
            rows.append(Row.of(f"{what} · {label}", None, accuracies))
    best_fl: dict[str, float] = {}
    for case, results in found.items():
        best_fl[case] = 100 * max(result["fl"] for result in results)
    worst_cfl = min(100 * each["cfl"] for case in ("xor", "opposed") for each in found[case])
    linear, hidden, diverging = (f"{best:.1f} %" for best in best_fl.values())
    simple = (
        f"a linear model for all: at most {linear}; with a hidden layer it fits them ({hidden})"
    )
    claims = (
        paper.claim("simple", best_fl["xor"] < 90, simple),
        paper.claim(
            "diverging",
            best_fl["opposed"] < 60,
            f"a model with a hidden layer for all: at most {diverging}",
        ),
        paper.claim("separated", worst_cfl > 95, f"after CFL's split: at least {worst_cfl:.1f} %"),
    )
    series = {case: found[case][0]["picture"] for case in ("xor", "opposed")}
    sentence = (
        f"One model for all reaches {best_fl['xor']:.1f} and {diverging} at most, after CFL's "
        f"split the clusters' own reach {worst_cfl:.1f} % at least."
    )
    return paper.outcome(rows, claims, series, sentence)


def _train(cache: ResultCache, settings: Settings, case: str, seed: int) -> dict[str, Any]:
    _, data, model = CASES[case]
    federation = data(settings["clients"], settings["points"], seed)
    rounds = settings["rounds"]
    methods = {"fl": FedAvg(), "cfl": CFL(split_rounds=(rounds // 2,), eps2=1e-3)}
    runs: dict[str, Run] = {}
    for name, algorithm in methods.items():
        runs[name] = cache.simulate(
            algorithm, model, federation, settings=settings, seed=seed, evaluate_every=rounds
        )
    accuracies = {name: run.metric_rows[-1]["accuracy_mean"] for name, run in runs.items()}
    return {**accuracies, "picture": _collect_picture(federation, runs, model)}


def _collect_picture(federation: Federation, runs: dict[str, Run], model: str) -> dict[str, Any]:
    """Collect the data of one panel of figure 1: points of clusters, predictions of models."""
    points: list[dict[str, Any]] = []
    for cluster in range(2):
        x, y = federation.examples(cluster, "test")
        points.append(
            {"x": np.round(x[:SHOWN].numpy().astype(float), 2).tolist(), "y": y[:SHOWN].tolist()}
        )
    models = {"one model for all": runs["fl"].tree.nodes[0].params}
    leaves = runs["cfl"].tree.leaves
    if len(leaves) == 2:
        models |= {f"cluster {leaf.members[0] % 2 + 1}": leaf.params for leaf in leaves}
    return {
        "points": points,
        "opinions": {
            name: _predict_on_grid(runs["fl"], model, params) for name, params in models.items()
        },
    }


def _predict_on_grid(run: Run, model: str, params: torch.Tensor) -> list[list[float]]:
    """Return a model's probability of label 1 at each point of the grid, with three digits."""
    module = build_model(model, input_shape=(2,), outputs=2)
    assert run.layout is not None  # since the run was made here
    run.layout.load(params.cpu(), module)
    grid = plane(-SIDE, SIDE)
    with torch.no_grad():
        chances = module(torch.from_numpy(grid.astype(np.float32)).view(-1, 2)).softmax(1)[:, 1]
    return np.round(chances.view(grid.shape[:2]).numpy().astype(float), 3).tolist()


def measure_paths(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figure 2: the path of one model that two incongruent or congruent clients train."""
    found = {
        kind: cache.by_seed(kind, settings["seeds"], partial(_follow_path, cache, settings, kind))
        for kind in ("incongruent", "congruent")
    }
    left: dict[tuple[str, str], list[float]] = {}
    for kind, runs in found.items():
        for norm in ("mean_norm", "max_norm"):
            left[kind, norm] = [run[norm][-1] / run[norm][0] for run in runs]
    still = min(left["incongruent", "max_norm"])
    gone = max(left["congruent", "max_norm"])
    at_rest = max(left["incongruent", "mean_norm"] + left["congruent", "mean_norm"])
    what = "cosine similarity of the two clients' updates at the end, incongruent (eq. 13)"
    row = Row.of(what, -1.0, [each["cosine"] for each in found["incongruent"]], "", within=0.01)
    claims = (
        paper.claim(
            "stationary",
            at_rest < 0.01,
            f"the mean update shrinks to at most {at_rest:.2g} of its first norm",
        ),
        paper.claim(
            "incongruent",
            still > 0.1,
            f"the largest update keeps at least {still:.2g} of its first norm",
        ),
        paper.claim(
            "congruent",
            gone < 0.01,
            f"the largest update shrinks to at most {gone:.2g} of its first norm",
        ),
    )
    sentence = (
        f"Incongruent: cosine {row.ours:.3f}, and the largest update keeps {still:.2g} of its "
        f"first norm; congruent: {gone:.2g}."
    )
    return paper.outcome([row], claims, {kind: runs[0] for kind, runs in found.items()}, sentence)


def _follow_path(cache: ResultCache, settings: Settings, kind: str, seed: int) -> dict[str, Any]:
    federation = two_risks(settings["points"], seed, congruent=kind == "congruent")
    start: tuple[float, float] = tuple(settings["start"])
    path = [list(start)]

    def on_round(_: object, tree: ParameterTree) -> None:
        path.append(tree.nodes[0].params.tolist())

    local = {**settings, "epochs": 1, "batch_size": settings["points"]}  # gradient descent
    run = cache.simulate(
        CFL(split_rounds=(settings["rounds"] + 1,)),
        TwoWeights(start),
        federation,
        settings=local,
        seed=seed,
        evaluate_every=settings["rounds"],
        engine="loop",
        on_round=on_round,
    )
    grid = plane(*settings["window"])
    return {
        "path": np.round(path, 3).tolist(),
        "risks": [np.round(risk(federation, client, grid), 3).tolist() for client in range(2)],
        "cosine": float(run.similarities[-1].alpha[0, 1]),
        "mean_norm": [row["mean_norm"] for row in run.cluster_rows],
        "max_norm": [row["max_norm"] for row in run.cluster_rows],
    }
