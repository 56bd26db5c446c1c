"""The numbers at the head of a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedclade.report.formats import count, duration, number, percent, shortened, traffic
from fedclade.report.outcome import Outcome
from fedclade.report.page.section import Card
from fedclade.report.queries import personal_part
from fedclade.report.run_view import RunView
from fedclade.report.score import Score


def run_cards(view: RunView) -> list[Card]:
    """Return what a run comes to: scores, clusters, recovery of the true ones, bytes, time, privacy if it has any."""
    s = view.run.summary
    clusters, seconds = s["clusters"], s["seconds"]
    known = "" if clusters["true"] is None else f"{clusters['true']} true"
    score, *others = Score.all_of(s)
    worst = f"mean {score.label} of the worst {count(-(-len(view.scores) // 10), 'client')}"
    cards = [_score(view), Card("Worst tenth", score.text(score.worst_tenth(s)), worst)]
    cards += [Card(each.title, each.text(each.mean(s)), _std(each, s)) for each in others]
    if chosen := s.get("chosen"):
        there = f"{score.text(score.of_chosen(s, 'validation'))} on validation data"
        if last := s.get("last"):
            there += f"; its models are kept. Round {last['round']}: {score.text(last['test'].get(score.name))}"
        cards.append(
            Card("Chosen round", score.text(score.of_chosen(s)), f"{score.label} of round {chosen['round']}; {there}")
        )
    if stopped := s.get("stopped"):
        cards.append(
            Card("Stopped", f"round {stopped['round']}", f"of {view.run.config.get('rounds')}: {stopped['why']}")
        )
    sizes = clusters["sizes"]
    each = (
        f"{count(sizes[0], 'client')} each"
        if len(set(sizes)) == 1 and len(sizes) > 1
        else f"largest {max(sizes, default=0)}"
    )
    cards.append(Card("Clusters", f"{clusters['found']:,}", ", ".join(filter(None, [known, each]))))
    if clusters["ari"] is not None:
        ari, below = clusters["ari"], f"NMI {number(clusters['nmi'])}; 1 is the truth"
        if sum(sizes) < s["clients"] and (assigned := clusters.get("ari_assigned")) is not None:
            ari, below = assigned, f"of {sum(sizes):,} clients in a cluster; {number(ari)} of all"
        cards.append(Card("ARI", number(ari), below))
    if personal := personal_part(view.run):
        what = f"{personal.numbers} of a model: {shortened(personal.names, limit=3)}"
        cards.append(Card("Stays with clients", percent(personal.share), what))
    if own := s.get("own_models"):
        cards.append(
            Card("Served with their own", count(own, "client"), f"of {s['clients']:,}, by models of their own")
        )
    both = f"{traffic(s['bytes_up'])} up, {traffic(s['bytes_down'])} down"
    cards.append(Card("Traffic", traffic(s["bytes_up"] + s["bytes_down"]), both))
    cards.append(Card("Time", duration(seconds["total"]), f"{duration(seconds['train'])} training, on {s['device']}"))
    if (privacy := s.get("privacy")) and privacy["epsilon"] is not None:
        level = privacy.get("level", "client")
        cards.append(Card("Privacy", f"ε = {privacy['epsilon']:.3g}", f"at δ = {privacy['delta']:g}, {level} level"))
    return cards


def _score(view: RunView) -> Card:
    """Return the card of the mean score, with the difference to the run that it is compared with."""
    summary, score = view.run.summary, view.score
    mean = score.mean(summary)
    if view.against is not None:
        base = Outcome.of(view.against)
        if mean is not None and (other := base.mean_score(base.rows)) is not None:
            gain, trend = score.gain(mean, other)
            return Card(score.title, score.text(mean), f"{gain} against {view.against_label}", trend)
    return Card(score.title, score.text(mean), _std(score, summary))


def _std(score: Score, summary: Mapping[str, Any]) -> str:
    scored = score.clients(summary)
    if score.mean(summary) is None:
        return f"undefined for {count(scored.without, 'client')}"
    over = scored.of_clients if scored.without else "clients"
    return f"std {score.text(summary[score.name]['std'])} over {over}"
