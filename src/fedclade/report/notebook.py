"""HTML of runs, federations, parameter trees and comparisons in notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import singledispatch
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
"""Number of clients of a federation that are listed."""

OPEN = 12
"""Largest number of clusters of a tree that is shown without a click."""

MANY = 200_000
"""With more client rows than this, scores of single clients are not read."""

BARS = 12
"""Number of bars in a histogram of targets that are numbers; labels have a bar each."""


@singledispatch
def html_of(value: object) -> str:
    """Return the HTML of a value in a notebook."""
    raise TypeError(f"notebooks have no view of a {type(value).__name__}")


@html_of.register
def _(run: Run) -> str:
    title = queries.heading(run)
    if len(run.client_rows) > MANY:  # to read them takes long, and much memory
        rows = [[markup.escape_text(text) for text in fact] for fact in facts(run)]
        tree = _folded_tree(run, markup.tree(tree_view(run.tree)))
        return markup.whole(markup.heading(title), markup.lines(rows), tree)
    summary = run.summary
    subtitle = f"{summary['model']}, {count(summary['rounds'], 'round')} on {summary['device']}"
    cards = markup.cards(run_cards(RunView(run)))
    tree = _folded_tree(run, markup.tree(tree_view(run.tree, run)))
    return markup.whole(markup.heading(title, subtitle), cards, tree)


@html_of.register
def _(tree: ParameterTree) -> str:
    n_clusters = sum(bool(leaf.members) for leaf in tree.leaves)
    clients = count(len(tree.leaf_of), "client")
    title = f"Parameter tree: {clients} in {count(n_clusters, 'cluster')}"
    return markup.whole(markup.heading(title), markup.tree(tree_view(tree)))


@html_of.register
def _(federation: Federation) -> str:
    ids = list(islice(federation.ids, LISTED))
    clients = [federation.by_id[client] for client in ids]
    columns = {
        "client": [markup.escape_text(client.name) for client in clients],
        "train": [f"{len(client.train):,}" for client in clients],
        "test": [f"{len(client.test):,}" for client in clients],
    }
    truth = federation.true_clusters
    if truth is not None:
        columns["true cluster"] = [str(truth[client]) for client in ids]
    histograms = [markup.histogram(counts) for counts in _count_targets(federation, ids)]
    if histograms:
        columns["labels" if federation.pool.schema.labels else "targets"] = histograms
    n_more = len(federation) - len(ids)
    note = f"and {count(n_more, 'more client')}" if n_more else ""
    table = markup.table(columns, ("client", "labels", "targets"), note=note)
    heading = markup.heading(f"Federation: {federation}")
    return markup.whole(heading, markup.cards(_federation_cards(federation)), table)


@html_of.register
def _(comparison: Comparison) -> str:
    return markup.whole(_render_comparison(comparison))


@html_of.register
def _(suite: SuiteComparison) -> str:
    parts = [
        markup.folded(name, _render_comparison(comparison))
        for name, comparison in suite.scenarios.items()
    ]
    columns = {name: _escape_cells(cells) for name, cells in suite.columns.items()}
    heading = markup.heading(f"{count(len(suite.scenarios), 'scenario')}", suite.title)
    return markup.whole(heading, markup.table(columns, ("config",)), *parts)


def _escape_cells(cells: Sequence[str]) -> list[str]:
    return [markup.escape_text(cell) for cell in cells]


def _folded_tree(run: Run, tree: str) -> str:
    return markup.folded("The parameter tree", tree) if len(run.tree.leaves) > OPEN else tree


def _federation_cards(federation: Federation) -> Iterator[Card]:
    """Yield the main numbers of a federation."""
    pool = federation.pool
    labels = pool.schema.labels
    sizes = np.fromiter(federation.sizes.values(), dtype=np.int64)
    yield Card("Clients", f"{len(federation):,}", _describe_newcomers(federation.newcomers))
    spread = f"{sizes.min():,} each"
    if sizes.min() < sizes.max():
        spread = f"{sizes.min():,} to {sizes.max():,} each"
    yield Card("Training examples", f"{sizes.sum():,}", spread)
    shape = " × ".join(str(size) for size in pool.input_shape)
    yield Card("Inputs", shape or "1", "numbers of an example")
    outputs = count(labels, "label") if labels else count(pool.outputs, "output")
    yield Card("Task", pool.task, outputs)
    if federation.true_clusters is not None:
        n_clusters = len(set(federation.true_clusters.values()))
        yield Card("True clusters", str(n_clusters), "unknown to all methods but the oracle")


def _describe_newcomers(newcomers: Federation | None) -> str:
    return "" if newcomers is None else f"and {count(len(newcomers), 'newcomer')}, held back"


def _count_targets(federation: Federation, ids: list[int]) -> Iterator[list[int]]:
    """Yield a histogram of the training targets of each client, by label or by interval."""
    pool = federation.pool
    if pool.task in ("language", "multilabel") or pool.y.dim() > 1:
        return
    targets: list[NDArray[Any]] = []
    for client_id in ids:
        client = federation.by_id[client_id]
        rows = torch.from_numpy(np.array(client.train))
        targets.append(client.labels(pool.y[rows]).numpy())
    if labels := pool.schema.labels:
        for of_client in targets:
            known = of_client[of_client != IGNORED].astype(np.int64)
            yield np.bincount(known, minlength=labels).tolist()
        return
    edges = np.histogram_bin_edges(np.concatenate(targets), BARS)
    for of_client in targets:
        yield np.histogram(of_client, edges)[0].tolist()


def _render_comparison(comparison: Comparison) -> str:
    """Return the table of a comparison, with a column of drawn intervals, and its note."""
    score = comparison.scores[0]
    estimates = [row.scores[score.name] for row in comparison.rows]
    columns: dict[str, list[str]] = {}
    for name, cells in comparison.columns.items():
        columns[name] = _escape_cells(cells)
        if name == score.heading:
            columns["95 % interval"] = _draw_intervals(estimates)
    is_pale = [row.algorithm in BASELINES for row in comparison.rows]
    words = [*WORDS, "95 % interval"]
    table = markup.table(columns, words, is_pale, comparison.note)
    return markup.heading(comparison.title) + table


def _draw_intervals(estimates: list[Estimate | None]) -> list[str]:
    """Return each estimate as a line with dots, all on one scale."""
    ends: list[float] = []
    for estimate in estimates:
        if estimate is not None and np.isfinite(estimate.values).all():
            half = estimate.half_width or 0.0
            ends += [estimate.mean - half, estimate.mean + half, *estimate.values]
    low = min(ends, default=0.0)
    span = (max(ends, default=0.0) - low) or 1.0
    return [_draw_interval(estimate, low, span) for estimate in estimates]


def _draw_interval(estimate: Estimate | None, low: float, span: float) -> str:
    """Return an estimate on a scale from ``low`` to ``low + span``; a dash if it is not finite."""
    if estimate is None or not np.isfinite(estimate.values).all():
        return NONE
    half = estimate.half_width or 0.0
    return markup.interval(
        (estimate.mean - half - low) / span,
        (estimate.mean - low) / span,
        (estimate.mean + half - low) / span,
        values=[(value - low) / span for value in estimate.values],
    )
