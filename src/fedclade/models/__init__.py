"""Models by name, adapters, and the parts of a model.

Runs, the network and reports import it; it imports :mod:`fedclade.core` alone.
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
