"""Callbacks: objects or functions that a run calls after splits, after rounds and at its end.

The module also contains the typed records that are passed to callbacks, and the progress bar.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedclade.core import FedcladeError, ParameterTree, RunInterrupted, at_prompt, drawn
from fedclade.runs.splits import splits_of
from fedclade.runs.stopping import FINISH, Finish, Stopped
from fedclade.runs.store.contents import Row
from fedclade.tasks import Metric

if TYPE_CHECKING:  # the settings of a run need this module, but no results of a run
    from fedclade.core import Event
    from fedclade.runs.store import Run

_log = logging.getLogger(__name__)

OnRound = Callable[[Row, ParameterTree], object]
"""Function that is called after every round with the round's metrics and the parameter tree.

If it returns :data:`FINISH`, the run is finished after the round.
"""

Stop = Callable[[], bool | Finish]
"""Function without arguments that returns whether to interrupt a run, or FINISH to finish it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Record:
    """Fields that the records of all callbacks have: the run's config and its folder, if any."""

    config: Mapping[str, Any]
    folder: Path | None


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundRecord(_Record):
    """Results of a round, passed to :meth:`Callback.on_round`.

    Parameters
    ----------
    config, folder
        Config and folder of the run; the folder is None for a run without one.
    round
        Number of the round, from 1.
    metrics
        The round's row of ``metrics.parquet``.
    tree
        The clusters and their models after the round. If clients permute the entries of models, the
        models are in permuted order.
    events
        Events of the round, in order.
    last
        Whether this is the last round.
    so_far
        Function that returns a :class:`~fedclade.Run` of the rounds so far, or None before the
        first evaluation. Call it before the next round.
    rows
        Metrics of all rounds so far, including rounds before an interruption. The last row is
        ``metrics``.
    scored_by
        The metrics of the task; the first is the task's main metric.
    """

    round: int
    metrics: Row
    tree: ParameterTree
    events: tuple[Event, ...]
    last: bool
    so_far: Callable[[], Run | None]
    rows: Sequence[Row] = ()
    scored_by: Sequence[Metric] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitRecord(_Record):
    """Split of one cluster into several, passed to :meth:`Callback.on_split`.

    Parameters
    ----------
    config, folder
        See :class:`RoundRecord`.
    round
        Round of the split.
    node
        Node of the tree that was split; 0 is the root, the cluster of all clients.
    children
        Client ids of the members of each cluster that resulted from the split, by node.
    event
        The algorithm's report of the split, with the numbers that decided it; None if the algorithm
        does not report splits.
    """

    round: int
    node: int
    children: Mapping[int, Sequence[int]]
    event: Event | None

    @property
    def criteria(self) -> dict[str, float]:
        """Numbers that decided the split, by name, such as ``max_norm`` or ``p_value``.

        Numbers that are not set are left out. The mapping is empty if there is no event.
        """
        if self.event is None:
            return {}
        values = {
            each.name: getattr(self.event, each.name)
            for each in fields(self.event)
            if each.name != "node"
        }
        return {name: value for name, value in values.items() if isinstance(value, int | float)}


@dataclass(frozen=True, eq=False, kw_only=True)
class EndRecord(_Record):
    """End of a run, passed to :meth:`Callback.on_end`.

    Parameters
    ----------
    config, folder
        See :class:`RoundRecord`.
    reason
        ``finished``; ``interrupted``, by the user or by a callback; or ``failed``.
    run
        The finished run, which is already written to its folder. If the run did not finish, the
        results of the rounds so far, or None before the first evaluation.
    error
        The exception that ended the run; None if it finished.
    """

    reason: Literal["finished", "interrupted", "failed"]
    run: Run | None
    error: BaseException | None = None


class Callback:
    """Base class of objects that a run calls after splits, after rounds and at its end.

    Subclasses override the methods that they need. If a method raises an exception, a warning is
    logged once and the run continues; a :class:`~fedclade.FedcladeError` ends the run. A callback
    can end a run early, but has no other influence on it. In a continued run, callbacks are called
    only for the rounds after the checkpoint. If the folder already contains the finished run, no
    callback is called.
    """

    def on_split(self, record: SplitRecord, /) -> None:
        """Handle the split of a cluster; called before ``on_round`` of the same round.

        The following count as splits:

        - each event :class:`~fedclade.core.ClusterSplit` (in CFL, in FL+HC, and in replicated
          clustering, ``rcfl``, if it queries only a cohort);
        - each event :class:`~fedclade.core.Regrouped` that contains a new cluster (in ``rcfl``).
          The event's node, which is the root or a cluster of the round before, is the node that was
          split, and its children are all clusters that were found in it;
        - the event :class:`~fedclade.core.Clustered` that separates all clients into clusters (in
          PACFL);
        - the round in which clients first join clusters whose models existed from the start (in
          FedGroup, IFCA and FeSEM); no event reports this split.

        A client that later moves to another cluster, or joins a cluster, does not count as a split.
        """

    def on_round(self, record: RoundRecord, /) -> bool | Finish | None:
        """Handle the results of a round, and decide whether the run continues.

        Returns
        -------
        bool or FINISH or None
            :data:`fedclade.FINISH` to finish the run after this round: clients are evaluated, and
            the results are written as after the last round. True to interrupt the run: a checkpoint
            is saved, and :class:`~fedclade.RunInterrupted` is raised; the run is unfinished and can
            be continued. Any other value to continue. FINISH takes precedence over True.
        """

    def reason(self, record: RoundRecord, /) -> str:
        """Return the reason for finishing the run, which is recorded in ``summary.json``.

        This method is called only if :meth:`on_round` has returned FINISH.
        """
        return "on_round returned FINISH"

    def on_end(self, record: EndRecord, /) -> None:
        """Handle the end of the run; called for every run that has begun, also if it fails."""


class Callbacks:
    """All callbacks of a run, which are called together.

    Parameters
    ----------
    callbacks
        Callbacks, in the order in which they are called.
    on_round, stop
        Functions that are called after each round: ``on_round`` before all callbacks, ``stop``
        after them. See :func:`fedclade.simulate`.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback] = (),
        on_round: OnRound | None = None,
        stop: Stop | None = None,
    ) -> None:
        first = [] if on_round is None else [_OnRound(on_round)]
        last = [] if stop is None else [_Stop(stop)]
        self._all: Sequence[Callback] = [*first, *callbacks, *last]
        self._failed = set[tuple[int, str]]()

    def __bool__(self) -> bool:
        return bool(self._all)

    def joined(self, callback: Callback) -> Callbacks:
        """Return new callbacks in which another callback is called before all existing ones."""
        found = Callbacks()
        found._all = [callback, *self._all]
        return found

    def split(self, record: SplitRecord) -> None:
        """Call ``on_split`` of all callbacks, in order."""
        for place, callback in enumerate(self._all):
            self._call_method(place, "on_split", callback.on_split, record)

    def round(self, record: RoundRecord) -> bool | Stopped:
        """Call ``on_round`` of all callbacks, in order, and combine their decisions.

        Returns
        -------
        bool or Stopped
            If a callback returned FINISH, the reason for finishing the run after this round.
            Otherwise, whether to interrupt the run.
        """
        # All callbacks are called for the round, also after a callback that returned FINISH.
        asked = [
            self._call_method(place, "on_round", each.on_round, record)
            for place, each in enumerate(self._all)
        ]
        for place, answer in enumerate(asked):
            if answer is FINISH:
                why = self._call_method(place, "reason", self._all[place].reason, record)
                by = self._name_method(place, "on_round").removesuffix(".on_round")
                return Stopped(record.round, by, str(why or "on_round returned FINISH"))
        return any(answer is True for answer in asked)

    def end(self, record: EndRecord) -> None:
        """Call ``on_end`` of all callbacks, in order.

        If a callback raises a :class:`~fedclade.FedcladeError`, the remaining callbacks are called
        first. The error is then raised, unless the run itself ended with an error; further errors
        are logged.
        """
        raised: FedcladeError | None = None
        for place, callback in enumerate(self._all):
            try:
                self._call_method(place, "on_end", callback.on_end, record)
            except FedcladeError as error:
                if record.error is None and raised is None:
                    raised = error
                else:
                    _log.warning(
                        "callback %s failed: %s", self._name_method(place, "on_end"), error
                    )
        if raised is not None:
            raise raised

    def _call_method(
        self, place: int, hook: str, method: Callable[[Any], Any], record: _Record
    ) -> Any:
        """Call a method of a callback, and log a warning if it raises an exception.

        The warning is logged once for each callback and method. A :class:`~fedclade.FedcladeError`
        is raised.
        """
        try:
            return method(record)
        except FedcladeError:
            raise
        except Exception:
            if (place, hook) not in self._failed:
                during = isinstance(record, RoundRecord | SplitRecord)
                where = f" in round {record.round}; the run continues" if during else ""
                _log.warning(
                    "callback %s failed%s", self._name_method(place, hook), where, exc_info=True
                )
            self._failed.add((place, hook))
            return None

    def _name_method(self, place: int, hook: str) -> str:
        """Return the name of a callback's method for a message, such as ``MyCallback.on_end``."""
        callback = self._all[place]
        if isinstance(callback, _OnRound):
            return "on_round"
        return "stop" if isinstance(callback, _Stop) else f"{type(callback).__name__}.{hook}"


@dataclass(frozen=True, eq=False)
class Following:
    """Callbacks of one run, with the values that all records of the run have in common.

    The methods build a record with these values, and pass it to the callbacks.

    Parameters
    ----------
    callbacks
        Callbacks of the run.
    config
        Function that returns the config of the run, some values of which are known only after
        clients have trained.
    folder
        Folder of the run; None if the run has no folder.
    so_far, scored_by
        See :class:`RoundRecord`.
    rows
        Function that returns the metrics of all rounds so far.
    """

    callbacks: Callbacks
    config: Callable[[], Mapping[str, Any]]
    folder: Path | None
    so_far: Callable[[], Run | None]
    rows: Callable[[], Sequence[Row]] = tuple[Row, ...]
    scored_by: Sequence[Metric] = ()

    def round(
        self,
        before: ParameterTree,
        after: ParameterTree,
        metrics: Row,
        events: tuple[Event, ...],
        *,
        last: bool,
    ) -> bool | Stopped:
        """Call the callbacks for the splits in a round, and then for the round.

        Parameters
        ----------
        before, after
            The trees before and after the round.
        metrics
            The round's row of ``metrics.parquet``.
        events
            Events of the round, in order.
        last
            Whether this is the last round.

        Returns
        -------
        bool or Stopped
            If a callback returned FINISH, the reason for finishing the run after this round.
            Otherwise, whether to interrupt the run.
        """
        if not self.callbacks:
            return False
        number = metrics["round"]
        config = self.config()
        for node, children, event in splits_of(before, after, events):
            self.callbacks.split(
                SplitRecord(
                    config=config,
                    folder=self.folder,
                    round=number,
                    node=node,
                    children=children,
                    event=event,
                )
            )
        return self.callbacks.round(
            RoundRecord(
                config=config,
                folder=self.folder,
                round=number,
                metrics=metrics,
                tree=after,
                events=events,
                last=last,
                so_far=self.so_far,
                rows=self.rows(),
                scored_by=self.scored_by,
            )
        )

    def finished(self, run: Run) -> None:
        """Call the callbacks for the end of a finished run."""
        self.callbacks.end(
            EndRecord(config=self.config(), folder=self.folder, reason="finished", run=run)
        )

    def ended(self, error: BaseException) -> None:
        """Call the callbacks for the end of a run by an error or an interruption."""
        if self.callbacks:
            failed = isinstance(error, Exception) and not isinstance(error, RunInterrupted)
            reason = "failed" if failed else "interrupted"
            run = self.so_far()
            self.callbacks.end(
                EndRecord(
                    config=self.config(), folder=self.folder, reason=reason, run=run, error=error
                )
            )


class _OnRound(Callback):
    """Callback that calls a function of the user with every round's metrics and tree."""

    def __init__(self, function: OnRound) -> None:
        self._function = function

    def on_round(self, record: RoundRecord, /) -> Finish | None:
        return FINISH if self._function(record.metrics, record.tree) is FINISH else None


class _Stop(Callback):
    """Callback that calls a function of the user after every round but the last.

    The run is interrupted if the function returns a true value, and finished if it returns FINISH.
    """

    def __init__(self, function: Stop) -> None:
        self._function = function

    def on_round(self, record: RoundRecord, /) -> bool | Finish:
        if record.last:
            return False
        answer = self._function()
        return FINISH if answer is FINISH else bool(answer)


# Progress bar of an interactive run.


@contextmanager
def progress_shown(
    progress: bool | None, name: str, rounds: int, following: Callbacks
) -> Generator[Callbacks]:
    """Show a progress bar on the terminal or in a notebook while the ``with`` block runs.

    Parameters
    ----------
    progress
        Whether to show the bar. None: in a notebook and at Python's prompt only.
    name
        Name of the algorithm.
    rounds
        Number of rounds of the run.
    following
        Callbacks of the run.

    Yields
    ------
    Callbacks
        The callbacks of the run. If the bar is shown, one more callback updates it.
    """
    if not (at_prompt() if progress is None else progress):
        yield following
        return
    bars = drawn("progress_bars")
    with bars.shown():
        yield following.joined(_Bar(bars.start(name, rounds)))


@dataclass(frozen=True, eq=False)
class _Bar(Callback):
    """Callback that updates a progress bar after every round."""

    show: OnRound

    def on_round(self, record: RoundRecord, /) -> None:
        self.show(record.metrics, record.tree)
