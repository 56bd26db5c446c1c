"""What notebooks show of a run, a federation, a parameter tree and a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from itertools import islice

import numpy as np
import torch

from fedclade.core import IGNORED, ParameterTree
from fedclade.data import Federation
from fedclade.report import markup, queries
from fedclade.report.comparison import Comparison
from fedclade.report.estimates import BASELINES, WORDS, Estimate
from fedclade.report.formats import NONE, count
from fedclade.report.page.one_run import run_cards
from fedclade.report.page.section import Card
from fedclade.report.run_view import RunView
from fedclade.report.suite import SuiteComparison
from fedclade.report.tables import facts, tree_view
from fedclade.runs import Run

LISTED = 8
"""So many clients of a federation are listed."""

OPEN = 12
"""A tree of more clusters is folded away."""

MANY = 200_000
"""Of more rows of clients none is looked at."""

BARS = 12
"""Bars of what a client's targets are, where these are numbers; of labels there may be more."""


@singledispatch
def html_of(thing: object) -> str:
    """Return what a notebook shows of a thing as HTML."""
    raise TypeError(f"notebooks have no picture of a {type(thing).__name__}")


@html_of.register
def _(run: Run) -> str:
    if len(run.client_rows) > MANY:  # of which no row is looked at: that would take long, and much memory
        lines = [[markup.shown_as_is(text) for text in fact] for fact in facts(run)]
        tree = markup.tree(tree_view(run.tree))
        return markup.whole(markup.heading(queries.heading(run)), markup.lines(lines), _folded_tree(run, tree))
    s = run.summary
    more = f"{s['model']}, {count(s['rounds'], 'round')} on {s['device']}"
    tree = _folded_tree(run, markup.tree(tree_view(run.tree, run)))
    return markup.whole(markup.heading(queries.heading(run), more), markup.cards(run_cards(RunView(run))), tree)


@html_of.register
def _(tree: ParameterTree) -> str:
    leaves = [leaf for leaf in tree.leaves if leaf.members]
    title = f"Parameter tree: {count(len(tree.leaf_of), 'client')} in {count(len(leaves), 'cluster')}"
    return markup.whole(markup.heading(title), markup.tree(tree_view(tree)))


@html_of.register
def _(federation: Federation) -> str:
    clients = list(islice(federation.ids, LISTED))
    held = [federation.by_id[client] for client in clients]
    truth, more = federation.true_clusters, len(federation) - len(clients)
    columns = {"client": [markup.shown_as_is(each.name) for each in held]}
    columns |= {"train": [f"{len(each.train):,}" for each in held], "test": [f"{len(each.test):,}" for each in held]}
    if truth is not None:
        columns["true cluster"] = [str(truth[client]) for client in clients]
    if drawn := [markup.histogram(counts) for counts in _targets(federation, clients)]:
        columns["labels" if federation.pool.schema.labels else "targets"] = drawn
    note = f"and {count(more, 'more client')}" if more else ""
    table = markup.table(columns, ("client", "labels", "targets"), note=note)
    heading = markup.heading(f"Federation: {federation}")
    return markup.whole(heading, markup.cards(_federation_cards(federation)), table)


@html_of.register
def _(comparison: Comparison) -> str:
    return markup.whole(_comparison(comparison))


@html_of.register
def _(suite: SuiteComparison) -> str:
    each = [markup.folded(name, _comparison(one)) for name, one in suite.scenarios.items()]
    cells = {name: [markup.shown_as_is(cell) for cell in column] for name, column in suite.columns.items()}
    heading = markup.heading(f"{count(len(suite.scenarios), 'scenario')}", suite.title)
    return markup.whole(heading, markup.table(cells, ("config",)), *each)


def _folded_tree(run: Run, tree: str) -> str:
    return markup.folded("The parameter tree", tree) if len(run.tree.leaves) > OPEN else tree


def _federation_cards(federation: Federation) -> Iterator[Card]:
    """Yield the numbers of a federation."""
    pool, sizes = federation.pool, np.fromiter(federation.sizes.values(), dtype=np.int64)
    yield Card("Clients", f"{len(federation):,}", _late(federation.newcomers))
    spread = f"{sizes.min():,} each" if sizes.min() == sizes.max() else f"{sizes.min():,} to {sizes.max():,} each"
    yield Card("Training examples", f"{sizes.sum():,}", spread)
    yield Card("Inputs", " × ".join(map(str, pool.input_shape)) or "1", "numbers of an example")
    labels = pool.schema.labels
    yield Card("Task", pool.task, count(labels, "label") if labels else count(pool.outputs, "output"))
    if federation.true_clusters is not None:
        yield Card("True clusters", str(len(set(federation.true_clusters.values()))), "which no method is told")


def _late(newcomers: Federation | None) -> str:
    return "" if newcomers is None else f"and {count(len(newcomers), 'newcomer')}, held back"


def _targets(federation: Federation, clients: list[int]) -> Iterator[list[int]]:
    """Yield what the training targets of each client are: how many there are of each label, or in each interval."""
    pool = federation.pool
    if pool.task in ("language", "multilabel") or pool.y.dim() > 1:
        return
    held = [federation.by_id[client] for client in clients]
    found = [each.labels(pool.y[torch.from_numpy(np.array(each.train))]).numpy() for each in held]
    if labels := pool.schema.labels:
        for mine in found:
            yield np.bincount(mine[mine != IGNORED].astype(np.int64), minlength=labels).tolist()
        return
    edges = np.histogram_bin_edges(np.concatenate(found), BARS)
    for mine in found:
        yield np.histogram(mine, edges)[0].tolist()


def _comparison(comparison: Comparison) -> str:
    """Return the table of a comparison, with the intervals drawn, and what there is to say of it."""
    columns = {name: [*map(markup.shown_as_is, cells)] for name, cells in comparison.columns.items()}
    score = comparison.scores[0]
    estimates = [row.scores[score.name] for row in comparison.rows]
    drawn = {}
    for name, cells in columns.items():
        drawn[name] = cells
        if name == score.heading:
            drawn["95 % interval"] = _intervals(estimates)
    pale = [row.algorithm in BASELINES for row in comparison.rows]
    words = [*WORDS, "95 % interval"]
    return markup.heading(comparison.title) + markup.table(drawn, words, pale, comparison.note)


def _intervals(estimates: list[Estimate | None]) -> list[str]:
    """Return each estimate as a line with dots, all on one scale."""
    known = [each for each in estimates if each is not None and np.isfinite(each.values).all()]
    ends = [each.mean + sign * (each.half_width or 0) for each in known for sign in (-1, 1)]
    ends += [value for each in known for value in each.values]
    low, span = min(ends, default=0.0), (max(ends, default=0.0) - min(ends, default=0.0)) or 1.0

    def drawn(each: Estimate | None) -> str:
        if each is None or each not in known:
            return NONE
        half = each.half_width or 0.0
        around = [(value - low) / span for value in (each.mean - half, each.mean, each.mean + half)]
        return markup.interval(around[0], around[1], around[2], [(value - low) / span for value in each.values])

    return [drawn(each) for each in estimates]
