"""HTML representation of runs, federations, parameter trees and comparisons in notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import singledispatch
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import DENSE, IGNORED, ParameterTree
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
"""Largest number of clients of a federation that are listed."""

OPEN = 12
"""Largest number of clusters with which a parameter tree is visible without a click."""

MANY = 200_000
"""Number of rows of client scores beyond which a notebook does not read them."""

BARS = 12
"""Number of bars in a histogram of numeric targets; histograms of labels have a bar per label."""


@singledispatch
def html_of(value: object) -> str:
    """Return the HTML representation of an object for notebooks.

    Parameters
    ----------
    value
        A run, parameter tree, federation, comparison or comparison of several scenarios.

    Raises
    ------
    TypeError
        If the object has another type.
    """
    raise TypeError(
        "an object with an HTML view for notebooks should be a run, parameter tree, federation or "
        f"comparison, got {type(value).__name__}"
    )


@html_of.register
def _(run: Run) -> str:
    """Return the HTML of a run: heading, cards with main results, and the parameter tree."""
    title = queries.heading(run)
    if len(run.client_rows) > MANY:  # reading the rows takes long and needs much memory
        rows = [_escape_cells(fact) for fact in facts(run)]
        if run.has_diverged:
            tree = ""
        else:
            tree = _folded_tree(run, markup.tree(tree_view(run.tree)))
        return markup.whole(markup.heading(title), markup.lines(rows), tree)
    summary = run.summary
    subtitle = f"{summary['model']}, {count(summary['rounds'], 'round')} on {summary['device']}"
    cards = markup.cards(run_cards(RunView(run)))
    if run.has_diverged:
        tree = ""
    else:
        tree = _folded_tree(run, markup.tree(tree_view(run.tree, run)))
    return markup.whole(markup.heading(title, subtitle), cards, tree)


@html_of.register
def _(tree: ParameterTree) -> str:
    """Return the HTML of a parameter tree."""
    n_clusters = sum(bool(leaf.members) for leaf in tree.leaves)
    clients = count(len(tree.leaf_of), "client")
    title = f"Parameter tree: {clients} in {count(n_clusters, 'cluster')}"
    return markup.whole(markup.heading(title), markup.tree(tree_view(tree)))


@html_of.register
def _(federation: Federation) -> str:
    """Return the HTML of a federation: heading, cards, and a table of its first clients."""
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
    note = ""
    if n_more:
        note = f"and {count(n_more, 'more client')}"
    table = markup.table(columns, ("client", "labels", "targets"), note=note)
    heading = markup.heading(f"Federation: {federation}")
    return markup.whole(heading, markup.cards(_federation_cards(federation)), table)


@html_of.register
def _(comparison: Comparison) -> str:
    """Return the HTML of a comparison of configurations."""
    return markup.whole(_render_comparison(comparison))


@html_of.register
def _(suite: SuiteComparison) -> str:
    """Return the HTML of a comparison of several scenarios: an overview, and a table for each."""
    parts = [
        markup.folded(name, _render_comparison(comparison))
        for name, comparison in suite.scenarios.items()
    ]
    columns = {name: _escape_cells(cells) for name, cells in suite.columns.items()}
    heading = markup.heading(f"{count(len(suite.scenarios), 'scenario')}", suite.title)
    return markup.whole(heading, markup.table(columns, ("config",)), *parts)


def _escape_cells(cells: Sequence[str]) -> list[str]:
    """Escape texts for HTML, for a row or column of table cells."""
    return [markup.escape_text(cell) for cell in cells]


def _folded_tree(run: Run, tree: str) -> str:
    """Return the HTML of a run's parameter tree; a large tree becomes visible after a click."""
    if len(run.tree.leaves) > OPEN:
        return markup.folded("The parameter tree", tree)
    return tree


def _federation_cards(federation: Federation) -> Iterator[Card]:
    """Yield cards with the main numbers of a federation: clients, examples, inputs and task."""
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
    if labels:
        outputs = count(labels, "label")
    else:
        outputs = count(pool.outputs, "output")
    yield Card("Task", pool.task, outputs)
    if federation.true_clusters is not None:
        n_clusters = len(set(federation.true_clusters.values()))
        yield Card("True clusters", str(n_clusters), "unknown to all methods but the oracle")


def _describe_newcomers(newcomers: Federation | None) -> str:
    """Return a note on the number of newcomers (clients excluded from training); may be empty."""
    if newcomers is None:
        return ""
    return f"and {count(len(newcomers), 'newcomer')}, excluded from training"


def _count_targets(federation: Federation, ids: list[int]) -> Iterator[list[int]]:
    """Yield a histogram of each client's training targets: by label, or by interval for numbers.

    Yields nothing for language models, several labels per example, and vectors as targets.

    Parameters
    ----------
    federation
        The clients' data.
    ids
        Ids of the clients.
    """
    pool = federation.pool
    if pool.task in (*DENSE, "multilabel") or pool.y.dim() > 1:
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
    """Return the table of a comparison as HTML, with a column of drawn intervals, and its note."""
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
    """Return a small picture of each estimate (mean, interval, values), all on one scale."""
    ends: list[float] = []
    for estimate in estimates:
        if estimate is not None and np.isfinite(estimate.values).all():
            half = estimate.half_width or 0.0
            ends += [estimate.mean - half, estimate.mean + half, *estimate.values]
    low = min(ends, default=0.0)
    span = (max(ends, default=0.0) - low) or 1.0
    return [_draw_interval(estimate, low, span) for estimate in estimates]


def _draw_interval(estimate: Estimate | None, low: float, span: float) -> str:
    """Return a small picture of an estimate on a scale from ``low`` to ``low + span``.

    The picture is a dash if the estimate is missing or not finite.
    """
    if estimate is None or not np.isfinite(estimate.values).all():
        return NONE
    half = estimate.half_width or 0.0
    return markup.interval(
        (estimate.mean - half - low) / span,
        (estimate.mean - low) / span,
        (estimate.mean + half - low) / span,
        values=[(value - low) / span for value in estimate.values],
    )
