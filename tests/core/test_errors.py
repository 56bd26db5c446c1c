from __future__ import annotations

import pytest

from fedclade.core import errors


def test_every_error_is_a_fedclade_error():
    for name in (
        "ConfigError",
        "DataError",
        "ModelError",
        "UpdateError",
        "RunError",
        "MissingExtraError",
    ):
        assert issubclass(getattr(errors, name), errors.FedcladeError)


def test_a_missing_extra_says_how_to_install_it():
    text = r"reading parquet needs the package 'datasets'; install it with: pip install 'fedclade\[data\]'"
    with pytest.raises(ImportError, match=text):
        raise errors.MissingExtraError("datasets", "data", "reading parquet")


def test_require_passes_what_holds_and_names_all_that_does_not():
    errors.require(("a", 1, True, "at least 1"))
    with pytest.raises(ValueError, match="a should be at least 1, got 0\nc should be 'x', got 'y'"):
        errors.require(
            ("a", 0, False, "at least 1"), ("b", 1, True, "at least 1"), ("c", "y", False, "'x'")
        )


def test_unknown_suggests_the_nearest_and_lists_all():
    assert (
        errors.unknown("model", "mpl", ["mlp", "cnn"])
        == "unknown model 'mpl'; did you mean 'mlp'? (known: cnn, mlp)"
    )
    assert errors.unknown("model", "zzz", ["mlp", "cnn"]) == "unknown model 'zzz' (known: cnn, mlp)"
