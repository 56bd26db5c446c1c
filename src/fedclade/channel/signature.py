"""Signatures of updates, by which clients are compared, and the permutation of update entries.

A signature is the whole update, a selection of its parameters, or a sketch (a short random
projection) of these parameters. The module also contains the middleware for permuted updates and
for replicates: several updates of one client, each trained on a part of the client's data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    Ask,
    DataQuery,
    EvaluationQuery,
    Layout,
    Nothing,
    Query,
    Splits,
    TrainQuery,
    Updates,
    at_least,
    check_settings,
    checked,
    document_settings,
    matching,
    models_of,
    one_of,
    packed,
    rng,
    row_norms,
    setting,
    unpacked,
)

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("full", "projected", "signs")

LARGEST_FOLD = 2**20
"""Size to which a longer update is folded by a count sketch before its signs are taken."""

PARTS_DIM = 4096
"""Default number R of entries of the signature of an update from a part of a client's data."""


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class Signature:
    """Settings of signatures, the vectors by which clients are compared.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    kind: Literal["full", "projected", "signs"] = setting(
        "full",
        one_of(*KINDS, text="'full', 'projected' or 'signs'"),
        doc="""``full``: the parameters of the update, D numbers. ``projected``: a sketch of the
        parameters (:class:`CountSketch`, or :class:`SignSketch` under secure aggregation).
        ``signs``: the signs of random projections of the parameters (:class:`SignSketch`).""",
    )
    dim: int = setting(
        1024,
        at_least(1),
        doc="""Length R of a sketch, or number of signs. Where an update is spread over many
        parameters, a sketch estimates the cosine similarity α of two clients with standard
        deviation (1 − α²)/√R: 0.03 at R = 1024 and α = 0. See :class:`CountSketch`. Signs estimate
        it with standard deviation at most π/(2√R): 0.05 at R = 1024. See :class:`SignSketch`.""",
    )
    of: tuple[str, ...] | str = setting(
        (),
        doc="""Pattern or patterns over the names of shared parameters, such as ``head.*``. Only the
        matching parameters are compared; all shared parameters if left out. The norms of updates,
        by which some algorithms decide when to split, remain the norms of all parameters.""",
    )

    def __post_init__(self) -> None:
        if isinstance(self.of, str):
            object.__setattr__(self, "of", (self.of,))
        check_settings(self, "signature")

    def sketch(self, seed: int, layout: Layout) -> Sketch | None:
        """Return the sketch for a run's seed and model, or None if whole updates are compared.

        A sketch maps updates to signatures. If ``kind`` is ``full`` and ``of`` has patterns of
        parameter names, the sketch is a :class:`Selection`. A sketch depends only on the settings,
        the seed and the model, so that the update of a newcomer is projected in the same way as the
        updates that are cached in the parameter tree. Updates are projected in the form in which
        the server receives them: permuted, if clients permute their updates.

        Parameters
        ----------
        seed
            Seed of the run.
        layout
            Names and positions of the parameters in a model vector.

        Raises
        ------
        ConfigError
            If a pattern matches no shared parameter.
        """
        if self.kind == "signs":
            return self.signs(seed, layout)
        if self.of:
            return Selection(layout, self.of, seed, self.dim if self.kind == "projected" else 0)
        return (
            CountSketch(seed, layout.n_parameters, self.dim) if self.kind == "projected" else None
        )

    def signs(self, seed: int, layout: Layout) -> SignSketch:
        """Return the sign sketch for updates that clients send masked (secure aggregation).

        The sketch depends only on the seed, the model and the settings ``of`` and ``dim``.

        Parameters
        ----------
        seed
            Seed of the run.
        layout
            Names and positions of the parameters in a model vector.
        """
        selection = Selection(layout, self.of, seed) if self.of else None
        size = layout.n_parameters if selection is None else selection.dim
        return SignSketch(seed, size, self.dim, selection)

    def sketch_of_parts(self, seed: int, layout: Layout) -> Sketch:
        """Return the sketch for updates from parts of a client's data.

        A client sends the signature of every part. To limit traffic, these updates are sketched
        even with kind ``full``, to :data:`PARTS_DIM` numbers each.

        Parameters
        ----------
        seed
            Seed of the run.
        layout
            Names and positions of the parameters in a model vector.
        """
        if self.kind == "signs":
            return self.signs(seed, layout)
        dim = self.dim if self.kind == "projected" else PARTS_DIM
        sketch = replace(self, kind="projected", dim=dim).sketch(seed, layout)
        assert sketch is not None  # as it is projected
        return sketch


class CountSketch:
    """Random linear map of vectors ``[D]`` to ``[R]`` that almost preserves inner products.

    Every entry is multiplied by a random sign and added to one of R buckets: a count sketch
    (Charikar, Chen, Farach-Colton 2002), known as feature hashing when used as a projection
    (Weinberger et al. 2009, arXiv:0902.2206). Inner products are unbiased, with variance Σ_{i≠j}
    p_ij (x_i² y_j² + x_i y_i x_j y_j) (their Lemma 2), where p_ij is the probability that entries i
    and j share a bucket. Here p_ij is at most 1/R, so that the variance is at most (‖x‖²‖y‖² + ⟨x,
    y⟩²)/R. The map takes O(D) time.

    The vector is cut into runs of R consecutive entries. Each run is placed around the circle of R
    buckets from a random offset on. Two entries of one run never share a bucket, and two entries of
    different runs share one with probability 1/R. Memory is read in order, and the order of
    summation is fixed, also on a GPU. With R ≥ D no two entries share a bucket, and the map is an
    isometry.

    Parameters
    ----------
    seed
        Seed of the run. The same seed gives the same map.
    size, dim
        Number of entries D of a vector, and number of buckets R.
    """

    def __init__(self, seed: int, size: int, dim: int) -> None:
        self.dim = min(dim, size)
        draw = rng.torch_generator(seed, "signature")
        self._signs = 2.0 * torch.randint(2, (size,), generator=draw) - 1.0
        self._places = torch.randint(self.dim, (-(-size // self.dim),), generator=draw).tolist()

    @property
    def described(self) -> dict[str, Any]:
        """Settings from which a client can build the same count sketch, by name."""
        return {"dim": self.dim}

    def apply(self, vectors: Tensor) -> Tensor:
        """Return the sketches of vectors: R buckets ``[..., R]`` for D entries ``[..., D]``."""
        signs = self._signs.to(vectors)
        # Runs are added to twice as many buckets, so that no run has to be split at the last
        # bucket; both halves are added up at the end.
        twice_around = vectors.new_zeros((*vectors.shape[:-1], 2 * self.dim))
        for place, run, sign in zip(
            self._places, vectors.split(self.dim, -1), signs.split(self.dim), strict=True
        ):
            twice_around[..., place : place + len(sign)].addcmul_(run, sign)
        first, second = twice_around.split(self.dim, -1)
        return first + second


class Selection:
    """Signature of the parameters that match patterns: their entries, or a count sketch of these.

    Parameters
    ----------
    layout
        Names and positions of the parameters in a model vector.
    of
        Patterns over parameter names. Parameters that share their values (tied parameters) match by
        any of their names.
    seed
        Seed of the run, for the sketch.
    dim
        Size of the sketch; 0 for the entries themselves.
    """

    def __init__(self, layout: Layout, of: Sequence[str], seed: int, dim: int = 0) -> None:
        places = {slot.name: slot for slot in layout.parameters}
        places |= {name: places[place] for name, place in layout.tied if place in places}
        chosen = {places[name] for name in matching(of, places, "signature.of", "shared parameter")}
        self._slots = [slot for slot in layout.parameters if slot in chosen]
        size = sum(slot.stop - slot.start for slot in self._slots)
        self._of, self._sketch = tuple(of), CountSketch(seed, size, dim) if dim else None
        self.dim = self._sketch.dim if self._sketch else size

    @property
    def described(self) -> dict[str, Any]:
        """Settings from which a client can build the same selection, by name."""
        return {"dim": self._sketch.dim if self._sketch else 0, "of": list(self._of)}

    def apply(self, vectors: Tensor) -> Tensor:
        """Return the R selected entries of vectors with D entries, or a sketch of these entries.

        Parameters
        ----------
        vectors
            Updates ``[..., D]``; the result is ``[..., R]``.
        """
        chosen = torch.cat([vectors[..., slot.start : slot.stop] for slot in self._slots], -1)
        return self._sketch.apply(chosen) if self._sketch else chosen


class SignSketch:
    """Signs of R random projections of an update, each 1 or −1.

    With secure aggregation the signs are the only part of an update by which clients are compared.
    Two updates at an angle φ differ in a share of φ/π of the signs (Charikar 2002), so cosines can
    be estimated from the signs (see :func:`fedclade.clustering.cosine_similarity`). R signs are R
    bits: they do not reveal the length of an update, nor the size of its projection on a direction.

    The projection consists of two rounds of random sign flips and a Fourier transform, which take
    O(D log D) time and O(D) memory. An update of more than ``LARGEST_FOLD`` entries is first folded
    to ``LARGEST_FOLD`` entries by a count sketch.

    Parameters
    ----------
    seed
        Seed of the run. The same seed gives the same projection.
    size, dim
        Number of entries D of an update, and number of signs R.
    selection
        The parameters that are compared; None for all.
    """

    def __init__(self, seed: int, size: int, dim: int, selection: Selection | None = None) -> None:
        self.dim = dim
        self._of = selection
        self._fold = CountSketch(seed, size, LARGEST_FOLD) if size > LARGEST_FOLD else None
        # At least twice as wide as R, so that the R projections are a subset of the outputs of the
        # transform and not all of them.
        self._width = 2 ** math.ceil(math.log2(max(min(size, LARGEST_FOLD), 2 * dim, 2)))
        draw = rng.torch_generator(seed, "signs of a signature")
        self._flips = [
            2.0 * torch.randint(2, (self._width,), generator=draw) - 1.0 for _ in range(2)
        ]
        self._places = torch.randperm(self._width, generator=draw)[:dim]

    @property
    def described(self) -> dict[str, Any]:
        """Settings from which a client can build the same sign sketch, by name."""
        of = {} if self._of is None else {"of": self._of.described["of"]}
        return {"dim": self.dim, "compared": "signs", **of}

    def apply(self, vectors: Tensor) -> Tensor:
        """Return the signs (1 or −1) of R random projections of vectors with D entries.

        Parameters
        ----------
        vectors
            Updates ``[..., D]``; the result is ``[..., R]``.
        """
        # torch.fft does not accept an empty tensor.
        if vectors.numel() == 0:
            return vectors.new_zeros(*vectors.shape[:-1], self.dim)
        return torch.where(self.project(vectors) >= 0, 1.0, -1.0).to(vectors.dtype)

    def project(self, vectors: Tensor) -> Tensor:
        """Return R random projections of vectors with D entries, in float64.

        Only the signs of the projections leave a client.

        Parameters
        ----------
        vectors
            Updates ``[..., D]``; the result is ``[..., R]``.
        """
        chosen = vectors if self._of is None else self._of.apply(vectors)
        if self._fold is not None:
            chosen = self._fold.apply(chosen)
        mixed = torch.nn.functional.pad(chosen.double(), (0, self._width - chosen.shape[-1]))
        for flips in self._flips:
            turned = torch.fft.fft(mixed * flips.to(mixed), norm="ortho")
            # The Hartley transform: real and orthonormal.
            mixed = turned.real + turned.imag
        return mixed[..., self._places.to(mixed.device)]


class NoSketch:
    """Sketch that maps every update to a signature without entries.

    It is used for updates that no algorithm compares: a round that streams, in which the server
    stores signatures instead of updates, then stores nothing for each client.
    """

    dim = 0

    @property
    def described(self) -> dict[str, Any]:
        """Settings from which a client can build the same empty sketch, by name."""
        return {"dim": 0}

    def apply(self, vectors: Tensor) -> Tensor:
        """Return empty signatures ``[..., 0]`` of vectors ``[..., D]``."""
        return vectors[..., :0]


Sketch = CountSketch | Selection | SignSketch | NoSketch
"""Any map of updates to signatures other than the whole update."""


@dataclass(frozen=True)
class Sketching(Middleware):
    """Middleware that adds to each update its sketch, by which the server compares clients.

    Parameters
    ----------
    sketch
        Map of updates to sketches (short random projections).
    """

    queries = (TrainQuery,)

    sketch: Sketch

    def after(self, query: TrainQuery, reply: Updates) -> Updates:
        """Return the updates, with the sketch of each update added.

        A reply without updates passes unchanged. Updates of a mixture, and replies to a private
        question about updates, get empty sketches, since no algorithm compares them.
        """
        work = query.work
        if not work.sends_update:
            return reply
        is_compared = work.mixture is None and work.question is None
        sketch = self.sketch if is_compared else NoSketch()
        return reply.with_columns(sketches=sketch.apply(reply.signatures))


class Permutation:
    """Permutation P of the entries of a model vector (CFL eqs. 45 and 46).

    P is orthonormal, and drawn from a seed that the clients share and the server never receives.
    Parameters are permuted among parameters and buffers among buffers, so that the server still
    knows which entries to compare. The seed may have any number of bits: 128 random bits withstand
    a server that tries all seeds. They do not withstand a server that infers the permutation from
    the movement of the entries (``studies/audit_permutation.py``).

    Parameters
    ----------
    seed
        The seed that clients share.
    size, n_parameters
        Number S of entries of a model vector, and number D of parameters among them; the other
        entries are buffers.
    """

    def __init__(self, seed: int, size: int, n_parameters: int) -> None:
        # Not torch's own generator: it uses at most 32 bits of a seed.
        draw = rng.generator(seed, "permutation")
        parameters = torch.from_numpy(draw.permutation(n_parameters))
        buffers = n_parameters + torch.from_numpy(draw.permutation(size - n_parameters))
        self._forward = torch.cat([parameters, buffers])
        self._inverse = torch.argsort(self._forward)

    def apply(self, vectors: Tensor) -> Tensor:
        """Permute vectors: return P·v for each vector v.

        Parameters
        ----------
        vectors
            Vectors with an entry for each of the S model entries, ``[..., S]``, or only for the D
            parameters, ``[..., D]``.
        """
        return vectors[..., self._forward[: vectors.shape[-1]].to(vectors.device)]

    def invert(self, vectors: Tensor) -> Tensor:
        """Reverse the permutation: return P⁻¹·v for each vector v.

        Parameters
        ----------
        vectors
            Vectors with an entry for each of the S model entries, ``[..., S]``, or only for the D
            parameters, ``[..., D]``.
        """
        return vectors[..., self._inverse[: vectors.shape[-1]].to(vectors.device)]


@dataclass(frozen=True)
class Permuting(Middleware):
    """Middleware that permutes all model vectors and updates between clients and the server.

    It implements CFL Algorithm 5, lines 7 and 8. Clients apply P⁻¹ to every model that they
    receive, and the permutation P to every update that they send. Means, norms and cosine
    similarities do not change (eqs. 45, 46), so algorithms run on permuted vectors unchanged. P
    does not hide subspaces of the clients' data, which contain no model entries.

    Parameters
    ----------
    permutation
        The permutation P, which only clients know.
    """

    queries = (TrainQuery, EvaluationQuery, DataQuery)

    permutation: Permutation

    def before(self, query: Any) -> Any:
        """Return the query with the permutation of its models reversed (P⁻¹·θ for each model θ)."""
        if isinstance(query, TrainQuery):
            vectors = self.permutation.invert(query.models.vectors)
            return replace(query, models=replace(query.models, vectors=vectors))
        if isinstance(query, EvaluationQuery):
            return replace(query, models=self.permutation.invert(query.models))
        models = models_of(query)
        if not models:
            return query
        inverted = {name: self.permutation.invert(model) for name, model in models.items()}
        return replace(query, **inverted)

    def after(self, query: Any, reply: Any) -> Any:
        """Return permuted updates (P·Δθ_i for each update Δθ_i); other replies are unchanged."""
        if not isinstance(query, TrainQuery):
            return reply
        if query.work.mixture is None:
            return reply.with_columns(deltas=self.permutation.apply(reply.required_deltas))
        count, size = query.models.vectors.shape
        D = reply.n_parameters // count
        deltas, tables = unpacked(reply.required_deltas, count, size, D)
        return reply.with_columns(deltas=packed(self.permutation.apply(deltas), D, tables))


# Replicates: clients make several updates in a query, each from a part of their data.


@dataclass(frozen=True)
class Replicating(Middleware):
    """Middleware that combines m replicates of each client into one reply.

    A replicate is an update from the same start model, trained on one of m parts of a client's
    training data. The reply contains the mean of the replicates, and the signature of each
    replicate (``parts``). If signatures are sketches, a client thus sends little more than one
    update. This middleware comes after all middleware that changes whole updates, such as privacy
    and permutation.

    Parameters
    ----------
    sketch
        Sketch that makes the signature of a replicate; None: the signature is the whole update.
    """

    sketch: Sketch | None

    def handles(self, query: Query[Any]) -> bool:
        """Return whether a query requests training on several parts of each client's data."""
        return isinstance(query, TrainQuery) and query.work.splits is not None

    def around(self, query: TrainQuery, ask: Ask) -> Updates:
        """Query the replicates of all clients, and return their mean for each client.

        The mean updates are ``[n, S]`` (n clients, S model entries). If clients are compared by
        their replicates, the reply has the signatures ``[n, m, R]`` as well (m replicates, R
        numbers each). A client is left out if any of its replicates is missing.
        """
        splits = query.work.splits
        assert splits is not None
        # No replicate may pass to a sink, since a client replies with all of them together.
        made = [ask(_replicate(query, splits, place), None) for place in range(splits.count)]
        answered = [
            client for client in query.ids if all(client in updates.ids for updates in made)
        ]
        parts = [updates.select(answered) for updates in made]
        sizes = torch.stack([updates.sizes for updates in parts])
        deltas = torch.stack([updates.required_deltas for updates in parts])
        n_parameters = parts[0].n_parameters
        mean = torch.einsum("kn,kns->ns", (sizes / sizes.sum(0)).to(deltas), deltas)
        signatures: Tensor | None = None
        if splits.compared:
            compared = deltas[:, :, :n_parameters]
            signatures = self.sketch.apply(compared) if self.sketch else compared
            signatures = signatures.transpose(0, 1).contiguous()
        return Updates.of(
            ids=tuple(answered),
            sizes=sizes.sum(0),
            losses=torch.stack([updates.losses for updates in parts]).mean(0),
            norms=row_norms(mean[:, :n_parameters]),
            n_parameters=n_parameters,
            deltas=mean,
            parts=signatures,
            left_out={client: why for updates in made for client, why in updates.left_out.items()},
        )


def _replicate(query: TrainQuery, splits: Splits, place: int) -> TrainQuery:
    """Return the query for one replicate, from part number ``place`` (from 0) of the data."""
    part, local = splits.split(place, query.round.local)
    on_part = replace(query.round, local=local, purpose=f"{query.round.purpose} {place}")
    # A replicate is only compared with other replicates, so clients store nothing that would change
    # later rounds.
    work = replace(query.work, data=part, store=Nothing())
    return replace(query, round=on_part, work=work)


# A client of a network sends its update and the signatures of its parts as one vector.


def pack_parts(updates: Updates) -> Tensor:
    """Return the vectors that n clients send: updates, followed by the signatures of their parts.

    A vector has S + m·R numbers: S for the entries of the update, and R for each of the m parts of
    the client's data. Without signatures of parts, the vectors are the updates alone.
    """
    if updates.parts is None:
        return updates.required_deltas
    return torch.cat([updates.required_deltas, updates.parts.flatten(1)], dim=1)


def unpack_parts(updates: Updates, query: TrainQuery) -> Updates:
    """Split received vectors into updates and the signatures of parts; reverse :func:`pack_parts`.

    Parameters
    ----------
    updates
        Updates whose vectors also contain the signatures of parts, if the query requests these.
    query
        The query to which the clients replied.
    """
    splits = query.work.compared_splits
    if splits is None:
        return updates
    size = query.models.vectors.shape[1]
    vectors = updates.required_deltas
    dim = (vectors.shape[1] - size) // splits.count
    parts = vectors[:, size:].reshape(len(vectors), splits.count, dim)
    return updates.with_columns(deltas=vectors[:, :size], parts=parts)
