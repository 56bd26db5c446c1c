"""Makes torchvision importable where pip finds a CPU build of torch, but none of torchvision.

The other build's operators do not load, and torchvision asks for two of them when it is imported. The peers that import
torchvision call neither here, so that their names alone are enough.
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
