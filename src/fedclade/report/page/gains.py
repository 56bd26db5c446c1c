"""Page sections on what the clients gain by the run, and on what distinguishes the clusters.

A gain is the difference between a client's score with the run's model and its score with a simpler
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from fedclade.report.formats import NONE, count
from fedclade.report.gains import (
    CLUSTERS_LISTED,
    EXPLAINED_AS,
    LABELS,
    TRAITS_LISTED,
    GainView,
    MeanGain,
    client_columns,
    identify,
    write_explained,
)
from fedclade.report.page.plot import Figure, draw
from fedclade.report.page.section import Card, Cell, Section, Table
from fedclade.report.picture import Axis, Dots, LegendEntry, Line, Panel, Picture, Rule
from fedclade.report.run_view import RunView
from fedclade.runs import ClientGains
from fedclade.tasks import Interval

MOST_LISTED = 1000
"""Largest number of clients in the table of gains."""

MOST_DRAWN = 120
"""Largest number of clients in a picture of gains; of more clients, a sample is drawn."""

_gain_views: WeakKeyDictionary[RunView, GainView | None] = WeakKeyDictionary()
"""Gains by view of a run.

They are cached because several sections need them, and their permutation tests take long.
"""

COMPARED = 2
"""Number of compared models with a card and a picture of gains, the most interesting models."""


def gain_cards(view: RunView) -> list[Card]:
    """Return cards with the run's mean gains, compared with at most ``COMPARED`` simpler models.

    Each card has the interval of the mean. Empty for a run without gains.
    """
    gains = _view_gains(view)
    if gains is None:
        return []
    return [_gain_card(gains, gain) for gain in gains.mean_gains[:COMPARED]]


def _gain_card(gains: GainView, gain: MeanGain) -> Card:
    """Return a card with the mean gain compared with one model.

    The card also has the interval of the mean, and the number of clients.
    """
    value = gains.write_gain(Interval(gain.mean.value))
    if gain.without_interval:
        note = f"mean over {gain.without_interval}"
    else:
        ends = gains.write_gain(gain.mean).partition(" ")[2]
        note = f"{ends}: 95 % interval of the mean over {count(gain.clients, 'client')}"
    return Card(f"Gain over {LABELS[gain.model]}, {gains.unit}", value, note, gain.trend)


def gains_section(view: RunView) -> Section | None:
    """Return the page section on each client's gain.

    None for a run in progress, for a run without scores, and for a run with very many clients
    whose gains were not measured.
    """
    gains = _view_gains(view)
    if gains is None:
        return None
    sentences: list[str] = []
    if gains.mean_gains:
        sentences.append(gains.explained_unit)
    sentences += gains.describe_missing()
    if gains.explained_intervals:
        sentences.append(gains.explained_intervals)
    if gains.mean_gains:
        sentences.append(
            "If nothing differed, about 1 client in 20 would still seem clearly better or worse, "
            "by chance."
        )
    shown = gains.mean_gains[:COMPARED]
    figures: dict[str, Figure] = {}
    legend: Sequence[LegendEntry] = ()
    for gain in shown:
        picture = _draw_gains(view, gains, gain)
        figures[LABELS[gain.model]] = draw(picture)
        legend = picture.legend
    tables: list[Table] = []
    if gains.mean_gains:
        tables.append(_mean_table(gains))
    tables.append(_client_table(view, gains))
    return Section(
        "gains",
        "What do the clients gain?",
        " ".join(sentences),
        figures,
        legend=legend,
        open_tables=tables,
        choice="Compared with",
    )


def distinction_section(view: RunView) -> Section | None:
    """Return the page section on what distinguishes the clusters.

    None for a run in progress, for a run with fewer than two clusters, and for clients with
    neither traits nor scores of simpler models.
    """
    gains = _view_gains(view)
    if gains is None or not (gains.differences or gains.explained):
        return None
    tables = [_list_trait_means(gains)] if gains.differences else []
    explained = [[name, *write_explained(each)] for name, each in gains.explained]
    tables.append(
        Table(
            "How much of the differences between clients the clusters explain",
            ["clients differ in", "explained", "by chance", "p"],
            explained,
            "Columns of one kind count together; inputs with equal weight.",
        )
    )
    return Section(
        "distinction",
        "What distinguishes the clusters",
        gains.describe_differences(),
        open_tables=tables,
    )


def _list_trait_means(gains: GainView) -> Table:
    """Return a table with the mean of each trait in each cluster."""
    clusters = sorted({client.cluster for client in gains.gains.clients})
    listed = clusters[:CLUSTERS_LISTED]
    columns = ["trait", *(f"cluster {cluster}" for cluster in listed)]
    rows: list[list[str]] = []
    for each in gains.differences[:TRAITS_LISTED]:
        cells = [each.by_cluster[cluster] for cluster in listed]
        rows.append([each.text, *cells, *write_explained(each.explained)])
    more = len(gains.differences) - len(rows)
    notes: list[str] = []
    if more > 0:
        notes.append(f"{count(more, 'more trait')} not listed.")
    if len(clusters) > len(listed):
        notes.append(f"{count(len(clusters) - len(listed), 'more cluster')} not listed.")
    if not gains.gains.intervals:  # only scores that clients reported
        notes.append(
            "Labels and inputs are not compared: that needs the clients’ data, which are not here."
        )
    return Table(
        "Mean of each trait over the clients of a cluster",
        [*columns, "explained", "by chance", "p"],
        rows,
        " ".join(notes),
        sortable=True,
    )


def _view_gains(view: RunView) -> GainView | None:
    """Return the gains of a finished run, computed once; None for a run without gains.

    A run in progress has no gains.
    """
    if view not in _gain_views:
        if view.is_finished:
            _gain_views[view] = GainView.of(view.run)
        else:
            _gain_views[view] = None
    return _gain_views[view]


def _mean_table(gains: GainView) -> Table:
    """Return a table of mean scores and mean gains over the clients, one row per compared model."""
    rows: list[list[str | Cell]] = []
    for gain in gains.mean_gains:
        cell = Cell(gains.write_gain(gain.mean), gain.trend)
        score = gains.write_with_interval(gains.mean_score(gain.model))
        counts = [str(gain.better), str(gain.worse), str(gain.clients)]
        rows.append([LABELS[gain.model], score, cell, *counts])
    deployed = gains.write_with_interval(gains.mean_score(gains.deployed))
    name = f"this run: {LABELS[gains.deployed]}"
    rows.append([name, deployed, NONE, NONE, NONE, str(len(gains.gains.clients))])
    columns = [
        "compared with",
        f"mean {gains.score.heading}",
        f"gain, {gains.unit}",
        "clearly better",
        "clearly worse",
        "clients",
    ]
    models = [*(gain.model for gain in gains.mean_gains), gains.deployed]
    meanings = "; ".join(f"{LABELS[model]}: {EXPLAINED_AS[model]}" for model in models)
    note = (
        f"{meanings[:1].upper()}{meanings[1:]}. "
        "Brackets: 95 % intervals of the means over the clients (Student’s t). Clearly: the "
        "client’s own interval is above or below 0."
    )
    return Table("Means over the clients", columns, rows, note)


def _client_table(view: RunView, gains: GainView) -> Table:
    """Return a table of the clients' scores and gains, which the reader can sort."""
    columns = client_columns(gains)
    against = _scores_against(view)
    if against is not None:
        columns += [view.against_label, f"difference to {view.against_label}"]
    rows = [_client_row(gains, client, against) for client in gains.clients[:MOST_LISTED]]
    notes = ["The table is sorted by a click on the head of a column."]
    if against is not None:
        notes.append(
            f"The difference to {view.against_label} has no interval: predictions for single rows "
            "of that run are not stored."
        )
    if view.folder is not None and gains.gains.intervals:
        notes.append("fedclade report writes it as gains.csv, with all intervals.")
    title = f"Clients: test {gains.score.heading}"
    if len(gains.clients) > MOST_LISTED:
        notes.append(f"{count(len(gains.clients) - MOST_LISTED, 'more client')} not listed.")
    return Table(title, columns, rows, " ".join(notes), sortable=True)


def _client_row(
    gains: GainView, client: ClientGains, against: dict[int, float] | None
) -> list[str | Cell]:
    """Return the cells of a client's row in the table of gains.

    Parameters
    ----------
    gains
        Gains of the run.
    client
        Scores and gains of the client.
    against
        Scores of another run to compare with, by client id; None without such a run.
    """
    cells: list[str | Cell] = [*identify(gains, client)]
    for model in gains.gains.models:
        interval = client.scores.get(model)
        if model == client.deployed:
            cells.append(gains.write_with_interval(interval))
        else:
            cells.append(gains.write_score(interval))
    for gain in gains.mean_gains[:COMPARED]:
        interval = client.gains.get(gain.model)
        trend = "" if interval is None else interval.trend
        cells.append(Cell(gains.write_gain(interval), trend))
    if against is not None:
        cells += _cells_against(gains, client, against)
    return cells


def _scores_against(view: RunView) -> dict[int, float] | None:
    """Return the clients' scores in the run to compare with; None without such a run."""
    if view.against is None or view.before is None:
        return None
    return view.before[1]


def _cells_against(
    gains: GainView, client: ClientGains, against: dict[int, float]
) -> list[str | Cell]:
    """Return two table cells: a client's score in another run, and its gain in this run over it.

    Both cells are dashes if the client has no score in the other run.

    Parameters
    ----------
    gains
        Gains of the run.
    client
        Scores and gains of the client.
    against
        Scores of the other run by client id.
    """
    score = against.get(client.client)
    if score is None:
        return [NONE, NONE]
    difference = gains.score.sign * (client.scores[client.deployed].value - score)
    return [gains.score.digits(score), gains.write_gain(Interval(difference))]


def _draw_gains(view: RunView, gains: GainView, gain: MeanGain) -> Picture:
    """Return a picture of each client's gain over one model, the largest gain first.

    Parameters
    ----------
    view
        The run.
    gains
        Gains of the run.
    gain
        Mean gain over the compared model.
    """
    clients = [client for client in gains.gains.clients if gain.model in client.gains]
    clients = sorted(clients, key=lambda client: -client.gains[gain.model].value)
    step = -(-len(clients) // MOST_DRAWN)
    clients = clients[::step]
    values = [client.gains[gain.model] for client in clients]
    scale = 100 if gains.score.share else 1
    names = [
        f"{client.name}, cluster {client.cluster}: {gains.write_gain(value)} {gains.unit}"
        for client, value in zip(clients, values, strict=True)
    ]
    dots = Dots(
        x=range(1, len(clients) + 1),
        y=[scale * value.value for value in values],
        colour=[view.colours.of(client.cluster) for client in clients],
        size=9 if len(clients) <= 60 else 6,
        texts=names,
        hover="%{text}",
    )
    lines = _draw_intervals(values, scale)
    label = f"gain over {LABELS[gain.model]}, {gains.unit}"
    ticks: dict[float, str] | None = None
    if len(clients) <= 40:
        ticks = {float(i): client.name for i, client in enumerate(clients, start=1)}
    x_axis = Axis("", "whole", range=(0, len(clients) + 1), grid=False, ticks=ticks)
    panel = Panel([Rule(0.0, dashed=False), lines, dots], Axis(label))
    legend = [*view.colours.current("dot"), LegendEntry("@muted", "95 % interval", "line")]
    return Picture("What do the clients gain?", [panel], x_axis, height=360, legend=legend)


def _draw_intervals(values: Sequence[Interval], scale: int) -> Line:
    """Return a vertical line for the confidence interval of each gain that has one.

    All lines form one mark. ``scale`` is a factor for the gains: 100 to draw shares in per cent,
    else 1.
    """
    x: list[float | None] = []
    y: list[float | None] = []
    for place, value in enumerate(values, start=1):
        if value.low is not None and value.high is not None:
            x += [place, place, None]
            y += [scale * value.low, scale * value.high, None]
    return Line(x=x, y=y, colour="@muted", width=1.5)
