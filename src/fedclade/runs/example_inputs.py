"""Compatibility of inputs with example-level privacy.

No example may change the inputs of another example.
"""

from __future__ import annotations

from fedclade.channel import ExamplePrivacy, Mechanism
from fedclade.core import ConfigError
from fedclade.data import Federation

LEVEL = "privacy.level = 'example' bounds what one example tells, and"


def check_inputs_apart(
    privacy: Mechanism | None, federation: Federation, *, agreed: bool = False
) -> None:
    """Check, for example-level privacy, that no example changes the inputs of another example.

    DP-SGD clips the gradient of each example separately. If an example also changes the mean that
    scales all examples of its client, or the vocabulary, it changes every gradient, and the noise
    no longer hides it.

    Parameters
    ----------
    privacy
        Privacy mechanism of the run; None without privacy.
    federation
        The clients' data.
    agreed
        Whether texts are encoded by a schema from outside, rather than one made from these texts.

    Raises
    ------
    ConfigError
        If privacy is at example level, and an example changes the inputs of others.
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
    """Return the error for private examples with inputs scaled by their own client."""
    return (
        f"{LEVEL} with standardize = {standardize!r} it moves the mean and the deviation that all "
        "examples of its client are scaled by; set standardize = 'none' and scale by numbers that "
        "are known beforehand, or set privacy.level = 'client'"
    )
