"""The installed method is known by its name, and finds clusters that are there: pytest."""

import fedclade
from fedclade.core import installed


def test_the_package_registers_its_names() -> None:
    """As fedclade ls lists them."""
    assert "update_kmeans" in installed("algorithms")


def test_the_method_finds_the_clusters() -> None:
    """Clients of two kinds, which the method is not told."""
    federation = fedclade.load_federation(
        "digits", clients=8, shift="label_permutation", clusters=2
    )
    run = fedclade.simulate("update_kmeans", "mlp", federation, rounds=2)
    assert run.summary["clusters"]["ari"] == 1.0
