"""Options that several commands share, and helpers for output, interrupts and folders."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from fedclade.catalogue import ENGINES, REMOTE, TRACKERS
from fedclade.core import RunInterrupted
from fedclade.report import Terminal

WIDTH_OF_FILES = 100
"""Width in characters of output that goes to a file or a pipe."""


def new_console() -> Terminal:
    """Create the console to which a command prints.

    The console is as wide as the terminal. For output to a file or a pipe it is 100 characters
    wide, unless the environment variable ``COLUMNS`` is set.
    """
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Terminal(width=WIDTH_OF_FILES)
    return console


def say(console: Console, line: str) -> None:
    """Print a line without wrapping, so that paths can be copied, and without markup."""
    console.print(line, soft_wrap=True, markup=False)


def is_from_program(config: Mapping[str, Any]) -> bool:
    """Return whether a Python program started a run, by the config in the run's folder.

    The config of such a run has a description of its data in place of settings that load them, so
    that only the program can continue the run.
    """
    return "description" in config.get("data", {})


# Interrupts: the first signal stops a run after the round, a second one at once.

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals of Ctrl-C, shutdowns and closed terminals. SIGHUP is missing on Windows."""

_MESSAGE = b"\nstopping after this round; Ctrl-C again stops at once\n"
_STDERR = 2


@contextmanager
def interruptible(then: Callable[[], str]) -> Generator[Callable[[], bool]]:
    """Let Ctrl-C, SIGTERM or SIGHUP stop the work of a ``with`` block at the next opportunity.

    A run stops after the current round. A second signal stops the work at once. Outside the main
    thread signals are not handled, since only the main thread receives them.

    Parameters
    ----------
    then
        Function that returns advice to the user after an interrupt, for the error message.

    Yields
    ------
    Callable
        Function without arguments that returns whether a signal has arrived; it can be passed as
        ``stop`` to :func:`fedclade.simulate`.

    Raises
    ------
    RunInterrupted
        If the work in the block was interrupted, or if a second signal stopped it at once.
    """
    is_requested = False

    def request_stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        if is_requested:
            raise KeyboardInterrupt
        is_requested = True
        if number == getattr(signal, "SIGHUP", None):
            _redirect_closed_terminal()
        with suppress(OSError):  # the terminal may be closed
            # print is not reentrant: it would raise an error if the signal interrupted another
            # print.
            os.write(_STDERR, _MESSAGE)

    previous_handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only it can handle signals
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                previous_handlers[number] = signal.signal(number, request_stop)
    try:
        yield lambda: is_requested
    except RunInterrupted as interrupted:
        raise RunInterrupted(interrupted.happened, then()) from None
    except KeyboardInterrupt:
        raise RunInterrupted("the command was stopped at once", then()) from None
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _redirect_closed_terminal() -> None:
    """Redirect standard output and error of a closed terminal to the null device.

    Otherwise the next attempt to write to the terminal would end the run.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(null, stream)
    os.close(null)


# The options.

ConfigFile = Annotated[
    str, typer.Argument(help="TOML file, or name of a config in 'fedclade ls configs'.")
]
RunFolder = Annotated[Path, typer.Argument(help="Run folder, as written by 'fedclade run'.")]
Client = Annotated[
    str | None,
    typer.Option("--client", metavar="NAME", help="Client whose model is taken: its name or id."),
]
Node = Annotated[
    int | None, typer.Option("--node", metavar="ID", help="Tree node whose model is taken.")
]
Level = Annotated[
    int | None,
    typer.Option(
        "--level",
        help="Level on the client's path: 0 is the root, -1 its leaf. Default: the model that "
        "the client was evaluated with.",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for the results; it must not exist yet.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="FEDCLADE_DATA_DIR",
        help="Folder with <dataset>/<split>.parquet. Default: download from the Hugging Face Hub.",
    ),
]
"""Type of the option ``--data-dir`` of a command.

The environment variable ``FEDCLADE_DATA_DIR`` also sets the option; None if unset.
"""
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Override a key of the config; can be repeated."
    ),
]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Override the number of rounds.")]
Device = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda, or a numbered GPU such as cuda:1.")
]
"""Type of the option ``--device`` of a command."""
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help=f"Engine of local training: {', '.join((*ENGINES, *REMOTE))}. Overrides the config.",
    ),
]
Actors = Annotated[
    int | None,
    typer.Option(
        "--actors",
        min=1,
        help="Number of actors for --engine ray. Default: one for each GPU, or else each node.",
    ),
]
ActorCores = Annotated[
    int | None,
    typer.Option(
        "--actor-cores",
        min=1,
        help="CPU cores of each actor. Default: 1 with --actors or GPUs, otherwise all of a node.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="Address of a running Ray cluster. Default: start Ray on this machine.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory for training, such as 2GB. Default: a quarter of the available memory.",
    ),
]
Dashboard = Annotated[
    bool,
    typer.Option(
        "--dashboard",
        help="Serve a live report during the run; only browsers on this machine can open it.",
    ),
]
Port = Annotated[
    int,
    typer.Option("--port", min=0, max=65535, help="Port of the dashboard; 0 for any free port."),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="NAME",
        help=f"Log every round: {', '.join(TRACKERS)}, or your own module:factory; can be repeated.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import the code that the folder's config names as module:name. Use it only if you "
        "trust the origin of the folder.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("-q", "--quiet", help="Show no progress bars, and only the result or its folder."),
]


class Kind(StrEnum):
    """Kind of entries that the command ``ls`` can list."""

    ALGORITHMS = "algorithms"
    DATASETS = "datasets"
    PARTITIONS = "partitions"
    SHIFTS = "shifts"
    MODELS = "models"
    TASKS = "tasks"
    ENGINES = "engines"
    CALLBACKS = "callbacks"
    CONFIGS = "configs"


class Sampler(StrEnum):
    """Name of a sampler, which chooses the settings of the trials of a sweep."""

    TPE = "tpe"
    RANDOM = "random"
    GRID = "grid"


def overrides(override: Sequence[str] | None, **settings: int | str | None) -> list[str]:
    """Return all overrides of config keys, as texts ``KEY=VALUE``.

    These are the values of ``--set``, followed by options that set a key, such as ``--rounds``.

    Parameters
    ----------
    override
        Values of ``--set``; None if unset.
    settings
        Value of each other option by config key; None if unset.
    """
    from_options = [f"{key}={value}" for key, value in settings.items() if value is not None]
    return [*(override or []), *from_options]
