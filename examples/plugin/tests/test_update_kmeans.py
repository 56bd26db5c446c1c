"""Tests of the package: fedclade finds the installed method by name, and it finds true clusters."""

import fedclade
from fedclade.core import installed


def test_the_package_registers_its_names() -> None:
    """The algorithm of the package is known by its name."""
    assert "update_kmeans" in installed("algorithms")


def test_the_method_finds_the_clusters() -> None:
    """The method finds two groups of clients, which it does not know."""
    federation = fedclade.load_federation(
        "digits", clients=8, shift="label_permutation", clusters=2
    )
    run = fedclade.simulate("update_kmeans", "mlp", federation, rounds=2)
    assert run.summary["clusters"]["ari"] == 1.0
