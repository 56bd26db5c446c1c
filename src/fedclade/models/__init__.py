"""The papers' models as plain modules, and the user's own by ``module:factory``.

Runs, the network and reports import it; it imports :mod:`fedclade.core` alone.
"""

from fedclade.models.build import FROM_DATA, MODELS, Model, build_model, model_factory

__all__ = ["FROM_DATA", "MODELS", "Model", "build_model", "model_factory"]
