"""The work of every simulator: data of clients, models, the clock, and the final score.

Each ``<peer>/train.py`` runs in a separate environment, so this module needs only torch and NumPy.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# A client has 300 images in batches of 20, so a round has 15 steps of plain SGD.
IMAGES, BATCH, LR = (300, 20, 0.1)


@dataclass(frozen=True)
class Task:
    """A model, the number of clients, and the number of timed rounds after a warm-up round."""

    model: str
    clients: int
    rounds: int


TASKS = {
    "mlp-20": Task("mlp", 20, 10),
    "mlp-100": Task("mlp", 100, 5),
    "cnn-10": Task("cnn", 10, 8),
}


class MLP(nn.Module):
    """The perceptron 784-128-10, fedclade's ``mlp``, as a user may write it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(784, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the labels."""
        return self.output(torch.relu(self.hidden(x.flatten(1))))


class CNN(nn.Module):
    """Two 5×5 convolutions and a dense layer of 512, fedclade's ``cnn``, as a user may write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5)
        self.hidden, self.output = nn.Linear(1024, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the labels."""
        x = torch.max_pool2d(torch.relu(self.first(x)), 2)
        x = torch.max_pool2d(torch.relu(self.second(x)), 2)
        return self.output(torch.relu(self.hidden(x.flatten(1))))


def module(task: Task) -> nn.Module:
    """Return the model with the initial weights, which are the same for all simulators."""
    torch.manual_seed(0)
    made = {"mlp": MLP, "cnn": CNN}[task.model]()
    if "PEERS_STEPS" in os.environ:
        made.register_forward_pre_hook(count_step)
    return made


def use_threads(number: int) -> None:
    """Set the number of threads of torch; one if steps are only counted, for a busy machine."""
    torch.set_num_threads(1 if "PEERS_STEPS" in os.environ else number)


def count_step(model: nn.Module, _inputs: Any) -> None:
    """Append a byte to a file for each training step, in any process."""
    if model.training:
        with Path(os.environ["PEERS_STEPS"]).open("ab") as file:
            file.write(b".")


def _array(name: str) -> np.ndarray:
    # With a memory map, only the parts that are used are read.
    return np.load(Path(os.environ["PEERS_DATA"]) / f"{name}.npy", mmap_mode="r")


def _tensors(x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(np.array(x, np.float32) / 255), torch.from_numpy(np.array(y, np.int64))


@cache
def client(number: int) -> tuple[Tensor, Tensor]:
    """Return a client's images ``[300, 1, 28, 28]`` in [0, 1], and their labels."""
    return _tensors(_array("x")[number], _array("y")[number])


def device() -> str:
    """Return the device on which clients train: the CPU unless the environment names another."""
    return os.environ.get("PEERS_DEVICE", "cpu")


def test_data() -> tuple[Tensor, Tensor]:
    """Return all 10,000 test images, and their labels."""
    return _tensors(_array("test_x"), _array("test_y"))


class Run:
    """One measurement: its settings, the ends of its rounds, and the final model.

    The settings are the arguments of the command line, which ``run.py`` passes.
    """

    def __init__(self) -> None:
        self.peer, self.name, self.way, self.out = sys.argv[1:]
        self.task = TASKS[self.name]
        self._ends: list[float] = []
        self._state: dict[str, Tensor] = {}
        self._memory = 0

    def round_over(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Record the time at which the global model of a round is available.

        After the last round, also store the model, which ``state`` returns.
        """
        self._ends.append(perf_counter())
        if len(self._ends) == self.task.rounds + 1:
            self._memory = memory()
            self._state = {
                name: torch.as_tensor(value).detach().clone() for name, value in state().items()
            }

    def report(self, package: str, **more: Any) -> None:
        """Evaluate the model, and append the line of this measurement to the file of results.

        Parameters
        ----------
        package
            Package whose version is stored; unused if ``more`` contains "version".
        more
            Further values of the line.
        """
        score = module(self.task)
        # Names of parameters may differ between simulators, but their order is the same.
        score.load_state_dict(dict(zip(score.state_dict(), self._state.values(), strict=True)))
        score.eval()
        x, y = test_data()
        with torch.no_grad():
            correct = sum(
                (score(a).argmax(1) == b).sum().item()
                for a, b in zip(x.split(500), y.split(500), strict=True)
            )
        line = {
            "peer": self.peer,
            "task": self.name,
            "way": self.way,
            "seconds": np.diff(self._ends[: self.task.rounds + 1]).tolist(),
            "accuracy": correct / len(y),
            "memory": self._memory,
            "version": None if "version" in more else version(package),
            "torch": torch.__version__,
            **more,
        }
        with Path(self.out).open("a") as file:
            file.write(json.dumps(line) + "\n")


def memory() -> int:
    """Return the memory of the run's processes in bytes, with shared pages counted once.

    It is 0 if the system has no ``/proc``.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        return 0
    parents = {
        int(p.name): int(_said(p / "stat").rpartition(")")[2].split()[1]) for p in _processes()
    }
    family = {int(os.environ.get("PEERS_ROOT", os.getpid()))}
    while more := {p for p, parent in parents.items() if parent in family} - family:
        family |= more
    lines = [line for p in family for line in _said(Path(f"/proc/{p}/smaps_rollup")).splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _said(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ") - 0"


def _processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]
