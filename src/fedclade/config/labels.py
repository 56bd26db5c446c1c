"""Labels of the configs in a batch, and names of the runs in a batch."""

from __future__ import annotations

from collections.abc import Iterable

from fedclade.core import ConfigError, name_problem, shown


def run_name(prefix: str, label: str, seed: int, seeds: int) -> str:
    """Return the name of a run in a batch, for progress bars and messages.

    The name consists of ``prefix`` and the ``label`` of the run's config. If each config has
    several seeds (``seeds`` > 1), the run's seed is added.
    """
    return f"{prefix}{label}" + (f" seed {seed}" if seeds > 1 else "")


def check_labels(labels: Iterable[str]) -> None:
    """Check that all labels of configs are valid names of folders, to which the runs are written.

    Raises
    ------
    ConfigError
        If a label is not a valid name of a folder.
    """
    for label in labels:
        if problem := name_problem(label):
            raise ConfigError(f"label {shown(label)} should be a valid name of a folder: {problem}")
