"""What a client may send where a number, a flag or an object is expected; strategies of hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.sampled_from([2**31, 2**63, -1]),
    st.floats(),
    st.text(),
    st.sampled_from(["nan", "\ud800", "'\"", "x" * 10_000]),
)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
