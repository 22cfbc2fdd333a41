"""Names that transformers imports from torchvision.io."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn


class ImageReadMode(Enum):
    """The one mode that transformers asks for."""

    RGB = "RGB"


def decode_image(*_args: object, **_kwargs: object) -> NoReturn:
    """Always raises: there is no image support here."""
    raise RuntimeError("torchvision is C2T's stub here, it cannot decode images: use a text model on the CPU engine")
