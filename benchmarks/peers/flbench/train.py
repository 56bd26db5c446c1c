"""FedAvg in FL-bench, with its own server and clients.

The clients train one after another, or in two workers of FL-bench's parallel mode.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

checkout = Path(os.environ["PEERS_CHECKOUT"])
sys.path.insert(0, str(checkout))
os.environ["HYDRA_FULL_ERROR"] = "1"
# Ray's workers get this path, too.
os.environ["PYTHONPATH"] = f"{checkout}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

import vision  # noqa: E402, F401  # isort: skip  (before what imports torchvision)
import hydra  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
import work  # noqa: E402
from data.utils.datasets import BaseDataset  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from src.server.fedavg import FedAvgServer  # noqa: E402
from src.utils import models  # noqa: E402

from flbench_model import Decoupled  # noqa: E402  # isort: skip

run = work.Run()
WORKERS = int(run.way.split()[0])


class Timed(FedAvgServer):
    """FedAvg on the arrays of the benchmark, which records the times of rounds."""

    def get_dataset(self) -> BaseDataset:
        """Return all clients' examples, one client after another."""
        x, y = zip(*(work.client(k) for k in range(run.task.clients)), strict=True)
        return BaseDataset(torch.cat(x), torch.cat(y), list(range(10)))

    def train_one_round(self) -> None:
        """Train and aggregate, then record the time."""
        super().train_one_round()
        run.round_over(lambda: self.public_model_params)

    def display_metrics(self) -> None:
        """Print nothing, because there is no evaluation."""


def prepare() -> None:
    """Write the partition of the examples to the file that FL-bench reads."""
    rows = torch.arange(run.task.clients * work.IMAGES).split(work.IMAGES)
    everybody = list(range(run.task.clients))
    partition = {
        "separation": {"train": everybody, "val": [], "test": [], "total": run.task.clients},
        "data_indices": [{"train": mine.tolist(), "val": [], "test": []} for mine in rows],
    }
    folder = checkout / "data" / "mnist"
    folder.mkdir(exist_ok=True)
    (folder / "partition.pkl").write_bytes(pickle.dumps(partition))
    (folder / "args.json").write_text(json.dumps({"split": "sample"}))


def begin_worker() -> None:
    """Prepare a worker of Ray before FL-bench is imported.

    A worker has one thread, which is also the number that Ray sets for a worker with one core.
    """
    import vision  # noqa: F401, F811

    work.use_threads(1)


@hydra.main(config_path=str(checkout / "config"), config_name="defaults", version_base=None)
def main(config: DictConfig) -> None:
    """Run the rounds."""
    OmegaConf.set_struct(config, False)  # as its own main does
    config.mode = "serial" if WORKERS == 1 else "parallel"
    config.parallel.update(num_workers=WORKERS, num_cpus=2, num_gpus=0)
    config.model.name, config.optimizer.lr = "peer", work.LR
    common = {
        "join_ratio": 1.0,
        "global_epoch": run.task.rounds + 1,
        "local_epoch": 1,
        "batch_size": work.BATCH,
    }
    off = (
        "use_cuda",
        "client_side_evaluation",
        "save_log",
        "save_learning_curve_plot",
        "save_metrics",
    )
    config.common.update(**common, **dict.fromkeys(off, False), verbose_gap=10**9)
    config.common.test.client.interval = -1
    if WORKERS > 1:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            runtime_env={"worker_process_setup_hook": begin_worker},
        )
    Timed(config).run_experiment()
    run.report("", version=os.environ["PEERS_COMMIT"])


work.use_threads(2)
models.MODELS["peer"] = Decoupled
prepare()
sys.argv[1:] = [f"hydra.run.dir={checkout / 'out'}"]
main()
