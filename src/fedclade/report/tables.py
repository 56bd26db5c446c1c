"""A run in the terminal: its summary, its clusters, its splits, and its parameter tree.

Everything here is a `rich` renderable: coloured in a terminal, plain text anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fedclade.core import DROPPED_OUT, TOO_LATE, Node, ParameterTree
from fedclade.report import outcome as outcomes
from fedclade.report import queries
from fedclade.report.formats import count, duration, number, percent, shortened, traffic
from fedclade.report.outcome import Outcome
from fedclade.report.score import Score
from fedclade.report.terminal import new_table
from fedclade.runs import Row, Run

LIMIT = 40
"""So many clusters are listed; of the rest only the number is told."""

DEPTH = 12
"""So many levels of the tree are shown: deeper ones leave no room for text."""

CRITERIA = {
    "mean_norm": "mean norm",
    "max_norm": "max norm",
    "alpha_cross_max": "α cross max",
    "gamma_bound": "γ bound",
}
"""The numbers that a split is decided by, and what to call them."""


def run_table(run: Run) -> Table:
    """Return the summary of a run, one fact a line."""
    table = new_table(queries.heading(run), show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in _facts(run):
        table.add_row(name, escape(value))
    return table


def cluster_table(run: Run) -> Table:
    """Return the current clusters: who is in them, how they fare, and the norms of the last round."""
    outcome, criteria = Outcome.of(run), {row["node"]: row for row in run.clusters}
    table = new_table("Clusters")
    for column in ("node", "size", outcome.score.name, "mean norm", "max norm"):
        table.add_column(column, justify="right", no_wrap=True)
    if outcome.truth is not None:
        table.add_column("true clusters")
    table.add_column("clients")
    leaves = queries.leaves_in_tree_order(run.tree)
    for leaf in leaves[:LIMIT]:
        last = criteria.get(leaf.id, {})
        cells = [str(leaf.id), str(len(leaf.members)), outcome.score.text(outcome.mean_score(leaf.members))]
        cells += [number(last.get("mean_norm")), number(last.get("max_norm"))]
        if outcome.truth is not None:
            cells.append(_composition(leaf.members, outcome.truth))
        table.add_row(*cells, escape(_members(leaf, outcome)))
    if len(leaves) > LIMIT:
        table.caption = f"and {count(len(leaves) - LIMIT, 'more cluster')}"
    return table


CHECKS = ("checked", "regrouped")
"""Kinds of events of replicated clustering."""

CHECK_COLUMNS = ("round", "clusters", "p", "needed", "gain", "gain before", "median γ")


def has_splits(run: Run) -> bool:
    """Tell whether clusters were split in a run, or were about to be: whether :func:`event_table` has something."""
    return bool(queries.events_of(run, "split", "rejected"))


def event_table(run: Run) -> Table:
    """Return the splits of a run, and the criteria by which they were decided (CFL eqs. 25, 32, 33 and 39)."""
    table = new_table("Splits")
    for column in ("round", "node", "into", "sizes", *CRITERIA.values()):
        table.add_column(column, justify="left" if column in ("into", "sizes") else "right", no_wrap=True)
    for event in queries.events_of(run, "split"):
        into = " + ".join(str(child) for child in event["children"])
        criteria = (number(event.get(key)) for key in CRITERIA)  # of very many clients no similarities are kept
        table.add_row(str(event["round"]), str(event["node"]), into, cluster_sizes(event), *criteria)
    table.caption = _captions(run, any_split=bool(table.row_count))
    return table


def check_table(run: Run) -> Table:
    """Return the checks of replicated clustering: what was found on halves of the data, and what was made of it."""
    table = new_table("Checks")
    for column in CHECK_COLUMNS:
        table.add_column(column, justify="left" if column == "clusters" else "right", no_wrap=True)
    for event in queries.events_of(run, *CHECKS):
        table.add_row(*check_cells(event))
    return table


def check_cells(event: Row) -> list[str]:
    """Return what a table says of one check."""
    now = "now" if event["kind"] == "regrouped" else "still"
    numbers = [f"{event[key]:.2g}" for key in ("p_value", "level", "gain", "gain_before")]
    gamma = "∞" if event["gamma"] is None else number(event["gamma"])
    return [str(event["round"]), f"{now} {cluster_sizes(event)}", *numbers, gamma]


def cluster_sizes(event: Row, limit: int = 12) -> str:
    """Return how many clients the clusters of an event have; beyond a limit, only how many more there are."""
    sizes = [str(len(cluster)) for cluster in event["clusters"][:limit]]
    more = len(event["clusters"]) - limit
    return " + ".join([*sizes, f"{more} more"] if more > 0 else sizes)


def decision_tables(run: Run) -> list[Table]:
    """Return the tables of what was decided in a run about clusters: splits, checks; none where there was nothing."""
    tables = [event_table(run)] if has_splits(run) else []
    return [*tables, check_table(run)] if queries.events_of(run, *CHECKS) else tables


def tree_view(tree: ParameterTree, run: Run | None = None) -> Tree:
    """Return the parameter tree from the root to the current clusters.

    Parameters
    ----------
    tree
        Of the run, or as it stands in the middle of one.
    run
        Tells the clients' names, the clusters' scores and, where it is known, the truth. Without it the tree shows what
        it knows itself.
    """
    last_round, outcome = (None, None) if run is None else (run.summary["rounds"], Outcome.of(run))

    root = tree.nodes[0]
    view = Tree(_node_text(root, tree, last_round, outcome), guide_style="dim")
    pending = [(root, view, 0)]
    while pending:
        node, branch, depth = pending.pop()
        children = tree.children(node.id)
        listed = children[:LIMIT] if depth < DEPTH else ()
        pending += [(c, branch.add(_node_text(c, tree, last_round, outcome)), depth + 1) for c in listed]
        if unlisted := _clusters_within(tree, children[len(listed) :]):
            branch.add(Text(f"and {count(unlisted, 'more cluster')}", style="dim"))
    return view


def _clusters_within(tree: ParameterTree, nodes: Sequence[Node]) -> int:
    """Return the number of current clusters that come from some nodes."""
    return len({tree.leaf_of[client] for node in nodes for client in node.members})


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the lines of a run's summary: name and value."""
    s = run.summary
    clusters, seconds = s["clusters"], s["seconds"]
    yield "model", f"{s['model']}, {count(s['rounds'], 'round')} on {s['device']}"
    yield from _accuracy_facts(s["accuracy"])
    if Score.of_run(run).language:
        yield "perplexity", f"{number(s['perplexity']['mean'], 1)}, worst client {number(s['perplexity']['max'], 1)}"
    known = "" if clusters["true"] is None else f", {clusters['true']} true"
    yield "clusters", f"{clusters['found']} found{known}; sizes {shortened([str(n) for n in clusters['sizes']])}"
    if clusters["ari"] is not None:
        yield "recovery", f"ARI {number(clusters['ari'])}, NMI {number(clusters['nmi'])}"
    if s["target"]["accuracy"] is not None:
        yield f"target {percent(s['target']['accuracy'], 0)}", _target(s["target"])
    yield from _connections(run)
    if lost := [why for event in queries.events_of(run, "left_out") for why in event["clients"].values()]:
        absent = sum(why in (DROPPED_OUT, TOO_LATE) for why in lost)
        yield "left out", f"{count(len(lost), 'answer')}: {absent:,} absent, {len(lost) - absent:,} unusable"
    if privacy := s.get("privacy"):
        yield "privacy", _privacy(**privacy)
    yield "traffic", f"{traffic(s['bytes_up'])} up, {traffic(s['bytes_down'])} down"
    phases = ", ".join(f"{phase} {duration(seconds[phase])}" for phase in ("train", "evaluate", "server"))
    yield "time", f"{duration(seconds['total'])}: {phases}"


def _privacy(epsilon: float | None, delta: float, releases: int, **_: float) -> str:
    spent = "clipped, without noise"
    if epsilon is not None:
        spent = f"ε = {epsilon:,.0f}" if epsilon >= 100 else f"ε = {epsilon:.3g}"
        spent += f" at δ = {delta:g}"
    return f"{spent}; {count(releases, 'update')} of the client that sent most"


def _connections(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the lines about clients that came and went over a network, and about nodes that were kept out."""
    kinds = ("disconnected", "reconnected")
    told = {kind: sum(len(event["clients"]) for event in queries.events_of(run, kind)) for kind in kinds}
    if any(told.values()):
        yield "connections", f"{told['disconnected']:,} lost, {told['reconnected']:,} back"
    if refused := {node: why for event in queries.events_of(run, "refused") for node, why in event["nodes"].items()}:
        *_, (node, why) = refused.items()
        yield "refused", f"{count(len(refused), 'node')}, the last {node}: {why}"


def _accuracy_facts(accuracy: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    yield "accuracy", f"mean {percent(accuracy['mean'])}, std {percent(accuracy['std'])} over the clients"
    spread = [("min", "min"), ("p10", "p10"), ("median", "p50"), ("p90", "p90"), ("worst tenth", "worst10_mean")]
    yield "", ", ".join(f"{name} {percent(accuracy[key])}" for name, key in spread)


def _target(target: Mapping[str, float | int | None]) -> str:
    share = f"{percent(target['share_of_clients'], 0)} of the clients at the end"
    if target["rounds_to_target"] is None:
        return f"not reached by the mean; {share}"
    spent = f"{target['rounds_to_target']} rounds and {traffic(target['bytes_to_target'])}"
    return f"reached by the mean after {spent}; {share}"


def _captions(run: Run, *, any_split: bool) -> str | None:
    lines = [] if any_split else ["No cluster was split."]
    lines += [_clustering(event) for event in queries.events_of(run, "clustered")]
    if rejected := queries.events_of(run, "rejected"):
        last = rejected[-1]
        why = escape(last["because"])
        lines.append(f"{count(len(rejected), 'bi-partition')} rejected, the last in round {last['round']}: {why}")
    return "\n".join(lines) or None


def _clustering(step: Row) -> str:
    """Say what a step of hierarchical clustering found."""
    found, cut = count(len(step["sizes"]), "cluster"), step["threshold"]
    where = "not cut" if cut is None else f"cut at {number(cut)}"
    return escape(f"Round {step['round']}: {found} by {step['metric']} distance and {step['linkage']} linkage, {where}")


def _node_text(node: Node, tree: ParameterTree, last_round: int | None, outcome: Outcome | None) -> Text:
    """Describe one node: what it is, who is in it and, if it was split, why."""
    is_leaf = not tree.children(node.id)
    text = Text(str(node.id), style="bold green" if is_leaf else "bold")
    last = last_round if node.split_in is None else node.split_in
    parts = [count(len(node.members), "client"), _lifetime(node, last)]
    members = _members(node, outcome)
    if outcome is not None:
        if is_leaf:
            parts.append(f"{outcome.score.name} {outcome.score.text(outcome.mean_score(node.members))}")
        if outcome.truth is not None and (inside := _purity(node.members, outcome.truth)):
            members += f"  ({inside})"
    text.append("  " + " · ".join(parts), style="not bold default")
    if members:
        text.append(f"\n{members}", style="not bold dim default")
    if node.criteria:
        criteria = ", ".join(" ".join(criterion_text(criterion)) for criterion in node.criteria.items())
        text.append(f"\nsplit at {criteria}", style="not bold yellow")
    return text


def criterion_text(criterion: tuple[str, float]) -> tuple[str, str]:
    """Return the name and the text of one number that a split was decided by."""
    key, value = criterion
    name = CRITERIA.get(key, key.removesuffix("_value").replace("_", " "))
    return name, f"{value:.2g}" if key == "p_value" else number(value)


def _lifetime(node: Node, last: int | None) -> str:
    """Say in which rounds a cluster trained: the first is the one after it came into being."""
    first = node.born + 1
    if last is None:
        return f"since round {first}"
    if last < first:
        return "not trained yet" if node.born else "never trained"
    return f"round {first}" if last == first else f"rounds {first}–{last}"


def _members(node: Node, outcome: Outcome | None) -> str:
    return shortened([str(client) if outcome is None else outcome.name(client) for client in node.members])


def _purity(members: Sequence[int], truth: Mapping[int, int]) -> str:
    """Say which true clusters are in a cluster: one, or how many clients of each; nothing where none is known."""
    inside = outcomes.composition(members, truth)
    if len(inside) <= 1:
        return f"true cluster {inside[0][0]}" if inside else ""
    return f"true clusters {_composition(members, truth)}; purity {percent(outcomes.purity(members, truth), 0)}"


def _composition(members: Sequence[int], truth: Mapping[int, int]) -> str:
    """Write which true clusters are in a cluster, with the number of its clients in each: ``2 (5), 0 (1)``."""
    return shortened([f"{label} ({n})" for label, n in outcomes.composition(members, truth)], limit=6)
