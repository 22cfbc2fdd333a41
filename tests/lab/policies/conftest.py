"""Fixtures of tests/support/core, for every test below."""

from tests.support.core.paths import at_random, from_table, grown, path_draft, paths

__all__ = ["at_random", "from_table", "grown", "path_draft", "paths"]
