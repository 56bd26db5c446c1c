"""CFL: Sattler, Müller, Samek 2019, "Clustered Federated Learning", and the workshop paper of the same year.

What each figure is measured with. The paper leaves out step sizes, the layers of its networks, ε₂, and the batch size
of figures 5 to 7: these settings are ours, and every result says so. Test examples matter to figures 8 and 9 alone.
"""

from __future__ import annotations

from typing import Any

from fedclade.papers import cfl_gaps, cfl_norms, cfl_splits, cfl_theory, cfl_toys
from fedclade.papers.experiment import Experiment

XOR: dict[str, Any] = {
    "clients": 10,
    "points": 100,
    "rounds": 100,
    "epochs": 3,
    "batch_size": 20,
    "lr": 0.1,
    "seeds": [0, 1, 2],
}

PATHS: dict[str, Any] = {
    "points": 500,
    "rounds": 200,
    "lr": 1.0,
    "start": [-1.5, 3.5],
    "window": [-2.5, 5.0],
    "seeds": [0, 1, 2],
}

THEORY: dict[str, Any] = {
    "d": 100,
    "clients_each": 3,  # m = 3k
    "ks": [2, 3, 4, 5, 6, 8, 10, 12, 15, 20],
    "gammas": [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 2.0],
    "bounds_of": [2, 3, 5, 10],
    "over_d": {"k": 12, "gamma": 1.1, "ds": [2, 5, 10, 20, 50, 100, 200, 500, 1000]},
    "samples": 1000,
    "seeds": [0],
}

SWAPPED: dict[str, Any] = {"clients": 20, "clusters": 4, "epochs": 3, "batch_size": 100, "lr": 0.1, "test_samples": 500}
"""Figures 5 and 6: label swaps, 3 local epochs (section VI-A); the batch size is that of section VI-C."""

BY_DATA: dict[str, Any] = {
    **SWAPPED,
    "rounds": 50,
    "tasks": {
        "mnist": {"model": "cnn", "points": [10, 20, 50, 100, 150, 200]},
        "cifar10": {"model": "cifar_cnn", "points": [100, 200, 500, 1000, 1500, 2400]},
    },
    "enough_points": {"mnist": 20, "cifar10": 500},
    "seeds": [0, 1, 2],
}

BY_ROUNDS: dict[str, Any] = {
    **SWAPPED,
    "rounds": [1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50],
    "tasks": {"mnist": {"model": "cnn", "points": 100}, "cifar10": {"model": "cifar_cnn", "points": 1500}},
    "enough_rounds": 10,
    "seeds": [0, 1, 2],
}

SMALL_CIFAR: dict[str, Any] = {"model": "cifar_cnn", "model_arguments": {"width": 8}, "seeds": [0]}
"""CIFAR-10's part of figures 5 and 6, in a few minutes."""

NORMS: dict[str, Any] = {
    "data": "mnist",
    "model": "cnn",
    "samples_per_client": None,  # all training digits
    "test_samples": 500,
    "rounds": 1000,
    "epochs": 3,
    "batch_size": 100,
    "lr": 0.05,
    "seeds": [0],
}

CIFAR: dict[str, Any] = {
    "data": "cifar10",
    "distribution": {"partition": "iid", "shift": "label_permutation", "clusters": 4},
    "clients": 20,
    "samples_per_client": None,  # 50,000 images in 20 equal parts
    "test_samples": None,  # the whole test split, as each cluster sees it (eq. 53)
    "model": "cifar_cnn",
    "model_arguments": {},
    "rounds": 200,
    "split_rounds": [50, 100, 150],
    "epochs": 3,
    "batch_size": 100,
    "lr": 0.1,
    "momentum": 0.0,
    "lr_decay": 1.0,
    "at_dates": {"eps2": 1.0},  # what decides in the rounds of the splits: eqs. 33 and 39
    "criteria": {},  # what CFL needs to split by itself: eqs. 32, 33 and 39
    "evaluate_every": 5,
    "seeds": [0],
}

AG_NEWS: dict[str, Any] = {
    "data": "ag_news",
    "distribution": {"partition": "label_groups", "clusters": 4},  # a topic for each client
    "source_arguments": {"vocabulary_size": 10_000, "sequence_length": 32},
    "clients": 20,
    "samples_per_client": None,
    "test_samples": None,
    "model": "lstm",
    "model_arguments": {},
    "rounds": 100,
    "split_rounds": [30, 60, 90],
    "epochs": 3,
    "batch_size": 100,
    "lr": 1.0,
    "momentum": 0.0,
    "lr_decay": 1.0,
    "at_dates": {"eps2": 0.1},
    "criteria": {},
    "evaluate_every": 5,
    "seeds": [0],
}

EXPERIMENTS = (
    Experiment(
        name="cfl-fig1-xor",
        source="Sattler et al. 2019, figure 1",
        title="Federated XOR and diverging conditionals: no single model fits both clusters",
        paper=XOR,
        changes={"smoke": {"rounds": 40, "seeds": [0]}, "laptop": {}},
        measure=cfl_toys.measure_xor,
        draw=cfl_toys.draw_xor,
    ),
    Experiment(
        name="cfl-fig2-paths",
        source="Sattler et al. 2019, figure 2",
        title="The optimization paths of two clients, incongruent and congruent",
        paper=PATHS,
        changes={"smoke": {"seeds": [0]}, "laptop": {}},
        measure=cfl_toys.measure_paths,
        draw=cfl_toys.draw_paths,
    ),
    Experiment(
        name="cfl-fig3-theory",
        source="Sattler et al. 2019, figure 3 and Theorem 1",
        title="How often clients are split right, against the number of distributions, dimensions and noise",
        paper=THEORY,
        changes={"smoke": {"ks": [2, 3, 5, 12], "bounds_of": [2, 3, 5], "samples": 20}, "laptop": {}},
        measure=cfl_theory.measure,
        draw=cfl_theory.draw,
    ),
    Experiment(
        name="cfl-fig5-data",
        source="Sattler et al. 2019, figure 5",
        title="Separation gap against the data points of a client",
        paper=BY_DATA,
        changes={
            "smoke": {
                "rounds": 5,
                "tasks": {"mnist": {"model": "mlp", "points": [10, 50]}},
                "clients": 8,
                "test_samples": 20,
                "seeds": [0],
            },
            "laptop": {
                "tasks": {
                    "mnist": {"model": "mlp", "points": [10, 20, 50, 100, 200]},
                    "mnist, CNN, batches of 10": {
                        "data": "mnist",
                        "model": "cnn",
                        "points": [20, 50],
                        "batch_size": 10,
                    },
                    "cifar10": {**SMALL_CIFAR, "points": [100, 200, 500]},
                },
                "enough_points": {"mnist": 20, "mnist, CNN, batches of 10": 20, "cifar10": 500},
                "test_samples": 20,
            },
        },
        measure=cfl_gaps.measure_data,
        draw=cfl_gaps.draw_data,
        data=("mnist", "cifar10"),
        smoke_data=("mnist",),
    ),
    Experiment(
        name="cfl-fig6-rounds",
        source="Sattler et al. 2019, figure 6",
        title="Separation gap against the rounds of federated learning",
        paper=BY_ROUNDS,
        changes={
            "smoke": {
                "rounds": [1, 5],
                "tasks": {"mnist": {"model": "mlp", "points": 50}},
                "clients": 8,
                "test_samples": 20,
                "seeds": [0],
            },
            "laptop": {
                "tasks": {
                    "mnist": {"model": "mlp", "points": 100},
                    "mnist, CNN": {"data": "mnist", "model": "cnn", "points": 100},
                    "mnist, batches of 10": {"data": "mnist", "model": "mlp", "points": 100, "batch_size": 10},
                    "cifar10": {**SMALL_CIFAR, "points": 500},
                },
                "test_samples": 20,
            },
        },
        measure=cfl_gaps.measure_rounds,
        draw=cfl_gaps.draw_rounds,
        data=("mnist", "cifar10"),
        smoke_data=("mnist",),
    ),
    Experiment(
        name="cfl-fig7-norms",
        source="Sattler et al. 2019, figure 7",
        title="Mean and largest norm of two clients' updates, congruent and incongruent",
        paper=NORMS,
        changes={
            "smoke": {
                "model": "mclr",
                "samples_per_client": 500,
                "rounds": 60,
                "batch_size": 50,
                "lr": 0.1,
                "test_samples": 20,
            },
            "laptop": {"model": "mlp", "samples_per_client": 6000, "test_samples": 20},
        },
        measure=cfl_norms.measure,
        draw=cfl_norms.draw,
        data=("mnist",),
    ),
    Experiment(
        name="cfl-fig8-cifar",
        source="Sattler et al. 2019, figure 8; workshop paper, figure 3",
        title="Permuted labels on CIFAR-10: FL stagnates, CFL's splits and rcfl do not",
        paper=CIFAR,
        changes={
            "smoke": {
                "clients": 8,
                "samples_per_client": 100,
                "test_samples": 40,
                "model_arguments": {"width": 4},
                "rounds": 7,
                "split_rounds": [3, 4, 5],
                "at_dates": {"eps2": 0.01},
                "criteria": {"eps1": 10.0, "eps2": 0.01, "gamma_max": 0.1},
                "evaluate_every": 1,
                "batch_size": 20,
            },
            "laptop": {
                "samples_per_client": 800,
                "test_samples": 500,
                "model_arguments": {"width": 8},
                "rounds": 30,
                "split_rounds": [10, 15, 20],
                "at_dates": {"eps2": 0.05},
                "batch_size": 20,
                "lr": 0.05,
            },
        },
        measure=cfl_splits.measure_cifar,
        draw=cfl_splits.draw_cifar,
        data=("cifar10",),
    ),
    Experiment(
        name="cfl-fig9-agnews",
        source="Sattler et al. 2019, figure 9",
        title="Next words of news articles by topic: perplexity after CFL's splits",
        paper=AG_NEWS,
        changes={
            "smoke": {
                "source_arguments": {"vocabulary_size": 200, "sequence_length": 8},
                "clients": 8,
                "samples_per_client": 100,
                "test_samples": 40,
                "model_arguments": {"embedding": 8, "hidden": 8},
                "rounds": 7,
                "split_rounds": [3, 4, 5],
                "at_dates": {"eps2": 0.01},
                "criteria": {"eps1": 10.0, "eps2": 0.01, "gamma_max": 0.1},
                "evaluate_every": 1,
                "batch_size": 20,
            },
            "laptop": {
                "source_arguments": {"vocabulary_size": 1000, "sequence_length": 16},
                "test_samples": 200,
                "model_arguments": {"embedding": 32, "hidden": 32},
                "rounds": 40,
                "split_rounds": [15, 20, 25],
                "lr": 0.1,
                "momentum": 0.9,  # as in the authors' published code, and so the next
                "lr_decay": 0.99,
                "at_dates": {"eps2": 1.8},
                "criteria": {"eps1": 1.4, "eps2": 1.9, "gamma_max": 0.6},
                "batch_size": 20,
            },
        },
        measure=cfl_splits.measure_agnews,
        draw=cfl_splits.draw_agnews,
        data=("ag_news",),
    ),
)
