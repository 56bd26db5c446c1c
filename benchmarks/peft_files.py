"""Adapters of fedclade and of peft: each other's files, and a PeftModel in a simulation, with the outputs compared.

Neither needs the other, and no test installs peft. In an environment of its own:

    pip install peft
    python benchmarks/peft_files.py

Exits with 1 if the outputs of one side are not those of the other, or if clients are not in their true clusters.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fedclade
from fedclade.core.params import Layout
from fedclade.models import Parts, load_adapter, save_adapter
from fedclade.runs import export_adapter

CLOSE = 1e-6
"""The largest difference of two outputs that are taken for the same, as a share of the largest."""

RANK, ALPHA = 4, 12.0
FEATURES, LABELS, CLIENTS = 16, 4, 8

Row = tuple[str, str, bool]
"""What was checked, what it came to, and whether that is right."""


class Block(nn.Module):
    """Two dense layers beside which others pass by."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x, and what the block adds."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Base(nn.Module):
    """A model that is there before its adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = (
            nn.ModuleList(Block(FEATURES) for _ in "12"),
            nn.Linear(FEATURES, LABELS),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the labels."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def base() -> Base:
    torch.manual_seed(0)
    return Base()


def drawn(module: nn.Module) -> nn.Module:
    """Give what is trained values other than those that it begins with: those of B are zeros."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    return module.eval()


def compared(what: str, one: nn.Module, other: nn.Module) -> Row:
    """Return how far the outputs of two models are apart."""
    inputs = torch.randn(64, FEATURES, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        of_one, of_other = one.eval()(inputs), other.eval()(inputs)
    apart = float((of_one - of_other).abs().max() / of_one.abs().max())
    return what, f"outputs {apart:.0e} apart", apart <= CLOSE


def peft_model(targets: list[str], train: list[str]) -> Any:
    config: Any = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=targets, modules_to_save=train or None
    )
    return peft.get_peft_model(base(), config)  # pyright: ignore[reportArgumentType]


def of_peft(folder: Path) -> nn.Module:
    return peft.PeftModel.from_pretrained(base(), str(folder))  # pyright: ignore[reportArgumentType]


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def files(folder: Path) -> Iterator[Row]:
    """Write with the one and read with the other, with and without a head that is trained besides."""
    for what, targets, train in (
        ("pairs", ["up", "down"], []),
        ("pairs and a head", ["up"], ["head"]),
    ):
        lora = fedclade.LoRA(targets=tuple(targets), rank=RANK, alpha=ALPHA, train=tuple(train))
        ours, theirs = drawn(Parts(adapter=lora).applied(base())), drawn(peft_model(targets, train))
        at = folder / what
        save_adapter(at / "1", trained(ours), ALPHA)
        yield compared(f"our file in peft: {what}", ours, of_peft(at / "1"))
        theirs.save_pretrained(at / "2")
        yield compared(f"peft's file in ours: {what}", theirs, load_adapter(at / "2", base()))
        save_adapter(at / "3", trained(theirs), ALPHA)
        yield compared(f"our file of a PeftModel in peft: {what}", theirs, of_peft(at / "3"))


def clients() -> fedclade.Federation:
    """Make up clients of two kinds, whose labels are others for the same inputs."""
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(2, FEATURES, LABELS, generator=draw)
    inputs = torch.randn(CLIENTS, 240, FEATURES, generator=draw)
    data = {
        f"client-{k}": (inputs[k], (inputs[k] @ truth[k % 2]).argmax(1)) for k in range(CLIENTS)
    }
    kinds = {name: k % 2 for k, name in enumerate(data)}
    return fedclade.federation(data, labels=LABELS, true_clusters=kinds)


def simulations(folder: Path) -> Iterator[Row]:
    """Let a PeftModel be trained by clients of two kinds, and compare the exported adapters."""
    federation, by_b = clients(), fedclade.Signature(of=("lora_B",))
    local = fedclade.LocalTraining(epochs=2, batch_size=20, lr=0.2)
    model = peft_model(["up", "down"], [])
    for engine in ("loop", "stacked"):
        method = fedclade.FLHC(rounds_before=1, n_clusters=2, metric="cosine")
        run = fedclade.simulate(
            method, model, federation, rounds=4, local=local, signature=by_b, engine=engine
        )
        ari = float(run.metric_rows[-1]["ari"])
        yield f"a PeftModel, {engine}: clusters by B", f"ARI {ari:.2f}", ari == 1.0
        for leaf in run.tree.leaves:
            path = export_adapter(run, folder / f"{engine}-{leaf.id}", node=leaf.id, alpha=ALPHA)
            mine = copy.deepcopy(model)
            Layout.of(mine).load(leaf.params, mine)
            yield compared(f"its adapter of node {leaf.id} in peft", mine, of_peft(path))
            yield compared(
                f"its adapter of node {leaf.id} in ours", mine, load_adapter(path, base())
            )


def main() -> None:
    table = Table(
        title=f"fedclade {fedclade.__version__}, peft {peft.__version__}, torch {torch.__version__}"
    )
    for column in ("what", "came to", ""):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        rows = [*files(Path(folder)), *simulations(Path(folder))]
    for what, came_to, right in rows:
        table.add_row(what, came_to, "as it should" if right else "WRONG")
    Console(width=110).print(table)
    if not all(right for *_, right in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
