"""FederatedAveraging of pfl-research on its SimulatedBackend, in one or in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

PROCESSES = int(sys.argv[3].split()[0])
if PROCESSES > 1 and "PFL_WORKER_RANK" not in os.environ:
    shared = {
        "PFL_WORKER_ADDRESSES": ",".join(f"127.0.0.1:{29611 + rank}" for rank in range(PROCESSES)),
        "PEERS_ROOT": str(os.getpid()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [os.environ | shared | {"PFL_WORKER_RANK": str(rank)} for rank in range(PROCESSES)]
    started = [subprocess.Popen([sys.executable, *sys.argv], env=rank) for rank in ranks]
    sys.exit(max(process.wait() for process in started))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import work  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.aggregate.weighting import WeightByDatapoints  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.sampling import MinimizeReuseUserSampler  # noqa: E402
from pfl.hyperparam import NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics, Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

run = work.Run()
work.use_threads(2 // PROCESSES)
np.random.seed(0)  # noqa: NPY002 (its samplers draw from the global state, which has to be the same in all processes)


class Scored(nn.Module):
    """The module with the two methods that pfl requires."""

    def __init__(self) -> None:
        super().__init__()
        self.module = work.module(run.task)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss."""
        return functional.cross_entropy(self.module(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> Mapping[str, Weighted]:
        """Return a metric that takes no time; pfl requests it only in the first round."""
        return {"examples": Weighted(len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Callback that records the times of rounds."""

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        """Record the end of a round."""
        run.round_over(scored.module.state_dict)
        return False, Metrics()


scored = Scored()


def dataset(k: int) -> Dataset:
    """Return the examples of a client, on the device on which it trains."""
    x, y = work.client(k)
    return Dataset((x.to(work.device()), y.to(work.device())), user_id=k)


data = FederatedDataset(dataset, MinimizeReuseUserSampler(range(run.task.clients)))
local = NNTrainHyperParams(
    local_learning_rate=work.LR, local_num_epochs=1, local_batch_size=work.BATCH
)
rounds = run.task.rounds + 1
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=rounds,
        evaluation_frequency=rounds,
        train_cohort_size=run.task.clients,
        val_cohort_size=None,
    ),
    backend=SimulatedBackend(
        training_data=data, val_data=None, postprocessors=[WeightByDatapoints()]
    ),
    model=PyTorchModel(scored, torch.optim.SGD, torch.optim.SGD(scored.parameters(), lr=1.0)),
    model_train_params=local,
    callbacks=[Clock()],
    send_metrics_to_platform=False,
)
if os.environ.get("PFL_WORKER_RANK", "0") == "0":
    run.report("pfl")
