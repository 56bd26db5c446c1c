"""Run all attack programs of this folder, and write the tables of attacks, before and after.

Each program writes rows with the attack, whether it succeeded, what it got, and what it has used up.
With ``--source`` the programs attack another version of fedclade. A program that needs features that
this version does not have is noted as such.

    git worktree add ../before COMMIT
    python benchmarks/attacks/table.py --source ../before/src --json before.json
    python benchmarks/attacks/table.py --json after.json
    python benchmarks/attacks/table.py --markdown before.json after.json
    python benchmarks/attacks/table.py --summary before.json after.json

``--markdown`` prints a row for each attack, and ``--summary`` a row for each goal of an attacker.
``lies.py`` takes ten minutes and has a table of its own: it is run if it is named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import REST

HERE = Path(__file__).parent
PROGRAMS = (
    "private_refusals",
    "disclosures",
    "limits",
    "partings",
    "masked_sums",
    "secure_sums",
    "over_tls",
)
APART = ("lies",)
"""Programs with a table of their own."""

PARTS = ("common", "lying_server", "over_tls_app", "table")
"""Modules that are no attack programs."""

LIMIT = 1800
"""Seconds that a program may take."""

HEADS = (
    "program",
    "attack",
    "successes before",
    "successes now",
    "budget used now",
    "result of the first variant now",
)
"""Columns of the table of attacks."""

SUMMARY_HEADS = (
    "goal of the attacker",
    "program",
    "successes before",
    "successes now",
    "largest budget used now",
)
"""Columns of the table of goals."""


@dataclass(frozen=True)
class Goal:
    """Goal of an attacker, which several attacks of a program share.

    Parameters
    ----------
    text
        The goal in a few words.
    program
        Name of the program.
    attacks
        The attacks of the program with this goal, by the beginnings of their names. By default all.
    """

    text: str
    program: str
    attacks: tuple[str, ...] = ("",)

    def includes(self, program: str, attack: str) -> bool:
        """Return whether an attack of a program has this goal."""
        return program == self.program and attack.startswith(self.attacks)


GOALS = (
    Goal(
        "learn from refusals and other replies of a client with differential privacy what its noise "
        "should hide, or obtain replies that its privacy ledger does not record",
        "private_refusals",
    ),
    Goal(
        "learn about a client's data from values that have neither a mask nor noise", "disclosures"
    ),
    Goal("find the exact number of a client's examples", "limits", ("size",)),
    Goal(
        "read an image from an update, by settings with which only one example counts",
        "limits",
        ("decay",),
    ),
    Goal(
        "ask one client for masked updates and the other clients of its sum for updates in clear",
        "limits",
        ("bystanders",),
    ),
    Goal("compute single images from updates on parts of a client's data", "partings"),
    Goal(
        "learn about a client's data from the values that it sends along with a masked update",
        "masked_sums",
        ("clear", "norm"),
    ),
    Goal(
        "as a malicious client, spoil the model by false updates under masks, without an event of "
        "the run that shows it",
        "masked_sums",
        ("liar_sum",),
    ),
    Goal(
        "open the update of a single client by false messages of secure aggregation", "secure_sums"
    ),
    Goal(
        "obtain the update of a single client over a real network",
        "over_tls",
        ("update alone", "sum of one", "neighbourhoods"),
    ),
    Goal(
        "obtain losses or exact scores from a client over a real network",
        "over_tls",
        ("evaluate", "own loss"),
    ),
    Goal(
        "learn from refusals of a client with differential privacy, or obtain replies that are not "
        "recorded, over a real network",
        "over_tls",
        ("refusals", "booked"),
    ),
)
"""Goals of the attacks of :data:`PROGRAMS`. Each attack has one of them."""


def run(program: str, source: Path) -> list[dict[str, Any]]:
    """Run a program against the version of fedclade in a folder; return its rows."""
    environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / f"{program}.py"), "--json", str(file)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        if file.exists():
            return [{"program": program, **row} for row in json.loads(file.read_text())]
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return [
        {
            "program": program,
            "attack": "",
            "succeeded": None,
            "detail": f"cannot be run: {lines[-1]}",
            "budget": "",
        }
    ]


def outcome(rows: Sequence[dict[str, Any]]) -> str:
    """Say how many of the variants of an attack succeeded."""
    if not rows:
        return "–"
    return f"{sum(bool(row['succeeded']) for row in rows)} of {len(rows)}"


def by_attack(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the rows by program and attack, without the program's name in the attack's name.

    Text after a comma in an attack's name names a variant of the attack.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        program = row["program"]
        attack = row["attack"].partition(",")[0].removeprefix(f"{program} ")
        found.setdefault((program, attack), []).append(row)
    return found


def budget_of(row: dict[str, Any]) -> str:
    """Return the budget that an attack has used up. Rows of older files do not have it."""
    return row.get("budget", "")


def numbers_in_budget(row: dict[str, Any]) -> list[float]:
    """Return all numbers of a budget, by which budgets are compared. Most begin with the requests."""
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", budget_of(row))]


def in_lines(heads: Sequence[str], alignment: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], alignment, *lines[1:]])


def markdown(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> str:
    """Return the table of both versions, a row for each attack with the number of variants that succeed.

    The budget is that of the first variant. Of its detail, the table shows the text before
    :data:`common.REST`.
    """
    earlier = by_attack(before)
    lines: list[list[str]] = []
    for (program, attack), rows in by_attack(after).items():
        cells = [f"`{program}`", attack, outcome(earlier.get((program, attack), [])), outcome(rows)]
        lines.append([*cells, budget_of(rows[0]), rows[0]["detail"].partition(REST)[0]])
    return in_lines(HEADS, "|:--|:--|--:|--:|:--|:--|", lines)


def summary(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> str:
    """Return a short table of both versions: a row for each goal of an attacker.

    The budget is that of the variant with the most requests. Between variants with the same number
    of requests, the further numbers of their budgets decide.
    """
    lines: list[list[str]] = []
    for goal in GOALS:
        earlier, now = rows_with(goal, before), rows_with(goal, after)
        if now:
            budget = budget_of(max(now, key=numbers_in_budget))
            lines.append([goal.text, f"`{goal.program}`", outcome(earlier), outcome(now), budget])
    return in_lines(SUMMARY_HEADS, "|:--|:--|--:|--:|:--|", lines)


def rows_with(goal: Goal, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of all variants of the attacks with a goal."""
    return [
        row
        for attack, variants in by_attack(rows).items()
        if goal.includes(*attack)
        for row in variants
        if row["succeeded"] is not None
    ]


def main() -> int:
    """Run programs, or write the table; return 1 if an attack succeeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", default=[], help=f"default: {', '.join(PROGRAMS)}")
    parser.add_argument(
        "--source", type=Path, default=HERE.parents[1] / "src", help="folder src of another version"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--markdown",
        type=Path,
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="print the table of attacks from two files of --json",
    )
    parser.add_argument(
        "--summary",
        type=Path,
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="print the table of goals from two files of --json",
    )
    arguments = parser.parse_args()
    for write, files in ((markdown, arguments.markdown), (summary, arguments.summary)):
        if files:
            before, after = (json.loads(file.read_text()) for file in files)
            print(write(before, after))
            return 0
    rows: list[dict[str, Any]] = []
    for program in arguments.programs or PROGRAMS:
        found = run(program, arguments.source)
        rows += found
        print(
            f"{program}: {sum(bool(row['succeeded']) for row in found)} of {len(found)} attacks succeed",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["succeeded"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
