"""FedAvg in PFLlib, with its own server and clients, and without evaluation.

PFLlib's clients read their files in every round, and this time is included.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import work

run = work.Run()
work.use_threads(int(run.way.split()[0]))
system = Path(os.environ["PEERS_CHECKOUT"]) / "system"
sys.path.insert(0, str(system))
os.chdir(system)  # its paths are relative

from flcore.servers.serveravg import FedAvg  # noqa: E402


class Timed(FedAvg):
    """FedAvg without evaluation and files, which records the times of rounds."""

    def evaluate(self, acc: object = None, loss: object = None) -> None:
        """Add a number to a list that must not be empty at the end of ``train``."""
        self.rs_test_acc.append(0.0)

    def aggregate_parameters(self) -> None:
        """Aggregate, then record the time."""
        super().aggregate_parameters()
        run.round_over(lambda: dict(self.global_model.named_parameters()))

    def save_results(self) -> None:
        """Write no files."""

    save_global_model = save_results


for split in ("train", "test"):
    folder = system.parent / "dataset" / run.name / split
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(run.task.clients):
        x, y = (part.numpy()[: None if split == "train" else 1] for part in work.client(k))
        np.savez_compressed(folder / f"{k}.npz", data=np.array({"x": x, "y": y}))

arguments = SimpleNamespace(
    **{
        "model": work.module(run.task),
        "device": "cpu",
        "dataset": run.name,
        "num_classes": 10,
        "algorithm": "FedAvg",
    },
    **{
        "num_clients": run.task.clients,
        "join_ratio": 1.0,
        "random_join_ratio": False,
        "client_drop_rate": 0.0,
    },
    **{
        "global_rounds": run.task.rounds,
        "local_epochs": 1,
        "batch_size": work.BATCH,
        "local_learning_rate": work.LR,
    },
    **{
        "learning_rate_decay": False,
        "learning_rate_decay_gamma": 1.0,
        "few_shot": 0,
        "eval_gap": 1,
        "goal": "",
    },
    **{
        "train_slow_rate": 0.0,
        "send_slow_rate": 0.0,
        "time_select": False,
        "time_threthold": 1e9,
        "top_cnt": 100,
    },
    **{
        "save_folder_name": "",
        "auto_break": False,
        "dlg_eval": False,
        "dlg_gap": 100,
        "batch_num_per_client": 0,
    },
    **{"num_new_clients": 0, "fine_tuning_epoch_new": 0},
)
Timed(arguments, 0).train()  # runs global_rounds + 1 rounds, of which the first is the warm-up
run.report("", version=os.environ["PEERS_COMMIT"])
