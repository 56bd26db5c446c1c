"""What the summary of a run says of privacy, by the events that count what clients sent or the server was given."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from fedclade.channel import CentralPrivacy, ExamplePrivacy, Release, mechanism_of
from fedclade.core import PrivateRelease, Released, Stepped
from fedclade.runs.store.run import Row


def spent(section: Mapping[str, Any], events: Sequence[Row]) -> dict[str, Any] | None:
    """Return what was spent of the privacy that the ``[privacy]`` section of a config asks for; None without any."""
    privacy = mechanism_of(section)
    if privacy is None:
        return None
    if isinstance(privacy, CentralPrivacy):
        return privacy.spent(_releases(events))
    if isinstance(privacy, ExamplePrivacy):
        return privacy.spent(_steps(events), _most_releases(events))
    return privacy.spent(_most_releases(events))


def _releases(events: Iterable[Row]) -> list[Release]:
    """Return what was released with noise on sums, or as choices."""
    names = [each.name for each in fields(Release)]
    rows = [event for event in events if event["kind"] == PrivateRelease.kind]
    return [Release(**{name: row[name] for name in names if name in row}) for row in rows]


def _most_releases(events: Iterable[Row]) -> int:
    """Return how many updates the client sent that sent most."""
    sent: Counter[str] = Counter()
    for event in events:
        sent.update(event.get("clients", {}) if event["kind"] == Released.kind else {})
    return max(sent.values(), default=0)


def _steps(events: Iterable[Row]) -> Mapping[str, Counter[float]]:
    """Return how many noisy steps each client took, by their rate."""
    steps: defaultdict[str, Counter[float]] = defaultdict(Counter)
    for event in events:
        for client, count in event.get("clients", {}).items() if event["kind"] == Stepped.kind else ():
            steps[client][event["rate"]] += count
    return steps
