"""Signatures of updates, by which clients are compared, and the permutation of update entries.

A signature is the whole update, a selection of its parameters, or a sketch of these. The module
also has the middleware for permuted updates and for clients that send several updates from parts of
their data (replicates).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    Ask,
    DataQuery,
    Evaluation,
    EvaluationQuery,
    Layout,
    R,
    UpdateQuery,
    Updates,
    checked,
    matching,
    models_of,
    packed,
    require,
    rng,
    row_norms,
    unpacked,
)

KINDS = ("full", "projected", "signs")

LARGEST_FOLD = 2**20
"""Size to which a longer update is folded by a count sketch before its signs are taken."""

PARTS_DIM = 4096
"""Default size R of the signature of an update from a part of the data."""


@checked()
@dataclass(frozen=True, kw_only=True)
class Signature:
    """Settings of the signature: the numbers by which clients are compared.

    Parameters
    ----------
    kind
        ``full``: the parameters of the update, D numbers. ``projected``: a sketch of the parameters
        (:class:`CountSketch`, or :class:`SignSketch` under secure aggregation). ``signs``: the
        signs of random projections of the parameters (:class:`SignSketch`).
    of
        Pattern or patterns over the names of shared parameters, such as ``head.*``. Only the
        matching parameters are compared; all shared parameters if left out. The norms of updates,
        by which some algorithms decide when to split, remain the norms of all parameters.
    dim
        Length R of a sketch, or number of signs. Where an update is spread over many parameters, a
        sketch estimates the cosine similarity α of two clients with standard deviation (1 − α²)/√R:
        0.03 at R = 1024 and α = 0. See :class:`CountSketch`. Signs estimate it with standard
        deviation at most π/(2√R): 0.05 at R = 1024. See :class:`SignSketch`.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    kind: Literal["full", "projected", "signs"] = "full"
    dim: int = 1024
    of: tuple[str, ...] | str = ()

    def __post_init__(self) -> None:
        if isinstance(self.of, str):
            object.__setattr__(self, "of", (self.of,))
        require(
            ("signature.kind", self.kind, self.kind in KINDS, "'full', 'projected' or 'signs'"),
            ("signature.dim", self.dim, self.dim >= 1, "at least 1"),
        )

    def sketch(self, seed: int, layout: Layout) -> Sketch | None:
        """Return the sketch of updates for a run's seed and model, or None for kind ``full``.

        With kind ``full`` and patterns ``of``, the sketch is a :class:`Selection`. A sketch depends
        only on the settings, the seed and the model. So the update of a newcomer is projected in
        the same way as the updates on the edges of the tree: in the form in which the server
        received them, which is P·Δθ_i with permuted clients.

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
        """Return the sign sketch of updates that leave their clients masked (secure aggregation).

        The signs depend only on the seed, the model, ``of`` and ``dim``.
        """
        selection = Selection(layout, self.of, seed) if self.of else None
        size = layout.n_parameters if selection is None else selection.dim
        return SignSketch(seed, size, self.dim, selection)

    def sketch_of_parts(self, seed: int, layout: Layout) -> Sketch:
        """Return the sketch of updates from parts of the data.

        A client sends the signatures of all its parts, so they are sketched even with kind
        ``full``, to :data:`PARTS_DIM` numbers each.
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
    isometry. The same run seed gives the same map.
    """

    def __init__(self, seed: int, size: int, dim: int) -> None:
        self.dim = min(dim, size)
        draw = rng.torch_generator(seed, "signature")
        self._signs = 2.0 * torch.randint(2, (size,), generator=draw) - 1.0
        self._places = torch.randint(self.dim, (-(-size // self.dim),), generator=draw).tolist()

    @property
    def described(self) -> dict[str, Any]:
        """Settings that a client needs to build the same sketch."""
        return {"dim": self.dim}

    def apply(self, vectors: Tensor) -> Tensor:
        """Return the sketches ``[..., R]`` of vectors ``[..., D]``."""
        signs = self._signs.to(vectors)
        twice_around = vectors.new_zeros((*vectors.shape[:-1], 2 * self.dim))
        for place, run, sign in zip(
            self._places, vectors.split(self.dim, -1), signs.split(self.dim), strict=True
        ):
            twice_around[..., place : place + len(sign)].addcmul_(run, sign)
        first, second = twice_around.split(self.dim, -1)
        return first + second


class Selection:
    """Entries of the parameters that match patterns, or a count sketch of these entries.

    Parameters
    ----------
    layout
        Names and positions of the parameters in a model vector.
    of
        The patterns. Parameters that share their values (tied) match by any of their names.
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
        """Settings that a client needs to build the same selection."""
        return {"dim": self._sketch.dim if self._sketch else 0, "of": list(self._of)}

    def apply(self, vectors: Tensor) -> Tensor:
        """Return the selected entries, or their sketch, ``[..., R]``, of vectors ``[..., D]``."""
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
        """Settings that a client needs to build the same sign sketch."""
        of = {} if self._of is None else {"of": self._of.described["of"]}
        return {"dim": self.dim, "compared": "signs", **of}

    def apply(self, vectors: Tensor) -> Tensor:
        """Return the signs ``[..., R]`` of vectors ``[..., D]``, as 1 and −1."""
        # torch.fft does not accept an empty tensor.
        if vectors.numel() == 0:
            return vectors.new_zeros(*vectors.shape[:-1], self.dim)
        return torch.where(self.project(vectors) >= 0, 1.0, -1.0).to(vectors.dtype)

    def project(self, vectors: Tensor) -> Tensor:
        """Return the projections ``[..., R]`` of vectors ``[..., D]``, float64.

        Only the signs of the projections leave a client.
        """
        chosen = vectors if self._of is None else self._of.apply(vectors)
        if self._fold is not None:
            chosen = self._fold.apply(chosen)
        mixed = functional.pad(chosen.double(), (0, self._width - chosen.shape[-1]))
        for flips in self._flips:
            turned = torch.fft.fft(mixed * flips.to(mixed), norm="ortho")
            # The Hartley transform: real and orthonormal.
            mixed = turned.real + turned.imag
        return mixed[..., self._places.to(mixed.device)]


class Nothing:
    """Sketch without entries, for updates that no algorithm compares.

    A round that streams stores it in place of each update.
    """

    dim = 0

    @property
    def described(self) -> dict[str, Any]:
        """Settings that a client needs to build the same sketch."""
        return {"dim": 0}

    def apply(self, vectors: Tensor) -> Tensor:
        """Return empty signatures ``[..., 0]`` of vectors ``[..., D]``."""
        return vectors[..., :0]


Sketch = CountSketch | Selection | SignSketch | Nothing
"""Any kind of signature that is not the whole update."""


@dataclass(frozen=True)
class Sketching(Middleware):
    """Middleware that projects updates at the server, which then compares sketches."""

    sketch: Sketch

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates with their sketches.

        Updates of models that clients store pass unchanged. Updates of a mixture and replies to a
        question about updates get empty sketches, since no algorithm compares them.
        """
        if query.is_secret:
            return ask(query)
        plain = query.mixture is None and query.question is None
        sketching = self if plain else Sketching(Nothing())
        if (sink := query.sink) is not None:
            query = replace(query, sink=lambda updates: sink(sketching._sketched(updates)))
        return sketching._sketched(ask(query))

    def _sketched(self, updates: Updates) -> Updates:
        return replace(updates, sketches=self.sketch.apply(updates.signatures))


class Permutation:
    """Permutation P of the entries of a model vector (CFL eqs. 45 and 46).

    P is orthonormal, and drawn from a seed that the clients share and the server never has.
    Parameters are permuted among parameters and buffers among buffers, so that the server can still
    tell which entries are compared. The seed may have any number of bits: 128 random bits withstand
    a server that tries all seeds. They do not withstand a server that infers the permutation from
    the movement of the entries (``studies/audit_permutation.py``).

    Parameters
    ----------
    seed
        The seed that clients share.
    size, n_parameters
        Numbers S of entries and D of parameters of a model vector.
    """

    def __init__(self, seed: int, size: int, n_parameters: int) -> None:
        # Not torch's own generator: it uses at most 32 bits of a seed.
        draw = rng.generator(seed, "permutation")
        parameters = torch.from_numpy(draw.permutation(n_parameters))
        buffers = n_parameters + torch.from_numpy(draw.permutation(size - n_parameters))
        self._forward = torch.cat([parameters, buffers])
        self._inverse = torch.argsort(self._forward)

    def apply(self, vectors: Tensor) -> Tensor:
        """Return P·v for vectors ``[..., S]``, or ``[..., D]`` of parameters alone."""
        return vectors[..., self._forward[: vectors.shape[-1]].to(vectors.device)]

    def invert(self, vectors: Tensor) -> Tensor:
        """Return P⁻¹·v for vectors ``[..., S]``, or ``[..., D]`` of parameters alone."""
        return vectors[..., self._inverse[: vectors.shape[-1]].to(vectors.device)]


@dataclass(frozen=True)
class Permuting(Middleware):
    """Middleware that permutes all vectors between clients and the server.

    It implements CFL Algorithm 5, lines 7 and 8. Clients apply P⁻¹ to every model that they
    receive, and P to every update that they send. Means, norms and cosine similarities do not
    change (eqs. 45, 46), so algorithms run on permuted vectors unchanged. P does not hide
    subspaces, since they are directions of the data themselves.
    """

    permutation: Permutation

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the permuted updates P·Δθ_i, trained from P⁻¹·θ."""
        updates = ask(replace(query, models=self.permutation.invert(query.models)))
        models = query.models
        if query.mixture is None:
            return replace(updates, deltas=self.permutation.apply(updates.required_deltas))
        D = updates.n_parameters // len(models)
        deltas, tables = unpacked(updates.required_deltas, len(models), models.shape[1], D)
        return replace(updates, deltas=packed(self.permutation.apply(deltas), D, tables))

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return the scores of the models P⁻¹·θ."""
        return ask(replace(query, models=self.permutation.invert(query.models)))

    def data(self, query: DataQuery[R], ask: Ask) -> R:
        """Return the clients' replies about the models P⁻¹·θ; P does not hide these replies."""
        models = models_of(query)
        if not models:
            return ask(query)
        inverted = {name: self.permutation.invert(model) for name, model in models.items()}
        return ask(replace(query, **inverted))


# Replicates: clients make several updates in a query, each from a part of their data.


@dataclass(frozen=True)
class Replicating(Middleware):
    """Middleware that combines m replicates of each client into one reply.

    The reply is the mean of the replicates and the signatures of all of them, concatenated.

    A replicate is an update from the same model, trained on a part of the training data. A client
    is queried once, and if signatures are sketches, it sends little more than one update. This
    middleware comes after all middleware that changes whole updates, such as privacy and
    permutation.

    Parameters
    ----------
    sketch
        Signature of a replicate; None: the whole update.
    """

    sketch: Sketch | None

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates: ``[n, S + m·R]`` with signatures, ``[n, S]`` without.

        Updates have signatures if the round compares m > 1 replicates. A client is left out if any
        of its replicates is missing.
        """
        count = query.round.replicates
        if query.kind == "gradients" or count == 1:
            return ask(query)
        made = [ask(replace(query, round=query.round.of_part(part))) for part in range(count)]
        answered = [
            client for client in query.ids if all(client in updates.ids for updates in made)
        ]
        parts = [updates.select(answered) for updates in made]
        sizes = torch.stack([updates.sizes for updates in parts])
        deltas = torch.stack([updates.required_deltas for updates in parts])
        n_parameters = parts[0].n_parameters
        mean = torch.einsum("kn,kns->ns", (sizes / sizes.sum(0)).to(deltas), deltas)
        compared = deltas[: count if query.round.compares_parts else 0, :, :n_parameters]
        signatures = self.sketch.apply(compared) if self.sketch else compared
        return Updates(
            ids=tuple(answered),
            sizes=sizes.sum(0),
            losses=torch.stack([updates.losses for updates in parts]).mean(0),
            norms=row_norms(mean[:, :n_parameters]),
            n_parameters=n_parameters,
            deltas=torch.cat([mean, *signatures], dim=1),
            left_out={client: why for updates in made for client, why in updates.left_out.items()},
        )


@dataclass(frozen=True)
class Unpacking(Middleware):
    """Middleware that separates mean updates from the signatures concatenated to them.

    It reverses the concatenation of :class:`Replicating`, before the server compares or sums
    updates.
    """

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the means of the replicates as ``deltas``, and their signatures as ``parts``."""
        if (
            query.kind == "gradients"
            or query.round.replicates == 1
            or not query.round.compares_parts
        ):
            return ask(query)
        if (sink := query.sink) is not None:
            query = replace(query, sink=lambda updates: sink(_unpacked(updates, query)))
        return _unpacked(ask(query), query)


def _unpacked(updates: Updates, query: UpdateQuery) -> Updates:
    size = query.models.shape[1]
    count = query.round.replicates
    deltas = updates.required_deltas
    signatures = deltas[:, size:].reshape(len(deltas), count, (deltas.shape[1] - size) // count)
    return replace(updates, deltas=deltas[:, :size], parts=signatures)
