"""Compatibility of the clients' inputs with example-level differential privacy.

Example-level privacy hides the influence of a single example. It requires that no example changes
the model inputs that are computed from another example, for example by changing a mean that is
subtracted from all inputs.
"""

from __future__ import annotations

from fedclade.channel import ExamplePrivacy, Mechanism
from fedclade.core import ConfigError
from fedclade.data import Federation

PRIVATE_CLIENTS = "with [privacy] clients disclose no sums of their data"
"""Reason, for a warning, that inputs and targets are not scaled by default."""

LEVEL = "privacy.level = 'example' bounds the influence of a single example, but"
"""Beginning of the errors about inputs that depend on other examples."""


def check_inputs_apart(
    privacy: Mechanism | None, federation: Federation, *, agreed: bool = False
) -> None:
    """Check, for example-level privacy, that no example changes the inputs of another example.

    DP-SGD clips the gradient of each example separately, and adds noise that hides one clipped
    gradient. If an example also changes the mean by which all examples of its client are scaled, or
    the vocabulary, it changes every gradient, and the noise no longer hides the example.

    Parameters
    ----------
    privacy
        Privacy mechanism of the run; None without privacy.
    federation
        The clients' data.
    agreed
        Whether texts are encoded by a given schema, rather than a schema made from these texts.

    Raises
    ------
    ConfigError
        If privacy is at example level, and an example can change the inputs of other examples.
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
            f"{LEVEL} with a vocabulary made from the clients' own texts, an example can change "
            "the encoding of all other examples; declare a schema with the words (data.schema in a "
            "config, schema= in Python), or set privacy.level = 'client'"
        )


def by_own_examples(standardize: str) -> str:
    """Return the error text for example-level privacy with inputs that each client scales itself.

    Parameters
    ----------
    standardize
        Value of the setting ``data.standardize``, such as ``client``.
    """
    return (
        f"{LEVEL} with standardize = {standardize!r}, an example changes the mean and the standard "
        "deviation by which all examples of its client are scaled; set standardize = 'none' and "
        "scale by numbers that are known beforehand, or set privacy.level = 'client'"
    )
