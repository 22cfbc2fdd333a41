"""Views of tensors that lie apart in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def apart(tensor: Tensor) -> Tensor:
    """The same values as every other entry of the first axis of a larger tensor, whose other entries differ."""
    other = ~tensor if tensor.dtype == torch.bool else tensor + 1
    view = torch.stack([tensor, other], dim=1)[:, 0]
    assert len(tensor) < 2 or not view.is_contiguous()
    return view
