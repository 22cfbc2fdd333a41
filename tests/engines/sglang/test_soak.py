"""Many requests that are aborted, retracted, prefilled in chunks and given each other's slots, at random.

Nothing may be lost, every text must be plain decoding's, and the statistics of every draft token, the relayed one of a
draft's first token among them, must be those of a recomputation. `make soak` runs it with 10,000 requests instead.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from benchmarks.serving.process import ServerError  # noqa: E402
from c2t_plugin.traces.file import load_traces  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target, load_draft  # noqa: E402

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "2000"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
AT_A_TIME = 16
D_MAX = 4
LONGEST = 24
ABORTED = 0.15
# With a prefix of their own, so that all of their prompt is prefilled.
UNCACHED = 0.3
CHUNK = 64
RUNNING = 9
# Tokens in the cache: enough for what runs, and few enough for every place to be taken again and again.
PLACES = 4096
# A server sums in another order than the recomputation; float32 over some hundred terms.
TOLERANCE = 1e-3
# Of the scheduler, over the second half of the requests: it grows by some 10 KiB for each. The hidden states of one
# prompt, were they kept, are 90 KiB on average.
GROWTH = min(96 * 2**20, 8 * 2**20 + REQUESTS // 2 * 24 * 2**10)


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


class Served(NamedTuple):
    """One random request. which, wanted: prompt, and tokens asked for. ids: what came, None if it was to be aborted.
    stopped: whether that met it while it ran."""

    which: int
    wanted: int
    ids: list[int] | None
    retractions: int = 0
    stopped: bool = False


def one(server: CpuServer, texts: SimpleNamespace, number: int) -> Served:
    chance = random.Random(f"{SEED} {number}")
    which, wanted = chance.randrange(len(texts.prompts)), chance.randint(2, LONGEST)
    # SGLang aborts every request whose name begins with the given one
    rid = f"soak-{number:09d}"
    params = {"temperature": 0.0, "max_new_tokens": wanted, "ignore_eos": True}
    payload = {"input_ids": texts.prompts[which], "rid": rid, "sampling_params": params}
    if chance.random() < UNCACHED:
        payload["extra_key"] = rid
    if chance.random() >= ABORTED:
        answer = server.request("/generate", payload)
        return Served(which, wanted, answer["output_ids"], answer["meta_info"]["num_retractions"])
    if chance.random() < 0.5:
        params["max_new_tokens"] = LONGEST
        return Served(which, LONGEST, None, stopped=stopped_midway(server, payload))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.request, "/generate", payload)
        time.sleep(chance.random() * 0.3)
        server.request("/abort_request", {"rid": rid})
        try:
            asked.result()
        except ServerError as error:
            # aborted before it was scheduled
            assert "was answered with" in str(error)
    return Served(which, wanted, None)


def stopped_midway(server: CpuServer, payload: dict[str, Any]) -> bool:
    """Abort a request once its first tokens have come; whether it had not ended by then."""
    body = json.dumps({**payload, "stream": True}).encode()
    asked = urllib.request.Request(f"{server.base_url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=600) as answer:
        metas = (json.loads(line[6:])["meta_info"] for line in answer if line.startswith(b"data: {"))
        first = next(metas)
        server.request("/abort_request", {"rid": payload["rid"]})
        *_, last = first, *metas
    return bool(last["finish_reason"]["type"] == "abort" and 0 < last["completion_tokens"] < LONGEST)


@pytest.fixture(scope="module")
def soaked(texts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("soak")
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    options = {
        "C2T_TRACE_DIR": str(folder / "traces"),
        "C2T_TRACE_PRECISION": "exact",
        "C2T_TRACE_SHARE": "1.0",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "17",
    }
    with CpuServer(
        pair_dir() / "target",
        *("--speculative-algorithm", "C2T", "--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS["eagle3"])),
        *("--speculative-num-steps", str(D_MAX), "--speculative-c2t-classifier", str(classifier)),
        *("--speculative-c2t-beta", str(vc.BETA), "--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk"),
        # the server's own first request would be recorded too
        *("--max-running-requests", str(RUNNING), "--max-total-tokens", str(PLACES), "--skip-server-warmup"),
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
        info = server.request("/get_server_info")
        state = info["internal_states"][0]["c2t"]
        process.parent().send_signal(signal.SIGTERM)
        psutil.wait_procs([process], timeout=120)
        yield SimpleNamespace(
            found=found, grown=grown, info=info, state=state, traces=folder / "traces", log=server.log
        )


def test_every_answer_is_plain_decodings(texts: SimpleNamespace, soaked: SimpleNamespace):
    answered = [each for each in soaked.found if each.ids is not None]
    assert [each for each in answered if each.ids != texts.plain[each.which][: each.wanted]] == []
    assert len(soaked.found) == REQUESTS
    assert REQUESTS / 2 < len(answered) < REQUESTS


def test_every_kind_of_event_happened(soaked: SimpleNamespace):
    """And often: with the 2,000 requests of the ordinary run each one dozens of times."""
    assert sum(each.retractions for each in soaked.found) > REQUESTS / 200
    assert sum(each.stopped for each in soaked.found) > REQUESTS / 50, "hardly any abort met a running request"
    line = re.compile(r"Prefill batch.*?#new-token: (\d+),.*?#running-req: (\d+),")
    batches = [(int(new), int(running)) for new, running in line.findall(soaked.log.read_text(errors="replace"))]
    # with mixed chunks a running request takes one token of the batch; a prompt ends where the batch is full
    full = sum(new + running == CHUNK for new, running in batches)
    assert full > REQUESTS * UNCACHED / 4, "hardly any prompt was prefilled in chunks"
    assert max(new + running for new, running in batches) == CHUNK
    assert soaked.info["max_total_num_tokens"] == PLACES
    assert sum(new for new, _ in batches) > PLACES * REQUESTS / 400, "hardly a place was taken again"
    assert soaked.info["max_running_requests"] == RUNNING


def test_every_statistic_is_that_of_a_recomputation(texts: SimpleNamespace, soaked: SimpleNamespace):
    traces = load_traces(soaked.traces)
    written = torch.stack([getattr(traces.chain, name) for name in ("joint_log_prob", "log_prob", "entropy", "margin")])
    rows = written.movedim(0, -1)
    assert len(traces.first) >= sum(1 for each in soaked.found if each.ids is not None and each.wanted > D_MAX + 3)
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
