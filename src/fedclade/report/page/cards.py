"""The numbers at the head of a page."""

from __future__ import annotations

from fedclade.report.formats import count, duration, number, percent, traffic
from fedclade.report.outcome import Outcome
from fedclade.report.page.section import Card
from fedclade.report.run_view import RunView
from fedclade.report.score import Score


def run_cards(view: RunView) -> list[Card]:
    """Return what a run comes to: scores, clusters, recovery of the true ones, bytes, time, privacy if it has any."""
    s = view.run.summary
    clusters, seconds = s["clusters"], s["seconds"]
    known = "" if clusters["true"] is None else f"{clusters['true']} true"
    worst = f"mean accuracy of the worst {count(-(-len(view.outcome.rows) // 10), 'client')}"
    cards = [_score(view), Card("Worst tenth", percent(s["accuracy"]["worst10_mean"]), worst)]
    sizes = clusters["sizes"]
    each = f"{sizes[0]} clients each" if len(set(sizes)) == 1 and len(sizes) > 1 else f"largest {max(sizes, default=0)}"
    cards.append(Card("Clusters", f"{clusters['found']:,}", ", ".join(filter(None, [known, each]))))
    if clusters["ari"] is not None:
        cards.append(Card("ARI", number(clusters["ari"]), f"NMI {number(clusters['nmi'])}; 1 is the truth"))
    both = f"{traffic(s['bytes_up'])} up, {traffic(s['bytes_down'])} down"
    cards.append(Card("Traffic", traffic(s["bytes_up"] + s["bytes_down"]), both))
    cards.append(Card("Time", duration(seconds["total"]), f"{duration(seconds['train'])} training, on {s['device']}"))
    if (privacy := s.get("privacy")) and privacy["epsilon"] is not None:
        cards.append(Card("Privacy", f"ε = {privacy['epsilon']:.3g}", f"at δ = {privacy['delta']:g}, worst client"))
    return cards


def _score(view: RunView) -> Card:
    """Return the card of the mean score, with the difference to the run that it is compared with."""
    summary, score = view.run.summary, view.score
    label, mean = score.name.capitalize(), score.mean(summary)
    if view.against is not None:
        base = Outcome.of(view.against)
        if (other := base.mean_score(base.rows)) is not None:
            return Card(label, score.text(mean), *difference(mean, other, view.against_label, score))
    spread = summary[score.name]
    if not score.share:
        worst = spread["min" if score.metric.higher_is_better else "max"]
        return Card(label, score.text(mean), f"worst client {score.text(worst)}")
    return Card(label, score.text(mean), f"std {percent(spread['std'])} over clients")


def difference(mean: float, other: float, label: str, score: Score) -> tuple[str, str]:
    """Say how much better a mean score is than another, and whether that is good or bad."""
    gain = mean - other
    written = f"{100 * gain:+.1f} points" if score.share else f"{gain:+.1f}" if abs(gain) >= 1 else f"{gain:+.3g}"
    trend = "" if abs(gain) < 5e-4 else "good" if gain * score.sign > 0 else "bad"
    return f"{written} against {label}".replace("-", "−", 1), trend
