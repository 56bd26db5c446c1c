"""References of a run: simpler models that are trained for comparison, with the run's settings.

The references are a model that each client trains alone, and one model that all clients train by
FedAvg.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedclade.channel import Signature
from fedclade.core import Aggregation, FedcladeError, RunInterrupted
from fedclade.data import ClientTable, Federation
from fedclade.runs.gains import NO_REFERENCES, ReferenceRuns
from fedclade.runs.reference_log import log_of_reference
from fedclade.runs.settings import RunSettings
from fedclade.runs.store.gains import ALONE, ONE_MODEL, REFERENCES
from fedclade.runs.store.run import Run

MOST_CLIENTS_MEASURED = 200
MOST_ROWS_MEASURED = 100_000
"""Largest numbers of clients and of test rows for which gains are measured by default."""

NEVER = 10**9
"""Rounds between evaluations of a reference, so that only its last round is evaluated.

The number is larger than any number of rounds. It must not depend on the number of rounds, which
may grow when a run is continued.
"""

DIVERGED = "not trained, since the run diverged"
"""Reason that a run that diverged has no trained references."""

OF_METHOD = {ALONE: "local", ONE_MODEL: "fedavg"}
"""Algorithm by which each reference is trained."""

REFERENCES_LOG = __name__
"""Name of the log that reports when the training of a reference begins, at level INFO."""

_log = logging.getLogger(REFERENCES_LOG)

TrainReference = Callable[[str, int, Path | None], Run]
"""Function that trains a reference, given its name, a number of rounds, and its folder, if any."""


def is_small(federation: Federation) -> bool:
    """Return whether a federation is so small that measuring gains takes a negligible time."""
    if len(federation) > MOST_CLIENTS_MEASURED or isinstance(federation.clients, ClientTable):
        return False
    return sum(len(client.test) for client in federation.clients) <= MOST_ROWS_MEASURED


def has_references(run: Run) -> bool:
    """Return whether the gains of a run include all references that the run requires.

    A run that diverged requires none, and a run of FedAvg or local training is itself a reference.
    """
    if run.gains is None:
        return False
    needed = {name for name in OF_METHOD if not _is_reference(run, name)}
    return run.has_diverged or needed <= set(run.gains.models)


def lacks_references(run: Run, folder: Path) -> bool:
    """Return whether references were begun in a finished run's folder, but not completed."""
    return has_begun_references(folder) and not has_references(run)


def has_begun_references(folder: Path) -> bool:
    """Return whether the training of references was begun in the folder of a run."""
    return (folder / REFERENCES).is_dir()


def _is_reference(run: Run, name: str) -> bool:
    """Return whether a run was itself trained like a reference, which then need not be trained.

    ``name`` is the name of the reference. A run with personal parameters is no reference.
    """
    return run.config["algorithm"]["name"] == OF_METHOD[name] and not run.parted


def settings_of_reference(settings: RunSettings, *, is_alone: bool) -> RunSettings:
    """Return the settings of a reference: the settings of its run, without settings for clusters.

    In a reference, clients share the whole model. If the reference is training alone
    (``is_alone``), clients send nothing, so that settings for privacy and aggregation are removed,
    too.
    """
    reference = replace(
        settings,
        # Early stopping counts evaluations.
        evaluate_every=settings.evaluate_every if settings.needs_validation else NEVER,
        evaluate_clients=None,
        target=None,
        personal=(),
        common=(),
        signature=Signature(),
        permute=False,
        min_cluster_size=1,
    )
    if is_alone:
        return replace(
            reference, privacy=None, aggregate=Aggregation(), min_clients=1, stream="auto"
        )
    return reference


def train_references(run: Run, train: TrainReference | None, folder: Path | None) -> ReferenceRuns:
    """Train the references of a run, or read those that are already finished in its folder.

    An error in the training of a reference is logged and noted as the reason for its absence, since
    the results of the run itself are complete.

    Parameters
    ----------
    run
        The run.
    train
        Function that trains a reference for as many rounds as the run had; None if references
        should not be trained.
    folder
        Folder of the run, in whose subfolder ``references`` the references are stored; None if the
        run has no folder.

    Raises
    ------
    RunInterrupted
        If the user interrupts the training.
    """
    runs: dict[str, Run] = {}
    missing: dict[str, str] = {}
    for name in OF_METHOD:
        if _is_reference(run, name):
            missing[name] = "it is the run itself"
        elif run.has_diverged:
            missing[name] = DIVERGED
        elif train is None:
            missing[name] = NO_REFERENCES
        else:
            place = None if folder is None else folder / REFERENCES / name
            _log.info("training the reference %s, for the report", name)
            try:
                with log_of_reference(name):
                    runs[name] = train(name, run.summary["rounds"], place)
            except RunInterrupted:
                raise
            # Any error is caught: the results of the run itself are complete, and must not be lost.
            except Exception as error:
                known = isinstance(error, FedcladeError)
                reason = str(error) if known else f"{type(error).__name__}: {error}"
                _log.warning("the reference %s could not be trained: %s", name, reason)
                missing[name] = f"its training failed: {reason}"
    return ReferenceRuns(runs, missing)
