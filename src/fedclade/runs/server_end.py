"""Middleware at the server's end of a run: the same in a simulation and in a network.

Middleware is code between algorithm and clients that may change queries and replies. The server's
part receives the clients' replies, limits and sums updates, and repeats queries to clients that did
not reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from fedclade.algorithms import Algorithm
from fedclade.channel import (
    Limiting,
    MatchingParts,
    Middleware,
    NoSketch,
    OpposingUpdates,
    Retrying,
    Sketch,
    Streaming,
    Weighing,
    arrived,
    received,
    server_side,
)
from fedclade.core import Aggregation, Layout, Limits
from fedclade.runs.settings import RunSettings


@dataclass(frozen=True)
class ServerEnd:
    """Middleware at the server's end of a run, and the sketches by which updates are compared.

    A sketch is a random projection of an update to a short vector, which keeps similarities between
    updates approximately.

    Parameters
    ----------
    sketch
        Sketch of whole updates; None if updates are compared without a sketch.
    sketch_of_parts
        Sketch of updates that clients compute from parts of their data.
    compared
        Sketch that the server computes of each update for comparisons; None if whole updates are
        compared, :class:`NoSketch` if updates are not compared.
    limits
        Limits on the weight and the norm of a single update.
    retrying
        Middleware that repeats queries, and records which clients did not reply.
    aggregation
        Rule that combines the updates of a cluster.
    streaming
        Middleware that sums updates as they arrive; None if single updates are stored.
    limiting
        Middleware that enforces ``limits``; None if there are no limits.
    matching
        Middleware that checks, for clients that train on several parts of their data, that the
        update is the mean of the parts' updates; None if clients are trusted.
    opposing
        Middleware that leaves out updates that oppose most others; None if it is not used.
    weighing
        Middleware that sets the weights of clients; None if the method decides.
    """

    sketch: Sketch | None
    sketch_of_parts: Sketch
    compared: Sketch | None
    limits: Limits
    retrying: Retrying
    aggregation: Aggregation
    streaming: Streaming | None
    limiting: Limiting | None
    matching: MatchingParts | None
    opposing: OpposingUpdates | None
    weighing: Weighing | None

    @classmethod
    def assemble(
        cls,
        settings: RunSettings,
        algorithm: Algorithm,
        layout: Layout,
        sizes: Callable[[], Mapping[int, int]],
        *,
        retrying: Retrying,
        streaming: Streaming | None,
        limits: Limits,
        untrusted: bool,
        names: Callable[[], Mapping[int, str]],
    ) -> Self:
        """Build the server's middleware from the settings of a run.

        Parameters
        ----------
        settings
            Settings of the run.
        algorithm
            The algorithm.
        layout
            Names and positions of the parameters in a model vector.
        sizes
            Function that returns the number of training examples that each client reports.
        retrying
            Middleware that repeats queries.
        streaming
            Middleware that sums updates as they arrive; None if single updates are stored.
        limits
            Limits on the weight and the norm of a single update.
        untrusted
            Whether clients may be malicious.
        names
            Function that returns the name of each client.
        """
        sketch = settings.signature.sketch(settings.seed, layout)
        parts = settings.signature.sketch_of_parts(settings.seed, layout)
        # A run that streams without a sketch does not compare clients, see
        # RunSettings.check_algorithm. Under central privacy the server receives no signature.
        compares_none = settings.is_central or (streaming is not None and sketch is None)
        opposed = settings.aggregate.looks_for_opposed(
            untrusted=untrusted, clients_choose=algorithm.requires.clients_choose
        )
        opposing = OpposingUpdates(settings.aggregate.byzantine) if opposed else None
        return cls(
            sketch=sketch,
            sketch_of_parts=parts,
            compared=NoSketch() if compares_none else sketch,
            limits=limits,
            retrying=retrying,
            aggregation=settings.aggregate,
            streaming=streaming,
            limiting=Limiting.within(limits, layout.n_parameters, sizes),
            matching=MatchingParts(parts) if untrusted else None,
            opposing=None if streaming is not None else opposing,
            weighing=Weighing.of(settings.aggregate, names, sizes),
        )

    @property
    def middleware(self) -> list[Middleware]:
        """All middleware of the server, in the order in which a reply passes through it."""
        return server_side(
            self.retrying,
            self.compared,
            self.streaming,
            limiting=self.limiting,
            aggregation=self.aggregation,
            matching=self.matching,
            opposing=self.opposing,
            weighing=self.weighing,
        )

    def streaming_from_now(self) -> ServerEnd:
        """Return the middleware of a server that begins to stream, as more clients have joined."""
        compared = NoSketch() if self.sketch is None else self.sketch
        return replace(self, streaming=Streaming(), compared=compared, opposing=None)

    @property
    def within_actors(self) -> list[Middleware]:
        """Middleware that each Ray actor applies to its clients' replies before it sends them.

        Limits on updates compare each update with other updates, so they are best enforced by the
        server, which receives the updates of all actors. If actors send only sums of updates, the
        server cannot limit single updates, and each actor enforces the limits for its clients.
        """
        limiting = self.limiting if self.streaming is not None else None
        # The actors do not need the sizes of all clients, which are those of the federation.
        weighing = None if self.weighing is None else replace(self.weighing, sizes=dict)
        return received(self.compared, self.streaming, limiting, weighing=weighing)

    @property
    def behind_actors(self) -> list[Middleware]:
        """Middleware that the server applies to the replies of Ray actors."""
        limiting = None if self.streaming is not None else self.limiting
        weighing = [] if self.weighing is None else [self.weighing]
        return [*weighing, *arrived(self.retrying, self.aggregation, limiting, self.opposing)]
