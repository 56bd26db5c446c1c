"""An experiment that takes no time, for the tests of the frame."""

from __future__ import annotations

from fedclade.report import style
from fedclade_papers import Claim, Experiment, Outcome, ResultCache, Row, Settings
from fedclade_papers.outcome import Summary


def measure(cache: ResultCache, settings: Settings) -> Outcome:
    found = [
        cache.piece(f"seed {seed}", lambda seed=seed: {"right": 90.0 + seed})
        for seed in settings["seeds"]
    ]
    right = [each["right"] for each in found]
    row = Row("accuracy", 95.0, sum(right) / len(right), seeds=tuple(right), wanted="at least")
    claims = (
        Claim("above 90 % (section I)", row.ours > 90, f"{row.ours:.1f} %"),
        Claim("always", False, "once"),
    )
    remarks = ("The paper does not say the seeds.",)
    summary = Summary("95 % on average.", f"{row.ours:.1f} %.", "The seeds are others.")
    return Outcome((row,), claims, {"right": right}, remarks, summary)


def draw(outcome: Outcome, settings: Settings):
    figure = style.new_figure(4, 3)
    axes = figure.subplots()
    axes.plot(settings["seeds"], outcome.series["right"])
    return figure


TINY = Experiment(
    name="tiny",
    source="Nobody 2000, table 1",
    title="accuracy by seed",
    paper={"seeds": [0, 1, 2], "rounds": 100, "data": "mnist"},
    changes={"smoke": {"seeds": [1]}, "laptop": {"seeds": [1, 3], "rounds": 10}},
    measure=measure,
    draw=draw,
)
