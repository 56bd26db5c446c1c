"""Compare the speed of all engines in two versions of fedclade.

Each version is measured by its own ``benchmarks/engine.py``, because names of modules may differ.
The two versions run alternately, so that changes of the machine's speed affect both. The table has
the best of all turns, in samples per second of local training. Further options are passed to
``engine.py``; without any, ``--quick`` is passed.

    git worktree add ../before COMMIT
    python benchmarks/engine_versions.py ../before --turns 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent

Speeds = dict[str, dict[str, float]]
"""Samples/s by model and engine."""


def measure(checkout: Path, options: list[str]) -> Speeds:
    """Run ``engine.py`` of one version, and return what it measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "engine.json"
        script = checkout / "benchmarks" / "engine.py"
        command = [sys.executable, str(script), "--json", str(file), *options]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        return json.loads(file.read_text(encoding="utf-8"))


def best_of(turns: list[Speeds]) -> Speeds:
    """Return the largest speed of each model and engine in several turns."""
    best: Speeds = {}
    for model, speeds in turns[0].items():
        best[model] = {}
        for name in speeds:
            best[model][name] = max(turn[model][name] for turn in turns)
    return best


def main() -> None:
    """Measure both versions alternately, and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="checkout of another version")
    parser.add_argument(
        "--turns", type=int, default=3, help="measurements of each version (default: 3)"
    )
    arguments, options = parser.parse_known_args()
    options = options or ["--quick"]
    others: list[Speeds] = []
    these: list[Speeds] = []
    for _ in range(arguments.turns):
        others.append(measure(arguments.other.resolve(), options))
        these.append(measure(HERE, options))
    other = best_of(others)
    this = best_of(these)
    print("| model | engine | before | now | ratio |\n|:--|:--|--:|--:|--:|")
    for model, speeds in this.items():
        for name, now in speeds.items():
            before = other.get(model, {}).get(name)
            is_speed = "/" not in name  # engine.py also writes ratios, such as auto/loop
            if before and is_speed:
                print(f"| {model} | {name} | {before:,.0f} | {now:,.0f} | {now / before:.2f} |")


if __name__ == "__main__":
    main()
