"""Random requests to one server, many at a time, and what each has to be answered with."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import torch

from benchmarks.cpu_engine.server import CpuServer
from benchmarks.pairs.toy import held_out_prompts, pair_dir
from benchmarks.serving.process import ServerError
from tests.support.sglang import hostile_clients
from tests.support.sglang import verify_counts as vc
from tests.support.sglang.simulate import Target, load_draft

D_MAX = 4
LONGEST = 24
# Of those that are stopped, so that they still run when the abort arrives.
STREAMED = 96
ABORTED = 0.15
# Of the aborted ones, those that come again under their id, with another prompt. Not of those that were streamed:
# SGLang ends what runs under such an id two seconds after the stream, whosever it is.
AGAIN = 0.8
# With a prefix of their own, so that all of their prompt is prefilled.
UNCACHED = 0.3
# With settings of their own, good ones.
SETS_SOMETHING = 0.15
HOSTILE_EVERY = 5
GOOD_SETTINGS = (
    {"enabled": False},
    {"beta": 0.0},
    {"beta": 1.0},
    {"max_depth": 0},
    {"max_depth": 2},
    {"max_depth": 99},
)


def make_texts() -> SimpleNamespace:
    """Prompts, how plain decoding continues them, and the draft's statistics and labels at the first LONGEST tokens."""
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


class Served(NamedTuple):
    """One request. which, wanted: prompt, and tokens asked for. ids: what came, None if it was to be aborted. stopped:
    whether that met it while it ran. again: whether it came under the id of an aborted one."""

    which: int
    wanted: int
    ids: list[int] | None
    retractions: int = 0
    stopped: bool = False
    again: bool = False


class Soak:
    """What one client after the other does, each known by its number. complaints: of hostile ones, what was answered
    that should not be."""

    def __init__(self, server: CpuServer, texts: SimpleNamespace, seed: int) -> None:
        self.served: list[Served] = []
        self.hostile = 0
        self.complaints: list[str] = []
        self.memory: dict[int, dict[str, int]] = {}
        self._server, self._texts, self._seed = server, texts, seed

    def run(self, numbers: range, at_a_time: int) -> None:
        with ThreadPoolExecutor(at_a_time) as pool:
            for found in pool.map(self._one, numbers):
                if isinstance(found, str):
                    self.hostile += 1
                    self.complaints += [found] if found else []
                else:
                    self.served += found
        self.memory[numbers.stop] = {process.name(): process.memory_info().rss for process in family(self._server)}

    def _one(self, number: int) -> list[Served] | str:
        chance = random.Random(f"{self._seed} {number}")
        if number % HOSTILE_EVERY == 0:
            return hostile_clients.send(self._server, hostile_clients.one_of_them(chance))
        # SGLang aborts every request whose name begins with the given one
        rid = f"soak-{number:09d}"
        if chance.random() >= ABORTED:
            return [self._answered(chance, rid)]
        if chance.random() < 0.5:
            return [self._stopped(chance, rid)]
        aborted = [self._aborted(chance, rid)]
        if chance.random() < AGAIN:
            aborted.append(self._answered(chance, rid)._replace(again=True))
        return aborted

    def _payload(self, chance: random.Random, rid: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
        which = chance.randrange(len(self._texts.prompts))
        params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": chance.randint(2, LONGEST), "ignore_eos": True}
        if chance.random() < SETS_SOMETHING:
            params["custom_params"] = {"c2t": chance.choice(GOOD_SETTINGS)}
        payload = {"input_ids": self._texts.prompts[which], "rid": rid, "sampling_params": params}
        if chance.random() < UNCACHED:
            payload["extra_key"] = rid
        return which, params, payload

    def _answered(self, chance: random.Random, rid: str) -> Served:
        which, params, payload = self._payload(chance, rid)
        answer = self._server.request("/generate", payload)
        return Served(which, params["max_new_tokens"], answer["output_ids"], answer["meta_info"]["num_retractions"])

    def _aborted(self, chance: random.Random, rid: str) -> Served:
        which, params, payload = self._payload(chance, rid)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self._server.request, "/generate", payload)
            time.sleep(chance.random() * 0.3)
            self._server.request("/abort_request", {"rid": rid})
            try:
                asked.result()
            except ServerError as error:
                # aborted before it was scheduled
                assert "was answered with" in str(error)
        return Served(which, params["max_new_tokens"], None)

    def _stopped(self, chance: random.Random, rid: str) -> Served:
        """Aborted once its first tokens have come."""
        which, params, payload = self._payload(chance, rid)
        params["max_new_tokens"] = STREAMED
        body = json.dumps({**payload, "stream": True}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self._server.base_url}/generate", body, headers)
        with urllib.request.urlopen(asked, timeout=600) as answer:
            metas = (json.loads(line[6:])["meta_info"] for line in answer if line.startswith(b"data: {"))
            first = next(metas)
            self._server.request("/abort_request", {"rid": rid})
            *_, last = first, *metas
        midway = last["finish_reason"]["type"] == "abort" and 0 < last["completion_tokens"] < STREAMED
        return Served(which, STREAMED, None, stopped=midway)


def family(server: CpuServer) -> list[psutil.Process]:
    """The server's processes, but for Python's own helpers."""
    assert server.process is not None
    main = psutil.Process(server.process.pid)
    return [
        each for each in (main, *main.children(recursive=True)) if "resource_tracker" not in " ".join(each.cmdline())
    ]
