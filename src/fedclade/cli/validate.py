"""Command ``validate``, which checks a config.

The module imports no package that only runs and reports need, so that errors of a config are shown
soon.
"""

from __future__ import annotations

from pathlib import Path

from fedclade.cli.options import new_console, say
from fedclade.config import (
    find_config,
    is_own_data,
    is_scenario,
    known_scales,
    read_config,
    read_scenarios,
)
from fedclade.data import Federation
from fedclade.report import count, shortened


def validate(*, config: str, data_dir: Path | None, without_data: bool) -> None:
    """Carry out the command ``fedclade validate``."""
    path = find_config(config)
    console = new_console()
    if is_scenario(path):
        for scale in (None, *known_scales(path)):
            read_scenarios(path, scale=scale)
        say(console, f"{path} is valid")
        return
    checked = read_config(path)
    lines: list[str] = []
    if not without_data and (data_dir is not None or is_own_data(checked.data)):
        lines = describe_federation(checked.federation(data_dir))
    # Only now, since the data may contradict the config.
    say(console, f"{path} is valid")
    for line in lines:
        say(console, line)


def describe_federation(federation: Federation) -> list[str]:
    """Describe the data of a config in lines of text: examples, inputs, targets and newcomers."""
    pool = federation.pool
    clients = federation.clients
    rows = [len(client.train) + len(client.validation) + len(client.test) for client in clients]
    tested = sum(len(client.test) for client in clients)
    fewest, most = min(rows), max(rows)
    each = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    lines = [
        f"data: {federation}, {each} examples each, {sum(rows):,} in all, "
        f"of which {tested:,} are for tests",
        f"inputs: {' × '.join(map(str, pool.x.shape[1:]))} for each example",
        f"target: {pool.task}, {count(pool.outputs, 'output')} of a model",
    ]
    if federation.newcomers is not None:
        lines.append(f"held back: {count(len(federation.newcomers), 'newcomer')}")
    if pool.columns is not None and pool.columns.labels:
        lines.append(f"labels: {shortened(pool.columns.labels)}")
    return lines
