"""A small residual network with a frozen backbone, personal BatchNorm layers and augmentation.

The backbone is pretrained and frozen, so it is never sent. Clients train the last block and the
head. The BatchNorm layers are personal: each client has its own and does not send them.

To need no download, the script pretrains the backbone on the same digits that the clients have.
With your own pictures, use a backbone that was trained on other data.

python examples/photographs.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedclade
from fedclade.report.page import write_report


class Residual(nn.Module):
    """Residual block: two convolutions with BatchNorm, and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape as the input, ``[n, width, height, width]``."""
        return functional.relu(x + self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))))


def resnet(seed: int, width: int = 8) -> nn.Module:
    """Return the network, after a few steps of pretraining."""
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
    """Return pictures shifted by up to one pixel in each direction, as an augmentation."""
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
