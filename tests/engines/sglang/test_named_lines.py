"""The lines of SGLang's that refusals name are those that are in the way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

import sglang  # noqa: E402

from c2t_plugin.engines.sglang import validate  # noqa: E402
from c2t_plugin.engines.sglang.verify import choice, one_length  # noqa: E402

NAMED_OF = "0.5.23"
# What is in the line that is named: below srt or srt/layers/attention.
LINES = {
    "arg_groups/lora_hook.py:253": "not in lora_spec_algorithms",
    "batch_overlap/two_batch_overlap.py:72": "return spec_info.draft_token_num",
    "linear/gdn_backend.py:1042": "batch_size = seq_len // forward_batch.spec_info.draft_token_num",
    "mamba/mamba.py:670": "num_decodes, draft_token_num, -1",
    "dsa_backend.py:1101": "draft_token_num = self.speculative_num_draft_tokens",
    "flashattention_backend.py:1083": "self._maybe_init_local_attn_metadata(metadata, device)",
}


def test_every_place_that_is_named_is_looked_up():
    texts = [reason for *_, reason in validate._REFUSED]
    texts += [Path(module.__file__).read_text(encoding="utf-8") for module in (choice, one_length)]
    assert set(re.findall(r"[\w/]+\.py:\d+", " ".join(texts))) == LINES.keys()


@pytest.mark.skipif(sglang.__version__ != NAMED_OF, reason=f"lines are those of SGLang {NAMED_OF}")
@pytest.mark.parametrize("place", LINES)
def test_the_line_is_in_the_way(place: str):
    name, _, number = place.partition(":")
    srt = Path(sglang.__file__).parent / "srt"
    file = next(each for each in (srt / name, srt / "layers" / "attention" / name) if each.exists())
    assert LINES[place] in file.read_text(encoding="utf-8").splitlines()[int(number) - 1]
