"""Text of the page ``docs/speed.md``, with the tables of the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

GPU = Path(__file__).resolve().parent / "gpu.jsonl"
"""Lines of the measurements on a GPU."""

CLOSE = 0.01
"""Largest difference in accuracy between simulators that do the same work."""

PAGE = """# Speed

This page answers the question how fast fedclade simulates federated learning, compared with other simulators. It
compares one round of federated averaging (FedAvg) in fedclade and in five other simulators (*peers*): pfl-research,
fluke, FL-bench, PFLlib and Flower. All have the same data, model and training. In short: compared with the peers,
fedclade is {headline}. The reason is that it trains all clients of a round at the same time ([how](performance.md)).
`benchmarks/peers/run.py` made the measurements and writes this page from
[`results.json`](../benchmarks/peers/results.json).

There is a table for each *task*, which is a model and a number of clients. Above the table is also the number of timed
rounds in a run. Each row is a simulator, from the fastest to the slowest. Three rows are not peers:

- *fedclade, plain module* trains the same `nn.Module` as the peers. The numbers above are from this row.
- *fedclade, its own model* trains fedclade's built-in model of the same name, which has the same layers.
- *no federation: large batches* trains one model on all data, without clients, as a rough measure of how fast the
  machine can train. Large batches are not the fastest with every model.

The columns are:

- **way**: how the simulator uses the {cores} CPU cores: the number of threads, processes, workers or actors that train
  clients; if it has several ways, the fastest. Without a federation, it is the number of examples in a batch.
- **seconds per round**: median time of a round.
- **relative time**: time divided by the time of *fedclade, plain module* in the same repeat of the measurement: 2 means
  that a round takes twice as long. The median over the repeats is followed by the smallest and the largest value in
  brackets. It can differ from the ratio of the two median times.
- **samples/s**: number of training samples per second.
- **accuracy**: accuracy of the last model on MNIST's test images, to show that all simulators do the same work.

{tables}

All values are medians of at least {repeats} repeats. In each repeat, every simulator makes one run in a process of its
own, in random order.

## On a GPU

The same tasks on one NVIDIA H200 (16 CPU cores, Python 3.12.3, torch 2.11.0, CUDA 13, 2026-11-26), in fedclade, with
the plain module, and in pfl-research in one process. The clients' tensors are on the GPU in both. Each value is the
median of the rounds of a run, and there are two runs, by turns. The lines of the measurement are in
[`gpu.jsonl`](../benchmarks/peers/gpu.jsonl).

{gpu}

`benchmarks/gpu.sh` repeats the comparison on random images. Several processes of pfl-research on one GPU were not
measured.

## What is the same for all simulators

- **Data**: {images} MNIST images for each client, drawn at random.
- **Clients**: all clients train in every round.
- **Training**: one epoch of plain SGD in batches of {batch}, with step size {lr}. We counted the steps: {steps} for
  each client and round, in every simulator.
- **Aggregation**: the mean of the clients' models, weighted by numbers of examples.
- **Model**: the same plain `nn.Module` with the same initial weights; *fedclade, its own model* starts from
  these weights, too. `mlp` is a multilayer perceptron; `cnn` has two 5×5 convolutions and a dense layer of 512 units.
- **Timing**: a round is timed from one global model to the next, without evaluation. One round before the timed
  rounds is not timed.
- **Evaluation**: the same function scores the last model of every simulator on the 10,000 test images. {verdict}
- **Machine**: {cores} CPU cores, Python {python}, torch {torch}, no GPU, except for the table
  of the section [On a GPU](#on-a-gpu).

## What differs

- **fedclade** trains all clients in one program, or in a process for each core (`workers` in the tables), and
  [measures which is faster](performance.md#which-one). The measurement is in the round that is not timed.
- **Peers with several ways to use the cores** are measured once in each way. All further repeats use the fastest way.
- **Flower** sends messages to Ray actors, which could be on many machines. **fluke** and **PFLlib** train one
  client after another. **FL-bench** trains one client after another or uses Ray. **pfl-research** divides the clients
  among processes.
- **pfl-research** forms batches in a fixed order, without shuffling. **PFLlib** reads the file of each client in
  every round.
- ***No federation*** does different work: it trains one model on all images in large batches. Its accuracy cannot be
  compared with the accuracies of the other rows.
- **In favour of the peers**, the clients' tensors stay in memory, and evaluation, files and checkpoints are
  switched off.

## Installed versions

The versions (for PFLlib and FL-bench, commits of the repository) are: {installs}

- **torchvision.** fluke and FL-bench import torchvision, of which no CPU build was available. Both call none of
  torchvision's compiled operators, so the benchmark only [declares the names of these
  operators](../benchmarks/peers/shared/vision.py).
- **Flower.** Version 1.42 needs a later version of `certifi` than was available.

## Repeat it

In a clone of the repository, these commands install the simulators in separate environments, check that each makes the
same number of steps, measure, and write this page:

```sh
python benchmarks/peers/run.py --prepare
python benchmarks/peers/run.py --check
python benchmarks/peers/run.py
python benchmarks/peers/run.py --page
```

The required versions are pinned in a file `requirements.txt` for each peer. If the measurement (the third command) is
interrupted, run it again: it makes the runs that are missing.
"""


def page(results: Mapping[str, Any]) -> str:
    """Return the page."""
    tasks, settings, machine = results["tasks"], results["work"], results["machine"]
    on_gpu = [json.loads(line) for line in GPU.read_text().splitlines()]
    rows = [row for rows in tasks.values() for row in rows.values()]
    return PAGE.format(
        tables="\n\n".join(
            table(name, mine, results["rounds"][name]) for name, mine in tasks.items()
        ),
        gpu=gpu_table(on_gpu),
        repeats=min(row["repeats"] for row in rows),
        **settings,
        **machine,
        steps=settings["images"] // settings["batch"],
        headline=headline(tasks),
        verdict=verdict(tasks),
        installs=installs(results),
    )


def table(name: str, rows: Mapping[str, Any], rounds: int) -> str:
    """Return the table of a task, from the fastest to the slowest."""
    model, clients = name.split("-")
    lines = [
        f"**`{model}`, {clients} clients**, {rounds} rounds",
        "",
        "| simulator | way | seconds per round | relative time | samples/s | accuracy |",
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


def gpu_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of measurements on a GPU: a row for each task and repeat."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for line in lines:
        found.setdefault(line["task"], {}).setdefault(line["peer"], []).append(line)
    rows = [
        "| task | fedclade, seconds per round | pfl-research, seconds per round | ratio | accuracies |",
        "|:--|--:|--:|--:|:--|",
    ]
    for task, peers in found.items():
        model, clients = task.split("-")
        for mine, other in zip(peers["fedclade"], peers["pfl"], strict=True):
            times = median(mine["seconds"]), median(other["seconds"])
            rows.append(
                f"| `{model}`, {clients} clients | {times[0]:.4f} | {times[1]:.3f} | "
                f"{times[1] / times[0]:.3g} | {mine['accuracy']:.1%}, {other['accuracy']:.1%} |"
            )
    return "\n".join(rows)


def ranged(values: tuple[float, float, float]) -> str:
    """Return a median with its range."""
    return "{:.3g} ({:.3g}–{:.3g})".format(*values)


def headline(tasks: Mapping[str, Any]) -> str:
    """Return a text that states, for each model, how many times as fast as the peers fedclade is."""
    times: dict[str, list[float]] = {}
    for name, rows in tasks.items():
        model = name.split("-")[0]
        peers = [key for key in rows if key != "central" and not key.startswith("fedclade")]
        times.setdefault(model, []).extend(rows[key]["times_fedclade"][0] for key in peers)
    parts = [
        f"{min(ratios):.1f} to {max(ratios):.1f} times as fast with the model `{model}`"
        for model, ratios in times.items()
    ]
    return ", and ".join(parts)


def verdict(tasks: Mapping[str, Any]) -> str:
    """Return a sentence on the differences in accuracy between simulators that do the same work.

    It states the largest difference between medians, and between single runs of one simulator.
    """
    peers = {
        name: [row["accuracy"] for key, row in rows.items() if key != "central"]
        for name, rows in tasks.items()
    }
    apart = {name: _range([row[0] for row in found]) for name, found in peers.items() if found}
    alone = max(_range(row) for found in peers.values() for row in found)
    worst = max(apart, key=lambda name: apart[name])
    if apart[worst] <= CLOSE:
        return (
            f"The simulators' median accuracies differ by at most {100 * apart[worst]:.1f} points, and accuracies of "
            f"single runs of one simulator by at most {100 * alone:.1f} points."
        )
    return (
        f"**The median accuracies of `{worst}` differ by {100 * apart[worst]:.1f} points, so the work is "
        "not the same.**"
    )


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)


def installs(results: Mapping[str, Any]) -> str:
    """Return a text with the versions of the simulators, and with failed measurements."""
    versions = {
        row["title"]: row["version"]
        for rows in results["tasks"].values()
        for key, row in rows.items()
        if key != "central" and not key.startswith("fedclade")
    }
    said = [", ".join(f"{title} {version}" for title, version in versions.items()) + "."]
    said += [f"{who} failed: `{why}`." for who, why in results["failed"].items()]
    return " ".join(said)
