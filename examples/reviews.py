"""Text classification from strings: shops that sort their customers' messages, each in its own way.

Half of the shops call a late parcel a complaint, the other half a question, which nobody tells the server.

python examples/reviews.py
"""

import random

import fedclade
from fedclade.report.page import write_report

OPENINGS = ["hello", "dear team", "good morning", "hi there", "to whom it may concern"]
SAID = {
    "praise": ["great quality", "arrived early and works well", "lovely colours, thank you"],
    "complaint": ["broken on arrival", "the wrong size was sent", "it stopped working"],
    "question": ["where do i find the manual", "does it come in blue", "how long is the cable"],
}
LATE = ["my parcel is late", "the delivery has not come yet", "still waiting for my order"]


def shop(late_is: str, messages: int, draw: random.Random) -> tuple[list[str], list[int]]:
    """Return what a shop's customers wrote, and what it is to the shop: praise, complaint or question."""
    texts, labels = list[str](), list[int]()
    for _ in range(messages):
        kind = draw.choice([*SAID, "late", "late"])
        texts.append(
            f"{draw.choice(OPENINGS)}, {draw.choice(LATE if kind == 'late' else SAID[kind])}"
        )
        labels.append([*SAID].index(late_is if kind == "late" else kind))
    return texts, labels


def shops(count: int = 12, seed: int = 0) -> fedclade.Federation:
    """Return the shops, with test messages of their own."""
    draw, names = random.Random(seed), [f"shop-{i}" for i in range(count)]
    truth = {name: i % 2 for i, name in enumerate(names)}
    ways = ["complaint", "question"]
    clients = {
        name: (shop(ways[truth[name]], 40, draw), shop(ways[truth[name]], 40, draw))
        for name in names
    }
    return fedclade.federation(
        clients, "classification", name="shops", true_clusters=truth, max_words=12
    )


if __name__ == "__main__":
    local = fedclade.LocalTraining(optimizer="adam", lr=0.01)
    run = fedclade.simulate("rcfl", "lstm", shops(), rounds=8, local=local)
    print(
        f"{run.summary['clusters']['found']} clusters, accuracy {100 * run.summary['accuracy']['mean']:.1f} %"
    )
    print("report:", write_report(run, "reviews.html"))
