"""docs/speed.md, from the medians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CLOSE = 0.01
"""By how much the accuracies of those that do the same work may differ."""

PAGE = """# Speed

A round of federated averaging in fedclade and in five other simulators, at the same work: written by
`benchmarks/peers/run.py`, from [`results.json`](../benchmarks/peers/results.json).

{tables}

Medians of at least {repeats} runs, each a process, by turns in random order; in brackets the smallest and the largest.
*Times* compares with fedclade in the same repeat.

## What is the same

{images} MNIST images for each client, drawn at random; all clients in every round; one epoch of plain SGD in batches of
{batch}, step size {lr}; a weighted mean; the same starting weights of the same plain `nn.Module` (`cnn`: two 5×5
convolutions, a dense layer of 512). Steps were counted: {steps} for each client and round, in all. One function scores
the last model on the 10,000 test images. {verdict}
A round goes from one global model to the next, without evaluation, after one round that is not timed.
{cores} CPU cores, Python {python}, torch {torch}, no GPU.

## What is not

- fedclade trains clients in one program or in a process for each core, as it [finds faster](performance.md#which-one);
  the round that is not timed includes the search.
- Where a peer can use the cores in two ways, both are run once, and the faster goes on (*way*).
- Flower sends messages to Ray actors, which may be on many machines. fluke and PFLlib train clients one after
  another; FL-bench does, too, or uses Ray.
- pfl-research takes batches in a fixed order. PFLlib reads each client's file in every round.
- *No federation*: one module, all images, large batches. What the machine can do at other work; its accuracy does not
  compare.
- What favours peers: clients' tensors stay in memory; evaluation, files and checkpoints are off.

## What installs

{installs} fluke and FL-bench import torchvision, of which there was no CPU build: the names of its operators
are [declared](../benchmarks/peers/shared/vision.py), none is called. Flower 1.42 asked for a later `certifi` than was
to be had.

## Repeat it

```sh
python benchmarks/peers/run.py --prepare
python benchmarks/peers/run.py --check
python benchmarks/peers/run.py
python benchmarks/peers/run.py --page
```

Requirements are pinned beside each peer; an interrupted call goes on where it stopped.
"""


def page(results: Mapping[str, Any]) -> str:
    """Return the page."""
    tasks, settings, machine = results["tasks"], results["work"], results["machine"]
    rows = [row for rows in tasks.values() for row in rows.values()]
    return PAGE.format(
        tables="\n\n".join(
            table(name, mine, results["rounds"][name]) for name, mine in tasks.items()
        ),
        repeats=min(row["repeats"] for row in rows),
        **settings,
        **machine,
        steps=settings["images"] // settings["batch"],
        verdict=verdict(tasks),
        installs=installs(results),
    )


def table(name: str, rows: Mapping[str, Any], rounds: int) -> str:
    """Return the table of a task, from the fastest to the slowest."""
    model, clients = name.split("-")
    lines = [
        f"**`{model}`, {clients} clients**, {rounds} rounds",
        "",
        "| | way | seconds a round | times | samples/s | accuracy |",
        "|:--|:--|--:|--:|--:|--:|",
    ]
    for row in sorted(rows.values(), key=lambda row: row["seconds"][0]):
        ratio = row["times_fedclade"]
        cells = (
            *(row["title"], row["way"], f"{row['seconds'][0]:.3g}"),
            *(
                ranged(ratio) if ratio else "–",
                f"{row['samples_per_second']:,}",
                f"{row['accuracy'][0]:.1%}",
            ),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ranged(values: tuple[float, float, float]) -> str:
    """Return a median with its range."""
    return "{:.3g} ({:.3g}–{:.3g})".format(*values)


def verdict(tasks: Mapping[str, Any]) -> str:
    """Return how far accuracies lie apart, of those that do the same work: their medians, and single runs of one."""
    peers = {
        name: [row["accuracy"] for key, row in rows.items() if key != "central"]
        for name, rows in tasks.items()
    }
    apart = {name: _range([row[0] for row in found]) for name, found in peers.items() if found}
    alone = max(_range(row) for found in peers.values() for row in found)
    worst = max(apart, key=lambda name: apart[name])
    if apart[worst] <= CLOSE:
        return (
            f"Their median accuracies lie at most {100 * apart[worst]:.1f} points apart, single runs of one peer "
            f"{100 * alone:.1f}."
        )
    return f"**Median accuracies of `{worst}` lie {100 * apart[worst]:.1f} points apart: not the same work.**"


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)


def installs(results: Mapping[str, Any]) -> str:
    """Return the versions, and what failed."""
    versions = {
        row["title"]: row["version"]
        for rows in results["tasks"].values()
        for key, row in rows.items()
        if key != "central" and not key.startswith("fedclade")
    }
    said = [", ".join(f"{title} {version}" for title, version in versions.items()) + "."]
    said += [f"{who} failed: `{why}`." for who, why in results["failed"].items()]
    return " ".join(said)
