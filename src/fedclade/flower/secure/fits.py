"""Which runs secure aggregation fits, and what single clients disclose in them beside sums."""

from __future__ import annotations

import math
from dataclasses import replace

from fedclade.algorithms import Algorithm
from fedclade.core import ConfigError
from fedclade.flower.kinds import SKETCH
from fedclade.runs import RunSettings

REVEALS = {
    SKETCH: (
        "the signs of {dim} random projections of each update that is compared: {dim} bits of it, and cosines between "
        "clients to about {error:.2f}"
    ),
    "statistics": "means and squares of each client's inputs, and how many examples of each label it has",
    "choice": "which of the models that it is sent has the lowest loss on each client's training data, once a round",
    "descriptors": "means and directions of each client's inputs, as a model sees them",
    "subspaces": "directions of each client's inputs, which are close to their means",
}
"""What a name of a policy's ``disclose`` stands for."""


def with_signs(settings: RunSettings) -> RunSettings:
    """Return the settings with signs in place of sketches: of masked updates nothing else is compared."""
    if settings.signature.kind != "projected":
        return settings
    return replace(settings, signature=replace(settings.signature, kind="signs"))


def disclosures_of(settings: RunSettings, algorithm: Algorithm, *, statistics: bool = False) -> dict[str, str]:
    """Return what single clients must disclose in a run of sums: what it reveals, by its name in ``disclose``.

    With ``statistics`` inputs are scaled, or labels weighted, by what all clients' examples come to.
    """
    names = [*([SKETCH] if algorithm.compares else []), *algorithm.discloses, *(["statistics"] if statistics else [])]
    dim = settings.signature.dim
    return {name: REVEALS.get(name, name).format(dim=dim, error=math.pi / (2 * math.sqrt(dim))) for name in names}


def announcement(settings: RunSettings, algorithm: Algorithm, *, statistics: bool = False) -> str:
    """Return what the server says at the start of a run whose clients disclose something beside sums, or nothing."""
    disclosed = disclosures_of(settings, algorithm, statistics=statistics)
    if not disclosed:
        return ""
    told = "; ".join(f"{name}: {what}" for name, what in disclosed.items())
    return (
        f"this run of {type(algorithm).__name__} needs more of each client than sums ({told}); a client with "
        f'secure-aggregation=true takes part only with disclose="{" ".join(disclosed)}" in its node config'
    )


def check_sums(settings: RunSettings, algorithm: Algorithm, clients: int = 0, *, parts: int = 1) -> None:
    """Check that a run of so many clients can do with sums of updates, and with signs where it compares.

    ``parts`` is the number of sums for each cluster, if these are enough for robust rules.

    Raises
    ------
    ConfigError
        If it cannot; a line for each reason.
    """
    name, problems = type(algorithm).__name__, list[str]()
    asked = algorithm.asks(clients, settings.client_fraction)
    if algorithm.needs_updates:
        problems.append(f"{name} needs the updates of single clients; take another algorithm, or leave it out")
    elif algorithm.compares and settings.signature.kind == "full":
        problems.append(f"{name} compares whole updates, which would be sent; set signature.kind = 'projected'")
    elif algorithm.compares and algorithm.compares_lengths:
        problems.append(
            f"{name} compares how long updates are, and signs of sketches tell their directions alone; set "
            "algorithm.metric = 'cosine'"
        )
    if algorithm.asks_for_gradients:
        problems.append(f"{name} asks for gradients, which leave without masks; take updates in place of them")
    if asked and not algorithm.discloses:
        problems.append(
            f"{name} asks each client for {asked}, from which its training data can be read; take another algorithm, "
            "or settings with which it does not (docs/secure-aggregation.md has a table of methods), or leave it out"
        )
    if settings.aggregate.is_robust and parts == 1:
        rule = settings.aggregate.rule
        problems.append(
            f"aggregate.rule = {rule!r} needs the updates of single clients, or several sums for each cluster; set "
            "network.secure_parts to at least 3, or leave it out"
        )
    if settings.aggregate.leave_out_opposed is True:
        problems.append("aggregate.leave_out_opposed = true needs the updates of single clients; leave it out")
    if settings.aggregate.clip_above not in ("auto", math.inf):
        problems.append("nobody can shorten an update that is part of a sum; leave aggregate.clip_above out")
    if settings.stream is False:
        problems.append("the server has sums alone, as a run that streams; leave out stream = false")
    if problems:
        raise ConfigError("\n".join(f"network.secure_aggregation = true: {problem}" for problem in problems))
