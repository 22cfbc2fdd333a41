"""JSON of strangers: names that come twice are found without comparing all with all."""

from __future__ import annotations

import pytest

from c2t_plugin import json_text
from c2t_plugin.errors import C2TError


def test_a_name_that_comes_twice_is_named_in_one_line() -> None:
    with pytest.raises(C2TError, match=r"^it is not valid JSON: the name 'a\\\\nb' comes twice$"):
        json_text.parse('{"a\\nb": 1, "c": 2, "a\\nb": 3}', "it")
    assert json_text.parse('{"a": 1, "a": 2}', "it", once=False) == {"a": 2}


def test_many_names_are_compared_a_few_times_each() -> None:
    """A file of a megabyte has 100,000 of them, which took minutes."""
    compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    pairs = [(Name(number), 0) for number in (*range(1_000), 999)]
    with pytest.raises(ValueError, match="the name '999' comes twice"):
        json_text._unique(pairs)
    assert compared < 10 * len(pairs)
