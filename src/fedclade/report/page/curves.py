"""How a run went: scores and separation gaps of the clusters over the rounds, and the norms of their updates."""

from __future__ import annotations

from collections.abc import Mapping

from fedclade.report import queries
from fedclade.report.curves import norms_picture, score_picture
from fedclade.report.formats import number
from fedclade.report.page.plot import LONGEST
from fedclade.report.page.section import Section, Table, table_by_round
from fedclade.report.queries import Series
from fedclade.report.run_view import RunView

LONGEST_TABLE = 30
"""So many clusters or rounds are listed in a table."""


def scores_section(view: RunView) -> Section:
    """Return the score of every cluster over the rounds, and the separation gap g(α); see `score_picture`."""
    picture, scores = score_picture(view), queries.score_series(view.run)
    splits = list(picture.uprights)
    when = ", ".join(str(at) for at in splits[:8])
    parts = [f"Mean test {view.score.label} of the clients in every cluster after each round.{view.score.remark}"]
    if splits:
        parts.append(f"Dotted lines: clusters were split in round {when}{' …' if len(splits) > 8 else ''}.")
    if len(picture.panels) > 1 and view.outcome.truth is not None:
        parts.append("Below, the separation gap: above 0 the best bi-partition of a cluster is right.")
    elif len(picture.panels) > 1:
        parts.append("Below, the largest similarity across the best bi-partition of a cluster.")
    if view.colours.crowded:
        parts.append("There are more clusters than colours: drawn are their mean, and where most of them lie.")
    if view.rounds > LONGEST:
        parts.append(f"Of {view.rounds:,} rounds, at most {LONGEST} are drawn for each line.")
    return Section.of("scores", " ".join(parts), picture, [_score_table(view, scores)])


def norms_section(view: RunView) -> Section | None:
    """Return the two norms that CFL splits by over the rounds; None for a run that compared no updates."""
    picture = norms_picture(view)
    if picture is None:
        return None
    caption = (
        "Norms of the clients’ updates in every cluster: above the largest of one client, below that of their weighted "
        "mean. Where the mean comes to rest and the largest does not, the members of a cluster disagree. "
    )
    eps2, eps1 = queries.norm_thresholds(view.run)
    thresholds = [
        f"{symbol} for the {name} is {'a tenth of the largest mean so far' if isinstance(of, Mapping) else f'{of:g}'}"
        for of, symbol, name in ((eps2, "ε₂", "largest"), (eps1, "ε₁", "mean"))
        if of is not None
    ]
    caption += f"Threshold {' and '.join(thresholds)} (dashed)." if thresholds else ""
    largest, mean = (queries.criterion_series(view.run, column) for column in ("max_norm", "mean_norm"))
    rows = [
        [str(node), number(largest[node].values[-1] if node in largest else None), number(series.values[-1])]
        for node, series in list(mean.items())[:LONGEST_TABLE]
    ]
    table = Table("Norms in the last round of each cluster", ["cluster", "largest", "mean"], rows)
    return Section.of("norms", caption.strip(), picture, [table])


def _score_table(view: RunView, scores: Mapping[int, Series]) -> Table:
    """Return the scores of the current clusters in some rounds."""
    leaves = [leaf for leaf in view.colours.leaves if leaf in scores][:10]
    shown = [node for node in scores if node not in leaves and view.run.tree.nodes[node].split_in][:4] + leaves
    columns = {str(node): dict(zip(scores[node].rounds, scores[node].values, strict=True)) for node in shown}
    more = f"{len(scores) - len(shown)} more clusters are not listed." if len(scores) > len(shown) else ""
    return table_by_round(f"Mean {view.score.label} by cluster", columns, view.score.text, LONGEST_TABLE, more)
