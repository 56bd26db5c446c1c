"""Fuzz test of configs: validate mutated configs, and run some of the valid ones.

Each mutated config is checked as by ``fedclade validate``, in this process. A sample of the valid
configs that need no data files is run by ``fedclade run`` on small data, each in a separate process
with limits of memory and time. A failure is an error that is not of a class of fedclade, a call
that takes more than 20 s, or a folder that is neither a run nor can be resumed.

    OMP_NUM_THREADS=1 python benchmarks/fuzz.py SEED [--configs 1000] [--runs 60] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import tomli_w
import torch
from rich.console import Console
from rich.table import Table

from fedclade import Run
from fedclade.algorithms import ALGORITHMS
from fedclade.cli import app
from fedclade.config import check_config, read_config
from fedclade.config.settings import SECTIONS
from fedclade.config.toml_files import config_folder, find_config, read_toml
from fedclade.core import memory_bytes
from fedclade.core.errors import FedcladeError
from fedclade.data import PARTITIONS, SHIFTS
from fedclade.models import MODELS
from fedclade.runs.store.contents import without_unset
from fedclade.runs.store.run import is_unfinished
from fedclade.training.auto import ENGINES

SECONDS = 20
"""Seconds after which a call counts as a hang."""

MEMORY = 6 * 2**30
"""Bytes of address space of a run, most of which the libraries of torch take."""

NEEDS_NO_FILES = ("digits", "synthetic")

OUTCOMES = ("valid", "refused", "traceback", "hang", "half-written")

Config = dict[str, Any]


@dataclass(frozen=True)
class Literal:
    """Text of a value in a TOML file, which need not be valid TOML."""

    text: str


def literals() -> list[str]:
    """Return texts of values that are seldom valid; some are not valid TOML."""
    numbers = [
        "0",
        "-1",
        "1",
        "2",
        "7",
        "-7",
        "0.0",
        "-0.0",
        "0.5",
        "1.0",
        "-0.5",
        "nan",
        "-nan",
        "inf",
        "-inf",
    ]
    numbers += [
        "1e30",
        "-1e30",
        "1e-30",
        "1e308",
        "1e400",
        "5e-324",
        "1e38",
        "1e18",
        "1e9",
        "0x7f",
        "1_000",
    ]
    numbers += [
        str(2**31),
        str(-(2**31)),
        str(2**53),
        str(2**63 - 1),
        str(2**63),
        str(-(2**63) - 1),
        "9" * 400,
    ]
    numbers += [
        "9" * 5000,
        "-" + "9" * 5000,
        "0x" + "f" * 5000,
        "1." + "9" * 5000,
        "1e" + "9" * 5000,
    ]
    texts = [
        '""',
        '" "',
        '"auto"',
        '"none"',
        '"nan"',
        '"1"',
        '"é ü 漢"',
        '"\\u0000"',
        '"\\n"',
        '"[bold]"',
        f'"{"x" * 5000}"',
    ]
    texts += [
        '"os:abort"',
        '":"',
        '".a:b"',
        '"math:pi"',
        '"builtins:int"',
        '"builtins:dict"',
        '"torch.nn:Linear"',
    ]
    texts += ['"../../etc/passwd"', "'''a\nb'''", '"' + "é" * 300 + '"', '"%s {0} {x}"']
    tables = [
        "true",
        "false",
        "[]",
        "{}",
        "[1]",
        "[[1]]",
        '["digits"]',
        '{name = "digits"}',
        "[1, 2, 3]",
        "[nan]",
        "[{}]",
    ]
    tables += [
        "1979-05-27",
        "07:32:00",
        "1979-05-27T07:32:00Z",
        "[true, 'a']",
        "{a = {b = {c = 1}}}",
    ]
    tables += ["[" * depth + "]" * depth for depth in (20, 300, 900, 100_000)]
    tables += ["{a = " * depth + "1" + "}" * depth for depth in (20, 300, 5000)]
    broken = [
        "",
        "=",
        "x",
        "[",
        "{",
        '"',
        "1 2",
        "none",
        "null",
        "1.",
        "0x",
        "[1,,2]",
        "'''",
        "\x00",
        "#",
    ]
    names = [
        f'"{name}"' for known in (ALGORITHMS, PARTITIONS, SHIFTS, MODELS, ENGINES) for name in known
    ]
    return [*numbers * 3, *texts, *tables, *broken, *names]


def bases() -> list[tuple[str, Config]]:
    """Return the configs to mutate, by name.

    They are the configs of fedclade, and small configs with every key of every section.
    """
    shipped = [
        (str(file.stem), read_toml(file)) for file in sorted(config_folder().rglob("*.toml"))
    ]
    small = [(name, small_config(name)) for name in ALGORITHMS]
    return [*shipped, *small * max(1, 2 * len(shipped) // len(small))]


def small_config(algorithm: str) -> Config:
    """Return a config with every section and key, whose run takes a short time."""
    raw = {
        "rounds": 2,
        "data": {
            "name": "digits",
            "clients": 6,
            "samples_per_client": 20,
            "shift": "label_swap",
            "clusters": 2,
        },
        "model": {"name": "mlp", "hidden": 8},
        "algorithm": {"name": algorithm},
        "newcomers": {"clients": 2},
    }
    return without_unset(check_config(raw).as_dict())


class Mutator:
    """Generator of mutated configs.

    Parameters
    ----------
    draw
        Random generator of all mutations.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._bases = bases()
        self._literals = literals()

    def file(self) -> tuple[str, bytes]:
        """Return a mutated config: a description of the mutations, and the bytes of the file."""
        name, config = self._draw.choice(self._bases)
        config = json.loads(json.dumps(config))
        done = [self._mutate(config) for _ in range(self._draw.choice((1, 1, 1, 2, 3)))]
        text, literals = "", list[str]()
        written = tomli_w.dumps(_marked(config, literals))
        text = re.sub(r'"@@(\d+)@@"', lambda match: literals[int(match[1])], written)
        if self._draw.random() < 0.1:
            change, encoded = self._draw.choice(list(self._encodings().items()))
            return f"{name}: {', '.join(done)}, {change}", encoded(text)
        return f"{name}: {', '.join(done)}", text.encode()

    def override(self) -> str:
        """Return an argument of ``--set``."""
        section, key = self._place(self._draw.choice(self._bases)[1])
        path = f"{section}.{key}" if section else key
        odd = (
            "",
            ".",
            "a.b.c",
            "=",
            f"{path} ",
            "data",
            "é.ü",
            "." * 2000,
            "[data].name",
            "algorithms.cfl",
        )
        path = self._draw.choice(odd) if self._draw.random() < 0.2 else path
        return f"{path}={self._draw.choice(self._literals)}"

    def memory(self) -> str:
        """Return an argument of ``--memory``."""
        unit = self._draw.choice(("", "B", "KB", "GB", "GiB", " MB", "XB", "é"))
        return self._draw.choice(self._literals).strip('"') + unit

    def _mutate(self, config: Config) -> str:
        kinds: list[Callable[[Config], str]] = [self._value] * 6 + [self._near] * 6
        kinds += [self._unknown, self._missing, self._section]
        return self._draw.choice(kinds)(config)

    def _value(self, config: Config) -> str:
        section, key = self._place(config)
        literal = self._draw.choice(self._literals)
        (config[section] if section else config)[key] = Literal(literal)
        return f"{section}.{key} = {_short(literal)}"

    def _near(self, config: Config) -> str:
        """Replace a value by another value of the same type, which is valid more often."""
        section, key = self._place(config)
        place = config[section] if section else config
        value = place.get(key)
        if isinstance(value, bool):
            place[key] = not value
        elif isinstance(value, int):
            place[key] = self._draw.choice(
                (0, 1, 2, value + 1, value - 1, 10 * value, 1000 * value, 10**9, 2**63 - 1)
            )
        elif isinstance(value, float):
            factor = self._draw.choice(
                (0.0, 0.01, 0.5, 2.0, 100.0, 1e10, 1e20, 1e30, 1e60, 1e300, float("inf"))
            )
            place[key] = (value or 1.0) * factor
        elif isinstance(value, str):
            names = (
                *ALGORITHMS,
                *PARTITIONS,
                *SHIFTS,
                *MODELS,
                *ENGINES,
                "auto",
                "projected",
                "pixel",
                "unit",
                "l2",
            )
            place[key] = self._draw.choice(names)
        return f"{section}.{key} = {_short(str(place.get(key)))}"

    def _place(self, config: Config) -> tuple[str, str]:
        places = [("", key) for key, value in config.items() if not isinstance(value, dict)]
        places += [
            (name, key)
            for name, value in config.items()
            if isinstance(value, dict)
            for key in value
        ]
        return self._draw.choice(places or [("data", "name")])

    def _unknown(self, config: Config) -> str:
        name = self._draw.choice(
            ("", "x", "é", "a b", "name", "seed", "x" * 3000, "true_clusters", "__init__", "self")
        )
        inside = self._draw.choice(
            [None, *(key for key, value in config.items() if isinstance(value, dict))]
        )
        value = self._draw.choice((Literal(self._draw.choice(self._literals)), {}, {"name": 1}))
        (config if inside is None else config[inside])[name] = value
        return f"unknown key {inside}.{_short(name)}"

    def _missing(self, config: Config) -> str:
        name = self._draw.choice(list(config))
        del config[name]
        return f"no {name}"

    def _section(self, config: Config) -> str:
        name, literal = (
            self._draw.choice((*SECTIONS, "algorithms", "scales", "network")),
            self._draw.choice(self._literals),
        )
        config.pop(name, None)
        config[name] = Literal(literal)
        return f"{name} = {_short(literal)}"

    def _encodings(self) -> dict[str, Callable[[str], bytes]]:
        draw = self._draw

        def flipped(text: str) -> bytes:
            spoilt = bytearray(text.encode())
            for _ in range(draw.randint(1, 5)):
                spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
            return bytes(spoilt)

        return {
            "UTF-16": lambda text: text.encode("utf-16"),
            "latin-1": lambda text: f"# Größe\n{text}".encode("latin-1", "replace"),
            "UTF-8 with a comment": lambda text: f"# Größe 漢\n{text}".encode(),
            "byte order mark": lambda text: text.encode("utf-8-sig"),
            "cut off": lambda text: text.encode()[: draw.randrange(1, len(text))],
            "bytes changed": flipped,
            "twice": lambda text: (text + "\n" + text).encode(),
            "deep header": lambda text: (text + f"\n[{'.'.join('a' * 3000)}]\nx = 1\n").encode(),
            "deep section": lambda text: (
                text + f"\n[model.{'.'.join('a' * 3000)}]\nx = 1\n"
            ).encode(),
            "empty": lambda text: b"",
            "lines of Windows": lambda text: text.replace("\n", "\r\n").encode(),
        }


def _marked(config: Config, literals: list[str]) -> Config:
    """Return a config with marks in place of literals, whose texts are added to ``literals``."""
    marked: Config = {}
    for key, value in config.items():
        if isinstance(value, Literal):
            literals.append(value.text)
            value = f"@@{len(literals) - 1}@@"
        marked[key] = _marked(value, literals) if isinstance(value, dict) else value
    return marked


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:20]!r}... ({len(text)} characters)"


class TooLongError(BaseException):
    """Time limit of a call; it is no subclass of Exception, so that no handler catches it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLongError in the context after a number of seconds."""

    def over(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome_of(call: Callable[[], object]) -> tuple[str, str]:
    """Call a function; return the outcome, and the error message or traceback."""
    try:
        with time_limit(SECONDS), contextlib.redirect_stdout(io.StringIO()):
            call()
    except TooLongError:
        return "hang", ""
    except FedcladeError as error:
        return (
            ("refused", str(error))
            if str(error).strip()
            else ("traceback", "an error without a word")
        )
    except SystemExit as left:
        return ("valid", "") if not left.code else ("traceback", f"exit status {left.code}")
    except BaseException:  # any other error is a failure
        return "traceback", traceback.format_exc()
    return "valid", ""


def validated(path: Path) -> tuple[str, str]:
    """Call ``fedclade validate``; return the outcome."""
    return outcome_of(lambda: app(["validate", str(path)], standalone_mode=False))


def tiny(path: Path) -> list[str] | None:
    """Return overrides with which a valid config runs in a short time.

    The result is None if the config needs data files, or if it is a scenario.
    """
    try:
        config = read_config(path)
    except FedcladeError:
        return None
    if config.data["name"] not in NEEDS_NO_FILES:
        return None
    most = {
        "rounds": (config.top.rounds, 2),
        "local.epochs": (config.local.epochs, 2),
        "algorithm.epochs": (config.algorithm.get("epochs"), 2),
        "algorithm.restart_rounds": (config.algorithm.get("restart_rounds"), 2),
    }
    if config.data["name"] == "synthetic":
        most |= {
            "data.clients": (config.data["clients"], 10),
            "data.max_samples": (config.data["max_samples"], 50),
        }
    changed = {
        key: least for key, (value, least) in most.items() if value is not None and value > least
    }
    return [f"{key}={value}" for key, value in changed.items()]


def warm_up() -> None:
    """Import the modules that a run needs, so that child processes do not have to import them."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "warm-up.toml"
        path.write_text(tomli_w.dumps({**small_config("cfl"), "engine": "loop"}))
        outcome_of(
            lambda: app(
                ["run", str(path), "--quiet", "--out", f"{scratch}/run"], standalone_mode=False
            )
        )


def run_it(path: Path, changes: list[str], out: Path, told: Path) -> None:
    """Run a config in this process, with limits, and write the outcome to a file."""
    os.setsid()  # so that its child processes can be killed with it
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    arguments = ["run", str(path), "--quiet", "--out", str(out), "--memory", "500MB"]
    arguments += [word for change in changes for word in ("--set", change)]
    with (told.with_suffix(".log")).open("w") as log, contextlib.redirect_stderr(log):
        ended = outcome_of(lambda: app(arguments, standalone_mode=False))
    told.write_text(json.dumps(ended))


def ran(path: Path, changes: list[str], out: Path) -> tuple[str, str]:
    """Run a config in a separate process; return the outcome, and the message or traceback."""
    told = out.with_suffix(".told")
    process = multiprocessing.get_context("fork").Process(
        target=run_it, args=(path, changes, out, told)
    )
    process.start()
    process.join(1.5 * SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    if not told.exists():
        return (
            ("hang", "")
            if process.exitcode == -signal.SIGKILL
            else ("traceback", f"died: {process.exitcode}")
        )
    outcome, said = json.loads(told.read_text())
    if outcome in ("valid", "refused") and (wrong := half_written(out)):
        return "half-written", f"{wrong}\n{said}"
    return outcome, said


def half_written(folder: Path) -> str:
    """Return a description of the error in the folder of a run.

    The result is empty if there is no folder, or if it is a run or can be resumed.
    """
    beside = [str(path) for path in folder.parent.rglob(".*") if folder.name in str(path)]
    if beside:
        return f"left behind: {beside}"
    if not folder.exists():
        return ""
    try:
        if is_unfinished(folder):
            read_config(folder / "config.toml")
        else:
            Run.load(folder)
    except Exception as error:  # with any error, the folder cannot be used
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", type=int, help="seed of all mutations")
    parser.add_argument(
        "--configs", type=int, default=1000, help="number of mutated configs (default: 1000)"
    )
    parser.add_argument(
        "--runs", type=int, default=60, help="largest number of configs to run (default: 60)"
    )
    parser.add_argument("--keep", type=Path, help="folder to which failing configs are copied")
    arguments = parser.parse_args()
    matplotlib.use("agg")
    # With more threads, a forked run would wait for OpenMP's threads, which do not exist in it.
    torch.set_num_threads(1)
    console, draw = Console(soft_wrap=True), random.Random(arguments.seed)
    mutator = Mutator(draw)
    warm_up()
    counts: dict[str, Counter[str]] = {
        kind: Counter() for kind in ("validated", "--set", "--memory", "run")
    }
    runnable: list[tuple[str, Path, list[str]]] = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FEDCLADE_CACHE_DIR"] = str(Path(scratch) / "cache")

        def note(kind: str, what: str, ended: tuple[str, str], path: Path | None = None) -> None:
            counts[kind][ended[0]] += 1
            if ended[0] in OUTCOMES[2:]:
                console.print(
                    f"{kind}: {ended[0]}: {what}\n{ended[1]}", markup=False, highlight=False
                )
                if path is not None and arguments.keep is not None:
                    arguments.keep.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, arguments.keep)

        for number in range(arguments.configs):
            path = Path(scratch) / f"config-{arguments.seed}-{number:05d}.toml"
            chosen = draw.random()
            if chosen < 0.1:
                override = mutator.override()
                base = find_config("cfl-digits-label-swap")
                note(
                    "--set",
                    _short(override),
                    outcome_of(lambda b=base, o=override: read_config(b, [o])),
                )
            elif chosen < 0.15:
                size = mutator.memory()
                note("--memory", _short(size), outcome_of(lambda s=size: memory_bytes(s)))
            else:
                what, content = mutator.file()
                path.write_bytes(content)
                ended = validated(path)
                note("validated", f"{path.name}, {what}", ended, path)
                if ended[0] == "valid" and (changes := tiny(path)) is not None:
                    runnable.append((what, path, changes))
        sample = draw.sample(runnable, min(arguments.runs, len(runnable)))
        for what, path, changes in sample:
            note(
                "run",
                f"{path.name}, {what}",
                ran(path, changes, Path(scratch) / f"run-{path.stem}"),
                path,
            )
    table = Table(*("", *OUTCOMES), title=f"seed {arguments.seed}")
    for kind, found in counts.items():
        table.add_row(kind, *(str(found[outcome]) for outcome in OUTCOMES))
    console.print(table)
    sys.exit(any(found[outcome] for found in counts.values() for outcome in OUTCOMES[2:]))


if __name__ == "__main__":
    main()
