"""Models by name, low-rank adapters, and parts of a model that are frozen, personal or common.

Runs, the network and reports import this package. Of fedclade's other packages, it imports only
:mod:`fedclade.core`.
"""

from fedclade.models.build import FROM_DATA, MODELS, Model, build_model, check_widths, model_factory
from fedclade.models.lora import LoRA, LoRALinear, load_adapter, save_adapter
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
