"""A run in the terminal: its summary, its clusters, its splits, and its parameter tree.

Everything here is a `rich` renderable: coloured in a terminal, plain text anywhere else.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fedclade.core import (
    DROPPED_OUT,
    TOO_LATE,
    Check,
    Checked,
    Clustered,
    ClusterSplit,
    Disconnected,
    FedcladeError,
    LeftOut,
    Limited,
    Node,
    ParameterTree,
    Reconnected,
    Refused,
    Regrouped,
    Rejected,
    SumClipped,
    SumRejected,
    SumUnguarded,
    Tested,
    Withheld,
)
from fedclade.report import queries, run_view
from fedclade.report.figures import save_figures
from fedclade.report.formats import count, duration, number, percent, shortened, traffic
from fedclade.report.run_view import Outcome
from fedclade.report.score import Score
from fedclade.runs import Newcomers, Run, events_of, score_columns
from fedclade.tasks import RIGHT

# Terminals as commands and servers print to, and their tables: text of others is shown there, and
# does nothing.

_HIDDEN = dict.fromkeys(
    # But for tab and new line; then the characters that turn the direction of what follows.
    [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F]
)


def visible(text: str) -> str:
    r"""Return a text without the characters that a terminal obeys: those that move, colour, ring or turn around.

    >>> visible("client \x1b[31m7\x07")
    'client [31m7'
    """
    return text.translate(_HIDDEN)


class Terminal(Console):
    """A console that lets through no control characters but its own, whoever named a client or wrote an error."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render something in parts, of which those with text are only that."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def new_table(title: str, **changes: Any) -> Table:
    """Return an empty table with the look that all share, and no more lines than it needs."""
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "header_style": "bold cyan", "pad_edge": False}
    look |= {"title_justify": "left", "caption_justify": "left", **changes}
    return Table(title=Text(title, style="bold") if title else None, **look)


# What was decided about clusters in a run, as tables: splits and their criteria, steps of
# clustering, checks.

CRITERIA = {
    "mean_norm": "mean norm",
    "max_norm": "max norm",
    "alpha_cross_max": "α cross max",
    "gamma_bound": "γ bound",
}
"""The numbers that a split is decided by, and what to call them."""

OF_TESTS = {"p_value": "p", "gain": "gain"}
"""The same where a test decides."""

CHECK_COLUMNS = ("round", "clusters", "p", "needed", "gain", "gain before", "median γ")


def decision_tables(run: Run) -> list[Table]:
    """Return the tables of what was decided in a run about clusters: splits, checks; none where there was nothing."""
    tables = [event_table(run)] if events_of(run.events, ClusterSplit, Rejected) else []
    return [*tables, check_table(run)] if events_of(run.events, Tested, Checked, Regrouped) else tables


def event_table(run: Run) -> Table:
    """Return the splits of a run, and the criteria by which they were decided (CFL eqs. 25, 32, 33 and 39)."""
    splits, table = events_of(run.events, ClusterSplit), new_table("Splits")
    decided_by = OF_TESTS if any(split.p_value is not None for _, split in splits) else CRITERIA
    for column in ("round", "node", "into", "sizes", *decided_by.values()):
        table.add_column(column, justify="left" if column in ("into", "sizes") else "right", no_wrap=True)
    for at, split in splits:
        into = " + ".join(str(child) for child in split.children)
        # Of very many clients no similarities are kept, and their criteria are missing.
        criteria = (criterion_text((key, getattr(split, key)))[1] for key in decided_by)
        table.add_row(str(at), str(split.node), into, cluster_sizes(split), *criteria)
    lines = [] if splits else ["No cluster was split."]
    lines += [_clustering(at, step) for at, step in events_of(run.events, Clustered)]
    if rejected := events_of(run.events, Rejected):
        at, last = rejected[-1]
        lines.append(f"{count(len(rejected), 'bi-partition')} rejected, the last in round {at}: {escape(last.because)}")
    table.caption = "\n".join(lines) or None
    return table


def check_table(run: Run) -> Table:
    """Return the checks of replicated clustering: what was found on parts of the data, and what was made of it."""
    table = new_table("Checks")
    for column in CHECK_COLUMNS:
        table.add_column(column, justify="left" if column == "clusters" else "right", no_wrap=True)
    for row in check_rows(events_of(run.events, Tested, Checked, Regrouped)):
        table.add_row(*row)
    return table


def check_rows(checks: Sequence[tuple[int, Check]]) -> list[list[str]]:
    """Return what a table says of checks with their rounds; those of which the same is said are in one row."""
    alike = groupby(checks, key=lambda each: _check_cells(each[1]))
    rounds = [(cells, [at for at, _ in together]) for cells, together in alike]
    return [[f"{at[0]}–{at[-1]}, {len(at)} ×" if len(at) > 1 else str(at[0]), *cells] for cells, at in rounds]


def _check_cells(check: Check) -> list[str]:
    numbers = [f"{value:.2g}" for value in (check.p_value, check.level, check.gain, check.gain_before)]
    return [clusters_text(check), *numbers, "∞" if check.gamma is None else number(check.gamma)]


def clusters_text(check: Check) -> str:
    """Return the sizes of a check's clusters, and what became of them."""
    word = "now" if isinstance(check, Regrouped) else "found" if isinstance(check, Tested) else "still"
    where = f" in node {check.node}" if check.node else ""
    return f"{word} {cluster_sizes(check)}{where}"


def cluster_sizes(event: ClusterSplit | Check, limit: int = 12) -> str:
    """Return how many clients the clusters of an event have; beyond a limit, only how many more there are."""
    sizes = [str(len(cluster)) for cluster in event.clusters[:limit]]
    more = len(event.clusters) - limit
    return " + ".join([*sizes, f"{more} more"] if more > 0 else sizes)


def criterion_text(criterion: tuple[str, float]) -> tuple[str, str]:
    """Return the name and the text of one number that a split was decided by."""
    key, value = criterion
    name = CRITERIA.get(key, key.removesuffix("_value").replace("_", " "))
    return name, f"{value:.2g}" if key == "p_value" else number(value)


def _clustering(at: int, step: Clustered) -> str:
    """Say what a step of hierarchical clustering found."""
    where = "not cut" if step.threshold is None else f"cut at {number(step.threshold)}"
    found = f"{count(len(step.sizes), 'cluster')} by {step.metric} distance and {step.linkage} linkage"
    if len(step.clients) < sum(step.sizes):
        found += f" of {len(step.clients):,} clients drawn from {sum(step.sizes):,}"
    return escape(f"Round {at}: {found}, {where}")


# Newcomers in the terminal: where each went, by what, and what it is worth.


def newcomer_table(newcomers: Newcomers, run: Run) -> Table:
    """Return a line for each newcomer to a run, and their means in the last."""
    table = new_table("Newcomers", show_footer=True)
    summary, score = newcomers.summary, Score.named(newcomers.metric, run.summary)
    by = next((row["by"] for row in newcomers.rows if row["by"]), "similarity")
    table.add_column("client", footer="mean", no_wrap=True)
    assigned = summary[RIGHT]
    table.add_column("path", footer="" if assigned is None else f"assigned right {number(assigned)}")
    for column in (by, "other side", "margin"):
        table.add_column(escape(column), justify="right")
    columns = score_columns(score.name)
    for name, column in zip((score.label, "root", "own", "tuned"), columns, strict=True):
        table.add_column(name, justify="right", no_wrap=True, footer=score.text(summary[column]))
    for row in newcomers.rows:
        cells = [escape(row["name"]), _path(row), _numbers(row["scores"]), _numbers(row["others"])]
        table.add_row(*cells, number(row["margin"]), *(score.text(row[column]) for column in columns))
    alone = count(summary["rounds_alone"], "round")
    table.caption = f"own: trained alone for {alone}, as many as the run's; "
    table.caption += "tuned: the model it got after one epoch on its data"
    if without := summary["without_score"]:
        table.caption += f"\n{_without_score(without, summary['newcomers'])}, and are left out of the means"
    if summary["fit_nowhere"]:
        misfits = count(summary["fit_nowhere"], "newcomer")
        got = "the deepest node that still fits" if summary["only_fitting"] else "the leaf that they came to"
        table.caption += f"\n{misfits} of {summary['newcomers']} fit nowhere, and got {got}"
    return table


def _without_score(without: int, newcomers: int) -> str:
    have = "has" if without == 1 else "have"
    return f"{without} of {count(newcomers, 'newcomer')} {have} no score: undefined for their test data"


def _path(row: Mapping[str, Any]) -> Text:
    text = Text(" > ".join(str(node) for node in row["path"]))
    if not row["fits"]:
        text.append(" fits nowhere", style="bold yellow")
    if row["right"] is False:
        text.append(" wrong", style="bold red")
    return text


def _numbers(values: Sequence[float | None]) -> str:
    return " ".join(number(value) for value in values) if values else number(None)


LIMIT = 40
"""So many clusters are listed; of the rest only the number is shown."""

QUANTILES = {"min": "min", "p10": "p10", "median": "p50", "p90": "p90", "worst tenth": "worst10_mean"}

DEPTH = 12
"""So many levels of the tree are shown: deeper ones leave no room for text."""


def run_table(run: Run) -> Table:
    """Return the summary of a run, one fact a line."""
    table = new_table(queries.heading(run), show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in facts(run):
        table.add_row(name, escape(value))
    return table


def cluster_table(run: Run) -> Table:
    """Return the current clusters: their members and scores, and the norms of the last round."""
    outcome, criteria = Outcome.of(run), {row["node"]: row for row in run.cluster_rows}
    table = new_table("Clusters")
    for column in ("node", "size", outcome.score.label, "mean norm", "max norm"):
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


def tree_view(tree: ParameterTree, run: Run | None = None) -> Tree:
    """Return a parameter tree from the root to the current clusters, which may be of the middle of a run.

    The run has the clients' names, the clusters' scores and, where it is known, the truth; without it, the tree shows
    what it knows itself.
    """
    last_round, outcome = (None, None) if run is None else (run.model_round, Outcome.of(run))
    root = tree.nodes[0]
    view = Tree(_node_text(root, tree, last_round, outcome), guide_style="dim")
    pending = [(root, view, 0)]
    while pending:
        node, branch, depth = pending.pop()
        children = tree.children(node.id)
        listed = children[:LIMIT] if depth < DEPTH else ()
        pending += [(c, branch.add(_node_text(c, tree, last_round, outcome)), depth + 1) for c in listed]
        if unlisted := {tree.leaf_of[client] for child in children[len(listed) :] for client in child.members}:
            branch.add(Text(f"and {count(len(unlisted), 'more cluster')}", style="dim"))
    return view


def facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the lines of a run's summary: name and value."""
    s = run.summary
    clusters, seconds = s["clusters"], s["seconds"]
    yield "model", f"{s['model']}, {count(s['rounds'], 'round')} on {s['device']}"
    if stopped := s.get("stopped"):
        yield "stopped", f"after round {stopped['round']} of {run.config.get('rounds')}: {stopped['why']}"
    if personal := queries.personal_part(run):
        yield "personal", f"{shortened(personal.names)}: {personal.numbers} of each client's model stay there"
    for score in Score.all_of(s):
        spread, scored = s[score.name], score.clients(s)
        if spread["mean"] is None:
            undefined = f"undefined for the test data of {count(scored.without, 'client')}"
            why = undefined if scored.without else "no client was evaluated"
            yield score.label, f"no score: {why}"
            continue
        over = scored.of_clients
        yield score.label, f"mean {score.text(spread['mean'])}, std {score.text(spread['std'])} over {over}"
        yield "", ", ".join(f"{name} {score.text(spread[key])}" for name, key in QUANTILES.items())
    if chosen := s.get("chosen"):
        counts, of_round = Score.named(chosen["metric"], s), f"round {chosen['round']}, best on validation data"
        yield "chosen", f"{of_round}: {counts.label} {counts.text(counts.of_chosen(s, 'validation'))} there"
        tested = [f"{each.label} {each.text(each.of_chosen(s))}" for each in Score.all_of(s)]
        yield "", f"on test data {', '.join(tested)}"
        if last := s.get("last"):
            score = counts.text(last["test"].get(counts.name))
            yield "", f"its models are kept; the last, of round {last['round']}, had {counts.label} {score}"
    known = "" if clusters["true"] is None else f", {clusters['true']} true"
    yield "clusters", f"{clusters['found']} found{known}; sizes {shortened([str(n) for n in clusters['sizes']])}"
    if clusters["ari"] is not None:
        yield "recovery", f"ARI {number(clusters['ari'])}, NMI {number(clusters['nmi'])}"
        if (inside := sum(clusters["sizes"])) < s["clients"] and (ari := clusters.get("ari_assigned")) is not None:
            yield "", f"ARI {number(ari)} of the {count(inside, 'client')} in a cluster"
    yield from _adversaries(s)
    if own := s.get("own_models"):
        yield "own models", f"{own} of {count(s['clients'], 'client')} served with one"
    yield from _target(s)
    yield from _connections(run)
    if lost := [why for _, event in events_of(run.events, LeftOut) for why in event.clients.values()]:
        absent = sum(why in (DROPPED_OUT, TOO_LATE) for why in lost)
        yield "left out", f"{count(len(lost), 'answer')}: {absent:,} absent, {len(lost) - absent:,} unusable"
    if limited := [client for _, event in events_of(run.events, Limited) for client in event.clients]:
        yield "limited", f"{count(len(limited), 'answer')} of {count(len(set(limited)), 'client')}"
    yield from _sums(run)
    if privacy := s.get("privacy"):
        yield "privacy", _privacy(**privacy)
    if withheld := sum(event.clusters for _, event in events_of(run.events, Withheld)):
        least = clusters.get("min_size", 1)
        yield "withheld", f"{count(withheld, 'cluster')} of fewer than {least} members, merged into others"
    yield "traffic", f"{traffic(s['bytes_up'])} up, {traffic(s['bytes_down'])} down"
    phases = ", ".join(f"{phase} {duration(seconds[phase])}" for phase in ("train", "evaluate", "server"))
    yield "time", f"{duration(seconds['total'])}: {phases}"


def _sums(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what happened to sums under secure aggregation; nothing if all were used as they came."""
    if rejected := events_of(run.events, SumRejected):
        yield "sums rejected", f"{len(rejected):,}; their clusters kept their models"
    if shortened := events_of(run.events, SumClipped):
        updates = sum(event.clipped for _, event in shortened)
        yield "updates clipped", f"{updates:,} in {count(len(shortened), 'sum')}, by network.secure_norm"
    if unguarded := events_of(run.events, SumUnguarded):
        yield "sums unguarded", f"from round {unguarded[0][0]} on one client can turn the mean of a cluster"


def _adversaries(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines about adversaries, and how honest clients fare beside them."""
    if (told := summary.get("adversary")) is None:
        return
    score, clusters = Score.all_of(summary)[0], told["clusters"]
    of_each = told["scores"][score.name]
    shown = f"honest {score.label} {score.text(of_each['honest'])}, worst tenth {score.text(of_each['honest_worst10'])}"
    lies = [f"false {', '.join(told['lies'])}"] if told.get("lies") else []
    what = ", ".join([*([told["kind"]] if told["kind"] else []), *lies])
    yield "adversaries", f"{len(told['ids']):,} of {count(summary['clients'], 'client')}, {what}; {shown}"
    alone, beside = (
        count(clusters["of_adversaries"], "cluster"),
        queries.adversaries(clusters["adversaries_with_honest"]),
    )
    found = "" if told["ari_honest"] is None else f"; ARI {number(told['ari_honest'])} of honest clients"
    yield "", f"{alone} of adversaries alone, {beside} in clusters with honest clients{found}"
    if told["attack_success"] is not None:
        yield "", f"backdoor: succeeds with {percent(told['attack_success'])} of honest clients' test examples"


def _privacy(
    epsilon: float | None, delta: float, releases: int, steps: int | None = None, model: str = "local", **more: Any
) -> str:
    spent = "clipped, without noise" + (" on everything" if model == "central" else "")
    if epsilon is not None:
        spent = f"{_epsilon(epsilon)} at δ = {delta:g}"
    if steps is not None:
        return f"{spent} for each example; {count(steps, 'noisy step')} of the client that spent most"
    if epsilon is not None:
        spent += f", client level, towards {more.get('towards', 'everybody')}"
    if model != "central":
        return f"{spent}; {count(releases, 'update')} of the client that sent most"
    if epsilon is not None and more.get("epsilon_public") not in (None, epsilon):
        spent += f", and {_epsilon(more['epsilon_public'])} towards who does not know who was sampled"
    return f"{spent}; {count(releases, 'release')}"


def _epsilon(epsilon: float) -> str:
    return f"ε = {epsilon:,.0f}" if epsilon >= 100 else f"ε = {epsilon:.3g}"


def _connections(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the lines about clients that came and went over a network, and about nodes that were kept out."""
    lost, back = (
        sum(len(event.clients) for _, event in events_of(run.events, kind)) for kind in (Disconnected, Reconnected)
    )
    if lost or back:
        yield "connections", f"{lost:,} lost, {back:,} back"
    refused = {node: why for _, event in events_of(run.events, Refused) for node, why in event.nodes.items()}
    if refused:
        *_, (node, why) = refused.items()
        yield "refused", f"{count(len(refused), 'node')}, the last {node}: {why}"


def _target(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the line about the target, if there was one; the metric is named if it is not the one that counts."""
    target, scores = summary["target"], Score.all_of(summary)
    score = next((score for score in scores if target.get(score.name) is not None), None)
    if score is None:
        return
    aim = percent(target[score.name], 0) if score.share else f"{target[score.name]:g}"
    name = " ".join(["target", *([] if score == scores[0] else [score.label]), aim])
    share = f"{percent(target['share_of_clients'], 0)} of the clients at the end"
    if target["rounds_to_target"] is None:
        yield name, f"not reached by the mean; {share}"
    else:
        spent = f"{target['rounds_to_target']} rounds and {traffic(target['bytes_to_target'])}"
        yield name, f"reached by the mean after {spent}; {share}"


def _node_text(node: Node, tree: ParameterTree, last_round: int | None, outcome: Outcome | None) -> Text:
    """Describe one node: its size and lifetime, its members and, if it was split, why."""
    is_leaf = not tree.children(node.id)
    text = Text(str(node.id), style="bold green" if is_leaf else "bold")
    last = last_round if node.split_in is None else node.split_in
    parts = [count(len(node.members), "client"), _lifetime(node, last)]
    if node.continued is not None:
        parts.append("its model goes on beside them")
    members = _members(node, outcome)
    if outcome is not None:
        if is_leaf:
            parts.append(f"{outcome.score.label} {outcome.score.text(outcome.mean_score(node.members))}")
        if outcome.truth is not None and (inside := _purity(node.members, outcome.truth)):
            members += f"  ({inside})"
    text.append("  " + " · ".join(parts), style="not bold default")
    if members:
        text.append(f"\n{members}", style="not bold dim default")
    if node.criteria:
        criteria = ", ".join(" ".join(criterion_text(criterion)) for criterion in node.criteria.items())
        text.append(f"\nsplit at {criteria}", style="not bold yellow")
    return text


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
    inside = run_view.composition(members, truth)
    if len(inside) <= 1:
        return f"true cluster {inside[0][0]}" if inside else ""
    return f"true clusters {_composition(members, truth)}; purity {percent(run_view.purity(members, truth), 0)}"


def _composition(members: Sequence[int], truth: Mapping[int, int]) -> str:
    """Write which true clusters are in a cluster, with the number of its clients in each: ``2 (5), 0 (1)``."""
    return shortened([f"{label} ({n})" for label, n in run_view.composition(members, truth)], limit=6)


# What a finished run shows on a terminal.


@contextmanager
def without_figures_if_need_be(console: Console) -> Generator[None]:
    """Warn of figures that cannot be drawn or written in the block; nothing else is lost with them."""
    try:
        yield
    except Exception as error:  # whatever it is: what the figures are of is finished and kept
        reason = str(error) if isinstance(error, FedcladeError | OSError) else f"{type(error).__name__}: {error}"
        console.print(Text.assemble(("no figures: ", "yellow"), reason), soft_wrap=True)


def add_figures(run: Run, folder: Path, console: Console) -> bool:
    """Draw the figures of a run folder, and return whether that was possible; why not is printed."""
    with without_figures_if_need_be(console):
        save_figures(run, folder / "figures")
        return True
    return False


def show_run(run: Run, console: Console) -> None:
    """Print the tables of a run: its figures, its splits or checks, its tree."""
    console.print(run_table(run))
    for table in decision_tables(run):
        console.print(table)
    console.print(tree_view(run.tree, run))
