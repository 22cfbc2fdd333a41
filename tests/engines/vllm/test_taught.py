"""What a planner is taught on vLLM: of every draft all that the text says of it, though most of it was cut."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from tests.engines.vllm.conftest import Engine  # noqa: E402
from tests.engines.vllm.test_network_learning import PAYS  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

D_MAX, PROMPTS, NEW_TOKENS = 4, 4, 32


@pytest.mark.slow
def test_a_draft_teaches_all_that_the_text_says_of_it(engine: Engine, tmp_path: Path):
    from vllm import SamplingParams

    write_curve(PAYS, tmp_path / "curve.json")
    target = Target(pair_dir() / "target")
    prompts = [ids[:64] for ids in held_out_prompts(PROMPTS, min_tokens=96, seed=21)]
    plain = [list(target.greedy(prompt, NEW_TOKENS)) for prompt in prompts]
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    # the last one wants nothing learnt of it
    sampling = [SamplingParams(**greedy, extra_args={"c2t_learn": 0} if last else None) for last in (0, 0, 0, 1)]
    with engine("c2t:eagle3", D_MAX, c2t_planner=str(tmp_path / "curve.json"), c2t_learn="calibrate") as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        planner, update = scheduler.planning.planner, scheduler.update_draft_token_ids
        keep, drafts, taught = planner.keep, list[tuple[str, int, list[int]]](), list[Any]()

        def noted(handed: Any) -> None:
            rows = zip(handed.req_ids, handed.draft_token_ids, strict=True)
            running = ((name, scheduler.requests.get(name), row) for name, row in rows)
            # of a prompt that is not read yet nothing is drafted
            begun = ((name, found, row) for name, found, row in running if found is not None and row)
            drafts.extend((name, len(found.output_token_ids), list(row)) for name, found, row in begun)
            update(handed)

        scheduler.update_draft_token_ids = noted
        planner.keep = lambda kept, own, sure: keep(kept, own, sure).clamp(max=1)
        planner.learn = lambda *outcomes: taught.extend(outcomes)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        scheduler.planning.learn()
    assert [list(each.outputs[0].token_ids) for each in outputs] == plain
    names = [name for name, begins, _ in drafts if begins == 1]
    texts = dict(zip(names, plain, strict=True))
    found = Counter[tuple[str, int, int]]()
    for _, known, hits, owners in taught:
        found.update((own, k, h) for own, k, h in zip(owners, known.tolist(), hits.tolist(), strict=True) if k)
    teaching = [each for each in drafts if each[0] != names[-1]]
    assert len(names) == PROMPTS and len(teaching) < len(drafts)
    expected = Counter((name, *said(texts[name][begins:], row)) for name, begins, row in teaching)
    # of a draft behind the end of a text nothing is known
    assert found == Counter({each: count for each, count in expected.items() if each[1]})
    assert sum(hits > 1 for _, _, hits in found) > 0


def said(text: list[int], drafted: list[int]) -> tuple[int, int]:
    """By the text alone: tokens of a draft that are known, and how many of them it goes on with."""
    agree = [one == other for one, other in zip(drafted, text, strict=False)]
    hits = agree.index(False) if False in agree else len(agree)
    return (len(drafted) if False in agree else hits), hits
