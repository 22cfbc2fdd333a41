"""torchvision.transforms.v2, of which only the module `functional` is imported."""

from . import functional

__all__ = ["functional"]
