"""The numbers at the head of a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedclade.report.facts import Outcome
from fedclade.report.formats import count, duration, number, percent, traffic
from fedclade.report.page.run_view import RunView
from fedclade.report.page.section import Card


def run_cards(subject: RunView) -> list[Card]:
    """Return what a run comes to: scores, clusters, recovery of the true ones, bytes, time, privacy if it has any."""
    s = subject.run.summary
    clusters, seconds = s["clusters"], s["seconds"]
    known = "" if clusters["true"] is None else f"{clusters['true']} true"
    cards = [_score(subject), _worst(subject)]
    sizes = clusters["sizes"]
    each = f"{sizes[0]} clients each" if len(set(sizes)) == 1 and len(sizes) > 1 else f"largest {max(sizes, default=0)}"
    cards.append(Card("Clusters", f"{clusters['found']:,}", ", ".join(filter(None, [known, each]))))
    if clusters["ari"] is not None:
        cards.append(Card("ARI", number(clusters["ari"]), f"NMI {number(clusters['nmi'])}; 1 is the truth"))
    cards.append(Card("Traffic", traffic(s["bytes_up"] + s["bytes_down"]), _per_round(s)))
    cards.append(Card("Time", duration(seconds["total"]), f"{duration(seconds['train'])} training, on {s['device']}"))
    if (privacy := s.get("privacy")) and privacy["epsilon"] is not None:
        cards.append(Card("Privacy", f"ε = {privacy['epsilon']:.3g}", f"at δ = {privacy['delta']:g}, worst client"))
    return cards


def _per_round(s: Mapping[str, Any]) -> str:
    return f"{traffic(s['bytes_up'])} up, {traffic(s['bytes_down'])} down"


def _score(subject: RunView) -> Card:
    s = subject.run.summary
    if subject.language:
        worst = number(s["perplexity"]["max"], 1)
        return _against(subject, "Perplexity", s["perplexity"]["mean"], f"worst client {worst}")
    return _against(subject, "Accuracy", s["accuracy"]["mean"], f"std {percent(s['accuracy']['std'])} over clients")


def _against(subject: RunView, label: str, mean: float, otherwise: str) -> Card:
    """Return the card of a mean, with the difference to the run that it is compared with."""
    value = subject.written(mean)
    if subject.against is None:
        return Card(label, value, otherwise)
    base = Outcome.of(subject.against)
    if (other := base.mean_score(base.rows)) is None:
        return Card(label, value, otherwise)
    return Card(label, value, *difference(mean, other, subject.against_label, language=subject.language))


def difference(mean: float, other: float, label: str, *, language: bool) -> tuple[str, str]:
    """Say how much better a mean score is than another, and whether that is good or bad."""
    gain = mean - other
    written = f"{gain:+.1f}" if language else f"{100 * gain:+.1f} points"
    trend = "" if abs(gain) < 5e-4 else "good" if (gain > 0) != language else "bad"
    return f"{written} against {label}".replace("-", "−", 1), trend


def _worst(subject: RunView) -> Card:
    accuracy = subject.run.summary["accuracy"]
    tenth = f"worst {count(-(-len(subject.outcome.rows) // 10), 'client')}"
    return Card("Worst tenth", percent(accuracy["worst10_mean"]), f"mean accuracy of the {tenth}")
