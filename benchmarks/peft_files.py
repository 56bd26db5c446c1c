"""Check that fedclade and peft can read each other's files of adapters.

The script also trains a ``PeftModel`` in a simulation, and compares the outputs of the exported
adapters in both libraries. fedclade does not need peft. In a separate
environment:

    pip install peft
    python benchmarks/peft_files.py

The exit status is 1 if outputs differ, or if clients are not in their true clusters.
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
"""Largest difference of outputs that count as equal, as a share of the largest output."""

RANK, ALPHA = 4, 12.0
FEATURES, LABELS, CLIENTS = 16, 4, 8

Row = tuple[str, str, bool]
"""Description of a check, its result, and whether the result is right."""


class Block(nn.Module):
    """Residual block of two dense layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of x and the output of the layers."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Base(nn.Module):
    """Base model, to which adapters are added."""

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
    """Set all trainable parameters to random values, because B is initially zero."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    return module.eval()


def compared(what: str, one: nn.Module, other: nn.Module) -> Row:
    """Compare the outputs of two models on random inputs."""
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
    """Write files with one library and read them with the other, with and without a head."""
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
    """Return synthetic clients of two kinds, which have different labels for the same inputs."""
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(2, FEATURES, LABELS, generator=draw)
    inputs = torch.randn(CLIENTS, 240, FEATURES, generator=draw)
    data = {
        f"client-{k}": (inputs[k], (inputs[k] @ truth[k % 2]).argmax(1)) for k in range(CLIENTS)
    }
    kinds = {name: k % 2 for k, name in enumerate(data)}
    return fedclade.federation(data, labels=LABELS, true_clusters=kinds)


def simulations(folder: Path) -> Iterator[Row]:
    """Train a PeftModel on clients of two kinds, and compare the exported adapters."""
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
    for column in ("check", "result", ""):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        rows = [*files(Path(folder)), *simulations(Path(folder))]
    for what, came_to, right in rows:
        table.add_row(what, came_to, "ok" if right else "WRONG")
    Console(width=110).print(table)
    if not all(right for *_, right in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
