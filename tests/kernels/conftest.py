"""Fixtures of tests/support/kernels, for every test below."""

from tests.support.kernels.interpreted import (
    device,
    interpreted,
    many,
    poisoned_memory,
    pytest_collection_finish,
)

__all__ = ["device", "interpreted", "many", "poisoned_memory", "pytest_collection_finish"]
