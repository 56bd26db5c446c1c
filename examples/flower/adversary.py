"""A federation in one process, with three honest clients and a malicious client that flips labels.

All clients have digits. Each client is the ``client_app`` that a SuperNode runs, and that of the
malicious client has an ``adversary``. CFL separates it from the others by their updates alone::

    python examples/flower/adversary.py
"""

import fedclade
from fedclade.flower import LocalGrid, LocalNode, Network, client_app, federate

CLIENTS, LIAR = 4, 3


def main() -> fedclade.Run:
    """Run CFL on the four clients; return the run."""
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
