"""Table II of FedGroup: how many clients, samples and parameters there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from fedclade.papers.experiment import ResultCache, Settings
from fedclade.papers.fedgroup_runs import SHARES_OUT, Task, absent, federation_of, there
from fedclade.papers.outcome import Claim, Outcome, Row, Summary

ROUNDED = 50
"""Samples by which shares that are rounded down differ from draw to draw, and do not count."""


def measure_statistics(
    tasks: Mapping[str, Task], table: Mapping[str, Sequence[int]], bench: ResultCache, settings: Settings
) -> Outcome:
    """Count the parameters of every model, and the clients and samples of the data that is there."""
    rows, exact, counted = list[Row](), list[bool](), set[str]()
    present = there(tasks, bench, settings)
    for name in settings["tasks"]:
        task, (clients, samples, parameters) = tasks[name], table.get(name, (None, None, None))
        found = bench.piece(f"{name}, parameters", lambda task=task: task.parameters)
        rows.append(Row(f"{name} · parameters", parameters, found, "", (float(found),), within=0.0))
        exact.append(parameters in (None, found))
        if name in present and task.data not in counted:
            counted.add(task.data)
            counts = [_counts(bench, settings, task, seed) for seed in settings["seeds"]]
            devices, examples = (tuple(float(count[key]) for count in counts) for key in ("clients", "samples"))
            rows.append(Row(f"{task.data} · devices", clients, fmean(devices), "", devices, within=0.0))
            rows.append(Row(f"{task.data} · samples", samples, fmean(examples), "", examples, within=ROUNDED))
    told = sum(exact)
    claims = (
        Claim(
            "every model has the number of parameters of Table II",
            told == len(exact),
            f"{told} of {len(exact)} to the last one",
        ),
    )
    series = {row.what: [row.paper, row.ours] for row in rows}
    summary = Summary(
        "Six models of 610 to 415,258 parameters, for 100 to 1,000 clients.",
        f"{told} of {len(exact)} models have the very number of parameters; "
        + "; ".join(f"{row.what.replace(' · ', ': ')} {row.ours:,.0f}" for row in rows if row.what.endswith("samples"))
        + ".",
        "Synthetic's sizes are log-normal with a heavy tail: the sum over 100 clients is another for every seed.",
    )
    return Outcome(tuple(rows), claims, series, (SHARES_OUT, *absent(tasks, bench, settings)), summary)


def _counts(bench: ResultCache, settings: Settings, task: Task, seed: int) -> dict[str, int]:
    def make() -> dict[str, int]:
        clients = federation_of(task.data, settings, bench, seed).clients
        samples = sum(len(client.train) + len(client.test) for client in clients)
        return {"clients": len(clients), "samples": samples}

    return bench.piece(f"{task.data}, seed {seed}", make)
