"""Callbacks that follow a run, and the typed records that are passed to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from fedclade.core import Event, FedcladeError, ParameterTree, RunInterrupted, at_prompt, drawn
from fedclade.runs.history import splits_of
from fedclade.runs.stopping import FINISH, Finish, Stopped
from fedclade.runs.store import Run
from fedclade.runs.store.contents import Row
from fedclade.tasks import Metric

_log = logging.getLogger(__name__)

OnRound = Callable[[Row, ParameterTree], object]
"""Simple form of a callback: a function of a round's metrics and the tree. It may return FINISH."""

Stop = Callable[[], bool | Finish]
"""Function that returns whether to interrupt a run, or FINISH to finish it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Record:
    config: Mapping[str, Any]
    folder: Path | None


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundRecord(_Record):
    """Results of a round.

    Parameters
    ----------
    config, folder
        Config and folder of the run; the folder is None for a run without one.
    round
        Number of the round, from 1.
    metrics
        The round's row of ``metrics.parquet``.
    tree
        The clusters and their models after the round, as the server sees them.
    events
        Events of the round, in order.
    last
        Whether this is the last round.
    so_far
        Returns a run of the rounds so far, or None before the first evaluation. Call it before the
        next round.
    rows
        Metrics of all rounds so far, including those before an interruption. The last row is
        ``metrics``.
    scored_by
        The metrics of the task; the first is the one that counts.
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
    """Split of one cluster into several.

    Parameters
    ----------
    config, folder
        See :class:`RoundRecord`.
    round
        Round of the split.
    node
        Node of the tree that was split; 0 is the root, the cluster of all clients.
    children
        Members of each cluster that resulted from the split, by node.
    event
        The algorithm's report of the split, with the numbers that decided it; None if the algorithm
        reports none.
    """

    round: int
    node: int
    children: Mapping[int, tuple[int, ...]]
    event: Event | None

    @property
    def criteria(self) -> dict[str, float]:
        """Numbers of the event by name, such as ``max_norm`` or ``p_value``.

        Numbers that are not set are left out.
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
    """End of a run.

    Parameters
    ----------
    config, folder
        See :class:`RoundRecord`.
    reason
        ``finished``; ``interrupted``, by the user or by a callback; or ``failed``.
    run
        The finished run, which is already written to its folder; for other reasons a run of the
        rounds so far, or None before the first evaluation.
    error
        The exception that ended the run; None if it finished.
    """

    reason: Literal["finished", "interrupted", "failed"]
    run: Run | None
    error: BaseException | None = None


class Callback:
    """Base class of objects that follow a run. Subclasses override the methods that they need.

    If a method raises an error, a warning is logged once and the run goes on; an error of
    fedclade's own ends the run. A callback can change when a run ends, and nothing else of it. A
    run that is continued calls its callbacks for the rounds from there on. If the folder already
    has the finished run, no callback is called.
    """

    def on_split(self, record: SplitRecord, /) -> None:
        """Handle the split of a cluster; called before ``on_round`` of the same round.

        These are splits:

        - each :class:`~fedclade.core.ClusterSplit` (CFL, FL+HC, and rcfl where it queries a cohort
          alone);
        - each :class:`~fedclade.core.Regrouped` that has a new cluster (rcfl). Its children are all
          clusters that it found in its node, which is the root or a cluster of the round before;
        - the :class:`~fedclade.core.Clustered` that separates all clients into clusters (PACFL);
        - without an event, the round in which clients first join clusters whose models existed from
          the start (FedGroup, IFCA, FeSEM).

        Clients that later move between clusters, or join one, are no split.
        """

    def on_round(self, record: RoundRecord, /) -> bool | Finish | None:
        """Handle the results of a round, and decide whether the run goes on.

        Returns
        -------
        bool or FINISH or None
            :data:`fedclade.FINISH` to finish the run after this round: it is evaluated, and its
            results are written as after the last round. True to interrupt it: a checkpoint is
            saved, and :class:`~fedclade.RunInterrupted` raised; the run is unfinished and can be
            continued. Any other value to go on. FINISH takes precedence over True.
        """

    def reason(self, record: RoundRecord, /) -> str:
        """Return the reason for finishing the run, for ``summary.json``.

        Called if :meth:`on_round` has returned FINISH.
        """
        return "on_round returned FINISH"

    def on_end(self, record: EndRecord, /) -> None:
        """Handle the end of the run; called for every run that has begun."""


class Callbacks:
    """All callbacks of a run.

    Parameters
    ----------
    callbacks
        Callbacks, in the order in which they are called.
    on_round, stop
        Functions that are called like callbacks, before and after all others; see
        :func:`fedclade.simulate`.
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
        """Return these callbacks with another one, which is called before them."""
        found = Callbacks()
        found._all = [callback, *self._all]
        return found

    def split(self, record: SplitRecord) -> None:
        """Call ``on_split`` of all callbacks."""
        for place, callback in enumerate(self._all):
            self._call(place, "on_split", callback.on_split, record)

    def round(self, record: RoundRecord) -> bool | Stopped:
        """Call ``on_round`` of all callbacks.

        Returns
        -------
        bool or Stopped
            Why the run is finished after this round, if a callback returned FINISH; otherwise
            whether to interrupt it.
        """
        # Every callback sees the round, also after another has returned FINISH.
        asked = [
            self._call(place, "on_round", each.on_round, record)
            for place, each in enumerate(self._all)
        ]
        for place, answer in enumerate(asked):
            if answer is FINISH:
                why = self._call(place, "reason", self._all[place].reason, record)
                by = self._name(place, "on_round").removesuffix(".on_round")
                return Stopped(record.round, by, str(why or "on_round returned FINISH"))
        return any(answer is True for answer in asked)

    def end(self, record: EndRecord) -> None:
        """Call ``on_end`` of all callbacks.

        An error that a callback raises is raised at the end, unless the run itself ended with an
        error.
        """
        raised: FedcladeError | None = None
        for place, callback in enumerate(self._all):
            try:
                self._call(place, "on_end", callback.on_end, record)
            except FedcladeError as error:
                if record.error is None and raised is None:
                    raised = error
                else:
                    _log.warning("%s failed: %s", self._name(place, "on_end"), error)
        if raised is not None:
            raise raised

    def _call(self, place: int, hook: str, method: Callable[[Any], Any], record: _Record) -> Any:
        try:
            return method(record)
        except FedcladeError:
            raise
        except Exception:
            if (place, hook) not in self._failed:
                during = isinstance(record, RoundRecord | SplitRecord)
                where = f" in round {record.round}; the run goes on" if during else ""
                _log.warning("%s failed%s", self._name(place, hook), where, exc_info=True)
            self._failed.add((place, hook))
            return None

    def _name(self, place: int, hook: str) -> str:
        callback = self._all[place]
        if isinstance(callback, _OnRound):
            return "on_round"
        return "stop" if isinstance(callback, _Stop) else f"{type(callback).__name__}.{hook}"


@dataclass(frozen=True, eq=False)
class Following:
    """Callbacks of one run, with the fields that all their records share.

    Parameters
    ----------
    callbacks
        Callbacks of the run.
    config
        Returns the config of the run; some values are only known after clients have trained.
    folder
        Folder of the run; None without one.
    so_far, scored_by
        See :class:`RoundRecord`.
    rows
        Returns the ``rows`` of a record.
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
        """Call the callbacks for a round, after those for the splits in it.

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
            Why the run is finished after this round, or whether to interrupt it.
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
    """Callback that calls a function with the metrics of every round and the tree."""

    def __init__(self, function: OnRound) -> None:
        self._function = function

    def on_round(self, record: RoundRecord, /) -> Finish | None:
        return FINISH if self._function(record.metrics, record.tree) is FINISH else None


class _Stop(Callback):
    """Callback that ends the run if a function says so after a round other than the last."""

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
    """Show a progress bar while the block runs.

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
        The callbacks of the run, with one that updates the bar if it is shown.
    """
    if not (at_prompt() if progress is None else progress):
        yield following
        return
    bars = drawn("progress_bars")
    with bars.shown():
        yield following.joined(_Bar(bars.start(name, rounds)))


@dataclass(frozen=True, eq=False)
class _Bar(Callback):
    show: OnRound

    def on_round(self, record: RoundRecord, /) -> None:
        self.show(record.metrics, record.tree)
