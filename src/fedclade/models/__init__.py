"""Models by name, low-rank adapters, and parts of a model that are frozen, personal or common.

Runs, the network and reports import this package. Of fedclade's other packages, it imports only
:mod:`fedclade.core`.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.models.build import (
        FROM_DATA,
        MODELS,
        Model,
        build_model,
        check_widths,
        model_factory,
    )
    from fedclade.models.lora import LoRA, load_adapter, save_adapter
    from fedclade.models.lora_layer import LoRALinear
    from fedclade.models.parts import PARTS, Parts, Preset, freeze

__all__ = [
    "FROM_DATA",
    "MODELS",
    "PARTS",
    "LoRA",
    "LoRALinear",
    "Model",
    "Parts",
    "Preset",
    "build_model",
    "check_widths",
    "freeze",
    "load_adapter",
    "model_factory",
    "save_adapter",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
