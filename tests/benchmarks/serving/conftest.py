"""Fixtures of tests/support/lab, for every test below."""

from tests.support.lab.toys import make_traces

__all__ = ["make_traces"]
