"""Fixtures of tests/support, for every test below."""

from tests.support.core.paths import at_random, from_table, grown, path_draft, paths
from tests.support.lab.toys import make_traces, tiny_pair, toy_bench, toy_draft, toy_logits

__all__ = ["at_random", "from_table", "grown", "make_traces", "path_draft", "paths", "tiny_pair", "toy_bench"]
__all__ += ["toy_draft", "toy_logits"]
