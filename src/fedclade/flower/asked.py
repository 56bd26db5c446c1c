"""What a client makes itself for a question: the model, of whatever it was given for it, and sketches."""

from __future__ import annotations

from torch import nn

from fedclade.channel import Signature, SignSketch, Sketch
from fedclade.core import Layout, UpdateError
from fedclade.data import Federation
from fedclade.flower.wire import Content, shown
from fedclade.models import Parts
from fedclade.runs import Maker, module_for


def maker_of(model: nn.Module | str | Maker, federation: Federation, parts: Parts) -> Maker:
    """Return a function that makes a model of some parts from a seed; a module is the same for every seed."""

    def make(seed: int) -> nn.Module:
        if isinstance(model, str):
            return module_for(model, federation.pool.schema, seed)
        return model if isinstance(model, nn.Module) else model(seed)

    return lambda seed: parts.applied(make(seed), seed)


def read_sketch(content: Content, seed: int, layout: Layout, permuted: bool) -> Sketch | None:
    """Return what is compared of an update, as the server asks for it."""
    dim, of = content.get("dim", int), read_patterns(content, permuted)
    if content.values.get("compared") == "signs":
        return read_signs(content, seed, layout, permuted)
    kind = "projected" if dim else "full"
    return Signature(kind=kind, dim=max(dim, 1), of=of).sketch(seed, layout)


def read_signs(content: Content, seed: int, layout: Layout, permuted: bool) -> SignSketch:
    """Return what is compared of a masked update, or of a part of one: signs alone."""
    dim, of = content.get("dim", int), read_patterns(content, permuted)
    if dim < 1:
        raise UpdateError("asked for the signs of no projection of an update")
    return Signature(kind="signs", dim=dim, of=of).signs(seed, layout)


def read_patterns(content: Content, permuted: bool) -> tuple[str, ...]:
    """Return the patterns of the parameters that are compared."""
    of = content.values.get("of", [])
    if not isinstance(of, list) or not all(isinstance(pattern, str) for pattern in of):
        raise UpdateError(f"'of' should be a list of patterns, got {shown(of)}")
    if of and permuted:
        raise UpdateError("asked for the updates of single parameters, which its permutation is there to hide")
    return tuple(of)
