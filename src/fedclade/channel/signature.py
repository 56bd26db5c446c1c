"""What the server compares of an update: all, some, or a sketch; and updates that clients have shuffled before."""

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
"""Entries that an update is folded to before its signs are taken, if it has more."""

PARTS_DIM = 4096
"""Numbers that the update of a part of the data is compared by, unless the run says how many."""


@checked()
@dataclass(frozen=True, kw_only=True)
class Signature:
    """What clients are compared by.

    Parameters
    ----------
    kind
        ``full``: the parameters of the update, D numbers; ``projected``: a sketch of them;
        ``signs``: the signs of random projections of them, which is what secure aggregation makes
        of ``projected``.
    of
        Patterns over the names of shared parameters, such as ``head.*``, or one: only these are
        compared. All, if left out. The norms of updates, by which some algorithms decide when to
        split, stay those of all parameters.
    dim
        Length R of a sketch, or how many signs. Where updates are spread over many parameters, the
        cosine similarity α of two clients is then off by (1 − α²)/√R (standard deviation): 0.03 at
        R = 1024 and α = 0. See :class:`CountSketch`. By signs it is off by at most π/(2√R): 0.05 at
        R = 1024. See :class:`SignSketch`.

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
        """Return what is compared of an update in a run with this seed and model; None for all of it.

        It depends on nothing else, so the update of a newcomer can be projected as those on the
        tree's edges were: as the server received them, which with permuted clients is P·Δθ_i.

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
        """Return what is compared of an update that leaves its client masked: the signs of a projection.

        They depend on the seed, the model, ``of`` and ``dim`` alone.
        """
        selection = Selection(layout, self.of, seed) if self.of else None
        size = layout.n_parameters if selection is None else selection.dim
        return SignSketch(seed, size, self.dim, selection)

    def sketch_of_parts(self, seed: int, layout: Layout) -> Sketch:
        """Return what is compared of the updates of parts of the data: they are many, so always a sketch."""
        if self.kind == "signs":
            return self.signs(seed, layout)
        dim = self.dim if self.kind == "projected" else PARTS_DIM
        sketch = replace(self, kind="projected", dim=dim).sketch(seed, layout)
        assert sketch is not None  # as it is projected
        return sketch


class CountSketch:
    """A random linear map of vectors ``[D]`` to ``[R]`` that keeps inner products, up to a known error.

    Every entry gets a random sign and is added to one of R buckets: a count sketch (Charikar, Chen,
    Farach-Colton 2002), as a projection known as feature hashing (Weinberger et al. 2009,
    arXiv:0902.2206). Inner products are unbiased, with variance Σ_{i≠j} p_ij (x_i² y_j² + x_i y_i
    x_j y_j) (their Lemma 2), where p_ij is the chance that i and j share a bucket. Here that is at
    most 1/R, so that the variance is at most (‖x‖²‖y‖² + ⟨x, y⟩²)/R. It takes O(D) time.

    The buckets: each run of R entries in a row is laid around the R buckets from a random place on.
    Entries of one run never meet, those of two do with p = 1/R; memory is read in order, and sums
    have one order, on a GPU too. With R ≥ D nothing meets, and the map is an isometry. The same run
    seed gives the same map.
    """

    def __init__(self, seed: int, size: int, dim: int) -> None:
        self.dim = min(dim, size)
        draw = rng.torch_generator(seed, "signature")
        self._signs = 2.0 * torch.randint(2, (size,), generator=draw) - 1.0
        self._places = torch.randint(self.dim, (-(-size // self.dim),), generator=draw).tolist()

    @property
    def described(self) -> dict[str, Any]:
        """What a client has to be told to make the same sketch."""
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
    """The entries of those parameters that patterns match, or with ``dim`` above 0 a sketch of them."""

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
        """What a client has to be told to make the same."""
        return {"dim": self._sketch.dim if self._sketch else 0, "of": list(self._of)}

    def apply(self, vectors: Tensor) -> Tensor:
        """Return what is compared, ``[..., R]``, of vectors ``[..., D]``."""
        chosen = torch.cat([vectors[..., slot.start : slot.stop] for slot in self._slots], -1)
        return self._sketch.apply(chosen) if self._sketch else chosen


class SignSketch:
    """The signs of R random projections of an update, each 1 or −1: all that is compared of an update under masks.

    Of two updates at an angle φ a share of φ/π of the signs differ (Charikar 2002), so cosines can
    be estimated from them (:func:`fedclade.clustering.cosine_similarity` does). R signs are R bits:
    an update's length, and how far it reaches in a direction, stay with the client.

    The projection is two rounds of random signs and a Fourier transform, which takes O(D log D)
    time and O(D) memory. Updates of more than ``LARGEST_FOLD`` entries are first folded to so many
    by a count sketch.

    Parameters
    ----------
    seed
        The same seed gives the same projection.
    size, dim
        D and R.
    selection
        The parameters that are compared; None: all.
    """

    def __init__(self, seed: int, size: int, dim: int, selection: Selection | None = None) -> None:
        self.dim = dim
        self._of = selection
        self._fold = CountSketch(seed, size, LARGEST_FOLD) if size > LARGEST_FOLD else None
        # Wide enough that R of the numbers are a part of all of them, and not themselves all that
        # there is.
        self._width = 2 ** math.ceil(math.log2(max(min(size, LARGEST_FOLD), 2 * dim, 2)))
        draw = rng.torch_generator(seed, "signs of a signature")
        self._flips = [
            2.0 * torch.randint(2, (self._width,), generator=draw) - 1.0 for _ in range(2)
        ]
        self._places = torch.randperm(self._width, generator=draw)[:dim]

    @property
    def described(self) -> dict[str, Any]:
        """What a client has to be told to make the same signs."""
        of = {} if self._of is None else {"of": self._of.described["of"]}
        return {"dim": self.dim, "compared": "signs", **of}

    def apply(self, vectors: Tensor) -> Tensor:
        """Return the signs ``[..., R]`` of vectors ``[..., D]``."""
        if vectors.numel() == 0:  # of no update, which a Fourier transform does not take
            return vectors.new_zeros(*vectors.shape[:-1], self.dim)
        return torch.where(self.project(vectors) >= 0, 1.0, -1.0).to(vectors.dtype)

    def project(self, vectors: Tensor) -> Tensor:
        """Return the projections ``[..., R]`` of vectors ``[..., D]``, float64, whose signs leave a client."""
        chosen = vectors if self._of is None else self._of.apply(vectors)
        if self._fold is not None:
            chosen = self._fold.apply(chosen)
        mixed = functional.pad(chosen.double(), (0, self._width - chosen.shape[-1]))
        for flips in self._flips:
            turned = torch.fft.fft(mixed * flips.to(mixed), norm="ortho")
            mixed = turned.real + turned.imag  # the Hartley transform: real and orthonormal
        return mixed[..., self._places.to(mixed.device)]


class Nothing:
    """No entries: what a stream keeps of each update where nobody compares them."""

    dim = 0

    @property
    def described(self) -> dict[str, Any]:
        """What a client has to be told to make the same."""
        return {"dim": 0}

    def apply(self, vectors: Tensor) -> Tensor:
        """Return ``[..., 0]`` of vectors ``[..., D]``."""
        return vectors[..., :0]


Sketch = CountSketch | Selection | SignSketch | Nothing
"""What is compared of an update, where that is not all of it."""


@dataclass(frozen=True)
class Sketching(Middleware):
    """Projects updates as the server receives them; it compares the sketches."""

    sketch: Sketch

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates with their sketches; models of one's own stay, and of a mixture nothing is compared."""
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
    """The orthonormal operator P of CFL's eqs. 45 and 46: a random order of the entries, by a seed that clients share.

    Parameters are shuffled among parameters and buffers among buffers, so that a server can still
    tell which entries are compared. The server never holds the seed, which may have any number of
    bits: 128 random ones withstand a server that tries them all; not one that goes by how entries
    move (``studies/audit_permutation.py``). ``size`` and ``n_parameters`` are S and D of a model
    vector.
    """

    def __init__(self, seed: int, size: int, n_parameters: int) -> None:
        # torch's own takes no more than 32 bits of a seed
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
    """Lets clients speak to the server in permuted vectors only (CFL Algorithm 5, lines 7 and 8).

    They undo P on every model that they receive and apply it to every update that they send. Means,
    norms and cosine similarities are what they were (eqs. 45, 46), so an algorithm runs on them
    unchanged. P hides no part of subspaces: they are directions of the data themselves.
    """

    permutation: Permutation

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return P·Δθ_i."""
        updates = ask(replace(query, models=self.permutation.invert(query.models)))
        models = query.models
        if query.mixture is None:
            return replace(updates, deltas=self.permutation.apply(updates.required_deltas))
        D = updates.n_parameters // len(models)
        deltas, tables = unpacked(updates.required_deltas, len(models), models.shape[1], D)
        return replace(updates, deltas=packed(self.permutation.apply(deltas), D, tables))

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return the scores of P⁻¹·θ."""
        return ask(replace(query, models=self.permutation.invert(query.models)))

    def data(self, query: DataQuery[R], ask: Ask) -> R:
        """Return what clients reply about P⁻¹·θ, which P does not hide."""
        models = models_of(query)
        if not models:
            return ask(query)
        inverted = {name: self.permutation.invert(model) for name, model in models.items()}
        return ask(replace(query, **inverted))


# Clients that make several updates at once, each from a part of their data.


@dataclass(frozen=True)
class Replicating(Middleware):
    """Answers a query for m replicates with the mean of their updates and the signatures of all, one behind the other.

    A replicate is an update made at the same model from a part of the training data. So a client is
    asked once, and sends little more than one update, if signatures are sketches. This comes after
    all that is done to whole updates: privacy and permutation.
    """

    sketch: Sketch | None

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates; of m replicates these are ``[n, S + m·R]``, or if they are not compared ``[n, S]``."""
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
    """Takes apart what :class:`Replicating` has sent, before anything else is done to it."""

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the mean of the replicates' updates as the update, with the signatures beside it."""
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
