"""Model, data, training and test of the Hugging Face quickstart."""

import random

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

SUBJECTS = ("the film", "this book", "that play", "the song", "her novel", "the show")
GOOD = ("great", "lovely", "brilliant", "funny", "moving", "clever")
BAD = ("dull", "awful", "boring", "silly", "weak", "slow")
VERBS = ("was", "is", "seemed", "felt")
WORDS = ("[pad]", *" ".join([*SUBJECTS, *GOOD, *BAD, *VERBS]).split())
LENGTH = 4


def get_model():
    """Return a small transformer with random parameters."""
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(config)


def load_data(partition_id, num_partitions, batch_size):
    """Write the reviews of a client, and return loaders of its training and test data.

    Clients with an odd number mean the opposite of what they write. This is what clusters can find.
    """
    draw = random.Random(partition_id)
    sentences, labels = [], []
    for _ in range(120):
        label = draw.randrange(2)
        words = f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice((BAD, GOOD)[label])}"
        sentences.append([WORDS.index(word) for word in words.split()])
        labels.append(label if partition_id % 2 == 0 else 1 - label)
    data = TensorDataset(torch.tensor(sentences), torch.tensor(labels))
    trainset, testset = data[:80], data[80:]
    trainloader = DataLoader(TensorDataset(*trainset), batch_size=batch_size, shuffle=True)
    return trainloader, DataLoader(TensorDataset(*testset), batch_size=batch_size)


def train(net, trainloader, epochs, device):
    """Train the model."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    net.to(device)
    net.train()
    for _ in range(epochs):
        for input_ids, labels in trainloader:
            loss = net(input_ids=input_ids.to(device), labels=labels.to(device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test(net, testloader, device):
    """Return the mean loss and the accuracy of the model."""
    net.to(device)
    net.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for input_ids, labels in testloader:
            outputs = net(input_ids=input_ids.to(device), labels=labels.to(device))
            loss += outputs.loss.item() * len(labels)
            correct += (outputs.logits.argmax(1).cpu() == labels).sum().item()
    return loss / len(testloader.dataset), correct / len(testloader.dataset)
