"""Names that SGLang and transformers import from torchvision.transforms."""

from . import functional, v2
from .functional import InterpolationMode

__all__ = ["InterpolationMode", "functional", "v2"]
