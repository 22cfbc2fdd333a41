"""`--speculative-c2t-beta auto` through real servers: a given cost curve decides exactly what a simulation says.

The simulation decides for all requests of a step together, as the server has to, so requests of one test are made to
start in the same step: they wait while a long prompt is read.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from c2t_plugin.engines.sglang.cpu_engine.server import CpuServer  # noqa: E402
from c2t_plugin.pair import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.planner import CostCurve  # noqa: E402
from tests.engines.sglang import verify_counts as vc  # noqa: E402
from tests.engines.sglang.simulate import Draft, Target, load_draft  # noqa: E402

D_MAX = 4
CONCURRENCIES = (1, 8)
# Cheap for one request, dear for eight: at 8 some requests get nothing.
CURVE = CostCurve(verify=((1, 1.0), (4, 1.2), (64, 16.0)), draft=((1, 0.05), (64, 0.1)), fixed=0.1, keep_up=0.1)
# Two choices whose output per second is so near that the rounding of sums decides.
UNDECIDED = 1e-5


def server(folder: Path, classifier: Path, curve: Path, name: str) -> CpuServer:
    return CpuServer(
        pair_dir() / "target",
        *("--speculative-algorithm", "C2T", "--speculative-c2t-base", "eagle3"),
        *("--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS["eagle3"])),
        *("--speculative-num-steps", str(D_MAX), "--speculative-c2t-classifier", str(classifier)),
        *("--speculative-c2t-beta", "auto", "--speculative-c2t-cost-curve", str(curve)),
        "--disable-radix-cache",
        log=folder / f"{name}.log",
    )


@dataclass
class Request:
    """One request of the simulation; text is prompt and output."""

    prompt: list[int]
    text: list[int]
    lengths: list[int] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return len(self.text) - len(self.prompt) >= vc.NEW_TOKENS

    def counts(self) -> vc.Counts:
        output = self.text[len(self.prompt) :][: vc.NEW_TOKENS]
        lengths = Counter(self.lengths)
        return vc.Counts(tuple(output), len(self.lengths), tuple(sorted(lengths.items())))


def budget(chances: Sequence[Sequence[float]], margins: list[float]) -> list[int]:
    """Kept tokens of each request, most likely ones first, as many as give most output per second of CURVE."""
    falling = [[min(row[: depth + 1]) for depth in range(len(row))] for row in chances]
    tokens = sorted(((p, -depth, -row) for row, ps in enumerate(falling) for depth, p in enumerate(ps)), reverse=True)
    rates = []
    for count in range(len(tokens) + 1):
        rows = torch.tensor(len(chances) + count)
        seconds = float(CURVE.verify_s(rows)) + (D_MAX - 1) * CURVE.draft_s(len(chances)) + CURVE.fixed + CURVE.keep_up
        rates.append((len(chances) + sum(p for p, _, _ in tokens[:count])) / seconds)
    best = max(range(len(rates)), key=lambda count: (rates[count], -count))
    margins.append(min(abs(rate / rates[best] - 1) for count, rate in enumerate(rates) if count != best))
    taken = Counter(-row for _, _, row in tokens[:best])
    return [taken[row] for row in range(len(chances))]


def chances(rule: vc.Rule, logits: torch.Tensor) -> list[float]:
    joint, found = 1.0, []
    for depth, row in enumerate(logits.double(), start=1):
        probs = row.softmax(-1).sort(descending=True).values[: rule.spec["top_m"]].tolist()
        joint *= probs[0]
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        found.append(rule.confidence(math.log(joint), entropy, depth))
    return found


def in_step(
    target: Target, draft: Draft, rule: vc.Rule, prompts: list[list[int]]
) -> tuple[list[vc.Counts], int, float]:
    """All requests decoded together, step by step; also the steps, and how near the nearest decision was."""
    requests = [Request(prompt, [*prompt, target.run(prompt)[0][-1]]) for prompt in prompts]
    margins: list[float] = []
    steps = 0
    while running := [request for request in requests if not request.ended]:
        steps += 1
        drafts = []
        for request in running:
            n = len(request.text) - 1
            features = draft.features([state[:n] for state in target.run(request.text)[1]])
            drafts.append(draft.chain(request.text, features, D_MAX))
        kept = budget([chances(rule, logits) for logits in drafts], margins)
        for request, logits, length in zip(running, drafts, kept, strict=True):
            drafted, n = logits.argmax(-1).tolist()[:length], len(request.text) - 1
            choices, _ = target.run([*request.text, *drafted])
            hits = next((i for i in range(length) if drafted[i] != choices[n + i]), length)
            request.text += [*drafted[:hits], choices[n + hits]]
            request.lengths.append(length)
    return [request.counts() for request in requests], steps, min(margins)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("planner")
    target = Target(pair_dir() / "target")
    prompts = [ids[: 30 + 6 * i] for i, ids in enumerate(held_out_prompts(8, min_tokens=96, seed=21))]
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    return SimpleNamespace(
        folder=folder,
        target=target,
        draft=load_draft(pair_dir(), vc.DRAFTS["eagle3"], target),
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        classifier=classifier,
        rule=vc.Rule(classifier, 0.0),
    )


def state(running: CpuServer) -> dict[str, Any]:
    return running.request("/get_server_info")["internal_states"][0]["c2t"]


def together(running: CpuServer, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Answers to requests that all start in one step: they arrive while a long prompt is read."""
    blocker = [7 + i % 900 for i in range(1900)]
    reading = threading.Thread(target=lambda: running.generate(blocker, max_new_tokens=1))
    reading.start()
    time.sleep(0.2)
    params = {"temperature": 0.0, "max_new_tokens": vc.NEW_TOKENS, "ignore_eos": True}
    found = running.request("/generate", {"input_ids": prompts, "sampling_params": params})
    reading.join()
    return found


@pytest.fixture(scope="module")
def planned(setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    curve = setting.folder / "given.json"
    CURVE.save(curve)
    with server(setting.folder, setting.classifier, curve, "given") as running:
        yield SimpleNamespace(server=running, curve=curve)


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_each_step_is_spent_as_simulated(setting: SimpleNamespace, planned: SimpleNamespace, concurrency: int):
    groups = [setting.prompts[i : i + concurrency] for i in range(0, 8, concurrency)]
    found: list[vc.Counts] = []
    expected: list[vc.Counts] = []
    for group in groups if concurrency > 1 else groups[:4]:
        before = state(planned.server)["steps"]
        found += [vc.Counts.of_answer(answer) for answer in together(planned.server, group)]
        counts, steps, margin = in_step(setting.target, setting.draft, setting.rule, group)
        expected += counts
        assert state(planned.server)["steps"] - before == steps
        assert margin > UNDECIDED, "a decision is too near to call: choose other prompts"
    assert [each.output_ids for each in found] == setting.plain[: len(found)]
    assert found == expected
    lengths = {length for each in found for length, _ in each.draft_lengths}
    assert len(lengths) >= 3
    assert concurrency == 1 or 0 in lengths


def test_a_given_curve_is_left_as_it_is(planned: SimpleNamespace):
    found = state(planned.server)
    assert found["beta"] == "auto"
    assert found["planner"] == {"active": True, "curve": True}
    assert CostCurve.load(planned.curve) == CURVE


def test_single_requests_keep_their_own_rules(setting: SimpleNamespace, planned: SimpleNamespace):
    own = [{"enabled": False}, {"beta": 0.9}, {"max_depth": 1}, {"max_depth": 0}]
    params = [
        {"temperature": 0.0, "max_new_tokens": vc.NEW_TOKENS, "ignore_eos": True, "custom_params": {"c2t": each}}
        for each in own
    ]
    answers = planned.server.request("/generate", {"input_ids": setting.prompts[:4], "sampling_params": params})
    found = [vc.Counts.of_answer(answer) for answer in answers]
    assert [each.output_ids for each in found] == setting.plain[:4]
    oracle = vc.Oracle(pair_dir(), setting.target)
    assert found[0] == oracle.counts("eagle3", setting.prompts[0], D_MAX, None)
    assert found[1] == oracle.counts("eagle3", setting.prompts[1], D_MAX, setting.classifier, 0.9)
    assert {length for length, _ in found[2].draft_lengths} <= {0, 1}
    assert found[3].draft_lengths == ((0, vc.NEW_TOKENS - 1),)


def test_a_fixed_beta_ends_it_and_auto_returns_to_it(setting: SimpleNamespace, planned: SimpleNamespace):
    oracle = vc.Oracle(pair_dir(), setting.target)
    vc.control(planned.server, beta=vc.BETA)
    try:
        assert state(planned.server)["planner"]["active"] is False
        answer = planned.server.generate(setting.prompts[0], max_new_tokens=vc.NEW_TOKENS, ignore_eos=True)
        expected = oracle.counts("eagle3", setting.prompts[0], D_MAX, setting.classifier)
        assert vc.Counts.of_answer(answer) == expected
        refused = {"server_args": {"speculative_c2t_auto": 1, "speculative_c2t_beta": 0.5}}
        assert planned.server.request("/set_internal_state", refused) == [False]
    finally:
        vc.control(planned.server, auto=1)
    assert state(planned.server)["beta"] == "auto"


def test_without_a_curve_one_is_measured_and_kept(setting: SimpleNamespace):
    curve = setting.folder / "measured.json"
    with server(setting.folder, setting.classifier, curve, "measured") as running:
        assert state(running)["planner"] == {"active": True, "curve": False}
        for _ in range(2):
            found = vc.answers(running, setting.prompts[:4], concurrency=1)
            assert [tuple(answer["output_ids"]) for answer in found] == setting.plain[:4]
        assert state(running)["planner"] == {"active": True, "curve": True}
        lengths = {length for answer in found for length, _ in vc.Counts.of_answer(answer).draft_lengths}
        log = running.log.read_text(errors="replace")
    assert CostCurve.load(curve).verify_s(torch.tensor([1, 5])).gt(0).all()
    assert lengths <= set(range(D_MAX + 1))
    assert "C2T: cost of a step, measured" in log
    assert "fit one with `c2t fit --calibrate chain`" in log
