"""What arrays of numpy are called in annotations, and a function that numpy has not."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def sigmoid(logits: Array) -> Array:
    """Of any shape, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * logits))
