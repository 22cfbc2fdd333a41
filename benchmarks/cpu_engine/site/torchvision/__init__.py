"""Stub of torchvision: SGLang 0.5.23 and transformers import it for image models, which the CPU engine never runs.

The published torchvision wheels are built against CUDA torch and fail to import beside a CPU torch. The stub has the
names that are read while SGLang starts; the functions among them refuse to work.
"""

from . import io, transforms

__version__ = "0.0.0+c2t.stub"
__all__ = ["io", "transforms"]
