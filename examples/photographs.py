"""A small residual network with BatchNorm, a frozen backbone and augmentation, over clients with pictures.

The backbone comes ready made (here: from a few steps on digits that no client has) and never travels; clients train the
last block and the head, and each keeps the statistics of its BatchNorm to itself.

python examples/photographs.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedclade
from fedclade.report.page import write_report


class Residual(nn.Module):
    """Two convolutions, each with BatchNorm, beside a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        return functional.relu(x + self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))))


def resnet(seed: int, width: int = 8) -> nn.Module:
    """Return the network, its backbone trained before."""
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), Residual(width))
    model = nn.Sequential()
    for name, part in {
        "backbone": backbone,
        "block": Residual(width),
        "pool": nn.AdaptiveAvgPool2d(2),
    }.items():
        model.add_module(name, part)
    model.add_module("head", nn.Sequential(nn.Flatten(), nn.Linear(4 * width, 10)))
    x, y = fedclade.load_federation("digits", clients=1, seed=99).examples(0, "train")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in torch.randperm(len(x))[:960].split(32):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model


def moved(x: Tensor) -> Tensor:
    """Return pictures moved by up to a pixel each way: an augmentation."""
    dx, dy = torch.randint(-1, 2, (2,)).tolist()
    return torch.roll(x, (dx, dy), (-2, -1))


if __name__ == "__main__":
    federation = fedclade.load_federation(
        "digits", clients=12, shift="label_permutation", clusters=3, augment=moved
    )
    parts = {"freeze": ["backbone.*"], "personal": ["*.bn*"]}
    local = fedclade.LocalTraining(epochs=2, lr=0.1)
    run = fedclade.simulate("rcfl", resnet, federation, rounds=15, local=local, **parts)
    print(
        f"{run.summary['clusters']['found']} clusters, accuracy {100 * run.summary['accuracy']['mean']:.1f} %"
    )
    print("report:", write_report(run, "photographs.html"))
