"""One streamed answer on the terminal, with the tokens that the draft contributed set off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

QUESTION = "Explain in a few sentences why the sky is blue."
STYLE = "bold green"
# where a text is shown that has no styles
MARKS = "[", "]"
# what a decoder writes for a character that has not all its bytes yet
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def question(target: Path) -> list[int]:
    """The demo's question as token ids under the target's chat template."""
    words = tokenizer(target)
    asked = words.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=True
    )
    return list(asked["input_ids"])


def tokenizer(target: Path) -> Any:
    """The target's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def spans(pieces: Iterable[Sequence[int]], words: Any) -> Iterator[tuple[str, bool]]:
    """Text, and whether the draft contributed it, of token ids that came together.

    Of a piece all tokens but the last were drafted and accepted; the last is the target's own. A character that both
    share counts as the last one's.
    """
    ids: list[int] = []
    shown = ""
    for piece in pieces:
        for part, from_draft in ((piece[:-1], True), (piece[-1:], False)):
            ids += part
            text = words.decode(ids, skip_special_tokens=True) if part else UNFINISHED
            if not text.endswith(UNFINISHED):
                yield text[len(shown) :], from_draft
                shown = text


def show(pieces: Iterable[Sequence[int]], target: Path, console: Console) -> None:
    """Print an answer while it comes, and how much of it was drafted."""
    drafted = tokens = 0

    def counted() -> Iterator[Sequence[int]]:
        nonlocal drafted, tokens
        for piece in pieces:
            drafted, tokens = drafted + len(piece) - 1, tokens + len(piece)
            yield piece

    for text, from_draft in spans(counted(), tokenizer(target)):
        plain = from_draft and not console.is_terminal
        console.print(
            f"{MARKS[0]}{text}{MARKS[1]}" if plain else text,
            end="",
            style=STYLE if from_draft else None,
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"\n\n{drafted} of {tokens} tokens came from the draft.", highlight=False)
