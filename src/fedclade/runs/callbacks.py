"""What follows a run: callbacks, and the typed records that they are called with."""

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
"""The simple form of a callback: a function of a round's metrics and the tree; it may return FINISH."""

Stop = Callable[[], bool | Finish]
"""Returns whether to interrupt a run; or FINISH, to finish it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Record:
    config: Mapping[str, Any]
    folder: Path | None


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundRecord(_Record):
    """What a round came to.

    Parameters
    ----------
    config, folder
        The run's; the folder is None for a run that has none.
    round
        Its number, from 1.
    metrics
        Its row of ``metrics.parquet``.
    tree
        The clusters and their models after it, as the server sees them.
    events
        What happened in it, in order.
    last
        Whether no round follows.
    so_far
        Returns the run of the rounds so far, or None before the first evaluation; to be called
        before the next round.
    rows
        The metrics of all rounds so far, those of a run that is continued among them. The last is
        ``metrics``.
    scored_by
        The metrics of the task; the first counts.
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
    """One cluster became several.

    Parameters
    ----------
    config, folder
        See :class:`RoundRecord`.
    round, node
        When, and which cluster: its node of the tree; 0 is the root, all clients.
    children
        The members of each cluster that it became, by node.
    event
        What the algorithm tells of it, with the numbers by which it was decided; None if it tells
        nothing.
    """

    round: int
    node: int
    children: Mapping[int, tuple[int, ...]]
    event: Event | None

    @property
    def criteria(self) -> dict[str, float]:
        """The numbers of the event, such as ``max_norm`` or ``p_value``, by name; those it has none of are left out."""
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
    """How a run ended.

    Parameters
    ----------
    config, folder
        See :class:`RoundRecord`.
    reason
        ``finished``; ``interrupted``, by whoever started it or by a callback; or ``failed``.
    run
        The finished run, which its folder holds by now, or that of the rounds so far; None before
        the first evaluation.
    error
        What ended it; None if it finished.
    """

    reason: Literal["finished", "interrupted", "failed"]
    run: Run | None
    error: BaseException | None = None


class Callback:
    """Follows a run; subclasses say what to do at which moments, and leave out the others.

    If a method fails, a warning says so, once, and the run goes on; an error of fedclade's own ends
    it. A callback changes nothing of a run but when it ends. A run that is continued calls with its
    rounds from there on; one that had finished already, which its folder holds, with nothing.
    """

    def on_split(self, record: SplitRecord, /) -> None:
        """Hear that one cluster became several; before ``on_round`` of that round.

        That is each :class:`~fedclade.core.ClusterSplit` (CFL, FL+HC, and rcfl where it asks a
        cohort alone); each :class:`~fedclade.core.Regrouped` with a cluster that there was not
        (rcfl), whose children are all clusters that it found in its node, the root or a cluster of
        the round before; the :class:`~fedclade.core.Clustered` that makes all clients into clusters
        (PACFL); and, without an event, the round in which clients first go into clusters whose
        models were there from the start (FedGroup, IFCA, FeSEM). Clients that move between clusters
        later, or join one, are no split.
        """

    def on_round(self, record: RoundRecord, /) -> bool | Finish | None:
        """Hear what a round came to; return what is to become of the run.

        Returns
        -------
        bool or FINISH or None
            :data:`fedclade.FINISH` to finish the run after this round: it is evaluated, and its
            results are written as after the last round. True to interrupt it: a checkpoint is
            saved, and :class:`~fedclade.RunInterrupted` raised; the run is unfinished and can be
            continued. Anything else to go on. FINISH wins over True.
        """

    def reason(self, record: RoundRecord, /) -> str:
        """Return why the run is to finish, for ``summary.json``; called if :meth:`on_round` has returned FINISH."""
        return "on_round returned FINISH"

    def on_end(self, record: EndRecord, /) -> None:
        """Hear how the run ended; of a run that has begun, always."""


class Callbacks:
    """All that follow a run.

    Parameters
    ----------
    callbacks
        In the order in which they are called.
    on_round, stop
        Functions that stand for callbacks, the first and the last; see :func:`fedclade.simulate`.
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
        """Return these, and one that is called before them."""
        found = Callbacks()
        found._all = [callback, *self._all]
        return found

    def split(self, record: SplitRecord) -> None:
        """Tell of a split."""
        for place, callback in enumerate(self._all):
            self._call(place, "on_split", callback.on_split, record)

    def round(self, record: RoundRecord) -> bool | Stopped:
        """Tell of a round; return why the run is to be finished, or else whether it is to be interrupted."""
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
        """Tell all that the run has ended; no error takes the place of one that ended it."""
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
    """The callbacks of one run, and what is the same in all their records.

    Parameters
    ----------
    callbacks
        Of the run.
    config
        Returns the run's, of which some is only known once clients have trained.
    folder
        The run's.
    so_far, scored_by
        See :class:`RoundRecord`.
    rows
        Returns those of a record.
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
        """Tell of a round, and of the splits in it, given the tree before and after.

        Return why the run is to be finished, or else whether it is to be interrupted.
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
        """Tell that the run has finished."""
        self.callbacks.end(
            EndRecord(config=self.config(), folder=self.folder, reason="finished", run=run)
        )

    def ended(self, error: BaseException) -> None:
        """Tell that an error has ended the run."""
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
    """Calls a function with the metrics of every round and the tree."""

    def __init__(self, function: OnRound) -> None:
        self._function = function

    def on_round(self, record: RoundRecord, /) -> Finish | None:
        return FINISH if self._function(record.metrics, record.tree) is FINISH else None


class _Stop(Callback):
    """Ends the run when a function says so, which is called after every round but the last."""

    def __init__(self, function: Stop) -> None:
        self._function = function

    def on_round(self, record: RoundRecord, /) -> bool | Finish:
        if record.last:
            return False
        answer = self._function()
        return FINISH if answer is FINISH else bool(answer)


# The bar of a run, where somebody looks at it.


@contextmanager
def progress_shown(
    progress: bool | None, name: str, rounds: int, following: Callbacks
) -> Generator[Callbacks]:
    """Show a bar while the block runs, and give what is to follow the run: the bar, and what follows it anyway.

    ``progress`` says whether to; None: in a notebook and at Python's prompt.
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
