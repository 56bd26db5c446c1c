"""Run all attack programs of this folder, and write the table of attacks, before and after.

Each program writes rows with the attack, whether it succeeded, and what it got. With ``--source`` they attack another
version of fedclade; a program that needs what that version does not have is noted as such.

    git worktree add ../before COMMIT
    python benchmarks/attacks/table.py --source ../before/src --json before.json
    python benchmarks/attacks/table.py --json after.json
    python benchmarks/attacks/table.py --markdown before.json after.json

``lies.py`` takes ten minutes and has a table of its own: it is run if it is named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
        }
    ]


def outcome(rows: Sequence[dict[str, Any]]) -> str:
    """Say how many of the variants of an attack succeeded."""
    if not rows:
        return "–"
    return f"{sum(bool(row['succeeded']) for row in rows)} of {len(rows)}"


def by_attack(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the rows by program and attack; what follows a comma in an attack's name is a variant of it."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["program"], row["attack"].partition(",")[0]), []).append(row)
    return found


def markdown(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> str:
    """Return the table of both versions, a row for each attack with the number of variants that succeed.

    Of the first variant's detail it shows what comes before :data:`common.REST`.
    """
    earlier = by_attack(before)
    heads = (
        "program",
        "attack",
        "successes before",
        "successes now",
        "result of the first variant now",
    )
    lines = [f"| {' | '.join(heads)} |", "|:--|:--|--:|--:|:--|"]
    for (program, attack), rows in by_attack(after).items():
        name = attack.removeprefix(f"{program} ")
        got = rows[0]["detail"].partition(REST)[0]
        cells = [
            f"`{program}`",
            name,
            outcome(earlier.get((program, attack), [])),
            outcome(rows),
            got,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
        help="print the table of both",
    )
    arguments = parser.parse_args()
    if arguments.markdown:
        before, after = (json.loads(file.read_text()) for file in arguments.markdown)
        print(markdown(before, after))
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
