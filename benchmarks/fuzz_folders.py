"""Fuzz test of damaged run folders: each must be read correctly, or refused with one error line.

The script makes a few small runs: finished and unfinished, with checksums, and without checksums as
in an older format. For each seed, it damages a copy of a run (flipped bits; truncated, missing or
swapped files; missing or odd keys), and opens it with ``Run.load`` and the commands ``tree``,
``export``, ``report`` and ``resume``. Tracebacks and hangs are failures.

    python benchmarks/fuzz_folders.py --folders 500 --seed 0
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from fedclade import Run, RunInterrupted
from fedclade.cli import main as command_line
from fedclade.config import check_config
from fedclade.core.errors import FedcladeError
from fedclade.report import style
from fedclade.runs.store.manifest import write_manifest
from fedclade.runs.store.run import FORMAT

LIMIT = 20
"""Processor seconds that each command may take.

It may take five times as many seconds by the clock, so that a command that only waits also ends.
"""

ROUNDS = 4

COMMANDS = ("load", "tree", "export", "report", "resume")

OUTCOMES = ("read right", "refused", "read wrong", "traceback", "hang", "half-written")
"""Outcomes of a command; all except the first two are failures."""

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        10**30,
        2.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "[bold]x[/]",
        "[/]",
        "x" * 5000,
        "\x1b[31m",
    ),
    *([], [[]], {}, {"a": 1}, [1, 2, 3], "cfl", "../..", "javascript:alert(1)"),
)
"""Values that replace values of a file."""


class TooLongError(BaseException):
    """Time limit of a command."""


# Runs to damage


def settings(algorithm: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    data = {
        "name": "digits",
        "clients": 6,
        "samples_per_client": 40,
        "shift": "label_swap",
        "clusters": 2,
    }
    config = {
        "rounds": ROUNDS,
        "engine": "loop",
        "checkpoint_every": 1,
        "data": data,
        "model": {"name": "mclr"},
    }
    return {**config, "local": {"batch_size": 20}, "algorithm": dict(algorithm), **changes}


def make_bases(folder: Path) -> dict[str, Path]:
    """Make the runs, and return their folders by name."""
    cfl = settings({"name": "cfl", "eps2": 0.1, "split_rounds": [2, 3]}, faults={"dropout": 0.2})
    fl_hc = settings({"name": "fl_hc", "rounds_before": 2, "n_clusters": 2})
    rcfl = settings({"name": "rcfl"})
    bases = {name: folder / name for name in ("cfl", "fl_hc", "rcfl", "unfinished")}
    for name, config in {"cfl": cfl, "fl_hc": fl_hc, "rcfl": rcfl}.items():
        checked = check_config(config)
        checked.run(checked.federation(), folder=bases[name])
    row = {
        "name": "a newcomer",
        "path": [0],
        "fits": True,
        "right": None,
        "margin": None,
        "by": "",
        "scores": [],
    }
    row |= dict.fromkeys(("accuracy", "accuracy_root", "accuracy_own", "accuracy_fine_tuned"), 0.5)
    told = {
        "summary": {"newcomers": 1, "fit_nowhere": 0, "assignment_accuracy": None, **row},
        "newcomers": [row],
    }
    (bases["cfl"] / "newcomers.json").write_text(json.dumps(told))
    checked, rounds = check_config(cfl), iter(range(1, ROUNDS))
    with contextlib.suppress(RunInterrupted):
        checked.run(
            checked.federation(),
            folder=bases["unfinished"],
            stop=lambda: next(rounds) == ROUNDS - 1,
        )
    for name in ("cfl", "fl_hc"):
        bases[f"{name}, format 2"] = unsealed(bases[name], folder / f"{name}-2")
    return bases


def unsealed(folder: Path, to: Path) -> Path:
    """Copy a folder to one in format 2, which has no checksums."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("manifest.json", "checkpoints"))
    summary = json.loads((to / "summary.json").read_text())
    (to / "summary.json").write_text(json.dumps({**summary, "format": 2}))
    (to / "config.toml").write_text(tomli_w.dumps(tomllib.loads((to / "config.toml").read_text())))
    return to


def seal(folder: Path) -> None:
    """Update the checksums of a run, so that its damage counts as an intended change.

    The checksums of checkpoints are not updated.
    """
    if (manifest := folder / "manifest.json").is_file():
        manifest.unlink()
        write_manifest(manifest, FORMAT)
    config = folder / "config.toml"
    if config.is_file():
        text = config.read_bytes().decode(errors="replace")
        config.write_text(
            "\n".join(line for line in text.split("\n") if not line.startswith("# SHA-256"))
        )


# Kinds of damage


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, draw: np.random.Generator) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.integers(1, 9)):
        if content:
            content[draw.integers(len(content))] ^= 1 << int(draw.integers(8))
    path.write_bytes(content)


def cut(path: Path, draw: np.random.Generator) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.integers(len(content) + 1)])


def lengthen(path: Path, draw: np.random.Generator) -> None:
    path.write_bytes(path.read_bytes() + draw.bytes(int(draw.integers(1, 100))))


def lose(path: Path, draw: np.random.Generator) -> None:
    path.unlink()


def become_a_folder(path: Path, draw: np.random.Generator) -> None:
    path.unlink()
    path.mkdir()


def garble(path: Path, draw: np.random.Generator) -> None:
    path.write_bytes(
        draw.choice([b"[" * 10**5, b"\xff\xfe\x00", b"null\n", b"{}\n", b"", b"9" * 5000])
    )


def swap(path: Path, draw: np.random.Generator) -> None:
    other = choice(draw, [each for each in path.parent.iterdir() if each.is_file()])
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def stray(path: Path, draw: np.random.Generator) -> None:
    (path.parent / choice(draw, [".DS_Store", ".nfs0001", "notes.txt", "Thumbs.db"])).write_bytes(
        draw.bytes(50)
    )


def change(path: Path, draw: np.random.Generator) -> None:
    """Remove or replace a value in a file, so that the file remains valid in its format."""
    readers: Mapping[str, Callable[[Path, np.random.Generator], None]] = {
        **{".json": change_json, ".jsonl": change_lines, ".toml": change_toml},
        **{".parquet": change_table, ".npz": change_arrays, ".safetensors": change_tensors},
    }
    readers.get(path.suffix, flip)(path, draw)


def change_json(path: Path, draw: np.random.Generator) -> None:
    path.write_text(json.dumps(changed(json.loads(path.read_text()), draw)))


def change_lines(path: Path, draw: np.random.Generator) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed(lines, draw) or []))


def change_toml(path: Path, draw: np.random.Generator) -> None:
    try:
        path.write_text(tomli_w.dumps(changed(tomllib.loads(path.read_text()), draw)))
    except (TypeError, AttributeError, ValueError):  # TOML cannot express the value
        path.write_text("rounds = 'x'\n")


def change_table(path: Path, draw: np.random.Generator) -> None:
    table = pq.read_table(path)
    if not table.num_columns:
        return
    at = int(draw.integers(table.num_columns))
    name = table.column_names[at]
    kind = draw.integers(4)
    if kind == 0:
        table = table.drop_columns(name)
    elif kind == 1:
        table = table.rename_columns(
            [f"{each}x" if each == name else each for each in table.column_names]
        )
    elif kind == 2:
        table = table.set_column(at, name, pa.array([choice(draw, ["[/]", "x"])] * table.num_rows))
    else:
        values = table.column(at).to_pylist()
        for i in range(len(values)):
            values[i] = None if draw.random() < 0.3 else values[i]
        table = table.set_column(at, name, pa.array(values))
    pq.write_table(table, path)


def change_arrays(path: Path, draw: np.random.Generator) -> None:
    with np.load(path) as found:
        arrays = dict(found)
    if arrays:
        name = choice(draw, sorted(arrays))
        value = arrays.pop(name)
        odd = [
            None,
            value[:1],
            value.astype(np.float64) * np.nan,
            value.astype(str),
            np.zeros((2, 3, 4)),
            -value - 1,
        ]
        if (instead := odd[draw.integers(len(odd))]) is not None:
            arrays[choice(draw, [name, "99/1/alpha", "alpha"])] = instead
    np.savez_compressed(path, **arrays)


def change_tensors(path: Path, draw: np.random.Generator) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    if tensors:
        name = choice(draw, sorted(tensors))
        value = tensors.pop(name)
        odd = [None, value[:1].clone(), value.int(), torch.zeros(2, 2, 2), value.double()]
        if (instead := odd[draw.integers(len(odd))]) is not None:
            tensors[choice(draw, [name, "77/params", "x"])] = instead
    save_file(tensors, path)


def changed(value: Any, draw: np.random.Generator) -> Any:
    """Return a copy of a value with one part removed or replaced by an odd value."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = choice(draw, sorted(value))
        if draw.random() < 0.25:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = int(draw.integers(len(value)))
        kind = draw.random()
        if kind < 0.15:
            return value[:at] + value[at + 1 :]
        if kind < 0.3:
            return [*value, value[at]]
        return [*value[:at], changed(value[at], draw), *value[at + 1 :]]
    return ODD[draw.integers(len(ODD))]


DAMAGES = (
    flip,
    cut,
    lengthen,
    lose,
    become_a_folder,
    garble,
    swap,
    stray,
    change,
    change,
    change,
    change,
)


def choice(draw: np.random.Generator, among: list[Any]) -> Any:
    return among[int(draw.integers(len(among)))]


@dataclass
class Damaged:
    """A damaged copy of a run.

    Parameters
    ----------
    name
        Name of the original run.
    folder
        The copy.
    told
        Description of the damage.
    sealed
        Whether the checksums must show the damage.
    """

    name: str
    folder: Path
    told: str
    sealed: bool


def damaged(bases: Mapping[str, Path], folder: Path, seed: int) -> Damaged:
    """Copy one of the runs, and damage the copy once or twice."""
    draw = np.random.default_rng(seed)
    name = choice(draw, sorted(bases))
    shutil.copytree(bases[name], folder)
    told: list[str] = []
    means_it = name == "unfinished" or "format" in name or draw.random() < 0.5
    for _ in range(draw.integers(1, 3)):
        damage, path = DAMAGES[draw.integers(len(DAMAGES))], choice(draw, files_of(folder))
        try:
            damage(path, draw)
        except Exception:  # a file that is already damaged may not have a valid format
            flip(path, draw)
        told.append(f"{damage.__name__} {path.relative_to(folder)}")
    means_it = means_it and draw.random() < 0.8
    if means_it:
        seal(folder)
    sealed = not means_it and "format" not in name and name != "unfinished"
    return Damaged(
        name, folder, "; ".join(told) + ("; checksums updated" if means_it else ""), sealed
    )


# Commands that read them


@dataclass
class Result:
    """Outcomes of all commands on one folder."""

    seed: int
    name: str
    told: str
    outcomes: dict[str, str] = field(default_factory=dict[str, str])
    details: list[str] = field(default_factory=list[str])


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TooLongError

    timers = {
        signal.ITIMER_PROF: (signal.SIGPROF, seconds),
        signal.ITIMER_REAL: (signal.SIGALRM, 5 * seconds),
    }
    for timer, (number, most) in timers.items():
        signal.signal(number, late)
        signal.setitimer(timer, most)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)


def called(*arguments: str) -> tuple[int, str]:
    """Call the command line; return its exit status, and its error output."""
    sys.argv = ["fedclade", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line()
        except SystemExit as left:
            return int(left.code or 0), err.getvalue()
    return 0, err.getvalue()


def opened(command: str, it: Damaged, base: Path, beside: Path) -> tuple[str, str]:
    """Open a folder with a command; return the outcome, and details."""
    page, model = beside / "page.html", beside / "model.safetensors"
    arguments = {
        "tree": ("tree", str(it.folder)),
        "export": ("export", str(it.folder), "--node", "0", "--out", str(model)),
        "report": ("report", str(it.folder), "--out", str(page)),
        "resume": ("resume", str(it.folder), "--rounds", str(ROUNDS + 1), "-q"),
    }
    try:
        with limited(LIMIT):
            if command == "load":
                same = (
                    same_run(Run.load(it.folder), base) if it.sealed else bool(Run.load(it.folder))
                )
                return (
                    ("read right", "") if same else ("read wrong", "another run than was written")
                )
            code, err = called(*arguments[command])
    except FedcladeError:
        return "refused", ""
    except TooLongError:
        return "hang", ""
    except Exception:
        return "traceback", traceback.format_exc(limit=-4)
    # Warnings may be printed before the error.
    told = any(line.startswith("error: ") for line in err.splitlines())
    if "Traceback" in err or code not in (0, 2) or (code == 2 and not told):
        return "traceback", err
    left = [path for root in (it.folder, beside) for path in root.rglob(".*.writing")]
    if (
        left
        or (page.exists() and not page.read_text().rstrip().endswith("</html>"))
        or not whole(model, code, command)
    ):
        return "half-written", ", ".join(map(str, left))
    return ("read right" if code == 0 else "refused"), err


def whole(model: Path, code: int, command: str) -> bool:
    if command != "export":
        return True
    return (
        bool(load_file(model)) and model.with_suffix(".md").exists()
        if code == 0
        else not model.exists()
    )


def same_run(run: Run, base: Path) -> bool:
    """Return whether a run equals the original run, in all values that checksums cover."""
    if not (base / "summary.json").exists():
        return True
    other = Run.load(base)
    trees = zip(run.tree.nodes, other.tree.nodes, strict=True)
    return (
        all(
            torch.equal(a.params, b.params) and a.members == b.members and a.parent == b.parent
            for a, b in trees
        )
        and (run.summary, run.config, run.metric_rows)
        == (other.summary, other.config, other.metric_rows)
        and (run.cluster_rows, run.client_rows, run.events)
        == (other.cluster_rows, other.client_rows, other.events)
    )


def work(pipe: Connection, bases: Mapping[str, Path], folder: Path) -> None:
    """Damage and open a folder for each seed that is received from a pipe."""
    torch.set_num_threads(1)
    style.DPI = 20  # the quality of pictures does not matter
    while (seed := pipe.recv()) is not None:
        beside = folder / f"{seed}-beside"
        beside.mkdir(parents=True)
        it = damaged(bases, folder / str(seed), seed)
        result = Result(seed, it.name, it.told)
        for command in COMMANDS:
            outcome, told = opened(command, it, bases[it.name], beside)
            result.outcomes[command] = outcome
            if outcome not in OUTCOMES[:2]:
                result.details.append(f"{command}: {outcome}: {told}")
        shutil.rmtree(it.folder)
        shutil.rmtree(beside)
        pipe.send(result)


@dataclass
class Worker:
    """Child process that opens folders, and is replaced if it hangs or dies."""

    bases: Mapping[str, Path]
    folder: Path
    seed: int | None = None

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=work, args=(theirs, self.bases, self.folder), daemon=True
        )
        self.process.start()

    def give(self, seed: int) -> None:
        """Send a seed to the process."""
        self.seed, self.until = seed, time.monotonic() + 5 * LIMIT * (len(COMMANDS) + 1)
        self.pipe.send(seed)

    def result(self) -> Result | None:
        """Return the result of the last seed; None if the process has not finished."""
        assert self.seed is not None
        try:
            if self.pipe.poll(0.05):
                return self.pipe.recv()
            why = "hang" if time.monotonic() > self.until else ""
        except EOFError:
            why = "traceback"
        if not why:
            return None
        self.process.kill()
        lost, self.seed = self.seed, None
        self.__post_init__()
        return Result(
            lost, "?", "?", dict.fromkeys(COMMANDS, why), [f"the process was killed: {why}"]
        )


def results(seeds: list[int], processes: int, folder: Path) -> Iterator[Result]:
    bases = make_bases(folder / "bases")
    workers = [Worker(bases, folder / f"worker-{i}") for i in range(processes)]
    pending, busy = list(reversed(seeds)), []
    for worker in workers[: len(pending)]:
        worker.give(pending.pop())
        busy.append(worker)
    while busy:
        for worker in list(busy):
            if (result := worker.result()) is not None:
                yield result
                if pending:
                    worker.give(pending.pop())
                else:
                    busy.remove(worker)
    for worker in workers:
        worker.pipe.send(None)
        worker.process.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folders", type=int, default=500, help="number of damaged folders (default: 500)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first folder; others follow (default: 0)"
    )
    parser.add_argument("--processes", type=int, default=1, help="number of processes (default: 1)")
    arguments = parser.parse_args()
    seeds = list(range(arguments.seed, arguments.seed + arguments.folders))
    counts: dict[str, Counter[str]] = {command: Counter() for command in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for result in results(seeds, arguments.processes, Path(folder)):
            for command, outcome in result.outcomes.items():
                counts[command][outcome] += 1
            for detail in result.details:
                print(f"seed {result.seed}, {result.name}: {result.told}\n{detail}", flush=True)
    table = Table(
        "", *OUTCOMES, title=f"{len(seeds)} damaged run folders, seeds {seeds[0]} to {seeds[-1]}"
    )
    for command, found in counts.items():
        table.add_row(command, *(str(found[outcome]) for outcome in OUTCOMES))
    Console(width=100).print(table)
    sys.exit(any(found[outcome] for found in counts.values() for outcome in OUTCOMES[2:]))


if __name__ == "__main__":
    main()
