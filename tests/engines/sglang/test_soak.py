"""Many requests that are aborted, retracted, prefilled in chunks and given each other's slots, at random. Every fifth
client sends what nobody should, the folder of the traces vanishes and its disk fills.

Nothing of the others may be lost, every text must be plain decoding's, the statistics of every draft token, the relayed
one of a draft's first token among them, must be those of a recomputation, and memory must not grow. `make soak` runs it
with 10,000 requests instead.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import pair_dir  # noqa: E402
from c2t_plugin.traces.file import SUFFIX, Traces, load_traces, merge_traces  # noqa: E402
from tests.support.sglang import disk_trouble, faults, soak  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.soak import D_MAX, HOSTILE_EVERY, Served, Soak  # noqa: E402

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "2000"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
AT_A_TIME = 16
# Memory is looked at after each of them.
PARTS = 10
CHUNK = 64
RUNNING = 9
# Tokens in the cache: for a few of those that run, so that every place is taken again and again and some are retracted.
PLACES = 1536
# A server sums in another order than the recomputation; float32 over some hundred terms.
TOLERANCE = 1e-3
# Of each process over the second half of the requests, however many there are. The hidden states of one prompt, were
# they kept, are 90 KiB on average. Measured: 1.6 MiB in the scheduler over 5,000 requests.
GROWTH = 8 * 2**20


@pytest.fixture(scope="module")
def texts() -> SimpleNamespace:
    return soak.make_texts()


@pytest.fixture(scope="module")
def soaked(texts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("soak")
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    (folder / "plugins").mkdir()
    plugins = str(faults.install(folder / "plugins", disk_trouble.__file__))
    options = {
        "C2T_TRACE_DIR": str(folder / "traces"),
        "C2T_TRACE_PRECISION": "exact",
        "C2T_TRACE_SHARE": "1.0",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "7",
        "PYTHONPATH": os.pathsep.join(filter(None, [plugins, os.environ.get("PYTHONPATH")])),
        disk_trouble.FULL_DISK: str(folder / "full"),
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
        trouble = disk_trouble.Trouble(folder / "traces", folder / "full", folder / "away")
        trouble.start()
        clients = Soak(server, texts, SEED)
        for part in range(PARTS):
            clients.run(range(part * REQUESTS // PARTS, (part + 1) * REQUESTS // PARTS), AT_A_TIME)
        trouble.end()
        server.flush_cache()
        trouble.wait_until_written()
        info = server.request("/get_server_info")
        state = info["internal_states"][0]["c2t"]
        main, *others = soak.family(server)
        main.send_signal(signal.SIGTERM)
        psutil.wait_procs(others, timeout=120)
        yield SimpleNamespace(
            clients=clients, trouble=trouble, info=info, state=state, traces=found(trouble), log=server.log
        )


def found(trouble: disk_trouble.Trouble) -> Traces:
    return merge_traces([load_traces(path) for path in trouble.files(SUFFIX)])


def answered(soaked: SimpleNamespace) -> list[Served]:
    return [each for each in soaked.clients.served if each.ids is not None]


def test_every_answer_is_plain_decodings(texts: SimpleNamespace, soaked: SimpleNamespace):
    asked = REQUESTS - soaked.clients.hostile
    assert [each for each in answered(soaked) if each.ids != texts.plain[each.which][: each.wanted]] == []
    assert len(soaked.clients.served) == asked + sum(each.again for each in soaked.clients.served)
    assert asked / 2 < len(answered(soaked)) < len(soaked.clients.served)


def test_whoever_is_hostile_is_refused_and_changes_nothing(soaked: SimpleNamespace):
    assert soaked.clients.complaints == []
    assert soaked.clients.hostile == REQUESTS // HOSTILE_EVERY
    assert soaked.state["beta"] == pytest.approx(vc.BETA) and soaked.state["max_depth"] == D_MAX


def test_every_kind_of_event_happened(soaked: SimpleNamespace):
    served = soaked.clients.served
    assert sum(each.retractions for each in served) > REQUESTS / 200
    assert sum(each.stopped for each in served) > REQUESTS / 50, "hardly any abort met a running request"
    assert sum(each.again for each in served) > REQUESTS / 50, "hardly any id came again"
    assert len(soaked.trouble.happened) == 3, "not all happened to the folder"
    line = re.compile(r"Prefill batch.*?#new-token: (\d+),.*?#running-req: (\d+),")
    batches = [(int(new), int(running)) for new, running in line.findall(soaked.log.read_text(errors="replace"))]
    # with mixed chunks a running request takes one token of the batch; a prompt ends where the batch is full
    full = sum(new + running == CHUNK for new, running in batches)
    assert full > REQUESTS * soak.UNCACHED / 4, "hardly any prompt was prefilled in chunks"
    assert max(new + running for new, running in batches) == CHUNK
    assert soaked.info["max_total_num_tokens"] == PLACES
    assert sum(new for new, _ in batches) > PLACES * REQUESTS / 400, "hardly a place was taken again"
    assert soaked.info["max_running_requests"] == RUNNING


def test_every_statistic_is_that_of_a_recomputation(texts: SimpleNamespace, soaked: SimpleNamespace):
    traces = soaked.traces
    written = torch.stack([getattr(traces.chain, name) for name in ("joint_log_prob", "log_prob", "entropy", "margin")])
    rows = written.movedim(0, -1)
    # one that is stopped late is longer than the texts
    known = traces.step < soak.LONGEST
    assert known.float().mean() > 0.5
    for number in traces.prompt[known].unique():
        mine = known & (traces.prompt == number)
        steps = traces.step[mine].long()
        errors = (texts.stats[:, steps] - rows[mine]).abs().flatten(1).amax(1)
        best = int(errors.argmin())
        assert errors[best] < TOLERANCE
        assert torch.equal(traces.chain.accepted[mine], texts.labels[best, steps])


def test_what_the_disk_did_not_take_is_counted_and_all_else_is_there(soaked: SimpleNamespace):
    told = soaked.state["traces"]
    # of a file that vanished as it was written the server cannot say that it is there
    assert told["recorded"] <= len(soaked.traces) <= told["recorded"] + told["dropped"]
    assert told["recorded"] + told["dropped"] >= sum(each.wanted > D_MAX + 3 for each in answered(soaked))
    assert 0 < told["dropped"] < told["recorded"]
    assert told["failed"] == 0


def test_nothing_is_left_behind(soaked: SimpleNamespace):
    sizes = list(soaked.clients.memory.values())
    before, after = sizes[PARTS // 2 - 1], sizes[-1]
    grown = {name: size - before[name] for name, size in after.items()}
    for name in after:
        print(name, "MiB:", *(f"{each[name] / 2**20:.1f}" for each in sizes))
    assert set(before) == set(after) and max(grown.values()) < GROWTH
    assert soaked.state["non_finite"] == 0
    log = soaked.log.read_text(errors="replace")
    assert "Scheduler hit an exception" not in log
    assert "leak" not in log.lower()
