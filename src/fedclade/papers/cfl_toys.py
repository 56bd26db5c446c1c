"""CFL's figures 1 and 2: two toy problems, and the optimization paths of two clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.algorithms import CFL, FedAvg
from fedclade.core import LocalSpec, ParameterTree
from fedclade.data import Federation
from fedclade.models import build_model
from fedclade.papers.drawing import head, legend, panels
from fedclade.papers.experiment import ResultCache, Settings
from fedclade.papers.outcome import Claim, Outcome, Row, Summary
from fedclade.papers.toys import TwoWeights, federated_xor, opposed, risk, two_risks
from fedclade.report import style
from fedclade.runs import Row as RunRow
from fedclade.runs import Run, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDE = 2.2
"""The plane is drawn from minus this to this."""

CELLS = 17
"""Points a side at which models are asked for their opinion."""

SHOWN = 40
"""Points of each cluster that are drawn."""

CASES = {
    "xor": ("federated XOR, linear model", federated_xor, "mclr"),
    "xor, complex": ("federated XOR, one hidden layer", federated_xor, "mlp"),
    "opposed": ("diverging conditionals, one hidden layer", opposed, "mlp"),
}
"""What each is called, its data, its model. The second is not in the paper: it shows that the model is to blame."""


def measure_xor(bench: ResultCache, settings: Settings) -> Outcome:
    """Let FedAvg and CFL learn the two problems of figure 1."""
    found: dict[str, list[dict[str, Any]]] = {
        case: [
            bench.piece(f"{case}, seed {seed}", lambda c=case, s=seed: _learn(bench, c, settings, s))
            for seed in settings["seeds"]
        ]
        for case in CASES
    }
    rows: list[Row] = []
    for case, (what, _, _) in CASES.items():
        for method, label in (("fl", "one model for all"), ("cfl", "CFL")):
            seeds = tuple(100 * each[method] for each in found[case])
            rows.append(Row(f"{what} · {label}", None, float(np.mean(seeds)), seeds=seeds))
    best_fl = {case: 100 * max(each["fl"] for each in found[case]) for case in CASES}
    worst_cfl = min(100 * each["cfl"] for case in ("xor", "opposed") for each in found[case])
    claims = (
        Claim(
            "An insufficiently complex model cannot fit all clients' data (fig. 1 left)",
            best_fl["xor"] < 90,
            f"a linear model for all: at most {best_fl['xor']:.1f} %; with a hidden layer it fits them "
            f"({best_fl['xor, complex']:.1f} %)",
        ),
        Claim(
            "If the conditional distributions diverge, no single model can fit all (fig. 1 right)",
            best_fl["opposed"] < 60,
            f"a model with a hidden layer for all: at most {best_fl['opposed']:.1f} %",
        ),
        Claim(
            "The data of clients of one cluster is easily separated (fig. 1), and CFL finds the clusters",
            worst_cfl > 95,
            f"after CFL's split: at least {worst_cfl:.1f} %",
        ),
    )
    series = {case: found[case][0]["picture"] for case in ("xor", "opposed")}
    remarks = ("The paper shows this figure as a picture, without numbers, and does not give its points.",)
    summary = Summary(
        "No single model fits the clients of both clusters; each cluster by itself is easy.",
        f"One model for all reaches {best_fl['xor']:.1f} and {best_fl['opposed']:.1f} % at most, after CFL's split the "
        f"clusters' own reach {worst_cfl:.1f} % at least.",
    )
    return Outcome(tuple(rows), claims, series, remarks, summary)


def _learn(bench: ResultCache, case: str, settings: Settings, seed: int) -> dict[str, Any]:
    _, data, model = CASES[case]
    federation = data(settings["clients"], settings["points"], seed)
    local = LocalSpec(epochs=settings["epochs"], batch_size=settings["batch_size"], lr=settings["lr"])
    rounds = settings["rounds"]
    methods = {"fl": FedAvg(), "cfl": CFL(split_rounds=(rounds // 2,), eps2=1e-3)}
    runs = {
        name: simulate(
            *(algorithm, model, federation),
            local=local,
            rounds=rounds,
            seed=seed,
            evaluate_every=rounds,
            device=bench.device,
        )
        for name, algorithm in methods.items()
    }
    accuracies = {name: run.metrics[-1]["accuracy_mean"] for name, run in runs.items()}
    return {**accuracies, "picture": _picture(federation, runs, model, settings)}


def _picture(federation: Federation, runs: dict[str, Run], model: str, settings: Settings) -> dict[str, Any]:
    """Return what one panel shows: some points of each cluster, and what each model makes of the plane."""
    points: list[dict[str, Any]] = []
    for cluster in range(2):
        x, y = federation.examples(cluster, "test")
        points.append({"x": np.round(x[:SHOWN].numpy().astype(float), 2).tolist(), "y": y[:SHOWN].tolist()})
    models = {"one model for all": runs["fl"].tree.nodes[0].params}
    leaves = runs["cfl"].tree.leaves
    if len(leaves) == 2:
        models |= {f"cluster {leaf.members[0] % 2 + 1}": leaf.params for leaf in leaves}
    return {
        "points": points,
        "opinions": {name: _opinions(runs["fl"], model, params) for name, params in models.items()},
    }


def _opinions(run: Run, model: str, params: torch.Tensor) -> list[list[float]]:
    """Return the probability of label 1 over the plane ``[CELLS, CELLS]``, to three digits."""
    module = build_model(model, input_shape=(2,), outputs=2)
    assert run.layout is not None  # a run of our own
    run.layout.load(params.cpu(), module)
    with torch.no_grad():
        chances = module(torch.from_numpy(_plane().astype(np.float32)).view(-1, 2)).softmax(1)[:, 1]
    return np.round(chances.view(CELLS, CELLS).numpy().astype(float), 3).tolist()


def _plane(low: float = -SIDE, high: float = SIDE) -> NDArray[np.float64]:
    """Return the points of a grid, ``[CELLS, CELLS, 2]``."""
    return np.stack(np.meshgrid(*[np.linspace(low, high, CELLS)] * 2), axis=-1)


def draw_xor(outcome: Outcome, settings: Settings) -> Figure:
    """Draw the points of both clusters, the border of one model for all, and those of the clusters' own."""
    title = "No single model fits both clusters; each cluster by itself is easy"
    figure, axes = panels(
        2, title, f"after Sattler et al. 2019, figure 1 · {settings['clients']} clients, {settings['rounds']} rounds"
    )
    colors = {"one model for all": style.INK, "cluster 1": style.CLUSTERS[0], "cluster 2": style.CLUSTERS[1]}
    for panel, case in zip(axes, ("xor", "opposed"), strict=True):
        for cluster, points in enumerate(outcome.series[case]["points"]):
            x, y = np.asarray(points["x"]), np.asarray(points["y"])
            for label, marker in ((0, "o"), (1, "+")):
                panel.scatter(*x[y == label].T, color=style.CLUSTERS[cluster], marker=marker, s=26, linewidths=1)
        grid = _plane()
        for name, opinions in outcome.series[case]["opinions"].items():
            dashes = "dashed" if name == "one model for all" else "solid"
            panel.contour(grid[..., 0], grid[..., 1], opinions, [0.5], colors=[colors[name]], linestyles=[dashes])
        head(panel, CASES[case][0])
    handles = [
        style.handle(name, {"color": color, "linestyle": "--" if color == style.INK else "-"})
        for name, color in colors.items()
    ]
    axes[0].legend(handles=handles, frameon=False, fontsize=8.5, loc="center left")
    return figure


def measure_paths(bench: ResultCache, settings: Settings) -> Outcome:
    """Follow the model of two clients whose risks can be minimised at once, and of two whose cannot."""
    found = {
        kind: [
            bench.piece(f"{kind}, seed {seed}", lambda k=kind, s=seed: _path(bench, k, settings, s))
            for seed in settings["seeds"]
        ]
        for kind in ("incongruent", "congruent")
    }
    cosines = tuple(each["cosine"] for each in found["incongruent"])
    apart, together = found["incongruent"], found["congruent"]
    still = min(each["max_norm"][-1] / each["max_norm"][0] for each in apart)
    gone = max(each["max_norm"][-1] / each["max_norm"][0] for each in together)
    at_rest = max(each["mean_norm"][-1] / each["mean_norm"][0] for each in apart + together)
    row = Row(
        *(
            "cosine similarity of the two clients' updates at the end, incongruent (eq. 13)",
            -1.0,
            float(np.mean(cosines)),
            "",
        ),
        seeds=cosines,
        within=0.01,
    )
    claims = (
        Claim(
            "Federated learning converges to a stationary point of the joint objective (fig. 2)",
            at_rest < 0.01,
            f"the mean update shrinks to at most {at_rest:.2g} of its first norm",
        ),
        Claim(
            "Incongruent: there the clients' gradients are of positive norm (fig. 2 left)",
            still > 0.1,
            f"the largest update keeps at least {still:.2g} of its first norm",
        ),
        Claim(
            "Congruent: the norm of both clients' updates goes to zero (fig. 2 right)",
            gone < 0.01,
            f"the largest update shrinks to at most {gone:.2g} of its first norm",
        ),
    )
    remarks = (
        "The paper shows this figure as a picture and does not give its risk functions; ours are logistic risks of two "
        "weights, and the congruent ones have one common minimum where the paper marks an area.",
    )
    summary = Summary(
        "At a stationary point of the joint objective incongruent clients' updates oppose each other, congruent ones "
        "vanish.",
        f"Incongruent: cosine {np.mean(cosines):.3f}, and the largest update keeps {still:.2g} of its first norm; "
        f"congruent: {gone:.2g}.",
    )
    return Outcome((row,), claims, {kind: runs[0] for kind, runs in found.items()}, remarks, summary)


def _path(bench: ResultCache, kind: str, settings: Settings, seed: int) -> dict[str, Any]:
    federation = two_risks(settings["points"], seed, congruent=kind == "congruent")
    start: tuple[float, float] = tuple(settings["start"])
    path = [list(start)]

    def on_round(_: RunRow, tree: ParameterTree) -> None:
        path.append(tree.nodes[0].params.tolist())

    run = simulate(
        *(CFL(split_rounds=(settings["rounds"] + 1,)), TwoWeights(start), federation),
        local=LocalSpec(epochs=1, batch_size=settings["points"], lr=settings["lr"]),
        rounds=settings["rounds"],
        seed=seed,
        evaluate_every=settings["rounds"],
        device=bench.device,
        engine="loop",
        on_round=on_round,
    )
    low, high = settings["window"]
    risks = [np.round(risk(federation, client, _plane(low, high)), 3).tolist() for client in range(2)]
    norms = {key: [row[key] for row in run.clusters] for key in ("mean_norm", "max_norm")}
    return {
        "path": np.round(path, 3).tolist(),
        "risks": risks,
        "cosine": float(run.similarities[-1].alpha[0, 1]),
        **norms,
    }


def draw_paths(outcome: Outcome, settings: Settings) -> Figure:
    """Draw the paths over the contours of both risks, and below how the norms go."""
    title = "Gradient norms tell incongruent clients from congruent ones"
    figure, axes = panels(2, title, "after Sattler et al. 2019, figure 2 · two clients, two weights", rows=2)
    for column, (kind, shown) in enumerate(outcome.series.items()):
        _draw_path(axes[column], shown, settings)
        head(axes[column], kind)
        rounds = range(1, len(shown["max_norm"]) + 1)
        axes[column + 2].plot(rounds, shown["max_norm"], color=style.CLUSTERS[1], label="largest of a client")
        axes[column + 2].plot(rounds, shown["mean_norm"], color=style.INK, label="of the mean")
        style.log_scale(axes[column + 2])
        style.label(axes[column + 2], x="round", y="norm of the update" if column == 0 else "")
    legend(axes[2])
    return figure


def _draw_path(axes: Axes, shown: dict[str, Any], settings: Settings) -> None:
    grid, path = _plane(*settings["window"]), np.asarray(shown["path"])
    for client, values in enumerate(shown["risks"]):
        levels = np.quantile(values, [0.02, 0.1, 0.25, 0.5, 0.75])
        axes.contour(grid[..., 0], grid[..., 1], values, levels, colors=[style.CLUSTERS[client]], linewidths=0.8)
    axes.plot(path[:, 0], path[:, 1], color=style.INK, marker=".", ms=4, linewidth=1)
    axes.plot(*path[-1], color=style.INK, marker="*", ms=12)
    style.label(axes, x="θ₁", y="θ₂")
