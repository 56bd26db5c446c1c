"""What all tests share: one thread, and no deadlines, so that a busy machine changes nothing."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fedclade", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fedclade")
