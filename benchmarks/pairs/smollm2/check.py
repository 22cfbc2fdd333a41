"""The prepared pair on stock SGLang's CPU engine: answers with the head equal those without, and the accept length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu_engine.server import CpuServer
from benchmarks.pairs.smollm2.evaluate import GAMMA, NEW_TOKENS
from benchmarks.serving.arms import ARMS, Speculation
from benchmarks.serving.engines import ENGINES


def check_served(pair: Path, prompts: Sequence[Sequence[int]], log: Path) -> dict[str, Any]:
    """Serve prompts (token ids) greedily in fp32, plain and with a static chain of GAMMA.

    accepted: draft tokens per verify step, bonus excluded.
    """
    plain = _answers(CpuServer(pair / "target", log=log), prompts)
    engine = ENGINES["sglang"]
    chain = engine.flags(ARMS[f"static {GAMMA}"].options(engine.name, Speculation(pair / "eagle3")))
    drafted = _answers(CpuServer(pair / "target", *chain, log=log), prompts)
    equal = sum(a["output_ids"] == b["output_ids"] for a, b in zip(plain, drafted, strict=True))
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in drafted)
    # the first token comes from the prompt's pass, and every verify step adds its bonus
    tokens = sum(answer["meta_info"]["completion_tokens"] - 1 for answer in drafted)
    return {"prompts": len(prompts), "equal": equal, "verify_steps": steps, "accepted": round(tokens / steps - 1, 3)}


def _answers(server: CpuServer, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    with server:
        return server.generate_all(prompts, max_new_tokens=NEW_TOKENS)
