"""Fixtures of tests/support/sglang, for every test below."""

from tests.support.sglang.stub_kernels import sgl_kernel

__all__ = ["sgl_kernel"]
