"""The real target on each stock engine: plain decoding gives transformers' greedy text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.pairs.smollm2 import target
from benchmarks.serving.arms import ARMS, Speculation
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.real_pair import chat_prompts, real_runner
from c2t_plugin.errors import C2TError

pytestmark = [pytest.mark.server, pytest.mark.slow]
TOKENS, PROMPTS = 32, 4


@pytest.mark.parametrize("name", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("sglang", "vllm")])
def test_plain_decoding_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    try:
        target.gguf_path()
    except C2TError as error:
        pytest.skip(str(error))
    from transformers import LlamaForCausalLM

    pair = tmp_path / "pair"
    folder = target.write_target(pair / "target")
    prompts = chat_prompts(folder, "development").batch(0, PROMPTS)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for ids in prompts:
        given = torch.tensor([list(ids)])
        whole = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=TOKENS)
        expected.append(whole[0, len(ids) :].tolist())
    assert len({tuple(each) for each in expected}) == PROMPTS
    engine = ENGINES[name]
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    server = real_runner(engine, pair, out, PROMPTS).server("plain", ARMS["plain"], Speculation(folder))
    with server, engine.client(server.base_url, TOKENS) as client:
        found = client.run(prompts, PROMPTS, lambda: None).completions
    # a benchmark's answers go on behind an end of text
    assert [list(answer.token_ids[: len(text)]) for answer, text in zip(found, expected, strict=True)] == expected
    assert sum(map(len, expected)) > PROMPTS * TOKENS / 2
