"""Options that several commands share, and what they mean."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from fedclade.core import ConfigError, RunError, RunInterrupted, make_folder
from fedclade.report import Terminal
from fedclade.runs import Callback, check_free, is_finished, is_unfinished
from fedclade.trackers import TRACKERS, build_callback
from fedclade.training import ENGINES, REMOTE, choose_device, memory_bytes
from fedclade.training import Actors as RayActors

# Where commands print.

WIDTH_OF_FILES = 100


def new_console() -> Terminal:
    """Return the console that commands print to.

    It is as wide as the terminal; output to a file or a pipe has a width of 100, unless ``COLUMNS`` says otherwise.
    """
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Terminal(width=WIDTH_OF_FILES)
    return console


def say(console: Console, line: str) -> None:
    """Print a line as it is: not wrapped, since it may hold a path to copy, and not read as markup."""
    console.print(line, soft_wrap=True, markup=False)


# Ctrl-C, or a terminal that goes away: once to stop after the round, twice to stop at once.

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Of Ctrl-C, of a scheduler or a system that shuts down, and of a terminal that is closed; Windows has no SIGHUP."""

_TOLD = b"\nstopping after this round; Ctrl-C again stops at once\n"
_STDERR = 2


@contextmanager
def interruptible(then: Callable[[], str]) -> Generator[Callable[[], bool]]:
    """Let Ctrl-C, SIGTERM or SIGHUP stop the work in the block at the next good place, such as the end of a round.

    A second signal stops it at once. Outside of the main thread, which alone gets signals, nothing is caught.

    Parameters
    ----------
    then
        Returns what the user can do after an interrupt, for the message.

    Yields
    ------
    Callable
        A function without arguments that returns True once a signal has come: ``stop`` of :func:`fedclade.simulate`.

    Raises
    ------
    RunInterrupted
        If the work in the block was interrupted, or if a second signal stopped it at once.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        if number == getattr(signal, "SIGHUP", None):
            _leave_terminal()
        with suppress(OSError):  # nobody can read it any more
            os.write(_STDERR, _TOLD)  # print could be interrupted in the middle of another, and would then raise

    here = threading.current_thread() is threading.main_thread()  # signals reach no other
    caught = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, ask) for number in caught} if here else {}
    try:
        yield lambda: asked
    except RunInterrupted as interrupted:
        raise RunInterrupted(interrupted.happened, then()) from None
    except KeyboardInterrupt:
        raise RunInterrupted("stopped at once", then()) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Let what is still to be printed to a terminal that is gone vanish: writing there would end the run."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for opened in (1, 2):
        if stat.S_ISCHR(os.fstat(opened).st_mode):
            os.dup2(nowhere, opened)
    os.close(nowhere)


ConfigFile = Annotated[str, typer.Argument(help="A TOML file, or a name of 'fedclade ls configs'.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder, as made by 'fedclade run'.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to make for the results; it must not exist yet.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="FEDCLADE_DATA_DIR",
        help="Folder with <dataset>/<split>.parquet as on the Hugging Face Hub; without it data comes from the Hub.",
    ),
]
"""The option ``--data-dir`` of a command, also set by ``FEDCLADE_DATA_DIR``; None if unset."""
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override any key of the config; may be repeated."),
]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Override the number of rounds.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
"""The option ``--device`` of a command."""
Engine = Annotated[
    str | None,
    typer.Option("--engine", help=f"How clients are trained: {', '.join((*ENGINES, *REMOTE))}; overrides the config."),
]
Actors = Annotated[
    int | None,
    typer.Option(
        "--actors", min=1, help="Of --engine ray; by default one for each GPU, or each node if there is none."
    ),
]
ActorCores = Annotated[
    int | None,
    typer.Option("--actor-cores", min=1, help="Of each actor; 1 with --actors or GPUs, all of a node without."),
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", metavar="ADDRESS", help="Of a running Ray cluster; this machine's by default."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="What training may take, such as 2GB; a quarter of what there is if left out."
    ),
]
Dashboard = Annotated[
    bool, typer.Option("--dashboard", help="Serve the report of the run while it goes on, to this machine alone.")
]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the dashboard; 0 for any free one.")]
Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="NAME",
        help=f"Track every round: {', '.join(TRACKERS)}, or your own module:factory; may be repeated.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import what the folder's config names by module:name, which runs that code; only for a folder whose "
        "origin you trust.",
    ),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress bars; only the result, or where it is.")]


def overrides(override: Sequence[str] | None, **settings: int | str | None) -> list[str]:
    """Return what ``--set`` was given, and the options that stand for a key of the config, as overrides."""
    given = [f"{key}={value}" for key, value in settings.items() if value is not None]
    return [*(override or []), *given]


def actors_of(actors: int | None, cores: int | None, address: str | None) -> RayActors | None:
    """Return the actors that were asked for; None if nothing was."""
    if actors is None and cores is None and address is None:
        return None
    return RayActors(count=actors, cores=cores, address=address)


def callbacks_of(log: Sequence[str] | None) -> list[Callback]:
    """Return the callbacks that ``--log`` names, each once."""
    return [build_callback(name) for name in dict.fromkeys(log or ())]


def check_machine(device: str, memory: str | None) -> None:
    """Find out before any data is loaded whether the device and the memory can be had."""
    choose_device(device)
    if memory is not None:
        memory_bytes(memory)


def made_for(out: Path | None) -> None:
    """Make the folder of a file that is to be written, before the work; a RunError if that cannot be."""
    if out is None:
        return
    try:
        make_folder(out.parent)
    except OSError as error:
        raise RunError(f"cannot make the folder {out.parent}: {error}; give another by --out") from error


def target_folder(out: Path | None, name: str, *, resume: bool = False) -> Path:
    """Return the folder to write: the one asked for, which must be free, or the first free one under ``runs``."""
    if resume and out is None:
        raise ConfigError("--resume needs the folder to continue in; name it with --out")
    if out is not None:
        if resume and (is_finished(out) or is_unfinished(out)):
            raise ConfigError(f"{out} is the folder of a single run, and not of several to go on with; name another")
        return out if resume else check_free(out, take_over=True)
    target, n = Path("runs") / name, 1
    while target.exists():
        n += 1
        target = Path("runs") / f"{name}-{n}"
    return target
