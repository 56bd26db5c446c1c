"""Text classification from strings: twelve shops sort the messages of their customers.

Half of the shops call a late parcel a complaint, the other half a question; the server does not
know which.

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
    """Return messages to a shop, and their labels: 0 praise, 1 complaint, 2 question.

    Parameters
    ----------
    late_is
        Label of messages about late parcels: "complaint" or "question".
    messages
        Number of messages.
    draw
        Random generator.
    """
    texts, labels = list[str](), list[int]()
    for _ in range(messages):
        kind = draw.choice([*SAID, "late", "late"])
        texts.append(
            f"{draw.choice(OPENINGS)}, {draw.choice(LATE if kind == 'late' else SAID[kind])}"
        )
        labels.append([*SAID].index(late_is if kind == "late" else kind))
    return texts, labels


def shops(count: int = 12, seed: int = 0) -> fedclade.Federation:
    """Return a federation of shops, each with 40 messages for training and 40 for testing."""
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
