"""Part of the command ``compare``: suites whose methods are tuned, such as ``natural``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from rich.console import Console

from fedclade.cli import arguments
from fedclade.cli.options import interruptible, new_console, say
from fedclade.config import Scenario
from fedclade.core import ConfigError, RunError, RunInterrupted, unknown
from fedclade.report import count, duration, shortened
from fedclade.sweeps import TunedComparison, TunedResults, TunedRun, select_methods


@dataclass(frozen=True)
class TunedOptions:
    """Options of the command for suites whose methods are tuned; see :func:`fedclade.cli.compare`."""

    only: str = "*"
    methods: str | None = None
    seeds: int | None = None
    at_most: float | None = None
    quiet: bool = False

    def select(self, scenarios: Sequence[Scenario]) -> list[Scenario]:
        """Return the scenarios and methods that the options name.

        Raises
        ------
        ConfigError
            If a name is unknown.
        """
        chosen = list(scenarios)
        if self.only != "*":
            known = {scenario.name: scenario for scenario in scenarios}
            names = _split_names("--only", self.only)
            for name in names:
                if name not in known:
                    raise ConfigError(f"--only: {unknown('data set', name, known)}")
            chosen = [known[name] for name in names]
        if self.methods is not None:
            chosen = select_methods(chosen, _split_names("--methods", self.methods))
        return chosen


def _split_names(option: str, text: str) -> list[str]:
    """Return the names in a text with commas, without repetitions."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"{option} should have at least 1 name, got {text!r}")
    return names


def compare_tuned(
    scenarios: Sequence[Scenario],
    given: TunedOptions,
    out: Path | None,
    data_dir: Path | None,
    *,
    device: str,
    memory: str | None,
) -> None:
    """Tune and compare methods in scenarios, or continue such a comparison, and print its tables."""
    console = new_console()
    chosen = given.select(scenarios)
    arguments.check_machine(device, memory)
    target = arguments.target_folder(out, "natural", resume=out is not None)
    progress = _Progress(console, quiet=given.quiet)
    comparison = TunedComparison(
        chosen,
        target,
        data_dir,
        seeds=given.seeds,
        device=device,
        memory=memory,
        on_run=progress.add,
    )
    if given.at_most is not None:
        end = monotonic() + 60 * given.at_most
        comparison.over = lambda: monotonic() > end
    advice = f"continue with the same command and --out {target}"
    with interruptible(lambda: advice) as comparison.stop:
        try:
            runs = comparison.run()
        except RunInterrupted:
            if not comparison.over():
                raise
            left = comparison.total - len(progress.runs)
            say(console, f"{left:,} of {count(comparison.total, 'run')} left: {advice}")
            return
    console.print(TunedResults(runs).table())
    say(console, f"comparison folder: {target}")
    _raise_failures(runs, target)


class _Progress:
    """Progress of a comparison: a line after the last run of each method in each scenario.

    Parameters
    ----------
    console
        Console on which the lines are printed.
    quiet
        Whether to print nothing.
    """

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self.runs: list[TunedRun] = []
        self._console = console
        self._quiet = quiet
        self._began = monotonic()
        self._executed = 0
        self._last = self._began

    def add(self, run: TunedRun, left: int) -> None:
        """Count a run, and print a line if it was the last one of its method in its scenario.

        Parameters
        ----------
        run
            The result of the run.
        left
            Number of runs that are left.
        """
        now = monotonic()
        # Runs whose results were read from files take almost no time, and predict nothing.
        if run.seconds is not None and now - self._last > run.seconds / 2:
            self._executed += 1
        self._last = now
        self.runs.append(run)
        if self._quiet or run.purpose != "cost":
            return
        line = f"{run.set}: {run.method} done, {count(left, 'run')} left"
        if self._executed and left:
            each = (now - self._began) / self._executed
            line += f", about {duration(left * each)}"
        say(self._console, line)


def _raise_failures(runs: Sequence[TunedRun], target: Path) -> None:
    """Raise a RunError that lists the methods whose runs failed; do nothing without failures.

    Failed trials are no problem if another trial succeeded: their settings are not chosen.
    """
    failures: dict[str, list[str]] = {}
    for run in runs:
        if run.failure and run.purpose != "trial":
            names = failures.setdefault(run.failure, [])
            names.append(f"{run.set}: {run.method} seed {run.seed}")
    if failures:
        lines = [f"{shortened(names)}: {failure}" for failure, names in failures.items()]
        lines.append(f"to repeat the runs of a method, delete its folders in {target / 'runs'}")
        raise RunError("\n".join(lines))
