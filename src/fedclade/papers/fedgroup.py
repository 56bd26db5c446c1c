"""FedGroup: Duan et al. 2020 (arXiv:2010.06870): Tables I to III, figures 1, 3, 4, 5, and equation 10."""

from __future__ import annotations

from functools import partial
from typing import Any

from fedclade.papers.experiment import Experiment
from fedclade.papers.fedgroup_classes import ClassRow, measure_classes
from fedclade.papers.fedgroup_distances import measure_distances
from fedclade.papers.fedgroup_figures import (
    draw_best,
    draw_classes,
    draw_distances,
    draw_rounds,
    draw_statistics,
)
from fedclade.papers.fedgroup_methods import measure_best, measure_joining, measure_rounds
from fedclade.papers.fedgroup_runs import Task
from fedclade.papers.fedgroup_statistics import measure_statistics

PAPER = "Duan et al. 2020"

TASKS = {
    "MNIST-MCLR": Task("mnist", "mclr", groups=3, lr=0.03, mu=1.0),
    "MNIST-MLP": Task("mnist", "mlp", groups=3, lr=0.03, mu=1.0, hidden=128),
    "FEMNIST-MCLR": Task("femnist", "mclr", groups=5, lr=0.003, mu=1.0, outputs=26),
    "FEMNIST-MLP": Task("femnist", "mlp", groups=5, lr=0.003, mu=1.0, outputs=26, hidden=512),
    "Synthetic(1,1)-MCLR": Task("synthetic", "mclr", groups=5, lr=0.01, mu=1.0, input_shape=(60,)),
    "Sent140-LSTM": Task(
        "sent140", "vector_lstm", groups=5, lr=0.3, mu=0.01, input_shape=(25, 300), outputs=2, hidden=100
    ),
    # Stands in for MNIST at the scale "smoke", which needs no data.
    "Digits-MCLR": Task("digits", "mclr", groups=3, lr=0.03, mu=1.0, input_shape=(1, 8, 8)),
}
"""Section IV-A and Table II, whose numbers of parameters tell that FEMNIST has 26 labels and Sent140's words are frozen
vectors of 300 numbers; m from the captions of figures 3 and 4."""

TRAINING: dict[str, Any] = {
    "seeds": [0, 1, 2],
    "rounds": 200,
    "selected": 20,
    "epochs": 20,
    "batch_size": 10,
    "pretrain_scale": 20,
    "eta_g": 0.01,
    "clients": {"mnist": 1000, "femnist": 200, "synthetic": 100, "sent140": 772},
}
"""Sections III-A and IV-A: T (III-A only), K, E, B, α, η_g, N. Three seeds, where the paper has one."""

SMOKE: dict[str, Any] = {
    "seeds": [0],
    "rounds": 8,
    "selected": 10,
    "epochs": 5,
    "pretrain_scale": 6,
    "clients": {"digits": 60},
}

TABLE_1: dict[int, ClassRow] = {
    1: (15.33, 46.42, 87.2, 79.35, 36),
    2: (15.96, 43.63, 89.3, 84.75, 29),
    3: (15.70, 31.73, 90.4, 86.30, 14),
    5: (13.98, 9.02, 91.2, 89.90, 10),
}
"""By classes per client: discrepancy (mean, variance), accuracy in % (maximum, median), rounds to 85 %."""

TABLE_3: dict[str, tuple[float | None, ...]] = {
    "MNIST-MCLR": (89.3, 90.5, 93.5, 88.1, 95.7, 95.8),
    "MNIST-MLP": (94.4, 93.4, 95.7, 92.9, 97.6, 97.1),
    "FEMNIST-MCLR": (76.8, 76.2, 87.0, 70.3, 87.8, 87.1),
    "FEMNIST-MLP": (79.8, 78.5, 91.5, 75.5, 94.5, 93.5),
    "Synthetic(1,1)-MCLR": (72.6, 80.4, 92.3, None, 92.1, 84.6),
    "Sent140-LSTM": (71.1, 71.1, 76.3, 70.0, 76.5, 76.1),
}
"""By task: FedAvg, FedProx, FedGroup-RCC, FedGroup-RAC, FedGroup, FedGrouProx; best accuracies in %."""


TABLE_2: dict[str, tuple[int, int, int]] = {
    "MNIST-MCLR": (1000, 69_035, 7_850),
    "MNIST-MLP": (1000, 69_035, 101_770),
    "FEMNIST-MCLR": (200, 18_345, 20_410),
    "FEMNIST-MLP": (200, 18_345, 415_258),
    "Synthetic(1,1)-MCLR": (100, 75_349, 610),
    "Sent140-LSTM": (772, 40_783, 243_861),
}
"""By task: devices, samples, parameters of the model."""


PIECES = "fedgroup"
"""Runs are shared by the tables and figures that show them."""


def _of_classes(name: str, place: str, title: str) -> Experiment:
    return Experiment(
        name=name,
        source=f"{PAPER}, {place}",
        title=title,
        paper={**TRAINING, "task": "MNIST-MCLR", "classes": [1, 2, 3, 5]},
        changes={"smoke": {**SMOKE, "task": "Digits-MCLR"}, "laptop": {"seeds": [0]}},
        measure=partial(measure_classes, TASKS, TABLE_1),
        draw=draw_classes,
        data=("mnist",),
        pieces=PIECES,
        smoke_data=(),
    )


METHODS: dict[str, Any] = {
    "paper": {**TRAINING, "tasks": list(TABLE_3), "seeds_of": {}},
    "changes": {
        "smoke": {**SMOKE, "tasks": ["Digits-MCLR"]},
        "laptop": {"seeds": [0], "rounds": 50, "tasks": ["MNIST-MCLR", "MNIST-MLP"]},
    },
    "data": ("mnist",),
    "pieces": PIECES,
    "smoke_data": (),
}
"""Table III, and figures 3 and 4, which show its runs. ``seeds_of`` gives a task seeds of its own: some take hours."""

EXPERIMENTS: tuple[Experiment, ...] = (
    _of_classes("fedgroup-table1", "Table I", "FedAvg on clients with few classes each: discrepancy and accuracy"),
    _of_classes("fedgroup-fig1", "figure 1", "FedAvg on clients with few classes each, round by round"),
    Experiment(
        name="fedgroup-table2",
        source=f"{PAPER}, Table II",
        title="clients, samples and parameters of the data sets and models",
        paper={"clients": TRAINING["clients"], "tasks": list(TABLE_2), "seeds": TRAINING["seeds"]},
        changes={"smoke": {"clients": {"digits": 60}, "tasks": ["Digits-MCLR"], "seeds": [0]}, "laptop": {}},
        measure=partial(measure_statistics, TASKS, TABLE_2),
        draw=draw_statistics,
        smoke_data=(),
    ),
    Experiment(
        name="fedgroup-table3",
        source=f"{PAPER}, Table III",
        title="FedGroup and FedGrouProx against FedAvg, FedProx and two random strategies",
        measure=partial(measure_best, TASKS, TABLE_3),
        draw=draw_best,
        **METHODS,
    ),
    Experiment(
        name="fedgroup-eq10",
        source=f"{PAPER}, section III-E and equation 10",
        title="when clients join a group, and what of the group they are compared with",
        paper={**TRAINING, "tasks": ["MNIST-MCLR"], "seeds_of": {}},
        changes={"smoke": {**SMOKE, "tasks": ["Digits-MCLR"]}, "laptop": {"seeds": [0], "rounds": 100}},
        measure=partial(measure_joining, TASKS, TABLE_3),
        draw=draw_best,
        data=("mnist",),
        pieces=PIECES,
        smoke_data=(),
    ),
    Experiment(
        name="fedgroup-fig3-4",
        source=f"{PAPER}, figures 3 and 4",
        title="accuracy and discrepancy round by round, and of every group",
        measure=partial(measure_rounds, TASKS),
        draw=draw_rounds,
        **METHODS,
    ),
    Experiment(
        name="fedgroup-fig5-edc",
        source=f"{PAPER}, figure 5",
        title="distances between ternary similarities against those between full cosine similarities",
        paper={**TRAINING, "tasks": list(TABLE_3)},
        changes={"smoke": {**SMOKE, "tasks": ["Digits-MCLR"]}, "laptop": {"seeds": [0]}},
        measure=partial(measure_distances, TASKS),
        draw=draw_distances,
        data=("mnist",),
        smoke_data=(),
    ),
)
