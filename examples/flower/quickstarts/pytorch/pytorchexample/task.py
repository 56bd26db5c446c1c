"""Model, data, training and test of the PyTorch quickstart."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Small convolutional network for images of 8 by 8 pixels, with batch normalization."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images):
        """Return the logits of images ``[B, 1, 8, 8]``."""
        x = functional.max_pool2d(functional.relu(self.norm(self.conv(images))), 2)
        return self.fc(x.flatten(1))


load_digits_once = cache(load_digits)


def load_data(partition_id, num_partitions, batch_size):
    """Load the training and the test data of a client.

    Clients with an odd number use other labels for the digits. This is what clusters can find.
    """
    digits = load_digits_once()
    images = torch.tensor(digits.images, dtype=torch.float32)[partition_id::num_partitions, None]
    labels = torch.tensor(digits.target)[partition_id::num_partitions]
    if partition_id % 2 == 1:
        labels = 9 - labels
    data = TensorDataset(images / 16, labels)
    split = int(0.8 * len(data))
    trainset = torch.utils.data.Subset(data, range(split))
    testset = torch.utils.data.Subset(data, range(split, len(data)))
    trainloader = DataLoader(trainset, batch_size=batch_size, shuffle=True)
    return trainloader, DataLoader(testset, batch_size=batch_size)


def train(net, trainloader, epochs, lr, device):
    """Train the model, and return the mean loss of the last epoch."""
    net.to(device)
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        total = 0.0
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(trainloader)


def test(net, testloader, device):
    """Return the mean loss and the accuracy of the model."""
    net.to(device)
    net.eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images.to(device))
            loss += functional.cross_entropy(outputs, labels.to(device), reduction="sum").item()
            correct += (outputs.argmax(1).cpu() == labels).sum().item()
    return loss / len(testloader.dataset), correct / len(testloader.dataset)
