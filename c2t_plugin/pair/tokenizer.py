"""The pair's byte-level BPE tokenizer and the prompts that ship with it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from c2t_plugin.pair.corpus import SourceFile

END = "<|endoftext|>"
END_ID = 0
# A code model knows no roles: messages are joined as plain text, each on lines of its own.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ '\\n' }}{% endfor %}"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with `vocab_size` entries; END has id END_ID. Any text survives encode and decode unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into a checkpoint directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def encode_files(tokenizer: Tokenizer, files: Iterable[SourceFile]) -> np.ndarray:
    """All files as one stream, int16 [tokens]; END follows each file."""
    encodings = tokenizer.encode_batch([source.text for source in files])
    return np.concatenate([np.array([*encoding.ids, END_ID], dtype=np.int16) for encoding in encodings])


def cut_prompts(
    tokenizer: Tokenizer, files: Iterable[SourceFile], count: int, min_tokens: int, max_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """count prompts of min_tokens..max_tokens tokens that start at line starts of the files, spread over them evenly.

    Each is {"file", "text", "ids"}; text encodes to exactly ids.
    """
    rng = random.Random(seed)
    lines = {source.path: source.text.splitlines(keepends=True) for source in files}
    paths = [path for path, content in lines.items() if len(content) >= 20]
    prompts: list[dict[str, Any]] = []
    while len(prompts) < count:
        path = paths[len(prompts) % len(paths)]
        start = rng.randrange(len(lines[path]) - 10)
        head = tokenizer.encode("".join(lines[path][start : start + 40])).ids[: rng.randint(min_tokens, max_tokens)]
        text = tokenizer.decode(head)
        # a cut inside a word or a character may encode differently; such a cut is drawn again
        if len(head) >= min_tokens and tokenizer.encode(text).ids == head:
            prompts.append({"file": path, "text": text, "ids": head})
    return prompts
