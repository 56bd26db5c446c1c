"""Compare the results of about 160 short runs with earlier results, bit by bit, by digests.

The runs cover every registered method, engine, rule of aggregation, kind of privacy and kind of
adversary; signatures, streams, drift, availability, faults, newcomers, adapters, frozen, personal
and common parts of models; the network and its messages, secure aggregation, and two Ray actors
(``golden_runs/cases.py``). The digest of a run covers its config, summary, tables with all columns,
events, parameter tree with all models, similarities, the stored values of clients, and messages. It
does not cover times, nor values that depend on the machine or are random keys. So equal digests
mean that runs agree to the last bit.

    python benchmarks/golden.py write golden.json [--jobs 2]
    python benchmarks/golden.py check golden.json [--only cfl] [--ignore messages]
    python benchmarks/golden.py check --against HEAD~3
    python benchmarks/golden.py figures

``write`` and ``check`` must run on the same machine: rounding depends on the processor and on
torch, so digests are not committed. Rounding the values before the digest would not help, because
some value would always be near a boundary between two rounded values. ``check --against`` computes
the digests of another commit from its source, in a temporary worktree, with the cases and the
digest functions of the present checkout, and compares.

Results that are the same on every machine up to a tolerance are committed:
``golden_runs/figures.json`` has the loss, score, clusters and bytes of each case, and is written by
``figures``. The slow tests (``tests/test_golden.py``) run each case twice, the second time
interrupted and continued, and require equal digests, and figures within a tolerance. They also
plant errors (``golden_runs/planted.py``), each of which must change a digest.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums of several threads are rounded differently

import fedclade  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Any

from golden_runs.cases import Case, named
from golden_runs.digest import digests_of, figures_of
from golden_runs.running import ray_cluster, run_case

HERE = Path(__file__).parent
FIGURES = HERE / "golden_runs" / "figures.json"

Result = dict[str, Any]
"""Results of one case: ``digests`` by part, ``figures``, and ``seconds`` of processor time."""


def main() -> int:
    """Execute the command; return 1 if a run differs."""
    arguments = parse_arguments()
    if arguments.do == "figures":
        write_figures(arguments.only, arguments.jobs)
        return 0
    if arguments.do == "write":
        digests = run_and_print(arguments.only, arguments.jobs)
        arguments.file.write_text(json.dumps(digests, indent=1) + "\n")
        return 0
    known = known_digests(arguments)
    return check_digests(known, arguments)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "do",
        choices=("write", "check", "figures"),
        help="write digests, compare with digests, or write the committed figures",
    )
    parser.add_argument("file", type=Path, nargs="?", help="JSON file of digests")
    parser.add_argument("--against", help="commit to compare with, instead of a file")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="run only cases whose names contain this text; can be repeated",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        help="part of the digests that may differ; can be repeated",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of processes that run cases (default: 1)"
    )
    parser.add_argument(
        "--source", type=Path, help="folder from which fedclade must have been imported"
    )
    arguments = parser.parse_args()
    if arguments.source and arguments.source not in Path(fedclade.__file__).parents:
        parser.error(f"fedclade comes from {fedclade.__file__}, and not from {arguments.source}")
    if arguments.do == "write" and arguments.file is None:
        parser.error("write needs a FILE")
    if arguments.do == "check" and (arguments.file is None) == (arguments.against is None):
        parser.error("check needs a FILE or --against COMMIT")
    if not named(arguments.only):
        parser.error(f"no case has {' or '.join(map(repr, arguments.only))} in its name")
    return arguments


def known_digests(arguments: argparse.Namespace) -> Mapping[str, Mapping[str, str]]:
    """Return the digests to compare with, from a file or made from another commit's source."""
    if arguments.file is not None:
        return json.loads(arguments.file.read_text())
    with tempfile.TemporaryDirectory() as folder:
        digests = Path(folder) / "digests.json"
        worktree = Path(folder) / "worktree"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--detach", worktree, arguments.against], check=True)
        try:
            write_with_source(worktree / "src", digests, arguments)
        finally:
            subprocess.run([*git, "remove", "--force", worktree], check=True)
        return json.loads(digests.read_text())


def write_with_source(source: Path, digests: Path, arguments: argparse.Namespace) -> None:
    """Write the digests of this program's cases with another source of fedclade.

    Raises
    ------
    SystemExit
        If the cases do not run with this source, for example because a name has changed since.
    """
    command = [sys.executable, __file__, "write", str(digests), "--jobs", str(arguments.jobs)]
    command += ["--source", str(source)]
    for text in arguments.only:
        command += ["--only", text]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    if subprocess.run(command, check=False, env=environment).returncode:
        sys.exit(
            f"the cases do not run with the source of {arguments.against}, see above; write digests "
            "with that commit's own benchmarks/golden.py, and check them here"
        )


def run_and_print(only: Sequence[str], jobs: int) -> dict[str, dict[str, str]]:
    """Run cases, print a line for each, and return their digests by part."""
    digests: dict[str, dict[str, str]] = {}
    total = 0.0
    for case, result in run_cases(named(only), jobs):
        digests[case.name] = result["digests"]
        total += result["seconds"]
        print(f"{result['seconds']:5.1f} s  {case.name}", flush=True)
    print(f"{len(digests)} cases, {total:.0f} s of processor time")
    return digests


def check_digests(known: Mapping[str, Mapping[str, str]], arguments: argparse.Namespace) -> int:
    """Run cases, and print the parts that differ from known digests; return 1 if any differs."""
    changed: list[str] = []
    cases = named(arguments.only)
    for case, result in run_cases(cases, arguments.jobs):
        different = changed_parts(known.get(case.name), result["digests"], arguments.ignore)
        if different:
            changed.append(case.name)
        verdict = f"DIFFERS: {', '.join(different)}" if different else "same"
        print(f"{case.name:60}{verdict}", flush=True)
    same = len(cases) - len(changed)
    print(f"{same} of {len(cases)} the same, fedclade {fedclade.__version__}")
    return 1 if changed else 0


def changed_parts(
    known: Mapping[str, str] | None, digests: Mapping[str, str], ignored: Sequence[str]
) -> list[str]:
    """Return the names of parts that differ from known digests, except ignored parts.

    If there are no known digests of the case, the result is a message instead.
    """
    if known is None:
        return ["all: the case is not in the file"]
    names = sorted(known.keys() | digests.keys())
    return [name for name in names if known.get(name) != digests.get(name) and name not in ignored]


def write_figures(only: Sequence[str], jobs: int) -> None:
    """Compute the committed figures again, of all cases or only of the named cases."""
    figures = json.loads(FIGURES.read_text()) if only else {}
    for case, result in run_cases(named(only), jobs):
        figures[case.name] = result["figures"]
        print(f"{case.name:60}{result['figures']}", flush=True)
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(figures.items())]
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def run_cases(cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, Result]]:
    """Run cases in ``jobs`` processes, and yield each with its result.

    The order is that of the cases, but with the cases on Ray at the end.
    """
    logging.getLogger("fedclade").setLevel(logging.ERROR)
    on_ray = [case for case in cases if case.kind == "ray"]
    others = [case for case in cases if case.kind != "ray"]
    if jobs == 1:
        for case in others:
            yield case, result_of(case)
    else:
        # Processes are spawned, because threads of torch and Flower do not survive a fork.
        pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
        with pool:
            yield from zip(others, pool.map(result_of, others), strict=True)
    # Ray's actors are further processes, so these cases run after the others.
    with ray_cluster() if on_ray else nullcontext():
        for case in on_ray:
            yield case, result_of(case)


def result_of(case: Case) -> Result:
    """Run a case in a temporary folder, and return its digests and figures."""
    logging.getLogger("fedclade").setLevel(logging.ERROR)  # also in a spawned process
    begun = process_time()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_case(case, Path(folder))
    return {
        "digests": digests_of(outcome),
        "figures": figures_of(outcome),
        "seconds": process_time() - begun,
    }


if __name__ == "__main__":
    sys.exit(main())
