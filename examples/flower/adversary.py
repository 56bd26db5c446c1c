"""A federation with a liar, in one process: three clients hold digits, and a fourth flips its labels.

What a SuperNode runs is ``client_app``; the one that lies has an ``adversary``. CFL finds it by its updates alone::

    python examples/flower/adversary.py
"""

import fedclade
from fedclade.flower import LocalGrid, LocalNode, Network, client_app, federate

CLIENTS, LIAR = 4, 3


def main() -> fedclade.Run:
    """Run it; return the run."""
    data = fedclade.load_federation("digits", clients=CLIENTS, samples_per_client=200)
    lies = fedclade.Adversary(kind="label_flip")

    def app(adversary: fedclade.Adversary | None = None):
        return client_app(
            "mclr", lambda c: data.alone(int(c.node_config["partition-id"])), adversary=adversary
        )

    nodes = {
        node + 1: LocalNode(app(lies if node == LIAR else None), {"partition-id": node})
        for node in range(CLIENTS)
    }
    algorithm = fedclade.CFL(split_rounds=(5,), eps2=1e-6)
    spec = fedclade.LocalTraining(epochs=2, lr=0.1)
    network = Network(clients=CLIENTS, wait=5)
    return federate(LocalGrid(nodes), algorithm, "mclr", network=network, rounds=8, local=spec)


if __name__ == "__main__":
    for cluster in main().tree.leaves:
        print(f"cluster {cluster.id}: clients {', '.join(map(str, cluster.members))}")
