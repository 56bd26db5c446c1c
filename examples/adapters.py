"""LoRA on a small transformer: twelve keyboards predict the next word and send only adapters.

The script pretrains the transformer and compares two runs. In the first, clients train and send the
whole model. In the second, the model is frozen, and clients train and send LoRA adapters. Half of
the users write British English, half American English; the server does not know which.

python examples/adapters.py
"""

import random

import torch
from torch import Tensor, nn

import fedclade
from fedclade.report.page import write_report

WHO = ["after work i", "at noon we", "on monday they", "in town people", "at night you"]
BRITISH = [
    "took the lift",
    "rented the flat",
    "ate the biscuit",
    "drove the lorry",
    "bought the petrol",
]
AMERICAN = [
    "took the elevator",
    "rented the apartment",
    "ate the cookie",
    "drove the truck",
    "bought the gas",
]
WORDS = sorted({*" ".join([*WHO, *BRITISH, *AMERICAN]).split()})
choose = random.Random(0).choice


def sentences(done: list[str], n: int) -> tuple[Tensor, Tensor]:
    """Return tokens ``[n, 5]`` of n sentences with ends from ``done``, and the next tokens."""
    tokens = torch.tensor(
        [[WORDS.index(w) for w in f"{choose(WHO)} {choose(done)}".split()] for _ in range(n)]
    )
    return tokens[:, :-1], tokens[:, 1:]


class Transformer(nn.Module):
    """Small causal transformer that predicts the next word at each of five positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.place, self.out = (
            nn.Embedding(len(WORDS), 32),
            nn.Embedding(5, 32),
            nn.Linear(32, len(WORDS)),
        )
        self.block = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[n, 5, words]`` of the next words for tokens ``[n, 5]``."""
        x = self.words(x) + self.place(torch.arange(5, device=x.device).expand_as(x))
        return self.out(
            self.block(x, src_mask=nn.Transformer.generate_square_subsequent_mask(5, x.device))
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    model, local, task = (
        Transformer(),
        fedclade.LocalTraining(epochs=2, lr=0.5),
        fedclade.Task(metrics=["perplexity"]),
    )
    adam = torch.optim.Adam(model.parameters(), lr=0.005)
    for x, y in (sentences(BRITISH + AMERICAN, 64) for _ in range(150)):  # pretraining
        adam.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        adam.step()
    truth = {f"keyboard-{i}": i % 2 for i in range(12)}
    clients = {name: sentences((BRITISH, AMERICAN)[kind], 150) for name, kind in truth.items()}
    federation = fedclade.federation(
        clients, "language", name="keyboards", labels=len(WORDS), true_clusters=truth
    )
    lora, by_b = (
        fedclade.LoRA(targets=("block.linear*",), rank=4),
        fedclade.Signature(of=("lora_B",)),
    )
    for name, parts in (("whole model", {}), ("adapters", {"adapter": lora, "signature": by_b})):
        run = fedclade.simulate(
            "rcfl", model, federation, rounds=10, local=local, task=task, **parts
        )
        found, score, *sent = (
            run.summary[key] for key in ("clusters", "perplexity", "bytes_up", "bytes_down")
        )
        print(
            f"{name:11}  {found['found']} clusters, perplexity {score['mean']:.2f}, {sum(sent) / 1e6:.1f} MB sent"
        )
    print("report:", write_report(run, "adapters.html"))
