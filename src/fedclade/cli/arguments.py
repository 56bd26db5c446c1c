"""Functions that check and convert the values of options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedclade.core import ConfigError, RunError, make_folder, memory_bytes
from fedclade.runs import Callback, check_free, is_finished, is_unfinished
from fedclade.trackers import build_callback
from fedclade.training import Actors, choose_device


def collect_actors(actors: int | None, cores: int | None, address: str | None) -> Actors | None:
    """Return the settings of Ray actors from command-line options; None if no option is set.

    Parameters
    ----------
    actors
        Number of actors.
    cores
        CPU cores of each actor.
    address
        Address of a running Ray cluster.
    """
    if actors is None and cores is None and address is None:
        return None
    return Actors(count=actors, cores=cores, address=address)


def build_callbacks(log: Sequence[str] | None) -> list[Callback]:
    """Create the callbacks that ``--log`` names; a name that is repeated counts once."""
    return [build_callback(name) for name in dict.fromkeys(log or ())]


def check_machine(device: str, memory: str | None) -> None:
    """Check the options ``--device`` and ``--memory`` before any data is loaded."""
    choose_device(device)
    if memory is not None:
        memory_bytes(memory)


def make_parent_folder(out: Path | None) -> None:
    """Create the parent folder of an output file, so that a run does not fail only at its end.

    Raises
    ------
    RunError
        If the folder cannot be created.
    """
    if out is None:
        return
    try:
        make_folder(out.parent)
    except OSError as error:
        raise RunError(
            f"cannot create the folder {out.parent}: {error}; choose another file with --out"
        ) from error


def target_folder(out: Path | None, name: str, *, resume: bool = False) -> Path:
    """Return the output folder of a command.

    Parameters
    ----------
    out
        Folder of the option ``--out``. If None, the result is the first unused folder in ``runs``
        with this ``name``.
    name
        Default name of the folder.
    resume
        Whether a sweep or a comparison is continued in ``out``; otherwise ``out`` must not be used.

    Raises
    ------
    ConfigError
        If a sweep or a comparison is to be continued without ``--out``, or in the folder of a
        single run.
    RunError
        If ``out`` is used already.
    """
    if out is None:
        if resume:
            raise ConfigError(
                "--resume needs the folder of the sweep or comparison to continue; set it with "
                "--out"
            )
        return _find_free_folder(name)
    if not resume:
        return check_free(out, take_over=True)
    if is_finished(out) or is_unfinished(out):
        raise ConfigError(
            f"{out} is the folder of a single run, not of a sweep or comparison that --resume can "
            "continue; choose another folder with --out"
        )
    return out


def _find_free_folder(name: str) -> Path:
    """Return the first folder ``runs/NAME``, ``runs/NAME-2``, ... that does not exist."""
    target = Path("runs") / name
    n = 1
    while target.exists():
        n += 1
        target = Path("runs") / f"{name}-{n}"
    return target
