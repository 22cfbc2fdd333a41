"""Fixtures of tests/support/lab, for every test below."""

from tests.support.lab.toys import make_traces, tiny_pair, toy_bench, toy_draft, toy_logits

__all__ = ["make_traces", "tiny_pair", "toy_bench", "toy_draft", "toy_logits"]
