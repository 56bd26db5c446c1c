"""Which inputs example-level privacy can go with: those of one example that no other example moves."""

from __future__ import annotations

from fedclade.channel import ExamplePrivacy, Mechanism
from fedclade.core import ConfigError
from fedclade.data import Federation

LEVEL = "privacy.level = 'example' bounds what one example tells, and"


def check_inputs_apart(
    privacy: Mechanism | None, federation: Federation, *, agreed: bool = False
) -> None:
    """Check that no example moves the inputs of another one of its client, where examples are private.

    DP-SGD clips the gradient of each example by itself. If the example also moves the mean that all
    are scaled by, or the vocabulary, it moves every gradient, and the noise hides that no longer.

    Parameters
    ----------
    agreed
        Whether texts are encoded by a schema that came from elsewhere.

    Raises
    ------
    ConfigError
        If it does.
    """
    if not isinstance(privacy, ExamplePrivacy):
        return
    columns = federation.pool.columns
    encoding = federation.encoding
    if columns is not None and columns.scaled_by_client:
        raise ConfigError(by_own_examples("client"))
    has_own_words = (
        encoding is not None and bool(encoding.schema.words) and not encoding.is_declared
    )
    if has_own_words and not agreed:
        raise ConfigError(
            f"{LEVEL} with a vocabulary of the clients' own texts it moves the words of all "
            "examples; declare a schema with the words (data.schema in a config, schema= in "
            "Python), or set privacy.level = 'client'"
        )


def by_own_examples(standardize: str) -> str:
    """Return why inputs that are scaled by a client's own examples do not go with private examples."""
    return (
        f"{LEVEL} with standardize = {standardize!r} it moves the mean and the deviation that all "
        "examples of its client are scaled by; set standardize = 'none' and scale by numbers that "
        "are known beforehand, or set privacy.level = 'client'"
    )
