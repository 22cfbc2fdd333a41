"""Many requests that are aborted, retracted, prefilled in chunks and given each other's slots, at random.

Nothing may be lost, every text must be plain decoding's, and the statistics of every draft token, the relayed one of a
draft's first token among them, must be those of a recomputation. `make soak` runs it with 10,000 requests instead.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from c2t_plugin.engines.server_process import ServerError  # noqa: E402
from c2t_plugin.engines.sglang.cpu_engine.server import CpuServer  # noqa: E402
from c2t_plugin.pair import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.traces import load_traces  # noqa: E402
from tests.engines.sglang import verify_counts as vc  # noqa: E402
from tests.engines.sglang.simulate import Target, load_draft  # noqa: E402

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "2000"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
AT_A_TIME = 16
D_MAX = 4
LONGEST = 24
ABORTED = 0.15
# A server sums in another order than the recomputation; float32 over some hundred terms.
TOLERANCE = 1e-3
# Of the scheduler, over the second half of the requests; a tensor of each request's that stayed would be more.
GROWTH = 96 * 2**20


@pytest.fixture(scope="module")
def texts() -> SimpleNamespace:
    """Prompts, how plain decoding continues them, and the statistics and labels of the draft at every token of that."""
    target = Target(pair_dir() / "target")
    draft = load_draft(pair_dir(), vc.DRAFTS["eagle3"], target)
    lengths = [4, 9, 20, 33, 47, 64, 81, 100, 127, 150, 190, 230]
    pool = [token for prompt in held_out_prompts(24, min_tokens=96, seed=13) for token in prompt]
    prompts = [pool[200 * i : 200 * i + length] for i, length in enumerate(lengths)]
    plain = [target.greedy(prompt, LONGEST + D_MAX + 1) for prompt in prompts]
    stats, labels = [], []
    for prompt, text in zip(prompts, plain, strict=True):
        _, states = target.run([*prompt, *text])
        rows = []
        for step in range(LONGEST):
            n = len(prompt) + step
            features = draft.features([state[:n] for state in states])
            logits = draft.chain([*prompt, *text[: step + 1]], features, D_MAX)
            log_probs = logits.double().log_softmax(-1).sort(descending=True).values
            largest = log_probs[:, :1000]
            entropy = -(largest.exp() * largest).sum(-1)
            margin = log_probs[:, 0] - log_probs[:, 1]
            rows.append(torch.stack([log_probs[:, 0].cumsum(0), log_probs[:, 0], entropy, margin], dim=-1))
            same = [a == b for a, b in zip(logits.argmax(-1).tolist(), text[step + 1 :], strict=False)]
            labels.append(torch.tensor(same).int().cumprod(0).bool())
        stats.append(torch.stack(rows))
    return SimpleNamespace(
        prompts=prompts,
        plain=plain,
        stats=torch.stack(stats),
        labels=torch.stack(labels).view(len(prompts), LONGEST, D_MAX),
    )


def scheduler(server: CpuServer) -> psutil.Process:
    assert server.process is not None
    family = psutil.Process(server.process.pid).children(recursive=True)
    return next(process for process in family if "scheduler" in " ".join(process.cmdline()))


def one(server: CpuServer, texts: SimpleNamespace, number: int) -> tuple[int, int, list[int] | None, int]:
    """Prompt, tokens asked for, what came (None if it was to be aborted) and retractions of one random request."""
    chance = random.Random(f"{SEED} {number}")
    which, wanted = chance.randrange(len(texts.prompts)), chance.randint(2, LONGEST)
    rid = f"soak-{number}"
    params = {"temperature": 0.0, "max_new_tokens": wanted, "ignore_eos": True}
    payload = {"input_ids": texts.prompts[which], "rid": rid, "sampling_params": params}
    if chance.random() >= ABORTED:
        answer = server.request("/generate", payload)
        return which, wanted, answer["output_ids"], answer["meta_info"]["num_retractions"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.request, "/generate", payload)
        time.sleep(chance.random() * 0.3)
        server.request("/abort_request", {"rid": rid})
        try:
            asked.result()
        except ServerError as error:
            # aborted before it was scheduled
            assert "was answered with" in str(error)
    return which, wanted, None, 0


@pytest.fixture(scope="module")
def soaked(texts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("soak")
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    options = {
        "C2T_TRACE_DIR": str(folder / "traces"),
        "C2T_TRACE_SHARE": "1.0",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "17",
    }
    with CpuServer(
        pair_dir() / "target",
        *("--speculative-algorithm", "C2T", "--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS["eagle3"])),
        *("--speculative-num-steps", str(D_MAX), "--speculative-c2t-classifier", str(classifier)),
        *("--speculative-c2t-beta", str(vc.BETA), "--chunked-prefill-size", "64", "--enable-mixed-chunk"),
        # the server's own first request would be recorded too
        *("--max-running-requests", "9", "--skip-server-warmup"),
        log=folder / "server.log",
        env={**os.environ, **options},
    ) as server:
        process = scheduler(server)
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            half = REQUESTS // 2
            found = list(pool.map(lambda number: one(server, texts, number), range(half)))
            before = process.memory_info().rss
            found += pool.map(lambda number: one(server, texts, number), range(half, REQUESTS))
        grown = process.memory_info().rss - before
        server.flush_cache()
        state = server.request("/get_server_info")["internal_states"][0]["c2t"]
        process.parent().send_signal(signal.SIGTERM)
        psutil.wait_procs([process], timeout=120)
        yield SimpleNamespace(found=found, grown=grown, state=state, traces=folder / "traces", log=server.log)


def test_every_answer_is_plain_decodings(texts: SimpleNamespace, soaked: SimpleNamespace):
    answered = [each for each in soaked.found if each[2] is not None]
    wrong = [which for which, wanted, ids, _ in answered if ids != texts.plain[which][:wanted]]
    assert wrong == []
    assert len(soaked.found) == REQUESTS
    assert REQUESTS / 2 < len(answered) < REQUESTS
    assert sum(retractions for *_, retractions in answered) > 0


def test_every_statistic_is_that_of_a_recomputation(texts: SimpleNamespace, soaked: SimpleNamespace):
    traces = load_traces(soaked.traces)
    written = torch.stack([getattr(traces.chain, name) for name in ("joint_log_prob", "log_prob", "entropy", "margin")])
    rows = written.movedim(0, -1)
    assert len(traces.first) >= sum(1 for _, wanted, ids, _ in soaked.found if ids is not None and wanted > D_MAX + 3)
    for number in traces.prompt.unique():
        mine = traces.prompt == number
        steps = traces.step[mine].long()
        errors = (texts.stats[:, steps] - rows[mine]).abs().flatten(1).amax(1)
        best = int(errors.argmin())
        assert errors[best] < TOLERANCE
        assert torch.equal(traces.chain.accepted[mine], texts.labels[best, steps])


def test_nothing_is_left_behind(soaked: SimpleNamespace):
    assert soaked.grown < GROWTH
    assert soaked.state["non_finite"] == 0
    assert soaked.state["traces"]["dropped"] == 0
    log = soaked.log.read_text(errors="replace")
    assert "Scheduler hit an exception" not in log
    assert "leak" not in log.lower()
