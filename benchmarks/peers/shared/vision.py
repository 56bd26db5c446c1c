"""Make torchvision importable if its build does not match that of torch.

pip may find a CPU build of torch, but no CPU build of torchvision. The operators of another build
cannot be loaded, and torchvision uses two of them when it is imported. The peers that import
torchvision do not call these operators here, so it is enough to declare their names.
"""

import torch

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401
