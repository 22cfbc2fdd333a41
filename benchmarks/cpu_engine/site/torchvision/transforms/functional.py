"""Names that SGLang and transformers import from torchvision.transforms.functional."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn


class InterpolationMode(Enum):
    """The modes that transformers maps to PIL's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(*_args: object, **_kwargs: object) -> NoReturn:
    """Always raises: there is no image support here."""
    raise RuntimeError("torchvision is C2T's stub here, it cannot read images: use a text model on the CPU engine")
