"""FL+HC: Briggs, Fan, Andras 2020: Tables I to VI, figures 1 to 6."""

from __future__ import annotations

from functools import partial
from typing import Any

from fedclade.papers.experiment import Experiment
from fedclade.papers.fl_hc_figures import draw_cells, draw_curves, draw_heights
from fedclade.papers.fl_hc_runs import HOWS
from fedclade.papers.fl_hc_tables import Cells, measure_curves, measure_fractions, measure_iid, measure_linkages

PAPER = "Briggs et al. 2020"

TRAINING: dict[str, Any] = {
    **{"images": "mnist", "scaling": "unit", "clients": 100, "samples_per_client": 600, "test_samples": 100},
    **{"model": "cnn", "model_arguments": {}, "engine": "auto"},
    **{"rounds": 50, "epochs": 3, "batch_size": 10, "lr": 0.1},
}
"""Section II-A. All of MNIST is shared out, 60,000 images to train on and 10,000 to test on. How pixels are scaled is
not in the paper."""

SETTINGS: dict[str, dict[str, Any]] = {
    "iid": {**TRAINING, "setting": "iid", "target": 0.99, "threshold": 3.0},
    "pathological": {**TRAINING, "setting": "pathological", "target": 0.99, "threshold": 3.0},
    "label-swapped": {**TRAINING, "setting": "label-swapped", "target": 0.99, "threshold": 3.0},
    "by writer": {
        **{**TRAINING, "setting": "by writer", "target": 0.8, "threshold": 10.0},
        **{"images": "femnist", "clients": 367, "samples_per_client": None},
    },
}
"""The settings of section II-A; target accuracies of section III; thresholds T of section III-A."""

FRACTIONS: dict[str, Any] = {
    "seeds": [0],
    "client_fractions": [0.1, 0.2, 0.5, 1.0],
    "rounds_before": [1, 3, 5, 10],
    "left_out": [],
}
"""Section III-A: Ward's linkage of Euclidean distances, at these fractions and rounds prior to clustering.

``left_out`` has pairs of both that are not run, since some take many times as long as others.
"""

LINKAGES: dict[str, Any] = {
    "seeds": [0],
    "client_fraction": 0.2,
    "rounds_before": 10,
    "hows": [f"{metric} {linkage}" for metric, linkage in sorted(HOWS)],
    "cuts": [4, 8, 16, 32, 64],
}
"""Section III-B. The paper tries 'a range of distance thresholds' and shows the best: here numbers of clusters."""

SMOKE: dict[str, Any] = {
    **{"images": "digits", "clients": 12, "samples_per_client": 100, "test_samples": 25, "engine": "stacked"},
    **{"model": "mlp", "rounds": 6},
}
"""Digits of 8×8 pixels, which need no download."""

LAPTOP: dict[str, Any] = {
    **{"model": "cifar_cnn", "model_arguments": {"width": 8}, "rounds": 20, "threshold": "auto"},
    **{"samples_per_client": 300},
}
"""What 2 cores can do in ten minutes: a network of 13,000 parameters, half of the images, fewer rounds; updates of
another length, so that T is where the merges have their largest gap."""

TABLE_1: Cells = {
    "cf 0.1, n 1": (91.1, 98.5, 62.0, 83.0),
    "cf 0.1, n 3": (80.4, 97.1, 46.0, 67.0),
    "cf 0.1, n 5": (89.3, 97.9, 45.0, 74.0),
    "cf 0.1, n 10": (92.0, 98.2, 40.0, 77.0),
    "cf 0.2, n 1": (91.4, 98.7, 63.0, 87.0),
    "cf 0.2, n 3": (92.5, 98.3, 58.0, 73.0),
    "cf 0.2, n 5": (90.2, 98.4, 49.0, 74.0),
    "cf 0.2, n 10": (93.6, 98.3, 55.0, 71.0),
    "cf 0.5, n 1": (91.9, 98.7, 68.0, 89.0),
    "cf 0.5, n 3": (94.6, 98.8, 67.0, 83.0),
    "cf 0.5, n 5": (93.6, 98.3, 61.0, 78.0),
    "cf 0.5, n 10": (93.8, 98.0, 39.0, 63.0),
    "cf 1.0, n 1": (94.1, 98.6, 64.0, 77.0),
    "cf 1.0, n 3": (94.3, 98.5, 64.0, 81.0),
    "cf 1.0, n 5": (93.6, 99.1, 61.0, 82.0),
    "cf 1.0, n 10": (95.6, 98.8, 48.0, 70.0),
}
"""Pathological. By client fraction and rounds before clustering: accuracy directly after it and in round 50, share of
clients at the target directly after it and in round 50; all in %."""

TABLE_2: Cells = {
    "cf 0.1, n 1": (98.2, 98.7, 49.0, 61.0),
    "cf 0.1, n 3": (98.1, 99.0, 46.0, 74.0),
    "cf 0.1, n 5": (98.4, 99.0, 48.0, 73.0),
    "cf 0.1, n 10": (98.6, 99.0, 63.0, 75.0),
    "cf 0.2, n 1": (98.2, 98.6, 48.0, 64.0),
    "cf 0.2, n 3": (98.2, 99.1, 43.0, 77.0),
    "cf 0.2, n 5": (98.4, 99.1, 52.0, 80.0),
    "cf 0.2, n 10": (98.6, 99.0, 57.0, 77.0),
    "cf 0.5, n 1": (98.1, 98.5, 49.0, 54.0),
    "cf 0.5, n 3": (98.3, 99.0, 51.0, 73.0),
    "cf 0.5, n 5": (98.5, 99.1, 54.0, 76.0),
    "cf 0.5, n 10": (98.6, 99.2, 61.0, 79.0),
    "cf 1.0, n 1": (98.3, 98.4, 53.0, 56.0),
    "cf 1.0, n 3": (98.3, 99.0, 54.0, 74.0),
    "cf 1.0, n 5": (98.5, 99.0, 59.0, 76.0),
    "cf 1.0, n 10": (98.6, 99.0, 59.0, 74.0),
}
"""Label-swapped."""

TABLE_3: Cells = {
    "cf 0.1, n 1": (30.7, 74.3, 14.2, 44.4),
    "cf 0.1, n 3": (51.4, 73.6, 15.0, 42.2),
    "cf 0.1, n 5": (69.6, 77.6, 29.7, 51.2),
    "cf 0.1, n 10": (71.0, 76.3, 32.4, 47.1),
    "cf 0.2, n 1": (12.7, 32.3, 0.5, 19.6),
    "cf 0.2, n 3": (71.2, 77.1, 38.7, 48.8),
    "cf 0.2, n 5": (69.4, 77.4, 31.3, 49.3),
    "cf 0.2, n 10": (6.3, 5.1, 0.0, 0.0),
    "cf 0.5, n 1": (43.5, 75.2, 15.0, 46.0),
    "cf 0.5, n 3": (57.6, 17.2, 28.9, 8.2),
    "cf 0.5, n 5": (69.3, 77.7, 28.1, 51.5),
    "cf 0.5, n 10": (69.3, 75.5, 29.7, 45.5),
    "cf 1.0, n 1": (72.3, 77.7, 39.2, 52.0),
    "cf 1.0, n 3": (None, None, None, None),
    "cf 1.0, n 5": (70.7, 77.9, 31.1, 51.2),
    "cf 1.0, n 10": (69.6, 75.4, 33.5, 45.0),
}
"""FEMNIST; one cell 'failed to complete in the time allowed'."""

TABLE_4: Cells = {
    "cosine average": (89.3, 97.8, 12.0, 55.0),
    "cosine complete": (91.3, 97.8, 23.0, 56.0),
    "cosine single": (92.0, 97.7, 19.0, 51.0),
    "l2 average": (95.5, 98.9, 69.0, 86.0),
    "l2 complete": (96.6, 98.8, 72.0, 84.0),
    "l2 single": (93.6, 98.1, 44.0, 67.0),
    "l2 ward": (97.3, 99.5, 79.0, 89.0),
    "l1 average": (99.4, 99.4, 89.0, 91.0),
    "l1 complete": (99.2, 99.3, 91.0, 92.0),
    "l1 single": (99.4, 99.4, 87.0, 91.0),
}
"""Pathological, by metric and linkage."""

TABLE_5: Cells = {
    "cosine average": (98.7, 99.1, 62.0, 79.0),
    "cosine complete": (98.5, 99.1, 56.0, 78.0),
    "cosine single": (None, None, None, None),
    "l2 average": (98.2, 98.3, 50.0, 53.0),
    "l2 complete": (98.4, 99.1, 53.0, 76.0),
    "l2 single": (98.2, 98.3, 47.0, 51.0),
    "l2 ward": (98.5, 99.1, 57.0, 77.0),
    "l1 average": (98.3, 98.3, 51.0, 50.0),
    "l1 complete": (98.5, 98.6, 58.0, 59.0),
    "l1 single": (98.3, 98.4, 48.0, 53.0),
}
"""Label-swapped; one row 'failed to complete in the time allowed'."""

TABLE_6: Cells = {
    "cosine average": (64.2, 66.3, 19.6, 20.2),
    "cosine complete": (62.6, 64.3, 19.3, 24.5),
    "cosine single": (65.4, 74.2, 19.1, 40.1),
    "l2 average": (67.0, 78.2, 22.3, 48.2),
    "l2 complete": (66.8, 78.7, 23.4, 52.3),
    "l2 single": (66.4, 77.0, 22.1, 47.7),
    "l2 ward": (72.2, 77.4, 34.6, 48.8),
    "l1 average": (66.5, 77.4, 22.9, 48.0),
    "l1 complete": (69.9, 76.5, 36.0, 54.0),
    "l1 single": (66.9, 78.7, 23.4, 51.2),
}
"""FEMNIST."""


PIECES = "flhc"
"""Runs are shared by the tables and figures that show them."""


def _by_fraction(name: str, number: str, setting: str, table: Cells) -> Experiment:
    smoke = {"client_fractions": [0.5], "rounds_before": [1, 3], "threshold": "auto"}
    laptop = {"client_fractions": [0.2], "rounds_before": [1, 10]}
    return Experiment(
        name=name,
        source=f"{PAPER}, Table {number}",
        title=f"FL+HC, {setting}: client fraction and rounds before clustering",
        paper={**SETTINGS[setting], **FRACTIONS},
        changes={"smoke": {**SMOKE, **smoke}, "laptop": {**LAPTOP, **laptop}},
        measure=partial(measure_fractions, table),
        draw=draw_cells,
        data=("femnist",) if setting == "by writer" else ("mnist",),
        pieces=PIECES,
        smoke_data=(),
    )


def _by_linkage(name: str, number: str, setting: str, table: Cells) -> Experiment:
    smoke = {"client_fraction": 0.5, "rounds_before": 2, "cuts": [4]}
    paper = {key: value for key, value in SETTINGS[setting].items() if key != "threshold"}
    laptop = {key: value for key, value in LAPTOP.items() if key != "threshold"}
    return Experiment(
        name=name,
        source=f"{PAPER}, Table {number}",
        title=f"FL+HC, {setting}: distance metric and linkage",
        paper={**paper, **LINKAGES},
        changes={
            "smoke": {**SMOKE, **smoke},
            "laptop": {**laptop, "hows": ["cosine complete", "l1 complete", "l2 ward"], "cuts": [4, 32]},
        },
        measure=partial(measure_linkages, table),
        draw=draw_cells,
        data=("femnist",) if setting == "by writer" else ("mnist",),
        pieces=PIECES,
        smoke_data=(),
    )


FIGURES: dict[str, dict[str, Any]] = {
    "figure 1": {"setting": "pathological", "client_fraction": 0.2, "rounds_before": 1, "how": "l2 ward"},
    "figure 2": {"setting": "pathological", "client_fraction": 0.2, "rounds_before": 10, "how": "l2 ward"},
    "figure 3": {"setting": "label-swapped", "client_fraction": 0.2, "rounds_before": 10, "how": "l2 ward"},
    "figure 4": {"setting": "by writer", "client_fraction": 0.1, "rounds_before": 5, "how": "l2 ward"},
    "figure 5": {"setting": "pathological", "client_fraction": 0.2, "rounds_before": 10, "how": "l1 complete"},
    "figure 6": {"setting": "by writer", "client_fraction": 0.2, "rounds_before": 10, "how": "l1 complete"},
}
"""What the captions say. Figures 5 and 6 cut where the best of several thresholds is: here at the best of ``cuts``."""


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="flhc-iid",
        source=f"{PAPER}, sections III-A and III-B",
        title="FL+HC, IID clients: how many clusters there are at one threshold",
        paper={
            **{**SETTINGS["iid"], "seeds": [0], "client_fraction": 0.2, "rounds_before": [1, 3, 5, 10]},
            "other_scaling": "source",
        },
        changes={
            "smoke": {**SMOKE, "client_fraction": 0.5, "rounds_before": [1, 3]},
            "laptop": {**{key: value for key, value in LAPTOP.items() if key != "threshold"}, "rounds_before": [1, 10]},
        },
        measure=measure_iid,
        draw=draw_heights,
        data=("mnist",),
        pieces=PIECES,
        smoke_data=(),
    ),
    _by_fraction("flhc-table1", "I", "pathological", TABLE_1),
    _by_fraction("flhc-table2", "II", "label-swapped", TABLE_2),
    _by_fraction("flhc-table3", "III", "by writer", TABLE_3),
    _by_linkage("flhc-table4", "IV", "pathological", TABLE_4),
    _by_linkage("flhc-table5", "V", "label-swapped", TABLE_5),
    _by_linkage("flhc-table6", "VI", "by writer", TABLE_6),
    Experiment(
        name="flhc-fig1-6",
        source=f"{PAPER}, figures 1 to 6",
        title="FL+HC and FL round by round: accuracy and clients at the target accuracy",
        paper={"settings": SETTINGS, "figures": FIGURES, "cuts": LINKAGES["cuts"], "seeds": [0]},
        changes={
            "smoke": {
                "settings": {name: {**each, **SMOKE, "threshold": "auto"} for name, each in SETTINGS.items()},
                "figures": {
                    name: {**each, "client_fraction": 0.5, "rounds_before": min(3, each["rounds_before"])}
                    for name, each in FIGURES.items()
                },
                "cuts": [4],
            },
            "laptop": {
                "settings": {name: {**each, **LAPTOP} for name, each in SETTINGS.items()},
                "cuts": [32],
            },
        },
        measure=measure_curves,
        draw=draw_curves,
        data=("mnist",),
        pieces=PIECES,
        smoke_data=(),
    ),
)
