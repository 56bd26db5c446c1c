"""Files that a run over a network writes while it is on, for people and programs that follow it.

The tables of a run folder are written at the end of a run. Until then, ``events.jsonl`` and
``metrics.jsonl`` have the events and the metrics of all rounds so far, one JSON object in each
line. They are followed by ``fedclade report --live`` and, for example, by ``tail -f``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from fedclade.core import RunError, write_text
from fedclade.runs.callbacks import Callback, EndRecord, RoundRecord
from fedclade.runs.store import Run
from fedclade.runs.store.contents import Row, plain, without_nan
from fedclade.runs.store.folder import RunFolder, load_unfinished
from fedclade.runs.store.manifest import is_locked, read_run_config
from fedclade.runs.store.run import EVENTS, is_finished, is_unfinished

LIVE_METRICS = "metrics.jsonl"
"""Name of the file with the rows of ``metrics.parquet`` so far. It is removed when a run ends."""

ENDED = "ended.json"
"""Name of the file that states why a run ended before its last round, until it is continued."""

State = Literal["running", "finished", "interrupted", "failed"]


class LiveLog(Callback):
    """Callback that appends the events and the metrics of each round to files in the run folder.

    A continued run first removes the rounds after its checkpoint from the files, since it runs
    these rounds again. A run without a folder has no such files.
    """

    def __init__(self) -> None:
        self._has_begun = False

    def on_round(self, record: RoundRecord, /) -> None:
        """Append the events and the metrics of a round."""
        folder = record.folder
        if folder is None:
            return
        events = [plain(event.to_row(record.round)) for event in record.events]
        if not self._has_begun:
            (folder / ENDED).unlink(missing_ok=True)
            earlier = [
                without_nan(plain(row)) for row in record.rows if row["round"] < record.round
            ]
            _write_rows(folder / LIVE_METRICS, earlier)
            _write_rows(folder / EVENTS, _rows_before(folder / EVENTS, record.round))
            self._has_begun = True
        # Events come first: a reader of a round's metrics then finds its events, too.
        _append_rows(folder / EVENTS, events)
        _append_rows(folder / LIVE_METRICS, [without_nan(plain(record.metrics))])

    def on_end(self, record: EndRecord, /) -> None:
        """Remove the metrics of a finished run, and note why another run has ended."""
        self._has_begun = False
        # The folder of a run that fails in its first round is removed.
        if record.folder is None or not record.folder.is_dir():
            return
        if record.reason == "finished":
            (record.folder / LIVE_METRICS).unlink(missing_ok=True)
            (record.folder / ENDED).unlink(missing_ok=True)
            return
        error = record.error
        why = "" if error is None or record.reason == "interrupted" else str(error)
        content = {"reason": record.reason, "error": why}
        write_text(record.folder / ENDED, json.dumps(content) + "\n")


def _append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a file, as one JSON object in each line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_as_lines(rows))


def _write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a file with rows, as one JSON object in each line, in place of an earlier file."""
    write_text(path, _as_lines(rows))


def _as_lines(rows: Iterable[Row]) -> str:
    """Return rows as lines of JSON."""
    return "".join(json.dumps(plain(row)) + "\n" for row in rows)


def _rows_before(path: Path, number: int) -> list[Row]:
    """Read the rows of the rounds before ``number`` from a file; empty if there is no file."""
    return [row for row in read_lines(path) if row["round"] < number]


def read_lines(path: Path) -> list[Row]:
    """Read the rows from a file that a run may be appending to.

    The result is empty if the file does not exist. Lines that are not complete are left out: the
    last line, while it is written, and a line that a killed process has left.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    rows: list[Row] = []
    for line in lines:
        try:
            row: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(cast("Row", row).get("round"), int):
            rows.append(cast("Row", row))
    return rows


@dataclass(frozen=True)
class Progress:
    """Progress of the run in a folder.

    Parameters
    ----------
    state
        Whether a process runs the run, or how the run ended. The state of a run whose process was
        killed is ``interrupted``.
    round
        Number of the last round; 0 before the end of the first round.
    rounds
        Planned number of rounds.
    metrics
        Metrics of all rounds so far; empty for a finished run, and for a simulation.
    error
        Message of the error of a failed run; empty otherwise.
    """

    state: State
    round: int
    rounds: int
    metrics: Sequence[Row] = ()
    error: str = ""


class FollowedRun:
    """Reader of the folder of a run that may be on, in this or another process.

    Parameters
    ----------
    folder
        Folder of the run.

    Raises
    ------
    RunError
        If the folder contains no run.
    """

    def __init__(self, folder: Path) -> None:
        if not is_finished(folder) and not is_unfinished(folder):
            raise RunError(
                f"{folder} contains no run yet; name the run folder (over a network, network.out "
                "on the server), which is created when enough clients are connected"
            )
        self.folder = folder
        self._read: tuple[object, Run | None] = (None, None)
        """State of the folder when the run was last read, and this run."""

    def progress(self) -> Progress:
        """Return the progress of the run.

        Raises
        ------
        RunError
            If the folder has been removed, or is damaged.
        """
        if not self.folder.is_dir():
            raise RunError(
                f"the run folder {self.folder} has been removed, as that of a run that fails in its "
                "first round; the output of the run states the reason"
            )
        rounds = self._read_rounds()
        # Both are read first: a run that finishes meanwhile removes the file, and then the lock.
        is_running = is_locked(self.folder)
        metrics = read_lines(self.folder / LIVE_METRICS)
        if is_finished(self.folder):
            run = self.run()
            return Progress("finished", 0 if run is None else run.summary["rounds"], rounds)
        number = max([*self._rounds_of_checkpoints(), *(row["round"] for row in metrics)])
        if is_running:
            return Progress("running", number, rounds, metrics)
        state, error = self._read_end()
        return Progress(state, number, rounds, metrics, error)

    def run(self) -> Run | None:
        """Return the run: as finished, or as of its newest checkpoint.

        None if there is no checkpoint with an evaluation yet. The same object is returned until the
        folder has a newer state.
        """
        finished = is_finished(self.folder)
        # A finished run may have been continued, for more rounds, since it was last read.
        version = max(self._rounds_of_checkpoints())
        if finished:
            version = f"finished after {self._read_rounds()}"
        if version != self._read[0]:
            try:
                run = Run.load(self.folder) if finished else load_unfinished(self.folder)
            except RunError:
                if finished:
                    raise
                # Not evaluated yet; or the checkpoint was replaced by the next one meanwhile.
                return self._read[1]
            self._read = (version, run)
        return self._read[1]

    def _read_rounds(self) -> int:
        """Return the planned number of rounds."""
        return int(read_run_config(self.folder)["rounds"])

    def _rounds_of_checkpoints(self) -> list[int]:
        """Return the rounds of all checkpoints, and 0."""
        return [0, *(RunFolder.round_of(path) for path in self._checkpoints())]

    def _checkpoints(self) -> list[Path]:
        return RunFolder(self.folder).list_checkpoints()

    def _read_end(self) -> tuple[State, str]:
        """Read why the run has ended before its last round, and the message of its error."""
        try:
            content = json.loads((self.folder / ENDED).read_text(encoding="utf-8"))
            failed = content["reason"] == "failed"
            return ("failed" if failed else "interrupted"), str(content["error"])
        except (OSError, ValueError, TypeError, KeyError):
            return "interrupted", ""  # the process was killed, and could not write the file
